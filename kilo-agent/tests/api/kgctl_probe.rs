//! Probes of `kgctl connectivity-test` over a path with a smaller MTU than its first interface.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use netns::{isolated, sh};
use serde_json::{Value, json};

const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");

/// The server, killed when the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This namespace, a router `r`, and the server in `b` behind a link with an MTU of 1300 bytes.
fn network() -> Server {
    sh("ip link set lo up; ip netns add r; ip netns add b; ip -n b link set lo up
        ip link add va type veth peer name ra netns r; ip -n r link add rb mtu 1300 type veth peer name vb mtu 1300 netns b
        ip address add 10.0.1.1/24 dev va; ip address add fd01::1/64 dev va nodad; ip link set va up
        ip -n r address add 10.0.1.2/24 dev ra; ip -n r address add fd01::2/64 dev ra nodad; ip -n r link set ra up
        ip -n r address add 10.0.2.2/24 dev rb; ip -n r address add fd02::2/64 dev rb nodad; ip -n r link set rb up
        ip -n b address add 10.0.2.1/24 dev vb; ip -n b address add fd02::1/64 dev vb nodad; ip -n b link set vb up
        ip route add default via 10.0.1.2; ip -6 route add default via fd01::2
        ip -n b route add default via 10.0.2.2; ip -n b -6 route add default via fd02::2
        ip netns exec r sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", "b", KGCTL, "probe-server"]).stdout(Stdio::null());
    Server(command.spawn().unwrap())
}

/// Error of each of these probes, over IPv4 and then IPv6.
fn errors(kinds: &[&str]) -> Vec<Option<String>> {
    let both = kinds.iter().flat_map(|kind| [(kind, "10.0.2.1:8080"), (kind, "[fd02::1]:8080")]);
    let probes: Vec<_> =
        both.enumerate().map(|(id, (kind, to))| json!({"id": id, "kind": kind, "to": to})).collect();
    let output = Command::new(KGCTL).arg("probe").arg(Value::from(probes).to_string()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answers: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    answers.iter().map(|answer| answer["error"].as_str().map(ToOwned::to_owned)).collect()
}

#[test]
fn a_path_that_drops_full_packets_silently_is_red_and_one_that_says_so_is_not() {
    isolated("a_path_that_drops_full_packets_silently_is_red_and_one_that_says_so_is_not", || async {
        let _server = network();
        let deadline = Instant::now() + Duration::from_secs(30);
        while errors(&["tcp", "udp"]).iter().any(Option::is_some) {
            assert!(Instant::now() < deadline, "the server answers small packets");
        }
        sh("ip netns exec r nft 'table inet silent { chain out { type filter hook output priority 0
            icmp type destination-unreachable drop; icmpv6 type packet-too-big drop; }; }'");
        for error in errors(&["full"]) {
            let error = error.expect("it is red");
            assert!(error.contains("no reply to packets of 1500 bytes"), "{error}");
        }
        assert_eq!(errors(&["udp"]), [None, None], "small ones pass");
        sh("ip netns exec r nft delete table inet silent");
        assert_eq!(errors(&["full", "bulk"]), [None, None, None, None]);
        let learned = sh("ip route get 10.0.2.1; ip -6 route get fd02::1");
        assert_eq!(learned.matches("mtu 1300").count(), 2, "the path was filled: {learned}");
    });
}
