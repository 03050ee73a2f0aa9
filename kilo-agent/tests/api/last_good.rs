//! A real `kg` that starts while the API server is away.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;
use crate::proxy;
use crate::wait::task::until;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::backend::{
    Backend as _,
    kubernetes::{NodesFrom, StartupFallback},
};
use kilo_core::{objects::Snapshot, plan::Tables, topology::CheckedIn, wireguard::key::PublicKey};
use kilo_host::dataplane::{BPFFS, read_tables};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply, apply_crds};
use proxy::{Mode, Proxy};

/// The stored topology.
const ON_DISK: &str = "/var/lib/kilo/last-good.json";

/// Kills the agent when the test ends.
struct Agent(Child);

impl Agent {
    fn start(kubeconfig: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kg"));
        command.arg("--kubeconfig").arg(kubeconfig).args(["--hostname", "n1", "--resync-period", "1s"]);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A node of a location, as its agent would have just published it.
async fn create(client: &Client, number: u8, location: &str) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let node: core::Node = serde_json::from_value(json!({
        "metadata": {"name": format!("n{number}"), "annotations": {
            "kilo.squat.ai/endpoint": format!("192.0.2.{number}:51820"),
            "kilo.squat.ai/internal-ip": format!("10.1.0.{number}/24"),
            "kilo.squat.ai/key": PublicKey([number; 32]).to_string(),
            "kilo.squat.ai/last-seen": now.to_string(),
            "kilo.squat.ai/location": location,
        }},
        "spec": {"podCIDR": format!("10.42.{number}.0/24")},
    }))
    .unwrap();
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.unwrap();
}

fn routed(prefix: &str) -> bool {
    netns::sh(&format!("ip route show {prefix}")).contains("dev kilo0")
}

/// The parts of the tables that do not depend on interface indexes.
fn numberless(tables: &Tables) -> impl PartialEq + std::fmt::Debug {
    let hops: Vec<u32> = tables.hop.keys().copied().collect();
    let (masq_src, masq_dst) = (tables.masq_src.clone(), tables.masq_dst.clone());
    (tables.prefix.clone(), hops, tables.node.clone(), masq_src, masq_dst)
}

fn allowed_ips() -> BTreeMap<String, String> {
    let text = netns::sh("wg show kilo0 allowed-ips");
    text.lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(key, ips)| (key.to_owned(), ips.to_owned()))
        .collect()
}

#[test]
fn a_host_that_boots_while_the_api_server_is_away_has_everything_and_the_server_rules_when_back() {
    let name = "a_host_that_boots_while_the_api_server_is_away_has_everything_and_the_server_rules_when_back";
    netns::isolated(name, || async {
        netns::host(&["10.1.0.1/24", "192.0.2.1/32"], "10.1.0.254");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        for (number, location) in [(1, "here"), (2, "here"), (3, "there")] {
            create(&client, number, location).await;
        }
        let preshared = PublicKey([8; 32]).to_string();
        let peer = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
            "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([9; 32]).to_string(),
                     "presharedKey": preshared},
        });
        apply(&client, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
        let proxy = Proxy::start(server.port()).await;
        let kubeconfig = server.kubeconfig(ADMIN, proxy.port());

        let agent = Agent::start(&kubeconfig);
        until("first start", Duration::from_secs(20), async || {
            ["10.42.2.0/24", "10.42.3.0/24", "10.5.0.1"].iter().all(|prefix| routed(prefix))
                && fs::read_to_string(ON_DISK).is_ok_and(|text| text.contains("\"n3\""))
        })
        .await;
        drop(agent);
        assert_eq!(fs::metadata(ON_DISK).unwrap().permissions().mode() & 0o777, 0o600);
        let (tables, peers) = (read_tables(Path::new(BPFFS)).unwrap(), allowed_ips());
        assert_eq!(peers.len(), 2, "{peers:?}");

        // Simulates a reboot, while the cluster changes unnoticed.
        netns::sh("ip link delete kilo0; umount /sys/fs/bpf; mount -t bpf bpf /sys/fs/bpf");
        proxy.set(Mode::Cut);
        let nodes: Api<core::Node> = Api::all(client.clone());
        nodes.delete("n3", &DeleteParams::default()).await.unwrap();
        create(&client, 4, "there").await;
        let version = || async { nodes.get("n1").await.unwrap().metadata.resource_version };
        let written = version().await;

        let _agent = Agent::start(&kubeconfig);
        until("start without API server", Duration::from_secs(20), async || {
            netns::succeeds("ip link show kilo0") && routed("10.42.3.0/24") && routed("10.5.0.1")
        })
        .await;
        assert!(routed("10.42.2.0/24"));
        assert_eq!(allowed_ips(), peers);
        assert!(netns::sh("wg show kilo0 preshared-keys").contains(&preshared));
        let without = read_tables(Path::new(BPFFS)).unwrap();
        assert_eq!(numberless(&without), numberless(&tables));
        assert_eq!(version().await, written, "nothing is published from the disk");

        proxy.set(Mode::Open);
        until("the server rules again", Duration::from_secs(20), async || {
            routed("10.42.4.0/24") && !routed("10.42.3.0/24")
        })
        .await;
        until("annotations are published again", Duration::from_secs(10), async || {
            version().await != written
        })
        .await;
        until("what the server says is kept", Duration::from_secs(20), async || {
            fs::read_to_string(ON_DISK).is_ok_and(|text| text.contains("\"n4\"") && !text.contains("\"n3\""))
        })
        .await;
    });
}

/// Like after a power failure, when agents take turns to contact the API server.
#[tokio::test]
async fn an_agent_whose_turn_comes_later_works_with_the_last_good_topology_until_then() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create(&client, 1, "a").await;
    let turn = Duration::from_secs(8);
    let mut remembered = Snapshot::default();
    remembered.nodes.insert(CheckedIn::default());
    let started = Instant::now();
    let (label, from) = ("topology.kubernetes.io/region", NodesFrom::Nodes);
    let backend =
        StartupFallback::start(client, "n1", label, from, turn, || Some(remembered.clone())).await.unwrap();
    assert!(started.elapsed() < turn, "it works already");
    let mut snapshots = backend.watch();
    assert_eq!(**snapshots.borrow(), remembered);
    let lists = |snapshot: &Arc<Snapshot>| snapshot.nodes.contains("n1");
    tokio::time::timeout(Duration::from_secs(30), snapshots.wait_for(lists)).await.unwrap().unwrap();
    assert!(started.elapsed() >= turn, "not before its turn");
}
