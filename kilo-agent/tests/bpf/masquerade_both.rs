//! Masquerading that is the same for IPv4 and IPv6: flows of each protocol, fragments, and the host's
//! ports; ICMP errors are in masquerade/errors.rs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod masquerade;
use crate::{bpf, seed::seed, wait::time_passes};

use std::{net::IpAddr, time::Duration};

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use bpf::{
    IFINDEX,
    packet::{PASS, SHOT},
};
use kilo_common::{
    checksum,
    maps::{CONFIG_ONE_V4, CONFIG_SEVERAL_V4, NAT_EGRESS, NAT_INGRESS, NatKey, NatValue, VXLAN_PORT},
};
use masquerade::{
    Side, World, addresses, echo, fragments, frame, ip, neighbour, ports, read, sides, tcp, transport, udp,
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

#[test]
fn udp_tcp_and_echo_of_both_families_go_out_and_come_back() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        for (there, here) in [
            (udp(pod, outside, (5000, 53), b"question"), udp(outside, public, (53, 5000), b"answer")),
            (tcp(pod, outside, (5001, 80), 2), tcp(outside, public, (80, 5001), 18)),
            (echo(pod, outside, &side, side.echo, 77), echo(outside, public, &side, side.echo_reply, 77)),
        ] {
            let out = world.out(&there);
            assert_eq!((out.verdict, out.counted.as_slice()), (PASS, &["masquerade"][..]));
            let seen = read(&out.bytes);
            assert_eq!((seen.src, seen.ports), (public, ports(&there)), "a free port is kept");
            let back = world.back(&here);
            assert_eq!((back.verdict, back.counted.as_slice()), (PASS, &["unmasquerade"][..]));
            let seen = read(&back.bytes);
            assert_eq!((seen.dst, seen.ports), (pod, ports(&here)));
        }
    }
}

#[test]
fn the_answer_to_any_translated_packet_comes_back_as_the_answer_to_the_packet_itself() {
    let Some(mut world) = World::new() else { return };
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut changed = 0;
    for _ in 0..2_000 {
        let side = &sides()[random.random_range(0..2)];
        // Few pods, servers and ports, so that many flows compete for the same port.
        let pod = neighbour(side.pod, random.random_range(2..6));
        let outside = neighbour(side.outside, random.random_range(2..5));
        let (own, theirs) = (random.random_range(5_000..5_020), random.random_range(50..53));
        let mut data = vec![0; random.random_range(0..300)];
        random.fill(&mut data[..]);
        let packet = |src, dst, ports: (u16, u16), answer: bool, kind: u32| match kind {
            0 => udp(src, dst, ports, &data),
            1 => tcp(src, dst, ports, if answer { 18 } else { 2 }),
            _ if answer => echo(src, dst, side, side.echo_reply, ports.1),
            _ => echo(src, dst, side, side.echo, ports.0),
        };
        let kind = random.random_range(0..3);
        let out = world.out(&packet(pod, outside, (own, theirs), false, kind));
        assert_eq!(out.counted, ["masquerade"]);
        let seen = read(&out.bytes);
        assert_eq!((seen.src, seen.dst), (side.public, outside));
        changed += u32::from(seen.ports.0 != own);
        let back = world.back(&packet(outside, side.public, (theirs, seen.ports.0), true, kind));
        assert_eq!(back.counted, ["unmasquerade"]);
        assert_eq!(back.bytes, frame(&packet(outside, pod, (theirs, own), true, kind)));
    }
    assert!(changed > 100, "ports were changed {changed} times only");
}

/// Reassembles a datagram.
fn whole(parts: [&[u8]; 2]) -> Vec<u8> {
    let (src, dst) = addresses(parts[0]);
    let payload = parts.map(|part| part[transport(part).offset..].to_vec()).concat();
    ip(src, dst, transport(parts[0]).protocol, &payload)
}

#[test]
fn fragments_follow_their_first_one_both_ways() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        // Another pod's flow forces a port change.
        let other = if pod.is_ipv4() { [10, 42, 1, 77].into() } else { "fd42:1::77".parse().unwrap() };
        world.out(&udp(other, outside, (5000, 53), b"x"));
        let data = vec![7; 2000];
        let [first, second] = fragments(&udp(pod, outside, (5000, 53), &data), 9, 1008);
        let early = world.out(&second);
        assert_eq!((early.verdict, early.counted.as_slice()), (SHOT, &["nat_fragment"][..]));
        let (first, second) = (world.out(&first), world.out(&second));
        assert_eq!(
            (first.counted.as_slice(), second.counted.as_slice()),
            (&["masquerade"][..], &["masquerade"][..])
        );
        let sent = whole([&first.bytes[14..], &second.bytes[14..]]);
        let seen = read(&frame(&sent));
        assert_eq!((seen.src, seen.ports.1), (public, 53));
        assert_ne!(seen.ports.0, 5000);

        let [first, second] = fragments(&udp(outside, public, (53, seen.ports.0), &data), 11, 1008);
        let (first, second) = (world.back(&first), world.back(&second));
        assert_eq!(
            (first.counted.as_slice(), second.counted.as_slice()),
            (&["unmasquerade"][..], &["unmasquerade"][..])
        );
        let got = read(&frame(&whole([&first.bytes[14..], &second.bytes[14..]])));
        assert_eq!((got.dst, got.ports), (pod, (53, 5000)));
    }
}

/// The data of an answer is never read as a port.
#[test]
fn a_later_fragment_that_reads_like_a_tunnels_packet_follows_its_first_one() {
    let Some(mut world) = World::new() else { return };
    for (side, port) in sides().into_iter().zip([world.tables.config.wireguard_port, VXLAN_PORT]) {
        let Side { pod, public, outside, .. } = side;
        world.out(&udp(pod, outside, (5000, 53), b"question"));
        let data = port.to_be_bytes().repeat(1000);
        for (id, at) in [(11, 1008), (12, 1016)] {
            let [first, second] = fragments(&udp(outside, public, (53, 5000), &data), id, at);
            for part in [first, second] {
                assert_eq!(world.back(&part).counted, ["unmasquerade"], "{pod}: fragment at {at}");
            }
        }
    }
}

#[test]
fn a_port_of_the_hosts_later_flow_is_changed_when_a_pod_has_it() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        world.out(&tcp(pod, outside, (5000, 443), 2));
        let own = tcp(public, outside, (5000, 443), 2);
        let out = world.out(&own);
        assert_eq!((out.verdict, out.counted.len()), (PASS, 0));
        let port = read(&out.bytes).ports.0;
        assert_ne!(port, 5000, "the pod's replies stay the pod's");
        let back = world.back(&tcp(outside, public, (443, port), 18));
        let seen = read(&back.bytes);
        assert_eq!((seen.dst, seen.ports), (public, (443, 5000)), "and the host's are the host's");
        let back = world.back(&tcp(outside, public, (443, 5000), 18));
        assert_eq!(read(&back.bytes).dst, pod);
        // Without a competing flow, nothing is changed and nothing is stored.
        let free = tcp(public, outside, (5001, 443), 2);
        assert_eq!(world.out(&free).bytes, frame(&free));
    }
}

#[test]
fn the_tunnels_own_packets_are_not_looked_at() {
    let Some(mut world) = World::new() else { return };
    let wireguard = world.tables.config.wireguard_port;
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        // Even when a pod uses the port: it did not get it on translation.
        let out = world.out(&udp(pod, outside, (wireguard, wireguard), b""));
        assert_ne!(read(&out.bytes).ports.0, wireguard, "WireGuard's port is never given away");
        let own = udp(public, outside, (wireguard, wireguard), b"encrypted");
        assert_eq!(world.out(&own).bytes, frame(&own));
    }
}

#[test]
fn a_family_the_interface_has_no_address_of_is_refused() {
    let Some(mut world) = World::new() else { return };
    let device = world.tables.device.get_mut(&IFINDEX).unwrap();
    device.masq_v6 = [0; 16];
    world.dataplane.write(&world.tables).unwrap();
    let [_, v6] = sides();
    let out = world.out(&udp(v6.pod, v6.outside, (5000, 53), b""));
    assert_eq!((out.verdict, out.counted.as_slice()), (SHOT, &["nat_unsupported"][..]));
}

#[test]
fn a_default_route_of_ipv6_in_the_tables_says_nothing_of_ipv4() {
    let Some(mut world) = World::new() else { return };
    world.tables.masq_dst.insert("::/0".parse().unwrap(), kilo_common::maps::MASQ_EXCLUDE);
    world.dataplane.write(&world.tables).unwrap();
    let [v4, v6] = sides();
    assert_eq!(world.out(&udp(v4.pod, v4.outside, (5000, 53), b"")).counted, ["masquerade"]);
    assert!(world.out(&udp(v6.pod, v6.outside, (5000, 53), b"")).counted.is_empty());
}

#[test]
fn nat_gc_removes_flows_that_have_ended_and_frees_their_ports() {
    let Some(mut world) = World::new() else { return };
    world.tables.config.nat_port_min = 40_000;
    world.tables.config.nat_port_max = 40_003;
    world.dataplane.write(&world.tables).unwrap();
    let mut gc = world.dataplane.nat_gc().unwrap();
    let [v4, v6] = sides();
    let pod = |host: u8| IpAddr::from([10, 42, 1, host]);
    let flow = |host: u8| udp(pod(host), v4.outside, (5000, 53), b"");
    for host in 2..7 {
        assert_eq!(world.out(&flow(host)).counted, ["masquerade"]);
    }
    world.out(&tcp(v6.pod, v6.outside, (5001, 80), 2));
    world.back(&tcp(v6.outside, v6.public, (80, 5001), 18));
    world.out(&tcp(v6.pod, v6.outside, (5001, 80), 16));
    assert_eq!(world.out(&flow(7)).counted, ["nat_exhausted"]);

    let now = kilo_host::dataplane::nat::now();
    let sweep = gc.sweep(now).unwrap();
    assert_eq!((sweep.entries, sweep.removed), (12, 0), "all flows are young");
    let sweep = gc.sweep(now + 32).unwrap();
    assert_eq!((sweep.entries, sweep.removed), (2, 10), "UDP without an answer; TCP is established");
    assert_eq!(world.out(&flow(7)).counted, ["masquerade"]);

    world.out(&tcp(v6.pod, v6.outside, (5001, 80), 4));
    let sweep = gc.sweep(now + 20).unwrap();
    assert_eq!(sweep.entries, 2, "the flow that was reset has gone: {sweep:?}");
}

#[test]
fn a_table_of_more_flows_than_one_call_reads_is_swept_whole() {
    let Some(mut world) = World::new() else { return };
    let mut gc = world.dataplane.nat_gc().unwrap();
    let flows = 3_000u16;
    for port in 0..flows {
        let [v4, _] = sides();
        let frame = frame(&udp(v4.pod, v4.outside, (10_000 + port, 53), b""));
        bpf::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
    }
    let now = kilo_host::dataplane::nat::now();
    assert_eq!(gc.sweep(now).unwrap().entries, 2 * usize::from(flows));
    let sweep = gc.sweep(now + 1_000).unwrap();
    assert_eq!((sweep.entries, sweep.removed), (0, 2 * usize::from(flows)));
}

#[test]
fn flows_to_what_has_joined_the_mesh_are_no_longer_translated_and_others_are() {
    for side in sides() {
        let Some(mut world) = World::new() else { return };
        let Side { pod, public, outside, .. } = side;
        let other = neighbour(outside, 200);
        let packets = [outside, other].map(|to| udp(pod, to, (5000, 53), b""));
        for packet in &packets {
            assert_eq!(read(&world.out(packet).bytes).src, public);
        }
        world.tables.masq_dst.insert(outside.into(), kilo_common::maps::MASQ_EXCLUDE);
        world.dataplane.write(&world.tables).unwrap();
        assert_eq!(flows(&mut world, None), 2, "those of the other flow");
        let ran = world.out(&packets[0]);
        assert_eq!(read(&ran.bytes).src, pod, "{:?}", ran.counted);
        assert_eq!(read(&world.out(&packets[1]).bytes).src, public);
    }
}

#[test]
fn a_full_table_of_flows_forgets_the_least_used_and_serves_new_and_forgotten_ones() {
    if std::thread::available_parallelism().is_ok_and(|count| count.get() == 1) {
        return bpf::skip("an emulated machine needs minutes for 131,072 flows");
    }
    let Some(mut world) = World::new() else { return };
    let [v4, _] = sides();
    let most = kilo_common::map_table::NAT.size as usize;
    let first = udp(v4.pod, v4.outside, (1_000, 53), b"");
    let port = read(&world.out(&first).bytes).ports.0;
    // Twice as many flows as fit, to several destinations: each gets its port.
    for number in 0..most {
        let outside = neighbour(v4.outside, u8::try_from(100 + number / 50_000).unwrap());
        let port = u16::try_from(10_000 + number % 50_000).unwrap();
        let frame = frame(&udp(v4.pod, outside, (port, 53), b""));
        bpf::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
    }
    let there = flows(&mut world, None);
    assert!(there <= most && there > most / 2, "{there} of {most} places are used");
    for (name, packet, own) in [
        ("a new flow", udp(v4.pod, v4.outside, (2_000, 53), b""), 2_000),
        ("the forgotten first one", first, port),
    ] {
        let ran = world.out(&packet);
        let seen = read(&ran.bytes);
        assert_eq!((seen.src, seen.ports.0), (v4.public, own), "{name}: {:?}", ran.counted);
        let back = udp(v4.outside, v4.public, (53, own), b"");
        assert_eq!(read(&world.back(&back).bytes).dst, v4.pod, "{name}: its answer");
    }
    println!("{there} of {most} places used by {most} flows of two entries");
}

/// Number of entries in the flow table; with `remove`, one of this direction is removed.
fn flows(world: &mut World, remove: Option<u8>) -> usize {
    let map = world.dataplane.map("nat").unwrap();
    let mut table = aya::maps::HashMap::<_, NatKey, NatValue>::try_from(map).unwrap();
    let keys: Vec<_> = table.keys().map(Result::unwrap).collect();
    if let Some(direction) = remove {
        let key = keys.iter().find(|key| key.direction == direction).unwrap();
        table.remove(key).unwrap();
    }
    keys.len()
}

#[test]
fn a_flow_that_lost_one_half_gets_it_back_with_its_next_packet() {
    for side in sides() {
        let Some(mut world) = World::new() else { return };
        let Side { pod, public, outside, .. } = side;
        let there = udp(pod, outside, (5000, 53), b"");
        let port = read(&world.out(&there).bytes).ports.0;
        let here = udp(outside, public, (53, port), b"");
        // The other half is checked once a second.
        let next_second = || time_passes(Duration::from_millis(1100), "the programs' clock counts seconds");
        assert_eq!(flows(&mut world, Some(NAT_INGRESS)), 2);
        next_second();
        assert_eq!(read(&world.out(&there).bytes).ports.0, port, "the port stays");
        assert_eq!(flows(&mut world, None), 2, "the entry for replies is back");
        flows(&mut world, Some(NAT_EGRESS));
        next_second();
        assert_eq!(read(&world.back(&here).bytes).dst, pod);
        assert_eq!(flows(&mut world, None), 2, "the entry for packets out is back");
        assert_eq!(read(&world.out(&there).bytes).ports.0, port);
    }
}

#[test]
fn two_processors_that_see_a_flow_first_at_once_agree_on_its_port() {
    let Some(mut world) = World::new() else { return };
    let [v4, _] = sides();
    // Another pod already has the ports, so each flow must search.
    let flows_of = |pod: IpAddr| -> Vec<_> {
        (0..500u16).map(|number| frame(&udp(pod, v4.outside, (20_000 + number, 53), b""))).collect()
    };
    for frame in flows_of([10, 42, 1, 77].into()) {
        bpf::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
    }
    let contested = flows_of(v4.pod);
    let program: &SchedClassifier = world.dataplane.program("uplink_egress").unwrap();
    let barrier = std::sync::Barrier::new(2);
    let ports: Vec<Vec<u16>> = std::thread::scope(|scope| {
        let workers = [0, 1].map(|_| {
            scope.spawn(|| {
                let mut out = vec![0; 256];
                let run = |frame: &Vec<u8>| {
                    barrier.wait();
                    let mut options = TestRunOptions::new();
                    options.data_in = Some(frame);
                    options.data_out = Some(&mut out);
                    program.test_run(options).unwrap();
                    u16::from_be_bytes([out[34], out[35]])
                };
                contested.iter().map(run).collect()
            })
        });
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    assert_eq!(ports[0], ports[1]);
    assert!(ports[0].iter().zip(20_000..).all(|(port, own)| *port != own), "none is the other pod's");
    assert_eq!(flows(&mut world, None), 2 * 2 * 500, "two entries a flow, no port locked for nothing");
}

/// When each half of the only flow was last seen, the outbound half first.
fn last_seen(world: &mut World) -> [u32; 2] {
    let map = world.dataplane.map("nat").unwrap();
    let table = aya::maps::HashMap::<_, NatKey, NatValue>::try_from(map).unwrap();
    let mut entries: Vec<_> = table.iter().map(Result::unwrap).collect();
    entries.sort_by_key(|(key, _)| key.direction);
    [entries[0].1.last_seen, entries[1].1.last_seen]
}

#[test]
fn nat_gc_sees_each_second_in_which_an_established_flow_has_packets() {
    let Some(mut world) = World::new() else { return };
    let [Side { pod, public, outside, .. }, _] = sides();
    let there = udp(pod, outside, (5000, 53), b"");
    let port = read(&world.out(&there).bytes).ports.0;
    let here = udp(outside, public, (53, port), b"");
    let mut before = [0; 2];
    for _ in 0..3 {
        for _ in 0..3 {
            assert_eq!(world.out(&there).counted, ["masquerade"]);
            assert_eq!(world.back(&here).counted, ["unmasquerade"]);
        }
        let seen = last_seen(&mut world);
        assert!(seen[0] > before[0] && seen[1] > before[1], "{seen:?} after {before:?}");
        before = seen;
        time_passes(Duration::from_millis(1100), "the programs' clock counts seconds");
    }
}

/// Makes every flow look long unused.
fn age(world: &mut World) {
    let map = world.dataplane.map("nat").unwrap();
    let mut table = aya::maps::HashMap::<_, NatKey, NatValue>::try_from(map).unwrap();
    let entries: Vec<_> = table.iter().map(Result::unwrap).collect();
    for (key, value) in entries {
        table.insert(key, NatValue { last_seen: 0, ..value }, 0).unwrap();
    }
}

#[test]
fn the_fast_path_of_an_established_flow_changes_packets_as_the_slow_path_does() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let [Side { pod, public, outside, .. }, _] = sides();
    for one_address in [false, true] {
        let Some(mut world) = World::new() else { return };
        world.tables.config.private_v4 = bpf::PUBLIC;
        world.tables.config.flags |= if one_address { CONFIG_ONE_V4 } else { 0 };
        world.dataplane.write(&world.tables).unwrap();
        let (mut changed, mut translated) = (0, 0);
        for _ in 0..200 {
            let pod = neighbour(pod, random.random_range(2..5));
            let (port, kind) = (random.random_range(5_000..5_004), random.random_range(0..3));
            let flags = [2, 16, 17, 24, 20, 4][random.random_range(0..6)];
            let data = vec![7; random.random_range(0..30)];
            let length = random.random_range(0..8);
            let odd = random.random_range(0..12);
            // Mostly whole, otherwise with options, a fragment, of a wrong length, or padded.
            let packet = |src, dst, ports: (u16, u16)| {
                let mut packet = match kind {
                    0 => tcp(src, dst, ports, flags),
                    _ => udp(src, dst, ports, &data),
                };
                if kind == 2 {
                    packet[26..28].fill(0);
                }
                match odd {
                    0 => drop(packet.splice(20..20, [1; 4])),
                    1 => packet[6] |= 0x20,
                    2 => packet[3] += 9,
                    3 => packet.truncate(packet.len() - length),
                    4 => packet.extend(vec![0; length]),
                    5 => packet[3] = 19,
                    _ => {}
                }
                packet[0] = if odd == 0 { 0x46 } else { 0x45 };
                packet[3] += if odd == 0 { 4 } else { 0 };
                packet[10..12].fill(0);
                let sum = checksum::header(packet.first_chunk().unwrap());
                packet[10..12].copy_from_slice(&sum.to_be_bytes());
                packet
            };
            world.out(&udp(pod, outside, (port, 53), b""));
            let there = world.out(&tcp(pod, outside, (port, 53), 2));
            let seen = read(&there.bytes);
            let out = packet(pod, outside, (port, 53));
            let back = packet(outside, public, (53, seen.ports.0));
            for (program, packet) in [("uplink_egress", out), ("lan_ingress", back)] {
                let packet = frame(&packet);
                let mut run = || bpf::packet::run(&mut world.dataplane, program, &packet);
                let [_, short] = [run(), run()];
                age(&mut world);
                let long = bpf::packet::run(&mut world.dataplane, program, &packet);
                assert_eq!(
                    (short.verdict, &short.bytes, &short.counted),
                    (long.verdict, &long.bytes, &long.counted),
                    "{program}: {packet:?}"
                );
                translated += usize::from(!long.counted.is_empty());
                changed += usize::from(long.bytes.get(34..38) != packet.get(34..38));
            }
        }
        assert!(translated > 100 && changed > 20, "{translated} translated, {changed} ports changed");
    }
}

/// The programs' flow entries without times.
fn entries(world: &mut World) -> Vec<(NatKey, NatValue)> {
    let map = world.dataplane.map("nat").unwrap();
    let table = aya::maps::HashMap::<_, NatKey, NatValue>::try_from(map).unwrap();
    let mut entries: Vec<_> = table.iter().map(Result::unwrap).collect();
    entries.iter_mut().for_each(|(_, value)| value.last_seen = 0);
    entries.sort_unstable_by_key(|(key, _)| *key);
    entries
}

#[test]
fn the_fast_path_of_a_new_flow_does_what_the_slow_path_does() {
    let mut random = StdRng::seed_from_u64(seed());
    let [Side { pod, outside, .. }, _] = sides();
    let (Some(mut short), Some(mut long)) = (World::new(), World::new()) else { return };
    // With several possible addresses, programs look the address up.
    long.tables.config.flags |= CONFIG_SEVERAL_V4;
    long.dataplane.write(&long.tables).unwrap();
    let mut counted = std::collections::BTreeMap::new();
    for _ in 0..600 {
        // Few of each, so that flows compete for ports; some sources and destinations are not masqueraded.
        let (pod, outside) =
            (neighbour(pod, random.random_range(2..8)), neighbour(outside, random.random_range(2..5)));
        let outside = if random.random_range(0..9) == 0 { IpAddr::from([10, 42, 2, 7]) } else { outside };
        let pod = if random.random_range(0..9) == 0 { IpAddr::from([10, 77, 2, 7]) } else { pod };
        let port =
            [5_000, 5_001, 5_002, 5_003, short.tables.config.wireguard_port][random.random_range(0..5)];
        let flags = [2, 16, 17, 24, 20, 4][random.random_range(0..6)];
        let mut packet = match random.random_range(0..3) {
            0 => tcp(pod, outside, (port, 53), flags),
            _ => udp(pod, outside, (port, 53), b"data"),
        };
        if random.random() && packet[9] == 17 {
            packet[26..28].fill(0);
        }
        let [ran, wanted] = [&mut short, &mut long].map(|world| world.out(&packet));
        assert_eq!(
            (ran.verdict, &ran.bytes, &ran.counted),
            (wanted.verdict, &wanted.bytes, &wanted.counted),
            "{packet:?}"
        );
        for label in ran.counted {
            *counted.entry(label).or_insert(0) += 1;
        }
        assert_eq!(entries(&mut short), entries(&mut long), "{packet:?}");
    }
    assert!(counted["masquerade"] > 300 && entries(&mut short).len() > 100, "{counted:?}");
}
