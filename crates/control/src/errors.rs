//! Refusals as callers see them: by gRPC as a status, by HTTP as a status code and a line of JSON.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tonic::metadata::AsciiMetadataValue;
use tonic::{Code, Status};
use unirdma_fleet::{Refusal, RefusalKind};

/// Metadata key of a refusal by a centre, as opposed to a transport error. The value `elsewhere` means that this centre
/// does not allocate.
const REFUSED: &str = "unirdma-refused";

/// The gRPC code for each kind of refusal. Any other code means that the change is impossible at present.
const CODES: [(RefusalKind, Code); 7] = [
    (RefusalKind::Invalid, Code::InvalidArgument),
    (RefusalKind::NotFound, Code::NotFound),
    (RefusalKind::Conflict, Code::FailedPrecondition),
    (RefusalKind::Stale, Code::Aborted),
    (RefusalKind::Unknown, Code::Unauthenticated),
    (RefusalKind::Denied, Code::PermissionDenied),
    (RefusalKind::Full, Code::ResourceExhausted),
];

/// Converts a refusal to a gRPC status.
pub(crate) fn status(e: &Refusal) -> Status {
    let code = CODES.iter().find(|(kind, _)| *kind == e.kind).map_or(Code::Unavailable, |(_, code)| *code);
    let mut status = Status::new(code, e.what.clone());
    status.metadata_mut().insert(REFUSED, AsciiMetadataValue::from_static("here"));
    status
}

/// Converts a gRPC status to a refusal.
pub(crate) fn refusal(status: &Status) -> Refusal {
    let of = CODES.iter().find(|(_, code)| *code == status.code());
    let kind = of.map_or(RefusalKind::Unavailable, |(kind, _)| *kind);
    Refusal { kind, what: status.message().into() }
}

/// A refusal that says that this centre does not allocate.
pub(crate) fn elsewhere() -> Status {
    let mut status = Status::unavailable("this centre does not allocate; ask another one");
    status.metadata_mut().insert(REFUSED, AsciiMetadataValue::from_static("elsewhere"));
    status
}

/// True if the refusal says that the centre that was asked does not allocate. `None`: it is no refusal by a centre, but
/// an error of the transport.
pub(crate) fn is_elsewhere(status: &Status) -> Option<bool> {
    status.metadata().get(REFUSED).map(|v| v.as_bytes() == b"elsewhere")
}

/// The HTTP status for a refusal.
pub(crate) fn http_status(e: &Refusal) -> StatusCode {
    match e.kind {
        RefusalKind::Invalid => StatusCode::BAD_REQUEST,
        RefusalKind::NotFound => StatusCode::NOT_FOUND,
        RefusalKind::Conflict | RefusalKind::Stale => StatusCode::CONFLICT,
        RefusalKind::Unknown => StatusCode::UNAUTHORIZED,
        RefusalKind::Denied => StatusCode::FORBIDDEN,
        RefusalKind::Full => StatusCode::TOO_MANY_REQUESTS,
        RefusalKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// An answer with one line that says why nothing was done.
pub(crate) fn said(code: StatusCode, line: &str) -> Response {
    (code, json(&serde_json::json!({ "error": line }))).into_response()
}

/// The content type of JSON.
pub(crate) const JSON: &str = "application/json";

/// An answer in JSON.
pub(crate) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => ([(header::CONTENT_TYPE, JSON), (header::CACHE_CONTROL, "no-store")], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}
