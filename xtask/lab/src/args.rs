//! Options and subcommands of `cargo xtask lab`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{durations::parse_time, failover, faults, nat_pairs, options::LabOptions, scenario::Scenario};

/// What `cargo xtask lab` is asked for: which lab, and what to do with it.
#[derive(Args, Clone, Debug)]
pub struct LabArgs {
    #[command(flatten)]
    pub(crate) options: LabOptions,
    #[command(subcommand)]
    pub(crate) command: Option<LabCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum LabCommand {
    /// Run a command inside a node, pod (pod-NODE), router, outside or laptop.
    Exec {
        /// Name of the namespace.
        netns: String,
        /// The command.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Show the agents and their counters.
    Status,
    /// Make faults while traffic flows, and write what each cost.
    Faults(FaultOptions),
    /// Put two leaders behind NATs of every pair of kinds, and show which way they find; then try a relay under traffic.
    Nat(nat_pairs::Options),
    /// Break a leader again and again while traffic flows, with --failover=auto.
    Failover(failover::Options),
    /// Inject random faults while every pod probes every other pod each second.
    Soak {
        /// Chooses the faults; printed, so that a run can be had again (default: by the clock).
        #[arg(long)]
        seed: Option<u64>,
        /// How long: 90s, 10m, 2h.
        #[arg(long, default_value = "10m", value_parser = parse_time)]
        time: Duration,
        /// Write the outcome as a test to this file.
        #[arg(long, value_name = "FILE", hide = true)]
        outcomes: Option<PathBuf>,
    },
    /// Let packets of a namespace disappear or be late for a while, and count them.
    Inject {
        /// Name of the namespace.
        netns: String,
        #[command(flatten)]
        rule: faults::injector::Rule,
        /// How long, in seconds.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// Take the lab down.
    Down,
    /// Build the lab, run every check, take it down.
    Test {
        /// Write the outcomes to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// Put this before each test's name.
        #[arg(long, default_value = "")]
        prefix: String,
        /// Then build a lab for each other way to carry packets, or those with this in their name, and try who
        /// reaches whom.
        #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "")]
        modes: Option<String>,
    },
    /// Build the mesh beside something else, run every check, take it down.
    Scenario {
        /// What it stands beside; all when none is named.
        names: Vec<Scenario>,
        /// Write the outcomes to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// Put this before each test's name.
        #[arg(long, default_value = "")]
        prefix: String,
    },
}

/// Which faults are made under traffic, and what becomes of what they cost.
#[derive(Args, Clone, Debug)]
pub(crate) struct FaultOptions {
    /// Only these faults of docs/reliability.md: ids, or first words of ids (comma separated).
    #[arg(long = "fault", value_delimiter = ',', value_name = "ID", value_parser = faults::list::named)]
    pub(crate) only_faults: Vec<String>,
    /// Only these.
    #[arg(long, value_enum, conflicts_with = "only_faults")]
    pub(crate) part: Option<faults::Part>,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// How long the cluster is away and agents are dead (cluster-away, static-stability): 90s, 10m, 2h.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) away: Option<Duration>,
    /// Write docs/reliability.md; with --fault, other rows from the file of --json.
    #[arg(long, conflicts_with = "part")]
    pub(crate) docs: bool,
    /// Write the outcomes as tests to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) outcomes: Option<PathBuf>,
}

impl LabArgs {
    /// True when a lab is built, which needs Debian packages.
    pub fn stands_up(&self) -> bool {
        match &self.command {
            None
            | Some(
                LabCommand::Test { .. }
                | LabCommand::Nat(_)
                | LabCommand::Faults(_)
                | LabCommand::Soak { .. }
                | LabCommand::Scenario { .. },
            ) => true,
            Some(LabCommand::Failover(options)) => options.needs_lab(),
            Some(
                LabCommand::Exec { .. } | LabCommand::Status | LabCommand::Inject { .. } | LabCommand::Down,
            ) => false,
        }
    }

    /// True when binaries must be built first.
    pub fn needs_build(&self) -> bool {
        self.stands_up() && self.options.bin.is_none()
    }
}
