//! Collects far leaders' answers to CLAIMs. Of a single leader the answer counts as it is; with several, all
//! must have moved a member's prefixes, because packets reach it from each of them.

use std::collections::{BTreeMap, BTreeSet};

use kilo_failover::{
    Far, NodeId, Signal, Term, far,
    signal::{Body, MAX_MEMBERS},
};

use crate::far::FarLocation;

/// The members that each far leader has moved, by location, by term asked in and by part of the CLAIM.
#[derive(Debug, Default)]
pub struct Moved {
    locations: BTreeMap<Far, BTreeMap<Term, Parts>>,
    /// Gateways of each location that have ever answered this agent. Two that are both behind NAT never do, and
    /// are not waited for; one that did and is silent now has an agent that is dead.
    heard: BTreeMap<Far, BTreeSet<NodeId>>,
}

/// Members that each gateway has moved, by part of the CLAIM.
type Parts = BTreeMap<(u16, u16), BTreeMap<NodeId, BTreeSet<NodeId>>>;

/// What this node has asked: nothing else is recorded, whatever another location sends.
pub struct Asked<'a> {
    /// Whether it has asked in this term.
    pub in_term: &'a dyn Fn(Term) -> bool,
    /// Nodes that it could have named.
    pub nodes: &'a [NodeId],
}

impl Asked<'_> {
    /// Whether a CLAIM or END could have this part: the sender may know some more nodes.
    fn has_part(&self, (part, parts): (u16, u16)) -> bool {
        part < parts && usize::from(parts) <= self.nodes.len() / MAX_MEMBERS + 2
    }
}

impl Moved {
    /// Forgets locations that no longer exist.
    pub fn retain(&mut self, is_there: impl Fn(&Far) -> bool) {
        self.locations.retain(|far, _| is_there(far));
        self.heard.retain(|far, _| is_there(far));
    }

    /// Records MOVED of the gateway `from`; returns what all gateways of its location that carry packets and have
    /// ever answered have moved. `acting`: the one with the shared prefixes, by claims that the mesh may not show
    /// yet.
    pub fn by_all(
        &mut self,
        far: Far,
        location: &FarLocation,
        (acting, from): (NodeId, NodeId),
        signal: &Signal,
        asked: &Asked<'_>,
    ) -> Option<Signal> {
        let Body::Claim { part, members, .. } = &signal.body else { return None };
        if from != acting && !location.active.contains(&from) || !asked.has_part(*part) {
            return None;
        }
        if far::is_latest(signal) {
            // Any gateway may know a later term.
            return Some(signal.clone());
        }
        let terms = self.locations.entry(far).or_default();
        terms.retain(|term, _| (asked.in_term)(*term));
        if !(asked.in_term)(signal.term) {
            return None;
        }
        if location.active.is_empty() {
            return Some(signal.clone());
        }
        let heard = self.heard.entry(far).or_default();
        heard.insert(from);
        heard.retain(|id| location.active.contains(id));
        let answers = terms.entry(signal.term).or_default().entry(*part).or_default();
        let named = members.iter().filter(|member| asked.nodes.contains(member));
        answers.entry(from).or_default().extend(named);
        let others = location.active.iter().filter(|id| **id != acting && heard.contains(id));
        let first = answers.get(&acting)?;
        let rest: Option<Vec<_>> = others.map(|id| answers.get(id)).collect();
        let rest = rest?;
        let by_all = first.iter().filter(|member| rest.iter().all(|moved| moved.contains(*member)));
        let by_all: Vec<NodeId> = by_all.copied().collect();
        let mut signal = signal.clone();
        if let Body::Claim { members, .. } = &mut signal.body {
            *members = by_all;
        }
        Some(signal)
    }
}

#[cfg(test)]
mod tests {
    use kilo_failover::signal::{Kind, Shared};

    use super::*;

    const FAR: Far = 7;

    fn said(term: u64, members: &[NodeId]) -> Signal {
        let body = Body::Claim { gateway: 1, shared: Shared::Stay, part: (0, 1), members: members.to_vec() };
        Signal { kind: Kind::Moved, nonce: 1, term: Term::from_bits(term), sender: 0, location: FAR, body }
    }

    fn members(signal: Option<Signal>) -> Option<Vec<NodeId>> {
        match signal?.body {
            Body::Claim { members, .. } => Some(members),
            _ => None,
        }
    }

    fn gateway(id: NodeId) -> crate::far::FarGateway {
        let key = kilo_core::wireguard::key::PublicKey([1; 32]);
        crate::far::FarGateway { id, ..crate::far::FarGateway::with(key) }
    }

    #[test]
    fn of_several_far_leaders_all_that_answer_have_to_have_moved_it() {
        let gateways = vec![gateway(10), gateway(11), gateway(12)];
        let one = FarLocation { gateways, ..FarLocation::default() };
        let several = FarLocation { active: vec![10, 11], ..one.clone() };
        let mut moved = Moved::default();
        let latest = std::cell::Cell::new(5);
        let in_term = |term: Term| term.bits() == latest.get();
        let asked = Asked { in_term: &in_term, nodes: &[3, 4] };
        let mut hears = |from, term, list: &[NodeId]| {
            members(moved.by_all(FAR, &several, (10, from), &said(term, list), &asked))
        };
        assert_eq!(hears(11, 5, &[3]), None);
        assert_eq!(hears(12, 5, &[3, 4]), None, "a stand-by's answer says nothing");
        assert_eq!(hears(10, 5, &[3, 4]), Some(vec![3]));
        assert_eq!(hears(11, 5, &[4]), Some(vec![3, 4]));
        // In a later term all are asked again, and answers for an earlier one are ignored.
        latest.set(6);
        assert_eq!(hears(10, 6, &[3]), None);
        assert_eq!(hears(11, 5, &[3, 4]), None);
        assert_eq!(hears(11, 6, &[3]), Some(vec![3]));
        // One that was there and is silent is waited for, as the agent of a single leader is, for as long as it
        // is a gateway; one that never answered is not.
        latest.set(7);
        assert_eq!(hears(10, 7, &[3]), None);
        assert_eq!(hears(11, 7, &[3]), Some(vec![3]));
        let without = FarLocation { active: vec![10], ..several.clone() };
        let with_unreachable = FarLocation { active: vec![10, 12], ..several.clone() };
        for (term, location) in [(8, &without), (9, &with_unreachable)] {
            latest.set(term);
            let answer = moved.by_all(FAR, location, (10, 10), &said(term, &[3]), &asked);
            assert_eq!(members(answer), Some(vec![3]), "{term}");
        }
        // With one leader its answer is passed on unchanged: that of the gateway that leads by now, and in a term
        // in which this node has asked.
        for (acting, from, term, is_passed_on) in
            [(10, 11, 9, false), (10, 10, 9, true), (11, 11, 9, true), (10, 10, 8, false)]
        {
            let answer = members(moved.by_all(FAR, &one, (acting, from), &said(term, &[3]), &asked));
            assert_eq!(answer.is_some(), is_passed_on, "{from} in term {term}, {acting} leads");
        }
        let mut imagined = said(9, &[3]);
        if let Body::Claim { part, .. } = &mut imagined.body {
            *part = (0, u16::MAX);
        }
        assert_eq!(moved.by_all(FAR, &one, (10, 10), &imagined, &asked), None);
    }

    #[test]
    fn a_location_that_has_gone_is_forgotten_and_others_are_not() {
        let gateways = vec![gateway(10), gateway(11)];
        let several = FarLocation { gateways, active: vec![10, 11], ..FarLocation::default() };
        let asked = Asked { in_term: &|_| true, nodes: &[3] };
        let mut moved = Moved::default();
        for far in [FAR, FAR + 1] {
            moved.by_all(far, &several, (10, 11), &said(5, &[3]), &asked);
        }
        moved.retain(|far| *far == FAR);
        assert_eq!(moved.locations.keys().chain(moved.heard.keys()).collect::<Vec<_>>(), [&FAR, &FAR]);
    }

    #[test]
    fn a_hostile_far_leader_fills_no_memory_and_mutes_nobody() {
        let gateways = vec![gateway(10), gateway(11)];
        let several = FarLocation { gateways, active: vec![10, 11], ..FarLocation::default() };
        let asked = Asked { in_term: &|term| term.bits() == 5, nodes: &[3, 4] };
        let mut moved = Moved::default();
        for number in 0..1_000_u16 {
            let term = 5 + u64::from(number / 3 % 3);
            let flood: Vec<NodeId> = (0..100).map(|member| u64::from(number) * 100 + member).collect();
            let mut signal = said(term, &flood);
            if let Body::Claim { part, .. } = &mut signal.body {
                *part = [(0, 1), (number, number.saturating_add(1)), (number, 0)][usize::from(number % 3)];
            }
            moved.by_all(FAR, &several, (10, 11), &signal, &asked);
        }
        // The greatest possible term.
        moved.by_all(FAR, &several, (10, 11), &said(u64::MAX, &[3]), &asked);
        let kept: usize = moved
            .locations
            .values()
            .flat_map(BTreeMap::values)
            .flat_map(BTreeMap::values)
            .map(|answers| answers.values().map(|named| 1 + named.len()).sum::<usize>())
            .sum();
        assert!(kept <= 10, "{kept} are kept");
        assert_eq!(members(moved.by_all(FAR, &several, (10, 11), &said(5, &[3, 4]), &asked)), None);
        let by_all = moved.by_all(FAR, &several, (10, 10), &said(5, &[3, 4, 99]), &asked);
        assert_eq!(members(by_all), Some(vec![3, 4]));
    }
}
