//! Hands a host over to Kilo's own agent: rules replace the programs, which stay where nothing can.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    cluster,
    netns::{Agent, isolated, sh},
    wait::{time_passes, until},
};

use std::{path::Path, time::Duration};

use kilo_agent::agent;
use kilo_core::settings::Masquerade;

const LIMIT: Duration = Duration::from_secs(20);
const PINS: &str = "find /sys/fs/bpf/kilo 2>/dev/null | sort || true";
/// Replaces the host's nft within the test's mounts with one that refuses scripts.
const REFUSE: &str = "n=$(readlink -f $(command -v nft)); cp $n /run/nft-itself; \
    printf '#!/bin/sh\\ncase $1 in -f) echo refused >&2; exit 1;; esac\\nexec /run/nft-itself \"$@\"\\n' > /run/nft; \
    chmod 755 /run/nft; mount --bind /run/nft $n";

/// State left by an agent that was asked to stop, with a node of its location and another location whose
/// leader has a private address.
fn left_by_an_agent() {
    let mut agent = agent_that_runs(&[]);
    sh(&format!("kill -TERM {}", agent.0.id()));
    assert!(agent.0.wait().unwrap().success());
}

fn agent_that_runs(flags: &[&str]) -> Agent {
    cluster::prepare();
    cluster::write_node(2, "a", "10.42.2.0/24", false);
    cluster::write_node(3, "b", "10.42.3.0/24", true);
    let mut command = cluster::kg(&[]);
    command.args(["--cni=true", "--cni-path=/run/absent.conflist"]).args(flags);
    let agent = Agent(command.spawn().unwrap());
    until("the agent has put everything right", LIMIT, || {
        cluster::has_done(&[("kilo_nodes", 3)]) && !sh("ip route show 10.42.3.0/24").is_empty()
    });
    agent
}

async fn hand_over() -> agent::Outcome {
    agent::hand_over(Path::new("/sys/fs/bpf"), "kilo0", Masquerade::Ebpf, agent::Programs::Removed).await
}

#[test]
fn programs_stay_when_nft_refuses() {
    isolated("programs_stay_when_nft_refuses", || async {
        left_by_an_agent();
        let pins = sh(PINS);
        assert!(pins.contains("/links/"), "{pins}");
        sh(REFUSE);
        let outcome = hand_over().await;
        assert_eq!(sh(PINS), pins, "nobody else keeps in what must not leave");
        let said = outcome.stays.join("; ");
        assert!(said.contains("programs, since no rules could take their place: nft: refused"), "{said}");
        sh("umount $(readlink -f $(command -v nft))");
        let outcome = hand_over().await;
        assert!(outcome.stays.is_empty(), "{outcome:?}");
        assert_eq!(sh(PINS), "");
    });
}

#[test]
fn rules_keep_in_what_the_programs_kept_in() {
    isolated("rules_keep_in_what_the_programs_kept_in", || async {
        left_by_an_agent();
        assert!(hand_over().await.stays.is_empty());
        for (what, set, addresses) in [
            ("pods of all three nodes, side by side", "never", "10.42.1.0-10.42.3.255"),
            ("private address of the other leader", "never", "10.1.0.3"),
            ("private address of a node of this LAN", "by_uplink", "10.1.0.2"),
        ] {
            let list = sh(&format!("nft list set inet kilo {set}_ip"));
            assert!(list.contains(addresses), "{what}: {list}");
        }
    });
}

/// Packets from a pod to one of another node as seen on the LAN: steered, and in cleartext.
fn seen_on_the_lan() -> (u64, u64) {
    let text = sh("ip netns exec lan nft list counters");
    let mut counts = text
        .split("packets ")
        .skip(1)
        .map(|rest| rest.split_whitespace().next().unwrap().parse::<u64>().unwrap());
    (counts.next().unwrap(), counts.next().unwrap())
}

fn grew_by(span: Duration) -> (u64, u64) {
    let before = seen_on_the_lan();
    time_passes(span, "packets are counted");
    let after = seen_on_the_lan();
    (after.0 - before.0, after.1 - before.1)
}

/// A stopped agent, so that its WireGuard device stays, and a pod of this host that sends to one of a node
/// on the LAN, where packets are counted.
fn pod_that_talks() -> Agent {
    let agent = agent_that_runs(&["--attach=clsact"]);
    sh(&format!("kill -STOP {}", agent.0.id()));
    sh("mkdir -p /run/netns; sysctl -qw net.ipv4.ip_forward=1; \
        ip netns add lan; ip link set other netns lan; ip -n lan link set other up; \
        ip -n lan address add 10.1.0.2/24 dev other; \
        ip netns add pod; ip link add pod type veth peer name eth0 netns pod; ip link set pod up; \
        ip address add 10.42.1.1/24 dev pod; ip -n pod link set lo up; ip -n pod link set eth0 up; \
        ip -n pod address add 10.42.1.2/24 dev eth0; ip -n pod route add default via 10.42.1.1");
    sh("ip netns exec lan nft -f - <<'END'
table netdev t {
    counter a_steered { }
    counter b_clear { }
    chain c {
        type filter hook ingress device other priority 0;
        ip protocol 4 counter name a_steered
        ip saddr 10.42.1.2 counter name b_clear
    }
}
END");
    sh("ip netns exec pod ping -q -i 0.02 10.42.2.7 > /dev/null 2>&1 &");
    agent
}

async fn left_for(lasts: Duration) {
    let programs = agent::Programs::LeftFor(lasts);
    let left = agent::hand_over(Path::new("/sys/fs/bpf"), "kilo0", Masquerade::Ebpf, programs).await;
    assert!(left.stays.is_empty(), "{left:?}");
    // A container's end removes these.
    sh("rm -r /sys/fs/bpf/kilo");
}

#[test]
fn programs_that_are_left_steer_for_a_while_and_then_let_everything_by() {
    isolated("programs_that_are_left_steer_for_a_while_and_then_let_everything_by", || async {
        let _agent = pod_that_talks();
        let (steered, clear) = grew_by(Duration::from_secs(1));
        assert!(steered > 20 && clear == 0, "before: {steered} and {clear}");

        left_for(Duration::from_secs(4)).await;
        let (steered, clear) = grew_by(Duration::from_secs(2));
        assert!(steered > 40 && clear == 0, "left alone: {steered} and {clear}");
        // Another agent would send it this way, and so would a host without one.
        sh("ip route replace 10.42.2.0/24 via 10.1.0.2 dev eth0");
        let (_, clear) = grew_by(Duration::from_secs(6));
        assert_eq!(clear, 0, "neither programs nor rules kept it in");
        assert_eq!(grew_by(Duration::from_secs(1)), (0, 0), "rules drop at the uplink what programs steered");
        sh("nft delete table inet kilo");
        let (steered, clear) = grew_by(Duration::from_secs(1));
        assert!(steered == 0 && clear > 20, "the programs still act: {steered} and {clear}");
        assert!(sh("tc filter show dev eth0 egress").contains("uplink_egress"));
    });
}

/// Sends an IPIP packet to a node of the LAN; the inner packet is only a header.
fn ipip(prefix: &str, to: &str, inner: [&str; 2]) {
    let [src, dst] = inner;
    let code = format!(
        "use Socket; socket(my $s, AF_INET, SOCK_RAW, 4) or die; \
         my $inner = pack(q(CCnnnCCna4a4), 0x45, 0, 20, 0, 0, 64, 17, 0, inet_aton(q({src})), inet_aton(q({dst}))); \
         send($s, $inner, 0, sockaddr_in(0, inet_aton(q({to})))) or die $!"
    );
    sh(&format!("{prefix} perl -e '{code}'"));
}

#[test]
fn programs_that_are_left_end_when_another_agent_steers() {
    isolated("programs_that_are_left_end_when_another_agent_steers", || async {
        let _agent = pod_that_talks();
        left_for(Duration::from_secs(600)).await;
        // From a node, while routes are ours.
        ipip("ip netns exec lan", "10.1.0.11", ["10.42.2.7", "10.42.1.2"]);
        assert!(grew_by(Duration::from_secs(1)).0 > 20, "the programs ended for a node's packet");
        // Another node never sends from this node's pods, whose routes do not use kilo0.
        ipip("ip netns exec lan", "10.1.0.11", ["10.42.1.3", "10.42.1.2"]);
        assert!(grew_by(Duration::from_secs(1)).0 > 20, "the programs ended for a forged packet");
        // Kilo takes kilo0 down on a node that leads nobody.
        sh("ip route replace 10.42.2.0/24 via 10.1.0.2 dev eth0");
        ipip("ip netns exec lan", "10.1.0.11", ["10.42.2.7", "10.42.1.2"]);
        sh("nft delete table inet kilo");
        let (steered, clear) = grew_by(Duration::from_secs(1));
        assert!(steered == 0 && clear > 20, "by what arrives: {steered} and {clear}");
    });
}

#[test]
fn programs_that_are_left_end_when_another_agents_tunnel_sends() {
    isolated("programs_that_are_left_end_when_another_agents_tunnel_sends", || async {
        let _agent = pod_that_talks();
        left_for(Duration::from_secs(600)).await;
        assert!(grew_by(Duration::from_secs(1)).0 > 20);
        ipip("", "10.1.0.2", ["10.42.1.2", "10.42.2.7"]);
        assert_eq!(grew_by(Duration::from_secs(1)).0, 0);
    });
}
