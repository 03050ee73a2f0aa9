//! Planned changes as the two gateways make them: [`crate::planned`] decides when, this does it.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::{
    Agent, Far, Micros, NodeId, Note, Output, SEC, Signal, Term, Turn, far,
    gateway::Lead,
    planned::{Act, Cause, Giver, Taker, Try},
    signal::{Body, Kind, MAX_MEMBERS, Shared},
    turn::Given,
};

/// Planned changes of one gateway.
#[derive(Clone, Debug, Default)]
pub(crate) struct Planned {
    giver: Option<Giver>,
    taker: Option<Taker>,
    /// When the next change may begin, how many in a row have failed, and why the last of these was tried.
    next: Micros,
    failures: u32,
    failed_for: Option<Cause>,
    /// What else than members is taken back if the change does not end: the shared prefixes, and this node
    /// itself where it led the location.
    gave: (Shared, bool),
    /// In how many tries in a row each far leader has not answered.
    silent: BTreeMap<Far, u32>,
    /// The gateway whose change to this one was the last that did not end, and when it was forgotten.
    left_open: Option<(NodeId, Micros)>,
}

impl Planned {
    /// Pause between two tries, doubled after each that failed.
    const PAUSE: Micros = 2 * SEC;
    /// The longest such pause.
    const LONGEST: Micros = 60 * SEC;
    /// How long this node is free for other work after a change that did not end: less than a gateway waits until
    /// it asks again.
    const RESTS: Micros = SEC;

    pub(crate) fn wake(&self) -> Micros {
        let giver = self.giver.as_ref().map_or(Micros::MAX, Giver::wake);
        self.taker.as_ref().map_or(Micros::MAX, Taker::end).min(giver)
    }

    /// Whether this node is giving leadership.
    pub(crate) const fn is_giving(&self) -> bool {
        self.giver.is_some()
    }

    /// Whether leadership is being given or taken.
    pub(crate) const fn is_busy(&self) -> bool {
        self.giver.is_some() || self.taker.is_some()
    }

    /// Whether leadership may be given now.
    pub(crate) fn is_free(&self, now: Micros) -> bool {
        self.giver.is_none() && self.taker.is_none() && now >= self.next
    }

    /// The leader whose packets it takes although it does not lead that leader's members yet.
    pub(crate) fn takes_from(&self) -> Option<NodeId> {
        self.taker.as_ref().filter(|taker| taker.is_ready()).map(|taker| taker.from)
    }

    /// Whether nodes that use this gateway in this term do so by a change that has not ended: far
    /// leaders have not moved them yet, or they are about to use another one.
    pub(crate) fn is_changing(&self, term: Term) -> bool {
        let takes = |taker: &Taker| !taker.is_done() && taker.term() == term;
        self.giver.as_ref().is_some_and(Giver::has_diverted) || self.taker.as_ref().is_some_and(takes)
    }

    /// Forgets the taker; far leaders that have not answered it have been silent in one more try.
    fn forget_taker(&mut self, now: Micros) {
        let Some(taker) = self.taker.take() else { return };
        if !taker.is_done() {
            self.left_open = Some((taker.from, now));
        }
        for far in taker.silent() {
            *self.silent.entry(far).or_default() += 1;
        }
    }

    /// Whether a PREPARE of that gateway has to wait. The gateway that this node uses goes first: another
    /// one that asks, and then gives nothing, must not keep it from giving, or this node busy. Of others that give at
    /// once, as when several leaders become one, the one with READY goes first.
    fn refuses(&self, from: NodeId, leader: NodeId, now: Micros) -> bool {
        let goes_first = |taker: &Taker| {
            taker.from != from
                && !taker.is_done()
                && from != leader
                && (taker.from == leader || taker.is_ready())
        };
        let has_failed = |(gateway, at)| gateway == from && from != leader && at + Self::RESTS > now;
        self.taker.as_ref().is_some_and(goes_first) || self.left_open.is_some_and(has_failed)
    }

    /// Far leaders that a change of this cause waits for.
    fn waits_for(&self, cause: Cause, fars: &[Far]) -> Vec<Far> {
        let tries = |far: &Far| self.silent.get(far).copied().unwrap_or(0);
        fars.iter().copied().filter(|far| cause.tries().is_none_or(|most| tries(far) < most)).collect()
    }

    /// Forgets failures that say nothing about a change of this cause (`None`: of any that does not hurry): a
    /// node that is about to go does not wait for what others have failed for, and nobody for what is long
    /// over.
    pub(crate) fn begin(&mut self, leaves: Option<Cause>, now: Micros) {
        if leaves.is_some() && self.failed_for != leaves {
            (self.next, self.failures, self.failed_for) = (0, 0, leaves);
        } else if self.next + Self::LONGEST <= now {
            self.failures = 0;
        }
    }

    fn failed(&mut self, cause: Cause, now: Micros) {
        self.failed_for = Some(cause);
        self.next = now + (Self::PAUSE << self.failures.min(5)).min(Self::LONGEST);
        self.failures += 1;
    }
}

impl Agent {
    /// Gives everybody that uses this node to another gateway, make before break.
    pub(crate) fn plan_change(&mut self, to: NodeId, cause: Cause, turn: &mut Turn<'_>) {
        let fars = self.own_location.fars.clone();
        let Some(gateway) = &mut self.gateway else { return };
        if fars.is_empty() {
            gateway.planned.failed(cause, turn.now);
            return self.give_away_to(to, 0, turn);
        }
        let trip = gateway.tunnels.longest();
        gateway.planned.giver = Some(Giver::new(to, cause, fars, trip, turn.now));
        self.go_on_planned(turn);
    }

    /// Takes the steps of a planned change that are due.
    pub(crate) fn go_on_planned(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        let planned = &mut gateway.planned;
        if planned.taker.as_ref().is_some_and(|taker| turn.now >= taker.end()) {
            let was_ready = planned.takes_from().is_some();
            planned.forget_taker(turn.now);
            if was_ready {
                self.mark_led(turn);
            }
        }
        let Some(gateway) = &mut self.gateway else { return };
        let Some(giver) = gateway.planned.giver.as_mut().filter(|giver| giver.wake() <= turn.now) else {
            return;
        };
        let acts = giver.wake_up(turn.now);
        self.act_as_giver(acts, turn);
    }

    /// Handles PREPARE or READY.
    pub(crate) fn handle_change(&mut self, from: NodeId, signal: &Signal, turn: &mut Turn<'_>) {
        let Body::Change { gateway: named, cookie } = signal.body else { return };
        if !self.own_location.gateways.contains(&from) {
            return;
        }
        if signal.kind == Kind::Prepare {
            if named == self.own_location.me {
                let try_of = Try { number: signal.nonce, cookie };
                self.handle_prepare((from, try_of), signal.term, turn);
            }
            return;
        }
        let (latest, own) = (self.term, self.own_location.cookie(from));
        let Some(gateway) = &self.gateway else { return };
        let Some(giver) = gateway.planned.giver.as_ref().filter(|giver| giver.to == from) else { return };
        // A READY recorded in an earlier try of the same term says nothing about who is ready now.
        if cookie != own || !giver.has_asked(signal.nonce) {
            return turn.push(Output::Note(Note::Replayed(from)));
        }
        // Somebody else has led since: nothing is given in an earlier term.
        if !giver.has_diverted() && signal.term <= latest {
            return;
        }
        if !self.raise_term(from, signal.term, turn.now) {
            return turn.push(Output::Note(Note::Leaps(from)));
        }
        if let Some(giver) = self.gateway.as_mut().and_then(|gateway| gateway.planned.giver.as_mut()) {
            let acts = giver.ready(signal.term, named == from, turn.now);
            self.act_as_giver(acts, turn);
        }
    }

    fn act_as_giver(&mut self, acts: Vec<Act>, turn: &mut Turn<'_>) {
        for act in acts {
            let Some(giver) = self.gateway.as_ref().and_then(|gateway| gateway.planned.giver.as_ref()) else {
                return;
            };
            let (to, cause) = (giver.to, giver.cause);
            match act {
                Act::Prepare => {
                    let number = cause.number(self.stamp(turn.now));
                    let own = self.gateway.as_mut().and_then(|gateway| gateway.planned.giver.as_mut());
                    own.into_iter().for_each(|giver| giver.asked(number));
                    let body = Body::Change { cookie: self.own_location.cookie(to), gateway: to };
                    let signal = self.sender().signal(Kind::Prepare, number, self.term, body);
                    turn.push(Output::Lan(to, signal));
                }
                Act::Divert(term) => self.divert(to, term, turn),
                Act::End(far, term) => self.end(far, term, turn),
                Act::Given => {
                    turn.push(Output::Note(Note::Gives { to, cause: Some(cause) }));
                    self.finish_giving(turn.now, true);
                }
                Act::TakeBack(term) => {
                    turn.push(Output::Note(Note::TakesBack(to)));
                    // Gateways stayed, and may have followed the other one meanwhile.
                    let mut members = giver.members.clone();
                    members.extend(self.lead().iter().flat_map(|lead| lead.members()));
                    let (shared, itself) =
                        self.gateway.as_ref().map_or_else(Default::default, |gateway| gateway.planned.gave);
                    let me = self.own_location.me;
                    self.term = self.term.max(term);
                    self.finish_giving(turn.now, false);
                    let members = members.into_iter().filter(|member| itself || *member != me);
                    self.lead_more(members, shared, turn);
                }
                Act::GiveUp => {
                    turn.push(Output::Note(Note::NotReady(to)));
                    self.finish_giving(turn.now, false);
                    self.end_trial(turn);
                }
                Act::Ask(..) | Act::Ready(_) | Act::Lead(..) | Act::Done(_) => {}
            }
        }
    }

    /// Ends a change in which nothing was diverted yet, because this node uses another gateway by now: the
    /// taker's ANNOUNCE may come before its READY.
    pub(crate) fn end_giving_to_another(&mut self, uses: NodeId, turn: &mut Turn<'_>) {
        let giver = self.gateway.as_ref().and_then(|gateway| gateway.planned.giver.as_ref());
        let Some(giver) = giver.filter(|giver| !giver.has_diverted() && uses != self.own_location.me) else {
            return;
        };
        let (to, cause) = (giver.to, giver.cause);
        if uses == to {
            turn.push(Output::Note(Note::Gives { to, cause: Some(cause) }));
        }
        self.finish_giving(turn.now, uses == to);
    }

    fn finish_giving(&mut self, now: Micros, ended: bool) {
        let Some(gateway) = &mut self.gateway else { return };
        let Some(giver) = gateway.planned.giver.take() else { return };
        if ended {
            gateway.planned.failures = 0;
            gateway.planned.next = now + Planned::PAUSE;
            self.forget_obeyed_order();
        } else {
            gateway.planned.failed(giver.cause, now);
        }
    }

    /// Sends everything to the taker from now on, except what other gateways send: nobody passes on packets
    /// of a gateway, so gateways stay here until they follow the taker themselves.
    fn divert(&mut self, to: NodeId, term: Term, turn: &mut Turn<'_>) {
        let (me, now, leads_location) = (self.own_location.me, turn.now, self.has_members());
        let Some(gateway) = &self.gateway else { return };
        let mut users: Vec<NodeId> = gateway.lead.iter().flat_map(Lead::members).collect();
        if leads_location {
            // Members that were not heard lately may use this node, too; far leaders know which ones do not.
            let may_use = |node: &NodeId| gateway.roll.last(*node).is_none_or(|present| present.word.1 == me);
            users.extend(self.own_location.nodes.iter().copied().filter(may_use));
            users.push(me);
        }
        users.sort_unstable();
        users.dedup();
        let stays = |node: &NodeId| *node != me && self.own_location.gateways.contains(node);
        let (stay, mut go): (Vec<NodeId>, Vec<NodeId>) = users.into_iter().partition(stays);
        // END has to name somebody, or no far leader would answer it.
        go.extend(go.is_empty().then_some(me));
        let sender = self.sender();
        let Some(gateway) = &mut self.gateway else { return };
        // In no term it leads by Kilo's order, and has them all.
        let shared = match &gateway.lead {
            Some(lead) => lead.shared(),
            None if self.word == (Term::NONE, me) => Shared::Move,
            None => Shared::Stay,
        };
        gateway.planned.gave = (shared, leads_location);
        let lead = gateway.lead.take();
        let lead = lead.unwrap_or_else(|| Lead::new(sender, self.word.0, &self.own_location.fars, now));
        gateway.lead = Some(lead.with_only(&stay));
        if let Some(giver) = &mut gateway.planned.giver {
            giver.members = go;
        }
        self.term = self.term.max(term);
        // The marks come first: the word is then the one moment in which everybody changes path.
        self.mark_led(turn);
        // Who leads single members follows the taker already, and passes on what it no longer leads.
        if leads_location {
            turn.push(Output::Word(term, to));
        }
    }

    fn end(&self, far: Far, term: Term, turn: &mut Turn<'_>) {
        let Some(giver) = self.gateway.as_ref().and_then(|gateway| gateway.planned.giver.as_ref()) else {
            return;
        };
        let owner = (giver.to, Shared::Move);
        let signals = self.sender().in_parts(Kind::End, term, owner, &giver.members, || turn.nonce());
        signals.into_iter().for_each(|signal| turn.push(Output::Tunnel(far, signal)));
    }

    /// Handles PREPARE: another gateway asks this one to lead.
    fn handle_prepare(&mut self, (from, asked): (NodeId, Try), term: Term, turn: &mut Turn<'_>) {
        let (cause, leader) = (Cause::of(asked.number), self.word.1);
        let Some(gateway) = &self.gateway else { return };
        if !gateway.tunnels.is_fit(&self.params, turn.now)
            || gateway.planned.giver.is_some()
            || gateway.planned.refuses(from, leader, turn.now)
        {
            return;
        }
        if !self.raise_term(from, term, turn.now) {
            return turn.push(Output::Note(Note::Leaps(from)));
        }
        let (latest, next) = (self.term, self.term.next(self.own_location.me));
        let Some(gateway) = &mut self.gateway else { return };
        let trip = gateway.tunnels.longest();
        let goes_on = |taker: &Taker| taker.from == from && taker.term() >= latest && !taker.is_done();
        let taker = gateway.planned.taker.take().filter(goes_on);
        let waits_for = gateway.planned.waits_for(cause, &self.own_location.fars);
        let mut taker = taker.unwrap_or_else(|| Taker::new(from, cause, next, &waits_for));
        let acts = taker.prepare(asked, trip, turn.now);
        let term = taker.term();
        gateway.planned.taker = Some(taker);
        // The others are asked, too: one that answers is waited for the next time.
        for far in self.own_location.fars.iter().filter(|far| !waits_for.contains(far)) {
            self.ask(*far, term, turn);
        }
        self.act_as_taker(acts, turn);
    }

    /// Whether far leaders were asked anything in this term: answers in other terms are ignored, except those
    /// that name a later one ([`far::is_latest`]).
    pub fn has_asked(&self, term: Term) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let takes = gateway.planned.taker.as_ref().map(Taker::term);
        let leads = gateway.lead.as_ref().map(Lead::term);
        [leads, takes].contains(&Some(term)) || term == Term::NONE && gateway.behind.has_asked()
    }

    /// Whether a CLAIM or END of this location could have this part: its sender may know some more nodes.
    fn could_have_part(&self, (part, parts): (u16, u16)) -> bool {
        part < parts && usize::from(parts) <= self.own_location.nodes.len() / MAX_MEMBERS + 2
    }

    /// Handles MOVED: a far leader answers a CLAIM or an END.
    pub(crate) fn handle_moved(&mut self, far: Far, signal: &Signal, turn: &mut Turn<'_>) {
        let Body::Claim { gateway: to, part, members, .. } = &signal.body else { return };
        let (me, is_latest) = (self.own_location.me, far::is_latest(signal));
        if !self.could_have_part(*part) || !is_latest && !self.has_asked(signal.term) {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        gateway.planned.silent.remove(&far);
        gateway.behind.answered();
        if is_latest {
            return self.catch_up_with(signal.term, turn);
        }
        if let Some(lead) = &mut gateway.lead {
            lead.moved(far, signal.term, members);
        }
        if let Some(taker) = gateway.planned.taker.as_mut().filter(|_| *to == me) {
            // No other location decides which nodes are in this one.
            let nodes = &self.own_location.nodes;
            let members: Vec<_> = members.iter().copied().filter(|member| nodes.contains(member)).collect();
            let acts = taker.moved(far, signal.term, *part, &members);
            self.act_as_taker(acts, turn);
        }
    }

    fn act_as_taker(&mut self, acts: Vec<Act>, turn: &mut Turn<'_>) {
        for act in acts {
            let Some(taker) = self.gateway.as_ref().and_then(|gateway| gateway.planned.taker.as_ref()) else {
                return;
            };
            let (from, cause, me) = (taker.from, taker.cause, self.own_location.me);
            let asked = taker.asked_in();
            match act {
                Act::Ask(far, term) => self.ask(far, term, turn),
                Act::Ready(term) => {
                    // Packets that the giver passes on go into WireGuard from now on.
                    self.mark_led(turn);
                    self.send_ready((from, asked), from, term, turn);
                }
                Act::Lead(term, members) => {
                    // Somebody has led in a later term, and far leaders hear of it, too. The giver gets no
                    // confirmation, so it takes back.
                    if self.term > term {
                        if let Some(gateway) = &mut self.gateway {
                            gateway.planned.forget_taker(turn.now);
                        }
                        self.mark_led(turn);
                        return;
                    }
                    let users = self.users_of(from, turn.now);
                    turn.push(Output::Note(Note::IsGiven { from, why: Given::Planned(cause) }));
                    self.term = term;
                    let shared = self.shared_of_giver(from);
                    self.lead_in(term, members.into_iter().chain(users).chain([me]), shared, turn);
                }
                Act::Done(term) => self.send_ready((from, asked), me, term, turn),
                _ => {}
            }
        }
    }

    /// Asks a far leader, by a CLAIM of nobody, whether its agent is there.
    pub(crate) fn ask(&self, far: Far, term: Term, turn: &mut Turn<'_>) {
        let (shared, part) = (Shared::Stay, (0, 1));
        let body = Body::Claim { gateway: self.own_location.me, shared, part, members: Vec::new() };
        let signal = self.sender().signal(Kind::Claim, turn.nonce(), term, body);
        turn.push(Output::Tunnel(far, signal));
    }

    fn send_ready(&self, (to, asked): (NodeId, Try), leader: NodeId, term: Term, turn: &mut Turn<'_>) {
        let body = Body::Change { cookie: asked.cookie, gateway: leader };
        let signal = self.sender().signal(Kind::Ready, asked.number, term, body);
        turn.push(Output::Lan(to, signal));
    }

    /// Leads in a term of its own if this is a leader of term 0 that is no longer first in Kilo's order and
    /// could not hand over, so that nobody goes to the other gateway before that is ready.
    pub(crate) fn stay_leader(&mut self, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let first = self.own_location.gateways.first();
        let since = self.not_first_since.get_or_insert(now);
        let ordered = self.ordered.as_ref().map(|(first, _)| first);
        if self.own_location.several.is_some() {
            return;
        }
        if first == Some(&me) || ordered != first || self.word != (Term::NONE, me) {
            self.not_first_since = None;
        } else if *since + Self::SETTLES + SEC <= now && self.is_fit(now) && self.gives_nothing() {
            let users = self.users_of(me, now);
            turn.push(Output::Note(Note::StaysLeader(first.copied().unwrap_or(me))));
            self.lead_more(users.into_iter().chain([me]), Shared::Move, turn);
        }
    }

    fn gives_nothing(&self) -> bool {
        self.gateway.as_ref().is_some_and(|gateway| !gateway.planned.is_giving())
    }

    /// How long nothing is given after Kilo's order has changed: every node of the mesh learns of it and
    /// plans anew, and a far leader that does so obeys END late, which costs packets.
    pub(crate) const SETTLES: Micros = 2 * SEC;
}
