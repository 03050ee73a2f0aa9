//! The fast detector of a stand-by: it probes the whole path through the leader and, while that is silent,
//! the leader's kernel on the LAN.

use crate::{
    Far, Micros, NodeId, Output, Params, ProbePath, Target, Turn,
    probes::{LOSSY, RoundTrip, Row},
};

/// Probes of the leader a stand-by follows.
#[derive(Clone, Debug)]
pub struct Detector {
    lan: Row,
    path: Row,
    trip: RoundTrip,
    turns: usize,
    due: Micros,
    /// When the last probes were sent.
    probed: Micros,
    /// When the LAN is next probed between two turns.
    between: Micros,
    /// When the last path probe came back.
    heard: Option<Micros>,
    /// Until when the leader's path counts as overloaded: it has lost some probes, but not all.
    lossy_until: Micros,
    /// Whether the leader's kernel answers probes on the LAN: Go Kilo's does not.
    pub lan_counts: bool,
}

impl Detector {
    /// The detector of an agent that starts now.
    pub fn new(now: Micros) -> Self {
        Self {
            lan: Row::default(),
            path: Row::default(),
            trip: RoundTrip::default(),
            turns: 0,
            due: now,
            probed: now,
            between: Micros::MAX,
            heard: None,
            lossy_until: 0,
            lan_counts: false,
        }
    }

    /// When it has to be woken. The first miss can wait for the next probe: what counts is when the last
    /// of several is known.
    pub fn wake(&self) -> Micros {
        let deadline = |row: &Row| if row.misses() > 0 { row.deadline() } else { Micros::MAX };
        self.due.min(self.between).min(deadline(&self.lan)).min(deadline(&self.path))
    }

    /// Counts overdue probes as missed; returns whether any are new.
    pub fn expire(&mut self, now: Micros) -> bool {
        self.lan.expire(now) | self.path.expire(now)
    }

    /// Whether the next probes are due.
    pub fn is_due(&self, now: Micros) -> bool {
        now >= self.due
    }

    /// Stops probing: this node leads itself, until somebody else does.
    pub const fn rest(&mut self) {
        (self.due, self.between) = (Micros::MAX, Micros::MAX);
    }

    /// Whether it rests ([`Self::rest`]).
    pub const fn rests(&self) -> bool {
        self.due == Micros::MAX
    }

    /// Starts to probe at once: somebody else leads this node.
    pub fn begin(&mut self, now: Micros) {
        self.due = self.due.min(now);
    }

    /// Sends the next probes: through the leader to the next of the far leaders that answer this node's own
    /// tunnel, which is returned, and to the leader itself if nothing has come back through it since the
    /// previous probes: what comes back shows that its kernel works, too. `usual`: round trip of that
    /// tunnel to a far leader.
    pub fn probe(
        &mut self,
        params: &Params,
        leader: NodeId,
        targets: &[Far],
        usual: impl Fn(Far) -> Micros,
        turn: &mut Turn<'_>,
    ) -> Option<Far> {
        // A wake-up costs more than what is done in it; a path that has begun to be
        // silent is probed more often.
        let pause = if self.path.misses() > 0 { params.silent } else { params.calm };
        self.due = turn.now + turn.jittered(pause);
        let since = std::mem::replace(&mut self.probed, turn.now);
        if self.heard.is_none_or(|heard| heard < since) {
            self.probe_lan(params, leader, turn);
            // This begins a turn later than the misses of the path, and must not end later.
            let is_silent = (1..params.hard).contains(&self.path.misses());
            self.between = if is_silent { turn.now + params.interval / 2 } else { Micros::MAX };
        }
        // In turn, so that one that dies among several never causes two misses in a row.
        let far = *targets.get(self.turns % targets.len().max(1))?;
        let target = Target::of_turn(params, self.turns, targets.len());
        self.turns += 1;
        let nonce = turn.nonce();
        let patience = self.timeout(params).max(usual(far) * 13 / 10 + params.margin);
        self.path.sent(nonce, turn.now, turn.now + patience);
        turn.push(Output::Probe { nonce, path: ProbePath::Path(far, target) });
        Some(far)
    }

    /// Sends a LAN probe to the leader between two turns, if nothing has come back meanwhile.
    pub fn probe_between(&mut self, params: &Params, leader: NodeId, turn: &mut Turn<'_>) {
        if turn.now >= self.between {
            self.between = Micros::MAX;
            self.probe_lan(params, leader, turn);
        }
    }

    fn probe_lan(&mut self, params: &Params, leader: NodeId, turn: &mut Turn<'_>) {
        let nonce = turn.nonce();
        self.lan.sent(nonce, turn.now, turn.now + params.lan_deadline);
        turn.push(Output::Probe { nonce, path: ProbePath::Lan(leader) });
    }

    /// How long a path probe may take.
    pub fn timeout(&self, params: &Params) -> Micros {
        self.trip.deadline(params)
    }

    /// Handles the answer to a probe; returns whether it was one of these.
    pub fn answered(&mut self, params: &Params, nonce: u64, at: Micros) -> bool {
        let has_missed = self.path.misses() >= LOSSY;
        if let Some(sent) = self.path.answered(nonce) {
            self.trip.measured(at.saturating_sub(sent));
            self.heard = Some(at);
            self.between = Micros::MAX;
            // LAN probes end with the silence, and their misses no longer count.
            self.lan.clear();
            if has_missed {
                self.lossy_until = at + params.busy;
            }
            return true;
        }
        self.lan.answered(nonce).is_some()
    }

    /// Misses in a row of the LAN and of the path. Those of the LAN count if the leader's
    /// kernel answers there at all.
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

    /// Whether the leader's path loses some probes, but not all.
    pub const fn is_lossy(&self, now: Micros) -> bool {
        self.lossy_until > now
    }

    /// Whether the path through the leader works: an answer came at `since` or later, and nothing is missed.
    pub fn works_since(&self, since: Micros) -> bool {
        self.heard.is_some_and(|heard| heard >= since) && self.path.misses() == 0
    }

    /// Forgets everything outstanding and missed.
    pub fn discard(&mut self) {
        self.lan.clear();
        self.path.clear();
        self.between = Micros::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MS, SEC};

    const LEADER: NodeId = 1;

    /// A leader that answers every probe before `until`, each after `trip`, and none later; turns come
    /// whenever one is due. Returns the number of LAN probes before that, and when the third miss was known,
    /// on the path and on the LAN.
    fn silent_after(until: Micros, trip: Micros) -> (usize, [Micros; 2]) {
        let params = Params::default();
        let mut detector = Detector::new(0);
        detector.lan_counts = true;
        let (mut now, mut random, mut before) = (0, 0, 0);
        let mut answers = std::collections::BTreeMap::new();
        let mut third = [None; 2];
        while third.contains(&None) && now < until + SEC {
            while let Some((at, nonce)) = answers.pop_first() {
                if at > now {
                    answers.insert(at, nonce);
                    break;
                }
                detector.answered(&params, nonce, at);
            }
            let (mut out, mut later) = (Vec::new(), Vec::new());
            let mut random = || {
                random += 7_919;
                random
            };
            let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
            detector.expire(now);
            if detector.is_due(now) {
                detector.probe(&params, LEADER, &[7], |_| trip, &mut turn);
            } else {
                detector.probe_between(&params, LEADER, &mut turn);
            }
            for output in out {
                let Output::Probe { nonce, path } = output else { continue };
                before += usize::from(path == ProbePath::Lan(LEADER) && now < until);
                let takes = if path == ProbePath::Lan(LEADER) { MS } else { trip };
                if now + takes < until {
                    answers.insert(now + takes, nonce);
                }
            }
            let (lan, path) = detector.misses();
            for (third, misses) in third.iter_mut().zip([path, lan]) {
                *third = third.or((misses >= params.hard).then_some(now));
            }
            now = detector.wake().max(now + 1);
        }
        (before, third.map(|at| at.unwrap_or(Micros::MAX)))
    }

    #[test]
    fn the_lan_is_probed_while_nothing_comes_back_and_is_known_as_soon() {
        for until in (0..20).map(|i| 3 * SEC + i * 7 * MS) {
            for trip in [MS, 12 * MS, 90 * MS] {
                let (before, [path, lan]) = silent_after(until, trip);
                // The first ones, before any answer can be there, and the last, when the answer is on
                // its way.
                assert!(before <= 4, "{before} probes of the LAN while all answer after {trip} µs");
                assert!(lan <= path + MS, "{until}, {trip}: the path is known at {path}, the LAN at {lan}");
                assert!(path < until + 300 * MS, "{until}, {trip}: {path}");
            }
        }
    }
}
