//! Signals through WireGuard, and signals that the agent sends.

use std::time::Duration;

use kilo_common::{
    counters::Action,
    event::Hook,
    lead::{Term, word},
    maps::{Heard, SIGNAL_GATEWAY, SignalKey, VXLAN_PORT},
    signal::{Body, Kind, parse},
};
use kilo_host::dataplane::lead::SendVia;

use super::{COOKIE, FAR, OTHER, OWN, all, control, signal, with_keys, written};
use crate::{
    bpf::{
        MEMBER, MEMBER_HOP, SELF,
        packet::{checksums_hold, steered, udp, udp_v6},
    },
    links::host::{self, LAN_MAC, LanSender, NODE_MAC, Tun, World, udp_in_lan},
    netns::isolated,
    wait::until,
};

/// Packets to a device are handled and counted with a delay.
const LIMIT: Duration = Duration::from_secs(10);

/// Id of a gateway elsewhere.
const ELSEWHERE: u64 = 0x3333_3333_3333_3333;
/// Ids of a gateway with another sender id, of a node that is not a gateway, and of a VPN peer.
const IMPOSTOR: u64 = 0x4444_4444_4444_4444;
const MEMBERS: u64 = 0x5555_5555_5555_5555;
const FOLLOWER: u64 = 0x6666_6666_6666_6666;

/// An IPv6 datagram with a signal, between two control addresses or from another address.
fn signal_v6(src: [u8; 16], dst: [u8; 16], data: &[u8]) -> Vec<u8> {
    udp_v6(src, dst, (VXLAN_PORT, VXLAN_PORT), data)
}

/// The other end of the WireGuard device. A device sends nothing until the kernel has noticed its carrier.
fn opened() -> Tun {
    let tun = Tun::new("kilo0");
    until("the carrier", LIMIT, || {
        !sh_says("ip link show kilo0", &["qdisc noop", "state DOWN", "NO-CARRIER"])
    });
    tun
}

fn sh_says(command: &str, texts: &[&str]) -> bool {
    let output = std::process::Command::new("sh").args(["-c", command]).output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout);
    texts.iter().any(|text| output.contains(text))
}

#[test]
fn a_claim_counts_from_a_gateways_own_address_in_the_tunnel_alone() {
    isolated("a_claim_counts_from_a_gateways_own_address_in_the_tunnel_alone", || async {
        let mut world = World::on_veth();
        world.tables = with_keys(world.tables.clone());
        let known = |sender, flags| SignalKey { sender, flags, ..SignalKey::default() };
        world.tables.signal_key.insert(control(ELSEWHERE).into(), known(OTHER, SIGNAL_GATEWAY));
        world.tables.signal_key.insert(control(IMPOSTOR).into(), known(IMPOSTOR, SIGNAL_GATEWAY));
        world.tables.signal_key.insert(control(MEMBERS).into(), known(OTHER, 0));
        world.attach(&["eth0"], &[]).await;
        let (tunnel, mut ring) = (opened(), world.ring());
        let claims = all();
        let claims =
            claims.iter().filter(|signal| matches!(signal.kind, Kind::Claim | Kind::Moved | Kind::End));
        let pod = "fd42:3::2".parse::<std::net::Ipv6Addr>().unwrap().octets();
        for (number, claim) in (1..).zip(claims) {
            let bytes = written(claim);
            tunnel.send(&signal_v6(control(ELSEWHERE), control(OWN), &bytes));
            until("the claim", LIMIT, || world.counted(Action::Hear) == number);
            let item = ring.next().unwrap();
            let (head, said) = Heard::read(&item).unwrap();
            assert_eq!((head.hook, head.source), (Hook::KiloIngress as u32, control(ELSEWHERE)));
            assert_eq!(said, bytes);
            drop(item);
            // From a pod elsewhere, whose address WireGuard accepts.
            tunnel.send(&signal_v6(pod, control(OWN), &bytes));
            until("its refusal", LIMIT, || world.drops().get("unknown_signal") == Some(&number));
        }
        // From a VPN peer that follows claims, a node that is not a gateway, and a gateway that speaks for
        // another. A VPN peer sends only MOVED.
        let (mut heard, mut unknown, mut forged) = (3, 3, 0);
        for claim in all().iter().filter(|it| matches!(it.kind, Kind::Claim | Kind::Moved | Kind::End)) {
            for from in [FOLLOWER, MEMBERS, IMPOSTOR] {
                tunnel.send(&signal_v6(control(from), control(OWN), &written(claim)));
                match (claim.kind, from) {
                    (Kind::Moved, _) => heard += 1,
                    (_, IMPOSTOR) => forged += 1,
                    _ => unknown += 1,
                }
                until("it is counted", LIMIT, || {
                    let (counted, drops) = (world.counted(Action::Hear), world.drops());
                    let dropped = |reason: &str| drops.get(reason).copied().unwrap_or(0);
                    (counted, dropped("unknown_signal"), dropped("forged_signal")) == (heard, unknown, forged)
                });
            }
        }
        while ring.next().is_some() {}
        // From the network between the nodes: directly, and steered by another node.
        let lan = LanSender::new();
        let mut frame = [NODE_MAC, LAN_MAC].concat();
        frame.extend([0x86, 0xdd]);
        frame.extend(signal_v6(control(ELSEWHERE), control(OWN), &written(&all()[11])));
        lan.send(&frame);
        until("the refusal on the LAN", LIMIT, || world.drops().get("forged_signal") == Some(&(forged + 1)));
        let mut frame = [NODE_MAC, LAN_MAC].concat();
        let inner = signal_v6(control(ELSEWHERE), control(OWN), &written(&all()[11]));
        frame.extend(&steered(MEMBER, SELF, &inner)[12..]);
        lan.send(&frame);
        until("that of a steered one", LIMIT, || world.drops().get("forged_signal") == Some(&(forged + 2)));
        assert!(ring.next().is_none());
    });
}

#[test]
fn however_much_others_send_there_is_room_for_claims_and_then_for_answers() {
    isolated("however_much_others_send_there_is_room_for_claims_and_then_for_answers", || async {
        let mut world = World::on_veth();
        world.tables = with_keys(world.tables.clone());
        let gateway = SignalKey { sender: OTHER, flags: SIGNAL_GATEWAY, ..SignalKey::default() };
        world.tables.signal_key.insert(control(ELSEWHERE).into(), gateway);
        world.attach(&["eth0"], &[]).await;
        let tunnel = opened();
        let of = |kind| written(&all().into_iter().find(|signal| signal.kind == kind).unwrap());
        let of = |from, kind| signal_v6(control(from), control(OWN), &of(kind));
        let dropped = || world.drops().get("signal_ring_full").copied().unwrap_or_default();
        let kinds = [(FOLLOWER, Kind::Moved), (ELSEWHERE, Kind::Claim), (ELSEWHERE, Kind::Reflected)];
        for [(sender, fills), (from, comes)] in kinds.array_windows() {
            let before = dropped();
            until("the ring is as full of these as it gets", LIMIT, || {
                (0..50).for_each(|_| tunnel.send(&of(*sender, *fills)));
                dropped() > before
            });
            let before = world.counted(Action::Hear);
            tunnel.send(&of(*from, *comes));
            until("the next kind is heard", LIMIT, || world.counted(Action::Hear) == before + 1);
        }
    });
}

#[test]
fn a_probe_through_the_tunnel_is_answered_into_the_tunnel() {
    isolated("a_probe_through_the_tunnel_is_answered_into_the_tunnel", || async {
        let mut world = World::on_veth();
        world.tables = with_keys(world.tables.clone());
        world.attach(&["eth0"], &[]).await;
        let tunnel = opened();
        let probe = written(&signal(Kind::Probe, 0, Body::Empty));
        tunnel.send(&signal_v6(control(ELSEWHERE), control(OWN), &probe));
        until("the answer", LIMIT, || world.counted(Action::Encrypt) > 0 || !world.drops().is_empty());
        assert_eq!(
            (world.counted(Action::Reflect), world.counted(Action::Encrypt)),
            (1, 1),
            "{:?}",
            world.drops()
        );
        let answer = tunnel.sent(6, 17);
        assert_eq!((&answer[8..24], &answer[24..40]), (&control(OWN)[..], &control(ELSEWHERE)[..]));
        assert_eq!(parse(&answer[48..]).unwrap().kind, Kind::Reflected);
        tunnel.send(&udp(FAR, [10, 5, 0, 1], (40_000, VXLAN_PORT), &probe));
        let answer = tunnel.sent(4, 17);
        assert_eq!((&answer[12..16], &answer[16..20]), (&[10, 5, 0, 1][..], &FAR[..]));
        assert!(checksums_hold(&answer));
        assert_eq!(world.counted(Action::Encrypt), 2, "{:?}", world.drops());
    });
}

#[test]
fn the_agent_sends_into_the_tunnel_to_the_lan_and_as_the_host_does() {
    isolated("the_agent_sends_into_the_tunnel_to_the_lan_and_as_the_host_does", || async {
        let mut world = World::on_veth();
        world.tables = with_keys(world.tables.clone());
        world.attach(&["eth0"], &[]).await;
        let (tunnel, signals) = (opened(), world.signals());
        let bytes = written(&signal(Kind::Prepare, 1, Body::Change { cookie: COOKIE, gateway: OWN }));
        signals.send(SendVia::Tunnel, &signal_v6(control(OWN), control(ELSEWHERE), &bytes)).unwrap();
        let sent = tunnel.sent(6, 17);
        assert_eq!(sent[48..], bytes);
        // Only the agent may speak as this gateway: without its mark, the signal is forged.
        assert!(signals.send(SendVia::Stack, &signal_v6(control(OWN), control(ELSEWHERE), &bytes)).is_err());
        assert_eq!(world.drops().get("forged_signal"), Some(&1));
        // Sent like a forwarded packet: this node leads, so through its own tunnel.
        signals.send(SendVia::Stack, &udp(SELF, FAR, (40_000, VXLAN_PORT), &bytes)).unwrap();
        assert_eq!(tunnel.sent(4, 17)[16..20], FAR);
        let socket = udp_in_lan(MEMBER, VXLAN_PORT);
        signals.send(SendVia::Lan, &udp(SELF, MEMBER, (VXLAN_PORT, VXLAN_PORT), &bytes)).unwrap();
        assert_eq!(host::heard(&socket), Some(bytes.clone()));
        // When led by another gateway, it goes there with the outer header of forwarded packets.
        let elsewhere = word(Term::from_bits(1), u16::try_from(MEMBER_HOP).unwrap());
        assert_eq!(signals.follow(elsewhere).unwrap(), elsewhere);
        let before = world.counted(Action::Steer);
        signals.send(SendVia::Stack, &udp(SELF, FAR, (40_000, VXLAN_PORT), &bytes)).unwrap();
        assert_eq!(world.counted(Action::Steer), before + 1, "{:?}", world.drops());
        // A stranger is not a node of the location.
        assert!(signals.send(SendVia::Lan, &udp(SELF, [10, 1, 0, 99], (1, VXLAN_PORT), &bytes)).is_err());
        assert_eq!(world.drops().get("unknown_signal"), Some(&1));
    });
}
