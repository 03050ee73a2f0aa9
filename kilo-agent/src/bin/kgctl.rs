//! `kgctl`: shows configurations of the mesh and draws it.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use kilo_agent::{
    backend::{Backend as _, Snapshot, file::FileBackend, kubernetes, peer},
    cli::BackendKind,
    topology::{self, Granularity, Mesh, Peer, Segment},
    wireguard::conf::{self, Conf, PeerSection},
};

/// Shows configurations of the mesh and draws it.
#[derive(Parser, Debug)]
#[command(name = "kgctl", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Args, Debug)]
struct Flags {
    /// Where nodes and peers come from: kubernetes or file.
    #[arg(long, default_value = "kubernetes", global = true)]
    backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR", global = true)]
    backend_dir: Option<PathBuf>,
    /// Kubernetes configuration; default: $KUBECONFIG, else ~/.kube/config.
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// auto (what the nodes say), location or full.
    #[arg(long, default_value = "auto", global = true)]
    mesh_granularity: String,
    /// WireGuard port of configurations for nodes.
    #[arg(long, default_value = "51820", global = true)]
    port: u16,
    /// WireGuard addresses come from here.
    #[arg(long, default_value = "10.4.0.0/16", global = true)]
    subnet: IpNet,
    /// Node label that names the location.
    #[arg(long, default_value = "topology.kubernetes.io/region", global = true)]
    topology_label: String,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Draw the mesh as Graphviz text.
    Graph,
    /// Show the WireGuard configuration of a node or peer.
    Showconf {
        #[command(subcommand)]
        of: Showconf,
    },
    /// Print a completion script.
    Completion {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
}

#[derive(Subcommand, Debug)]
enum Showconf {
    /// Of a node that leads its location.
    Node(ShowconfArgs),
    /// Of a VPN peer.
    Peer(ShowconfArgs),
}

#[derive(Args, Debug)]
struct ShowconfArgs {
    /// Name of the node or peer.
    name: String,
    /// Describe it as a peer of somebody else.
    #[arg(long)]
    as_peer: bool,
    /// Format of --as-peer.
    #[arg(long, short, default_value = "wireguard")]
    output: Output,
    /// Allowed IPs to add to --as-peer.
    #[arg(long, value_delimiter = ',')]
    allowed_ips: Vec<IpNet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// WireGuard's INI.
    Wireguard,
    /// A Peer object.
    Yaml,
    /// A Peer object.
    Json,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Completion { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "kgctl", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(cli))) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kgctl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<String> {
    let snapshot = snapshot(&cli.flags).await?;
    let mesh = mesh(&snapshot, &cli.flags)?;
    match cli.command {
        Command::Graph => Ok(topology::dot(&mesh)),
        Command::Showconf { of: Showconf::Node(args) } => showconf_node(&mesh, &snapshot, &cli.flags, &args),
        Command::Showconf { of: Showconf::Peer(args) } => showconf_peer(&mesh, &args),
        Command::Completion { .. } => Ok(String::new()),
    }
}

async fn snapshot(flags: &Flags) -> Result<Arc<Snapshot>> {
    let watch = match flags.backend {
        BackendKind::File => {
            let directory = flags.backend_dir.as_deref().context("--backend=file needs --backend-dir")?;
            FileBackend::start(directory, &flags.topology_label).await?.watch()
        }
        BackendKind::Kubernetes => {
            let client = kubernetes::client(flags.kubeconfig.as_deref(), None).await?;
            kubernetes::KubernetesBackend::start(client, None, &flags.topology_label).await?.watch()
        }
    };
    let snapshot = Arc::clone(&watch.borrow());
    for (object, problem) in &snapshot.problems {
        eprintln!("kgctl: {object}: {problem}");
    }
    Ok(snapshot)
}

fn mesh(snapshot: &Snapshot, flags: &Flags) -> Result<Mesh> {
    let granularity = match flags.mesh_granularity.as_str() {
        "auto" => snapshot.nodes.values().find_map(|node| node.granularity).unwrap_or_default(),
        text => text.parse::<Granularity>().map_err(|error| anyhow::anyhow!("{error}, auto"))?,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let ready = snapshot.nodes.values().filter(|node| topology::ready_at(node, now));
    Ok(Mesh::new(ready, &snapshot.peers, granularity, flags.subnet))
}

fn showconf_node(mesh: &Mesh, snapshot: &Snapshot, flags: &Flags, args: &ShowconfArgs) -> Result<String> {
    let node =
        snapshot.nodes.get(&args.name).with_context(|| format!("node {:?} does not exist", args.name))?;
    let Some((own, _)) = mesh.find(&args.name) else {
        bail!(
            "node {:?} is not ready: it needs an endpoint, a key, a pod CIDR and a recent last-seen",
            args.name
        );
    };
    if !mesh.leads(&args.name) {
        let leader = mesh.segments[own].leading().map_or("", |leader| &leader.name);
        bail!("node {:?} does not lead its location, {leader:?} does", args.name);
    }
    let mesh = mesh.clone().seen_by(&node.discovered_endpoints);
    let segment = &mesh.segments[own];
    if args.as_peer {
        return as_peer(
            &args.name,
            with_allowed_ips(conf::as_peer(segment), segment, &args.allowed_ips),
            args.output,
        );
    }
    only_wireguard(args)?;
    // The private key never leaves the node; WireGuard's tools take the line as a reminder.
    let conf = conf::of_node(
        &mesh,
        own,
        kilo_agent::wireguard::key::SecretKey::from_bytes([0; 32]),
        flags.port,
        node.persistent_keepalive,
    );
    Ok(format!("[Interface]\nListenPort = {}\n\n{}", flags.port, Conf { interface: None, ..conf }.to_ini()))
}

fn showconf_peer(mesh: &Mesh, args: &ShowconfArgs) -> Result<String> {
    let peer = mesh.peers.iter().find(|peer| peer.name == args.name);
    let peer = peer.with_context(|| {
        let names: Vec<_> = mesh.peers.iter().map(|peer| peer.name.as_str()).collect();
        format!("peer {:?} does not exist or is invalid; there are: {}", args.name, names.join(", "))
    })?;
    if args.as_peer {
        let mut allowed_ips = peer.allowed_ips.clone();
        allowed_ips.extend(&args.allowed_ips);
        let section = PeerSection {
            allowed_ips,
            endpoint: peer.endpoint.clone(),
            persistent_keepalive: peer.persistent_keepalive,
            preshared_key: peer.preshared_key,
            public_key: peer.public_key,
        };
        return as_peer(&args.name, without_duplicates(section), args.output);
    }
    only_wireguard(args)?;
    let conf = conf::of_peer(mesh, &args.name).context("the peer has gone")?;
    Ok(conf.to_ini())
}

fn only_wireguard(args: &ShowconfArgs) -> Result<()> {
    if args.output != Output::Wireguard || !args.allowed_ips.is_empty() {
        bail!("--output and --allowed-ips go with --as-peer");
    }
    Ok(())
}

fn with_allowed_ips(section: PeerSection, segment: &Segment, more: &[IpNet]) -> PeerSection {
    let allowed_ips = segment.allowed_ips.iter().chain(more).copied().collect();
    without_duplicates(PeerSection { allowed_ips, ..section })
}

fn without_duplicates(section: PeerSection) -> PeerSection {
    let mut seen = std::collections::BTreeSet::new();
    let allowed_ips = section.allowed_ips.iter().copied().filter(|prefix| seen.insert(*prefix)).collect();
    PeerSection { allowed_ips, ..section }
}

fn as_peer(name: &str, section: PeerSection, output: Output) -> Result<String> {
    let object = peer::to_object(&Peer {
        name: name.to_owned(),
        allowed_ips: section.allowed_ips.clone(),
        endpoint: section.endpoint.clone(),
        persistent_keepalive: section.persistent_keepalive,
        preshared_key: section.preshared_key,
        public_key: section.public_key,
    });
    match output {
        Output::Wireguard => Ok(Conf { interface: None, peers: vec![section] }.to_ini()),
        Output::Yaml => Ok(serde_yaml_ng::to_string(&object)?),
        Output::Json => Ok(serde_json::to_string_pretty(&object)? + "\n"),
    }
}
