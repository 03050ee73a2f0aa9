//! `cargo xtask bench`: what a packet costs in instructions of a guest kernel, beside plain routes and
//! Kilo's kernel IPIP; and what the control plane costs on this machine (`cargo xtask bench control`).

mod agent;
mod control;
mod document;
mod figures;
mod frames;
mod gateways;
mod generator;
mod guest;
mod kernel_variants;
mod limits;
mod single;
mod site;
mod stages;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};

use crate::{
    apt,
    command::own_program,
    lab::PACKAGES,
    vm::{self, VmArgs},
    workspace_root,
};
use figures::{Cost, Figure};

/// The kernel whose figures are stored.
const KERNEL: &str = "6.12";

/// Figures of the last stored run.
const STORED: &str = "docs/benchmarks.json";

/// The document with the tables; its plot is in the same directory.
const DOCUMENT: &str = "docs/benchmark-figures.md";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Instructions of packets, in a virtual machine.
    Data,
    /// Topology, changes, memory and traffic of the agent, against a real kube-apiserver.
    Control,
    /// What many agents and the API server spend on knowing all nodes, by Nodes and by slices.
    Slices,
    /// A mesh of hundreds of namespaces with real agents: start, rest, an API server that is away, a dead leader.
    Scale,
    /// What the start of the programs costs, and what each asks of the verifier.
    Start,
    /// What each of one to four active leaders encrypts while twelve members send alike, in the lab.
    Gateways,
}

/// Options of the benchmark.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// What is measured (default: data and control; with --only, the data path).
    part: Option<Part>,
    /// 6.1, 6.12 or newest.
    #[arg(long, default_value = KERNEL)]
    kernel: String,
    /// Compare with docs/benchmarks.json instead of writing it; fail when a count of ours grew by more than its
    /// tolerance, or a packet costs more than its stage may.
    #[arg(long)]
    check: bool,
    /// Only variants with one of these in their name, or numbers of nodes (comma separated); nothing is written unless
    /// with --update.
    #[arg(long, default_value = "")]
    only: String,
    /// Write the figures of --only; the others keep theirs.
    #[arg(long)]
    update: bool,
    /// scale: how many nodes, in 20 locations (default: 200).
    #[arg(long)]
    nodes: Option<u32>,
    /// scale: seconds without API server (default: 600).
    #[arg(long, value_name = "SECONDS")]
    outage: Option<u32>,
    /// Leave out the mesh of 10,000 nodes.
    #[arg(long)]
    no_large: bool,
    /// Measure nothing, take what a run left in target/vm/bench.json or target/bench-control.json.
    #[arg(long)]
    last: bool,
    /// Directory of the kg binary, and of kgctl for gateways (default: a release build).
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Measure here: this is the guest.
    #[arg(long, hide = true)]
    guest: bool,
}

impl BenchArgs {
    /// True when binaries must be built first.
    pub fn needs_build(&self) -> bool {
        matches!(self.part, None | Some(Part::Data)) && !self.guest && !self.last && self.bin.is_none()
    }
}

/// Runs `cargo xtask bench`.
pub fn main(args: &BenchArgs) -> Result<()> {
    match args.part {
        Some(Part::Control) => control::main(args),
        Some(part @ (Part::Slices | Part::Scale | Part::Start | Part::Gateways)) => single::main(part, args),
        // Report the errors of both parts.
        None if args.only.is_empty() && !args.guest => match (data(args), control::main(args)) {
            (Err(data), Err(control)) => bail!("{data:#}\n{control:#}"),
            (data, control) => data.and(control),
        },
        _ => data(args),
    }
}

/// Compares what packets cost in the default mesh of five nodes with [`STORED`]; programs are those of `bin`.
///
/// # Errors
/// Names the counts that grew by more than their tolerance, or says why nothing could be measured.
pub fn compare_packets(bin: &Path) -> Result<()> {
    data(&BenchArgs {
        part: Some(Part::Data),
        kernel: KERNEL.to_owned(),
        check: true,
        only: "ours-ipip-5".to_owned(),
        update: false,
        nodes: None,
        outage: None,
        no_large: true,
        last: false,
        bin: Some(bin.to_owned()),
        guest: false,
    })
}

/// Whether the figure is one of the control plane.
fn is_of_control_plane(figure: &Figure) -> bool {
    control::is_control(figure) || single::is_single(figure)
}

fn data(args: &BenchArgs) -> Result<()> {
    let bin = match &args.bin {
        Some(bin) => fs::canonicalize(bin).with_context(|| bin.display().to_string())?,
        None => workspace_root().join("target/release"),
    };
    let results = workspace_root().join(vm::SHARED).join("bench.json");
    if args.guest {
        return guest::main(
            &std::env::temp_dir().join("bench"),
            &bin.join("kg"),
            &results,
            &args.only,
            !args.no_large,
        );
    }
    if !args.last {
        measure(args, &bin, &results)?;
    }
    if !(args.only.is_empty() || args.update || args.check) {
        return Ok(());
    }
    let mut costs: Vec<Cost> = serde_json::from_slice(&fs::read(&results)?)?;
    if args.update {
        costs.extend(figures::kept(&stored(|figure| !is_of_control_plane(figure))?, &costs));
        guest::sort(&mut costs);
    }
    let now = figures::figures(&costs);
    if args.check {
        let is_measured = |figure: &Figure| {
            args.only.is_empty()
                || costs.iter().any(|cost| figure.name.ends_with(&format!("/{}", cost.variant)))
        };
        return check(&stored(|figure| !is_of_control_plane(figure) && is_measured(figure))?, &now);
    }
    store(now, is_of_control_plane)?;
    let machine = format!(
        "QEMU TCG, one virtual CPU, `-icount shift=0`; guest kernel {}. Counted in {}.",
        fs::read_to_string(results.with_extension("kernel"))?.trim(),
        if args.update { "several runs (`--update`)" } else { "one run" }
    );
    let document = workspace_root().join(DOCUMENT);
    let text = fs::read_to_string(&document).context(DOCUMENT)?;
    fs::write(&document, document::with_tables(&text, &machine, &costs).context(DOCUMENT)?)?;
    fs::write(document.with_file_name("benchmarks.svg"), document::plot(&costs))?;
    Ok(())
}

/// Runs the guest's part in the virtual machine.
fn measure(args: &BenchArgs, bin: &Path, results: &Path) -> Result<()> {
    apt::install(PACKAGES)?;
    let _ = fs::remove_file(results);
    let mut command = vec![own_program()?.display().to_string()];
    command.extend(["bench", "--guest", "--only", &args.only, "--bin"].map(ToOwned::to_owned));
    command.push(bin.display().to_string());
    if args.no_large {
        command.push("--no-large".to_owned());
    }
    let machine = VmArgs {
        kernel: args.kernel.clone(),
        modules: None,
        memory: 3072,
        timeout: 3600,
        icount: true,
        command,
    };
    let code = vm::execute(&machine)?;
    if code != 0 {
        bail!("the guest's part failed with {code}");
    }
    Ok(())
}

/// Stored figures for which `wanted` holds.
fn stored(wanted: impl Fn(&Figure) -> bool) -> Result<Vec<Figure>> {
    let text = fs::read(workspace_root().join(STORED)).context(STORED)?;
    let figures: Vec<Figure> = serde_json::from_slice(&text).context(STORED)?;
    Ok(figures.into_iter().filter(wanted).collect())
}

/// Stores new figures, and keeps the old ones of other parts.
fn store(now: Vec<Figure>, is_others: impl Fn(&Figure) -> bool) -> Result<()> {
    let others = stored(is_others)?;
    let (mut data, control): (Vec<_>, Vec<_>) =
        now.into_iter().chain(others).partition(|figure| !is_of_control_plane(figure));
    data.extend(control);
    fs::write(workspace_root().join(STORED), serde_json::to_string_pretty(&data)? + "\n").context(STORED)
}

fn check(stored: &[Figure], now: &[Figure]) -> Result<()> {
    let worse = [figures::regressions(stored, now), limits::exceeded(now)].concat();
    if worse.is_empty() {
        println!("bench: no count of ours grew by more than its tolerance or exceeds its limit");
        return Ok(());
    }
    bail!("more than {STORED} or a limit allows:\n{}", worse.join("\n"))
}
