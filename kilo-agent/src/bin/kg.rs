//! `kg`: the agent of a node.

use std::{
    io::IsTerminal as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use ipnet::IpNet;
use kilo_agent::{
    agent::{self, Agent},
    backend::{Backend, BackendError, file::FileBackend, kubernetes, patient::Patient},
    cli::{
        AttachMode, BackendKind, Compatibility, LogLevel, Masquerade, TunnelMode, WireguardMode,
        parse_duration, parse_listen,
    },
    dataplane::BPFFS,
    health::Health,
    http, interface,
    last_good::{self, LastGood},
    metrics::Metrics,
    net::mtu::Mtu,
    topology::{Encapsulate, Granularity, Settings},
    wireguard::{private_key, userspace},
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// Where the private key is.
const KEY_PATH: &str = "/var/lib/kilo/key";
/// An API server that has not answered by then is not waited for, if there is
/// a topology to start with.
const SHORT_WAIT: Duration = Duration::from_secs(3);

/// Joins this node to the others' network: WireGuard between locations, TC
/// programs inside them.
#[derive(Parser, Debug)]
#[command(name = "kg", version, disable_version_flag = true, args_conflicts_with_subcommands = false)]
struct Cli {
    /// Print the version.
    #[arg(long, short = 'V', action = clap::ArgAction::Version)]
    version: Option<bool>,
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print the version.
    Version,
    /// Print a completion script.
    Completion {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
    /// Remove everything the agent set up on this node, annotations too.
    Uninstall,
    /// Run the userspace WireGuard device (started by the agent itself).
    #[command(name = userspace::SUBCOMMAND, hide = true)]
    UserspaceWireguard {
        /// Interface to make.
        interface: String,
    },
}

#[derive(Args, Debug)]
struct Flags {
    /// How programs are attached: auto (TCX, else clsact), tcx or clsact.
    #[arg(long, default_value = "auto")]
    attach: AttachMode,
    /// Where nodes and peers come from: kubernetes or file.
    #[arg(long, default_value = "kubernetes", global = true)]
    backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR", global = true)]
    backend_dir: Option<PathBuf>,
    /// Remove what the agent set up when it stops and its node no longer exists.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    clean_up: bool,
    /// Also delete the WireGuard interface then.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    clean_up_interface: bool,
    /// Create the WireGuard interface; else it must exist.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", global = true)]
    create_interface: bool,
    /// Write the node's pod CIDRs into the CNI configuration; masquerade its pods.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    cni: bool,
    /// CNI configuration list.
    #[arg(long, value_name = "FILE", default_value = "/etc/cni/net.d/10-kilo.conflist")]
    cni_path: PathBuf,
    /// The CNI that manages routes inside a location: flannel or cilium.
    #[arg(long, default_value = "", hide_default_value = true)]
    compatibility: Compatibility,
    /// When packets inside a location are encapsulated: never, crosssubnet or always.
    #[arg(long, default_value = "always")]
    encapsulate: Encapsulate,
    /// Name of this node; default: the host's.
    #[arg(long, default_value = "", hide_default_value = true, global = true)]
    hostname: String,
    /// The WireGuard interface.
    #[arg(long, default_value = "kilo0", global = true)]
    interface: String,
    /// Only addresses in these ranges are private addresses of the node (repeatable).
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    internal_cidr: Vec<IpNet>,
    /// Let traffic of local pods pass a FORWARD policy DROP (accepted; not done yet).
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    iptables_forward_rules: bool,
    /// Kubernetes configuration; default: in-cluster.
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true, global = true)]
    kubeconfig: String,
    /// Address of the Kubernetes API server; overrides the configuration's.
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true, global = true)]
    master: String,
    /// Address of health, metrics and graph.
    #[arg(long, default_value = ":1107", value_parser = parse_listen)]
    listen: SocketAddr,
    /// Manage routes inside the location.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    local: bool,
    /// all, debug, info, warn, error or none.
    #[arg(long, default_value = "info", global = true)]
    log_level: LogLevel,
    /// Who masquerades: ebpf or off.
    #[arg(long, default_value = "ebpf")]
    masquerade: Masquerade,
    /// Which nodes are meshed directly: location or full.
    #[arg(long, default_value = "location")]
    mesh_granularity: Granularity,
    /// Outer header inside a location: auto (vxlan beside another CNI, else ipip), ipip, vxlan or none. Every
    /// node understands all of them.
    #[arg(long, default_value = "auto")]
    tunnel: TunnelMode,
    /// MTU of the WireGuard interface: auto or bytes.
    #[arg(long, default_value = "auto")]
    mtu: Mtu,
    /// WireGuard port.
    #[arg(long, default_value = "51820", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Prefer the private address as endpoint.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    prioritise_private_addresses: bool,
    /// How often everything is checked although nothing seems to have changed.
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    resync_period: Duration,
    /// Service ranges, never masqueraded (repeatable).
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    service_cidr: Vec<IpNet>,
    /// WireGuard addresses come from here.
    #[arg(long, default_value = "10.4.0.0/16")]
    subnet: IpNet,
    /// Node label that names the location.
    #[arg(long, default_value = "topology.kubernetes.io/region", global = true)]
    topology_label: String,
    /// WireGuard implementation: auto, kernel or userspace.
    #[arg(long, default_value = "auto", global = true)]
    wireguard: WireguardMode,
}

fn main() -> ExitCode {
    if let Some(tables) = kilo_agent::flag_table::if_asked(Cli::command) {
        print!("{tables}");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kg: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match cli.command {
        Some(Command::Version) => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Some(Command::Completion { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "kg", &mut std::io::stdout());
            Ok(())
        }
        Some(Command::UserspaceWireguard { interface }) => {
            Ok(runtime()?.block_on(userspace::run(&interface)).context("userspace WireGuard")?)
        }
        Some(Command::Uninstall) => {
            log_to_stdout(cli.flags.log_level);
            runtime()?.block_on(uninstall(&cli.flags))
        }
        None => {
            log_to_stdout(cli.flags.log_level);
            // The interface is named by the kernel's rules; ours stay below its length.
            runtime()?.block_on(serve(cli.flags))
        }
    }
}

fn log_to_stdout(level: LogLevel) {
    use tracing_subscriber::{EnvFilter, fmt, prelude::*};
    // Libraries speak only when everything is asked for.
    let filter = match level {
        LogLevel::All | LogLevel::None => level.directive().to_owned(),
        level => format!("warn,kilo_agent={0},kilo_ebpf={0}", level.directive()),
    };
    let registry = tracing_subscriber::registry().with(EnvFilter::new(filter));
    if std::io::stdout().is_terminal() {
        registry.with(fmt::layer()).init();
    } else {
        registry.with(fmt::layer().json().flatten_event(true)).init();
    }
}

fn hostname(flags: &Flags) -> Result<String> {
    if !flags.hostname.is_empty() {
        return Ok(flags.hostname.clone());
    }
    let name = nix::unistd::gethostname().context("the host's name")?;
    name.into_string().map_err(|name| anyhow::anyhow!("the host's name {name:?} is no text; set --hostname"))
}

/// A lock that dies with the process: an abstract socket of this network namespace.
fn lock(interface: &str) -> Result<std::os::unix::net::UnixListener> {
    use std::os::linux::net::SocketAddrExt as _;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(format!("kilo-agent/{interface}"))?;
    std::os::unix::net::UnixListener::bind_addr(&address).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("an agent for interface {interface} already runs on this node; stop it first")
        }
        _ => error.into(),
    })
}

fn interface_options(flags: &Flags) -> Result<interface::Options> {
    if flags.interface.is_empty() || flags.interface.len() > 15 || flags.interface.contains('/') {
        bail!("--interface {:?}: use 1 to 15 characters without a slash", flags.interface);
    }
    Ok(interface::Options {
        name: flags.interface.clone(),
        mode: flags.wireguard,
        create: flags.create_interface,
        executable: std::env::current_exe().context("path of this program")?,
    })
}

fn options(flags: &Flags) -> Result<agent::Options> {
    Ok(agent::Options {
        hostname: hostname(flags)?,
        interface: interface_options(flags)?,
        settings: Settings {
            granularity: flags.mesh_granularity,
            encapsulate: flags.encapsulate,
            tunnel: flags.tunnel.decide(flags.compatibility),
            local: flags.local,
            cni: flags.cni,
            subnet: flags.subnet.trunc(),
            service_cidrs: flags.service_cidr.clone(),
            port: flags.port,
        },
        mtu: flags.mtu,
        resync: flags.resync_period,
        internal_cidrs: flags.internal_cidr.clone(),
        prefer_private: flags.prioritise_private_addresses,
        cni: flags.cni.then(|| flags.cni_path.clone()),
        cni_beside: flags.compatibility.cni(),
        masquerade: flags.masquerade == Masquerade::Ebpf,
        bpffs: PathBuf::from(BPFFS),
        attach: flags.attach,
        debug: matches!(flags.log_level, LogLevel::All | LogLevel::Debug),
    })
}

fn directory(flags: &Flags) -> Result<&Path> {
    flags.backend_dir.as_deref().context("--backend=file needs --backend-dir")
}

fn text(flag: &str) -> Option<&str> {
    Some(flag).filter(|text| !text.is_empty())
}

async fn serve(flags: Flags) -> Result<()> {
    let options = options(&flags)?;
    let _lock = lock(&flags.interface)?;
    if flags.iptables_forward_rules {
        tracing::warn!("--iptables-forward-rules is accepted, but rules are not written yet");
    }
    match flags.backend {
        BackendKind::File => {
            let backend = FileBackend::start(directory(&flags)?, &flags.topology_label).await?;
            work(flags, options, backend, None).await
        }
        BackendKind::Kubernetes => {
            let path = text(&flags.kubeconfig).map(PathBuf::from);
            let client = kubernetes::client(path.as_deref(), text(&flags.master)).await?;
            let (hostname, label) = (options.hostname.clone(), flags.topology_label.clone());
            let start = async move { start_patiently(client, &hostname, &label).await };
            serve_kubernetes(flags, options, start).await
        }
    }
}

/// Starts with the API server, or, when it does not answer soon, with the
/// topology on disk.
async fn serve_kubernetes(
    flags: Flags,
    options: agent::Options,
    start: impl Future<Output = Result<kubernetes::KubernetesBackend, BackendError>> + Send + 'static,
) -> Result<()> {
    let mut start = Box::pin(start);
    let path = PathBuf::from(last_good::DEFAULT_PATH);
    let known = last_good::load(&path, &options.hostname).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "the topology on disk is ignored");
        None
    });
    let backend = match (tokio::time::timeout(SHORT_WAIT, &mut start).await, &known) {
        (Ok(backend), _) => backend?,
        (Err(_), None) => start.await?,
        (Err(_), Some(topology)) => {
            tracing::warn!(
                nodes = topology.nodes.len(),
                peers = topology.peers.len(),
                "the API server does not answer; starting with the topology on disk"
            );
            let backend = Patient::start(topology.clone().into_snapshot(), start);
            return work(flags, options, backend, Some(Keep { path, known })).await;
        }
    };
    work(flags, options, backend, Some(Keep { path, known })).await
}

/// The file to keep the topology in.
struct Keep {
    path: PathBuf,
    known: Option<LastGood>,
}

/// An API server that is away is waited for: traffic goes on meanwhile.
async fn start_patiently(
    client: kube::Client,
    hostname: &str,
    topology_label: &str,
) -> Result<kubernetes::KubernetesBackend, BackendError> {
    loop {
        match kubernetes::KubernetesBackend::start(client.clone(), Some(hostname), topology_label).await {
            Err(error) if error.is_temporary() => {
                tracing::warn!(%error, "the API server does not answer; trying again");
                tokio::time::sleep(Duration::from_secs(5).mul_f64(rand::random_range(0.8..1.2))).await;
            }
            other => return other,
        }
    }
}

async fn work<B: Backend>(
    flags: Flags,
    options: agent::Options,
    backend: B,
    keep: Option<Keep>,
) -> Result<()> {
    let key = private_key::load_or_create(Path::new(KEY_PATH))?;
    let metrics = Metrics::default();
    // Three resync periods, and never less than a check-in takes.
    let patience = (flags.resync_period * 3).max(Duration::from_secs(90));
    let health = Health::new(Instant::now(), patience);
    let (view, view_reader) = tokio::sync::watch::channel(Arc::default());
    let keeping = keep.map(|keep| last_good::keep(keep.path, keep.known, view_reader.clone()));
    let context = http::Context {
        health: health.clone(),
        metrics: metrics.clone(),
        view: view_reader,
        graphviz: http::Graphviz::default(),
    };
    let stop = CancellationToken::new();
    let snapshots = backend.watch();
    let hostname = options.hostname.clone();
    let agent = Agent::new(options, backend, key, metrics, health, view).await?;
    let listen = flags.listen;
    let listener = http::bind(listen).await.with_context(|| format!("--listen {listen}"))?;
    let answer = move |request| context.clone().answer(request);
    let _keeping = keeping.map(|keeping| AbortOnDropHandle::new(tokio::spawn(keeping)));
    let mut server = tokio::spawn(http::serve(listener, None, answer, stop.clone()));
    let mut agent = tokio::spawn(agent.run(stop.clone()));
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = hostname, %listen, "kg runs");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        ended = &mut agent => return ended.context("the reconcile loop panicked")?.map_err(Into::into),
        ended = &mut server => return ended.context("the HTTP server panicked"),
    }
    stop.cancel();
    agent.await.context("the reconcile loop panicked")??;
    // A restart or an upgrade must not interrupt traffic: programs, routes and
    // annotations stay for the next agent, unless the node has left the cluster.
    let gone = !snapshots.borrow().nodes.contains_key(&hostname);
    if flags.clean_up && gone {
        tracing::info!("the node no longer exists; cleaning up");
        return uninstall(&flags).await;
    }
    tracing::info!("kg stops; traffic goes on, `kg uninstall` removes everything");
    Ok(())
}

async fn uninstall(flags: &Flags) -> Result<()> {
    let options = interface_options(flags)?;
    let hostname = hostname(flags)?;
    let _lock = lock(&flags.interface);
    let bpffs = Path::new(BPFFS);
    let mut problems = match flags.backend {
        BackendKind::File => {
            let backend = FileBackend::start(directory(flags)?, &flags.topology_label).await?;
            agent::uninstall(Some(&backend), &hostname, &options, bpffs).await
        }
        BackendKind::Kubernetes => {
            let path = text(&flags.kubeconfig).map(PathBuf::from);
            let client = kubernetes::client(path.as_deref(), text(&flags.master)).await;
            let backend = match client {
                Ok(client) => {
                    kubernetes::KubernetesBackend::start(client, Some(&hostname), &flags.topology_label).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = &backend {
                // The host is cleaned although the API is out of reach.
                tracing::warn!(%error, "annotations stay");
            }
            agent::uninstall(backend.ok().as_ref(), &hostname, &options, bpffs).await
        }
    };
    if let Err(error) = last_good::remove(Path::new(last_good::DEFAULT_PATH)) {
        problems.push(error.to_string());
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!("not everything could be removed:\n{}", problems.join("\n"))
}
