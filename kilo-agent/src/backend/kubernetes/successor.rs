//! Whether Kilo's own agent comes after this one: the image that the DaemonSet names now.

use std::{path::Path, time::Duration};

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, Client};

use kilo_core::errors::{Cause, error_chain};

/// The namespace of this pod, as the kubelet writes it.
const NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// The DaemonSet and its container, in our manifests as in Kilo's.
const NAME: &str = "kilo";
/// Kilo's own image, without its registry.
const KILO: &str = "squat/kilo";
/// A stop waits no longer than this for an answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The namespace of this pod, or else of our manifests.
pub fn own_namespace() -> String {
    let namespace = std::fs::read_to_string(NAMESPACE).ok();
    namespace.map_or_else(|| "kube-system".to_owned(), |namespace| namespace.trim().to_owned())
}

/// What is asked when the agent is to stop.
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
    /// This account has no right to read the DaemonSet: Kilo's own ClusterRole does not give it.
    #[error("{}", error_chain(.0.as_ref()))]
    Forbidden(#[source] Cause),
    /// The API server does not answer, or not with the DaemonSet.
    #[error("{}", error_chain(.0.as_ref()))]
    Api(#[source] Cause),
    /// There is no such container.
    #[error("DaemonSet {NAME} has no container {NAME}")]
    NoContainer,
}

impl Successor {
    /// Asks nobody yet; `None` outside of a pod.
    pub fn new(client: Client) -> Option<Self> {
        let namespace = std::fs::read_to_string(Path::new(NAMESPACE)).ok()?;
        Some(Self { daemon_sets: Api::namespaced(client, namespace.trim()) })
    }

    /// The image that the DaemonSet runs now, if it is Kilo's own.
    ///
    /// # Errors
    /// When there is no answer within three seconds; also when the DaemonSet is gone.
    pub async fn kilos(&self) -> Result<Option<String>, SuccessorError> {
        let asked = tokio::time::timeout(PATIENCE, image(&self.daemon_sets)).await;
        let image = asked.map_err(|_| SuccessorError::Api("the API server does not answer".into()))??;
        Ok(is_kilos(&image).then_some(image))
    }
}

async fn image(daemon_sets: &Api<DaemonSet>) -> Result<String, SuccessorError> {
    let found = daemon_sets.get(NAME).await.map_err(|error| match &error {
        kube::Error::Api(status) if status.code == 403 => SuccessorError::Forbidden(error.into()),
        _ => SuccessorError::Api(error.into()),
    })?;
    let pod = found.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
    let container = pod.containers.into_iter().find(|container| container.name == NAME);
    container.and_then(|container| container.image).ok_or(SuccessorError::NoContainer)
}

/// By its name alone: neither a mistyped image nor a mirror of ours may leave a host without
/// programs.
fn is_kilos(image: &str) -> bool {
    let image = image.split('@').next().unwrap_or(image);
    // A colon before a slash is that of a registry's port.
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
