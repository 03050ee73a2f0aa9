//! A proxy in front of the API server that speaks plain HTTP on loopback, and can act overloaded, slow or
//! wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::wait::task as wait;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use http_body_util::BodyExt as _;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use kube::{Client, client::Body};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// What the front does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Passes them on.
    Honest,
    /// Answers 429.
    Busy,
    /// Passes them on after this time.
    Slow(Duration),
    /// Answers the next watch of nodes with 410, and then one list of nodes with half of them.
    Lying,
    /// Answers watches of nodes with 410, and lists of nodes with 500; passes everything else on.
    Listless,
    /// Ends watches of nodes at once, without an error.
    Ending,
    /// Passes lists of nodes on after this time.
    SlowLists(Duration),
    /// Answers requests for slices with this status.
    NoSlices(u16),
    /// Never answers a write of a slice; passes everything else on.
    Mute,
}

/// The front, which ends with the test's runtime.
pub struct Front {
    port: u16,
    state: Arc<Mutex<State>>,
}

struct State {
    manner: Manner,
    watch_refused: bool,
    /// Time and text of each request.
    asked: Vec<(Instant, String)>,
}

impl Front {
    /// Listens on its own port, and sends requests on with this client.
    pub async fn start(client: Client) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state =
            Arc::new(Mutex::new(State { manner: Manner::Honest, watch_refused: false, asked: Vec::new() }));
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (client, state) = (client.clone(), Arc::clone(&shared));
                let service = service_fn(move |request| answer(client.clone(), Arc::clone(&state), request));
                let connection = hyper::server::conn::http1::Builder::new();
                tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { port, state }
    }

    /// Port on which it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes its manner from now on.
    pub fn set(&self, manner: Manner) {
        let mut state = self.state.lock();
        (state.manner, state.watch_refused) = (manner, false);
        state.asked.clear();
    }

    /// True once it has sent the list that lacks half of the nodes.
    pub fn has_lied(&self) -> bool {
        let state = self.state.lock();
        state.watch_refused && state.manner == Manner::Honest
    }

    /// Time, method and path of each request since the last change of manner.
    pub fn asked(&self) -> Vec<(Instant, String)> {
        self.state.lock().asked.clone()
    }
}

/// A kubeconfig for plain HTTP on this port.
pub fn plain_kubeconfig(directory: &Path, port: u16) -> PathBuf {
    let path = directory.join(format!("plain-{port}.kubeconfig"));
    let text = format!(
        "kind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         users: [{{name: u, user: {{}}}}]\nclusters: [{{name: k, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n"
    );
    std::fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    path
}

enum Step {
    Pass,
    Wait(Duration),
    Refuse(u16),
    End,
    Gone,
    Halve,
}

fn next(state: &Mutex<State>, request: &Request<Incoming>) -> Step {
    let mut state = state.lock();
    let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    let of_nodes = request.uri().path() == "/api/v1/nodes";
    let watches = path.contains("watch=true");
    let writes_slice = path.contains("/nodeslices") && request.method() != "GET";
    state.asked.push((Instant::now(), format!("{} {path}", request.method())));
    match state.manner {
        Manner::Honest => Step::Pass,
        Manner::Busy => Step::Refuse(429),
        Manner::Slow(time) => Step::Wait(time),
        Manner::Lying if of_nodes && watches && !state.watch_refused => {
            state.watch_refused = true;
            Step::Gone
        }
        Manner::Lying if of_nodes && !watches && state.watch_refused => {
            state.manner = Manner::Honest;
            Step::Halve
        }
        Manner::Listless if of_nodes && watches => Step::Gone,
        Manner::Listless if of_nodes => Step::Refuse(500),
        Manner::Ending if of_nodes && watches => Step::End,
        Manner::SlowLists(time) if of_nodes && !watches => Step::Wait(time),
        Manner::NoSlices(code) if path.contains("/nodeslices") => Step::Refuse(code),
        Manner::Mute if writes_slice => Step::Wait(Duration::from_mins(60)),
        _ => Step::Pass,
    }
}

async fn answer(
    client: Client,
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> kube::Result<Response<Body>> {
    let step = next(&state, &request);
    match step {
        Step::Refuse(500) => return Ok(status(500, 500, "InternalError")),
        Step::Refuse(403) => return Ok(status(403, 403, "Forbidden")),
        Step::Refuse(code) => return Ok(status(code, code, "TooManyRequests")),
        Step::End => return Ok(Response::new(Body::empty())),
        Step::Gone => return Ok(status(200, 410, "Expired")),
        Step::Wait(time) => wait::pace(time).await,
        Step::Pass | Step::Halve => {}
    }
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await.map_err(kube::Error::HyperError)?.to_bytes();
    // The client sets its own headers.
    for header in ["authorization", "host", "accept-encoding"] {
        parts.headers.remove(header);
    }
    let answer = client.send(Request::from_parts(parts, Body::from(body))).await?;
    if !matches!(step, Step::Halve) {
        return Ok(answer);
    }
    let bytes = answer.into_body().collect().await?.to_bytes();
    let mut list: Value = serde_json::from_slice(&bytes).unwrap();
    let items = list["items"].as_array_mut().unwrap();
    items.truncate(items.len() / 2);
    let answer = Response::builder().header("content-type", "application/json");
    Ok(answer.body(Body::from(list.to_string().into_bytes())).unwrap())
}

/// A Status; with HTTP 200, the event of a watch that carries it.
fn status(http: u16, code: u16, reason: &str) -> Response<Body> {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                         "message": format!("the test says {reason}"), "reason": reason, "code": code });
    let text = if http == 200 {
        format!("{}\n", json!({ "type": "ERROR", "object": status }))
    } else {
        status.to_string()
    };
    let answer = Response::builder().status(http).header("content-type", "application/json");
    answer.body(Body::from(text.into_bytes())).unwrap()
}
