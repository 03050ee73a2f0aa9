//! Nodes that no gateway leads, although the location has a leader in a term: their agents started, or their
//! kernels did not answer, while it changed. Their packets still arrive at that leader, passed on by the
//! gateway that their kernels name. But far leaders have their prefixes where they were before, and not all
//! at the same gateway, so some of what these nodes send is lost; and a node whose other probes are answered
//! never asks for another leader.

use super::Agent;
use crate::{Micros, NodeId, Rule, SEC, Term, Turn, signal::Shared};

/// Minimum time between two times that a node is taken: a kernel that does not obey is not
/// announced to all the time.
const PAUSE: Micros = 10 * SEC;

impl Agent {
    /// Takes a node whose kernel has said which gateway it uses, if this gateway leads the location and the
    /// node already uses it, or has followed no gateway in any term and uses one that follows this gateway.
    pub(super) fn take_left_behind(&mut self, node: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        if self.place.several.is_some() || !self.params.keeps(Rule::TakesLeftBehind) {
            return;
        }
        let Some(gateway) = self.gateway.as_mut().filter(|gateway| !gateway.planned.is_busy()) else {
            return;
        };
        let Some(lead) = &mut gateway.lead else { return };
        let leads_location = self.word == (lead.term(), me) && lead.shared() == Shared::Move;
        let uses_it = match word {
            (term, uses) if uses == me => term <= lead.term(),
            (term, uses) => term == Term::NONE && lead.is_followed_by(uses),
        };
        if !leads_location || !uses_it || lead.has(node) || !self.place.nodes.contains(&node) {
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
        Input, MS, Output, Params, Place, Signal, Start,
        signal::{Body, Kind},
    };

    const FIRST: NodeId = 1 << 48;
    const ME: NodeId = 2 << 48;
    const OTHER: NodeId = 3 << 48;
    const MEMBER: NodeId = 4 << 48;
    const FAR: u64 = 9;

    /// A gateway that leads the location since this agent's start, and is followed by Kilo's leader alone.
    struct Leads {
        agent: Agent,
        now: Micros,
        drawn: u64,
    }

    impl Leads {
        fn new(term: Term, shared: Shared) -> Self {
            let place = Place {
                me: ME,
                location: 7,
                gateways: vec![FIRST, ME, OTHER],
                nodes: vec![FIRST, ME, OTHER, MEMBER],
                fars: vec![FAR],
                leaving: std::collections::BTreeMap::new(),
                several: None,
                cookies: std::collections::BTreeMap::new(),
            };
            let start = Start { now: 0, clock: 0, word: (term, ME), led: vec![ME, FIRST], is_boot: false };
            let mut agent = Agent::new(Params::default(), place, start, &mut || 1);
            let lead = agent.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()).expect("it leads");
            lead.set_shared(shared);
            lead.followed(FIRST, 0);
            // Long after the start, when words that an earlier agent has announced no longer count.
            Self { agent, now: 60 * SEC, drawn: 1 }
        }

        fn turn(&mut self, inputs: Vec<Input>) -> Vec<Output> {
            self.now += 10 * MS;
            let drawn = &mut self.drawn;
            let mut random = || {
                *drawn += 1;
                *drawn
            };
            self.agent.turn(self.now, inputs, &mut random)
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
