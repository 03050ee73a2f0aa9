//! What can fail, and when.

use kilo_failover::{MS, Micros, SEC};

use crate::rng::Rng;

/// A fault; nodes and far locations by index, gateways first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The node is off; when the fault ends it boots.
    Power(usize),
    /// The whole node freezes.
    Pause(usize),
    /// Its uplink carries nothing.
    Uplink(usize),
    /// Its uplink goes down, and it notices.
    Carrier(usize),
    /// Nothing leaves by its uplink.
    UplinkOut(usize),
    /// Nothing arrives by its uplink.
    UplinkIn(usize),
    /// Its LAN interface carries nothing.
    Lan(usize),
    /// Nothing leaves by its LAN interface.
    LanOut(usize),
    /// Nothing arrives by its LAN interface.
    LanIn(usize),
    /// It forwards nothing, but answers for itself.
    Forward(usize),
    /// Two nodes do not hear each other.
    Link(usize, usize),
    /// A gateway and a far leader do not reach each other.
    FarPath(usize, usize),
    /// Its agent is dead; afterwards a new one starts.
    Agent(usize),
    /// Its agent is replaced by one of another layout of the maps: marks are lost, and its word
    /// names the acting leader.
    Layout(usize),
    /// Its agent does not run for a while.
    Stall(usize),
    /// Every agent is dead.
    Agents,
    /// A far leader's agent is dead.
    FarAgent(usize),
    /// A far leader's agent does not run for a while.
    FarStall(usize),
    /// A far leader is off.
    Far(usize),
    /// No agent reads or writes an annotation.
    Api,
    /// No gateway has an uplink.
    Site,
    /// The LAN is split in two halves: the marked nodes, and the others.
    Halves(Vec<bool>),
    /// It is cordoned.
    Cordon(usize),
    /// From its next boot on, its clock is earlier than it was.
    Clock(usize),
    /// It sends the last of all terms in every signal that has one.
    Leap(usize),
    /// Its HELLO claims 700 changes of leader more than anybody knows.
    Ahead(usize),
    /// It sends 1,000 HELLOs in ten seconds, each of which claims 1,000 changes more.
    Hellos(usize),
    /// Kilo's order begins with this gateway.
    First(usize),
    /// It stops being a gateway.
    NoGateway(usize),
    /// Nodes disagree about the WireGuard addresses of other locations.
    Renumbered,
    /// A node sends and receives more than its leader's tunnel carries, whichever gateway leads it: so many
    /// percent of packets are lost each way.
    Flood(u8),
}

/// A fault with its start and end ([`NEVER`]: it does not end).
pub type Scheduled = (Micros, Micros, Fault);

/// The end of a fault that stays.
pub const NEVER: Micros = Micros::MAX;

/// What fails in one run.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The faults.
    pub faults: Vec<Scheduled>,
    /// When the run ends.
    pub until: Micros,
    /// Nodes whose own outages are not counted, since the faults are theirs.
    pub excused: Vec<usize>,
}

impl Schedule {
    /// These faults, in a run that ends at `until`.
    pub fn new(faults: Vec<Scheduled>, until: Micros) -> Self {
        Self { faults, until, excused: Vec::new() }
    }

    /// One fault that does not end, in a run that ends 15 s after it began.
    pub fn one(fault: Fault, start: Micros) -> Self {
        Self::new(vec![(start, NEVER, fault)], start + 15 * SEC)
    }

    /// The same schedule, without counting outages of these nodes.
    pub fn without(mut self, nodes: &[usize]) -> Self {
        self.excused = nodes.to_vec();
        self
    }
}

/// A random fault.
pub fn any(rng: &mut Rng, nodes: usize, gateways: usize) -> Fault {
    let gateway = rng.index(gateways.min(nodes));
    let node = rng.index(nodes);
    match rng.index(18) {
        0 | 1 => Fault::Power(gateway),
        2 => Fault::Pause(gateway),
        3 => Fault::Uplink(gateway),
        4 => Fault::UplinkOut(gateway),
        5 => Fault::UplinkIn(gateway),
        6 => Fault::Lan(gateway),
        7 => Fault::LanOut(gateway),
        8 => Fault::LanIn(gateway),
        9 => Fault::Forward(gateway),
        10 => Fault::Agent(node),
        11 => Fault::Stall(node),
        12 => Fault::FarAgent(0),
        13 => Fault::Carrier(gateway),
        14 => Fault::Power(node),
        15 => Fault::Cordon(gateway),
        16 => Fault::First(gateway),
        _ => Fault::Halves((0..nodes).map(|_| rng.chance(0.5)).collect()),
    }
}

/// One to four random faults within 30 s, each healed, then time to converge.
pub fn several(rng: &mut Rng, nodes: usize, gateways: usize, start: Micros) -> Schedule {
    let count = 1 + rng.index(4);
    let faults = (0..count).map(|_| {
        let at = start + rng.between(0, 30 * SEC);
        (at, at + rng.between(100 * MS, 8 * SEC), any(rng, nodes, gateways))
    });
    Schedule::new(faults.collect(), start + 60 * SEC)
}
