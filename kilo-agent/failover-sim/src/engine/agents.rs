//! Agents: when they start and run, their events, and what becomes of their outputs.

use std::{collections::BTreeSet, rc::Rc};

use kilo_common::lead::{self, Term};
use kilo_failover::{Agent, Cause, Input, MS, Micros, NodeId, Note, Output, OwnLocation, SEC};

use super::{Event, LOCATION, Sim};
use crate::host;

impl Sim {
    pub(super) fn start_agent(&mut self, node: usize, is_boot: bool) {
        let host = &self.hosts[node];
        if !host.wires.on || host.is_go {
            return;
        }
        let own_location = self.own_location(node);
        let (term, gateway) = host.said();
        let leads_itself = term > Term::NONE && gateway == host::id(node);
        let led: BTreeSet<usize> = host.led.iter().copied().chain(leads_itself.then_some(node)).collect();
        let start = kilo_failover::Start {
            now: self.now,
            clock: self.now.wrapping_add(host.clock),
            word: host.said(),
            led: led.into_iter().map(host::id).collect(),
            is_boot,
        };
        let rng = &mut self.rng;
        let mut agent = Agent::new(self.params.clone(), own_location, start, &mut || rng.bits());
        if leads_itself && host.was_written == Some(term) {
            agent.lead_location();
        }
        self.hosts[node].agent = Some(agent);
        self.hosts[node].since = self.now;
        self.hosts[node].inbox.clear();
        self.hosts[node].wake = Micros::MAX;
        self.schedule(node);
    }

    /// All gateways in Kilo's order.
    pub(crate) fn gateways(&self) -> Vec<NodeId> {
        let others = (0..self.gateways).filter(|gateway| *gateway != self.first);
        let order = std::iter::once(self.first).chain(others);
        order.filter(|node| !self.no_gateways.contains(node)).map(host::id).collect()
    }

    pub(super) fn own_location(&self, node: usize) -> OwnLocation {
        let is_ours = |gateway: &NodeId| !self.hosts[host::index(*gateway)].is_go;
        OwnLocation {
            me: host::id(node),
            location: LOCATION,
            gateways: self.gateways().into_iter().filter(is_ours).collect(),
            nodes: (0..self.hosts.len()).map(host::id).collect(),
            fars: (0..self.fars.len() as u64).collect(),
            leaving: self.cordoned.iter().map(|node| (host::id(*node), Cause::Cordoned)).collect(),
            several: self.several(),
            cookies: (0..self.gateways)
                .map(|other| (host::id(other), self.hosts[node].cookie(host::id(other))))
                .collect(),
        }
    }

    /// The objects have changed: each agent learns it at its own moment.
    pub(super) fn objects_changed(&mut self) {
        for node in 0..self.hosts.len() {
            let at = self.now + self.rng.between(MS, 500 * MS);
            self.at(at, Event::ReadObjects(node));
        }
    }

    pub(super) fn set_own_location(&mut self, node: usize) {
        let own_location = self.own_location(node);
        self.fall_to_kilos_leader(node, &own_location);
        let Some(mut agent) = self.hosts[node].agent.take() else { return };
        let rng = &mut self.rng;
        let outputs = agent.set_own_location(own_location, self.now, &mut || rng.bits());
        outputs.into_iter().for_each(|output| self.output(node, output));
        self.hosts[node].agent = Some(agent);
        self.run_agent(node);
    }

    /// The gateway that a node's word names is no longer one: does what the agent's thread does.
    pub(super) fn fall_to_kilos_leader(&mut self, node: usize, own_location: &OwnLocation) {
        let host = &mut self.hosts[node];
        let (term, gateway) = host.said();
        let Some(first) = own_location.gateways.first().copied() else { return };
        if host.agent.is_some() && term > Term::NONE && !own_location.gateways.contains(&gateway) {
            host.word = lead::word(term, host::index(first) as u16);
            host.inbox.push(Input::Word(term, first));
            self.followed[node].insert((term, first));
            self.look_at_all();
        }
    }

    pub(super) fn schedule(&mut self, node: usize) {
        let Some(agent) = &self.hosts[node].agent else { return };
        let wake = agent.wake().max(self.now + 1);
        if wake != self.hosts[node].wake {
            self.hosts[node].wake = wake;
            self.at(wake, Event::Wake(node));
        }
    }

    pub(crate) fn input(&mut self, node: usize, input: Input) {
        if self.hosts[node].agent.is_some() {
            self.hosts[node].inbox.push(input);
            self.run_agent(node);
        }
    }

    /// Lets an agent run, unless it stalls: then its inputs wait.
    pub(super) fn run_agent(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        if !host.wires.runs(self.now) || host.stalled > self.now {
            return;
        }
        let Some(mut agent) = host.agent.take() else { return };
        let decrypts = self.decrypts(node);
        let host = &mut self.hosts[node];
        host.decrypted += u64::from(decrypts);
        host.inbox.push(Input::Decrypted(host.decrypted));
        loop {
            let inputs = std::mem::take(&mut self.hosts[node].inbox);
            let rng = &mut self.rng;
            let outputs = agent.turn(self.now, inputs, &mut || rng.bits());
            outputs.into_iter().for_each(|output| self.output(node, output));
            if self.hosts[node].inbox.is_empty() {
                break;
            }
        }
        self.hosts[node].agent = Some(agent);
        self.schedule(node);
    }

    /// A node sends something to another one on the LAN, where somebody may record and replay it.
    pub(super) fn lan_send_signal(&mut self, node: usize, to: usize, bytes: &Rc<[u8]>) {
        let arrival = |sim: &Self| Event::Lan { to, bytes: bytes.clone(), sent_at: sim.now };
        if self.noise.replays {
            for _ in 0..3 {
                let later = self.now + self.rng.between(SEC, 40 * SEC);
                self.at(later, arrival(self));
            }
        }
        let event = arrival(self);
        self.lan_send(node, to, event);
    }

    pub(super) fn output(&mut self, node: usize, output: Output) {
        match output {
            Output::Probe { nonce, path } => {
                self.counts.sent += 1;
                self.probe(node, nonce, path);
            }
            Output::Lan(to, signal) => {
                self.counts.sent += 1;
                let bytes = host::write(&signal, host::id(node), to).into();
                self.lan_send_signal(node, host::index(to), &bytes);
            }
            Output::Tunnel(far, signal) => {
                self.counts.sent += 1;
                let bytes = host::write(&signal, host::id(node), 0).into();
                let far = far as usize;
                self.uplink_send(node, far, true, Event::ToFar { gateway: node, far, bytes });
            }
            Output::Word(term, gateway) => {
                let before = self.hosts[node].word;
                self.hosts[node].follow(&self.params, term, gateway);
                self.set_word(node, before, self.now);
            }
            Output::Led(members) => {
                self.hosts[node].led = members.into_iter().map(host::index).collect();
                self.look_at_all();
            }
            Output::Note(note) => self.note(node, note),
        }
    }

    /// Handles what an ANNOUNCE has changed in a kernel.
    pub(super) fn set_word(&mut self, node: usize, before: u64, sent_at: Micros) {
        let after = self.hosts[node].word;
        if after != before {
            self.word_changed(node, before, after, sent_at);
            if node < self.gateways { self.look_at_all() } else { self.look([node]) }
        }
        if self.hosts[node].agent.is_some() || self.hosts[node].wires.on {
            let (term, gateway) = self.hosts[node].said();
            // Read when the agent runs: it may be in the middle of a turn.
            self.hosts[node].inbox.push(Input::Word(term, gateway));
        }
    }

    pub(super) fn note(&mut self, node: usize, note: Note) {
        if self.log {
            println!("{:>9} {node}: {note:x?}", self.now / MS);
        }
        match note {
            Note::TakesOver { all: true, .. } => self.counts.taken += 1,
            Note::TakesOver { all: false, .. } => self.counts.alone += 1,
            Note::IsGiven { .. } => self.counts.count_given(node, self.now),
            Note::Adopts { .. } => self.counts.adopted += 1,
            Note::Suspects(_) => self.counts.suspicions += 1,
            Note::TakesBack(_) => self.counts.taken_back += 1,
            Note::Gives { .. } => self.counts.gave += 1,
            Note::TakesHome(_) => self.counts.took_home.push((self.now, node)),
            Note::Replayed(_) => self.counts.replayed += 1,
            Note::Tries(_)
            | Note::ClaimsShared(_)
            | Note::StaysLeader(_)
            | Note::NotReady(_)
            | Note::Leaps(_)
            | Note::OverBudget
            | Note::Busy
            | Note::Behind(_) => {}
        }
    }
}
