//! `cargo xtask lab failover`: makes a leader fail under traffic, again and again, and measures how long its
//! location is cut off.

mod breaking;
mod cases;
mod clocks;
mod command;
mod cost_at_rest;
mod crowd;
mod flaps;
mod flood;
mod forged;
mod kept_runs;
mod laptop;
mod many_members;
mod named_leader;
mod new_flows;
mod partial_failures;
mod renumbered;
mod shares;
mod state;
mod table;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{
    Lab,
    faults::traffic::{Figures, Traffic},
    network::{Node, Shape},
};
use crate::report::{InClear, Outcome, TestOutcome};
use crate::{deployed_state, wait};
use breaking::{Broken, LEADER};
use cases::{CASES, Case, Limit};
pub use command::{Options, main};
pub use crowd::Share;

/// Longest wait until traffic flows, before the fault and after it.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longest wait until the leader by Kilo's rule leads, if need be after a minute of health, and each stand-by
/// reports that it could.
const FIT: Duration = Duration::from_secs(150);
/// How long traffic is watched after the fault, so that a second change is seen, too.
const AFTER: Duration = Duration::from_secs(2);

/// One run of a case.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Id of the case.
    pub id: String,
    /// Release of the kernel whose WireGuard carried the packets; empty for userspace WireGuard.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernel: String,
    /// What was done, and what was seen of it.
    pub injected: String,
    /// Datagrams sent, one per millisecond.
    pub sent: u64,
    /// Datagrams without an answer.
    pub lost: u64,
    /// Longest time without an answer, ms.
    pub gap_ms: u64,
    /// Longest time the TCP connection stood still, ms.
    pub stall_ms: u64,
    /// How often the location's leader changed.
    pub switches: u64,
    /// Why the run misses what its case accepts.
    pub problem: Option<String>,
    /// Packets were seen in cleartext.
    #[serde(skip)]
    pub is_final: bool,
    /// Wall time of the whole run, s.
    pub seconds: f64,
    /// What each gateway carried, where that is counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
}

/// Returns what the kept runs have shown for a line of docs/reliability.md.
pub fn kept_lines() -> Result<impl Fn(u8) -> Vec<String>> {
    let runs = kept_runs::read()?;
    Ok(move |line| table::of_line(&runs, line))
}

/// Cases that are run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Those of every test run.
    Always,
    /// The others in which one leader, its links or its clock fail, or leadership is moved on purpose.
    Leader,
    /// The others of one leader and its stand-bys: dead agents, Kilo itself, lost packets, strangers, many members.
    Conditions,
    /// The others of several active leaders, and of machines with `kgctl connect`.
    Gateways,
    /// What a debug build is too slow for: 17 nodes that all send, and the last node with Kilo itself that leaves.
    Release,
}

impl Part {
    fn has(self, case: &Case) -> bool {
        self == match case {
            case if case.is_always => Self::Always,
            case if case.needs_release => Self::Release,
            case if case.is_of_several() => Self::Gateways,
            case if case.is_under_conditions() => Self::Conditions,
            _ => Self::Leader,
        }
    }
}

/// Which cases are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice<'a> {
    /// The cases of a part.
    Part(Part),
    /// All cases.
    All,
    /// The cases with these ids.
    Named(&'a [String]),
}

impl Choice<'_> {
    fn has(self, case: &Case) -> bool {
        match self {
            Self::Part(part) => part.has(case),
            Self::All => true,
            Self::Named(ids) => ids.iter().any(|id| id == case.id),
        }
    }

    /// Flags of the agents for the first chosen case of this shape.
    fn flags(self, shape: Shape) -> Vec<String> {
        let first = CASES.iter().find(|case| case.shape == shape && self.has(case));
        let flags = first.map(|case| [("--stand-bys", case.stand_bys), ("--leaders", case.leaders)]);
        flags.into_iter().flatten().map(|(flag, value)| format!("{flag}={value}")).collect()
    }

    /// Whether a chosen case has this shape.
    fn needs(self, shape: Shape) -> bool {
        CASES.iter().any(|case| case.shape == shape && self.has(case))
    }
}

/// Runs each chosen case so many times; `save` gets all runs after each one. `keep`: stops at the first
/// failure, and mends nothing.
fn run(
    lab: &mut Lab,
    choice: Choice<'_>,
    runs: usize,
    keep: bool,
    save: impl Fn(&[Run]) -> Result<()>,
) -> Result<Vec<Run>> {
    let mut all = Vec::new();
    let shape = lab.network.shape;
    for case in CASES.iter().filter(|case| case.shape == shape && choice.has(case)) {
        let (before, mut wanted) = (all.len(), runs);
        while all.len() - before < wanted {
            all.push(one(lab, case, keep));
            save(&all)?;
            if keep && all.iter().any(|run| run.problem.is_some()) {
                return Ok(all);
            }
            if wanted == 1 && table::sums(&all[before..]).any(|sum| sum.is_doubtful()) {
                wanted = table::FEW;
                println!("failover {}: longer than 95 of 100 runs may take; two more decide", case.id);
            }
        }
        for sum in table::sums(&all[before..]) {
            println!("== {}", sum.line());
        }
    }
    Ok(all)
}

fn one(lab: &mut Lab, case: &Case, keep: bool) -> Run {
    let began = Instant::now();
    let result = watch(lab, case, keep);
    let mut run = Run { id: case.id.to_owned(), kernel: kernel(lab), ..Run::default() };
    match result {
        Ok(Watched { broken, figures, switches, trouble }) => {
            run.is_final = trouble.as_ref().is_some_and(anyhow::Error::is::<InClear>);
            run.problem =
                missed(case, &figures, switches).or_else(|| trouble.map(|error| format!("{error:#}")));
            (run.injected, run.shares) = (broken.said, broken.shares);
            (run.sent, run.lost, run.switches) = (figures.sent, figures.lost, switches);
            run.gap_ms = figures.gap.as_millis() as u64;
            run.stall_ms = figures.stall.as_millis() as u64;
            if run.problem.is_some() {
                let holes: Vec<_> =
                    figures.holes.iter().map(|(first, lost)| format!("{first}+{lost}")).collect();
                println!("failover {}: lost {}", run.id, holes.join(" "));
            }
        }
        Err(error) => {
            run.is_final = error.is::<InClear>();
            run.problem = Some(format!("{error:#}"));
        }
    }
    run.seconds = began.elapsed().as_secs_f64();
    let state = run.problem.as_ref().map_or("ok".to_owned(), |problem| format!("FAILED\n    {problem}"));
    println!(
        "failover {}: {} of {} lost, {} ms without answer, TCP {} ms, {} switches; {} ... {state}",
        run.id, run.lost, run.sent, run.gap_ms, run.stall_ms, run.switches, run.injected
    );
    run
}

fn kernel(lab: &Lab) -> String {
    if !lab.agents.have_kernel_wireguard() {
        return String::new();
    }
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// What a fault did to traffic and leadership.
struct Watched {
    broken: Broken,
    figures: Figures,
    switches: u64,
    /// Other trouble: packets in cleartext, or warnings that the case does not cause.
    trouble: Option<anyhow::Error>,
}

fn watch(lab: &mut Lab, case: &Case, keep: bool) -> Result<Watched> {
    lab.caused(&[deployed_state::CHANGE]);
    lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
    state::begin_anew(lab, case, FIT)?;
    case.prepare.map_or(Ok(()), |prepare| prepare(lab))?;
    let used = (case.shape == Shape::Crowd).then(|| crowd::uses(lab)).transpose()?;
    let flows = Flows::start(lab, case)?;
    let broken = flows.settle().context("before the fault").and_then(|()| {
        let before = state::changes(lab);
        Ok((before, (case.inject)(lab)?))
    });
    let settled = broken.is_ok().then(|| flows.settle().context("after the fault"));
    wait::time_passes(AFTER, "what follows the fault is counted, too");
    let flows = flows.finish();
    let of = broken.as_ref().map_or(LEADER, |(_, broken)| broken.of);
    let mut figures = match &used {
        Some(before) => {
            flows.and_then(|flows| crowd::sum_up((case.limit, of), flows, before, &crowd::uses(lab)?))
        }
        None => flows.and_then(|flows| sum(case.limit, flows)),
    };
    let (before, mut broken) = match broken {
        Ok(broken) => broken,
        Err(error) => {
            // The next run needs every host.
            breaking::boot_all_without_power(lab)?;
            return Err(error);
        }
    };
    if let Some(fresh) = broken.fresh.take() {
        figures = fresh
            .finish()
            .and_then(|gap| figures.map(|figures| Figures { gap: figures.gap.max(gap), ..figures }));
    }
    let switches = state::changes(lab).saturating_sub(before);
    let clear = lab.nothing_in_clear();
    let fails = |figures: &Figures| missed(case, figures, switches).is_some();
    if keep && (settled.as_ref().is_some_and(Result::is_err) || figures.as_ref().is_ok_and(fails)) {
        println!("failover {}: {}; kept as it is", case.id, broken.said);
        let trouble = settled.transpose().err();
        return Ok(Watched { broken, figures: figures?, switches, trouble });
    }
    // Hosts are mended whatever was seen.
    broken.mend(lab).context("mending")?;
    let well = clear.and(settled.transpose()).and_then(|_| {
        lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
        lab.all_well()
    });
    Ok(Watched { broken, figures: figures?, switches, trouble: well.err() })
}

/// The flows of a case, by source namespace.
struct Flows(Vec<(String, Traffic)>);

impl Flows {
    fn start(lab: &Lab, case: &Case) -> Result<Self> {
        let target = |to: &str| {
            Ok::<_, anyhow::Error>(lab.network.node(to.trim_start_matches("pod-"))?.pod_ip().into())
        };
        if case.shape == Shape::Crowd {
            let to = target(case.to)?;
            let start =
                |node: &Node| (node.name().to_owned(), Traffic::start_every(&node.pod, to, crowd::TICK));
            return Ok(Self(crowd::senders(lab, &case.limit, case.leaders.into()).map(start).collect()));
        }
        let start = |(from, to): (&str, &str)| {
            let netns = lab.network.netns(from)?;
            ensure!(to != from, "a flow has two ends");
            Ok((from.to_owned(), Traffic::start(&netns, target(to)?)))
        };
        [Some((case.from, case.to)), case.also]
            .into_iter()
            .flatten()
            .map(start)
            .collect::<Result<_>>()
            .map(Self)
    }

    fn settle(&self) -> Result<()> {
        self.0.iter().try_for_each(|(_, flow)| flow.settle(PATIENCE))
    }

    /// What each of them sent and lost.
    fn finish(self) -> Result<Vec<(String, Figures)>> {
        let all: Vec<_> = self.0.into_iter().map(|(from, flow)| (from, flow.finish())).collect();
        all.into_iter().map(|(from, figures)| Ok((from, figures?))).collect()
    }
}

/// What all flows sent and lost, and the longest interruption of any.
fn sum(limit: Limit, flows: Vec<(String, Figures)>) -> Result<Figures> {
    let mut all = flows.into_iter().map(|(_, figures)| figures);
    let first = all.next().context("no flow")?;
    all.try_fold(first, |sum, one| {
        if let Limit::OnlyIts(_) = limit {
            ensure!(one.lost == 0, "{} datagrams of a node that uses another leader were lost", one.lost);
            return Ok(sum);
        }
        Ok(Figures {
            sent: sum.sent + one.sent,
            lost: sum.lost + one.lost,
            gap: sum.gap.max(one.gap),
            holes: [sum.holes, one.holes].concat(),
            stall: sum.stall.max(one.stall),
            broken: sum.broken.or(one.broken),
        })
    })
}

/// Why a run misses what its case accepts, if it does.
fn missed(case: &Case, figures: &Figures, switches: u64) -> Option<String> {
    if let Some(broken) = &figures.broken {
        return Some(format!("the TCP connection: {broken}"));
    }
    let gap = figures.gap.as_millis() as u64;
    match case.limit {
        Limit::Outage(most) | Limit::Silence(most) | Limit::OnlyIts(most) if gap > most => {
            Some(format!("{gap} ms without an answer instead of {most}"))
        }
        Limit::Outage(_) if switches == 0 => Some("nobody took over".to_owned()),
        Limit::Lost(most) if figures.lost > most => {
            Some(format!("{} datagrams were lost instead of {most}", figures.lost))
        }
        Limit::Switches(most) if switches > most => {
            Some(format!("the leader changed {switches} times instead of {most}"))
        }
        Limit::NoSwitch if switches > 0 => Some(format!("the leader changed {switches} times")),
        Limit::Undisturbed if figures.lost > 0 || switches > 0 => {
            Some(format!("{} datagrams were lost, the leader changed {switches} times", figures.lost))
        }
        _ => None,
    }
}

/// The runs as outcomes of a test run, one for each case.
fn outcomes(runs: &[Run]) -> Vec<TestOutcome> {
    let outcome = |case: &Case| {
        let of_case: Vec<_> = runs.iter().filter(|run| run.id == case.id).cloned().collect();
        let is_final = of_case.iter().any(|run| run.is_final);
        let seconds = of_case.iter().map(|run| run.seconds).sum();
        let result = Outcome::from(table::sums(&of_case).all(|sum| sum.problem().is_none()));
        let outcome = TestOutcome::new("lab", format!("failover {}", case.id), result, seconds);
        (!of_case.is_empty()).then_some(TestOutcome { is_final, ..outcome })
    };
    CASES.iter().filter_map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(id: &str, gap_ms: u64) -> Run {
        Run { id: id.to_owned(), sent: 1, gap_ms, seconds: 10.0, ..Run::default() }
    }

    #[test]
    fn a_case_that_took_more_runs_has_one_outcome() {
        let one_late = [run("uplink-silent", 900), run("power-off", 501), run("power-off", 400)];
        let all = [&one_late[..], &[run("power-off", 400)]].concat();
        let found = outcomes(&all);
        let said: Vec<_> = found.iter().map(|found| (&*found.name, found.outcome, found.seconds)).collect();
        let passed = [("failover power-off", 30.0), ("failover uplink-silent", 10.0)];
        assert_eq!(said, passed.map(|(name, seconds)| (name, Outcome::Passed, seconds)));
        let all = [&one_late[..], &[run("power-off", 502)]].concat();
        assert_eq!(outcomes(&all)[0].outcome, Outcome::Failed, "two of three are late");
        assert!(!outcomes(&one_late[..1])[0].is_failed(), "the case has no p95");
    }
}
