//! `uplink_egress`: mesh traffic never leaves in cleartext, whatever the routes say.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use std::os::fd::{AsFd as _, AsRawFd as _};

use aya::maps::MapData;
use bpf::{
    MEMBER, MEMBER_HOP, MEMBER_POD, OUTSIDE, OWN_POD, PUBLIC, REMOTE_POD, SELF, leader_tables, member_tables,
    packet::{PASS, REDIRECT, Ran, SHOT, ethernet, run, run_brought_by, steered, udp},
};
use ipnet::IpNet;
use kilo_common::maps::{
    CONFIG_GATEWAY, CONFIG_OFFERED, CONFIG_ONE_V4, HOP_LOCAL, HOP_NONE, HOP_REMOTE, MASQ_EXCLUDE, MASQ_FORCE,
    PREFIX_ENDPOINT, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED, PREFIX_ROUTE,
    PREFIX_SOURCE, PrefixValue,
};
use kilo_core::plan::{Hop, Tables};
use kilo_host::dataplane::{Dataplane, pin_directory};

const REMOTE_NODE: [u8; 4] = [10, 5, 0, 1];
const VPN_PEER: [u8; 4] = [10, 42, 9, 7];
const WIREGUARD: u16 = 51_820;

fn open(tables: &Tables) -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(tables).unwrap();
    Some((fs, dataplane))
}

fn outcome(ran: &Ran) -> (i32, Vec<&str>) {
    (ran.verdict, ran.counted.clone())
}

#[test]
fn nothing_is_sent_in_clear_to_a_prefix_of_wireguard_or_a_tunnel() {
    for tables in [leader_tables(), member_tables()] {
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        for src in [OWN_POD, SELF, PUBLIC, MEMBER_POD, MEMBER, VPN_PEER, OUTSIDE] {
            for dst in [REMOTE_POD, REMOTE_NODE, MEMBER_POD] {
                let ran =
                    run(&mut dataplane, "uplink_egress", &ethernet(&udp(src, dst, (1000, 53), b"secret")));
                assert_eq!(outcome(&ran), (SHOT, vec!["not_encrypted"]), "{src:?} to {dst:?}");
            }
        }
        // Other destinations are unaffected.
        let ran =
            run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, OUTSIDE, (1000, 53), b"question")));
        assert_eq!(outcome(&ran), (PASS, vec!["masquerade"]));
        let ran =
            run(&mut dataplane, "uplink_egress", &ethernet(&udp(SELF, MEMBER, (1000, 53), b"question")));
        assert_eq!(outcome(&ran), (PASS, vec![]));
    }
}

/// Makes the map refuse further writes by processes (`BPF_MAP_FREEZE`, linux/bpf.h).
fn freeze(map: &MapData) {
    const FREEZE: i64 = 22;
    let attributes = [u32::try_from(map.fd().as_fd().as_raw_fd()).unwrap(), 0];
    // SAFETY: the kernel reads as many bytes as are named, which begin with the descriptor.
    let done = unsafe {
        nix::libc::syscall(nix::libc::SYS_bpf, FREEZE, attributes.as_ptr(), size_of_val(&attributes))
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_new_prefix_is_guarded_before_it_is_left_out_of_masquerading() {
    let Some((fs, mut dataplane)) = open(&member_tables()) else { return };
    let new = [10, 42, 12, 7];
    let flow = |dataplane: &mut Dataplane, port: u16| {
        run(dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, new, (port, 53), b"secret")))
    };
    assert_eq!(outcome(&flow(&mut dataplane, 1000)), (PASS, vec!["masquerade"]));
    let mut tables = member_tables();
    let prefix: IpNet = "10.42.12.0/24".parse().unwrap();
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR;
    tables.prefix.insert(prefix, PrefixValue { hop: MEMBER_HOP, flags });
    tables.masq_dst.insert(prefix, MASQ_EXCLUDE);
    // As if the process ended between the two writes.
    freeze(&MapData::from_pin(pin_directory(fs.path()).join("masq_dst")).unwrap());
    dataplane.write(&tables).unwrap_err();
    assert_eq!(outcome(&flow(&mut dataplane, 1001)), (SHOT, vec!["not_encrypted"]));
}

#[test]
fn wireguards_own_packets_leave_and_a_pod_does_not_pass_for_it() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for src in [SELF, PUBLIC] {
        let ran = run(
            &mut dataplane,
            "uplink_egress",
            &ethernet(&udp(src, REMOTE_NODE, (WIREGUARD, 1), b"sealed")),
        );
        assert_eq!(outcome(&ran), (PASS, vec![]), "an endpoint within what another location offers");
    }
    for src in [OWN_POD, MEMBER_POD, VPN_PEER] {
        let ran =
            run(&mut dataplane, "uplink_egress", &ethernet(&udp(src, REMOTE_NODE, (WIREGUARD, 1), b"open")));
        assert_eq!(outcome(&ran), (SHOT, vec!["not_encrypted"]), "{src:?}");
    }
}

#[test]
fn a_header_nobody_can_read_hides_no_destination() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    // A total length of zero, as in packets above 64 KiB, and an invalid version.
    for (at, byte) in [([2, 3], 0), ([0, 0], 0x95)] {
        for (dst, wanted) in [(REMOTE_POD, (SHOT, vec!["not_encrypted"])), (OUTSIDE, (PASS, vec![]))] {
            let mut packet = udp(OWN_POD, dst, (1000, 53), b"secret");
            at.iter().for_each(|at| packet[*at] = byte);
            let ran = run(&mut dataplane, "uplink_egress", &ethernet(&packet));
            assert_eq!(outcome(&ran), wanted, "{at:?} {dst:?}");
        }
    }
}

#[test]
fn an_established_flow_is_looked_at_where_others_offer_prefixes() {
    // It was translated on the WireGuard device, to an address the uplink has, too.
    let mut tables = leader_tables();
    tables.config.private_v4 = PUBLIC;
    tables.config.flags |= CONFIG_ONE_V4 | CONFIG_OFFERED;
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let packet = ethernet(&udp(OWN_POD, OUTSIDE, (1000, 53), b"question"));
    assert_eq!(outcome(&run(&mut dataplane, "uplink_egress", &packet)), (PASS, vec!["masquerade"]));
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR;
    tables.prefix.insert("198.51.100.0/24".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
    dataplane.write(&tables).unwrap();
    for _ in 0..3 {
        assert_eq!(outcome(&run(&mut dataplane, "uplink_egress", &packet)), (SHOT, vec!["not_encrypted"]));
    }
}

#[test]
fn a_new_flow_is_not_masqueraded_to_where_packets_must_be_encrypted() {
    for one in [0, CONFIG_ONE_V4] {
        let mut tables = leader_tables();
        tables.config.private_v4 = PUBLIC;
        tables.config.flags |= one;
        // Independent of what masquerading itself excludes.
        let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR;
        tables.prefix.insert("198.51.100.0/24".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        let packet = ethernet(&udp(OWN_POD, OUTSIDE, (1000, 53), b"question"));
        for _ in 0..3 {
            let ran = run(&mut dataplane, "uplink_egress", &packet);
            assert_eq!(outcome(&ran), (SHOT, vec!["not_encrypted"]));
        }
    }
}

#[test]
fn pods_packets_to_where_wireguard_itself_sends_are_encrypted_all_the_same() {
    let mut tables = leader_tables();
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_PODS_STEERED;
    tables.prefix.insert("10.5.0.1/32".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    for src in [OWN_POD, MEMBER_POD, VPN_PEER] {
        let sent = ethernet(&udp(src, REMOTE_NODE, (1000, 10_250), b"hello"));
        let ran = run(&mut dataplane, "uplink_egress", &sent);
        assert_eq!(outcome(&ran), (REDIRECT, vec![]), "{src:?} is handed to kilo0");
        assert_eq!(ran.bytes, sent);
    }
    // The host's own packets pass unchanged: the API server may be there.
    for src in [SELF, PUBLIC] {
        let ran =
            run(&mut dataplane, "uplink_egress", &ethernet(&udp(src, REMOTE_NODE, (1000, 10_250), b"hello")));
        assert_eq!(outcome(&ran), (PASS, vec![]), "{src:?}");
    }
    let large = ethernet(&udp(OWN_POD, REMOTE_NODE, (1000, 10_250), &[7; 1421 - 28]));
    let ran = run(&mut dataplane, "uplink_egress", &large);
    assert_eq!(outcome(&ran), (REDIRECT, vec!["too_big"]), "the sender hears what WireGuard carries");
    assert_eq!(&ran.bytes[14 + 26..14 + 28], &1420_u16.to_be_bytes());
}

/// The private address of another leader is open to the host as a destination, but proves nothing about a
/// sender: packets from WireGuard reach the uplink when somebody detaches `kilo_ingress`.
#[test]
fn what_wireguard_brought_from_another_leaders_host_is_not_sent_on_in_clear() {
    let mut tables = leader_tables();
    let endpoint = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_PODS_STEERED | PREFIX_HOST_STEERED;
    tables.prefix.insert("10.5.0.1/32".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags: endpoint });
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let kilo = tables.config.kilo_ifindex;
    for port in [1000, WIREGUARD] {
        let packet = ethernet(&udp(REMOTE_NODE, MEMBER, (port, 53), b"secret"));
        let ran = run_brought_by(&mut dataplane, kilo, "uplink_egress", &packet);
        assert_eq!(outcome(&ran), (REDIRECT, vec![]), "port {port}: it is handed to kilo0");
        // The stack has masqueraded, to an address of this host, what a pod or VPN peer sent here for a
        // Service.
        for own in [SELF, PUBLIC] {
            let own = ethernet(&udp(own, MEMBER, (port, 53), b"question"));
            let ran = run_brought_by(&mut dataplane, kilo, "uplink_egress", &own);
            assert_eq!(outcome(&ran), (PASS, vec![]), "port {port}");
        }
        // As the host's own, which alone sends from where no location is.
        let ran = run_brought_by(&mut dataplane, kilo + 1, "uplink_egress", &packet);
        assert_eq!(outcome(&ran), (PASS, vec![]), "port {port}");
    }
}

#[test]
fn of_the_hosts_packets_wireguards_alone_go_to_a_private_endpoint_as_they_are() {
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_PODS_STEERED | PREFIX_HOST_STEERED;
    for one in [0, CONFIG_ONE_V4] {
        let mut tables = leader_tables();
        tables.config.flags |= one;
        tables.prefix.insert("10.5.0.1/32".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        for src in [SELF, PUBLIC, OWN_POD, MEMBER_POD, VPN_PEER, OUTSIDE] {
            // Also large ones: the PMTU that the stack would learn for the address is the tunnel's.
            for payload in [&b"hello"[..], &[7; 1460 - 28]] {
                if payload.len() > 1000 && [OWN_POD, MEMBER_POD, VPN_PEER].contains(&src) {
                    continue;
                }
                let sent = ethernet(&udp(src, REMOTE_NODE, (1000, WIREGUARD), payload));
                let ran = run(&mut dataplane, "uplink_egress", &sent);
                assert_eq!(outcome(&ran), (REDIRECT, vec![]), "{src:?} is handed to kilo0");
                assert_eq!(ran.bytes, sent);
            }
        }
        for (src, wanted) in [(SELF, PASS), (PUBLIC, PASS), (OWN_POD, REDIRECT)] {
            let sealed = ethernet(&udp(src, REMOTE_NODE, (WIREGUARD, 51_820), b"sealed"));
            assert_eq!(outcome(&run(&mut dataplane, "uplink_egress", &sealed)), (wanted, vec![]), "{src:?}");
        }
        // A full-size packet of the host makes WireGuard's own packet too large for the uplink. Steering
        // its first fragment would enlarge it and return it here forever, and all fragments must take one
        // path. A later fragment of another datagram may begin with any bytes.
        let other = u16::MAX.to_be_bytes();
        for (id, offset, wanted) in [
            ([1, u8::from(one != 0)], 8_u16, REDIRECT),
            ([1, u8::from(one != 0)], 0x2000, PASS),
            ([1, u8::from(one != 0)], 0x2008, PASS),
            ([1, u8::from(one != 0)], 16, PASS),
            (other, 8, REDIRECT),
        ] {
            let mut fragment = udp(SELF, REMOTE_NODE, (WIREGUARD, 51_820), b"sealed");
            fragment[4..6].copy_from_slice(&id);
            fragment[6..8].copy_from_slice(&offset.to_be_bytes());
            let ran = run(&mut dataplane, "uplink_egress", &ethernet(&fragment));
            assert_eq!(outcome(&ran), (wanted, vec![]), "{id:?} {offset:x}");
            // Another protocol's fragment, whatever it begins with.
            fragment[9] = 1;
            if offset & 0x1fff != 0 {
                let ran = run(&mut dataplane, "uplink_egress", &ethernet(&fragment));
                assert_eq!(outcome(&ran), (REDIRECT, vec![]), "{id:?} {offset:x}, of ICMP");
            }
        }
    }
}

#[test]
fn without_a_hop_pods_packets_do_not_leave_as_they_are() {
    let mut tables = leader_tables();
    tables.hop.remove(&MEMBER_HOP);
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let ran =
        run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, MEMBER, (1000, 10_250), b"hello")));
    assert_eq!(outcome(&ran), (SHOT, vec!["no_hop"]));
}

#[test]
fn a_prefix_this_host_forces_to_be_masqueraded_stays_closed() {
    let mut tables = leader_tables();
    tables.masq_dst.insert("10.42.4.0/24".parse().unwrap(), MASQ_FORCE);
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let ran =
        run(&mut dataplane, "uplink_egress", &ethernet(&udp(OWN_POD, REMOTE_POD, (1000, 53), b"secret")));
    assert_eq!(outcome(&ran), (SHOT, vec!["not_encrypted"]));
}

#[test]
fn neighbours_on_the_link_are_answered_and_nothing_else_looks_like_that() {
    let mut tables = leader_tables();
    let closed = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR;
    for (prefix, hop, flags) in [
        ("fd42:1::/64", HOP_LOCAL, PREFIX_ROUTE | PREFIX_SOURCE),
        ("fd00:1::12/128", HOP_REMOTE, closed),
        ("fd42:4::/64", HOP_REMOTE, closed),
    ] {
        tables.prefix.insert(prefix.parse().unwrap(), PrefixValue { hop, flags });
    }
    tables.config.private_v6 = "fd00:1::11".parse::<std::net::Ipv6Addr>().unwrap().octets();
    assert!(matches!(tables.hop.get(&HOP_REMOTE), Some(Hop::Wireguard)));
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let packet = |src: &str, kind: u8, ttl: u8| {
        let address = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        let mut ip = vec![0x60, 0, 0, 0, 0, 24, 58, ttl];
        ip.extend(address(src));
        ip.extend(address("fd00:1::12"));
        ip.extend([kind, 0, 0, 0]);
        ip.resize(64, 0);
        let mut frame = ethernet(&ip);
        frame[12..14].copy_from_slice(&0x86dd_u16.to_be_bytes());
        frame
    };
    for (src, kind, ttl, passes) in [
        ("fd00:1::11", 136, 255, true),
        ("2001:db8::11", 135, 255, true),
        ("fd00:1::11", 136, 64, false),
        ("fd00:1::11", 128, 255, false),
        ("fd42:1::2", 136, 255, false),
    ] {
        let ran = run(&mut dataplane, "uplink_egress", &packet(src, kind, ttl));
        let wanted = if passes { (PASS, vec![]) } else { (SHOT, vec!["not_encrypted"]) };
        assert_eq!(outcome(&ran), wanted, "{src} {kind} {ttl}");
    }
}

#[test]
fn what_is_for_pods_that_are_not_there_does_not_leave_in_clear() {
    for mut tables in [leader_tables(), member_tables()] {
        let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR;
        tables.prefix.insert("10.42.1.0/24".parse().unwrap(), PrefixValue { hop: HOP_LOCAL, flags });
        tables.prefix.insert("10.42.7.0/24".parse().unwrap(), PrefixValue { hop: HOP_NONE, flags });
        let host = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_PODS_STEERED;
        tables.prefix.insert("10.7.0.1/32".parse().unwrap(), PrefixValue { hop: HOP_NONE, flags: host });
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        let mut ran = |src, dst| {
            let packet = ethernet(&udp(src, dst, (1000, 53), b"secret"));
            let ran = run(&mut dataplane, "uplink_egress", &packet);
            (ran.verdict, ran.counted)
        };
        // Prefix of this node before its first pod, for decrypted packets and packets from neighbours; and
        // prefix of a lost node.
        for dst in [OWN_POD, [10, 42, 7, 2]] {
            for src in [REMOTE_POD, MEMBER_POD, VPN_PEER, SELF] {
                assert_eq!(ran(src, dst), (SHOT, vec!["not_encrypted"]), "{src:?} {dst:?}");
            }
        }
        // The lost node's address: pods' packets are dropped, the host's own pass.
        assert_eq!(ran(OWN_POD, [10, 7, 0, 1]), (SHOT, vec!["no_hop"]));
        assert_eq!(ran(SELF, [10, 7, 0, 1]), (PASS, vec![]));
        // A packet that a shorter route leads to kilo0 is dropped, too. The kernel reads its protocol from
        // bytes 12 and 13, where the source begins.
        let packet = udp([8, 0, 0, 2], [10, 42, 7, 2], (1000, 53), b"secret");
        assert_eq!(outcome(&run(&mut dataplane, "kilo_egress", &packet)), (SHOT, vec!["no_hop"]));
    }
}

/// What a pod sends in an outer header, another node would take for a packet that this node or another one has
/// steered. The pod may have forged the source, or somebody masquerades it to this host's address.
#[test]
fn a_pods_own_ipip_reaches_no_node() {
    const BRIDGE: u32 = 99;
    for tables in [leader_tables(), member_tables()] {
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        let inner = udp(REMOTE_POD, MEMBER_POD, (1, 2), b"forged");
        for from in [SELF, OWN_POD, [10, 1, 0, 13]] {
            let packet = steered(from, MEMBER, &inner);
            let ran = run_brought_by(&mut dataplane, BRIDGE, "uplink_egress", &packet);
            assert_eq!(outcome(&ran), (SHOT, vec!["forged_vxlan"]), "{from:?}");
        }
        // IPIP of the host itself is another agent's, what came from a node by its interface is that node's,
        // and what goes to no node is anybody's.
        let of_host = steered(SELF, MEMBER, &inner);
        assert_eq!(outcome(&run(&mut dataplane, "uplink_egress", &of_host)), (PASS, vec![]));
        let of_node = steered(MEMBER, MEMBER, &inner);
        let ran = run_brought_by(&mut dataplane, bpf::IFINDEX, "uplink_egress", &of_node);
        assert_eq!(outcome(&ran).1, Vec::<&str>::new());
        let outside = steered(SELF, OUTSIDE, &inner);
        let ran = run_brought_by(&mut dataplane, BRIDGE, "uplink_egress", &outside);
        assert_eq!(outcome(&ran), (PASS, vec![]));
    }
}

/// On a gateway nobody behind it would notice.
#[test]
fn a_pod_of_a_gateway_sends_from_no_address_of_another() {
    const BRIDGE: u32 = 99;
    // The kernel reads the test's packet as IPv4 with such a source.
    const POD: [u8; 4] = [8, 0, 1, 2];
    let packet = udp(POD, REMOTE_POD, (1, 2), b"forged");
    for (owner, flags, is_foreign) in [
        (MEMBER_HOP, 0, true),
        (HOP_REMOTE, PREFIX_NEVER_CLEAR, true),
        (HOP_REMOTE, PREFIX_PODS_STEERED | PREFIX_ENDPOINT, true),
        // Somebody offers a default route.
        (HOP_REMOTE, PREFIX_PODS_STEERED, false),
        (HOP_NONE, PREFIX_NEVER_CLEAR, false),
        (HOP_LOCAL, PREFIX_NEVER_CLEAR, false),
    ] {
        for mut tables in [leader_tables(), member_tables()] {
            let leads = tables.config.flags & CONFIG_GATEWAY != 0;
            let value = PrefixValue { hop: owner, flags: PREFIX_ROUTE | PREFIX_SOURCE | flags };
            tables.prefix.insert("8.0.1.0/24".parse().unwrap(), value);
            let Some((_fs, mut dataplane)) = open(&tables) else { return };
            let ran = run_brought_by(&mut dataplane, BRIDGE, "kilo_egress", &packet);
            let is_dropped = outcome(&ran) == (SHOT, vec!["foreign_source"]);
            assert_eq!(is_dropped, leads && is_foreign, "{owner}: {:?}", outcome(&ran));
            // What WireGuard, an uplink or the host itself hands to the stack is checked elsewhere.
            for other in [0, bpf::IFINDEX, tables.config.kilo_ifindex] {
                let ran = run_brought_by(&mut dataplane, other, "kilo_egress", &packet);
                assert!(!outcome(&ran).1.contains(&"foreign_source"), "{owner} from {other}");
            }
        }
    }
}
