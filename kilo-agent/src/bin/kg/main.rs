//! `kg`: the agent of a node.

mod flags;
mod stopping;
mod termination_message;
mod uninstall;

use std::{
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::FromArgMatches as _;
use kilo_agent::{
    agent::{self, Agent},
    backend::{
        Backend,
        file::FileBackend,
        kubernetes::{self, NodesFrom},
        last_good,
    },
    cli::{BackendMismatch, PrefixList, log_filter, objects_directory},
    failover,
    health::Health,
    http::{
        self,
        access::{self, Gate, LocalToken},
    },
    leaving::{self, Leaving},
    metrics::Metrics,
    status::ask::LOCAL_TOKEN,
    takeover, webhook,
};
use kilo_core::{
    errors::error_chain,
    objects::{Snapshot, slices},
    settings::{Failover, LogLevel, PageAccess, Settings, Slices},
};
use kilo_host::{
    cni::{CniConfiguration, boot::BootConfiguration},
    dataplane::BPFFS,
    interface, lock,
    wireguard::{private_key, userspace},
};
use nix::time::{ClockId, clock_gettime};
#[cfg(debug_assertions)]
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use flags::{Cli, Command, Flags, UninstallArgs, WebhookArgs, command};
use stopping::Stopping;
use termination_message::LastWords;
use uninstall::{uninstall, uninstall_alone};

/// A host that has been up for less may have booted together with all others.
const BOOTS_WITHIN: Duration = Duration::from_mins(5);

fn main() -> ExitCode {
    #[cfg(debug_assertions)]
    if let Some(tables) = kilo_agent::flags_markdown::if_asked(command) {
        print!("{tables}");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
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
            clap_complete::generate(shell, &mut command(), "kg", &mut std::io::stdout());
            Ok(())
        }
        Some(Command::UserspaceWireguard { interface }) => {
            // The device disappears with the process, and the agent creates another one.
            kilo_agent::health::end_on_panic(Duration::ZERO, |_| {});
            to_end(PACKETS, async {
                userspace::run(&interface).await.context("failed to run userspace WireGuard")
            })
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
            kilo_host::memory::prepare();
            log_to_stdout(cli.flags.log_level);
            to_end(EVENTS, serve(cli.flags))
        }
    }
}

/// Worker threads besides the main one. Waiting for events needs one: a second would be woken for each event
/// of a watch, and find nothing to do.
const EVENTS: usize = 1;
const PACKETS: usize = 2;

/// Runs `work` to the end with this many worker threads, and does not wait for remaining tasks: a silent name
/// server would hold up the stop.
fn to_end(threads: usize, work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}

fn log_to_stdout(level: LogLevel) {
    use tracing_subscriber::{EnvFilter, fmt, prelude::*};
    let registry = tracing_subscriber::registry().with(EnvFilter::new(log_filter(level, "kg")));
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
    let name = nix::unistd::gethostname().context("failed to read the host's name; set --hostname")?;
    let name = name.into_string().map_err(|name| {
        anyhow::anyhow!("the host's name {} is not valid UTF-8; set --hostname", name.display())
    })?;
    // Names of Node objects are lower case; the kubelet lowers the host name, too.
    Ok(name.to_lowercase())
}

fn interface_options(flags: &Flags) -> Result<interface::Options> {
    Ok(interface::Options {
        name: flags.interface.clone(),
        mode: flags.wireguard,
        create: flags.create_interface,
        executable: std::env::current_exe().context("failed to find the path of this program")?,
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
        cni: cni_configuration(flags),
        masquerade: flags.masquerade,
        bpffs: PathBuf::from(BPFFS),
        attach: flags.attach,
        last_good: Some(state_file(last_good::FILE)),
        forward_rules: flags.iptables_forward_rules,
        debug: matches!(flags.log_level, LogLevel::All | LogLevel::Debug),
        failover: (flags.failover == Failover::Auto).then(|| failover::Options {
            stand_bys: usize::from(flags.stand_bys),
            leaders: usize::from(flags.leaders),
            params: flags.failover_interval.clone(),
        }),
        host_routing: flags.host_routing,
        relay: flags.relay,
        relay_rate: flags.relay_rate,
    })
}

fn cni_configuration(flags: &Flags) -> CniConfiguration {
    let path = flags.cni_path.clone();
    match text(&flags.cni_source) {
        _ if !flags.cni => CniConfiguration::Off,
        None => CniConfiguration::InPlace(path),
        Some(source) => CniConfiguration::OfBoot(BootConfiguration {
            source: PathBuf::from(source),
            path,
            directory: flags.cni_run_dir.clone(),
        }),
    }
}

/// The directory of the objects; `None`: they are read from an API server.
fn directory(flags: &Flags) -> Result<Option<&Path>, BackendMismatch> {
    objects_directory(flags.backend, flags.backend_dir.as_deref())
}

fn text(flag: &str) -> Option<&str> {
    Some(flag).filter(|text| !text.is_empty())
}

async fn serve(flags: Flags) -> Result<()> {
    let mut options = options(&flags)?;
    let directory = directory(&flags)?.map(Path::to_owned);
    let mut stopping = Stopping::listen()?;
    lock::warn_of_former(&flags.interface);
    let lock = stopping.before(takeover::lock(Path::new(lock::STATE), &flags.interface));
    let Some(lock) = lock.await else { return Ok(()) };
    let _lock = lock?;
    let mut leaving = Leaving::begin(&options.bpffs, options.attach);
    options.attach = leaving.attach();
    // Where pins would outlive this agent, nothing is pinned while Kilo's agent runs.
    let mut startup = agent::begin(&options, flags.take_over_from_kilo && leaving.pins_end_here());
    let deadline = takeover::Deadline::begin(flags.take_over_from_kilo);
    if flags.take_over_from_kilo {
        // Programs that do not load must be noticed before Kilo's agent is gone.
        let prepared = deadline.before("the programs to be loaded", startup.prepare(&options));
        let Some(prepared) = stopping.before(prepared).await else { return Ok(()) };
        startup = prepared??;
    }
    match directory {
        Some(directory) => {
            if flags.page_access == PageAccess::Token {
                bail!("--page-access=token asks an API server about tokens, and --backend=file has none");
            }
            let backend = FileBackend::start(&directory, &flags.topology_label).await?;
            LocalToken::remove(Path::new(LOCAL_TOKEN));
            run_until_stopped(flags, options, backend, startup, leaving, Gate::Open, stopping).await
        }
        None => {
            let path = text(&flags.kubeconfig).map(PathBuf::from);
            let client = kubernetes::client(path.as_deref(), text(&flags.master)).await?;
            leaving.ask(client.clone());
            let hostname = options.hostname.clone();
            let label = &flags.topology_label;
            let gate = gate(flags.page_access, &client)?;
            let from = match flags.slices {
                Slices::Auto => NodesFrom::Slices { namespace: kubernetes::own_namespace() },
                Slices::Off => NodesFrom::Nodes,
            };
            // After a power failure all agents start at once; they begin with the last good topology.
            let booted = flags.slices == Slices::Auto && since_boot() < BOOTS_WITHIN;
            let early = booted.then(|| last_good_topology(&hostname)).flatten();
            let spread = early.as_ref().map_or(Duration::ZERO, |known| {
                slices::start_spread(known.nodes.len(), rand::random_range(0.0..1.0))
            });
            let remembered = || early.or_else(|| last_good_topology(&hostname));
            let started =
                kubernetes::StartupFallback::start(client, &hostname, label, from, spread, remembered);
            let started = deadline.before("the API server's list of nodes and peers", started);
            let Some(backend) = stopping.before(started).await else { return Ok(()) };
            run_until_stopped(flags, options, backend??, startup, leaving, gate, stopping).await
        }
    }
}

/// Decides who may see the page.
fn gate(access: PageAccess, client: &kube::Client) -> Result<Gate> {
    let path = Path::new(LOCAL_TOKEN);
    match access {
        PageAccess::Open => {
            LocalToken::remove(path);
            Ok(Gate::Open)
        }
        PageAccess::Token => {
            let local = LocalToken::create(path).with_context(|| format!("failed to write {LOCAL_TOKEN}"))?;
            Ok(Gate::token(access::through_api(client.clone()), local))
        }
    }
}

async fn serve_webhook(args: WebhookArgs) -> Result<()> {
    let source = match (args.secret, args.cert_file, args.key_file) {
        (Some((namespace, secret)), _, _) => webhook::Source::Secret(webhook::ObjectNames {
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
    let (mut stopping, token) = (Stopping::listen()?, stop.clone());
    tokio::spawn(async move {
        stopping.requested().await;
        token.cancel();
    });
    Ok(webhook::run(options, stop).await?)
}

/// How long this host has been up.
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}

/// The topology that an earlier agent saved, for a start without API server.
fn last_good_topology(hostname: &str) -> Option<Snapshot> {
    let path = state_file(last_good::FILE);
    last_good::load(&path, hostname).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "ignoring the saved topology");
        None
    })
}

/// Path of a file of this agent's state.
fn state_file(name: &str) -> PathBuf {
    Path::new(lock::STATE).join(name)
}

/// Runs the agent and its pages until this process is asked to stop, and leaves the host then.
async fn run_until_stopped<B: Backend>(
    flags: Flags,
    options: agent::Options,
    backend: B,
    startup: agent::Startup,
    leaving: Leaving,
    gate: Gate,
    mut stopping: Stopping,
) -> Result<()> {
    let key = private_key::load_or_create(&state_file(private_key::FILE))?;
    let metrics = Metrics::default();
    // Three resync periods, but never less than a check-in takes.
    let patience = (flags.resync_period * 3).max(Duration::from_secs(90));
    let health = Health::new(patience);
    health.end_on_panic();
    #[cfg(debug_assertions)]
    panic_when_asked()?;
    let (view, view_reader) = tokio::sync::watch::channel(Arc::default());
    let last_words = LastWords::new(health.clone(), view_reader.clone());
    let graph = http::Graph::default();
    let context = http::Context::new(health.clone(), metrics.clone(), view_reader, graph).behind(gate);
    let stop = CancellationToken::new();
    let snapshots = backend.watch();
    let hostname = options.hostname.clone();
    // Before anything is set up: if the address is taken, nothing half done remains.
    let listen = flags.listen;
    let bound = match flags.take_over_from_kilo {
        true => stopping.before(takeover::address(listen)).await,
        false => Some(http::bind(listen).await),
    };
    let Some(bound) = bound else { return Ok(()) };
    let listener = bound.with_context(|| format!("failed to bind --listen {listen}"))?;
    if let Some(client) = leaving.client().filter(|_| flags.take_over_from_kilo) {
        tokio::spawn(takeover::keep_annotations(client, hostname.clone()));
    }
    let agent = Agent::new(options, backend, startup, key, metrics, health, view).await?;
    let answer = move |request| context.clone().answer(request);
    let mut server = tokio::spawn(http::serve(listener, None, answer, stop.clone()));
    let mut agent = tokio::spawn(agent.run(stop.clone()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = hostname, %listen, "kg started");
    tokio::select! {
        () = stopping.requested() => {}
        ended = &mut agent => return ended.context("the reconcile loop panicked")?.map_err(Into::into),
        ended = &mut server => return ended.context("the HTTP server panicked"),
    }
    stop.cancel();
    let said = last_words.said();
    agent.await.context("the reconcile loop panicked")??;
    let gone = !snapshots.borrow().nodes.contains(&hostname);
    leave(&flags, &hostname, gone, leaving, &said).await
}

/// Leaves the host once the agent has stopped. A restart or an upgrade must not interrupt traffic: programs,
/// routes and annotations stay for the next agent, unless the node has left the cluster (`gone`). `said`: the
/// last words of the agent.
async fn leave(flags: &Flags, hostname: &str, gone: bool, leaving: Leaving, said: &[String]) -> Result<()> {
    if flags.clean_up && gone {
        let containers = leaving::containers_that_stay().await?;
        if containers.is_empty() {
            tracing::info!("node object no longer exists; cleaning up");
            // A pod that starts when the node registers again must find an agent first. Annotations went with the Node.
            let args = UninstallArgs {
                keep_interface: !flags.clean_up_interface,
                keep_annotations: true,
                remove_cni: !flags.cni_source.is_empty(),
                ..UninstallArgs::default()
            };
            return uninstall(flags, &args).await;
        }
        // Without programs and routes the containers' packets would leave in cleartext.
        tracing::warn!(
            interfaces = containers.join(", "),
            "node object no longer exists, but pods or other containers still run here: everything stays, so that \
             they send nothing in cleartext; reboot the host, or run `kg uninstall --keep-annotations --remove-cni` there \
             when they have ended"
        );
        termination_message::write(said);
        return Ok(());
    }
    termination_message::write(said);
    if leaving.leave(hostname, Path::new(BPFFS), &flags.interface, flags.masquerade).await {
        return Ok(());
    }
    tracing::info!("kg stopped; traffic keeps flowing, `kg uninstall` removes everything");
    Ok(())
}

/// For tests, in debug builds only: a task that panics on SIGUSR2.
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
