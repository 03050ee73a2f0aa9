//! One node of a file-based cluster, for a real `kg` in a network namespace.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kilo_core::wireguard::key::PublicKey;
use kilo_host::dataplane;

pub use crate::scrape::{has_done, metrics};
use crate::{netns::sh, wait::until};

const CLUSTER: &str = "/run/cluster";
const BPFFS: &str = "/sys/fs/bpf";

/// Sets up links, mounts, and the node itself, n1 of location a.
pub fn prepare() {
    sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/cluster; mount -t sysfs sys /sys; \
        mount -t bpf bpf /sys/fs/bpf; ip link set lo up; \
        ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
        ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
        ip route add default via 10.1.0.1 dev eth0; \
        echo 10.1.0.11 n1 > /run/hosts; mount --bind /run/hosts /etc/hosts");
    write(
        "n1",
        "kind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/region: a}}\nspec: {podCIDRs: [10.42.1.0/24, 'fd00:42:1::/64']}\n",
    );
}

/// The command for an agent; `before` are words in front of it.
pub fn kg(before: &[&str]) -> Command {
    let words: Vec<&str> = before
        .iter()
        .copied()
        .chain([env!("CARGO_BIN_EXE_kg"), "--backend", "file", "--backend-dir", CLUSTER, "--hostname", "n1"])
        .chain(["--cni=false", "--iptables-forward-rules", "--resync-period", "1h", "--log-level", "warn"])
        .collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Waits until duplicate address detection has finished for all IPv6 addresses.
pub fn settle() {
    let tentative = || sh("ip -6 address show tentative");
    until("no IPv6 address is tentative", Duration::from_secs(10), || tentative().is_empty());
}

/// State of the host, keyed by what it shows.
pub fn host() -> BTreeMap<String, String> {
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

/// Writes the file atomically, so that the agent never reads half of it.
pub fn write(name: &str, yaml: &str) {
    fs::write("/run/aside", yaml).unwrap();
    fs::rename("/run/aside", format!("{CLUSTER}/{name}.yaml")).unwrap();
}

pub fn remove(name: &str) {
    fs::remove_file(format!("{CLUSTER}/{name}.yaml")).unwrap();
}

pub fn write_node(number: u8, location: &str, pod_cidr: &str, leader: bool) {
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

pub fn write_peer(allowed_ip: &str) {
    let key = PublicKey([99; 32]);
    write(
        "laptop",
        &format!(
            "kind: Peer\nmetadata: {{name: laptop}}\nspec: {{allowedIPs: [{allowed_ip}], publicKey: {key}}}\n"
        ),
    );
}

/// Sections that differ, each with both versions.
pub fn differences(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> String {
    let differing = before.iter().filter(|(what, shown)| after.get(*what) != Some(shown));
    differing
        .map(|(what, shown)| format!("{what} before:\n{shown}\n{what} after:\n{}\n", after[what]))
        .collect()
}
