//! `cargo xtask lab faults`: makes faults in a running lab, one after the other, under traffic, and measures
//! what each of them costs. The table of all faults is `list.rs`.

pub mod control_plane;
mod hosts;
pub mod injector;
mod links;
pub mod list;
pub(crate) mod nodes;
mod reliability_page;
mod requirements;
pub mod soak;
pub mod traffic;

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Lab, netns::Netns, network::Network, network::OUTSIDE};
use crate::report::{InClear, Outcome, TestOutcome};
use list::{FAULTS, Fault, Goal, UnderTraffic, is_named};
pub use reliability_page::{renewed as renewed_page, write as write_page, write_requirements};
use traffic::{Figures, Traffic};

/// Longest wait until traffic flows again.
const PATIENCE: Duration = Duration::from_secs(45);

/// One row of the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The fault's id.
    pub id: String,
    /// Number of the requirement that it belongs to.
    pub requirement: u8,
    /// What happened.
    pub fault: String,
    /// What showed that it really happened.
    pub injected: String,
    /// Datagrams sent, one per millisecond.
    pub sent: u64,
    /// Datagrams lost.
    pub lost: u64,
    /// Longest time without an answer, in milliseconds.
    pub gap_ms: u64,
    /// Longest time the TCP connection stood still, in milliseconds.
    pub stall_ms: u64,
    /// What was allowed.
    pub goal: String,
    /// Why the goal was missed.
    pub problem: Option<String>,
    /// The problem is packets in cleartext.
    #[serde(skip)]
    pub is_final: bool,
    /// Wall time.
    pub seconds: f64,
}

/// Faults that are run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Those of every test run.
    Always,
    /// The others.
    OnRequest,
}

/// Runs these faults under traffic (neither words nor a part: all).
pub fn run(lab: &mut Lab, words: &[String], part: Option<Part>) -> Vec<Row> {
    if let Err(error) = track_connections(lab) {
        eprintln!("lab: {error:#}");
    }
    let mut rows = Vec::new();
    for fault in FAULTS {
        let Some(traffic) = &fault.traffic else { continue };
        let wanted = match part {
            Some(part) => traffic.always == (part == Part::Always),
            None => words.is_empty() || is_chosen(fault.id, words),
        };
        if wanted {
            rows.push(row(lab, fault, traffic));
        }
    }
    rows
}

/// Whether one of these words names the fault.
pub fn is_chosen(id: &str, words: &[String]) -> bool {
    words.iter().any(|word| is_named(id, word))
}

/// Index of a fault in the table, to sort rows of several runs; an unknown id comes last.
pub fn place(id: &str) -> usize {
    FAULTS.iter().position(|fault| fault.id == id).unwrap_or(FAULTS.len())
}

/// Hosts of a cluster track connections from the start, because kube-proxy does.
fn track_connections(lab: &Lab) -> Result<()> {
    for node in &lab.network.nodes {
        node.netns.sh("nft 'table inet host { chain forward { type filter hook forward priority 0; ct state established counter; }; }'")?;
    }
    Ok(())
}

/// The rows as outcomes of a test run.
pub fn outcomes(rows: &[Row], prefix: &str) -> Vec<TestOutcome> {
    let outcome = |row: &Row| {
        let result = Outcome::from(row.problem.is_none());
        let name = format!("{prefix}fault {}: {}", row.id, row.fault);
        TestOutcome { is_final: row.is_final, ..TestOutcome::new("lab", name, result, row.seconds) }
    };
    rows.iter().map(outcome).collect()
}

fn row(lab: &mut Lab, fault: &Fault, traffic: &UnderTraffic) -> Row {
    let began = Instant::now();
    let queued = dropped_by_queue(lab);
    let mut result = watch(lab, traffic);
    // A loss caused by a busy machine hardly repeats; packets in cleartext have no such excuse.
    let fails = |(_, figures): &(_, Figures)| missed(traffic.goal, figures).is_some();
    if result.as_ref().map_or_else(|error| !error.is::<InClear>(), fails) {
        let said = match &result {
            Ok((_, figures)) => missed(traffic.goal, figures).unwrap_or_default(),
            Err(error) => format!("{error:#}"),
        };
        let full = dropped_by_queue(lab).saturating_sub(queued);
        println!(
            "fault {}: once more, because {said}; queues of kilo0 have dropped {full} packets",
            fault.id
        );
        result = watch(lab, traffic)
            .map(|(injected, figures)| (format!("{injected}; at the second try"), figures));
    }
    let is_final = result.as_ref().is_err_and(anyhow::Error::is::<InClear>);
    let (injected, figures, problem) = match result {
        Ok((injected, figures)) => {
            let problem = missed(traffic.goal, &figures);
            (injected, Some(figures), problem)
        }
        Err(error) => (String::new(), None, Some(format!("{error:#}"))),
    };
    let millis = |time: fn(&Figures) -> Duration| figures.as_ref().map_or(0, |f| time(f).as_millis() as u64);
    let row = Row {
        id: fault.id.to_owned(),
        requirement: fault.requirement,
        fault: traffic.name.to_owned(),
        injected,
        sent: figures.as_ref().map_or(0, |figures| figures.sent),
        lost: figures.as_ref().map_or(0, |figures| figures.lost),
        gap_ms: millis(|figures| figures.gap),
        stall_ms: millis(|figures| figures.stall),
        goal: match traffic.goal {
            Goal::Nothing => "nothing lost".to_owned(),
            Goal::Within(millis) => format!("answers within {millis} ms"),
            Goal::Heals => "heals".to_owned(),
            Goal::HealsAnew => "heals, connections may end".to_owned(),
        },
        problem,
        is_final,
        seconds: began.elapsed().as_secs_f64(),
    };
    let Row { id, fault, sent, lost, gap_ms, stall_ms, .. } = &row;
    let state = row.problem.as_ref().map_or("ok".to_owned(), |problem| format!("FAILED\n    {problem}"));
    println!(
        "fault {id}: {fault}: {lost} of {sent} lost, {gap_ms} ms without answer, TCP {stall_ms} ms; {} ... {state}",
        row.injected
    );
    row
}

/// Packets dropped by the queues of all nodes' WireGuard devices: a process that gets no processor reads
/// none.
fn dropped_by_queue(lab: &Lab) -> u64 {
    let of = |netns: &Netns| -> Option<u64> {
        let shown = netns.sh("ip -s -j link show kilo0").ok()?;
        let links: serde_json::Value = serde_json::from_str(&shown).ok()?;
        links.pointer("/0/stats64/tx/dropped")?.as_u64()
    };
    lab.network.nodes.iter().filter_map(|node| of(&node.netns)).sum()
}

fn watch(lab: &mut Lab, fault: &UnderTraffic) -> Result<(String, Figures)> {
    lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
    let (from, target) = (lab.network.netns(fault.from)?, target(&lab.network, fault.to)?);
    let traffic = Traffic::start(&from, target);
    let result = traffic.settle(PATIENCE).context("before the fault").and_then(|()| (fault.inject)(lab));
    let settled = result.and_then(|injected| {
        traffic.settle(PATIENCE).context("after the fault")?;
        Ok(injected)
    });
    let figures = traffic.finish();
    let well = lab.all_well();
    match well {
        // Worse than whatever else went wrong.
        Err(clear) if clear.is::<InClear>() => Err(clear),
        well => {
            let injected = settled?;
            well?;
            Ok((injected, figures?))
        }
    }
}

fn target(network: &Network, name: &str) -> Result<IpAddr> {
    match name.strip_prefix("pod-") {
        Some(node) => Ok(network.node(node)?.pod_ip().into()),
        None => Ok(OUTSIDE.into()),
    }
}

/// Why the figures miss the goal.
fn missed(goal: Goal, figures: &Figures) -> Option<String> {
    if let Some(broken) = figures.broken.as_ref().filter(|_| !matches!(goal, Goal::HealsAnew)) {
        return Some(format!("the TCP connection: {broken}"));
    }
    let gap = figures.gap.as_millis() as u64;
    match goal {
        Goal::Nothing => (figures.lost > 0).then(|| figures.said_of_lost()),
        Goal::Within(most) => (gap > most).then(|| format!("{gap} ms without an answer instead of {most}")),
        Goal::Heals | Goal::HealsAnew => None,
    }
}

/// Runs a script in a namespace and parses its output as a number.
fn number(netns: &Netns, script: &str) -> Result<u64> {
    let text = netns.sh(script)?;
    text.trim().parse().with_context(|| format!("{script}: {text}"))
}
