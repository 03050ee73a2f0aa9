//! Which members a gateway leads, and in which term.

use super::Agent;
use crate::{Micros, NodeId, Output, Term, Turn, gateway::Lead, signal::Shared};

impl Agent {
    /// Continues to lead the location, shared prefixes included, as was annotated before a restart.
    pub fn lead_location(&mut self) {
        if let Some(lead) = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()) {
            lead.set_shared(Shared::Move);
        }
    }

    /// Continues after a restart with the members that its kernel has marked.
    pub(super) fn resume_leading(&mut self, led: Vec<NodeId>, now: Micros) {
        let sender = self.sender();
        if led.is_empty() {
            return;
        }
        let is_mine = self.word.1 == self.own_location.me && self.word.0 > Term::NONE;
        let term = if is_mine { self.word.0 } else { self.term.next(self.own_location.me) };
        self.term = self.term.max(term);
        if let Some(gateway) = &mut self.gateway {
            let mut lead = Lead::new(sender, term, &self.own_location.fars, now);
            if is_mine {
                lead.add(led, now);
                lead.heard(self.own_location.me, self.word, now);
            } else {
                lead.resume(led, Term::NONE);
            }
            gateway.lead = Some(lead);
        }
    }

    /// Continues to lead a member whose kernel uses this gateway by a word that an earlier agent has
    /// announced, if its mark is left, or if this gateway uses itself: a gateway that has given its members
    /// away does not. A word of a later term moves the whole leadership to that term, once after the start,
    /// so that members cannot spend terms.
    pub(super) fn resume_with(&mut self, member: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let (me, now, (term, uses)) = (self.own_location.me, turn.now, word);
        let Some(gateway) = &mut self.gateway else { return };
        // Every member is called in that time, and again if its answer is lost.
        let is_start = now < gateway.since + 2 * gateway.roll.counts_for();
        let Some(lead) = gateway.lead.as_ref().filter(|_| is_start) else { return };
        let goes_on = if lead.has(member) {
            term > lead.term()
        } else {
            self.word.1 == me && term >= lead.term() && self.own_location.nodes.contains(&member)
        };
        // When a node stops being a gateway, its members' words name Kilo's leader in the term that it had.
        let is_own = uses == me && term.is_by(me);
        if !is_own || !goes_on || gateway.planned.is_changing(term) {
            return;
        }
        if term > lead.term() {
            if std::mem::replace(&mut gateway.has_resumed, true) {
                return;
            }
            self.lead_in(term, [], Shared::Stay, turn);
        }
        if let Some(lead) = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()) {
            lead.followed(member, now);
        }
        self.mark_led(turn);
    }

    /// Takes the shared prefixes, whatever the old leader answers, once nobody uses that one any more
    /// ([`Self::is_left_by_most`]): this gateway may have heard no other node when it took over.
    pub(super) fn take_shared_of_most(&mut self, turn: &mut Turn<'_>) {
        let me = self.own_location.me;
        let may = |lead: &Lead| lead.shared() == Shared::MoveIfSilent && self.word == (lead.term(), me);
        if !self.lead().is_some_and(may) || !self.is_left_by_most(turn.now) {
            return;
        }
        if let Some(lead) = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()) {
            lead.set_shared(Shared::Move);
            lead.claim_again_within(0, turn.now);
            self.mark_led(turn);
        }
    }

    /// Whether most other nodes follow this gateway. Of several active leaders, whether it is the acting one
    /// and hears others; or that one is silent, and none of those that are heard uses it or a stand-by in its
    /// place.
    fn is_left_by_most(&self, now: Micros) -> bool {
        let me = self.own_location.me;
        let Some(gateway) = &self.gateway else { return false };
        if let Some(several) = &self.own_location.several {
            let acting = several.acting.1;
            let is_left = || {
                self.acting_to_watch(several, now).is_some()
                    && gateway.roll.fresh(acting, now).is_none()
                    && !gateway.roll.users(now).any(|(_, uses)| uses == acting)
                    && !self.is_replaced(acting, now)
            };
            return self.hears_others(now) && (acting == me || is_left());
        }
        let Some(lead) = &gateway.lead else { return false };
        let others = self.own_location.nodes.iter().filter(|node| **node != me);
        let (all, follow) = others
            .fold((0, 0), |(all, follow), node| (all + 1, follow + usize::from(lead.is_followed_by(*node))));
        follow * 2 > all
    }

    /// Whether any other node has answered the latest roll calls: gateways are called once in that time.
    pub(super) fn hears_others(&self, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let lately = now.saturating_sub(self.params.roll * 3 / 2);
        let is_there = |node: &NodeId| gateway.roll.last(*node).is_some_and(|last| last.at >= lately);
        self.own_location.nodes.iter().any(|node| *node != self.own_location.me && is_there(node))
    }

    /// Marks the members it leads in the kernel; a leadership without members ends.
    pub(crate) fn mark_led(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        let mut led: Vec<_> = gateway.lead.iter().flat_map(Lead::members).collect();
        led.extend(gateway.planned.takes_from().filter(|from| !led.contains(from)));
        gateway.lead = gateway.lead.take().filter(|lead| !lead.is_empty());
        turn.push(Output::Led(led));
    }

    /// Leads these members, too: in the term it leads in when that is the latest known, else in a new
    /// one, which takes over everything it leads.
    pub(crate) fn lead_more(
        &mut self,
        members: impl IntoIterator<Item = NodeId>,
        shared: Shared,
        turn: &mut Turn<'_>,
    ) {
        let leads_already = self.lead().is_some_and(|lead| lead.term() == self.term);
        if !leads_already {
            self.term = self.term.next(self.own_location.me);
        }
        self.lead_in(self.term, members, shared, turn);
    }

    /// Leads these members in this term, which takes over everything it leads.
    pub(crate) fn lead_in(
        &mut self,
        term: Term,
        members: impl IntoIterator<Item = NodeId>,
        shared: Shared,
        turn: &mut Turn<'_>,
    ) {
        let (sender, now) = (self.sender(), turn.now);
        let Some(gateway) = &mut self.gateway else { return };
        let mut shared = shared;
        let mut lead = match gateway.lead.take() {
            Some(lead) if lead.term() == term => {
                // A member that it adopts does not put in question what it has in this term.
                shared = if lead.shared() == Shared::Move { Shared::Stay } else { shared };
                lead
            }
            older => {
                let mut lead = Lead::new(sender, term, &self.own_location.fars, now);
                if let Some(older) = older {
                    lead.continue_from(&older);
                    lead.inherit(&older);
                    lead.add((older.has(sender.me) && self.word.1 == sender.me).then_some(sender.me), now);
                }
                lead
            }
        };
        lead.add(members, now);
        lead.set_shared(shared);
        let leads_itself = lead.has(sender.me);
        gateway.lead = Some(lead);
        // The marks come first: packets of a node that follows must not be passed on.
        self.mark_led(turn);
        if leads_itself && self.word != (term, sender.me) {
            turn.push(Output::Word(term, sender.me));
        }
        let Some(gateway) = &mut self.gateway else { return };
        if let Some(lead) = &mut gateway.lead {
            lead.wake_up(&self.params, &mut gateway.roll, turn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        OwnLocation, Params, SEC, Signal, Start,
        agent::test_bench::{Bench, LEADER, ME, MEMBER},
        signal::{Body, Kind},
    };

    /// A gateway that has started at 0 and leads itself alone hears the member's kernel name this term at
    /// `now`; returns the term in which it then leads the member.
    fn leads_in(agent: &mut Agent, count: u64, now: Micros) -> Option<Term> {
        let (mut out, mut later, mut random) = (Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
        agent.resume_with(MEMBER, (term(count), ME), &mut turn);
        agent.lead().filter(|lead| lead.has(MEMBER)).map(Lead::term)
    }

    /// This gateway's term after so many changes.
    fn term(count: u64) -> Term {
        Term::from_bits((count - 1) << 16).next(ME)
    }

    fn starts() -> Agent {
        let own_location = OwnLocation {
            me: ME,
            location: 7,
            gateways: vec![LEADER, ME],
            nodes: vec![LEADER, ME, MEMBER],
            fars: vec![],
            leaving: std::collections::BTreeMap::new(),
            several: None,
            cookies: std::collections::BTreeMap::new(),
        };
        let start = Start { now: 0, clock: 0, word: (term(8), ME), led: vec![ME], is_boot: false };
        Agent::new(Params::default(), own_location, start, &mut || 1)
    }

    #[test]
    fn who_leads_in_a_new_term_says_so_at_once() {
        let mut bench = Bench::new();
        let out = bench.lead(&[ME, MEMBER], Shared::Move);
        let said = out.iter().find_map(|output| match output {
            Output::Lan(LEADER, Signal { kind: Kind::Hello, term, body: Body::Hello { leads, .. }, .. }) => {
                Some((*leads, *term))
            }
            _ => None,
        });
        assert_eq!(said, Some((true, bench.agent.lead().unwrap().term())));
    }

    #[test]
    fn a_member_of_an_agent_before_is_led_on_in_its_own_term() {
        assert_eq!(leads_in(&mut starts(), 8, SEC), Some(term(8)));
        assert_eq!(leads_in(&mut starts(), 7, SEC), None, "of an earlier term");
        assert_eq!(leads_in(&mut starts(), 9, SEC), Some(term(9)));
    }

    #[test]
    fn who_adopts_a_member_keeps_what_belongs_to_none() {
        let (mut out, mut later, mut random) = (Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now: SEC, random: &mut random, out: &mut out, later: &mut later };
        for (in_term, wanted) in [(8, Shared::Move), (9, Shared::MoveIfSilent)] {
            let mut agent = starts();
            agent.lead_location();
            // In the term of another gateway's change, that gateway may have them.
            agent.term = term(in_term);
            agent.lead_more([MEMBER], Shared::MoveIfSilent, &mut turn);
            assert_eq!(agent.lead().map(Lead::shared), Some(wanted), "change {in_term}");
        }
    }

    #[test]
    fn members_cannot_spend_terms() {
        let mut agent = starts();
        assert_eq!(leads_in(&mut agent, 9, SEC), Some(term(9)));
        assert_eq!(leads_in(&mut agent, 10, SEC), Some(term(9)), "once");
        assert_eq!(leads_in(&mut starts(), 9, 10 * SEC), None, "long after the start");
    }
}
