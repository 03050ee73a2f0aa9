//! Declaring a leader dead. Nodes without failover follow Kilo's rule, which waits until the leader's
//! heartbeat is too old: a gateway declares it dead sooner.

use crate::{Agent, Micros, NodeId, SEC, gateway::Lead, roll_call::Present, signal::Shared};

/// How long a gateway must have led the location before it declares; the leader's kernel has not
/// answered for 3 s then, either.
const LEADS: Micros = 2 * SEC;

/// Minimum time between two declarations of the same leader's death that no third node confirms, unless it
/// has booted since: a LAN between two nodes that comes and goes looks the same.
const ALONE: Micros = 600 * SEC;

/// The last declaration that no third node confirmed.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeclaredAlone(Option<(NodeId, Option<u64>, Micros)>);

impl DeclaredAlone {
    /// Returns whether the leader, which has this cookie ([`Agent::cookie_of`]), may be declared dead now,
    /// and if so remembers the declaration.
    pub fn admit(&mut self, leader: NodeId, cookie: Option<u64>, now: Micros) -> bool {
        let is_again = |(before, its, at)| (before, its) == (leader, cookie) && now < at + ALONE;
        let admits = !self.0.is_some_and(is_again);
        if admits {
            self.0 = Some((leader, cookie, now));
        }
        admits
    }
}

impl Agent {
    /// Kilo's leader, if this gateway is to declare it dead. That takes a kernel that has answered roll calls
    /// and no longer does, and one of two gateways:
    ///
    /// - the one that leads the location, and hears half of the others;
    /// - the next in Kilo's order, where nobody can find out who could lead (no far leader answers
    ///   probes), if it hears most of the others.
    ///
    /// A gateway whose own network is broken sees the same, which is why others have to be heard.
    /// Where there are none ([`Agent::has_no_witness`]), a leader that is alive and was declared
    /// dead renews its heartbeat.
    ///
    /// A leader that never answered roll calls is declared dead by the gateway that has taken over from it:
    /// it does not know them, or has been dead since before this agent started.
    pub fn declares_dead(&self, now: Micros) -> Option<NodeId> {
        let (me, gateway) = (self.own_location.me, self.gateway.as_ref()?);
        let leader = *self.own_location.gateways.first().filter(|leader| **leader != me)?;
        let leads = |lead: &Lead| lead.shared() != Shared::Stay && lead.since() + LEADS <= now;
        let leads = self.word.1 == me && gateway.lead.as_ref().is_some_and(leads);
        let counts_for = gateway.roll.counts_for();
        let is_there = |last: &Present| last.at + counts_for * 2 / 3 > now;
        let is_heard = |node: &NodeId| gateway.roll.last(*node).is_some_and(is_there);
        let others: Vec<_> = self.others(leader).collect();
        let heard = others.iter().filter(|node| is_heard(node)).count();
        let leads = leads && heard * 2 >= others.len();
        let Some(last) = gateway.roll.last(leader) else {
            let was_asked = gateway.since + counts_for <= now;
            return (leads && (was_asked || !self.own_location.nodes.contains(&leader))).then_some(leader);
        };
        if last.at + counts_for > now {
            return None;
        }
        let before = self.own_location.gateways.iter().skip(1).take_while(|gateway| **gateway != me);
        let hears_most = others.is_empty() || heard * 2 > others.len();
        let is_next = self.own_location.fars.is_empty() && hears_most && !before.into_iter().any(is_heard);
        (leads || is_next).then_some(leader)
    }

    /// Whether no third node of the location knows signals: nobody can then show that this
    /// node's own network works.
    pub fn has_no_witness(&self) -> bool {
        let leader = self.own_location.gateways.first().copied().unwrap_or(self.own_location.me);
        self.others(leader).next().is_none()
    }

    /// The cookie that a node's kernel gave last; it changes with each boot.
    pub fn cookie_of(&self, node: NodeId) -> Option<u64> {
        self.gateway.as_ref()?.roll.last(node).map(|last| last.cookie)
    }

    fn others(&self, leader: NodeId) -> impl Iterator<Item = &NodeId> {
        let me = self.own_location.me;
        self.own_location.nodes.iter().filter(move |node| ![me, leader].contains(node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Input, MS, OwnLocation, Params, Signal, Start, Term,
        signal::{Body, Kind},
        turn::Output,
    };

    const ME: NodeId = 2;

    /// The location of 1, 2 and 3, led by 1, without far leaders that know signals; 1 answers roll
    /// calls for a second, and the members that are named go on.
    fn after(time: Micros, answer: &[NodeId]) -> Option<NodeId> {
        declared_dead(time, answer, stands_by())
    }

    fn stands_by() -> Start {
        Start { now: 0, clock: 0, word: (Term::NONE, 1), led: vec![], is_boot: false }
    }

    fn declared_dead(time: Micros, answer: &[NodeId], start: Start) -> Option<NodeId> {
        declared_dead_among(&[1, ME, 3, 4], time, answer, start)
    }

    fn declared_dead_among(
        nodes: &[NodeId],
        time: Micros,
        answer: &[NodeId],
        start: Start,
    ) -> Option<NodeId> {
        let own_location = OwnLocation {
            me: ME,
            location: 7,
            gateways: nodes.iter().copied().filter(|node| *node < 4).collect(),
            nodes: nodes.to_vec(),
            fars: vec![],
            leaving: std::collections::BTreeMap::new(),
            several: None,
            cookies: std::collections::BTreeMap::new(),
        };
        let mut number = 0;
        let mut random = move || {
            number += 1;
            number
        };
        let begins = start.now;
        let mut agent = Agent::new(Params::default(), own_location, start, &mut random);
        agent.lead_location();
        let (mut now, mut inputs) = (begins, Vec::new());
        while now < time {
            let out = agent.turn(now, std::mem::take(&mut inputs), &mut random);
            for output in out {
                let Output::Lan(to, Signal { kind: Kind::Roll, nonce, .. }) = output else { continue };
                if answer.contains(&to) || to == 1 && now < SEC {
                    let body = Body::Word { cookie: 9, gateway: 1 };
                    let (kind, term) = (Kind::Present, Term::NONE);
                    let signal = Signal { kind, nonce, term, sender: to, location: 7, body };
                    inputs.push(Input::Signal { from: to, signal });
                }
            }
            now += 20 * MS;
        }
        agent.declares_dead(now)
    }

    #[test]
    fn a_leader_is_declared_dead_when_it_alone_is_silent() {
        assert_eq!(after(2 * SEC, &[3, 4]), None, "too early");
        assert_eq!(after(6 * SEC, &[3, 4]), Some(1));
        assert_eq!(after(6 * SEC, &[1, 3, 4]), None, "it answers");
        assert_eq!(after(6 * SEC, &[4]), None, "half of the others");
        assert_eq!(after(6 * SEC, &[]), None, "this node hears nobody");
    }

    #[test]
    fn of_two_nodes_the_one_that_is_left_declares_the_leader_dead() {
        assert_eq!(declared_dead_among(&[1, ME], 6 * SEC, &[], stands_by()), Some(1));
        assert_eq!(declared_dead_among(&[1, ME], 6 * SEC, &[1], stands_by()), None, "it answers");
    }

    #[test]
    fn without_a_third_node_a_leader_is_declared_dead_once_in_ten_minutes_unless_it_has_booted() {
        let mut alone = DeclaredAlone::default();
        assert!(alone.admit(1, Some(7), SEC));
        assert!(!alone.admit(1, Some(7), 600 * SEC));
        assert!(alone.admit(1, Some(8), 601 * SEC), "it has booted");
        assert!(!alone.admit(1, Some(8), 1200 * SEC), "counted from the boot's declaration");
        assert!(alone.admit(1, Some(8), 1201 * SEC), "ten minutes later");
        assert!(alone.admit(5, Some(8), 1202 * SEC), "another leader");
        assert!(alone.admit(5, None, 1203 * SEC), "nothing is known of its boot any more");
        assert!(!alone.admit(5, None, 1204 * SEC));
    }

    #[test]
    fn who_leads_and_hears_nobody_declares_nobody_dead() {
        let leads = || Start {
            now: 0,
            clock: 0,
            word: (Term::NONE.next(ME), ME),
            led: vec![ME, 3, 4],
            is_boot: false,
        };
        assert_eq!(declared_dead(6 * SEC, &[3, 4], leads()), Some(1));
        assert_eq!(declared_dead(6 * SEC, &[3], leads()), Some(1), "half of the others");
        assert_eq!(declared_dead(6 * SEC, &[], leads()), None, "its own network may be broken");
    }

    #[test]
    fn a_leader_that_died_before_this_agent_started_is_declared_dead() {
        let leads = |now| Start {
            now,
            clock: 0,
            word: (Term::NONE.next(ME), ME),
            led: vec![ME, 3, 4],
            is_boot: false,
        };
        let after = |time| declared_dead(SEC + time, &[3, 4], leads(SEC));
        assert_eq!(after(2 * SEC), None, "it has been asked for two seconds");
        assert_eq!(after(4 * SEC), Some(1));
        let stands_by = Start { now: SEC, clock: 0, word: (Term::NONE, 1), led: vec![], is_boot: false };
        assert_eq!(declared_dead(9 * SEC, &[3, 4], stands_by), None, "it has taken nothing over");
    }
}
