//! The HTTP server of the agent: `/health`, `/metrics`, `/graph`.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Instant};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::CONTENT_TYPE,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::{
    health::Health,
    metrics::Metrics,
    topology::{self, Mesh},
};

/// What the server answers from.
#[derive(Clone)]
pub struct Context {
    /// For `/health`.
    pub health: Health,
    /// For `/metrics`.
    pub metrics: Metrics,
    /// The mesh as this node sees it, for `/graph`.
    pub mesh: tokio::sync::watch::Receiver<Arc<Mesh>>,
}

/// Serves until the task is dropped.
///
/// # Errors
/// When the address cannot be bound.
pub async fn serve(listen: SocketAddr, context: Context) -> std::io::Result<Infallible> {
    let listener = TcpListener::bind(listen).await?;
    loop {
        let (stream, _) = match listener.accept().await {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, "accept");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let context = context.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(&context, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(std::time::Duration::from_secs(10))
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "http connection");
            }
        });
    }
}

fn answer(context: &Context, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported\n");
    }
    match request.uri().path() {
        "/health" => match context.health.check(Instant::now()) {
            Ok(()) => text(StatusCode::OK, "ok\n"),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
        },
        "/metrics" => match context.metrics.encode() {
            Ok(body) => {
                respond(StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", body)
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        },
        "/graph" => graph(request.uri().query().unwrap_or(""), &context.mesh),
        "/" => respond(
            StatusCode::OK,
            "text/html; charset=utf-8",
            "<!doctype html><title>kg</title><h1>kg</h1><ul>\
             <li><a href=/health>health</a><li><a href=/metrics>metrics</a>\
             <li><a href=/graph?format=dot>graph</a></ul>\n",
        ),
        path => text(
            StatusCode::NOT_FOUND,
            format!("{path} does not exist; try /health, /metrics or /graph?format=dot\n"),
        ),
    }
}

fn graph(query: &str, mesh: &tokio::sync::watch::Receiver<Arc<Mesh>>) -> Response<Full<Bytes>> {
    let format = query.split('&').find_map(|pair| pair.strip_prefix("format=")).unwrap_or("dot");
    match format {
        "dot" | "gv" => {
            // Drawn when asked for: every pair of leaders is an edge.
            let mesh = Arc::clone(&mesh.borrow());
            respond(StatusCode::OK, "text/vnd.graphviz; charset=utf-8", topology::dot(&mesh))
        }
        other => text(
            StatusCode::BAD_REQUEST,
            format!(
                "format {other:?} cannot be rendered here; use format=dot and pipe it through `dot -Tsvg`\n"
            ),
        ),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    respond(status, "text/plain; charset=utf-8", body)
}

fn respond(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(content_type));
    response
}
