//! Simulated time: packets with delay and loss, agents that wake, faults that start
//! and end. Everything an agent or a kernel decides is the code that ships.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    rc::Rc,
};

use kilo_common::lead::{self, Term};
use kilo_failover::{
    Agent, Cause, Input, MS, Micros, NodeId, Note, Output, Params, Place, SEC, Several, Signal,
    signal::{Body, Kind, MAX_MEMBERS, Shared},
};

use crate::{
    checks::Counts,
    far::FarHost,
    faults::{Fault, NEVER, Schedule},
    host::{self, Host, Taken},
    planned::Traffic,
    rng::Rng,
    wires::Noise,
};

/// Wall clock of the first moment.
pub(crate) const CLOCK: u64 = 1_700_000_000_000_000;
/// The location's id.
pub const LOCATION: u64 = 0x6c6f_6361_7469_6f6e;

/// A location and what it is joined to.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Nodes.
    pub nodes: usize,
    /// The first of them that are gateways, in Kilo's order.
    pub gateways: usize,
    /// Far locations.
    pub fars: usize,
    /// One-way delay to every far leader; `None`: 2 to 40 ms at random.
    pub delay: Option<Micros>,
    /// The nodes that run Go Kilo.
    pub go: Option<usize>,
}

/// Something that happens.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Wake(usize),
    Resume(usize),
    Starts(usize),
    Ends(usize),
    /// A signal on the LAN, and when it was sent first.
    Lan {
        to: usize,
        bytes: Rc<[u8]>,
        said_at: Micros,
    },
    LanProbe {
        prober: usize,
        probed: usize,
        nonce: u64,
        back: bool,
    },
    /// A forwarded probe at a gateway, from the node before.
    AtGateway {
        member: usize,
        from: usize,
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    /// At the far leader, and back at the gateway.
    AtFar {
        member: usize,
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    BackAtGateway {
        member: usize,
        gateway: usize,
        nonce: u64,
    },
    /// An answer at the prober.
    Answer {
        node: usize,
        nonce: u64,
    },
    OwnAtFar {
        gateway: usize,
        far: usize,
        nonce: u64,
    },
    /// A signal inside a tunnel.
    ToFar {
        gateway: usize,
        far: usize,
        bytes: Rc<[u8]>,
    },
    FromFar {
        gateway: usize,
        far: usize,
        bytes: Rc<[u8]>,
    },
    FarApplies {
        far: usize,
    },
    /// A node's agent learns what the objects say.
    Place(usize),
    /// So many of the first gateways lead from now on.
    Active(usize),
    /// The next packet of the traffic.
    Packet,
    FarResume(usize),
    /// A far leader learns who the gateways are.
    FarPlace(usize),
    FarWake(usize),
    FarProbe {
        far: usize,
        gateway: usize,
        nonce: u64,
        back: bool,
    },
}

#[derive(Clone, Debug)]
struct Queued {
    at: Micros,
    number: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// One run.
pub struct Sim {
    pub(crate) now: Micros,
    pub(crate) params: Params,
    pub(crate) gateways: usize,
    pub(crate) hosts: Vec<Host>,
    pub(crate) fars: Vec<FarHost>,
    pub(crate) noise: Noise,
    pub(crate) rng: Rng,
    queue: BinaryHeap<Reverse<Queued>>,
    number: u64,
    pub(crate) delays: Vec<Vec<Micros>>,
    pub(crate) cuts: BTreeSet<(usize, usize)>,
    /// What share of packets a flood loses in its leader's tunnel, each way.
    pub(crate) flood: f64,
    faults: Vec<(Micros, Micros, Fault)>,
    /// Cordoned nodes, and whom Kilo's order names first.
    cordoned: BTreeSet<usize>,
    first: usize,
    /// Nodes that would be gateways, and are none.
    no_gateways: BTreeSet<usize>,
    /// How many gateways lead at once; 0: one leads all.
    active: usize,
    /// How many did from the start.
    led_by_first: usize,
    /// Changes that were told of and that concerned nobody.
    changes: u32,
    pub(crate) traffic: Option<Traffic>,
    pub(crate) counted: Vec<bool>,
    pub(crate) watched_from: Micros,
    pub(crate) down: Vec<Vec<Option<Micros>>>,
    /// Every word each member's kernel has had.
    pub(crate) followed: Vec<BTreeSet<(Term, NodeId)>>,
    /// What the run counts.
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
            noise,
            rng,
            queue: BinaryHeap::new(),
            number: 0,
            delays,
            cuts: BTreeSet::new(),
            flood: 0.0,
            faults: Vec::new(),
            cordoned: BTreeSet::new(),
            first: 0,
            no_gateways: BTreeSet::new(),
            active: 0,
            led_by_first: 1,
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

    /// From now on so many of the first gateways lead, and agents learn every second what objects say.
    pub fn leads_with(&mut self, active: usize, until: Micros) {
        (self.active, self.led_by_first) = (active, active.max(1));
        for at in (1..until / SEC).map(|second| second * SEC) {
            for node in 0..self.hosts.len() {
                let at = at + self.rng.between(MS, 500 * MS);
                self.at(at, Event::Place(node));
            }
        }
    }

    /// How many of the first gateways lead from `at` on.
    pub fn leads_with_at(&mut self, active: usize, at: Micros) {
        self.at(at, Event::Active(active));
    }

    /// How many members use each gateway now.
    pub fn loads(&self) -> Vec<usize> {
        (0..self.gateways)
            .map(|gateway| self.hosts.iter().filter(|host| host.uses() == gateway).count())
            .collect()
    }

    /// What topology says of several leaders: shares by turns, and of one that is cordoned to the next.
    fn several(&self) -> Option<Several> {
        let all: Vec<usize> = (0..self.active).collect();
        let leads = |node: &usize| !self.cordoned.contains(node) && !self.no_gateways.contains(node);
        let active: Vec<usize> = all.iter().copied().filter(leads).collect();
        if active.len() < 2 {
            return None;
        }
        // Who has joined takes a share of everybody's.
        let joined = self.led_by_first..all.len();
        let place = |node: usize| {
            let taken = joined.clone().rev().find(|place| node / self.led_by_first % (place + 1) == *place);
            taken.unwrap_or(node % self.led_by_first)
        };
        let home = |node: usize| match place(node) {
            _ if active.contains(&node) => node,
            home if active.contains(&home) => home,
            _ => active[node / all.len() % active.len()],
        };
        let leads = |node: usize| {
            let agent = self.hosts[node].agent.as_ref()?;
            let lead = agent.lead().filter(|lead| lead.shared() != Shared::Stay)?;
            Some((lead.term(), host::id(node)))
        };
        Some(Several {
            active: active.iter().copied().map(host::id).collect(),
            homes: (0..self.hosts.len()).map(|node| (host::id(node), host::id(home(node)))).collect(),
            acting: (0..self.gateways).filter_map(leads).max().unwrap_or((Term::NONE, host::id(self.first))),
        })
    }

    /// Lets a schedule happen.
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
            self.happens(next.event);
        }
        self.now = until;
        let of_member = self.down.iter().enumerate();
        let open: Vec<_> = of_member
            .flat_map(|(member, down)| down.iter().flatten().map(move |since| (member, *since)))
            .collect();
        open.into_iter().for_each(|(member, since)| self.outage(member, since));
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

    // ---- agents ---------------------------------------------------------------

    fn start_agent(&mut self, node: usize, is_boot: bool) {
        let host = &self.hosts[node];
        if !host.wires.on || host.is_go {
            return;
        }
        let place = self.place(node);
        let start = kilo_failover::Start {
            now: self.now,
            clock: self.now.wrapping_add(host.clock),
            word: host.said(),
            led: host.led.iter().map(|member| host::id(*member)).collect(),
            is_boot,
        };
        let rng = &mut self.rng;
        let agent = Agent::new(self.params.clone(), place, start, &mut || rng.bits());
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

    fn place(&self, node: usize) -> Place {
        let is_ours = |gateway: &NodeId| !self.hosts[host::index(*gateway)].is_go;
        Place {
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

    /// The objects have changed: each agent learns it at a moment of its own.
    fn objects_changed(&mut self) {
        for node in 0..self.hosts.len() {
            let at = self.now + self.rng.between(MS, 500 * MS);
            self.at(at, Event::Place(node));
        }
    }

    fn place_is(&mut self, node: usize) {
        let place = self.place(node);
        self.falls_to_kilos_leader(node, &place);
        let Some(mut agent) = self.hosts[node].agent.take() else { return };
        let rng = &mut self.rng;
        let outputs = agent.place_is(place, self.now, &mut || rng.bits());
        outputs.into_iter().for_each(|output| self.output(node, output));
        self.hosts[node].agent = Some(agent);
        self.run_agent(node);
    }

    /// The gateway that a node's word names is none any more: as the agent's thread does.
    fn falls_to_kilos_leader(&mut self, node: usize, place: &Place) {
        let host = &mut self.hosts[node];
        let (term, gateway) = host.said();
        let Some(first) = place.gateways.first().copied() else { return };
        if host.agent.is_some() && term > Term::NONE && !place.gateways.contains(&gateway) {
            host.word = lead::word(term, host::index(first) as u16);
            host.inbox.push(Input::Word(term, first));
            self.followed[node].insert((term, first));
            self.look_at_all();
        }
    }

    fn schedule(&mut self, node: usize) {
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

    /// Lets an agent run, unless it stalls: then what came waits.
    fn run_agent(&mut self, node: usize) {
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

    fn output(&mut self, node: usize, output: Output) {
        match output {
            Output::Probe { nonce, way } => {
                self.counts.sent += 1;
                self.probe(node, nonce, way);
            }
            Output::Lan(to, signal) => {
                self.counts.sent += 1;
                let bytes: Rc<[u8]> = host::write(&signal, host::id(node), to).into();
                let to = host::index(to);
                if self.noise.replays
                    && matches!(
                        signal.kind,
                        Kind::Announce | Kind::Adopt | Kind::Handover | Kind::Prepare | Kind::Verdict
                    )
                {
                    for _ in 0..3 {
                        let later = self.now + self.rng.between(SEC, 40 * SEC);
                        self.at(later, Event::Lan { to, bytes: bytes.clone(), said_at: self.now });
                    }
                }
                self.lan_send(node, to, Event::Lan { to, bytes, said_at: self.now });
            }
            Output::Tunnel(far, signal) => {
                self.counts.sent += 1;
                let bytes = host::write(&signal, host::id(node), 0).into();
                let far = far as usize;
                self.uplink_send(node, far, true, Event::ToFar { gateway: node, far, bytes });
            }
            Output::Word(term, gateway) => {
                let before = self.hosts[node].word;
                self.hosts[node].obey(&self.params, term, gateway);
                self.word_is(node, before, self.now);
            }
            Output::Led(members) => {
                self.hosts[node].led = members.into_iter().map(host::index).collect();
                self.look_at_all();
            }
            Output::Note(note) => self.note(node, note),
        }
    }

    /// After a kernel has looked at an ANNOUNCE.
    fn word_is(&mut self, node: usize, before: u64, said_at: Micros) {
        let after = self.hosts[node].word;
        if after != before {
            self.word_changed(node, before, after, said_at);
            if node < self.gateways { self.look_at_all() } else { self.look([node]) }
        }
        if self.hosts[node].agent.is_some() || self.hosts[node].wires.on {
            let (term, gateway) = self.hosts[node].said();
            // Read when the agent runs: it may be in the middle of a turn.
            self.hosts[node].inbox.push(Input::Word(term, gateway));
        }
    }

    fn note(&mut self, node: usize, note: Note) {
        if self.log {
            println!("{:>9} {node}: {note:x?}", self.now / MS);
        }
        match note {
            Note::TakesOver { all: true, .. } => self.counts.taken += 1,
            Note::TakesOver { all: false, .. } => self.counts.alone += 1,
            Note::IsGiven { .. } => self.counts.is_given(node, self.now),
            Note::Adopts(_) => self.counts.adopted += 1,
            Note::Suspects(_) => self.counts.suspicions += 1,
            Note::TakesBack(_) => self.counts.taken_back += 1,
            Note::Gives { .. } => self.counts.gave += 1,
            Note::TakesHome(_) => self.counts.took_home += 1,
            Note::Replayed(_) => self.counts.replayed += 1,
            Note::Tries(_) | Note::GivesUp(_) | Note::Leaps(_) | Note::OverBudget | Note::Busy => {}
        }
    }

    // ---- events ---------------------------------------------------------------

    fn happens(&mut self, event: Event) {
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
            Event::Lan { to, bytes, said_at } => self.signal(to, &bytes, said_at),
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
            // Cryptokey routing: from the peer that has the member's prefix.
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
            Event::ToFar { gateway, far, bytes } => self.far_hears(gateway, far, &bytes),
            Event::FarApplies { far } => self.far_applies(far),
            Event::FarPlace(far) => self.far_plans(far),
            Event::FarResume(far) => self.far_resumes(far),
            Event::FarWake(far) => self.far_wakes(far),
            Event::Place(node) => self.place_is(node),
            Event::Active(active) => self.active = active,
            Event::Packet => self.packet(),
            Event::FarProbe { far, gateway, nonce, back } => self.far_probe(far, gateway, nonce, back),
        }
    }

    /// A signal is at a node's kernel.
    fn signal(&mut self, node: usize, bytes: &[u8], said_at: Micros) {
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
                let is_old = self.now > said_at + 3 * SEC && self.hosts[node].since < said_at;
                let counted = self.counts.accepted();
                self.input(node, Input::Signal { from, signal });
                if is_numbered && is_old && counted != self.counts.accepted() {
                    self.broken("no replay counts");
                }
            }
            Taken::Answer(answer) => {
                let event = Event::Lan { to: asker, bytes: answer.into(), said_at: self.now };
                self.lan_send(node, asker, event);
            }
            Taken::Obeys(answer) => {
                self.word_is(node, before, said_at);
                let event = Event::Lan { to: asker, bytes: answer.into(), said_at: self.now };
                self.lan_send(node, asker, event);
                self.run_agent(node);
            }
        }
    }

    fn fault(&mut self, index: usize, on: bool) {
        let (_, end, fault) = self.faults[index].clone();
        if self.log {
            println!("{:>9} {} {fault:?}", self.now / MS, if on { "fault:" } else { "end of" });
        }
        match fault {
            Fault::Power(node) => self.power(node, !on),
            Fault::Pause(node) => {
                if on {
                    self.hosts[node].wires.paused = end;
                    self.at(end, Event::Resume(node));
                }
            }
            Fault::Uplink(node) => self.hosts[node].wires.uplink[0] = !on,
            Fault::Carrier(node) => {
                self.hosts[node].wires.uplink[0] = !on;
                self.look_at_all();
                if on {
                    self.input(node, Input::LinkDown);
                }
            }
            Fault::UplinkOut(node) => self.hosts[node].wires.uplink[1] = !on,
            Fault::UplinkIn(node) => self.hosts[node].wires.uplink[2] = !on,
            Fault::Lan(node) => self.hosts[node].wires.lan[0] = !on,
            Fault::LanOut(node) => self.hosts[node].wires.lan[1] = !on,
            Fault::LanIn(node) => self.hosts[node].wires.lan[2] = !on,
            Fault::Forward(node) => self.hosts[node].wires.forwards = !on,
            Fault::Link(a, b) => {
                let link = (a.min(b), a.max(b));
                let _ = if on { self.cuts.insert(link) } else { self.cuts.remove(&link) };
            }
            Fault::Agent(node) => self.agent(node, !on),
            Fault::Agents => (0..self.hosts.len()).for_each(|node| self.agent(node, !on)),
            Fault::Stall(node) => {
                if on {
                    self.hosts[node].stalled = self.hosts[node].stalled.max(end);
                    self.at(end, Event::Resume(node));
                }
            }
            Fault::FarAgent(far) => self.far_agent(far, !on),
            Fault::FarStall(far) => {
                if on {
                    self.far_stalls(far, end);
                }
            }
            Fault::Far(far) => self.fars[far].on = !on,
            Fault::Site => (0..self.gateways).for_each(|node| self.hosts[node].wires.uplink[0] = !on),
            Fault::Halves(halves) => {
                for (host, half) in self.hosts.iter_mut().zip(halves) {
                    host.wires.half = on && half;
                }
            }
            Fault::Cordon(node) => {
                let _ = if on { self.cordoned.insert(node) } else { self.cordoned.remove(&node) };
                self.objects_changed();
            }
            // Until it boots nobody asks what time it is.
            Fault::Clock(node) if on => self.hosts[node].clock = CLOCK - 1_000 * SEC,
            Fault::NoGateway(node) => {
                let _ = if on { self.no_gateways.insert(node) } else { self.no_gateways.remove(&node) };
                self.objects_changed();
                for far in 0..self.fars.len() {
                    let at = self.now + self.rng.between(MS, 500 * MS);
                    self.at(at, Event::FarPlace(far));
                }
            }
            Fault::Leap(node) if on => self.leap(node),
            Fault::Ahead(node) if on => self.ahead(node),
            Fault::Clock(_) | Fault::Leap(_) | Fault::Ahead(_) => {}
            Fault::Flood(percent) => self.flood = if on { f64::from(percent) / 100.0 } else { 0.0 },
            Fault::First(node) => {
                self.first = if on { node.min(self.gateways - 1) } else { 0 };
                self.objects_changed();
            }
        }
        self.look_at_all();
    }

    /// A gateway's HELLO as after 700 changes that concerned others.
    fn ahead(&mut self, node: usize) {
        let me = host::id(node);
        self.changes += 700;
        let count = self.changes;
        let body = Body::Hello { is_fit: true, is_busy: false, leads: true, gateway: me, losses: Vec::new() };
        let term = Term::from_bits(u64::from(count) << 16);
        let signal = Signal { kind: Kind::Hello, nonce: 7, term, sender: me, location: LOCATION, body };
        for to in (0..self.gateways).filter(|to| *to != node) {
            let bytes = host::write(&signal, me, host::id(to)).into();
            self.lan_send(node, to, Event::Lan { to, bytes, said_at: self.now });
        }
    }

    /// How many of those changes the last node's kernel has not heard of.
    pub fn behind(&self) -> u32 {
        let counts = self.hosts.iter().map(|host| lead::term_of(host.word).count());
        self.changes.saturating_sub(counts.min().unwrap_or(0))
    }

    /// A gateway's signals of the last of all terms: HELLO, ANNOUNCE to every kernel, CLAIM of everybody.
    fn leap(&mut self, node: usize) {
        let (me, term) = (host::id(node), Term::from_bits(u64::MAX));
        let say = |kind, body| Signal { kind, nonce: 7, term, sender: me, location: LOCATION, body };
        for to in (0..self.hosts.len()).filter(|to| *to != node) {
            let hello =
                Body::Hello { is_fit: true, is_busy: false, leads: true, gateway: me, losses: Vec::new() };
            let announce = Body::Word { cookie: self.hosts[to].cookie(me), gateway: me };
            for signal in [say(Kind::Hello, hello), say(Kind::Announce, announce)] {
                let bytes = host::write(&signal, me, host::id(to)).into();
                self.lan_send(node, to, Event::Lan { to, bytes, said_at: self.now });
            }
        }
        let members: Vec<_> = (0..self.hosts.len()).map(host::id).collect();
        for far in 0..self.fars.len() {
            for members in members.chunks(MAX_MEMBERS) {
                let body = Body::Claim {
                    gateway: me,
                    shared: Shared::Move,
                    part: (0, 1),
                    members: members.to_vec(),
                };
                let bytes = host::write(&say(Kind::Claim, body), me, 0).into();
                self.uplink_send(node, far, true, Event::ToFar { gateway: node, far, bytes });
            }
        }
    }

    fn agent(&mut self, node: usize, starts: bool) {
        self.hosts[node].agent = None;
        self.hosts[node].inbox.clear();
        if starts {
            self.start_agent(node, false);
        }
    }

    fn power(&mut self, node: usize, on: bool) {
        let boot = self.rng.bits();
        let host = &mut self.hosts[node];
        host.wires.on = on;
        host.agent = None;
        host.inbox.clear();
        if on {
            host.boot = boot;
            host.word = lead::word(Term::NONE, 0);
            host.led.clear();
            self.followed[node].insert((Term::NONE, host::id(0)));
            self.start_agent(node, true);
        }
    }
}
