//! Asks an agent for its status: at its address, or in its pod through the API server.

use std::time::Duration;

use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    client::conn::http1,
    header::{AUTHORIZATION, HOST},
    http::uri::InvalidUri,
};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, client::Body, core::Status as Refusal};
use tokio::{net::TcpStream, time::timeout};

use super::{Status, pods};
use kilo_core::{
    errors::{Cause, error_chain},
    settings::defaults::AGENT_PORT,
};

/// Timeout for an agent's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum size of an answer in bytes: 10,000 nodes take 5 MB.
const LARGEST: usize = 64 << 20;

/// Where an agent that requires tokens keeps one for root on its node, and for `kgctl` in its container.
pub const LOCAL_TOKEN: &str = "/var/lib/kilo/page-token";

/// Why an agent did not report its status.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The URL cannot be used.
    #[error("{url:?} is not the URL of an agent: {source}; write for example http://127.0.0.1:1107")]
    Url {
        /// The text given.
        url: String,
        /// What is wrong.
        source: Cause,
    },
    /// Nothing answers at that address.
    #[error(
        "the agent at {url} does not answer: {}; does kg run there, with --listen on that port?",
        error_chain(source.as_ref())
    )]
    Unreachable {
        /// URL that was asked.
        url: String,
        /// The error underneath.
        source: Cause,
    },
    /// A server answers, but not an agent that knows `/status`.
    #[error("the server at {url} is not an agent of this version: {source}")]
    Answer {
        /// URL that was asked.
        url: String,
        /// What was received instead.
        source: Cause,
    },
    /// The agent cannot show it at the moment, for example because it asks an API server that is away.
    #[error("the agent at {url} cannot show its status now ({code}): {said}")]
    Busy {
        /// URL that was asked.
        url: String,
        /// The status code.
        code: StatusCode,
        /// The agent's message.
        said: String,
    },
    /// The agent requires a token.
    #[error("the agent at {url} requires a token to show its status: {said}")]
    Token {
        /// URL that was asked.
        url: String,
        /// The agent's message.
        said: String,
    },
    /// There is no agent pod on that node.
    #[error(
        "no running pod with the label {label} on node {0}; use --agent with the address of its agent",
        label = pods::LABEL
    )]
    NoPod(String),
    /// The API server refuses.
    #[error(
        "{}; this needs list on pods and get on pods/proxy, or --agent with the address of the agent",
        error_chain(.0.as_ref())
    )]
    Api(#[source] Cause),
}

impl AskError {
    /// Whether a later attempt may succeed without intervention.
    pub const fn is_temporary(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Busy { .. })
    }
}

/// Reads the status at an agent's own address (`http://host:port`), with this token if given.
///
/// # Errors
/// Why the status cannot be read.
pub async fn agent(url: &str, token: Option<&str>) -> Result<Status, AskError> {
    let wrong = |source: Cause| AskError::Url { url: url.to_owned(), source };
    let uri: Uri = url.trim_end_matches('/').parse().map_err(|error: InvalidUri| wrong(error.into()))?;
    if uri.scheme_str() != Some("http") {
        return Err(wrong("it must start with http://".into()));
    }
    let authority = uri.authority().ok_or_else(|| wrong("it names no host".into()))?.clone();
    let path = uri.path().trim_end_matches('/');
    let path = if path.ends_with("/status") { path.to_owned() } else { format!("{path}/status") };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let address = (host, authority.port_u16().unwrap_or(AGENT_PORT));
    let unreachable = |source: Cause| AskError::Unreachable { url: url.to_owned(), source };
    let exchange = async {
        let stream = TcpStream::connect(address).await.map_err(|error| unreachable(error.into()))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| unreachable(error.into()))?;
        let connection = tokio::spawn(connection);
        let mut request = Request::get(path).header(HOST, authority.as_str());
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| wrong(error.into()))?;
        let answer = sender.send_request(request).await.map_err(|error| unreachable(error.into()))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), LARGEST).collect().await;
        connection.abort();
        let body = body.map_err(unreachable)?.to_bytes();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let said = String::from_utf8_lossy(&body).trim().to_owned();
            return Err(AskError::Token { url: url.to_owned(), said });
        }
        if status.is_server_error() {
            // Another server may send a whole page.
            let said = String::from_utf8_lossy(&body).lines().next().unwrap_or_default().to_owned();
            return Err(AskError::Busy { url: url.to_owned(), code: status, said });
        }
        if status != StatusCode::OK {
            return Err(AskError::Answer { url: url.to_owned(), source: status.to_string().into() });
        }
        serde_json::from_slice(&body)
            .map_err(|error| AskError::Answer { url: url.to_owned(), source: error.into() })
    };
    timeout(PATIENCE, exchange)
        .await
        .unwrap_or_else(|_| Err(unreachable(format!("no response within {} s", PATIENCE.as_secs()).into())))
}

/// Reads the status of the agent in this pod, through the API server's proxy.
///
/// # Errors
/// Why the status cannot be read.
pub async fn pod(client: &Client, pod: &Pod) -> Result<Status, AskError> {
    let asked = timeout(PATIENCE, status_of(client, pod)).await;
    asked.unwrap_or_else(|_| Err(AskError::Api("the API server's proxy does not answer".into())))
}

async fn status_of(client: &Client, pod: &Pod) -> Result<Status, AskError> {
    let text = page(client, pod, "status").await.map_err(|error| match error {
        // Not from the API server itself, which has just let this client list pods.
        kube::Error::Api(status) if status.code == 401 => {
            let said = "the API server's proxy cannot show it one".to_owned();
            AskError::Token { url: proxy_url(pod, "status"), said }
        }
        kube::Error::Service(source) if source.is::<TooLong>() => {
            AskError::Answer { url: proxy_url(pod, "status"), source }
        }
        error => AskError::Api(error.into()),
    })?;
    serde_json::from_str(&text)
        .map_err(|error| AskError::Answer { url: proxy_url(pod, "status"), source: error.into() })
}

/// Reads this path of the agent in a pod, through the API server's proxy.
///
/// # Errors
/// Errors of the API server; [`TooLong`] is inside of [`kube::Error::Service`].
pub async fn page(client: &Client, pod: &Pod, path: &str) -> Result<String, kube::Error> {
    let request = Request::get(proxy_url(pod, path)).body(Vec::new()).map_err(kube::Error::HttpError)?;
    bounded(client, request, LARGEST).await
}

/// The answer exceeded the limit and was not read to its end.
#[derive(Debug, thiserror::Error)]
#[error("the answer is longer than {0} bytes")]
pub struct TooLong(pub usize);

/// Reads at most `most` bytes of text from a node or pod through the API server: an attacker who controls the
/// node can send endlessly, even with an error code.
///
/// # Errors
/// Errors of the API server; [`TooLong`] is inside of [`kube::Error::Service`].
pub async fn bounded(client: &Client, request: Request<Vec<u8>>, most: usize) -> Result<String, kube::Error> {
    let answer = client.send(request.map(Body::from)).await?;
    let code = answer.status();
    let body = Limited::new(answer.into_body(), most).collect().await.map_err(|error| {
        match error.downcast::<kube::Error>() {
            Ok(error) => *error,
            Err(error) if error.is::<LengthLimitError>() => kube::Error::Service(TooLong(most).into()),
            Err(error) => kube::Error::Service(error),
        }
    })?;
    let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    if !code.is_client_error() && !code.is_server_error() {
        return Ok(text);
    }
    // The API server's own errors are JSON objects, those of agents are text.
    let refused = serde_json::from_str(&text)
        .unwrap_or_else(|_| Refusal::failure(text.trim(), "").with_code(code.as_u16()));
    Err(kube::Error::Api(Box::new(refused)))
}

fn proxy_url(pod: &Pod, path: &str) -> String {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    format!("/api/v1/namespaces/{namespace}/pods/{name}:{AGENT_PORT}/proxy/{path}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use super::*;
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    /// A server that sends this head and then an endless body; also counts the bytes sent.
    fn endless(head: &'static str) -> (Client, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = write!(stream, "HTTP/1.1 {head}\r\n\r\n");
                while stream.write_all(&[b'x'; 1 << 12]).is_ok() {
                    counted.fetch_add(1 << 12, Ordering::Relaxed);
                }
            }
        });
        (Client::try_from(kube::Config::new(uri)).unwrap(), sent)
    }

    #[tokio::test]
    async fn an_answer_without_end_is_not_read_to_its_end() {
        const MOST: usize = 1 << 20;
        // A body without a length ends with the connection.
        for head in ["200 OK", "500 Internal Server Error", "403 Forbidden"] {
            let (client, sent) = endless(head);
            let asked = bounded(&client, Request::get("/").body(Vec::new()).unwrap(), MOST);
            let error = timeout(Duration::from_secs(20), asked).await.unwrap().unwrap_err();
            let kube::Error::Service(cause) = &error else { panic!("{head}: {error:?}") };
            assert!(cause.is::<TooLong>(), "{head}: {cause}");
            // Bytes in flight when the reader stops are in the kernel's buffers.
            assert!(sent.load(Ordering::Relaxed) < 16 * MOST, "{head}");
        }
        let (client, _) = endless("200 OK");
        let error = pod(&client, &Pod::default()).await.unwrap_err().to_string();
        // On a slow machine the timeout comes first.
        assert!(error.contains("longer than 67108864 bytes") || error.contains("does not answer"), "{error}");
    }
}
