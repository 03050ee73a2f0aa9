//! Node and Peer objects of a Kubernetes API server. Only what the topology
//! needs is kept of each object.

mod cache;
mod client;
mod declare_dead;
mod event;
#[cfg(test)]
mod idle_watch;
mod kubeconfig;
mod network;
mod partial_node;
mod pauses;
mod peer_status;
mod proxy;
pub mod read_once;
#[cfg(feature = "agent")]
mod slices;
#[cfg(feature = "agent")]
mod startup_fallback;
#[cfg(feature = "agent")]
mod successor;
#[cfg(test)]
mod test_server;
mod watch_errors;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams},
    core::ObjectMeta,
    runtime::watcher,
};
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

pub use client::{ANSWER, Server, client, connect};
pub use kubeconfig::{Access, Names, cluster_name, names};
#[cfg(feature = "agent")]
pub use startup_fallback::StartupFallback;
#[cfg(feature = "agent")]
pub use successor::{Successor, SuccessorError, own_namespace};

use self::{
    cache::{Arrived, Cache, Kept, Own, Seen, Store, Urgency, version},
    client::{Asked, counted, in_time},
    partial_node::PartialNode,
    pauses::with_pauses,
    watch_errors::WatchErrors,
};
#[cfg(feature = "agent")]
use super::SlicesReport;
use super::{
    Backend, BackendError, Handshake, Happened, PeersReported, TunnelStatus,
    mass_delete_guard::MassDeleteGuard,
};
use kilo_core::{
    errors::Explained,
    objects::{Published, Snapshot, annotations, node, peer, slices::longest_start},
    topology::PeerAcceptances,
};

/// How long to wait for a second list after one that lost many objects.
const CONFIRM_AFTER: Duration = Duration::from_secs(5);
/// Regular heartbeats are collected for this long: each node sends one every 30 s.
const COLLECT: Duration = Duration::from_secs(5);
/// Minimum time between two snapshots.
const PACE: Duration = Duration::from_millis(50);
/// The start fails unless all lists are complete within this time, and [`longest_start`] of the mesh.
const LISTED: Duration = Duration::from_secs(60);

struct Shared {
    hostname: Option<String>,
    cache: Mutex<Cache>,
    /// Signalled when a change is to be forwarded: `now` at once, `later` after a pause.
    now: Notify,
    later: Notify,
    /// Signalled when everything has been listed for the first time.
    listed: Notify,
    /// How often the API server has answered.
    answers: watch::Receiver<u64>,
    /// Signalled when the API server's history has begun anew, so that everything is to be listed again.
    restored: watch::Sender<()>,
    /// Nodes that the API server had when this agent started.
    expected: usize,
    errors: WatchErrors,
}

/// The Kubernetes backend. Dropping it ends its watches; should one of them
/// fail for good, the receivers of snapshots are closed.
pub struct KubernetesBackend {
    nodes: Api<core::Node>,
    peers: Api<DynamicObject>,
    client: Client,
    shared: Arc<Shared>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    #[cfg(feature = "agent")]
    slices: Option<Arc<slices::Report>>,
    _watches: AbortOnDropHandle<()>,
}

/// Source of the list of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodesFrom {
    /// Node objects.
    Nodes,
    /// Slices, where possible; this agent may also write them.
    #[cfg(feature = "agent")]
    Slices {
        /// The namespace of the writer's Lease.
        namespace: String,
    },
}

impl KubernetesBackend {
    /// Starts watching and waits until everything has been listed once.
    /// `hostname`: the node this agent publishes for.
    ///
    /// # Errors
    /// When the API server refuses the first lists (missing rights, missing
    /// CRD) or is out of reach; see [`BackendError::is_temporary`].
    pub async fn start(
        client: Client,
        hostname: Option<&str>,
        topology_label: &str,
    ) -> Result<Self, BackendError> {
        Self::start_from(client, hostname, topology_label, &NodesFrom::Nodes).await
    }

    /// [`Self::start`], optionally with slices, which need a `hostname`.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub async fn start_from(
        client: Client,
        hostname: Option<&str>,
        topology_label: &str,
        from: &NodesFrom,
    ) -> Result<Self, BackendError> {
        let (client, answers) = counted(client);
        let nodes: Api<PartialNode> = Api::all_with(client.clone(), &ApiResource::erase::<core::Node>(&()));
        // Untyped, so that one malformed object does not hide the others.
        let peers: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<peer::Peer>(&()));
        let one = ListParams::default().limit(1);
        let first = in_time(nodes.list(&one), Asked::Nodes).await?;
        let more = first.metadata.remaining_item_count.unwrap_or(0);
        in_time(peers.list(&one), Asked::Peers).await?;
        let shared = Arc::new(Shared {
            hostname: hostname.map(ToOwned::to_owned),
            cache: Mutex::default(),
            now: Notify::new(),
            later: Notify::new(),
            listed: Notify::new(),
            answers,
            restored: watch::Sender::default(),
            expected: first.items.len() + usize::try_from(more).unwrap_or(0),
            errors: WatchErrors::default(),
        });
        let (sender, snapshots) = watch::channel(Arc::default());
        let mut tasks = JoinSet::new();
        #[cfg(feature = "agent")]
        let mut report = None;
        match (from, hostname) {
            #[cfg(feature = "agent")]
            (NodesFrom::Slices { namespace }, Some(hostname)) => {
                let place = (client.clone(), namespace.clone());
                let report = Arc::clone(report.get_or_insert_default());
                let context =
                    slices::Context::new(place, hostname, topology_label, Arc::clone(&shared), report);
                tasks.spawn(slices::run(context));
            }
            _ => {
                let (label, own) = (topology_label.to_owned(), Arc::clone(&shared));
                let node = move |object, arrived| own.see_node(object, &label, arrived);
                tasks.spawn(follow(nodes, Asked::Nodes, Arc::clone(&shared), node, |cache| &mut cache.nodes));
            }
        }
        let own = Arc::clone(&shared);
        let peer = move |object, _| own.see_peer(object);
        tasks.spawn(follow(peers.clone(), Asked::Peers, Arc::clone(&shared), peer, |cache| &mut cache.peers));
        tasks.spawn(hand_on(Arc::clone(&shared), sender));
        // A task ends only by a panic; then all of them end, and the sender is dropped.
        let watches = tokio::spawn(async move { drop(tasks.join_next().await) });
        let watches = AbortOnDropHandle::new(watches);
        let mut ended = snapshots.clone();
        let limit = LISTED + longest_start(shared.expected);
        let listed = tokio::time::timeout(limit, async {
            tokio::select! {
                () = shared.listed.notified() => true,
                () = async { while ended.changed().await.is_ok() {} } => false,
            }
        });
        match listed.await {
            Ok(true) => Ok(Self {
                nodes: Api::all(client.clone()),
                peers,
                client,
                shared,
                snapshots,
                #[cfg(feature = "agent")]
                slices: report,
                _watches: watches,
            }),
            Ok(false) => Err(BackendError::Api("a watch has failed for good; see the log".into())),
            Err(elapsed) => {
                let text = format!("nodes and peers were not listed within {} s", limit.as_secs());
                Err(BackendError::Unreachable(Explained::of(text, elapsed)))
            }
        }
    }

    async fn patch(
        &self,
        node: &str,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<(), BackendError> {
        let patch = Patch::Merge(serde_json::json!({ "metadata": { "annotations": annotations } }));
        let parameters = PatchParams { field_manager: Some("kilo".to_owned()), ..PatchParams::default() };
        let known = self.shared.cache().own_version();
        let patched = self.nodes.patch_metadata(node, &parameters, &patch);
        let object = in_time(patched, Asked::Patch(node)).await?;
        // Recorded at once, so that the next reconcile does not write the same again.
        self.shared.see_patched(&object.metadata, known);
        Ok(())
    }
}

/// Removes from a node what an agent published: its annotations, and the condition NetworkUnavailable, which
/// would otherwise keep pods off the node forever, or report forever that Kilo is up. Needs the right to
/// patch that node and its status only, as its kubelet has it.
///
/// # Errors
/// When the API server refuses or is out of reach. A node that does not exist is not an error.
pub async fn retract(client: Client, node: &str) -> Result<(), BackendError> {
    let nodes: Api<core::Node> = Api::all(client);
    let patch = Patch::Merge(serde_json::json!({ "metadata": { "annotations": annotations::retracted() } }));
    // The patch returns the whole object, so the right to get it is not needed.
    match in_time(nodes.patch(node, &PatchParams::default(), &patch), Asked::Patch(node)).await {
        Ok(object) => network::retract(&nodes, &object).await,
        Err(BackendError::NoSuchNode(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes only a node's failover annotations.
///
/// # Errors
/// Those of [`retract`].
pub async fn retract_failover(client: Client, node: &str) -> Result<(), BackendError> {
    remove(client, node, &annotations::without_failover()).await
}

/// Removes only the endpoints that a node's WireGuard has discovered.
///
/// # Errors
/// Those of [`retract`].
pub async fn retract_discovered_endpoints(client: Client, node: &str) -> Result<(), BackendError> {
    remove(client, node, &[(annotations::DISCOVERED_ENDPOINTS.to_owned(), None)].into()).await
}

async fn remove(
    client: Client,
    node: &str,
    annotations: &BTreeMap<String, Option<String>>,
) -> Result<(), BackendError> {
    let patch = Patch::Merge(serde_json::json!({ "metadata": { "annotations": annotations } }));
    let nodes: Api<core::Node> = Api::all(client);
    match in_time(nodes.patch_metadata(node, &PatchParams::default(), &patch), Asked::Patch(node)).await {
        Err(BackendError::NoSuchNode(_)) => Ok(()),
        other => other.map(drop),
    }
}

/// Follows one resource forever. A list that suddenly misses many objects is believed only when a second one
/// confirms it.
async fn follow<K, T: Kept>(
    api: Api<K>,
    asked: Asked<'static>,
    shared: Arc<Shared>,
    see: impl Fn(K, Arrived) -> Seen<T>,
    store: fn(&mut Cache) -> &mut Store<T>,
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let name = |object: &K| object.meta().name.clone().unwrap_or_default();
    let mut guard = MassDeleteGuard::default();
    // Objects already known, for example from slices, must not vanish because of one list either.
    let known: BTreeSet<String> =
        T::names(store(&mut shared.cache()).values()).map(ToOwned::to_owned).collect();
    if !known.is_empty() {
        guard.list(&known);
    }
    loop {
        let bytes = move |cache: &mut Cache| store(cache).bytes();
        let api = api.clone();
        let watch = move || watcher(api.clone(), watcher::Config::default());
        let stream = with_pauses(watch, &shared, bytes);
        pin_mut!(stream);
        // Translated at once, so that only one page of whole objects is held at a time.
        let mut listed: Vec<Seen<T>> = Vec::new();
        while let Some(event) = stream.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(object)) => listed.push(see(object, Arrived::Listed)),
                Ok(watcher::Event::InitDone) => {
                    let names = listed.iter().map(|seen| seen.name.clone()).collect();
                    let keep = guard.list(&names);
                    shared.change(|cache| store(cache).replace(std::mem::take(&mut listed), keep));
                    if !keep.is_empty() {
                        tracing::warn!(
                            missing = keep.len(),
                            "a list of {}s has far fewer objects than are cached; keeping the missing ones until a second list \
                             confirms that they are gone",
                            T::KIND
                        );
                        break;
                    }
                }
                Ok(watcher::Event::Apply(object)) => {
                    let seen = see(object, Arrived::Reported);
                    guard.add(&seen.name);
                    shared.change(|cache| store(cache).put(seen));
                }
                Ok(watcher::Event::Delete(object)) => {
                    guard.remove(&name(&object));
                    shared.change(|cache| store(cache).remove(&name(&object)));
                }
                Err(error) => shared.errors.report(error, asked),
            }
        }
        tokio::time::sleep(CONFIRM_AFTER).await;
    }
}

/// Forwards snapshots: at once after a change, a little later after a mere heartbeat, and never so often that
/// it costs much.
async fn hand_on(shared: Arc<Shared>, sender: watch::Sender<Arc<Snapshot>>) {
    let collected = async || {
        shared.later.notified().await;
        tokio::time::sleep(COLLECT).await;
    };
    loop {
        tokio::select! {
            () = shared.now.notified() => {}
            () = collected() => {}
        }
        let started = Instant::now();
        let snapshot = shared.cache().snapshot();
        if let Some(snapshot) = snapshot {
            sender.send_if_modified(|current| {
                let differs = **current != snapshot;
                if differs {
                    *current = Arc::new(snapshot);
                }
                differs
            });
            shared.listed.notify_one();
        }
        // With 10,000 nodes a snapshot costs milliseconds: at most 5 % of a core.
        tokio::time::sleep(PACE.max(started.elapsed() * 20)).await;
    }
}

fn see_node(object: PartialNode, label: &str) -> Seen<kilo_core::topology::CheckedIn> {
    let (seen, problems) = node::from_object(&object.into(), label);
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    Seen { name: seen.node.name.clone(), value: Some(seen), problem }
}

fn see_peer(object: DynamicObject) -> Seen<kilo_core::topology::Peer> {
    let name = object.metadata.name.clone().unwrap_or_default();
    match peer::parse(object) {
        Ok(peer) => Seen { name, value: Some(peer), problem: None },
        Err(problem) => Seen { name, value: None, problem: Some(problem) },
    }
}

impl Shared {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock()
    }

    /// Nodes of the mesh, also before they have been listed.
    fn size(&self) -> usize {
        self.cache().nodes.values().len().max(self.expected)
    }

    fn change(&self, change: impl FnOnce(&mut Cache) -> Urgency) {
        let urgency = change(&mut self.cache());
        match urgency {
            Urgency::Never => {}
            Urgency::Later => self.later.notify_one(),
            Urgency::Now => self.now.notify_one(),
        }
    }

    fn see_node(
        &self,
        object: PartialNode,
        label: &str,
        arrived: Arrived,
    ) -> Seen<kilo_core::topology::CheckedIn> {
        self.see_own(object.meta(), arrived);
        see_node(object, label)
    }

    fn see_peer(&self, object: DynamicObject) -> Seen<kilo_core::topology::Peer> {
        if let Some(name) = &object.metadata.name {
            self.cache().peers.note(name, peer_status::note(&object));
        }
        see_peer(object)
    }

    /// Takes the answer to a patch of this node that was sent when its object was `known` to have that version.
    /// Versions only grow, unless etcd was restored from a backup: watches that go on from a version of before
    /// then show nothing, without an error, until the new history has got there.
    fn see_patched(&self, metadata: &ObjectMeta, known: Option<u64>) {
        let is_restored = known.zip(version(metadata)).is_some_and(|(known, now)| now < known);
        if !is_restored {
            return self.see_own(metadata, Arrived::Reported);
        }
        tracing::warn!(
            "the API server's resource versions went back, as after a restore of etcd from a backup; listing \
             everything again"
        );
        self.see_own(metadata, Arrived::Listed);
        self.restored.send_replace(());
    }

    fn see_own(&self, metadata: &ObjectMeta, arrived: Arrived) {
        if self.hostname.is_some() && self.hostname == metadata.name {
            self.cache().put_own(Own::new(metadata), arrived);
        }
    }
}

impl Backend for KubernetesBackend {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        let changes = {
            let cache = self.shared.cache();
            let own = self.shared.hostname.as_deref() == Some(node) && cache.nodes.contains(node);
            let present = cache.own().filter(|_| own);
            let present = present.ok_or_else(|| BackendError::NoSuchNode(node.to_owned()))?;
            annotations::changes(present, annotations::wanted(published))
        };
        if changes.is_empty() {
            return Ok(false);
        }
        self.patch(node, &changes).await?;
        Ok(true)
    }

    async fn report_peers(&self, peers: &PeerAcceptances) -> Result<PeersReported, BackendError> {
        peer_status::report(&self.client, &self.peers, peers).await
    }

    fn tunnel_status(&self, peer: &str) -> Option<TunnelStatus> {
        self.shared.cache().peers.note_of(peer).map(|note| note.tunnels)
    }

    async fn report_handshake(&self, peer: &str, handshake: &Handshake) -> Result<bool, BackendError> {
        let version = self.shared.cache().peers.note_of(peer).map(|note| note.version.clone());
        match version {
            Some(version) => peer_status::write_handshake(&self.peers, peer, &version, handshake).await,
            None => Ok(false),
        }
    }

    async fn declare_dead(&self, node: &str, last_seen: i64) -> Result<bool, BackendError> {
        declare_dead::write(&self.nodes, node, last_seen).await
    }

    async fn report_network(&self, node: &str, available: bool) -> Result<(), BackendError> {
        network::report(&self.nodes, node, available).await
    }

    #[cfg(feature = "agent")]
    fn slices(&self) -> Option<SlicesReport> {
        self.slices.as_ref().map(|report| report.read())
    }

    async fn event(&self, happened: &Happened) -> Result<(), BackendError> {
        event::write(&self.client, &happened.object, happened).await
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        self.patch(node, &annotations::retracted()).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{test_server::Answer, *};

    /// etcd was restored from a backup, and versions are lower than before.
    #[tokio::test]
    async fn a_list_of_nodes_brings_the_own_annotations_whatever_their_version() {
        let client = test_server::client(|asked| {
            if asked.watches() {
                return Answer::Silence;
            }
            let annotations = serde_json::json!({ "kilo.squat.ai/location": "restored" });
            let node = serde_json::json!({
                "metadata": { "name": "a", "resourceVersion": "5", "annotations": annotations },
            });
            let list = serde_json::json!({ "metadata": { "resourceVersion": "6" }, "items": [node] });
            Answer::Object(200, list)
        });
        let (shared, _answered) = test_server::shared("a");
        let known = ObjectMeta {
            name: Some("a".to_owned()),
            resource_version: Some("1000".to_owned()),
            ..ObjectMeta::default()
        };
        shared.see_own(&known, Arrived::Reported);
        let nodes: Api<PartialNode> = Api::all_with(client, &ApiResource::erase::<core::Node>(&()));
        let own = Arc::clone(&shared);
        let see = move |object, arrived| own.see_node(object, "l", arrived);
        let follow = follow(nodes, Asked::Nodes, Arc::clone(&shared), see, |cache| &mut cache.nodes);
        let _following = AbortOnDropHandle::new(tokio::spawn(follow));
        tokio::time::timeout(Duration::from_secs(10), shared.now.notified()).await.unwrap();
        assert_eq!(shared.cache().own().unwrap()["kilo.squat.ai/location"], "restored");
    }

    /// Watches that go on from a version of before the restore show nothing.
    #[tokio::test]
    async fn versions_that_go_back_have_everything_listed_again() {
        let restored = Arc::new(AtomicBool::new(false));
        let is_restored = Arc::clone(&restored);
        let client = test_server::client(move |asked| {
            let (version, location) =
                if is_restored.load(Ordering::Relaxed) { ("5", "restored") } else { ("1000", "before") };
            let annotations = serde_json::json!({ "kilo.squat.ai/location": location });
            let node = serde_json::json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": { "name": "a", "resourceVersion": version, "annotations": annotations },
            });
            match asked.method.as_str() {
                _ if asked.watches() => Answer::Silence,
                "PATCH" => Answer::Object(200, node),
                _ => {
                    let items = if asked.path.ends_with("/nodes") { vec![node] } else { Vec::new() };
                    let list =
                        serde_json::json!({ "metadata": { "resourceVersion": version }, "items": items });
                    Answer::Object(200, list)
                }
            }
        });
        let backend = KubernetesBackend::start(client, Some("a"), "l").await.unwrap();
        let mut snapshots = backend.watch();
        assert_eq!(snapshots.borrow().nodes["a"].location, "before");
        assert!(backend.publish("a", &Published::default()).await.unwrap());
        restored.store(true, Ordering::Relaxed);
        backend.publish("a", &Published { last_seen: 1, ..Published::default() }).await.unwrap();
        let listed = snapshots.wait_for(|snapshot| snapshot.nodes["a"].location == "restored");
        tokio::time::timeout(Duration::from_secs(10), listed).await.unwrap().unwrap();
    }
}
