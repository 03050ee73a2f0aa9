//! Where `kilo_egress` and `kilo_ingress` send packets. (The lab checks the bytes that they send, on real
//! links.)
//!
//! `BPF_PROG_TEST_RUN` always reads an Ethernet header, which the WireGuard device lacks. The packets here
//! come from 8.0.0.0/16, whose first bytes read as the EtherType of IPv4.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    bpf,
    netns::{isolated, sh},
    wait::{stays, until},
};

use std::time::Duration;

use bpf::{
    MEMBER_POD, OWN_POD, REMOTE_POD, leader_tables, member_tables,
    packet::{PASS, REDIRECT, Ran, SHOT, run, udp},
};
use kilo_common::maps::{HOP_LOCAL, PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue};
use kilo_core::plan::{Hop, Tables};
use kilo_host::dataplane::Dataplane;

const POD: [u8; 4] = [8, 0, 1, 2];
/// The least that `BPF_PROG_TEST_RUN` accepts: two headers (since Linux 6.17).
const SHORTEST: usize = 34;

fn open(mut tables: Tables) -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    let local = PrefixValue { hop: HOP_LOCAL, flags: PREFIX_ROUTE | PREFIX_SOURCE };
    tables.prefix.insert("8.0.1.0/24".parse().unwrap(), local);
    dataplane.write(&tables).unwrap();
    Some((fs, dataplane))
}

fn outcome(ran: &Ran) -> (i32, &[&'static str]) {
    (ran.verdict, ran.counted.as_slice())
}

#[test]
fn a_leader_leaves_remote_destinations_to_wireguard() {
    let Some((_fs, mut dataplane)) = open(leader_tables()) else { return };
    let ran = run(&mut dataplane, "kilo_egress", &udp(POD, REMOTE_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (PASS, &["encrypt"][..]));
}

#[test]
fn a_member_steers_remote_destinations_and_never_encrypts() {
    let Some((_fs, mut dataplane)) = open(member_tables()) else { return };
    let ran = run(&mut dataplane, "kilo_egress", &udp(POD, REMOTE_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (REDIRECT, &["steer"][..]));
    let ran = run(&mut dataplane, "kilo_egress", &udp(POD, [8, 8, 8, 8], (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (SHOT, &["no_prefix"][..]), "nothing falls through to WireGuard");
}

#[test]
fn pods_of_the_own_location_are_steered_to_their_node() {
    for tables in [leader_tables(), member_tables()] {
        let Some((_fs, mut dataplane)) = open(tables) else { return };
        let ran = run(&mut dataplane, "kilo_egress", &udp(POD, MEMBER_POD, (1, 2), b"payload"));
        assert_eq!(outcome(&ran), (REDIRECT, &["steer"][..]));
    }
}

#[test]
fn a_leader_without_a_hop_drops() {
    let mut tables = leader_tables();
    tables.hop.remove(&bpf::MEMBER_HOP);
    let Some((_fs, mut dataplane)) = open(tables) else { return };
    let ran = run(&mut dataplane, "kilo_egress", &udp(POD, MEMBER_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (SHOT, &["no_hop"][..]));
}

#[test]
fn multicast_broadcast_and_link_local_are_never_steered() {
    let Some((_fs, mut dataplane)) = open(member_tables()) else { return };
    for dst in [[224, 0, 0, 1], [255; 4], [169, 254, 0, 1], [0; 4]] {
        let ran = run(&mut dataplane, "kilo_egress", &udp(POD, dst, (1, 2), b"payload"));
        assert_eq!(outcome(&ran), (SHOT, &["not_unicast"][..]), "{dst:?}");
    }
}

#[test]
fn a_packet_larger_than_the_hop_carries_is_a_counted_drop() {
    let Some((_fs, mut dataplane)) = open(member_tables()) else { return };
    let ran = run(&mut dataplane, "kilo_egress", &udp(POD, REMOTE_POD, (1, 2), &[0; 1460]));
    assert_eq!(outcome(&ran), (SHOT, &["too_big"][..]));
}

#[test]
fn a_leader_sends_decrypted_packets_on_to_their_node_and_keeps_its_own() {
    let Some((_fs, mut dataplane)) = open(leader_tables()) else { return };
    let ran = run(&mut dataplane, "kilo_ingress", &udp(POD, MEMBER_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (REDIRECT, &["forward"][..]));
    let ran = run(&mut dataplane, "kilo_ingress", &udp(POD, OWN_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (PASS, &["decrypt"][..]));
}

#[test]
fn a_truncated_packet_is_dropped() {
    let Some((_fs, mut dataplane)) = open(leader_tables()) else { return };
    let whole = udp(POD, REMOTE_POD, (1, 2), b"some payload");
    for length in SHORTEST..whole.len() {
        let ran = run(&mut dataplane, "kilo_egress", &whole[..length]);
        assert_eq!(outcome(&ran), (SHOT, &["truncated"][..]), "{length} bytes");
    }
}

/// Link-layer destination that the program itself gives a packet to the leader; `None`: the kernel is to
/// find it.
fn sent_to(dataplane: &mut Dataplane) -> Option<[u8; 6]> {
    let ran = run(dataplane, "kilo_egress", &udp(POD, REMOTE_POD, (1, 2), b"payload"));
    assert_eq!(outcome(&ran), (REDIRECT, &["steer"][..]));
    ran.bytes[..6].try_into().ok().filter(|mac| *mac != [0; 6])
}

/// Sends until a packet gets this link-layer destination.
#[track_caller]
fn sends_to(dataplane: &mut Dataplane, wanted: Option<[u8; 6]>) {
    until(&format!("a packet is sent to {wanted:?}"), Duration::from_secs(5), || {
        sent_to(dataplane) == wanted
    });
}

#[test]
fn link_addresses_follow_the_kernels_neighbours_and_each_second_a_packet_asks_the_kernel() {
    isolated(
        "link_addresses_follow_the_kernels_neighbours_and_each_second_a_packet_asks_the_kernel",
        async || {
            sh("ip link add uplink index 77 type veth peer name peer; ip link set uplink up; ip link set peer up
            ip address add 10.1.0.11/16 dev uplink; sysctl -qw net.ipv4.conf.all.forwarding=1");
            let mut tables = member_tables();
            let mut remote = None;
            for hop in tables.hop.values_mut() {
                if let Hop::Node { ifindex, remote: to, .. } = hop {
                    *ifindex = 77;
                    remote = Some(*to);
                }
            }
            let remote = remote.unwrap();
            let Some((_fs, mut dataplane)) = open(tables) else { return };
            for _ in 0..20 {
                assert_eq!(
                    sent_to(&mut dataplane),
                    None,
                    "without an entry the kernel asks for the neighbour"
                );
            }
            let entry = |mac: &str| {
                sh(&format!("ip neighbour replace {remote} lladdr {mac} dev uplink nud reachable"))
            };
            entry("02:00:00:00:00:01");
            sends_to(&mut dataplane, Some([2, 0, 0, 0, 0, 1]));
            entry("02:00:00:00:00:02");
            sends_to(&mut dataplane, Some([2, 0, 0, 0, 0, 2]));
            // The kernel confirms a neighbour only by packets that it sends itself.
            for _ in 0..2 {
                sends_to(&mut dataplane, None);
                sends_to(&mut dataplane, Some([2, 0, 0, 0, 0, 2]));
            }
            sh(&format!("ip neighbour del {remote} dev uplink"));
            sends_to(&mut dataplane, None);
            stays("without an entry the kernel is asked", Duration::from_millis(20), || {
                sent_to(&mut dataplane).is_none()
            });
            entry("02:00:00:00:00:03");
            sends_to(&mut dataplane, Some([2, 0, 0, 0, 0, 3]));
            // The route changes while the hop still names this interface.
            sh("ip link set uplink down");
            sends_to(&mut dataplane, None);
        },
    );
}
