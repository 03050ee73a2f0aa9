//! Who comes after this agent: the image the DaemonSet names now.

use std::{path::Path, time::Duration};

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, Client};

use kilo_core::objects::error_chain;

/// The namespace of this pod, as the kubelet writes it.
const NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// The DaemonSet and its container, in our manifests as in Kilo's.
const NAME: &str = "kilo";
/// A stop waits no longer than this for an answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What is asked when the agent is told to stop.
pub struct Successor {
    daemon_sets: Api<DaemonSet>,
    own: String,
}

impl std::fmt::Debug for Successor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Successor").field("own", &self.own).finish_non_exhaustive()
    }
}

/// Why nobody can tell.
#[derive(Debug, thiserror::Error)]
pub enum SuccessorError {
    /// Asking is forbidden, or the API server does not answer.
    #[error("{0}")]
    Api(String),
    /// There is no such container.
    #[error("DaemonSet {NAME} has no container {NAME}")]
    NoContainer,
}

impl Successor {
    /// Learns the image that this agent runs from; `None` outside of a pod.
    ///
    /// # Errors
    /// When the DaemonSet may not be read: Kilo's own ClusterRole does not have the right.
    pub async fn learn(client: Client) -> Result<Option<Self>, SuccessorError> {
        let Ok(namespace) = std::fs::read_to_string(Path::new(NAMESPACE)) else { return Ok(None) };
        let daemon_sets = Api::namespaced(client, namespace.trim());
        let own = repository(&image(&daemon_sets).await?).to_owned();
        Ok(Some(Self { daemon_sets, own }))
    }

    /// The image of another program, when that is what the DaemonSet runs now.
    ///
    /// # Errors
    /// When there is no answer; also when the DaemonSet is gone.
    pub async fn other(&self) -> Result<Option<String>, SuccessorError> {
        let asked = image(&self.daemon_sets);
        let image = tokio::time::timeout(PATIENCE, asked).await;
        let image = image.map_err(|_| SuccessorError::Api("the API server does not answer".to_owned()))??;
        Ok((repository(&image) != self.own).then_some(image))
    }
}

async fn image(daemon_sets: &Api<DaemonSet>) -> Result<String, SuccessorError> {
    let found = daemon_sets.get(NAME).await.map_err(|error| SuccessorError::Api(error_chain(&error)))?;
    let pod = found.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
    let container = pod.containers.into_iter().find(|container| container.name == NAME);
    container.and_then(|container| container.image).ok_or(SuccessorError::NoContainer)
}

/// An image's name without tag and digest.
fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    // A colon before a slash is that of a registry's port.
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name.strip_prefix("docker.io/").unwrap_or(name),
        _ => image.strip_prefix("docker.io/").unwrap_or(image),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_digests_make_no_other_image() {
        for (image, expected) in [
            ("kilo-ebpf/kilo:0.1.0", "kilo-ebpf/kilo"),
            ("docker.io/kilo-ebpf/kilo", "kilo-ebpf/kilo"),
            ("registry:5000/kilo", "registry:5000/kilo"),
            ("registry:5000/kilo:1@sha256:abc", "registry:5000/kilo"),
            ("squat/kilo:0.7.0", "squat/kilo"),
        ] {
            assert_eq!(repository(image), expected);
        }
    }
}
