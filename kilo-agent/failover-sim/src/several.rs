//! Several active leaders of one location.

use std::collections::BTreeMap;

use kilo_failover::{Micros, Params, SEC};

use crate::{
    Noise,
    engine::{Shape, Sim},
    faults::{Fault, NEVER, Schedule, Scheduled},
    invariants::Invariant,
};

/// What a run with several leaders showed.
#[derive(Clone, Debug)]
pub struct Shares {
    /// How many nodes used each gateway before anything happened.
    pub before: Vec<usize>,
    /// How many used each at the end.
    pub after: Vec<usize>,
    /// Which gateway each node was to use before.
    pub used: Vec<usize>,
    /// The longest outage of each node after that.
    pub outages: BTreeMap<usize, Micros>,
    /// Invariants that did not hold.
    pub broken: Vec<Invariant>,
    /// How many changes the node that is furthest behind had not heard of, before.
    pub behind: u32,
    /// Whether every node that can be served is.
    pub has_converged: bool,
    /// Whether each gateway claims all that use it.
    pub is_claimed: bool,
    /// How often a stand-by or a gateway took itself alone.
    pub alone: u32,
    /// Nodes that took the location, or were given it, in order.
    pub took: Vec<usize>,
}

/// What happens to the gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// This gateway loses power, for good.
    PowerOff(usize),
    /// As `PowerOff`, after 1,400 changes of leader that concern nobody here.
    PowerOffLater(usize),
    /// It loses power for 8 s.
    PowerCycle(usize),
    /// Another one joins.
    Joins,
    /// Another one joins, which one of three far leaders does not reach.
    JoinsWithoutWay,
    /// One leads all from now on: somewhere a node does not know several leaders.
    OneLeads,
    /// This gateway is cordoned.
    Cordoned(usize),
    /// As `Cordoned`, but the run ends 10 s later; the next one does not reach one of three far leaders, and
    /// its agent was started 20 s before.
    CordonedBesideOneWithoutWay(usize),
    /// Its uplink goes down, and its carrier reports that.
    Carrier(usize),
    /// It stops being a gateway for so many seconds.
    NoGateway(usize, u64),
}

/// By then each gateway has taken its own members.
pub const START: Micros = 300 * SEC;

/// Active leaders, nodes that could lead (these and their stand-bys, by turns), and all nodes.
pub type Size = (usize, usize, usize);

/// These faults, which begin at [`START`] or a little before; the run ends so long after it.
pub fn after(
    seed: u64,
    (active, gateways, nodes): Size,
    faults: &[Scheduled],
    lasts: Micros,
    log: bool,
) -> Sim {
    let shape = Shape { nodes, gateways, fars: 2, delay: None, go: None };
    let mut sim = Sim::new(seed, shape, Noise::default(), Params::default());
    sim.log = log;
    sim.set_active(active, START + lasts);
    sim.run(Schedule::new(faults.to_vec(), START + lasts), START);
    sim
}

/// `active` gateways with a stand-by each, and twelve other nodes.
pub fn shares(seed: u64, active: usize, what: What, log: bool) -> Shares {
    let joins = matches!(what, What::Joins | What::JoinsWithoutWay);
    let last = if joins { active + 1 } else { active };
    let lasts = if matches!(what, What::CordonedBesideOneWithoutWay(_)) { 10 } else { 150 };
    let (gateways, until) = (2 * last, START + lasts * SEC);
    let is_cut = matches!(what, What::JoinsWithoutWay | What::CordonedBesideOneWithoutWay(_));
    let fars = if is_cut { 3 } else { 2 };
    let shape = Shape { nodes: gateways + 12, gateways, fars, delay: None, go: None };
    let run = |schedule: Schedule, changes_to: Option<usize>| {
        let mut sim = Sim::new(seed, shape, Noise::default(), Params::default());
        sim.log = log;
        sim.set_active(active, until);
        if let Some(active) = changes_to {
            sim.set_active_at(active, START);
        }
        sim.run(schedule, START);
        sim
    };
    let mut long_ago = Vec::new();
    if let What::PowerOffLater(node) = what {
        let other = (node + 1) % active;
        long_ago.extend([100, 50].map(|ago| (START - ago * SEC, NEVER, Fault::Ahead(other))));
    }
    if let What::CordonedBesideOneWithoutWay(node) = what {
        let other = (node + 1) % active;
        long_ago.push((SEC, NEVER, Fault::FarPath(other, 2)));
        long_ago.push((START - 20 * SEC, START - 19 * SEC, Fault::Agent(other)));
    }
    let before = run(Schedule::new(long_ago.clone(), START - SEC), None);
    let (faults, excused) = match what {
        What::PowerOff(node) | What::PowerOffLater(node) => {
            (vec![(START, NEVER, Fault::Power(node))], vec![node])
        }
        What::PowerCycle(node) => (vec![(START, START + 8 * SEC, Fault::Power(node))], vec![node]),
        What::Cordoned(node) | What::CordonedBesideOneWithoutWay(node) => {
            (vec![(START, NEVER, Fault::Cordon(node))], Vec::new())
        }
        What::Carrier(node) => (vec![(START, NEVER, Fault::Carrier(node))], Vec::new()),
        What::NoGateway(node, seconds) => {
            (vec![(START, START + seconds * SEC, Fault::NoGateway(node))], Vec::new())
        }
        What::JoinsWithoutWay => (vec![(SEC, NEVER, Fault::FarPath(active, 2))], Vec::new()),
        What::Joins | What::OneLeads => (Vec::new(), Vec::new()),
    };
    let faults = long_ago.into_iter().chain(faults).collect();
    let changes_to = match what {
        _ if joins => Some(active + 1),
        What::OneLeads => Some(1),
        _ => None,
    };
    let after = run(Schedule::new(faults, until).without(&excused), changes_to);
    Shares {
        before: before.loads(),
        behind: before.behind(),
        used: before.hosts.iter().map(crate::host::Host::uses).collect(),
        after: after.loads(),
        has_converged: after.has_converged(),
        is_claimed: after.is_claimed(),
        alone: after.counts.alone.saturating_sub(before.counts.alone),
        took: after.counts.took.clone(),
        outages: after.counts.of_member.clone(),
        broken: after.counts.broken.iter().copied().collect(),
    }
}
