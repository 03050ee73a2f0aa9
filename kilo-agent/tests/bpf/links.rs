//! Real packets through the programs on special links: VLANs above an interface with its own address, and
//! uplinks without link-layer header.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

pub mod host;
use crate::{bpf, netns, seed::seed, wait::time_passes};

use bpf::{
    MEMBER, MEMBER_POD, OUTSIDE, OWN_POD, PUBLIC, REMOTE_POD, SELF,
    packet::{checksums_hold, ipv4, steered, udp},
    random::Random,
};
use host::{LAN_MAC, LanSender, NODE_MAC, World, has_vlans, heard, index, lan, udp_in_lan};
use kilo_common::{
    counters::Action,
    maps::{CONFIG_SEVERAL_V4, DEVICE_BY_DESTINATION, DEVICE_MASQUERADE, Device, MASQ_FORCE},
    packet::protocol,
};
use netns::{isolated, sh};
use std::{
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    time::Duration,
};

/// A steered packet for a pod of this node, in a frame with this tag.
fn tagged(tag: Option<u16>, port: u16) -> Vec<u8> {
    let packet = steered(MEMBER, SELF, &udp(MEMBER_POD, OWN_POD, (1000, port), b"steered"));
    let mut frame = [NODE_MAC, LAN_MAC].concat();
    frame.extend(tag.iter().flat_map(|tag| [0x8100_u16.to_be_bytes(), tag.to_be_bytes()].concat()));
    frame.extend(&packet[12..]);
    frame
}

#[test]
fn a_priority_tag_is_taken_off_and_a_vlan_without_device_is_nobodys() {
    isolated("a_priority_tag_is_taken_off_and_a_vlan_without_device_is_nobodys", || async {
        let mut world = World::on_veth();
        world.attach(&["eth0"], &[]).await;
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        let sender = LanSender::new();
        sender.send(&tagged(None, 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "without a tag");
        assert_eq!(world.counted(Action::Deliver), 1);
        // VLAN id 0, with priority 0 and 5.
        for (tag, delivered) in [(0, 2), (5 << 13, 3)] {
            sender.send(&tagged(Some(tag), 2000));
            assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "with tag {tag:#x}");
            assert_eq!(world.counted(Action::Deliver), delivered);
        }
        for tag in [7, 5 << 13 | 7] {
            sender.send(&tagged(Some(tag), 2000));
        }
        // Once the last frame is handled, so are the others.
        sender.send(&tagged(None, 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!(world.counted(Action::Deliver), 4, "no device has VLAN 7: its frames are for no device");
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn frames_with_random_tags_are_delivered_when_they_are_of_no_vlan() {
    isolated("frames_with_random_tags_are_delivered_when_they_are_of_no_vlan", || async {
        let mut world = World::on_veth();
        world.attach(&["eth0"], &[]).await;
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        let sender = LanSender::new();
        let mut random = Random::new(seed());
        let (mut of_none, mut of_vlans) = (0, 0);
        for _ in 0..300 {
            // Random priority and VLAN id, or priority alone.
            let tag = u16::from_be_bytes([random.byte(), random.byte()]);
            let tag = random.pick(&[None, Some(tag), Some(tag & 0xf000)]);
            sender.send(&tagged(tag, 2000));
            if tag.is_some_and(|tag| tag & 0xfff != 0) {
                of_vlans += 1;
                continue;
            }
            of_none += 1;
            assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "with tag {tag:x?}");
            assert_eq!(world.counted(Action::Deliver), of_none, "{of_vlans} are of a VLAN without device");
        }
        println!("{of_none} frames of no VLAN, {of_vlans} of one");
        assert!(of_none > 50 && of_vlans > 50 && world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn a_frame_of_a_vlan_is_the_vlan_devices() {
    isolated("a_frame_of_a_vlan_is_the_vlan_devices", || async {
        if !has_vlans() {
            bpf::skip("this kernel has no VLAN devices");
            return;
        }
        let mut world = World::on_veth();
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        let sender = LanSender::new();
        sh("ip link add link eth0 name eth0.7 type vlan id 7; ip link set eth0.7 up
            ip address del 10.1.0.11/24 dev eth0; ip address add 10.1.0.11/24 dev eth0.7");
        world.attach(&["eth0", "eth0.7"], &[]).await;
        for tag in [7, 5 << 13 | 7] {
            sender.send(&tagged(Some(tag), 2000));
            assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "with tag {tag:#x}");
        }
        assert_eq!(world.counted(Action::Deliver), 2);
        sender.send(&tagged(Some(8), 2000));
        sender.send(&tagged(Some(7), 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!(world.counted(Action::Deliver), 3);
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn what_leaves_by_a_macvlan_is_masqueraded_once_and_the_answer_comes_back() {
    isolated("what_leaves_by_a_macvlan_is_masqueraded_once_and_the_answer_comes_back", || async {
        let mut world = World::on_veth();
        if !netns::succeeds("ip link add link eth0 name mac0 type macvlan mode bridge") {
            bpf::skip("this kernel has no macvlan devices");
            return;
        }
        sh("ip link set mac0 up; ip address add 192.0.2.11/24 dev mac0
            ip route add 198.51.100.0/24 via 192.0.2.1");
        lan("ip address add 192.0.2.1/24 dev eth0");
        world.tables.config.flags |= CONFIG_SEVERAL_V4;
        world.masquerade_as(index("mac0"), PUBLIC);
        world.attach(&["eth0", "mac0"], &[]).await;
        let outside = udp_in_lan(OUTSIDE, 53);
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        for round in 1..=3 {
            pod.send_to(b"question", (Ipv4Addr::from(OUTSIDE), 53)).unwrap();
            let (_, from) = outside.recv_from(&mut [0; 64]).unwrap();
            assert_eq!(from, (Ipv4Addr::from(PUBLIC), 2000).into());
            outside.send_to(b"answer", from).unwrap();
            assert_eq!(heard(&pod).as_deref(), Some(&b"answer"[..]));
            assert_eq!(world.counted(Action::Masquerade), round);
        }
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

/// Routes through both name one source address, which is on loopback.
#[test]
fn a_flow_keeps_its_port_where_two_uplinks_give_packets_one_address() {
    isolated("a_flow_keeps_its_port_where_two_uplinks_give_packets_one_address", || async {
        let mut world = World::on_veth();
        sh("ip link add eth1 type veth peer name eth1 netns lan
            ip link set eth1 up; ip address add 10.1.1.11/24 dev eth1
            ip address add 10.42.1.3/32 dev lo; ip address add 192.0.2.11/32 dev lo
            ip route add 198.51.100.0/24 via 10.1.1.12");
        lan("ip link set eth1 up; ip address add 10.1.1.12/24 dev eth1");
        for (name, masq_v4) in [("eth0", SELF), ("eth1", [10, 1, 1, 11])] {
            let flags = DEVICE_MASQUERADE | DEVICE_BY_DESTINATION;
            world.tables.device.insert(index(name), Device { masq_v4, flags, ..Device::default() });
            let to = "198.51.100.0/24".parse().unwrap();
            world.tables.masq_addr.insert((index(name), to), Ipv4Addr::from(PUBLIC).into());
        }
        world.tables.config.flags |= CONFIG_SEVERAL_V4;
        world.attach(&["eth0", "eth1"], &[]).await;
        let outside = udp_in_lan(OUTSIDE, 53);
        let pods = [OWN_POD, [10, 42, 1, 3]].map(|pod| UdpSocket::bind((Ipv4Addr::from(pod), 2000)).unwrap());
        let seen = |pod: &UdpSocket| {
            pod.send_to(b"question", (Ipv4Addr::from(OUTSIDE), 53)).unwrap();
            outside.recv_from(&mut [0; 64]).unwrap().1
        };
        assert_eq!(seen(&pods[0]), (Ipv4Addr::from(PUBLIC), 2000).into());
        let second = seen(&pods[1]);
        assert_eq!(second.ip(), Ipv4Addr::from(PUBLIC));
        assert_ne!(second.port(), 2000, "the first pod has it");
        world.forget_flows_of(OWN_POD);
        time_passes(Duration::from_millis(1100), "a flow's address is looked at once a second");
        assert_eq!(seen(&pods[1]), second);
    });
}

#[test]
fn what_leaves_by_a_vlan_is_masqueraded_once_and_the_answer_comes_back() {
    isolated("what_leaves_by_a_vlan_is_masqueraded_once_and_the_answer_comes_back", || async {
        if !has_vlans() {
            bpf::skip("this kernel has no VLAN devices");
            return;
        }
        let mut world = World::on_veth();
        sh("ip link add link eth0 name eth0.7 type vlan id 7; ip link set eth0.7 up
            ip address del 10.1.0.11/24 dev eth0; ip address add 10.1.0.11/24 dev eth0.7
            ip address add 192.0.2.11/24 dev eth0; ip route add 198.51.100.0/24 via 10.1.0.12");
        lan("ip link add link eth0 name eth0.7 type vlan id 7; ip link set eth0.7 up
             ip address del 10.1.0.12/24 dev eth0; ip address add 10.1.0.12/24 dev eth0.7
             ip address add 192.0.2.1/24 dev eth0");
        world.tables.device.get_mut(&index("eth0")).unwrap().masq_v4 = PUBLIC;
        // Masquerades every source, including what the first program has translated.
        world.tables.masq_dst.insert("198.51.100.0/24".parse().unwrap(), MASQ_FORCE);
        world.attach(&["eth0", "eth0.7"], &[]).await;
        world.masquerade_as(index("eth0.7"), SELF);
        let outside = udp_in_lan(OUTSIDE, 53);
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        for round in 1..=3 {
            pod.send_to(b"question", (Ipv4Addr::from(OUTSIDE), 53)).unwrap();
            let (_, from) = outside.recv_from(&mut [0; 64]).unwrap();
            assert_eq!(from, (Ipv4Addr::from(SELF), 2000).into());
            outside.send_to(b"answer", from).unwrap();
            assert_eq!(heard(&pod).as_deref(), Some(&b"answer"[..]));
            assert_eq!(world.counted(Action::Masquerade), round);
            assert_eq!(world.counted(Action::Unmasquerade), round);
        }
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

/// Source address and source port of an IPv4 packet without options.
fn source(packet: &[u8]) -> ([u8; 4], u16) {
    (packet[12..16].try_into().unwrap(), u16::from_be_bytes([packet[20], packet[21]]))
}

#[test]
fn pods_behind_an_uplink_without_link_layer_are_masqueraded_both_ways() {
    isolated("pods_behind_an_uplink_without_link_layer_are_masqueraded_both_ways", || async {
        let (mut world, tun) = World::on_tun();
        world.attach(&[], &["tun0"]).await;
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        for round in 1..=3 {
            pod.send_to(b"question", (Ipv4Addr::from(OUTSIDE), 53)).unwrap();
            let packet = tun.sent(4, protocol::UDP);
            assert_eq!(source(&packet), (SELF, 2000));
            assert!(checksums_hold(&packet));
            tun.send(&udp(OUTSIDE, SELF, (53, 2000), b"answer"));
            assert_eq!(heard(&pod).as_deref(), Some(&b"answer"[..]));
            assert_eq!(world.counted(Action::Masquerade), round);
            assert_eq!(world.counted(Action::Unmasquerade), round);
        }
        let pod = UdpSocket::bind(("fd42:1::2", 2000)).unwrap();
        let outside: Ipv6Addr = "2001:db8:9::53".parse().unwrap();
        pod.send_to(b"question", (outside, 53)).unwrap();
        let mut packet = tun.sent(6, protocol::UDP);
        assert_eq!(packet[8..24], bpf::PUBLIC_V6, "IPv6, too");
        // The reply is the packet with its ends swapped, which keeps the checksum.
        let (src, dst) = (packet[8..24].to_vec(), packet[24..40].to_vec());
        packet[8..24].copy_from_slice(&dst);
        packet[24..40].copy_from_slice(&src);
        let ports = [packet[42], packet[43], packet[40], packet[41]];
        packet[40..44].copy_from_slice(&ports);
        tun.send(&packet);
        assert_eq!(heard(&pod).as_deref(), Some(&b"question"[..]));
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn an_icmp_error_from_behind_an_uplink_without_link_layer_reaches_the_pod() {
    isolated("an_icmp_error_from_behind_an_uplink_without_link_layer_reaches_the_pod", || async {
        let (mut world, tun) = World::on_tun();
        world.attach(&[], &["tun0"]).await;
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        pod.connect((Ipv4Addr::from(OUTSIDE), 53)).unwrap();
        pod.send(b"question").unwrap();
        let quoted = tun.sent(4, protocol::UDP);
        assert_eq!(source(&quoted), (SELF, 2000));
        let mut message = vec![3, 3, 0, 0, 0, 0, 0, 0];
        message.extend(&quoted[..28]);
        let sum = message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        message[2..4].copy_from_slice(&(!kilo_common::checksum::fold(sum)).to_be_bytes());
        tun.send(&ipv4(OUTSIDE, SELF, protocol::ICMP, 64, &message));
        pod.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let refused = pod.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn nodes_steer_to_each_other_over_a_link_without_link_layer() {
    isolated("nodes_steer_to_each_other_over_a_link_without_link_layer", || async {
        let (mut world, tun) = World::on_tun();
        for hop in world.tables.hop.values_mut() {
            if let kilo_core::plan::Hop::Node { ifindex, .. } = hop {
                *ifindex = index("tun0");
            }
        }
        world.attach(&[], &["tun0"]).await;
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        tun.send(&steered(MEMBER, SELF, &udp(MEMBER_POD, OWN_POD, (1000, 2000), b"steered"))[14..]);
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!(world.counted(Action::Deliver), 1);
        // The route steers packets to a pod, the program on the uplink those to the node itself.
        for (round, to) in [(1, MEMBER_POD), (2, MEMBER)] {
            pod.send_to(b"answer", (Ipv4Addr::from(to), 1000)).unwrap();
            let packet = tun.sent(4, protocol::IPIP);
            assert_eq!((&packet[12..16], &packet[16..20]), (&SELF[..], &MEMBER[..]));
            assert_eq!((source(&packet[20..]), &packet[36..40]), ((OWN_POD, 2000), &to[..]));
            assert!(checksums_hold(&packet[20..]));
            assert_eq!(world.counted(Action::Steer), round);
        }
        // On a leader, packets to another location go on into WireGuard.
        tun.send(&steered(MEMBER, SELF, &udp(MEMBER_POD, REMOTE_POD, (1000, 2000), b"transit"))[14..]);
        tun.send(&steered(MEMBER, SELF, &udp(MEMBER_POD, OWN_POD, (1000, 2000), b"steered"))[14..]);
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!((world.counted(Action::Transit), world.counted(Action::Encrypt)), (1, 1));
        // A packet too large for the outer header gets an ICMP error as if from the node.
        pod.connect((Ipv4Addr::from(MEMBER), 1000)).unwrap();
        pod.send(&[7; 1481 - 28]).unwrap();
        let refused = std::iter::from_fn(|| Some(pod.send(&[7; 1481 - 28]))).take(1000).find_map(Result::err);
        assert_eq!(refused.unwrap().raw_os_error(), Some(nix::libc::EMSGSIZE));
        assert_eq!(world.drops().keys().copied().collect::<Vec<_>>(), ["too_big"]);
    });
}
