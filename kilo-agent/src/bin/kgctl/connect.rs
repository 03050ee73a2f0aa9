//! `kgctl connect`: makes this machine a peer until it is interrupted.

mod fail_closed;
mod first_handshakes;
mod following;
mod node_source;
mod remedy;

use std::{
    collections::BTreeMap,
    io::IsTerminal as _,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use ipnet::IpNet;
use kilo_agent::{
    cli::{log_filter, parse_bool, parse_cidr, parse_interface, parse_number, parse_period, parse_port},
    resolve::Resolver,
    timestamp::Timestamp,
};
use kilo_core::{
    errors::error_chain,
    objects::{Snapshot, peer},
    settings::{LogLevel, WireguardMode, defaults},
    signal_id,
    topology::{Liveness, Mesh, Peer},
    vpn_peer::{self, ConnectPlan, Options},
    wireguard::{Change, WireguardPlan, diff, is_dns_name, key::SecretKey},
};
use kilo_host::{
    interface::{self, Interface},
    lock,
    net::{Net, routes},
    wireguard::private_key,
};
use tokio::signal::unix::{SignalKind, signal};

use self::{
    fail_closed::Closed,
    first_handshakes::{FirstHandshakes, Next},
    following::Following,
    node_source::Origin,
};
use crate::{
    complete,
    progress::{self, Progress},
    source::{self, Flags},
};

/// Pause after a failure to follow gateways.
const AGAIN: Duration = Duration::from_secs(300);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl connect laptop --allowed-ip=10.5.0.1/32
  kgctl connect laptop --allowed-ip=10.5.0.1/32 --allowed-ips=10.43.0.0/16
  kgctl connect laptop --clean-up=false --private-key=/etc/wireguard/laptop.key")]
pub struct ConnectArgs {
    /// Name of the Peer object; defaults to the host name.
    #[arg(add = complete::peers())]
    peer: Option<String>,
    /// Address of this machine in the mesh, for a Peer that does not exist yet.
    #[arg(long, short, value_name = "CIDR", default_value = "10.10.10.10/32", value_parser = parse_cidr)]
    allowed_ip: IpNet,
    /// Number of stand-bys per location to keep as WireGuard peers, 0 to 4; must match the agents'
    /// --stand-bys.
    #[arg(long, default_value_t = defaults::STAND_BYS, value_parser = parse_number::<0, 4>)]
    stand_bys: u8,
    /// More prefixes to reach through the cluster, services for example (repeatable).
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = parse_cidr)]
    allowed_ips: Vec<IpNet>,
    /// On exit, remove the interface, the routes and the Peer object if this command created it.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    clean_up: bool,
    /// Create the WireGuard interface; otherwise it must exist, and is kept on exit.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    create_interface: bool,
    /// Name of the WireGuard interface.
    #[arg(long, short, default_value = defaults::INTERFACE, value_parser = parse_interface)]
    interface: String,
    /// Log level: all, debug, info, warn, error or none.
    #[arg(long, default_value = "info")]
    log_level: LogLevel,
    /// MTU of the WireGuard interface in bytes.
    #[arg(long, default_value = "1420", value_parser = clap::value_parser!(u32).range(576..=65535))]
    mtu: u32,
    /// Seconds between keepalive packets; 0 = none.
    #[arg(long, default_value = "10")]
    persistent_keepalive: u16,
    /// File of the WireGuard private key, created if it does not exist; defaults to /var/lib/kilo/PEER.key.
    #[arg(long, value_name = "FILE")]
    private_key: Option<PathBuf>,
    /// Interval between full resyncs.
    #[arg(long, default_value = defaults::RESYNC_PERIOD, value_parser = parse_period)]
    resync_period: Duration,
    /// WireGuard implementation: auto, kernel or userspace.
    #[arg(long, default_value = "auto")]
    wireguard: WireguardMode,
    /// WireGuard port of this machine.
    #[arg(long, default_value_t = defaults::WIREGUARD_PORT, value_parser = parse_port)]
    port: u16,
    #[command(flatten)]
    flags: Flags,
}

/// Connects and stays connected until SIGINT, SIGTERM or SIGHUP (a terminal that is closed).
pub async fn run(args: &ConnectArgs) -> Result<String> {
    let flags = &args.flags;
    log_to_stderr(args.log_level);
    // Before anything else, so that no signal ends this halfway.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut hangup = signal(SignalKind::hangup())?;
    let name = match &args.peer {
        Some(name) => name.clone(),
        None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
    };
    if !is_dns_name(&name) {
        bail!("{name:?} cannot be the name of a Peer; use lower case letters, digits, '-' and '.'");
    }
    if args.allowed_ip.prefix_len() != args.allowed_ip.max_prefix_len() {
        let network = args.allowed_ip;
        let first = network.hosts().next().filter(|_| network.addr() == network.network());
        bail!(
            "--allowed-ip {network} is a network, and this machine has one address in the mesh; write for example {}",
            IpNet::from(first.unwrap_or(network.addr()))
        );
    }
    remedy::check_rights()?;
    let path = args.private_key.clone().unwrap_or_else(|| PathBuf::from(format!("/var/lib/kilo/{name}.key")));
    let existing = private_key::load_existing(&path)?;
    let interface = interface::Options {
        name: args.interface.clone(),
        mode: args.wireguard,
        create: args.create_interface,
        executable: std::env::current_exe().context("failed to find the path of this program")?,
    };
    let _lock = lock::interface(Path::new(lock::STATE), &args.interface).map_err(remedy::of_lock)?;
    let progress = Progress::new("connecting", 0);
    let origin = Origin::start(flags).await?;
    // A key is generated only for a new Peer: it would not match an existing one.
    let key = match existing {
        Some(key) => key,
        None if origin.has_peer(&name).await? => bail!(
            "Peer {name:?} exists, and its private key is not in {}; give the file with --private-key, or choose \
             another name",
            path.display()
        ),
        None => private_key::load_or_create(&path)?,
    };
    let mut connection = Connection::new(args, name, key, (origin, interface), progress)?;
    connection.check_alone().await?;
    let ended = tokio::select! {
        ended = connection.keep(args.resync_period, flags) => ended,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        _ = hangup.recv() => Ok(()),
    };
    drop(connection.progress.take());
    if args.clean_up {
        let _progress = Progress::new("disconnecting", 0);
        for problem in connection.clean_up().await {
            tracing::error!("{problem}");
        }
    } else if connection.wanted.follows
        && let Err(error) = connection.leave_as_is(flags).await
    {
        tracing::error!("{}", error_chain(error.as_ref()));
    }
    ended.map(|()| String::new())
}

struct Connection {
    net: Net,
    origin: Origin,
    resolver: Resolver,
    following: Following,
    liveness: Liveness,
    /// Following gateways failed and is not retried before this time.
    not_before: Option<Instant>,
    stand_bys: usize,
    options: Options,
    interface: interface::Options,
    wanted: Peer,
    key: SecretKey,
    /// The device's configuration as last planned.
    planned: WireguardPlan,
    /// Prefixes whose traffic must not leave in cleartext.
    closed: Closed,
    /// Prefixes without a route that were last warned about.
    unrouted: Vec<IpNet>,
    /// Locations whose leader is not a peer of this machine, as last warned about.
    warned: BTreeMap<String, String>,
    /// Shown until the connection is up.
    progress: Option<Progress>,
}

impl Connection {
    /// Prepares the connection of a Peer with this name and key.
    fn new(
        args: &ConnectArgs,
        name: String,
        key: SecretKey,
        (origin, interface): (Origin, interface::Options),
        progress: Progress,
    ) -> Result<Self> {
        let wanted = Peer {
            name: name.clone(),
            allowed_ips: vec![args.allowed_ip],
            endpoint: None,
            persistent_keepalive: args.persistent_keepalive.into(),
            preshared_key: None,
            public_key: key.public(),
            follows: false,
        };
        let options = Options {
            peer: name,
            port: args.port,
            mtu: args.mtu,
            persistent_keepalive: args.persistent_keepalive,
            more_prefixes: args.allowed_ips.clone(),
        };
        Ok(Self {
            net: Net::new()?,
            origin,
            resolver: Resolver::waiting(),
            following: Following::new(&key.public()),
            liveness: Liveness::default(),
            not_before: None,
            stand_bys: args.stand_bys.into(),
            options,
            interface,
            wanted,
            key,
            planned: WireguardPlan::default(),
            closed: Closed::default(),
            unrouted: Vec::new(),
            warned: BTreeMap::new(),
            progress: Some(progress),
        })
    }

    /// Our routes are recognised by their protocol alone, so only one process may manage them.
    async fn check_alone(&self) -> Result<()> {
        let links = self.net.links().await?;
        for found in routes::read(self.net.rtnl()).await? {
            let link = links.iter().find(|link| Some(link.index) == found.interface);
            if let Some(link) = link.filter(|link| link.name != self.interface.name) {
                bail!(
                    "another process already manages routes through {}: either this machine is a node of the mesh, or \
                     another kgctl connect is running",
                    link.name
                );
            }
        }
        let Some(interface) = self.existing().await else { return Ok(()) };
        let state = interface.device.read().await?;
        if state.private_key.is_some_and(|key| key.public() != self.key.public()) {
            bail!(
                "{} is in use by something else: its private key differs; choose another --interface",
                self.interface.name
            );
        }
        Ok(())
    }

    /// The interface, if it exists and is a WireGuard device.
    async fn existing(&self) -> Option<Interface> {
        let options = interface::Options { create: false, ..self.interface.clone() };
        Interface::ensure(&self.net, &options, None).await.ok().map(|(interface, _)| interface)
    }

    /// The interface, created if missing; returns whether it was.
    async fn ensure_interface(&self) -> Result<(Interface, bool)> {
        Interface::ensure(&self.net, &self.interface, None).await.map_err(remedy::of_wireguard)
    }

    /// Keeps everything in sync; returns only on an error before this machine is connected, or when the
    /// watches end.
    async fn keep(&mut self, resync: Duration, flags: &Flags) -> Result<()> {
        let mut snapshots = self.origin.watch();
        let mut ticks = tokio::time::interval(resync.max(Duration::from_millis(100)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let first = Arc::clone(&snapshots.borrow_and_update());
        self.decide(&first, flags);
        // Traffic to nodes' own addresses is blocked only after the Peer exists, because the API server may
        // run on a node.
        let mesh = self.build_mesh(&first, flags)?;
        fail_closed::begin(&self.net, vpn_peer::pods(&mesh)).await?;
        let mut peer = self.origin.ensure(&self.wanted, &mesh).await?;
        let mut connected = false;
        loop {
            let mut check_peer = false;
            tokio::select! {
                _ = ticks.tick() => check_peer = connected,
                changed = snapshots.changed() => changed.context("the watches have ended")?,
                // A name of an endpoint now stands for another address.
                () = self.resolver.changed() => {}
            }
            if check_peer {
                self.decide(&snapshots.borrow_and_update(), flags);
                match self.origin.ensure(&self.wanted, &mesh).await {
                    Ok(found) => peer = found,
                    // The tunnels work without the API server.
                    Err(error) => tracing::warn!("{}", error_chain(error.as_ref())),
                }
            }
            let snapshot = Arc::clone(&snapshots.borrow_and_update());
            match self.sync(&snapshot, &peer, flags).await {
                Ok(writes) if !connected => {
                    connected = true;
                    if self.following.is_on() {
                        self.await_gateways(&snapshot, &peer, flags).await?;
                    }
                    drop(self.progress.take());
                    tracing::info!(
                        interface = self.interface.name,
                        writes,
                        "this machine is connected to the mesh"
                    );
                }
                Ok(0) => {}
                Ok(writes) => tracing::info!(writes, "the interface and its routes were updated"),
                Err(error) if connected => tracing::error!("{}; retrying", error_chain(error.as_ref())),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until every gateway has answered, so that any of them may fail afterwards.
    async fn await_gateways(&mut self, snapshot: &Snapshot, peer: &Peer, flags: &Flags) -> Result<()> {
        let mut handshakes = FirstHandshakes::new(Instant::now());
        loop {
            let (interface, _) = self.ensure_interface().await?;
            let gateways = self.following.gateways();
            let silent = first_handshakes::silent(&gateways, &self.planned, &interface.device.read().await?);
            if handshakes.note_silent(&silent) {
                self.following.announce();
            }
            match handshakes.next(silent, Instant::now()) {
                Next::Wait => tokio::time::sleep(first_handshakes::LOOK).await,
                Next::Again(silent) => {
                    let removed: Vec<_> = silent.into_iter().map(Change::RemovePeer).collect();
                    interface.device.apply(&removed).await?;
                    self.sync(snapshot, peer, flags).await?;
                }
                Next::Done(silent) => {
                    for key in silent {
                        tracing::warn!(
                            gateway = self.following.name(&key),
                            "this gateway does not answer: nodes that use it cannot be reached from here. Check its \
                             endpoint and UDP port"
                        );
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Builds the mesh of the nodes that are alive, even while the API server is away.
    fn build_mesh(&mut self, snapshot: &Snapshot, flags: &Flags) -> Result<Mesh> {
        let nodes = || snapshot.nodes.iter();
        let ready = self.liveness.ready_as_heard(nodes(), Instant::now(), Timestamp::now().0);
        let ready = nodes().zip(ready).filter(|(_, ready)| *ready);
        source::mesh_of(snapshot, &flags.mesh, &ready.map(|(known, _)| known.node.name.as_str()).collect())
    }

    /// Decides whether this machine follows gateways: if a location has several, and this machine is able to.
    fn decide(&mut self, snapshot: &Snapshot, flags: &Flags) {
        let has_several = self.build_mesh(snapshot, flags).is_ok_and(|mesh| {
            let mesh = mesh.with_acting(self.stand_bys, Arc::default());
            mesh.gateways.iter().any(|gateways| gateways.order.len() > 1)
        });
        let is_due = self.not_before.is_none_or(|not_before| Instant::now() >= not_before);
        let obstacle = following::obstacle(self.options.mtu);
        self.wanted.follows = has_several && is_due && obstacle.is_none();
        if let Some(obstacle) = obstacle.filter(|_| has_several && is_due && self.not_before.is_none()) {
            self.not_before = Some(Instant::now() + AGAIN);
            tracing::warn!(
                "this machine cannot follow gateways, so it uses only Kilo's leaders: gateways' signals use IPv6 inside \
                 the tunnels, so {obstacle}"
            );
        }
    }

    /// Reads, plans and writes what differs; returns the number of writes.
    async fn sync(&mut self, snapshot: &Snapshot, peer: &Peer, flags: &Flags) -> Result<usize> {
        let mut snapshot = snapshot.clone();
        // The watch may not have delivered a Peer that was just created.
        let own = Arc::make_mut(&mut snapshot.peers).entry(peer.name.clone()).or_insert_with(|| peer.clone());
        own.follows &= self.wanted.follows;
        let follows = own.follows;
        if vpn_peer::addresses(own).is_empty() {
            bail!(
                "Peer {:?} has no address for this machine: none of its allowed IPs is a /32 or /128",
                peer.name
            );
        }
        let mesh = self.build_mesh(&snapshot, flags)?;
        let mesh = mesh.with_acting(self.stand_bys, Arc::new(self.following.acting()));
        let resolved: BTreeMap<String, IpAddr> = self.resolver.resolve(&mesh).await;
        let (interface, created) = self.ensure_interface().await?;
        let state = interface.device.read().await?;
        // Reads the claims again after the device: a prefix claimed later is not moved back, because the plan
        // does not differ from what was read.
        let mesh = mesh.with_acting(self.stand_bys, Arc::new(self.following.acting()));
        let plan = vpn_peer::plan(&mesh, &self.options, &resolved).with_context(|| {
            format!("Peer {0:?} is not in the mesh: kubectl describe peer {0} says why", peer.name)
        })?;
        let ConnectPlan { wireguard, mut net, unrouted } = plan;
        if net.addresses.iter().all(signal_id::is_control) {
            let own = vpn_peer::addresses(peer);
            let earlier = mesh.peers.iter().find(|it| it.allowed_ips.iter().any(|ip| own.contains(ip)));
            bail!(
                "Peer {:?} has no address for this machine: Peer {:?} has it; choose another --allowed-ip, or change \
                 the Peer",
                peer.name,
                earlier.map_or("", |peer| &peer.name)
            );
        }
        if self.unrouted != unrouted {
            for prefix in &unrouted {
                tracing::warn!(%prefix, "prefix not routed into the tunnel because it contains a tunnel endpoint");
            }
            self.unrouted = unrouted;
        }
        let mut writes = usize::from(created);
        // An error is returned only at the end: the tunnel is updated regardless.
        let closed = self.closed.before(&self.net, &mut net, &wireguard).await;
        writes += interface.device.apply(&diff(&state, &wireguard, &self.key)).await?;
        writes += self.net.apply(&net, interface.index).await?;
        if follows && let Err(error) = self.following.go_on(&mesh, &wireguard, &interface.device) {
            tracing::error!(
                "{}; this machine uses only Kilo's leaders; retrying in {} s",
                error_chain(error.as_ref()),
                AGAIN.as_secs()
            );
            (self.wanted.follows, self.not_before) = (false, Some(Instant::now() + AGAIN));
            self.origin.annotate(&self.wanted.name, false).await?;
        }
        self.planned = wireguard;
        self.warn_of_stand_bys(&mesh);
        Ok(writes + closed?)
    }

    /// Warns once that agents are configured with more stand-bys than this machine.
    fn warn_of_stand_bys(&mut self, mesh: &Mesh) {
        let is_led = |at: &usize| self.wanted.follows && mesh.unforeseen(*at).is_some();
        let warning = |at: usize| Some((mesh.segments[at].location.clone(), mesh.stand_by_warning(at)?));
        let warnings: BTreeMap<String, String> =
            (0..mesh.segments.len()).filter(is_led).filter_map(warning).collect();
        for (location, warning) in
            warnings.iter().filter(|(location, _)| !self.warned.contains_key(*location))
        {
            tracing::warn!("{location}: {warning}");
        }
        self.warned = warnings;
    }

    /// Leaves the interface with a static configuration, because gateways are no longer followed.
    async fn leave_as_is(&mut self, flags: &Flags) -> Result<()> {
        self.wanted.follows = false;
        let (snapshot, peer) = (Arc::clone(&self.origin.watch().borrow()), self.wanted.clone());
        // Works without the API server, too.
        self.sync(&snapshot, &peer, flags).await?;
        self.origin.annotate(&self.wanted.name, false).await
    }

    /// Undoes everything; returns descriptions of what failed.
    async fn clean_up(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let index = self.existing().await.map(|interface| interface.index);
        if let Err(error) = self.net.remove(index).await {
            problems.push(error.to_string());
        }
        if self.interface.create
            && let Err(error) = Interface::remove(&self.net, &self.interface).await
        {
            problems.push(error.to_string());
        }
        if let Err(error) = self.origin.release(&self.wanted).await {
            problems.push(format!(
                "Peer {0} could not be removed: {1}. Delete it (kubectl delete peer {0}), or if others use it: \
                 kubectl annotate peer {0} {2}-",
                self.wanted.name,
                error_chain(error.as_ref()),
                peer::FOLLOWS
            ));
        }
        problems
    }
}

fn log_to_stderr(level: LogLevel) {
    use tracing_subscriber::{EnvFilter, fmt, prelude::*};
    let layer = fmt::layer()
        .with_writer(|| progress::Stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false);
    tracing_subscriber::registry().with(EnvFilter::new(log_filter(level, "kgctl"))).with(layer).init();
}
