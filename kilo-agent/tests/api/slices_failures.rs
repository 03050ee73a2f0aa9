//! Agents that read slices while the API server refuses, is overloaded, or cannot list.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kilo_agent::backend::{
    Backend as _,
    kubernetes::{self, KubernetesBackend, NodesFrom},
};
use kilo_core::objects::slices::LEASE;
use kube::{Api, api::DeleteParams};

use crate::{
    api::until,
    front::{self, Front, Manner},
    proxy::{Mode, Proxy},
    slices::{Cluster, LABEL, now, read_slices, report},
    wait::task as wait,
};

const SOON: Duration = Duration::from_secs(10);
/// Pauses between attempts last four seconds at most in a mesh this small, and the machine may be busy.
const RECOVERED: Duration = Duration::from_secs(30);

/// How long an agent of a mesh of 100 waits for a writer when it starts.
const WAITS: Duration = Duration::from_millis(4500);

/// The API server behind a proxy that can fail.
struct FailingApi {
    front: Front,
    proxy: Proxy,
}

impl FailingApi {
    async fn to(cluster: &Cluster) -> Self {
        let client = kubernetes::client(Some(&cluster.kubeconfig), None).await.unwrap();
        let front = Front::start(client).await;
        let proxy = Proxy::start(front.port()).await;
        Self { front, proxy }
    }

    async fn backend(&self, cluster: &Cluster, node: &str) -> KubernetesBackend {
        let kubeconfig = front::plain_kubeconfig(cluster.server.file("").as_path(), self.proxy.port());
        let client = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
        let from = NodesFrom::Slices { namespace: "kube-system".to_owned() };
        KubernetesBackend::start_from(client, Some(node), LABEL, &from).await.unwrap()
    }

    /// Changes what happens to requests, and ends the watches that were there before.
    async fn set(&self, manner: Manner) {
        self.front.set(manner);
        self.proxy.set(Mode::Cut);
        wait::fault_lasts(Duration::from_millis(100)).await;
        self.proxy.set(Mode::Open);
    }

    /// Requests for slices since the last change of manner.
    fn for_slices(&self) -> usize {
        self.front.asked().iter().filter(|(_, what)| what.contains("/nodeslices")).count()
    }

    /// Lists of all Nodes since the last change of manner.
    fn lists(&self) -> usize {
        let is_list = |what: &str| what.starts_with("GET /api/v1/nodes?") && what.contains("limit=500");
        self.front.asked().iter().filter(|(_, what)| is_list(what) && !what.contains("fieldSelector")).count()
    }
}

/// An agent that writes slices, and another one that reads them through a proxy that can fail.
async fn writer_and_reader(cluster: &Cluster) -> (KubernetesBackend, KubernetesBackend, FailingApi) {
    let (agents, _) = cluster.by_rank(2).await;
    let writer = cluster.backend(&agents[0]).await;
    read_slices(&[&writer]).await;
    let api = FailingApi::to(cluster).await;
    let reader = api.backend(cluster, &agents[1]).await;
    read_slices(&[&reader]).await;
    (writer, reader, api)
}

#[tokio::test]
async fn a_refusal_counts_only_when_it_lasts() {
    let Some(cluster) = Cluster::start(3).await else { return };
    let (_writer, reader, api) = writer_and_reader(&cluster).await;
    api.set(Manner::NoSlices(403)).await;
    wait::until("slices are refused", RECOVERED, async || api.for_slices() >= 2).await;
    api.front.set(Manner::Honest);
    cluster.create("n90", 90).await;
    wait::until("the watch goes on", RECOVERED, async || {
        assert!(report(&reader).reads, "{:?}", report(&reader));
        reader.watch().borrow().nodes.contains("n90")
    })
    .await;
    assert_eq!(api.lists(), 0, "{:?}", api.front.asked());
    api.set(Manner::NoSlices(403)).await;
    let took = wait::until("a lasting refusal counts", Duration::from_mins(2), async || {
        let report = report(&reader);
        !report.reads && report.against.is_some_and(|against| against.contains("may not read"))
    })
    .await;
    println!("Nodes were read instead of slices after {took:?}");
    assert!(took > Duration::from_secs(20), "{took:?}");
    assert_eq!(reader.watch().borrow().nodes.len(), 4);
}

#[tokio::test]
async fn an_overloaded_server_is_asked_for_slices_again_before_it_is_asked_for_all_nodes() {
    let Some(cluster) = Cluster::start(3).await else { return };
    let (agents, _) = cluster.by_rank(2).await;
    let writer = cluster.backend(&agents[0]).await;
    read_slices(&[&writer]).await;
    let api = FailingApi::to(&cluster).await;
    api.front.set(Manner::NoSlices(429));
    let relieved = async {
        wait::until("slices are asked for", SOON, async || api.for_slices() >= 2).await;
        assert_eq!(api.lists(), 0, "{:?}", api.front.asked());
        api.front.set(Manner::Honest);
    };
    let (reader, ()) = tokio::join!(api.backend(&cluster, &agents[1]), relieved);
    assert!(report(&reader).reads, "{:?}", report(&reader));
    assert_eq!((reader.watch().borrow().nodes.len(), api.lists()), (3, 0));
}

#[tokio::test]
async fn nobody_turns_to_nodes_while_the_server_cannot_list_them() {
    let Some(cluster) = Cluster::start(3).await else { return };
    let (_writer, reader, api) = writer_and_reader(&cluster).await;
    api.front.set(Manner::Listless);
    // Its agent renews only last-seen, as Kilo's own does.
    let (_, others) = cluster.by_rank(2).await;
    cluster.annotate(&others[0], "last-seen", &(now() + 7).to_string()).await;
    wait::until("Nodes are wanted", SOON, async || {
        report(&reader).against.is_some_and(|against| against.contains("Kilo's own agent"))
    })
    .await;
    wait::stays("slices are read", Duration::from_secs(8), async || report(&reader).reads).await;
    assert_eq!(api.lists(), 0, "{:?}", api.front.asked());
    api.front.set(Manner::Honest);
    wait::until("the server lists Nodes again", RECOVERED, async || !report(&reader).reads).await;
    until(&mut reader.watch(), SOON, |snapshot| snapshot.nodes[&*others[0]].declared_alive.is_none()).await;
}

#[tokio::test]
async fn slices_that_are_emptied_while_an_agent_turns_to_them_are_not_believed() {
    let Some(cluster) = Cluster::start(5).await else { return };
    // Without the Lease of the manifests no agent writes.
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), "kube-system");
    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    let (_, mut index) = cluster.slices_by_hand(now() - 1_000_000).await;
    let api = FailingApi::to(&cluster).await;
    let backend = api.backend(&cluster, "n00").await;
    assert!(!report(&backend).reads, "{:?}", report(&backend));
    api.front.set(Manner::SlowLists(Duration::from_secs(3)));
    index.spec.index.as_mut().unwrap().renewed = now();
    cluster.write(&mut index).await;
    let is_own = |what: &str| what.contains("fieldSelector") && !what.contains("watch=true");
    wait::until("the agent turns to slices", SOON, async || {
        api.front.asked().iter().any(|(_, what)| is_own(what))
    })
    .await;
    index.spec.index.as_mut().unwrap().slices.clear();
    cluster.write(&mut index).await;
    wait::stays("all nodes stay", Duration::from_secs(6), async || {
        let (nodes, report) = (backend.watch().borrow().nodes.len(), report(&backend));
        nodes == 5 && !report.reads
    })
    .await;
}

/// The index is as old as the power failure, and the slices are complete.
#[tokio::test]
async fn after_a_power_failure_agents_wait_for_one_that_writes_before_they_list_nodes() {
    let Some(cluster) = Cluster::start(100).await else { return };
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), "kube-system");
    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    let (_, mut index) = cluster.slices_by_hand(now() - 1_000_000).await;
    let (candidates, others) = cluster.by_rank(10).await;
    let api = FailingApi::to(&cluster).await;
    let started = Instant::now();
    let candidate = api.backend(&cluster, &candidates[9]).await;
    assert!(started.elapsed() < WAITS, "{:?}", started.elapsed());
    assert_eq!((report(&candidate).reads, api.lists()), (false, 1), "it could not write without");
    drop(candidate);
    api.front.set(Manner::Honest);
    let renewed = async {
        wait::until("slices are watched", SOON, async || {
            api.front
                .asked()
                .iter()
                .any(|(_, what)| what.contains("/nodeslices") && what.contains("watch=true"))
        })
        .await;
        index.spec.index.as_mut().unwrap().renewed = now();
        cluster.write(&mut index).await;
    };
    let (waits, ()) = tokio::join!(api.backend(&cluster, &others[0]), renewed);
    assert!(report(&waits).reads, "{:?}", report(&waits));
    assert_eq!((waits.watch().borrow().nodes.len(), api.lists()), (100, 0));
}
