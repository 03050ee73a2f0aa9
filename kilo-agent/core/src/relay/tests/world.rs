//! A small world: two ends behind NATs, relays, and WireGuard as far as it matters.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use kilo_common::relay::{Kind, Message, is_port};

use super::super::*;

pub(super) const X: NodeId = 11;
pub(super) const Y: NodeId = 22;
pub(super) const Z: [NodeId; 3] = [33, 44, 55];
pub(super) const WIREGUARD: u16 = 51_820;
pub(super) const STEP: Duration = Duration::from_millis(100);

pub(super) const fn own(uses_relays: bool, is_behind_nat: bool) -> OwnEnd {
    OwnEnd { uses_relays, is_behind_nat }
}

pub(super) fn ip(id: NodeId) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, u8::try_from(id).unwrap()).into()
}

pub(super) fn endpoint_of(id: NodeId) -> SocketAddr {
    SocketAddr::new(ip(id), WIREGUARD)
}

/// What is wrong with a relay whose tunnels with both ends worked a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// Nothing reaches it, and nothing comes from it.
    Dead,
    /// A firewall lets only WireGuard's port through.
    Closed,
    /// It has no room for pairs, or does not reach one end.
    Refuses,
    /// Its agent uses no relays.
    Off,
}

/// The three relays in the order in which the pair asks them.
pub(super) fn ranked() -> [NodeId; 3] {
    let mut relays = Z;
    relays.sort_unstable_by_key(|relay| rank(X, Y, *relay));
    relays
}

/// One end's WireGuard towards the other.
#[derive(Clone, Copy)]
pub(super) struct Tunnel {
    pub(super) endpoint: SocketAddr,
    handshake: Option<Instant>,
    sent: u64,
    received: u64,
    /// When something was last received.
    heard: Instant,
    attempt: Option<Instant>,
}

impl Tunnel {
    fn receives(&mut self, bytes: u64, now: Instant) {
        self.received += bytes;
        self.heard = now;
    }
}

pub(super) struct World {
    pub(super) now: Instant,
    /// Wall clock in microseconds.
    pub(super) wall: u64,
    pub(super) clients: BTreeMap<NodeId, Client>,
    pub(super) servers: BTreeMap<NodeId, Server>,
    pub(super) broken: BTreeMap<NodeId, Broken>,
    /// Relays that have taken their offer back, and hear nobody any more.
    pub(super) withdrawn: Vec<NodeId>,
    /// Ends that do not know yet that a relay has taken its offer back.
    pub(super) unaware: Vec<NodeId>,
    /// Ends with which relays have no working tunnel.
    pub(super) apart: Vec<NodeId>,
    /// Relays that nothing from this end reaches, while the end hears them.
    pub(super) deaf: Vec<(NodeId, NodeId)>,
    pub(super) tunnels: BTreeMap<NodeId, Tunnel>,
    pub(super) queue: VecDeque<(NodeId, SocketAddr, Message)>,
    /// X and Y reach each other without a relay.
    pub(super) direct: bool,
    /// Only messages pass: whatever else goes directly is lost.
    pub(super) deceives: bool,
    /// Each end publishes where it is, as with IPv6; else its address behind its NAT.
    pub(super) is_published: bool,
    /// Ends publish where they are, but not as their endpoint.
    pub(super) also_publishes: bool,
    /// Both ends use relays.
    pub(super) uses: bool,
    /// Y refuses relays, and the others know.
    pub(super) refuses: bool,
    /// Changes the ports that both NATs give for a destination.
    pub(super) nat: u16,
    pub(super) seed: u64,
    /// Datagrams of data from X that Y did not get, and the longest time without one.
    pub(super) lost: u64,
    pub(super) gap: Duration,
    pub(super) last: Instant,
    pub(super) forwarded: u64,
    pub(super) drops: f64,
    /// Forwarded datagrams by relay.
    by_relay: BTreeMap<NodeId, u64>,
    /// Data take a step to arrive, so that each end sends before it has heard the other.
    pub(super) is_long: bool,
    /// Data in flight: since when, to whom, and from where.
    flight: Vec<(Instant, NodeId, SocketAddr)>,
}

pub(super) fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 16
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let start = Instant::now();
        let tunnel = |to| Tunnel {
            endpoint: endpoint_of(to),
            handshake: None,
            sent: 0,
            received: 0,
            heard: start,
            attempt: None,
        };
        Self {
            now: start,
            wall: 0,
            clients: [X, Y].map(|id| (id, Client::new(id))).into(),
            servers: Z.map(|id| (id, Server::default())).into(),
            broken: BTreeMap::new(),
            withdrawn: Vec::new(),
            unaware: Vec::new(),
            apart: Vec::new(),
            deaf: Vec::new(),
            tunnels: [(X, tunnel(Y)), (Y, tunnel(X))].into(),
            queue: VecDeque::new(),
            direct: false,
            deceives: false,
            is_published: false,
            also_publishes: false,
            uses: true,
            refuses: false,
            nat: 1,
            seed,
            lost: 0,
            gap: Duration::ZERO,
            last: start,
            forwarded: 0,
            drops: 0.0,
            by_relay: BTreeMap::new(),
            is_long: false,
            flight: Vec::new(),
        }
    }

    /// The source after the NAT.
    pub(super) fn source(&self, from: NodeId, to: SocketAddr) -> SocketAddr {
        let by_destination = (to.port() ^ u16::try_from(from).unwrap()) % 5_000 + self.nat * 7;
        SocketAddr::new(ip(from), if is_port(to.port()) { 40_000 + by_destination } else { WIREGUARD })
    }

    /// Who gets a datagram, and its source as seen there.
    pub(super) fn arrives(&mut self, from: NodeId, to: SocketAddr) -> Option<(NodeId, SocketAddr)> {
        let source = self.source(from, to);
        let is_deaf = self.deaf.iter().any(|(relay, end)| *end == from && ip(*relay) == to.ip());
        if is_deaf { None } else { self.delivered(source, to, 0) }
    }

    pub(super) fn delivered(
        &mut self,
        source: SocketAddr,
        to: SocketAddr,
        hops: u8,
    ) -> Option<(NodeId, SocketAddr)> {
        assert!(hops < 2, "a loop");
        for relay in Z {
            if ip(relay) == to.ip() {
                let server = self.servers.get(&relay).filter(|_| self.lets(relay, to.port()))?;
                if to.port() == WIREGUARD {
                    return Some((relay, source));
                }
                let table = server.table(0);
                let port = table.get(&to.port())?;
                let is_bound = port.from == mapped(source.ip()) && port.from_port == source.port();
                if !is_bound || port.to_port == 0 {
                    return None;
                }
                self.forwarded += 1;
                *self.by_relay.entry(relay).or_insert(0) += 1;
                let on = SocketAddr::new(IpAddr::from(port.to).to_canonical(), port.to_port);
                return self.delivered(SocketAddr::new(ip(relay), port.by_port), on, hops + 1);
            }
        }
        let from_relay = Z.iter().any(|relay| ip(*relay) == source.ip());
        let end = [X, Y].into_iter().find(|end| ip(*end) == to.ip())?;
        (from_relay || self.direct && to.port() == WIREGUARD).then_some((end, source))
    }

    /// Whether datagrams to this port reach the relay.
    fn lets(&self, relay: NodeId, port: u16) -> bool {
        match self.broken.get(&relay) {
            Some(Broken::Dead) => false,
            Some(Broken::Closed) => port == WIREGUARD,
            _ => true,
        }
    }

    pub(super) fn seen(&self, own: NodeId) -> Vec<Seen> {
        let other = if own == X { Y } else { X };
        let tunnel = &self.tunnels[&own];
        let behind_nat = SocketAddr::new(Ipv4Addr::new(10, 0, 0, 1).into(), WIREGUARD);
        let mut seen = vec![Seen {
            is_idle: false,
            id: other,
            handshake_age: tunnel.handshake.map(|at| self.now - at),
            sent: tunnel.sent,
            received: tunnel.received,
            endpoint: Some(tunnel.endpoint),
            published: Some(if self.is_published { endpoint_of(other) } else { behind_nat }),
            also_published: if self.also_publishes { vec![endpoint_of(other)] } else { Vec::new() },
            candidates: vec![endpoint_of(other)],
            relays: false,
            refuses: other == Y && self.refuses,
        }];
        seen.extend(Z.iter().filter(|relay| self.servers.contains_key(relay)).map(|relay| Seen {
            id: *relay,
            handshake_age: Some(Duration::from_secs(5)),
            endpoint: Some(endpoint_of(*relay)),
            published: Some(endpoint_of(*relay)),
            relays: !self.withdrawn.contains(relay) || self.unaware.contains(&own),
            ..Seen::default()
        }));
        seen
    }

    pub(super) fn take(&mut self, from: NodeId, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Send { to, message, .. } => self.queue.push_back((from, to, message)),
                Output::Keep { to, .. } | Output::Move { to, .. } => {
                    self.tunnels.get_mut(&from).unwrap().endpoint = to;
                }
            }
        }
    }

    pub(super) fn message(&mut self, from: NodeId, to: SocketAddr, message: Message) {
        let source = self.source(from, to);
        let mut random = next(&mut self.seed);
        let relay = Z.into_iter().find(|relay| ip(*relay) == to.ip());
        if let Some(relay) = relay.filter(|_| message.kind == Kind::Ask) {
            let now = self.now;
            let heard = Heard { source, local: ip(relay), port: to.port(), ifindex: 2 };
            let broken = self.broken.get(&relay).copied();
            let hears = broken != Some(Broken::Off) && !self.withdrawn.contains(&relay);
            let lets = self.lets(relay, to.port()) && hears && !self.deaf.contains(&(relay, from));
            let Some(server) = self.servers.get_mut(&relay).filter(|_| lets) else { return };
            if to.port() != WIREGUARD && !server.table(0).contains_key(&to.port()) {
                // The program leaves it to the stack.
                return;
            }
            let is_near = |end: &NodeId| !(self.apart.contains(end) || self.refuses && *end == Y);
            let reachable = [X, Y].into_iter().filter(is_near).map(|end| (end, endpoint_of(end))).collect();
            let mut seed = random;
            let outputs = server.hear(
                &message,
                heard,
                (relay, &reachable),
                &mut |_| broken != Some(Broken::Refuses),
                &mut || next(&mut seed),
                now,
            );
            self.take(relay, outputs);
            return;
        }
        let from_relay = Z.contains(&from);
        let arrived = if from_relay && self.servers.contains_key(&from) {
            [X, Y].into_iter().find(|end| ip(*end) == to.ip()).map(|end| (end, endpoint_of(from)))
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
    pub(super) fn traffic(&mut self, from: NodeId) {
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
        if fresh && self.is_long {
            self.flight.push((now, to, source));
            return;
        }
        let theirs = self.tunnels.get_mut(&to).unwrap();
        theirs.endpoint = source;
        theirs.receives(148, now);
        if !fresh {
            // Its answer takes the same path back.
            theirs.handshake = Some(now);
            let back = self.arrives(to, source).filter(|(end, _)| *end == from);
            if back.is_some() {
                let own = self.tunnels.get_mut(&from).unwrap();
                own.handshake = Some(now);
                own.receives(92, now);
            }
        } else if from == X {
            self.gap = self.gap.max(self.now - self.last);
            self.last = self.now;
        }
    }

    /// Delivers what was sent to this end before.
    fn land(&mut self, end: NodeId) {
        let now = self.now;
        let (landed, under_way) =
            self.flight.drain(..).partition(|(sent, to, _)| *to == end && *sent + STEP < now);
        self.flight = under_way;
        let landed: Vec<_> = landed;
        for (_, to, source) in landed {
            let theirs = self.tunnels.get_mut(&to).unwrap();
            theirs.endpoint = source;
            theirs.receives(148, now);
            if to == Y {
                (self.gap, self.last) = (self.gap.max(now - self.last), now);
            }
        }
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += STEP;
            self.wall += 100_000;
            // WireGuard renews its keys where both ends hear each other.
            let works = self.tunnels.values().all(|end| self.now - end.heard < Duration::from_secs(15));
            for tunnel in self.tunnels.values_mut().filter(|_| works) {
                if tunnel.handshake.is_some_and(|at| self.now - at > Duration::from_secs(120)) {
                    tunnel.handshake = Some(self.now);
                }
            }
            // One end sends before it hears the other, or the other way round.
            let is_first = next(&mut self.seed).is_multiple_of(2);
            for end in [X, Y] {
                if is_first == (end == X) {
                    self.land(end);
                }
                self.traffic(end);
                self.land(end);
            }
            for end in [X, Y] {
                let uses = self.uses && !(end == Y && self.refuses);
                let (seen, now) = (self.seen(end), self.now);
                // Clocks are not equal.
                let wall = self.wall + end * 86_400_000_000;
                let client = self.clients.get_mut(&end).unwrap();
                client.see(seen, own(uses, true), now);
                let mut seed = self.seed;
                let outputs = client.turn(now, wall, &mut || next(&mut seed));
                self.seed = seed;
                self.take(end, outputs);
            }
            for (relay, server) in &mut self.servers {
                server.set_relays(!self.withdrawn.contains(relay), self.now);
                server.end_pairs_of(|end| end == Y && self.refuses);
                server.turn(&BTreeMap::new(), self.now, self.wall);
            }
            for _ in 0..self.queue.len() {
                let (from, to, message) = self.queue.pop_front().unwrap();
                let dice = next(&mut self.seed) % 1000;
                if dice as f64 >= self.drops * 1000.0 {
                    self.message(from, to, message);
                }
            }
        }
        self.gap = self.gap.max(self.now - self.last);
    }

    pub(super) fn connects(&mut self, most: Duration) -> Duration {
        let began = self.now;
        while self.now - began < most {
            self.run(STEP);
            if [X, Y].iter().all(|end| self.path(*end).is_some()) {
                return self.now - began;
            }
        }
        panic!("no path after {most:?}");
    }

    pub(super) fn path(&self, of: NodeId) -> Option<Path> {
        let other = if of == X { Y } else { X };
        self.clients[&of].paths().get(&other).copied()
    }

    pub(super) fn relay(&self, of: NodeId) -> NodeId {
        match self.path(of) {
            Some(Path::Relayed(relay)) => relay,
            path => panic!("{path:?}"),
        }
    }

    pub(super) fn forwarded_by(&self, relay: NodeId) -> u64 {
        self.by_relay.get(&relay).copied().unwrap_or(0)
    }

    pub(super) fn begin_to_measure(&mut self) {
        (self.lost, self.gap, self.last) = (0, Duration::ZERO, self.now);
    }
}

pub(super) fn ask(sender: NodeId, other: NodeId) -> Message {
    Message { kind: Kind::Ask, flags: 0, nonce: 5, sequence: 1, sender, other, token: 0, port: 0 }
}
