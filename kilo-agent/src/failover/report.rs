//! What people see of failover: metrics, and what the status says.

use std::{
    collections::VecDeque,
    time::{SystemTime, UNIX_EPOCH},
};

use kilo_failover::{MS, Micros, SEC, Way};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

/// What the thread knows, for `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// `leader`, `stand-by` or `member`; empty before the thread runs.
    pub role: &'static str,
    /// The gateway this node's packets use.
    pub leader: String,
    /// Kilo's choice.
    pub kilos_leader: String,
    /// How many changes there were.
    pub term: u32,
    /// Unix seconds since when this leader is used; 0 = since before this agent.
    pub since: i64,
    /// The other gateways, as far as this node knows.
    pub stand_bys: Vec<StandBy>,
    /// The last change, in words.
    pub last_change: Option<String>,
}

/// A gateway that does not lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandBy {
    /// Its name.
    pub node: String,
    /// Whether it could lead now; `None`: this node does not hear it.
    pub fit: Option<bool>,
    /// Round trip of its tunnels in milliseconds, of this node alone.
    pub round_trip: Option<u64>,
}

/// Unix seconds now.
pub fn unix_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RoleLabel {
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CauseLabel {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PathLabel {
    path: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WhyLabel {
    why: &'static str,
}

/// Handles of its metrics; cloning shares them.
#[derive(Clone, Debug)]
pub struct FailoverMetrics {
    role: Family<RoleLabel, Gauge>,
    /// `kilo_failover_term`.
    pub term: Gauge,
    failovers: Family<CauseLabel, Counter>,
    suspicions: Family<OutcomeLabel, Counter>,
    seconds: Family<PathLabel, Histogram, fn() -> Histogram>,
    lost: Family<KindLabel, Counter>,
    /// `kilo_stand_by_fit`.
    pub fit: Gauge,
    /// `kilo_gateway_nodes`.
    pub nodes: Gauge,
    refused: Family<WhyLabel, Counter>,
}

/// Roles, as labels.
pub const ROLES: [&str; 3] = ["leader", "stand-by", "member"];

fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_25, 2.0, 12))
}

impl FailoverMetrics {
    /// With their names in the registry.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            role: Family::default(),
            term: Gauge::default(),
            failovers: Family::default(),
            suspicions: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            lost: Family::default(),
            fit: Gauge::default(),
            nodes: Gauge::default(),
            refused: Family::default(),
        };
        registry.register("kilo_failover_role", "Role of this node in its location", metrics.role.clone());
        registry.register("kilo_failover_term", "Changes of leader of this location", metrics.term.clone());
        registry.register(
            "kilo_failovers",
            "Leaderships this node has taken, by cause",
            metrics.failovers.clone(),
        );
        registry.register(
            "kilo_suspicions",
            "Times this node suspected its leader, by outcome",
            metrics.suspicions.clone(),
        );
        registry.register(
            "kilo_probe_seconds",
            "Round trips of answered failover probes, by path",
            metrics.seconds.clone(),
        );
        registry.register(
            "kilo_probes_lost",
            "Failover probes without an answer within a second, by kind",
            metrics.lost.clone(),
        );
        registry.register("kilo_stand_by_fit", "Whether this gateway could lead now", metrics.fit.clone());
        registry.register(
            "kilo_gateway_nodes",
            "Nodes that use this gateway, itself included, as their kernels have said lately",
            metrics.nodes.clone(),
        );
        registry.register(
            "kilo_signals_refused",
            "Signals the agent did not take, by reason",
            metrics.refused.clone(),
        );
        metrics
    }

    /// Says which role the node has.
    pub fn role(&self, role: &'static str) {
        for label in ROLES {
            self.role.get_or_create(&RoleLabel { role: label }).set(i64::from(label == role));
        }
    }

    /// Leadership was taken.
    pub fn failover(&self, cause: &'static str) {
        self.failovers.get_or_create(&CauseLabel { cause }).inc();
    }

    /// The leader was suspected, and what came of it.
    pub fn suspicion(&self, outcome: &'static str) {
        self.suspicions.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// A signal was not taken.
    pub fn refused(&self, why: &'static str) {
        self.refused.get_or_create(&WhyLabel { why }).inc();
    }
}

const fn label(way: Way) -> &'static str {
    match way {
        Way::Lan(_) => "lan",
        Way::Path(_) => "path",
        Way::Own(_) => "own",
    }
}

/// Probes that are out, for the metrics alone.
#[derive(Debug, Default)]
pub struct Out(VecDeque<(u64, Micros, Way, bool)>);

impl Out {
    /// One was sent.
    pub fn sent(&mut self, nonce: u64, now: Micros, way: Way) {
        self.0.push_back((nonce, now, way, false));
    }

    /// One was answered.
    pub fn answered(&mut self, nonce: u64, at: Micros, metrics: &FailoverMetrics) {
        let Some((_, sent, way, answered)) = self.0.iter_mut().rev().find(|probe| probe.0 == nonce) else {
            return;
        };
        if !std::mem::replace(answered, true) {
            let seconds = at.saturating_sub(*sent) as f64 / (1_000 * MS) as f64;
            metrics.seconds.get_or_create(&PathLabel { path: label(*way) }).observe(seconds);
        }
    }

    /// Counts what has been out for too long.
    pub fn expire(&mut self, now: Micros, metrics: &FailoverMetrics) {
        while let Some((_, sent, way, answered)) = self.0.front() {
            if sent + SEC > now {
                return;
            }
            if !answered {
                metrics.lost.get_or_create(&KindLabel { kind: label(*way) }).inc();
            }
            self.0.pop_front();
        }
    }
}
