//! A real `kg` on a real API server: what it writes about its node, what it
//! does about peers, and what `kg uninstall` takes back.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "support/api.rs"]
mod api;
mod netns;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{backend::peer::Peer, wireguard::key::PublicKey};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Map, Value, json};

use api::{ADMIN, ApiServer, apply, apply_crds, create_node};

const KG: &str = env!("CARGO_BIN_EXE_kg");

/// Ends the agent with the test.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

type Annotations = BTreeMap<String, String>;

async fn until(nodes: &Api<core::Node>, what: &str, wanted: impl Fn(&Annotations) -> bool) -> Annotations {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let annotations = nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        if wanted(&annotations) {
            return annotations;
        }
        assert!(Instant::now() < deadline, "{what} within 20 s: {annotations:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn kg(kubeconfig: &Path) -> Command {
    let mut command = Command::new(KG);
    command.arg("--kubeconfig").arg(kubeconfig).args(["--hostname", "n1", "--resync-period", "1s"]);
    command
}

/// A host with a private and a public address.
fn prepare_host() {
    netns::sh(
        "mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard; mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
         ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
         ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
         ip route add default via 10.1.0.1 dev eth0",
    );
}

#[test]
fn the_agents_annotations_come_and_go_on_a_real_api_server() {
    netns::isolated("the_agents_annotations_come_and_go_on_a_real_api_server", || async {
        prepare_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[("example.com/mine", "stays")]).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let started = Instant::now();
        let agent = Agent(kg(&kubeconfig).spawn().unwrap());

        let written = until(&nodes, "wireguard-ip", |annotations| {
            annotations.get(&name("wireguard-ip")).is_some_and(|ip| !ip.is_empty())
        })
        .await;
        println!("annotations complete after {:?}", started.elapsed());
        assert_eq!(written[&name("endpoint")], "192.0.2.11:51820");
        assert_eq!(written[&name("internal-ip")], "10.1.0.11/24");
        assert_eq!(written[&name("wireguard-ip")], "10.4.0.1/16");
        assert_eq!(written[&name("granularity")], "location");
        assert!(written[&name("key")].parse::<PublicKey>().is_ok());
        assert!(written[&name("last-seen")].parse::<i64>().is_ok_and(|seconds| seconds > 1_700_000_000));
        assert_eq!(written["example.com/mine"], "stays");

        let force = json!({"metadata": {"annotations": {name("force-endpoint"): "vpn.example.com:7777"}}});
        nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&force)).await.unwrap();
        until(&nodes, "the forced endpoint", |annotations| {
            annotations.get(&name("endpoint")).is_some_and(|endpoint| endpoint == "vpn.example.com:7777")
        })
        .await;

        let key = PublicKey([9; 32]);
        let peer = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
            "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": key.to_string()},
        });
        apply(&client, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !netns::sh("wg show kilo0 allowed-ips").contains(&key.to_string()) {
            assert!(Instant::now() < deadline, "the peer is not on the device");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(netns::sh("ip route show 10.5.0.1").contains("dev kilo0"));

        drop(agent);
        let removed = kg(&kubeconfig).arg("uninstall").status().unwrap();
        assert!(removed.success());
        let left =
            until(&nodes, "annotations gone", |annotations| !annotations.contains_key(&name("key"))).await;
        assert_eq!(left["example.com/mine"], "stays");
        assert_eq!(left[&name("force-endpoint")], "vpn.example.com:7777", "the user's own stay");
        for gone in ["endpoint", "internal-ip", "last-seen", "wireguard-ip", "granularity"] {
            assert!(!left.contains_key(&name(gone)), "{gone} is still there");
        }
        assert_eq!(netns::sh("ip -o link show kilo0 2>/dev/null || true"), "");
    });
}

fn name(name: &str) -> String {
    format!("kilo.squat.ai/{name}")
}

/// Writes (or, with null, removes) annotations of a node.
async fn annotate(nodes: &Api<core::Node>, node: &str, annotations: Value) {
    let annotations: Map<_, _> =
        annotations.as_object().unwrap().iter().map(|(key, value)| (name(key), value.clone())).collect();
    let patch = json!({ "metadata": { "annotations": annotations } });
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
}

async fn until_written(nodes: &Api<core::Node>, what: &str, annotation: &str, value: &str) {
    let annotation = name(annotation);
    until(nodes, what, |annotations| annotations.get(&annotation).is_some_and(|text| text == value)).await;
}

/// Waits until a command's output is as wanted.
async fn until_shown(what: &str, command: &str, wanted: impl Fn(&str) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        let shown = netns::sh(command);
        if wanted(&shown) {
            return;
        }
        assert!(Instant::now() < deadline, "{what} within 40 s: `{command}` shows {shown}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Another node, far away, that somebody else's agent speaks for.
async fn create_far_node(client: &Client, key: &PublicKey) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let annotations: BTreeMap<_, _> = [
        ("location", "far".to_owned()),
        ("endpoint", "192.0.2.12:51820".to_owned()),
        ("internal-ip", "10.2.0.12/24".to_owned()),
        ("key", key.to_string()),
        ("last-seen", now.to_string()),
    ]
    .map(|(key, value)| (name(key), value))
    .into();
    let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n2", "annotations": annotations },
                         "spec": { "podCIDR": "10.42.2.0/24" } });
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

#[test]
fn what_people_annotate_overrides_what_agents_find_and_moves_the_leader() {
    netns::isolated("what_people_annotate_overrides_what_agents_find_and_moves_the_leader", || async {
        prepare_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let _agent = Agent(kg(&server.kubeconfig(ADMIN, server.port())).spawn().unwrap());
        until_written(&nodes, "the agent's address", "wireguard-ip", "10.4.0.1/16").await;
        let far = PublicKey([7; 32]);
        create_far_node(&client, &far).await;
        let far = far.to_string();
        until_shown("the other location", "wg show kilo0 allowed-ips", |shown| {
            shown.contains(&far) && shown.contains("10.42.2.0/24")
        })
        .await;

        annotate(&nodes, "n1", json!({ "force-internal-ip": "10.1.0.99/24" })).await;
        until_written(&nodes, "the forced address", "internal-ip", "10.1.0.99/24").await;
        annotate(&nodes, "n1", json!({ "force-internal-ip": "-" })).await;
        until_written(&nodes, "no address", "internal-ip", "").await;
        annotate(&nodes, "n1", json!({ "force-internal-ip": "rubbish", "force-endpoint": "rubbish" })).await;
        until_written(&nodes, "rubbish forces nothing", "internal-ip", "10.1.0.11/24").await;
        until_written(&nodes, "rubbish forces nothing", "endpoint", "192.0.2.11:51820").await;
        annotate(&nodes, "n1", json!({ "force-internal-ip": null, "force-endpoint": null })).await;

        annotate(&nodes, "n1", json!({ "persistent-keepalive": "17" })).await;
        until_shown("the keepalive", "wg show kilo0 persistent-keepalive", |shown| shown.contains("\t17"))
            .await;
        annotate(&nodes, "n1", json!({ "persistent-keepalive": null })).await;
        until_shown("no keepalive", "wg show kilo0 persistent-keepalive", |shown| shown.contains("\toff"))
            .await;
        annotate(&nodes, "n2", json!({ "force-endpoint": "192.0.2.77:7" })).await;
        until_shown("the endpoint", "wg show kilo0 endpoints", |shown| shown.contains("192.0.2.77:7")).await;
        annotate(&nodes, "n2", json!({ "allowed-location-ips": "192.168.7.0/24,x" })).await;
        until_shown("a route", "ip route show 192.168.7.0/24", |shown| shown.contains("dev kilo0")).await;
        assert!(netns::sh("wg show kilo0 allowed-ips").contains("192.168.7.0/24"));
        annotate(&nodes, "n2", json!({ "allowed-location-ips": null })).await;
        until_shown("no route", "ip route show 192.168.7.0/24", str::is_empty).await;
        assert!(!netns::sh("wg show kilo0 allowed-ips").contains("192.168.7.0/24"));

        annotate(&nodes, "n1", json!({ "location": "far" })).await;
        until_shown("one location needs no tunnel", "wg show kilo0 peers", str::is_empty).await;
        until_written(&nodes, "the first leads", "wireguard-ip", "10.4.0.1/16").await;
        annotate(&nodes, "n2", json!({ "leader": "" })).await;
        until_written(&nodes, "who asks leads", "wireguard-ip", "").await;
        annotate(&nodes, "n1", json!({ "leader": "false" })).await;
        until_written(&nodes, "both ask: the first", "wireguard-ip", "10.4.0.1/16").await;
        annotate(&nodes, "n1", json!({ "leader": null })).await;
        until_written(&nodes, "the other alone asks", "wireguard-ip", "").await;
        annotate(&nodes, "n2", json!({ "leader": null })).await;
        until_written(&nodes, "nobody asks: the first", "wireguard-ip", "10.4.0.1/16").await;
        annotate(&nodes, "n1", json!({ "location": null })).await;
        until_shown("two locations again", "wg show kilo0 peers", |shown| shown.contains(&far)).await;
    });
}

async fn put_peer(client: &Client, peer: &str, number: u8, key: &PublicKey) {
    let object = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": peer },
        "spec": { "allowedIPs": [format!("10.5.0.{number}/32")], "publicKey": key.to_string() },
    });
    apply(client, &serde_json::from_value(object).unwrap(), false).await.unwrap();
}

#[test]
fn peers_come_change_and_go_and_a_restart_of_the_api_server_disturbs_none() {
    netns::isolated("peers_come_change_and_go_and_a_restart_of_the_api_server_disturbs_none", || async {
        prepare_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        let mut agent = Agent(kg(&server.kubeconfig(ADMIN, server.port())).spawn().unwrap());
        let (desk, old, new) = (PublicKey([1; 32]), PublicKey([2; 32]), PublicKey([3; 32]));
        put_peer(&client, "desk", 1, &desk).await;
        put_peer(&client, "laptop", 2, &old).await;
        let (desk, old_text, new_text) = (desk.to_string(), old.to_string(), new.to_string());
        let peers = "wg show kilo0 allowed-ips 2>/dev/null || true";
        until_shown("two peers", peers, |shown| shown.contains(&desk) && shown.contains(&old_text)).await;

        put_peer(&client, "laptop", 2, &new).await;
        until_shown("the new key", peers, |shown| {
            assert!(shown.contains(&desk), "the other peer was disturbed: {shown}");
            shown.contains(&format!("{new_text}\t10.5.0.2/32")) && !shown.contains(&old_text)
        })
        .await;

        server.stop_api();
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(netns::sh(peers).contains(&desk) && netns::sh(peers).contains(&new_text));
        assert!(netns::sh("ip route show 10.5.0.1").contains("dev kilo0"));
        server.start_api().await;
        assert!(agent.0.try_wait().unwrap().is_none(), "the agent has ended");
        let api: Api<Peer> = Api::all(client.clone());
        api.delete("laptop", &DeleteParams::default()).await.unwrap();
        until_shown("no laptop", peers, |shown| {
            assert!(shown.contains(&desk), "the other peer was disturbed: {shown}");
            !shown.contains(&new_text)
        })
        .await;
        until_shown("no route", "ip route show 10.5.0.2", str::is_empty).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        annotate(&nodes, "n1", json!({ "force-endpoint": "192.0.2.99:9" })).await;
        until_written(&nodes, "writing goes on", "endpoint", "192.0.2.99:9").await;
    });
}
