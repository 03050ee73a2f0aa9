//! A gateway that uses itself while more of the location use another one, as during the trial of a return.
//! None of its own packets pass that one, so it probes that gateway's kernel on the LAN, and members say
//! whether their path still works.
//!
//! Several active leaders all use themselves. The first of the others watches the acting leader in this way,
//! and claims the shared prefixes if that one is silent and no stand-by of its own takes them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, stand_by::Suspect};
use crate::{
    Micros, NodeId, Note, Output, Params, ProbePath, Rule, SEC, Several, Turn, gateway::Lead, probes::Row,
    signal::Shared,
};

/// Probes of a gateway that others use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    leader: Option<NodeId>,
    lan: Row,
    due: Micros,
    /// When the shared prefixes were last claimed, and whether the gateway has been silent since.
    claimed: Option<Micros>,
    has_claimed: bool,
}

impl Watch {
    /// When it has to be woken.
    pub(crate) fn wake(&self) -> Micros {
        let deadline = if self.lan.misses() > 0 { self.lan.deadline() } else { Micros::MAX };
        if self.leader.is_some() { self.due.min(deadline) } else { Micros::MAX }
    }

    /// Sets the gateway that others use now; `None`: nobody uses any other than this node.
    fn set_leader(&mut self, leader: Option<NodeId>, now: Micros) {
        if leader != self.leader {
            *self = Self { leader, due: now, ..Self::default() };
        }
    }

    /// Handles the answer to a probe.
    pub(crate) fn answered(&mut self, nonce: u64) {
        if self.lan.answered(nonce).is_some() {
            self.has_claimed = false;
        }
    }

    /// Drops outstanding probes, which prove nothing: the agent slept.
    pub(crate) fn discard(&mut self) {
        self.lan.clear();
    }

    /// LAN probes that were missed in a row, and since when.
    fn missed(&self) -> Option<(usize, Micros)> {
        Some((self.lan.misses(), self.lan.since()?))
    }

    /// Sends the probe that is due; `calm`: the pause after it while the gateway answers.
    fn wake_up(&mut self, params: &Params, calm: Micros, turn: &mut Turn<'_>) {
        self.lan.expire(turn.now);
        if turn.now < self.due {
            return;
        }
        let Some(leader) = self.leader else { return };
        let pause = match self.lan.misses() {
            _ if self.has_claimed => params.roll,
            0 => calm,
            _ => params.silent,
        };
        self.due = turn.now + turn.jittered(pause);
        let nonce = turn.nonce();
        self.lan.sent(nonce, turn.now, turn.now + params.lan_deadline);
        turn.push(Output::Probe { nonce, path: ProbePath::Lan(leader) });
    }
}

impl Agent {
    /// Finds out whether others use another gateway, as often as HELLO is sent.
    pub(super) fn choose_leader_to_watch(&mut self, now: Micros) {
        let leader = self.leads_more(now);
        if let Some(gateway) = &mut self.gateway {
            gateway.watch.set_leader(leader, now);
        }
    }

    /// The gateway that more nodes use than this one, while this one uses itself; of several active leaders,
    /// [`Self::acting_to_watch`]. Of two nodes neither has a witness: `None`.
    fn leads_more(&self, now: Micros) -> Option<NodeId> {
        let (me, gateway) = (self.own_location.me, self.gateway.as_ref()?);
        if self.word.1 != me || !self.params.keeps(Rule::Watch) {
            return None;
        }
        if let Some(several) = &self.own_location.several {
            return self.acting_to_watch(several, now);
        }
        if self.own_location.nodes.len() <= 2 {
            return None;
        }
        let mut users = BTreeMap::<NodeId, BTreeSet<NodeId>>::new();
        for (node, uses) in gateway.roll.users(now).filter(|(node, uses)| node != uses && *node != me) {
            if self.own_location.gateways.contains(&uses) {
                users.entry(uses).or_default().insert(node);
            }
        }
        let own = users.remove(&me).unwrap_or_default();
        let (leader, most) = users.into_iter().max_by_key(|(gateway, of)| (of.len(), *gateway))?;
        // That gateway may use this one to try it, and does not count.
        let own = own.into_iter().filter(|node| *node != leader).count();
        (most.len() > own).then_some(leader)
    }

    /// The acting leader, if this is the first of the other active leaders that could lead.
    pub(super) fn acting_to_watch(&self, several: &Several, now: Micros) -> Option<NodeId> {
        let (me, (_, acting), gateway) = (self.own_location.me, several.acting, self.gateway.as_ref()?);
        let could = |node: &&NodeId| **node == me || gateway.others.is_fit(**node, now, self.params.heard);
        let first = several.active.iter().filter(|node| **node != acting).find(could)?;
        (*first == me && self.own_location.nodes.contains(&acting)).then_some(acting)
    }

    /// Sends the probes that are due, and takes over from a gateway that is silent and whose members say so.
    pub(super) fn watch_leader(&mut self, turn: &mut Turn<'_>) {
        let me = self.own_location.me;
        let Some(gateway) = &mut self.gateway else { return };
        if self.word.1 != me {
            // The gateway that this node uses is watched by the node's own packets.
            gateway.watch.set_leader(None, turn.now);
            return;
        }
        let is_one_of_several = self.own_location.several.is_some();
        let calm = if is_one_of_several { self.params.own } else { self.params.calm };
        gateway.watch.wake_up(&self.params, calm, turn);
        let (Some(leader), Some((misses, since))) = (gateway.watch.leader, gateway.watch.missed()) else {
            return;
        };
        // The proof by this node's own tunnel must not come later than the last miss.
        if let Some(far) = gateway.tunnels.targets(&self.params, turn.now).first() {
            gateway.tunnels.probe_again(*far, self.params.silent, turn);
        }
        if is_one_of_several {
            if misses >= self.params.soft {
                self.claim_shared_of_silent(leader, since, turn);
            }
            return;
        }
        let suspect = Suspect { leader, since, followed_since: 0 };
        self.decide_on(&suspect, turn, |sentinel, scene| sentinel.decide_by_witnesses(scene, misses, since));
    }

    /// How long stand-bys of an acting leader that could take over are waited for.
    const LEAVES_TO_STAND_BYS: Micros = 3 * SEC;
    /// Minimum time between two such claims, each of which is a new term.
    const CLAIMS: Micros = 10 * SEC;

    /// Claims the shared prefixes of an acting leader whose kernel has been silent since then, if this node's
    /// own tunnel worked meanwhile. Far leaders ask it before they move them: it may only have lost this LAN.
    fn claim_shared_of_silent(&mut self, acting: NodeId, since: Micros, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let is_awaited = since + Self::LEAVES_TO_STAND_BYS > now && self.has_fit_stand_by(acting, now);
        let Some(gateway) = &self.gateway else { return };
        let shared = gateway.lead.as_ref().map_or(Shared::Stay, Lead::shared);
        let is_claimed = match shared {
            Shared::Move => true,
            Shared::MoveIfSilent => gateway.watch.has_claimed,
            Shared::Stay => false,
        };
        let was_lately = gateway.watch.claimed.is_some_and(|at| at + Self::CLAIMS > now);
        let proved = gateway.tunnels.is_fit(&self.params, now)
            && gateway.tunnels.proves(since + self.params.interval * 3 / 2)
            && gateway.tunnels.were_good(since.max(now.saturating_sub(SEC)));
        if is_claimed || was_lately || is_awaited || !proved || self.is_replaced(acting, now) {
            return;
        }
        if let Some(gateway) = &mut self.gateway {
            (gateway.watch.claimed, gateway.watch.has_claimed) = (Some(now), true);
        }
        turn.push(Output::Note(Note::ClaimsShared(acting)));
        // In a term of its own: a far leader that the old leader has answered asks it again only then.
        self.term = self.term.next(me);
        self.lead_in(self.term, [me], Shared::MoveIfSilent, turn);
    }

    /// The stand-bys of an active leader.
    fn stand_bys_of(&self, leader: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let several = self.own_location.several.as_ref();
        let is_its = move |node: &NodeId| several.is_some_and(|it| it.home(*node) == Some(leader));
        self.own_location.gateways.iter().copied().filter(move |node| *node != leader).filter(is_its)
    }

    fn has_fit_stand_by(&self, leader: NodeId, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        self.stand_bys_of(leader).any(|node| gateway.others.is_fit(node, now, self.params.heard))
    }

    /// Whether a stand-by of an active leader leads in its place.
    pub(super) fn is_replaced(&self, leader: NodeId, now: Micros) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let leads = |node: NodeId| gateway.roll.fresh(node, now).is_some_and(|last| last.word.1 == node);
        self.stand_bys_of(leader).any(leads)
    }
}
