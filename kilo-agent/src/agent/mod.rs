//! The reconcile loop: whatever the event, compute the desired state and apply what differs. The same code
//! serves first start, restart and repair.

mod apply;
mod declare_dead;
mod error;
mod hand_over;
mod host_state;
mod last_good_writer;
mod log_limiter;
mod nat_gc;
mod network;
mod peer_reports;
mod planning;
mod publish;
mod publisher;
mod reconcile;
mod rules;
mod state;
mod uninstall;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use self::{
    last_good_writer::LastGoodWriter, log_limiter::LogLimiter, peer_reports::PeerReports,
    publisher::Publisher, state::State,
};
use crate::{
    announce,
    backend::{Backend, BackendError, last_good::LastGood},
    failover::{self, Failover},
    health::Health,
    metrics::Metrics,
    relay::{self, MeshView, Relays},
    resolve::Resolver,
    status::View,
};
use kilo_core::{
    objects::Snapshot,
    plan::HopIds,
    settings::{AttachMode, Compatibility, EndpointFrom, HostRouting, Masquerade, Relay, Settings},
    topology::Liveness,
    wireguard::key::SecretKey,
};
use kilo_host::{
    cni::boot::BootConfiguration,
    dataplane::{self, Dataplane, DataplaneError, PathMtus},
    firewall::{forward::Forward, nat_rules::NatRules},
    interface::{self, Interface},
    lock::{self, Lock},
    net::{Net, forwarding, mtu::Mtu, watch},
    wireguard::handshake_nudge::HandshakeNudge,
};

pub use error::AgentError;
pub use hand_over::{Programs, hand_over};
pub use uninstall::{Outcome, Removal, uninstall};

/// Pause before a failed step is repeated, unless something else causes it earlier.
const RETRY: Duration = Duration::from_secs(2);
/// Cilium's device, which has the node's overlay address.
const CILIUM_HOST: &str = "cilium_host";

/// Programs removed from their hooks are reattached after at most this long: the kernel does not announce
/// that a TCX link is gone.
const LOOK_AT_HOOKS: Duration = Duration::from_secs(3);

/// All settings from the flags.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of this node.
    pub hostname: String,
    /// The WireGuard device.
    pub interface: interface::Options,
    /// Settings of the mesh.
    pub settings: Settings,
    /// MTU of the WireGuard device, or how it is found (`--mtu`).
    pub mtu: Mtu,
    /// CNI that owns routing inside a location (`--compatibility`).
    pub compatibility: Compatibility,
    /// Interval between full resyncs (`--resync-period`).
    pub resync: Duration,
    /// Prefixes in which the node's private address is looked for (`--internal-cidr`).
    pub internal_cidrs: Vec<IpNet>,
    /// Which addresses may become the node's WireGuard endpoint (`--endpoint-from`).
    pub endpoint_from: EndpointFrom,
    /// Prefer a private address as endpoint (`--prioritise-private-addresses`).
    pub prefer_private: bool,
    /// The CNI configuration list that pod CIDRs are written into; `None`: no file is written.
    pub cni: Option<PathBuf>,
    /// A CNI configuration that does not outlive the boot, used instead of `cni`.
    pub cni_boot: Option<BootConfiguration>,
    /// Who translates the source of pods' packets (`--masquerade`).
    pub masquerade: Masquerade,
    /// Accept pods' traffic in the FORWARD chains of iptables.
    pub forward_rules: bool,
    /// Where the last good topology is saved; `None`: nowhere.
    pub last_good: Option<PathBuf>,
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// How programs are attached.
    pub attach: AttachMode,
    /// Load the programs with logging enabled.
    pub debug: bool,
    /// Settings of failover; `None` when it is off.
    pub failover: Option<failover::Options>,
    /// Whether packets from pods may bypass the stack (`--host-routing`).
    pub host_routing: HostRouting,
    /// Whether tunnels may go through relays (`--relay`).
    pub relay: Relay,
    /// Megabits per second that a relay forwards for each end of a pair (`--relay-rate`); 0 = unlimited.
    pub relay_rate: u16,
}

/// What starts before the nodes are known: see [`begin`].
pub struct Startup {
    resolver: Resolver,
    /// The task that is loading the programs.
    loading: Option<JoinHandle<Result<(Dataplane, Lock), AgentError>>>,
    /// The loaded programs.
    loaded: Option<(Dataplane, Lock)>,
}

impl Startup {
    /// Waits for the programs that are being loaded and checks for other required kernel features.
    ///
    /// # Errors
    /// When a program fails to load or a feature is missing.
    pub async fn prepare(mut self, options: &Options) -> Result<Self, AgentError> {
        if options.masquerade == Masquerade::Ebpf {
            dataplane::realtime::check()?;
        }
        if let Some(loading) = self.loading.take() {
            self.loaded = loading.await.ok().transpose()?;
        }
        Ok(self)
    }
}

/// Starts what depends on this host only, so that it overlaps with listing the nodes: resolves this node's
/// name, and loads the programs where an earlier agent left some or where `prepared` asks for it. Otherwise
/// nothing is created before the backend has answered.
pub fn begin(options: &Options, prepared: bool) -> Startup {
    let mut resolver = Resolver::default();
    resolver.ask_own(&options.hostname);
    let early = prepared || dataplane::top_directory(&options.bpffs).exists();
    let (bpffs, debug, attach) = (options.bpffs.clone(), options.debug, options.attach);
    let load = move || open(&bpffs, debug, attach);
    Startup { resolver, loading: early.then(|| tokio::task::spawn_blocking(load)), loaded: None }
}

/// Opens the data path, holding the lock that keeps other agents from its programs and maps.
fn open(bpffs: &Path, debug: bool, attach: AttachMode) -> Result<(Dataplane, Lock), AgentError> {
    dataplane::make_top_directory(bpffs)?;
    let pins = lock::pins(&dataplane::top_directory(bpffs))?;
    Ok((Dataplane::open_with(bpffs, debug, attach)?, pins))
}

/// Why a reconciliation is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The host may have changed, or a full read is due.
    Host,
    /// Nodes or peers differ.
    Snapshot,
    /// A name was resolved, or a heartbeat is due.
    Own,
}

/// The agent of one node: reads objects and the host, plans, and applies the plan to the host.
pub struct Agent<B> {
    options: Options,
    backend: Arc<B>,
    publisher: Publisher<B>,
    peer_reports: PeerReports,
    key: SecretKey,
    net: Net,
    dataplane: Dataplane,
    state: State,
    log_limiter: LogLimiter,
    resolver: Resolver,
    metrics: Metrics,
    health: Health,
    view: tokio::sync::watch::Sender<Arc<View>>,
    host_changed: Arc<Notify>,
    path_mtus: PathMtus,
    forward: Forward,
    nat_rules: NatRules,
    last_good_writer: Option<LastGoodWriter>,
    availability: network::Availability,
    handshake_nudge: HandshakeNudge,
    failover: Option<Failover>,
    relays: Relays,
    /// Feeds the relay task.
    relay_view: tokio::sync::watch::Sender<MeshView>,
    /// Keeps other agents from changing the pinned programs and maps.
    _pins: Lock,
}

impl<B: Backend> Agent<B> {
    /// Opens what the agent needs (programs, pinned maps, the WireGuard device), except what `startup`
    /// already holds.
    ///
    /// # Errors
    /// When a capability or kernel feature is missing; the text says which. Whatever was not there before is
    /// removed again.
    pub async fn new(
        options: Options,
        backend: B,
        startup: Startup,
        key: SecretKey,
        metrics: Metrics,
        health: Health,
        view: tokio::sync::watch::Sender<Arc<View>>,
    ) -> Result<Self, AgentError> {
        let net = Net::new()?;
        let adopted = dataplane::top_directory(&options.bpffs).exists()
            || dataplane::has_filters(&net).await.unwrap_or(true);
        let Startup { resolver, loaded, .. } = startup.prepare(&options).await?;
        let (dataplane, pins) = match loaded {
            Some(loaded) => loaded,
            None => open(&options.bpffs, options.debug, options.attach)?,
        };
        let counters = dataplane.counters()?;
        metrics.set_counters(move || counters.read());
        let host_changed = Arc::new(Notify::new());
        let path_mtus = dataplane.follow_path_mtus(Arc::clone(&host_changed))?;
        if let Err(error) = Interface::ensure(&net, &options.interface, None).await {
            if !adopted {
                drop(dataplane);
                dataplane::remove(&options.bpffs);
            }
            return Err(error.into());
        }
        let remembered =
            options.last_good.as_deref().map(|path| last_good_writer::nodes(path, &options.hostname));
        let last_good = options.last_good.as_deref().map(|path| LastGood::new(path, &options.hostname));
        let last_good_writer = last_good.map(LastGoodWriter::new);
        let former_pod_cidrs = network::kept_former_pod_cidrs(options.cni_boot.as_ref());
        let failover = options.failover.clone();
        let failover = failover.map(|options| Failover::new(options, Arc::clone(&host_changed)));
        let failover = failover.transpose().map_err(|source| DataplaneError::Run { source })?;
        let backend = Arc::new(backend);
        let publisher = Publisher::new(Arc::clone(&backend), options.hostname.clone(), Instant::now());
        Ok(Self {
            net,
            options,
            backend,
            publisher,
            peer_reports: PeerReports::default(),
            key,
            // Programs of an earlier agent still send with these hop ids.
            state: State {
                hops: HopIds::adopt(&dataplane.held_senders()),
                liveness: Liveness::remembering(remembered.into_iter().flatten().map(Arc::new)),
                former_pod_cidrs,
                ..State::default()
            },
            dataplane,
            log_limiter: LogLimiter::default(),
            resolver,
            metrics,
            health,
            view,
            host_changed,
            path_mtus,
            forward: Forward::default(),
            nat_rules: NatRules::default(),
            last_good_writer,
            availability: network::Availability::new(None),
            handshake_nudge: HandshakeNudge::default(),
            failover,
            relays: Relays::default(),
            relay_view: tokio::sync::watch::Sender::new(MeshView::default()),
            _pins: pins,
        })
    }

    /// Reconciles on every change and every resync period until asked to stop.
    ///
    /// # Errors
    /// When kernel events cannot be followed.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), AgentError> {
        let mut snapshots = self.backend.watch();
        let host_changed = Arc::clone(&self.host_changed);
        let ways = tokio::sync::watch::Sender::default();
        watch::watch(Arc::clone(&host_changed), self.net.rtnl().port(), ways.clone())?;
        self.spawn_tasks(&stop, ways.subscribe())?;
        let mut resync = tokio::time::interval(self.options.resync.max(Duration::from_millis(100)));
        resync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut hooks = tokio::time::interval(LOOK_AT_HOOKS);
        hooks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let nudge = self.handshake_nudge.due();
            let check_in = self.publisher.next_check_in();
            let mut by_the_clock = false;
            let cause = tokio::select! {
                () = stop.cancelled() => break,
                _ = resync.tick() => {
                    by_the_clock = true;
                    Cause::Host
                }
                () = host_changed.notified() => Cause::Host,
                _ = hooks.tick() => {
                    // A setting that a reconcile failed to turn on waits for the next one, unless it was on
                    // in between.
                    let forwards = forwarding::is_on();
                    self.state.cannot_forward &= !forwards;
                    let may_stay = forwards || self.state.cannot_forward;
                    // Errors are left for the reconcile to report.
                    if self.dataplane.is_attached(&self.net).await.unwrap_or(false) && may_stay {
                        continue;
                    }
                    Cause::Host
                }
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        tracing::error!("backend stopped unexpectedly");
                        break;
                    }
                    Cause::Snapshot
                }
                () = self.resolver.changed() => Cause::Own,
                () = async {
                    match nudge {
                        Some(due) => tokio::time::sleep_until(due.into()).await,
                        None => std::future::pending().await,
                    }
                } => {
                    self.nudge().await;
                    continue;
                }
                answer = self.publisher.answered() => {
                    self.heard(answer);
                    continue;
                }
                written = self.peer_reports.finished() => {
                    if written {
                        self.report_peers();
                    }
                    continue;
                }
                () = tokio::time::sleep_until(check_in.into()) => Cause::Own,
            };
            let snapshot = Arc::clone(&snapshots.borrow_and_update());
            if cause == Cause::Snapshot && self.only_heartbeats_changed(&snapshot) {
                continue;
            }
            if cause == Cause::Host {
                self.state.host = None;
            }
            self.reconcile_once(&snapshot, by_the_clock).await;
        }
        self.publisher.finish().await;
        if let Some(last_good_writer) = self.last_good_writer {
            last_good_writer.finish().await;
        }
        Ok(())
    }

    /// Starts the tasks that run beside the reconciles: NAT GC, writes to the API server, announcements,
    /// relays. `ways` changes when packets of this host may take another path.
    fn spawn_tasks(
        &self,
        stop: &CancellationToken,
        ways: tokio::sync::watch::Receiver<()>,
    ) -> Result<(), AgentError> {
        if self.options.masquerade == Masquerade::Ebpf {
            let gc = self.dataplane.nat_gc()?;
            let counters = self.dataplane.counters()?;
            tokio::spawn(nat_gc::run(gc, counters, self.metrics.clone(), stop.clone()));
        }
        let (backend, node) = (Arc::clone(&self.backend), self.options.hostname.clone());
        tokio::spawn(network::write(backend, node, self.availability.subscribe()));
        self.announce_network();
        tokio::spawn(announce::run(announce::Context {
            backend: Arc::clone(&self.backend),
            node: self.options.hostname.clone(),
            metrics: self.metrics.clone(),
            health: self.health.clone(),
            view: self.view.subscribe(),
            stop: stop.clone(),
        }));
        self.spawn_relays(stop, ways)
    }

    /// Reconciles, counts it and logs the result. After the first one, and after one `by_the_clock`, memory
    /// is returned to the system.
    async fn reconcile_once(&mut self, snapshot: &Arc<Snapshot>, by_the_clock: bool) {
        let started = Instant::now();
        let mut gives_back = false;
        self.metrics.reconciles.inc();
        match self.reconcile(snapshot).await {
            Ok(writes) => {
                let is_first = !std::mem::replace(&mut self.state.applied, true);
                gives_back = is_first || by_the_clock;
                if is_first {
                    // Deferred until here, when pods no longer wait for it.
                    self.dataplane.load_late_beside();
                }
                if self.publisher.is_settled() {
                    self.succeeded();
                }
                self.metrics.writes.inc_by(writes);
                tracing::debug!(
                    writes,
                    milliseconds = started.elapsed().as_millis(),
                    "the host was reconciled"
                );
            }
            Err(error) => {
                self.failed("reconcile failed", &error);
                self.publisher.hold_back(Instant::now());
            }
        }
        self.metrics.reconcile_seconds.observe(started.elapsed().as_secs_f64());
        if gives_back {
            // Memory used to list and compute everything, and for changes since then.
            kilo_host::memory::give_back();
        }
    }

    /// Starts the task that looks after pairs of locations that cannot reach each other directly.
    fn spawn_relays(
        &self,
        stop: &CancellationToken,
        ways: tokio::sync::watch::Receiver<()>,
    ) -> Result<(), AgentError> {
        let mut tools = relay::tools(&self.dataplane, &self.options.bpffs)?;
        if self.options.relay == Relay::Off {
            // Pairs that an earlier agent relayed for do not carry over.
            tools.maps.write_ports(&BTreeMap::new())?;
            tools.maps.write_keys(&BTreeMap::new())?;
            return Ok(());
        }
        let context = relay::Context {
            key: self.key,
            port: self.options.settings.port,
            relay: self.options.relay,
            relay_rate: self.options.relay_rate,
            view: self.relay_view.subscribe(),
            ways,
            relays: self.relays.clone(),
            changed: Arc::clone(&self.host_changed),
            metrics: self.metrics.clone(),
            stop: stop.clone(),
        };
        tokio::spawn(relay::run(context, tools));
        Ok(())
    }

    /// Handles the backend's answer to the last write. It does not affect whether the host is correct.
    fn heard(&mut self, answer: Result<(), BackendError>) {
        match answer {
            Ok(()) if self.state.applied => self.succeeded(),
            Ok(()) => {}
            Err(error) => {
                self.report_failure("failed to write this node's annotations (key, endpoint, heartbeat); others may declare it dead", &error.into());
            }
        }
    }

    /// Records that this host is in sync and others know what they need to.
    fn succeeded(&mut self) {
        self.log_limiter.clear_failures();
        self.health.succeeded(Instant::now());
    }

    fn failed(&mut self, what: &'static str, error: &AgentError) {
        self.state.applied = false;
        self.report_failure(what, error);
    }

    fn report_failure(&mut self, what: &'static str, error: &AgentError) {
        self.metrics.error(error.label());
        self.log_limiter.log_failure(what, error.to_string(), Instant::now());
        self.health.failed(error.to_string());
    }
}
