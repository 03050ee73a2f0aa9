//! Real packets through the programs on links that differ: VLANs above an
//! interface that has an address itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod links;
mod netns;
mod support;

use kilo_common::{
    maps::MASQ_FORCE,
    verdict::{Action, DropReason},
};
use links::{LAN_MAC, LanSender, NODE_MAC, World, has_vlans, heard, index, lan, udp_in_lan};
use netns::{isolated, sh};
use std::net::UdpSocket;
use support::{
    MEMBER, MEMBER_POD, OUTSIDE, OWN_POD, PUBLIC, SELF,
    packet::{steered, udp},
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
fn a_frame_of_a_vlan_is_the_vlan_devices_and_a_priority_tag_is_taken_off() {
    isolated("a_frame_of_a_vlan_is_the_vlan_devices_and_a_priority_tag_is_taken_off", || async {
        let mut world = World::on_veth();
        world.attach(&["eth0"], &[]).await;
        let pod = UdpSocket::bind((std::net::Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        let sender = LanSender::new();
        sender.send(&tagged(None, 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "without a tag");
        assert_eq!(world.counted(Action::Deliver), 1);
        // Priority 0 and 5.
        for (tag, delivered) in [(0, 2), (5 << 13, 3)] {
            sender.send(&tagged(Some(tag), 2000));
            assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "with tag {tag:#x}");
            assert_eq!(world.counted(Action::Deliver), delivered);
        }
        for tag in [7, 5 << 13 | 7] {
            sender.send(&tagged(Some(tag), 2000));
        }
        // What comes last has been handled last.
        sender.send(&tagged(None, 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!(world.counted(Action::Deliver), 4, "no device has VLAN 7: its frames are nobody's");
        assert!(world.drops().is_empty(), "{:?}", world.drops());

        if !has_vlans() {
            support::skip("this kernel has no VLAN devices");
            return;
        }
        sh("ip link add link eth0 name eth0.7 type vlan id 7; ip link set eth0.7 up
            ip address del 10.1.0.11/24 dev eth0; ip address add 10.1.0.11/24 dev eth0.7");
        world.attach(&["eth0", "eth0.7"], &[]).await;
        for tag in [7, 5 << 13 | 7] {
            sender.send(&tagged(Some(tag), 2000));
            assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]), "with tag {tag:#x}");
        }
        assert_eq!(world.counted(Action::Deliver), 6);
        sender.send(&tagged(Some(8), 2000));
        sender.send(&tagged(Some(7), 2000));
        assert_eq!(heard(&pod).as_deref(), Some(&b"steered"[..]));
        assert_eq!(world.counted(Action::Deliver), 7);
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn what_leaves_by_a_vlan_is_masqueraded_once_and_the_answer_comes_back() {
    isolated("what_leaves_by_a_vlan_is_masqueraded_once_and_the_answer_comes_back", || async {
        if !has_vlans() {
            support::skip("this kernel has no VLAN devices");
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
        // Whatever the source is, what the first program has made of it too.
        world.tables.masq_dst.insert("198.51.100.0/24".parse().unwrap(), MASQ_FORCE);
        world.attach(&["eth0", "eth0.7"], &[]).await;
        world.masquerade_as(index("eth0.7"), SELF);
        let outside = udp_in_lan(OUTSIDE, 53);
        let pod = UdpSocket::bind((std::net::Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        for round in 1..=3 {
            pod.send_to(b"question", (std::net::Ipv4Addr::from(OUTSIDE), 53)).unwrap();
            let (_, from) = outside.recv_from(&mut [0; 64]).unwrap();
            assert_eq!(from, (std::net::Ipv4Addr::from(SELF), 2000).into());
            outside.send_to(b"answer", from).unwrap();
            assert_eq!(heard(&pod).as_deref(), Some(&b"answer"[..]));
            assert_eq!(world.counted(Action::Masquerade), round);
            assert_eq!(world.counted(Action::Unmasquerade), round);
        }
        assert!(world.drops().is_empty(), "{:?}", world.drops());
        let _ = DropReason::ALL;
    });
}
