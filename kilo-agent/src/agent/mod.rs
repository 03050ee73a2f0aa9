//! The reconcile loop: whatever happened, compute the desired state and apply
//! what differs. The same code serves first start, restart and repair.

mod error;
mod hand_over;
mod host_state;
mod last_good_writer;
mod log_limiter;
mod nat_gc;
mod network;
mod publish;
mod rules;
mod uninstall;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ipnet::IpNet;
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use self::{
    error::Parts,
    host_state::HostState,
    last_good_writer::LastGoodWriter,
    log_limiter::LogLimiter,
    publish::{PublishTask, StatusTask},
};
use crate::{
    announce,
    backend::{Backend, BackendError, last_good::LastGood},
    failover::{self, Failover},
    health::Health,
    metrics::Metrics,
    resolve::Resolver,
    status::{History, Leaders, View},
};
use kilo_core::{
    objects::{Snapshot, events::EventReason},
    plan::{self, HopIds, HostPlan, Inputs, NetPlan},
    settings::{AttachMode, Compatibility, EndpointFrom, Masquerade, Settings},
    topology::{self, FreedAddresses, Liveness, Mesh, Node, among, not_among, with_own},
    wireguard::{diff, key::SecretKey},
};
use kilo_host::{
    cni::boot::BootConfiguration,
    dataplane::{self, Dataplane, DataplaneError, Interfaces, PathMtus},
    firewall::{forward::Forward, nat_rules::NatRules},
    interface::{self, Interface},
    lock::{self, Lock},
    net::{Net, forwarding, links, mtu::Mtu, watch},
    wireguard::handshake_nudge::HandshakeNudge,
};

pub use error::AgentError;
pub use hand_over::hand_over;
pub use uninstall::{Outcome, Removal, uninstall};

/// Seconds between two heartbeats; every agent adds its own jitter.
const CHECK_IN: Duration = Duration::from_secs(30);
/// What failed is not tried again for its own sake before this time.
const RETRY: Duration = Duration::from_secs(2);
/// An API server that is overloaded or away is asked again after 2, 4, 8, 16, 16, ... seconds.
const MOST_DOUBLINGS: u32 = 3;
/// The device of Cilium that has the node's address in its overlay.
const CILIUM_HOST: &str = "cilium_host";

/// Programs that were removed from their hooks are back after at most this:
/// the kernel does not announce it when a TCX link goes.
const LOOK_AT_HOOKS: Duration = Duration::from_secs(3);

/// Everything the flags say.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of this node.
    pub hostname: String,
    /// The WireGuard device.
    pub interface: interface::Options,
    /// Settings of the mesh.
    pub settings: Settings,
    /// `--mtu`.
    pub mtu: Mtu,
    /// `--compatibility`.
    pub compatibility: Compatibility,
    /// `--resync-period`.
    pub resync: Duration,
    /// `--internal-cidr`.
    pub internal_cidrs: Vec<IpNet>,
    /// `--endpoint-from`.
    pub endpoint_from: EndpointFrom,
    /// `--prioritise-private-addresses`.
    pub prefer_private: bool,
    /// The CNI configuration list to write pod CIDRs into.
    pub cni: Option<PathBuf>,
    /// A CNI configuration that ends with the boot, instead of that.
    pub cni_boot: Option<BootConfiguration>,
    /// Who masquerades.
    pub masquerade: Masquerade,
    /// Accept pods' traffic in the FORWARD chains of iptables.
    pub forward_rules: bool,
    /// Where the last good topology is kept, if at all.
    pub last_good: Option<PathBuf>,
    /// The BPF file system.
    pub bpffs: PathBuf,
    /// How programs are attached.
    pub attach: AttachMode,
    /// Load the programs with their log.
    pub debug: bool,
    /// Failover; `None` = off.
    pub failover: Option<failover::Options>,
}

/// What is started before the nodes are known: see [`begin`].
pub struct Startup {
    resolver: Resolver,
    /// Programs that are being loaded.
    loading: Option<JoinHandle<Result<Dataplane, DataplaneError>>>,
}

/// Begins what needs this host only, so that it is waited for together with the list of nodes:
/// looks up the own name, and loads the programs where an earlier agent left some. Where there
/// are none, nothing is made before the backend has answered.
pub fn begin(options: &Options) -> Startup {
    let mut resolver = Resolver::default();
    resolver.ask_own(&options.hostname);
    let adopts = dataplane::top_directory(&options.bpffs).exists();
    let (bpffs, debug, attach) = (options.bpffs.clone(), options.debug, options.attach);
    let load = move || Dataplane::open_with(&bpffs, debug, attach);
    Startup { resolver, loading: adopts.then(|| tokio::task::spawn_blocking(load)) }
}

/// Why a reconciliation is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The host may have changed, or it is time to read it.
    Host,
    /// Nodes or peers differ.
    Snapshot,
    /// A name was resolved, or a heartbeat is due.
    Own,
}

/// The agent of one node.
pub struct Agent<B> {
    options: Options,
    backend: Arc<B>,
    /// What the backend was asked to write, as long as it has not answered.
    publish_task: Option<PublishTask>,
    status_task: Option<StatusTask>,
    key: SecretKey,
    net: Net,
    dataplane: Dataplane,
    liveness: Liveness,
    freed: FreedAddresses,
    hops: HopIds,
    log_limiter: LogLimiter,
    resolver: Resolver,
    /// This host as far as known; `None`: it must be read.
    host: Option<HostState>,
    /// What the last reconciliation that succeeded was about.
    applied: Option<Arc<Snapshot>>,
    next_check_in: Instant,
    /// Attempts in a row that the API server did not answer.
    unanswered: u32,
    /// What it said to the last of them.
    last_refusal: String,
    /// Unix seconds of the last heartbeat written; 0 = none yet.
    checked_in: i64,
    metrics: Metrics,
    health: Health,
    view: tokio::sync::watch::Sender<Arc<View>>,
    leaders: Leaders,
    history: History,
    /// Peers whose status has been written, and what it says.
    reported_peers: Option<topology::PeerStandings>,
    host_changed: Arc<Notify>,
    path_mtus: PathMtus,
    /// Index of the WireGuard device when it was last seen.
    device: Option<u32>,
    forward: Forward,
    nat_rules: NatRules,
    last_good_writer: Option<LastGoodWriter>,
    availability: network::Availability,
    handshake_nudge: HandshakeNudge,
    failover: Option<Failover>,
    /// No other agent may change the pinned programs and maps meanwhile.
    _pins: Lock,
}

impl<B: Backend> Agent<B> {
    /// Opens what the agent needs: programs, pinned maps, the WireGuard device,
    /// except what `startup` holds already.
    ///
    /// # Errors
    /// When a capability or kernel feature is missing; the text says which.
    /// What was not there before is then not there afterwards.
    pub async fn new(
        options: Options,
        backend: B,
        startup: Startup,
        key: SecretKey,
        metrics: Metrics,
        health: Health,
        view: tokio::sync::watch::Sender<Arc<View>>,
    ) -> Result<Self, AgentError> {
        let adopted = dataplane::top_directory(&options.bpffs).exists();
        if options.masquerade == Masquerade::Ebpf {
            dataplane::realtime::check()?;
        }
        let Startup { resolver, loading } = startup;
        let loaded = match loading {
            Some(loading) => loading.await.ok(),
            None => None,
        };
        let open = || Dataplane::open_with(&options.bpffs, options.debug, options.attach);
        let dataplane = loaded.unwrap_or_else(open)?;
        let pins = lock::pins(&dataplane::top_directory(&options.bpffs))?;
        metrics.set_counters(dataplane.counters()?);
        let host_changed = Arc::new(Notify::new());
        let path_mtus = dataplane.follow_path_mtus(Arc::clone(&host_changed))?;
        let net = Net::new()?;
        if let Err(error) = Interface::ensure(&net, &options.interface, None).await {
            if !adopted {
                drop(dataplane);
                dataplane::remove(&options.bpffs);
            }
            return Err(error.into());
        }
        let last_good = options.last_good.as_deref().map(|path| LastGood::new(path, &options.hostname));
        let last_good_writer = last_good.map(LastGoodWriter::new);
        let failover = options.failover.clone();
        let failover = failover.map(|options| Failover::new(options, Arc::clone(&host_changed)));
        let failover = failover.transpose().map_err(|source| DataplaneError::Run { source })?;
        Ok(Self {
            net,
            dataplane,
            options,
            backend: Arc::new(backend),
            publish_task: None,
            status_task: None,
            key,
            liveness: Liveness::default(),
            freed: FreedAddresses::default(),
            hops: HopIds::default(),
            log_limiter: LogLimiter::default(),
            resolver,
            host: None,
            applied: None,
            next_check_in: Instant::now(),
            unanswered: 0,
            last_refusal: String::new(),
            checked_in: 0,
            metrics,
            health,
            view,
            leaders: Leaders::default(),
            history: History::default(),
            reported_peers: None,
            host_changed,
            path_mtus,
            device: None,
            forward: Forward::default(),
            nat_rules: NatRules::default(),
            last_good_writer,
            availability: network::Availability::new(None),
            handshake_nudge: HandshakeNudge::default(),
            failover,
            _pins: pins,
        })
    }

    /// Reconciles on every change and every resync period until told to stop.
    ///
    /// # Errors
    /// When the kernel's events cannot be followed.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), AgentError> {
        let mut snapshots = self.backend.watch();
        let host_changed = Arc::clone(&self.host_changed);
        watch::watch(Arc::clone(&host_changed), self.net.rtnl().port())?;
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
        let mut resync = tokio::time::interval(self.options.resync.max(Duration::from_millis(100)));
        resync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut hooks = tokio::time::interval(LOOK_AT_HOOKS);
        hooks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let nudge = self.handshake_nudge.due();
            let cause = tokio::select! {
                () = stop.cancelled() => break,
                _ = resync.tick() => Cause::Host,
                () = host_changed.notified() => Cause::Host,
                _ = hooks.tick() => {
                    // An error is the reconcile's to report.
                    if self.dataplane.is_attached(&self.net).await.unwrap_or(false) && forwarding::is_on() {
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
                () = tokio::time::sleep_until(self.next_check_in.into()) => Cause::Own,
            };
            let snapshot = Arc::clone(&snapshots.borrow_and_update());
            if cause == Cause::Snapshot && self.only_heartbeats_changed(&snapshot) {
                continue;
            }
            if cause == Cause::Host {
                self.host = None;
            }
            let started = Instant::now();
            self.metrics.reconciles.inc();
            match self.reconcile(&snapshot).await {
                Ok(writes) => {
                    self.applied = Some(snapshot);
                    self.log_limiter.succeeded();
                    self.health.succeeded(Instant::now());
                    self.metrics.writes.inc_by(writes);
                    tracing::debug!(writes, milliseconds = started.elapsed().as_millis(), "reconciled");
                }
                Err(error) => {
                    self.applied = None;
                    self.metrics.error(error.label());
                    self.log_limiter.failed(error.to_string(), Instant::now());
                    self.health.failed(error.to_string());
                    if self.unanswered == 0 {
                        let retry = Instant::now() + RETRY.mul_f64(rand::random_range(0.8..1.2));
                        self.next_check_in = self.next_check_in.max(retry);
                    }
                }
            }
            self.metrics.reconcile_seconds.observe(started.elapsed().as_secs_f64());
        }
        if let Some(last_good_writer) = self.last_good_writer {
            last_good_writer.finish().await;
        }
        Ok(())
    }

    /// True when the snapshot differs from the one last applied in heartbeats
    /// only, and the same nodes are alive: then there is nothing to do.
    fn only_heartbeats_changed(&mut self, snapshot: &Arc<Snapshot>) -> bool {
        let Some(before) = &self.applied else { return false };
        if !snapshot.differs_only_in_heartbeats(before) {
            return false;
        }
        let view = self.view.borrow().clone();
        let nodes = with_own(&snapshot.nodes, view.own.as_ref());
        let ready = self.liveness.ready(nodes, &self.options.hostname, Instant::now(), unix_now());
        if ready != view.ready {
            return false;
        }
        drop(view);
        self.applied = Some(Arc::clone(snapshot));
        self.view.send_modify(|view| Arc::make_mut(view).snapshot = Arc::clone(snapshot));
        true
    }

    /// Computes the desired state once and applies what differs; returns the
    /// number of writes to the kernel. What is known of this host is forgotten
    /// when anything fails.
    async fn reconcile(&mut self, snapshot: &Arc<Snapshot>) -> Result<u64, AgentError> {
        let mut host = match self.host.take() {
            Some(host) => host,
            None => self.read_host().await?,
        };
        let writes = self.converge(snapshot, &mut host).await?;
        self.host = Some(host);
        Ok(writes)
    }

    async fn converge(&mut self, snapshot: &Arc<Snapshot>, host: &mut HostState) -> Result<u64, AgentError> {
        self.log_limiter.objects(&snapshot.problems, &self.metrics);
        let now = Instant::now();
        let unix_now = unix_now();
        let name = self.options.hostname.clone();
        let seen = snapshot.nodes.get(&name).ok_or_else(|| BackendError::NoSuchNode(name.clone()))?;
        let own = self.own_node(&seen, host).await;
        // What is the same stays where it is in memory.
        let shown = self.view.borrow().own.clone().filter(|shown| **shown == own);
        let shown = shown.unwrap_or_else(|| own.clone().into());
        let nodes = with_own(&snapshot.nodes, Some(&shown));
        let ready = self.liveness.ready(nodes.clone(), &name, now, unix_now);
        let members = among(nodes.clone(), &ready);
        let settings = &self.options.settings;
        let before = Arc::clone(&self.view.borrow().mesh);
        let mesh = before.next(members, &snapshot.peers, settings.granularity, settings.subnet);
        let freed = self.freed.after(&before, &mesh, now);
        let mesh =
            mesh.with_lost(not_among(nodes, &ready).chain(self.liveness.former(now))).with_freed(freed);
        let mesh = Arc::new(match &mut self.failover {
            Some(failover) => failover.mesh(mesh, &host.state, now),
            None => mesh,
        });
        drop(before);
        // An API server that is away must not keep this host from being put right.
        let unpublished = match self.publish(&own, seen, &mesh, &host.state, now, unix_now).await {
            Err(AgentError::Backend(error)) if error.is_temporary() => Some(error),
            other => other.map(|()| None)?,
        };
        self.leaders.observe(&mesh, now);
        self.report_successions(&mesh);
        self.observe(&mesh);
        let warned = if self.options.prefer_private { None } else { mesh.private_endpoint_of(&name) };
        if let Some(text) = self.log_limiter.private_endpoint(warned) {
            self.report(EventReason::PrivateEndpoint, text);
        }
        self.show(Arc::clone(&mesh), snapshot, shown, ready, &host.interface);

        let missing = |missing| AgentError::Incomplete { node: name.clone(), missing };
        if own.pod_cidrs.is_empty() {
            return Err(missing(
                "it has no pod CIDR; set spec.podCIDR (kube-controller-manager --allocate-node-cidrs)",
            ));
        }
        if own.endpoint.is_none() {
            return Err(missing(
                "no address of this host can be an endpoint; set the annotation force-endpoint",
            ));
        }
        let plan = self.plan(&mesh, &own, host).await;
        let mut plan = plan.ok_or_else(|| missing("it is not in the mesh"))?;
        let site = self.site(&mesh, &mut plan, host);
        if self.log_limiter.conflicts(&plan.conflicts, &self.metrics) {
            self.report_conflicts(&plan.conflicts);
        }
        let decision = self.nat_decision(&plan.tables);
        let applied = self.apply(plan, host).await;
        self.tell_failover(site);
        self.give_up(snapshot);
        let programs = self.dataplane.attached();
        self.view.send_if_modified(|view| {
            let differs = view.programs != programs;
            if differs {
                Arc::make_mut(view).programs = programs;
            }
            differs
        });
        // Pods' packets need these rules, whatever else failed.
        let ruled = self.write_forward_rules(&own).await + self.write_nat_rules(decision).await;
        self.metrics.writes.inc_by(ruled);
        let writes = applied?;
        // The data path is up: pods may start.
        self.publish_cni(&own);
        self.warn_of_other_cni();
        // What has just been applied: ready nodes, this one, peers.
        if let Some(last_good_writer) = &mut self.last_good_writer {
            last_good_writer.keep(&self.view.borrow().clone(), &self.metrics, now);
        }
        if unpublished.is_none() {
            self.report_peers(&mesh, snapshot).await;
        }
        unpublished.map_or(Ok(writes + std::mem::take(&mut host.made)), |error| Err(error.into()))
    }

    /// Programs and tables first, routes last: a packet that reaches the
    /// device always meets a program that knows what to do with it. One part
    /// that fails keeps none of the others from being put right: without its
    /// programs, peers or port the device drops what routes lead there.
    async fn apply(&mut self, plan: HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let mut parts = Parts::default();
        let written = self.dataplane.write(&plan.tables);
        for (map, entries) in self.dataplane.entries() {
            self.metrics.set_map_entries(map, entries);
        }
        parts.add(written.map_err(AgentError::from));
        parts.add(self.apply_programs(&plan, host).await);
        parts.add(self.apply_wireguard(&plan, host).await);
        let steers_by_source = plan.tables.steers_to_wireguard_by_source();
        parts.add(self.apply_net(plan.net, host, steers_by_source).await);
        parts.end(&self.metrics)
    }

    async fn apply_programs(&mut self, plan: &HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let interfaces = Interfaces {
            kilo: host.interface.index,
            uplinks: &plan.uplinks,
            layer3: &plan.layer3,
            tunnels: &plan.tunnels,
        };
        let attached = self.dataplane.attach(&self.net, interfaces).await?;
        self.metrics.reattached.inc_by(attached.reattached);
        for error in attached.failed {
            self.metrics.error(error.label());
            tracing::error!(%error, "failed to attach BPF program to interface; other interfaces are unaffected");
        }
        let guarded = host.tunnels.guard(self.net.rtnl(), &attached.unguarded).await;
        match attached.refused {
            Some(error) => Err(error.into()),
            None => Ok(attached.changes + guarded?),
        }
    }

    async fn apply_wireguard(&mut self, plan: &HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let changes = diff(&host.state, &plan.wireguard, &self.key);
        let writes = host.interface.device.apply(&changes).await? as u64;
        host.state.take(&changes);
        let (own, subnet) = (self.key.public(), &self.options.settings.subnet);
        self.handshake_nudge.watch(&changes, &plan.wireguard.peers, own, subnet, Instant::now());
        Ok(writes)
    }

    async fn apply_net(
        &self,
        plan: NetPlan,
        host: &mut HostState,
        steers_by_source: bool,
    ) -> Result<u64, AgentError> {
        let kilo = host.interface.index;
        let mut writes = match host.net.take() {
            Some(before) => self.net.change(&before, &plan, kilo).await?,
            None => self.net.apply(&plan, kilo).await?,
        } as u64;
        writes += forwarding::enable(plan.routes.iter().any(|route| route.destination.addr().is_ipv6()));
        if steers_by_source {
            writes += forwarding::accept_by_tunnel(self.net.rtnl(), &self.options.interface.name, kilo).await;
        }
        host.net = Some(plan);
        Ok(writes)
    }

    /// What the failover thread is to know, and the keys of signals for the tables; `None` when it
    /// is off, or this node takes no part.
    fn site(&mut self, mesh: &Mesh, plan: &mut HostPlan, host: &HostState) -> Option<failover::Site> {
        let failover = self.failover.as_mut()?;
        let node = &self.options.hostname;
        let held = self.dataplane.held_keys();
        plan.tables.signal_key = failover.signal_keys(mesh, node, &self.key, &self.hops, &held);
        failover::Site::of(&failover::Facts {
            mesh,
            node,
            hops: &self.hops,
            plan,
            state: &host.state,
            device: &host.interface.device,
            uplink: host.ways_out.default,
            keys: failover.keys(),
        })
    }

    fn tell_failover(&mut self, site: Option<failover::Site>) {
        let (Some(failover), Some(site)) = (&mut self.failover, site) else { return };
        let (bpffs, metrics) = (&self.options.bpffs, &self.metrics.failover);
        if let Err(error) = failover.tell(site, &self.dataplane, bpffs, metrics) {
            self.metrics.error(error.label());
            tracing::error!(%error, "failed to start failover; the leader is replaced when it is declared dead");
        }
    }

    /// Makes new peers shake hands that have not by themselves.
    async fn nudge(&mut self) {
        let Some(host) = &self.host else {
            // The next reconcile reads the host anew and tries again.
            self.handshake_nudge = HandshakeNudge::default();
            return;
        };
        match self.handshake_nudge.nudge(&host.interface.device, Instant::now()).await {
            Ok(writes) => drop(self.metrics.writes.inc_by(writes as u64)),
            Err(error) => {
                // It may have taken a peer off the device that it has not put back.
                self.host_changed.notify_one();
                self.metrics.error(error.label());
                tracing::warn!(%error, "failed to trigger handshakes with new peers");
            }
        }
    }

    async fn plan(&mut self, mesh: &Mesh, own: &Node, host: &mut HostState) -> Option<HostPlan> {
        let private = own.internal_ip.map(|net| net.addr());
        let mesh = &*mesh.around(&own.name);
        let (segment, _) = mesh.find(&own.name)?;
        let others = mesh.segments[segment].members.iter().filter(|member| member.name() != own.name);
        let overlay = plan::overlay_addresses(mesh, &own.name, self.options.compatibility);
        let elsewhere =
            overlay.iter().filter(|(name, _)| **name != own.name).map(|(_, ip)| IpAddr::from(*ip));
        let others = others.filter_map(topology::Member::private_ip).chain(elsewhere).collect();
        let query = links::HostQuery {
            kilo: host.interface.index,
            private,
            pod_cidrs: &own.pod_cidrs,
            next_hops: &host.ways_out.next_hops,
            ways: &host.ways,
        };
        let multihomed = links::host_links(&host.links, &query, &BTreeMap::new()).uplinks.len() > 1;
        self.net.find_paths(&mut host.paths, others, multihomed).await;
        if self.hops.is_empty() {
            self.hops = HopIds::adopt(&self.dataplane.held_senders(), mesh, &own.name);
        }
        let mut found = links::host_links(&host.links, &query, &host.paths.interfaces);
        found.more_towards.clone_from(&host.paths.several);
        (found.vxlan, found.ipip) = (host.tunnels.vxlan, host.tunnels.ipip);
        links::add_overlay(&mut found, &host.links, &own.name, overlay);
        links::add_elsewhere(&mut found, &host.ways_out.elsewhere);
        found.path_mtus = self.path_mtus.current(Instant::now());
        for (address, mtu) in &host.paths.mtus {
            found.path_mtus.entry(*address).and_modify(|known| *known = *mtu.min(known)).or_insert(*mtu);
        }
        self.hops = self.hops.update(mesh, &own.name);
        self.log_limiter.no_uplink(found.uplinks.is_empty(), &self.metrics);
        self.log_limiter.unknown_headers(&found.unknown_headers, &self.metrics);
        self.log_limiter.left_out(self.hops.left_out(mesh, &own.name), &self.metrics);
        let resolved = self.resolver.resolve(mesh).await;
        plan::host_plan(&Inputs {
            mesh,
            settings: &self.options.settings,
            node: &own.name,
            links: &found,
            hops: &self.hops,
            resolved: &resolved,
            seen: &host.state.seen_endpoints(),
            persistent_keepalive: own.persistent_keepalive,
            masquerade: self.options.masquerade == Masquerade::Ebpf,
            mtu: self.options.mtu.resolve(
                &host.links,
                host.ways_out.default,
                own.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6()),
            ),
        })
    }

    /// Sets gauges.
    fn observe(&self, mesh: &Mesh) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.leader.set(i64::from(mesh.leads(&self.options.hostname)));
        self.metrics.nodes.set(gauge(mesh.node_count()));
        self.metrics.peers.set(gauge(mesh.peers.len()));
    }

    /// Keeps what `/status` and `/graph` answer from.
    fn show(
        &mut self,
        mesh: Arc<Mesh>,
        snapshot: &Arc<Snapshot>,
        own: Arc<Node>,
        ready: Vec<bool>,
        interface: &Interface,
    ) {
        let before = self.view.borrow().clone();
        let own_differs = before.own.as_ref() != Some(&own);
        if let Some(last_good_writer) = &self.last_good_writer
            && (own_differs
                || ready != before.ready
                || !snapshot.differs_only_in_heartbeats(&before.snapshot))
        {
            last_good_writer.note_change();
        }
        self.view.send_replace(Arc::new(View {
            node: self.options.hostname.clone(),
            interface: self.options.interface.name.clone(),
            mesh,
            snapshot: Arc::clone(snapshot),
            own: Some(own),
            ready,
            granularity: self.options.settings.granularity,
            leaders: self.leaders.clone(),
            history: self.history.clone(),
            programs: before.programs.clone(),
            warnings: before.warnings.clone(),
            device: Some(interface.device.clone()),
            failover: self.failover.as_ref().map(Failover::reporter),
        }));
    }
}

fn unix_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
