//! `uplink_egress` and `lan_ingress`: translation out and back.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod support;

use kilo_agent::dataplane::Dataplane;
use support::{
    MEMBER_POD, OUTSIDE, OWN_POD, PUBLIC, leader_tables,
    packet::{PASS, SHOT, checksums_hold, ethernet, icmp, ipv4, run, udp},
};

fn open() -> Option<(support::BpfFs, Dataplane, kilo_agent::plan::Tables)> {
    let fs = support::bpffs()?;
    let tables = leader_tables();
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&tables).unwrap();
    Some((fs, dataplane, tables))
}

fn source(frame: &[u8]) -> ([u8; 4], u16) {
    (frame[26..30].try_into().unwrap(), u16::from_be_bytes([frame[34], frame[35]]))
}

fn destination(frame: &[u8]) -> ([u8; 4], u16) {
    (frame[30..34].try_into().unwrap(), u16::from_be_bytes([frame[36], frame[37]]))
}

#[test]
fn a_pods_packet_gets_the_uplinks_address_and_the_answer_comes_back() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let out =
        run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, OUTSIDE, (5000, 53), b"question")));
    assert_eq!((out.verdict, out.counted.as_slice()), (PASS, &["masquerade"][..]));
    assert_eq!(source(&out.bytes), (PUBLIC, 5000), "a free port is kept");
    assert!(checksums_hold(&out.bytes[14..]));
    let back = run(&mut dataplane, "lan_ingress", &ethernet(&udp(OUTSIDE, PUBLIC, (53, 5000), b"answer")));
    assert_eq!((back.verdict, back.counted.as_slice()), (PASS, &["unmasquerade"][..]));
    assert_eq!(destination(&back.bytes), (OWN_POD, 5000));
    assert!(checksums_hold(&back.bytes[14..]));
}

#[test]
fn tcp_and_echo_are_translated_with_their_own_checksums() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let mut segment = vec![0x13, 0x88, 0, 80];
    segment.extend([0; 8]);
    segment.extend([0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
    let sum = support::packet::transport_checksum(OWN_POD, OUTSIDE, 6, &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    for ip in [ipv4(OWN_POD, OUTSIDE, 6, 64, &segment), icmp(OWN_POD, OUTSIDE, 8, 77)] {
        let out = run(&mut dataplane, "uplink_egress", &ethernet(&ip));
        assert_eq!(out.counted, ["masquerade"]);
        assert_eq!(source(&out.bytes).0, PUBLIC);
        assert!(checksums_hold(&out.bytes[14..]), "{:?}", out.bytes);
    }
    let back = run(&mut dataplane, "lan_ingress", &ethernet(&icmp(OUTSIDE, PUBLIC, 0, 77)));
    assert_eq!(back.counted, ["unmasquerade"]);
    assert_eq!(destination(&back.bytes).0, OWN_POD);
}

#[test]
fn two_pods_with_one_port_towards_one_server_get_different_ports() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let other = [10, 42, 1, 3];
    let first = run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, OUTSIDE, (5000, 53), b"")));
    let second = run(&mut dataplane, "uplink_egress", &ethernet(&udp(other, OUTSIDE, (5000, 53), b"")));
    assert_ne!(source(&first.bytes).1, source(&second.bytes).1);
    let port = source(&second.bytes).1;
    let back = run(&mut dataplane, "lan_ingress", &ethernet(&udp(OUTSIDE, PUBLIC, (53, port), b"")));
    assert_eq!(destination(&back.bytes), (other, 5000));
}

#[test]
fn a_flow_keeps_its_port() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let packet = ethernet(&udp(OWN_POD, OUTSIDE, (5000, 53), b""));
    let first = source(&run(&mut dataplane, "uplink_egress", &packet).bytes);
    for _ in 0..10 {
        assert_eq!(source(&run(&mut dataplane, "uplink_egress", &packet).bytes), first);
    }
}

#[test]
fn used_up_ports_are_a_counted_drop() {
    let Some((_fs, mut dataplane, mut tables)) = open() else { return };
    tables.config.nat_port_min = 40_000;
    tables.config.nat_port_max = 40_003;
    dataplane.write(&tables).unwrap();
    let mut outcomes = Vec::new();
    for host in 2..9 {
        let packet = ethernet(&udp([10, 42, 1, host], OUTSIDE, (5000, 53), b""));
        outcomes.push(run(&mut dataplane, "uplink_egress", &packet).counted[0]);
    }
    // The first keeps its own port, four more find one in the range.
    assert_eq!(outcomes[..5], ["masquerade"; 5]);
    assert_eq!(outcomes[5..], ["nat_exhausted"; 2]);
}

#[test]
fn a_port_a_host_socket_listens_on_is_not_taken() {
    let Some((_fs, mut dataplane, mut tables)) = open() else { return };
    // The programs look in the namespace of the loopback device, with its address.
    tables.device.get_mut(&support::IFINDEX).unwrap().masq_v4 = [127, 0, 0, 1];
    dataplane.write(&tables).unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let out = run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, OUTSIDE, (port, 53), b"")));
    assert_eq!(out.counted, ["masquerade"]);
    assert_ne!(source(&out.bytes).1, port);
}

#[test]
fn known_destinations_and_foreign_sources_are_left_alone() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    for (src, dst) in [(OWN_POD, MEMBER_POD), ([172, 16, 0, 1], OUTSIDE), (PUBLIC, OUTSIDE)] {
        let frame = ethernet(&udp(src, dst, (5000, 53), b""));
        let out = run(&mut dataplane, "uplink_egress", &frame);
        assert_eq!((out.verdict, out.bytes, out.counted.len()), (PASS, frame, 0));
    }
}

#[test]
fn what_cannot_be_translated_never_leaves_with_a_pods_address() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let out = run(&mut dataplane, "uplink_egress", &ethernet(&ipv4(OWN_POD, OUTSIDE, 47, 64, &[0; 20])));
    assert_eq!((out.verdict, out.counted.as_slice()), (SHOT, &["nat_unsupported"][..]));
    let mut late = udp(OWN_POD, OUTSIDE, (5000, 53), b"");
    late[6..8].copy_from_slice(&[0, 8]);
    let out = run(&mut dataplane, "uplink_egress", &ethernet(&late));
    assert_eq!((out.verdict, out.counted.as_slice()), (SHOT, &["nat_fragment"][..]));
}

#[test]
fn the_hosts_own_ping_and_a_pods_with_one_identifier_both_get_their_answers() {
    let Some((_fs, mut dataplane, _)) = open() else { return };
    let pod = run(&mut dataplane, "uplink_egress", &ethernet(&icmp(OWN_POD, OUTSIDE, 8, 7)));
    let host = run(&mut dataplane, "uplink_egress", &ethernet(&icmp(PUBLIC, OUTSIDE, 8, 7)));
    let id = |frame: &[u8]| u16::from_be_bytes([frame[38], frame[39]]);
    assert_ne!(id(&pod.bytes), id(&host.bytes));
    let back = run(&mut dataplane, "lan_ingress", &ethernet(&icmp(OUTSIDE, PUBLIC, 0, id(&host.bytes))));
    assert_eq!((destination(&back.bytes).0, id(&back.bytes)), (PUBLIC, 7));
    assert!(checksums_hold(&back.bytes[14..]));
}
