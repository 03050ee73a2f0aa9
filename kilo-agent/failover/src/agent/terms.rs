//! Which nodes are believed about how many changes of leader there were. Kernels follow only a later term, so
//! a gateway takes the latest it hears of; a member that lies must not drive it out of everybody's reach.

use super::Agent;
use crate::{NodeId, Rule, Term};

/// By how many changes a single member may be ahead of everybody else.
const ALONE: u32 = 16;

impl Agent {
    /// Takes over a term that a gateway, this node's kernel or a far leader knows.
    pub(super) fn learn_term(&mut self, term: Term) {
        self.known = self.known.max(term);
        self.term = self.term.max(term);
    }

    /// Takes a term that a node's kernel or agent names; returns whether it is believed.
    pub(super) fn hear_term(&mut self, from: NodeId, term: Term) -> bool {
        if self.own_location.gateways.contains(&from) {
            self.learn_term(term);
            return true;
        }
        let others = self.gateway.iter().flat_map(|gateway| gateway.roll.words_but(from));
        let known = others.map(|(term, _)| term).fold(self.known, Term::max);
        let is_believed = term.count() <= known.count().saturating_add(ALONE);
        if is_believed || !self.params.keeps(Rule::NoLeap) {
            self.term = self.term.max(term);
            return true;
        }
        // The next time it may be believed: nobody else may be left who knows.
        self.term = self.term.max(Term::from_bits(u64::from(known.count() + ALONE) << 16));
        term <= self.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Output, SEC,
        agent::test_bench::{Bench, LEADER, ME, MEMBER},
        signal::{Body, Kind},
    };

    fn count(count: u64) -> Term {
        Term::from_bits(count << 16)
    }

    /// The member's kernel answers a roll call with this count, and then its agent asks to be led in it;
    /// the term in which it is led.
    fn led_after(bench: &mut Bench, said: u64) -> Option<u32> {
        let nonce = bench.roll_call_of(MEMBER);
        let body = Body::Word { cookie: 5, gateway: LEADER };
        bench.hear(MEMBER, Kind::Present, nonce, count(said), body);
        let (number, body) = (bench.now, Body::Members { cookie: 5, age: 1, members: vec![MEMBER] });
        let out = bench.hear(MEMBER, Kind::Adopt, number, count(said), body);
        out.iter().find_map(|output| match output {
            Output::Lan(MEMBER, signal) if signal.kind == Kind::Announce => Some(signal.term.count()),
            _ => None,
        })
    }

    #[test]
    fn a_member_alone_does_not_make_terms_run_away() {
        let mut bench = Bench::new();
        assert_eq!(
            led_after(&mut bench, 20),
            Some(21),
            "it may have missed some changes less than the others"
        );
        let mut bench = Bench::new();
        for said in (100..3_000).step_by(100) {
            assert_eq!(led_after(&mut bench, said), None, "{said}");
        }
        assert!(bench.agent.term.count() < 100);
        // A gateway is believed.
        assert!(bench.agent.hear_term(LEADER, count(700)));
        assert_eq!(bench.agent.term.count(), 700);
    }

    #[test]
    fn what_a_member_says_alone_is_not_passed_on() {
        let mut bench = Bench::new();
        assert!(bench.agent.hear_term(MEMBER, count(20)));
        let until = bench.now + SEC;
        let mut said = Vec::new();
        while bench.now < until {
            said.extend(bench.turn(vec![]).into_iter().filter_map(|output| match output {
                Output::Lan(_, signal) if signal.kind == Kind::Hello => Some(signal.term.count()),
                _ => None,
            }));
        }
        assert!(said.len() > 3 && said.iter().all(|term| *term == 7), "{said:?}");
    }

    #[test]
    fn what_two_members_know_is_believed() {
        let mut bench = Bench::new();
        let mut own_location = bench.agent.own_location.clone();
        own_location.nodes.push(4);
        bench.agent.set_own_location(own_location, bench.now, &mut || 1);
        for (member, is_believed) in [(MEMBER, false), (4, true)] {
            let nonce = bench.roll_call_of(member);
            let body = Body::Word { cookie: 5, gateway: ME };
            bench.hear(member, Kind::Present, nonce, count(500), body);
            assert_eq!(bench.agent.term.count() == 500, is_believed, "{member}");
        }
    }

    #[test]
    fn a_member_is_adopted_twice_a_second_at_most() {
        let mut bench = Bench::new();
        let adopted = (0..40).filter(|_| bench.agent.admit_adoption(MEMBER, bench.now)).count();
        assert_eq!(adopted, 1);
        assert!(bench.agent.admit_adoption(MEMBER, bench.now + SEC));
    }
}
