//! One end's lease with one relay.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use kilo_common::relay::{BOTH, Kind, Message, is_port};

use super::{NodeId, fresh, numbers::Numbers};

/// Interval of messages to the relay in use, and to one that is to become it.
const OFTEN: Duration = Duration::from_millis(400);
/// Interval of messages to a stand-by relay: they keep the NAT entry alive.
const SELDOM: Duration = Duration::from_secs(5);
/// The relay in use is dead when nothing was heard from it for this long.
const DEAD: Duration = Duration::from_millis(1300);
/// A stand-by relay is dead when nothing was heard from it for this long.
const GONE: Duration = Duration::from_secs(12);
/// A relay through which packets do not pass after this long is useless for now.
const USELESS: Duration = Duration::from_secs(5);
/// A relay that says that packets pass, while they do not, is believed again after this long.
const BLACK: Duration = Duration::from_secs(60);
/// A relay that refuses, or is useless, is asked again after this long.
pub(super) const SELDOM_USELESS: Duration = Duration::from_secs(10);

/// What a pair has a relay for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The pair's packets go through it.
    Active,
    /// None is in use, and it is about to be.
    Next,
    /// Another one is in use.
    StandBy,
}

impl Use {
    /// Of this relay, where that one is in use.
    pub(super) fn of(relay: NodeId, in_use: Option<NodeId>) -> Self {
        match in_use {
            Some(in_use) if in_use == relay => Self::Active,
            Some(_) => Self::StandBy,
            None => Self::Next,
        }
    }
}

/// A port of a relay that leads to the other end, or a request for one.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    /// Address and port of the relay's WireGuard.
    endpoint: SocketAddr,
    nonce: u64,
    token: u64,
    /// 0 = none yet.
    port: u16,
    /// The port that it gave before.
    before: u16,
    /// Both ends are bound.
    both: bool,
    /// The last answer was a refusal.
    is_refused: bool,
    /// When it was first asked, or packets were last known to pass.
    passed: Instant,
    /// When the other end was last heard through it.
    came: Option<Instant>,
    /// When it was found to pass nothing, whatever it says.
    black: Option<Instant>,
    next: Instant,
    /// Since when nothing was heard from it: its last sign, or when it was first held.
    unheard: Instant,
    /// Messages to it since then.
    asked: u32,
    /// Numbers of the latest questions that it has not answered.
    questions: BTreeSet<u64>,
}

impl Lease {
    pub(super) const fn new(endpoint: SocketAddr, nonce: u64, now: Instant) -> Self {
        Self {
            endpoint,
            nonce,
            token: 0,
            port: 0,
            before: 0,
            both: false,
            is_refused: false,
            passed: now,
            came: None,
            black: None,
            next: now,
            unheard: now,
            asked: 0,
            questions: BTreeSet::new(),
        }
    }

    /// A lease for an endpoint that an earlier agent has left.
    pub(super) fn at(endpoint: SocketAddr, port: u16, nonce: u64, now: Instant) -> Self {
        Self { port, ..Self::new(endpoint, nonce, now) }
    }

    /// Sets where the relay's WireGuard is reached.
    pub(super) const fn set_endpoint(&mut self, endpoint: SocketAddr) {
        self.endpoint = endpoint;
    }

    /// Where datagrams for the other end are sent; `None`: it has no port yet.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        (self.port != 0).then(|| SocketAddr::new(self.endpoint.ip(), self.port))
    }

    /// Whether this is the port that the relay has given, or the one before: other ports may be those
    /// of ends behind its NAT.
    pub(super) fn is_at(&self, address: SocketAddr) -> bool {
        address.ip() == self.endpoint.ip()
            && is_port(address.port())
            && [self.port, self.before].contains(&address.port())
    }

    /// Whether packets pass, as far as this end knows.
    pub(super) fn works(&self, in_use: bool, now: Instant) -> bool {
        self.both && !self.is_dead(in_use, now) && (in_use || !self.is_black(now))
    }

    fn is_black(&self, now: Instant) -> bool {
        self.black.is_some_and(|at| now.saturating_duration_since(at) < BLACK)
    }

    /// WireGuard hears nothing through it, the relay in use: if the other end has not answered a try either,
    /// it passes nothing, although it says that both ends are bound.
    pub(super) fn found_unanswered(&mut self, now: Instant) {
        let is_silent = |at: Instant| now.saturating_duration_since(at) >= USELESS;
        if self.came.is_none_or(is_silent) && !self.is_black(now) {
            self.black = Some(now);
        }
    }

    /// Whether the other end has been heard through it since then.
    pub(super) fn is_answered_since(&self, then: Instant) -> bool {
        self.came.is_some_and(|at| at >= then)
    }

    /// Whether packets may still come through it, the one in use: it lives, and is not known to pass nothing.
    pub(super) fn may_pass(&self, now: Instant) -> bool {
        !self.is_dead(true, now) && !self.is_black(now)
    }

    /// Whether nothing was heard of it for too long, although it was asked.
    pub(super) fn is_dead(&self, in_use: bool, now: Instant) -> bool {
        let patience = if in_use { DEAD } else { GONE };
        self.asked >= 3 && now.saturating_duration_since(self.unheard) >= patience
    }

    /// Whether it is useless for now: it is dead, has refused, or packets do not pass although it was
    /// asked for long enough.
    pub(super) fn fails(&self, in_use: bool, now: Instant) -> bool {
        let is_useless = self.is_refused || now.saturating_duration_since(self.passed) >= USELESS;
        self.is_dead(in_use, now) || self.is_black(now) || !self.both && is_useless
    }

    /// Whether it was heard from after this time.
    pub(super) fn is_heard_since(&self, then: Instant) -> bool {
        self.unheard > then
    }

    /// The other end asks for it, too: asking it again brings news.
    pub(super) fn invited(&mut self, now: Instant) {
        if !self.both {
            self.next = self.next.min(now);
        }
    }

    /// The message that is due, and its destination.
    pub(super) fn ask(
        &mut self,
        (own, other): (NodeId, NodeId),
        numbers: &mut Numbers,
        used: Use,
        now: Instant,
    ) -> Option<(SocketAddr, Message)> {
        if now < self.next {
            return None;
        }
        let in_use = used == Use::Active;
        self.next = now
            + match self.fails(in_use, now) {
                true if !in_use => SELDOM_USELESS,
                _ if used != Use::StandBy || !self.both => OFTEN,
                _ => SELDOM,
            };
        self.asked = self.asked.saturating_add(1);
        let sequence = numbers.next();
        fresh::remember(&mut self.questions, sequence);
        let message = Message {
            kind: Kind::Ask,
            flags: 0,
            nonce: self.nonce,
            sequence,
            sender: own,
            other,
            token: self.token,
            port: self.port,
        };
        // A relay that has forgotten the port does not listen there.
        let is_forgotten = self.asked.is_multiple_of(2);
        Some((self.address().filter(|_| !is_forgotten).unwrap_or(self.endpoint), message))
    }

    /// Takes the relay's answer; false if it answers no question, or one that has been answered.
    pub(super) fn offered(&mut self, offer: &Message, now: Instant) -> bool {
        if offer.nonce != self.nonce || !self.questions.remove(&offer.sequence) {
            return false;
        }
        self.heard(now);
        if self.port != offer.port && is_port(self.port) {
            self.before = self.port;
        }
        // On another port nothing relays that this end would know as a relay.
        self.is_refused = !is_port(offer.port);
        if self.is_refused {
            (self.port, self.token, self.both) = (0, 0, false);
            self.next = now + SELDOM_USELESS;
            return true;
        }
        let is_news = offer.token != self.token || offer.port != self.port;
        (self.token, self.port, self.both) = (offer.token, offer.port, offer.flags & BOTH != 0);
        if self.both {
            self.passed = now;
        }
        if is_news {
            self.next = now;
        }
        true
    }

    /// Something came through it from the other end.
    pub(super) const fn passed(&mut self, now: Instant) {
        (self.passed, self.came, self.black) = (now, Some(now), None);
        self.heard(now);
    }

    /// Something was heard from it.
    const fn heard(&mut self, now: Instant) {
        (self.unheard, self.asked) = (now, 0);
    }
}
