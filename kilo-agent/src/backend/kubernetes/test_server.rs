//! In tests: an API server that is a function, and the state of an agent that reads from it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{io, sync::Arc};

use http_body_util::BodyExt as _;
use hyper::{Request, Response};
use kube::{Client, client::Body};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};

use super::{Shared, cache::Cache, watch_errors::WatchErrors};

/// What was asked: method, path without query, query, and body.
pub struct Asked {
    pub method: String,
    pub path: String,
    pub query: String,
    pub body: Value,
}

impl Asked {
    /// Whether it is a watch.
    pub fn watches(&self) -> bool {
        self.query.contains("watch=true")
    }
}

/// What a request gets.
#[derive(Clone)]
pub enum Answer {
    /// The HTTP status, and the object.
    Object(u16, Value),
    /// The connection breaks.
    Broken,
    /// Nothing, ever.
    Silence,
}

impl From<(u16, Value)> for Answer {
    fn from((code, object): (u16, Value)) -> Self {
        Self::Object(code, object)
    }
}

/// A client of a server that answers each request as `answer` says.
pub fn client<A: Into<Answer> + Send>(answer: impl Fn(Asked) -> A + Send + Sync + 'static) -> Client {
    let answer = Arc::new(answer);
    let service = tower::service_fn(move |request: Request<Body>| {
        let answer = Arc::clone(&answer);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let asked = Asked {
                method: parts.method.to_string(),
                path: parts.uri.path().to_owned(),
                query: parts.uri.query().unwrap_or_default().to_owned(),
                body: serde_json::from_slice(&body).unwrap_or_default(),
            };
            let answer = answer(asked).into();
            match answer {
                Answer::Object(code, object) => {
                    let response = Response::builder().status(code);
                    Ok::<_, tower::BoxError>(
                        response.body(Body::from(object.to_string().into_bytes())).unwrap(),
                    )
                }
                Answer::Broken => Err(io::Error::other("the test does not answer").into()),
                Answer::Silence => std::future::pending().await,
            }
        }
    });
    Client::new(service, "default")
}

/// A refusal, as an API server words it; `name`: the object that it concerns.
pub fn refusal(code: u16, reason: &str, message: &str, name: &str) -> (u16, Value) {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                         "reason": reason, "message": message, "details": { "name": name } });
    (code, status)
}

/// State of an agent on this node, and the number of answers that it believes in.
pub fn shared(hostname: &str) -> (Arc<Shared>, watch::Sender<u64>) {
    let (answered, answers) = watch::channel(0);
    let shared = Shared {
        hostname: Some(hostname.to_owned()),
        cache: Mutex::<Cache>::default(),
        now: Notify::new(),
        later: Notify::new(),
        listed: Notify::new(),
        answers,
        restored: watch::Sender::default(),
        expected: 3,
        errors: WatchErrors::default(),
    };
    (Arc::new(shared), answered)
}
