//! A gateway's own tunnels: whether it could lead, and the proof that it could while the
//! leader's path did not work.

mod waiting;

use std::collections::VecDeque;

use crate::{
    Far, MS, Micros, Output, Params, ProbePath, SEC, Turn,
    probes::{LOSSY, RoundTrip, Row},
};

#[derive(Clone, Debug)]
struct Tunnel {
    far: Far,
    row: Row,
    trip: RoundTrip,
    /// When the newest answered probe was sent.
    answered: Option<Micros>,
    /// It has been silent for long while another one answered, and no other could be probed in its place.
    is_dark: bool,
}

impl Tunnel {
    fn new(far: Far) -> Self {
        Self { far, row: Row::default(), trip: RoundTrip::default(), answered: None, is_dark: false }
    }

    /// Sends a probe, which is missed after one and a half round trips and 30 ms.
    fn probe(&mut self, turn: &mut Turn<'_>) {
        let nonce = turn.nonce();
        self.row.sent(nonce, turn.now, turn.now + self.trip.usual() * 3 / 2 + 30 * MS);
        turn.push(Output::Probe { nonce, path: ProbePath::Own(self.far) });
    }

    /// Handles the answer to the probe with this nonce; returns whether it was one of this tunnel's.
    fn take_answer(&mut self, nonce: u64, at: Micros) -> bool {
        let Some(sent) = self.row.answered(nonce) else { return false };
        self.trip.measured(at.saturating_sub(sent));
        self.answered = self.answered.max(Some(sent));
        self.is_dark = false;
        true
    }
}

/// Signs that this node's own tunnel carries more than it can: it loses probes, and packets come out of it. A
/// fault of the uplink loses all probes, and mostly all packets.
#[derive(Clone, Debug, Default)]
struct Load {
    /// The kernel's count of packets that came out, and when it was read.
    counted: Option<(u64, Micros)>,
    /// Packets have come out since then.
    moved: Option<Micros>,
    /// Until when the tunnel counts as overloaded.
    busy_until: Micros,
    /// Since when it has counted as overloaded.
    busy_since: Micros,
    /// In how many of the seconds since then overload was observed, and the end of the last of these.
    seconds: (u64, Micros),
}

impl Load {
    /// How long seconds are counted before the count begins anew.
    const WINDOW: Micros = 10 * SEC;

    /// Records that some probes were lost while packets came out.
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

    /// Whether overload was observed in most seconds of a while, and not only when the machine
    /// stood still for a moment.
    const fn lasts(&self, now: Micros) -> bool {
        let age = now.saturating_sub(self.busy_since);
        self.busy_until > now && age >= 3 * SEC && self.seconds.0 * SEC * 3 > age * 2
    }
}

/// Probes through this node's own tunnel to some far leaders.
#[derive(Clone, Debug)]
pub struct Tunnels {
    probed: Vec<Tunnel>,
    /// The other far leaders: one of them takes the place of a probed one that is silent.
    waiting: VecDeque<Tunnel>,
    /// Those that fell silent while another one answered. They count against this node until they answer
    /// again: otherwise a node that reaches few locations would ask on until it has found these.
    silent: VecDeque<Tunnel>,
    /// When one of `silent` is probed next.
    next_silent: Micros,
    /// Since when any is silent: what others answered before that says nothing about now.
    silent_from: Micros,
    /// When one of `waiting` is probed next, and when several are because all probed ones are silent.
    next_waiting: Micros,
    next_around: Micros,
    up_since: Micros,
    /// Since when most probed ones have answered without three misses in a row.
    good_since: Option<Micros>,
    /// Since when it could not lead ([`Self::is_fit`]).
    unfit_since: Option<Micros>,
    /// When the last answer came.
    heard: Option<Micros>,
    load: Load,
    next: Micros,
}

impl Tunnels {
    /// The tunnels of an agent that starts now.
    pub fn new(params: &Params, fars: &[Far], now: Micros) -> Self {
        let (first, rest) = fars.split_at(fars.len().min(params.targets));
        Self {
            probed: first.iter().map(|far| Tunnel::new(*far)).collect(),
            waiting: rest.iter().copied().map(Tunnel::new).collect(),
            silent: VecDeque::new(),
            next_silent: now,
            silent_from: now,
            next_waiting: now,
            next_around: now,
            up_since: now,
            good_since: None,
            unfit_since: None,
            heard: None,
            load: Load::default(),
            next: now,
        }
    }

    /// Takes over other far leaders; keeps what is known of those that stay.
    pub fn set_fars(&mut self, params: &Params, fars: &[Far], now: Micros) {
        self.probed.retain(|tunnel| fars.contains(&tunnel.far));
        self.silent.retain(|tunnel| fars.contains(&tunnel.far));
        self.waiting.retain(|tunnel| fars.contains(&tunnel.far));
        let known: Vec<Far> = self.all().map(|tunnel| tunnel.far).collect();
        self.waiting.extend(fars.iter().filter(|far| !known.contains(far)).map(|far| Tunnel::new(*far)));
        while self.probed.len() < params.targets
            && let Some(tunnel) = self.waiting.pop_front()
        {
            self.probed.push(Tunnel::new(tunnel.far));
        }
        while self.probed.len() < params.targets
            && let Some(tunnel) = self.silent.pop_front()
        {
            self.probed.push(tunnel);
        }
        self.next_silent = self.next_silent.max(now);
    }

    fn all(&self) -> impl Iterator<Item = &Tunnel> {
        self.probed.iter().chain(&self.waiting).chain(&self.silent)
    }

    /// Probes others in place of those that are silent, while one of the probed ones or enough of the others
    /// answer: which of many locations are down says nothing about this node's own tunnel.
    fn replace_silent(&mut self, params: &Params, now: Micros) {
        let is_whole = !self.probed.iter().any(|tunnel| Self::answers(params, tunnel, now));
        if is_whole && !self.others_answer() {
            return;
        }
        for tunnel in &mut self.probed {
            let is_silent = tunnel.row.misses() >= Self::SILENT && !Self::answers(params, tunnel, now);
            let answers = || self.waiting.iter().position(|tunnel| tunnel.row.misses() == 0);
            if is_silent && let Some(mut next) = answers().and_then(|at| self.waiting.remove(at)) {
                if self.silent.is_empty() {
                    self.silent_from = tunnel.row.since().unwrap_or(now);
                }
                next.row.clear();
                self.silent.push_back(std::mem::replace(tunnel, next));
            }
        }
    }

    /// Probes one of the silent ones again, in turn.
    fn probe_silent(&mut self, params: &Params, turn: &mut Turn<'_>) {
        if turn.now < self.next_silent {
            return;
        }
        let Some(mut tunnel) = self.silent.pop_front() else { return };
        self.next_silent = turn.now + params.roll;
        tunnel.probe(turn);
        self.silent.push_back(tunnel);
    }

    /// When the next probes are due.
    pub const fn next(&self) -> Micros {
        self.next
    }

    /// When the next miss is known, once there was one: a first miss can wait for the next probe.
    pub fn deadline(&self) -> Micros {
        let missed = self.probed.iter().filter(|tunnel| tunnel.row.misses() > 0);
        missed.map(|tunnel| tunnel.row.deadline()).fold(Micros::MAX, Micros::min)
    }

    /// Sends what is due and counts what is overdue.
    pub fn wake_up(&mut self, params: &Params, turn: &mut Turn<'_>) {
        for tunnel in &mut self.probed {
            tunnel.row.expire(turn.now);
        }
        self.set_dark(params, turn.now);
        if !self.most(|tunnel| tunnel.row.misses() < 3) {
            self.good_since = None;
        }
        self.note_fitness(params, turn.now);
        let has_missed = self.has_missed(LOSSY) && turn.now >= self.up_since + Self::LEARNT;
        let moves = self.load.moved.is_some_and(|moved| moved + params.own * 13 / 10 > turn.now);
        if has_missed && moves {
            self.load.seen(params, turn.now);
        }
        self.probe_around(params, turn);
        if turn.now >= self.next {
            // An overloaded tunnel lets some probes through: more of them show that sooner.
            let pause = if has_missed && self.is_busy(turn.now) { params.interval } else { params.own };
            self.next = turn.now + turn.jittered(pause);
            let fars: Vec<_> = self.probed.iter().map(|tunnel| tunnel.far).collect();
            fars.into_iter().for_each(|far| self.probe(far, turn));
            self.replace_silent(params, turn.now);
            self.probe_silent(params, turn);
            self.probe_waiting(params, turn);
        }
    }

    /// Sends a probe at once.
    pub fn probe(&mut self, far: Far, turn: &mut Turn<'_>) {
        if let Some(tunnel) = self.probed.iter_mut().find(|tunnel| tunnel.far == far) {
            tunnel.probe(turn);
        }
    }

    /// Sends a probe, unless the newest was sent less than `pause` ago.
    pub fn probe_again(&mut self, far: Far, pause: Micros, turn: &mut Turn<'_>) {
        let of_far = self.probed.iter().find(|tunnel| tunnel.far == far);
        let newest = of_far.and_then(|tunnel| tunnel.row.newest().max(tunnel.answered));
        if newest.is_none_or(|newest| newest + pause <= turn.now) {
            self.probe(far, turn);
        }
    }

    /// Takes the kernel's count of packets that have come out of the tunnel, read now.
    pub const fn decrypted(&mut self, count: u64, now: Micros) {
        // New packets came after the previous reading.
        if let Some((before, read)) = self.load.counted
            && before != count
        {
            self.load.moved = Some(read);
        }
        self.load.counted = Some((count, now));
    }

    /// Whether this node's own tunnel is overloaded: it has to carry more than it can.
    pub const fn is_busy(&self, now: Micros) -> bool {
        self.load.busy_until > now
    }

    /// Whether it has been overloaded for long enough to be reported.
    pub const fn stays_busy(&self, now: Micros) -> bool {
        self.load.lasts(now)
    }

    /// Another gateway of a far location answers now: misses of the previous one say nothing about it.
    pub fn far_moved(&mut self, far: Far) {
        let known = self.probed.iter_mut().chain(&mut self.waiting).filter(|tunnel| tunnel.far == far);
        known.for_each(|tunnel| tunnel.row.clear());
    }

    /// Handles the answer to a probe; returns whether it was one of these.
    pub fn answered(&mut self, params: &Params, nonce: u64, at: Micros) -> bool {
        let has_missed = self.has_missed(LOSSY) && at >= self.up_since + Self::LEARNT;
        for tunnel in &mut self.probed {
            if !tunnel.take_answer(nonce, at) {
                continue;
            }
            self.heard = self.heard.max(Some(at));
            if has_missed {
                // Some are lost, but not all.
                self.load.seen(params, at);
            }
            if self.good_since.is_none() && self.most(|tunnel| tunnel.row.misses() < 3) {
                self.good_since = Some(at);
            }
            return true;
        }
        let waits = self.waiting.iter_mut().any(|tunnel| tunnel.take_answer(nonce, at));
        let again = self.silent.iter_mut().position(|tunnel| tunnel.take_answer(nonce, at));
        self.waiting.extend(again.and_then(|at| self.silent.remove(at)));
        waits || again.is_some()
    }

    /// Drops outstanding probes, which prove nothing: the agent slept.
    pub fn discard(&mut self) {
        self.probed.iter_mut().chain(&mut self.waiting).for_each(|tunnel| tunnel.row.clear());
    }

    /// Misses in a row after which another far leader is probed in place of this one, while others answer.
    const SILENT: usize = 6;
    /// How long it takes until round trips are known: before, deadlines are guesses.
    const LEARNT: Micros = 2 * SEC;

    fn has_missed(&self, misses: usize) -> bool {
        !self.probed.is_empty() && self.most(|tunnel| tunnel.row.misses() >= misses)
    }

    /// Whether that holds for most of the probed ones, dark ones left out.
    fn most(&self, is_good: impl Fn(&Tunnel) -> bool) -> bool {
        let lit = || self.probed.iter().filter(|tunnel| !tunnel.is_dark);
        lit().filter(|tunnel| is_good(tunnel)).count() * 2 > lit().count()
    }

    fn answers(params: &Params, tunnel: &Tunnel, now: Micros) -> bool {
        tunnel.answered.is_some_and(|sent| sent + params.answers + tunnel.trip.usual() > now)
    }

    /// Far leaders that answer now, to which path probes are sent.
    pub fn targets(&self, params: &Params, now: Micros) -> Vec<Far> {
        let answers = self.probed.iter().filter(|tunnel| Self::answers(params, tunnel, now));
        answers.map(|tunnel| tunnel.far).collect()
    }

    /// Whether this node could lead now.
    pub fn is_fit(&self, params: &Params, now: Micros) -> bool {
        now >= self.up_since + SEC && self.most_of_asked_answer(params, now)
    }

    /// Whether every probed far leader answers now, and none was replaced as silent.
    pub fn all_answer(&self, params: &Params, now: Micros) -> bool {
        self.silent.is_empty() && self.probed.iter().all(|tunnel| Self::answers(params, tunnel, now))
    }

    /// Whether most of the probed ones answered a probe sent at `since` or later.
    pub fn proves(&self, since: Micros) -> bool {
        self.most(|tunnel| tunnel.answered.is_some_and(|sent| sent >= since))
    }

    /// Since when most of the probed ones have answered without three misses in a row.
    pub const fn good_since(&self) -> Option<Micros> {
        self.good_since
    }

    /// Whether they have been good since `since` or longer.
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

    /// Since when all of them have been silent: each has so many misses in a row, and the others
    /// do not answer instead.
    pub fn silent_since(&self, misses: usize) -> Option<Micros> {
        if self.probed.iter().any(|tunnel| tunnel.row.misses() < misses) || self.others_answer() {
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

    /// One far leader that answers every probe for 3 s, and from then on those whose number `answers`
    /// accepts; the count of packets keeps growing if `moves`. Returns whether the tunnel is busy, and for
    /// how long it is quiet, a second later.
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

    /// As [`of_fars`], with ten far leaders.
    fn at_times<T>(
        answers: fn(Far, Micros) -> bool,
        times: &[Micros],
        see: fn(&Tunnels, &Params, Micros) -> T,
    ) -> Vec<T> {
        of_fars(10, answers, times, see)
    }

    /// So many far leaders, each of which answers while `answers` says so; returns the state of the tunnels
    /// at each of these times.
    pub(super) fn of_fars<T>(
        fars: Far,
        answers: fn(Far, Micros) -> bool,
        times: &[Micros],
        see: fn(&Tunnels, &Params, Micros) -> T,
    ) -> Vec<T> {
        let (params, fars) = (Params::default(), (0..fars).collect::<Vec<_>>());
        let mut tunnels = Tunnels::new(&params, &fars, 0);
        let (mut number, mut seen) = (0, Vec::new());
        for now in (0..=times.last().copied().unwrap_or(0)).step_by(10_000) {
            let (mut out, mut later) = (Vec::new(), Vec::new());
            let mut random = || {
                number += 1;
                number
            };
            tunnels
                .wake_up(&params, &mut Turn { now, random: &mut random, out: &mut out, later: &mut later });
            for output in out {
                if let Output::Probe { nonce, path: ProbePath::Own(far) } = output
                    && answers(far, now)
                {
                    assert!(tunnels.answered(&params, nonce, now + 2 * MS));
                }
            }
            seen.extend(times.contains(&now).then(|| see(&tunnels, &params, now)));
        }
        seen
    }

    #[test]
    fn others_are_asked_in_the_place_of_far_leaders_that_are_silent() {
        let fit = |tunnels: &Tunnels, params: &Params, now| tunnels.is_fit(params, now);
        // Two of the first three are down from the start, or from 3 s on, and back at 8 s.
        assert_eq!(at_times(|far, _| far > 1, &[2 * SEC], fit), [true]);
        let two_fall = |far, now| far > 1 || !(3 * SEC..8 * SEC).contains(&now);
        assert_eq!(
            at_times(two_fall, &[2 * SEC, 3_450 * MS, 5 * SEC, 12 * SEC], fit),
            [true, false, true, true]
        );
        let all = |tunnels: &Tunnels, params: &Params, now| tunnels.all_answer(params, now);
        assert_eq!(at_times(two_fall, &[2 * SEC, 5 * SEC, 12 * SEC], all), [true, false, true]);
    }

    #[test]
    fn who_reaches_few_of_many_locations_is_not_fit_by_asking_on() {
        let fit = |tunnels: &Tunnels, params: &Params, now| tunnels.is_fit(params, now);
        let times: Vec<Micros> = (2..60).map(|second| second * SEC).collect();
        let seen = at_times(|far, _| [0, 8, 9].contains(&far), &times, fit);
        assert!(seen.iter().all(|fit| !fit), "{seen:?}");
    }

    #[test]
    fn a_tunnel_that_is_silent_as_a_whole_is_known_as_soon() {
        let silent =
            |tunnels: &Tunnels, params: &Params, _| tunnels.silent_since(params.leader_misses).is_some();
        let seen = at_times(|_, now| now < 3 * SEC, &[2_900 * MS, 3_600 * MS, 9 * SEC], silent);
        assert_eq!(seen, [false, true, true]);
        let fit = |tunnels: &Tunnels, params: &Params, now| tunnels.is_fit(params, now);
        assert_eq!(
            at_times(|_, now| now < 3 * SEC, &[2_900 * MS, 3_600 * MS, 9 * SEC], fit),
            [true, false, false]
        );
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
