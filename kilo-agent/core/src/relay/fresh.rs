//! Tells repeated messages from fresh ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use super::{NodeId, REORDERED};

/// Numbers that are remembered of one sender: more than it sends within the reordering window.
const MOST_NUMBERS: usize = 512;

/// What was heard from each sender, about each node.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    heard: BTreeMap<(NodeId, NodeId), Heard>,
    /// Repeated messages so far.
    pub(super) refused: u64,
}

#[derive(Clone, Debug, Default)]
struct Heard {
    /// Numbers heard within the reordering window; the last one is the latest of all.
    numbers: BTreeSet<u64>,
    /// When the latest one was heard.
    at: Option<Instant>,
    /// Numbers up to this one are no longer remembered, and count as heard.
    forgotten: u64,
}

/// Whether a number is at most the window behind the latest one.
pub(super) fn is_recent(sequence: u64, latest: u64) -> bool {
    u128::from(latest.saturating_sub(sequence)) <= REORDERED.as_micros()
}

/// Adds a number, and drops those that are no longer within the window.
pub(super) fn remember(numbers: &mut BTreeSet<u64>, number: u64) {
    numbers.insert(number);
    let latest = numbers.last().copied().unwrap_or(number);
    numbers.retain(|known| is_recent(*known, latest));
}

impl Latest {
    /// Takes a message's number; `None`: the message is a repeated one. Else whether no later one was heard.
    pub(super) fn hear(&mut self, of: (NodeId, NodeId), sequence: u64, now: Instant) -> Option<bool> {
        let heard = self.heard.entry(of).or_default();
        let latest = heard.numbers.last().copied();
        let is_later = latest.is_none_or(|latest| sequence > latest);
        // An earlier number may only have taken another path, which is slower by at most the window.
        let is_in_time = || {
            heard.at.is_some_and(|at| now.saturating_duration_since(at) <= REORDERED)
                && latest.is_some_and(|latest| is_recent(sequence, latest))
                && sequence > heard.forgotten
                && !heard.numbers.contains(&sequence)
        };
        if !is_later && !is_in_time() {
            self.refused += 1;
            return None;
        }
        if is_later {
            heard.at = Some(now);
        }
        remember(&mut heard.numbers, sequence);
        if heard.numbers.len() > MOST_NUMBERS {
            heard.forgotten = heard.numbers.pop_first().unwrap_or_default();
        }
        Some(is_later)
    }

    /// Forgets senders that are not known.
    pub(super) fn keep(&mut self, is_known: impl Fn(NodeId) -> bool) {
        self.heard.retain(|(sender, _), _| is_known(*sender));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_message_counts_once_and_an_earlier_one_for_a_while() {
        let (mut latest, start) = (Latest::default(), Instant::now());
        let mut hear =
            |sequence, seconds| latest.hear((1, 2), sequence, start + Duration::from_secs(seconds));
        assert_eq!(hear(9_000_000, 0), Some(true));
        assert_eq!(
            (hear(8_000_000, 2), hear(9_000_000, 2)),
            (Some(false), None),
            "by another path, and again"
        );
        assert_eq!((hear(8_000_000, 2), hear(6_999_999, 2)), (None, None), "again, and too old");
        assert_eq!((hear(8_500_000, 3), hear(9_000_000, 3)), (None, None), "too late");
        // Hearing it does not make it newer.
        assert_eq!((hear(9_000_000, 4), hear(9_000_001, 60)), (None, Some(true)));
        assert_eq!(latest.refused, 6);
    }

    #[test]
    fn a_sender_of_very_many_messages_cannot_repeat_those_that_were_forgotten() {
        let (mut latest, now) = (Latest::default(), Instant::now());
        let mut hear = |sequence| latest.hear((1, 2), sequence, now);
        for sequence in 1..=2 * MOST_NUMBERS as u64 {
            assert_eq!(hear(sequence), Some(true));
        }
        assert_eq!((hear(1), hear(MOST_NUMBERS as u64)), (None, None));
        assert_eq!(latest.heard[&(1, 2)].numbers.len(), MOST_NUMBERS);
    }
}
