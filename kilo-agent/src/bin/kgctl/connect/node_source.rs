//! The source of nodes, and the store of this machine's Peer.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result, bail};
use kilo_agent::backend::{Backend as _, file::FileBackend, kubernetes};
use kilo_core::{
    errors::error_chain,
    objects::{Snapshot, peer},
    topology::{Mesh, Peer},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use tokio::sync::watch::Receiver;

use crate::{
    cluster::Cluster,
    refusal::Asked,
    source::{self, Flags},
};

/// Label of Peer objects that are deleted with the connection.
const MANAGED: (&str, &str) = ("app.kubernetes.io/managed-by", "kgctl-connect");

/// The API server, or a directory of files.
pub enum Origin {
    Kubernetes {
        cluster: Box<Cluster>,
        backend: Box<kubernetes::KubernetesBackend>,
        peers: Box<Api<peer::Peer>>,
    },
    File(FileBackend),
}

impl Origin {
    /// Reads everything once, so that a refusal is reported here and not by a watch.
    pub async fn start(flags: &Flags) -> Result<Self> {
        let label = &flags.mesh.shape.topology_label;
        if let Some(directory) = source::directory(flags)? {
            return Ok(Self::File(FileBackend::start(directory, label).await?));
        }
        let cluster = Cluster::open(&flags.mesh.api).await?;
        // First a plain list, whose refusal says more than that of a watch.
        cluster.snapshot(label).await?;
        let client = cluster.client.clone();
        let backend = kubernetes::KubernetesBackend::start(client.clone(), None, label).await?;
        Ok(Self::Kubernetes {
            cluster: Box::new(cluster),
            backend: Box::new(backend),
            peers: Box::new(Api::all(client)),
        })
    }

    /// The current objects, and each change.
    pub fn watch(&self) -> Receiver<Arc<Snapshot>> {
        match self {
            Self::Kubernetes { backend, .. } => backend.watch(),
            Self::File(backend) => backend.watch(),
        }
    }

    /// Whether there is a Peer object of this name, valid or not.
    pub async fn has_peer(&self, name: &str) -> Result<bool> {
        Ok(match self {
            Self::File(backend) => backend.watch().borrow().peers.contains_key(name),
            Self::Kubernetes { cluster, peers, .. } => {
                cluster.ask(Asked::new("get", "peers"), peers.get_opt(name)).await?.is_some()
            }
        })
    }

    /// The existing Peer object, or a new one made from `wanted`, if that overlaps nothing of `mesh`.
    pub async fn ensure(&self, wanted: &Peer, mesh: &Mesh) -> Result<Peer> {
        let found = match self {
            Self::File(backend) => {
                let found = backend.watch().borrow().peers.get(&wanted.name).cloned();
                found.with_context(|| {
                    let object = serde_yaml_ng::to_string(&peer::to_object(wanted)).unwrap_or_default();
                    format!("there is no Peer of that name; put it into the directory:\n{object}")
                })?
            }
            Self::Kubernetes { cluster, peers, .. } => match cluster
                .ask(Asked::new("get", "peers"), peers.get_opt(&wanted.name))
                .await?
            {
                Some(object) => peer::from_object(&object)
                    .with_context(|| format!("Peer {:?} is invalid", wanted.name))?,
                None => {
                    check_free(wanted, &self.watch().borrow().peers, mesh)?;
                    let mut object = peer::to_object(wanted);
                    let label = (MANAGED.0.to_owned(), MANAGED.1.to_owned());
                    object.metadata.labels = Some([label].into());
                    let parameters = PostParams::default();
                    cluster.ask(Asked::new("create", "peers"), peers.create(&parameters, &object)).await?;
                    let address = wanted.allowed_ips.first().map(ToString::to_string);
                    tracing::info!(peer = wanted.name, address, "created Peer object: it did not exist");
                    wanted.clone()
                }
            },
        };
        if found.public_key != wanted.public_key {
            bail!(
                "Peer {:?} exists with another key; give its private key with --private-key, or choose another name",
                wanted.name
            );
        }
        if wanted.follows == found.follows {
            return Ok(found);
        }
        // An annotation left by another run determines where nodes send: it must match what this machine
        // does, either way.
        if let Err(error) = self.annotate(&wanted.name, wanted.follows).await {
            tracing::warn!(
                "{}; until then this machine and nodes may use different gateways",
                error_chain(error.as_ref())
            );
            return Ok(found);
        }
        Ok(Peer { follows: wanted.follows && matches!(self, Self::Kubernetes { .. }), ..found })
    }

    /// Records in the Peer object whether this machine follows gateways.
    pub async fn annotate(&self, name: &str, follows: bool) -> Result<()> {
        let Self::Kubernetes { cluster, peers, .. } = self else {
            let annotation = peer::FOLLOWS;
            if follows {
                tracing::warn!("add the annotation {annotation}=true to Peer {name} in the directory");
            } else {
                tracing::warn!("remove the annotation {annotation} from Peer {name} in the directory");
            }
            return Ok(());
        };
        let patch =
            serde_json::json!({"metadata": {"annotations": {peer::FOLLOWS: follows.then_some("true")}}});
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let patched = peers.patch_metadata(name, &parameters, &patch);
        cluster.ask(Asked::new("patch", "peers"), patched).await.map(drop)
    }

    /// Deletes the Peer object if this command created it; otherwise removes the annotation for following.
    pub async fn release(&self, wanted: &Peer) -> Result<()> {
        let Self::Kubernetes { cluster, peers, .. } = self else { return Ok(()) };
        let read = cluster.ask(Asked::new("get", "peers"), peers.get_opt(&wanted.name)).await?;
        let Some(object) = read else { return Ok(()) };
        let label = object.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED.0));
        let ours = label.is_some_and(|label| label == MANAGED.1)
            && object.spec.public_key.trim() == wanted.public_key.to_string();
        if ours {
            // Spares one that has been recreated meanwhile.
            let preconditions = Preconditions { uid: object.metadata.uid, resource_version: None };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            cluster.ask(Asked::new("delete", "peers"), peers.delete(&wanted.name, &parameters)).await?;
        } else if object.annotations().contains_key(peer::FOLLOWS) {
            self.annotate(&wanted.name, false).await?;
        }
        Ok(())
    }
}

/// Refuses an address that another Peer has, of which only the first by name would work, and one that nodes, their
/// pods or locations have.
fn check_free(wanted: &Peer, peers: &BTreeMap<String, Peer>, mesh: &Mesh) -> Result<()> {
    if let Some(owner) = wanted.allowed_ips.iter().find_map(|prefix| mesh.owner_of(*prefix)) {
        bail!("{owner}; give this machine an address of its own with --allowed-ip");
    }
    for peer in peers.values().filter(|peer| peer.name != wanted.name) {
        if let Some(taken) = wanted.allowed_ips.iter().find(|prefix| peer.allowed_ips.contains(prefix)) {
            bail!(
                "{} belongs to Peer {:?} already; give this machine an address of its own with --allowed-ip",
                taken.addr(),
                peer.name
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kilo_core::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    use super::*;

    #[test]
    fn an_address_that_a_peer_or_a_node_has_is_refused_with_its_owner() {
        let node = Node {
            name: "a1".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.1.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.1.0/24".parse().unwrap()],
            ..Node::default()
        };
        let peer = |name: &str, allowed_ip: &str| Peer {
            name: name.to_owned(),
            allowed_ips: vec![allowed_ip.parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([9; 32]),
            follows: false,
        };
        let peers = BTreeMap::from([("phone".to_owned(), peer("phone", "10.5.0.1/32"))]);
        let mesh = Mesh::new([&node], &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let refusal = |allowed_ip: &str| {
            check_free(&peer("laptop", allowed_ip), &peers, &mesh).err().map(|error| error.to_string())
        };
        assert_eq!(refusal("10.5.0.2/32"), None);
        for (taken, words) in [
            ("10.5.0.1/32", "10.5.0.1 belongs to Peer \"phone\" already"),
            ("10.1.0.1/32", "10.1.0.1/32 is the private address of node a1"),
            ("10.42.1.7/32", "10.42.1.7/32 lies in 10.42.1.0/24, the pod CIDR of node a1"),
            ("10.4.0.7/32", "10.4.0.7/32 lies in 10.4.0.0/16, the subnet of WireGuard addresses"),
        ] {
            let said = refusal(taken).unwrap_or_default();
            assert!(said.starts_with(words) && said.contains("--allowed-ip"), "{taken}: {said}");
        }
    }
}
