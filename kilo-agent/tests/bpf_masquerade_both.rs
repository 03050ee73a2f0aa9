//! What masquerading does alike for IPv4 and IPv6: flows of each protocol,
//! ICMP errors with the packet inside, fragments, ports of the host.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod support;

use std::net::{IpAddr, Ipv6Addr};

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use kilo_agent::{dataplane::Dataplane, plan::Tables};
use kilo_common::{
    checksum,
    maps::{CONFIG_MASQUERADE, NAT_EGRESS, NAT_INGRESS, NatKey, NatValue},
    nat::{
        flow::layout,
        transport::{self, Transport},
    },
    packet::{Ipv4, protocol},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use support::{
    IFINDEX, OUTSIDE, OWN_POD, PUBLIC, PUBLIC_V6, leader_tables,
    packet::{PASS, Ran, SHOT, run},
};

/// The addresses of one family.
struct Side {
    pod: IpAddr,
    public: IpAddr,
    outside: IpAddr,
    icmp: u8,
    echo: u8,
    echo_reply: u8,
    unreachable: u8,
}

fn sides() -> [Side; 2] {
    let v6 = |text: &str| IpAddr::V6(text.parse::<Ipv6Addr>().unwrap());
    [
        Side {
            pod: OWN_POD.into(),
            public: PUBLIC.into(),
            outside: OUTSIDE.into(),
            icmp: protocol::ICMP,
            echo: 8,
            echo_reply: 0,
            unreachable: 3,
        },
        Side {
            pod: v6("fd42:1::2"),
            public: PUBLIC_V6.into(),
            outside: v6("2001:db8:9::53"),
            icmp: protocol::ICMPV6,
            echo: 128,
            echo_reply: 129,
            unreachable: 1,
        },
    ]
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

/// Sum over a pseudo header and a transport segment; 0xffff when it holds.
fn sum(src: IpAddr, dst: IpAddr, kind: u8, segment: &[u8]) -> u16 {
    let pseudo = if kind == protocol::ICMP {
        Vec::new()
    } else {
        let length = u32::try_from(segment.len()).unwrap();
        [octets(src), octets(dst), length.to_be_bytes().to_vec(), vec![0, 0, 0, kind]].concat()
    };
    let words = |bytes: &[u8]| -> u32 {
        bytes
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| u32::from(low)))
            .sum()
    };
    checksum::fold(words(&pseudo) + words(segment))
}

/// An IP header and what is behind it.
fn ip(src: IpAddr, dst: IpAddr, kind: u8, behind: &[u8]) -> Vec<u8> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            support::packet::ipv4(src.octets(), dst.octets(), kind, 64, behind)
        }
        _ => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(u16::try_from(behind.len()).unwrap().to_be_bytes());
            header.extend([kind, 64]);
            header.extend(octets(src));
            header.extend(octets(dst));
            header.extend(behind);
            header
        }
    }
}

/// A transport segment with its checksum; RFC 768: a sum of zero is sent as all ones, for zero says that there is none.
fn segment(src: IpAddr, dst: IpAddr, kind: u8, mut bytes: Vec<u8>) -> Vec<u8> {
    let Some(at) = layout(kind).unwrap().checksum else { return bytes };
    bytes[at..at + 2].fill(0);
    let sum = !sum(src, dst, kind, &bytes);
    let sum = if kind == protocol::UDP && sum == 0 { 0xffff } else { sum };
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    bytes
}

fn udp(src: IpAddr, dst: IpAddr, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + data.len()).unwrap();
    let header = [ports.0, ports.1, length, 0].map(u16::to_be_bytes).concat();
    ip(src, dst, protocol::UDP, &segment(src, dst, protocol::UDP, [&header[..], data].concat()))
}

fn tcp(src: IpAddr, dst: IpAddr, ports: (u16, u16), flags: u8) -> Vec<u8> {
    let mut bytes = [ports.0, ports.1].map(u16::to_be_bytes).concat();
    bytes.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    ip(src, dst, protocol::TCP, &segment(src, dst, protocol::TCP, bytes))
}

fn echo(src: IpAddr, dst: IpAddr, side: &Side, kind: u8, id: u16) -> Vec<u8> {
    let bytes = [&[kind, 0, 0, 0][..], &id.to_be_bytes(), &[0, 1, 7, 8, 9, 10]].concat();
    ip(src, dst, side.icmp, &segment(src, dst, side.icmp, bytes))
}

/// An ICMP error about the first bytes of a packet.
fn error(src: IpAddr, dst: IpAddr, side: &Side, about: &[u8]) -> Vec<u8> {
    let bytes = [&[side.unreachable, 4, 0, 0, 0, 0, 0, 0][..], about].concat();
    ip(src, dst, side.icmp, &segment(src, dst, side.icmp, bytes))
}

fn frame(ip: &[u8]) -> Vec<u8> {
    let ethertype = if ip[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] };
    [&[0; 12][..], &ethertype, ip].concat()
}

/// What a packet says.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    src: IpAddr,
    dst: IpAddr,
    ports: (u16, u16),
}

fn transport(ip: &[u8]) -> Transport {
    if ip[0] >> 4 == 6 {
        transport::ipv6(ip[6], |at| ip.get(at..at + 8)?.try_into().ok()).unwrap()
    } else {
        transport::ipv4(&Ipv4::parse(ip.first_chunk().unwrap(), usize::MAX).unwrap(), [ip[4], ip[5]])
    }
}

fn addresses(ip: &[u8]) -> (IpAddr, IpAddr) {
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap());
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
    if ip[0] >> 4 == 6 { (v6(8), v6(24)) } else { (v4(12), v4(16)) }
}

/// Reads a packet, whose checksums must hold.
fn read(frame: &[u8]) -> Seen {
    let ip = &frame[14..];
    let (src, dst) = addresses(ip);
    let found = transport(ip);
    let segment = &ip[found.offset..];
    if ip[0] >> 4 == 4 {
        assert_eq!(checksum::header(ip.first_chunk().unwrap()), 0, "the header's checksum holds");
    }
    assert_eq!(sum(src, dst, found.protocol, segment), 0xffff, "the transport's checksum holds");
    Seen { src, dst, ports: ports(ip) }
}

fn ports(ip: &[u8]) -> (u16, u16) {
    let found = transport(ip);
    let layout = layout(found.protocol).unwrap();
    let at = |at: usize| u16::from_be_bytes([ip[found.offset + at], ip[found.offset + at + 1]]);
    (at(layout.src_port), at(layout.dst_port))
}

struct World {
    _fs: support::BpfFs,
    dataplane: Dataplane,
    tables: Tables,
}

impl World {
    fn new() -> Option<Self> {
        let fs = support::bpffs()?;
        let tables = leader_tables();
        assert_ne!(tables.config.flags & CONFIG_MASQUERADE, 0);
        let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
        dataplane.write(&tables).unwrap();
        Some(Self { _fs: fs, dataplane, tables })
    }

    fn out(&mut self, ip: &[u8]) -> Ran {
        run(&mut self.dataplane, "uplink_egress", &frame(ip))
    }

    fn back(&mut self, ip: &[u8]) -> Ran {
        run(&mut self.dataplane, "lan_ingress", &frame(ip))
    }
}

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

/// The same address with another last byte.
fn neighbour(addr: IpAddr, last: u8) -> IpAddr {
    let mut octets = octets(addr);
    *octets.last_mut().unwrap() = last;
    match <[u8; 4]>::try_from(octets.as_slice()) {
        Ok(octets) => octets.into(),
        Err(_) => <[u8; 16]>::try_from(octets.as_slice()).unwrap().into(),
    }
}

#[test]
fn the_answer_to_any_translated_packet_comes_back_as_the_answer_to_the_packet_itself() {
    let Some(mut world) = World::new() else { return };
    let seed =
        std::env::var("KILO_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random);
    println!("KILO_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut changed = 0;
    for _ in 0..2_000 {
        let side = &sides()[random.random_range(0..2)];
        // Few pods, servers and ports: many flows want the same one.
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

#[test]
fn an_error_from_outside_reaches_the_pod_with_its_own_packet_inside() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        let router: IpAddr =
            if pod.is_ipv4() { [203, 0, 113, 9].into() } else { "2001:db8:5::1".parse().unwrap() };
        // The first takes the port, so that the second's is changed.
        let other = if pod.is_ipv4() { [10, 42, 1, 77].into() } else { "fd42:1::77".parse().unwrap() };
        for kind in 0..3 {
            let packet = |src: IpAddr| match kind {
                0 => udp(src, outside, (5000, 53), b"question"),
                1 => tcp(src, outside, (5001, 80), 2),
                _ => echo(src, outside, &side, side.echo, 7),
            };
            world.out(&packet(other));
            let sent = world.out(&packet(pod));
            let translated = read(&sent.bytes);
            assert_eq!(translated.src, public);
            assert_ne!(translated.ports.0, ports(&packet(pod)).0);
            // Eight bytes of transport header must do.
            for quoted in [transport(&packet(pod)).offset + 8, packet(pod).len()] {
                let back = world.back(&error(router, public, &side, &sent.bytes[14..14 + quoted]));
                assert_eq!((back.verdict, back.counted.as_slice()), (PASS, &["unmasquerade"][..]), "{kind}");
                let ip = &back.bytes[14..];
                assert_eq!(addresses(ip), (router, pod));
                let icmp = &ip[transport(ip).offset..];
                assert_eq!(sum(router, pod, side.icmp, icmp), 0xffff, "the error's checksum holds");
                let inner = &icmp[8..];
                let expected = &packet(pod)[..quoted];
                if kind == 1 && quoted > 30 {
                    // TCP's checksum inside is of no use to anybody.
                    assert_eq!((addresses(inner), ports(inner)), (addresses(expected), ports(expected)));
                } else {
                    assert_eq!(inner, expected, "byte for byte what the pod sent: {kind}");
                }
            }
        }
    }
}

#[test]
fn a_pods_own_error_goes_out_with_what_the_sender_knows_inside() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        world.out(&udp(pod, outside, (5000, 53), b"question"));
        let reply = udp(outside, public, (53, 5000), b"answer");
        let received = world.back(&reply).bytes;
        let out = world.out(&error(pod, outside, &side, &received[14..]));
        assert_eq!((out.verdict, out.counted.as_slice()), (PASS, &["masquerade"][..]));
        let ip = &out.bytes[14..];
        assert_eq!(addresses(ip), (public, outside));
        let icmp = &ip[transport(ip).offset..];
        assert_eq!(sum(public, outside, side.icmp, icmp), 0xffff);
        assert_eq!(&icmp[8..], reply, "byte for byte what the other end sent");
    }
}

/// An error of this type and code about the whole of a packet.
fn error_of(kind: (u8, u8), src: IpAddr, dst: IpAddr, side: &Side, about: &[u8]) -> Vec<u8> {
    let bytes = [&[kind.0, kind.1, 0, 0, 0, 0, 5, 20][..], about].concat();
    ip(src, dst, side.icmp, &segment(src, dst, side.icmp, bytes))
}

#[test]
fn the_nodes_own_error_about_an_answer_to_a_pod_quotes_what_the_other_end_sent() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        let other = neighbour(pod, 77);
        // Another address of the node's, which no table names.
        let elsewhere: IpAddr =
            if pod.is_ipv4() { [192, 0, 2, 200].into() } else { "2001:db8:f::200".parse().unwrap() };
        let errors = if pod.is_ipv4() { [(3, 4), (11, 0), (3, 3)] } else { [(2, 0), (3, 0), (1, 4)] };
        for kind in 0..3 {
            let there = |src: IpAddr| match kind {
                0 => udp(src, outside, (5000, 53), b"question"),
                1 => tcp(src, outside, (5001, 80), 2),
                _ => echo(src, outside, &side, side.echo, 7),
            };
            // The first takes the port, so that the second's is changed.
            world.out(&there(other));
            let port = read(&world.out(&there(pod)).bytes).ports.0;
            assert_ne!(port, ports(&there(pod)).0);
            let reply = match kind {
                0 => udp(outside, public, (53, port), b"an answer that is too big"),
                1 => tcp(outside, public, (80, port), 16),
                _ => echo(outside, public, &side, side.echo_reply, port),
            };
            let received = world.back(&reply).bytes;
            assert_eq!(read(&received).dst, pod);
            for (error, src) in errors.into_iter().flat_map(|error| [(error, public), (error, elsewhere)]) {
                for quoted in [transport(&reply).offset + 8, reply.len()] {
                    let sent = error_of(error, src, outside, &side, &received[14..14 + quoted]);
                    let out = world.out(&sent);
                    assert_eq!((out.verdict, out.counted.len()), (PASS, 0), "{kind} {error:?}");
                    let ip = &out.bytes[14..];
                    assert_eq!(addresses(ip), (src, outside), "the error's own addresses stay");
                    let icmp = &ip[transport(ip).offset..];
                    assert_eq!(sum(src, outside, side.icmp, icmp), 0xffff, "the error's checksum holds");
                    assert_eq!(icmp[4..8], [0, 0, 5, 20], "what it says stays");
                    let inner = &icmp[8..];
                    let expected = &reply[..quoted];
                    if kind == 1 && quoted > 30 {
                        // TCP's checksum inside is of no use to anybody.
                        assert_eq!((addresses(inner), ports(inner)), (addresses(expected), ports(expected)));
                    } else {
                        assert_eq!(inner, expected, "byte for byte what the other end sent: {kind}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_nodes_own_errors_about_no_flow_leave_as_they_are() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        world.out(&udp(pod, outside, (5000, 53), b""));
        let mut later = udp(outside, pod, (53, 5000), b"");
        if pod.is_ipv4() {
            later[6..8].copy_from_slice(&[0, 8]);
        }
        for about in [
            udp(outside, public, (53, 5000), b"for the node itself"),
            udp(outside, pod, (53, 5001), b"another port"),
            ip(outside, pod, 47, &[0; 20]),
            if pod.is_ipv4() { later } else { ip(outside, pod, protocol::FRAGMENT, &[17, 0, 0, 8, 0, 0, 0, 1]) },
            udp(outside, pod, (53, 5000), b"")[..10].to_vec(),
            Vec::new(),
        ] {
            let sent = error(public, outside, &side, &about);
            let out = world.out(&sent);
            assert_eq!((out.verdict, out.counted.len(), &out.bytes[14..]), (PASS, 0, &sent[..]));
        }
    }
}

#[test]
fn errors_about_no_flow_are_the_hosts_on_the_way_in_and_refused_on_the_way_out() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        let hosts = error(outside, public, &side, &udp(public, outside, (1, 2), b"")[..]);
        let back = world.back(&hosts);
        assert_eq!((back.verdict, back.counted.len(), &back.bytes[14..]), (PASS, 0, &hosts[..]));
        let out = world.out(&error(pod, outside, &side, &udp(outside, pod, (1, 2), b"")[..]));
        assert_eq!((out.verdict, out.counted.as_slice()), (SHOT, &["nat_unsupported"][..]));
    }
}

/// The parts of a packet: the first with `cut` bytes of payload.
fn fragments(whole: &[u8], id: u16, cut: usize) -> [Vec<u8>; 2] {
    let found = transport(whole);
    let (src, dst) = addresses(whole);
    let payload = &whole[found.offset..];
    let offset = u16::try_from(cut).unwrap();
    if src.is_ipv4() {
        [(&payload[..cut], 0x2000), (&payload[cut..], offset / 8)].map(|(part, field)| {
            let mut packet = ip(src, dst, found.protocol, part);
            packet[4..6].copy_from_slice(&id.to_be_bytes());
            packet[6..8].copy_from_slice(&field.to_be_bytes());
            packet[10..12].fill(0);
            let sum = checksum::header(packet.first_chunk().unwrap());
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            packet
        })
    } else {
        [(&payload[..cut], 1), (&payload[cut..], offset)].map(|(part, field)| {
            let mut behind = vec![found.protocol, 0];
            behind.extend(field.to_be_bytes());
            behind.extend([0, 0]);
            behind.extend(id.to_be_bytes());
            behind.extend(part);
            ip(src, dst, protocol::FRAGMENT, &behind)
        })
    }
}

/// A datagram put together again.
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
        // Another pod's flow, so that the port is changed.
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
        // Where nobody else has it, nothing is done and nothing kept.
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
        // Even when a pod has the port: it was not given to it.
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
fn the_collector_removes_flows_that_have_ended_and_frees_their_ports() {
    let Some(mut world) = World::new() else { return };
    world.tables.config.nat_port_min = 40_000;
    world.tables.config.nat_port_max = 40_003;
    world.dataplane.write(&world.tables).unwrap();
    let mut collector = world.dataplane.nat_collector().unwrap();
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

    let now = kilo_agent::dataplane::nat::now();
    let sweep = collector.sweep(now).unwrap();
    assert_eq!((sweep.entries, sweep.removed), (12, 0), "all flows are young");
    let sweep = collector.sweep(now + 32).unwrap();
    assert_eq!((sweep.entries, sweep.removed), (2, 10), "UDP without an answer; TCP is established");
    assert_eq!(world.out(&flow(7)).counted, ["masquerade"]);

    world.out(&tcp(v6.pod, v6.outside, (5001, 80), 4));
    let sweep = collector.sweep(now + 20).unwrap();
    assert_eq!(sweep.entries, 2, "the flow that was reset has gone: {sweep:?}");
}

#[test]
fn a_table_of_more_flows_than_one_call_reads_is_swept_whole() {
    let Some(mut world) = World::new() else { return };
    let mut collector = world.dataplane.nat_collector().unwrap();
    let flows = 3_000u16;
    for port in 0..flows {
        let [v4, _] = sides();
        let frame = frame(&udp(v4.pod, v4.outside, (10_000 + port, 53), b""));
        support::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
    }
    let now = kilo_agent::dataplane::nat::now();
    assert_eq!(collector.sweep(now).unwrap().entries, 2 * usize::from(flows));
    let sweep = collector.sweep(now + 1_000).unwrap();
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
        return support::skip("an emulated machine needs minutes for 131,072 flows");
    }
    let Some(mut world) = World::new() else { return };
    let [v4, _] = sides();
    let most = kilo_common::bounds::size(kilo_common::maps::name::NAT) as usize;
    let first = udp(v4.pod, v4.outside, (1_000, 53), b"");
    let port = read(&world.out(&first).bytes).ports.0;
    // Twice as many flows as have room, to several destinations: each has its port.
    for number in 0..most {
        let outside = neighbour(v4.outside, u8::try_from(100 + number / 50_000).unwrap());
        let port = u16::try_from(10_000 + number % 50_000).unwrap();
        let frame = frame(&udp(v4.pod, outside, (port, 53), b""));
        support::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
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

/// Entries of the table of flows, and one of them removed if wanted.
fn flows(world: &mut World, remove: Option<u8>) -> usize {
    let map = world.dataplane.bpf_mut().map_mut("nat").unwrap();
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
        // The other half is looked after once a second.
        let next_second = || std::thread::sleep(std::time::Duration::from_millis(1100));
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
    // A pod that has the ports already, so that each flow must search.
    let flows_of = |pod: IpAddr| -> Vec<_> {
        (0..500u16).map(|number| frame(&udp(pod, v4.outside, (20_000 + number, 53), b""))).collect()
    };
    for frame in flows_of([10, 42, 1, 77].into()) {
        support::packet::run_uncounted(&mut world.dataplane, "uplink_egress", &frame);
    }
    let contested = flows_of(v4.pod);
    let program: &SchedClassifier =
        world.dataplane.bpf_mut().program("uplink_egress").unwrap().try_into().unwrap();
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
