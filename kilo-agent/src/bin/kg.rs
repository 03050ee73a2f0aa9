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
    backend::{Backend, file::FileBackend, kubernetes, last_good},
    cli::{
        BackendKind, LogLevel, PageAccess, PrefixList, parse_bool, parse_cidr, parse_failover_interval,
        parse_label, parse_listen, parse_node_name, parse_period, parse_port, parse_secret,
    },
    failover,
    health::Health,
    http::{
        self,
        access::{self, Gate, LocalToken},
    },
    leaving::Leaving,
    metrics::Metrics,
    status::ask::LOCAL_TOKEN,
    webhook,
};
use kilo_core::{
    errors::error_chain,
    objects::Snapshot,
    settings::{
        AttachMode, Compatibility, Encapsulate, EndpointFrom, Failover, Granularity, Masquerade, Settings,
        TunnelMode, WireguardMode,
    },
};
use kilo_failover::Params;
use kilo_host::{
    cni::boot::BootConfiguration,
    dataplane::{self, BPFFS},
    interface,
    lock::{self, LockError},
    net::mtu::Mtu,
    wireguard::{private_key, userspace},
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Where the private key is.
const KEY_PATH: &str = "/var/lib/kilo/key";

/// Run the Kilo agent: joins this node to the mesh, with WireGuard between locations and TC
/// programs inside them.
#[derive(Parser, Debug)]
#[command(name = "kg", version, disable_version_flag = true, args_override_self = true)]
struct Cli {
    /// Print the version.
    #[arg(long, short = 'V')]
    version: bool,
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
    /// Run the admission webhook, which rejects invalid Peer objects.
    Webhook(WebhookArgs),
    /// Remove everything the agent set up on this node, including its annotations, and print what was removed. Fails while the agent runs.
    Uninstall(UninstallArgs),
    /// Run the userspace WireGuard device (started by the agent itself).
    #[command(name = userspace::SUBCOMMAND, hide = true)]
    UserspaceWireguard {
        /// Interface to make.
        interface: String,
    },
}

#[derive(Args, Debug)]
struct UninstallArgs {
    /// Keep the WireGuard interface with its peers and sessions, so that another agent can take it over.
    #[arg(long)]
    keep_interface: bool,
    /// Also remove the CNI configuration (--cni-path) and its bridge; pods of this node lose their network.
    #[arg(long)]
    remove_cni: bool,
}

#[derive(Args, Debug)]
struct WebhookArgs {
    /// Certificate chain in PEM; reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "key_file", required_unless_present = "secret")]
    cert_file: Option<PathBuf>,
    /// Private key of the certificate in PEM; reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// Secret in which the webhook keeps a certificate that it creates and renews itself, instead of --cert-file and --key-file.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = parse_secret, conflicts_with = "cert_file")]
    secret: Option<(String, String)>,
    /// With --secret: the Service of this webhook, in the same namespace.
    #[arg(long, value_name = "NAME", default_value = "peer-validation")]
    service: String,
    /// With --secret: the ValidatingWebhookConfiguration whose CA bundle is updated.
    #[arg(long, value_name = "NAME", default_value = "peers.kilo.squat.ai")]
    configuration: String,
    /// Address on which reviews are served: POST /validate over TLS.
    #[arg(long, default_value = ":8443", value_parser = parse_listen)]
    listen: SocketAddr,
    /// Address on which metrics and health are served.
    #[arg(long, default_value = ":1107", value_parser = parse_listen)]
    listen_metrics: SocketAddr,
}

#[derive(Args, Debug)]
struct Flags {
    /// How BPF programs are attached: auto (TCX if the kernel has it, otherwise clsact), tcx or clsact.
    #[arg(long, default_value = "auto")]
    attach: AttachMode,
    /// Source of nodes and peers: kubernetes or file.
    #[arg(long, default_value = "kubernetes", global = true)]
    backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR", global = true)]
    backend_dir: Option<PathBuf>,
    /// Remove what the agent set up when it stops and its Node object no longer exists. A restart removes nothing.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    clean_up: bool,
    /// With --clean-up, also delete the WireGuard interface.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    clean_up_interface: bool,
    /// Create the WireGuard interface if it does not exist.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool, global = true)]
    create_interface: bool,
    /// Write the node's pod CIDRs into the CNI configuration and masquerade its pods' traffic.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    cni: bool,
    /// Path of the CNI configuration list.
    #[arg(long, value_name = "FILE", default_value = "/etc/cni/net.d/10-kilo.conflist", global = true)]
    cni_path: PathBuf,
    /// CNI configuration to publish at --cni-path once the data path is up, valid until the next boot.
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    cni_source: String,
    /// Directory of the host that is empty after a boot, mounted at the same path; used by --cni-source.
    #[arg(long, value_name = "DIR", default_value = "/run/kilo")]
    cni_run_dir: PathBuf,
    /// CNI that manages routes inside a location: flannel or cilium.
    #[arg(long, default_value = "", hide_default_value = true)]
    compatibility: Compatibility,
    /// When to encapsulate packets inside a location: never, crosssubnet or always.
    #[arg(long, default_value = "always")]
    encapsulate: Encapsulate,
    /// Source of the WireGuard endpoint: auto (a public address of an interface, else the Node's
    /// ExternalIP, else a private address), interface or external-ip. The annotation force-endpoint overrides it.
    #[arg(long, default_value = "auto")]
    endpoint_from: EndpointFrom,
    /// Whether stand-bys take over from a leader that fails: auto (in locations of two nodes or more that can) or
    /// off. The same on every node.
    #[arg(long, default_value = "off")]
    failover: Failover,
    /// Interval between a stand-by's probes of its leader, 20ms to 1s; all times of failover follow it.
    #[arg(long, value_name = "DURATION", default_value = "40ms", value_parser = parse_failover_interval)]
    failover_interval: Params,
    /// Name of this node; defaults to the host name.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = parse_node_name, global = true)]
    hostname: String,
    /// Name of the WireGuard interface.
    #[arg(long, default_value = "kilo0", global = true)]
    interface: String,
    /// CIDRs in which the node's private address is looked for (comma separated, repeatable).
    #[arg(long, value_name = "CIDR")]
    internal_cidr: Vec<PrefixList>,
    /// Accept traffic of local pods in the FORWARD chains of iptables, whatever the chains' policy.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    iptables_forward_rules: bool,
    /// Path of the kubeconfig; defaults to the in-cluster configuration.
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true, global = true)]
    kubeconfig: String,
    /// Address of the Kubernetes API server; overrides the one in the kubeconfig.
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true, global = true)]
    master: String,
    /// Active leaders of each location with --failover=auto, 1 to 8: each of its nodes uses one of them. The same
    /// on every node of the mesh.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u8).range(1..=8))]
    leaders: u8,
    /// Address on which health, metrics and graph are served.
    #[arg(long, default_value = ":1107", value_parser = parse_listen)]
    listen: SocketAddr,
    /// Manage routes inside the location.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    local: bool,
    /// Log level: all, debug, info, warn, error or none.
    #[arg(long, default_value = "info", global = true)]
    log_level: LogLevel,
    /// Who masquerades: ebpf, nftables or off.
    #[arg(long, default_value = "ebpf")]
    masquerade: Masquerade,
    /// Which nodes are meshed directly: location, full or cross.
    #[arg(long, default_value = "location")]
    mesh_granularity: Granularity,
    /// Encapsulation inside a location: auto (vxlan beside another CNI, else ipip), ipip, vxlan or none. Every
    /// node understands all of them.
    #[arg(long, default_value = "auto")]
    tunnel: TunnelMode,
    /// MTU of the WireGuard interface: auto, or a number of bytes.
    #[arg(long, default_value = "auto")]
    mtu: Mtu,
    /// Who sees more than health and metrics at --listen: open (everybody who reaches it) or token (those with a
    /// bearer token that the API server accepts, and the right to get /status, /events, /graph or /).
    #[arg(long, default_value = "open")]
    page_access: PageAccess,
    /// UDP port of WireGuard.
    #[arg(long, default_value = "51820", value_parser = parse_port)]
    port: u16,
    /// Use the private address as the WireGuard endpoint.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    prioritise_private_addresses: bool,
    /// Interval between full resyncs.
    #[arg(long, default_value = "30s", value_parser = parse_period)]
    resync_period: Duration,
    /// CIDRs of services, to which traffic is never masqueraded (comma separated, repeatable).
    #[arg(long, value_name = "CIDR")]
    service_cidr: Vec<PrefixList>,
    /// CIDR from which WireGuard addresses are allocated.
    #[arg(long, default_value = "10.4.0.0/16", value_parser = parse_cidr)]
    subnet: IpNet,
    /// Nodes of a location that can take over from its leader, 0 to 4. The same on every node.
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u8).range(0..=4))]
    stand_bys: u8,
    /// Node label that names the location.
    #[arg(long, default_value = "topology.kubernetes.io/region", value_parser = parse_label, global = true)]
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
            eprintln!("kg: {}", error_chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    match cli.command.or(cli.version.then_some(Command::Version)) {
        Some(Command::Version) => {
            println!("{}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Some(Command::Completion { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "kg", &mut std::io::stdout());
            Ok(())
        }
        Some(Command::UserspaceWireguard { interface }) => {
            // The device goes with the process, and the agent makes another one.
            kilo_agent::health::end_on_panic(Duration::ZERO, |_| {});
            to_end(PACKETS, async { userspace::run(&interface).await.context("userspace WireGuard") })
        }
        Some(Command::Webhook(args)) => {
            log_to_stdout(cli.flags.log_level);
            to_end(EVENTS, serve_webhook(args))
        }
        Some(Command::Uninstall(args)) => {
            log_to_stdout(cli.flags.log_level);
            to_end(EVENTS, uninstall_alone(&cli.flags, &args))
        }
        None => {
            log_to_stdout(cli.flags.log_level);
            // The interface is named by the kernel's rules; ours stay below its length.
            to_end(EVENTS, serve(cli.flags))
        }
    }
}

/// Threads beside the main one. What waits for events needs one: a second would be
/// woken for each event of a watch, and find nothing to do.
const EVENTS: usize = 1;
const PACKETS: usize = 2;

/// Runs to the end with so many threads beside this one, and does not wait for what
/// goes on there: a name server that is silent would hold up the stop.
fn to_end(threads: usize, work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}

fn log_to_stdout(level: LogLevel) {
    use tracing_subscriber::{EnvFilter, fmt, prelude::*};
    // Libraries speak only when everything is asked for.
    let filter = match level {
        LogLevel::All | LogLevel::None => level.directive().to_owned(),
        level => {
            format!("warn,kg={0},kilo_agent={0},kilo_core={0},kilo_host={0},kilo_ebpf={0}", level.directive())
        }
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
    let name = name.into_string().map_err(|name| {
        anyhow::anyhow!("the host's name {} is not valid UTF-8; set --hostname", name.display())
    })?;
    // Names of Node objects are lower case; the kubelet does the same.
    Ok(name.to_lowercase())
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
    if flags.leaders > 1 && flags.failover == Failover::Off {
        bail!("--leaders={} needs --failover=auto: active leaders watch each other", flags.leaders);
    }
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
            service_cidrs: PrefixList::join(&flags.service_cidr),
            port: flags.port,
        },
        mtu: flags.mtu,
        compatibility: flags.compatibility,
        resync: flags.resync_period,
        internal_cidrs: PrefixList::join(&flags.internal_cidr),
        endpoint_from: flags.endpoint_from,
        prefer_private: flags.prioritise_private_addresses,
        cni: flags.cni.then(|| flags.cni_path.clone()),
        cni_boot: text(&flags.cni_source).filter(|_| flags.cni).map(|source| BootConfiguration {
            source: PathBuf::from(source),
            path: flags.cni_path.clone(),
            directory: flags.cni_run_dir.clone(),
        }),
        masquerade: flags.masquerade,
        bpffs: PathBuf::from(BPFFS),
        attach: flags.attach,
        // A directory of files is there at every start.
        last_good: (flags.backend == BackendKind::Kubernetes).then(last_good_path),
        forward_rules: flags.iptables_forward_rules,
        debug: matches!(flags.log_level, LogLevel::All | LogLevel::Debug),
        failover: (flags.failover == Failover::Auto).then(|| failover::Options {
            stand_bys: usize::from(flags.stand_bys),
            leaders: usize::from(flags.leaders),
            params: flags.failover_interval.clone(),
        }),
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
    let _lock = lock::interface(Path::new(lock::STATE), &flags.interface)?;
    let mut leaving = Leaving::begin(&options.bpffs);
    let startup = agent::begin(&options);
    match flags.backend {
        BackendKind::File => {
            if flags.page_access == PageAccess::Token {
                bail!("--page-access=token asks an API server about tokens, and --backend=file has none");
            }
            let backend = FileBackend::start(directory(&flags)?, &flags.topology_label).await?;
            LocalToken::remove(Path::new(LOCAL_TOKEN));
            work(flags, options, backend, startup, leaving, Gate::Open).await
        }
        BackendKind::Kubernetes => {
            let path = text(&flags.kubeconfig).map(PathBuf::from);
            let client = kubernetes::client(path.as_deref(), text(&flags.master)).await?;
            leaving.ask(client.clone());
            let hostname = options.hostname.clone();
            let label = &flags.topology_label;
            let gate = gate(flags.page_access, &client)?;
            let remembered = || last_good_topology(&hostname);
            let backend = kubernetes::StartupFallback::start(client, &hostname, label, remembered).await?;
            work(flags, options, backend, startup, leaving, gate).await
        }
    }
}

/// Who may see the page.
fn gate(access: PageAccess, client: &kube::Client) -> Result<Gate> {
    let path = Path::new(LOCAL_TOKEN);
    match access {
        PageAccess::Open => {
            LocalToken::remove(path);
            Ok(Gate::Open)
        }
        PageAccess::Token => {
            let local = LocalToken::create(path).with_context(|| LOCAL_TOKEN.to_owned())?;
            Ok(Gate::token(access::through_api(client.clone()), local))
        }
    }
}

async fn serve_webhook(args: WebhookArgs) -> Result<()> {
    let source = match (args.secret, args.cert_file, args.key_file) {
        (Some((namespace, secret)), _, _) => webhook::Source::Secret(webhook::Place {
            namespace,
            secret,
            service: args.service,
            configuration: args.configuration,
        }),
        (None, Some(certificate), Some(key)) => webhook::Source::Files { certificate, key },
        (None, _, _) => bail!("--secret or --cert-file and --key-file must be given"),
    };
    let options = webhook::Options {
        source,
        listen: args.listen,
        listen_metrics: args.listen_metrics,
        reload: Duration::from_secs(5),
    };
    let stop = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        told.cancel();
    });
    Ok(webhook::run(options, stop).await?)
}

/// What an earlier agent left, for a start without API server.
fn last_good_topology(hostname: &str) -> Option<Snapshot> {
    last_good::load(&last_good_path(), hostname).unwrap_or_else(|error| {
        tracing::warn!(path = %last_good_path().display(), %error, "ignoring the saved topology");
        None
    })
}

fn last_good_path() -> PathBuf {
    Path::new(KEY_PATH).with_file_name(last_good::FILE)
}

async fn work<B: Backend>(
    flags: Flags,
    options: agent::Options,
    backend: B,
    startup: agent::Startup,
    leaving: Leaving,
    gate: Gate,
) -> Result<()> {
    let key = private_key::load_or_create(Path::new(KEY_PATH))?;
    let metrics = Metrics::default();
    // Three resync periods, and never less than a check-in takes.
    let patience = (flags.resync_period * 3).max(Duration::from_secs(90));
    let health = Health::new(Instant::now(), patience);
    health.end_on_panic();
    #[cfg(debug_assertions)]
    panic_when_asked()?;
    let (view, view_reader) = tokio::sync::watch::channel(Arc::default());
    let graph = http::Graph::default();
    let context = http::Context::new(health.clone(), metrics.clone(), view_reader, graph).behind(gate);
    let stop = CancellationToken::new();
    let snapshots = backend.watch();
    let hostname = options.hostname.clone();
    // Before anything is set up: nothing half done stays behind an address that is taken.
    let listen = flags.listen;
    let listener = http::bind(listen).await.with_context(|| format!("--listen {listen}"))?;
    let agent = Agent::new(options, backend, startup, key, metrics, health, view).await?;
    let answer = move |request| context.clone().answer(request);
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
    let gone = !snapshots.borrow().nodes.contains(&hostname);
    if flags.clean_up && gone {
        tracing::info!("node object no longer exists; cleaning up");
        let keep_interface = !flags.clean_up_interface;
        return uninstall(&flags, &UninstallArgs { keep_interface, remove_cni: false }).await;
    }
    if leaving.leave(&hostname, Path::new(BPFFS), &flags.interface, flags.masquerade).await {
        return Ok(());
    }
    tracing::info!("kg stopped; traffic keeps flowing, `kg uninstall` removes everything");
    Ok(())
}

/// For tests, and in no release build: a task that panics on SIGUSR2.
#[cfg(debug_assertions)]
fn panic_when_asked() -> Result<()> {
    let mut asked = signal(SignalKind::user_defined2())?;
    tokio::spawn(async move {
        asked.recv().await;
        #[allow(clippy::panic, reason = "what is tested")]
        {
            panic!("asked to by SIGUSR2");
        }
    });
    Ok(())
}

/// `kg uninstall`: only while no agent runs, which would put everything back.
async fn uninstall_alone(flags: &Flags, args: &UninstallArgs) -> Result<()> {
    let refused = |error: LockError| {
        match error {
        LockError::Taken(_) | LockError::PinsTaken(_) => anyhow::Error::new(error).context(
            "nothing was removed: end the agent first (kubectl --namespace kube-system delete daemonset kilo)",
        ),
        other => other.into(),
    }
    };
    let _lock = lock::interface(Path::new(lock::STATE), &flags.interface).map_err(refused)?;
    let top = dataplane::top_directory(Path::new(BPFFS));
    let _pins = top.exists().then(|| lock::pins(&top)).transpose().map_err(refused)?;
    uninstall(flags, args).await
}

async fn uninstall(flags: &Flags, args: &UninstallArgs) -> Result<()> {
    let options = interface_options(flags)?;
    let hostname = hostname(flags)?;
    let retracted = retract(flags, &hostname).await;
    let removal = agent::Removal {
        interface: &options,
        delete_interface: !args.keep_interface,
        bpffs: Path::new(BPFFS),
        cni: args.remove_cni.then_some(flags.cni_path.as_path()),
    };
    // The host is cleaned although the API may be out of reach.
    let mut outcome = agent::uninstall(removal).await;
    match retracted {
        Ok(()) => outcome.removed.push(format!("annotations of node {hostname}")),
        Err(error) => {
            outcome.stays.push(format!("annotations of node {hostname}: {}", error_chain(error.as_ref())));
        }
    }
    for removed in &outcome.removed {
        println!("removed: {removed}");
    }
    if outcome.stays.is_empty() {
        return Ok(());
    }
    bail!("not everything could be removed:\n{}", outcome.stays.join("\n"))
}

/// Removes what the agent published.
async fn retract(flags: &Flags, hostname: &str) -> Result<()> {
    match flags.backend {
        BackendKind::File => {
            let backend = FileBackend::start(directory(flags)?, &flags.topology_label).await?;
            Ok(backend.retract(hostname).await?)
        }
        BackendKind::Kubernetes => {
            let path = text(&flags.kubeconfig).map(PathBuf::from);
            let client = kubernetes::client(path.as_deref(), text(&flags.master)).await?;
            Ok(kubernetes::retract(client, hostname).await?)
        }
    }
}
