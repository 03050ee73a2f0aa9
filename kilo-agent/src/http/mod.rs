//! The agent's HTTP server: the page, `/health`, `/metrics`, `/status`, `/events`, `/graph`.

pub mod access;
mod answer_limit;
mod connection_limit;
pub mod drawing;
mod graph;
pub mod page;
mod respond;
mod serve;

use std::{sync::Arc, time::Instant};

use hyper::{Method, Request, StatusCode, body::Incoming};

pub use answer_limit::AnswerLimit;
pub use graph::{Format, Graph, Layout};
pub use page::Page;
pub use respond::{html, method_not_allowed, respond, text};
pub use serve::{Answer, Closing, bind, serve};

use crate::{health::Health, metrics::Metrics, status::View, timestamp::Timestamp};
use access::Gate;
use kilo_core::topology::tunnel_ends;
use page::{Feed, Report};

/// Sources of the server's answers.
#[derive(Clone)]
pub struct Context {
    /// Result of the last reconcile, and what is degraded, for `/health`.
    pub health: Health,
    /// All metrics of the agent, for `/metrics`.
    pub metrics: Metrics,
    /// The mesh as this node sees it.
    pub view: tokio::sync::watch::Receiver<Arc<View>>,
    /// Draws the mesh of `view`, for `/graph`.
    pub graph: Graph,
    /// The page (`/`), its data as JSON (`/status`) and changes of it (`/events`).
    pub page: Page,
    /// Applies to all paths except `/health`, `/events` and the page's files.
    pub answer_limit: AnswerLimit,
    /// Guards all paths except `/health` and `/metrics`.
    pub gate: Gate,
}

/// Media type of `/metrics`.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

impl Context {
    /// Creates a context without access control.
    pub fn new(
        health: Health,
        metrics: Metrics,
        view: tokio::sync::watch::Receiver<Arc<View>>,
        graph: Graph,
    ) -> Self {
        let answer_limit = AnswerLimit::default();
        let feed = {
            let (health, metrics, view) = (health.clone(), metrics.clone(), view.clone());
            Feed::new(answer_limit.clone(), move || {
                let (health, metrics, view) = (health.clone(), metrics.clone(), Arc::clone(&view.borrow()));
                async move { report(&health, &metrics, &view).await }
            })
        };
        Self { health, metrics, view, graph, page: Page::new(feed), answer_limit, gate: Gate::Open }
    }

    /// Shows everything besides health and metrics only to callers that `gate` admits.
    pub fn behind(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Answers one request.
    pub async fn answer(self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        let is_known = matches!(path, "/" | "/health" | "/metrics" | "/status" | "/events" | "/graph");
        if !is_known && !page::is_file(path) {
            return text(StatusCode::NOT_FOUND, "not found; try /health, /metrics, /status or /graph\n");
        }
        if *request.method() == Method::POST && path == "/" {
            return self.gate.log_in(request).await.unwrap_or_else(|| method_not_allowed("GET, HEAD"));
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return method_not_allowed("GET, HEAD");
        }
        if !matches!(path, "/health" | "/metrics")
            && let Err(answer) = self.gate.admit(&request, path).await
        {
            return answer;
        }
        if let Some(file) = Page::file(path) {
            return file;
        }
        match path {
            "/health" => match self.health.check(Instant::now()) {
                Ok(()) => text(StatusCode::OK, well(&self.health.degraded())),
                Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
            },
            "/events" => {
                let closing = request.extensions().get::<Closing>().map(|closing| closing.0.clone());
                self.page.events(closing.unwrap_or_default())
            }
            _ => self.answer_limit.answer(self.costly(path, request.uri().query().unwrap_or(""))).await,
        }
    }

    /// Answers requests that take work and memory.
    async fn costly(&self, path: &str, query: &str) -> Answer {
        let view = || Arc::clone(&self.view.borrow());
        match path {
            "/" => self.page.html().await,
            "/metrics" => {
                match view().peers().await {
                    Ok(peers) => {
                        self.metrics.set_peers(peers, tunnel_ends(&view().observed.mesh), Timestamp::now());
                    }
                    Err(error) => {
                        tracing::warn!(%error, "failed to read WireGuard peers; their metrics are from the last scrape");
                    }
                }
                match self.metrics.encode() {
                    Ok(body) => respond(StatusCode::OK, OPENMETRICS, body),
                    Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
                }
            }
            "/status" => self.page.status().await,
            _ => {
                let view = view();
                self.graph.answer(query, &view.observed.mesh, view.paths()).await
            }
        }
    }
}

/// Builds the current report.
async fn report(health: &Health, metrics: &Metrics, view: &View) -> Report {
    let counters = metrics.counters().map_err(|error| error.to_string());
    let unhealthy = health.check(Instant::now()).err();
    let status = view.status(counters, unhealthy, health.degraded()).await;
    Report::new(status, view.history.all())
}

/// The body of a healthy answer: probes look at the status code, people and scripts at the text.
fn well(degraded: &[String]) -> String {
    if degraded.is_empty() { "ok\n".to_owned() } else { format!("degraded: {}\n", degraded.join("; ")) }
}
