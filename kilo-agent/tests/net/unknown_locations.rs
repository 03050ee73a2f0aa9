//! A real `kg` that has not heard of other locations yet: packets to their WireGuard addresses, local or
//! forwarded, do not leave through the default route.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    cluster,
    netns::{Agent, isolated, sh},
    wait::until,
};

use std::{path::Path, time::Duration};

use kilo_common::drop_reasons::DropReason;
use kilo_host::dataplane::{BPFFS, CounterReader};

const LIMIT: Duration = Duration::from_secs(20);
/// Echo requests to each address.
const ECHOES: u64 = 3;

/// Sets up a router beyond the default route, which counts packets to the subnet, and a pod.
fn build() {
    cluster::prepare();
    sh("mkdir -p /run/netns; sysctl -qw net.ipv4.ip_forward=1; \
        ip netns add outside; ip link set other netns outside; ip -n outside link set lo up; \
        ip -n outside link set other up; ip -n outside address add 10.1.0.1/24 dev other; \
        ip netns exec outside nft 'table ip seen { counter subnet { }; chain every { \
            type filter hook prerouting priority 0; ip daddr 10.4.0.0/16 counter name subnet; }; }'; \
        ip netns add pod; ip link add pod type veth peer name eth0 netns pod; ip link set pod up; \
        ip address add 10.42.1.1/24 dev pod; ip -n pod link set lo up; ip -n pod link set eth0 up; \
        ip -n pod address add 10.42.1.2/24 dev eth0; ip -n pod route add default via 10.42.1.1");
}

/// Sends echo requests to an address from the host and from the pod; returns how many the router saw, and
/// how many were counted as drops.
fn sent_to(address: &str) -> (u64, u64) {
    let seen = || -> u64 {
        let said = sh("ip netns exec outside nft list counter ip seen subnet");
        said.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse().unwrap()
    };
    let dropped = || CounterReader::open(Path::new(BPFFS)).unwrap().drops(DropReason::NotEncrypted).unwrap();
    let before = (seen(), dropped());
    for from in ["", "ip netns exec pod "] {
        sh(&format!("{from}ping -q -n -c {ECHOES} -i 0.05 -W 1 {address} || true"));
    }
    (seen() - before.0, dropped() - before.1)
}

/// Asserts that the router sees none and all count as drops; `ping` repeats some that were refused.
#[track_caller]
fn is_closed(address: &str) {
    let (seen, dropped) = sent_to(address);
    assert!(seen == 0 && dropped >= 2 * ECHOES, "{address}: {seen} seen by the router, {dropped} dropped");
}

fn start() -> Agent {
    let agent = Agent(cluster::kg(&[]).spawn().unwrap());
    until("the agent has put everything right", LIMIT, || cluster::has_done(&[]));
    agent
}

#[test]
fn a_node_that_knows_only_itself_sends_nothing_for_others_in_clear() {
    isolated("a_node_that_knows_only_itself_sends_nothing_for_others_in_clear", || async {
        build();
        let mut agent = start();
        // Without the device, whose address brings a route: as before it is created or after it was
        // deleted.
        agent.0.kill().unwrap();
        agent.0.wait().unwrap();
        sh("ip link delete kilo0");
        // The first address is the node's own while it is alone.
        ["10.4.0.1", "10.4.0.2", "10.4.200.7"].into_iter().for_each(is_closed);
    });
}

#[test]
fn a_member_keeps_in_what_is_for_locations_it_has_not_heard_of() {
    isolated("a_member_keeps_in_what_is_for_locations_it_has_not_heard_of", || async {
        build();
        cluster::write_node(2, "a", "10.42.2.0/24", true);
        let _agent = start();
        is_closed("10.4.0.2");
        // A network in the subnet that this host reaches by its own route is not part of the mesh.
        sh("ip route add 10.4.128.0/17 via 10.1.0.1");
        until("the host's own route counts", LIMIT, || sent_to("10.4.128.9") == (2 * ECHOES, 0));
        is_closed("10.4.0.2");
    });
}
