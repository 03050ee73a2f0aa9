//! The Kubernetes backend while the API server fails, loses data and lies.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::front;
use crate::proxy;
use crate::wait::task as wait;

use std::{collections::BTreeSet, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1 as core;
use kilo_agent::backend::{
    Backend as _,
    kubernetes::{self, KubernetesBackend},
};
use kilo_core::{objects::Published, settings::Granularity};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, WatchEvent, WatchParams},
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply_crds, create_node, until};
use front::{Front, Manner};
use proxy::{Mode, Proxy};

const LABEL: &str = "topology.kubernetes.io/region";
const SOON: Duration = Duration::from_secs(5);
/// In a mesh this small, the longest pause between two attempts is four seconds; the machine may be busy.
const RECOVERED: Duration = Duration::from_secs(30);
/// The documented bound after a real outage.
const BACK: Duration = Duration::from_secs(10);

async fn backend_through(server: &ApiServer, proxy: &Proxy, node: &str) -> KubernetesBackend {
    let kubeconfig = server.kubeconfig(ADMIN, proxy.port());
    let client = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    KubernetesBackend::start(client, Some(node), LABEL).await.unwrap()
}

/// Ends open watches, which can resume at once.
async fn break_connections(proxy: &Proxy) {
    proxy.set(Mode::Cut);
    wait::fault_lasts(Duration::from_millis(100)).await;
    proxy.set(Mode::Open);
}

async fn delete(client: &Client, name: &str) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.delete(name, &DeleteParams::default()).await.unwrap();
}

async fn touch(client: &Client, name: &str, location: &str) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    let patch = json!({ "metadata": { "annotations": { "kilo.squat.ai/location": location } } });
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
}

#[tokio::test]
async fn a_watch_goes_on_after_its_connection_broke() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "cut", &[]).await;
    let proxy = Proxy::start(server.port()).await;
    let backend = backend_through(&server, &proxy, "cut").await;
    let mut snapshots = backend.watch();
    proxy.set(Mode::Cut);
    touch(&client, "cut", "while-cut").await;
    let refused = backend.publish("cut", &Published::default()).await.unwrap_err();
    println!("unreachable: {refused}");
    assert!(refused.is_temporary(), "{refused}");
    assert_eq!(snapshots.borrow().nodes["cut"].location, "", "the last known stays");
    proxy.set(Mode::Open);
    let took =
        until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["cut"].location == "while-cut").await;
    println!("seen {took:?} after the connection was whole again");
    assert!(backend.publish("cut", &Published::default()).await.unwrap());
    delete(&client, "cut").await;
}

#[tokio::test]
async fn a_server_that_does_not_answer_holds_nobody_up() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "silent", &[]).await;
    let proxy = Proxy::start(server.port()).await;
    let backend = backend_through(&server, &proxy, "silent").await;
    proxy.set(Mode::Silent);
    let started = std::time::Instant::now();
    let refused = backend.publish("silent", &Published::default()).await.unwrap_err();
    println!("silent: {refused}");
    assert!(refused.is_temporary(), "{refused}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    delete(&client, "silent").await;
}

#[tokio::test]
async fn a_history_that_is_gone_and_half_of_the_nodes_with_it() {
    // A separate server, because it is stopped.
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for name in ["a", "b", "c", "d", "e", "f"] {
        create_node(&client, name, &[]).await;
    }
    let proxy = Proxy::start(server.port()).await;
    let backend = backend_through(&server, &proxy, "a").await;
    let mut snapshots = backend.watch();
    assert_eq!(snapshots.borrow().nodes.len(), 6);

    let nodes: Api<core::Node> = Api::all(client.clone());
    let version = nodes.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    proxy.set(Mode::Cut);
    for name in ["c", "d", "e", "f"] {
        delete(&client, name).await;
    }
    create_node(&client, "g", &[]).await;
    touch(&client, "b", "moved").await;
    server.stop_api();
    server.compact();
    server.start_api().await;
    let mut old = nodes.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    let answer = old.next().await;
    assert!(matches!(&answer, Some(Ok(WatchEvent::Error(status))) if status.code == 410), "{answer:?}");
    proxy.set(Mode::Open);

    // The watch gets a 410, and the following list lacks four of six nodes.
    let took = until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes.contains("g")).await;
    println!("listed again after {took:?}");
    let doubted = snapshots.borrow().clone();
    assert_eq!(doubted.nodes.len(), 7, "the lost ones are kept until a second list says the same");
    assert_eq!(doubted.nodes["b"].location, "moved", "what is listed counts at once");
    let took = until(&mut snapshots, Duration::from_secs(15), |snapshot| snapshot.nodes.len() == 3).await;
    println!("the loss was confirmed after {took:?} more");
    assert!(took > Duration::from_secs(3), "{took:?}");
}

/// The backend may be in a pause of half a minute, and the watch history may be gone.
#[tokio::test]
async fn an_outage_of_forty_seconds_is_over_for_the_agent_soon_after_it_is_over() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for name in ["a", "b", "c"] {
        create_node(&client, name, &[]).await;
    }
    let proxy = Proxy::start(server.port()).await;
    let backend = backend_through(&server, &proxy, "a").await;
    let mut snapshots = backend.watch();
    proxy.set(Mode::Cut);
    let began = std::time::Instant::now();
    touch(&client, "b", "moved").await;
    server.stop_api();
    server.compact();
    server.start_api().await;
    let left = Duration::from_secs(40).saturating_sub(began.elapsed());
    wait::time_passes(left, "an outage").await;
    proxy.set(Mode::Open);
    let took = until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["b"].location == "moved").await;
    println!("what had changed was known {took:?} after the outage");
    assert!(took < BACK, "{took:?}");
}

#[tokio::test]
async fn a_list_that_fails_is_tried_with_pauses_that_grow_and_soon_when_the_server_answers_again() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "listless", &[]).await;
    let front = Front::start(client.clone()).await;
    let proxy = Proxy::start(front.port()).await;
    let kubeconfig = front::plain_kubeconfig(server.file("").as_path(), proxy.port());
    let through = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    let backend = KubernetesBackend::start(through, Some("listless"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    front.set(Manner::Listless);
    break_connections(&proxy).await;
    wait::time_passes(Duration::from_secs(15), "requests are counted").await;
    let lists: Vec<_> = front
        .asked()
        .into_iter()
        .filter(|(_, what)| what.starts_with("GET /api/v1/nodes?") && !what.contains("watch"))
        .collect();
    let gaps: Vec<_> = lists.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    println!("{} lists in 15 s, {gaps:?} apart", lists.len());
    // With constant pauses there would be a dozen or more.
    assert!((3..=8).contains(&lists.len()), "{lists:?}");
    assert!(gaps.last() > Some(&Duration::from_millis(1900)), "no longer and longer pauses: {gaps:?}");
    front.set(Manner::Honest);
    touch(&client, "listless", "meanwhile").await;
    let took =
        until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["listless"].location == "meanwhile").await;
    println!("listed {took:?} after lists were answered again");
    assert!(took < BACK, "{took:?}");
    delete(&client, "listless").await;
}

#[tokio::test]
async fn a_watch_that_the_server_ends_at_once_is_repeated_with_pauses() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "ended", &[]).await;
    let front = Front::start(client.clone()).await;
    let proxy = Proxy::start(front.port()).await;
    let kubeconfig = front::plain_kubeconfig(server.file("").as_path(), proxy.port());
    let through = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    let backend = KubernetesBackend::start(through, Some("ended"), LABEL).await.unwrap();
    front.set(Manner::Ending);
    break_connections(&proxy).await;
    wait::time_passes(Duration::from_secs(8), "requests are counted").await;
    let watches = |what: &str| what.starts_with("GET /api/v1/nodes?") && what.contains("watch=true");
    let asked = front.asked().iter().filter(|(_, what)| watches(what)).count();
    println!("{asked} watches in 8 s");
    assert!((3..=9).contains(&asked), "{asked}");
    front.set(Manner::Honest);
    touch(&client, "ended", "meanwhile").await;
    let mut snapshots = backend.watch();
    until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["ended"].location == "meanwhile").await;
    delete(&client, "ended").await;
}

#[tokio::test]
async fn a_restart_of_the_server_is_survived_and_writes_go_on() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "a", &[]).await;
    let backend = KubernetesBackend::start(client.clone(), Some("a"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    server.stop_api();
    let refused = backend.publish("a", &Published::default()).await.unwrap_err();
    println!("stopped: {refused}");
    assert!(refused.is_temporary(), "{refused}");
    let out_of_reach = KubernetesBackend::start(client.clone(), Some("a"), LABEL).await.err().unwrap();
    assert!(out_of_reach.is_temporary(), "{out_of_reach}");
    server.start_api().await;
    create_node(&client, "b", &[]).await;
    let took = until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes.contains("b")).await;
    println!("a new node was seen {took:?} after the restart");
    // A heartbeat alone would be passed on later.
    let granularity = Some(Granularity::Location);
    let published = Published { last_seen: 5, granularity, ..Published::default() };
    assert!(backend.publish("a", &published).await.unwrap());
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes.get("a").is_some_and(|node| node.last_seen == 5))
        .await;
}

#[tokio::test]
async fn heartbeats_are_collected_and_many_nodes_are_listed_in_pages() {
    const NODES: usize = 600;
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for number in 0..NODES {
        create_node(&client, &format!("n{number}"), &[("kilo.squat.ai/last-seen", "100")]).await;
    }
    let started = std::time::Instant::now();
    let backend = KubernetesBackend::start(client.clone(), None, LABEL).await.unwrap();
    println!("{NODES} nodes listed in {:?}", started.elapsed());
    let mut snapshots = backend.watch();
    assert_eq!(snapshots.borrow_and_update().nodes.len(), NODES, "all pages");

    let nodes: Api<core::Node> = Api::all(client.clone());
    let patch = json!({ "metadata": { "annotations": { "kilo.squat.ai/last-seen": "130" } } });
    let mut handed_on = BTreeSet::new();
    let writes = async {
        for number in 0..200 {
            nodes
                .patch_metadata(&format!("n{number}"), &PatchParams::default(), &Patch::Merge(&patch))
                .await
                .unwrap();
        }
    };
    let watching = async {
        while snapshots.changed().await.is_ok() {
            let seen =
                snapshots.borrow_and_update().nodes.iter().filter(|node| node.last_seen == 130).count();
            handed_on.insert(seen);
            if seen == 200 {
                return;
            }
        }
    };
    let both = async { tokio::join!(writes, watching) };
    tokio::time::timeout(Duration::from_secs(30), both).await.unwrap();
    println!("200 heartbeats came in {} snapshots", handed_on.len());
    assert!(handed_on.len() < 20, "{}", handed_on.len());
}

#[tokio::test]
async fn one_list_without_half_of_the_nodes_removes_none_when_the_next_has_them() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for name in ["a", "b", "c", "d", "e", "f"] {
        create_node(&client, name, &[]).await;
    }
    let front = Front::start(client.clone()).await;
    let proxy = Proxy::start(front.port()).await;
    let kubeconfig = front::plain_kubeconfig(server.file("").as_path(), proxy.port());
    let through = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    let backend = KubernetesBackend::start(through, Some("a"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    let least = {
        let mut snapshots = snapshots.clone();
        tokio::spawn(async move {
            let mut least = snapshots.borrow().nodes.len();
            let seen = snapshots.wait_for(|snapshot| {
                least = least.min(snapshot.nodes.len());
                snapshot.nodes["b"].location == "after"
            });
            tokio::time::timeout(RECOVERED, seen).await.unwrap().unwrap();
            least
        })
    };
    front.set(Manner::Lying);
    break_connections(&proxy).await;
    wait::until("the API server has been asked again, and has lied", RECOVERED, async || front.has_lied())
        .await;
    touch(&client, "b", "after").await;
    let took = until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["b"].location == "after").await;
    println!("the next list was there {took:?} after the wrong one");
    assert_eq!(least.await.unwrap(), 6, "no node was ever missing");
    let is_list = |what: &str| what.starts_with("GET /api/v1/nodes?") && !what.contains("watch");
    let lists = || front.asked().iter().filter(|(_, what)| is_list(what)).count();
    // On a busy machine the wrong list already has the change.
    wait::until("the wrong list is confirmed", RECOVERED, async || lists() >= 2).await;
    // In that case a connection may also break once more.
    assert!(lists() <= 3, "the wrong list and its confirmation: {:?}", front.asked());
}

#[tokio::test]
async fn an_overloaded_server_is_named_left_alone_for_longer_and_longer_and_found_again() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "busy", &[]).await;
    let front = Front::start(client.clone()).await;
    let proxy = Proxy::start(front.port()).await;
    let kubeconfig = front::plain_kubeconfig(server.file("").as_path(), proxy.port());
    let through = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
    let backend = KubernetesBackend::start(through.clone(), Some("busy"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    front.set(Manner::Busy);
    break_connections(&proxy).await;
    let refused = backend.publish("busy", &Published::default()).await.unwrap_err();
    println!("overloaded: {refused}");
    assert!(refused.is_temporary() && refused.to_string().contains("429"), "{refused}");
    let started = KubernetesBackend::start(through, Some("busy"), LABEL).await.err().unwrap();
    assert!(started.is_temporary() && started.to_string().contains("429"), "{started}");
    wait::time_passes(Duration::from_secs(8), "requests are counted").await;
    let asked: Vec<_> = front.asked().into_iter().filter(|(_, what)| what.contains("/nodes?")).collect();
    println!("{} requests for nodes in 8 s", asked.len());
    assert!((3..=12).contains(&asked.len()), "{asked:?}");
    let gaps: Vec<_> = asked.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    assert!(gaps.last() > Some(&Duration::from_secs(1)), "no longer and longer pauses: {gaps:?}");

    front.set(Manner::Slow(Duration::from_secs(2)));
    touch(&client, "busy", "meanwhile").await;
    let took =
        until(&mut snapshots, RECOVERED, |snapshot| snapshot.nodes["busy"].location == "meanwhile").await;
    println!("seen {took:?} after the server was only slow");
    assert!(backend.publish("busy", &Published::default()).await.unwrap(), "slow is not lost");
    delete(&client, "busy").await;
}
