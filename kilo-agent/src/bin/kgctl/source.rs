//! The source of the commands' objects.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Result, anyhow};
use clap::Args;
use ipnet::IpNet;
use kilo_agent::{
    backend::{Backend as _, file::FileBackend},
    cli::{BackendMismatch, OrAuto, objects_directory, parse_label, parse_port, parse_subnet},
    status::{self, Status},
    timestamp::Timestamp,
};
use kilo_core::{
    objects::Snapshot,
    settings::{BackendKind, Granularity, defaults},
    topology::{self, Mesh, Node, SubnetsDiffer, published_subnet},
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
    /// CIDR from which WireGuard addresses are allocated: auto (that of the nodes' wireguard-ip, else 10.4.0.0/16) or
    /// the agents' --subnet.
    #[arg(long, default_value = "auto", value_parser = parse_subnet)]
    pub subnet: OrAuto<IpNet>,
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
    pub mesh_granularity: OrAuto<Granularity>,
    /// Node label that names the location.
    #[arg(long, default_value = defaults::TOPOLOGY_LABEL, value_parser = parse_label)]
    pub topology_label: String,
}

/// `--port` of a command that needs no port: all commands of Kilo's own `kgctl` have the flag.
#[derive(Args, Clone, Debug)]
pub struct UnusedPort {
    #[arg(long = "port", hide = true, value_parser = parse_port)]
    _port: Option<u16>,
}

/// The directory of the objects; `None`: they are read from an API server.
pub fn directory(flags: &Flags) -> Result<Option<&Path>, BackendMismatch> {
    objects_directory(flags.backend, flags.backend_dir.as_deref())
}

/// Reads all objects once; also returns the API server they were read from, if any.
pub async fn objects(flags: &Flags) -> Result<(Arc<Snapshot>, Option<Cluster>)> {
    let label = &flags.mesh.shape.topology_label;
    if let Some(directory) = directory(flags)? {
        let watch = FileBackend::start(directory, label).await?.watch();
        let snapshot = Arc::clone(&watch.borrow());
        return Ok((snapshot, None));
    }
    let cluster = Cluster::open(&flags.mesh.api).await?;
    let snapshot = cluster.snapshot(label).await?;
    Ok((Arc::new(snapshot), Some(cluster)))
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
pub fn granularity(snapshot: &Snapshot, flags: &ShapeFlags) -> Granularity {
    match flags.mesh_granularity {
        OrAuto::Auto => snapshot.nodes.iter().find_map(|node| node.granularity).unwrap_or_default(),
        OrAuto::Given(granularity) => granularity,
    }
}

/// The value of `--subnet`; with `auto`, that of the nodes.
fn subnet(snapshot: &Snapshot, flags: &MeshFlags, ready: &BTreeSet<&str>) -> Result<IpNet, SubnetsDiffer> {
    if let OrAuto::Given(subnet) = flags.subnet {
        return Ok(subnet.trunc());
    }
    let all = || snapshot.nodes.iter().map(|known| &**known.node);
    let is_ready = |node: &&Node| ready.contains(node.name.as_str());
    let published = published_subnet(all().filter(is_ready))?;
    // Nodes that are lost may be of an earlier subnet, but without any other they are all there is to go by.
    let lost = || all().find_map(|node| node.wireguard_ip).map(|address| address.trunc());
    Ok(published.or_else(lost).unwrap_or(defaults::SUBNET))
}

/// Names of the nodes that take part at this time (Unix seconds).
pub fn ready(snapshot: &Snapshot, now: i64) -> BTreeSet<&str> {
    let ready = snapshot.nodes.iter().filter(|node| topology::ready_at(*node, now));
    ready.map(|node| node.node.name.as_str()).collect()
}

/// The status of a mesh at this time, as far as the objects show it.
pub fn status(mesh: &Mesh, snapshot: &Snapshot, flags: &ShapeFlags, now: Timestamp) -> Status {
    status::of_objects(mesh, snapshot, &ready(snapshot, now.0), granularity(snapshot, flags), now)
}

/// The current mesh.
pub fn mesh(snapshot: &Snapshot, flags: &MeshFlags) -> Result<Mesh> {
    mesh_of(snapshot, flags, &ready(snapshot, Timestamp::now().0))
}

/// [`mesh`] without the peers, and their prefixes, that belong to others: stderr names them, and says why.
pub fn mesh_in_use(snapshot: &Snapshot, flags: &MeshFlags) -> Result<Mesh> {
    let mut mesh = mesh(snapshot, flags)?;
    for (name, why) in topology::leave_out_unused(&mut mesh, snapshot) {
        eprintln!("kgctl: {}", terminal::plain(&format!("peer {name} {why}")));
    }
    Ok(mesh)
}

/// [`mesh`] for what is collected while things are wrong: where nodes contradict each other about the subnet, stderr
/// says so, and that of the first counts.
pub fn mesh_anyway(snapshot: &Snapshot, flags: &MeshFlags) -> Mesh {
    let ready = ready(snapshot, Timestamp::now().0);
    let subnet = subnet(snapshot, flags, &ready).unwrap_or_else(|differ| {
        eprintln!("kgctl: {}", terminal::plain(&differ.to_string()));
        differ.subnet
    });
    mesh_with(snapshot, flags, subnet, &ready)
}

/// The mesh of these nodes; all others count as lost.
pub fn mesh_of(snapshot: &Snapshot, flags: &MeshFlags, ready: &BTreeSet<&str>) -> Result<Mesh> {
    let subnet = subnet(snapshot, flags, ready).map_err(|differ| {
        anyhow!(
            "{differ}; give all agents the same --subnet, or choose one for this command, for example --subnet={}",
            differ.subnet
        )
    })?;
    Ok(mesh_with(snapshot, flags, subnet, ready))
}

fn mesh_with(snapshot: &Snapshot, flags: &MeshFlags, subnet: IpNet, ready: &BTreeSet<&str>) -> Mesh {
    let (nodes, lost): (Vec<_>, Vec<_>) =
        snapshot.nodes.iter().map(|known| known.node).partition(|node| ready.contains(node.name.as_str()));
    let granularity = granularity(snapshot, &flags.shape);
    let mesh = Mesh::new(nodes.into_iter().map(|node| &**node), &snapshot.peers, granularity, subnet);
    mesh.with_lost(lost)
}
