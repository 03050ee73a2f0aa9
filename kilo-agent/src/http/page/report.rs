//! What `/status` returns and the page shows: the status that `kgctl` reads, and what it means.

use std::collections::BTreeMap;

use kilo_common::counters::DropReason;
use serde::{Deserialize, Serialize};

use crate::status::{LeaderChange, Problem, Status, problems, verdict};

/// The status of the mesh as one agent sees it, with its meaning in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The status, as `kgctl status -o json` prints it.
    #[serde(flatten)]
    pub status: Status,
    /// Whether that is well; the same as `kgctl status` prints.
    pub verdict: Verdict,
    /// Who led before, the newest change first.
    pub leader_changes: Vec<LeaderChange>,
    /// The rules that chose leaders, by their name in the status.
    pub leader_rules: BTreeMap<String, String>,
    /// Of each reason for which packets were dropped, what it means and what to do.
    pub drop_reasons: BTreeMap<String, DropHelp>,
}

/// Whether the mesh is healthy, and what is wrong first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// True when there are no problems.
    pub healthy: bool,
    /// One line that says how it is.
    pub text: String,
    /// What is wrong, the worst first.
    pub problems: Vec<Problem>,
}

/// About a reason for which packets are dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropHelp {
    /// What the drop reason means, from `DropReason::describe`.
    pub meaning: String,
    /// What an operator can do about it, from `DropReason::remedy`.
    pub remedy: String,
}

impl Report {
    /// With the meaning of a status.
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

    /// Without times and counts: two that are equal then show the same mesh.
    pub fn shape(mut self) -> Self {
        self.status.time = crate::timestamp::Timestamp::default();
        for node in &mut self.status.nodes {
            // A node that has never checked in is another thing than one that has.
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
