//! `kgctl` on a real API server: recorded answers of Kilo for the same objects,
//! and two clusters that take each other's nodes for peers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "support/api.rs"]
mod api;
#[path = "support/dot.rs"]
mod dot;

use std::{
    path::Path,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::backend::peer::{self, Peer};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
};
use serde_json::Value;

use api::{ADMIN, ApiServer, apply, apply_crds, create_node};
use dot::Graph;

const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");
const LAST_SEEN: &str = "kilo.squat.ai/last-seen";
/// Recorded scenarios: leaders and peers, a full mesh, another label and subnet.
const SEEDS: [u64; 5] = [1, 2, 10, 11, 22];

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

/// Runs kgctl: whether it succeeded, standard output, standard error.
fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(KGCTL).arg("--kubeconfig").arg(kubeconfig).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn peers_of(ini: &str) -> String {
    let peers = ini.find("[Peer]").map_or("", |at| &ini[at..]);
    peers.lines().filter(|line| !line.contains("<nil>")).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// Applies a scenario's objects, with signs of life moved to the present.
async fn put(client: &Client, scenario: &Value) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    let peers: Api<Peer> = Api::all(client.clone());
    for node in nodes.list(&ListParams::default()).await.unwrap() {
        nodes.delete(&node.name_any(), &DeleteParams::default()).await.unwrap();
    }
    for peer in peers.list(&ListParams::default()).await.unwrap() {
        peers.delete(&peer.name_any(), &DeleteParams::default()).await.unwrap();
    }
    let later = now() - scenario["now"].as_i64().unwrap();
    for object in scenario["nodes"].as_array().unwrap() {
        let mut node: core::Node = serde_json::from_value(object.clone()).unwrap();
        if let Some(seen) = node.annotations_mut().get_mut(LAST_SEEN)
            && let Ok(seconds) = seen.parse::<i64>()
        {
            *seen = (seconds + later).to_string();
        }
        node.metadata.resource_version = None;
        nodes.create(&PostParams::default(), &node).await.unwrap_or_else(|error| panic!("{error}: {object}"));
    }
    for object in scenario["peers"].as_array().into_iter().flatten() {
        let peer: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        if let Err(error) = apply(client, &peer, false).await {
            let valid =
                serde_json::from_value(object.clone()).is_ok_and(|peer| peer::from_object(&peer).is_ok());
            assert!(!valid, "{object} is valid, and refused: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kgctl_answers_as_kilo_for_the_same_objects_on_a_server() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let recorded = include_str!("../testdata/topology.jsonl");
    let mut compared = 0;
    for scenario in recorded.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let seed = scenario["seed"].as_u64().unwrap();
        if !SEEDS.contains(&seed) {
            continue;
        }
        put(&client, &scenario).await;
        let config = |key: &str| scenario["config"][key].as_str().unwrap();
        let run = |arguments: &[&str]| {
            let (granularity, subnet, label) =
                (config("mesh_granularity"), config("subnet"), config("topology_label"));
            let flags = ["--mesh-granularity", granularity, "--subnet", subnet, "--topology-label", label];
            kgctl(&kubeconfig, &[arguments, &flags[..]].concat())
        };
        let (_, dot, _) = run(&["graph"]);
        for (name, view) in scenario["views"].as_object().unwrap() {
            assert_eq!(Graph::parse(&dot), Graph::parse(view["dot"].as_str().unwrap()), "seed {seed}, graph");
            let (success, conf, said) = run(&["showconf", "node", name]);
            if view["leader"] != true {
                assert!(
                    conf.is_empty() && said.contains("does not lead"),
                    "seed {seed}, {name}: {conf}{said}"
                );
                continue;
            }
            assert!(success, "seed {seed}, {name}: {said}");
            assert_eq!(peers_of(&conf), peers_of(view["conf"].as_str().unwrap()), "seed {seed}, {name}");
            let as_peer = view["as_peer"].as_str().unwrap();
            let (_, ini, _) = run(&["showconf", "node", name, "--as-peer"]);
            assert_eq!(peers_of(&ini), peers_of(as_peer), "seed {seed}, {name} as peer");
            let (_, more, _) =
                run(&["showconf", "node", name, "--as-peer", "--allowed-ips", "10.96.0.0/12,10.96.0.0/12"]);
            assert_eq!(more.matches("10.96.0.0/12").count(), 1, "added once: {more}");
            let (_, yaml, _) = run(&["showconf", "node", name, "--as-peer", "-o", "yaml"]);
            let (_, json, _) = run(&["showconf", "node", name, "--as-peer", "-o", "json"]);
            let object: Peer = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_yaml_ng::from_str::<Peer>(&yaml).unwrap(), object);
            assert_eq!(peer::from_object(&object).unwrap().name, *name);
            let ips = object.spec.allowed_ips.join(", ");
            assert!(ini.contains(&format!("AllowedIPs = {ips}\n")), "{ips} in {ini}");
            for (name, want) in view["peer_conf"].as_object().into_iter().flatten() {
                let (_, conf, said) = run(&["showconf", "peer", name]);
                assert_eq!(
                    peers_of(&conf),
                    peers_of(want.as_str().unwrap()),
                    "seed {seed}, peer {name}: {said}"
                );
            }
            compared += 1;
        }
    }
    println!("{compared} leaders compared");
    assert!(compared >= 10, "{compared}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clusters_take_each_others_nodes_for_peers() {
    let (Some(one), Some(two)) = (ApiServer::start().await, ApiServer::start().await) else { return };
    let mut clusters = Vec::new();
    for (number, server) in [(1_u8, &one), (2, &two)] {
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        let seen = now().to_string();
        let key = kilo_agent::wireguard::key::PublicKey([number; 32]).to_string();
        let annotations = [
            ("kilo.squat.ai/endpoint", format!("192.0.2.{number}:51820")),
            ("kilo.squat.ai/internal-ip", format!("10.{number}.0.1/24")),
            ("kilo.squat.ai/key", key.clone()),
            (LAST_SEEN, seen),
        ];
        let annotations: Vec<_> = annotations.iter().map(|(name, value)| (*name, value.as_str())).collect();
        create_node(&client, &format!("cluster-{number}"), &annotations).await;
        clusters.push((client, server.kubeconfig(ADMIN, server.port()), format!("cluster-{number}"), key));
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let (_, kubeconfig, node, _) = &clusters[from];
        let services = format!("10.9{from}.0.0/16");
        let arguments = ["showconf", "node", node, "--as-peer", "-o", "yaml", "--allowed-ips", &services];
        let (success, yaml, said) = kgctl(kubeconfig, &arguments);
        assert!(success, "{said}");
        let object: DynamicObject = serde_yaml_ng::from_str(&yaml).unwrap();
        apply(&clusters[to].0, &object, false).await.unwrap_or_else(|error| panic!("{error}: {yaml}"));
    }
    for (own, other) in [(0, 1), (1, 0)] {
        let (_, kubeconfig, node, _) = &clusters[own];
        let (success, conf, said) = kgctl(kubeconfig, &["showconf", "node", node]);
        assert!(success, "{said}");
        assert!(conf.contains(&clusters[other].3) && conf.contains(&format!("10.9{other}.0.0/16")), "{conf}");
        let (_, dot, _) = kgctl(kubeconfig, &["graph"]);
        assert!(dot.contains(&clusters[other].2), "{dot}");
    }
}
