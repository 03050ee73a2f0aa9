//! A stand-by that suspects its leader: it asks witnesses, and takes over.

use super::Gateway;
use crate::{
    Agent, MS, Micros, NodeId, Note, Output, OwnLocation, Params, Rule, SEC, Turn, gateway,
    member::adopt,
    other_gateways::Others,
    roll_call::Present,
    sentinel::{Decision, Scene, Sentinel},
    signal::{Body, Kind, Shared},
};

/// A gateway that may have failed.
pub(super) struct Suspect {
    /// The gateway.
    pub(super) leader: NodeId,
    /// Since when it has been silent.
    pub(super) since: Micros,
    /// Since when this node has used it: what nodes said before that does not show which gateway they
    /// use now.
    pub(super) followed_since: Micros,
}

impl Agent {
    /// How long into a silence this node asks who leads by now, before it takes over after all.
    const ASKS: Micros = 3 * SEC;

    pub(crate) fn decide(&mut self, turn: &mut Turn<'_>) {
        if self.word.1 == self.own_location.me || self.is_back() {
            return;
        }
        let silent_since = self.gateway.as_ref().and_then(|gateway| gateway.detector.silent_since());
        let suspect = Suspect {
            leader: self.word.1,
            since: silent_since.unwrap_or(turn.now),
            followed_since: self.word_since,
        };
        self.decide_on(&suspect, turn, Sentinel::decide);
    }

    /// Carries out what `decide` returns about a gateway that may have failed.
    pub(super) fn decide_on(
        &mut self,
        suspect: &Suspect,
        turn: &mut Turn<'_>,
        decide: impl Fn(&mut Sentinel, &Scene<'_>) -> Decision,
    ) {
        // A question is decided at once if nobody can be asked.
        for _ in 0..2 {
            let Some(gateway) = &mut self.gateway else { return };
            let is_fit = gateway.tunnels.is_fit(&self.params, turn.now);
            let better =
                better(&self.params, &self.own_location, suspect.leader, (&gateway.others, is_fit), turn.now);
            let scene = Scene {
                params: &self.params,
                now: turn.now,
                detector: &gateway.detector,
                tunnels: &gateway.tunnels,
                is_able: gateway.is_able(&self.params, suspect.leader, turn.now),
                alone: self.own_location.nodes.len() <= 2,
                better,
                has_lost: !self.params.keeps(Rule::BudgetSparesOthers)
                    || gateway.others.losses(&self.params, turn.now, self.own_location.me) > 0,
                patience: gateway.patience(&self.params, turn.now),
            };
            match decide(&mut gateway.sentinel, &scene) {
                Decision::Wait => return,
                Decision::Ask => self.ask_witnesses(suspect, turn),
                Decision::OverBudget => return turn.push(Output::Note(Note::OverBudget)),
                Decision::Take { .. } if self.ask_who_leads(turn) => return,
                Decision::Take { all, but } => return self.take(suspect, all, &but, turn),
            }
        }
    }

    fn ask_witnesses(&mut self, suspect: &Suspect, turn: &mut Turn<'_>) {
        let (sender, now) = (self.sender(), turn.now);
        let Suspect { leader, followed_since, .. } = *suspect;
        let Some(gateway) = &mut self.gateway else { return };
        turn.push(Output::Note(Note::Suspects(leader)));
        let mut pool: Vec<_> = gateway
            .roll
            .heard_lately(now)
            .filter(|(member, present)| {
                ![leader, sender.me].contains(member) && may_use(present, leader, followed_since)
            })
            .map(|(member, _)| member)
            .collect();
        let mut asked = Vec::new();
        let count = if self.params.keeps(Rule::Witnesses) { self.params.witnesses } else { 0 };
        while asked.len() < count && !pool.is_empty() {
            asked.push(pool.swap_remove(turn.below(pool.len() as u64) as usize));
        }
        // Only nodes that are heard from now on get announcements: signals must pass both ways.
        gateway.roll.start_over(now);
        for member in self.own_location.nodes.iter().filter(|node| **node != sender.me) {
            gateway::ask(sender, *member, &mut gateway.roll, turn);
        }
        let patience =
            gateway.detector.timeout(&self.params).max(gateway.tunnels.longest() * 13 / 10 + 15 * MS);
        let patience = patience.min(self.params.path_deadline.1);
        let id = turn.nonce() as u32;
        let answers = 2 * patience.min(120 * MS) + 40 * MS;
        // By then the LAN has missed its third probe, too.
        let answers = answers.max(self.params.silent + self.params.lan_deadline);
        gateway.sentinel.asked(id, asked.clone(), now + answers);
        let body = Body::Question { id, patience: (patience / MS) as u32 };
        let signal = sender.signal(Kind::Witness, leader, self.word.0, body);
        for witness in asked {
            turn.push(Output::Lan(witness, signal.clone()));
            turn.after(10 * MS, Output::Lan(witness, signal.clone()));
        }
    }

    /// Asks the gateway that leads by now, if only this node was left with a silent leader:
    /// taking the location from that one would take it from the gateway that leads. The agent
    /// there may stall for a while.
    fn ask_who_leads(&mut self, turn: &mut Turn<'_>) -> bool {
        let now = turn.now;
        let Some(leader) = self.leads_instead(now) else { return false };
        turn.push(Output::Lan(leader, adopt(&self.member_view(now), leader, 0)));
        if let Some(gateway) = &mut self.gateway {
            gateway.sentinel.rest_until(now + self.params.hello);
        }
        true
    }

    /// The gateway whose kernel says that it leads in a later term than the silent leader, which no
    /// other node uses any more.
    fn leads_instead(&self, now: Micros) -> Option<NodeId> {
        let (me, (term, from), gateway) = (self.own_location.me, self.word, self.gateway.as_ref()?);
        let silent_since = gateway.detector.silent_since()?;
        let is_over = silent_since + Self::ASKS <= now;
        if is_over || self.own_location.several.is_some() || !self.params.keeps(Rule::AsksWhoLeads) {
            return None;
        }
        let others = || gateway.roll.heard_lately(now).filter(|(node, _)| ![me, from].contains(node));
        if others().any(|(_, present)| may_use(present, from, self.word_since)) {
            return None;
        }
        // Gateways are called once in that time, and everybody with each suspicion.
        let answers = |present: &Present| present.at + self.params.roll * 3 / 2 > now;
        let leads = |(node, present): &(NodeId, &Present)| {
            let (since, uses) = present.word;
            uses == *node && since > term && self.own_location.gateways.contains(node) && answers(present)
        };
        let (leader, _) = others().filter(leads).max_by_key(|(_, present)| present.word)?;
        // It has taken over since the silence began, or the silent one was led by another one before. A
        // gateway that only took itself, and long ago, does not have the shared prefixes.
        let is_led = gateway.roll.last(from).is_some_and(|last| last.word.1 != from);
        let takes = gateway.roll.has_changed_gateway(leader, silent_since.saturating_sub(self.params.heard));
        (is_led || takes).then_some(leader)
    }

    fn take(&mut self, suspect: &Suspect, all: bool, but: &[NodeId], turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let Suspect { leader: from, since, followed_since } = *suspect;
        let Some(gateway) = &mut self.gateway else { return };
        turn.push(Output::Note(Note::TakesOver { from, all, since }));
        gateway.others.lost(&self.params, now, from);
        let roll = &gateway.roll;
        let several = self.own_location.several.as_ref();
        let used = |member: &NodeId| match (roll.last(*member), several) {
            // Nodes that use another leader stay there.
            (Some(present), Some(_)) => present.word.1 == from,
            (None, Some(several)) => several.home(*member) == Some(from),
            (present, None) => present.is_none_or(|present| may_use(present, from, followed_since)),
        };
        let members: Vec<_> = self
            .own_location
            .nodes
            .iter()
            .copied()
            .filter(|node| *node == me || all && *node != from && !but.contains(node) && used(node))
            .collect();
        // A node that has lost its own LAN hears nobody, either: then far leaders ask the gateway that
        // has the shared prefixes.
        let hears = |node: &NodeId| ![me, from].contains(node) && roll.reachable(*node, now).is_some();
        let is_heard = !self.params.keeps(Rule::SharedNeedsLan) || self.own_location.nodes.iter().any(hears);
        // Another one of several leaders acts according to the annotations, which may be old.
        let is_unsure = several.is_some_and(|several| several.acting.1 != from);
        let shared = match (all, is_heard) {
            (true, true) if self.own_location.nodes.len() > 2 && !is_unsure => Shared::Move,
            (true, _) => Shared::MoveIfSilent,
            (false, _) => Shared::Stay,
        };
        self.lead_more(members, shared, turn);
    }
}

impl Gateway {
    /// Whether this gateway could lead in the place of that one. A few far locations that are dark to it count
    /// against it only while another gateway could lead, which may reach them.
    pub(super) fn is_able(&self, params: &Params, leader: NodeId, now: Micros) -> bool {
        self.tunnels.is_fit(params, now)
            || self.tunnels.is_fit_but_for_dark(params, now)
                && !self.others.is_any_fit_but(params, leader, now)
    }
}

/// Whether a member that reported this may use `leader`: what it reported before this node followed that
/// leader proves nothing.
fn may_use(present: &Present, leader: NodeId, word_since: Micros) -> bool {
    present.word.1 == leader || present.at < word_since
}

/// How many gateways that should take over before this one were heard lately. One that is not fit but could
/// lead all the same ([`Gateway::is_able`]) takes others that are not fit for like itself.
fn better(
    params: &Params,
    own_location: &OwnLocation,
    leader: NodeId,
    (others, is_fit): (&Others, bool),
    now: Micros,
) -> usize {
    let order = |node: NodeId| {
        let index = own_location.gateways.iter().position(|gateway| *gateway == node);
        (own_location.leaving.contains_key(&node), others.losses(params, now, node), index)
    };
    let own = order(own_location.me);
    let may_take = |node: NodeId| {
        if is_fit { others.is_fit(node, now, params.heard) } else { others.is_heard(params, node, now) }
    };
    own_location
        .gateways
        .iter()
        .filter(|gateway| ![leader, own_location.me].contains(gateway) && may_take(**gateway))
        .filter(|gateway| order(**gateway) < own)
        // Each of several leaders has stand-bys of its own.
        .filter(|gateway| {
            own_location.several.as_ref().is_none_or(|several| several.home(**gateway) == Some(leader))
        })
        .count()
}
