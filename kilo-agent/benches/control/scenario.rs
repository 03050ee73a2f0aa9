//! A real agent on a real API server with a mesh of generated nodes.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
};

use crate::{
    Figures,
    api::{ADMIN, ApiServer, apply_crds},
    by_slices::Slices,
    check_ins::{CheckIns, unix_now},
    compute::{median, milliseconds},
    counted::Counted,
    first_packet, netns, objects,
    process::Agent,
    trace::{Asked, Trace},
};

/// VPN peers in every mesh; the one of [`NODES_BESIDE_MANY_PEERS`] nodes has [`MANY_PEERS`] at the end.
const PEERS: usize = 100;
const MANY_PEERS: usize = 10_000;
const NODES_BESIDE_MANY_PEERS: usize = 1000;
/// In a mesh of this many nodes, slices are measured at the end.
const NODES_OF_SLICES: usize = 10_000;
/// Long enough for everything that a change causes, without a resync.
const SETTLE: Duration = Duration::from_millis(2500);
const CHANGES: usize = 3;

pub async fn measure(figures: &mut Figures, nodes: usize) {
    make_host();
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create(&client, nodes).await;
    let check_ins = CheckIns::start(&client, nodes);
    let proxy = Counted::start(server.port()).await;
    let kubeconfig = server.kubeconfig(ADMIN, proxy.port);
    let own = objects::name(objects::OWN);

    let mut agent = Agent::start(&kubeconfig, &own);
    agent.until("kilo_nodes", |value| value == nodes as f64).await;
    agent.until("kilo_reconcile_duration_seconds_count", |value| value >= 1.0).await;
    figures.add(nodes, "first start: mesh in the kernel", "ms", milliseconds(agent.age()));
    figures.add(nodes, "first start: bytes received", "bytes", proxy.received() as f64);
    tokio::time::sleep(Duration::from_secs(5)).await;

    // Twenty locations: `nodes` is a multiple of them.
    for (what, number) in [("another location", nodes + 1), ("the own location", nodes)] {
        join(figures, &client, &mut agent, &check_ins, (nodes, what, number)).await;
    }
    let api: Api<DynamicObject> =
        Api::all_with(client.clone(), &ApiResource::erase::<kilo_core::objects::peer::Peer>(&()));
    let node_key = published_key(&client, &own).await;
    figures.add(nodes, "Peer applied to first packet", "ms", first_packets(&node_key, &api).await);

    rest(figures, &mut agent, nodes, &check_ins, &proxy).await;

    figures.add(nodes, "stop", "ms", milliseconds(agent.stop().await));
    let mut agent = Agent::start(&kubeconfig, &own);
    agent.until("kilo_reconcile_duration_seconds_count", |value| value >= 1.0).await;
    figures.add(nodes, "start to data path adopted", "ms", milliseconds(agent.age()));
    figures.add(nodes, "start: processor time", "ms", milliseconds(agent.ran()));
    agent.until("kilo_nodes", |value| value == nodes as f64).await;
    if nodes == NODES_OF_SLICES {
        drop(check_ins);
        agent.stop().await;
        agent = by_slices(figures, &client, (&kubeconfig, &own), nodes, &proxy).await;
    } else if nodes == NODES_BESIDE_MANY_PEERS {
        let started = Instant::now();
        create_peers(&client, PEERS..MANY_PEERS).await;
        println!("bench: created {MANY_PEERS} peers in {:.1} s", started.elapsed().as_secs_f64());
        agent.until("kilo_peers", |value| value == MANY_PEERS as f64).await;
        tokio::time::sleep(SETTLE).await;
        beside_many_peers(figures, &mut agent, nodes, (&node_key, &api)).await;
        agent.stop().await;
        agent = Agent::start(&kubeconfig, &own);
        agent.until("kilo_reconcile_duration_seconds_count", |value| value >= 1.0).await;
        figures.add(nodes, "10,000 Peers: start to data path adopted", "ms", milliseconds(agent.age()));
        figures.add(nodes, "10,000 Peers: start: processor time", "ms", milliseconds(agent.ran()));
    }
    drop((agent, server));
    netns::sh(
        "ip link del kilo0; ip link del eth0; ip netns del peer; sleep 1; umount -l /run /tmp /var/lib /sys/fs/bpf",
    );
}

/// Sets up a private and a public address, a default route without a router, a link to the peer, and
/// forwarding, which a confined agent cannot turn on and would complain about at each reconcile. From the
/// second size on, `/sys` already belongs to this namespace.
fn make_host() {
    netns::sh(
        "mount -t tmpfs lib /var/lib; mount -t tmpfs tmp /tmp; mount -t tmpfs run /run; mkdir -p /run/wireguard /run/netns; \
         mountpoint -q /sys/fs/bpf || mount -t sysfs sys /sys 2>/dev/null || true; mount -t bpf bpf /sys/fs/bpf; \
         ip link del kilo0 2>/dev/null || true; \
         ip netns add peer; ip link set lo up; ip link add eth0 type veth peer name eth0 netns peer; \
         ip address add 10.201.0.1/16 dev eth0; ip address add 192.0.2.11/24 dev eth0; ip link set eth0 up; \
         ip -n peer address add 192.0.2.77/24 dev eth0; ip -n peer link set eth0 up; ip -n peer link set lo up; \
         ip route add default via 192.0.2.254 dev eth0; sysctl -qw net.ipv4.ip_forward=1",
    );
}

async fn create(client: &Client, nodes: usize) {
    let started = Instant::now();
    let api: Api<core::Node> = Api::all(client.clone());
    let now = unix_now();
    stream::iter(0..nodes)
        .for_each_concurrent(16, |number| {
            let api = api.clone();
            async move { drop(api.create(&PostParams::default(), &objects::node(number, now)).await.unwrap()) }
        })
        .await;
    create_peers(client, 0..PEERS).await;
    println!("bench: created {nodes} nodes and {PEERS} peers in {:.1} s", started.elapsed().as_secs_f64());
}

async fn create_peers(client: &Client, numbers: std::ops::Range<usize>) {
    let peers: Api<DynamicObject> =
        Api::all_with(client.clone(), &ApiResource::erase::<kilo_core::objects::peer::Peer>(&()));
    stream::iter(numbers)
        .for_each_concurrent(16, |number| {
            let (peers, peer) = (peers.clone(), serde_json::from_value(objects::peer(number)).unwrap());
            async move { drop(peers.create(&PostParams::default(), &peer).await.unwrap()) }
        })
        .await;
}

/// Measures adding and removing one peer beside many.
async fn beside_many_peers(
    figures: &mut Figures,
    agent: &mut Agent,
    nodes: usize,
    (node_key, peers): (&str, &Api<DynamicObject>),
) {
    let before = agent.metrics().await;
    let first_packet = first_packets(node_key, peers).await;
    let after = agent.metrics().await;
    let rise = |name: &str| after[name] - before[name];
    let reconcile =
        rise("kilo_reconcile_duration_seconds_sum") / rise("kilo_reconcile_duration_seconds_count");
    figures.add(nodes, "10,000 Peers: one more to first packet", "ms", first_packet);
    figures.add(nodes, "10,000 Peers: one more or less: reconcile", "ms", reconcile * 1000.0);
    figures.add(nodes, "10,000 Peers: memory", "MB", agent.memory().0);
}

/// Milliseconds until a packet reaches a new peer: the median.
async fn first_packets(node_key: &str, peers: &Api<DynamicObject>) -> f64 {
    let device = first_packet::Device::start(node_key);
    let mut times = Vec::new();
    for _ in 0..CHANGES {
        times.push(device.measure(peers).await);
        tokio::time::sleep(SETTLE).await;
    }
    milliseconds(median(times))
}

async fn published_key(client: &Client, own: &str) -> String {
    let node = Api::<core::Node>::all(client.clone()).get(own).await.unwrap();
    node.metadata.annotations.unwrap()["kilo.squat.ai/key"].clone()
}

/// Measures one node that joins: what that asks of the kernel, and how long it takes.
async fn join(
    figures: &mut Figures,
    client: &Client,
    agent: &mut Agent,
    check_ins: &CheckIns,
    (nodes, what, number): (usize, &str, usize),
) {
    let api: Api<core::Node> = Api::all(client.clone());
    let create =
        || async { api.create(&PostParams::default(), &objects::node(number, unix_now())).await.unwrap() };
    let delete = || async {
        api.delete(&objects::name(number), &DeleteParams::default()).await.unwrap();
        tokio::time::sleep(SETTLE).await;
    };
    let (mut reconciles, mut to_kernel, mut spent) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..CHANGES {
        let mut monitor = Monitor::start();
        let before = agent.metrics().await;
        let ran = agent.ran();
        let started = Instant::now();
        create().await;
        to_kernel.push(monitor.until(&objects::pods(number).to_string()).duration_since(started));
        // Read at once: what follows the route is not part of the change, such as writing the last good
        // topology.
        spent.push(agent.ran() - ran);
        drop(monitor);
        let (count, writes) = ("kilo_reconcile_duration_seconds_count", "kilo_writes_total");
        agent.until(writes, |value| value > before[writes]).await;
        agent.until(count, |value| value > before[count]).await;
        let after = agent.metrics().await;
        let rise = |name: &str| after[name] - before[name];
        reconciles.push(Duration::from_secs_f64(rise("kilo_reconcile_duration_seconds_sum") / rise(count)));
        tokio::time::sleep(SETTLE).await;
        delete().await;
    }
    figures.add(nodes, &format!("node joins {what}: reconcile"), "ms", milliseconds(median(reconciles)));
    figures.add(nodes, &format!("node joins {what}: to its route"), "ms", milliseconds(median(to_kernel)));
    figures.add(nodes, &format!("node joins {what}: processor time"), "ms", milliseconds(median(spent)));

    check_ins.set(false);
    let trace = Trace::start(agent.id()).await;
    let idle = trace.here();
    tokio::time::sleep(SETTLE).await;
    let idle = trace.stop(idle);
    let trace = Trace::start(agent.id()).await;
    let from = trace.here();
    create().await;
    tokio::time::sleep(SETTLE).await;
    let asked = trace.stop(from);
    check_ins.set(true);
    delete().await;
    let mut add = |what: String, unit, of: fn(&Asked) -> usize| {
        figures.add(nodes, &what, unit, of(&asked).saturating_sub(of(&idle)) as f64);
    };
    add(format!("node joins {what}: system calls"), "calls", |asked| asked.calls);
    add(format!("node joins {what}: map writes"), "writes", |asked| asked.map_writes);
    add(format!("node joins {what}: netlink writes"), "messages", |asked| asked.netlink_writes);
    add(format!("node joins {what}: netlink reads"), "messages", |asked| asked.netlink_reads);
    add(format!("node joins {what}: WireGuard writes"), "requests", |asked| asked.wireguard_writes);
}

/// Output of `ip monitor route`.
struct Monitor {
    child: std::process::Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Monitor {
    fn start() -> Self {
        let mut child = Command::new("ip")
            .args(["monitor", "route"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        std::thread::sleep(Duration::from_millis(100));
        Self { child, lines }
    }

    /// Waits for a line with this text; returns when it came.
    fn until(&mut self, text: &str) -> Instant {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "ip monitor ended");
        }
        Instant::now()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures an agent that reads slices while nothing happens.
async fn by_slices(
    figures: &mut Figures,
    client: &Client,
    (kubeconfig, own): (&Path, &str),
    nodes: usize,
    proxy: &Counted,
) -> Agent {
    let flags = ["--slices=auto"];
    // This run publishes that the agent promises heartbeats.
    let mut agent = Agent::start_with(kubeconfig, own, &flags);
    agent.until("kilo_reconcile_duration_seconds_count", |value| value >= 2.0).await;
    agent.stop().await;
    let _slices = Slices::write(client, own).await;
    let received = proxy.received();
    let mut agent = Agent::start_with(kubeconfig, own, &flags);
    agent.until("kilo_slices_in_use", |value| value == 1.0).await;
    agent.until("kilo_nodes", |value| value == nodes as f64).await;
    figures.add(nodes, "by slices: start: bytes received", "bytes", (proxy.received() - received) as f64);
    // What the start needed is given back after the first reconcile, and after the next periodic one.
    tokio::time::sleep(Duration::from_secs(40)).await;
    let (ran, started, received) = (agent.ran(), Instant::now(), proxy.received());
    tokio::time::sleep(rest_time()).await;
    let (ran, spent) = (agent.ran() - ran, started.elapsed().as_secs_f64());
    agent.until("kilo_slices_in_use", |value| value == 1.0).await;
    figures.add(nodes, "by slices: at rest: processor", "% of a core", ran.as_secs_f64() / spent * 100.0);
    figures.add(nodes, "by slices: at rest: memory", "MB", agent.memory().0);
    let bytes = (proxy.received() - received) as f64 / spent;
    figures.add(nodes, "by slices: at rest: bytes received", "a second", bytes);
    agent
}

/// `KILO_BENCH_REST`, in seconds.
fn rest_time() -> Duration {
    Duration::from_secs(std::env::var("KILO_BENCH_REST").map_or(60, |seconds| seconds.parse().unwrap()))
}

/// Its metrics once it has nothing left to write: what nodes and Peers leave behind is closed for a minute,
/// and opened at the next periodic reconcile, every 30 s.
async fn settled(agent: &mut Agent) -> BTreeMap<String, f64> {
    let writes = "kilo_writes_total";
    let mut before = agent.metrics().await;
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(31)).await;
        let after = agent.metrics().await;
        let is_settled = after[writes] == before[writes];
        before = after;
        if is_settled {
            break;
        }
    }
    before
}

/// Measures the agent while nothing happens but heartbeats.
async fn rest(figures: &mut Figures, agent: &mut Agent, nodes: usize, check_ins: &CheckIns, proxy: &Counted) {
    let before = settled(agent).await;
    let (ran, written, received, started) =
        (agent.ran(), check_ins.written(), proxy.received(), Instant::now());
    tokio::time::sleep(rest_time()).await;
    if let Some(profile) = std::env::var_os("KILO_BENCH_PERF") {
        let id = agent.id().to_string();
        let mut perf = Command::new("perf");
        perf.args(["record", "-q", "-g", "-F", "997", "-p", &id, "-o"])
            .arg(profile)
            .args(["--", "sleep", "20"]);
        assert!(perf.status().unwrap().success());
    }
    let spent = started.elapsed().as_secs_f64();
    let events = check_ins.written() - written;
    let bytes = proxy.received() - received;
    let used = agent.ran() - ran;
    let after = agent.metrics().await;
    let (now, most) = agent.memory();
    figures.add(nodes, "at rest: processor", "% of a core", used.as_secs_f64() / spent * 100.0);
    figures.add(nodes, "at rest: memory", "MB", now);
    figures.add(nodes, "at most: memory", "MB", most);
    figures.add(nodes, "at rest: events received", "a second", events as f64 / spent);
    figures.add(nodes, "at rest: bytes received", "a second", bytes as f64 / spent);
    figures.add(nodes, "at rest: bytes of an event", "bytes", bytes as f64 / events as f64);
    let reconciles = "kilo_reconcile_duration_seconds_count";
    figures.add(
        nodes,
        "at rest: reconciles",
        "a minute",
        (after[reconciles] - before[reconciles]) / spent * 60.0,
    );
    let writes = "kilo_writes_total";
    figures.add(nodes, "at rest: writes to the kernel", "writes", after[writes] - before[writes]);
}
