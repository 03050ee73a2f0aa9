//! A gateway that uses itself while more of the location use another one, as during the trial of a return.
//! None of its own packets pass that one, so it probes that gateway's kernel on the LAN, and members say
//! whether their path still works.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, stand_by::Suspect};
use crate::{Micros, NodeId, Output, Params, ProbePath, Rule, Turn, probes::Row};

/// Probes of a gateway that others use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    leader: Option<NodeId>,
    lan: Row,
    due: Micros,
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
            *self = Self { leader, lan: Row::default(), due: now };
        }
    }

    /// Handles the answer to a probe.
    pub(crate) fn answered(&mut self, nonce: u64) {
        self.lan.answered(nonce);
    }

    /// Drops outstanding probes, which prove nothing: the agent slept.
    pub(crate) fn discard(&mut self) {
        self.lan.clear();
    }

    /// LAN probes that were missed in a row, and since when.
    fn missed(&self) -> Option<(usize, Micros)> {
        Some((self.lan.misses(), self.lan.since()?))
    }

    fn wake_up(&mut self, params: &Params, turn: &mut Turn<'_>) {
        self.lan.expire(turn.now);
        if turn.now < self.due {
            return;
        }
        let Some(leader) = self.leader else { return };
        let pause = if self.lan.misses() > 0 { params.silent } else { params.calm };
        self.due = turn.now + turn.jittered(pause);
        let nonce = turn.nonce();
        self.lan.sent(nonce, turn.now, turn.now + params.lan_deadline);
        turn.push(Output::Probe { nonce, way: ProbePath::Lan(leader) });
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

    /// The gateway that more nodes use than this one, while this one uses itself. Several active leaders have
    /// stand-bys of their own, and of two nodes neither has a witness: `None`.
    fn leads_more(&self, now: Micros) -> Option<NodeId> {
        let (me, gateway) = (self.place.me, self.gateway.as_ref()?);
        let has_witnesses = self.place.nodes.len() > 2 && self.place.several.is_none();
        if self.word.1 != me || !has_witnesses || !self.params.keeps(Rule::Watch) {
            return None;
        }
        let mut users = BTreeMap::<NodeId, BTreeSet<NodeId>>::new();
        for (node, uses) in gateway.roll.users(now).filter(|(node, uses)| node != uses && *node != me) {
            if self.place.gateways.contains(&uses) {
                users.entry(uses).or_default().insert(node);
            }
        }
        let own = users.remove(&me).unwrap_or_default();
        let (leader, most) = users.into_iter().max_by_key(|(gateway, of)| (of.len(), *gateway))?;
        // That gateway may use this one to try it, and does not count.
        let own = own.into_iter().filter(|node| *node != leader).count();
        (most.len() > own).then_some(leader)
    }

    /// Sends the probes that are due, and takes over from a gateway that is silent and whose members say so.
    pub(super) fn watch_leader(&mut self, turn: &mut Turn<'_>) {
        let me = self.place.me;
        let Some(gateway) = &mut self.gateway else { return };
        if self.word.1 != me {
            // The gateway that this node uses is watched by the node's own packets.
            gateway.watch.set_leader(None, turn.now);
            return;
        }
        gateway.watch.wake_up(&self.params, turn);
        let (Some(leader), Some((misses, since))) = (gateway.watch.leader, gateway.watch.missed()) else {
            return;
        };
        // The proof by this node's own tunnel must not come later than the last miss.
        if let Some(far) = gateway.tunnels.targets(&self.params, turn.now).first() {
            gateway.tunnels.probe_again(*far, self.params.silent, turn);
        }
        let suspect = Suspect { leader, since, followed_since: 0 };
        self.decide_on(&suspect, turn, |sentinel, scene| sentinel.decide_by_witnesses(scene, misses, since));
    }
}
