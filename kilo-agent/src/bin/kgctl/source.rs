//! Where the commands' objects come from.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use clap::Args;
use ipnet::IpNet;
use kilo_agent::{
    backend::{Backend as _, file::FileBackend, kubernetes},
    cli::{BackendKind, parse_cidr, parse_label, parse_port},
    status::Timestamp,
};
use kilo_core::{
    objects::Snapshot,
    settings::Granularity,
    topology::{self, Mesh},
};

#[derive(Args, Debug)]
pub struct Flags {
    /// Source of nodes and peers: kubernetes or file.
    #[arg(long, default_value = "kubernetes", global = true)]
    pub backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR", global = true)]
    pub backend_dir: Option<PathBuf>,
    /// Kubernetes configuration; default: $KUBECONFIG, else ~/.kube/config.
    #[arg(long, value_name = "FILE", global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// auto (what the nodes say), location, full or cross.
    #[arg(long, default_value = "auto", global = true)]
    pub mesh_granularity: String,
    /// WireGuard port of configurations for nodes, and of connect.
    #[arg(long, default_value = "51820", value_parser = parse_port, global = true)]
    pub port: u16,
    /// CIDR from which WireGuard addresses are allocated.
    #[arg(long, default_value = "10.4.0.0/16", value_parser = parse_cidr, global = true)]
    pub subnet: IpNet,
    /// Node label that names the location.
    #[arg(long, default_value = "topology.kubernetes.io/region", value_parser = parse_label, global = true)]
    pub topology_label: String,
}

/// Directory of the file backend.
pub fn directory(flags: &Flags) -> Result<&Path> {
    flags.backend_dir.as_deref().context("--backend=file needs --backend-dir")
}

/// Reads all objects once.
pub async fn snapshot(flags: &Flags) -> Result<Arc<Snapshot>> {
    let watch = match flags.backend {
        BackendKind::File => FileBackend::start(directory(flags)?, &flags.topology_label).await?.watch(),
        BackendKind::Kubernetes => {
            let client = kubernetes::client(flags.kubeconfig.as_deref(), None).await?;
            kubernetes::KubernetesBackend::start(client, None, &flags.topology_label).await?.watch()
        }
    };
    Ok(Arc::clone(&watch.borrow()))
}

/// Says on stderr which objects cannot be used.
pub fn warn(snapshot: &Snapshot) {
    for (object, problem) in &snapshot.problems {
        eprintln!("kgctl: {object}: {problem}");
    }
}

/// What `--mesh-granularity` says, or else the nodes.
pub fn granularity(snapshot: &Snapshot, flags: &Flags) -> Result<Granularity> {
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

/// The mesh as it is now.
pub fn mesh(snapshot: &Snapshot, flags: &Flags) -> Result<Mesh> {
    let ready = ready(snapshot, Timestamp::now().0);
    let nodes =
        snapshot.nodes.iter().map(|known| &**known.node).filter(|node| ready.contains(node.name.as_str()));
    Ok(Mesh::new(nodes, &snapshot.peers, granularity(snapshot, flags)?, flags.subnet))
}
