//! The web page. Its files are part of the program. It uses the API with a token that its user types in, so the files
//! contain no secret and need no token.

use axum::Router;
use axum::http::header;
use axum::routing::get;

/// The page loads and runs only its own files, connects only to the centre, and cannot be embedded in another page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Address, type and content of each file.
const FILES: [(&str, &str, &str); 8] = [
    ("/", HTML, include_str!("../web/index.html")),
    ("/style.css", CSS, include_str!("../web/style.css")),
    ("/app.js", SCRIPT, include_str!("../web/app.js")),
    ("/dom.js", SCRIPT, include_str!("../web/dom.js")),
    ("/api.js", SCRIPT, include_str!("../web/api.js")),
    ("/model.js", SCRIPT, include_str!("../web/model.js")),
    ("/draw.js", SCRIPT, include_str!("../web/draw.js")),
    ("/views.js", SCRIPT, include_str!("../web/views.js")),
];

/// Adds the page.
pub(crate) fn routes(router: Router) -> Router {
    FILES.into_iter().fold(router, |router, (path, kind, content)| {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            // A browser must not use files of an earlier version of the program.
            (header::CACHE_CONTROL, "no-cache"),
        ];
        router.route(path, get(move || async move { (headers, content) }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files that a file loads: modules, the style sheet and the script of the page.
    fn loads(content: &str) -> Vec<&str> {
        let quoted = |before: &'static str| content.split(before).skip(1).filter_map(|rest| rest.split('"').next());
        [" from \"", "rel=\"stylesheet\" href=\"", "src=\""].into_iter().flat_map(quoted).collect()
    }

    #[test]
    fn each_file_that_the_page_loads_is_there_and_nothing_is_loaded_from_elsewhere() {
        let known = |name: &str| FILES.iter().any(|f| f.0.trim_start_matches('/') == name.trim_start_matches("./"));
        let all: Vec<&str> = FILES.iter().flat_map(|f| loads(f.2)).collect();
        assert!(all.len() >= 8, "{all:?}");
        assert!(all.iter().all(|name| known(name)), "{all:?}");
        // Names of namespaces are excluded, because nobody loads them.
        let elsewhere = FILES
            .iter()
            .flat_map(|f| f.2.lines())
            .filter(|l| l.contains("://") && !l.contains("http://www.w3.org/2000/svg"));
        assert_eq!(elsewhere.count(), 0);
    }

    /// The policy refuses these.
    #[test]
    fn there_is_no_inline_script_or_style() {
        let page = FILES[0].2;
        assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains(" onclick="));
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=").count());
    }
}
