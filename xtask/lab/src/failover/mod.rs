//! `cargo xtask lab failover`: a leader fails under traffic, again and again, and how long its
//! location was cut off each time.

mod breaking;
mod cases;
mod flaps;
mod forged;
mod parts;
mod shares;
mod state;
mod table;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{
    Lab,
    faults::traffic::{Figures, Traffic},
};
use crate::report::TestOutcome;
pub use breaking::set_length;
pub use cases::named;
use cases::{CASES, Case, Limit};
pub use table::write as write_table;

/// Longest wait until traffic flows, before the fault and after it.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longest wait until the leader of Kilo's rule leads, after a minute of health if need be, and each stand-by
/// says that it could.
const FIT: Duration = Duration::from_secs(150);
/// How long traffic is watched after the fault, so that a second change is seen, too.
const AFTER: Duration = Duration::from_secs(2);

/// What agents log when another gateway leads.
const CHANGE: &str = "change of leader";

/// One run of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Id of the case.
    pub id: String,
    /// Line of docs/reliability.md.
    pub line: u8,
    /// What was done, and what was seen of it.
    pub injected: String,
    /// Datagrams sent, one a millisecond.
    pub sent: u64,
    /// Those without an answer.
    pub lost: u64,
    /// Longest time without an answer, ms.
    pub gap_ms: u64,
    /// Longest time the TCP connection stood still, ms.
    pub stall_ms: u64,
    /// How often the location's leader changed.
    pub switches: u64,
    /// Why it is not what is accepted.
    pub problem: Option<String>,
    /// Wall time of the whole run, s.
    pub seconds: f64,
}

/// Which cases are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<'a> {
    /// Those of every test run.
    Always,
    /// All.
    All,
    /// Those with these ids.
    Named(&'a [String]),
}

impl Choice<'_> {
    fn has(self, case: &Case) -> bool {
        match self {
            Self::Always => case.is_always,
            Self::All => true,
            Self::Named(ids) => ids.iter().any(|id| id == case.id),
        }
    }
}

/// Runs each chosen case so many times. `keep`: ends with the first that fails, and mends nothing.
pub fn run(lab: &mut Lab, choice: Choice<'_>, runs: usize, keep: bool) -> Vec<Run> {
    let mut all = Vec::new();
    for case in CASES.iter().filter(|case| choice.has(case)) {
        let mut of_case = Vec::new();
        while of_case.len() < runs {
            of_case.push(one(lab, case, keep));
            if keep && of_case.iter().any(|run| run.problem.is_some()) {
                all.extend(of_case);
                return all;
            }
        }
        summary(case, &of_case);
        all.extend(of_case);
    }
    all
}

fn one(lab: &mut Lab, case: &Case, keep: bool) -> Run {
    let began = Instant::now();
    let result = watch(lab, case, keep);
    let mut run = Run {
        id: case.id.to_owned(),
        line: case.line,
        injected: String::new(),
        sent: 0,
        lost: 0,
        gap_ms: 0,
        stall_ms: 0,
        switches: 0,
        problem: None,
        seconds: 0.0,
    };
    match result {
        Ok((injected, figures, switches)) => {
            run.problem = missed(case, &figures, switches);
            (run.injected, run.sent, run.lost, run.switches) =
                (injected, figures.sent, figures.lost, switches);
            run.gap_ms = figures.gap.as_millis() as u64;
            run.stall_ms = figures.stall.as_millis() as u64;
        }
        Err(error) => run.problem = Some(format!("{error:#}")),
    }
    run.seconds = began.elapsed().as_secs_f64();
    let state = run.problem.as_ref().map_or("ok".to_owned(), |problem| format!("FAILED\n    {problem}"));
    println!(
        "failover {}: {} of {} lost, {} ms without answer, TCP {} ms, {} switches; {} ... {state}",
        run.id, run.lost, run.sent, run.gap_ms, run.stall_ms, run.switches, run.injected
    );
    run
}

fn watch(lab: &mut Lab, case: &Case, keep: bool) -> Result<(String, Figures, u64)> {
    lab.caused(&[CHANGE]);
    lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
    state::begin_anew(lab, case, FIT)?;
    case.prepare.map_or(Ok(()), |prepare| prepare(lab))?;
    let flows = Flows::start(lab, case)?;
    let broken = flows.settle().context("before the fault").and_then(|()| {
        let before = state::changes(lab);
        Ok((before, (case.inject)(lab)?))
    });
    let settled = broken.is_ok().then(|| flows.settle().context("after the fault"));
    std::thread::sleep(AFTER);
    let figures = flows.finish(case.limit);
    let (before, mut broken) = broken?;
    let switches = state::changes(lab).saturating_sub(before);
    let clear = lab.nothing_in_clear();
    let fails = |figures: &Figures| missed(case, figures, switches).is_some();
    if keep && (settled.as_ref().is_some_and(Result::is_err) || figures.as_ref().is_ok_and(fails)) {
        println!("failover {}: {}; kept as it is", case.id, broken.said);
        settled.transpose()?;
        return Ok((broken.said, figures?, switches));
    }
    // Hosts are mended whatever was seen.
    broken.mend(lab).context("mending")?;
    settled.transpose()?;
    clear?;
    lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
    lab.all_well()?;
    Ok((broken.said, figures?, switches))
}

/// The flows of a case.
struct Flows(Vec<Traffic>);

impl Flows {
    fn start(lab: &Lab, case: &Case) -> Result<Self> {
        let start = |(from, to): (&str, &str)| {
            let space = lab.network.space(from)?;
            let target = lab.network.node(to.trim_start_matches("pod-"))?.pod_ip().into();
            ensure!(to != from, "a flow has two ends");
            Ok(Traffic::start(&space, target))
        };
        [Some((case.from, case.to)), case.also]
            .into_iter()
            .flatten()
            .map(start)
            .collect::<Result<_>>()
            .map(Self)
    }

    fn settle(&self) -> Result<()> {
        self.0.iter().try_for_each(|flow| flow.settle(PATIENCE))
    }

    /// What all of them sent and lost, and the longest interruption of any.
    fn finish(self, limit: Limit) -> Result<Figures> {
        let all: Vec<_> = self.0.into_iter().map(Traffic::finish).collect();
        let mut all = all.into_iter();
        let first = all.next().context("no flow")??;
        all.try_fold(first, |sum, one| {
            let one = one?;
            if let Limit::OnlyIts(_) = limit {
                ensure!(one.lost == 0, "{} datagrams of a node that uses another leader were lost", one.lost);
                return Ok(sum);
            }
            Ok(Figures {
                sent: sum.sent + one.sent,
                lost: sum.lost + one.lost,
                gap: sum.gap.max(one.gap),
                stall: sum.stall.max(one.stall),
                broken: sum.broken.or(one.broken),
            })
        })
    }
}

/// Why a run is not what is accepted.
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

/// One line: the median, the longest outage and the worst loss of all runs of a case.
fn summary(case: &Case, runs: &[Run]) {
    let mut gaps: Vec<_> = runs.iter().filter(|run| run.sent > 0).map(|run| run.gap_ms).collect();
    gaps.sort_unstable();
    let Some(longest) = gaps.last() else { return };
    let (median, p95) = (table::part(&gaps, 50), table::part(&gaps, 95));
    let failed = runs.iter().filter(|run| run.problem.is_some()).count();
    println!(
        "== line {}, {}: {} runs, {failed} failed; without answer {median} ms in the median, p95 {p95}, \
         longest {longest}; accepted: {}",
        case.line,
        case.name,
        runs.len(),
        case.limit
    );
}

/// As a test run reports them.
pub fn outcomes(runs: &[Run], prefix: &str) -> Vec<TestOutcome> {
    let outcome = |run: &Run| {
        let result = if run.problem.is_none() { "passed" } else { "failed" };
        TestOutcome::new("lab", format!("{prefix}failover {}", run.id), result, run.seconds)
    };
    runs.iter().map(outcome).collect()
}
