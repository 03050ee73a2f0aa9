//! What a path carries is asked of the path itself: real routers with small links,
//! hosts that refuse, and ICMP errors that somebody made up.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod netns;

use std::net::IpAddr;

use kilo_agent::net::path_probe::smaller_than;
use netns::{isolated, sh};

/// This host, a router, and a node behind it.
fn build() {
    sh("mkdir -p /run/netns; ip link set lo up; ip netns add router; ip netns add node; \
        ip link add eth0 type veth peer name lan netns router; \
        ip -n router link add far type veth peer name eth0 netns node; \
        ip link set eth0 up; ip -n router link set lan up; ip -n router link set far up; ip -n node link set eth0 up; \
        ip address add 10.1.0.1/24 dev eth0; ip address add fd01::1/64 dev eth0 nodad; \
        ip -n router address add 10.1.0.254/24 dev lan; ip -n router address add fd01::ff/64 dev lan nodad; \
        ip -n router address add 10.2.0.254/24 dev far; ip -n router address add fd02::ff/64 dev far nodad; \
        ip -n node address add 10.2.0.1/24 dev eth0; ip -n node address add fd02::1/64 dev eth0 nodad; \
        ip route add default via 10.1.0.254; ip route add default via fd01::ff; \
        ip -n node route add default via 10.2.0.254; ip -n node route add default via fd02::ff; \
        ip netns exec router sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; \
        until ping -c 1 -W 1 10.2.0.1 && ping -c 1 -W 1 fd02::1; do sleep 0.1; done");
}

const NODES: [&str; 2] = ["10.2.0.1", "fd02::1"];

fn nodes() -> [IpAddr; 2] {
    NODES.map(|node| node.parse().unwrap())
}

#[test]
fn a_router_with_a_small_link_says_what_it_carries() {
    isolated("a_router_with_a_small_link_says_what_it_carries", || async {
        build();
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}: all of it passes");
        }
        sh("ip -n router link set far mtu 1360");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), Some(1360), "{node}");
            // What the kernel has learnt meanwhile is not believed either.
            assert_eq!(smaller_than(1361, node).await.unwrap(), Some(1360), "{node}");
            assert_eq!(smaller_than(1360, node).await.unwrap(), None, "{node}");
        }
        sh("ip -n router link set far mtu 1500");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}: it has grown again");
        }
        sh("ip link set eth0 mtu 1400");
        for node in nodes() {
            assert!(smaller_than(1500, node).await.is_err(), "{node}: the interface carries less");
        }
    });
}

#[test]
fn silence_is_no_answer() {
    isolated("silence_is_no_answer", || async {
        build();
        sh("ip netns exec router nft 'add table inet drop; \
            add chain inet drop forward { type filter hook forward priority 0; policy drop; }'");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}");
        }
    });
}
