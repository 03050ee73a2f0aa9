//! Which nodes are believed about how many changes of leader there were. Kernels follow only a later term, so
//! a gateway takes the latest it hears of; a member that lies must not drive it out of everybody's reach.

use std::collections::BTreeMap;

use kilo_common::lead::LEAP;

use super::Agent;
use crate::{Micros, NodeId, Rule, SEC, Term};

/// By how many changes a single member may be ahead of everybody else.
const ALONE: u32 = 16;

/// By how many changes what each node said has raised the latest term lately. Signals arrive by the thousand
/// in a second, and with each of them the term may rise as far as kernels follow: without a limit one gateway
/// could drive it so far from kernels and far leaders that leading them up takes minutes.
#[derive(Clone, Debug, Default)]
pub(super) struct Raises(BTreeMap<NodeId, Micros>);

impl Raises {
    /// Time in which a gateway may raise the term by one change more: a member that asks for another leader again
    /// and again makes an honest gateway do so several times a second.
    const GATEWAY: Micros = 60 * SEC / LEAP as u64;
    /// The same for other nodes. Real changes come less often, or far leaders refuse them.
    const MEMBER: Micros = SEC;

    /// Takes up to `wanted` changes from the budget of a node, of which each is restored in `each`; returns how
    /// many it may raise the term by.
    fn take(&mut self, from: NodeId, wanted: u32, each: Micros, now: Micros) -> u32 {
        self.0.retain(|_, spent_until| *spent_until > now);
        if wanted == 0 {
            return 0;
        }
        let spent_until = self.0.get(&from).map_or(now, |spent_until| (*spent_until).max(now));
        let left = (now + each * u64::from(LEAP)).saturating_sub(spent_until) / each;
        let taken = u64::from(wanted).min(left);
        self.0.insert(from, spent_until + each * taken);
        taken as u32
    }
}

impl Agent {
    /// Takes over a term that this node's kernel or a far leader knows.
    pub(super) fn learn_term(&mut self, term: Term) {
        self.known = self.known.max(term);
        self.term = self.term.max(term);
    }

    /// Takes a term that a node's kernel or agent names; returns whether it is believed.
    pub(super) fn hear_term(&mut self, from: NodeId, term: Term, now: Micros) -> bool {
        if self.own_location.gateways.contains(&from) {
            let is_believed = self.raise_term(from, term, now);
            self.known = self.known.max(term.min(self.term));
            return is_believed;
        }
        let others = self.gateway.iter().flat_map(|gateway| gateway.roll.words_but(from));
        let known = others.map(|(term, _)| term).fold(self.known, Term::max);
        let is_believed = term.count() <= known.count().saturating_add(ALONE);
        if is_believed || !self.params.keeps(Rule::NoLeap) {
            return self.raise_term(from, term, now);
        }
        // The next time it may be believed: nobody else may be left who knows.
        self.raise_term(from, Term::from_bits(u64::from(known.count() + ALONE) << 16), now);
        term <= self.term
    }

    /// Raises the latest term to one that a node names, or by as many changes as that node may raise it now;
    /// returns whether the term is reached.
    pub(super) fn raise_term(&mut self, from: NodeId, term: Term, now: Micros) -> bool {
        let each = if self.own_location.gateways.contains(&from) { Raises::GATEWAY } else { Raises::MEMBER };
        let wanted = term.count().saturating_sub(self.term.count());
        let taken = match &mut self.gateway {
            Some(gateway) if self.params.keeps(Rule::RaisesSlowly) => {
                gateway.raises.take(from, wanted, each, now)
            }
            _ => wanted,
        };
        let reached =
            if taken == wanted { term } else { Term::from_bits(u64::from(self.term.count() + taken) << 16) };
        self.term = self.term.max(reached);
        term <= self.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Output, SEC,
        agent::test_bench::{BOOT, Bench, LEADER, ME, MEMBER},
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
        assert!(bench.agent.hear_term(LEADER, count(700), bench.now));
        assert_eq!(bench.agent.term.count(), 700);
    }

    #[test]
    fn what_a_member_says_alone_is_not_passed_on() {
        let mut bench = Bench::new();
        assert!(bench.agent.hear_term(MEMBER, count(20), bench.now));
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

    #[test]
    fn what_one_node_says_raises_the_term_by_few_changes_a_minute() {
        // The bench knows of 7 changes, and what each node says may leap by 1,024.
        for (from, a_minute) in [(LEADER, 1_024), (MEMBER, 60)] {
            let mut agent = Bench::new().agent;
            let mut raised = Vec::new();
            for minute in 0..3 {
                for hello in 0..1_000_u64 {
                    let now = 100 * SEC + minute * 60 * SEC + hello;
                    agent.raise_term(from, count(u64::from(agent.term.count()) + 1_024), now);
                }
                raised.push(agent.term.count() - 7);
            }
            assert_eq!(raised, [1_024, 1_024 + a_minute, 1_024 + 2 * a_minute], "{from}");
            // Another one is believed all the same.
            assert!(agent.raise_term(ME, count(u64::from(agent.term.count()) + 1_000), 221 * SEC));
        }
    }

    #[test]
    fn a_hostile_gateway_is_heard_and_its_terms_are_not() {
        const NUMBERS: u64 = 1_000;
        let mut bench = Bench::new();
        for hello in 0..NUMBERS {
            bench.hear_hello(LEADER, count(7 + hello * 1_000), LEADER);
        }
        assert!((1_000..1_500).contains(&bench.agent.term.count()), "{:?}", bench.agent.term);
        // What it gives in a term that is out of its reach is refused, and what is near is taken.
        let term = bench.agent.term.count();
        for (ahead, is_taken) in [(900, false), (0, true)] {
            let members = Body::Members { cookie: BOOT, age: 0, members: vec![LEADER, MEMBER] };
            let number = bench.now + 1_000 * SEC + ahead;
            bench.hear(LEADER, Kind::Handover, number, count(u64::from(term) + ahead), members);
            assert_eq!(bench.agent.lead().is_some(), is_taken, "{ahead} changes ahead");
        }
    }

    #[test]
    fn two_members_do_not_raise_each_other_without_end() {
        let mut bench = Bench::new();
        let mut own_location = bench.agent.own_location.clone();
        own_location.nodes.push(4);
        bench.agent.set_own_location(own_location, bench.now, &mut || 1);
        for _ in 0..100 {
            for member in [MEMBER, 4] {
                let (nonce, body) = (bench.roll_call_of(member), Body::Word { cookie: 5, gateway: ME });
                for said in 1..100 {
                    let term = count(u64::from(bench.agent.term.count()) + said);
                    bench.hear(member, Kind::Present, nonce, term, body.clone());
                }
            }
        }
        let seconds = bench.now / SEC;
        let term = u64::from(bench.agent.term.count());
        assert!(term < 2 * (1_024 + seconds) + 100, "{term} after {seconds} s");
    }
}
