//! Which messages are no recorded ones.

use std::collections::BTreeMap;

use super::{NodeId, REORDERED};

/// The latest number heard of each sender, about each node.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest(BTreeMap<(NodeId, NodeId), u64>);

/// Whether a number is no more than the window behind the latest one.
pub(super) fn is_recent(sequence: u64, latest: u64) -> bool {
    u128::from(latest.saturating_sub(sequence)) <= REORDERED.as_micros()
}

impl Latest {
    /// Takes a message's number; `None`: it is a recorded one. Else whether no later one was heard.
    pub(super) fn hear(&mut self, of: (NodeId, NodeId), sequence: u64) -> Option<bool> {
        let latest = self.0.entry(of).or_insert(sequence);
        let is_latest = sequence >= *latest;
        let is_recent = is_recent(sequence, *latest);
        *latest = sequence.max(*latest);
        is_recent.then_some(is_latest)
    }

    /// Forgets all other senders.
    pub(super) fn keep(&mut self, is_known: impl Fn(NodeId) -> bool) {
        self.0.retain(|(sender, _), _| is_known(*sender));
    }
}
