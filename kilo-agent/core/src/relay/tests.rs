//! A small world: two ends behind NATs, relays, and WireGuard as far as it matters.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use kilo_common::relay::{FIRST_PORT, Kind, LAST_PORT, Message, is_port};
use proptest::prelude::*;

use super::*;

const X: NodeId = 11;
const Y: NodeId = 22;
const Z: [NodeId; 2] = [33, 44];
const WIREGUARD: u16 = 51_820;
const STEP: Duration = Duration::from_millis(100);

fn ip(id: NodeId) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, u8::try_from(id).unwrap()).into()
}

fn place(id: NodeId) -> SocketAddr {
    SocketAddr::new(ip(id), WIREGUARD)
}

/// One end's WireGuard towards the other.
#[derive(Clone, Copy)]
struct Tunnel {
    endpoint: SocketAddr,
    handshake: Option<Instant>,
    sent: u64,
    received: u64,
    attempt: Option<Instant>,
}

struct World {
    now: Instant,
    /// Microseconds.
    wall: u64,
    clients: BTreeMap<NodeId, Client>,
    servers: BTreeMap<NodeId, Server>,
    tunnels: BTreeMap<NodeId, Tunnel>,
    queue: VecDeque<(NodeId, SocketAddr, Message)>,
    /// X and Y reach each other without a relay.
    direct: bool,
    /// Messages alone do: what else goes directly is lost.
    deceives: bool,
    /// Both have the relays on.
    uses: bool,
    /// Ports of both NATs depend on the destination by this.
    nat: u16,
    seed: u64,
    /// Datagrams of data from X that Y did not get, and the longest time without one.
    lost: u64,
    gap: Duration,
    last: Instant,
    forwarded: u64,
    drops: f64,
}

fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 16 | 1
}

impl World {
    fn new(seed: u64) -> Self {
        let start = Instant::now();
        let tunnel =
            |to| Tunnel { endpoint: place(to), handshake: None, sent: 0, received: 0, attempt: None };
        Self {
            now: start,
            wall: 0,
            clients: [X, Y].map(|id| (id, Client::new(id))).into(),
            servers: Z.map(|id| (id, Server::default())).into(),
            tunnels: [(X, tunnel(Y)), (Y, tunnel(X))].into(),
            queue: VecDeque::new(),
            direct: false,
            deceives: false,
            uses: true,
            nat: 1,
            seed,
            lost: 0,
            gap: Duration::ZERO,
            last: start,
            forwarded: 0,
            drops: 0.0,
        }
    }

    /// What a NAT makes of the source.
    fn source(&self, from: NodeId, to: SocketAddr) -> SocketAddr {
        let by_destination = (to.port() ^ u16::try_from(from).unwrap()) % 5_000 + self.nat * 7;
        SocketAddr::new(ip(from), if is_port(to.port()) { 40_000 + by_destination } else { WIREGUARD })
    }

    /// Who gets a datagram, and where it seems to come from.
    fn arrives(&mut self, from: NodeId, to: SocketAddr) -> Option<(NodeId, SocketAddr)> {
        let source = self.source(from, to);
        self.delivered(source, to, 0)
    }

    fn delivered(&mut self, source: SocketAddr, to: SocketAddr, hops: u8) -> Option<(NodeId, SocketAddr)> {
        assert!(hops < 2, "a loop");
        for relay in Z {
            if ip(relay) == to.ip() {
                let server = self.servers.get(&relay)?;
                if to.port() == WIREGUARD {
                    return Some((relay, source));
                }
                let table = server.table();
                let port = table.get(&to.port())?;
                let is_bound = port.from == mapped(source.ip()) && port.from_port == source.port();
                if !is_bound || port.to_port == 0 {
                    return None;
                }
                self.forwarded += 1;
                let on = SocketAddr::new(IpAddr::from(port.to).to_canonical(), port.to_port);
                return self.delivered(SocketAddr::new(ip(relay), port.by_port), on, hops + 1);
            }
        }
        let from_relay = Z.iter().any(|relay| ip(*relay) == source.ip());
        let end = [X, Y].into_iter().find(|end| ip(*end) == to.ip())?;
        (from_relay || self.direct && to.port() == WIREGUARD).then_some((end, source))
    }

    fn seen(&self, own: NodeId) -> Vec<Seen> {
        let other = if own == X { Y } else { X };
        let tunnel = &self.tunnels[&own];
        let mut seen = vec![Seen {
            id: other,
            handshake_age: tunnel.handshake.map(|at| self.now - at),
            sent: tunnel.sent,
            received: tunnel.received,
            endpoint: Some(tunnel.endpoint),
            published: Some(SocketAddr::new(Ipv4Addr::new(10, 0, 0, 1).into(), WIREGUARD)),
            places: vec![place(other)],
            relays: false,
        }];
        seen.extend(Z.iter().filter(|relay| self.servers.contains_key(relay)).map(|relay| Seen {
            id: *relay,
            handshake_age: Some(Duration::from_secs(5)),
            endpoint: Some(place(*relay)),
            published: Some(place(*relay)),
            relays: true,
            ..Seen::default()
        }));
        seen
    }

    fn take(&mut self, from: NodeId, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Send { to, message, .. } => self.queue.push_back((from, to, message)),
                Output::Move { to, .. } => self.tunnels.get_mut(&from).unwrap().endpoint = to,
            }
        }
    }

    fn message(&mut self, from: NodeId, to: SocketAddr, message: Message) {
        let source = self.source(from, to);
        let mut random = next(&mut self.seed);
        let relay = Z.into_iter().find(|relay| ip(*relay) == to.ip());
        if let Some(relay) = relay.filter(|_| message.kind == Kind::Ask) {
            let now = self.now;
            let heard = Heard { source, local: ip(relay), port: to.port(), ifindex: 2 };
            let Some(server) = self.servers.get_mut(&relay) else { return };
            if to.port() != WIREGUARD && !server.table().contains_key(&to.port()) {
                // The program leaves it to the stack.
                return;
            }
            let reachable = [X, Y].map(|end| (end, place(end))).into();
            let mut seed = random;
            let outputs = server.hear(
                &message,
                heard,
                (relay, &reachable),
                &mut |_| true,
                &mut || next(&mut seed),
                now,
            );
            self.take(relay, outputs);
            return;
        }
        let from_relay = Z.contains(&from);
        let arrived = if from_relay && self.servers.contains_key(&from) {
            [X, Y].into_iter().find(|end| ip(*end) == to.ip()).map(|end| (end, place(from)))
        } else if from_relay {
            None
        } else {
            self.arrives(from, to)
        };
        if let Some((end, source)) = arrived
            && self.clients.contains_key(&end)
        {
            let now = self.now;
            random = next(&mut self.seed);
            let outputs = self.clients.get_mut(&end).unwrap().hear(&message, source, random, now);
            self.take(end, outputs);
        }
    }

    /// Data from X to Y and back, or attempts to shake hands.
    fn traffic(&mut self, from: NodeId) {
        let to = if from == X { Y } else { X };
        let tunnel = self.tunnels[&from];
        let fresh = tunnel.handshake.is_some_and(|at| self.now - at < Duration::from_secs(180));
        let waits = tunnel.attempt.is_some_and(|at| self.now - at < Duration::from_secs(5));
        if !fresh && waits {
            return;
        }
        let is_lost = self.deceives && !is_port(tunnel.endpoint.port());
        let arrived = self.arrives(from, tunnel.endpoint).filter(|(end, _)| *end == to && !is_lost);
        let now = self.now;
        let own = self.tunnels.get_mut(&from).unwrap();
        own.sent += 148;
        if !fresh {
            own.attempt = Some(now);
        }
        let Some((_, source)) = arrived else {
            self.lost += u64::from(from == X && fresh);
            return;
        };
        let theirs = self.tunnels.get_mut(&to).unwrap();
        theirs.endpoint = source;
        theirs.received += 148;
        if !fresh {
            // Its answer comes back the same way.
            theirs.handshake = Some(now);
            let back = self.arrives(to, source).filter(|(end, _)| *end == from);
            if back.is_some() {
                let own = self.tunnels.get_mut(&from).unwrap();
                (own.handshake, own.received) = (Some(now), own.received + 92);
            }
        } else if from == X {
            self.gap = self.gap.max(self.now - self.last);
            self.last = self.now;
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += STEP;
            self.wall += 100_000;
            for (id, tunnel) in &mut self.tunnels {
                // WireGuard renews its keys.
                if tunnel.handshake.is_some_and(|at| self.now - at > Duration::from_secs(120)) {
                    tunnel.handshake = tunnel.handshake.filter(|_| *id > 0).map(|_| self.now);
                }
            }
            self.traffic(X);
            self.traffic(Y);
            for end in [X, Y] {
                let (seen, uses, now) = (self.seen(end), self.uses, self.now);
                // Clocks are not equal.
                let wall = self.wall + end * 86_400_000_000;
                let client = self.clients.get_mut(&end).unwrap();
                client.see(seen, uses, true, now);
                let mut seed = self.seed;
                let outputs = client.turn(now, wall, &mut || next(&mut seed));
                self.seed = seed;
                self.take(end, outputs);
            }
            for server in self.servers.values_mut() {
                server.turn(&BTreeMap::new(), self.now);
            }
            for _ in 0..self.queue.len() {
                let (from, to, message) = self.queue.pop_front().unwrap();
                let dice = next(&mut self.seed) % 1000;
                if dice as f64 >= self.drops * 1000.0 {
                    self.message(from, to, message);
                }
            }
        }
    }

    fn connects(&mut self, most: Duration) -> Duration {
        let began = self.now;
        while self.now - began < most {
            self.run(STEP);
            if [X, Y].iter().all(|end| self.way(*end).is_some()) {
                return self.now - began;
            }
        }
        panic!("no way after {most:?}");
    }

    fn way(&self, of: NodeId) -> Option<Way> {
        let other = if of == X { Y } else { X };
        self.clients[&of].ways().get(&other).copied()
    }

    fn relay(&self, of: NodeId) -> NodeId {
        match self.way(of) {
            Some(Way::Relayed(relay)) => relay,
            way => panic!("{way:?}"),
        }
    }

    fn begin_to_measure(&mut self) {
        (self.lost, self.gap, self.last) = (0, Duration::ZERO, self.now);
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
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
        prop_assert_eq!(world.relay(X), world.relay(Y), "both use one relay");
        prop_assert!(world.forwarded > 0);
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
    fn a_direct_way_is_found_again_within_a_minute_and_loses_nothing(seed: u64, drops in 0u8..5) {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(7));
        world.begin_to_measure();
        (world.direct, world.drops) = (true, f64::from(drops) / 100.0);
        world.run(DIRECT_EVERY * 2 + seconds(5));
        prop_assert_eq!((world.way(X), world.way(Y)), (Some(Way::Punched), Some(Way::Punched)));
        prop_assert_eq!(world.lost, 0);
        let before = world.forwarded;
        world.run(seconds(60));
        prop_assert_eq!(world.forwarded, before, "nothing goes through the relay any more");
    }

    #[test]
    fn whatever_happens_there_is_a_way_20_s_after_there_is_one(seed: u64, events in prop::collection::vec(0u8..5, 1..8)) {
        let mut world = World::new(seed);
        for event in events {
            match event {
                0 => world.direct = !world.direct,
                1 => drop(world.servers.remove(&Z[0])),
                2 => drop(world.servers.remove(&Z[1])),
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
        // The keys of a session that broke have to expire.
        world.run(seconds(250));
        world.begin_to_measure();
        world.run(seconds(10));
        prop_assert!(world.gap <= seconds(2), "{:?} {:?}", world.way(X), world.gap);
    }
}

#[test]
fn a_direct_way_is_taken_before_a_relay_is_needed() {
    let mut world = World::new(7);
    world.tunnels.values_mut().for_each(|tunnel| {
        tunnel.endpoint = SocketAddr::new(Ipv4Addr::new(192, 168, 0, 1).into(), WIREGUARD);
    });
    world.direct = true;
    let took = world.connects(seconds(20));
    assert!(took < seconds(11), "{took:?}");
    assert_eq!((world.way(X), world.forwarded), (Some(Way::Punched), 0));
}

#[test]
fn relays_that_are_off_are_not_used() {
    let mut world = World::new(7);
    world.uses = false;
    world.run(seconds(120));
    assert_eq!((world.way(X), world.forwarded), (None, 0));
    assert!(world.servers.values().all(|server| server.pairs() == 0));
}

#[test]
fn a_relay_that_has_forgotten_a_pair_gets_it_again() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(10));
    let relay = world.relay(X);
    world.servers.insert(relay, Server::default());
    world.begin_to_measure();
    world.run(seconds(20));
    assert_eq!((world.relay(X), world.relay(Y)), (relay, relay));
    assert!(world.gap <= seconds(2), "{:?}", world.gap);
}

#[test]
fn the_only_relay_may_forget_everything() {
    let mut world = World::new(5);
    world.servers.remove(&Z[1]);
    world.connects(seconds(20));
    world.run(seconds(10));
    world.servers.insert(Z[0], Server::default());
    world.begin_to_measure();
    world.run(seconds(20));
    assert_eq!((world.relay(X), world.relay(Y)), (Z[0], Z[0]));
    assert!(world.gap.max(world.now - world.last) <= seconds(3), "{:?}", world.gap);
}

#[test]
fn a_direct_way_that_only_messages_go_is_left_again() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(7));
    (world.direct, world.deceives) = (true, true);
    world.begin_to_measure();
    world.run(DIRECT_EVERY * 2);
    assert!(world.lost > 0, "it was tried");
    assert!(world.gap <= seconds(7), "{:?}", world.gap);
    assert!(matches!((world.way(X), world.way(Y)), (Some(Way::Relayed(_)), Some(Way::Relayed(_)))));
}

#[test]
fn an_end_behind_a_relays_nat_is_not_taken_for_relayed() {
    let now = Instant::now();
    let at = SocketAddr::new(ip(Z[0]), FIRST_PORT + 3);
    let age = Some(Duration::ZERO);
    for (published, way) in [(Some(at), Way::Direct), (None, Way::Relayed(Z[0]))] {
        let mut client = Client::new(X);
        let relay = Seen {
            id: Z[0],
            handshake_age: age,
            endpoint: Some(place(Z[0])),
            relays: true,
            ..Seen::default()
        };
        let other = Seen { id: Y, handshake_age: age, endpoint: Some(at), published, ..Seen::default() };
        client.see(vec![relay, other], true, false, now);
        client.turn(now, 1, &mut || 4);
        assert_eq!(client.ways()[&Y], way);
    }
}

#[test]
fn recorded_messages_change_nothing() {
    let now = Instant::now();
    let mut client = Client::new(X);
    let seen = |id, relays| Seen { id, endpoint: Some(place(id)), relays, ..Seen::default() };
    client.see(vec![seen(Y, false), seen(Z[0], true)], true, true, now);
    let message = |kind, sender, other, sequence| Message { kind, sequence, ..ask(sender, other) };
    let hears = |client: &mut Client, message| client.hear(&message, place(77), 1, now).len();
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 9_000_000)), 1);
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 7_000_001)), 1, "by another way");
    assert_eq!(hears(&mut client, message(Kind::Try, Y, X, 6_999_999)), 0, "recorded");
    // Invitations bear the numbers of who has asked.
    client.see(vec![seen(Y, false), seen(Z[0], true)], false, true, now);
    hears(&mut client, message(Kind::Invite, Z[0], Y, 5_000_000));
    client.see(vec![seen(Y, false), seen(Z[0], true)], true, true, now);
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

fn ask(sender: NodeId, other: NodeId) -> Message {
    Message { kind: Kind::Ask, flags: 0, nonce: 5, sequence: 1, sender, other, token: 0, port: 0 }
}

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

#[test]
fn a_relays_next_agent_goes_on_with_its_pairs() {
    let mut world = World::new(3);
    world.connects(seconds(20));
    world.run(seconds(3));
    let relay = world.relay(X);
    let table = world.servers[&relay].table();
    let mut seed = 9;
    let adopted = Server::adopted(&table, world.now, &mut || next(&mut seed));
    assert_eq!(adopted.table(), table);
    world.servers.insert(relay, adopted);
    world.begin_to_measure();
    world.run(seconds(30));
    assert_eq!((world.relay(X), world.lost), (relay, 0));
}
