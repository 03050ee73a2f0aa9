//! The roll call of a gateway: which members' kernels answer, and which gateway each uses.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Micros, NodeId, SEC, Term};

/// What a member's kernel last reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// When its last answer came.
    pub at: Micros,
    /// The nonce of the ROLL it answered; the next ANNOUNCE carries it, too.
    pub nonce: u64,
    /// Its cookie, a secret for this gateway.
    pub cookie: u64,
    /// The term and the gateway of its word.
    pub word: (Term, NodeId),
}

/// A ROLL that was sent.
#[derive(Clone, Copy, Debug)]
struct Question {
    /// Its nonce, which the answer repeats.
    nonce: u64,
    /// Whether PRESENT has come: there is one for each.
    is_answered: bool,
}

/// All nodes that have answered a roll call.
#[derive(Clone, Debug, Default)]
pub struct Roll {
    members: BTreeMap<NodeId, Present>,
    /// When each was first heard to use another gateway than before.
    changed_gateway: BTreeMap<NodeId, Micros>,
    /// The last two ROLLs to each.
    asked: BTreeMap<NodeId, [Option<Question>; 2]>,
    /// Kernels heard before this do not count as reachable now.
    since: Micros,
    /// Index of the next node to be called when the location is called in parts.
    position: usize,
}

impl Roll {
    /// Minimum time for which an answer counts.
    pub const FRESH: Micros = 3 * SEC;
    /// What each node adds to that: a large location is called less often, and three answers may be lost.
    const EACH: Micros = SEC / 33;

    /// How long an answer counts.
    pub fn counts_for(&self) -> Micros {
        Self::FRESH.max(self.asked.len() as u64 * Self::EACH)
    }

    /// The next `count` nodes to be called, in turn, and all gateways each time.
    pub fn next(&mut self, nodes: &[NodeId], gateways: &[NodeId], count: usize) -> BTreeSet<NodeId> {
        let begin = self.position % nodes.len().max(1);
        self.position = begin + count;
        let (first, rest) = nodes.split_at(begin.min(nodes.len()));
        let part = rest.iter().chain(first).take(count);
        part.chain(gateways.iter().filter(|gateway| nodes.contains(gateway))).copied().collect()
    }

    /// Forgets nodes that are no longer in the location.
    pub fn set_nodes(&mut self, nodes: &[NodeId]) {
        self.members.retain(|member, _| nodes.contains(member));
        self.changed_gateway.retain(|member, _| nodes.contains(member));
        self.asked.retain(|member, _| nodes.contains(member));
    }

    /// Records that a member was asked, with this nonce.
    pub fn asked(&mut self, member: NodeId, nonce: u64) {
        let asked = self.asked.entry(member).or_default();
        *asked = [Some(Question { nonce, is_answered: false }), asked[0]];
    }

    /// Handles a member's answer; `false`: nobody asked for it, or it has been answered.
    pub fn heard(&mut self, member: NodeId, present: Present) -> bool {
        let asked = self.asked.get_mut(&member).into_iter().flatten().flatten();
        let mut open = asked.filter(|question| question.nonce == present.nonce && !question.is_answered);
        let Some(question) = open.next() else { return false };
        question.is_answered = true;
        let before = self.members.insert(member, present);
        if before.is_some_and(|before| before.word.1 != present.word.1) {
            self.changed_gateway.insert(member, present.at);
        }
        true
    }

    /// Records that a member obeyed the ANNOUNCE with this nonce; `false`: it was not sent one lately, so
    /// the signal is a replay.
    pub fn followed(&mut self, member: NodeId, nonce: u64, at: Micros, word: (Term, NodeId)) -> bool {
        let was_asked = self.was_asked(member, nonce);
        let Some(present) = self.members.get_mut(&member) else { return false };
        if was_asked {
            present.at = at;
        }
        // The ANNOUNCE that it obeys came after its last answer, although it was called twice since.
        let is_known = was_asked || present.nonce == nonce;
        if is_known {
            if present.word.1 != word.1 {
                self.changed_gateway.insert(member, at);
            }
            present.word = word;
        }
        is_known
    }

    fn was_asked(&self, member: NodeId, nonce: u64) -> bool {
        self.asked.get(&member).into_iter().flatten().flatten().any(|question| question.nonce == nonce)
    }

    /// From now on only members heard again are reachable: signals must have passed both
    /// ways since a suspicion.
    pub fn start_over(&mut self, now: Micros) {
        self.since = now;
    }

    /// What a member last said, if that was lately.
    pub fn fresh(&self, member: NodeId, now: Micros) -> Option<&Present> {
        self.members.get(&member).filter(|present| present.at + self.counts_for() > now)
    }

    /// As [`Self::fresh`], counting only answers since the last suspicion.
    pub fn reachable(&self, member: NodeId, now: Micros) -> Option<&Present> {
        self.fresh(member, now).filter(|present| present.at >= self.since)
    }

    /// What a member last said, however long ago.
    pub fn last(&self, member: NodeId) -> Option<&Present> {
        self.members.get(&member)
    }

    /// Whether a member has changed to another gateway since then.
    pub fn has_changed_gateway(&self, member: NodeId, since: Micros) -> bool {
        self.changed_gateway.get(&member).is_some_and(|at| *at >= since)
    }

    /// Members heard lately, and what they said.
    pub fn heard_lately(&self, now: Micros) -> impl Iterator<Item = (NodeId, &Present)> + '_ {
        let counts_for = self.counts_for();
        let is_fresh = move |present: &&Present| present.at + counts_for > now;
        self.members
            .iter()
            .map(|(member, present)| (*member, present))
            .filter(move |(_, present)| is_fresh(present))
    }

    /// What the kernels of all members but one last said.
    pub fn words_but(&self, member: NodeId) -> impl Iterator<Item = (Term, NodeId)> + '_ {
        self.members.iter().filter(move |(other, _)| **other != member).map(|(_, present)| present.word)
    }

    /// Members heard lately, and the gateway each uses.
    pub fn users(&self, now: Micros) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
        self.heard_lately(now).map(|(member, present)| (member, present.word.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Params;

    #[test]
    fn a_recorded_answer_is_no_sign_that_a_node_is_there() {
        let (member, word) = (9, (Term::NONE, 1));
        let mut roll = Roll::default();
        roll.asked(member, 5);
        assert!(roll.heard(member, Present { at: 0, nonce: 5, cookie: 1, word }));
        assert!(roll.followed(member, 5, SEC, (Term::NONE.next(2), 2)));
        [6, 7].into_iter().for_each(|nonce| roll.asked(member, nonce));
        // It may have been called twice since, and not be there any more.
        assert!(roll.followed(member, 5, 9 * SEC, word));
        assert!(!roll.followed(member, 4, 9 * SEC, word));
        assert!(!roll.heard(member, Present { at: 9 * SEC, nonce: 5, cookie: 1, word }));
        assert_eq!(roll.last(member).map(|present| present.at), Some(SEC));
    }

    #[test]
    fn a_question_is_answered_once() {
        let mut roll = Roll::default();
        let present = |nonce| Present { at: 0, nonce, cookie: 1, word: (Term::NONE, 1) };
        assert!(!roll.heard(9, present(0)), "nobody has asked");
        [5, 6].into_iter().for_each(|nonce| roll.asked(9, nonce));
        let heard = [6, 5, 6, 5, 0].map(|nonce| roll.heard(9, present(nonce)));
        assert_eq!(heard, [true, true, false, false, false]);
    }

    #[test]
    fn who_goes_to_another_gateway_has_changed_it_since_then() {
        let (member, term) = (9, Term::NONE.next(2));
        let mut roll = Roll::default();
        for (at, word, changed_gateway) in [
            (1, (Term::NONE, 1), None),
            (2, (term, 1), None),
            (3, (term.next(2), 2), Some(3)),
            (4, (term.next(2), 2), Some(3)),
        ] {
            roll.asked(member, at);
            assert!(roll.heard(member, Present { at, nonce: at, cookie: 1, word }));
            assert_eq!(
                (1..9).rev().find(|since| roll.has_changed_gateway(member, *since)),
                changed_gateway,
                "at {at}"
            );
        }
        roll.asked(member, 5);
        assert!(roll.followed(member, 5, 5, (term.next(3), 3)));
        assert!(roll.has_changed_gateway(member, 5) && !roll.has_changed_gateway(member, 6));
    }

    #[test]
    fn gateways_are_called_as_often_however_many_members_there_are() {
        let params = Params::default();
        for count in [1, 5, 39, 80, 500, 1_000, 1_010, 4_000, 10_000] {
            let nodes: Vec<NodeId> = (1..=count).collect();
            let gateways: Vec<NodeId> = [1, count / 2, count].into_iter().filter(|id| *id > 0).collect();
            let (pause, part) = params.roll_of(nodes.len());
            assert!(pause <= params.roll, "{count} nodes: gateways are called every {pause} µs");
            let mut roll = Roll::default();
            let mut called = BTreeSet::new();
            // Everybody has been called when the whole roll has.
            let whole = params.roll.max(count * SEC / params.roll_rate);
            let calls = whole.div_ceil(pause);
            for _ in 0..calls {
                let next = roll.next(&nodes, &gateways, part);
                assert!(gateways.iter().all(|gateway| next.contains(gateway)), "{count} nodes");
                assert!(next.len() <= part + gateways.len(), "{count} nodes: {} at once", next.len());
                called.extend(next);
            }
            assert_eq!(called.len(), nodes.len());
            // The ring has room for the answers to one call.
            assert!(part <= 80, "{count} nodes: {part} at once");
        }
    }
}
