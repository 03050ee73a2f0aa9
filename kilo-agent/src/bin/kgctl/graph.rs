//! `kgctl graph`: the mesh as Graphviz text.

use anyhow::{Context as _, Result};
use clap::Args;
use kilo_agent::{
    status::{self, Status},
    timestamp::Timestamp,
};
use kilo_core::{
    objects::Snapshot,
    topology::{self, Mesh, Ways},
};

use crate::{
    cluster::Cluster,
    progress::Progress,
    remote,
    source::{self, Flags},
    terminal,
};

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl graph | dot -Kcirco -Tsvg > mesh.svg
  kgctl graph --ways | grep label=          tunnels that are punched or relayed
  kgctl graph --context=prod --mesh-granularity=full")]
pub struct GraphArgs {
    /// Write beside each tunnel between leaders whether it is punched, or which node relays it: their agents are asked
    /// through the API server (needs get on pods/proxy). Direct tunnels have no label.
    #[arg(long)]
    ways: bool,
    #[command(flatten)]
    flags: Flags,
}

/// The mesh in the DOT language.
pub async fn run(args: &GraphArgs) -> Result<String> {
    let (snapshot, cluster) = source::snapshot(&args.flags).await?;
    let mesh = source::mesh(&snapshot, &args.flags.mesh)?;
    let ways = if args.ways {
        let cluster =
            cluster.context("--ways asks agents through the API server: --backend=file has none")?;
        ways(&cluster, &mesh, &snapshot, &args.flags).await?
    } else {
        Ways::default()
    };
    Ok(topology::dot(&mesh, &ways))
}

/// As the leaders' agents know them; those that do not answer are named on stderr.
async fn ways(cluster: &Cluster, mesh: &Mesh, snapshot: &Snapshot, flags: &Flags) -> Result<Ways> {
    let time = Timestamp::now();
    let granularity = source::granularity(snapshot, &flags.mesh.shape)?;
    let leaders =
        status::of_objects(mesh, snapshot, &source::ready(snapshot, time.0), granularity, time).leading();
    let progress = Progress::new("asking the leaders' agents", leaders.len());
    let seen = remote::statuses_on(cluster, leaders, Some(&progress)).await;
    drop(progress);
    for (leader, _) in seen.iter().filter(|(_, seen)| seen.is_none()) {
        eprintln!(
            "kgctl: {}",
            terminal::plain(&format!("the agent of {leader} did not answer; ask it: kgctl status {leader}"))
        );
    }
    Ok(seen.iter().filter_map(|(_, seen)| seen.as_ref()).flat_map(Status::ways).collect())
}
