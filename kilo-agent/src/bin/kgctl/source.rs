//! The source of the commands' objects.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use clap::Args;
use ipnet::IpNet;
use kilo_agent::{
    backend::{Backend as _, file::FileBackend},
    cli::{BackendKind, parse_cidr, parse_label},
    timestamp::Timestamp,
};
use kilo_core::{
    objects::Snapshot,
    settings::{DEFAULT_SUBNET, DEFAULT_TOPOLOGY_LABEL, Granularity},
    topology::{self, Mesh},
};

use crate::{
    cluster::{ApiFlags, Cluster},
    terminal,
};

/// Flags of the commands that look at the mesh of a cluster or of a directory.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Mesh")]
pub struct Flags {
    /// Source of nodes and peers: kubernetes or file.
    #[arg(long, default_value = "kubernetes")]
    pub backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR")]
    pub backend_dir: Option<PathBuf>,
    #[command(flatten)]
    pub mesh: MeshFlags,
}

/// Flags of the commands that look at the mesh of a cluster.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Mesh")]
pub struct MeshFlags {
    /// CIDR from which WireGuard addresses are allocated.
    #[arg(long, default_value = DEFAULT_SUBNET, value_parser = parse_cidr)]
    pub subnet: IpNet,
    #[command(flatten)]
    pub shape: ShapeFlags,
    #[command(flatten)]
    pub api: ApiFlags,
}

/// Flags about which nodes belong together.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Mesh")]
pub struct ShapeFlags {
    /// auto (what the nodes say), location, full or cross.
    #[arg(long, default_value = "auto")]
    pub mesh_granularity: String,
    /// Node label that names the location.
    #[arg(long, default_value = DEFAULT_TOPOLOGY_LABEL, value_parser = parse_label)]
    pub topology_label: String,
}

/// Directory of the file backend.
pub fn directory(flags: &Flags) -> Result<&Path> {
    flags.backend_dir.as_deref().context("--backend=file needs --backend-dir")
}

/// Reads all objects once; also returns the API server they were read from, if any.
pub async fn objects(flags: &Flags) -> Result<(Arc<Snapshot>, Option<Cluster>)> {
    match flags.backend {
        BackendKind::File => {
            let watch =
                FileBackend::start(directory(flags)?, &flags.mesh.shape.topology_label).await?.watch();
            let snapshot = Arc::clone(&watch.borrow());
            Ok((snapshot, None))
        }
        BackendKind::Kubernetes => {
            let cluster = Cluster::open(&flags.mesh.api).await?;
            let snapshot = cluster.snapshot(&flags.mesh.shape.topology_label).await?;
            Ok((Arc::new(snapshot), Some(cluster)))
        }
    }
}

/// [`objects`], but reports unusable objects on stderr.
pub async fn snapshot(flags: &Flags) -> Result<(Arc<Snapshot>, Option<Cluster>)> {
    let (snapshot, cluster) = objects(flags).await?;
    for (object, problem) in &snapshot.problems {
        eprintln!("kgctl: {}", terminal::plain(&format!("{object}: {problem}")));
    }
    Ok((snapshot, cluster))
}

/// The value of `--mesh-granularity`; with `auto`, that of the nodes.
pub fn granularity(snapshot: &Snapshot, flags: &ShapeFlags) -> Result<Granularity> {
    match flags.mesh_granularity.as_str() {
        "auto" => Ok(snapshot.nodes.iter().find_map(|node| node.granularity).unwrap_or_default()),
        text => text.parse::<Granularity>().map_err(|error| anyhow::anyhow!("{error}, auto")),
    }
}

/// Names of the nodes that take part at this time (Unix seconds).
pub fn ready(snapshot: &Snapshot, now: i64) -> BTreeSet<&str> {
    let ready = snapshot.nodes.iter().filter(|node| topology::ready_at(*node, now));
    ready.map(|node| node.node.name.as_str()).collect()
}

/// The current mesh.
pub fn mesh(snapshot: &Snapshot, flags: &MeshFlags) -> Result<Mesh> {
    mesh_of(snapshot, flags, &ready(snapshot, Timestamp::now().0))
}

/// The mesh of these nodes; all others count as lost.
pub fn mesh_of(snapshot: &Snapshot, flags: &MeshFlags, ready: &BTreeSet<&str>) -> Result<Mesh> {
    let (nodes, lost): (Vec<_>, Vec<_>) =
        snapshot.nodes.iter().map(|known| known.node).partition(|node| ready.contains(node.name.as_str()));
    let granularity = granularity(snapshot, &flags.shape)?;
    let mesh = Mesh::new(nodes.into_iter().map(|node| &**node), &snapshot.peers, granularity, flags.subnet);
    Ok(mesh.with_lost(lost))
}
