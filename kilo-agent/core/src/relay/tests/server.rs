//! What a relay gives to whom.

use std::{net::SocketAddr, time::Instant};

use kilo_common::relay::{FIRST_PORT, Kind, LAST_PORT, Message};

use super::{super::*, seconds, world::*};

fn heard(from: NodeId, port: u16) -> Heard {
    Heard { source: SocketAddr::new(ip(from), 40_001), local: ip(Z[0]), port, ifindex: 2 }
}

/// What a relay answers to who.
fn said(server: &mut Server, message: &Message, heard: Heard, now: Instant) -> Vec<Message> {
    let reachable = [X, Y].map(|end| (end, place(end))).into();
    let mut seed = 3;
    let outputs =
        server.hear(message, heard, (Z[0], &reachable), &mut |_| true, &mut || next(&mut seed), now);
    let sent = outputs.into_iter().map(|output| match output {
        Output::Send { to, node, message } => {
            assert_eq!(to, place(node), "nobody is answered but where WireGuard knows him");
            message
        }
        Output::Move { .. } => panic!("a relay moves nothing"),
    });
    sent.collect()
}

#[test]
fn a_binding_needs_the_token_and_a_later_number() {
    let (mut server, now) = (Server::default(), Instant::now());
    let first = said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now);
    let [offer, invite] = first[..] else { panic!("{first:?}") };
    assert_eq!((offer.kind, offer.flags, invite.kind, invite.other), (Kind::Offer, 0, Kind::Invite, X));
    assert!((FIRST_PORT..=LAST_PORT).contains(&offer.port));
    let bound = |server: &Server| server.table()[&offer.port].from_port;
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
fn a_relay_keeps_its_pairs_while_it_may_lead_again() {
    let (mut server, now) = (Server::default(), Instant::now());
    said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now);
    let pairs = |server: &mut Server, relays, is_meant_to, after| {
        server.relays(relays, is_meant_to, now + seconds(after));
        server.pairs()
    };
    assert_eq!(pairs(&mut server, false, true, 0), 1);
    assert_eq!(pairs(&mut server, false, true, 29), 1);
    assert_eq!(pairs(&mut server, true, true, 30), 1);
    assert_eq!(pairs(&mut server, false, true, 40), 1);
    assert_eq!(pairs(&mut server.clone(), false, true, 70), 0);
    assert_eq!(pairs(&mut server, false, false, 41), 0, "--relay=off, or the annotation is gone");
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
    let (mut server, now) = (Server::default(), Instant::now());
    said(&mut server, &ask(X, Y), heard(X, WIREGUARD), now);
    let mut table = server.table();
    server.turn(&table, now + seconds(100));
    table.values_mut().for_each(|port| port.packets += 5);
    server.turn(&table, now + seconds(170));
    server.turn(&table, now + seconds(340));
    assert_eq!(server.pairs(), 1);
    server.turn(&table, now + seconds(351));
    assert_eq!((server.pairs(), server.table().len()), (0, 0));
}
