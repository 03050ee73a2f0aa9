//! What a relay gives to the two ends of a pair.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_common::relay::{BOTH, FIRST_PORT, Kind, LAST_PORT, Message, Port};

use super::{super::*, seconds, world::*};
use crate::{
    objects::{CheckedIn, Nodes},
    topology::Node,
};

fn heard(from: NodeId, port: u16) -> Heard {
    Heard { source: SocketAddr::new(ip(from), 40_001), local: ip(Z[0]), port, ifindex: 2 }
}

/// The messages that a relay sends in answer.
fn said(server: &mut Server, message: &Message, heard: Heard, now: Instant) -> Vec<Message> {
    said_near(server, &[X, Y], message, heard, now)
}

/// As [`said`], where the relay's WireGuard reaches only these ends.
fn said_near(
    server: &mut Server,
    near: &[NodeId],
    message: &Message,
    heard: Heard,
    now: Instant,
) -> Vec<Message> {
    let reachable = near.iter().map(|end| (*end, endpoint_of(*end))).collect();
    let mut seed = message.sequence;
    let outputs =
        server.hear(message, heard, (Z[0], &reachable), &mut |_| true, &mut || next(&mut seed), now);
    let sent = outputs.into_iter().map(|output| match output {
        Output::Send { to, node, message } => {
            assert_eq!(to, endpoint_of(node), "nobody is answered but where WireGuard knows him");
            message
        }
        Output::Keep { .. } | Output::Move { .. } => panic!("a relay moves nothing"),
    });
    sent.collect()
}

/// Asks for the other end, and binds what is offered from where `end` is; the numbers
/// are later than `number`.
fn binds(server: &mut Server, end: NodeId, number: u64, now: Instant) -> Option<Message> {
    let ask = Message { sequence: number + 1, ..ask(end, if end == X { Y } else { X }) };
    let offer = said(server, &ask, heard(end, WIREGUARD), now).first().copied()?;
    let bind = Message { sequence: number + 2, token: offer.token, ..ask };
    said(server, &bind, heard(end, offer.port), now).first().copied()
}

/// A relay with a pair that both ends have bound.
fn bound(now: Instant) -> Server {
    let mut server = Server::default();
    let offers = [X, Y].map(|end| binds(&mut server, end, 0, now));
    assert_eq!(offers[1].map(|offer| offer.flags & BOTH), Some(BOTH));
    server
}

#[test]
fn the_pairs_of_a_node_that_has_left_the_mesh_end_whatever_it_sends() {
    let now = Instant::now();
    let server = bound(now);
    let mut random = 3;
    let adopted = Server::adopted(&server.table(0), now, &mut || next(&mut random));
    for mut server in [server, adopted] {
        let mut table = server.table(0);
        let mut pairs = |after, is_there: bool| {
            table.values_mut().for_each(|port| port.packets += 5);
            server.turn(&table, now + seconds(after), 0);
            server.end_pairs_without(|node| node == X || is_there, now + seconds(after));
            server.pairs()
        };
        assert_eq!((pairs(1, false), pairs(30, false)), (1, 1));
        assert_eq!((pairs(31, true), pairs(32, false), pairs(61, false)), (1, 1, 1), "it was there again");
        assert_eq!(pairs(62, false), 0);
    }
}

#[test]
fn nobody_binds_where_another_relay_is() {
    let (mut server, now) = (Server::default(), Instant::now());
    let node = Node { relay: true, endpoint: Some(endpoint_of(Z[1]).into()), ..Node::default() };
    let nodes: Nodes = [CheckedIn { node, last_seen: 0 }].into_iter().collect();
    server.see_relays(Arc::new(RelayAddresses::of(&nodes, &BTreeMap::new())));
    let [offer, ..] = said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now)[..] else { panic!() };
    // WireGuard has followed X to a relay, from one of whose ports its ASK comes.
    let mut sequence = 1;
    let mut bound_from = |port| {
        sequence += 1;
        let source = SocketAddr::new(ip(Z[1]), port);
        let message = Message { sequence, token: offer.token, ..ask(X, Y) };
        let reachable = [(X, source), (Y, endpoint_of(Y))].into();
        let heard = Heard { source, ..heard(X, offer.port) };
        server.hear(&message, heard, (Z[0], &reachable), &mut |_| true, &mut || 3, now);
        server.table(0)[&offer.port].from_port
    };
    assert_eq!((bound_from(FIRST_PORT), bound_from(LAST_PORT)), (0, 0));
    assert_eq!(bound_from(40_000), 40_000, "an end behind its NAT");
}

#[test]
fn a_pair_that_one_end_never_binds_is_dropped_and_refused_for_a_while() {
    let (mut server, now) = (Server::default(), Instant::now());
    let at = |after| now + seconds(after);
    let port = |offer: Option<Message>| offer.map(|offer| offer.port != 0);
    assert_eq!(port(binds(&mut server, X, 0, now)), Some(true));
    server.turn(&server.table(0), at(59), 0);
    assert_eq!(server.pairs(), 1);
    server.turn(&server.table(0), at(60), 0);
    assert_eq!(server.pairs(), 0);
    assert_eq!(port(binds(&mut server, X, 60_000_000, at(61))), Some(false));
    server.turn(&server.table(0), at(179), 0);
    assert_eq!(port(binds(&mut server, X, 179_000_000, at(179))), Some(false));
    assert_eq!(port(binds(&mut server, X, 180_000_000, at(180))), Some(true), "it is tried again");
    // A pair that both ends have bound stays.
    let mut both = bound(now);
    both.turn(&both.table(0), at(100), 0);
    assert_eq!(both.pairs(), 1);
}

#[test]
fn an_end_that_was_absent_gets_the_pair_as_soon_as_it_asks() {
    let (mut server, now) = (Server::default(), Instant::now());
    let at = |after| now + seconds(after);
    binds(&mut server, X, 0, now);
    server.turn(&server.table(0), at(60), 0);
    assert_eq!(binds(&mut server, X, 61_000_000, at(61)).map(|offer| offer.port), Some(0));
    let port = |offer: Option<Message>| offer.map_or(0, |offer| offer.port);
    assert_ne!(port(binds(&mut server, Y, 0, at(62))), 0);
    let offer = binds(&mut server, X, 63_000_000, at(63));
    assert_eq!(offer.map(|offer| (offer.port != 0, offer.flags & BOTH)), Some((true, BOTH)));
}

#[test]
fn an_end_that_was_absent_is_invited_while_the_other_one_is_refused() {
    let (mut server, now) = (Server::default(), Instant::now());
    binds(&mut server, X, 0, now);
    server.turn(&server.table(0), now + seconds(60), 0);
    let mut asks = |near: &[NodeId], millis: u64| {
        let ask = Message { sequence: millis * 1_000, ..ask(X, Y) };
        let at = now + Duration::from_millis(millis);
        let sent = said_near(&mut server, near, &ask, heard(X, WIREGUARD), at);
        sent.into_iter().map(|message| (message.kind, message.other, message.port)).collect::<Vec<_>>()
    };
    let refused = (Kind::Offer, Y, 0);
    assert_eq!(asks(&[X], 61_000), [refused], "it is not seen");
    assert_eq!(asks(&[X, Y], 61_100), [refused, (Kind::Invite, X, 0)], "it is there again");
    assert_eq!(asks(&[X, Y], 61_300), [refused], "not that often");
    assert_eq!(asks(&[X, Y], 61_400), [refused, (Kind::Invite, X, 0)]);
}

#[test]
fn pairs_with_a_stand_by_have_half_of_the_slots() {
    let now = Instant::now();
    let given = |stand_bys: &[NodeId], others: u64| {
        let mut server = Server::default();
        server.see_stand_bys(stand_bys.iter().copied().collect());
        let far = (100..100 + others).collect::<Vec<_>>();
        for other in &far {
            let mut message = ask(X, *other);
            message.sequence += other;
            let near: Vec<_> = far.iter().copied().chain([X]).collect();
            said_near(&mut server, &near, &message, heard(X, WIREGUARD), now);
        }
        server.pairs()
    };
    assert_eq!(given(&[], 70), 64);
    assert_eq!(given(&[X], 70), 32);
    assert_eq!(given(&[101], 70), 64, "those of others are not concerned");
}

#[test]
fn a_binding_needs_the_token_and_a_later_number() {
    let (mut server, now) = (Server::default(), Instant::now());
    let first = said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now);
    let [offer, invite] = first[..] else { panic!("{first:?}") };
    assert_eq!((offer.kind, offer.flags, invite.kind, invite.other), (Kind::Offer, 0, Kind::Invite, X));
    assert!((FIRST_PORT..=LAST_PORT).contains(&offer.port));
    let bound = |server: &Server| server.table(0)[&offer.port].from_port;
    let binds = |server: &mut Server, token, sequence, source_port| {
        let message = Message { token, sequence, ..ask(X, Y) };
        let source = SocketAddr::new(ip(X), source_port);
        said(server, &message, Heard { source, ..heard(X, offer.port) }, now);
    };
    binds(&mut server, offer.token + 1, 2, 40_002);
    assert_eq!(bound(&server), 0, "another token");
    binds(&mut server, offer.token, 5, 40_003);
    assert_eq!(bound(&server), 40_003);
    binds(&mut server, offer.token, 5, 40_004);
    binds(&mut server, offer.token, 4, 40_004);
    assert_eq!(bound(&server), 40_003, "recorded ones do not bind again");
    binds(&mut server, offer.token, 6, 40_005);
    assert_eq!(bound(&server), 40_005, "the NAT has chosen another port");
}

#[test]
fn an_end_binds_only_the_address_where_wireguard_has_it() {
    let (mut server, now) = (Server::default(), Instant::now());
    let [offer, ..] = said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now)[..] else { panic!() };
    let mut sequence = 1;
    let mut binds = |at: SocketAddr, source: &str| {
        sequence += 1;
        let message = Message { sequence, token: offer.token, ..ask(X, Y) };
        let heard = Heard { source: source.parse().unwrap(), ..heard(X, offer.port) };
        let reachable = [(X, at), (Y, endpoint_of(Y))].into();
        let reachable = (Z[0], &reachable);
        server.hear(&message, heard, reachable, &mut |_| true, &mut || 3, now);
        let port = server.table(0)[&offer.port];
        SocketAddr::new(IpAddr::from(port.from).to_canonical(), port.from_port).to_string()
    };
    let own = ip(X);
    for elsewhere in ["198.51.100.9:51820", "[2001:db8::9]:51820"] {
        assert_eq!(binds(endpoint_of(X), elsewhere), "[::]:0", "its sender has made that up");
    }
    assert_eq!(binds(endpoint_of(X), &format!("{own}:40001")), format!("{own}:40001"));
    assert_eq!(binds(endpoint_of(X), "198.51.100.9:51820"), format!("{own}:40001"), "what is bound stays");
    // The form in which a dual-stack socket reports it.
    let mapped = SocketAddr::new(IpAddr::from(mapped(own)), WIREGUARD);
    assert_eq!(binds(mapped, &format!("{own}:40002")), format!("{own}:40002"));
    // WireGuard has followed the end to its other family.
    let v6 = "[2001:db8::9]:51820";
    assert_eq!(binds(v6.parse().unwrap(), v6), v6);
}

#[test]
fn recorded_asks_neither_use_up_answers_nor_begin_anew() {
    let (mut server, now) = (Server::default(), Instant::now());
    let asks = |nonce, sequence| Message { nonce, sequence, ..ask(X, Y) };
    said(&mut server, &asks(5, 1_000_000), heard(X, WIREGUARD), now);
    let [offer, ..] = said(&mut server, &asks(6, 9_000_000), heard(X, WIREGUARD), now)[..] else { panic!() };
    for _ in 0..300 {
        assert_eq!(said(&mut server, &asks(5, 1_000_000), heard(X, WIREGUARD), now), []);
    }
    let [late] = said(&mut server, &asks(5, 8_500_000), heard(X, WIREGUARD), now)[..] else { panic!() };
    assert_eq!((late.token, late.port), (offer.token, offer.port), "the later agent's");
    let changes = server.changes();
    let bind = Message { token: offer.token, ..asks(6, 9_000_001) };
    said(&mut server, &bind, heard(X, offer.port), now);
    said(&mut server, &Message { sequence: 9_000_002, ..bind }, heard(X, offer.port), now);
    assert_eq!(server.changes(), changes + 1, "the same binding is none");
}

#[test]
fn a_relay_keeps_its_pairs_while_it_may_lead_or_offer_again() {
    let (mut server, now) = (Server::default(), Instant::now());
    said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now);
    let pairs = |server: &mut Server, relays, after| {
        server.set_relays(relays, now + seconds(after));
        server.pairs()
    };
    assert_eq!(pairs(&mut server, false, 0), 1);
    assert_eq!(pairs(&mut server, false, 29), 1);
    assert_eq!(pairs(&mut server, true, 30), 1);
    assert_eq!(pairs(&mut server, false, 40), 1);
    assert_eq!(pairs(&mut server.clone(), false, 70), 0);
}

#[test]
fn unknown_nodes_get_no_answer_and_unreachable_ends_are_refused() {
    let (mut server, now) = (Server::default(), Instant::now());
    assert_eq!(said(&mut server, &ask(77, X), heard(X, WIREGUARD), now), []);
    assert_eq!(said(&mut server, &ask(X, X), heard(X, WIREGUARD), now), []);
    let refused = said(&mut server, &ask(X, 77), heard(X, WIREGUARD), now);
    assert_eq!(refused.iter().map(|offer| offer.port).collect::<Vec<_>>(), [0]);
    assert_eq!(server.pairs(), 0);
    let many =
        (0..500).filter(|_| !said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now).is_empty()).count();
    assert!(many <= 200, "{many} answers in a second");
}

#[test]
fn idle_pairs_are_forgotten_and_those_whose_packets_pass_are_not() {
    let now = Instant::now();
    let mut server = bound(now);
    let mut table = server.table(0);
    server.turn(&table, now + seconds(100), 0);
    table.values_mut().for_each(|port| port.packets += 5);
    server.turn(&table, now + seconds(170), 0);
    server.turn(&table, now + seconds(340), 0);
    assert_eq!(server.pairs(), 1);
    server.turn(&table, now + seconds(351), 0);
    assert_eq!((server.pairs(), server.table(0).len()), (0, 0));
}

#[test]
fn an_end_that_is_gone_for_good_is_refused_to_the_other_one() {
    let (mut server, now) = (Server::default(), Instant::now());
    let mut sequence = 1_000_000;
    let mut asks = |server: &mut Server, from, near: &[NodeId], bind: Option<Message>, after| {
        sequence += 1;
        let other = if from == X { Y } else { X };
        let (token, port) = bind.map_or((0, WIREGUARD), |offer| (offer.token, offer.port));
        let message = Message { sequence, token, ..ask(from, other) };
        said_near(server, near, &message, heard(from, port), now + seconds(after)).first().copied()
    };
    for end in [X, Y] {
        let offer = asks(&mut server, end, &[X, Y], None, 0);
        asks(&mut server, end, &[X, Y], offer, 0);
    }
    let passes =
        |offer: Option<Message>| offer.is_some_and(|offer| offer.port != 0 && offer.flags & BOTH != 0);
    assert!(passes(asks(&mut server, X, &[X], None, 29)));
    // It asks, although it cannot be answered.
    assert_eq!(asks(&mut server, Y, &[X], None, 25), None);
    assert!(passes(asks(&mut server, X, &[X], None, 54)));
    // Its port counts packets.
    let mut table = server.table(0);
    let count = |table: &mut BTreeMap<u16, Port>, of| {
        table.values_mut().filter(|port| port.ids[0] == of).for_each(|port| port.packets += 1);
    };
    count(&mut table, Y);
    server.turn(&table, now + seconds(50), 0);
    assert!(passes(asks(&mut server, X, &[X], None, 79)));
    assert!(!passes(asks(&mut server, X, &[X], None, 80)), "nothing came of it for 30 s");
    assert!(passes(asks(&mut server.clone(), X, &[X, Y], None, 81)), "it may be back");
    // An end that sends and asks alone does not keep the pair.
    for after in (81..258).step_by(3) {
        count(&mut table, X);
        server.turn(&table, now + seconds(after), 0);
        asks(&mut server, X, &[X], None, after);
    }
    assert_eq!(server.pairs(), 1);
    server.turn(&table, now + seconds(259), 0);
    assert_eq!(server.pairs(), 0);
}

#[test]
fn invitations_bear_the_relays_own_numbers() {
    let (mut server, now) = (Server::default(), Instant::now());
    server.turn(&BTreeMap::new(), now, 5_000_000);
    let mut invites = |sequence, after| {
        let message = Message { sequence, ..ask(X, Y) };
        let said = said(&mut server, &message, heard(X, WIREGUARD), now + seconds(after));
        said.iter().map(|message| (message.kind, message.sequence)).collect::<Vec<_>>()
    };
    let ahead = u64::MAX / 2;
    assert_eq!(invites(ahead, 0), [(Kind::Offer, ahead), (Kind::Invite, 5_000_001)]);
    assert_eq!(invites(ahead + 1, 1), [(Kind::Offer, ahead + 1), (Kind::Invite, 5_000_002)]);
}

#[test]
fn numbers_of_a_node_are_forgotten_when_it_has_left_and_no_sooner() {
    let now = Instant::now();
    let mut server = bound(now);
    let later = 10_000_000;
    assert!(binds(&mut server, X, later, now).is_some());
    let has_left = |id| id != X;
    server.end_pairs_without(has_left, now);
    let now = now + REORDERED + seconds(1);
    assert!(binds(&mut server, X, 0, now).is_none(), "recorded: its pair is kept for a while");
    let now = now + RESTS + seconds(1);
    server.end_pairs_without(has_left, now);
    assert_eq!(server.pairs(), 0);
    // It comes back with another clock.
    assert!(binds(&mut server, X, 0, now).is_some());
}
