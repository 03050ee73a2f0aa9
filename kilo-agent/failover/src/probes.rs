//! Probes of one path: those outstanding, the misses in a row, and the round trip.

use std::collections::VecDeque;

use crate::{MS, Micros, Params};

/// So many misses in a row are more than chance: a path that loses them, but
/// not all, is overloaded.
pub(crate) const LOSSY: usize = 2;
/// Maximum number of probes kept per path.
const KEPT: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Probe {
    nonce: u64,
    at: Micros,
    deadline: Micros,
    missed: bool,
}

/// The probes since the last one that was answered. An answer, even a late one, ends the row: the
/// path worked after everything sent before.
#[derive(Clone, Debug, Default)]
pub struct Row(VecDeque<Probe>);

impl Row {
    /// Records that a probe was sent.
    pub fn sent(&mut self, nonce: u64, at: Micros, deadline: Micros) {
        // The first one shows since when the path is silent.
        if self.0.len() >= KEPT {
            self.0.remove(1);
        }
        self.0.push_back(Probe { nonce, at, deadline, missed: false });
    }

    /// Handles the answer to a probe; returns when that was sent, if it is one of these.
    pub fn answered(&mut self, nonce: u64) -> Option<Micros> {
        let index = self.0.iter().position(|probe| probe.nonce == nonce)?;
        let at = self.0.get(index).map(|probe| probe.at);
        self.0.drain(..=index);
        at
    }

    /// Counts overdue probes as missed; returns whether any are new.
    pub fn expire(&mut self, now: Micros) -> bool {
        let mut new = false;
        for probe in self.0.iter_mut().filter(|probe| !probe.missed && probe.deadline <= now) {
            probe.missed = true;
            new = true;
        }
        new
    }

    /// Misses in a row.
    pub fn misses(&self) -> usize {
        self.0.iter().filter(|probe| probe.missed).count()
    }

    /// When the first missed probe was sent.
    pub fn since(&self) -> Option<Micros> {
        self.0.iter().find(|probe| probe.missed).map(|probe| probe.at)
    }

    /// When the newest probe was sent.
    pub fn newest(&self) -> Option<Micros> {
        self.0.back().map(|probe| probe.at)
    }

    /// When the next probe is overdue.
    pub fn deadline(&self) -> Micros {
        self.0.iter().filter(|probe| !probe.missed).map(|probe| probe.deadline).min().unwrap_or(Micros::MAX)
    }

    /// Forgets all probes: they prove nothing.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Round trip, smoothed as TCP does (RFC 6298).
#[derive(Clone, Copy, Debug)]
pub struct RoundTrip {
    smoothed: i64,
    variation: i64,
    is_first: bool,
}

impl Default for RoundTrip {
    fn default() -> Self {
        Self { smoothed: 60_000, variation: 10_000, is_first: true }
    }
}

impl RoundTrip {
    /// Longer round trips say more about the receiver than about the path.
    const LONGEST: Micros = 400 * MS;

    /// Takes a measured round trip.
    pub fn measured(&mut self, trip: Micros) {
        if trip > Self::LONGEST {
            return;
        }
        let trip = trip as i64;
        if std::mem::take(&mut self.is_first) {
            (self.smoothed, self.variation) = (trip, trip / 2);
        }
        let difference = trip - self.smoothed;
        self.variation += (difference.abs() - self.variation) / 8;
        self.smoothed += difference / 8;
    }

    /// The smoothed round trip.
    pub fn usual(&self) -> Micros {
        self.smoothed.max(0) as Micros
    }

    /// A bound that few round trips exceed.
    pub fn bound(&self) -> Micros {
        (self.smoothed + 4 * self.variation).max(0) as Micros
    }

    /// How long a probe of the path may take.
    pub fn deadline(&self, params: &Params) -> Micros {
        (self.bound() + params.margin).clamp(params.path_deadline.0, params.path_deadline.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn misses_count_probes_and_any_answer_ends_the_row() {
        let mut row = Row::default();
        for i in 0..5 {
            row.sent(i, i * 40, i * 40 + 100);
        }
        assert!(row.expire(200) && !row.expire(200));
        assert_eq!((row.misses(), row.since(), row.deadline()), (3, Some(0), 220));
        assert_eq!(row.answered(1), Some(40), "a late one");
        assert_eq!((row.misses(), row.since()), (1, Some(80)));
        assert_eq!(row.answered(1), None, "twice");
        assert_eq!(row.answered(4), Some(160));
        assert_eq!((row.misses(), row.deadline()), (0, Micros::MAX));
    }

    proptest! {
        #[test]
        fn a_long_silence_is_remembered_from_its_start(count in 65u64..300) {
            let mut row = Row::default();
            for i in 0..count {
                row.sent(i, 1_000 + i, 1_000 + i);
                row.expire(2_000);
            }
            prop_assert_eq!(row.since(), Some(1_000));
            prop_assert!(row.misses() <= KEPT);
        }

        #[test]
        fn the_bound_covers_a_steady_round_trip(trip in 1_000u64..300_000) {
            let mut round = RoundTrip::default();
            (0..80).for_each(|_| round.measured(trip));
            prop_assert!(round.usual().abs_diff(trip) < trip / 50 + 20, "{:?}", round);
            prop_assert!(round.bound() >= round.usual());
        }
    }
}
