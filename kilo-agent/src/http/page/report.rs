//! Data of `/status` and of the page: the status that `kgctl` reads, and its interpretation.

use std::collections::BTreeMap;

use kilo_common::drop_reasons::DropReason;
use serde::{Deserialize, Serialize};

use crate::status::{LeaderChange, Problem, Status, problems, verdict};

/// The status of the mesh as seen by one agent, with explanations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The status, as `kgctl status -o json` prints it.
    #[serde(flatten)]
    pub status: Status,
    /// Whether the mesh is healthy, as `kgctl status` prints it.
    pub verdict: Verdict,
    /// Former leaders, the latest change first.
    pub leader_changes: Vec<LeaderChange>,
    /// Descriptions of the rules that chose leaders, by their name in the status.
    pub leader_rules: BTreeMap<String, String>,
    /// Meaning and remedy of each reason for which packets were dropped.
    pub drop_reasons: BTreeMap<String, DropHelp>,
}

/// Whether the mesh is healthy, and its problems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// True when there are no problems.
    pub healthy: bool,
    /// Summary in one line.
    pub text: String,
    /// Problems, the most serious first.
    pub problems: Vec<Problem>,
}

/// Explanation of a drop reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropHelp {
    /// What the drop reason means, from `DropReason::describe`.
    pub meaning: String,
    /// What an operator can do about it, from `DropReason::remedy`.
    pub remedy: String,
}

impl Report {
    /// Adds the interpretation of a status.
    pub fn new(status: Status, leader_changes: Vec<LeaderChange>) -> Self {
        let found = problems(&status);
        let verdict = Verdict { healthy: found.is_empty(), text: verdict(&status, &found), problems: found };
        let rules = status.locations.iter().filter_map(|location| {
            let rule = location.reason?;
            Some((serde_json::to_value(rule).ok()?.as_str()?.to_owned(), rule.to_string()))
        });
        let leader_rules = rules.collect();
        let drops = status.agent.as_ref().map(|agent| &agent.drops);
        let drop_reasons = DropReason::ALL
            .iter()
            .filter(|reason| {
                drops.and_then(|drops| drops.get(reason.label())).is_some_and(|count| *count > 0)
            })
            .map(|reason| {
                let help =
                    DropHelp { meaning: reason.describe().to_owned(), remedy: reason.remedy().to_owned() };
                (reason.label().to_owned(), help)
            })
            .collect();
        Self { status, verdict, leader_changes, leader_rules, drop_reasons }
    }

    /// Removes times and counters: two reports that are then equal show the same mesh.
    pub fn shape(mut self) -> Self {
        self.status.time = crate::timestamp::Timestamp::default();
        for node in &mut self.status.nodes {
            // A node that has never checked in still differs from one that has.
            node.last_seen = node.last_seen.map(|_| self.status.time);
        }
        for location in &mut self.status.locations {
            location.since = None;
        }
        if let Some(agent) = &mut self.status.agent {
            for tunnel in &mut agent.tunnels {
                tunnel.last_handshake = None;
                (tunnel.received_bytes, tunnel.sent_bytes) = (0, 0);
            }
            agent.packets.clear();
            agent.drops.clear();
            if let Some(failover) = &mut agent.failover {
                failover.since = None;
                for stand_by in &mut failover.stand_bys {
                    stand_by.round_trip = None;
                }
            }
        }
        self.drop_reasons.clear();
        self
    }
}
