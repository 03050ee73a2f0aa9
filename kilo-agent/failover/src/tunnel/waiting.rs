//! The far leaders that are not probed all the time: a few of them are asked when probed ones fall silent, so
//! that the share of all that is silent decides, and not their number.

use super::{LOSSY, Tunnel, Tunnels};
use crate::{Far, Micros, Params, SEC, Turn};

impl Tunnels {
    /// After so long a silence one of a few far locations is dark: most likely it is down, and not this node's
    /// tunnel to it.
    const DARK: Micros = 10 * SEC;

    /// Finds out which of the probed ones are dark. Where there are more locations, others are probed in
    /// their place.
    pub(super) fn set_dark(&mut self, params: &Params, now: Micros) {
        let any_answers = self.probed.iter().any(|tunnel| Self::answers(params, tunnel, now));
        let are_few = self.waiting.is_empty() && self.silent.is_empty();
        for tunnel in &mut self.probed {
            let silent_since = tunnel.row.since().filter(|_| !Self::answers(params, tunnel, now));
            let is_over = silent_since.is_some_and(|since| since + Self::DARK <= now);
            // While all are silent, what was dark stays so.
            tunnel.is_dark = are_few && is_over && (any_answers || tunnel.is_dark);
        }
    }

    /// As [`Self::is_fit`], with dark ones left out.
    pub fn is_fit_but_for_dark(&self, params: &Params, now: Micros) -> bool {
        now >= self.up_since + SEC && self.most(|tunnel| Self::answers(params, tunnel, now))
    }

    /// Records since when it could not lead.
    pub(super) fn note_fitness(&mut self, params: &Params, now: Micros) {
        let is_fit = self.is_fit(params, now);
        self.unfit_since = self.unfit_since.or(Some(now)).filter(|_| !is_fit);
    }

    /// Since when it could not lead, and the far leaders that are dark.
    pub fn lacks(&self) -> Option<(Micros, Vec<Far>)> {
        let dark = self.probed.iter().filter(|tunnel| tunnel.is_dark);
        Some((self.unfit_since?, dark.map(|tunnel| tunnel.far).collect()))
    }

    /// Whether more of the waiting ones have answered than are probed, since the probed ones fell silent.
    pub(super) fn others_answer(&self) -> bool {
        let since = self.probed.iter().filter_map(|tunnel| tunnel.row.since()).min().unwrap_or(0);
        let answers = |tunnel: &&Tunnel| tunnel.answered.is_some_and(|sent| sent >= since);
        self.waiting.iter().filter(answers).count() > self.probed.len()
    }

    /// Asks some of the waiting ones when all probed ones have missed two in a row: those may be
    /// down, or this node's own tunnel. If there are few others, they would not outweigh the probed
    /// ones, and nobody is asked.
    pub(super) fn probe_around(&mut self, params: &Params, turn: &mut Turn<'_>) {
        let count = self.probed.len();
        let is_whole = self.probed.iter().all(|tunnel| tunnel.row.misses() >= LOSSY);
        if !is_whole || count == 0 || self.waiting.len() <= count || turn.now < self.next_around {
            return;
        }
        self.next_around = turn.now + params.roll;
        for _ in 0..self.waiting.len().min(2 * count) {
            let Some(mut tunnel) = self.waiting.pop_front() else { return };
            // A long silence of this node's own tunnel is not their fault.
            tunnel.row.clear();
            tunnel.probe(turn);
            self.waiting.push_back(tunnel);
        }
    }

    /// Asks one of the waiting ones while any is silent and another one answers: soon while those asked are
    /// too few to tell which share of all is silent, else in turn. One that does not answer is asked again
    /// until it is a silent one, too.
    pub(super) fn probe_waiting(&mut self, params: &Params, turn: &mut Turn<'_>) {
        let answers = self.probed.iter().any(|tunnel| Self::answers(params, tunnel, turn.now));
        if self.silent.is_empty() || !answers || turn.now < self.next_waiting {
            return;
        }
        self.waiting.iter_mut().for_each(|tunnel| _ = tunnel.row.expire(turn.now));
        if self.waiting.front().is_some_and(|tunnel| tunnel.row.misses() >= Self::SILENT) {
            self.silent.extend(self.waiting.pop_front());
        } else if self.waiting.front().is_some_and(|tunnel| tunnel.row.misses() == 0) {
            self.waiting.rotate_left(1);
        }
        let Some(tunnel) = self.waiting.front_mut() else { return };
        tunnel.probe(turn);
        let is_known = self.most_of_asked_answer(params, turn.now);
        self.next_waiting = turn.now + if is_known { params.roll } else { params.own };
    }

    /// Whether most of the probed ones answer, and most of all that were asked since one fell silent: a few
    /// that are down count little among many.
    pub(super) fn most_of_asked_answer(&self, params: &Params, now: Micros) -> bool {
        let answer = self.probed.iter().filter(|tunnel| Self::answers(params, tunnel, now)).count();
        let answered = |tunnel: &&Tunnel| {
            tunnel.answered.is_some_and(|sent| sent >= self.silent_from) && tunnel.row.misses() == 0
        };
        let waiting = self.waiting.iter().filter(answered).count();
        answer * 2 > self.probed.len() && answer + waiting > self.probed.len() - answer + self.silent.len()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::of_fars, *};
    use crate::MS;

    #[test]
    fn a_few_silent_far_locations_of_many_are_no_fault_of_this_gateway() {
        let fit = |tunnels: &Tunnels, params: &Params, now| tunnels.is_fit(params, now);
        let times = [2 * SEC, 5 * SEC, 9 * SEC, 60 * SEC];
        let three = |far: Far, now| far > 2 || now < 3 * SEC;
        assert_eq!(of_fars(10, three, &times, fit), [true; 4], "all that it probes");
        let three = |far: Far, now| !(2..=4).contains(&far) || now < 3 * SEC;
        assert_eq!(of_fars(10, three, &times, fit), [true; 4], "one that it probes");
        let one_by_one = |far: Far, now| now < (3 + far) * SEC || far > 3;
        assert_eq!(of_fars(10, one_by_one, &times, fit), [true; 4]);
        let four = |far: Far, now| far > 3 || now < 3 * SEC;
        assert_eq!(of_fars(100, four, &times, fit), [true; 4]);
        for (fars, is_fit) in [(4, false), (6, false), (7, true)] {
            let seen = of_fars(fars, |far, now| far > 2 || now < 3 * SEC, &times, fit);
            assert_eq!(seen[1..], [is_fit; 3], "three of {fars}");
        }
        let six = |far: Far, now| far > 5 || now < 3 * SEC;
        assert_eq!(of_fars(10, six, &times, fit)[1..], [false; 3], "more than half");
        let whole = |_, now| !(3 * SEC..20 * SEC).contains(&now);
        assert_eq!(of_fars(100, whole, &[2 * SEC, 5 * SEC, 22 * SEC], fit), [true, false, true]);
    }

    #[test]
    fn a_leader_does_not_give_away_because_of_three_far_locations_of_many() {
        let silent =
            |tunnels: &Tunnels, params: &Params, _| tunnels.silent_since(params.leader_misses).is_some();
        let times: Vec<Micros> = (200..1_000).map(|tick| tick * 10 * MS).collect();
        let three = |far: Far, now| far > 2 || now < 3 * SEC;
        assert!(of_fars(10, three, &times, silent).iter().all(|silent| !silent));
        assert!(of_fars(6, three, &times, silent).contains(&true), "of few it does");
    }

    #[test]
    fn one_of_few_that_is_silent_for_long_is_left_out_and_counts_again_at_once() {
        let fit = |tunnels: &Tunnels, params: &Params, now| {
            (tunnels.is_fit(params, now), tunnels.is_fit_but_for_dark(params, now))
        };
        let times = [2 * SEC, 12 * SEC, 14 * SEC, 41 * SEC, 43 * SEC];
        let (neither, able, both) = ((false, false), (false, true), (true, true));
        let one = |far: Far, now| far == 0 || !(3 * SEC..40 * SEC).contains(&now);
        assert_eq!(of_fars(2, one, &times, fit), [both, neither, able, both, both], "of two");
        assert_eq!(of_fars(3, one, &times, fit), [both, neither, able, both, both], "two of three");
        let one_of_three = |far: Far, now| far != 0 || !(3 * SEC..40 * SEC).contains(&now);
        assert_eq!(of_fars(3, one_of_three, &times, fit), [both; 5], "one of three");
        let all = |_, now| !(3 * SEC..40 * SEC).contains(&now);
        assert_eq!(of_fars(2, all, &times, fit), [both, neither, neither, both, both], "all at once");
        // Then the other one, too.
        let then = |far: Far, now| now < 3 * SEC || far == 0 && now < 20 * SEC || now > 40 * SEC;
        assert_eq!(of_fars(2, then, &[14 * SEC, 21 * SEC, 43 * SEC], fit), [able, neither, both]);
        let lacks = |tunnels: &Tunnels, _: &Params, _| tunnels.lacks();
        let seen = of_fars(2, one, &[2 * SEC, 14 * SEC, 43 * SEC], lacks);
        assert!(matches!(&seen[1], Some((since, dark)) if *since < 4 * SEC && dark[..] == [1]), "{seen:?}");
        assert_eq!((&seen[0], &seen[2]), (&None, &None));
    }
}
