//! Agents of gateways that restart, or are replaced by ones of another layout of the maps.

use kilo_failover::{MS, Micros, Params, SEC};

use crate::{
    Noise,
    engine::{Shape, Sim},
    faults::{Fault, NEVER, Schedule},
    rng::Rng,
    scenarios::QUIET,
};

/// How an agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The next one finds the same maps.
    Restarts,
    /// The next one has another layout of the maps.
    IsUpgraded,
}

impl How {
    fn fault(self, node: usize) -> Fault {
        match self {
            Self::Restarts => Fault::Agent(node),
            Self::IsUpgraded => Fault::Layout(node),
        }
    }
}

/// Whose agent restarts around a planned change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The agent of the leader that gives, up to three seconds before.
    Giver,
    /// The agent of any node, within a second before or after.
    Any,
}

fn shape(nodes: usize) -> Shape {
    Shape { nodes, gateways: 3, fars: 2, delay: None, go: None }
}

fn run(seed: u64, nodes: usize, noise: Noise, start: Micros, schedule: Schedule, log: bool) -> Sim {
    let mut sim = Sim::new(seed, shape(nodes), noise, Params::default());
    (sim.log, sim.fars_forget) = (log, true);
    sim.run(schedule, start);
    sim
}

/// Kilo's leader is cordoned, so that the next gateway acts. That gateway's agent ends, and then that of a
/// far leader; outages count from then on.
pub fn acting_leader(seed: u64, how: How, nodes: usize, log: bool) -> Sim {
    let start = 10 * SEC;
    let faults = vec![
        (4 * SEC, NEVER, Fault::Cordon(0)),
        (start, start + 600 * MS, how.fault(1)),
        (start + 2 * SEC, start + 2_500 * MS, Fault::FarAgent(0)),
    ];
    run(seed, nodes, QUIET, start, Schedule::new(faults, start + 80 * SEC), log)
}

/// A stand-by hears of 700 changes that concerned others, then a member loses its leader and is led by that
/// stand-by alone. The stand-by's agent restarts; outages count from then on.
pub fn alone_in_a_later_term(seed: u64, how: How, log: bool) -> Sim {
    let start = 25 * SEC;
    let member = 4;
    let faults = vec![
        (4 * SEC, NEVER, Fault::Ahead(2)),
        (5 * SEC, NEVER, Fault::Link(0, member)),
        (start, start + 600 * MS, how.fault(1)),
    ];
    run(seed, 5, QUIET, start, Schedule::new(faults, start + 20 * SEC), log)
}

/// The next gateway acts, and is cordoned too, so that it gives to the third one; agents restart around that.
pub fn planned_change(seed: u64, how: How, who: Who, log: bool) -> Sim {
    let mut rng = Rng::new(seed ^ 0x7e57_a275);
    let nodes = [3, 5, 8, 20][rng.index(4)];
    let start = 10 * SEC;
    let lasts = rng.between(50 * MS, 600 * MS);
    let (node, at) = match who {
        Who::Giver => (1, start - rng.between(0, 3 * SEC)),
        Who::Any => (rng.index(nodes), start + rng.between(0, 2 * SEC) - SEC),
    };
    let faults = vec![
        (4 * SEC, NEVER, Fault::Cordon(0)),
        (at, at + lasts, how.fault(node)),
        (start, NEVER, Fault::Cordon(1)),
    ];
    run(seed, nodes, QUIET, start, Schedule::new(faults, start + 15 * SEC), log)
}
