//! Leadership that is given, not taken: by a leader that cannot lead any more, by
//! one that is asked to leave, and back to Kilo's choice after a time of health.

use crate::{
    Agent, MS, Micros, NodeId, Note, Output, SEC, Signal, Turn,
    signal::{Body, Kind, MAX_MEMBERS, Shared},
};

/// What a gateway remembers of what it gave.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Returns {
    /// When it gave anything last.
    gave: Option<Micros>,
    /// How often it gave back within ten minutes, and when last.
    count: u32,
    last: Micros,
    /// To whom it has given itself, to try the way before others take it.
    tries: Option<NodeId>,
}

impl Agent {
    /// A leader whose own tunnels are all silent is its own witness.
    pub(crate) fn give_away_when_silent(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        if self.word.1 != self.place.me || self.place.nodes.len() < 2 || self.place.fars.is_empty() {
            return;
        }
        if let Some(since) = gateway.tunnels.silent_since(self.params.leader_misses) {
            self.give_away(turn.now - since, turn);
        }
    }

    /// Gives everybody to the best stand-by. `age`: for how long it has known that
    /// it cannot lead; 0: it does not want to, or its link went this moment.
    pub(crate) fn give_away(&mut self, age: Micros, turn: &mut Turn<'_>) {
        let now = turn.now;
        let Some(gateway) = &mut self.gateway else { return };
        if self.word.1 != self.place.me || gateway.returns.gave.is_some_and(|gave| gave + 100 * MS > now) {
            return;
        }
        let best = gateway.others.best(&self.params, &self.place.gateways, now, 700 * MS);
        let Some(to) = best.into_iter().find(|to| *to != self.place.me) else { return };
        gateway.returns.gave = Some(now);
        let mut members = self.users(now);
        members.push(self.place.me);
        turn.push(Output::Note(Note::Gives(to)));
        self.give(to, age, &members, turn);
    }

    /// Other nodes that use this one.
    fn users(&self, now: Micros) -> Vec<NodeId> {
        let me = self.place.me;
        let roll = self.gateway.iter().flat_map(|gateway| gateway.roll.users(now));
        roll.filter(|(member, uses)| *uses == me && *member != me).map(|(member, _)| member).collect()
    }

    fn give(&self, to: NodeId, age: Micros, members: &[NodeId], turn: &mut Turn<'_>) {
        let age = (age / MS).min(u64::from(u32::MAX)) as u32;
        let term = self.term;
        for (i, members) in members.chunks(MAX_MEMBERS).enumerate() {
            let body = Body::Members { age, members: members.to_vec() };
            let signal = self.sender().signal(Kind::Handover, self.stamp(turn.now) + i as u64, term, body);
            turn.push(Output::Lan(to, signal.clone()));
            for pause in [10 * MS, 30 * MS] {
                turn.after(pause, Output::Lan(to, signal.clone()));
            }
        }
    }

    /// A leader gives these members.
    pub(crate) fn is_given(
        &mut self,
        from: NodeId,
        signal: &Signal,
        age: Micros,
        members: &[NodeId],
        turn: &mut Turn<'_>,
    ) {
        let (me, now) = (self.place.me, turn.now);
        let Some(gateway) = &mut self.gateway else { return };
        let since = now.saturating_sub(age);
        let tunnels = &gateway.tunnels;
        let proof = self.params.interval * 3 / 2;
        let may =
            tunnels.is_fit(now) && (age < proof || tunnels.proves(since + proof) && tunnels.were_good(since));
        let known = members.iter().all(|member| self.place.nodes.contains(member));
        if !may || !known || !self.place.gateways.contains(&from) {
            return;
        }
        let has = |member: &NodeId| {
            gateway.lead.as_ref().is_some_and(|lead| lead.has(*member) && lead.term() > signal.term)
        };
        if members.iter().all(has) {
            return;
        }
        if age > 0 {
            gateway.others.lost(&self.params, now, from);
        }
        self.term = self.term.max(signal.term);
        let uses = self.word.1;
        let itself = (uses == me || members.contains(&uses)).then_some(me);
        // One node alone is a trial, unless there are no others.
        let is_trial = members == [from] && self.place.nodes.len() > 2;
        let shared = if is_trial { Shared::Stay } else { Shared::Move };
        turn.push(Output::Note(Note::IsGiven { from, planned: age == 0 }));
        self.lead_more(members.iter().copied().chain(itself), shared, turn);
    }

    /// Leadership goes back to Kilo's choice, members that were taken singly to the
    /// leader this node uses. First this node goes itself: only if its packets pass
    /// the old leader again do others follow.
    pub(crate) fn give_back(&mut self, turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        let uses = self.word.1;
        let Some(gateway) = &mut self.gateway else { return };
        let Some(lead) = &gateway.lead else { return };
        let leads_itself = uses == me;
        let Some(to) = (if leads_itself { self.place.gateways.first().copied() } else { Some(uses) }) else {
            return;
        };
        let returns = &mut gateway.returns;
        if to == me || returns.gave.is_some_and(|gave| gave + 2 * SEC > now) {
            return;
        }
        if !gateway.others.is_fit(to, now, 500 * MS) {
            return;
        }
        if leads_itself {
            returns.tries = None;
        }
        let tried = returns.tries == Some(to) && now >= self.word_since + SEC;
        if !tried || !gateway.detector.works_since(now.saturating_sub(500 * MS)) {
            if returns.count > 0 && returns.last + self.params.memory < now {
                returns.count = 0;
            }
            let losses = gateway.others.losses(&self.params, now, to).max(returns.count);
            let healthy = gateway.others.healthy_for(to, now).min(now.saturating_sub(lead.since()));
            if healthy < self.params.hold_after(losses) {
                return;
            }
            returns.count += 1;
            returns.last = now;
        }
        returns.gave = Some(now);
        let members: Vec<_> = if leads_itself {
            returns.tries = Some(to);
            vec![me]
        } else {
            lead.members().filter(|member| *member != me).collect()
        };
        turn.push(Output::Note(Note::Gives(to)));
        self.give(to, 0, &members, turn);
    }
}
