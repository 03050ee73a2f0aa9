//! A gateway of another location: by which path packets go to it, and what is done to find a better one.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use kilo_common::relay::{Kind, Message, START};

use super::{
    DIRECT_EVERY, DIRECT_SELDOM, INSISTS, LASTS, NodeId, Output, PREPARE, SILENT, SILENT_FOR_GOOD,
    SILENT_SESSION, Seen, TRY, TRY_SELDOM,
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
/// New addresses of a silent end are tried as eagerly as the first ones when those have been tried for so long.
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

/// This gateway's end of the tunnel with one gateway of another location.
#[derive(Clone, Debug)]
pub(super) struct Pair {
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
    sources: Sources,
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

impl Pair {
    pub(super) fn new(seen: &Seen, now: Instant) -> Self {
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
            sources: Sources::default(),
            nonce: 0,
            round: None,
            next_round: None,
            last_round: None,
            first_round: None,
            interval: DIRECT_EVERY,
            answers: (now, 0),
        }
    }

    pub(super) fn see(&mut self, seen: &Seen, now: Instant) {
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
        let comes_one_way = seen.endpoint.is_some_and(|at| self.comes_one_way(at, now));
        if comes_one_way {
            self.insists = Some(now + INSISTS);
        }
        let settled =
            self.moved.is_none_or(|moved| now.saturating_duration_since(moved) >= SETTLES) && seen.is_fresh();
        let Some(endpoint) = seen.endpoint.filter(|_| settled) else { return };
        // The other end has moved, and WireGuard has followed it.
        match (self.leases.of(endpoint), self.by) {
            _ if comes_one_way => self.moved = Some(now),
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

    /// The relay through which packets go, as far as is known. While a direct path is on trial, late packets may
    /// move WireGuard back and forth.
    pub(super) fn relayed_by(&self, endpoint: Option<SocketAddr>) -> Option<NodeId> {
        let on_trial = self.left.filter(|_| self.trial.is_some()).map(|(relay, _)| relay);
        self.relay_at(endpoint).or(on_trial)
    }

    /// The endpoint, where it differs from what the mesh says; true: at a relay.
    pub(super) fn endpoint(&self) -> Option<(SocketAddr, bool)> {
        match self.by {
            // A relay that has just refused may still relay, and the endpoint from the mesh does not work.
            Some(_) => Some((self.at?, true)),
            None => Some((self.punched?, false)),
        }
    }

    /// Whether anything is in progress that cannot wait for a second.
    pub(super) fn is_busy(&self) -> bool {
        !self.leases.is_empty() || self.round.is_some()
    }

    /// Tries the other end as at the beginning of a silence.
    pub(super) const fn try_anew(&mut self) {
        self.first_round = None;
    }

    /// Takes what a relay offers; false if it was not asked, or has answered this question before.
    pub(super) fn offered(&mut self, message: &Message, now: Instant) -> bool {
        self.leases.get_mut(message.sender).is_some_and(|lease| lease.offered(message, now))
    }

    /// A relay says that the other end asks for it.
    pub(super) fn invited(&mut self, to: (NodeId, SocketAddr), random: u64, now: Instant) {
        self.keeps = self.keeps.max(Some(now + LINGERS));
        self.leases.invited(to, self.by, random, now);
    }

    /// The other end tries a path; returns whether it gets an answer.
    pub(super) fn tried(&mut self, message: &Message, source: SocketAddr, now: Instant) -> bool {
        if !self.admit_answer(now) {
            return false;
        }
        if !self.is_relays(source) {
            self.sources.heard(source, now);
        }
        let may = self.last_round.is_none_or(|last| now.saturating_duration_since(last) >= ASKED_EVERY);
        if message.flags & START != 0 && self.by.is_some() && may {
            self.next_round = Some(now);
        }
        true
    }

    /// The other end has answered a try; returns whether its path is good enough to be used from now on.
    pub(super) fn answered(&mut self, message: &Message, source: SocketAddr, now: Instant) -> bool {
        if self.nonce != message.nonce {
            return false;
        }
        let lease = self.leases.of(source).and_then(|relay| self.leases.get_mut(relay));
        if let Some(lease) = lease.filter(|lease| lease.address() == Some(source)) {
            lease.passed(now);
        }
        if self.is_relays(source) {
            return false;
        }
        let is_relayed = self.by.is_some();
        let enough = if is_relayed { ENOUGH } else { ENOUGH_TO_BEGIN };
        let answers = self.round.as_mut().and_then(|round| round.answered(message.sequence, source));
        if answers.is_none_or(|answers| answers < enough) {
            return false;
        }
        self.use_directly(source, now);
        self.insists = is_relayed.then(|| now + INSISTS);
        true
    }

    /// The other end may be somewhere new: it is tried as at the beginning of a silence,
    /// unless that was lately.
    pub(super) fn hurry(&mut self, now: Instant) {
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
    pub(super) fn insists(&self, now: Instant) -> Option<SocketAddr> {
        let to = if self.by.is_some() { self.at } else { self.punched.filter(|_| self.trial.is_some()) };
        to.filter(|_| self.insists.is_some_and(|until| now < until))
    }

    /// The relay by which packets go: the one in use, or whose port the device sends to.
    pub(super) fn relay_at(&self, endpoint: Option<SocketAddr>) -> Option<NodeId> {
        let left = || self.left.filter(|(_, left)| Some(*left) == endpoint).map(|(relay, _)| relay);
        self.by.or_else(|| self.leases.of(endpoint?)).or_else(left)
    }

    /// Takes note of the port that is in use, before another address is.
    fn leave(&mut self, to: SocketAddr) {
        let left = self.by.zip(self.at).filter(|(_, at)| *at != to);
        self.left = left.or(self.left);
        self.insists = None;
    }

    /// Whether this is a port of a relay that is held, in use, or was in use before.
    fn is_relays(&self, address: SocketAddr) -> bool {
        self.leases.of(address).is_some()
            || self.at == Some(address)
            || self.left.is_some_and(|(_, left)| left == address)
    }

    /// Whether datagrams come from a relay that was left because this end does not reach it.
    fn comes_one_way(&self, address: SocketAddr, now: Instant) -> bool {
        let works = |by: NodeId| !self.leases.fails(by, now);
        let other =
            self.leases.of(address).filter(|relay| self.by.is_some_and(|by| by != *relay && works(by)));
        other.is_some_and(|relay| self.leases.fails(relay, now))
    }

    /// Holds no relay any more, as where none is used.
    pub(super) fn forget_relays(&mut self) {
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

    fn use_directly(&mut self, address: SocketAddr, now: Instant) {
        self.trial = self.by.map(|_| Trial::new(now));
        // Without a relay, only an answer of WireGuard counts: messages may pass where its datagrams do not.
        if self.by.is_some() {
            self.unanswered = None;
        }
        self.leave(address);
        (self.by, self.punched, self.moved) = (None, Some(address), Some(now));
        (self.round, self.next_round) = (None, None);
        self.keeps = Some(now + LINGERS);
    }

    /// Takes over a relay that an earlier agent has left in use.
    pub(super) fn adopt(&mut self, turn: &Turn<'_>, random: &mut impl FnMut() -> u64) {
        let is_free = self.by.is_none() && self.leases.is_empty() && turn.seen.is_fresh();
        let Some((relay, address, endpoint)) = turn.relay_of_endpoint().filter(|_| is_free) else { return };
        self.leases.insert(relay, Lease::at(address, endpoint.port(), random(), turn.now));
        self.use_relay(relay, endpoint, turn.now);
    }

    /// Leaves all relays because the other end refuses them, even where WireGuard follows what
    /// still comes through one.
    pub(super) fn leave_relays(&mut self, turn: &mut Turn<'_>) {
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
    pub(super) fn lease(&mut self, turn: &mut Turn<'_>, random: &mut impl FnMut() -> u64) {
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
            if let Some(endpoint) = turn.relays.get(&relay) {
                lease.set_endpoint(*endpoint);
            }
            let used = Use::of(relay, by);
            if let Some((to, message)) = lease.ask(turn.ends, turn.numbers, used, now) {
                let sequence = message.sequence;
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
    pub(super) fn choose(&mut self, turn: &mut Turn<'_>) {
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
        // It still relays, but not for long: it has withdrawn its offer, or has ceased to be a gateway. Or this
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

    /// Tries every address where the other end may be, from time to time.
    pub(super) fn try_directly(&mut self, turn: &mut Turn<'_>, random: &mut impl FnMut() -> u64) {
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
                let sequence = turn.numbers.next();
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
        self.sources.keep(now);
        let first = turn.seen.published.into_iter().chain(self.sources.iter());
        let mut candidates = round::candidates(first, &turn.seen.candidates, self.nonce);
        candidates.retain(|address| !self.is_relays(*address));
        // A relay that fails does not carry it either.
        let flags = if is_silent && self.by.is_some() { START } else { 0 };
        let Some(round) = self.round.as_mut() else { return };
        for to in candidates.into_iter().take(round::MOST_CANDIDATES) {
            let sequence = turn.numbers.next();
            round.sent(sequence, to);
            let message = message_to(Kind::Try, turn.ends, self.nonce, sequence);
            turn.send(other, to, Message { flags, ..message });
        }
    }
}
