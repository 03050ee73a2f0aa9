//! Runs of scenarios, and their figures.

use std::collections::BTreeMap;

use kilo_failover::{MS, Micros, Params, SEC};

use crate::{
    engine::{Noise, Shape, Sim},
    faults::Schedule,
    invariants::Invariant,
    scenarios::{BUSY, QUIET, Scenario},
};

/// Results of a scenario's runs.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The longest outage of each run.
    outages: Vec<Micros>,
    /// Changes of leader, in total and in the worst run.
    switches: (u64, u32),
    /// Invariants that did not hold, each with its first seed.
    pub broken: BTreeMap<Invariant, u64>,
}

impl Figures {
    /// Number of runs.
    pub fn runs(&self) -> usize {
        self.outages.len()
    }

    /// The outage in ms that a share (0 to 1) of the runs did not exceed.
    pub fn outage(&self, share: f64) -> u64 {
        let last = self.outages.len().saturating_sub(1);
        self.outages.get((last as f64 * share) as usize).copied().unwrap_or(0) / MS
    }

    /// Mean number of changes of leader per run.
    pub fn switches(&self) -> f64 {
        self.switches.0 as f64 / self.outages.len().max(1) as f64
    }
}

impl Scenario {
    /// One run, with the limits of this scenario checked among the rules.
    pub fn one(&self, seed: u64, params: &Params, log: bool) -> Sim {
        let (shape, start, schedule) = self.schedule(seed);
        let mut sim = Sim::new(seed, shape, self.noise, params.clone());
        sim.log = log;
        sim.run(schedule, start);
        if sim.counts.longest > self.goal * MS {
            sim.broken(Invariant::Outages);
        }
        if sim.counts.switches() > self.switches {
            sim.broken(Invariant::Changes);
        }
        if !sim.has_converged() {
            sim.broken(Invariant::Served);
        }
        if !sim.shared_are_served() {
            sim.broken(Invariant::SharedServed);
        }
        if self.goal == 0 && sim.counts.flips > 0 {
            sim.broken(Invariant::Undisturbed);
        }
        if self.suspects_nobody && sim.counts.suspicions > 0 {
            sim.broken(Invariant::Unsuspected);
        }
        sim
    }

    /// Runs with the seeds from `seed` on.
    pub fn many(&self, runs: u64, seed: u64, params: &Params) -> Figures {
        let mut figures = Figures::default();
        for seed in seed..seed + runs {
            let counts = self.one(seed, params, false).counts;
            figures.outages.push(counts.longest);
            figures.switches.0 += u64::from(counts.switches());
            figures.switches.1 = figures.switches.1.max(counts.switches());
            for rule in counts.broken {
                figures.broken.entry(rule).or_insert(seed);
            }
        }
        figures.outages.sort_unstable();
        figures
    }

    /// Header of the table.
    pub fn head() -> String {
        format!(
            "{:<50} {:>5} {:>6} {:>6} {:>6} {:>6} {:>5} {:>4}",
            "fault (longest outage of any member, ms)", "runs", "p50", "p99", "max", "limit", "sw.", "most"
        )
    }

    /// A row of the table.
    pub fn row(&self, figures: &Figures) -> String {
        let broken: String =
            figures.broken.iter().map(|(rule, seed)| format!("  BROKEN: {rule} (seed {seed})")).collect();
        format!(
            "{:<50} {:>5} {:>6} {:>6} {:>6} {:>6} {:>5.2} {:>4}{broken}",
            self.name,
            figures.runs(),
            figures.outage(0.5),
            figures.outage(0.99),
            figures.outage(1.0),
            self.goal,
            figures.switches(),
            figures.switches.1,
        )
    }
}

/// Hours without a fault; returns takeovers of the location, takeovers by a stand-by
/// alone, and changes of words.
pub fn without_fault(hours: u64, seed: u64, nodes: usize, noise: Noise) -> (u32, u32, u32) {
    let mut sum = (0, 0, 0);
    for seed in seed..seed + hours {
        let shape = Shape { nodes, gateways: 3, fars: 2, delay: None, go: None };
        let mut sim = Sim::new(seed, shape, noise, Params::default());
        sim.run(Schedule::new(Vec::new(), 3_600 * SEC), 3 * SEC);
        sum = (sum.0 + sim.counts.taken, sum.1 + sim.counts.alone, sum.2 + sim.counts.flips);
    }
    sum
}

/// Probes and signals per second that the agents of a healthy location send.
pub fn load(nodes: usize) -> u64 {
    let seconds = if nodes > 200 { 10 } else { 60 };
    let shape = Shape { nodes, gateways: 3, fars: 3, delay: None, go: None };
    let mut sim = Sim::new(1, shape, QUIET, Params::default());
    sim.run(Schedule::new(Vec::new(), seconds * SEC), 3 * SEC);
    sim.counts.sent / seconds
}

/// Noise for the hours without a fault, by name.
pub const NOISES: &[(&str, usize, Noise)] = &[
    ("quiet", 5, QUIET),
    ("1 % loss on every link, stalls", 5, Noise { loss: 0.01, ..BUSY }),
    ("5 % loss on every link, stalls", 5, BUSY),
    ("5 % loss on every link, stalls, 2 nodes", 2, BUSY),
    ("10 % loss on every link, stalls", 5, Noise { loss: 0.10, ..BUSY }),
];
