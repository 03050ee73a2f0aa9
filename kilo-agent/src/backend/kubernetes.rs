//! Node and Peer objects of a Kubernetes API server. Only what the topology
//! needs is kept of each object.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client, Config,
    api::{Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::sync::watch;

use super::{Backend, BackendError, Published, Snapshot, confirm::Confirmed, node, peer};

/// How long a list that lost many objects waits for its confirmation.
const CONFIRM_AFTER: Duration = Duration::from_secs(5);

/// Connects as flags say: `--kubeconfig`, `--master`, else in-cluster or the
/// user's own configuration.
///
/// # Errors
/// Names the file and what is wrong with it.
pub async fn client(kubeconfig: Option<&Path>, master: Option<&str>) -> Result<Client, BackendError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let failed = |error: &dyn std::fmt::Display| {
                BackendError::Config(format!("--kubeconfig {}: {error}", path.display()))
            };
            let file = Kubeconfig::read_from(path).map_err(|error| failed(&error))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|error| failed(&error))?
        }
        None => Config::infer().await.map_err(|error| {
            BackendError::Config(format!(
                "no way to the Kubernetes API ({error}); run in a pod or give --kubeconfig"
            ))
        })?,
    };
    if let Some(master) = master {
        config.cluster_url =
            master.parse().map_err(|error| BackendError::Config(format!("--master {master:?}: {error}")))?;
    }
    Client::try_from(config).map_err(|error| BackendError::Config(error.to_string()))
}

/// Says what an API error means for the operator.
fn explain(error: &kube::Error) -> BackendError {
    BackendError::Api(match error {
        kube::Error::Api(status) if status.is_forbidden() => {
            format!("{}; apply the ClusterRole of manifests/", status.message)
        }
        kube::Error::Api(status) if status.is_not_found() && status.message.contains("page not found") => {
            "the Peer resource is unknown to the API server; run: kubectl apply -f manifests/crds.yaml"
                .to_owned()
        }
        other => other.to_string(),
    })
}

#[derive(Default)]
struct Cache {
    snapshot: Snapshot,
    node_problems: BTreeMap<String, String>,
    peer_problems: BTreeMap<String, String>,
    /// Our annotations of the own node, as the API server has them.
    own: Option<BTreeMap<String, String>>,
    nodes_listed: bool,
    peers_listed: bool,
}

struct Shared {
    label: String,
    hostname: Option<String>,
    cache: Mutex<Cache>,
    sender: watch::Sender<Arc<Snapshot>>,
}

/// The Kubernetes backend.
pub struct KubernetesBackend {
    nodes: Api<core::Node>,
    shared: Arc<Shared>,
    tasks: Vec<tokio::task::AbortHandle>,
}

impl Drop for KubernetesBackend {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl KubernetesBackend {
    /// Starts watching and waits until everything has been listed once.
    /// `hostname`: the node this agent publishes for.
    ///
    /// # Errors
    /// When the API server refuses the first lists (missing rights, missing CRD).
    pub async fn start(
        client: Client,
        hostname: Option<&str>,
        topology_label: &str,
    ) -> Result<Self, BackendError> {
        let nodes: Api<core::Node> = Api::all(client.clone());
        let peers: Api<peer::Peer> = Api::all(client);
        let one = kube::api::ListParams::default().limit(1);
        nodes.list(&one).await.map_err(|error| explain(&error))?;
        peers.list(&one).await.map_err(|error| explain(&error))?;
        let (sender, mut receiver) = watch::channel(Arc::new(Snapshot::default()));
        let shared = Arc::new(Shared {
            label: topology_label.to_owned(),
            hostname: hostname.map(ToOwned::to_owned),
            cache: Mutex::default(),
            sender,
        });
        let tasks = vec![
            tokio::spawn(follow(nodes.clone(), Arc::clone(&shared), Shared::put_nodes, Shared::put_node))
                .abort_handle(),
            tokio::spawn(follow(peers, Arc::clone(&shared), Shared::put_peers, Shared::put_peer))
                .abort_handle(),
        ];
        let backend = Self { nodes, shared, tasks };
        let _ = receiver.changed().await;
        Ok(backend)
    }
}

/// One object, or its name when it was deleted.
enum One<K> {
    Applied(K),
    Deleted(String),
}

/// Follows one resource for ever. A list that suddenly misses many objects is
/// believed only when a second one says the same.
async fn follow<K>(api: Api<K>, shared: Arc<Shared>, all: fn(&Shared, Vec<K>), one: fn(&Shared, One<K>))
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let name = |object: &K| object.meta().name.clone().unwrap_or_default();
    let mut confirmed = Confirmed::default();
    loop {
        let stream = watcher(api.clone(), watcher::Config::default()).default_backoff();
        pin_mut!(stream);
        let mut listed: Vec<K> = Vec::new();
        while let Some(event) = stream.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(object)) => listed.push(object),
                Ok(watcher::Event::InitDone) => {
                    if confirmed.believes(listed.iter().map(&name).collect()) {
                        all(&shared, std::mem::take(&mut listed));
                    } else {
                        tracing::warn!("a list misses many objects; asking again before believing it");
                        break;
                    }
                }
                Ok(watcher::Event::Apply(object)) => {
                    confirmed.add(name(&object));
                    one(&shared, One::Applied(object));
                }
                Ok(watcher::Event::Delete(object)) => {
                    confirmed.remove(&name(&object));
                    one(&shared, One::Deleted(name(&object)));
                }
                Err(error) => tracing::warn!(%error, "watch interrupted, retrying"),
            }
        }
        tokio::time::sleep(CONFIRM_AFTER).await;
    }
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut Cache)) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut cache);
        cache.snapshot.problems = cache
            .node_problems
            .iter()
            .chain(&cache.peer_problems)
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        if cache.nodes_listed && cache.peers_listed {
            let snapshot = cache.snapshot.clone();
            self.sender.send_if_modified(|current| {
                let differs = **current != snapshot;
                *current = Arc::new(snapshot);
                differs
            });
        }
    }

    fn put_nodes(&self, objects: Vec<core::Node>) {
        self.change(|cache| {
            cache.snapshot.nodes.clear();
            cache.node_problems.clear();
            cache.own = None;
            cache.nodes_listed = true;
            for object in objects {
                self.insert_node(cache, &object);
            }
        });
    }

    fn put_node(&self, event: One<core::Node>) {
        self.change(|cache| match event {
            One::Applied(object) => self.insert_node(cache, &object),
            One::Deleted(name) => {
                cache.snapshot.nodes.remove(&name);
                cache.node_problems.remove(&format!("node {name}"));
                if self.hostname.as_ref() == Some(&name) {
                    cache.own = None;
                }
            }
        });
    }

    fn insert_node(&self, cache: &mut Cache, object: &core::Node) {
        let (node, problems) = node::from_object(object, &self.label);
        if self.hostname.as_ref() == Some(&node.name) {
            cache.own = Some(object.metadata.annotations.clone().unwrap_or_default());
        }
        let label = format!("node {}", node.name);
        if problems.is_empty() {
            cache.node_problems.remove(&label);
        } else {
            cache.node_problems.insert(label, problems.join("; "));
        }
        cache.snapshot.nodes.insert(node.name.clone(), node);
    }

    fn put_peers(&self, objects: Vec<peer::Peer>) {
        self.change(|cache| {
            cache.snapshot.peers.clear();
            cache.peer_problems.clear();
            cache.peers_listed = true;
            for object in objects {
                insert_peer(cache, &object);
            }
        });
    }

    fn put_peer(&self, event: One<peer::Peer>) {
        self.change(|cache| match event {
            One::Applied(object) => insert_peer(cache, &object),
            One::Deleted(name) => {
                cache.snapshot.peers.remove(&name);
                cache.peer_problems.remove(&format!("peer {name}"));
            }
        });
    }
}

fn insert_peer(cache: &mut Cache, object: &peer::Peer) {
    let name = object.metadata.name.clone().unwrap_or_default();
    let label = format!("peer {name}");
    match peer::from_object(object) {
        Ok(peer) => {
            cache.peer_problems.remove(&label);
            cache.snapshot.peers.insert(name, peer);
        }
        Err(error) => {
            cache.snapshot.peers.remove(&name);
            cache.peer_problems.insert(label, error.to_string());
        }
    }
}

impl Backend for KubernetesBackend {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.shared.sender.subscribe()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        let present = self.shared.cache.lock().unwrap_or_else(PoisonError::into_inner).own.clone();
        let present = present.ok_or_else(|| BackendError::NoSuchNode(node.to_owned()))?;
        let changes = node::changes(&present, node::annotations(published));
        if changes.is_empty() {
            return Ok(false);
        }
        self.patch(node, &changes).await?;
        Ok(true)
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        self.patch(node, &node::retracted()).await
    }
}

impl KubernetesBackend {
    async fn patch(
        &self,
        node: &str,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<(), BackendError> {
        let patch = serde_json::json!({ "metadata": { "annotations": annotations } });
        let patched = self.nodes.patch_metadata(node, &PatchParams::default(), &Patch::Merge(&patch)).await;
        let object = patched.map_err(|error| explain(&error))?;
        // Known at once, so that the next reconcile does not write the same again.
        let mut cache = self.shared.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.own.is_some() {
            cache.own = object.metadata.annotations;
        }
        Ok(())
    }
}
