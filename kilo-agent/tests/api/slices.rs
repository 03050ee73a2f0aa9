//! Slices of the node list on a real API server: who writes them, who reads them, and how faults are
//! handled.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1 as core},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kilo_agent::backend::{
    Backend as _, SlicesReport,
    kubernetes::{self, KubernetesBackend, NodesFrom},
};
use kilo_core::{
    objects::{
        node,
        slices::{Entry, INDEX, Index, LEASE, NodeSlice, NodeSliceSpec, rank},
    },
    wireguard::key::PublicKey,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    accounts::{account, grant},
    api::{ADMIN, ApiServer, apply_crds, create_node, until, until_may},
    front::{Front, Manner, plain_kubeconfig},
    wait::task as wait,
};

pub(crate) const LABEL: &str = "topology.kubernetes.io/region";
/// Time within which a change is known everywhere.
const SOON: Duration = Duration::from_secs(5);
/// Time within which a writer is replaced.
const REPLACED: Duration = Duration::from_secs(40);

pub(crate) fn now() -> i64 {
    kilo_agent::timestamp::Timestamp::now().0
}

/// An API server with nodes that run our agents.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) admin: Client,
    pub(crate) nodes: Api<core::Node>,
    pub(crate) slices: Api<NodeSlice>,
    pub(crate) kubeconfig: PathBuf,
}

impl Cluster {
    pub(crate) async fn start(nodes: usize) -> Option<Self> {
        let server = ApiServer::start().await?;
        let admin = server.client(ADMIN).await;
        apply_crds(&admin).await;
        let kubeconfig = account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await;
        grant(&server, "slices.yaml", "kube-system", "kilo").await;
        let (nodes_api, slices) = (Api::all(admin.clone()), Api::all(admin.clone()));
        let cluster = Self { server, admin, nodes: nodes_api, slices, kubeconfig };
        for number in 0..nodes {
            cluster.create(&format!("n{number:02}"), number).await;
        }
        Some(cluster)
    }

    pub(crate) async fn create(&self, name: &str, number: usize) {
        let seen = now();
        let key = PublicKey([u8::try_from(number + 1).unwrap(); 32]).to_string();
        let pairs = [
            ("kilo.squat.ai/key", key),
            ("kilo.squat.ai/endpoint", format!("192.0.2.{number}:51820")),
            ("kilo.squat.ai/internal-ip", format!("10.1.0.{number}/24")),
            ("kilo.squat.ai/granularity", "location".to_owned()),
            ("kilo.squat.ai/last-seen", seen.to_string()),
            ("kilo.squat.ai/heartbeat", format!("{seen}/300")),
        ];
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(name, value)| (*name, value.as_str())).collect();
        create_node(&self.admin, name, &pairs).await;
    }

    pub(crate) async fn backend(&self, node: &str) -> KubernetesBackend {
        let client = kubernetes::client(Some(&self.kubeconfig), None).await.unwrap();
        let from = NodesFrom::Slices { namespace: "kube-system".to_owned() };
        KubernetesBackend::start_from(client, Some(node), LABEL, &from).await.unwrap()
    }

    /// Names of the `agents` nodes with the lowest ranks, which write first, and of the others.
    pub(crate) async fn by_rank(&self, agents: usize) -> (Vec<String>, Vec<String>) {
        let plain = KubernetesBackend::start(self.admin.clone(), None, LABEL).await.unwrap();
        let snapshot = plain.watch().borrow().clone();
        let mut names: Vec<String> = snapshot.nodes.names().map(ToOwned::to_owned).collect();
        names.sort_by_key(|name| rank(&snapshot.nodes, name));
        let mut others = names.split_off(agents);
        others.sort();
        (names, others)
    }

    pub(crate) async fn annotate(&self, node: &str, name: &str, value: &str) {
        let patch = json!({ "metadata": { "annotations": { (format!("kilo.squat.ai/{name}")): value } } });
        self.nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    /// Writes both annotations at once, as the node's agent does.
    pub(crate) async fn beat(&self, node: &str, seen: i64, every: u16) {
        let patch = json!({ "metadata": { "annotations": {
            "kilo.squat.ai/heartbeat": format!("{seen}/{every}"), "kilo.squat.ai/last-seen": seen.to_string() } } });
        self.nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    pub(crate) async fn holder(&self) -> Option<String> {
        let leases: Api<Lease> = Api::namespaced(self.admin.clone(), "kube-system");
        leases.get_opt(LEASE).await.unwrap()?.spec?.holder_identity
    }

    /// Creates slices of all nodes, whose index was renewed at this time; returns them and the index.
    pub(crate) async fn slices_by_hand(&self, renewed: i64) -> (NodeSlice, NodeSlice) {
        let list = self.nodes.list(&ListParams::default()).await.unwrap();
        let entry =
            |object: &core::Node| Entry::new(object, &node::from_object(object, LABEL).0, LABEL, true);
        let nodes = list.items.iter().map(entry).collect();
        let slices = vec!["nodes-00000".to_owned()];
        let index = Index { slices, topology_label: LABEL.to_owned(), writer: "n04".to_owned(), renewed };
        let slice = NodeSlice::new("nodes-00000", NodeSliceSpec { nodes, index: None });
        let index = NodeSlice::new(INDEX, NodeSliceSpec { nodes: Vec::new(), index: Some(index) });
        let create = async |slice| self.slices.create(&PostParams::default(), &slice).await.unwrap();
        (create(slice).await, create(index).await)
    }

    /// Replaces a slice.
    pub(crate) async fn write(&self, slice: &mut NodeSlice) {
        let name = slice.metadata.name.clone().unwrap();
        *slice = self.slices.replace(&name, &PostParams::default(), slice).await.unwrap();
    }

    /// Number of nodes in all slices.
    pub(crate) async fn sliced(&self) -> usize {
        let slices = self.slices.list(&ListParams::default()).await.unwrap();
        slices.items.iter().map(|slice| slice.spec.nodes.len()).sum()
    }
}

pub(crate) fn report(backend: &KubernetesBackend) -> SlicesReport {
    backend.slices().unwrap()
}

pub(crate) async fn read_slices(backends: &[&KubernetesBackend]) {
    wait::until("all read slices", Duration::from_secs(30), async || {
        backends.iter().all(|backend| report(backend).reads)
    })
    .await;
}

#[tokio::test]
async fn one_agent_writes_what_the_others_read_and_a_dead_one_is_replaced() {
    let Some(cluster) = Cluster::start(45).await else { return };
    let (agents, others) = cluster.by_rank(3).await;
    let started = futures::future::join_all(agents.iter().map(|name| cluster.backend(name))).await;
    let mut backends: BTreeMap<String, KubernetesBackend> = agents.iter().cloned().zip(started).collect();
    assert_eq!(backends[&agents[0]].watch().borrow().nodes.len(), 45, "before there are slices, Nodes");
    read_slices(&backends.values().collect::<Vec<_>>()).await;
    assert_eq!(cluster.sliced().await, 45);
    let index = cluster.slices.get(INDEX).await.unwrap().spec.index.unwrap();
    assert_eq!(index.slices.len(), 3, "{index:?}");
    let writer = cluster.holder().await.unwrap();
    assert_eq!(writer, index.writer);
    let reader = agents.iter().find(|name| **name != writer).unwrap();

    // Slices give the same nodes as Nodes do.
    let plain = KubernetesBackend::start(cluster.admin.clone(), None, LABEL).await.unwrap();
    let by_nodes = plain.watch().borrow().clone();
    let mut snapshots = backends[reader].watch();
    let by_slices = snapshots.borrow_and_update().clone();
    for (one, other) in by_nodes.nodes.iter().zip(by_slices.nodes.iter()) {
        let mut other_node = (**other.node).clone();
        assert_eq!(
            other_node.declared_alive.take(),
            (other.name != *reader).then_some(true),
            "{}",
            other.name
        );
        assert_eq!((&**one.node, one.last_seen), (&other_node, other.last_seen));
    }

    // A change touches one slice and is soon known; a heartbeat touches none.
    let before = report(&backends[&writer]).written;
    cluster.beat(&others[0], now() + 1, 300).await;
    wait::stays("a heartbeat writes no slice", Duration::from_secs(2), async || {
        report(&backends[&writer]).written == before
    })
    .await;
    cluster.annotate(&others[1], "leader", "true").await;
    let took = until(&mut snapshots, SOON, |snapshot| snapshot.nodes[&*others[1]].leader).await;
    println!("a change was known after {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    // The reader may see the slice before its writer gets the response.
    wait::until("the writer counts it", SOON, async || report(&backends[&writer]).written > before).await;
    wait::stays("one slice is written", Duration::from_secs(1), async || {
        report(&backends[&writer]).written == before + 1
    })
    .await;

    // Nodes come and go; a change of the reader's own node is seen at once.
    cluster.create("n99", 99).await;
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes.contains("n99")).await;
    cluster.nodes.delete(&others[2], &DeleteParams::default()).await.unwrap();
    until(&mut snapshots, SOON, |snapshot| !snapshot.nodes.contains(&others[2])).await;
    cluster.annotate(reader, "location", "moved").await;
    let took = until(&mut snapshots, SOON, |snapshot| snapshot.nodes[&**reader].location == "moved").await;
    assert!(took < Duration::from_millis(500), "the own node: {took:?}");

    // The writer dies: no node changes, and another agent continues.
    backends.remove(&writer);
    let known = snapshots.borrow_and_update().nodes.len();
    cluster.annotate(&others[3], "leader", "true").await;
    let took = until(&mut snapshots, REPLACED, |snapshot| {
        assert_eq!(snapshot.nodes.len(), known, "static stability");
        snapshot.nodes[&*others[3]].leader
    })
    .await;
    println!("another agent wrote it after {took:?}");
    assert!(backends.values().all(|backend| report(backend).reads), "nobody lists Nodes");
    assert_ne!(cluster.holder().await.unwrap(), writer);
}

#[tokio::test]
async fn slices_that_are_deleted_spoiled_or_forged_are_mended_and_take_no_node_along() {
    let Some(cluster) = Cluster::start(45).await else { return };
    let (first, second) = tokio::join!(cluster.backend("n00"), cluster.backend("n01"));
    read_slices(&[&first, &second]).await;
    let complete = || [&first, &second].iter().all(|backend| backend.watch().borrow().nodes.len() == 45);
    let whole = async || {
        wait::until("all slices are there and right", SOON, async || {
            assert!(complete(), "a node was lost");
            let bad = [&first, &second].iter().any(|backend| report(backend).bad + report(backend).twice > 0);
            cluster.sliced().await == 45 && !bad
        })
        .await
    };
    let some = "nodes-00001";
    cluster.slices.delete(some, &DeleteParams::default()).await.unwrap();
    whole().await;
    cluster.slices.delete(INDEX, &DeleteParams::default()).await.unwrap();
    wait::until("the index is back", SOON, async || cluster.slices.get_opt(INDEX).await.unwrap().is_some())
        .await;
    whole().await;
    cluster.slices.delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
    whole().await;

    // A third party forges entries: another key, a duplicate node, and one that does not exist.
    let mut slice = cluster.slices.get(some).await.unwrap();
    let lie = [("key".to_owned(), PublicKey([99; 32]).to_string())];
    let annotations =
        slice.spec.nodes[0].annotations.iter().map(|(name, text)| (name.to_owned(), text.to_owned()));
    slice.spec.nodes[0].annotations = annotations.chain(lie).collect();
    let mut twice = cluster.slices.get("nodes-00000").await.unwrap().spec.nodes[0].clone();
    twice.resource_version = "1".to_owned();
    let ghost = Entry { name: "ghost".to_owned(), ..twice.clone() };
    slice.spec.nodes.extend([twice, ghost]);
    cluster.slices.replace(some, &PostParams::default(), &slice).await.unwrap();
    wait::until("the lie is gone", SOON, async || {
        let slice = cluster.slices.get(some).await.unwrap();
        cluster.sliced().await == 45
            && slice.spec.nodes[0].annotations.get("key") != Some(&*PublicKey([99; 32]).to_string())
    })
    .await;
    wait::until("and nobody believes it", SOON, async || {
        let snapshot = second.watch().borrow().clone();
        let honest = |node: &&str| snapshot.nodes[node].key != Some(PublicKey([99; 32]));
        complete() && snapshot.nodes.names().all(|name| honest(&name)) && !snapshot.nodes.contains("ghost")
    })
    .await;
    assert!(report(&first).reads && report(&second).reads);
    whole().await;
}

#[tokio::test]
async fn a_node_of_kilos_own_sends_all_back_to_nodes_within_a_minute() {
    let Some(cluster) = Cluster::start(5).await else { return };
    let (first, second) = tokio::join!(cluster.backend("n00"), cluster.backend("n01"));
    read_slices(&[&first, &second]).await;
    // Its agent renews only last-seen, as Kilo's own does.
    cluster.annotate("n04", "last-seen", &(now() + 7).to_string()).await;
    let mut snapshots = second.watch();
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["n04"].heartbeat.is_none()).await;
    wait::until("all read Nodes", Duration::from_mins(1), async || {
        !report(&first).reads && !report(&second).reads
    })
    .await;
    assert!(report(&second).against.unwrap().contains("Kilo's own agent"));
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["n03"].declared_alive.is_none()).await;
    // Heartbeats are seen as they arrive.
    let seen = now() + 100;
    cluster.annotate("n03", "last-seen", &seen.to_string()).await;
    until(&mut snapshots, Duration::from_secs(10), |snapshot| {
        snapshot.nodes.get("n03").unwrap().last_seen == seen
    })
    .await;
}

#[tokio::test]
async fn without_rights_or_crd_agents_read_nodes_as_before() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    // The account lacks the rights of manifests/slices.yaml; the CRD exists.
    let kubeconfig = account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await;
    create_node(&admin, "old-a", &[]).await;
    create_node(&admin, "old-b", &[]).await;
    let user = "system:serviceaccount:kube-system:kilo";
    until_may(&admin, user, ("list", "kilo.squat.ai", "nodeslices"), ("", ""), false).await;
    until_may(&admin, user, ("get", "coordination.k8s.io", "leases"), ("kube-system", LEASE), false).await;
    let start = async || {
        let client = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
        let from = NodesFrom::Slices { namespace: "kube-system".to_owned() };
        KubernetesBackend::start_from(client, Some("old-a"), LABEL, &from).await.unwrap()
    };
    let backend = start().await;
    assert_eq!(backend.watch().borrow().nodes.len(), 2);
    let report = report(&backend);
    assert!(!report.reads && !report.writes && report.against.unwrap().contains("may not read"));
    // Then without the CRD, like an older API server.
    let crds: Api<CustomResourceDefinition> = Api::all(admin.clone());
    crds.delete("nodeslices.kilo.squat.ai", &DeleteParams::default()).await.unwrap();
    let slices: Api<NodeSlice> = Api::all(admin.clone());
    wait::until("slices are no longer served", Duration::from_secs(20), async || {
        slices.list(&ListParams::default()).await.is_err()
    })
    .await;
    let backend = start().await;
    assert_eq!(backend.watch().borrow().nodes.len(), 2);
    create_node(&admin, "old-c", &[]).await;
    until(&mut backend.watch(), SOON, |snapshot| snapshot.nodes.contains("old-c")).await;
}

#[tokio::test]
async fn a_dead_node_is_declared_dead_by_the_writer_for_all() {
    let Some(cluster) = Cluster::start(4).await else { return };
    // Its agent has promised a heartbeat every 2 s and is dead; the others promised longer intervals.
    cluster.beat("n03", now(), 2).await;
    let (first, second) = tokio::join!(cluster.backend("n00"), cluster.backend("n01"));
    read_slices(&[&first, &second]).await;
    let mut snapshots = second.watch();
    // The writer's own heartbeat proves that the node is dead, not the API server.
    let writer = cluster.holder().await.unwrap();
    let beat = async {
        loop {
            cluster.beat(&writer, now(), 30).await;
            wait::pace(Duration::from_secs(2)).await;
        }
    };
    let declared = until(&mut snapshots, Duration::from_secs(90), |snapshot| {
        snapshot.nodes["n03"].declared_alive == Some(false)
    });
    let took = tokio::select! { () = beat => unreachable!(), took = declared => took };
    println!("n03 was declared dead after {took:?}");
    assert!(took > Duration::from_secs(40));
    assert_eq!(snapshots.borrow().nodes["n02"].declared_alive, Some(true), "it promised one in 300 s");
    cluster.beat("n03", now() + 1, 2).await;
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["n03"].declared_alive == Some(true)).await;
}

#[tokio::test]
async fn slices_that_nobody_writes_or_that_deny_the_own_node_are_not_believed() {
    let Some(cluster) = Cluster::start(5).await else { return };
    // Without the Lease of the manifests no agent may write, nor has one the right to create it.
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), "kube-system");
    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    let (mut slice, mut index) = cluster.slices_by_hand(now() - 1_000_000).await;
    let write = async |slice: &mut NodeSlice| cluster.write(slice).await;
    let backend = cluster.backend("n00").await;
    let says = |text: &str| report(&backend).against.is_some_and(|against| against.contains(text));
    assert!(!report(&backend).reads && says("no agent has renewed"), "{:?}", report(&backend));
    // Wrong slices are reported also where nobody uses them.
    let again = slice.spec.nodes[1].clone();
    slice.spec.nodes.push(again);
    write(&mut slice).await;
    wait::until("a node that is there twice is counted", SOON, async || report(&backend).twice == 1).await;
    slice.spec.nodes.pop();
    write(&mut slice).await;
    wait::until("it is there once", SOON, async || report(&backend).twice == 0).await;
    assert!(!report(&backend).reads);
    // Now somebody writes.
    index.spec.index.as_mut().unwrap().renewed = now();
    write(&mut index).await;
    read_slices(&[&backend]).await;
    assert!(report(&backend).against.is_none());
    slice.spec.nodes[0].alive = false;
    write(&mut slice).await;
    wait::until("the own node is said to be dead", SOON, async || says("do not follow the own node")).await;
    slice.spec.nodes[0].alive = true;
    write(&mut slice).await;
    wait::until("it lives again", SOON, async || report(&backend).against.is_none()).await;
    // An index without slices removes no node.
    index.spec.index.as_mut().unwrap().slices.clear();
    write(&mut index).await;
    wait::until("no slice has the own node", SOON, async || says("do not follow the own node")).await;
    wait::stays("all nodes stay, and the agent writes nothing", Duration::from_secs(3), async || {
        let (nodes, report) = (backend.watch().borrow().nodes.len(), report(&backend));
        nodes == 5 && report.reads && !report.writes && leases.get_opt(LEASE).await.unwrap().is_none()
    })
    .await;
}

#[tokio::test]
async fn slices_that_lag_behind_nodes_are_not_turned_to() {
    let Some(cluster) = Cluster::start(5).await else { return };
    // Without the Lease of the manifests no agent writes.
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), "kube-system");
    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    let (mut slice, mut index) = cluster.slices_by_hand(now() - 1_000_000).await;
    let backend = cluster.backend("n00").await;
    assert!(!report(&backend).reads, "{:?}", report(&backend));
    // Another node's agent has started, and the writer has not got to it.
    let right = slice.spec.nodes[3].annotations.clone();
    slice.spec.nodes[3].annotations = right
        .iter()
        .filter(|(name, _)| *name != "key")
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .collect();
    cluster.write(&mut slice).await;
    index.spec.index.as_mut().unwrap().renewed = now();
    cluster.write(&mut index).await;
    wait::until("nothing else is against slices", SOON, async || report(&backend).against.is_none()).await;
    wait::stays("the node is known by its object", Duration::from_secs(4), async || {
        !report(&backend).reads && backend.watch().borrow().nodes["n03"].key.is_some()
    })
    .await;
    slice.spec.nodes[3].annotations = right;
    cluster.write(&mut slice).await;
    read_slices(&[&backend]).await;
}

#[tokio::test]
async fn a_writer_whose_writes_are_not_answered_leaves_the_lease_to_another() {
    let Some(cluster) = Cluster::start(5).await else { return };
    let own = kubernetes::client(Some(&cluster.kubeconfig), None).await.unwrap();
    let front = Front::start(own).await;
    front.set(Manner::Mute);
    let kubeconfig = plain_kubeconfig(&cluster.server.file(""), front.port());
    let through = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    let from = NodesFrom::Slices { namespace: "kube-system".to_owned() };
    let mute = KubernetesBackend::start_from(through, Some("n00"), LABEL, &from).await.unwrap();
    wait::until("it has the Lease", REPLACED, async || report(&mute).writes).await;
    let other = cluster.backend("n01").await;
    wait::stays("one writer is enough", Duration::from_secs(20), async || report(&mute).writes).await;
    // It renews the Lease all the time.
    let took = wait::until("another agent writes", Duration::from_secs(150), async || {
        let index = cluster.slices.get_opt(INDEX).await.unwrap();
        index.and_then(|index| index.spec.index).is_some_and(|index| index.writer == "n01")
    })
    .await;
    println!("another agent wrote slices {took:?} later");
    assert!(!report(&mute).writes && report(&mute).failed > 0);
    assert_eq!(cluster.holder().await.as_deref(), Some("n01"));
    read_slices(&[&other]).await;
}

/// Changes the schema of a node in slices, and waits until the API server goes by it.
async fn change_entries(cluster: &Cluster, change: impl Fn(&mut serde_json::Value)) {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.admin.clone());
    let crd = crds.get("nodeslices.kilo.squat.ai").await.unwrap();
    let mut crd = serde_json::to_value(crd).unwrap();
    let entry = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/nodes/items/properties";
    change(crd.pointer_mut(entry).unwrap());
    let crd = serde_json::from_value(crd).unwrap();
    crds.replace("nodeslices.kilo.squat.ai", &PostParams::default(), &crd).await.unwrap();
    let entry = Entry { name: "a".to_owned(), heartbeat: Some(300), ..Entry::default() };
    let probe = NodeSlice::new("probe", NodeSliceSpec { nodes: vec![entry], index: None });
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    wait::until("the schema is in use", Duration::from_secs(30), async || {
        cluster.slices.create(&dry, &probe).await.unwrap().spec.nodes[0].heartbeat.is_none()
    })
    .await;
}

#[tokio::test]
async fn what_an_older_crd_drops_is_not_written_again_and_a_refused_slice_does_not_stop_the_index() {
    let Some(cluster) = Cluster::start(4).await else { return };
    change_entries(&cluster, |entry| {
        entry.as_object_mut().unwrap().remove("heartbeat");
        entry["externalIPs"]["maxItems"] = 1.into();
    })
    .await;
    let backend = cluster.backend("n00").await;
    wait::until("slices are written", SOON * 3, async || cluster.sliced().await == 4).await;
    wait::time_passes(Duration::from_secs(2), "the index is the last of them").await;
    let before = report(&backend).written;
    wait::stays("nothing is written again", SOON, async || report(&backend).written == before).await;

    // A change is still written, once.
    cluster.annotate("n01", "leader", "true").await;
    let leads = async || {
        let slice = cluster.slices.get("nodes-00000").await.unwrap();
        slice.spec.nodes.iter().any(|entry| entry.annotations.get("leader").is_some())
    };
    wait::until("the change is written", SOON, leads).await;

    // The only slice is refused from now on, and others still see that a writer works.
    let addresses =
        ["192.0.2.1", "192.0.2.2"].map(|address| json!({"type": "ExternalIP", "address": address}));
    let patch = Patch::Merge(json!({ "status": { "addresses": addresses } }));
    let renewed = async || cluster.slices.get(INDEX).await.unwrap().spec.index.unwrap().renewed;
    let before = renewed().await;
    cluster.nodes.patch_status("n03", &PatchParams::default(), &patch).await.unwrap();
    wait::until("the slice is refused", SOON, async || report(&backend).failed > 0).await;
    wait::until("the index is renewed", Duration::from_secs(75), async || renewed().await > before).await;
    assert!(report(&backend).writes && report(&backend).failed > 1, "it is tried again");
}
