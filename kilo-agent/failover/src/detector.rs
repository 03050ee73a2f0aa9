//! The fast detector of a stand-by: the leader's kernel on the LAN, and the whole
//! way through it.

use crate::{
    Far, Micros, NodeId, Output, Params, Turn, Way,
    probes::{RoundTrip, Row},
};

/// Probes of the leader a stand-by follows.
#[derive(Clone, Debug)]
pub struct Detector {
    lan: Row,
    path: Row,
    trip: RoundTrip,
    turns: usize,
    due: Micros,
    /// When the last path probe came back.
    heard: Option<Micros>,
    /// Until when the leader's way is taken for overloaded: it has lost some probes, and not all.
    lossy_until: Micros,
    /// Whether the leader's kernel answers probes on the LAN: Go Kilo's does not.
    pub lan_counts: bool,
}

impl Detector {
    /// Of an agent that starts now.
    pub fn new(now: Micros) -> Self {
        Self {
            lan: Row::default(),
            path: Row::default(),
            trip: RoundTrip::default(),
            turns: 0,
            due: now,
            heard: None,
            lossy_until: 0,
            lan_counts: false,
        }
    }

    /// When it has to be woken. The first miss can wait for the next probe: what counts is when the last
    /// of several is known.
    pub fn wake(&self) -> Micros {
        let deadline = |row: &Row| if row.misses() > 0 { row.deadline() } else { Micros::MAX };
        self.due.min(deadline(&self.lan)).min(deadline(&self.path))
    }

    /// Counts what is overdue; whether anything new is.
    pub fn expire(&mut self, now: Micros) -> bool {
        self.lan.expire(now) | self.path.expire(now)
    }

    /// Whether the next probes are due.
    pub fn is_due(&self, now: Micros) -> bool {
        now >= self.due
    }

    /// Nothing to probe: this node leads itself, until somebody else does.
    pub const fn rest(&mut self) {
        self.due = Micros::MAX;
    }

    /// Whether it does.
    pub const fn rests(&self) -> bool {
        self.due == Micros::MAX
    }

    /// Somebody else leads this node: probes begin at once.
    pub fn begin(&mut self, now: Micros) {
        self.due = self.due.min(now);
    }

    /// Sends the next probes: to the leader, and through it to the next of the far
    /// leaders that answer the own tunnel, which is returned. `usual`: round trip
    /// of the own tunnel to it.
    pub fn probe(
        &mut self,
        params: &Params,
        leader: NodeId,
        targets: &[Far],
        usual: impl Fn(Far) -> Micros,
        turn: &mut Turn<'_>,
    ) -> Option<Far> {
        self.due = turn.now + turn.jittered(params.interval);
        let nonce = turn.nonce();
        self.lan.sent(nonce, turn.now, turn.now + params.lan_deadline);
        turn.push(Output::Probe { nonce, way: Way::Lan(leader) });
        // In turn: one that dies among several never makes two misses in a row.
        let far = *targets.get(self.turns % targets.len().max(1))?;
        self.turns += 1;
        let nonce = turn.nonce();
        let patience = self.timeout(params).max(usual(far) * 13 / 10 + params.margin);
        self.path.sent(nonce, turn.now, turn.now + patience);
        turn.push(Output::Probe { nonce, way: Way::Path(far) });
        Some(far)
    }

    /// How long a path probe may take.
    pub fn timeout(&self, params: &Params) -> Micros {
        self.trip.deadline(params)
    }

    /// A probe was answered; whether it was one of these.
    pub fn answered(&mut self, params: &Params, nonce: u64, at: Micros) -> bool {
        let has_missed = self.path.misses() >= Self::LOSSY;
        if let Some(sent) = self.path.answered(nonce) {
            self.trip.measured(at.saturating_sub(sent));
            self.heard = Some(at);
            if has_missed {
                self.lossy_until = at + params.busy;
            }
            return true;
        }
        self.lan.answered(nonce).is_some()
    }

    /// Misses in a row of the LAN and of the path. The LAN's count if it answers at all.
    pub fn misses(&self) -> (usize, usize) {
        (if self.lan_counts { self.lan.misses() } else { 0 }, self.path.misses())
    }

    /// When the first missed path probe was sent.
    pub fn silent_since(&self) -> Option<Micros> {
        self.path.since()
    }

    /// For how long nothing has come back through the leader, not even late.
    pub fn quiet_for(&self, now: Micros) -> Micros {
        let since = self.path.since().unwrap_or(now);
        now.saturating_sub(self.heard.map_or(since, |heard| heard.max(since)))
    }

    /// Misses in a row that are no accident.
    const LOSSY: usize = 2;

    /// Whether the leader's way loses some probes, and not all.
    pub const fn is_lossy(&self, now: Micros) -> bool {
        self.lossy_until > now
    }

    /// Whether the way through the leader works: it was heard after `since`, and nothing is missed.
    pub fn works_since(&self, since: Micros) -> bool {
        self.heard.is_some_and(|heard| heard >= since) && self.path.misses() == 0
    }

    /// Forgets everything outstanding and missed.
    pub fn discard(&mut self) {
        self.lan.clear();
        self.path.clear();
    }
}
