//! Tells replayed messages from fresh ones.

use std::{collections::BTreeMap, time::Instant};

use super::{NodeId, REORDERED};

/// The latest number heard from each sender, about each node, and when.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    heard: BTreeMap<(NodeId, NodeId), (u64, Instant)>,
    /// Replayed messages so far.
    pub(super) refused: u64,
}

/// Whether a number is at most the window behind the latest one.
pub(super) fn is_recent(sequence: u64, latest: u64) -> bool {
    u128::from(latest.saturating_sub(sequence)) <= REORDERED.as_micros()
}

impl Latest {
    /// Takes a message's number; `None`: the message is a replay. Else whether
    /// no later one was heard.
    pub(super) fn hear(&mut self, of: (NodeId, NodeId), sequence: u64, now: Instant) -> Option<bool> {
        let (latest, heard) = *self.heard.entry(of).or_insert((sequence, now));
        if sequence > latest {
            self.heard.insert(of, (sequence, now));
            return Some(true);
        }
        // An earlier number may only have taken another path, which is slower
        // by at most the window.
        let is_in_time = now.saturating_duration_since(heard) <= REORDERED;
        let is_taken = is_in_time && is_recent(sequence, latest);
        self.refused += u64::from(!is_taken);
        is_taken.then_some(sequence == latest)
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
    fn the_last_message_of_a_sender_is_a_recorded_one_after_a_while() {
        let (mut latest, start) = (Latest::default(), Instant::now());
        let mut hear =
            |sequence, seconds| latest.hear((1, 2), sequence, start + Duration::from_secs(seconds));
        assert_eq!(hear(9_000_000, 0), Some(true));
        assert_eq!((hear(8_000_000, 2), hear(9_000_000, 2)), (Some(false), Some(true)), "by another way");
        assert_eq!((hear(8_000_000, 3), hear(9_000_000, 3)), (None, None));
        // Hearing it does not make it newer.
        assert_eq!((hear(9_000_000, 4), hear(9_000_001, 60)), (None, Some(true)));
        assert_eq!(latest.refused, 3);
    }
}
