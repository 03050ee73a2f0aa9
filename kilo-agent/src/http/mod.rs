//! The HTTP server of the agent: `/health`, `/metrics`, `/status`, `/graph`.

mod drawing;
mod graph;
mod linger;
mod places;
mod respond;
mod serve;
mod turns;

use std::{sync::Arc, time::Instant};

use hyper::{Method, Request, StatusCode, body::Incoming};

pub use graph::{Format, Graph, Layout};
pub use respond::{method_not_allowed, respond, text};
pub use serve::{Answer, bind, serve};
pub use turns::Turns;

use crate::{
    health::Health,
    metrics::Metrics,
    status::{Timestamp, View},
};
use kilo_core::topology::tunnel_ends;

/// What the server answers from.
#[derive(Clone)]
pub struct Context {
    /// For `/health`.
    pub health: Health,
    /// For `/metrics` and the counters of `/status`.
    pub metrics: Metrics,
    /// The mesh as this node sees it.
    pub view: tokio::sync::watch::Receiver<Arc<View>>,
    /// For `/graph`.
    pub graph: Graph,
    /// For all but `/health` and `/`.
    pub turns: Turns,
}

/// Media type of `/metrics`.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

impl Context {
    /// Answers one request.
    pub async fn answer(self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        if !matches!(path, "/" | "/health" | "/metrics" | "/status" | "/graph") {
            return text(StatusCode::NOT_FOUND, "not found; try /health, /metrics, /status or /graph\n");
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return method_not_allowed("GET, HEAD");
        }
        match path {
            "/" => respond(StatusCode::OK, "text/html; charset=utf-8", PAGE),
            "/health" => match self.health.check(Instant::now()) {
                Ok(()) => text(StatusCode::OK, well(&self.health.degraded())),
                Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
            },
            _ => self.turns.answer(self.costly(path, request.uri().query().unwrap_or(""))).await,
        }
    }

    /// Answers what takes work and memory.
    async fn costly(&self, path: &str, query: &str) -> Answer {
        let view = || Arc::clone(&self.view.borrow());
        match path {
            "/metrics" => {
                match view().peers().await {
                    Ok(peers) => self.metrics.set_peers(peers, tunnel_ends(&view().mesh), Timestamp::now()),
                    Err(error) => {
                        tracing::warn!(%error, "failed to read WireGuard peers; their metrics are from the last scrape");
                    }
                }
                match self.metrics.encode() {
                    Ok(body) => respond(StatusCode::OK, OPENMETRICS, body),
                    Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
                }
            }
            "/status" => {
                let counters = self.metrics.counters().map_err(|error| error.to_string());
                let unhealthy = self.health.check(Instant::now()).err();
                match serde_json::to_vec_pretty(
                    &view().status(counters, unhealthy, self.health.degraded()).await,
                ) {
                    Ok(body) => respond(StatusCode::OK, "application/json", body),
                    Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
                }
            }
            _ => self.graph.answer(query, &view().mesh).await,
        }
    }
}

/// The body of a good answer: a readiness probe looks at the code, people and scripts at the text.
fn well(degraded: &[String]) -> String {
    if degraded.is_empty() { "ok\n".to_owned() } else { format!("degraded: {}\n", degraded.join("; ")) }
}

/// All links are relative: the page works behind the API server's proxy, too.
const PAGE: &str = r#"<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Kilo</title>
<style>
body { font-family: sans-serif; margin: 2em; }
nav a { margin-right: 1.5em; }
img { max-width: 100%; margin-top: 1em; }
</style>
<h1>Kilo</h1>
<nav>
<a href="health">health</a>
<a href="metrics">metrics</a>
<a href="status">status</a>
<a href="graph">graph</a>
<a href="graph?format=dot">graph as text</a>
</nav>
<img src="graph" alt="The mesh: locations, their nodes, the leaders joined to each other">
</html>
"#;
