//! The addresses of the calls by HTTP.

/// The routes: method, address, and the gRPC call that they stand for.
pub(crate) const ROUTES: [(&str, &str, &str); 14] = [
    ("post", "/api/v1/apply", "Apply"),
    ("get", "/api/v1/objects", "Get"),
    ("get", "/api/v1/objects/{kind}", "Get"),
    ("get", "/api/v1/objects/{kind}/{name}", "Get"),
    ("delete", "/api/v1/objects/{kind}/{name}", "Delete"),
    ("post", "/api/v1/delete", "Delete"),
    ("get", "/api/v1/watch", "Watch"),
    ("post", "/api/v1/move", "Move"),
    ("post", "/api/v1/secrets", "RotateSecret"),
    ("post", "/api/v1/tokens", "CreateToken"),
    ("get", "/api/v1/tokens", "ListTokens"),
    ("delete", "/api/v1/tokens/{id}", "RevokeToken"),
    ("get", "/api/v1/audit", "Audit"),
    ("get", "/api/v1/status", "Status"),
];
