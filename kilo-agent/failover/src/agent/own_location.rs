//! The location in the topology, and what a change of it means to an agent.

use std::collections::BTreeMap;

use super::{Agent, Gateway, Start};
use crate::{Far, Micros, NodeId, Output, Several, Turn, planned::Cause};

/// The location, as the topology has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnLocation {
    /// This node.
    pub me: NodeId,
    /// First 8 bytes of SHA-256 of the location's name.
    pub location: u64,
    /// Gateways in Kilo's order.
    pub gateways: Vec<NodeId>,
    /// All nodes, this one included.
    pub nodes: Vec<NodeId>,
    /// Far leaders that can answer probes.
    pub fars: Vec<Far>,
    /// Nodes that are about to go, and why: they lead only where nobody else can.
    pub leaving: BTreeMap<NodeId, Cause>,
    /// Several active leaders; `None`: one leads all.
    pub several: Option<Several>,
    /// The cookies with which this node's kernel answers the roll calls of the other
    /// gateways: secrets of this boot.
    pub cookies: BTreeMap<NodeId, u64>,
}

impl OwnLocation {
    /// The gateway that is to lead: the first in Kilo's order that stays, else the first.
    pub fn first(&self) -> Option<NodeId> {
        let stays = |gateway: &&NodeId| !self.leaving.contains_key(gateway);
        self.gateways.iter().find(stays).or(self.gateways.first()).copied()
    }

    /// The cookie for this node's numbered signals to another one.
    pub(crate) fn cookie(&self, to: NodeId) -> u64 {
        self.cookies.get(&to).copied().unwrap_or(0)
    }
}

impl Agent {
    /// Takes over a location in which nodes, gateways or far leaders came or went. Keeps what is known
    /// about those that stay.
    pub fn set_own_location(
        &mut self,
        new: OwnLocation,
        now: Micros,
        random: &mut dyn FnMut() -> u64,
    ) -> Vec<Output> {
        let mut out = Vec::new();
        if new == self.own_location {
            return out;
        }
        if new.location != self.own_location.location {
            return self.start_anew(new, now, random);
        }
        let leads_no_more = match (&mut self.gateway, new.gateways.contains(&new.me)) {
            (Some(gateway), true) => {
                gateway.tunnels.set_fars(&self.params, &new.fars, now);
                gateway.roll.set_nodes(&new.nodes);
                gateway.numbers.set_nodes(&new.nodes);
                gateway.homing.set_nodes(&new.nodes);
                gateway.orphans.set_nodes(&new.nodes);
                gateway.others.set_gateways(&self.params, &new.gateways, now);
                gateway.lead.as_mut().is_some_and(|lead| lead.set_nodes_and_fars(&new.nodes, &new.fars, now))
            }
            (Some(gateway), false) => {
                let led = gateway.lead.is_some();
                self.gateway = None;
                led
            }
            (None, true) => {
                self.gateway = Some(Gateway::new(&self.params, &new.fars, now, random));
                false
            }
            (None, false) => false,
        };
        self.note_order(&new, now);
        self.own_location = new;
        self.leave_shared_to_acting();
        if leads_no_more {
            let (later, random) = (&mut Vec::new(), random);
            if self.gateway.is_some() {
                self.mark_led(&mut Turn { now, random, out: &mut out, later });
            } else {
                out.push(Output::Led(Vec::new()));
            }
        }
        self.due = Micros::MAX;
        out
    }

    /// Starts anew in another location: the node led its members and heard its signals in the former one.
    pub(super) fn start_anew(
        &mut self,
        new: OwnLocation,
        now: Micros,
        random: &mut dyn FnMut() -> u64,
    ) -> Vec<Output> {
        let led = self.lead().is_some();
        let clock = self.clock.wrapping_add(now);
        let start = Start { now, clock, word: self.word, led: Vec::new(), is_boot: false };
        *self = Self::new(self.params.clone(), new, start, random);
        led.then_some(Output::Led(Vec::new())).into_iter().collect()
    }

    /// Records a new order: a gateway that was there before and now comes first is to lead as soon as it can;
    /// one that has come, or is no longer about to go, only after a time of health.
    pub(super) fn note_order(&mut self, new: &OwnLocation, now: Micros) {
        self.left.retain(|node, _| new.nodes.contains(node));
        for node in self.own_location.leaving.keys().filter(|node| !new.leaving.contains_key(node)) {
            self.left.insert(*node, now);
        }
        self.leaving_since.retain(|node, _| new.leaving.contains_key(node));
        for node in new.leaving.keys() {
            self.leaving_since.entry(*node).or_insert(now);
        }
        let (before, first) = (self.own_location.first(), new.first());
        if first != before {
            let was_there = |node: &NodeId| {
                self.own_location.nodes.contains(node) && !self.own_location.leaving.contains_key(node)
            };
            // Where the former first one is gone, nobody has asked for another order.
            let is_order = before.is_some_and(|before| new.nodes.contains(&before));
            self.ordered = first.filter(|first| is_order && was_there(first)).map(|first| (first, now));
            self.forget_obeyed_order();
        }
    }

    /// Forgets Kilo's order once the gateway that it names leads this node, and no change to it is under way
    /// that may be taken back: what follows, as that gateway's failure and return, nobody has ordered.
    pub(crate) fn forget_obeyed_order(&mut self) {
        let gives = self.gateway.as_ref().is_some_and(|gateway| gateway.planned.is_giving());
        if !gives && self.ordered.is_some_and(|(first, _)| first == self.word.1) {
            self.ordered = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Input, SEC, Term,
        agent::test_bench::{Bench, LEADER, ME, MEMBER},
    };

    /// The bench with gateways in this order, where these nodes are there; returns the gateway that is
    /// ordered to lead.
    fn ordered(bench: &mut Bench, gateways: &[NodeId], nodes: &[NodeId]) -> Option<NodeId> {
        let new = OwnLocation {
            gateways: gateways.to_vec(),
            nodes: nodes.to_vec(),
            ..bench.agent.own_location.clone()
        };
        bench.agent.set_own_location(new, bench.now, &mut || 1);
        bench.agent.ordered.map(|(first, _)| first)
    }

    #[test]
    fn an_order_counts_until_its_gateway_leads_and_none_is_made_by_a_death() {
        const ALL: [NodeId; 3] = [LEADER, ME, MEMBER];
        let mut bench = Bench::new();
        assert_eq!(ordered(&mut bench, &[MEMBER, LEADER, ME], &ALL), Some(MEMBER), "the annotation moves");
        bench.turn(vec![Input::Word(Term::from_bits(8 << 16), MEMBER)]);
        assert_eq!(bench.agent.ordered, None, "it leads");
        assert_eq!(ordered(&mut bench, &[LEADER, ME], &[LEADER, ME]), None, "the first one is declared dead");
        assert_eq!(ordered(&mut bench, &[MEMBER, LEADER, ME], &ALL), None, "it is back");
        bench.turn(vec![Input::Word(Term::from_bits(9 << 16), ME)]);
        assert_eq!(ordered(&mut bench, &[ME, LEADER], &ALL), None, "who leads already is first");
        assert_eq!(ordered(&mut bench, &[LEADER, ME], &ALL), Some(LEADER), "and back");
        bench.now += SEC;
        bench.turn(vec![]);
        assert_eq!(bench.agent.ordered.map(|(first, _)| first), Some(LEADER), "it does not lead yet");
    }
}
