//! Pairs in a small world, and how a client and a relay handle single messages.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod failing_relays;
mod server;
mod world;

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use kilo_common::relay::{FIRST_PORT, Kind, Message};
use proptest::prelude::*;

use super::*;
use world::*;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn broken() -> impl Strategy<Value = Broken> {
    prop::sample::select(vec![Broken::Dead, Broken::Closed, Broken::Refuses, Broken::Off])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_pair_without_a_way_is_relayed_within_20_s_whatever_is_lost(seed: u64, drops in 0u8..20) {
        let mut world = World::new(seed);
        world.drops = f64::from(drops) / 100.0;
        let took = world.connects(seconds(20));
        prop_assert!(took > seconds(10), "WireGuard itself is given time");
        world.run(seconds(5));
        prop_assert!(world.forwarded > 0);
        // While messages are lost, each end may use another relay, and
        // packets pass; not for longer.
        world.drops = 0.0;
        world.run(seconds(20));
        prop_assert_eq!(world.relay(X), world.relay(Y), "both use one relay");
    }

    #[test]
    fn an_established_session_whose_way_breaks_is_relayed_within_20_s(seed: u64, drops in 0u8..20) {
        let mut world = World::new(seed);
        world.direct = true;
        world.connects(seconds(20));
        world.run(seconds(30));
        (world.direct, world.drops) = (false, f64::from(drops) / 100.0);
        world.begin_to_measure();
        world.run(seconds(20));
        prop_assert!(matches!((world.path(X), world.path(Y)), (Some(Path::Relayed(_)), Some(Path::Relayed(_)))));
        world.run(seconds(1));
        prop_assert!(world.gap > seconds(10) && world.gap <= seconds(20), "{:?}", world.gap);
    }

    #[test]
    fn another_relay_takes_over_within_2_s(seed: u64) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(10));
        let first = world.relay(X);
        world.servers.remove(&first);
        world.begin_to_measure();
        world.run(seconds(10));
        prop_assert_ne!(world.relay(X), first);
        prop_assert_ne!(world.relay(Y), first);
        prop_assert!(world.gap <= seconds(2), "{:?}", world.gap);
    }

    #[test]
    fn a_relay_that_takes_its_offer_back_is_left_without_a_loss(seed: u64, drops in 0u8..5, is_long: bool) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(10));
        (world.drops, world.is_long) = (f64::from(drops) / 100.0, is_long);
        let first = world.relay(X);
        world.withdrawn.push(first);
        world.begin_to_measure();
        // Both learn of it later, and not at the same time.
        for unaware in [&[X, Y][..], &[Y]] {
            world.unaware = unaware.to_vec();
            world.run(seconds(2));
        }
        world.unaware.clear();
        world.run(seconds(5));
        let before = world.forwarded_by(first);
        world.run(seconds(5));
        prop_assert_eq!(world.forwarded_by(first), before, "both have left it");
        world.run(RESTS + seconds(2));
        prop_assert!(world.relay(X) != first && world.relay(Y) != first);
        prop_assert_eq!(world.lost, 0);
        prop_assert_eq!(world.servers[&first].pairs(), 0);
    }

    #[test]
    fn a_third_relay_is_asked_where_two_are_of_no_use(seed: u64, kinds in [broken(), broken()]) {
        let mut world = World::new(seed);
        let [one, two, good] = ranked();
        world.broken = [(one, kinds[0]), (two, kinds[1])].into();
        world.connects(seconds(20));
        world.run(seconds(5));
        prop_assert_eq!((world.relay(X), world.relay(Y)), (good, good));
        // A mended relay stands by once it was asked again, at the latest.
        world.broken.remove(&two);
        world.run(seconds(12));
        world.broken.insert(good, Broken::Dead);
        world.begin_to_measure();
        world.run(seconds(10));
        prop_assert_eq!((world.relay(X), world.relay(Y)), (two, two));
        prop_assert!(world.gap <= seconds(2), "{:?}", world.gap);
    }

    #[test]
    fn a_relay_that_passes_nothing_any_more_is_left_whatever_it_says(seed: u64) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(10));
        let first = world.relay(X);
        // A firewall in front of it lets its agent answer, and nothing else.
        world.broken.insert(first, Broken::Closed);
        world.run(SILENT_SESSION + seconds(10));
        world.begin_to_measure();
        world.run(seconds(40));
        prop_assert!(world.relay(X) != first && world.relay(Y) != first);
        prop_assert_eq!(world.lost, 0);
    }

    #[test]
    fn a_third_relay_takes_over_soon_after_the_second(seed: u64) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(10));
        world.begin_to_measure();
        for relay in ranked().into_iter().take(2) {
            prop_assert_eq!((world.relay(X), world.relay(Y)), (relay, relay));
            // Its tunnels count as working for three minutes.
            world.broken.insert(relay, Broken::Dead);
            world.run(seconds(4));
        }
        prop_assert_eq!(world.relay(X), ranked()[2]);
        prop_assert!(world.gap <= seconds(2), "{:?}", world.gap);
    }

    #[test]
    fn a_direct_path_is_found_again_within_a_minute_and_loses_nothing(seed: u64, drops in 0u8..5, is_published: bool, also_publishes: bool) {
        let mut world = World::new(seed);
        (world.is_published, world.also_publishes) = (is_published, also_publishes);
        world.connects(seconds(20));
        world.run(seconds(7));
        world.begin_to_measure();
        (world.direct, world.drops) = (true, f64::from(drops) / 100.0);
        world.run(DIRECT_EVERY * 2 + seconds(5));
        let path = Some(if is_published || also_publishes { Path::Direct } else { Path::Punched });
        prop_assert_eq!((world.path(X), world.path(Y)), (path, path));
        prop_assert_eq!(world.lost, 0);
        let before = world.forwarded;
        world.run(seconds(60));
        prop_assert_eq!(world.forwarded, before, "nothing goes through the relay any more");
    }

    #[test]
    fn both_ends_stay_on_a_direct_path_while_packets_of_the_relay_are_still_under_way(seed: u64, drops in 0u8..5) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(7));
        world.begin_to_measure();
        (world.direct, world.is_long, world.drops) = (true, true, f64::from(drops) / 100.0);
        world.run(DIRECT_EVERY * 2 + seconds(5));
        // A try whose packets are dropped is followed by another one.
        for _ in 0..drops {
            if world.path(X) != Some(Path::Punched) || world.path(Y) != Some(Path::Punched) {
                world.run(DIRECT_EVERY);
            }
        }
        prop_assert_eq!((world.path(X), world.path(Y), world.lost), (Some(Path::Punched), Some(Path::Punched), 0));
        let before = world.forwarded;
        world.run(seconds(60));
        prop_assert_eq!(world.forwarded, before, "nothing goes through the relay any more");
    }

    #[test]
    fn whatever_happens_there_is_a_way_20_s_after_there_is_one(seed: u64, events in prop::collection::vec(0u8..8, 1..8)) {
        let mut world = World::new(seed);
        for event in events {
            match event {
                0 => world.direct = !world.direct,
                1 => drop(world.servers.remove(&Z[0])),
                2 => drop(world.servers.remove(&Z[1])),
                5 => drop(world.broken.insert(Z[2], Broken::Dead)),
                6 => drop(world.broken.insert(Z[1], Broken::Closed)),
                7 => drop(world.broken.insert(Z[0], Broken::Refuses)),
                // A relay whose agent has forgotten everything, and one whose NAT has.
                3 => Z.iter().for_each(|relay| drop(world.servers.insert(*relay, Server::default()))),
                _ => world.nat += 1,
            }
            let time = next(&mut world.seed) % 60;
            world.run(seconds(time));
        }
        for relay in Z {
            world.servers.entry(relay).or_default();
        }
        world.broken.clear();
        // The keys of the broken session have to expire.
        world.run(seconds(250));
        world.begin_to_measure();
        world.run(seconds(10));
        prop_assert!(world.gap <= seconds(2), "{:?} {:?}", world.path(X), world.gap);
    }
}

#[test]
fn the_endpoint_of_a_direct_path_follows_what_the_other_end_says_and_where_it_is() {
    let mut world = World::new(7);
    world.connects(seconds(20));
    world.direct = true;
    world.run(DIRECT_EVERY * 2);
    let at = |world: &World| world.clients[&X].endpoints().get(&Y).copied();
    assert_eq!((world.path(X), at(&world)), (Some(Path::Punched), Some((endpoint_of(Y), false))));
    let sees = |world: &mut World, published, endpoint| {
        let (mut seen, now) = (world.seen(X), world.now);
        (seen[0].published, seen[0].endpoint) = (Some(published), Some(endpoint));
        world.clients.get_mut(&X).unwrap().see(seen, own(true, true), now);
    };
    let published = world.seen(X)[0].published.unwrap();
    sees(&mut world, published, endpoint_of(78));
    assert_eq!(at(&world), Some((endpoint_of(78), false)), "WireGuard has followed it");
    sees(&mut world, endpoint_of(77), endpoint_of(78));
    assert_eq!(at(&world), None, "the plan has what is published now");
}

#[test]
fn a_direct_path_is_taken_before_a_relay_is_needed() {
    let mut world = World::new(7);
    world.tunnels.values_mut().for_each(|tunnel| {
        tunnel.endpoint = SocketAddr::new(Ipv4Addr::new(192, 168, 0, 1).into(), WIREGUARD);
    });
    world.direct = true;
    let took = world.connects(seconds(20));
    assert!(took < seconds(11), "{took:?}");
    assert_eq!((world.path(X), world.forwarded), (Some(Path::Punched), 0));
}

#[test]
fn a_flow_that_is_not_answered_but_by_keepalives_asks_for_nothing() {
    let (mut client, start) = (Client::new(X), Instant::now());
    let relay = Seen {
        id: Z[0],
        handshake_age: Some(Duration::ZERO),
        endpoint: Some(endpoint_of(Z[0])),
        relays: true,
        ..Seen::default()
    };
    let mut outputs = Vec::new();
    for second in 0..120 {
        let other = Seen {
            id: Y,
            handshake_age: Some(seconds(second)),
            sent: 148_000 * second,
            received: 92 + 32 * (second / 10),
            endpoint: Some(endpoint_of(Y)),
            candidates: vec![endpoint_of(Y)],
            ..Seen::default()
        };
        let now = start + seconds(second);
        client.see(vec![other, relay.clone()], own(true, true), now);
        outputs.extend(client.turn(now, 1, &mut || 4));
    }
    assert_eq!(outputs, []);
}

#[test]
fn relays_that_are_off_are_not_used() {
    let mut world = World::new(7);
    world.uses = false;
    world.run(seconds(120));
    assert_eq!((world.path(X), world.forwarded), (None, 0));
    assert!(world.servers.values().all(|server| server.pairs() == 0));
}

#[test]
fn one_end_that_refuses_relays_ends_the_pair_and_a_direct_path_still_serves_it() {
    let mut world = World::new(7);
    world.connects(seconds(20));
    world.run(seconds(10));
    world.refuses = true;
    world.clients.insert(Y, Client::new(Y));
    world.run(seconds(3));
    let before = world.forwarded;
    world.run(seconds(60));
    assert_eq!(world.forwarded, before, "nothing goes through a relay any more");
    assert!(world.servers.values().all(|server| server.pairs() == 0));
    let published = world.seen(X)[0].published;
    assert_eq!((Some(world.tunnels[&X].endpoint), world.clients[&X].endpoints().get(&Y)), (published, None));
    // Its agent gets `--relay=auto` again.
    world.refuses = false;
    world.run(seconds(250));
    assert!(matches!((world.path(X), world.path(Y)), (Some(Path::Relayed(_)), Some(Path::Relayed(_)))));
}

#[test]
fn a_punched_way_that_ends_is_left_also_where_the_other_end_refuses_relays_and_answers_no_tries() {
    let mut world = World::new(7);
    world.connects(seconds(20));
    world.direct = true;
    world.run(DIRECT_EVERY * 2);
    assert_eq!(world.path(X), Some(Path::Punched));
    world.refuses = true;
    world.run(seconds(10));
    assert_eq!(world.tunnels[&X].endpoint, endpoint_of(Y), "it works");
    world.direct = false;
    world.run(SILENT_FOR_GOOD + seconds(10));
    assert_eq!(Some(world.tunnels[&X].endpoint), world.seen(X)[0].published);
}

#[test]
fn an_address_that_an_end_without_relays_answered_from_is_left_only_after_wireguards_own_attempts() {
    let (mut client, start) = (Client::new(X), Instant::now());
    let seen = || Seen {
        id: Y,
        sent: 148,
        endpoint: Some(endpoint_of(9)),
        published: Some(endpoint_of(9)),
        candidates: vec![endpoint_of(Y)],
        ..Seen::default()
    };
    client.see(vec![seen()], own(true, true), start);
    let now = start + TRY;
    client.see(vec![seen()], own(true, true), now);
    for step in 0..2 {
        for output in client.turn(now + 2 * STEP * step, 1, &mut || 4) {
            if let Output::Send { to, message, .. } = output
                && to == endpoint_of(Y)
            {
                client.hear(&Message { kind: Kind::Tried, sender: Y, other: X, ..message }, to, 1, now);
            }
        }
    }
    assert_eq!(client.endpoints().get(&Y), Some(&(endpoint_of(Y), false)));
    // A flow one way, answered every 10 s by keepalives alone: one is lost, and all after 60 s.
    let mut left = None;
    for second in 0..120 {
        let answers = [0, 10, 30, 40, 50, 60].iter().filter(|at| second >= **at).count() as u64;
        let other = Seen {
            handshake_age: Some(seconds(second)),
            sent: 148_000 * (second + 1),
            received: 92 + 32 * answers,
            endpoint: Some(endpoint_of(Y)),
            refuses: true,
            ..seen()
        };
        let now = now + seconds(second);
        client.see(vec![other], own(true, true), now);
        let outputs = client.turn(now, 1, &mut || 4);
        if outputs.contains(&Output::Move { node: Y, to: endpoint_of(9) }) {
            left.get_or_insert(second);
        }
    }
    let left = left.unwrap();
    assert!((88..=91).contains(&left), "{left}");
}

#[test]
fn where_nothing_answers_tries_become_rare_and_begin_anew_where_there_is_something_new() {
    let (mut client, start) = (Client::new(X), Instant::now());
    let mut now = start;
    let mut rounds = |refuses, at: NodeId, time: Duration| {
        let (end, mut tries) = (now + time, 0);
        while now < end {
            now += STEP;
            let other = Seen {
                id: Y,
                sent: u64::try_from((now - start).as_millis()).unwrap(),
                published: Some(endpoint_of(9)),
                candidates: vec![endpoint_of(at)],
                refuses,
                ..Seen::default()
            };
            client.see(vec![other], own(true, true), now);
            tries += client.turn(now, 1, &mut || 4).len();
        }
        // Two addresses, eight times.
        tries / 16
    };
    assert_eq!(rounds(true, Y, seconds(600)), 0, "its agent answers no tries");
    let at_first = rounds(false, Y, seconds(30));
    assert!((9..=11).contains(&at_first), "however long it had been silent: {at_first}");
    rounds(false, Y, seconds(120));
    assert_eq!(rounds(false, Y, seconds(600)), 20);
    assert!(rounds(false, 77, seconds(3)) >= 1, "it is seen elsewhere");
    let again = rounds(false, 77, seconds(30));
    assert!((9..=11).contains(&again), "{again}");
    // A node that keeps naming new addresses does not make anybody send more.
    rounds(false, 77, seconds(120));
    let flapping = (0..30).map(|second| rounds(false, 70 + second % 2, seconds(10))).sum::<usize>();
    assert!((9..=11).contains(&flapping), "{flapping}");
}

#[test]
fn a_direct_path_that_only_messages_go_is_left_again() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(7));
    (world.direct, world.deceives) = (true, true);
    world.begin_to_measure();
    world.run(DIRECT_EVERY * 2);
    assert!(world.lost > 0, "it was tried");
    assert!(world.gap <= seconds(7), "{:?}", world.gap);
    assert!(matches!((world.path(X), world.path(Y)), (Some(Path::Relayed(_)), Some(Path::Relayed(_)))));
}

#[test]
fn a_pair_between_which_messages_alone_pass_gets_a_relay() {
    let mut world = World::new(5);
    (world.direct, world.deceives) = (true, true);
    world.connects(seconds(20));
    world.run(seconds(5));
    assert!(matches!((world.path(X), world.path(Y)), (Some(Path::Relayed(_)), Some(Path::Relayed(_)))));
    assert!(world.forwarded > 0);
}

#[test]
fn a_try_counts_once_and_only_where_it_was_sent_to() {
    let (mut client, start) = (Client::new(X), Instant::now());
    let seen = || Seen {
        id: Y,
        sent: 148,
        endpoint: Some(endpoint_of(9)),
        candidates: vec![endpoint_of(Y)],
        ..Seen::default()
    };
    client.see(vec![seen()], own(false, true), start);
    let now = start + TRY;
    client.see(vec![seen()], own(false, true), now);
    let mut tries = Vec::new();
    for step in 0..3 {
        tries.extend(client.turn(now + 2 * STEP * step, 1, &mut || 4));
    }
    let tries: Vec<Message> = tries
        .into_iter()
        .filter_map(|output| match output {
            Output::Send { to, message, .. } if to == endpoint_of(Y) => Some(message),
            _ => None,
        })
        .collect();
    assert_eq!(tries.len(), 3);
    let mut answers = |of: usize, from| {
        let message = Message { kind: Kind::Tried, sender: Y, other: X, ..tries[of] };
        client.hear(&message, from, 1, now + seconds(1))
    };
    assert_eq!(answers(0, endpoint_of(Y)), []);
    assert_eq!(answers(0, endpoint_of(Y)), [], "the same answer again");
    assert_eq!(
        (answers(1, endpoint_of(77)), answers(2, endpoint_of(77))),
        (vec![], vec![]),
        "carried from elsewhere"
    );
    assert_eq!(answers(1, endpoint_of(Y)), [Output::Move { node: Y, to: endpoint_of(Y) }]);
}

#[test]
fn a_new_endpoint_is_tried_within_two_minutes_however_seldom_the_old_one_was() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(7));
    (world.direct, world.deceives) = (true, true);
    // Each path that does not last doubles the time to the next try.
    world.run(DIRECT_EVERY * 40);
    world.begin_to_measure();
    (world.deceives, world.is_published) = (false, true);
    world.run(DIRECT_EVERY * 2);
    assert_eq!((world.path(X), world.path(Y)), (Some(Path::Direct), Some(Path::Direct)));
    assert_eq!(world.lost, 0);
}

#[test]
fn an_end_behind_a_relays_nat_is_not_taken_for_relayed() {
    let now = Instant::now();
    let at = SocketAddr::new(ip(Z[0]), FIRST_PORT + 3);
    let age = Some(Duration::ZERO);
    for (published, path) in [(Some(at), Path::Direct), (None, Path::Relayed(Z[0]))] {
        let mut client = Client::new(X);
        let relay = Seen {
            id: Z[0],
            handshake_age: age,
            endpoint: Some(endpoint_of(Z[0])),
            relays: true,
            ..Seen::default()
        };
        let other = Seen { id: Y, handshake_age: age, endpoint: Some(at), published, ..Seen::default() };
        client.see(vec![relay, other], own(true, false), now);
        client.turn(now, 1, &mut || 4);
        assert_eq!(client.paths()[&Y], path);
    }
}

#[test]
fn recorded_messages_change_nothing() {
    let now = Instant::now();
    let mut client = Client::new(X);
    let seen = |id, relays| Seen { id, endpoint: Some(endpoint_of(id)), relays, ..Seen::default() };
    client.see(vec![seen(Y, false), seen(Z[0], true)], own(true, true), now);
    let message = |kind, sender, other, sequence| Message { kind, sequence, ..ask(sender, other) };
    let hears = |client: &mut Client, message| client.hear(&message, endpoint_of(77), 1, now).len();
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 9_000_000)), 1);
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 7_000_001)), 1, "by another path");
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 6_999_999)), 0, "recorded");
    for repeated in [9_000_000, 7_000_001] {
        assert_eq!(hears(&mut client, message(Kind::Try, Y, X, repeated)), 0, "it was answered");
    }
    // Invitations carry the relay's numbers, even where they are ignored.
    client.see(vec![seen(Y, false), seen(Z[0], true)], own(false, true), now);
    hears(&mut client, message(Kind::Invite, Z[0], Y, 5_000_000));
    client.see(vec![seen(Y, false), seen(Z[0], true)], own(true, true), now);
    hears(&mut client, message(Kind::Invite, Z[0], Y, 2_999_999));
    assert!(!client.is_busy());
    hears(&mut client, message(Kind::Invite, Z[0], Y, 5_000_001));
    assert!(client.is_busy(), "it asks the relay");
}

#[test]
fn the_next_agent_of_an_end_goes_on_with_its_relay() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(3));
    let relay = world.relay(X);
    world.clients.insert(X, Client::new(X));
    world.begin_to_measure();
    world.run(seconds(30));
    assert_eq!((world.relay(X), world.relay(Y), world.lost), (relay, relay, 0));
}

#[test]
fn a_relays_next_agent_goes_on_with_its_pairs() {
    let mut world = World::new(3);
    world.connects(seconds(20));
    world.run(seconds(3));
    let relay = world.relay(X);
    let table = world.servers[&relay].table(0);
    let mut seed = 9;
    let adopted = Server::adopted(&table, world.now, &mut || next(&mut seed));
    assert_eq!(adopted.table(0), table);
    world.servers.insert(relay, adopted);
    world.begin_to_measure();
    world.run(seconds(30));
    assert_eq!((world.relay(X), world.lost), (relay, 0));
}
