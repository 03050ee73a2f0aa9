//! `kgctl connect` against a real API server and a real WireGuard peer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;
use crate::wait::{task, until};

use std::{
    collections::BTreeMap,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use k8s_openapi::api::core::v1::Node;
use kilo_agent::timestamp::Timestamp;
use kilo_core::{
    objects::peer::Peer,
    wireguard::{
        DeviceState, WireguardPeer, WireguardPlan, diff,
        key::{PublicKey, SecretKey},
    },
};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams},
};
use netns::{isolated, sh, succeeds};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply, apply_crds, create_node};

const LIMIT: Duration = Duration::from_secs(20);

const NODE: SecretKey = SecretKey::from_bytes([0x48; 32]);

/// Kills what a failed test leaves running.
struct Running(Child);

impl Running {
    fn signal(&mut self, signal: Signal) -> bool {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), signal).unwrap();
        until("it ends", LIMIT, || self.0.try_wait().unwrap()).success()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        succeeds("ip link delete kilo0; ip -n b link delete wgb");
    }
}

fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    command.arg("--kubeconfig").arg(kubeconfig).args(["connect", "--resync-period", "1s"]).args(arguments);
    command
}

fn refused(kubeconfig: &Path, arguments: &[&str]) -> String {
    let output = kgctl(kubeconfig, arguments).output().unwrap();
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Value of the Peer's annotation for following gateways.
fn follows(object: &Peer) -> Option<&str> {
    object.metadata.annotations.as_ref()?.get("kilo.squat.ai/follows-gateways").map(String::as_str)
}

/// Asserts a clean machine: no interface, no route, no process of ours.
#[track_caller]
fn nothing_left() {
    until("the interface goes", LIMIT, || !succeeds("ip link show kilo0"));
    assert_eq!(sh("ip route show proto 107; ip -6 route show proto 107; ip rule show priority 1107"), "");
    until("the socket goes", LIMIT, || !Path::new("/run/wireguard/kilo0.sock").exists());
}

/// Sets up a namespace `b` with a WireGuard device as an agent would on the leader of a location.
fn network() -> Running {
    sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/netns; ip link set lo up; ip netns add b
        ip -n b link set lo up; ip link add va type veth peer name vb netns b; ip link set va up
        ip -n b link set vb up; ip addr add 192.0.2.1/24 dev va; ip -n b addr add 192.0.2.2/24 dev vb
        ip -n b addr add 10.42.1.1/32 dev lo");
    let process = Command::new("ip")
        .args(["netns", "exec", "b", env!("CARGO_BIN_EXE_kg"), "userspace-wireguard", "wgb"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let running = Running(process);
    until("the node's device", LIMIT, || Path::new("/run/wireguard/wgb.sock").exists());
    running
}

/// Configures the peer on the node's device, as its agent would.
fn node_knows(key: PublicKey) {
    use std::io::{Read as _, Write as _};
    let peer = WireguardPeer {
        allowed_ips: ["10.10.10.10/32".parse().unwrap()].into_iter().collect(),
        ..WireguardPeer::default()
    };
    let plan = WireguardPlan { listen_port: 51820, peers: [(key, peer)].into() };
    let changes = diff(&DeviceState::default(), &plan, &NODE);
    let mut stream = std::os::unix::net::UnixStream::connect("/run/wireguard/wgb.sock").unwrap();
    stream.write_all(diff::request(&changes).encode().as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer.trim(), "errno=0");
    sh(
        "ip -n b addr replace 10.4.0.1/16 dev wgb; ip -n b link set wgb up; ip -n b route replace 10.10.10.10/32 dev wgb",
    );
}

/// How a packet from this machine leaves: nowhere, through the tunnel, or in cleartext.
fn leaves(to: &str) -> &'static str {
    match sh(&format!("ip route get {to} 2>&1 || true")) {
        route if route.contains("unreachable") || route.contains("No route to host") => "nowhere",
        route if route.contains("dev kilo0") => "tunnel",
        _ => "in cleartext",
    }
}

/// A machine that cannot set up its device leaves the mesh's prefixes unreachable.
fn closed_before_the_device_is_set_up(kubeconfig: &Path) {
    // The port is taken, so the state at the failure stays.
    let port = std::net::UdpSocket::bind("[::]:51820").unwrap();
    refused(kubeconfig, &["laptop", "--clean-up=false"]);
    assert_eq!(["10.42.1.1", "10.1.0.2"].map(leaves), ["nowhere"; 2], "closed before the device is set up");
    drop(port);
    sh("ip link delete kilo0; ip route flush proto 107");
    until("its process ends", LIMIT, || !Path::new("/run/wireguard/kilo0.sock").exists());
    // The same without a device to begin with.
    refused(kubeconfig, &["laptop", "--clean-up=false", "--create-interface=false"]);
    assert_eq!(
        ["10.42.1.1", "10.1.0.2"].map(leaves),
        ["nowhere", "in cleartext"],
        "pods are closed first of all"
    );
}

fn a_second_one_is_refused(kubeconfig: &Path) {
    let said = refused(kubeconfig, &["other"]);
    assert!(
        said.contains("another process manages interface") && said.contains("stop that one first"),
        "{said}"
    );
    let said = refused(kubeconfig, &["other", "--interface", "kilo1"]);
    assert!(said.contains("already manages routes through kilo0"), "{said}");
}

#[test]
fn a_machine_joins_reaches_pods_and_leaves_nothing_behind() {
    isolated("a_machine_joins_reaches_pods_and_leaves_nothing_behind", || async {
        let _node = network();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        let now = Timestamp::now().0;
        let annotations = BTreeMap::from([
            ("kilo.squat.ai/endpoint", "192.0.2.2:51820".to_owned()),
            ("kilo.squat.ai/internal-ip", "10.1.0.2/24".to_owned()),
            ("kilo.squat.ai/key", NODE.public().to_string()),
            ("kilo.squat.ai/last-seen", (now + 3600).to_string()),
        ]);
        let pairs: Vec<_> = annotations.iter().map(|(name, value)| (*name, value.as_str())).collect();
        create_node(&client, "n1", &pairs).await;
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let peers: Api<Peer> = Api::all(client.clone());

        // A default route exists for everything that the tunnel does not take.
        sh("ip route add default via 192.0.2.2");
        assert_eq!(["10.42.1.1", "10.1.0.2"].map(leaves), ["in cleartext"; 2]);
        closed_before_the_device_is_set_up(&kubeconfig);
        let mut connected =
            Running(kgctl(&kubeconfig, &["laptop", "--allowed-ips", "10.43.0.0/16"]).spawn().unwrap());
        until("the device has its peer", LIMIT, || {
            succeeds(&format!("wg show kilo0 allowed-ips | grep -q {}", NODE.public()))
        });
        until("the route", LIMIT, || sh("ip route show 10.42.1.0/24").contains("dev kilo0"));
        let mode = std::fs::metadata("/var/lib/kilo/laptop.key").unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the private key is nobody else's");
        let object = peers.get("laptop").await.unwrap();
        assert_eq!(object.spec.allowed_ips, ["10.10.10.10/32"]);
        assert_eq!(follows(&object), None, "no location has gateways to follow");
        for prefix in ["10.1.0.2", "10.4.0.1", "10.42.1.0/24", "10.43.0.0/16"] {
            let route = sh(&format!("ip route show {prefix}"));
            assert!(route.contains("dev kilo0") && route.contains("src 10.10.10.10"), "{prefix}: {route:?}");
        }
        assert!(sh("ip -o address show kilo0").contains("10.10.10.10/32"));
        assert!(sh("ip -o link show kilo0").contains("mtu 1420"));
        node_knows(object.spec.public_key.parse().unwrap());
        until("a pod answers", LIMIT, || succeeds("ping -c 1 -W 1 10.42.1.1"));

        // A second one on the same machine would fight over routes.
        a_second_one_is_refused(&kubeconfig);
        assert!(peers.get_opt("other").await.unwrap().is_none());

        // It follows the agents to another subnet, a new location, and the deletion of its own Peer by a third party.
        let nodes: Api<Node> = Api::all(client.clone());
        let moved = json!({"metadata": {"annotations": {"kilo.squat.ai/wireguard-ip": "10.6.0.1/16"}}});
        nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&moved)).await.unwrap();
        until("the leader's new address", LIMIT, || sh("ip route show 10.6.0.1").contains("dev kilo0"));
        until("its former one is left", LIMIT, || leaves("10.4.0.1") == "nowhere");
        let mut far = annotations.clone();
        far.insert("kilo.squat.ai/location", "far".to_owned());
        far.insert("kilo.squat.ai/key", PublicKey([5; 32]).to_string());
        far.insert("kilo.squat.ai/endpoint", "192.0.2.77:51820".to_owned());
        far.insert("kilo.squat.ai/internal-ip", "10.9.0.9/24".to_owned());
        let pairs: Vec<_> = far.iter().map(|(name, value)| (*name, value.as_str())).collect();
        create_node(&client, "n9", &pairs).await;
        until("the other location", LIMIT, || sh("ip route show 10.9.0.9").contains("kilo0"));
        assert_eq!(["10.42.1.1", "10.1.0.2", "10.9.0.9"].map(leaves), ["tunnel"; 3]);
        nodes.delete("n9", &DeleteParams::default()).await.unwrap();
        until("it has left", LIMIT, || leaves("10.9.0.9") != "tunnel");
        assert_eq!(leaves("10.9.0.9"), "nowhere", "what had begun does not go on in cleartext");
        peers.delete("laptop", &DeleteParams::default()).await.unwrap();
        task::until("the Peer is made again", LIMIT, async || {
            peers.get_opt("laptop").await.unwrap().is_some()
        })
        .await;

        // After SIGKILL everything stays, including traffic; a new process takes it over.
        connected.signal(Signal::SIGKILL);
        let index = sh("cat /sys/class/net/kilo0/ifindex 2>/dev/null || ip -o link show kilo0 | cut -d: -f1");
        assert!(succeeds("ping -c 1 -W 2 10.42.1.1"));
        drop(std::mem::replace(&mut connected.0, kgctl(&kubeconfig, &["laptop"]).spawn().unwrap()));
        until("services are no longer routed", LIMIT, || sh("ip route show 10.43.0.0/16").is_empty());
        assert_eq!(
            sh("cat /sys/class/net/kilo0/ifindex 2>/dev/null || ip -o link show kilo0 | cut -d: -f1"),
            index
        );
        assert!(succeeds("ping -c 1 -W 2 10.42.1.1"));

        assert!(connected.signal(Signal::SIGTERM), "a stop is a success");
        nothing_left();
        assert!(peers.get_opt("laptop").await.unwrap().is_none(), "the Peer it made goes with it");
    });
}

/// A node that can lead the location `one`.
async fn create_gateway(client: &Client, number: u8) {
    let annotations = [
        ("location", "one".to_owned()),
        ("endpoint", format!("192.0.2.{number}:51820")),
        ("internal-ip", format!("10.1.0.{number}/24")),
        ("key", PublicKey([number; 32]).to_string()),
        ("last-seen", (Timestamp::now().0 + 3600).to_string()),
        ("signal", "1".to_owned()),
    ];
    let named = annotations.map(|(name, value)| (format!("kilo.squat.ai/{name}"), value));
    let pairs: Vec<_> = named.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    create_node(client, &format!("g{number}"), &pairs).await;
}

#[test]
fn a_peer_made_by_somebody_else_is_used_and_stays() {
    isolated("a_peer_made_by_somebody_else_is_used_and_stays", || async {
        sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard; ip link set lo up");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        for number in 1..=2u8 {
            create_gateway(&client, number).await;
        }
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let peers: Api<Peer> = Api::all(client.clone());
        let key = SecretKey::from_bytes([0x50; 32]);
        std::fs::write("/var/lib/key", key.reveal()).unwrap();
        for (name, public) in [("mine", key.public()), ("theirs", PublicKey([9; 32]))] {
            let object = json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": name},
                "spec": {"allowedIPs": ["10.5.0.7/32", "10.55.0.0/16"], "publicKey": public.to_string()},
            });
            apply(&client, &serde_json::from_value(object).unwrap(), false).await.unwrap();
            if name == "mine" {
                let arguments = ["mine", "--private-key", "/var/lib/key", "--interface", "wg7"];
                let mut running = Running(kgctl(&kubeconfig, &arguments).spawn().unwrap());
                until("its address", LIMIT, || {
                    succeeds("ip link show wg7") && sh("ip -o -4 address show wg7").contains("10.5.0.7/32")
                });
                assert_eq!(follows(&peers.get("mine").await.unwrap()), Some("true"));
                // Gateways send claims to an address of its own that only the tunnel has.
                let control = kilo_core::signal_id::control_address(&key.public());
                until("its control address", LIMIT, || {
                    sh("ip -o -6 address show wg7").contains(&format!("{control}/128"))
                });
                until("its socket", LIMIT, || {
                    sh("ss -Hlnu sport = 51821").contains(&format!("[{control}]%wg7"))
                });
                assert!(running.signal(Signal::SIGINT));
                until("the interface goes", LIMIT, || !succeeds("ip link show wg7"));
                let left = peers.get_opt("mine").await.unwrap().expect("it is not ours to delete");
                assert_eq!(follows(&left), None, "nobody follows any more");
                // What remains in the kernel matches a static configuration.
                let mut running =
                    Running(kgctl(&kubeconfig, &arguments).arg("--clean-up=false").spawn().unwrap());
                until("its control address", LIMIT, || {
                    succeeds("ip link show wg7") && sh("ip -o -6 address show wg7").contains("fd6b:")
                });
                assert!(running.signal(Signal::SIGINT));
                assert!(!sh("ip -o -6 address show wg7").contains("fd6b:"));
                assert_eq!(follows(&peers.get("mine").await.unwrap()), None);
                sh("ip link delete wg7; ip route flush proto 107; ip -6 route flush proto 107");
                peers.delete("mine", &DeleteParams::default()).await.unwrap();
            }
        }
        let said = refused(&kubeconfig, &["theirs", "--private-key", "/var/lib/key"]);
        assert!(said.contains("another key") && said.contains("--private-key"), "{said}");
        let said = refused(&kubeconfig, &["theirs"]);
        assert!(said.contains("its private key is not in /var/lib/kilo/theirs.key"), "{said}");
        assert!(!Path::new("/var/lib/kilo/theirs.key").exists(), "a new key would be of no use");
        let said = refused(&kubeconfig, &["UPPER_case"]);
        assert!(said.contains("lower case"), "{said}");
        let said = refused(&kubeconfig, &["x", "--allowed-ip", "10.0.0.0/8"]);
        assert!(said.contains("10.0.0.0/8 is a network") && said.contains("10.0.0.1/32"), "{said}");
        let said = refused(&server.kubeconfig(api::NOBODY, server.port()), &["x"]);
        assert!(said.contains("forbidden"), "{said}");
        assert!(!Path::new("/var/lib/kilo/x.key").exists(), "nothing was done with a key");
        let said = refused(&kubeconfig, &["x", "--allowed-ip", "10.5.0.7/32"]);
        assert!(said.contains("10.5.0.7 belongs to Peer \"theirs\" already"), "{said}");
        assert!(peers.get_opt("x").await.unwrap().is_none(), "it would take the address, or get none");
        let nobody = kgctl(&kubeconfig, &["x"]).uid(65534).output().unwrap();
        let said = String::from_utf8_lossy(&nobody.stderr).into_owned();
        assert!(said.contains("run it as root"), "{said}");
        std::fs::write("/var/lib/rubbish", "no key").unwrap();
        let said = refused(&kubeconfig, &["x", "--private-key", "/var/lib/rubbish"]);
        assert!(said.contains("/var/lib/rubbish"), "{said}");
        nothing_left();
    });
}
