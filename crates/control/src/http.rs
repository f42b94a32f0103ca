//! The calls as HTTP with JSON, in proto3's JSON mapping. [`crate::routes`] gives the address of each call; the
//! OpenAPI document is generated from it and the .proto file.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_stream::StreamExt;
use unirdma_fleet::{Actor, Kind, Refusal, v1};

use crate::admit::{MAX_BODY, token};
use crate::calls::{ByToken, OperatorCall};
use crate::errors::{JSON, http_status, json, refusal, said};
use crate::openapi;
use crate::shared::{Shared, now_ms};
use crate::watch;

/// Interval of comments on an event stream that has no events.
const ALIVE: Duration = Duration::from_secs(5);

type S = State<Arc<Shared>>;

/// A refusal as an HTTP answer.
struct Refused(Refusal);

impl From<Refusal> for Refused {
    fn from(e: Refusal) -> Self {
        Refused(e)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        said(http_status(&self.0), &self.0.what)
    }
}

type Answer = Result<Response, Refused>;

fn actor(shared: &Shared, headers: &HeaderMap) -> Result<Actor, Refused> {
    Ok(shared.actor(token(headers))?)
}

/// Converts a refusal by the router itself to JSON, the form of all other refusals.
async fn in_json(response: Response) -> Response {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    if !status.is_client_error() || kind.is_some_and(|k| k.as_bytes().starts_with(JSON.as_bytes())) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), 4096).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = if text.is_empty() { status.canonical_reason().unwrap_or("refused") } else { &text };
    said(status, &Refusal::invalid(line).what)
}

/// Parses a body, which has been read whole.
async fn body<M: DeserializeOwned>(body: Body) -> Result<M, Refused> {
    let bytes = axum::body::to_bytes(body, MAX_BODY).await.map_err(Refusal::invalid)?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Refused(Refusal::invalid(format_args!("the body is not what it must be: {e}"))))
}

/// Adds the calls to a router.
pub(crate) fn routes(router: Router, shared: Arc<Shared>) -> Router {
    let api = Router::new()
        .route("/api/v1/apply", post(apply))
        .route("/api/v1/objects", get(objects))
        .route("/api/v1/objects/{kind}", get(objects_of))
        .route("/api/v1/objects/{kind}/{name}", get(object).delete(delete_object))
        .route("/api/v1/delete", post(delete_objects))
        .route("/api/v1/watch", get(events))
        .route("/api/v1/move", post(move_vrnic))
        .route("/api/v1/secrets", post(rotate))
        .route("/api/v1/tokens", post(create_token).get(tokens))
        .route("/api/v1/tokens/{id}", delete(revoke_token))
        .route("/api/v1/audit", get(audit))
        .route("/api/v1/status", get(status_of_centre))
        .route("/api/v1/openapi.json", get(document))
        .with_state(shared)
        .layer(axum::middleware::map_response(in_json));
    router.merge(api)
}

fn kind(word: &str) -> Result<i32, Refused> {
    let kind = Kind::of_word(word).ok_or_else(|| {
        let shown: String = word.chars().take(40).collect();
        Refusal::not_found(format_args!("there is no kind `{}`; use host, group, vrnic or rule", shown.escape_debug()))
    })?;
    Ok(i32::from(match kind {
        Kind::Host => v1::Kind::Host,
        Kind::Group => v1::Kind::Group,
        Kind::Vrnic => v1::Kind::Vrnic,
        Kind::Rule => v1::Kind::Rule,
    }))
}

/// Parses the parameters of a query as a message.
fn query<M: DeserializeOwned>(q: Vec<(String, String)>) -> Result<M, Refused> {
    let mut fields = serde_json::Map::new();
    for (name, value) in q {
        let value = match value.as_str() {
            "true" => serde_json::Value::Bool(true),
            "false" => serde_json::Value::Bool(false),
            _ => serde_json::Value::String(value),
        };
        fields.insert(name, value);
    }
    let read = serde_json::from_value(serde_json::Value::Object(fields));
    read.map_err(|e| Refused(Refusal::invalid(format_args!("the parameters are not what they must be: {e}"))))
}

type Q = Query<Vec<(String, String)>>;

/// A change that somebody with a token asks for.
async fn wish<R: OperatorCall<Answer: Serialize>>(shared: &Arc<Shared>, headers: &HeaderMap, request: R) -> Answer {
    let actor = actor(shared, headers)?;
    let token = token(headers).unwrap_or_default().to_owned();
    let done = shared.run(ByToken { token, request }, false).await;
    Ok(json(&done.map_err(|e| Refused(refusal(&shared.told(&actor, e))))?))
}

async fn apply(State(shared): S, headers: HeaderMap, b: Body) -> Answer {
    wish::<v1::ApplyRequest>(&shared, &headers, body(b).await?).await
}

fn found(shared: &Shared, headers: &HeaderMap, request: &v1::GetRequest) -> Answer {
    let actor = actor(shared, headers)?;
    let answer = shared.centre().get(&actor, request, now_ms())?;
    Ok(json(&answer))
}

async fn objects(State(shared): S, headers: HeaderMap, Query(q): Q) -> Answer {
    found(&shared, &headers, &query(q)?)
}

async fn objects_of(State(shared): S, headers: HeaderMap, Path(word): Path<String>, Query(q): Q) -> Answer {
    found(&shared, &headers, &v1::GetRequest { kind: kind(&word)?, ..query(q)? })
}

async fn object(State(shared): S, headers: HeaderMap, Path((word, name)): Path<(String, String)>) -> Answer {
    found(&shared, &headers, &v1::GetRequest { kind: kind(&word)?, name, ..Default::default() })
}

async fn delete_object(
    State(shared): S,
    headers: HeaderMap,
    Path((word, name)): Path<(String, String)>,
    Query(q): Q,
) -> Answer {
    let r = v1::DeleteRequest { names: vec![v1::Name { kind: kind(&word)?, name }], ..query(q)? };
    wish(&shared, &headers, r).await
}

async fn delete_objects(State(shared): S, headers: HeaderMap, b: Body) -> Answer {
    wish::<v1::DeleteRequest>(&shared, &headers, body(b).await?).await
}

/// Watching as server-sent events, each of which is a `WatchResponse`.
async fn events(State(shared): S, headers: HeaderMap, Query(q): Q) -> Answer {
    let stream = watch::start(&shared, token(&headers), query(q)?)?;
    let events = stream.timeout_repeating(tokio::time::interval(ALIVE)).map(|m| {
        let text = match m {
            // A comment, which tells the reader that the centre is alive.
            Err(_) => return Ok(Bytes::from_static(b":\n\n")),
            Ok(Ok(m)) => serde_json::to_string(&m).map(|t| format!("data: {t}\n\n")),
            Ok(Err(e)) => serde_json::to_string(&serde_json::json!({ "error": e.what }))
                .map(|t| format!("event: error\ndata: {t}\n\n")),
        };
        text.map(Bytes::from)
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(events)).into_response())
}

async fn move_vrnic(State(shared): S, headers: HeaderMap, b: Body) -> Answer {
    wish::<v1::MoveRequest>(&shared, &headers, body(b).await?).await
}

async fn rotate(State(shared): S, headers: HeaderMap, b: Body) -> Answer {
    wish::<v1::RotateSecretRequest>(&shared, &headers, body(b).await?).await
}

async fn create_token(State(shared): S, headers: HeaderMap, b: Body) -> Answer {
    wish::<v1::CreateTokenRequest>(&shared, &headers, body(b).await?).await
}

async fn tokens(State(shared): S, headers: HeaderMap) -> Answer {
    let actor = actor(&shared, &headers)?;
    let answer = shared.centre().tokens(&actor)?;
    Ok(json(&answer))
}

async fn revoke_token(State(shared): S, headers: HeaderMap, Path(id): Path<String>) -> Answer {
    wish(&shared, &headers, v1::RevokeTokenRequest { id }).await
}

async fn audit(State(shared): S, headers: HeaderMap, Query(q): Q) -> Answer {
    let actor = actor(&shared, &headers)?;
    let answer = shared.centre().audit(&actor, query(q)?)?;
    Ok(json(&answer))
}

/// The OpenAPI document, which is generated once. Anybody may read it.
async fn document() -> Response {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| openapi::document().to_string().into());
    ([(header::CONTENT_TYPE, JSON)], TEXT.clone()).into_response()
}

async fn status_of_centre(State(shared): S, headers: HeaderMap) -> Answer {
    let actor = actor(&shared, &headers)?;
    Ok(json(&shared.status(&actor)))
}
