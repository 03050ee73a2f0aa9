//! Simulated time: packets with delay and loss, agents that wake, faults that start
//! and end. Everything an agent or a kernel decides is the code that ships.

mod agents;
mod breaking;
mod checks;
mod event;
mod far;
mod probes;
mod traffic;
mod wires;

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

use checks::Counts;
use event::{Event, Queued};
use far::FarHost;
use kilo_common::lead::Term;
use kilo_failover::{Input, MS, Micros, NodeId, Params, SEC, Several, signal::Kind};
use traffic::Traffic;
pub use wires::Noise;

use crate::{
    faults::{Fault, NEVER, Schedule},
    host::{self, Host, Taken},
    invariants::Invariant,
    rng::Rng,
};

/// The location's id.
pub const LOCATION: u64 = 0x6c6f_6361_7469_6f6e;

/// A location, and the far locations it is joined to.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Nodes of the location under test, gateways included.
    pub nodes: usize,
    /// How many of them, from the first on, are gateways, in Kilo's order.
    pub gateways: usize,
    /// Far locations.
    pub fars: usize,
    /// One-way delay to every far leader; `None`: 2 to 40 ms at random.
    pub delay: Option<Micros>,
    /// Index of a node that runs Go Kilo, if there is one.
    pub go: Option<usize>,
}

/// One run: hosts, far leaders, the network between them, and a queue of events in simulated time.
pub struct Sim {
    pub(crate) now: Micros,
    pub(crate) params: Params,
    pub(crate) gateways: usize,
    pub(crate) hosts: Vec<Host>,
    pub(crate) fars: Vec<FarHost>,
    /// Whether agents of far leaders forget, half a minute after their start, what nobody has claimed.
    pub(crate) fars_forget: bool,
    pub(crate) noise: Noise,
    pub(crate) rng: Rng,
    queue: BinaryHeap<Reverse<Queued>>,
    number: u64,
    pub(crate) delays: Vec<Vec<Micros>>,
    pub(crate) cuts: BTreeSet<(usize, usize)>,
    /// Gateways and far leaders that do not reach each other.
    pub(crate) far_cuts: BTreeSet<(usize, usize)>,
    /// Share of packets that a flood loses in its leader's tunnel, each way.
    pub(crate) flood: f64,
    faults: Vec<(Micros, Micros, Fault)>,
    /// Cordoned nodes, and the node that Kilo's order names first.
    cordoned: BTreeSet<usize>,
    first: usize,
    /// Nodes that have stopped being gateways.
    no_gateways: BTreeSet<usize>,
    /// How many gateways lead at once; 0: one leads all.
    active: usize,
    /// How many led from the start.
    led_by_first: usize,
    /// Who leads according to the annotations while nobody can change them.
    annotated: Option<(Term, NodeId)>,
    /// Whether probes to other locations' WireGuard addresses are lost.
    renumbered: bool,
    /// Announced changes that concerned nobody.
    changes: u32,
    pub(crate) traffic: Option<Traffic>,
    pub(crate) counted: Vec<bool>,
    pub(crate) watched_from: Micros,
    pub(crate) down: Vec<Vec<Option<Micros>>>,
    /// Every word that each member's kernel has had.
    pub(crate) followed: Vec<BTreeSet<(Term, NodeId)>>,
    /// Counters of this run.
    pub counts: Counts,
    /// Whether it prints what happens.
    pub log: bool,
}

impl Sim {
    /// A healthy location at its start. The same seed gives the same run.
    pub fn new(seed: u64, shape: Shape, noise: Noise, params: Params) -> Self {
        let Shape { nodes, fars, .. } = shape;
        let gateways = shape.gateways.min(nodes);
        let mut rng = Rng::new(seed);
        let delays = (0..fars)
            .map(|_| {
                let base = shape.delay.unwrap_or_else(|| rng.between(2, 40) * MS);
                (0..gateways).map(|_| base + rng.between(0, 3 * MS)).collect()
            })
            .collect();
        let hosts =
            (0..nodes).map(|node| Host { is_go: shape.go == Some(node), ..Host::new(rng.bits()) }).collect();
        let mut sim = Self {
            now: 0,
            params,
            gateways,
            hosts,
            fars: (0..fars).map(|_| FarHost::new(nodes)).collect(),
            fars_forget: false,
            noise,
            rng,
            queue: BinaryHeap::new(),
            number: 0,
            delays,
            cuts: BTreeSet::new(),
            far_cuts: BTreeSet::new(),
            flood: 0.0,
            faults: Vec::new(),
            cordoned: BTreeSet::new(),
            first: 0,
            no_gateways: BTreeSet::new(),
            active: 0,
            led_by_first: 1,
            annotated: None,
            renumbered: false,
            changes: 0,
            traffic: None,
            counted: vec![true; nodes],
            watched_from: 3 * SEC,
            down: vec![vec![None; fars]; nodes],
            followed: vec![[(Term::NONE, host::id(0))].into(); nodes],
            counts: Counts::default(),
            log: false,
        };
        (0..nodes).for_each(|node| sim.start_agent(node, false));
        sim
    }

    /// From now on so many of the first gateways lead, and agents read the objects every second.
    pub fn set_active(&mut self, active: usize, until: Micros) {
        (self.active, self.led_by_first) = (active, active.max(1));
        for at in (1..until / SEC).map(|second| second * SEC) {
            for node in 0..self.hosts.len() {
                let at = at + self.rng.between(MS, 500 * MS);
                self.at(at, Event::ReadObjects(node));
            }
        }
    }

    /// How many of the first gateways lead from `at` on.
    pub fn set_active_at(&mut self, active: usize, at: Micros) {
        self.at(at, Event::Active(active));
    }

    /// How many members use each gateway now.
    pub fn loads(&self) -> Vec<usize> {
        (0..self.gateways)
            .map(|gateway| self.hosts.iter().filter(|host| host.uses() == gateway).count())
            .collect()
    }

    /// What the topology says about several leaders: shares in turn; those of a cordoned
    /// leader go to the next.
    fn several(&self) -> Option<Several> {
        let all: Vec<usize> = (0..self.active).collect();
        let leads = |node: &usize| !self.cordoned.contains(node) && !self.no_gateways.contains(node);
        let active: Vec<usize> = all.iter().copied().filter(leads).collect();
        if active.len() < 2 {
            return None;
        }
        // A node that has joined takes a share of everybody's.
        let joined = self.led_by_first..all.len();
        let assigned = |node: usize| {
            let taken =
                joined.clone().rev().find(|leader| node / self.led_by_first % (leader + 1) == *leader);
            taken.unwrap_or(node % self.led_by_first)
        };
        let home = |node: usize| match assigned(node) {
            _ if active.contains(&node) => node,
            home if active.contains(&home) => home,
            _ => active[node / all.len() % active.len()],
        };
        Some(Several {
            active: active.iter().copied().map(host::id).collect(),
            homes: (0..self.hosts.len()).map(|node| (host::id(node), host::id(home(node)))).collect(),
            acting: self.acting(),
        })
    }

    /// Who leads the location according to the annotations, and since which term.
    pub(crate) fn acting(&self) -> (Term, NodeId) {
        if let Some(annotated) = self.annotated {
            return annotated;
        }
        let leads = |node: usize| self.hosts[node].written().map(|term| (term, host::id(node)));
        (0..self.gateways).filter_map(leads).max().unwrap_or((Term::NONE, host::id(self.first)))
    }

    /// Runs a schedule to its end; outages that began before `start` do not count.
    pub fn run(&mut self, schedule: Schedule, start: Micros) {
        let Schedule { faults, until, excused } = schedule;
        excused
            .into_iter()
            .filter(|node| *node < self.hosts.len())
            .for_each(|node| self.counted[node] = false);
        if let Some(go) = self.hosts.iter().position(|host| host.is_go) {
            self.counted[go] = false;
        }
        self.watched_from = start;
        self.faults = faults;
        if self.noise.stalls {
            self.add_stalls(until);
        }
        for (index, (from, to, _)) in self.faults.clone().into_iter().enumerate() {
            self.at(from, Event::Starts(index));
            if to != NEVER {
                self.at(to, Event::Ends(index));
            }
        }
        while let Some(Reverse(next)) = self.queue.pop() {
            if next.at > until {
                break;
            }
            self.now = next.at;
            self.handle(next.event);
        }
        self.now = until;
        let of_member = self.down.iter().enumerate();
        let open: Vec<_> = of_member
            .flat_map(|(member, down)| down.iter().flatten().map(move |since| (member, *since)))
            .collect();
        open.into_iter().for_each(|(member, since)| self.count_outage(member, since));
    }

    fn add_stalls(&mut self, until: Micros) {
        let agents = self.hosts.len() + self.fars.len();
        let mut at = SEC;
        while at < until {
            let who = self.rng.index(agents);
            let fault = who.checked_sub(self.hosts.len()).map_or(Fault::Stall(who), Fault::FarStall);
            self.faults.push((at, at + 200 * MS, fault));
            at += self.rng.between(1, 10 * SEC / agents as u64);
        }
    }

    pub(crate) fn at(&mut self, at: Micros, event: Event) {
        self.number += 1;
        self.queue.push(Reverse(Queued { at, number: self.number, event }));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake(node) => {
                if self.hosts[node].wake == self.now {
                    self.hosts[node].wake = Micros::MAX;
                    self.run_agent(node);
                }
            }
            Event::Resume(node) => {
                self.look_at_all();
                self.run_agent(node);
            }
            Event::Starts(index) => self.fault(index, true),
            Event::Ends(index) => self.fault(index, false),
            Event::Lan { to, bytes, sent_at } => self.signal(to, &bytes, sent_at),
            Event::LanProbe { prober, probed, nonce, back: false } => {
                if self.hosts[probed].wires.runs(self.now) && !self.hosts[probed].is_go {
                    self.lan_send(probed, prober, Event::LanProbe { prober, probed, nonce, back: true });
                }
            }
            Event::LanProbe { prober: node, nonce, .. } | Event::Answer { node, nonce } => {
                if self.traffic.as_mut().is_some_and(|traffic| traffic.out.remove(&nonce)) {
                    return;
                }
                if self.hosts[node].wires.runs(self.now) {
                    self.input(node, Input::Answer { nonce, at: self.now });
                }
            }
            Event::AtGateway { member, from, gateway, far, nonce } => {
                self.at_gateway(member, from, gateway, far, nonce);
            }
            // Cryptokey routing: only from the peer that has the member's prefix.
            Event::AtFar { member, gateway, far, nonce } => {
                if self.fars[far].on && self.fars[far].owner[member].1 == gateway {
                    self.uplink_send(gateway, far, false, Event::BackAtGateway { member, gateway, nonce });
                }
            }
            Event::BackAtGateway { member, gateway, nonce } => {
                let wires = &self.hosts[gateway].wires;
                if wires.runs(self.now) && (member == gateway || wires.forwards) {
                    self.lan_send(gateway, member, Event::Answer { node: member, nonce });
                }
            }
            Event::OwnAtFar { gateway, far, nonce } => {
                if self.fars[far].on {
                    self.uplink_send(gateway, far, false, Event::Answer { node: gateway, nonce });
                }
            }
            Event::FromFar { gateway, far, bytes } => {
                if let Ok(signal) = kilo_common::signal::parse(&bytes)
                    && self.hosts[gateway].wires.runs(self.now)
                {
                    let signal = host::read(&signal);
                    self.input(gateway, Input::Signal { from: far as u64, signal });
                }
            }
            Event::ToFar { gateway, far, bytes } => self.far_hear(gateway, far, &bytes),
            Event::FarApplies { far } => self.far_apply(far),
            Event::FarPlans(far) => self.far_plan(far),
            Event::FarResume(far) => self.far_resume(far),
            Event::FarWake(far) => self.far_wake_up(far),
            Event::FarForgets(far) => self.far_forget(far),
            Event::ReadObjects(node) => self.set_own_location(node),
            Event::Active(active) => self.active = active,
            Event::Packet => self.send_packet(),
            Event::FarProbe { far, gateway, nonce, back } => self.far_probe(far, gateway, nonce, back),
        }
    }

    /// A signal arrives at a node's kernel.
    fn signal(&mut self, node: usize, bytes: &[u8], sent_at: Micros) {
        if !self.hosts[node].wires.runs(self.now) {
            return;
        }
        let before = self.hosts[node].word;
        let to = |bytes: &[u8]| kilo_common::signal::parse(bytes).map(|signal| host::index(signal.sender));
        let Ok(asker) = to(bytes) else { return };
        match self.hosts[node].take(&self.params, host::id(node), bytes) {
            Taken::Refused => {}
            Taken::Agent(signal) => {
                let from = signal.sender;
                let is_numbered = matches!(signal.kind, Kind::Adopt | Kind::Handover);
                let is_old = self.now > sent_at + 3 * SEC && self.hosts[node].since < sent_at;
                let counted = self.counts.accepted();
                self.input(node, Input::Signal { from, signal });
                if is_numbered && is_old && counted != self.counts.accepted() {
                    self.broken(Invariant::NoReplay);
                }
            }
            Taken::Answer(answer) => self.lan_send_signal(node, asker, &answer.into()),
            Taken::Obeys(answer) => {
                self.set_word(node, before, sent_at);
                self.lan_send_signal(node, asker, &answer.into());
                self.run_agent(node);
            }
        }
    }
}
