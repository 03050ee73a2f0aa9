//! `kg webhook`: rejects invalid Peer objects when they are written, by the same rules by which agents ignore
//! them.

mod certificate;
mod issue;
pub mod metrics;
mod secret;

use std::{future, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode, body::Incoming, header::CONTENT_TYPE};
use kube::core::{
    DynamicObject,
    admission::{
        AdmissionRequest, AdmissionResponse, AdmissionReview, META_API_VERSION_V1, META_KIND, Operation,
    },
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use certificate::CertificateError;
pub use secret::{ObjectNames, SecretError};

use self::{certificate::Certificate, metrics::Metrics};
use crate::{
    backend::{BackendError, kubernetes},
    http::{self, Answer, OPENMETRICS, method_not_allowed, respond, text},
};

/// Source of the certificate.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files maintained by somebody else.
    Files {
        /// PEM certificate chain.
        certificate: PathBuf,
        /// PEM private key.
        key: PathBuf,
    },
    /// A Secret, which the webhook creates and renews itself.
    Secret(ObjectNames),
}

/// What the flags of `kg webhook` say.
#[derive(Clone, Debug)]
pub struct Options {
    /// Source of the certificate.
    pub source: Source,
    /// Address for reviews by the API server, over TLS.
    pub listen: SocketAddr,
    /// Address for metrics and health, in cleartext.
    pub listen_metrics: SocketAddr,
    /// How often the files or the Secret are read again.
    pub reload: Duration,
}

/// Why the webhook cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The certificate's files cannot be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The Secret cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// There is no connection to the API server.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The TLS library failed.
    #[error("failed to set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// An address cannot be bound.
    #[error("failed to listen on {address}: {source}")]
    Listen {
        /// Address of the flag.
        address: SocketAddr,
        /// The error underneath.
        source: io::Error,
    },
}

/// Maximum size of a review in bytes: more than two objects of the largest size that etcd accepts.
const LARGEST: usize = 8 << 20;
/// Timeout for receiving a body.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves until `stop`, then completes pending requests.
///
/// # Errors
/// When the certificate cannot be used or an address is taken.
pub async fn run(options: Options, stop: CancellationToken) -> Result<(), WebhookError> {
    let metrics = Metrics::default();
    let Some((certificate, source)) = Origin::open(&options, &stop).await? else { return Ok(()) };
    let certificate = Arc::new(certificate);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::<Certificate>::clone(&certificate));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let bind =
        async |address| http::bind(address).await.map_err(|source| WebhookError::Listen { address, source });
    let reviews = bind(options.listen).await?;
    let scrapes = bind(options.listen_metrics).await?;
    tracing::info!(listen = %options.listen, metrics = %options.listen_metrics, "webhook is listening");

    let (for_reviews, for_scrapes) = (metrics.clone(), metrics.clone());
    let review = move |request| review_or_refuse(for_reviews.clone(), request);
    let scrape = move |request| future::ready(metrics_or_health(&for_scrapes, &request));
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let serving = async {
        tokio::join!(
            http::serve(reviews, Some(acceptor), review, stop.clone()),
            http::serve(scrapes, None, scrape, stop.clone()),
        );
    };
    let reloading = async {
        loop {
            tokio::time::sleep(options.reload).await;
            match source.renew(&certificate).await {
                Ok(true) => tracing::info!("certificate changed; using the new one"),
                Ok(false) => {}
                Err(error) => {
                    metrics.errors.inc();
                    tracing::error!(%error, "failed to reload certificate; keeping the previous one");
                }
            }
        }
    };
    tokio::select! {
        () = serving => Ok(()),
        () = reloading => Ok(()),
    }
}

/// Where the certificate is reloaded from.
enum Origin {
    Files,
    Secret(kube::Client, ObjectNames),
}

impl Origin {
    /// Obtains the first certificate; `None` when asked to stop before.
    async fn open(
        options: &Options,
        stop: &CancellationToken,
    ) -> Result<Option<(Certificate, Self)>, WebhookError> {
        let objects = match &options.source {
            Source::Files { certificate, key } => {
                return Ok(Some((Certificate::load(certificate, key)?, Self::Files)));
            }
            Source::Secret(objects) => objects,
        };
        let client = kubernetes::client(None, None).await?;
        let files = loop {
            match secret::ensure(&client, objects).await {
                Ok(files) => break files,
                // Permissions or the webhook's configuration may not exist yet.
                Err(error) => tracing::error!(%error, "failed to obtain a certificate; retrying"),
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(None),
                () = tokio::time::sleep(options.reload) => {}
            }
        };
        let secret = PathBuf::from(format!("secret {}/{}", objects.namespace, objects.secret));
        let paths = (secret.join("tls.crt"), secret.join("tls.key"));
        Ok(Some((Certificate::of(paths, files)?, Self::Secret(client, objects.clone()))))
    }

    /// Reloads the certificate; returns whether it had changed.
    async fn renew(&self, certificate: &Certificate) -> Result<bool, WebhookError> {
        match self {
            Self::Files => Ok(certificate.reload()?),
            Self::Secret(client, objects) => Ok(certificate.take(secret::ensure(client, objects).await?)?),
        }
    }
}

/// Answers requests for metrics and health.
fn metrics_or_health(metrics: &Metrics, request: &Request<Incoming>) -> Answer {
    let path = request.uri().path();
    let handler = match path {
        "/metrics" => "metrics",
        "/health" => "health",
        _ => "other",
    };
    metrics.request(handler, request.method());
    if handler == "other" {
        return text(StatusCode::NOT_FOUND, "not found; try /metrics or /health\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return method_not_allowed("GET, HEAD");
    }
    match (handler, metrics.encode()) {
        ("health", _) => text(StatusCode::OK, "ok\n"),
        (_, Ok(body)) => respond(StatusCode::OK, OPENMETRICS, body),
        (_, Err(error)) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

async fn review_or_refuse(metrics: Metrics, request: Request<Incoming>) -> Answer {
    let known = request.uri().path() == "/validate";
    metrics.request(if known { "validate" } else { "other" }, request.method());
    match read(known, request).await {
        Ok(review) => {
            let (response, operation) = review;
            metrics.review(&operation, response.allowed);
            if !response.allowed {
                tracing::info!(reason = response.result.message, "denied Peer object");
            }
            match serde_json::to_vec(&response.into_review()) {
                Ok(body) => respond(StatusCode::OK, "application/json", body),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            }
        }
        Err(refusal) => {
            metrics.errors.inc();
            refusal
        }
    }
}

/// Reads and decides one review; `Err` is the response to an invalid request.
async fn read(known: bool, request: Request<Incoming>) -> Result<(AdmissionResponse, Operation), Answer> {
    let bad = |reason: String| text(StatusCode::BAD_REQUEST, reason + "\n");
    if !known {
        return Err(text(StatusCode::NOT_FOUND, "not found; send reviews to /validate\n"));
    }
    if *request.method() != Method::POST {
        return Err(method_not_allowed("POST"));
    }
    let media = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    if media.split(';').next().map(str::trim) != Some("application/json") {
        return Err(text(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json\n"));
    }
    let body = tokio::time::timeout(PATIENCE, Limited::new(request.into_body(), LARGEST).collect()).await;
    let body = match body {
        Err(_) => return Err(text(StatusCode::REQUEST_TIMEOUT, "the body takes too long\n")),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("a review of more than {} MiB\n", LARGEST >> 20);
            return Err(text(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        Ok(Err(error)) => return Err(bad(format!("the body is not complete: {error}"))),
        Ok(Ok(body)) => body.to_bytes(),
    };
    let review: AdmissionReview<DynamicObject> =
        serde_json::from_slice(&body).map_err(|error| bad(format!("not an AdmissionReview: {error}")))?;
    if review.types.api_version != META_API_VERSION_V1 || review.types.kind != META_KIND {
        return Err(bad(format!(
            "{:?} {:?} is not understood, only {META_API_VERSION_V1} {META_KIND}",
            review.types.api_version, review.types.kind
        )));
    }
    let request: AdmissionRequest<DynamicObject> =
        review.try_into().map_err(|_| bad("the AdmissionReview has no request".to_owned()))?;
    Ok((review_peer(&request), request.operation))
}

fn review_peer(request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    let is_peer = request.kind.group == "kilo.squat.ai" && request.kind.kind == "Peer";
    if !is_peer {
        return response.deny(format!(
            "this webhook reviews Peers of kilo.squat.ai, not {}; check the rules of the ValidatingWebhookConfiguration",
            request.kind.kind
        ));
    }
    let spec_is_written = matches!(request.operation, Operation::Create | Operation::Update)
        && request.sub_resource.as_deref().unwrap_or_default().is_empty();
    if !spec_is_written {
        return response;
    }
    match request.object.clone().map(kilo_core::objects::peer::parse) {
        Some(Ok(_)) => response,
        Some(Err(problem)) => response.deny(problem),
        None => response.deny("the request holds no object"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use kilo_core::wireguard::key::PublicKey;

    fn request(operation: &str, kind: &str, object: &serde_json::Value) -> AdmissionRequest<DynamicObject> {
        let group = "kilo.squat.ai";
        serde_json::from_value(json!({
            "uid": "u", "operation": operation, "userInfo": {}, "object": object,
            "kind": {"group": group, "version": "v1alpha1", "kind": kind},
            "resource": {"group": group, "version": "v1alpha1", "resource": "peers"},
        }))
        .unwrap()
    }

    #[test]
    fn what_the_agent_would_ignore_is_denied_with_the_field() {
        let object = |prefix: &str| {
            json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
                "spec": {"allowedIPs": [prefix], "publicKey": PublicKey([1; 32]).to_string()},
            })
        };
        assert!(review_peer(&request("CREATE", "Peer", &object("10.5.0.1/32"))).allowed);
        let control = review_peer(&request("CREATE", "Peer", &object("fd6b:696c:6f00::1/128")));
        assert!(!control.allowed && control.result.message.contains("fd6b:696c:6f00::1/128"), "{control:?}");
        assert!(
            review_peer(&request("CREATE", "Peer", &object("::/0"))).allowed,
            "longer prefixes come first"
        );
        let denied = review_peer(&request("UPDATE", "Peer", &object("10.5.0.1")));
        assert!(!denied.allowed && denied.result.message.contains("allowedIPs"), "{denied:?}");
        let shapeless = json!({"apiVersion": "v1", "kind": "Peer", "metadata": {}, "spec": 7});
        assert!(!review_peer(&request("CREATE", "Peer", &shapeless)).allowed);
        assert!(!review_peer(&request("CREATE", "Peer", &serde_json::Value::Null)).allowed);
        assert!(
            review_peer(&request("DELETE", "Peer", &serde_json::Value::Null)).allowed,
            "it may always go"
        );
        assert!(!review_peer(&request("CREATE", "Pod", &object("10.5.0.1/32"))).allowed);
    }
}
