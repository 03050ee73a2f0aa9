//! Leadership that is given, not taken: by a leader that cannot lead any more or is about to go, to the
//! gateway that Kilo's order names, and back after a time of health.

use super::Gateway;
use crate::{
    Agent, Given, MS, Micros, NodeId, Note, Output, SEC, Signal, Turn,
    gateway::Lead,
    planned::Cause,
    signal::{Body, Kind, MAX_MEMBERS, Shared},
};

/// What a gateway remembers about what it gave.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Returns {
    /// When it last gave anything.
    gave: Option<Micros>,
    /// How often it gave back lately ([`crate::Params::remembers`]), and when last.
    count: u32,
    last: Micros,
    /// The same for changes that Kilo's order asked for.
    ordered: (u32, Micros),
    /// The gateway that this node alone uses, to try the path before others follow.
    tries: Option<NodeId>,
    /// The gateway that everybody was handed over to, and when: leadership is given once that one leads
    /// this node.
    handed: Option<(NodeId, Micros)>,
}

impl Agent {
    /// A leader whose own tunnels are all silent needs no other witness. An overloaded one loses probes, too,
    /// and so would the next one: it waits longer, and the longer the more often leadership was lost.
    pub(crate) fn give_away_when_silent(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        if !self.has_members() || self.own_location.nodes.len() < 2 || self.own_location.fars.is_empty() {
            return;
        }
        let Some(since) = gateway.tunnels.silent_since(self.params.leader_misses) else { return };
        let losses = gateway.others.all_losses(&self.params, turn.now);
        let patience = gateway.patience(&self.params, turn.now).max(self.params.patience_with_faults(losses));
        // Where somebody has taken over already, little more than this node itself moves.
        let is_replaced = gateway.others.is_led_since(&self.params, self.word.0, turn.now);
        let patience = if is_replaced { patience.min(self.params.patience(0)) } else { patience };
        if gateway.tunnels.quiet_for(since, turn.now) >= patience {
            self.give_away(turn.now - since, turn);
        }
    }

    /// How long a leader has not reached most far locations, and another gateway has, when it gives leadership
    /// away; doubled for each loss of leadership lately.
    const UNFIT: Micros = 10 * SEC;

    /// A leader that reaches some far locations, but not most, gives leadership to a gateway that does. Where the
    /// leaders of two locations do not reach each other, one of them goes first.
    pub(crate) fn give_away_when_unfit(&mut self, turn: &mut Turn<'_>) {
        let (now, has_members) = (turn.now, self.has_members());
        let Some(gateway) = &self.gateway else { return };
        if !has_members || self.own_location.several.is_some() || gateway.planned.is_busy() {
            return;
        }
        let Some((since, dark)) = gateway.tunnels.lacks() else { return };
        let is_second = dark.iter().all(|far| self.own_location.location > *far);
        let losses = gateway.others.all_losses(&self.params, now).min(6);
        let patience = (Self::UNFIT * if is_second { 2 } else { 1 }) << losses;
        if dark.is_empty() || since + patience > now {
            return;
        }
        let is_there = |to: &NodeId| {
            let healthy = gateway.others.healthy_for(&self.params, *to, now);
            *to != self.own_location.me
                && !self.own_location.leaving.contains_key(to)
                && healthy > Self::UNFIT
        };
        let best = gateway.others.best(&self.params, &self.own_location.gateways, now, self.params.heard);
        if let Some(to) = best.into_iter().find(is_there) {
            self.give_away_to(to, Self::UNFIT, turn);
        }
    }

    /// Whether the location uses this node's tunnels: the node uses itself, or alone tries another gateway.
    pub(crate) fn has_members(&self) -> bool {
        let tries = |gateway: &Gateway| gateway.lead.is_some() && gateway.returns.tries == Some(self.word.1);
        self.word.1 == self.own_location.me || self.gateway.as_ref().is_some_and(tries)
    }

    /// Gives everybody to the best stand-by. `age`: for how long this node has known that it cannot lead; 0:
    /// its link has just gone.
    pub(crate) fn give_away(&mut self, age: Micros, turn: &mut Turn<'_>) {
        let now = turn.now;
        let has_members = self.has_members();
        let Some(gateway) = &mut self.gateway else { return };
        if !has_members || gateway.returns.gave.is_some_and(|gave| gave + 100 * MS > now) {
            return;
        }
        let mut best = gateway.others.best(
            &self.params,
            &self.own_location.gateways,
            now,
            self.params.heard + self.params.hello,
        );
        // A gateway that leaves is better than none; each of several leaders has stand-bys of its own.
        let is_anothers = |to: &NodeId| {
            let several = self.own_location.several.as_ref();
            several.is_some_and(|several| several.home(*to) != Some(self.own_location.me))
        };
        best.sort_by_key(|to| (self.own_location.leaving.contains_key(to), is_anothers(to)));
        let Some(to) = best.into_iter().find(|to| *to != self.own_location.me) else { return };
        self.give_away_to(to, age, turn);
    }

    pub(crate) fn give_away_to(&mut self, to: NodeId, age: Micros, turn: &mut Turn<'_>) {
        let now = turn.now;
        if let Some(gateway) = &mut self.gateway {
            gateway.returns.gave = Some(now);
            gateway.returns.handed = Some((to, now));
            // During a trial this node's word does not show whether the others have been given, too.
            gateway.returns.tries = None;
        }
        let mut members = self.users_of(self.own_location.me, now);
        members.push(self.own_location.me);
        self.give(to, age, &members, turn);
    }

    /// Reports that leadership was given, if the gateway that leads this node now is the one that
    /// everybody was handed over to a moment ago.
    pub(crate) fn note_handover(&mut self, leader: NodeId, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        let handed = gateway.returns.handed.take();
        if handed.is_some_and(|(to, at)| to == leader && at + SEC > turn.now) {
            turn.push(Output::Note(Note::Gives { to: leader, cause: None }));
        }
    }

    /// Ends a trial that no change of leader has followed: this node uses itself again. A far leader whose
    /// agent is dead does not move this node's packets, and would cut it off for as long.
    pub(crate) fn end_trial(&mut self, turn: &mut Turn<'_>) {
        let uses = self.word.1;
        let Some(gateway) = &mut self.gateway else { return };
        if gateway.lead.is_some() && gateway.returns.tries.take_if(|tries| *tries == uses).is_some() {
            self.lead_more([self.own_location.me], Shared::Stay, turn);
        }
    }

    /// Other nodes that use the gateway `leader`.
    pub(crate) fn users_of(&self, leader: NodeId, now: Micros) -> Vec<NodeId> {
        let me = self.own_location.me;
        let roll = self.gateway.iter().flat_map(|gateway| gateway.roll.users(now));
        roll.filter(|(member, uses)| *uses == leader && *member != me).map(|(member, _)| member).collect()
    }

    fn give(&self, to: NodeId, age: Micros, members: &[NodeId], turn: &mut Turn<'_>) {
        let age = (age / MS).min(u64::from(u32::MAX)) as u32;
        let term = self.term;
        for (i, members) in members.chunks(MAX_MEMBERS).enumerate() {
            let body = Body::Members { cookie: self.own_location.cookie(to), age, members: members.to_vec() };
            let signal = self.sender().signal(Kind::Handover, self.stamp(turn.now) + i as u64, term, body);
            turn.push(Output::Lan(to, signal.clone()));
            for pause in [10 * MS, 30 * MS] {
                turn.after(pause, Output::Lan(to, signal.clone()));
            }
        }
    }

    /// Handles HANDOVER: a leader gives these members.
    pub(crate) fn handle_handover(
        &mut self,
        from: NodeId,
        signal: &Signal,
        age: Micros,
        members: &[NodeId],
        turn: &mut Turn<'_>,
    ) {
        let (me, now) = (self.own_location.me, turn.now);
        let Some(gateway) = &self.gateway else { return };
        let since = now.saturating_sub(age);
        let tunnels = &gateway.tunnels;
        let proof = self.params.interval * 3 / 2;
        let may = tunnels.is_fit(&self.params, now)
            && (age < proof || tunnels.proves(since + proof) && tunnels.were_good(since));
        let is_itself = members == [from];
        // A node that has just joined or left is not known to both.
        let members: Vec<_> =
            members.iter().copied().filter(|member| self.own_location.nodes.contains(member)).collect();
        // A replay to an agent that has restarted since, and remembers no numbers: the giver has been
        // succeeded in a later term.
        let is_outdated = signal.term < self.word.0;
        if !may || members.is_empty() || is_outdated || !self.own_location.gateways.contains(&from) {
            return;
        }
        let has = |member: &NodeId| {
            gateway
                .lead
                .as_ref()
                .is_some_and(|lead| lead.has_announced_to(*member) && lead.term() > signal.term)
        };
        if members.iter().all(has) {
            return;
        }
        if !self.raise_term(from, signal.term, now) {
            return turn.push(Output::Note(Note::Leaps(from)));
        }
        if let Some(gateway) = self.gateway.as_mut().filter(|_| age > 0) {
            gateway.others.lost(&self.params, now, from);
        }
        let uses = self.word.1;
        let itself = (uses == me || members.contains(&uses)).then_some(me);
        // One node alone is a trial, unless there are no others.
        let several = self.own_location.several.as_ref();
        let is_trial = is_itself && self.own_location.nodes.len() > 2 && several.is_none();
        let shared = if is_trial { Shared::Stay } else { self.shared_of_giver(from) };
        let why = match age {
            _ if is_trial => Given::Trial,
            0 => Given::LinkDown,
            _ => Given::Silent,
        };
        turn.push(Output::Note(Note::IsGiven { from, why }));
        self.lead_more(members.into_iter().chain(itself), shared, turn);
    }

    /// What becomes of the shared prefixes when that gateway gives its members to this one: another one may
    /// have them.
    pub(crate) fn shared_of_giver(&self, from: NodeId) -> Shared {
        let is_another = match &self.own_location.several {
            // According to the annotations, which may be old.
            Some(several) => several.acting.1 != from,
            None => ![self.own_location.me, from].contains(&self.word.1),
        };
        if is_another { Shared::MoveIfSilent } else { Shared::Move }
    }

    /// Gives leadership to the gateway that is to have it, and members that were adopted singly to the
    /// leader this node uses.
    pub(crate) fn give_as_planned(&mut self, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let uses = self.word.1;
        if self.own_location.several.is_some() {
            return self.take_home(turn);
        }
        let leaves = self.own_location.leaving.get(&me).copied();
        let Some(gateway) = &mut self.gateway else { return };
        gateway.planned.begin(leaves, now);
        let gave_lately = gateway.returns.gave.is_some_and(|gave| gave + 2 * SEC > now);
        if gave_lately || !gateway.planned.is_free(now) {
            return;
        }
        if uses != me {
            // It may lead only nodes that have died since.
            let leads_any =
                gateway.lead.is_some() && (self.has_members() || !self.users_of(me, now).is_empty());
            match leaves.filter(|_| leads_any) {
                Some(cause) => self.leave_to(uses, cause, turn),
                None if leads_any => self.give_back(uses, turn),
                None => {}
            }
        } else if let Some(cause) = leaves {
            self.leave(cause, turn);
        } else if let Some(to) = self.own_location.first().filter(|to| *to != me) {
            self.give_back(to, turn);
        }
    }

    /// Gives leadership away because this node is about to go, if a gateway that stays can lead.
    fn leave(&mut self, cause: Cause, turn: &mut Turn<'_>) {
        let now = turn.now;
        let Some(gateway) = &mut self.gateway else { return };
        let best = gateway.others.best(&self.params, &self.own_location.gateways, now, self.params.heard);
        let may = |to: &NodeId| {
            *to != self.own_location.me
                && !self.own_location.leaving.contains_key(to)
                && gateway.others.healthy_for(&self.params, *to, now) >= SEC
        };
        if let Some(to) = best.into_iter().find(may) {
            gateway.returns.gave = Some(now);
            self.plan_change(to, cause, turn);
        }
    }

    /// Gives the members that it leads to the gateway that it uses itself, because this node is about to go.
    fn leave_to(&mut self, to: NodeId, cause: Cause, turn: &mut Turn<'_>) {
        let now = turn.now;
        let Some(gateway) = &mut self.gateway else { return };
        if gateway.others.healthy_for(&self.params, to, now) >= SEC {
            gateway.returns.gave = Some(now);
            self.plan_change(to, cause, turn);
        }
    }

    /// Gives leadership back after a time of health. The gateway that returns is tried first: only this node
    /// uses it, and others follow only if packets pass it again.
    fn give_back(&mut self, to: NodeId, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let leads_itself = self.word.1 == me;
        let ordered = self.ordered.filter(|(first, _)| leads_itself && *first == to);
        if ordered.is_some_and(|(_, since)| since + Self::SETTLES > now) {
            return;
        }
        let since_left = self.left.get(&to).map_or(Micros::MAX, |left| now.saturating_sub(*left));
        let Some(gateway) = &mut self.gateway else { return };
        let returns = &mut gateway.returns;
        if !gateway.others.is_fit(to, now, self.params.heard) {
            return;
        }
        if leads_itself {
            returns.tries = None;
        }
        let lost = gateway.others.losses(&self.params, now, to);
        // One that has failed lately returns as after any fault, whatever the order says.
        let is_ordered = ordered.is_some() && lost == 0;
        let tried = returns.tries == Some(to) && now >= self.word_since + SEC;
        if !tried || !gateway.detector.works_since(now.saturating_sub(self.params.heard)) {
            let healthy = gateway.others.healthy_for(&self.params, to, now).min(since_left);
            if is_ordered {
                // There and back is one change of each; an annotation that keeps moving has to wait.
                let (count, last) = returns.ordered;
                let count = if last + self.params.remembers(count) < now { 0 } else { count };
                if healthy < SEC || count > 0 && now < last + self.params.hold_after(count) {
                    return;
                }
                returns.ordered = (count + 1, now);
            } else {
                if returns.last + self.params.remembers(returns.count) < now {
                    returns.count = 0;
                }
                let led_since = gateway.lead.as_ref().map_or(self.word_since, Lead::since);
                if healthy.min(now.saturating_sub(led_since))
                    < self.params.hold_after(lost.max(returns.count))
                {
                    return;
                }
                returns.count += 1;
                returns.last = now;
            }
        }
        returns.gave = Some(now);
        if leads_itself && !is_ordered && self.own_location.nodes.len() > 2 {
            returns.tries = Some(to);
            turn.push(Output::Note(Note::Tries(to)));
            return self.give(to, 0, &[me], turn);
        }
        self.plan_change(to, if is_ordered { Cause::Order } else { Cause::Returns }, turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Term,
        agent::test_bench::{Bench, LEADER, ME, MEMBER},
    };

    /// What this gateway does about the one that Kilo's order names, which is fit from now on, and after how many
    /// seconds; it has `lost` leadership a moment ago.
    fn gives_to_ordered(lost: bool) -> (&'static str, u64) {
        let mut bench = Bench::new();
        bench.lead(&[ME, MEMBER], Shared::Move);
        let begins = bench.now;
        bench.agent.ordered = Some((LEADER, begins));
        if lost {
            let gateway = bench.agent.gateway.as_mut().expect("it is one");
            gateway.others.lost(&bench.agent.params, begins, LEADER);
        }
        loop {
            for output in bench.hear_hello(LEADER, Term::from_bits(7 << 16), ME) {
                let seconds = (bench.now - begins) / SEC;
                match output {
                    Output::Note(Note::Tries(LEADER)) => return ("tries it", seconds),
                    Output::Lan(LEADER, Signal { kind: Kind::Prepare, .. }) => return ("gives", seconds),
                    _ => assert!(seconds < 90, "it gives nothing"),
                }
            }
        }
    }

    #[test]
    fn an_order_spares_nobody_the_trial_who_has_just_failed() {
        assert_eq!(gives_to_ordered(false), ("gives", 2));
        assert_eq!(gives_to_ordered(true), ("tries it", 60));
    }
}
