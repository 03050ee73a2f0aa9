//! A gateway's end of its tunnels with other locations: each message goes to the pair that it is about.

use std::{collections::BTreeMap, net::SocketAddr, time::Instant};

use kilo_common::relay::{Kind, Message};

use super::{
    NodeId, Output, OwnEnd, Path, Seen,
    fresh::{self, Latest},
    numbers::Numbers,
    pair::Pair,
    turn::{Turn, message_to},
};

/// All pairs of this gateway: one with each gateway of another location.
#[derive(Clone, Debug)]
pub struct Client {
    own: NodeId,
    /// Relays are used.
    uses_relays: bool,
    /// Other nodes see this one at another endpoint than it publishes.
    is_behind_nat: bool,
    seen: BTreeMap<NodeId, Seen>,
    pairs: BTreeMap<NodeId, Pair>,
    numbers: Numbers,
    latest: Latest,
}

impl Client {
    /// The client of the node with this id.
    pub fn new(own: NodeId) -> Self {
        Self {
            own,
            uses_relays: false,
            is_behind_nat: false,
            seen: BTreeMap::new(),
            pairs: BTreeMap::new(),
            numbers: Numbers::default(),
            latest: Latest::default(),
        }
    }

    /// Takes what the device shows: all gateways of other locations.
    pub fn see(&mut self, seen: Vec<Seen>, own: OwnEnd, now: Instant) {
        let OwnEnd { uses_relays, is_behind_nat } = own;
        if uses_relays && !self.uses_relays {
            // Tries that were due before were not sent.
            self.pairs.values_mut().for_each(Pair::try_anew);
        }
        if !uses_relays {
            self.pairs.values_mut().for_each(Pair::forget_relays);
        }
        (self.uses_relays, self.is_behind_nat) = (uses_relays, is_behind_nat);
        let others =
            seen.into_iter().filter(|seen| seen.id != self.own).map(|seen| (seen.id, seen)).collect();
        let before = std::mem::replace(&mut self.seen, others);
        self.pairs.retain(|id, _| self.seen.contains_key(id));
        self.latest.keep(|id| self.seen.contains_key(&id));
        for seen in self.seen.values() {
            let pair = self.pairs.entry(seen.id).or_insert_with(|| Pair::new(seen, now));
            pair.see(seen, now);
            if before.get(&seen.id).is_some_and(|before| before.candidates != seen.candidates) {
                pair.hurry(now);
            }
        }
    }

    /// How each pair whose tunnel works is connected.
    pub fn paths(&self) -> BTreeMap<NodeId, Path> {
        let working = self.seen.values().filter(|seen| seen.is_fresh());
        let path = |seen: &Seen| {
            let pair = self.pairs.get(&seen.id)?;
            let is_elsewhere = seen
                .endpoint
                .is_some_and(|at| seen.published != Some(at) && !seen.also_published.contains(&at));
            Some(match pair.relayed_by(seen.endpoint) {
                Some(relay) => Path::Relayed(relay),
                None if self.is_behind_nat && is_elsewhere => Path::Punched,
                None => Path::Direct,
            })
        };
        working.filter_map(|seen| Some((seen.id, path(seen)?))).collect()
    }

    /// Endpoints of peers that are not where the mesh says; true: through a relay.
    pub fn endpoints(&self) -> BTreeMap<NodeId, (SocketAddr, bool)> {
        self.pairs.iter().filter_map(|(id, pair)| Some((*id, pair.endpoint()?))).collect()
    }

    /// Whether the tunnel with this end goes through a relay, as far as the device shows.
    pub fn is_relayed(&self, id: NodeId) -> bool {
        let seen = self.pairs.get(&id).zip(self.seen.get(&id));
        seen.is_some_and(|(pair, seen)| pair.relay_at(seen.endpoint).is_some())
    }

    /// Number of repeated messages that were refused so far.
    pub const fn refused(&self) -> u64 {
        self.latest.refused
    }

    /// Whether anything is in progress that cannot wait for a second.
    pub fn is_busy(&self) -> bool {
        self.uses_relays && self.pairs.values().any(Pair::is_busy)
    }

    /// Whether an endpoint was just moved that late packets may move back, so that turns are due at once.
    pub fn insists(&self, now: Instant) -> bool {
        self.uses_relays && self.pairs.values().any(|pair| pair.insists(now).is_some())
    }

    /// Handles a message whose tag was right.
    pub fn hear(&mut self, message: &Message, source: SocketAddr, random: u64, now: Instant) -> Vec<Output> {
        let from = message.sender;
        let Some(sender) = self.seen.get(&from) else { return Vec::new() };
        let is_recent = match message.kind {
            // Answers carry the numbers of what they answer.
            Kind::Offer | Kind::Tried => {
                let latest = self.numbers.latest();
                let is_recent = message.sequence <= latest && fresh::is_recent(message.sequence, latest);
                self.latest.refused += u64::from(!is_recent);
                is_recent
            }
            Kind::Ask => false,
            Kind::Invite if !self.pairs.contains_key(&message.other) => false,
            Kind::Try if message.other != self.own => false,
            Kind::Invite | Kind::Try => {
                self.latest.hear((from, message.other), message.sequence, now).is_some()
            }
        };
        if !is_recent {
            return Vec::new();
        }
        match message.kind {
            Kind::Ask => Vec::new(),
            Kind::Offer => {
                if let Some(pair) = self.pairs.get_mut(&message.other) {
                    let is_asked_for = pair.offered(message, now);
                    self.latest.refused += u64::from(!is_asked_for);
                }
                Vec::new()
            }
            Kind::Invite => {
                let refuses = self.seen.get(&message.other).is_none_or(|other| other.refuses);
                let endpoint = sender.endpoint.filter(|_| sender.relays && self.uses_relays && !refuses);
                let is_relayed = self.is_relayed(from);
                let pair = self.pairs.get_mut(&message.other);
                if let (Some(endpoint), Some(pair), false) = (endpoint, pair, is_relayed) {
                    pair.invited((from, endpoint), random, now);
                }
                Vec::new()
            }
            Kind::Tried if message.other != self.own => Vec::new(),
            Kind::Try => self.answer_try(message, source, now).into_iter().collect(),
            Kind::Tried => self.answered(message, source, now).into_iter().collect(),
        }
    }

    /// Answers a try of the other end on the path by which it came.
    fn answer_try(&mut self, message: &Message, source: SocketAddr, now: Instant) -> Option<Output> {
        let pair = self.pairs.get_mut(&message.sender)?;
        if !pair.tried(message, source, now) {
            return None;
        }
        let (nonce, sequence) = (message.nonce, message.sequence);
        let answer = message_to(Kind::Tried, (self.own, message.sender), nonce, sequence);
        Some(Output::Send { node: message.sender, to: source, message: answer })
    }

    /// The other end has answered a try: through a relay, which therefore works, or directly.
    fn answered(&mut self, message: &Message, source: SocketAddr, now: Instant) -> Option<Output> {
        let node = message.sender;
        let pair = self.pairs.get_mut(&node)?;
        pair.answered(message, source, now).then_some(Output::Move { node, to: source })
    }

    /// Does what is due; `wall` is the wall clock in microseconds, which need not be right.
    pub fn turn(&mut self, now: Instant, wall: u64, random: &mut impl FnMut() -> u64) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.numbers.read_clocks(now, wall);
        let relayed: Vec<NodeId> = self.pairs.keys().copied().filter(|id| self.is_relayed(*id)).collect();
        // A node that is itself reached through a relay cannot relay: paths could loop.
        let relays = || {
            let offers = self.seen.values().filter(|seen| self.uses_relays && seen.relays && seen.is_fresh());
            let near = offers.filter(|seen| !relayed.contains(&seen.id));
            near.filter_map(|seen| Some((seen.id, seen.endpoint?)))
        };
        let relays: BTreeMap<NodeId, SocketAddr> = relays().collect();
        let none = BTreeMap::new();
        for (id, pair) in &mut self.pairs {
            let Some(seen) = self.seen.get(id) else { continue };
            let mut turn = Turn {
                ends: (self.own, *id),
                seen,
                relays: &relays,
                numbers: &mut self.numbers,
                outputs: &mut outputs,
                now,
            };
            if seen.refuses {
                pair.leave_relays(&mut turn);
                turn.relays = &none;
            }
            pair.adopt(&turn, random);
            pair.lease(&mut turn, random);
            if self.uses_relays {
                pair.choose(&mut turn);
                turn.outputs.extend(pair.insists(now).map(|to| Output::Keep { node: *id, to }));
            }
            pair.try_directly(&mut turn, random);
        }
        outputs
    }
}
