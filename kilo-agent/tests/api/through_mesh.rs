//! An API server that one location can reach only through the mesh.
//!
//! ```text
//!   here, lan-a 10.1.0.0/24           router           there, lan-b 10.2.0.0/24
//!   a1 .11 (leads) ──┐            ┌── lan-a  lan-b ──┐
//!   a2 .12 (API)   ──┴────────────┘  ^ a site link    └── b1 .11 (leads)
//!   a1 192.0.2.11 ──────────────── wan ────────────────── b1 192.0.2.21
//! ```
//!
//! a2 is the test's own namespace. b1 joins over the site link, which is then cut.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;
use crate::wait::{pace, task, time_passes};

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    net::UdpSocket,
    path::PathBuf,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_core::wireguard::key::PublicKey;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use nix::sched::{CloneFlags, setns};
use parking_lot::Mutex;
use serde_json::{Value, json};

use api::{ADMIN, ApiServer, apply, apply_crds};
use netns::{isolated, sh};

/// Address of the API server's node, reachable only inside the mesh.
const SERVER: &str = "10.1.0.12";
const ECHO: &str = "10.1.0.12:7000";
/// How long a busy machine may delay datagrams.
const STRAGGLERS: Duration = Duration::from_secs(1);

const NETWORK: &str = "
    mkdir -p /run/netns /run/wireguard; mount -t sysfs sys /sys; ip link set lo up; sysctl -qw net.ipv4.ip_forward=1
    for n in router a1 b1; do ip netns add $n; ip -n $n link set lo up; ip netns exec $n sysctl -qw net.ipv4.ip_forward=1; done
    for n in a1 a2 b1; do mkdir -p /run/$n/lib /run/$n/wireguard /run/$n/bpf; mount -t bpf bpf /run/$n/bpf; done
    ip netns exec router sh -c 'for f in /proc/sys/net/bridge/bridge-nf-call-ip*; do test ! -e $f || echo 0 > $f; done'
    for lan in lan-a lan-b wan; do ip -n router link add $lan type bridge; ip -n router link set $lan up; done
    ip -n router address add 10.1.0.1/24 dev lan-a; ip -n router address add 10.2.0.1/24 dev lan-b
    join() { ip -n router link add $1 type veth peer name $4 netns $3; ip -n router link set $1 master $2 up; }
    join a1-lan lan-a a1 eth0; join a1-wan wan a1 eth1; join b1-lan lan-b b1 eth0; join b1-wan wan b1 eth1
    join a2-lan lan-a $$ eth0; ip link set eth0 up; ip address add 10.1.0.12/24 dev eth0; ip route add default via 10.1.0.1
    for n in a1 b1; do ip -n $n link set eth0 up; ip -n $n link set eth1 up; done
    ip -n a1 address add 10.1.0.11/24 dev eth0; ip -n a1 address add 192.0.2.11/24 dev eth1
    ip -n b1 address add 10.2.0.11/24 dev eth0; ip -n b1 address add 192.0.2.21/24 dev eth1
    ip -n a1 route add default via 192.0.2.1; ip -n b1 route add default via 192.0.2.1
    ip -n a1 route add 10.2.0.0/24 via 10.1.0.1; ip -n b1 route add 10.1.0.0/24 via 10.2.0.1";

/// Blocks everything from one LAN to the other.
const CUT: &str = "ip netns exec router nft 'table ip site {
    counter refused { }
    chain forward { type filter hook forward priority 0; counter name refused drop; }
}'";

/// Removes everything of an agent that a reboot removes; its files stay.
const REBOOT: &str =
    "ip -n b1 link delete kilo0; rm -r /run/b1/bpf/kilo; umount /run/b1/bpf; mount -t bpf bpf /run/b1/bpf
    ip -n b1 rule flush protocol 107; ip -n b1 route flush table all proto 107";

/// Diagnostics for a timeout's message.
const LOGS: &str = "for n in a1 a2 b1; do echo \"-- $n\"; tail -n 12 /run/$n/log || true; done; ip -n b1 route
    for n in a1 b1; do ip netns exec $n sh -ec \"mount --bind /run/$n/wireguard /run/wireguard; wg show kilo0 || true\"; done";

/// The agents, killed when the test ends.
struct Agents {
    kubeconfig: PathBuf,
    running: BTreeMap<&'static str, Child>,
}

impl Agents {
    /// `a2` runs in this namespace, the others in their own.
    fn start(&mut self, node: &'static str) {
        let inside = if node == "a2" {
            "exec unshare --mount".to_owned()
        } else {
            format!("exec ip netns exec {node}")
        };
        let line = format!(
            "{inside} sh -ec '
                mount --bind /run/{node}/lib /var/lib; mount --bind /run/{node}/wireguard /run/wireguard
                mount --bind /run/{node}/bpf /sys/fs/bpf
                exec {} --kubeconfig {} --hostname {node} --resync-period 5s --cni=false --log-level info \
                    --listen 127.0.0.1:1107 >> /run/{node}/log 2>&1'",
            env!("CARGO_BIN_EXE_kg"),
            self.kubeconfig.display()
        );
        self.running.insert(node, Command::new("sh").args(["-ec", &line]).spawn().unwrap());
    }

    /// Sends SIGKILL.
    fn kill(&mut self, node: &str) {
        let mut agent = self.running.remove(node).unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        for agent in self.running.values_mut() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        // Userspace WireGuard processes end with their interfaces.
        netns::succeeds("ip link delete kilo0; ip -n a1 link delete kilo0; ip -n b1 link delete kilo0");
    }
}

/// One datagram per millisecond from b1 to the API server's node and back.
struct Stream {
    stop: Arc<AtomicBool>,
    /// When each was sent, and whether its reply arrived.
    sent: Arc<Mutex<Vec<(Instant, bool)>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(Mutex::new(Vec::new()));
        let server = UdpSocket::bind(ECHO).unwrap();
        server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let ended = Arc::clone(&stop);
        let echo = std::thread::spawn(move || {
            let mut buffer = [0; 8];
            while !ended.load(Ordering::Relaxed) {
                if let Ok((_, from)) = server.recv_from(&mut buffer) {
                    let _ = server.send_to(&buffer, from);
                }
            }
        });
        let in_b1 = || setns(File::open("/run/netns/b1").unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
        let socket = std::thread::spawn(move || {
            in_b1();
            UdpSocket::bind("10.2.0.11:0").unwrap()
        });
        let socket = socket.join().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let (ended, seen, from) = (Arc::clone(&stop), Arc::clone(&sent), socket.try_clone().unwrap());
        let sender = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let number = {
                    let mut seen = seen.lock();
                    seen.push((Instant::now(), false));
                    seen.len() - 1
                };
                // Without a route it also counts as lost.
                let _ = from.send_to(&(number as u64).to_be_bytes(), ECHO);
                pace(Duration::from_millis(1));
            }
        });
        let (ended, seen) = (Arc::clone(&stop), Arc::clone(&sent));
        let receiver = std::thread::spawn(move || {
            let mut buffer = [0; 8];
            while !ended.load(Ordering::Relaxed) {
                if socket.recv(&mut buffer).is_ok() {
                    seen.lock()[u64::from_be_bytes(buffer) as usize].1 = true;
                }
            }
        });
        Self { stop, sent, threads: vec![echo, sender, receiver] }
    }

    /// Datagrams (sent, lost) since then; waits for those in flight.
    fn since(&self, since: Instant) -> (usize, usize) {
        let until = Instant::now();
        time_passes(STRAGGLERS, "answers may be under way");
        let sent = self.sent.lock();
        let window = sent.iter().filter(|(at, _)| (since..until).contains(at));
        let answers: Vec<bool> = window.map(|(_, answered)| *answered).collect();
        (answers.len(), answers.iter().filter(|answered| !**answered).count())
    }

    /// Send time of the first answered datagram after that moment.
    fn first_after(&self, moment: Instant) -> Option<Instant> {
        let sent = self.sent.lock();
        sent.iter().find(|(at, answered)| *answered && *at > moment).map(|(at, _)| *at)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

async fn until(what: &str, limit: u64, mut reached: impl AsyncFnMut() -> bool) -> Duration {
    let logs = || fmt::from_fn(|to| to.write_str(&sh(LOGS)));
    let began = Instant::now();
    task::until(
        what,
        Duration::from_secs(limit),
        async || if reached().await { Ok(()) } else { Err(logs()) },
    )
    .await;
    println!("{what}: after {:?}", began.elapsed());
    began.elapsed()
}

/// Output of `wg` in b1; empty without a device.
fn peers_of_b1() -> String {
    sh(
        "ip netns exec b1 sh -ec 'mount --bind /run/b1/wireguard /run/wireguard; wg show kilo0 allowed-ips 2>/dev/null || true'",
    )
}

/// Packets from one LAN to the other that bypassed the mesh and were blocked.
fn refused() -> u64 {
    let said = sh("ip netns exec router nft list counter ip site refused");
    said.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse().unwrap()
}

async fn create(client: &Client, name: &str, location: &str, pod_cidr: &str, annotations: Value) {
    let node = json!({
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/region": location}, "annotations": annotations},
        "spec": {"podCIDR": pod_cidr},
    });
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
}

/// Adds a peer, which b1 learns through the mesh; returns its key.
async fn add_peer(client: &Client, number: u8) -> String {
    let key = PublicKey([number; 32]).to_string();
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": format!("p{number}")},
        "spec": {"allowedIPs": [format!("10.5.0.{number}/32")], "publicKey": key},
    });
    apply(client, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
    key
}

async fn annotation(client: &Client, node: &str, name: &str) -> String {
    let node = Api::<core::Node>::all(client.clone()).get(node).await.unwrap();
    let annotations = node.metadata.annotations.unwrap_or_default();
    annotations.get(&format!("kilo.squat.ai/{name}")).cloned().unwrap_or_default()
}

async fn annotate(client: &Client, node: &str, annotations: Value) {
    let patch = json!({"metadata": {"annotations": annotations}});
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
}

#[test]
fn a_location_that_reaches_the_api_server_through_the_mesh_only_follows_it_and_comes_back_from_a_reboot() {
    let name = "a_location_that_reaches_the_api_server_through_the_mesh_only_follows_it_and_comes_back_from_a_reboot";
    isolated(name, || async {
        sh(NETWORK);
        let Some(server) = ApiServer::start_everywhere().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        for (name, location, cidr) in
            [("a1", "here", "10.42.1.0/24"), ("a2", "here", "10.42.2.0/24"), ("b1", "there", "10.42.3.0/24")]
        {
            create(&client, name, location, cidr, json!({})).await;
        }
        let kubeconfig = server.file("through-mesh.kubeconfig");
        let text = fs::read_to_string(server.kubeconfig(ADMIN, server.port())).unwrap();
        let inside = format!("tls-server-name: 127.0.0.1\n    server: https://{SERVER}");
        fs::write(&kubeconfig, text.replace("server: https://127.0.0.1", &inside)).unwrap();
        let mut agents = Agents { kubeconfig, running: BTreeMap::new() };
        for node in ["a1", "a2"] {
            agents.start(node);
        }
        until("a1 leads", 30, async || annotation(&client, "a1", "wireguard-ip").await == "10.4.0.1/16")
            .await;
        agents.start("b1");
        let stream = Stream::start();
        joins(&client, &stream).await;
        follows(&client, &stream).await;
        reboots(&client, &mut agents, &stream).await;
        leader_restarts(&client, &mut agents, &stream).await;
    });
}

/// The first join uses the site link, which is then cut.
async fn joins(client: &Client, stream: &Stream) {
    until("b1 has the way to the API server's node", 90, async || {
        sh(&format!("ip -n b1 route show {SERVER}")).contains("dev kilo0")
            && fs::read_to_string("/run/b1/lib/kilo/last-good.json").is_ok_and(|text| text.contains(SERVER))
    })
    .await;
    sh(CUT);
    until("a second of datagrams passes through the mesh", 30, async || {
        let began = Instant::now();
        task::time_passes(Duration::from_secs(1), "datagrams are counted").await;
        matches!(stream.since(began), (100.., 0))
    })
    .await;
    assert_eq!(
        annotation(client, "a1", "wireguard-ip").await,
        "10.4.0.1/16",
        "a1 leads, not the server's node"
    );
}

/// Changes at the server reach b1, and what b1 writes reaches the server.
async fn follows(client: &Client, stream: &Stream) {
    let (began, before) = (Instant::now(), refused());
    let key = add_peer(client, 9).await;
    until("a new peer is known", 10, async || peers_of_b1().contains(&key)).await;
    create(
        client,
        "c1",
        "elsewhere",
        "10.42.4.0/24",
        json!({
            "kilo.squat.ai/endpoint": "192.0.2.99:51820", "kilo.squat.ai/internal-ip": "10.3.0.1/24",
            "kilo.squat.ai/key": PublicKey([77; 32]).to_string(),
            "kilo.squat.ai/last-seen": kilo_agent::timestamp::Timestamp::now().0.to_string(),
        }),
    )
    .await;
    until("a new node is known", 10, async || peers_of_b1().contains("10.42.4.0/24")).await;
    annotate(
        client,
        "b1",
        json!({"kilo.squat.ai/force-endpoint": "192.0.2.21:51820",
                                  "kilo.squat.ai/persistent-keepalive": "7"}),
    )
    .await;
    until("its own annotation is obeyed", 10, async || {
        sh("ip netns exec b1 sh -ec 'mount --bind /run/b1/wireguard /run/wireguard; wg show kilo0 persistent-keepalive'")
            .contains('7')
    })
    .await;
    annotate(client, "b1", json!({"kilo.squat.ai/last-seen": "1"})).await;
    until("b1 has written what somebody else overwrote", 45, async || {
        annotation(client, "b1", "last-seen").await.len() > 1
    })
    .await;
    let (sent, lost) = stream.since(began);
    println!("changes through the mesh: {lost} of {sent} datagrams lost");
    assert!(sent > 100 && lost == 0, "{lost} of {sent} datagrams lost");
    assert_eq!(refused(), before, "nothing takes the site link");
}

/// b1 is killed and loses device and pins: only its agent can restore the path to the API server.
async fn reboots(client: &Client, agents: &mut Agents, stream: &Stream) {
    let written = annotation(client, "b1", "last-seen").await;
    agents.kill("b1");
    sh(REBOOT);
    let (down, before) = (Instant::now(), refused());
    // b1 can see this only through the mesh.
    let key = add_peer(client, 10).await;
    annotate(client, "b1", json!({"kilo.squat.ai/last-seen": "1"})).await;
    // Nothing in b1 sends by itself now.
    assert!(!netns::succeeds("ip netns exec b1 ping -c 2 -W 1 10.1.0.12"), "b1 reaches the API server");
    assert!(refused() > before, "without the mesh there is no way");
    let (sent, lost) = stream.since(down);
    assert_eq!(sent, lost, "no datagram is answered meanwhile");
    let started = Instant::now();
    agents.start("b1");
    until("datagrams pass again", 30, async || stream.first_after(started).is_some()).await;
    let back = stream.first_after(started).unwrap();
    let said = fs::read_to_string("/run/b1/log").unwrap();
    assert!(said.contains("working with the last good topology"), "{said}");
    until("b1 knows what changed meanwhile", 40, async || peers_of_b1().contains(&key)).await;
    until("b1 has checked in", 40, async || annotation(client, "b1", "last-seen").await.len() > 1).await;
    assert!(annotation(client, "b1", "last-seen").await >= written);
    let (sent, lost) = stream.since(back);
    println!(
        "reboot: datagrams pass {:?} after the agent's start; {lost} of {sent} lost since",
        back - started
    );
    assert!(sent > 100 && lost == 0, "{lost} of {sent} datagrams lost since the way is back");
}

/// The agent of the leader on the path is killed: the path stays.
async fn leader_restarts(client: &Client, agents: &mut Agents, stream: &Stream) {
    let (began, before) = (Instant::now(), refused());
    agents.kill("a1");
    let key = add_peer(client, 11).await;
    until("a change passes the leader whose agent is dead", 10, async || peers_of_b1().contains(&key)).await;
    let restarted = kilo_agent::timestamp::Timestamp::now().0;
    agents.start("a1");
    until("the leader's agent is back", 30, async || {
        annotation(client, "a1", "last-seen").await.parse::<i64>().is_ok_and(|seen| seen >= restarted)
    })
    .await;
    let (sent, lost) = stream.since(began);
    println!("leader's agent killed: {lost} of {sent} datagrams lost");
    assert!(sent > 100 && lost == 0, "{lost} of {sent} datagrams lost");
    assert_eq!(refused(), before, "nothing takes the site link");
}
