//! `kgctl`: shows configurations of the mesh and draws it; looks into a node's data path.

mod cluster;
#[cfg(target_os = "linux")]
mod connect;
mod graph;
mod health;
mod leading_flags;
#[cfg(target_os = "linux")]
mod monitor;
#[cfg(any(test, not(target_os = "linux")))]
mod needs_linux;
mod peer_cluster;
mod progress;
mod refusal;
mod showconf;
mod source;
mod status;
mod terminal;
#[cfg(target_os = "linux")]
mod trace;
mod uninstall;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

#[cfg(target_os = "linux")]
use kilo_host::wireguard::userspace;

#[cfg(not(target_os = "linux"))]
use crate::needs_linux::{connect, monitor, trace};
use crate::{
    connect::ConnectArgs, graph::GraphArgs, monitor::MonitorArgs, peer_cluster::PeerClusterArgs,
    showconf::Showconf, status::StatusArgs, trace::TraceArgs, uninstall::UninstallArgs,
};

/// Inspect the mesh and a node's data path, print configurations, and join the mesh as a peer.
#[derive(Parser, Debug)]
#[command(
    name = "kgctl",
    version,
    after_help = "Each command has its own flags: `kgctl COMMAND --help`. They may also stand before it: \
                  `kgctl --context prod status`."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Draw the mesh as Graphviz text.
    Graph(GraphArgs),
    /// Show packets that this node drops, live, with the reason.
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
    /// Show what this node would do with a packet, and why.
    Trace(TraceArgs),
    /// Make this machine a peer of the mesh until interrupted (Linux, as root).
    Connect(ConnectArgs),
    /// Take Kilo off every node, once its DaemonSet is deleted, and show what was removed.
    Uninstall(UninstallArgs),
    /// Run the userspace WireGuard device (started by connect itself).
    #[cfg(target_os = "linux")]
    #[command(name = userspace::SUBCOMMAND, hide = true)]
    UserspaceWireguard {
        /// Interface to make.
        interface: String,
    },
    /// Print a completion script.
    Completion {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    if let Some(tables) = kilo_agent::flag_table::if_asked(Cli::command) {
        print!("{tables}");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse_from(leading_flags::behind_command(&Cli::command(), std::env::args_os()));
    if let Command::Completion { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "kgctl", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(cli))) {
        Ok((text, success)) => {
            print!("{text}");
            if success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("kgctl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What to print, and whether to exit with success.
async fn run(cli: Cli) -> Result<(String, bool)> {
    if let Command::Status(args) = &cli.command {
        return status::run(args).await;
    }
    done(cli).await.map(|text| (text, true))
}

async fn done(cli: Cli) -> Result<String> {
    match &cli.command {
        Command::Graph(args) => graph::run(args).await,
        Command::Monitor(args) => monitor::run(args).await.map(|()| String::new()),
        Command::PeerCluster(args) => peer_cluster::run(args).await,
        Command::Showconf { of } => showconf::run(of).await,
        Command::Trace(args) => trace::run(args).await,
        Command::Connect(args) => connect::run(args).await,
        Command::Uninstall(args) => uninstall::run(args).await,
        #[cfg(target_os = "linux")]
        Command::UserspaceWireguard { interface } => {
            let run = userspace::run(interface).await;
            anyhow::Context::context(run, "userspace WireGuard")?;
            Ok(String::new())
        }
        Command::Completion { .. } | Command::Status(_) => Ok(String::new()),
    }
}
