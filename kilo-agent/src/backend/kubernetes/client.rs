//! The way to the API server, and what its errors mean for the operator.

use std::{path::Path, time::Duration};

use hyper::http;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::backend::BackendError;
use kilo_core::objects::error_chain;

/// No byte for this long: the connection is given up. It may be dead, or a watch of an API server without bookmarks
/// (others send one every 60 to 75 s) where nothing changes.
const SILENCE: Duration = Duration::from_secs(90);
/// Connecting takes no longer than this.
const CONNECT: Duration = Duration::from_secs(10);
/// A single request is answered within this time.
const ANSWER: Duration = Duration::from_secs(20);

/// Connects as flags say: `--kubeconfig`, `--master`, else in-cluster or the
/// user's own configuration (`$KUBECONFIG`, `~/.kube/config`).
///
/// # Errors
/// Names the file and what is wrong with it.
pub async fn client(kubeconfig: Option<&Path>, master: Option<&str>) -> Result<Client, BackendError> {
    let master = master.map(|master| (master, parse_master(master)));
    // A manifest may name a file that the platform does not have: kube-proxy's, for example.
    let missing = kubeconfig.filter(|path| is_missing(path) && in_cluster());
    if let Some(path) = missing {
        tracing::info!(path = %path.display(), "kubeconfig does not exist; using the in-cluster configuration");
    }
    let kubeconfig = kubeconfig.filter(|_| missing.is_none());
    let mut config = match (kubeconfig, &master) {
        (Some(path), _) => from_file(path).await?,
        (None, None) => Config::infer().await.map_err(|error| no_way(&error))?,
        (None, Some((text, parsed))) => match (Config::infer().await, parsed) {
            (Ok(config), _) => config,
            (Err(_), Ok(url)) => Config::new(url.clone()),
            (Err(_), Err(reason)) => return Err(bad_master(text, reason)),
        },
    };
    if let Some((text, parsed)) = master {
        config.cluster_url = parsed.map_err(|reason| bad_master(text, &reason))?;
    }
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    // Watches and the agent try again by themselves; tries below them would hide the reason, and pause for minutes.
    config.default_retry = false;
    let origin = kubeconfig.map(|path| format!("--kubeconfig {}: ", path.display())).unwrap_or_default();
    Client::try_from(config).map_err(|error| BackendError::Config(format!("{origin}{}", error_chain(&error))))
}

fn is_missing(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Whether this is a container of a pod with a service account.
fn in_cluster() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// Name of the cluster a configuration leads to: `--kubeconfig`, else the
/// user's own. In a pod there is none.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn cluster_name(kubeconfig: Option<&Path>) -> Result<String, BackendError> {
    let file = match kubeconfig {
        Some(path) => read(path)?,
        None => Kubeconfig::read().map_err(|error| no_way(&error))?,
    };
    let current = file.current_context.as_deref().unwrap_or_default();
    let named = file.contexts.iter().find(|context| context.name == current);
    let context = named.and_then(|named| named.context.as_ref());
    context
        .map(|context| context.cluster.clone())
        .ok_or_else(|| BackendError::Config(format!("current-context {current:?} does not exist")))
}

fn read(path: &Path) -> Result<Kubeconfig, BackendError> {
    let failed = |reason: String| BackendError::Config(format!("--kubeconfig {}: {reason}", path.display()));
    // Read here: the library's error names the path but loses the reason.
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    Kubeconfig::from_yaml(&text).map_err(|error| failed(error_chain(&error)))
}

async fn from_file(path: &Path) -> Result<Config, BackendError> {
    let failed = |reason: String| BackendError::Config(format!("--kubeconfig {}: {reason}", path.display()));
    let mut file = read(path)?;
    anchor_paths(&mut file, path.parent().unwrap_or(Path::new(".")));
    check_references(&file).map_err(failed)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|error| failed(error_chain(&error)))?;
    if !matches!(config.cluster_url.scheme_str(), Some("http" | "https")) {
        return Err(failed(format!(
            "server {} is not the URL of an API server; write for example https://192.0.2.1:6443",
            config.cluster_url
        )));
    }
    if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
        return Err(failed("the certificate authority holds no certificate in PEM".to_owned()));
    }
    Ok(config)
}

/// The library says less of names that lead nowhere, and goes on without a
/// user that does not exist.
fn check_references(file: &Kubeconfig) -> Result<(), String> {
    fn known<'a>(what: &str, name: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
        let names: Vec<_> = names.map(String::as_str).collect();
        if names.contains(&name) {
            return Ok(());
        }
        Err(format!("{what} {name:?} does not exist; there are: {}", names.join(", ")))
    }
    let contexts = || file.contexts.iter();
    let current = file.current_context.as_deref().unwrap_or_default();
    known("current-context", current, contexts().map(|context| &context.name))?;
    let context = contexts().find(|context| context.name == current);
    let Some(context) = context.and_then(|named| named.context.as_ref()) else { return Ok(()) };
    known("cluster", &context.cluster, file.clusters.iter().map(|cluster| &cluster.name))?;
    match context.user.as_deref() {
        None | Some("") => Ok(()),
        Some(user) => known("user", user, file.auth_infos.iter().map(|user| &user.name)),
    }
}

/// Files named in a configuration are relative to it.
fn anchor_paths(config: &mut Kubeconfig, directory: &Path) {
    let anchor = |path: &mut Option<String>| {
        if let Some(path) = path
            && !Path::new(path).is_absolute()
        {
            *path = directory.join(&*path).to_string_lossy().into_owned();
        }
    };
    for cluster in config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        anchor(&mut cluster.certificate_authority);
    }
    for auth in config.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        anchor(&mut auth.client_certificate);
        anchor(&mut auth.client_key);
        anchor(&mut auth.token_file);
    }
}

/// A URL; without a scheme it is HTTP, as Kubernetes' own clients take it.
fn parse_master(master: &str) -> Result<http::Uri, String> {
    let text = if master.contains("://") { master.to_owned() } else { format!("http://{master}") };
    let url: http::Uri = text.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
    match url.scheme_str() {
        Some("http" | "https") if url.host().is_some_and(|host| !host.is_empty()) => Ok(url),
        _ => Err("it is not http or https".to_owned()),
    }
}

fn bad_master(text: &str, reason: &str) -> BackendError {
    BackendError::Config(format!("--master {text:?}: {reason}; write for example https://192.0.2.1:6443"))
}

fn no_way(error: &dyn std::error::Error) -> BackendError {
    BackendError::Config(format!(
        "no kubeconfig found: looked at --kubeconfig, $KUBECONFIG, ~/.kube/config and the service account of a pod; give --kubeconfig ({})",
        error_chain(error)
    ))
}

/// What was asked of the API server.
#[derive(Clone, Copy, Debug)]
pub enum Asked<'a> {
    /// To list or watch nodes.
    Nodes,
    /// To list or watch peers.
    Peers,
    /// To patch this node.
    Patch(&'a str),
    /// To create an Event.
    Event,
}

/// Says what an API error means for the operator.
pub fn explain(error: &kube::Error, asked: Asked<'_>) -> BackendError {
    let kube::Error::Api(status) = error else {
        return match error {
            kube::Error::SerdeError(_) => BackendError::Api(error_chain(error)),
            _ => BackendError::Unreachable(format!("the API server is out of reach: {}", error_chain(error))),
        };
    };
    match (status.code, asked) {
        (401, _) => BackendError::Api(
            "the API server does not accept the credentials (401); check the kubeconfig or service account"
                .to_owned(),
        ),
        (403, _) => BackendError::Api(format!(
            "{}; apply the ClusterRole and ClusterRoleBinding of manifests/",
            status.message
        )),
        (404, Asked::Patch(node)) => BackendError::NoSuchNode(node.to_owned()),
        (404, Asked::Peers) => BackendError::Api(
            "the API server does not know Peer objects; run: kubectl apply -f manifests/crds.yaml".to_owned(),
        ),
        (429 | 500.., _) => {
            BackendError::Unreachable(format!("the API server answers {}: {}", status.code, status.message))
        }
        _ => BackendError::Api(status.message.clone()),
    }
}

/// The answer, or an error when it takes too long.
pub async fn in_time<T>(
    answer: impl Future<Output = kube::Result<T>>,
    asked: Asked<'_>,
) -> Result<T, BackendError> {
    match tokio::time::timeout(ANSWER, answer).await {
        Ok(answer) => answer.map_err(|error| explain(&error, asked)),
        Err(_) => Err(BackendError::Unreachable(format!(
            "the API server did not answer within {} s",
            ANSWER.as_secs()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, message: &str) -> kube::Error {
        kube::Error::Api(Box::new(kube::core::Status::failure(message, "").with_code(code)))
    }

    #[test]
    fn a_master_is_a_url_or_an_address() {
        for (text, url) in [
            ("https://192.0.2.1:6443", "https://192.0.2.1:6443/"),
            ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
            ("[2001:db8::1]:6443", "http://[2001:db8::1]:6443/"),
        ] {
            assert_eq!(parse_master(text).map(|url| url.to_string()), Ok(url.to_owned()));
        }
        for text in ["", "ftp://x", "https://", "a b"] {
            assert!(parse_master(text).is_err(), "{text}");
        }
    }

    #[test]
    fn each_refusal_says_what_to_do_and_whether_to_try_again() {
        let forbidden = status(403, "nodes is forbidden: User \"x\" cannot list resource \"nodes\"");
        let forbidden = explain(&forbidden, Asked::Nodes);
        assert!(forbidden.to_string().contains("cannot list resource \"nodes\""), "{forbidden}");
        assert!(forbidden.to_string().contains("ClusterRole"), "{forbidden}");
        assert!(!forbidden.is_temporary());
        let missing = explain(&status(404, "404 page not found"), Asked::Peers);
        assert!(missing.to_string().contains("kubectl apply -f manifests/crds.yaml"), "{missing}");
        assert!(matches!(explain(&status(404, "x"), Asked::Patch("a")), BackendError::NoSuchNode(_)));
        assert!(explain(&status(401, "Unauthorized"), Asked::Nodes).to_string().contains("401"));
        for code in [429, 500, 503] {
            assert!(explain(&status(code, "busy"), Asked::Peers).is_temporary(), "{code}");
        }
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
