//! ICMP errors, with the packets that they quote.

use std::net::IpAddr;

use kilo_common::packet::protocol;

use super::{
    Side, World, addresses, echo, ip, neighbour, ports, read, segment, sides, sum, tcp, transport, udp,
};
use crate::bpf::packet::{PASS, SHOT};

/// An ICMP error of this type and code that quotes the start of a packet.
fn error_of(kind: (u8, u8), src: IpAddr, dst: IpAddr, side: &Side, about: &[u8]) -> Vec<u8> {
    let bytes = [&[kind.0, kind.1, 0, 0, 0, 0, 5, 20][..], about].concat();
    ip(src, dst, side.icmp, &segment(src, dst, side.icmp, bytes))
}

pub fn error(src: IpAddr, dst: IpAddr, side: &Side, about: &[u8]) -> Vec<u8> {
    error_of((side.unreachable, 4), src, dst, side, about)
}

/// A packet to the outside: UDP, TCP or an echo request.
fn request(kind: usize, src: IpAddr, side: &Side) -> Vec<u8> {
    match kind {
        0 => udp(src, side.outside, (5000, 53), b"question"),
        1 => tcp(src, side.outside, (5001, 80), 2),
        _ => echo(src, side.outside, side, side.echo, 7),
    }
}

/// Checks the addresses of an error, its checksum, and that it quotes `expected`.
fn quotes(frame: &[u8], from_to: (IpAddr, IpAddr), side: &Side, expected: &[u8]) {
    let packet = &frame[14..];
    assert_eq!(addresses(packet), from_to);
    let icmp = &packet[transport(packet).offset..];
    assert_eq!(sum(from_to.0, from_to.1, side.icmp, icmp), 0xffff, "the error's checksum holds");
    assert_eq!(icmp[4..8], [0, 0, 5, 20], "what it says stays");
    let inner = &icmp[8..];
    let found = transport(expected);
    if found.protocol == protocol::TCP && expected.len() > found.offset + 8 {
        // Nobody uses the TCP checksum of a quoted packet.
        assert_eq!((addresses(inner), ports(inner)), (addresses(expected), ports(expected)));
    } else {
        assert_eq!(inner, expected, "byte for byte");
    }
}

#[test]
fn an_error_from_outside_reaches_the_pod_with_its_own_packet_quoted() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, .. } = side;
        let router: IpAddr =
            if pod.is_ipv4() { [203, 0, 113, 9].into() } else { "2001:db8:5::1".parse().unwrap() };
        // The first one takes the port, so that the second's is changed.
        let other = neighbour(pod, 77);
        for kind in 0..3 {
            let sent_by_pod = request(kind, pod, &side);
            world.out(&request(kind, other, &side));
            let sent = world.out(&sent_by_pod);
            let translated = read(&sent.bytes);
            assert_eq!(translated.src, public);
            assert_ne!(translated.ports.0, ports(&sent_by_pod).0);
            // Eight bytes of the transport header must suffice.
            for quoted in [transport(&sent_by_pod).offset + 8, sent_by_pod.len()] {
                let back = world.back(&error(router, public, &side, &sent.bytes[14..14 + quoted]));
                assert_eq!((back.verdict, back.counted.as_slice()), (PASS, &["unmasquerade"][..]));
                quotes(&back.bytes, (router, pod), &side, &sent_by_pod[..quoted]);
            }
        }
    }
}

#[test]
fn a_pods_own_error_goes_out_quoting_what_the_sender_knows() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        world.out(&udp(pod, outside, (5000, 53), b"question"));
        let reply = udp(outside, public, (53, 5000), b"answer");
        let received = world.back(&reply).bytes;
        let out = world.out(&error(pod, outside, &side, &received[14..]));
        assert_eq!((out.verdict, out.counted.as_slice()), (PASS, &["masquerade"][..]));
        quotes(&out.bytes, (public, outside), &side, &reply);
    }
}

#[test]
fn the_nodes_own_error_about_an_answer_to_a_pod_quotes_what_the_other_end_sent() {
    let Some(mut world) = World::new() else { return };
    for side in sides() {
        let Side { pod, public, outside, .. } = side;
        let other = neighbour(pod, 77);
        // Another address of the node, which is in no table.
        let elsewhere: IpAddr =
            if pod.is_ipv4() { [192, 0, 2, 200].into() } else { "2001:db8:f::200".parse().unwrap() };
        let errors = if pod.is_ipv4() { [(3, 4), (11, 0), (3, 3)] } else { [(2, 0), (3, 0), (1, 4)] };
        for kind in 0..3 {
            // The first one takes the port, so that the second's is changed.
            world.out(&request(kind, other, &side));
            let sent = request(kind, pod, &side);
            let port = read(&world.out(&sent).bytes).ports.0;
            assert_ne!(port, ports(&sent).0);
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
                    quotes(&out.bytes, (src, outside), &side, &reply[..quoted]);
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
            if pod.is_ipv4() {
                later
            } else {
                ip(outside, pod, protocol::FRAGMENT, &[17, 0, 0, 8, 0, 0, 0, 1])
            },
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
