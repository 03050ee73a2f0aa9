//! Flows that others open towards pods: their replies are not translated.

use std::{collections::BTreeMap, net::IpAddr};

use kilo_common::{
    maps::{CONFIG_NATIVE, CONFIG_OFFERED, InboundValue, MASQ_EXCLUDE, MASQ_FORCE, NatKey},
    nat::timeout::seconds,
    packet::protocol,
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::{Side, World, echo, error, fragments, frame, ip, neighbour, read, segment, sides, tcp, udp};
use crate::{
    bpf::{
        self,
        packet::{PASS, SHOT},
    },
    seed::seed,
};

const SYN: u8 = 2;
const SYN_ACK: u8 = 18;
const ACK: u8 = 16;

/// Asserts that the incoming packet passes unchanged.
#[track_caller]
fn comes(world: &mut World, packet: &[u8]) {
    let ran = world.back(packet);
    assert_eq!((ran.verdict, &ran.bytes, ran.counted.len()), (PASS, &frame(packet), 0));
}

/// Asserts that the packet leaves unchanged.
#[track_caller]
fn stays(world: &mut World, packet: &[u8]) {
    let ran = world.out(packet);
    assert_eq!((ran.verdict, &ran.bytes, ran.counted.as_slice()), (PASS, &frame(packet), &[][..]));
}

/// Asserts that the packet's source is translated.
#[track_caller]
fn is_translated(world: &mut World, packet: &[u8], side: &Side) {
    let ran = world.out(packet);
    assert_eq!(ran.counted, ["masquerade"]);
    assert_eq!(read(&ran.bytes).src, side.public);
}

fn table(world: &mut World) -> aya::maps::HashMap<&mut aya::maps::MapData, NatKey, InboundValue> {
    world.dataplane.map("inbound").unwrap().try_into().unwrap()
}

/// Makes every flow from outside look unused for so many seconds more, back to boot at most.
fn age(world: &mut World, by: u32) {
    let mut table = table(world);
    let entries: Vec<_> = table.iter().map(Result::unwrap).collect();
    for (key, value) in entries {
        table
            .insert(key, InboundValue { last_seen: value.last_seen.saturating_sub(by), ..value }, 0)
            .unwrap();
    }
}

#[test]
fn answers_to_connections_opened_towards_pods_stay_as_they_are() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, outside, .. } = side;
        for (there, here) in [
            (tcp(outside, pod, (5001, 80), SYN), tcp(pod, outside, (80, 5001), SYN_ACK)),
            (tcp(outside, pod, (5001, 80), ACK), tcp(pod, outside, (80, 5001), 24)),
            (udp(outside, pod, (5000, 53), b"question"), udp(pod, outside, (53, 5000), b"answer")),
            (echo(outside, pod, &side, side.echo, 7), echo(pod, outside, &side, side.echo_reply, 7)),
            (tcp(outside, pod, (5002, 81), SYN), tcp(pod, outside, (81, 5002), 20)),
            // From WireGuard's port, which another program's flow may use.
            (udp(outside, pod, (51_820, 51_820), b"x"), udp(pod, outside, (51_820, 51_820), b"y")),
        ] {
            for _ in 0..3 {
                comes(&mut world, &there);
                stays(&mut world, &here);
                stays(&mut world, &here);
            }
        }
        // Flows that a pod opens are masqueraded, even between the same two hosts.
        is_translated(&mut world, &udp(pod, outside, (5000, 53), b""), &side);
        is_translated(&mut world, &tcp(pod, outside, (5003, 80), SYN), &side);
        is_translated(&mut world, &tcp(pod, outside, (80, 5001), SYN), &side);
        is_translated(&mut world, &echo(pod, outside, &side, side.echo, 7), &side);
    }
}

#[test]
fn an_established_connection_is_noted_by_any_packet_from_outside() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, outside, .. } = side;
        comes(&mut world, &tcp(outside, pod, (5001, 80), ACK));
        stays(&mut world, &tcp(pod, outside, (80, 5001), ACK));
        // A reset alone opens no flow, and an unsolicited echo reply is refused.
        comes(&mut world, &tcp(outside, pod, (5009, 80), 4));
        is_translated(&mut world, &tcp(pod, outside, (80, 5009), ACK), &side);
        let reply = echo(pod, outside, &side, side.echo_reply, 9);
        assert_eq!(world.out(&reply).counted, ["nat_unsupported"]);
    }
}

#[test]
fn flows_from_outside_end_as_netfilters_do() {
    let Some(mut world) = World::new() else { return };
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let uptime: u32 = uptime.split('.').next().unwrap().parse().unwrap();
    if uptime < 2 * seconds::UDP_STREAM {
        println!("kilo-skip: no flow can be older than this kernel, which runs for {uptime} s");
        return;
    }
    for side in sides() {
        let Side { pod, outside, .. } = side;
        let (there, here) = (udp(outside, pod, (5000, 53), b""), udp(pod, outside, (53, 5000), b""));
        comes(&mut world, &there);
        age(&mut world, seconds::UDP - 1);
        stays(&mut world, &here);
        age(&mut world, seconds::UDP_STREAM - 1);
        stays(&mut world, &here);
        age(&mut world, seconds::UDP_STREAM + 2);
        is_translated(&mut world, &here, &side);
    }
}

#[test]
fn errors_about_flows_from_outside_stay_as_they_are() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, outside, .. } = side;
        let question = udp(outside, pod, (5000, 53), b"to a closed port");
        comes(&mut world, &question);
        stays(&mut world, &error(pod, outside, &side, &question));
        let unknown = udp(outside, pod, (5001, 53), b"that never came");
        let ran = world.out(&error(pod, outside, &side, &unknown));
        assert_eq!((ran.verdict, ran.counted.as_slice()), (SHOT, &["nat_unsupported"][..]));
    }
}

#[test]
fn fragments_of_answers_follow_the_first() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, outside, .. } = side;
        let data = vec![7; 2000];
        for part in fragments(&udp(outside, pod, (5000, 53), &data), 3, 1008) {
            comes(&mut world, &part);
        }
        let [first, second] = fragments(&udp(pod, outside, (53, 5000), &data), 9, 1008);
        let early = world.out(&second);
        assert_eq!(early.counted, ["nat_fragment"]);
        stays(&mut world, &first);
        stays(&mut world, &second);
        stays(&mut world, &second);
        let long = |src, dst, kind| {
            let data = [&[kind, 0, 0, 0, 0, 7, 0, 1][..], &data].concat();
            ip(src, dst, side.icmp, &segment(src, dst, side.icmp, data))
        };
        for part in fragments(&long(outside, pod, side.echo), 4, 1008) {
            comes(&mut world, &part);
        }
        for part in fragments(&long(pod, outside, side.echo_reply), 10, 1008) {
            stays(&mut world, &part);
        }
    }
}

#[test]
fn only_flows_whose_answers_would_be_masqueraded_are_noted() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        // To the node itself, to an address of no pod, from a mesh node, and of a protocol without ports.
        comes(&mut world, &tcp(outside, public, (5001, 80), SYN));
        let elsewhere: IpAddr =
            if pod.is_ipv4() { [172, 16, 0, 9].into() } else { "2001:db8:77::9".parse().unwrap() };
        comes(&mut world, &tcp(outside, elsewhere, (5001, 80), SYN));
        let mut mesh = outside;
        if pod.is_ipv4() {
            mesh = [10, 42, 2, 9].into();
        } else {
            world.tables.masq_dst.insert(outside.into(), MASQ_EXCLUDE);
            world.dataplane.write(&world.tables).unwrap();
        }
        comes(&mut world, &tcp(mesh, pod, (5001, 80), SYN));
        comes(&mut world, &ip(outside, pod, 47, &[0; 20]));
        assert_eq!(table(&mut world).keys().count(), 0);
    }
}

#[test]
fn hosts_of_the_own_location_that_open_towards_the_mesh_get_their_answers() {
    let Some(mut world) = World::new() else { return };
    let [side, _] = sides();
    let host: IpAddr = [198, 51, 100, 77].into();
    // allowed-location-ips: masqueraded for every sender.
    world.tables.masq_dst.insert(host.into(), MASQ_FORCE);
    world.dataplane.write(&world.tables).unwrap();
    let remote: IpAddr = bpf::REMOTE_POD.into();
    is_translated(&mut world, &tcp(remote, host, (70, 7000), SYN), &side);
    comes(&mut world, &tcp(host, remote, (5001, 80), SYN));
    stays(&mut world, &tcp(remote, host, (80, 5001), SYN_ACK));
}

/// The WireGuard device has no Ethernet header, but `BPF_PROG_TEST_RUN` reads one: bytes 12 and 13 of these
/// packets, in the source address, are their family's EtherType.
#[test]
fn flows_from_behind_another_location_are_noted_where_some_offers_prefixes() {
    for offered in [true, false] {
        let Some(mut world) = World::new() else { return };
        let (host, pod): (IpAddr, IpAddr) = ([8, 0, 99, 9].into(), [8, 0, 1, 2].into());
        world.tables.masq_src.insert("8.0.1.0/24".parse().unwrap(), kilo_common::maps::MASQ_SRC_ALWAYS);
        world.tables.prefix.insert(
            "8.0.99.0/24".parse().unwrap(),
            kilo_common::maps::PrefixValue { hop: kilo_common::maps::HOP_REMOTE, flags: 3 },
        );
        world.tables.config.flags |= if offered { CONFIG_OFFERED } else { 0 };
        world.dataplane.write(&world.tables).unwrap();
        let mut run = |program: &str, packet: &[u8]| bpf::packet::run(&mut world.dataplane, program, packet);
        let there = tcp(host, pod, (5001, 80), SYN);
        let ran = run("kilo_ingress", &there);
        assert_eq!((ran.verdict, &ran.bytes, ran.counted.as_slice()), (PASS, &there, &["decrypt"][..]));
        let here = tcp(pod, host, (80, 5001), SYN_ACK);
        let ran = run("kilo_egress", &here);
        if offered {
            assert_eq!((&ran.bytes, ran.counted.as_slice()), (&here, &["encrypt"][..]));
        } else {
            assert_eq!(ran.counted, ["encrypt", "masquerade"]);
        }
        let own = run("kilo_egress", &tcp(pod, host, (81, 5001), SYN));
        assert_eq!(own.counted, ["encrypt", "masquerade"]);
    }
}

#[test]
fn packets_of_nodes_with_native_routing_are_not_noted() {
    let Some(mut world) = World::new() else { return };
    world.tables.config.flags |= CONFIG_NATIVE;
    world.dataplane.write(&world.tables).unwrap();
    for side in sides() {
        let Side { pod, outside, .. } = side;
        comes(&mut world, &udp(outside, pod, (5000, 53), b"from the network, all the same"));
        stays(&mut world, &udp(pod, outside, (53, 5000), b""));
    }
}

#[test]
fn strangers_fill_their_own_table_and_take_no_port_from_pods() {
    let Some(mut world) = World::new() else { return };
    let [side, _] = sides();
    let Side { pod, outside, public, .. } = side;
    let ours = udp(pod, outside, (5000, 53), b"");
    is_translated(&mut world, &ours, &side);
    let guest = udp(outside, pod, (999, 80), b"");
    let answer = udp(pod, outside, (80, 999), b"");
    comes(&mut world, &guest);
    let most = kilo_common::map_table::INBOUND.size;
    for number in 0..most + most / 2 {
        let stranger = neighbour([203, 0, 113, 1].into(), u8::try_from(1 + number / 60_000).unwrap());
        let port = u16::try_from(1_000 + number % 60_000).unwrap();
        let frame = frame(&udp(stranger, pod, (port, 80), b""));
        bpf::packet::run_uncounted(&mut world.dataplane, "lan_ingress", &frame);
        if number % 64 == 0 {
            // A flow in use stays.
            comes(&mut world, &guest);
            stays(&mut world, &answer);
        }
    }
    assert!(table(&mut world).keys().count() <= most as usize);
    stays(&mut world, &answer);
    assert_eq!(world.out(&ours).counted, ["masquerade"]);
    let back = world.back(&udp(outside, public, (53, 5000), b""));
    assert_eq!(read(&back.bytes).dst, pod, "the pod's own flow is untouched");
}

/// Connections in both directions between few hosts and ports, some with the same ports: a reply is treated
/// as its flow began, whatever else exists. The model is a table of who spoke first.
#[test]
fn every_answer_goes_as_its_flow_began() {
    let Some(mut world) = World::new() else { return };
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    // Who opened the flow: true = outside.
    let mut flows: BTreeMap<(IpAddr, u16, IpAddr, u16, u8), bool> = BTreeMap::new();
    let (mut outward, mut inward) = (0, 0);
    for _ in 0..3_000 {
        let side = &sides()[random.random_range(0..2)];
        let pod = neighbour(side.pod, random.random_range(2..5));
        let outside = neighbour(side.outside, random.random_range(2..5));
        let (own, theirs) = (random.random_range(5_000..5_006), random.random_range(50..53));
        let kind = [protocol::TCP, protocol::UDP][random.random_range(0..2)];
        let from_outside = random.random_bool(0.5);
        let first = *flows.entry((pod, own, outside, theirs, kind)).or_insert(from_outside);
        let (open, later) = if kind == protocol::TCP { (SYN, SYN_ACK) } else { (0, 0) };
        let packet = |src, dst, ports, flags| match kind {
            protocol::TCP => tcp(src, dst, ports, flags),
            _ => udp(src, dst, ports, b"data"),
        };
        if first {
            comes(&mut world, &packet(outside, pod, (theirs, own), open));
            stays(&mut world, &packet(pod, outside, (own, theirs), later));
            inward += 1;
        } else {
            let ran = world.out(&packet(pod, outside, (own, theirs), open));
            assert_eq!(ran.counted, ["masquerade"]);
            let port = read(&ran.bytes).ports.0;
            let back = world.back(&packet(outside, side.public, (theirs, port), later));
            let seen = read(&back.bytes);
            assert_eq!((seen.dst, seen.ports), (pod, (theirs, own)));
            outward += 1;
        }
    }
    assert!(outward > 500 && inward > 500, "{outward} {inward}");
}
