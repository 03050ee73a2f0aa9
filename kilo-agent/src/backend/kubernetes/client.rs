//! Connects to the API server, and explains its errors to the operator.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::http;
use kube::{Client, Config, client::Body, core::Status};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::kubeconfig::{self, Access, Paths};
use crate::backend::BackendError;
use kilo_core::errors::{Explained, error_chain};

/// A connection without a byte for this long is closed. It may be dead, or an idle watch on an API server
/// without bookmarks (others send one every 60 to 75 s).
const SILENCE: Duration = Duration::from_secs(90);
/// Timeout for connecting.
const CONNECT: Duration = Duration::from_secs(10);
/// Timeout for a single request, unless a flag says otherwise.
pub const ANSWER: Duration = Duration::from_secs(20);

/// Watches of the same objects begin at least this long after one another, and at random up to twice as long:
/// the client library repeats one that the server ends without an error at once, and reports nothing.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);

/// An API server as named in errors.
#[derive(Clone, Debug, Default)]
pub struct Server {
    /// URL of the API server.
    pub url: String,
    /// The kubeconfig context; `None` in a pod.
    pub context: Option<String>,
    /// The kubeconfig user.
    pub user: Option<String>,
    /// The impersonated user (`--as`, or the kubeconfig's `as`), if any.
    pub impersonated: Option<String>,
    /// The kubeconfig files that were read.
    pub files: Vec<PathBuf>,
    /// The proxy in between, without its password.
    pub proxy: Option<String>,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.url)?;
        let mut about = Vec::new();
        match &self.context {
            Some(context) => about.push(format!("context {context:?} of {}", Paths(&self.files))),
            None => about.push("the service account of this pod".to_owned()),
        }
        if let Some(user) = &self.user {
            about.push(format!("user {user:?}"));
        }
        if let Some(user) = &self.impersonated {
            about.push(format!("as {user:?}"));
        }
        if let Some(proxy) = &self.proxy {
            about.push(format!("through the proxy {proxy}"));
        }
        write!(f, " ({})", about.join(", "))
    }
}

/// Connects as flags specify: `--kubeconfig`, `--master`, else the user's own configuration (`$KUBECONFIG`,
/// `~/.kube/config`), else in-cluster.
///
/// # Errors
/// When the configuration is unusable; the error names the file and what is wrong with it.
pub async fn client(kubeconfig: Option<&Path>, master: Option<&str>) -> Result<Client, BackendError> {
    let access = Access { kubeconfig: kubeconfig.map(ToOwned::to_owned), ..Access::default() };
    connect(&access, master, CONNECT).await.map(|(client, _)| client)
}

/// [`client`] with all options that flags can set; also returns how to name the server.
///
/// # Errors
/// When the configuration is unusable; the error names the file and what is wrong with it.
pub async fn connect(
    access: &Access,
    master: Option<&str>,
    patience: Duration,
) -> Result<(Client, Server), BackendError> {
    let mut access = access.clone();
    // A manifest may name a file that the platform does not have: kube-proxy's, for example.
    if let Some(path) =
        access.kubeconfig.as_deref().filter(|path| kubeconfig::is_missing(path) && in_cluster())
    {
        let path = path.display();
        match master {
            Some(_) => tracing::info!(%path, "kubeconfig does not exist; using the pod's service account"),
            None => tracing::info!(
                %path,
                "kubeconfig does not exist; using the in-cluster configuration, for which kube-proxy or its \
                 replacement must provide the Service \"kubernetes\"; where nothing does, --master=https://SERVER:6443 \
                 names the server"
            ),
        }
        access.kubeconfig = None;
    }
    let configured = match configured(&access).await {
        Err(error) if access.kubeconfig.is_some() => return Err(error),
        configured => configured,
    };
    let master = master.map(parse_master).transpose().map_err(BackendError::Config)?;
    let (mut config, mut server) = match (configured, &master) {
        (Err(_), Some(url)) => (Config::new(url.clone()), Server::default()),
        (configured, _) => configured?,
    };
    if let Some(url) = master {
        config.cluster_url = url;
    }
    if access.impersonate.is_some() {
        config.auth_info.impersonate = access.impersonate;
    }
    if !access.impersonate_groups.is_empty() {
        config.auth_info.impersonate_groups = Some(access.impersonate_groups);
    }
    config.connect_timeout = Some(patience.min(CONNECT));
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    // Watches and the agent retry by themselves; retries below them would hide the reason and pause for
    // minutes.
    config.default_retry = false;
    config.cluster_url.to_string().trim_end_matches('/').clone_into(&mut server.url);
    server.impersonated.clone_from(&config.auth_info.impersonate);
    server.proxy = config.proxy_url.as_ref().map(without_password);
    let client = Client::try_from(config).map_err(|error| {
        BackendError::Config(match access.kubeconfig {
            Some(path) => Explained::behind(format!("--kubeconfig {}", path.display()), error),
            None => Explained::of(error_chain(&error), error),
        })
    })?;
    Ok((client, server))
}

/// When watches began, or will begin, by what they watch.
#[derive(Default)]
struct Watches(Mutex<BTreeMap<String, Instant>>);

impl Watches {
    /// How long this request is to wait; `random` is from 0 to 1.
    fn pause(&self, uri: &http::Uri, now: Instant, random: f64) -> Duration {
        let parameters = || uri.query().unwrap_or_default().split('&');
        if !parameters().any(|parameter| parameter == "watch=true") {
            return Duration::ZERO;
        }
        // It says where in the history of the same objects the watch begins.
        let what = parameters().filter(|parameter| !parameter.starts_with("resourceVersion="));
        let what = what.fold(uri.path().to_owned(), |what, parameter| what + "&" + parameter);
        let mut began = self.0.lock();
        let after = began.get(&what).map(|began| *began + BETWEEN_WATCHES.mul_f64(1.0 + random));
        let begins = after.map_or(now, |after| after.max(now));
        began.insert(what, begins);
        begins.saturating_duration_since(now)
    }
}

/// Wraps a client; also returns a count of responses other than 429 and server errors.
pub fn counted(client: Client) -> (Client, watch::Receiver<u64>) {
    let (answers, count) = watch::channel(0);
    let namespace = client.default_namespace().to_owned();
    let watches = Arc::new(Watches::default());
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (client, answers) = (client.clone(), answers.clone());
        let pause = watches.pause(request.uri(), Instant::now(), rand::random_range(0.0..1.0));
        async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let response = client.send(request).await?;
            let status = response.status();
            if !status.is_server_error() && status != http::StatusCode::TOO_MANY_REQUESTS {
                answers.send_modify(|count| *count += 1);
            }
            Ok::<_, kube::Error>(response)
        }
    });
    (Client::new(service, namespace), count)
}

/// The configuration from files, or else the pod's service account.
async fn configured(access: &Access) -> Result<(Config, Server), BackendError> {
    let chosen = access.context.is_some() || access.cluster.is_some() || access.user.is_some();
    // In a pod, when no file can be read or selects a context, the pod's own account is meant.
    let may_fall_back = !chosen && access.kubeconfig.is_none() && in_cluster();
    let found = match kubeconfig::find(access) {
        Err(_) if may_fall_back => None,
        found => found?.filter(|found| !may_fall_back || !found.context_name(access).is_empty()),
    };
    if let Some(found) = found {
        let server = Server {
            context: Some(found.context_name(access).to_owned()),
            user: found.user_name(access).map(ToOwned::to_owned),
            files: found.files.clone(),
            ..Server::default()
        };
        return Ok((found.config(access).await?, server));
    }
    if chosen || !in_cluster() {
        return Err(kubeconfig::not_found(access));
    }
    let failed = |error| BackendError::Config(Explained::behind("service account of this pod", error));
    Ok((Config::incluster().map_err(failed)?, Server::default()))
}

/// A URL reduced to scheme, host and port, without credentials.
fn without_password(url: &http::Uri) -> String {
    let authority = url.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{}://{host}", url.scheme_str().unwrap_or_default())
}

/// Whether this is a container of a pod with a service account.
fn in_cluster() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// Parses a URL; without a scheme it is HTTP, as in Kubernetes' own clients.
fn parse_master(master: &str) -> Result<http::Uri, Explained> {
    let text = if master.contains("://") { master.to_owned() } else { format!("http://{master}") };
    let wrong =
        |reason: &str| format!("--master {master:?}: {reason}; write for example https://192.0.2.1:6443");
    let url: http::Uri = text
        .parse()
        .map_err(|error: http::uri::InvalidUri| Explained::of(wrong(&error.to_string()), error))?;
    match url.scheme_str() {
        Some("http" | "https") if url.host().is_some_and(|host| !host.is_empty()) => Ok(url),
        _ => Err(wrong("it is not http or https").into()),
    }
}

/// What was asked of the API server.
#[derive(Clone, Copy, Debug)]
pub enum Asked<'a> {
    /// List or watch nodes.
    Nodes,
    /// List or watch peers.
    Peers,
    /// Patch this node.
    Patch(&'a str),
    /// Create an Event.
    Event,
}

impl Asked<'_> {
    /// The kind of objects.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Nodes | Self::Patch(_) => "Nodes",
            Self::Peers => "Peers",
            Self::Event => "Events",
        }
    }
}

/// Explains to the operator what an API error means.
pub fn explain(error: kube::Error, asked: Asked<'_>) -> BackendError {
    let kube::Error::Api(status) = &error else {
        let text = error_chain(&error);
        return match error {
            kube::Error::SerdeError(_) => BackendError::Api(Explained::of(text, error)),
            _ => BackendError::Unreachable(Explained::of(
                format!("the API server is unreachable: {text}"),
                error,
            )),
        };
    };
    let text = match (status.code, asked) {
        (401, _) => {
            "the API server does not accept the credentials (401); check the kubeconfig or service account"
                .to_owned()
        }
        (403, _) => {
            format!("{}; apply the ClusterRole and ClusterRoleBinding of manifests/", status.message)
        }
        (404, Asked::Patch(node)) => return BackendError::NoSuchNode(node.to_owned()),
        (404, Asked::Peers) => {
            "the API server does not know Peer objects; run: kubectl apply -f manifests/crds.yaml".to_owned()
        }
        (429 | 500.., _) => {
            let text = format!("the API server answers {}: {}", status.code, status.message);
            return BackendError::Unreachable(Explained::of(text, error));
        }
        _ => status.message.clone(),
    };
    BackendError::Api(Explained::of(text, error))
}

/// Whether the account lacks a right. Admission, too, answers with 403, but about one object.
pub fn is_right_missing(status: &Status) -> bool {
    // As in: User "kilo" cannot create resource "nodeslices" in API group "kilo.squat.ai" at the cluster scope
    let what = status.message.split_once("\" cannot ").map_or("", |(_, what)| what);
    status.code == 403 && what.split(' ').nth(1) == Some("resource")
}

/// The answer, or an error that explains it to the operator, also when it takes too long.
pub async fn in_time<T>(
    answer: impl Future<Output = kube::Result<T>>,
    asked: Asked<'_>,
) -> Result<T, BackendError> {
    answered(answer).await?.map_err(|error| explain(error, asked))
}

/// The answer as it is, or an error when it takes too long.
pub async fn answered<T>(
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<kube::Result<T>, BackendError> {
    tokio::time::timeout(ANSWER, answer).await.map_err(|elapsed| {
        let text = format!("the API server did not answer within {} s", ANSWER.as_secs());
        BackendError::Unreachable(Explained::of(text, elapsed))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, message: &str) -> kube::Error {
        kube::Error::Api(Box::new(Status::failure(message, "").with_code(code)))
    }

    #[test]
    fn a_master_is_a_url_or_an_address() {
        for (text, url) in [
            ("https://192.0.2.1:6443", "https://192.0.2.1:6443/"),
            ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
            ("[2001:db8::1]:6443", "http://[2001:db8::1]:6443/"),
        ] {
            assert_eq!(parse_master(text).unwrap().to_string(), url);
        }
        for text in ["", "ftp://x", "https://", "a b"] {
            assert!(parse_master(text).is_err(), "{text}");
        }
    }

    #[test]
    fn each_refusal_says_what_to_do_and_whether_to_try_again() {
        let forbidden = status(403, "nodes is forbidden: User \"x\" cannot list resource \"nodes\"");
        let forbidden = explain(forbidden, Asked::Nodes);
        assert!(forbidden.to_string().contains("cannot list resource \"nodes\""), "{forbidden}");
        assert!(forbidden.to_string().contains("ClusterRole"), "{forbidden}");
        assert!(!forbidden.is_temporary());
        let missing = explain(status(404, "404 page not found"), Asked::Peers);
        assert!(missing.to_string().contains("kubectl apply -f manifests/crds.yaml"), "{missing}");
        assert!(matches!(explain(status(404, "x"), Asked::Patch("a")), BackendError::NoSuchNode(_)));
        assert!(explain(status(401, "Unauthorized"), Asked::Nodes).to_string().contains("401"));
        for code in [429, 500, 503] {
            assert!(explain(status(code, "busy"), Asked::Peers).is_temporary(), "{code}");
        }
    }

    #[test]
    fn a_right_is_missing_only_when_the_account_is_what_is_refused() {
        for (code, message, is_missing) in [
            (403, "nodeslices is forbidden: User \"x\" cannot create resource \"nodeslices\"", true),
            (403, "admission webhook \"w\" denied the request: field \"f\" cannot be changed", false),
            (403, "nodeslices \"a\" is forbidden: exceeded quota", false),
            (409, "User \"x\" cannot create resource \"nodeslices\"", false),
        ] {
            let status = Status::failure(message, "Forbidden").with_code(code);
            assert_eq!(is_right_missing(&status), is_missing, "{code} {message}");
        }
    }

    #[test]
    fn watches_of_the_same_objects_do_not_follow_each_other_at_once() {
        let (watches, start) = (Watches::default(), Instant::now());
        let pause = |uri: &str, milliseconds| {
            let now = start + Duration::from_millis(milliseconds);
            watches.pause(&uri.parse().unwrap(), now, 0.5).as_millis()
        };
        let watch =
            |version: u32| format!("/api/v1/nodes?&watch=true&timeoutSeconds=290&resourceVersion={version}");
        assert_eq!(pause(&watch(1), 0), 0);
        assert_eq!(pause("/api/v1/nodes?&limit=500", 1), 0, "a list");
        assert_eq!(pause("/api/v1/nodes?&watch=true&fieldSelector=metadata.name%3Da", 2), 0);
        assert_eq!(pause("/apis/kilo.squat.ai/v1alpha1/peers?&watch=true&resourceVersion=1", 3), 0);
        assert_eq!(pause(&watch(2), 100), 1400);
        assert_eq!(pause(&watch(2), 1500), 1500, "it has just begun");
        assert_eq!(pause(&watch(3), 290_000), 0);
    }

    #[tokio::test]
    async fn an_unreadable_kubeconfig_is_named_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        let text = |result: Result<Client, BackendError>| result.err().unwrap().to_string();
        let missing = text(client(Some(&path), None).await);
        assert!(missing.contains(path.to_str().unwrap()) && missing.contains("No such file"), "{missing}");
        std::fs::write(&path, "clusters: 7\n").unwrap();
        let broken = text(client(Some(&path), None).await);
        assert!(broken.contains(path.to_str().unwrap()) && broken.contains("clusters"), "{broken}");
        std::fs::write(&path, "apiVersion: v1\nkind: Config\n").unwrap();
        let empty = text(client(Some(&path), None).await);
        assert!(empty.contains(path.to_str().unwrap()) && empty.contains("context"), "{empty}");
    }
}
