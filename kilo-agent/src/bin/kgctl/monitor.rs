//! `kgctl monitor`: shows a node's drops as they happen.

#[cfg(target_os = "linux")]
mod local;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kilo_common::drop_reasons::DropReason;

#[cfg(not(target_os = "linux"))]
pub use crate::needs_linux::monitor as run;
use crate::{
    cluster::{AgentsFlags, ApiFlags},
    complete,
    remote::{self, BPFFS},
};
#[cfg(target_os = "linux")]
pub use local::run;

/// Options of `kgctl monitor`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl monitor a1                          the drops of node a1, through the API server
  kgctl monitor                             those of this node, as root
  kgctl monitor a1 --reason=unknown_sender --count=5
  kgctl monitor a1 --counters -o json")]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "read where the kernel is Linux"))]
pub struct MonitorArgs {
    /// Listen on this node: kgctl runs in its agent's pod, through the API server. Without a name
    /// this machine is the node.
    #[arg(add = complete::nodes())]
    pub node: Option<String>,
    /// Only drops for this reason (repeatable); see docs/drop-reasons.md.
    #[arg(long, value_parser = reason, add = complete::reasons())]
    reason: Vec<DropReason>,
    /// Show one drop in N, at random.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    sample: u32,
    /// Exit after this many drops.
    #[arg(long, short, value_name = "N")]
    count: Option<u64>,
    /// Also print the counters that increased, once per second.
    #[arg(long)]
    counters: bool,
    /// Format of each line.
    #[arg(long, short, default_value = "text")]
    output: Output,
    /// Mount point of the BPF file system.
    #[arg(long, value_name = "DIR", default_value = BPFFS)]
    bpffs: PathBuf,
    /// End with standard input, for who started it from afar.
    #[arg(long = remote::UNTIL_STDIN_ENDS, hide = true)]
    until_stdin_ends: bool,
    #[command(flatten)]
    pub agents: AgentsFlags,
    #[command(flatten)]
    pub api: ApiFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

fn reason(text: &str) -> Result<DropReason, String> {
    DropReason::ALL.iter().find(|reason| reason.label() == text).copied().ok_or_else(|| {
        let labels: Vec<_> = DropReason::ALL.iter().map(|reason| reason.label()).collect();
        format!("unknown reason; possible values are {}", labels.join(", "))
    })
}
