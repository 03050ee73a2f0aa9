//! Broken hosts and Node objects: the log of a real `kg` and `kgctl status` say what to do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;
use crate::wait::until;

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use netns::{Agent, isolated, sh};

const LIMIT: Duration = Duration::from_secs(20);

const LOG: &str = "/run/kg.log";

/// Sets up a host with one node and a private address, and starts a `kg` on it.
fn start(node: &str, arguments: &[&str]) -> Agent {
    sh(
        "mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/cluster /run/net.d; mount -t sysfs sys /sys; \
        mount -t bpf bpf /sys/fs/bpf; ip link set lo up; \
        ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
        ip address add 10.1.0.11/24 dev eth0; ip route add default via 10.1.0.1 dev eth0",
    );
    fs::write("/run/cluster/n1.yaml", format!("apiVersion: v1\nkind: Node\nmetadata: {{name: n1}}\n{node}"))
        .unwrap();
    let log = fs::File::create(LOG).unwrap();
    let agent = Command::new(env!("CARGO_BIN_EXE_kg"))
        .args([
            "--backend",
            "file",
            "--backend-dir",
            "/run/cluster",
            "--hostname",
            "n1",
            "--resync-period",
            "1s",
        ])
        .args(arguments)
        .stdout(log)
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    Agent(agent)
}

fn status(arguments: &str) -> String {
    let kgctl = env!("CARGO_BIN_EXE_kgctl");
    sh(&format!("{kgctl} status --backend file --backend-dir /run/cluster {arguments} 2>&1 || true"))
}

/// Waits until a text contains all of these.
#[track_caller]
fn until_says(what: &str, text: impl Fn() -> String, wanted: &[&str]) {
    until(&format!("{what} says {wanted:?}"), LIMIT, || {
        let text = text();
        if wanted.iter().all(|wanted| text.contains(wanted)) { Ok(()) } else { Err(text) }
    });
}

fn log() -> String {
    fs::read_to_string(LOG).unwrap()
}

const PODS: &str = "spec: {podCIDRs: [10.42.1.0/24]}\n";

#[test]
fn a_node_without_pod_cidr_reports_how_it_gets_one() {
    isolated("a_node_without_pod_cidr_reports_how_it_gets_one", || async {
        let _agent = start("", &["--cni=false"]);
        until_says("the log", log, &["no pod CIDR", "--allocate-node-cidrs"]);
        assert!(log().trim_end().lines().last().unwrap().contains("--allocate-node-cidrs"), "{}", log());
        until_says("the status", || status(""), &["no pod CIDR", "--allocate-node-cidrs"]);
        until_says("the agent's status", || status("--agent"), &["no pod CIDR", "--allocate-node-cidrs"]);
    });
}

#[test]
fn another_cnis_file_in_front_of_ours_is_named_until_it_is_gone() {
    isolated("another_cnis_file_in_front_of_ours_is_named_until_it_is_gone", || async {
        sh("mkdir -p /run/net.d");
        fs::write(
            "/run/net.d/10-kilo.conflist",
            r#"{"name":"kilo","plugins":[{"type":"bridge","ipam":{}}]}"#,
        )
        .unwrap();
        fs::write("/run/net.d/05-other.conflist", "{}").unwrap();
        let _agent = start(PODS, &["--cni-path", "/run/net.d/10-kilo.conflist"]);
        let named = ["/run/net.d/05-other.conflist", "remove it"];
        until_says("the log", log, &named);
        until_says("the agent's status", || status("--agent"), &["warning: ", named[0], named[1]]);
        sh("rm /run/net.d/05-other.conflist");
        until("the status no longer names it", LIMIT, || {
            let said = status("--agent");
            if said.contains("05-other") { Err(said) } else { Ok(()) }
        });
        assert_eq!(log().matches("05-other").count(), 1, "it is said once: {}", log());
    });
}

#[test]
fn former_pod_cidrs_are_not_forgotten_before_the_bridge_has_left_them() {
    isolated("former_pod_cidrs_are_not_forgotten_before_the_bridge_has_left_them", || async {
        sh("mkdir -p /run/net.d; ip link add br1 type bridge; ip address add 10.42.9.1/24 dev br1");
        let path = "/run/net.d/10-kilo.conflist";
        let with = |bridge: &str| {
            let ipam = r#"{"type":"host-local","ranges":[[{"subnet":"10.42.9.0/24"}]]}"#;
            let plugin = |bridge| format!(r#"{{"type":"bridge","bridge":"{bridge}","ipam":{ipam}}}"#);
            let text = format!(r#"{{"name":"kilo","plugins":[{},{}]}}"#, plugin("br1"), plugin(bridge));
            let new = format!("{path}.new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, path).unwrap();
        };
        let cni = || fs::read_to_string(path).unwrap();
        // The kernel rejects a lookup of an interface name this long.
        with("more-than-fifteen-characters");
        let _agent = start(PODS, &["--cni-path", path]);
        let failures = || log().matches("failed to remove the former pod CIDRs from the bridge").count();
        until("it is tried again", LIMIT, || if failures() < 2 { Err(log()) } else { Ok(()) });
        assert!(cni().contains("10.42.9.0"), "{}", cni());
        with("br2");
        until_says("the CNI configuration", cni, &["10.42.1.0"]);
        let left = sh("ip address show dev br1");
        assert!(!left.contains("10.42.9.1") && !cni().contains("10.42.9.0"), "{left}: {}", cni());
    });
}

#[test]
fn a_node_whose_agent_has_never_run_leads_to_its_log() {
    isolated("a_node_whose_agent_has_never_run_leads_to_its_log", || async {
        let _agent = start(PODS, &["--cni=false"]);
        let other = "apiVersion: v1\nkind: Node\nmetadata: {name: n2}\nspec: {podCIDRs: [10.42.2.0/24]}\n";
        fs::write("/run/cluster/n2.yaml", other).unwrap();
        until_says(
            "the status",
            || status(""),
            &["n2", "its agent never checked in: the log of its pod says why"],
        );
        assert!(
            !status("").contains("no endpoint, no key"),
            "one reason, not its consequences: {}",
            status("")
        );
    });
}

#[test]
fn the_nodes_external_ip_is_the_endpoint_and_the_flag_switches_it_off() {
    isolated("the_nodes_external_ip_is_the_endpoint_and_the_flag_switches_it_off", || async {
        let node = format!("{PODS}status:\n  addresses: [{{type: ExternalIP, address: 203.0.113.9}}]\n");
        let written = || fs::read_to_string("/run/cluster/n1.kilo.yaml").unwrap_or_default();
        let agent = start(&node, &["--cni=false"]);
        until_says("the agent's file", written, &["203.0.113.9:51820"]);
        drop(agent);
        sh("umount /sys/fs/bpf /sys; umount /var/lib; ip link delete eth0");
        let _agent = start(&node, &["--cni=false", "--endpoint-from=interface"]);
        until_says("the agent's file", written, &["10.1.0.11:51820"]);
    });
}

#[test]
fn a_part_that_fails_keeps_no_rules_of_the_firewall_from_being_written() {
    isolated("a_part_that_fails_keeps_no_rules_of_the_firewall_from_being_written", || async {
        sh("iptables-nft -P FORWARD DROP; mkdir -p /run/net.d");
        let cni = || fs::read_to_string("/run/net.d/10-kilo.conflist").unwrap();
        fs::write(
            "/run/net.d/10-kilo.conflist",
            r#"{"name":"kilo","plugins":[{"type":"bridge","ipam":{}}]}"#,
        )
        .unwrap();
        // WireGuard's port is taken, so the device cannot be set up.
        let taken = std::net::UdpSocket::bind("0.0.0.0:51820").unwrap();
        let rules = ["--masquerade=nftables", "--iptables-forward-rules"];
        let _agent = start(PODS, &["--cni-path", "/run/net.d/10-kilo.conflist", rules[0], rules[1]]);
        let ruleset = || sh("nft list ruleset; iptables-nft -S");
        until_says("the ruleset", ruleset, &["table inet kilo", "10.42.1.0/24", "KILO-FORWARD"]);
        until_says("the log", log, &["51820"]);
        // The rules are deleted, and the device still cannot be set up.
        sh("nft delete table inet kilo");
        until_says("the ruleset", ruleset, &["table inet kilo"]);
        assert!(!cni().contains("10.42.1.0"), "no pod starts without the mesh: {}", cni());
        drop(taken);
        until_says("the CNI configuration", cni, &["10.42.1.0"]);
    });
}

/// A node with a VPN peer that has this prefix. Its CNI configuration gets the pod CIDR once everything is in
/// place.
fn start_with_peer(prefix: &str) -> Agent {
    sh("mkdir -p /run/cluster /run/net.d");
    let key = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    let peer = format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {{name: laptop}}\n\
         spec: {{publicKey: \"{key}\", allowedIPs: [\"{prefix}\"]}}\n"
    );
    fs::write("/run/cluster/laptop.yaml", peer).unwrap();
    let list = r#"{"name":"kilo","plugins":[{"type":"bridge","ipam":{}}]}"#;
    fs::write("/run/net.d/10-kilo.conflist", list).unwrap();
    start(PODS, &["--cni-path", "/run/net.d/10-kilo.conflist"])
}

#[track_caller]
fn until_pods_may_start() {
    until("pods may start", LIMIT, || match fs::read_to_string("/run/net.d/10-kilo.conflist").unwrap() {
        cni if cni.contains("10.42.1.0") => Ok(()),
        _ => Err(log()),
    });
}

#[test]
fn a_host_without_ipv6_works_although_a_peer_has_ipv6_prefixes() {
    isolated("a_host_without_ipv6_works_although_a_peer_has_ipv6_prefixes", || async {
        sh("for it in all default; do echo 1 > /proc/sys/net/ipv6/conf/$it/disable_ipv6; done");
        let _agent = start_with_peer("fd00:9::/64");
        until_pods_may_start();
        until_says("the log", log, &["IPv6 is off on this host"]);
    });
}

#[test]
fn a_peers_prefix_that_is_the_hosts_own_network_is_left_to_the_host() {
    isolated("a_peers_prefix_that_is_the_hosts_own_network_is_left_to_the_host", || async {
        let _agent = start_with_peer("10.1.0.0/24");
        until_pods_may_start();
        until_says("the log", log, &["10.1.0.0/24", "by a route of its own"]);
        assert!(sh("ip route get 10.1.0.1").contains("dev eth0"));
    });
}
