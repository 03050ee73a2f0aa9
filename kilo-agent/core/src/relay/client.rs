//! A gateway's end of each of its tunnels with other locations: how it is connected.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use kilo_common::relay::{Kind, Message, START};

use super::{
    DIRECT_EVERY, DIRECT_SELDOM, INSISTS, LASTS, NodeId, Output, OwnEnd, PREPARE, SILENT, SILENT_FOR_GOOD,
    SILENT_SESSION, Seen, TRY, TRY_SELDOM, Way,
    fresh::{self, Latest},
    lease::{Lease, Use},
    leases::Leases,
    round::{self, Round},
    sources::Sources,
    trial::{KEEPALIVE, Trial},
    turn::{Turn, message_to},
};

/// Time between two rounds where an end has been silent for long.
const PAUSE: Duration = Duration::from_secs(30);
/// So many answers in one round show that a direct path is good enough: to leave a relay for it, and, without
/// a relay, to start with it.
const ENOUGH: u32 = 3;
const ENOUGH_TO_BEGIN: u32 = 2;
/// New places of a silent end are tried as eagerly as the first ones when those have been tried for so long.
const HURRIES_AFTER: Duration = Duration::from_secs(600);
/// Minimum time between two rounds that the other end asks for.
const ASKED_EVERY: Duration = Duration::from_secs(10);
/// How long relays are kept after they were left, or after one has sent an invitation.
const LINGERS: Duration = Duration::from_secs(20);
/// Minimum time between two changes to another port of the relay in use.
const FOLLOWS: Duration = Duration::from_secs(1);
/// How long the device takes to settle after an endpoint was moved.
const SETTLES: Duration = Duration::from_secs(5);
/// Maximum number of answers to tries, per second and pair.
const ANSWERS: u32 = 40;
/// How much longer an established session is given than one that shakes hands.
const SESSION_LONGER: Duration = SILENT_SESSION.saturating_sub(SILENT);
/// Bytes of three handshake attempts.
const ATTEMPTS: u64 = 3 * 148;

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
    sequence: u64,
    latest: Latest,
}

#[derive(Clone, Debug)]
struct Pair {
    /// Since when nothing answers what is sent, and how many bytes had been sent by then.
    unanswered: Option<(Instant, u64)>,
    sent: u64,
    received: u64,
    age: Option<Duration>,
    /// When the device was last read.
    looked: Instant,
    leases: Leases,
    /// The relay in use.
    by: Option<NodeId>,
    /// Its port, to which the endpoint was moved.
    at: Option<SocketAddr>,
    /// The relay that was in use before, and its port.
    left: Option<(NodeId, SocketAddr)>,
    /// The endpoint that answered tries.
    punched: Option<SocketAddr>,
    /// The endpoint that the other end publishes.
    published: Option<SocketAddr>,
    /// When its endpoint was last changed.
    moved: Option<Instant>,
    /// The endpoint is kept there until then: late packets may still arrive by the former path.
    insists: Option<Instant>,
    /// A direct path is used instead of a relay, and is not known to work yet.
    trial: Option<Trial>,
    /// Leases are kept until then, needed or not.
    keeps: Option<Instant>,
    /// Endpoints its tries came from.
    places: Sources,
    nonce: u64,
    round: Option<Round>,
    next_round: Option<Instant>,
    last_round: Option<Instant>,
    /// When the first round of this silence began.
    first_round: Option<Instant>,
    interval: Duration,
    /// Start of a second, and the answers given in it.
    answers: (Instant, u32),
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
            sequence: 0,
            latest: Latest::default(),
        }
    }

    /// Takes what the device shows: all gateways of other locations.
    pub fn see(&mut self, seen: Vec<Seen>, own: OwnEnd, now: Instant) {
        let OwnEnd { uses_relays, is_behind_nat } = own;
        if uses_relays && !self.uses_relays {
            // Tries that were due before were not sent.
            self.pairs.values_mut().for_each(|pair| pair.first_round = None);
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
            if before.get(&seen.id).is_some_and(|before| before.places != seen.places) {
                pair.hurry(now);
            }
        }
    }

    /// How each pair whose tunnel works is connected.
    pub fn ways(&self) -> BTreeMap<NodeId, Way> {
        let working = self.seen.values().filter(|seen| seen.is_fresh());
        let way = |seen: &Seen| {
            let pair = self.pairs.get(&seen.id)?;
            let is_elsewhere =
                seen.endpoint.is_some_and(|at| seen.published != Some(at) && !seen.says.contains(&at));
            // While a direct path is on trial, late packets may move WireGuard back and forth.
            let on_trial = pair.left.filter(|_| pair.trial.is_some()).map(|(relay, _)| relay);
            Some(match pair.relay_at(seen.endpoint).or(on_trial) {
                Some(relay) => Way::Relayed(relay),
                None if self.is_behind_nat && is_elsewhere => Way::Punched,
                None => Way::Direct,
            })
        };
        working.filter_map(|seen| Some((seen.id, way(seen)?))).collect()
    }

    /// Endpoints of peers that are not where the mesh says; true: through a relay.
    pub fn endpoints(&self) -> BTreeMap<NodeId, (SocketAddr, bool)> {
        let endpoint = |pair: &Pair| match pair.by {
            // A relay that has just refused may still relay, and the endpoint from the mesh does not work.
            Some(_) => Some((pair.at?, true)),
            None => Some((pair.punched?, false)),
        };
        self.pairs.iter().filter_map(|(id, pair)| Some((*id, endpoint(pair)?))).collect()
    }

    /// Whether the tunnel with this end goes through a relay, as far as the device shows.
    pub fn is_relayed(&self, id: NodeId) -> bool {
        let seen = self.pairs.get(&id).zip(self.seen.get(&id));
        seen.is_some_and(|(pair, seen)| pair.relay_at(seen.endpoint).is_some())
    }

    /// Number of replayed messages that were refused so far.
    pub const fn refused(&self) -> u64 {
        self.latest.refused
    }

    /// Whether anything is in progress that cannot wait for a second.
    pub fn is_busy(&self) -> bool {
        self.uses_relays && self.pairs.values().any(|pair| !pair.leases.is_empty() || pair.round.is_some())
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
                let is_recent =
                    message.sequence <= self.sequence && fresh::is_recent(message.sequence, self.sequence);
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
                let lease = self.pairs.get_mut(&message.other).and_then(|pair| pair.leases.get_mut(from));
                if let Some(lease) = lease {
                    lease.offered(message, now);
                }
                Vec::new()
            }
            Kind::Invite => {
                let refuses = self.seen.get(&message.other).is_none_or(|other| other.refuses);
                let place = sender.endpoint.filter(|_| sender.relays && self.uses_relays && !refuses);
                let is_relayed = self.is_relayed(from);
                let pair = self.pairs.get_mut(&message.other);
                if let (Some(place), Some(pair), false) = (place, pair, is_relayed) {
                    pair.keeps = pair.keeps.max(Some(now + LINGERS));
                    pair.leases.invited((from, place), pair.by, random, now);
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
        let own = self.own;
        let pair = self.pairs.get_mut(&message.sender)?;
        if !pair.admit_answer(now) {
            return None;
        }
        if !pair.is_relays(source) {
            pair.places.heard(source, message.sequence, now);
        }
        let may = pair.last_round.is_none_or(|last| now.saturating_duration_since(last) >= ASKED_EVERY);
        if message.flags & START != 0 && pair.by.is_some() && may {
            pair.next_round = Some(now);
        }
        let (nonce, sequence) = (message.nonce, message.sequence);
        let answer = message_to(Kind::Tried, (own, message.sender), nonce, sequence);
        Some(Output::Send { node: message.sender, to: source, message: answer })
    }

    /// The other end has answered a try: through a relay, which therefore works, or directly.
    fn answered(&mut self, message: &Message, source: SocketAddr, now: Instant) -> Option<Output> {
        let node = message.sender;
        let pair = self.pairs.get_mut(&node).filter(|pair| pair.nonce == message.nonce)?;
        if let Some(relay) = pair.leases.of(source) {
            if let Some(lease) = pair.leases.get_mut(relay).filter(|lease| lease.address() == Some(source)) {
                lease.passed(now);
            }
            return None;
        }
        if pair.is_relays(source) {
            return None;
        }
        let is_relayed = pair.by.is_some();
        let round = pair.round.as_mut()?;
        if round.answered(message.sequence, source)? < if is_relayed { ENOUGH } else { ENOUGH_TO_BEGIN } {
            return None;
        }
        pair.use_directly(source, now);
        pair.insists = is_relayed.then(|| now + INSISTS);
        Some(Output::Move { node, to: source })
    }

    /// Does what is due; `wall` is the wall clock in microseconds, which need not be right.
    pub fn turn(&mut self, now: Instant, wall: u64, random: &mut impl FnMut() -> u64) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.sequence = self.sequence.max(wall);
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
                sequence: &mut self.sequence,
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

impl Pair {
    fn new(seen: &Seen, now: Instant) -> Self {
        Self {
            unanswered: (seen.sent > 0 && seen.handshake_age.is_none()).then_some((now, 0)),
            sent: seen.sent,
            received: seen.received,
            age: seen.handshake_age,
            looked: now,
            leases: Leases::default(),
            by: None,
            at: None,
            left: None,
            punched: None,
            published: seen.published,
            moved: None,
            insists: None,
            trial: None,
            keeps: None,
            places: Sources::default(),
            nonce: 0,
            round: None,
            next_round: None,
            last_round: None,
            first_round: None,
            interval: DIRECT_EVERY,
            answers: (now, 0),
        }
    }

    fn see(&mut self, seen: &Seen, now: Instant) {
        let is_new = match (seen.handshake_age, self.age) {
            (Some(now), Some(before)) => now < before,
            (age, _) => age.is_some(),
        };
        let is_answered =
            seen.is_fresh() && (is_new || seen.received != self.received) || seen.sent < self.sent;
        if is_answered {
            self.unanswered = None;
            // What a relay carries says nothing about direct paths.
            self.first_round = self.first_round.filter(|_| self.by.is_some());
        } else if seen.sent > self.sent && self.unanswered.is_none() {
            self.unanswered = Some((now, self.sent));
        }
        (self.sent, self.received, self.age) = (seen.sent, seen.received, seen.handshake_age);
        self.looked = now;
        // An answer has come directly where WireGuard did not follow it to a relay.
        let is_relayed = seen.endpoint.is_some_and(|at| self.is_relays(at));
        self.trial = self.trial.and_then(|trial| trial.goes_on(seen, is_relayed, now));
        // A newly published endpoint counts for more than where the other end once answered.
        if seen.published != self.published {
            (self.published, self.punched) = (seen.published, None);
            // How long earlier paths have lasted says nothing about this one.
            self.interval = DIRECT_EVERY;
            self.next_round = self.next_round.map(|next| next.min(now + DIRECT_EVERY));
            self.hurry(now);
        }
        if seen.endpoint.is_some_and(|at| self.comes_one_way(at, now)) {
            self.insists = Some(now + INSISTS);
        }
        let settled =
            self.moved.is_none_or(|moved| now.saturating_duration_since(moved) >= SETTLES) && seen.is_fresh();
        let Some(endpoint) = seen.endpoint.filter(|_| settled) else { return };
        // The other end has moved, and WireGuard has followed it.
        match (self.leases.of(endpoint), self.by) {
            _ if self.comes_one_way(endpoint, now) => self.moved = Some(now),
            (Some(relay), by) if by != Some(relay) => self.use_relay(relay, endpoint, now),
            // The port in use, although the relay has given others since.
            (None, Some(_)) if self.at == Some(endpoint) => {}
            // The port of a relay that was left: late packets have moved the endpoint back after `insists`.
            (None, _) if self.left.is_some_and(|(_, left)| left == endpoint) => {
                (self.moved, self.insists) = (Some(now), Some(now + INSISTS));
            }
            (None, Some(_)) => self.use_directly(endpoint, now),
            // The plan follows WireGuard, too.
            (None, None) if self.punched.is_some() => self.punched = Some(endpoint),
            _ => {}
        }
    }

    /// The other end may be somewhere new: it is tried as at the beginning of a silence,
    /// unless that was lately.
    fn hurry(&mut self, now: Instant) {
        self.first_round =
            self.first_round.filter(|first| now.saturating_duration_since(*first) < HURRIES_AFTER);
    }

    /// For how long bytes have been sent without an answer; zero if that is not significant.
    fn silence(&self, seen: &Seen, now: Instant) -> Duration {
        let Some((since, before)) = self.unanswered else { return Duration::ZERO };
        let silence = now.saturating_duration_since(since);
        if !seen.is_fresh() {
            return silence;
        }
        // Repairs by WireGuard since then are not seen yet.
        let silence = self.looked.saturating_duration_since(since);
        // Nobody answers a keepalive.
        let keepalives = ATTEMPTS + KEEPALIVE * (silence.as_secs() + 2);
        let is_data = self.sent.saturating_sub(before) > keepalives;
        if is_data { silence.saturating_sub(SESSION_LONGER) } else { Duration::ZERO }
    }

    /// Where packets must go after a recent move: what the other end has sent through the relay before moves
    /// WireGuard's endpoint back, and both ends would do so to each other for as long as there is traffic.
    fn insists(&self, now: Instant) -> Option<SocketAddr> {
        let to = if self.by.is_some() { self.at } else { self.punched.filter(|_| self.trial.is_some()) };
        to.filter(|_| self.insists.is_some_and(|until| now < until))
    }

    /// The relay by which packets go: the one in use, or whose port the device sends to.
    fn relay_at(&self, endpoint: Option<SocketAddr>) -> Option<NodeId> {
        let left = || self.left.filter(|(_, left)| Some(*left) == endpoint).map(|(relay, _)| relay);
        self.by.or_else(|| self.leases.of(endpoint?)).or_else(left)
    }

    /// Takes note of the port that is in use, before another place is.
    fn leave(&mut self, to: SocketAddr) {
        let left = self.by.zip(self.at).filter(|(_, at)| *at != to);
        self.left = left.or(self.left);
        self.insists = None;
    }

    /// Whether this is a port of a relay that is held, in use, or was in use before.
    fn is_relays(&self, place: SocketAddr) -> bool {
        self.leases.of(place).is_some()
            || self.at == Some(place)
            || self.left.is_some_and(|(_, left)| left == place)
    }

    /// Whether datagrams come from a relay that was left because this end does not reach it.
    fn comes_one_way(&self, place: SocketAddr, now: Instant) -> bool {
        let works = |by: NodeId| !self.leases.fails(by, now);
        let other = self.leases.of(place).filter(|relay| self.by.is_some_and(|by| by != *relay && works(by)));
        other.is_some_and(|relay| self.leases.fails(relay, now))
    }

    /// Holds no relay any more, as where none is used.
    fn forget_relays(&mut self) {
        (self.by, self.at, self.left, self.trial, self.keeps) = (None, None, None, None, None);
        self.insists = None;
        self.leases.clear();
    }

    fn admit_answer(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.answers.0) >= Duration::from_secs(1) {
            self.answers = (now, 0);
        }
        self.answers.1 += 1;
        self.answers.1 <= ANSWERS
    }

    fn use_relay(&mut self, relay: NodeId, at: SocketAddr, now: Instant) {
        if self.by.is_none() {
            let is_short = self.moved.is_some_and(|moved| now.saturating_duration_since(moved) < LASTS);
            self.interval = match self.punched.take() {
                Some(_) if is_short => (self.interval * 2).min(DIRECT_SELDOM),
                _ => DIRECT_EVERY,
            };
            (self.next_round, self.first_round) = (Some(now + self.interval), None);
        }
        self.leave(at);
        (self.by, self.at, self.moved, self.unanswered) = (Some(relay), Some(at), Some(now), None);
        self.trial = None;
    }

    fn use_directly(&mut self, place: SocketAddr, now: Instant) {
        self.trial = self.by.map(|_| Trial::new(now));
        // Without a relay, only an answer of WireGuard counts: messages may pass where its datagrams do not.
        if self.by.is_some() {
            self.unanswered = None;
        }
        self.leave(place);
        (self.by, self.punched, self.moved) = (None, Some(place), Some(now));
        (self.round, self.next_round) = (None, None);
        self.keeps = Some(now + LINGERS);
    }

    /// Takes over a relay that an earlier agent has left in use.
    fn adopt(&mut self, turn: &Turn<'_>, random: &mut impl FnMut() -> u64) {
        let is_free = self.by.is_none() && self.leases.is_empty() && turn.seen.is_fresh();
        let Some((relay, place, endpoint)) = turn.relay_of_endpoint().filter(|_| is_free) else { return };
        self.leases.insert(relay, Lease::at(place, endpoint.port(), random(), turn.now));
        self.use_relay(relay, endpoint, turn.now);
    }

    /// Leaves all relays because the other end refuses them, even where WireGuard follows what
    /// still comes through one.
    fn leave_relays(&mut self, turn: &mut Turn<'_>) {
        let is_by_relay = self.by.is_some() || turn.relay_of_endpoint().is_some();
        // Its agent answers no tries: nobody finds this endpoint again once it is left.
        let lost = if turn.seen.is_fresh() { SILENT_FOR_GOOD.saturating_sub(SESSION_LONGER) } else { SILENT };
        let is_lost = self.punched.is_some() && self.silence(turn.seen, turn.now) >= lost;
        if (is_by_relay || is_lost)
            && let Some(to) = turn.seen.published
        {
            turn.outputs.push(Output::Move { node: turn.ends.1, to });
            (self.punched, self.moved) = (None, Some(turn.now));
        }
        self.forget_relays();
    }

    /// Holds leases while relays are needed, or may be soon.
    fn lease(&mut self, turn: &mut Turn<'_>, random: &mut impl FnMut() -> u64) {
        let now = turn.now;
        let is_silent = !turn.seen.is_idle && self.silence(turn.seen, now) >= PREPARE;
        let needs = self.by.is_some() || self.trial.is_some() || is_silent;
        if !needs && self.keeps.is_none_or(|until| now >= until) {
            self.leases.clear();
            return;
        }
        let (_, other) = turn.ends;
        if needs {
            self.leases.hold(turn.ends, turn.relays, self.by, random, now);
        }
        let by = self.by;
        for (relay, lease) in self.leases.iter_mut() {
            if let Some(place) = turn.relays.get(&relay) {
                lease.set_place(*place);
            }
            let sequence = *turn.sequence + 1;
            let used = Use::of(relay, by);
            if let Some((to, message)) = lease.ask(turn.ends, sequence, used, now) {
                *turn.sequence = sequence;
                turn.outputs.push(Output::Send { node: relay, to, message });
                // The whole path is tried, too: the relay's agent may be dead while its kernel relays.
                if let Some(to) = lease.address().filter(|_| used == Use::Active) {
                    let message = message_to(Kind::Try, turn.ends, self.nonce, sequence);
                    turn.outputs.push(Output::Send { node: other, to, message });
                }
            }
        }
    }

    /// Starts to use a relay after silence, leaves one that is useless, and follows one
    /// that gives another port.
    fn choose(&mut self, turn: &mut Turn<'_>) {
        let now = turn.now;
        let lease = self.by.and_then(|relay| self.leases.get(relay)).filter(|lease| lease.works(true, now));
        if lease.zip(self.moved).is_some_and(|(lease, moved)| lease.is_answered_since(moved)) {
            self.first_round = None;
        }
        let may_follow = self.moved.is_none_or(|moved| now.saturating_duration_since(moved) >= FOLLOWS);
        let other = lease.and_then(Lease::address).filter(|to| may_follow && Some(*to) != self.at);
        if let Some(to) = other {
            (self.at, self.moved) = (Some(to), Some(now));
            turn.outputs.push(Output::Move { node: turn.ends.1, to });
        }
        let is_silent = self.silence(turn.seen, now) >= SILENT;
        if is_silent && let Some(lease) = self.by.and_then(|relay| self.leases.get_mut(relay)) {
            lease.found_unanswered(now);
        }
        let needs = match self.by {
            Some(relay) => self.leases.fails(relay, now),
            None => is_silent || self.trial.is_some_and(|trial| trial.fails(now)),
        };
        // It still relays, but not for long: it has withdrawn its offer, or is no longer a gateway. Or this
        // end's own tunnel with it has not worked for three minutes: another relay is better.
        let is_withdrawn = self.by.is_some_and(|relay| !turn.relays.contains_key(&relay));
        if !needs && !is_withdrawn {
            return;
        }
        let Some((relay, to)) = self.leases.best(turn.ends, self.by, now) else { return };
        if !needs && !turn.relays.contains_key(&relay) {
            return;
        }
        // Else nothing comes late, and the other end may know better what works.
        let may_come_late = match self.by {
            Some(relay) => self.leases.get(relay).is_some_and(|lease| lease.may_pass(now)),
            None => self.trial.is_some(),
        };
        self.use_relay(relay, to, now);
        self.insists = may_come_late.then(|| now + INSISTS);
        turn.outputs.push(Output::Move { node: turn.ends.1, to });
    }

    /// Tries every place where the other end may be, from time to time.
    fn try_directly(&mut self, turn: &mut Turn<'_>, random: &mut impl FnMut() -> u64) {
        let now = turn.now;
        if self.nonce == 0 {
            self.nonce = random().max(1);
        }
        let (_, other) = turn.ends;
        let is_silent = match self.by {
            // Where another relay works, it is in use by now. A direct path that did not last has to be better than none.
            Some(relay) => {
                let may_last = self.interval == DIRECT_EVERY || self.silence(turn.seen, now) >= PREPARE;
                self.leases.fails(relay, now) && may_last
            }
            None => self.silence(turn.seen, now) >= if turn.seen.is_fresh() { PREPARE } else { TRY },
        };
        let is_paused = || {
            let tried = self.first_round.map_or(Duration::ZERO, |first| now.saturating_duration_since(first));
            let pause = if tried < TRY_SELDOM { 2 * round::LENGTH } else { PAUSE };
            self.last_round.is_some_and(|last| now.saturating_duration_since(last) < pause)
        };
        let is_next = self.by.is_some() && self.next_round.is_some_and(|next| now >= next);
        let is_due = is_next || is_silent && !turn.seen.refuses && !is_paused();
        if self.round.is_none() && is_due {
            self.nonce = random().max(1);
            self.round = Some(Round::new(now));
            self.last_round = Some(now);
            if is_silent {
                self.first_round.get_or_insert(now);
            }
            self.next_round = self.by.map(|_| now + self.interval);
            let relay = self.by.and_then(|relay| self.leases.get(relay)).and_then(Lease::address);
            if let Some(to) = relay {
                let sequence = turn.sequence();
                let message = message_to(Kind::Try, turn.ends, self.nonce, sequence);
                turn.send(other, to, Message { flags: START, ..message });
            }
        }
        if self.round.as_ref().is_some_and(|round| round.is_over(now)) {
            self.round = None;
        }
        if !self.round.as_mut().is_some_and(|round| round.is_due(now)) {
            return;
        }
        self.places.keep(now);
        let first = turn.seen.published.into_iter().chain(self.places.iter());
        let mut places = round::candidates(first, &turn.seen.places, self.nonce);
        places.retain(|place| !self.is_relays(*place));
        // A relay that fails does not carry it either.
        let flags = if is_silent && self.by.is_some() { START } else { 0 };
        let Some(round) = self.round.as_mut() else { return };
        for to in places.into_iter().take(round::MOST_PLACES) {
            let sequence = turn.sequence();
            round.sent(sequence, to);
            let message = message_to(Kind::Try, turn.ends, self.nonce, sequence);
            turn.send(other, to, Message { flags, ..message });
        }
    }
}
