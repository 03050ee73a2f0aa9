//! Whether Kilo's own agent follows this one: the image that the DaemonSet now names.

use std::{path::Path, time::Duration};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Container};
use kube::{Api, Client};

use crate::AGENTS_NAMESPACE;
use kilo_core::errors::{Cause, error_chain};

/// File with the namespace of this pod, written by the kubelet.
const NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Name of the DaemonSet and its container, in our manifests as in Kilo's.
const NAME: &str = "kilo";
/// Kilo's own image, without the registry.
const KILO: &str = "squat/kilo";
/// The flags of Kilo's agent (0.7.0), which exits at once if given any other.
const KILOS_FLAGS: [&str; 27] = [
    "backend",
    "clean-up",
    "clean-up-interface",
    "cni",
    "cni-path",
    "compatibility",
    "create-interface",
    "encapsulate",
    "help",
    "hostname",
    "interface",
    "internal-cidr",
    "iptables-forward-rules",
    "kubeconfig",
    "listen",
    "local",
    "log-level",
    "master",
    "mesh-granularity",
    "mtu",
    "port",
    "prioritise-private-addresses",
    "resync-period",
    "service-cidr",
    "subnet",
    "topology-label",
    "version",
];
/// A stopping agent waits at most this long for an answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The namespace of this pod; outside of a pod, that of our manifests.
pub fn own_namespace() -> String {
    let namespace = std::fs::read_to_string(NAMESPACE).ok();
    namespace.map_or_else(|| AGENTS_NAMESPACE.to_owned(), |namespace| namespace.trim().to_owned())
}

/// Finds out, when the agent stops, what follows it.
#[derive(Clone)]
pub struct Successor {
    daemon_sets: Api<DaemonSet>,
}

impl std::fmt::Debug for Successor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Successor").finish_non_exhaustive()
    }
}

/// Why the next image is not known.
#[derive(Debug, thiserror::Error)]
pub enum SuccessorError {
    /// This account has no right to read the DaemonSet; Kilo's own ClusterRole does not grant it.
    #[error("{}", error_chain(.0.as_ref()))]
    Forbidden(#[source] Cause),
    /// The API server does not answer, or not with the DaemonSet.
    #[error("{}", error_chain(.0.as_ref()))]
    Api(#[source] Cause),
    /// The DaemonSet runs Kilo's own image with a flag of ours, so that agent will not start.
    #[error(
        "the DaemonSet now runs {image}, which does not know {flag} and will not start: apply Kilo's own manifests"
    )]
    UnknownFlag {
        /// Kilo's image.
        image: String,
        /// The first unknown flag, without its value.
        flag: String,
    },
    /// The DaemonSet has no such container.
    #[error("DaemonSet {NAME} has no container {NAME}")]
    NoContainer,
}

impl Successor {
    /// Sends no request yet; `None` outside of a pod.
    pub fn new(client: Client) -> Option<Self> {
        let namespace = std::fs::read_to_string(Path::new(NAMESPACE)).ok()?;
        Some(Self { daemon_sets: Api::namespaced(client, namespace.trim()) })
    }

    /// The image that the DaemonSet runs now, if it is Kilo's own.
    ///
    /// # Errors
    /// When there is no answer within three seconds; also when the DaemonSet is gone, or gives Kilo's agent a flag that
    /// it does not know.
    pub async fn kilos(&self) -> Result<Option<String>, SuccessorError> {
        let asked = tokio::time::timeout(PATIENCE, container(&self.daemon_sets)).await;
        let container = asked.map_err(|_| SuccessorError::Api("the API server does not answer".into()))??;
        let image = container.image.ok_or(SuccessorError::NoContainer)?;
        if !is_kilos(&image) {
            return Ok(None);
        }
        match unknown_flag(container.args.as_deref().unwrap_or_default()) {
            Some(flag) => Err(SuccessorError::UnknownFlag { image, flag }),
            None => Ok(Some(image)),
        }
    }
}

async fn container(daemon_sets: &Api<DaemonSet>) -> Result<Container, SuccessorError> {
    let found = daemon_sets.get(NAME).await.map_err(|error| match &error {
        kube::Error::Api(status) if status.code == 403 => SuccessorError::Forbidden(error.into()),
        _ => SuccessorError::Api(error.into()),
    })?;
    let pod = found.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
    pod.containers.into_iter().find(|container| container.name == NAME).ok_or(SuccessorError::NoContainer)
}

/// The first argument that is a flag but not one of Kilo's.
fn unknown_flag(arguments: &[String]) -> Option<String> {
    let flags = arguments.iter().filter(|argument| argument.starts_with("--"));
    let mut names = flags.map(|flag| flag.split('=').next().unwrap_or(flag));
    names.find(|flag| !KILOS_FLAGS.contains(&flag.trim_start_matches("--"))).map(ToOwned::to_owned)
}

/// Decides by the name alone: neither a mistyped image nor a mirror of ours may leave a host without
/// programs.
fn is_kilos(image: &str) -> bool {
    let image = image.split('@').next().unwrap_or(image);
    // A colon before a slash belongs to the registry's port.
    let name = match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    };
    name == KILO || name.strip_suffix(KILO).is_some_and(|registry| registry.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_kilo_does_not_know_are_found() {
        let unknown = |arguments: &[&str]| {
            unknown_flag(&arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
        };
        let kilos = [
            "--kubeconfig=/etc/kubernetes/kubeconfig",
            "--hostname=$(NODE_NAME)",
            "--cni=false",
            "--mtu",
            "1420",
        ];
        assert_eq!(unknown(&kilos), None);
        assert_eq!(unknown(&["--hostname=a", "--cni-source=/etc/kilo"]).as_deref(), Some("--cni-source"));
        assert_eq!(unknown(&["--failover", "auto"]).as_deref(), Some("--failover"));
    }

    #[test]
    fn kilos_image_is_known_by_its_name_whatever_registry_tag_and_digest() {
        for image in [
            "squat/kilo",
            "squat/kilo:0.7.0",
            "registry:5000/squat/kilo",
            "example.org/squat/kilo:1@sha256:abc",
        ] {
            assert!(is_kilos(image), "{image}");
        }
        for image in [
            "kilo-ebpf/kilo:0.1.0",
            "registry:5000/kilo",
            "kilo-ebpf/kil0:0.2",
            "notsquat/kilo",
            "squat/kilo-ebpf",
        ] {
            assert!(!is_kilos(image), "{image}");
        }
    }
}
