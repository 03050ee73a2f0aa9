//! `cargo xtask test`: everything, or single parts, with one count at the end.

mod beside;
mod cluster;
mod guest;
mod labs;
mod programs;
mod reader;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Instant,
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::{
    apt, bench, build_all,
    cluster::{ClusterPart, release::Release},
    command::own_program,
    image, kube_tools, kubernetes,
    lab::{self, takedown::stop_if_interrupted},
    report::{Outcome, TestOutcome},
    rotation::{Kernel, Long, LongLab, OnKernel},
    second_try::SecondTries,
    static_checks, web_tools, workspace_root,
};
use beside::Beside;
use cluster::Checks;
use programs::TestBinary;

/// File for the outcomes, relative to the workspace.
const REPORT: &str = "target/test-report.json";

/// What can be tested alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// Formatting, lints, unit and property tests: nothing but cargo.
    Unit,
    /// The BPF programs through `BPF_PROG_TEST_RUN` on this kernel.
    Bpf,
    /// Parts of the agent in namespaces on this kernel: routes, WireGuard, bad input, the page in a browser.
    Net,
    /// The mesh in namespaces on this kernel.
    Lab,
    /// Random faults for ten minutes.
    Soak,
    /// Labs that not every run has: failover's other cases, several leaders, NATs, other faults.
    LongLabs,
    /// Against a real kube-apiserver.
    Api,
    /// Kilo on a real Kubernetes, as its manifests deploy it; only what is built already, unless
    /// named or with --all.
    Cluster,
    /// The mesh with kernel WireGuard on Debian's kernels.
    Vm,
    /// What a packet costs, compared with docs/benchmarks.json: instructions in a guest with Debian's 6.12.
    Bench,
    /// The image as it is shipped, compiled in its own base image; only named or with --all.
    Image,
}

/// Parts of every run, one after the other.
const QUICK: [Part; 3] = [Part::Unit, Part::Lab, Part::Cluster];
/// Parts that every run puts into two more processes from the lab on: all of them mostly wait.
const BESIDE_LAB: [&[Part]; 2] = [&[Part::Bpf, Part::Net], &[Part::Api]];
/// Debian packages of the part `api`, besides the lab's.
const API_PACKAGES: &[&str] = &["openssl", "procps", "socat"];
/// Long parts, in an order in which the soak's ten minutes pass beside another part.
const LONG: [Part; 5] = [Part::Soak, Part::Vm, Part::Bench, Part::LongLabs, Part::Image];

impl Part {
    const fn label(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Bpf => "bpf",
            Self::Net => "net",
            Self::Lab => "lab",
            Self::Soak => "soak",
            Self::LongLabs => "long-labs",
            Self::Api => "api",
            Self::Cluster => "cluster",
            Self::Vm => "vm",
            Self::Bench => "bench",
            Self::Image => "image",
        }
    }
}

/// Options of the test command.
#[derive(Args, Debug)]
pub struct TestArgs {
    /// Parts to run. When none is named: unit, lab, cluster (if built), and beside them bpf, net and api.
    parts: Vec<Part>,
    /// Run every part.
    #[arg(long, conflicts_with = "parts")]
    all: bool,
    /// Then run one of the long parts, drawn by the commit's hash: soak, bench, one of the long-labs, a kernel of vm,
    /// or more checks of cluster.
    #[arg(long, conflicts_with_all = ["parts", "all"])]
    rotate: bool,
    /// Kernels of the part vm (repeatable); all when none is named.
    #[arg(long = "kernel", value_enum)]
    kernels: Vec<Kernel>,
    /// What of the part vm runs on them.
    #[arg(long, value_enum, default_value_t, conflicts_with = "all")]
    only: OnKernel,
    /// Which of the part long-labs (repeatable); all when none is named.
    #[arg(long, value_enum, requires = "parts", conflicts_with = "all")]
    labs: Vec<LongLab>,
    /// Which checks of the part cluster run (repeatable).
    #[arg(long, value_enum, default_value = "always", conflicts_with_all = ["all", "every_check"])]
    checks: Vec<ClusterPart>,
    /// Every check of the part cluster.
    #[arg(long)]
    every_check: bool,
    /// Where the outcomes are written (JSON).
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Stop at the first part with a failure.
    #[arg(long)]
    fail_fast: bool,
}

/// What to run, and how much of it.
#[derive(Debug)]
struct Chosen {
    parts: Vec<Part>,
    /// Kernels of `vm`, and what runs on each.
    on: (Vec<Kernel>, OnKernel),
    labs: Vec<LongLab>,
    cluster: Checks,
}

impl TestArgs {
    /// Resolves the arguments; prints which long parts are left out.
    fn chosen(&self) -> Chosen {
        let chosen = Chosen {
            parts: self.parts.clone(),
            on: (or_all(&self.kernels), self.only),
            labs: or_all(&self.labs),
            cluster: Checks::Parts(if self.every_check { or_all(&[]) } else { self.checks.clone() }),
        };
        if self.all {
            let parts = [&QUICK[..], &LONG].concat();
            return Chosen { parts, cluster: Checks::EveryAndOldest, ..chosen };
        }
        if !self.parts.is_empty() {
            return chosen;
        }
        let turn = self.rotate.then(Long::of_this_commit);
        let left = Long::all().filter(|long| Some(*long) != turn).map(Long::label);
        if let Some(turn) = turn {
            println!("xtask: of the long parts, this commit runs: {}", turn.label());
        }
        let left = left.chain([Part::Image.label().to_owned()]);
        println!("xtask: left to `cargo xtask test --all`: {}", left.collect::<Vec<_>>().join(", "));
        let and = |part: &[Part]| [&QUICK[..], part].concat();
        match turn {
            None => Chosen { parts: QUICK.to_vec(), ..chosen },
            Some(Long::Soak) => Chosen { parts: and(&[Part::Soak]), ..chosen },
            Some(Long::Bench) => Chosen { parts: and(&[Part::Bench]), ..chosen },
            Some(Long::Cluster(part)) => {
                let cluster = Checks::Parts(vec![ClusterPart::Always, part]);
                Chosen { parts: QUICK.to_vec(), cluster, ..chosen }
            }
            Some(Long::Lab(lab)) => Chosen { parts: and(&[Part::LongLabs]), labs: vec![lab], ..chosen },
            Some(Long::Vm(kernel, what)) => {
                Chosen { parts: and(&[Part::Vm]), on: (vec![kernel], what), ..chosen }
            }
        }
    }
}

/// The named values, or all when none is named.
fn or_all<T: ValueEnum>(named: &[T]) -> Vec<T> {
    if named.is_empty() { T::value_variants() } else { named }.to_vec()
}

/// Runs the parts, writes the report, prints the count as the last line.
pub fn main(args: &TestArgs) -> Result<()> {
    let chosen = args.chosen();
    let mut outcomes = Vec::new();
    let mut binaries = None;
    let (mut beside_lab, mut soak) = (Vec::new(), None);
    let mut tries = SecondTries::default();
    for part in chosen.parts.iter().copied() {
        if LONG.contains(&part) {
            outcomes.extend(beside_lab.drain(..).flat_map(Beside::join));
        }
        println!("\n== {}", part.label());
        let started = Instant::now();
        let wanted = args.all || args.parts.contains(&part);
        if part == Part::Lab && args.parts.is_empty() {
            match start_beside_lab(args.all) {
                Ok(processes) => beside_lab = processes,
                Err(error) => outcomes.push(does_not_run(part, &error, started)),
            }
        }
        let ran = match left_out(part, wanted) {
            Some(reason) => Ok(vec![skipped(part, &reason, started)]),
            None => run_part(part, args.all, &chosen, &mut binaries, &mut soak, &mut tries),
        };
        let ran = ran.unwrap_or_else(|error| vec![does_not_run(part, &error, started)]);
        let failed = ran.iter().any(TestOutcome::is_failed);
        outcomes.extend(ran);
        println!("== {}: {:.0} s", part.label(), started.elapsed().as_secs_f32());
        if failed && args.fail_fast {
            break;
        }
    }
    outcomes.extend(beside_lab.into_iter().chain(soak).flat_map(Beside::join));
    guest::count_elsewhere(&mut outcomes);
    let path = args.report.clone().unwrap_or_else(|| workspace_root().join(REPORT));
    fs::write(&path, serde_json::to_vec_pretty(&outcomes)?).with_context(|| path.display().to_string())?;
    if summarise(&outcomes) > 0 {
        std::process::exit(1);
    }
    Ok(())
}

/// Starts the parts that run beside the lab, once the packages that they need are installed.
fn start_beside_lab(all: bool) -> Result<Vec<Beside>> {
    apt::install(&[lab::PACKAGES, API_PACKAGES].concat())?;
    BESIDE_LAB.iter().map(|parts| Beside::parts(parts, &seed(all))).collect()
}

/// Prints what did not pass, and the count; returns the number of failures.
fn summarise(outcomes: &[TestOutcome]) -> usize {
    let count = |wanted: Outcome| outcomes.iter().filter(|outcome| outcome.outcome == wanted).count();
    println!();
    for outcome in outcomes.iter().filter(|outcome| outcome.outcome != Outcome::Passed) {
        let hint = match outcome.outcome {
            Outcome::Skipped if guest::runs(outcome) => " (`cargo xtask test vm` runs it on other kernels)",
            _ => "",
        };
        println!("{} {}: {}{hint}", outcome.outcome.to_string().to_uppercase(), outcome.part, outcome.name);
    }
    let (failed, flaky, elsewhere) =
        (count(Outcome::Failed), count(Outcome::Flaky), count(Outcome::Elsewhere));
    if elsewhere > 0 {
        println!("{elsewhere} that this machine's kernel cannot run passed in a virtual machine");
    }
    if flaky > 0 {
        println!("{flaky} of those that passed did at the second try");
    }
    println!(
        "{} passed, {failed} failed, {} skipped",
        count(Outcome::Passed) + flaky,
        count(Outcome::Skipped)
    );
    failed
}

fn does_not_run(part: Part, error: &anyhow::Error, started: Instant) -> TestOutcome {
    println!("FAILED {}: {error:#}", part.label());
    outcome(part, "the part runs", Outcome::Failed, started)
}

fn outcome(part: Part, name: &str, outcome: Outcome, started: Instant) -> TestOutcome {
    TestOutcome::new(part.label(), name, outcome, started.elapsed().as_secs_f64())
}

/// Why a part is left out, unless it was asked for.
fn left_out(part: Part, wanted: bool) -> Option<String> {
    if part != Part::Cluster || wanted {
        return None;
    }
    let is_built = Release::newest().and_then(Release::is_built).unwrap_or(false);
    (!is_built).then(|| {
        "Kubernetes is not built on this machine, which takes 10 to 20 minutes once; \
         `cargo xtask test cluster` or `--all` does it"
            .to_owned()
    })
}

fn skipped(part: Part, reason: &str, started: Instant) -> TestOutcome {
    println!("SKIPPED {}: {reason}", part.label());
    outcome(part, &format!("Kilo on a real Kubernetes ({reason})"), Outcome::Skipped, started)
}

fn run_part(
    part: Part,
    all: bool,
    chosen: &Chosen,
    binaries: &mut Option<Vec<TestBinary>>,
    soak: &mut Option<Beside>,
    tries: &mut SecondTries,
) -> Result<Vec<TestOutcome>> {
    if binaries.is_none() {
        build_all()?;
        // These run the programs, not cargo's test binaries.
        if matches!(part, Part::Unit | Part::Bpf | Part::Net | Part::Api | Part::Vm) {
            *binaries = Some(programs::build()?);
        }
    }
    let binaries = binaries.as_deref().unwrap_or_default();
    match part {
        Part::Unit => {
            if let Err(error) = kube_tools::prepare() {
                println!("kube-tools: {error:#}; tests that need them are skipped");
            }
            let mut outcomes = static_checks::sources(part.label());
            outcomes.extend(programs::run_unit(binaries, &seed(all))?);
            Ok(outcomes)
        }
        Part::Bpf => {
            apt::install(lab::PACKAGES)?;
            programs::run(part, binaries, &seed(all), None)
        }
        Part::Net => {
            apt::install(lab::PACKAGES)?;
            if let Err(error) = web_tools::prepare() {
                println!("web-tools: {error:#}; tests of the page are skipped");
            }
            programs::run(part, binaries, &seed(all), Some(tries))
        }
        Part::Lab => {
            apt::install(lab::PACKAGES)?;
            labs::quick(tries)
        }
        Part::LongLabs => {
            apt::install(lab::PACKAGES)?;
            labs::long(&chosen.labs, tries)
        }
        Part::Soak => {
            apt::install(lab::PACKAGES)?;
            *soak = Some(Beside::soak()?);
            Ok(Vec::new())
        }
        Part::Api => {
            apt::install(lab::PACKAGES)?;
            apt::install(API_PACKAGES)?;
            let assets = kubernetes::assets()?;
            let environment = BTreeMap::from([("KUBEBUILDER_ASSETS".to_owned(), assets)]);
            programs::run(part, binaries, &environment, Some(tries))
        }
        Part::Cluster => cluster::run(&chosen.cluster, tries),
        Part::Vm => {
            apt::install(lab::PACKAGES)?;
            guest::run((&chosen.on.0, chosen.on.1), binaries, tries)
        }
        Part::Bench => {
            let name = "a packet costs no more instructions than docs/benchmarks.json has";
            let bin = own_program()?;
            Ok(single(part, name, || bench::compare_packets(bin.parent().context("no directory")?)))
        }
        Part::Image => {
            let name = "the Dockerfile makes an image that holds what it should";
            Ok(single(part, name, image::build_shipped))
        }
    }
}

/// The outcome of a part that has but one.
fn single(part: Part, name: &str, code: impl FnOnce() -> Result<()>) -> Vec<TestOutcome> {
    let started = Instant::now();
    let result = match code() {
        Ok(()) => Outcome::Passed,
        Err(error) => {
            println!("FAILED {}: {error:#}", part.label());
            Outcome::Failed
        }
    };
    vec![outcome(part, name, result, started)]
}

/// Seed of the random tests: fixed in ordinary runs, so that a commit which passed passes again; random
/// with `--all`.
fn seed(all: bool) -> BTreeMap<String, PathBuf> {
    let wanted = all && std::env::var_os("KILO_SEED").is_none();
    wanted.then(|| ("KILO_SEED".to_owned(), PathBuf::from("random"))).into_iter().collect()
}

/// Runs one of our processes, which writes outcomes to `file`. Returns them, and one more failure when the
/// process failed without reporting any.
fn run_own(part: Part, what: &str, command: &mut Command, file: &Path) -> Result<Vec<TestOutcome>> {
    stop_if_interrupted()?;
    let started = Instant::now();
    let status = command.status().with_context(|| what.to_owned())?;
    let mut outcomes = read_outcomes_of(file, part)?;
    outcomes.extend(unexplained(part, what, status, &outcomes, started));
    Ok(outcomes)
}

/// The failure of a process that none of its outcomes explains.
fn unexplained(
    part: Part,
    what: &str,
    status: ExitStatus,
    outcomes: &[TestOutcome],
    started: Instant,
) -> Option<TestOutcome> {
    if status.success() || outcomes.iter().any(TestOutcome::is_failed) {
        return None;
    }
    println!("FAILED {what}: {status}, and no outcome says why");
    // A second run has no outcome of this name that could replace this one.
    let ends = outcome(part, &format!("{what} ends properly"), Outcome::Failed, started);
    Some(TestOutcome { is_final: true, ..ends })
}

/// Outcomes that one of our processes wrote, each with its part.
fn read_outcomes(path: &Path) -> Result<Vec<TestOutcome>> {
    let text = fs::read(path).with_context(|| format!("{}: no outcomes were written", path.display()))?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

/// Like [`read_outcomes`], for a process that does not know which part it runs for.
fn read_outcomes_of(path: &Path, part: Part) -> Result<Vec<TestOutcome>> {
    let outcomes = read_outcomes(path)?.into_iter();
    Ok(outcomes.map(|outcome| TestOutcome { part: part.label().to_owned(), ..outcome }).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Outcomes of a process that runs this script, with the outcomes' file as `$0`.
    fn made_of(script: &str) -> Result<Vec<(String, Outcome)>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(file.path());
        let outcomes = run_own(Part::Lab, "lab it", &mut command, file.path())?;
        Ok(outcomes.into_iter().map(|outcome| (outcome.name, outcome.outcome)).collect())
    }

    #[test]
    fn a_process_that_fails_without_saying_why_has_failed() {
        let writes = |outcome: Outcome, code: u8| {
            let outcomes =
                format!(r#"[{{"part": "lab", "name": "x", "outcome": "{outcome}", "seconds": 1}}]"#);
            made_of(&format!("echo '{outcomes}' > \"$0\"; exit {code}")).unwrap()
        };
        let pair = |name: &str, outcome| (name.to_owned(), outcome);
        assert_eq!(writes(Outcome::Passed, 0), [pair("x", Outcome::Passed)]);
        assert_eq!(writes(Outcome::Failed, 1), [pair("x", Outcome::Failed)]);
        assert_eq!(
            writes(Outcome::Passed, 1),
            [pair("x", Outcome::Passed), pair("lab it ends properly", Outcome::Failed)]
        );
        assert!(made_of("exit 0").is_err(), "it wrote nothing");
    }
}
