//! `kgctl`: shows configurations of the mesh and draws it; inspects a node's data path.

mod cluster;
mod complete;
#[cfg(target_os = "linux")]
mod connect;
mod connectivity;
mod flags_before_command;
mod graph;
mod image_name;
mod manual;
mod monitor;
#[cfg(any(test, not(target_os = "linux")))]
mod needs_linux;
#[cfg(target_os = "linux")]
mod node_report;
mod outcome;
mod peer_cluster;
mod progress;
mod refusal;
mod remote;
mod showconf;
mod source;
mod status;
mod status_filter;
mod sysdump;
mod takeover;
mod terminal;
mod trace;
mod uninstall;
mod version;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::CompleteEnv;
use kilo_core::errors::error_chain;

#[cfg(target_os = "linux")]
use kilo_host::wireguard::userspace;

#[cfg(not(target_os = "linux"))]
use crate::needs_linux::connect;
use crate::{
    connect::ConnectArgs,
    connectivity::{ConnectivityArgs, probe},
    graph::GraphArgs,
    monitor::MonitorArgs,
    outcome::Outcome,
    peer_cluster::PeerClusterArgs,
    showconf::Showconf,
    status::StatusArgs,
    sysdump::SysdumpArgs,
    takeover::TakeoverArgs,
    trace::TraceArgs,
    uninstall::UninstallArgs,
    version::VersionArgs,
};

/// Inspect the mesh and a node's data path, print configurations, and join the mesh as a peer.
#[derive(Parser, Debug)]
#[command(
    name = "kgctl",
    version,
    after_help = "Each command has its own flags: `kgctl COMMAND --help`. They may also stand before it: \
                  `kgctl --context prod status`.

Exit codes: 0 = all is well, 1 = an error, 2 = the command line is wrong, 3 = something is wrong or missing in the \
                  cluster (status --check, status --wait, connectivity-test, version, sysdump)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Start pods on some nodes, and show which of them reach each other, nodes, Services and peers.
    ConnectivityTest(ConnectivityArgs),
    /// Draw the mesh as Graphviz text.
    Graph(GraphArgs),
    /// Show packets that a node drops, live, with the reason.
    Monitor(MonitorArgs),
    /// Join the meshes of two clusters: the locations of each become peers of the other.
    PeerCluster(PeerClusterArgs),
    /// Show the WireGuard configuration of a node or peer.
    Showconf {
        #[command(subcommand)]
        of: Showconf,
    },
    /// Show the leader of each location, since when and why, and which nodes are ready.
    Status(StatusArgs),
    /// Collect diagnostics into one archive, without keys.
    Sysdump(SysdumpArgs),
    /// Print the DaemonSet that takes over from Kilo's own on each node while its image changes.
    Takeover(TakeoverArgs),
    /// Show what a node would do with a packet, and why.
    Trace(TraceArgs),
    /// Make this machine a peer of the mesh until interrupted (Linux, as root).
    Connect(ConnectArgs),
    /// Remove Kilo from every node, once its DaemonSet is deleted, and show what was removed.
    Uninstall(UninstallArgs),
    /// Show the version of this program and of the agent on each node.
    Version(VersionArgs),
    /// Answer probes (run in pods by connectivity-test).
    #[command(name = probe::SERVER, hide = true)]
    ProbeServer,
    /// Send probes (run in pods by connectivity-test).
    #[command(name = probe::CLIENT, hide = true)]
    Probe {
        /// The list, as JSON.
        probes: String,
    },
    /// Write man pages into a directory (for packages).
    #[command(name = manual::NAME, hide = true)]
    ManPages {
        /// Directory, made where it is missing.
        directory: PathBuf,
    },
    /// Print what only this node knows of its host (run in agents' pods by sysdump).
    #[cfg(target_os = "linux")]
    #[command(name = sysdump::NODE_REPORT, hide = true)]
    NodeReport,
    /// Run the userspace WireGuard device (started by connect itself).
    #[cfg(target_os = "linux")]
    #[command(name = userspace::SUBCOMMAND, hide = true)]
    UserspaceWireguard {
        /// Interface to make.
        interface: String,
    },
    /// Print a completion script, which also asks kgctl for names of nodes, peers and contexts.
    #[command(after_help = "Examples:
  source <(kgctl completion bash)                                  in ~/.bashrc
  kgctl completion fish > ~/.config/fish/completions/kgctl.fish")]
    Completion {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    #[cfg(debug_assertions)]
    if let Some(tables) = kilo_agent::flags_markdown::if_asked(Cli::command) {
        print!("{tables}");
        return ExitCode::SUCCESS;
    }
    // Exits if a shell asks for completions.
    CompleteEnv::with_factory(Cli::command).var(complete::VARIABLE).complete();
    let arguments = flags_before_command::behind_command(&Cli::command(), std::env::args_os());
    let matches = Cli::command().get_matches_from(arguments);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(&cli.command, &matches))) {
        Ok(Outcome { text, end }) => match terminal::print(&text) {
            Err(error) if !error.is::<terminal::OutputClosed>() => failed(&error),
            _ => end.into(),
        },
        // The reader has closed the pipe, as `| head` does.
        Err(error) if error.is::<terminal::OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("kgctl: {}", terminal::plain(&error_chain(error.as_ref())));
    ExitCode::FAILURE
}

/// Returns what to print, and how the command ended.
async fn run(command: &Command, matches: &ArgMatches) -> Result<Outcome> {
    let text = match command {
        Command::Status(args) => return status::run(args).await,
        Command::ConnectivityTest(args) => return Box::pin(connectivity::run(args)).await,
        Command::Sysdump(args) => return sysdump::run(args).await,
        Command::Version(args) => return version::run(args).await,
        Command::Monitor(MonitorArgs { node, agents, api, .. })
        | Command::Trace(TraceArgs { node, agents, api, .. }) => {
            let root = Cli::command();
            let given =
                matches.subcommand().and_then(|(name, given)| Some((root.find_subcommand(name)?, given)));
            let (below, given) = given.context("no command was given; see `kgctl --help`")?;
            let flags = remote::flags(below, given)?;
            match (node, command) {
                (Some(node), _) => {
                    let done = remote::run((api, agents), node, below.get_name(), &flags).await?;
                    return Ok(Outcome::of(done));
                }
                (None, Command::Trace(args)) => trace::run(args).await?,
                (None, Command::Monitor(args)) => monitor::run(args).await.map(|()| String::new())?,
                (None, _) => String::new(),
            }
        }
        Command::Graph(args) => graph::run(args).await?,
        Command::PeerCluster(args) => peer_cluster::run(args).await?,
        Command::Showconf { of } => showconf::run(of).await?,
        Command::Connect(args) => connect::run(args).await?,
        Command::Uninstall(args) => uninstall::run(args).await?,
        Command::ProbeServer => {
            probe::Server::bind(probe::PORT).await?.run().await;
            String::new()
        }
        Command::Probe { probes } => probe::ask(probes).await?,
        Command::ManPages { directory } => {
            manual::write(Cli::command(), directory)?;
            String::new()
        }
        Command::Takeover(args) => takeover::run(args).await?,
        #[cfg(target_os = "linux")]
        Command::NodeReport => node_report::run().await?,
        #[cfg(target_os = "linux")]
        Command::UserspaceWireguard { interface } => {
            userspace::run(interface).await.context("failed to run userspace WireGuard")?;
            String::new()
        }
        Command::Completion { shell } => complete::script(*shell)?,
    };
    Ok(text.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    /// Collects the subcommands that have none of their own, with their paths.
    fn leaves(command: &clap::Command, path: &str, found: &mut Vec<(String, clap::Command)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            let path = format!("{path} {}", below.get_name());
            match below.has_subcommands() {
                true => leaves(below, &path, found),
                false => found.push((path, below.clone())),
            }
        }
    }

    #[test]
    fn every_command_has_examples_that_it_understands() {
        let root = Cli::command();
        let mut found = Vec::new();
        leaves(&root, "kgctl", &mut found);
        assert!(found.len() > 10, "{}", found.len());
        for (path, command) in found {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines = help.strip_prefix("Examples:\n").unwrap_or_else(|| panic!("{path} has no examples"));
            assert!(lines.lines().all(|line| line.starts_with("  ") && line.len() <= 100), "{path}: {help}");
            let mut own = 0;
            for line in lines.lines().filter(|line| line.contains("kgctl ")) {
                // Ends at the shell's operators, or at the remark that follows.
                let example = &line[line.find("kgctl ").unwrap()..];
                let end = ["  ", " | ", " >", ")", " #"].iter().filter_map(|end| example.find(end)).min();
                let example = &example[..end.unwrap_or(example.len())];
                let words = example.split_whitespace().map(Into::into);
                let words =
                    flags_before_command::behind_command(&root, words.collect::<Vec<std::ffi::OsString>>());
                Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{path}: {example}: {error}"));
                own += usize::from(example.starts_with(&path));
            }
            assert!(own > 0, "{path}: none of its examples shows it: {help}");
        }
    }

    #[test]
    fn flags_are_below_the_heading_they_belong_to() {
        let root = Cli::command();
        let mut found = Vec::new();
        leaves(&root, "kgctl", &mut found);
        for (path, command) in found {
            for arg in command.get_arguments() {
                let of_server = [
                    "kubeconfig",
                    "context",
                    "cluster",
                    "user",
                    "impersonate",
                    "impersonate_groups",
                    "request_timeout",
                ];
                let expected = of_server.contains(&arg.get_id().as_str());
                let is_there = arg.get_help_heading() == Some(cluster::API_HEADING);
                assert_eq!(is_there, expected, "{path} --{}", arg.get_id());
            }
        }
    }
}
