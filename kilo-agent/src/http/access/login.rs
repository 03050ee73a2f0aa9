//! Login for browsers: a form that works without scripts.

use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{ACCEPT, HeaderMap, HeaderValue, LOCATION, SET_COOKIE},
};
use minijinja::{AutoEscape, Environment, Error, context};
use tokio::time::timeout;

use super::{LONGEST_TOKEN, is_token};
use crate::http::{Answer, html, text};

const PAGE: &str = include_str!("login.html");
/// Allows only the form, which may be submitted to this agent only.
const POLICY: &str = "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";
/// Timeout for receiving a form.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether the client is a browser, whose user can fill in a form.
pub fn is_browser(headers: &HeaderMap) -> bool {
    headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).is_some_and(|it| it.contains("text/html"))
}

/// The form, with what was wrong with the last attempt, one paragraph per line.
pub fn form(status: StatusCode, wrong: &str) -> Answer {
    match page(wrong) {
        Ok(page) => html(status, POLICY, page),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")),
    }
}

/// Renders the form; all inserted text is escaped.
fn page(wrong: &str) -> Result<String, Error> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    let lines: Vec<_> = wrong.lines().collect();
    environment.template_from_str(PAGE)?.render(context! { wrong => lines })
}

/// Reads the token from a submitted form.
pub async fn token(request: Request<Incoming>) -> Result<String, Answer> {
    let body = Limited::new(request.into_body(), 2 * LONGEST_TOKEN).collect();
    let Ok(Ok(body)) = timeout(PATIENCE, body).await else {
        return Err(text(StatusCode::BAD_REQUEST, "the form is too long or incomplete\n"));
    };
    let body = body.to_bytes();
    let field = form_urlencoded::parse(&body).find(|(name, _)| name == "token");
    let token = field.map(|(_, value)| value.trim().to_owned());
    token.filter(|token| is_token(token)).ok_or_else(|| {
        form(
            StatusCode::BAD_REQUEST,
            "This is not a bearer token: a token has only letters, digits and the characters -._~+/=.",
        )
    })
}

/// Redirects to the page, and sets the session cookie.
pub fn welcome(session: &str) -> Answer {
    let mut answer = text(StatusCode::SEE_OTHER, "continue at ./\n");
    answer.headers_mut().insert(LOCATION, HeaderValue::from_static("./"));
    if let Ok(cookie) = HeaderValue::from_str(&format!("{session}; Path=/; HttpOnly; SameSite=Strict")) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
    answer
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_was_wrong_is_text() {
        let page = page("<b>\"one\"\ntwo").unwrap();
        assert!(page.contains("<p><strong>&lt;b&gt;&quot;one&quot;</strong></p>"), "{page}");
        assert!(page.contains("<p><strong>two</strong></p>") && !page.contains("<b>"), "{page}");
    }
}
