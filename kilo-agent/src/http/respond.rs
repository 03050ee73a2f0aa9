//! Helpers that build responses.

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS,
    },
};

use super::Answer;

/// A plain text response; `body` should end with a newline.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    respond(status, "text/plain; charset=utf-8", body)
}

/// A response with any media type.
pub fn respond(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// An HTML response that is not cached and sends no referrer; `policy` is its Content-Security-Policy.
pub fn html(status: StatusCode, policy: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut response = respond(status, "text/html; charset=utf-8", body);
    let constant = |name, value| (name, HeaderValue::from_static(value));
    response.headers_mut().extend([
        constant(CONTENT_SECURITY_POLICY, policy),
        constant(CACHE_CONTROL, "no-store"),
        constant(REFERRER_POLICY, "no-referrer"),
    ]);
    response
}

/// 405, with the allowed methods.
pub fn method_not_allowed(allowed: &'static str) -> Answer {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, format!("use one of: {allowed}\n"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}
