//! The own tunnels of a gateway: whether it could lead, and the proof that it
//! could while the leader's way did not work.

use crate::{
    Far, MS, Micros, Output, Params, SEC, Turn, Way,
    probes::{RoundTrip, Row},
};

#[derive(Clone, Debug)]
struct Tunnel {
    far: Far,
    row: Row,
    trip: RoundTrip,
    /// When the newest answered probe was sent.
    answered: Option<Micros>,
}

/// Probes through the own tunnel to some far leaders.
#[derive(Clone, Debug)]
pub struct Tunnels {
    probed: Vec<Tunnel>,
    up_since: Micros,
    /// Since when most of them have answered without three misses in a row.
    good_since: Option<Micros>,
    next: Micros,
}

impl Tunnels {
    /// Of an agent that starts now.
    pub fn new(params: &Params, fars: &[Far], now: Micros) -> Self {
        let tunnel =
            |far: &Far| Tunnel { far: *far, row: Row::default(), trip: RoundTrip::default(), answered: None };
        let probed = fars.iter().take(params.targets).map(tunnel).collect();
        Self { probed, up_since: now, good_since: None, next: now }
    }

    /// There are other far leaders now; what is known of those that stay goes on.
    pub fn fars_are(&mut self, params: &Params, fars: &[Far], now: Micros) {
        let new = Self::new(params, fars, now);
        let mut known = std::mem::take(&mut self.probed);
        let keep = |tunnel: Tunnel| {
            let at = known.iter().position(|known| known.far == tunnel.far);
            at.map_or(tunnel, |at| known.swap_remove(at))
        };
        self.probed = new.probed.into_iter().map(keep).collect();
    }

    /// When the next probes are due.
    pub const fn next(&self) -> Micros {
        self.next
    }

    /// When the next miss is known, once there was one: a first one can wait for the next probe.
    pub fn deadline(&self) -> Micros {
        let missed = self.probed.iter().filter(|tunnel| tunnel.row.misses() > 0);
        missed.map(|tunnel| tunnel.row.deadline()).fold(Micros::MAX, Micros::min)
    }

    /// Sends what is due and counts what is overdue.
    pub fn wake_up(&mut self, params: &Params, turn: &mut Turn<'_>) {
        for tunnel in &mut self.probed {
            tunnel.row.expire(turn.now);
        }
        if !self.most(|tunnel| tunnel.row.misses() < 3) {
            self.good_since = None;
        }
        if turn.now >= self.next {
            self.next = turn.now + turn.jittered(params.own);
            let fars: Vec<_> = self.probed.iter().map(|tunnel| tunnel.far).collect();
            fars.into_iter().for_each(|far| self.probe(far, turn));
        }
    }

    /// Sends one at once.
    pub fn probe(&mut self, far: Far, turn: &mut Turn<'_>) {
        let Some(tunnel) = self.probed.iter_mut().find(|tunnel| tunnel.far == far) else { return };
        let nonce = turn.nonce();
        tunnel.row.sent(nonce, turn.now, turn.now + tunnel.trip.usual() * 3 / 2 + 30 * MS);
        turn.push(Output::Probe { nonce, way: Way::Own(far) });
    }

    /// A probe was answered; whether it was one of these.
    pub fn answered(&mut self, nonce: u64, at: Micros) -> bool {
        for tunnel in &mut self.probed {
            let Some(sent) = tunnel.row.answered(nonce) else { continue };
            tunnel.trip.measured(at.saturating_sub(sent));
            tunnel.answered = tunnel.answered.max(Some(sent));
            if self.good_since.is_none() && self.most(|tunnel| tunnel.row.misses() < 3) {
                self.good_since = Some(at);
            }
            return true;
        }
        false
    }

    /// The agent slept: what is outstanding proves nothing.
    pub fn discard(&mut self) {
        self.probed.iter_mut().for_each(|tunnel| tunnel.row.clear());
    }

    fn most(&self, is_good: impl Fn(&Tunnel) -> bool) -> bool {
        self.probed.iter().filter(|tunnel| is_good(tunnel)).count() * 2 > self.probed.len()
    }

    fn answers(tunnel: &Tunnel, now: Micros) -> bool {
        tunnel.answered.is_some_and(|sent| sent + 400 * MS + tunnel.trip.usual() > now)
    }

    /// Far leaders that answer now: those path probes are sent to.
    pub fn targets(&self, now: Micros) -> Vec<Far> {
        self.probed.iter().filter(|tunnel| Self::answers(tunnel, now)).map(|tunnel| tunnel.far).collect()
    }

    /// Whether this node could lead now.
    pub fn is_fit(&self, now: Micros) -> bool {
        now >= self.up_since + SEC && self.most(|tunnel| Self::answers(tunnel, now))
    }

    /// Whether most answered a probe sent at `since` or later.
    pub fn proves(&self, since: Micros) -> bool {
        self.most(|tunnel| tunnel.answered.is_some_and(|sent| sent >= since))
    }

    /// Since when they have been good.
    pub const fn good_since(&self) -> Option<Micros> {
        self.good_since
    }

    /// Whether they were good at `since` and ever since.
    pub fn were_good(&self, since: Micros) -> bool {
        self.good_since.is_some_and(|good| good <= since)
    }

    /// The usual round trip to a far leader.
    pub fn usual(&self, far: Far) -> Micros {
        self.probed.iter().find(|tunnel| tunnel.far == far).map_or(0, |tunnel| tunnel.trip.usual())
    }

    /// The longest usual round trip.
    pub fn longest(&self) -> Micros {
        self.probed.iter().map(|tunnel| tunnel.trip.usual()).max().unwrap_or(0)
    }

    /// Since when every one of them is silent: each has so many misses in a row.
    pub fn silent_since(&self, misses: usize) -> Option<Micros> {
        if self.probed.iter().any(|tunnel| tunnel.row.misses() < misses) {
            return None;
        }
        self.probed.iter().filter_map(|tunnel| tunnel.row.since()).min()
    }
}
