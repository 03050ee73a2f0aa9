//! What operators see of failover: metrics, and its part of the status.

use std::{collections::VecDeque, time::Instant};

use kilo_core::label_values;
use kilo_failover::{MS, Micros, ProbePath, SEC};
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

use crate::far::Refusal;

/// The thread's state for `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// `leader`, `stand-by` or `member`; empty before the thread runs.
    pub role: &'static str,
    /// The gateway this node's packets use.
    pub leader: String,
    /// Name of the node that leads by Kilo's rule.
    pub kilos_leader: String,
    /// Number of changes of the acting leader.
    pub term: u32,
    /// Since when this leader is used, by the monotonic clock; `None` = since before this agent started.
    pub since: Option<Instant>,
    /// The other gateways, as far as this node knows.
    pub stand_bys: Vec<StandBy>,
    /// The last change, in words.
    pub last_change: Option<String>,
}

/// A gateway that does not lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandBy {
    /// Name of its Node object.
    pub node: String,
    /// Whether it could lead now; `None` when this node does not hear it.
    pub fit: Option<bool>,
    /// Round trip through its tunnels in milliseconds, as measured by this node.
    pub round_trip: Option<u64>,
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

/// Handles of the failover metrics; clones share them.
#[derive(Clone, Debug)]
pub struct FailoverMetrics {
    role: Family<RoleLabel, Gauge>,
    /// `kilo_failover_term`: changes of the acting leader of this location so far.
    pub term: Gauge,
    failovers: Family<CauseLabel, Counter>,
    suspicions: Family<OutcomeLabel, Counter>,
    seconds: Family<PathLabel, Histogram, fn() -> Histogram>,
    lost: Family<KindLabel, Counter>,
    /// `kilo_failover_seconds`.
    outages: Histogram,
    /// `kilo_stand_by_fit`: 1 if this node is a gateway that could lead now, else 0.
    pub fit: Gauge,
    /// `kilo_gateway_nodes`.
    pub nodes: Gauge,
    refused: Family<WhyLabel, Counter>,
}

/// Roles, as labels.
pub const ROLES: [&str; 3] = ["leader", "stand-by", "member"];

label_values! {
    /// Why this node has taken leadership: label `cause` of `kilo_failovers`.
    TakeoverCause {
        /// The leader was lost to the whole location.
        Lost => "lost",
        /// The leader was lost to this node alone.
        Alone => "alone",
        /// The leader gave leadership away, because it cannot lead now.
        HandedOver => "handed_over",
        /// A planned change of leader.
        Planned => "planned",
        /// A node that nobody led asked this one.
        Adopted => "adopted",
        /// Nodes moved to the active leader that they are assigned to.
        Rebalanced => "rebalanced",
    }
}

label_values! {
    /// What a suspicion of the leader led to: label `outcome` of `kilo_suspicions`.
    SuspicionOutcome {
        /// Other nodes were asked whether they reach the leader.
        Asked => "asked",
        /// This node took over the location.
        TookOver => "took_over",
        /// This node took over its own traffic only.
        TookItself => "took_itself",
        /// Leadership had changed too often lately.
        OverBudget => "over_budget",
    }
}

fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_25, 2.0, 12))
}

impl FailoverMetrics {
    /// Creates the metrics and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            role: Family::default(),
            term: Gauge::default(),
            failovers: Family::default(),
            suspicions: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            lost: Family::default(),
            outages: Histogram::new(exponential_buckets(0.05, 2.0, 10)),
            fit: Gauge::default(),
            nodes: Gauge::default(),
            refused: Family::default(),
        };
        // Created at 0: Prometheus sees no increase in a counter that appears with 1.
        for cause in TakeoverCause::ALL {
            drop(metrics.failovers.get_or_create(&CauseLabel { cause: cause.label() }));
        }
        for outcome in SuspicionOutcome::ALL {
            drop(metrics.suspicions.get_or_create(&OutcomeLabel { outcome: outcome.label() }));
        }
        for why in Refusal::ALL {
            drop(metrics.refused.get_or_create(&WhyLabel { why: why.label() }));
        }
        registry.register("kilo_failover_role", "Role of this node in its location", metrics.role.clone());
        registry.register(
            "kilo_failover_term",
            "Current leadership term of this location",
            metrics.term.clone(),
        );
        registry.register(
            "kilo_failovers",
            "Times this node took over leadership, by cause",
            metrics.failovers.clone(),
        );
        registry.register(
            "kilo_failover_seconds",
            "Seconds from the first unanswered probe through the lost leader until this node took over",
            metrics.outages.clone(),
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
            "Nodes that currently use this gateway, itself included",
            metrics.nodes.clone(),
        );
        registry.register(
            "kilo_signals_refused",
            "Signals rejected by the agent, by reason",
            metrics.refused.clone(),
        );
        metrics
    }

    /// Sets the role of the node.
    pub fn role(&self, role: &'static str) {
        for label in ROLES {
            self.role.get_or_create(&RoleLabel { role: label }).set(i64::from(label == role));
        }
    }

    /// Clears what only a node that takes part has.
    pub fn left(&self) {
        self.role("");
        self.fit.set(0);
        self.nodes.set(0);
    }

    /// Counts a leadership that this node has taken.
    pub fn failover(&self, cause: TakeoverCause) {
        self.failovers.get_or_create(&CauseLabel { cause: cause.label() }).inc();
    }

    /// Records how long no answer came through a lost leader before it was replaced.
    pub fn outage(&self, outage: Micros) {
        self.outages.observe(outage as f64 / SEC as f64);
    }

    /// Counts a suspicion of the leader by its outcome.
    pub fn suspicion(&self, outcome: SuspicionOutcome) {
        self.suspicions.get_or_create(&OutcomeLabel { outcome: outcome.label() }).inc();
    }

    /// Records the round trip of a probe, in seconds.
    pub fn round_trip(&self, path: &'static str, seconds: f64) {
        self.seconds.get_or_create(&PathLabel { path }).observe(seconds);
    }

    /// Counts a probe without an answer.
    pub fn probe_lost(&self, kind: &'static str) {
        self.lost.get_or_create(&KindLabel { kind }).inc();
    }

    /// Counts a signal that was rejected.
    pub fn refused(&self, why: Refusal) {
        self.refused.get_or_create(&WhyLabel { why: why.label() }).inc();
    }
}

const fn label(path: ProbePath) -> &'static str {
    match path {
        ProbePath::Lan(_) => "lan",
        ProbePath::Path(..) => "path",
        ProbePath::Own(_) => "own",
    }
}

/// Outstanding probes, kept for metrics only.
#[derive(Debug, Default)]
pub struct Out(VecDeque<(u64, Micros, ProbePath, bool)>);

impl Out {
    /// Remembers a probe that was just sent.
    pub fn sent(&mut self, nonce: u64, now: Micros, path: ProbePath) {
        self.0.push_back((nonce, now, path, false));
    }

    /// Records the round trip of a probe; repeated answers are ignored.
    pub fn answered(&mut self, nonce: u64, at: Micros, metrics: &FailoverMetrics) {
        let Some((_, sent, path, answered)) = self.0.iter_mut().rev().find(|probe| probe.0 == nonce) else {
            return;
        };
        if !std::mem::replace(answered, true) {
            let seconds = at.saturating_sub(*sent) as f64 / (1_000 * MS) as f64;
            metrics.round_trip(label(*path), seconds);
        }
    }

    /// Counts probes that have been without an answer for too long as lost.
    pub fn expire(&mut self, now: Micros, metrics: &FailoverMetrics) {
        while let Some((_, sent, path, answered)) = self.0.front() {
            if sent + SEC > now {
                return;
            }
            if !answered {
                metrics.probe_lost(label(*path));
            }
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_first_has_grown_from_zero() {
        let mut registry = Registry::default();
        let metrics = FailoverMetrics::register(&mut registry);
        let text = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let before = text();
        metrics.failover(TakeoverCause::Lost);
        metrics.suspicion(SuspicionOutcome::OverBudget);
        metrics.refused(Refusal::Forged);
        metrics.outage(268 * MS);
        let after = text();
        for series in [
            "kilo_failovers_total{cause=\"lost\"}",
            "kilo_suspicions_total{outcome=\"over_budget\"}",
            "kilo_signals_refused_total{why=\"forged\"}",
            "kilo_failover_seconds_bucket{le=\"0.4\"}",
        ] {
            assert!(before.contains(&format!("{series} 0\n")), "{series}: {before}");
            assert!(after.contains(&format!("{series} 1\n")), "{series}: {after}");
        }
        assert!(after.contains("kilo_failover_seconds_bucket{le=\"0.2\"} 0\n"), "{after}");
        assert!(after.contains("kilo_failover_seconds_sum 0.268\n"), "{after}");
    }
}
