//! `uplink_egress` and `lan_ingress`: translation of packets and of their replies.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use bpf::{
    MEMBER, OUTSIDE, OWN_POD, PUBLIC, PUBLIC_V6, leader_tables,
    packet::{PASS, SHOT, checksums_hold, ethernet, icmp, ipv4, run, transport_checksum, udp},
};
use kilo_common::{
    map_table::name,
    maps::{CONFIG_ONE_V4, CONFIG_ONE_V6, MASQ_EXCLUDE, VXLAN_PORT},
};
use kilo_host::dataplane::{Dataplane, DataplaneError, pin_directory};

fn open() -> Option<(bpf::BpfFs, Dataplane, kilo_core::plan::Tables)> {
    let fs = bpf::bpffs()?;
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
    let sum = transport_checksum(&OWN_POD, &OUTSIDE, 6, &segment);
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
    // The programs look for sockets in the loopback device's namespace, by its address.
    tables.device.get_mut(&bpf::IFINDEX).unwrap().masq_v4 = [127, 0, 0, 1];
    dataplane.write(&tables).unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let out = run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, OUTSIDE, (port, 53), b"")));
    assert_eq!(out.counted, ["masquerade"]);
    assert_ne!(source(&out.bytes).1, port);
}

#[test]
fn known_destinations_and_foreign_sources_are_left_alone() {
    const SERVICE: [u8; 4] = [10, 96, 0, 10];
    let Some((_fs, mut dataplane, mut tables)) = open() else { return };
    // The mesh's own prefixes are excluded, too, but never leave through an uplink: tests/bpf/clear.rs.
    tables.masq_dst.insert("10.96.0.0/12".parse().unwrap(), MASQ_EXCLUDE);
    dataplane.write(&tables).unwrap();
    for (src, dst) in [(OWN_POD, SERVICE), ([172, 16, 0, 1], OUTSIDE), (PUBLIC, OUTSIDE)] {
        let frame = ethernet(&udp(src, dst, (5000, 53), b""));
        let out = run(&mut dataplane, "uplink_egress", &frame);
        assert_eq!((out.verdict, out.bytes, out.counted.len()), (PASS, frame, 0));
    }
}

/// The NAT table is looked up before the exclusions.
#[test]
fn flows_to_a_destination_that_joins_are_forgotten_by_the_next_write_if_this_one_fails() {
    let Some((fs, mut dataplane, mut tables)) = open() else { return };
    let frame = ethernet(&udp(OWN_POD, OUTSIDE, (5000, 53), b""));
    assert_eq!(run(&mut dataplane, "uplink_egress", &frame).counted, ["masquerade"]);
    tables.masq_dst.insert("198.51.100.0/24".parse().unwrap(), MASQ_EXCLUDE);
    let pin = pin_directory(fs.path()).join(name::NAT);
    let aside = pin.with_file_name("aside");
    std::fs::rename(&pin, &aside).unwrap();
    let error = dataplane.write(&tables).unwrap_err();
    assert!(matches!(error, DataplaneError::Absent { .. }), "{error}");
    assert_eq!(run(&mut dataplane, "uplink_egress", &frame).counted, ["masquerade"], "the flow goes on");
    std::fs::rename(&aside, &pin).unwrap();
    dataplane.write(&tables).unwrap();
    let out = run(&mut dataplane, "uplink_egress", &frame);
    assert_eq!((out.verdict, out.bytes, out.counted.len()), (PASS, frame, 0));
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

/// An Ethernet frame with a UDP packet from this IPv6 address.
fn udp_v6(src: [u8; 16], port: u16) -> Vec<u8> {
    let mut outside = PUBLIC_V6;
    outside[15] = 99;
    let mut frame = [&[0; 12][..], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64], &src, &outside].concat();
    frame.extend(port.to_be_bytes());
    // A checksum of zero is kept.
    frame.extend([0, 53, 0, 8, 0, 0]);
    frame
}

/// A segment with a valid checksum.
fn tcp(src: [u8; 4], port: u16) -> Vec<u8> {
    let mut segment =
        [&port.to_be_bytes()[..], &[0, 80], &[0; 8], &[0x50, 2, 0xff, 0xff, 0, 0, 0, 0]].concat();
    let sum = transport_checksum(&src, &OUTSIDE, 6, &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    ipv4(src, OUTSIDE, 6, 64, &segment)
}

#[test]
fn the_fast_path_of_the_tunnels_packets_changes_nothing_for_any_packet() {
    let Some((_fs, mut long, mut tables)) = open() else { return };
    let Some((_other_fs, mut short, _)) = open() else { return };
    tables.config.private_v4 = PUBLIC;
    tables.config.private_v6 = PUBLIC_V6;
    long.write(&tables).unwrap();
    tables.config.flags |= CONFIG_ONE_V4 | CONFIG_ONE_V6;
    short.write(&tables).unwrap();
    let port = tables.config.wireguard_port;
    let pod_v6 = [0xfd, 0x42, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
    let with_options = {
        // WireGuard's port, where the header would end without options.
        let options =
            [&port.to_be_bytes()[..], &[1, 1], &7000_u16.to_be_bytes(), &[0, 53, 0, 8, 0, 0]].concat();
        let mut ip = ipv4(PUBLIC, OUTSIDE, 17, 64, &options);
        ip[0] = 0x46;
        ip
    };
    let translated = |own: &[u8], out: &[u8]| own[14..] != out[14..];
    let mut changed = Vec::new();
    for (name, frame) in [
        ("WireGuard's", ethernet(&udp(PUBLIC, OUTSIDE, (port, 53), b"noise"))),
        ("a pod's from that port", ethernet(&udp(OWN_POD, OUTSIDE, (port, 53), b"noise"))),
        ("a pod's from another", ethernet(&udp(OWN_POD, OUTSIDE, (7000, 53), b"noise"))),
        ("the host's from another, which the pod has", ethernet(&udp(PUBLIC, OUTSIDE, (7000, 53), b"noise"))),
        ("a pod's segment from that port", ethernet(&tcp(OWN_POD, port))),
        ("the host's segment from that port, which the pod has", ethernet(&tcp(PUBLIC, port))),
        ("the host's with options, from another", ethernet(&with_options)),
        ("the VXLAN device's", ethernet(&udp(PUBLIC, MEMBER, (7001, VXLAN_PORT), b"noise"))),
        ("a pod's to that port", ethernet(&udp(OWN_POD, OUTSIDE, (7002, VXLAN_PORT), b"noise"))),
        (
            "the host's to no node, which the pod has",
            ethernet(&udp(PUBLIC, OUTSIDE, (7002, VXLAN_PORT), b"")),
        ),
        ("WireGuard's, IPv6", udp_v6(PUBLIC_V6, port)),
        ("a pod's from that port, IPv6", udp_v6(pod_v6, port)),
        ("a pod's from another, IPv6", udp_v6(pod_v6, 7000)),
        ("the host's from another, which the pod has, IPv6", udp_v6(PUBLIC_V6, 7000)),
    ] {
        let (wanted, got) =
            (run(&mut long, "uplink_egress", &frame), run(&mut short, "uplink_egress", &frame));
        assert_eq!(
            (got.verdict, &got.bytes, &got.counted),
            (wanted.verdict, &wanted.bytes, &wanted.counted),
            "{name}"
        );
        if translated(&frame, &got.bytes) {
            changed.push(name);
        }
    }
    // The slow path sees every pod's packets, and the host's where a pod uses the same port.
    assert_eq!(changed.iter().filter(|name| name.starts_with("a pod's")).count(), 6, "{changed:?}");
    assert_eq!(changed.iter().filter(|name| name.starts_with("the host's")).count(), 5, "{changed:?}");
    assert_eq!(changed.len(), 11, "{changed:?}");
}
