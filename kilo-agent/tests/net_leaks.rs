//! A real `kg` through 200 reconfigurations: nothing is left over on the host
//! or in the process. `KILO_ROUNDS=n` makes it longer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod netns;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kilo_agent::{dataplane, wireguard::key::PublicKey};
use netns::{isolated, sh};

const CLUSTER: &str = "/run/cluster";
const BPFFS: &str = "/sys/fs/bpf";
/// Rounds of ten reconfigurations.
const ROUNDS: usize = 20;
/// Most time for one change, on a slow machine.
const LIMIT: Duration = Duration::from_secs(20);

/// Ends the agent with the test.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        // The userspace WireGuard device is a process of its own.
        let _ = sh("ip link del kilo0 2>/dev/null || true");
    }
}

impl Agent {
    fn start() -> Self {
        sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/cluster; mount -t sysfs sys /sys; \
            mount -t bpf bpf /sys/fs/bpf; ip link set lo up; \
            ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
            ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
            ip route add default via 10.1.0.1 dev eth0");
        write(
            "n1",
            "kind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/region: a}}\nspec: {podCIDRs: [10.42.1.0/24, 'fd00:42:1::/64']}\n",
        );
        let agent = Command::new(env!("CARGO_BIN_EXE_kg"))
            .args([
                "--backend",
                "file",
                "--backend-dir",
                CLUSTER,
                "--hostname",
                "n1",
                "--cni=false",
                "--iptables-forward-rules",
            ])
            .args(["--resync-period", "1h", "--log-level", "warn"])
            .spawn()
            .unwrap();
        Self(agent)
    }

    /// What the process holds: how many open files of each kind, and threads.
    fn held(&self) -> BTreeMap<String, usize> {
        let process = Path::new("/proc").join(self.0.id().to_string());
        let mut held =
            BTreeMap::from([("thread".to_owned(), fs::read_dir(process.join("task")).unwrap().count())]);
        for entry in fs::read_dir(process.join("fd")).unwrap().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            // Numbers of sockets and pipes differ.
            let name = target.to_string_lossy().into_owned();
            let kind = name.strip_prefix("anon_inode:").or(name.split_once(":[").map(|(kind, _)| kind));
            *held.entry(kind.unwrap_or(&name).to_owned()).or_default() += 1;
        }
        held
    }

    /// Resident memory that is its own, in KiB.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

/// What is on the host, by what shows it.
fn host() -> BTreeMap<String, String> {
    let commands = [
        ("links", "ip -o link"),
        ("addresses", "ip -o address"),
        ("IPv4 routes", "ip route show table all"),
        ("IPv6 routes", "ip -6 route show table all"),
        ("rules", "ip rule; ip -6 rule"),
        ("neighbours", "ip neighbour show nud permanent; ip neighbour show | grep managed || true"),
        ("qdiscs", "tc qdisc show"),
        (
            "filters",
            "for i in eth0 kilo0; do tc filter show dev $i ingress; tc filter show dev $i egress; done",
        ),
        ("nftables", "nft list ruleset | sed 's/packets [0-9]* bytes [0-9]*//'"),
        (
            "WireGuard",
            "wg show kilo0 allowed-ips; wg show kilo0 endpoints; wg show kilo0 persistent-keepalive",
        ),
        ("pins", "find /sys/fs/bpf | sort"),
        ("files", "find /run /var/lib | sort"),
    ];
    let mut shown: BTreeMap<_, _> =
        commands.iter().map(|(what, command)| ((*what).to_owned(), sh(command))).collect();
    let tables = dataplane::read_tables(Path::new(BPFFS)).unwrap();
    shown.insert("map entries".to_owned(), format!("{tables:#?}"));
    shown
}

/// Complete at once, so that the agent reads no half of it.
fn write(name: &str, yaml: &str) {
    fs::write("/run/aside", yaml).unwrap();
    fs::rename("/run/aside", format!("{CLUSTER}/{name}.yaml")).unwrap();
}

fn remove(name: &str) {
    fs::remove_file(format!("{CLUSTER}/{name}.yaml")).unwrap();
}

fn write_node(number: u8, location: &str, pod_cidr: &str, leader: bool) {
    let seen = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let key = PublicKey([number; 32]);
    let leader = if leader { "    kilo.squat.ai/leader: ''\n" } else { "" };
    write(
        &format!("n{number}"),
        &format!(
            "kind: Node\nmetadata:\n  name: n{number}\n  labels: {{topology.kubernetes.io/region: {location}}}\n  annotations:\n{leader}    \
             kilo.squat.ai/key: {key}\n    kilo.squat.ai/endpoint: 192.0.2.{number}:51820\n    kilo.squat.ai/internal-ip: 10.1.0.{number}/24\n    \
             kilo.squat.ai/last-seen: '{seen}'\n    kilo.squat.ai/wireguard-ip: 10.4.0.{number}/16\nspec: {{podCIDRs: [{pod_cidr}, 'fd00:42:{number}::/64']}}\n"
        ),
    );
}

fn write_peer(allowed_ip: &str) {
    let key = PublicKey([99; 32]);
    write(
        "laptop",
        &format!(
            "kind: Peer\nmetadata: {{name: laptop}}\nspec: {{allowedIPs: [{allowed_ip}], publicKey: {key}}}\n"
        ),
    );
}

/// The metrics of the agent; empty while nobody answers.
fn metrics() -> BTreeMap<String, u64> {
    let mut text = String::new();
    let asked = TcpStream::connect("127.0.0.1:1107").and_then(|mut stream| {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kg\r\nConnection: close\r\n\r\n")?;
        stream.read_to_string(&mut text)
    });
    drop(asked);
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

/// Makes a change, and waits until the agent has written something for it and
/// counts as many nodes and peers, and leads or not, as it should.
fn reconfigure(what: &str, [leads, nodes, peers]: [u64; 3], change: impl FnOnce()) {
    let before = metrics().get("kilo_writes_total").copied();
    change();
    let started = Instant::now();
    loop {
        let now = metrics();
        let gauges = ["kilo_leader", "kilo_nodes", "kilo_peers"].map(|name| now.get(name).copied());
        if gauges == [leads, nodes, peers].map(Some) && now.get("kilo_writes_total").copied() > before {
            return;
        }
        assert!(started.elapsed() < LIMIT, "{what}: leads, nodes, peers are {gauges:?} within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ten reconfigurations that end where they began.
fn round() {
    reconfigure("a node joins the location", [1, 2, 0], || write_node(2, "a", "10.42.2.0/24", false));
    reconfigure("it becomes the leader", [0, 2, 0], || write_node(2, "a", "10.42.2.0/24", true));
    reconfigure("a location joins", [0, 3, 0], || write_node(3, "b", "10.42.3.0/24", false));
    reconfigure("a peer joins", [0, 3, 1], || write_peer("10.5.0.1/32"));
    reconfigure("we lead again", [1, 3, 1], || write_node(2, "a", "10.42.2.0/24", false));
    reconfigure("the peer changes", [1, 3, 1], || write_peer("10.5.0.2/32"));
    reconfigure("pods elsewhere have other addresses", [1, 3, 1], || {
        write_node(3, "b", "10.42.7.0/24", false);
    });
    reconfigure("the other node leaves", [1, 2, 1], || remove("n2"));
    reconfigure("the peer leaves", [1, 2, 0], || remove("laptop"));
    reconfigure("the location leaves", [1, 1, 0], || remove("n3"));
}

/// Sections that differ, each with both sides.
fn differences(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> String {
    let differing = before.iter().filter(|(what, shown)| after.get(*what) != Some(shown));
    differing
        .map(|(what, shown)| format!("{what} before:\n{shown}\n{what} after:\n{}\n", after[what]))
        .collect()
}

#[test]
fn two_hundred_reconfigurations_leave_nothing_over() {
    isolated("two_hundred_reconfigurations_leave_nothing_over", || async {
        let agent = Agent::start();
        reconfigure("the agent starts", [1, 1, 0], || {});
        // What is made once and kept (threads, connections, hooks) is there after one round.
        round();
        std::thread::sleep(Duration::from_secs(1));
        let (before, held, memory) = (host(), agent.held(), agent.memory());
        let rounds = std::env::var("KILO_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(ROUNDS);
        let started = Instant::now();
        for _ in 0..rounds {
            round();
        }
        println!("{} reconfigurations in {:?}", 10 * rounds, started.elapsed());
        // Idle threads and the last connection take their time to go.
        let more = || {
            let now = agent.held();
            now.into_iter()
                .filter(|(kind, count)| *count > held.get(kind).copied().unwrap_or(0))
                .collect::<Vec<_>>()
        };
        let deadline = Instant::now() + LIMIT;
        while (host() != before || !more().is_empty()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(500));
        }
        assert_eq!(differences(&before, &host()), "", "left over on the host");
        assert_eq!(more(), [], "more than before: {held:?}");
        println!("own memory {memory} KiB before, {} KiB after", agent.memory());
        assert!(
            agent.memory() < memory + 8 * 1024,
            "memory grows: {memory} KiB, then {} KiB",
            agent.memory()
        );
        let errors: Vec<_> =
            metrics().into_iter().filter(|(name, _)| name.starts_with("kilo_errors")).collect();
        assert_eq!(errors, [], "errors on the way");
    });
}
