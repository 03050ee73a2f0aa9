//! `kgctl graph`: the mesh as Graphviz text.

use anyhow::{Context as _, Result};
use clap::Args;
use kilo_agent::{status::IndirectTunnel, timestamp::Timestamp};
use kilo_core::{
    objects::Snapshot,
    topology::{self, Mesh, TunnelPaths},
    tunnel_path::PathWithRelay,
};

use crate::{
    cluster::{AgentsFlags, Cluster},
    progress::Progress,
    remote,
    source::{self, Flags, UnusedPort},
    terminal,
};

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl graph | dot -Kcirco -Tsvg > mesh.svg
  kgctl graph --paths | grep 'both, label='  tunnels that are punched or relayed
  kgctl graph --context=prod --mesh-granularity=full")]
pub struct GraphArgs {
    /// Label each tunnel between leaders as punched, or with the node that relays it. Asks the leaders' agents through
    /// the API server (needs get on pods/proxy). Direct tunnels get no label; agents that do not answer are listed on
    /// stderr.
    #[arg(long)]
    paths: bool,
    #[command(flatten)]
    agents: AgentsFlags,
    #[command(flatten)]
    _port: UnusedPort,
    #[command(flatten)]
    flags: Flags,
}

/// The mesh in the DOT language.
pub async fn run(args: &GraphArgs) -> Result<String> {
    let (snapshot, cluster) = source::snapshot(&args.flags).await?;
    let mesh = source::mesh_in_use(&snapshot, &args.flags.mesh)?;
    let paths = if args.paths {
        let cluster =
            cluster.context("--paths asks agents through the API server: --backend=file has none")?;
        let cluster = cluster.with_agents(&args.agents);
        paths(&cluster, &mesh, &snapshot, &args.flags).await?
    } else {
        TunnelPaths::default()
    };
    Ok(topology::dot(&mesh, &paths))
}

/// The tunnels' paths as the leaders' agents know them; agents that do not answer are listed on stderr.
async fn paths(cluster: &Cluster, mesh: &Mesh, snapshot: &Snapshot, flags: &Flags) -> Result<TunnelPaths> {
    let mut status = source::status(mesh, snapshot, &flags.mesh.shape, Timestamp::now());
    let leaders = status.leading();
    let progress = Progress::new("asking the leaders' agents", leaders.len());
    let seen = remote::statuses_on(cluster, leaders, Some(&progress)).await;
    drop(progress);
    let mut heard = Vec::new();
    for (leader, seen) in seen {
        match seen {
            Ok(seen) => heard.push((leader, seen)),
            Err(error) => {
                let text =
                    format!("tunnel paths of {leader} are unknown: its agent did not answer: {error:#}");
                eprintln!("kgctl: {}", terminal::plain(&text));
            }
        }
    }
    status.remember_paths(&heard);
    // The tunnel of an acting stand-by is drawn beside the line of the location's leader.
    let drawn = |name: String| mesh.find(&name).map_or(name, |(at, _)| topology::acting(mesh, at).to_owned());
    let path = |IndirectTunnel { nodes, path, relay }| (nodes.map(drawn), PathWithRelay { path, relay });
    Ok(status.indirect_tunnels.into_iter().map(path).collect())
}
