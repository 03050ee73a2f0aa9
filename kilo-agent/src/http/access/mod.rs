//! Who may see more than `/health` and `/metrics`: everybody, or those whose token the API server accepts.
//! The API server identifies them (`TokenReview`) and decides whether they may (`SubjectAccessReview` of the
//! path).

mod cache;
mod local_token;
mod login;
mod review;
mod sessions;

use std::{sync::Arc, time::Instant};

use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE},
};

pub use local_token::LocalToken;
pub use review::{Finding, Reviewer, Whose, through_api};

use super::{Answer, text};
use cache::Cache;
use sessions::Sessions;

/// The role in the manifests that grants access.
const ROLE: &str = "kilo-page";
/// Message for a browser whose session outlives its token.
const ENDED: &str = "Your token expired or was revoked. Show a new one.";
/// Maximum length of a token in bytes; those of service accounts have about 1,000.
const LONGEST_TOKEN: usize = 8 << 10;

/// Admits requests, or answers them itself.
#[derive(Clone, Debug, Default)]
pub enum Gate {
    /// Everybody may see everything.
    #[default]
    Open,
    /// Only clients with a valid token are admitted.
    Token(Arc<TokenGate>),
}

/// Admits clients with a token that the API server accepts, or with this node's own [`LocalToken`].
#[derive(Debug)]
pub struct TokenGate {
    reviewer: Reviewer,
    local: LocalToken,
    cache: Cache,
    sessions: Sessions,
}

/// The credentials in a request.
enum Shown {
    Nothing,
    Token(String),
    /// The token of a browser's session.
    Session(String),
    Malformed,
}

impl Gate {
    /// Creates a gate that asks `reviewer` about each token except the local one.
    pub fn token(reviewer: Reviewer, local: LocalToken) -> Self {
        let (cache, sessions) = (Cache::default(), Sessions::default());
        Self::Token(Arc::new(TokenGate { reviewer, local, cache, sessions }))
    }

    /// `Err` with the response if the request is not admitted.
    pub async fn admit(&self, request: &Request<Incoming>, path: &str) -> Result<(), Answer> {
        match self {
            Self::Open => Ok(()),
            Self::Token(gate) => gate.admit(request.headers(), path, Instant::now()).await,
        }
    }

    /// Handles a browser's form sent to `/`; `None` if no login is needed.
    pub async fn log_in(&self, request: Request<Incoming>) -> Option<Answer> {
        match self {
            Self::Open => None,
            Self::Token(gate) => Some(gate.log_in(request).await),
        }
    }
}

impl TokenGate {
    async fn admit(&self, headers: &HeaderMap, path: &str, now: Instant) -> Result<(), Answer> {
        let path = reviewed(path);
        // A browser that requests the page gets the form.
        let forms = path == "/" && login::is_browser(headers);
        let (token, forms) = match self.shown(headers, now) {
            Shown::Token(token) => (token, false),
            Shown::Session(token) => (token, forms),
            Shown::Nothing if forms => return Err(login::form(StatusCode::UNAUTHORIZED, "")),
            Shown::Nothing => return Err(unauthorized("this agent requires a token to show that")),
            Shown::Malformed => return Err(unauthorized("the header Authorization is not: Bearer TOKEN")),
        };
        match self.find(&token, path, now).await {
            Finding::Allowed => Ok(()),
            Finding::Unknown if forms => Err(login::form(StatusCode::UNAUTHORIZED, ENDED)),
            Finding::Unknown => Err(unauthorized("the API server does not accept this token")),
            Finding::Forbidden(user) if forms => {
                Err(login::form(StatusCode::FORBIDDEN, &not_allowed(&user, path)))
            }
            Finding::Forbidden(user) => Err(text(StatusCode::FORBIDDEN, not_allowed(&user, path))),
            Finding::Unanswered(why) => Err(unanswered(&why)),
        }
    }

    fn shown(&self, headers: &HeaderMap, now: Instant) -> Shown {
        let Some(authorization) = headers.get(AUTHORIZATION) else {
            return self.sessions.token(headers, now).map_or(Shown::Nothing, Shown::Session);
        };
        let token = authorization.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
        });
        match token {
            Some(token) if is_token(&token) => Shown::Token(token),
            _ => Shown::Malformed,
        }
    }

    /// The finding about a token and a path, cached or obtained now.
    async fn find(&self, token: &str, path: &'static str, now: Instant) -> Finding {
        if self.local.is(token) {
            return Finding::Allowed;
        }
        if let Some(known) = self.cache.get(token, path, now) {
            return known;
        }
        let whose = if self.cache.was_good(token) { Whose::Known } else { Whose::Stranger };
        let found = self.reviewer.review(token, path, whose, now).await;
        self.cache.put(token, path, &found, now);
        found
    }

    async fn log_in(&self, request: Request<Incoming>) -> Answer {
        let token = match login::token(request).await {
            Ok(token) => token,
            Err(answer) => return answer,
        };
        let now = Instant::now();
        match self.find(&token, "/", now).await {
            Finding::Allowed => login::welcome(&self.sessions.begin(token, now)),
            Finding::Unknown => {
                login::form(StatusCode::UNAUTHORIZED, "The API server does not accept this token.")
            }
            Finding::Forbidden(user) => login::form(StatusCode::FORBIDDEN, &not_allowed(&user, "/")),
            Finding::Unanswered(why) => unanswered(&why),
        }
    }
}

/// The path that the API server is asked about: the page's files count as the page.
fn reviewed(path: &str) -> &'static str {
    match path {
        "/status" => "/status",
        "/events" => "/events",
        "/graph" => "/graph",
        _ => "/",
    }
}

/// Whether the text has the syntax of a bearer token (RFC 6750).
fn is_token(text: &str) -> bool {
    let may = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    (1..=LONGEST_TOKEN).contains(&text.len()) && text.bytes().all(may)
}

fn unauthorized(why: &str) -> Answer {
    let mut answer = text(
        StatusCode::UNAUTHORIZED,
        format!(
            "{why} (kg --page-access=token). Show one of an account that has the ClusterRole {ROLE}:\n\
             curl --header \"Authorization: Bearer $(kubectl create token NAME)\" http://NODE:1107/status\n\
             /health and /metrics need none, and neither does kgctl for those who may run it in the agents' pods.\n"
        ),
    );
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"kilo\""));
    answer
}

fn not_allowed(user: &str, path: &str) -> String {
    let parts: Vec<_> = user.splitn(4, ':').collect();
    let whom = match parts[..] {
        ["system", "serviceaccount", namespace, name] => format!("--serviceaccount={namespace}:{name}"),
        _ => format!("--user={user}"),
    };
    format!(
        "{user} is not allowed to get {path} of this agent. The ClusterRole {ROLE} allows it:\n\
         kubectl create clusterrolebinding {ROLE} --clusterrole={ROLE} {whom}\n"
    )
}

fn unanswered(why: &str) -> Answer {
    let body = format!(
        "the API server did not confirm this token, so nothing is shown: {why}\n\
         In the agent's pod and as root on its node, `kgctl status --agent` works without it.\n"
    );
    text(StatusCode::SERVICE_UNAVAILABLE, body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use hyper::header::{ACCEPT, COOKIE};

    use super::*;

    /// A gate whose API server knows `good` and `poor`, and the number of its reviews.
    fn gate() -> (Arc<TokenGate>, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let reviewer = Reviewer::new(move |token, path| {
            count.fetch_add(1, Ordering::Relaxed);
            async move {
                match &*token {
                    "good" => Finding::Allowed,
                    "poor" => Finding::Forbidden(format!("system:serviceaccount:a:poor at {path}")),
                    "away" => Finding::Unanswered("connection refused".to_owned()),
                    _ => Finding::Unknown,
                }
            }
        });
        let Gate::Token(gate) = Gate::token(reviewer, LocalToken::of("local")) else { panic!() };
        (gate, asked)
    }

    fn with(authorization: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(authorization).unwrap())])
    }

    async fn status(gate: &TokenGate, headers: &HeaderMap, path: &str, now: Instant) -> u16 {
        gate.admit(headers, path, now).await.map_or_else(|answer| answer.status().as_u16(), |()| 200)
    }

    #[tokio::test]
    async fn each_token_gets_its_answer() {
        let (gate, _) = gate();
        let now = Instant::now();
        for (authorization, wanted) in [
            ("Bearer good", 200),
            ("bearer  good", 200),
            ("Bearer local", 200),
            ("Bearer other", 401),
            ("Bearer poor", 403),
            ("Bearer away", 503),
            ("Basic good", 401),
            ("Bearer", 401),
            ("Bearer ", 401),
            ("Bearer a b", 401),
        ] {
            assert_eq!(status(&gate, &with(authorization), "/status", now).await, wanted, "{authorization}");
        }
        assert_eq!(status(&gate, &HeaderMap::new(), "/status", now).await, 401);
        let long = format!("Bearer {}", "x".repeat(LONGEST_TOKEN + 1));
        assert_eq!(status(&gate, &with(&long), "/status", now).await, 401);
    }

    #[tokio::test]
    async fn answers_are_remembered_for_a_while_and_silence_is_not() {
        let (gate, asked) = gate();
        let now = Instant::now();
        for _ in 0..3 {
            assert_eq!(status(&gate, &with("Bearer good"), "/page/app.js", now).await, 200);
            assert_eq!(status(&gate, &with("Bearer good"), "/", now).await, 200);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1, "the page and its files are one");
        assert_eq!(status(&gate, &with("Bearer good"), "/status", now).await, 200);
        let later = now + Duration::from_secs(120);
        assert_eq!(status(&gate, &with("Bearer good"), "/", later).await, 200);
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        for _ in 0..2 {
            assert_eq!(status(&gate, &with("Bearer away"), "/", later).await, 503);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 5);
    }

    #[tokio::test]
    async fn strangers_tokens_are_not_all_asked_about() {
        let (gate, asked) = gate();
        let now = Instant::now();
        let mut refused = 0;
        for number in 0..200 {
            let found = status(&gate, &with(&format!("Bearer guess{number}")), "/", now).await;
            refused += usize::from(found == 503);
        }
        assert!(asked.load(Ordering::Relaxed) <= 20 && refused >= 180, "{asked:?}, {refused}");
        let later = now + Duration::from_secs(2);
        assert_eq!(status(&gate, &with("Bearer good"), "/", later).await, 200);
    }

    /// Ten minutes in which, before each request, twice as many random tokens are presented as are reviewed
    /// per second.
    #[tokio::test]
    async fn a_flood_of_random_tokens_does_not_hold_up_who_is_known() {
        let (gate, asked) = gate();
        let begun = Instant::now();
        assert_eq!(status(&gate, &with("Bearer good"), "/status", begun).await, 200);
        for second in 0..600 {
            let now = begun + Duration::from_secs(second);
            for number in 0..40 {
                let guess = with(&format!("Bearer guess{second}-{number}"));
                assert_ne!(status(&gate, &guess, "/status", now).await, 200);
            }
            for path in ["/", "/status", "/events", "/graph"] {
                let found = status(&gate, &with("Bearer good"), path, now).await;
                assert_eq!(found, 200, "{path} after {second} s");
            }
        }
        let most = 600 * 20 + 4 * 11;
        assert!(asked.load(Ordering::Relaxed) <= most, "{asked:?}");
    }

    #[tokio::test]
    async fn who_is_known_is_asked_about_so_often_and_no_more_when_its_token_ends() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        // It is good for the first review, and afterwards expired or without an answer.
        let reviewer = Reviewer::new(move |token, _| {
            let before = count.fetch_add(1, Ordering::Relaxed);
            async move {
                match (before, &*token) {
                    (0, _) => Finding::Allowed,
                    (_, "ends") => Finding::Unknown,
                    _ => Finding::Unanswered("connection refused".to_owned()),
                }
            }
        });
        let gate_of = |reviewer| {
            let Gate::Token(gate) = Gate::token(reviewer, LocalToken::of("local")) else { panic!() };
            gate
        };
        let gate = gate_of(reviewer);
        let now = Instant::now();
        assert_eq!(status(&gate, &with("Bearer good"), "/", now).await, 200);
        for _ in 0..100 {
            assert_eq!(status(&gate, &with("Bearer good"), "/status", now).await, 503);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1 + 20);
        gate.cache.put("ends", "/", &Finding::Allowed, now);
        assert!(gate.cache.was_good("ends"));
        let later = now + Duration::from_secs(61);
        assert_eq!(status(&gate, &with("Bearer ends"), "/", later).await, 401);
        assert!(!gate.cache.was_good("ends"), "it is a stranger's now");
    }

    #[tokio::test]
    async fn a_session_stands_for_its_token_and_for_no_longer_than_that_is_good() {
        let (gate, _) = gate();
        let now = Instant::now();
        let session = |token: &str| {
            let cookie = format!("other=1; {}", gate.sessions.begin(token.to_owned(), now));
            HeaderMap::from_iter([(COOKIE, HeaderValue::from_str(&cookie).unwrap())])
        };
        assert_eq!(status(&gate, &session("good"), "/events", now).await, 200);
        assert_eq!(status(&gate, &session("poor"), "/events", now).await, 403);
        let headers = session("good");
        let old = now + Duration::from_secs(13 * 3600);
        assert_eq!(status(&gate, &headers, "/events", old).await, 401);
        let forged = HeaderMap::from_iter([(COOKIE, HeaderValue::from_static("kilo-session=00"))]);
        assert_eq!(status(&gate, &forged, "/events", now).await, 401);
    }

    #[tokio::test]
    async fn a_browser_gets_a_form_and_others_the_command() {
        let (gate, _) = gate();
        let browser = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("text/html,*/*"))]);
        let form = gate.admit(&browser, "/", Instant::now()).await.unwrap_err();
        assert_eq!(form.status(), StatusCode::UNAUTHORIZED);
        assert!(form.headers()["content-type"].to_str().unwrap().starts_with("text/html"));
        assert!(form.headers()["content-security-policy"].to_str().unwrap().contains("form-action 'self'"));
        let other = gate.admit(&browser, "/status", Instant::now()).await.unwrap_err();
        assert!(other.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
        assert_eq!(other.headers()["www-authenticate"], "Bearer realm=\"kilo\"");
    }

    /// A session may outlive its token: a browser at `/` can then enter another one.
    #[tokio::test]
    async fn a_browser_whose_token_has_ended_gets_the_form_and_not_a_dead_end() {
        let (gate, _) = gate();
        let now = Instant::now();
        let browser = |token: &str| {
            let cookie = gate.sessions.begin(token.to_owned(), now);
            HeaderMap::from_iter([
                (ACCEPT, HeaderValue::from_static("text/html")),
                (COOKIE, HeaderValue::from_str(&cookie).unwrap()),
            ])
        };
        for (token, code, words) in
            [("ended", 401, ENDED), ("poor", 403, "create clusterrolebinding kilo-page")]
        {
            let answer = gate.admit(&browser(token), "/", now).await.unwrap_err();
            assert_eq!(answer.status().as_u16(), code);
            let body = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap().to_bytes();
            let body = String::from_utf8_lossy(&body);
            assert!(body.contains("<form") && body.contains(words), "{body}");
            let data = gate.admit(&browser(token), "/status", now).await.unwrap_err();
            assert!(data.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
        }
    }
}
