//! Time from applying the object of a VPN peer to the first packet that reaches the peer through WireGuard.

use std::{
    net::UdpSocket,
    os::fd::AsFd as _,
    process::{Child, Command},
    sync::mpsc,
    time::{Duration, Instant},
};

use kilo_core::wireguard::key::SecretKey;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, PostParams},
};
use serde_json::json;

use crate::{netns, process::kg};

const ADDRESS: &str = "10.250.200.77";
/// Addresses of node and peer on the link between them.
const NODE: &str = "192.0.2.11:51820";
const PEER: &str = "192.0.2.77";
const PORT: u16 = 51_821;

/// The peer's end: a namespace with a WireGuard device, set up before the object exists.
pub struct Device {
    process: Child,
    key: SecretKey,
}

impl Device {
    /// `node_key`: public key that the node has published.
    pub fn start(node_key: &str) -> Self {
        let key = SecretKey::from_bytes([0x48; 32]);
        let process = Command::new("ip")
            .args(["netns", "exec", "peer", &kg(), "userspace-wireguard", "wg-peer"])
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !netns::succeeds("wg show wg-peer") {
            assert!(Instant::now() < deadline, "the peer's device does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        netns::sh(&format!(
            "umask 077; echo {} > /tmp/peer.key; wg set wg-peer private-key /tmp/peer.key listen-port {PORT} \
             peer {node_key} endpoint {NODE} allowed-ips 10.0.0.0/8; \
             ip -n peer address add {ADDRESS}/32 dev wg-peer; ip -n peer link set wg-peer up; \
             ip -n peer route add 10.0.0.0/8 dev wg-peer",
            base64(&key),
        ));
        Self { process, key }
    }

    /// Creates the object; returns the time until the first packet arrived.
    pub async fn measure(&self, objects: &Api<DynamicObject>) -> Duration {
        let (sender, arrived) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let receiver = std::thread::spawn(move || {
            let namespace = std::fs::File::open("/run/netns/peer").unwrap();
            nix::sched::setns(namespace.as_fd(), nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let socket = UdpSocket::bind((ADDRESS, 9999)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            ready.send(()).unwrap();
            socket.recv(&mut [0; 16]).expect("no packet within 120 s");
            let _ = sender.send(Instant::now());
        });
        is_ready.recv().unwrap();
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
            "spec": {
                "allowedIPs": [format!("{ADDRESS}/32")],
                "publicKey": self.key.public().to_string(),
                "endpoint": {"dnsOrIP": {"ip": PEER}, "port": PORT},
            },
        });
        let started = Instant::now();
        objects.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let packet = loop {
            // A new socket each time: the route determines the source address.
            let sent = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"x", (ADDRESS, 9999)));
            drop(sent);
            match arrived.try_recv() {
                Ok(packet) => break packet,
                Err(_) => assert!(started.elapsed() < Duration::from_secs(120), "no packet"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        receiver.join().unwrap();
        objects.delete("laptop", &DeleteParams::default()).await.unwrap();
        packet.duration_since(started)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = netns::succeeds("ip -n peer link del wg-peer; rm -f /run/wireguard/wg-peer.sock");
    }
}

fn base64(key: &SecretKey) -> String {
    use kilo_core::wireguard::key::PublicKey;
    // The same text form as a public key's.
    PublicKey(*key.as_bytes()).to_string()
}
