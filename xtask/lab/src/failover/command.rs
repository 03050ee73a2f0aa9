//! The command line of `cargo xtask lab failover`.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use super::{Choice, Part, Run, breaking, cases, cost_at_rest, kept_runs, table};
use crate::{Lab, checks, network::Shape, options::LabOptions};

/// Its options.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only these cases (comma separated); all when none is named.
    #[arg(long = "case", value_delimiter = ',', value_name = "ID", value_parser = cases::named)]
    cases: Vec<String>,
    /// Only these.
    #[arg(long, value_enum, conflicts_with = "cases")]
    part: Option<Part>,
    /// How often each case is run. A single run that takes longer than 95 of 100 may is followed by two more.
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Write the runs to this file, after each run.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Take the runs from a file that --json wrote instead of making any (repeatable).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cases", "part", "json", "outcomes"])]
    from: Vec<PathBuf>,
    /// How long the cases go on that last, and the cluster is away: 90s, 10m, 2h (default: 30s).
    #[arg(long = "for", value_name = "TIME", value_parser = crate::durations::parse_time)]
    length: Option<Duration>,
    /// Keep the runs in docs/failover.json instead of those of the same cases, and write the tables of
    /// docs/failover.md and docs/reliability.md.
    #[arg(long, conflicts_with = "part")]
    docs: bool,
    /// Break nothing: measure for so long (60s or more) what agents cost at rest, without failover and with it; fail when
    /// that is too much, or anything was written.
    #[arg(long, value_name = "TIME", value_parser = crate::durations::parse_time, conflicts_with_all = ["docs", "from", "cases"])]
    rest: Option<Duration>,
    /// Write the outcomes as tests to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    outcomes: Option<PathBuf>,
}

impl Options {
    /// Whether a lab is built.
    pub const fn needs_lab(&self) -> bool {
        self.from.is_empty()
    }
}

/// Runs the cases, or reads earlier runs with `--from`.
pub fn main(args: &LabOptions, options: &Options) -> Result<()> {
    if !options.needs_lab() {
        let mut runs = Vec::new();
        for path in &options.from {
            let text = fs::read(path).with_context(|| path.display().to_string())?;
            let more: Vec<Run> = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
            runs.extend(more);
        }
        return end(&runs, options);
    }
    let mut guard = crate::take_over(&args.name)?;
    let mut args = args.clone();
    args.kg_flags.extend(["--failover=auto", "--stand-bys=1"].map(str::to_owned));
    if let Some(length) = options.length {
        breaking::set_length(length);
    }
    if let Some(time) = options.rest {
        return cost_at_rest::measure(&args, time);
    }
    let choice = match (options.part, options.cases.as_slice()) {
        (Some(part), _) => Choice::Part(part),
        (None, []) => Choice::All,
        (None, ids) => Choice::Named(ids),
    };
    let (mut runs, mut ends) = (Vec::new(), Vec::new());
    for shape in Shape::ALL.into_iter().filter(|shape| choice.needs(*shape)) {
        if !runs.is_empty() {
            crate::down(&args.name)?;
        }
        args.shape = shape;
        // The first case finds the flags that it needs.
        args.kg_flags.retain(|flag| !flag.starts_with("--stand-bys=") && !flag.starts_with("--leaders="));
        args.kg_flags.extend(choice.flags(shape));
        let before = runs.clone();
        let save = |new: &[Run]| {
            let all = [&before, new].concat();
            options.json.as_ref().map_or(Ok(()), |path| crate::write_json(path, &all))
        };
        let mut lab = Lab::up(&args, None)?;
        runs.extend(super::run(&mut lab, choice, options.runs, args.keep, save)?);
        if args.keep && runs.iter().any(|run| run.problem.is_some()) {
            break;
        }
        ends.push(checks::as_deployed(&mut lab, &format!("failover, network {shape:?}: ")));
    }
    if let Some(path) = &options.outcomes {
        crate::write_json(path, &[super::outcomes(&runs), ends.clone()].concat())?;
    }
    // With `--keep` a failed lab stays for inspection.
    guard.keep = args.keep && runs.iter().any(|run| run.problem.is_some());
    end(&runs, options)?;
    crate::report(&ends, None)
}

/// Writes the tables, and fails when a case misses what it accepts.
fn end(runs: &[Run], options: &Options) -> Result<()> {
    if options.docs {
        let all = kept_runs::replace(kept_runs::read()?, runs);
        kept_runs::write(&all)?;
        table::write(&all)?;
        crate::faults::write_requirements(|line| table::of_line(&all, line))?;
    }
    let beyond: Vec<_> = table::sums(runs).filter_map(|sum| sum.problem()).collect();
    if !beyond.is_empty() {
        bail!("not what is accepted: {}", beyond.join("; "));
    }
    Ok(())
}
