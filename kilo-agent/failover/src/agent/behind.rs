//! Far leaders remember terms that a whole location forgets when all its nodes boot: they take no claim of an
//! earlier one. They say so when they are asked, and the gateway claims again in a later one.

use super::Agent;
use crate::{MS, Micros, NodeId, Note, Output, Rule, SEC, Term, Turn, gateway::Lead, signal::Shared};

/// When a gateway that leads by Kilo's rule asks, and when it was told.
#[derive(Clone, Debug, Default)]
pub(super) struct Behind {
    asked: usize,
    told: Option<Micros>,
}

impl Behind {
    /// When far leaders are asked, since the start: by the first time another gateway has led a node that has booted
    /// alone, and an answer may be lost.
    const ASKS: [Micros; 4] = [700 * MS, 1_500 * MS, 3 * SEC, 6 * SEC];
    /// Between two catches: far leaders may not make terms run away.
    const PAUSE: Micros = SEC;
}

impl Agent {
    /// Asks far leaders for their latest term, a while after the start.
    pub(super) fn asks_far_leaders(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        let asked = gateway.behind.asked;
        let is_due = Behind::ASKS.get(asked).is_some_and(|at| turn.now >= gateway.since + at);
        if !is_due {
            return;
        }
        if self.leads_by_order(turn.now) && self.params.keeps(Rule::CatchesUp) {
            for far in self.place.fars.clone() {
                self.ask(far, Term::NONE, turn);
            }
        }
        if let Some(gateway) = &mut self.gateway {
            gateway.behind.asked = asked + 1;
        }
    }

    /// When [`Self::asks_far_leaders`] has something to do.
    pub(super) fn next_ask(&self) -> Micros {
        let next = self
            .gateway
            .as_ref()
            .and_then(|gateway| Behind::ASKS.get(gateway.behind.asked).map(|at| gateway.since + at));
        next.unwrap_or(Micros::MAX)
    }

    /// A far leader knows a later term than anybody here does: it takes no claim before that.
    pub(crate) fn far_leader_knows(&mut self, term: Term, turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        let leads_by_order = self.leads_by_order(now);
        let Some(gateway) = &mut self.gateway else { return };
        let leads_in = gateway.lead.as_ref().map(Lead::term).or(leads_by_order.then_some(Term::NONE));
        let is_behind = leads_in.is_some_and(|leads_in| term.count() > leads_in.count());
        let is_told = gateway.behind.told.is_some_and(|told| told + Behind::PAUSE > now);
        if !is_behind || is_told || gateway.planned.is_busy() || !self.params.keeps(Rule::CatchesUp) {
            return;
        }
        gateway.behind.told = Some(now);
        self.term_is_known(term);
        turn.push(Output::Note(Note::Behind(term)));
        // Who has what belongs to no member keeps it, unless it is known to lead nobody.
        let shared = if self.nobody_else_leads(now) { Shared::Move } else { Shared::MoveIfSilent };
        let members = leads_by_order.then(|| self.users_of(me, now).into_iter().chain([me]).collect());
        let members: Vec<NodeId> = members.unwrap_or_default();
        self.lead_more(members, shared, turn);
    }

    /// Whether it leads although nobody has changed anything, and it is alone in that as far as it has heard.
    fn leads_by_order(&self, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        self.word == (Term::NONE, self.place.me)
            && gateway.lead.is_none()
            && self.place.several.is_none()
            && !gateway.others.is_led_since(&self.params, Term::NONE, now)
    }

    /// Whether every other gateway has said a moment ago that it leads nobody.
    fn nobody_else_leads(&self, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let others = self.place.gateways.iter().filter(|other| **other != self.place.me);
        others.into_iter().all(|other| gateway.others.leads_nobody(&self.params, *other, now))
    }
}
