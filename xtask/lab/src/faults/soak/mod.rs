//! `cargo xtask lab soak`: injects random faults, one or two at a time, for a given time, while everybody
//! probes everybody once per second. A seed gives the same faults in the same order again.

pub(super) mod inject;
mod left_over;
pub(super) mod reachability;
pub(super) mod rng;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};

use super::list::{FAULTS, Fault, SoakFault, is_named};
use crate::{
    Lab, agents, deployed_state, matrix,
    report::TestOutcome,
    stop_if_interrupted,
    wait::{self, until},
};
use reachability::{Totals, Watch};
use rng::Rng;

/// After the last fault of a round is mended, everybody reaches everybody within this.
pub const HEALS_WITHIN: Duration = Duration::from_secs(60);
/// Longest time a fault lasts before it is mended.
const LONGEST: Duration = Duration::from_secs(5);
/// How much an agent's own memory may grow, in KiB.
const MORE_MEMORY: u64 = 16 * 1024;

/// Undoes a fault.
type Undo = Box<dyn FnOnce(&mut Lab) -> Result<()>>;

/// How a fault ends.
pub enum Mend {
    /// This undoes it.
    By(Undo),
    /// There is nothing to undo.
    ByItself {
        /// Why not.
        why: &'static str,
    },
}

/// A fault in force.
pub struct Injected {
    /// Where and how.
    said: String,
    /// How it ends.
    mend: Mend,
}

impl Injected {
    /// A fault that is undone by `mend`.
    fn until(said: impl Into<String>, mend: impl FnOnce(&mut Lab) -> Result<()> + 'static) -> Self {
        Self { said: said.into(), mend: Mend::By(Box::new(mend)) }
    }

    /// A fault that leaves nothing to undo.
    fn heals(said: impl Into<String>, why: &'static str) -> Self {
        Self { said: said.into(), mend: Mend::ByItself { why } }
    }
}

/// What a soak showed.
#[derive(Debug, Default)]
pub struct Report {
    /// Rounds of one or two faults.
    rounds: usize,
    /// How often each fault was made, and the longest time until all was well after it.
    kinds: BTreeMap<&'static str, (usize, Duration)>,
    /// What everybody's probes have shown.
    probes: Totals,
    /// Faults after which agents were not well, or something was seen in cleartext.
    problems: Vec<String>,
}

/// Makes faults for that long; only those with one of these ids, or first words of an id
/// (comma separated).
///
/// # Errors
/// When the mesh does not heal within [`HEALS_WITHIN`], a process ends by
/// itself, a pod's address is seen in cleartext, or something is left over.
pub fn run(lab: &mut Lab, seed: u64, time: Duration, only: Option<&str>) -> Result<Report> {
    println!("soak: seed {seed}, {} s", time.as_secs());
    let wanted =
        |fault: &&Fault| only.is_none_or(|only| only.split(',').any(|word| is_named(fault.id, word)));
    let kinds: Vec<_> =
        FAULTS.iter().filter(wanted).filter_map(|fault| Some((fault.id, fault.soak.as_ref()?))).collect();
    ensure!(!kinds.is_empty(), "no fault of the soak is called {:?}", only.unwrap_or_default());
    let mut report = Report::default();
    let mut rng = Rng::new(seed);
    lab.all_well()?;
    let before = left_over::Inventory::settled(lab)?;
    let watch = Watch::start(&lab.network);
    watch.whole(Instant::now(), HEALS_WITHIN)?;
    let began = Instant::now();
    let mut result = Ok(());
    while result.is_ok() && began.elapsed() < time {
        result =
            stop_if_interrupted().and_then(|()| round(lab, &kinds, &mut rng, &watch, &mut report, began));
    }
    report.probes = watch.finish();
    report.print();
    result?;
    ensure!(report.problems.is_empty(), "{}", report.problems.join("\n"));
    let matrix = matrix::run(&lab.network)?;
    if matrix.passed() < matrix.total() {
        matrix.print();
        bail!("{} probes failed in the end", matrix.total() - matrix.passed());
    }
    left_over::nothing(lab, &before, MORE_MEMORY)?;
    deployed_state::as_deployed(lab)?;
    println!("soak: nothing left over after {} rounds", report.rounds);
    Ok(report)
}

/// Makes one or two faults, waits, mends them, and waits until everybody reaches everybody.
fn round(
    lab: &mut Lab,
    kinds: &[(&'static str, &SoakFault)],
    rng: &mut Rng,
    watch: &Watch,
    report: &mut Report,
    began: Instant,
) -> Result<()> {
    report.rounds += 1;
    let mut injected: Vec<(&'static str, Injected)> = Vec::new();
    for _ in 0..=rng.below(2) {
        let (id, kind) = *rng.pick(kinds);
        if injected.iter().any(|(other, _)| *other == id) {
            continue;
        }
        let made = (kind.inject)(lab, rng)?;
        println!("soak: {:4} s  {}: {}", began.elapsed().as_secs(), kind.name, made.said);
        lab.caused(kind.causes);
        injected.push((id, made));
        wait::fault_lasts(rng.duration(LONGEST / 5));
    }
    wait::fault_lasts(rng.duration(LONGEST));
    let (mut names, mut left_alone) = (Vec::new(), Vec::new());
    // What was made last is mended first.
    while let Some((id, made)) = injected.pop() {
        match made.mend {
            Mend::By(mend) => mend(lab)?,
            Mend::ByItself { why } => left_alone.push(format!("{id}: {why}")),
        }
        names.push(id);
    }
    let mended = Instant::now();
    lab.agents.all_run()?;
    let whole = watch.whole(mended, HEALS_WITHIN);
    let took = match whole {
        Ok(took) => took,
        Err(error) => {
            for node in &lab.network.nodes {
                let wg = node.netns.sh("wg show kilo0 | grep -v '^$'").unwrap_or_default();
                println!("{}:\n{}\n{wg}", node.name(), agents::tail(&lab.agents.log(node.name())));
            }
            left_alone.iter().for_each(|one| println!("soak: not mended, {one}"));
            bail!("after {}: {error:#}", names.join(", then "));
        }
    };
    println!("soak: {:4} s  well {:.1} s after the end of it", began.elapsed().as_secs(), took.as_secs_f32());
    if let Err(error) = lab.all_well() {
        let problem = format!("after {}: {error:#}", names.join(", then "));
        println!("soak: {problem}");
        report.problems.push(problem);
    }
    for name in names {
        let (times, longest) = report.kinds.entry(name).or_default();
        *times += 1;
        *longest = took.max(*longest);
    }
    until("every agent counts every node", HEALS_WITHIN, || Ok(lab.agents.are_ready(&lab.network)))?;
    Ok(())
}

impl Report {
    fn print(&self) {
        let faults: usize = self.kinds.values().map(|(times, _)| times).sum();
        let Totals { rounds: seconds, incomplete, asked, unanswered } = self.probes;
        println!(
            "soak: {faults} faults in {} rounds; {seconds} s looked at, {incomplete} of them with an \
             endpoint out of reach; {unanswered} of {asked} questions unanswered",
            self.rounds
        );
        for (name, (times, longest)) in &self.kinds {
            println!("soak: {times:3} times {name}: well within {:.1} s", longest.as_secs_f32());
        }
    }
}

/// The soak as an outcome of a test run.
pub fn outcome(result: &Result<Report>, seed: u64, started: Instant) -> TestOutcome {
    if let Err(error) = result {
        println!("FAILED with seed {seed}: {error:#}");
    }
    let name = format!("random faults heal and leave nothing over (seed {seed})");
    TestOutcome::ended("soak", name, result.is_ok(), started)
}
