//! Making answers.

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{ALLOW, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};

use super::Answer;

/// A plain text answer; `body` ends with a newline.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    respond(status, "text/plain; charset=utf-8", body)
}

/// An answer of any media type.
pub fn respond(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// 405 with the methods that are possible.
pub fn method_not_allowed(allowed: &'static str) -> Answer {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, format!("use one of: {allowed}\n"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}
