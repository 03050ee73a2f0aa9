//! Nodes that no gateway leads, although the location has a leader in a term: their agents started, or their
//! kernels did not answer, while it changed, or the gateway that they followed is none any more and they fell
//! back to Kilo's leader, who knows nothing of it. Their packets still arrive at that leader, passed on by the
//! gateway that their kernels name. But far leaders have their prefixes where they were before, and not all
//! at the same gateway, so some of what these nodes send is lost; and a node whose other probes are answered
//! never asks for another leader.

use std::collections::BTreeMap;

use super::Agent;
use crate::{Micros, NodeId, Rule, SEC, Term, Turn, signal::Shared};

/// Minimum time between two times that a node is taken: a kernel that does not obey is not
/// announced to all the time.
const PAUSE: Micros = 10 * SEC;
/// How long a kernel must have said that it follows this gateway, which does not lead its node: longer than a
/// planned change may take.
const ORPHANED: Micros = 20 * SEC;

/// Nodes that follow this gateway although it does not lead them, in which term, and since when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orphans(BTreeMap<NodeId, (Term, Micros)>);

impl Orphans {
    /// Records whether a node follows this gateway unled; returns whether it has for long enough to be taken,
    /// after which it counts anew: a kernel that does not obey costs few terms.
    fn note(&mut self, node: NodeId, unled_in: Option<Term>, now: Micros) -> bool {
        let Some(term) = unled_in else {
            self.0.remove(&node);
            return false;
        };
        let since = match self.0.get(&node) {
            Some((known, since)) if *known == term => *since,
            _ => now,
        };
        let is_due = since + ORPHANED <= now;
        self.0.insert(node, (term, if is_due { now } else { since }));
        is_due
    }

    /// Sets the nodes of the location.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeId]) {
        self.0.retain(|node, _| nodes.contains(node));
    }
}

impl Agent {
    /// Leads a node again whose kernel follows this gateway in a term of this gateway that it no longer leads
    /// it in: the node was not in the topology for a moment. Nobody else takes it, because it has a gateway,
    /// and far leaders expect its packets from another one.
    pub(super) fn take_orphan(&mut self, node: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let (me, now, (term, uses)) = (self.own_location.me, turn.now, word);
        if self.own_location.several.is_some() || !self.params.keeps(Rule::TakesLeftBehind) {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        let is_led = gateway.lead.as_ref().is_some_and(|lead| lead.has(node));
        let is_orphan = uses == me && term.is_by(me) && !is_led && self.own_location.nodes.contains(&node);
        let is_due = gateway.orphans.note(node, is_orphan.then_some(term), now);
        if is_due && !gateway.planned.is_busy() && gateway.tunnels.is_fit(&self.params, now) {
            self.lead_more([node], Shared::Stay, turn);
        }
    }

    /// Takes a node whose kernel has said which gateway it uses, if this gateway leads the location and the
    /// node already uses it, or uses one that follows this gateway and that has not taken the node in any term.
    pub(super) fn take_left_behind(&mut self, node: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        if self.own_location.several.is_some() || !self.params.keeps(Rule::TakesLeftBehind) {
            return;
        }
        let Some(gateway) = self.gateway.as_mut().filter(|gateway| !gateway.planned.is_busy()) else {
            return;
        };
        let Some(lead) = &mut gateway.lead else { return };
        let leads_location = self.word == (lead.term(), me) && lead.shared() == Shared::Move;
        let uses_it = match word {
            (term, uses) if uses == me => term <= lead.term(),
            (term, uses) => term < lead.term() && !term.is_by(uses) && lead.is_followed_by(uses),
        };
        if !leads_location || !uses_it || lead.has(node) || !self.own_location.nodes.contains(&node) {
            return;
        }
        gateway.left_behind.retain(|_, at| *at + PAUSE > now);
        if gateway.left_behind.contains_key(&node) {
            return;
        }
        gateway.left_behind.insert(node, now);
        lead.add([node], now);
        lead.heard(node, word, now);
        self.mark_led(turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Input, MS, Output, OwnLocation, Params, Signal, Start,
        signal::{Body, Kind},
    };

    const FIRST: NodeId = 1 << 48;
    const ME: NodeId = 2 << 48;
    const OTHER: NodeId = 3 << 48;
    const MEMBER: NodeId = 4 << 48;
    const FAR: u64 = 9;

    /// A gateway.
    struct Leads {
        agent: Agent,
        now: Micros,
        drawn: u64,
        /// Probes that are answered next, if they are answered at all.
        nonces: Option<Vec<u64>>,
    }

    impl Leads {
        /// One that uses Kilo's leader, leads nobody, and whose tunnels answer.
        fn nobody() -> Self {
            let start = Start { now: 0, clock: 0, word: (Term::NONE, FIRST), led: vec![], is_boot: false };
            let agent = Agent::new(Params::default(), Self::own_location(), start, &mut || 1);
            let mut leads = Self { agent, now: 0, drawn: 1, nonces: Some(Vec::new()) };
            while leads.now < 60 * SEC {
                leads.turn(vec![]);
            }
            leads
        }

        fn own_location() -> OwnLocation {
            OwnLocation {
                me: ME,
                location: 7,
                gateways: vec![FIRST, ME, OTHER],
                nodes: vec![FIRST, ME, OTHER, MEMBER],
                fars: vec![FAR],
                leaving: BTreeMap::new(),
                several: None,
                cookies: BTreeMap::new(),
            }
        }

        /// One that leads the location since this agent's start, and is followed by Kilo's leader alone.
        fn new(term: Term, shared: Shared) -> Self {
            let start = Start { now: 0, clock: 0, word: (term, ME), led: vec![ME, FIRST], is_boot: false };
            let mut agent = Agent::new(Params::default(), Self::own_location(), start, &mut || 1);
            let lead = agent.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()).expect("it leads");
            lead.set_shared(shared);
            lead.followed(FIRST, 0);
            // Long after the start, when words that an earlier agent has announced no longer count.
            Self { agent, now: 60 * SEC, drawn: 1, nonces: None }
        }

        fn turn(&mut self, mut inputs: Vec<Input>) -> Vec<Output> {
            self.now += 10 * MS;
            let at = self.now;
            inputs.extend(
                self.nonces
                    .iter_mut()
                    .flat_map(|nonces| nonces.drain(..))
                    .map(|nonce| Input::Answer { nonce, at }),
            );
            let drawn = &mut self.drawn;
            let mut random = || {
                *drawn += 1;
                *drawn
            };
            let out = self.agent.turn(self.now, inputs, &mut random);
            if let Some(nonces) = &mut self.nonces {
                nonces.extend(out.iter().filter_map(|output| match output {
                    Output::Probe { nonce, .. } => Some(*nonce),
                    _ => None,
                }));
            }
            out
        }

        fn wait_a_second(&mut self) {
            let until = self.now + SEC;
            while self.now < until {
                self.turn(vec![]);
            }
        }

        /// The member's kernel reports this word; returns the terms then announced to it, and
        /// who is claimed at once.
        fn hears(&mut self, term: Term, gateway: NodeId) -> (Vec<Term>, Vec<NodeId>) {
            let nonce = 77;
            self.agent.gateway.as_mut().expect("it is one").roll.asked(MEMBER, nonce);
            let body = Body::Word { cookie: 5, gateway };
            let signal = Signal { kind: Kind::Present, nonce, term, sender: MEMBER, location: 7, body };
            let mut out = self.turn(vec![Input::Signal { from: MEMBER, signal }]);
            out.extend(self.turn(vec![]));
            let (mut announced, mut claimed) = (Vec::new(), Vec::new());
            for output in out {
                match output {
                    Output::Lan(MEMBER, signal) if signal.kind == Kind::Announce => {
                        announced.push(signal.term);
                    }
                    Output::Tunnel(
                        FAR,
                        Signal { kind: Kind::Claim, body: Body::Claim { members, .. }, .. },
                    ) => {
                        claimed.extend(members);
                    }
                    _ => {}
                }
            }
            (announced, claimed)
        }
    }

    fn term() -> Term {
        Term::NONE.next(FIRST).next(ME)
    }

    #[test]
    fn a_node_that_uses_a_gateway_that_follows_is_announced_to() {
        let mut leads = Leads::new(term(), Shared::Move);
        let (announced, _) = leads.hears(Term::NONE, FIRST);
        assert!(
            !announced.is_empty() && announced.iter().all(|announced| *announced == term()),
            "{announced:?}"
        );
        assert!(leads.agent.lead().is_some_and(|lead| lead.has(MEMBER)));
    }

    #[test]
    fn a_node_whose_gateway_is_none_any_more_is_announced_to() {
        let mut leads = Leads::new(term(), Shared::Move);
        // It followed that one in its term, and fell back to Kilo's leader.
        let (announced, _) = leads.hears(Term::NONE.next(OTHER), FIRST);
        assert!(!announced.is_empty() && announced.iter().all(|announced| *announced == term()));
    }

    #[test]
    fn a_node_that_uses_this_leader_unasked_is_claimed() {
        let mut leads = Leads::new(term(), Shared::Move);
        let (announced, claimed) = leads.hears(term(), ME);
        assert_eq!(announced, [], "it follows");
        assert!(claimed.contains(&MEMBER), "{claimed:?}");
    }

    #[test]
    fn a_node_with_another_leader_is_left_there() {
        for (word, shared) in [
            // That gateway uses itself, as far as is known.
            ((Term::NONE, OTHER), Shared::Move),
            // It has taken this member in a term, perhaps after it began to follow.
            ((Term::NONE.next(FIRST), FIRST), Shared::Move),
            // This gateway leads some members alone.
            ((Term::NONE, FIRST), Shared::Stay),
        ] {
            let mut leads = Leads::new(term(), shared);
            let (announced, claimed) = leads.hears(word.0, word.1);
            assert_eq!(announced, [], "{word:?}");
            assert!(!claimed.contains(&MEMBER), "{word:?}");
        }
    }

    #[test]
    fn a_node_that_follows_this_gateway_unled_is_led_again_after_a_while() {
        let mut leads = Leads::nobody();
        let start = leads.now;
        let word = (Term::NONE.next(ME), ME);
        let mut taken = Vec::new();
        while leads.now < start + 65 * SEC {
            leads.hears(word.0, word.1);
            if let Some(lead) = leads.agent.lead().filter(|lead| lead.has(MEMBER)) {
                assert!(lead.term() > word.0);
                taken.push((leads.now - start) / SEC);
            }
            leads.wait_a_second();
        }
        // This one never obeys.
        assert!(matches!(taken[..], [20..=21, 40..=43, 60..=65]), "{taken:?}");
    }

    #[test]
    fn a_node_that_was_given_away_is_left_to_the_gateway_that_takes_it() {
        let mut leads = Leads::nobody();
        for (term, gateway) in [
            // A word of Kilo's leader in whatever term.
            (Term::NONE.next(ME), FIRST),
            // A word that another gateway announced, which names this one by mistake.
            (Term::NONE.next(OTHER), ME),
            (Term::NONE, ME),
        ] {
            let until = leads.now + 2 * ORPHANED;
            while leads.now < until {
                leads.hears(term, gateway);
                leads.wait_a_second();
            }
            assert!(leads.agent.lead().is_none(), "{term:?} {gateway:?}");
        }
        let mut orphans = Orphans::default();
        let (now, term) = (SEC, Term::NONE.next(ME));
        assert!(!orphans.note(MEMBER, Some(term), now));
        assert!(!orphans.note(MEMBER, None, now + ORPHANED), "the other gateway has taken it");
        assert!(!orphans.note(MEMBER, Some(term), now + ORPHANED));
        assert!(
            !orphans.note(MEMBER, Some(term.next(ME)), now + 2 * ORPHANED),
            "led meanwhile in another term"
        );
    }

    #[test]
    fn one_that_does_not_obey_is_announced_to_now_and_then() {
        let mut leads = Leads::new(term(), Shared::Move);
        let mut taken = 0;
        while leads.now < 100 * SEC {
            let had = leads.agent.lead().is_some_and(|lead| lead.has(MEMBER));
            leads.hears(Term::NONE, FIRST);
            taken += usize::from(!had && leads.agent.lead().is_some_and(|lead| lead.has(MEMBER)));
        }
        assert!((3..=4).contains(&taken), "{taken} times in 40 s");
    }
}
