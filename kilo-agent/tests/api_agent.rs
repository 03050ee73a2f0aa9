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
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::wireguard::key::PublicKey;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

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
    command.arg("--kubeconfig").arg(kubeconfig).args([
        "--hostname",
        "n1",
        "--resync-period",
        "1s",
        "--compatibility=cilium",
    ]);
    command
}

#[test]
fn the_agents_annotations_come_and_go_on_a_real_api_server() {
    netns::isolated("the_agents_annotations_come_and_go_on_a_real_api_server", || async {
        netns::sh(
            "mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard; mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
             ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
             ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
             ip route add default via 10.1.0.1 dev eth0; \
             ip link add cilium_host type veth peer name cilium_net; ip address add 10.42.1.7/32 dev cilium_host; ip link set cilium_host up",
        );
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[("example.com/mine", "stays")]).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let started = Instant::now();
        let agent = Agent(kg(&kubeconfig).spawn().unwrap());

        let name = |name: &str| format!("kilo.squat.ai/{name}");
        let written = until(&nodes, "wireguard-ip", |annotations| {
            annotations.get(&name("wireguard-ip")).is_some_and(|ip| !ip.is_empty())
        })
        .await;
        println!("annotations complete after {:?}", started.elapsed());
        assert_eq!(written[&name("endpoint")], "192.0.2.11:51820");
        assert_eq!(written[&name("internal-ip")], "10.1.0.11/24");
        assert_eq!(written[&name("wireguard-ip")], "10.4.0.1/16");
        assert_eq!(written[&name("granularity")], "location");
        assert_eq!(written[&name("cni-compatibility-ip")], "10.42.1.7/32");
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
        for gone in
            ["endpoint", "internal-ip", "last-seen", "wireguard-ip", "granularity", "cni-compatibility-ip"]
        {
            assert!(!left.contains_key(&name(gone)), "{gone} is still there");
        }
        assert_eq!(netns::sh("ip -o link show kilo0 2>/dev/null || true"), "");
    });
}
