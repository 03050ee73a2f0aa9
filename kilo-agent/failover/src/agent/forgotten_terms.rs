//! Far leaders remember terms that a location forgets when all its nodes boot, and take no claim of an
//! earlier one. They answer such a claim with the latest term, and the gateway claims again in the next term.

use kilo_common::lead::MOST_CHANGES;

use super::Agent;
use crate::{MS, Micros, NodeId, Note, Output, Rule, SEC, Term, Turn, gateway::Lead, signal::Shared};

/// When a gateway that leads by Kilo's rule asks far leaders, and what it does with their answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Behind {
    asked: usize,
    last_asked: Micros,
    is_answered: bool,
    /// When it last led in a later term because of an answer, and how long it then waits until the next time.
    caught_up: Option<(Micros, Micros)>,
}

impl Behind {
    /// How long after its start it asks far leaders. By the first of these, a gateway that has booted alone
    /// has been led by another one; it asks four times, since answers may be lost.
    const ASKS: [Micros; 4] = [700 * MS, 1_500 * MS, 3 * SEC, 6 * SEC];
    /// Interval at which it asks after that, until one has answered: a site's router may
    /// boot later than its nodes.
    const LATER: Micros = 10 * SEC;
    /// Pause after the first time it catches up, doubled with each: a far leader must
    /// not make terms run away.
    const PAUSE: Micros = SEC;
    /// The longest such pause. A gateway that has not caught up for twice as long begins anew.
    const LONGEST: Micros = 3_600 * SEC;

    /// Records that a far leader has answered a claim.
    pub(crate) const fn answered(&mut self) {
        self.is_answered = true;
    }

    /// Whether it has asked any far leader.
    pub(crate) const fn has_asked(&self) -> bool {
        self.asked > 0
    }

    fn next(&self, since: Micros) -> Micros {
        match Self::ASKS.get(self.asked) {
            Some(at) => since + at,
            None if self.is_answered => Micros::MAX,
            None => self.last_asked + Self::LATER,
        }
    }

    /// Whether it catches up now; if so, the next time has to wait.
    fn try_catch_up(&mut self, now: Micros) -> bool {
        let pause = match self.caught_up {
            Some((last, pause)) if now < last + pause => return false,
            Some((last, pause)) if now < last + 2 * Self::LONGEST => (pause * 2).min(Self::LONGEST),
            _ => Self::PAUSE,
        };
        self.caught_up = Some((now, pause));
        true
    }
}

impl Agent {
    /// Asks far leaders for their latest term, a while after the start.
    pub(super) fn ask_far_leaders(&mut self, turn: &mut Turn<'_>) {
        if turn.now < self.next_ask() {
            return;
        }
        if self.leads_by_order(turn.now) && self.params.keeps(Rule::CatchesUp) {
            for far in self.own_location.fars.clone() {
                self.ask(far, Term::NONE, turn);
            }
        }
        if let Some(gateway) = &mut self.gateway {
            gateway.behind.asked += 1;
            gateway.behind.last_asked = turn.now;
        }
    }

    /// When [`Self::ask_far_leaders`] has something to do.
    pub(super) fn next_ask(&self) -> Micros {
        self.gateway.as_ref().map_or(Micros::MAX, |gateway| gateway.behind.next(gateway.since))
    }

    /// Leads in a later term when a far leader knows a later one than this gateway leads in: the far leader
    /// takes no claim of an earlier term.
    pub(crate) fn catch_up_with(&mut self, term: Term, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let leads_by_order = self.leads_by_order(now);
        let Some(gateway) = &mut self.gateway else { return };
        let leads_in = gateway.lead.as_ref().map(Lead::term).or(leads_by_order.then_some(Term::NONE));
        let is_behind = leads_in.is_some_and(|leads_in| term.count() > leads_in.count());
        // One that has just given its location away may have to lead other gateways until they follow, too.
        let follows = self.word.1 != me && self.word.0.count() >= term.count();
        if !is_behind
            || follows
            || term.count() >= MOST_CHANGES
            || gateway.planned.is_busy()
            || !self.params.keeps(Rule::CatchesUp)
            || !gateway.behind.try_catch_up(now)
        {
            return;
        }
        self.learn_term(term);
        turn.push(Output::Note(Note::Behind(term)));
        if leads_by_order {
            // The gateway with the shared prefixes keeps them, unless it is known to lead nobody.
            let shared = if self.nobody_else_leads(now) { Shared::Move } else { Shared::MoveIfSilent };
            let members: Vec<NodeId> = self.users_of(me, now).into_iter().chain([me]).collect();
            self.lead_more(members, shared, turn);
        } else {
            // In the later term another gateway may have got them.
            let has_shared = self.lead().is_some_and(|lead| lead.shared() == Shared::Move);
            let shared = if has_shared { Shared::MoveIfSilent } else { Shared::Stay };
            self.lead_more([], shared, turn);
        }
    }

    /// Whether it leads by Kilo's order, in no term, and has heard of no other leader.
    fn leads_by_order(&self, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        self.word == (Term::NONE, self.own_location.me)
            && gateway.lead.is_none()
            && self.own_location.several.is_none()
            && !gateway.others.is_led_since(&self.params, Term::NONE, now)
    }

    /// Whether every other gateway has recently said that it leads nobody.
    fn nobody_else_leads(&self, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let mut others = self.own_location.gateways.iter().filter(|other| **other != self.own_location.me);
        others.all(|other| gateway.others.leads_nobody(&self.params, *other, now))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{OwnLocation, Params, Start};

    #[test]
    fn a_far_leader_does_not_make_terms_run_away() {
        let mut behind = Behind::default();
        let times = (0..24 * 3_600).filter(|second| behind.try_catch_up(second * SEC)).count();
        assert!((12..=40).contains(&times), "{times} times in a day");
        let mut behind = Behind::default();
        assert!(behind.try_catch_up(0) && !behind.try_catch_up(SEC / 2) && behind.try_catch_up(SEC));
        assert!(!behind.try_catch_up(2 * SEC) && behind.try_catch_up(3 * SEC));
    }

    #[test]
    fn a_gateway_that_follows_the_later_leader_is_not_behind() {
        let (me, next) = (1 << 48, 2 << 48);
        let term = Term::NONE.next(next);
        for (word, is_behind) in [((Term::NONE, me), true), ((Term::NONE, next), true), ((term, next), false)]
        {
            let own_location = OwnLocation {
                me,
                location: 7,
                gateways: vec![me, next],
                nodes: vec![me, next],
                fars: vec![9],
                leaving: BTreeMap::new(),
                several: None,
                cookies: BTreeMap::new(),
            };
            let start = Start { now: 0, clock: 0, word, led: Vec::new(), is_boot: false };
            let mut agent = Agent::new(Params::default(), own_location, start, &mut || 1);
            // As after a planned change, until the other gateway has said that it follows itself.
            let mut lead = Lead::new(agent.sender(), Term::NONE, &agent.own_location.fars, 0);
            lead.add([next], 0);
            agent.gateway.as_mut().expect("it is one").lead = Some(lead);
            let (mut out, mut later) = (Vec::new(), Vec::new());
            let mut turn = Turn { now: 60 * SEC, random: &mut || 1, out: &mut out, later: &mut later };
            agent.catch_up_with(term, &mut turn);
            let said = out.iter().any(|output| matches!(output, Output::Note(Note::Behind(_))));
            assert_eq!(said, is_behind, "{word:?}: {out:?}");
        }
    }

    #[test]
    fn it_asks_until_somebody_answers() {
        let mut behind = Behind { asked: 4, last_asked: 6 * SEC, ..Behind::default() };
        assert_eq!(behind.next(0), 16 * SEC);
        behind.answered();
        assert_eq!(behind.next(0), Micros::MAX);
    }
}
