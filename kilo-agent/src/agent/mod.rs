//! The reconcile loop: whatever the event, compute the desired state and apply what differs. The same code
//! serves first start, restart and repair.

mod apply;
mod cni;
mod declare_dead;
mod error;
mod hand_over;
mod host_state;
mod last_good_writer;
mod log_limiter;
mod nat_gc;
mod network_condition;
mod options;
mod peer_reports;
mod planning;
mod publish;
mod publisher;
mod reconcile;
mod rules;
mod setup_warnings;
mod startup;
mod state;
mod uninstall;
mod views;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::{
    apply::Actuators, last_good_writer::LastGoodWriter, log_limiter::LogLimiter,
    network_condition::Availability, peer_reports::PeerReports, planning::Sources, publish::Writers,
    publisher::Publisher, state::State, views::Views,
};
use crate::{
    announce,
    backend::{Backend, BackendError, last_good::LastGood},
    failover::Failover,
    health::Health,
    metrics::Metrics,
    relay::{self, Relays},
    status::View,
};
use kilo_core::{
    objects::Snapshot,
    plan::HopIds,
    settings::{Masquerade, Relay},
    topology::Liveness,
    wireguard::key::SecretKey,
};
use kilo_host::{
    dataplane::{self, DataplaneError},
    interface::Interface,
    net::{Net, watch},
};

pub use error::AgentError;
pub use hand_over::{Programs, hand_over};
pub use options::Options;
pub use startup::{Startup, begin};
pub use uninstall::{Outcome, Removal, uninstall};

/// Programs removed from their hooks are reattached after at most this long: the kernel does not announce
/// that a TCX link is gone.
const LOOK_AT_HOOKS: Duration = Duration::from_secs(3);

/// Why a reconciliation is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The host may have changed.
    Host,
    /// The resync period is over: a full read is due.
    Resync,
    /// Nodes or peers differ.
    Snapshot,
    /// A name was resolved, or a heartbeat is due.
    Own,
}

/// The agent of one node: reads objects and the host, plans, and applies the plan to the host.
pub struct Agent<B> {
    options: Options,
    key: SecretKey,
    backend: Arc<B>,
    state: State,
    views: Views,
    writers: Writers<B>,
    metrics: Metrics,
    health: Health,
    log_limiter: LogLimiter,
    sources: Sources,
    /// Dropped last: the failover thread, one of the sources, uses the pinned maps until it ends.
    actuators: Actuators,
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
        let (resolver, dataplane, pins) = startup.finish(&options).await?;
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
        let former_pod_cidrs = cni::kept_former_pod_cidrs(options.cni.of_boot());
        let failover = options.failover.clone();
        let failover = failover.map(|options| Failover::new(options, Arc::clone(&host_changed)));
        let failover = failover.transpose().map_err(|source| DataplaneError::Run { source })?;
        let backend = Arc::new(backend);
        let publisher = Publisher::new(Arc::clone(&backend), options.hostname.clone(), Instant::now());
        let writers = Writers {
            publisher,
            peer_reports: PeerReports::default(),
            availability: Availability::new(None),
            last_good: last_good.map(LastGoodWriter::new),
        };
        Ok(Self {
            options,
            key,
            backend,
            // Programs of an earlier agent still send with these hop ids.
            state: State {
                hops: HopIds::adopt(&dataplane.held_senders()),
                liveness: Liveness::remembering(remembered.into_iter().flatten().map(Arc::new)),
                former_pod_cidrs,
                ..State::default()
            },
            views: Views::new(view),
            writers,
            metrics,
            health,
            log_limiter: LogLimiter::default(),
            sources: Sources { resolver, path_mtus, relays: Relays::default(), failover, host_changed },
            actuators: Actuators::new(net, dataplane, pins),
        })
    }

    /// Reconciles on every change and every resync period until asked to stop.
    ///
    /// # Errors
    /// When kernel events cannot be followed, or the backend has ended.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), AgentError> {
        let mut snapshots = self.backend.watch();
        let host_changed = Arc::clone(&self.sources.host_changed);
        let routes_changed = tokio::sync::watch::Sender::default();
        watch::watch(Arc::clone(&host_changed), self.actuators.net.rtnl().port(), routes_changed.clone())?;
        self.spawn_tasks(&stop, routes_changed.subscribe())?;
        let mut resync = tokio::time::interval(self.options.resync.max(Duration::from_millis(100)));
        resync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut hooks = tokio::time::interval(LOOK_AT_HOOKS);
        hooks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let nudge = self.actuators.handshake_nudge.due();
            let check_in = self.writers.publisher.next_check_in();
            let cause = tokio::select! {
                () = stop.cancelled() => break,
                _ = resync.tick() => Cause::Resync,
                () = host_changed.notified() => Cause::Host,
                _ = hooks.tick() => {
                    if self.actuators.are_in_place().await {
                        continue;
                    }
                    Cause::Host
                }
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return Err(AgentError::BackendEnded);
                    }
                    Cause::Snapshot
                }
                () = self.sources.resolver.changed() => Cause::Own,
                () = async {
                    match nudge {
                        Some(due) => tokio::time::sleep_until(due.into()).await,
                        None => std::future::pending().await,
                    }
                } => {
                    self.nudge().await;
                    continue;
                }
                answer = self.writers.publisher.answered() => {
                    self.handle_publish_result(answer);
                    continue;
                }
                written = self.writers.peer_reports.finished() => {
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
            if matches!(cause, Cause::Host | Cause::Resync) {
                self.state.host = None;
            }
            self.reconcile_once(&snapshot, cause).await;
        }
        self.writers.finish().await;
        Ok(())
    }

    /// Starts the tasks that run beside the reconciles: NAT GC, writes to the API server, announcements,
    /// relays. `routes_changed` changes when packets of this host may take another path.
    fn spawn_tasks(
        &self,
        stop: &CancellationToken,
        routes_changed: tokio::sync::watch::Receiver<()>,
    ) -> Result<(), AgentError> {
        if self.options.masquerade == Masquerade::Ebpf {
            let gc = self.actuators.dataplane.nat_gc()?;
            let counters = self.actuators.dataplane.counters()?;
            tokio::spawn(nat_gc::run(gc, counters, self.metrics.clone(), stop.clone()));
        }
        let (backend, node) = (Arc::clone(&self.backend), self.options.hostname.clone());
        tokio::spawn(network_condition::write(backend, node, self.writers.availability.subscribe()));
        self.announce_no_network();
        tokio::spawn(announce::run(announce::Context {
            backend: Arc::clone(&self.backend),
            node: self.options.hostname.clone(),
            metrics: self.metrics.clone(),
            health: self.health.clone(),
            view: self.views.status.subscribe(),
            stop: stop.clone(),
        }));
        self.spawn_relays(stop, routes_changed)
    }

    /// Reconciles, counts it and logs the result. After the first one, and after each resync, memory is
    /// returned to the system.
    async fn reconcile_once(&mut self, snapshot: &Arc<Snapshot>, cause: Cause) {
        let started = Instant::now();
        let mut gives_back = false;
        self.metrics.reconciles.inc();
        match self.reconcile(snapshot).await {
            Ok(writes) => {
                let is_first = !std::mem::replace(&mut self.state.applied, true);
                gives_back = is_first || cause == Cause::Resync;
                if is_first {
                    // Deferred until here, when pods no longer wait for it.
                    self.actuators.dataplane.load_late_beside();
                }
                // Otherwise the answer to the write decides, or the next one.
                if self.writers.publisher.is_settled() {
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
                self.writers.publisher.hold_back(Instant::now());
            }
        }
        self.metrics.reconcile_seconds.observe(started.elapsed().as_secs_f64());
        if gives_back {
            // Memory used to list and compute everything, and for changes since then.
            kilo_host::memory::give_back();
        }
    }

    /// Starts the task that looks after pairs of locations that cannot reach each other directly. With
    /// `--relay=off` it only shows how tunnels are connected, and that this node does not relay.
    fn spawn_relays(
        &self,
        stop: &CancellationToken,
        routes_changed: tokio::sync::watch::Receiver<()>,
    ) -> Result<(), AgentError> {
        let mut tools = relay::tools(&self.actuators.dataplane, &self.options.bpffs)?;
        if self.options.relay == Relay::Off {
            // Pairs that an earlier agent relayed for end at once, also while the API server is away.
            tools.maps.write_ports(&BTreeMap::new())?;
            tools.maps.write_keys(&BTreeMap::new())?;
        }
        let context = relay::Context {
            key: self.key,
            port: self.options.settings.port,
            relay: self.options.relay,
            relay_rate: self.options.relay_rate,
            view: self.views.relay.subscribe(),
            routes_changed,
            relays: self.sources.relays.clone(),
            changed: Arc::clone(&self.sources.host_changed),
            metrics: self.metrics.clone(),
            stop: stop.clone(),
        };
        tokio::spawn(relay::run(context, tools));
        Ok(())
    }

    /// Handles the backend's answer to the last write of this node's annotations. `/health` needs it, the host does not.
    fn handle_publish_result(&mut self, answer: Result<(), BackendError>) {
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
