//! The web page, whose files are carried by the program.

use axum::Router;
use axum::http::header;
use axum::response::Html;
use axum::routing::get;

/// Adds what `/` shows: where the API is.
pub(crate) fn routes(router: Router) -> Router {
    let page = "<!doctype html><title>uniRDMA control centre</title><p>The API is described in <a href=\"/api/v1/openapi.json\">/api/v1/openapi.json</a>.";
    router
        .route("/", get(move || async move { ([(header::CONTENT_SECURITY_POLICY, "default-src 'none'")], Html(page)) }))
}
