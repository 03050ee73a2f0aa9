//! Questions and announcements waiting to be sent to nodes of this location, in turns: a thousand members are
//! asked at once.

use std::collections::BTreeMap;

use kilo_common::signal::Kind;
use kilo_core::signal_id::NodeId;
use kilo_failover::Signal;

/// At most one signal per node.
#[derive(Default)]
pub struct Asks {
    waiting: BTreeMap<NodeId, Signal>,
    next_from: NodeId,
}

impl Asks {
    /// Replaces the signal that waits for that node. A question does not replace an announcement, which is
    /// answered like a question, and must not be lost.
    pub fn add(&mut self, node: NodeId, signal: Signal) {
        let announces = |waits: &Signal| waits.kind == Kind::Announce;
        if signal.kind != Kind::Roll || !self.waiting.get(&node).is_some_and(announces) {
            self.waiting.insert(node, signal);
        }
    }

    /// Takes the next signal, in turns over all nodes.
    pub fn take_next(&mut self) -> Option<(NodeId, Signal)> {
        let next = self.waiting.range(self.next_from..).next().or_else(|| self.waiting.first_key_value());
        let node = *next?.0;
        self.next_from = node.wrapping_add(1);
        self.waiting.remove_entry(&node)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn clear(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use kilo_common::{lead::Term, signal::Body};

    use super::*;

    fn signal(kind: Kind, nonce: u64) -> Signal {
        Signal { kind, nonce, term: Term::NONE, sender: 9, location: 1, body: Body::Empty }
    }

    #[test]
    fn a_question_does_not_take_the_place_of_an_announcement() {
        let mut asks = Asks::default();
        let mut left = |kinds: &[Kind]| {
            for (kind, nonce) in kinds.iter().zip(1..) {
                asks.add(7, signal(*kind, nonce));
            }
            let (node, signal) = asks.take_next().unwrap();
            assert_eq!((node, asks.is_empty()), (7, true), "one for each node");
            (signal.kind, signal.nonce)
        };
        assert_eq!(left(&[Kind::Announce, Kind::Roll]), (Kind::Announce, 1));
        assert_eq!(left(&[Kind::Roll, Kind::Announce]), (Kind::Announce, 2));
        assert_eq!(left(&[Kind::Announce, Kind::Announce]), (Kind::Announce, 2), "the later term");
        assert_eq!(left(&[Kind::Roll, Kind::Roll]), (Kind::Roll, 2));
    }

    #[test]
    fn every_node_has_its_turn_however_often_the_first_ones_are_asked_again() {
        let mut asks = Asks::default();
        for node in [1, 2, NodeId::MAX] {
            asks.add(node, signal(Kind::Roll, 0));
        }
        let order: Vec<_> = (0..5)
            .map(|_| {
                let (node, signal) = asks.take_next().unwrap();
                asks.add(node, signal);
                node
            })
            .collect();
        assert_eq!(order, [1, 2, NodeId::MAX, 1, 2]);
    }
}
