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

/// What says that the own tunnel carries more than it can: it loses probes, and packets come out of it. A
/// fault of the uplink loses all probes, and mostly all packets.
#[derive(Clone, Debug, Default)]
struct Load {
    /// The kernel's count of packets that came out, and when it was read.
    counted: Option<(u64, Micros)>,
    /// Some have come out since then.
    moved: Option<Micros>,
    /// Until when it is taken for overloaded.
    busy_until: Micros,
    /// Since when.
    busy_since: Micros,
    /// In how many of the seconds since then it was seen, and the end of the last of these.
    seconds: (u64, Micros),
}

impl Load {
    /// How long seconds are counted before that begins anew.
    const WINDOW: Micros = 10 * SEC;

    /// Some probes were lost, and packets come out.
    fn seen(&mut self, params: &Params, at: Micros) {
        if self.busy_until <= at || self.busy_since + Self::WINDOW <= at {
            (self.busy_since, self.seconds) = (at, (0, at));
        }
        let (count, end) = self.seconds;
        if end <= at {
            self.seconds = (count + 1, at + SEC);
        }
        self.busy_until = self.busy_until.max(at + params.busy);
    }

    /// Whether it was seen in most seconds of some, and not when the machine stood still for a moment.
    const fn lasts(&self, now: Micros) -> bool {
        let age = now.saturating_sub(self.busy_since);
        self.busy_until > now && age >= 3 * SEC && self.seconds.0 * SEC * 3 > age * 2
    }
}

/// Probes through the own tunnel to some far leaders.
#[derive(Clone, Debug)]
pub struct Tunnels {
    probed: Vec<Tunnel>,
    up_since: Micros,
    /// Since when most of them have answered without three misses in a row.
    good_since: Option<Micros>,
    /// When an answer came last.
    heard: Option<Micros>,
    load: Load,
    next: Micros,
}

impl Tunnels {
    /// Of an agent that starts now.
    pub fn new(params: &Params, fars: &[Far], now: Micros) -> Self {
        let tunnel =
            |far: &Far| Tunnel { far: *far, row: Row::default(), trip: RoundTrip::default(), answered: None };
        let probed = fars.iter().take(params.targets).map(tunnel).collect();
        Self { probed, up_since: now, good_since: None, heard: None, load: Load::default(), next: now }
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
        let has_missed = self.has_missed(Self::LOSSY) && turn.now >= self.up_since + Self::LEARNT;
        let moves = self.load.moved.is_some_and(|moved| moved + params.own * 13 / 10 > turn.now);
        if has_missed && moves {
            self.load.seen(params, turn.now);
        }
        if turn.now >= self.next {
            // An overloaded tunnel lets some probes through: more of them show it sooner.
            let pause = if has_missed && self.is_busy(turn.now) { params.interval } else { params.own };
            self.next = turn.now + turn.jittered(pause);
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

    /// The kernel's count of packets that have come out of the tunnel, read now.
    pub const fn decrypted(&mut self, count: u64, now: Micros) {
        // What is new came after the reading before.
        if let Some((before, read)) = self.load.counted
            && before != count
        {
            self.load.moved = Some(read);
        }
        self.load.counted = Some((count, now));
    }

    /// Whether it carries more than it can.
    pub const fn is_busy(&self, now: Micros) -> bool {
        self.load.busy_until > now
    }

    /// Whether it has done so for long enough to bother somebody with it.
    pub const fn stays_busy(&self, now: Micros) -> bool {
        self.load.lasts(now)
    }

    /// Another gateway of a far location answers now: what the one before has missed says nothing of it.
    pub fn far_moved(&mut self, far: Far) {
        self.probed.iter_mut().filter(|tunnel| tunnel.far == far).for_each(|tunnel| tunnel.row.clear());
    }

    /// A probe was answered; whether it was one of these.
    pub fn answered(&mut self, params: &Params, nonce: u64, at: Micros) -> bool {
        let has_missed = self.has_missed(Self::LOSSY) && at >= self.up_since + Self::LEARNT;
        for tunnel in &mut self.probed {
            let Some(sent) = tunnel.row.answered(nonce) else { continue };
            tunnel.trip.measured(at.saturating_sub(sent));
            tunnel.answered = tunnel.answered.max(Some(sent));
            self.heard = self.heard.max(Some(at));
            if has_missed {
                // Some are lost, and not all.
                self.load.seen(params, at);
            }
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

    /// Misses in a row of most tunnels that are no accident.
    const LOSSY: usize = 2;
    /// Until round trips are known, deadlines are guesses.
    const LEARNT: Micros = 2 * SEC;

    fn has_missed(&self, misses: usize) -> bool {
        !self.probed.is_empty() && self.most(|tunnel| tunnel.row.misses() >= misses)
    }

    fn most(&self, is_good: impl Fn(&Tunnel) -> bool) -> bool {
        self.probed.iter().filter(|tunnel| is_good(tunnel)).count() * 2 > self.probed.len()
    }

    fn answers(params: &Params, tunnel: &Tunnel, now: Micros) -> bool {
        tunnel.answered.is_some_and(|sent| sent + params.answers + tunnel.trip.usual() > now)
    }

    /// Far leaders that answer now: those path probes are sent to.
    pub fn targets(&self, params: &Params, now: Micros) -> Vec<Far> {
        let answers = self.probed.iter().filter(|tunnel| Self::answers(params, tunnel, now));
        answers.map(|tunnel| tunnel.far).collect()
    }

    /// Whether this node could lead now.
    pub fn is_fit(&self, params: &Params, now: Micros) -> bool {
        now >= self.up_since + SEC && self.most(|tunnel| Self::answers(params, tunnel, now))
    }

    /// Whether every one of them answers now.
    pub fn all_answer(&self, params: &Params, now: Micros) -> bool {
        self.probed.iter().all(|tunnel| Self::answers(params, tunnel, now))
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

    /// For how long no answer has come, even a late one, to probes that were sent at `since` or later.
    pub fn quiet_for(&self, since: Micros, now: Micros) -> Micros {
        now.saturating_sub(self.heard.map_or(since, |heard| heard.max(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One far leader that answers every probe for 3 s, and from then on those whose number `answers` names; the count of
    /// packets goes on as long as `moves` says. Whether it is busy, and for how long it is quiet, a second later.
    fn after_a_second(answers: fn(u64) -> bool, moves: bool) -> (bool, Micros) {
        const SINCE: Micros = 3 * SEC;
        let params = Params::default();
        let mut tunnels = Tunnels::new(&params, &[7], 0);
        let (mut number, mut count, mut probes, mut now) = (0, 0, 0, 0);
        while now < SINCE + SEC {
            let (mut out, mut later) = (Vec::new(), Vec::new());
            let mut random = || {
                number += 1;
                number
            };
            count += u64::from(moves || now < SINCE);
            tunnels.decrypted(count, now);
            tunnels
                .wake_up(&params, &mut Turn { now, random: &mut random, out: &mut out, later: &mut later });
            for output in out {
                let Output::Probe { nonce, .. } = output else { continue };
                probes += 1;
                if now < SINCE || answers(probes) {
                    assert!(tunnels.answered(&params, nonce, now + 2 * MS));
                }
            }
            now += 10 * MS;
        }
        (tunnels.is_busy(now), tunnels.quiet_for(SINCE, now))
    }

    #[test]
    fn what_loses_some_probes_is_overloaded_and_what_loses_all_and_all_packets_is_not() {
        let one_of_four = |probe: u64| probe.is_multiple_of(4);
        let none = |_: u64| false;
        assert!(after_a_second(one_of_four, true).0);
        assert!(after_a_second(one_of_four, false).0, "a flood one way");
        assert!(after_a_second(none, true).0, "the way in works");
        assert!(!after_a_second(none, false).0, "its uplink is dead");
        assert!(!after_a_second(|_| true, true).0, "nothing is lost");
    }

    #[test]
    fn only_an_overload_that_goes_on_is_worth_a_word() {
        let params = Params::default();
        let lasts = |seen: &[Micros], now| {
            let mut load = Load::default();
            seen.iter().for_each(|at| load.seen(&params, *at));
            load.lasts(now)
        };
        let each_second = [10, 11, 12, 13].map(|at| at * SEC);
        assert!(lasts(&each_second, 13 * SEC));
        assert!(!lasts(&each_second[..3], 12 * SEC), "not yet");
        assert!(!lasts(&each_second, 13 * SEC + params.busy), "it is over");
        assert!(!lasts(&[10 * SEC, 10 * SEC + 100 * MS, 10 * SEC + 200 * MS], 13 * SEC), "one moment");
        assert!(!lasts(&[10, 13, 16, 19].map(|at| at * SEC), 19 * SEC), "a moment each three seconds");
        let rarely: Vec<Micros> = (0..900).map(|i| i * 4 * SEC).collect();
        let then = (3_600..3_620).map(|at| at * SEC);
        assert!(
            lasts(&rarely.into_iter().chain(then).collect::<Vec<_>>(), 3_619 * SEC),
            "after an hour of moments"
        );
    }

    #[test]
    fn any_answer_ends_the_silence() {
        assert!(after_a_second(|probe| probe.is_multiple_of(4), true).1 < 400 * MS);
        assert!(after_a_second(|_| false, true).1 >= 900 * MS);
    }

    #[test]
    fn what_one_gateway_missed_says_nothing_of_the_next() {
        let params = Params::default();
        let mut tunnels = Tunnels::new(&params, &[7], 0);
        for now in (0..20).map(|i| i * 50 * MS) {
            let mut random = || now;
            let (mut out, mut later) = (Vec::new(), Vec::new());
            tunnels
                .wake_up(&params, &mut Turn { now, random: &mut random, out: &mut out, later: &mut later });
        }
        assert!(tunnels.silent_since(params.leader_misses).is_some());
        tunnels.far_moved(7);
        assert_eq!(tunnels.silent_since(1), None);
    }
}
