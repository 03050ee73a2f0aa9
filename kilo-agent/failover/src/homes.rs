//! Several active leaders: each takes those whose home it is, a minute after the last that did. Nothing
//! is given: who is taken follows the later term, and whoever led it learns that by the roll call.

use std::collections::BTreeMap;

use kilo_common::lead::LEAP;

use crate::{Agent, Micros, NodeId, Note, Output, SEC, Term, Turn, gateway::Lead, signal::Shared};

/// What topology says of several active leaders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Several {
    /// The active leaders.
    pub active: Vec<NodeId>,
    /// Which of them each node is to use; they use themselves.
    pub homes: BTreeMap<NodeId, NodeId>,
    /// Who has what belongs to no member, as was written, and since which term.
    pub acting: (Term, NodeId),
}

impl Several {
    /// Whom a node is to use.
    pub fn home(&self, node: NodeId) -> Option<NodeId> {
        self.homes.get(&node).copied()
    }
}

/// What a gateway remembers between two turns.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homing {
    /// Since when its tunnels have worked without a break.
    fit_since: Option<Micros>,
    /// Whom members used when they were last looked at.
    used: BTreeMap<NodeId, NodeId>,
    /// When another gateway took members that had a leader.
    others_took: Option<Micros>,
    /// When this one took any.
    took: Option<Micros>,
}

impl Agent {
    /// How long a new gateway works before it takes anybody.
    const NEW: Micros = 10 * SEC;
    /// Between two gateways that take members from others.
    const APART: Micros = 60 * SEC;
    /// Between two times this one takes anybody.
    const PAUSE: Micros = 5 * SEC;
    /// CLAIMs are repeated more often than with one leader: who has lost them, as after a boot, knows Kilo's
    /// leader alone.
    const REFRESH: Micros = 2 * SEC;
    /// How many changes of others it may have had no part in: long before its term is one that others have to
    /// take for a leap from it ([`LEAP`]), or theirs for one from its members' words.
    const BEHIND: u32 = LEAP / 4;

    /// Takes those whose home this gateway is.
    pub(crate) fn takes_home(&mut self, turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        let (Some(several), Some(gateway)) = (&self.place.several, &mut self.gateway) else { return };
        if let Some(lead) = &mut gateway.lead {
            lead.claims_again_within(Self::REFRESH, now);
        }
        let rests = |at: Option<Micros>, pause: Micros| at.is_some_and(|at| now < at + pause);
        let homing = &mut gateway.homing;
        let led_in = gateway.lead.as_ref().map(Lead::term);
        let is_behind =
            led_in.is_some_and(|term| term.count().saturating_add(Self::BEHIND) < self.term.count());
        if is_behind && !rests(homing.took, Self::PAUSE) {
            // The same members in the latest term: nobody's packets go another way.
            homing.took = Some(now);
            return self.lead_more([], Shared::Stay, turn);
        }
        homing.looks(gateway.roll.users(now), me, now);
        let since = match homing.fit_since {
            _ if !gateway.tunnels.is_fit(now) => None,
            known => Some(known.unwrap_or(now)),
        };
        homing.fit_since = since;
        let (Some(since), Some(place)) = (since, several.active.iter().position(|node| *node == me)) else {
            return;
        };
        let healthy = now - since;
        let losses = gateway.others.losses(&self.params, now, me);
        // Those that start at once do not take at once.
        let wait = if losses > 0 { self.params.hold_after(losses) } else { Self::NEW + place as u64 * SEC };
        let is_turn = healthy >= wait && !rests(homing.others_took, Self::APART);
        let leads = |node: NodeId| gateway.lead.as_ref().is_some_and(|lead| lead.has(node));
        // After a boot others have what was this node's, until it says that it is back.
        let is_back = self.word == (Term::NONE, me) && self.term > Term::NONE;
        let takes_itself = !leads(me) && (is_back || is_turn);
        let members = gateway.roll.heard_lately(now).filter(|(node, present)| {
            let (term, uses) = present.word;
            let leaves = self.place.leaving.contains_key(&uses) && healthy >= SEC;
            let strays = uses != me || term == Term::NONE;
            several.home(*node) == Some(me) && *node != me && strays && (leaves || is_turn)
        });
        let mut members: Vec<NodeId> = members.map(|(node, _)| node).filter(|node| !leads(*node)).collect();
        members.extend(takes_itself.then_some(me));
        let first = self.place.first() == Some(me);
        let has_shared = gateway.lead.as_ref().is_some_and(|lead| lead.shared() != Shared::Stay);
        let leaves = self.place.leaving.contains_key(&several.acting.1) && healthy >= SEC;
        let takes_shared = first && !has_shared && (is_turn || leaves);
        if members.is_empty() && !takes_shared || rests(homing.took, Self::PAUSE) {
            return;
        }
        homing.took = Some(now);
        if !members.is_empty() {
            turn.push(Output::Note(Note::TakesHome(members.len())));
        }
        if self.word.1 != me && !members.contains(&me) && !leads(me) {
            members.push(me);
        }
        let shared = if takes_shared { Shared::Move } else { Shared::Stay };
        self.lead_more(members, shared, turn);
    }

    /// What belongs to no member has one owner: who has it in a later term.
    pub(crate) fn shares_stay_with_who_acts(&mut self) {
        let (Some(several), Some(gateway)) = (&self.place.several, &mut self.gateway) else { return };
        let (term, acting) = several.acting;
        let outdated = |lead: &&mut Lead| acting != self.place.me && term > lead.term();
        if let Some(lead) = gateway.lead.as_mut().filter(outdated) {
            lead.shares_no_more();
        }
    }

    /// A member asks to be led because its leader has been silent for `age`: it has lost that one.
    pub(crate) fn lost_by_adoption(&mut self, member: NodeId, age: Micros, now: Micros) {
        let Some(gateway) = &mut self.gateway else { return };
        let from = gateway.roll.last(member).map(|present| present.word.1);
        if let (Some(from), true, true) = (from, age > 0, self.place.several.is_some()) {
            gateway.others.lost(&self.params, now, from);
        }
    }
}

impl Homing {
    /// Looks whom members use now.
    fn looks(&mut self, users: impl Iterator<Item = (NodeId, NodeId)>, me: NodeId, now: Micros) {
        for (node, uses) in users {
            let before = self.used.insert(node, uses);
            if before.is_some_and(|before| before != uses) && uses != me {
                self.others_took = Some(now);
            }
        }
    }
}
