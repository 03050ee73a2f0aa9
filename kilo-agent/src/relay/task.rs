//! The task that receives relay messages, decides, and sends.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kilo_common::{
    map_table::RELAY_KEY,
    relay::{Heard, Kind, Message},
    siphash,
};
use kilo_core::{
    relay::{self, Client, Output, OwnEnd, Path, Server},
    settings,
    signal_id::{self, NodeId},
    tunnel_path::PathWithRelay,
    wireguard::key::{PublicKey, SecretKey},
};
use kilo_host::{
    dataplane::{
        lead::{self, Signals},
        relay::{RelayMaps, RelayRing},
    },
    wireguard::Reading,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    Connected, Relays,
    mesh::{FarGateways, Locations, RelayView},
    paths::{Paths, Ports},
};
use crate::{metrics::Metrics, packets};

/// Capacity of the map `relay_key`.
const MOST_KEYS: usize = RELAY_KEY.size as usize;
/// Pause between two turns while something is under way; [`IDLE`] otherwise.
const BUSY: Duration = Duration::from_millis(100);
/// Pause while moved endpoints are defended: on a busy tunnel packets move them back every millisecond.
const INSISTS: Duration = Duration::from_millis(10);
const IDLE: Duration = Duration::from_secs(1);
/// Interval between reads of the device, and interval where no other paths are needed.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_OFF: Duration = Duration::from_secs(5);
/// Reading a device with many prefixes takes at most 1/`SHARE` of the time, but it is read at least every
/// [`LOOK_SELDOM`], so that silence is noticed on a busy machine, too.
const SHARE: u32 = 20;
const LOOK_SELDOM: Duration = Duration::from_secs(3);
/// Share where no other paths are needed: then only status, metrics and graph use the result.
const SHARE_OFF: u32 = 1000;
const LOOK_RARELY: Duration = Duration::from_secs(60);

/// Settings of the task, and what it shares with other tasks.
pub struct Context {
    /// Private key of this node.
    pub key: SecretKey,
    /// UDP port of the WireGuard device.
    pub port: u16,
    /// Whether tunnels may go through relays (`--relay`).
    pub relay: settings::Relay,
    /// Rate limit for each end of a pair through this node (`--relay-rate`), in megabits per second; 0 =
    /// unlimited.
    pub relay_rate: u16,
    /// The mesh and the device, as published by reconciles.
    pub view: watch::Receiver<RelayView>,
    /// Changes when packets of this host may take another path.
    pub routes_changed: watch::Receiver<()>,
    /// The task's findings, for reconciles.
    pub relays: Relays,
    /// Wakes the reconcile loop.
    pub changed: Arc<Notify>,
    /// Gauges of tunnels and relayed pairs.
    pub metrics: Metrics,
    /// Cancelled to stop the task.
    pub stop: CancellationToken,
}

/// Programs and maps that the task uses.
#[derive(Debug)]
pub struct Tools {
    /// Sends messages from WireGuard's port.
    pub signals: Signals,
    /// The maps of relayed ports and of keys.
    pub maps: RelayMaps,
    /// The ring with messages from the programs.
    pub ring: RelayRing,
}

pub struct Task {
    context: Context,
    signals: Signals,
    maps: RelayMaps,
    ring: Option<RelayRing>,
    own: NodeId,
    client: Client,
    server: Server,
    far: FarGateways,
    /// Pairwise keys with gateways, cached because each costs a Diffie-Hellman exchange.
    keys: BTreeMap<PublicKey, siphash::Key>,
    reachable: BTreeMap<NodeId, SocketAddr>,
    paths: Paths,
    ports: Ports,
    look_again: Instant,
    /// Maximum age of a reading of the device by others.
    counts: Duration,
    /// The locations at the last reading of the device.
    locations: Locations,
    /// Paths as last reported.
    said: BTreeMap<NodeId, Path>,
    /// Whether the device has been read.
    has_looked: bool,
    /// Pause between two turns while endpoints are defended.
    keeps_each: Duration,
    /// Replayed messages as last counted.
    refused: u64,
}

impl Task {
    pub fn new(context: Context, tools: Tools) -> Self {
        let own = signal_id::node(&context.key.public());
        let now = Instant::now();
        let mut server = Server::adopted(&tools.maps.ports(), now, &mut rand::random);
        let mut ports = Ports::default();
        for port in server.taken() {
            if !ports.take(port) {
                tracing::warn!(
                    port,
                    "another process has taken the UDP port of a relayed pair; assigning other ports to the pair"
                );
                server.forget_port(port);
            }
        }
        Self {
            context,
            signals: tools.signals,
            maps: tools.maps,
            ring: Some(tools.ring),
            own,
            client: Client::new(own),
            server,
            far: FarGateways::default(),
            keys: BTreeMap::new(),
            reachable: BTreeMap::new(),
            paths: Paths::default(),
            ports,
            look_again: now,
            counts: Duration::ZERO,
            locations: Locations::default(),
            said: BTreeMap::new(),
            has_looked: false,
            keeps_each: INSISTS,
            refused: 0,
        }
    }

    pub async fn run(mut self) {
        let stop = self.context.stop.clone();
        let Some(mut ring) = self.ring.take() else { return };
        let mut next = Instant::now();
        // The kernel's events are followed while the agent runs.
        let mut routes_changed = self.context.routes_changed.clone();
        let mut last = next;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                heard = ring.heard() => match heard {
                    Ok(heard) => {
                        for one in heard {
                            self.hear(&one).await;
                        }
                        let now = Instant::now();
                        if self.client.insists(now) {
                            next = next.min(now + self.keeps_each);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(
                            %error,
                            "failed to read relay messages; this agent can no longer use or offer relays: \
                             restart it"
                        );
                        return;
                    }
                },
                Ok(()) = routes_changed.changed(), if self.server.pairs() > 0 => {
                    self.maps.routes_changed();
                    // Collects changes: many routes may change in a row.
                    next = next.min(last + BUSY);
                }
                () = tokio::time::sleep_until(next.into()) => {
                    self.turn().await;
                    last = Instant::now();
                    next = last
                        + match self.client.is_busy() {
                            _ if self.client.insists(last) => self.keeps_each,
                            true => BUSY,
                            false => IDLE,
                        };
                }
            }
        }
    }

    /// Whether the task only shows how tunnels are connected, and changes nothing.
    fn is_off(&self) -> bool {
        self.context.relay == settings::Relay::Off
    }

    /// Whether relays may be used here at all.
    fn is_on(&self) -> bool {
        !self.is_off() && self.far.is_gateway && self.far.is_wanted
    }

    async fn turn(&mut self) {
        let now = Instant::now();
        let (mesh, is_another) = {
            let view = self.context.view.borrow();
            // Before the first reconcile nothing is known, and the state of an earlier agent stays.
            if view.observed.own.is_none() || view.device.is_none() {
                return;
            }
            (Arc::clone(&view.observed.mesh), !self.locations.are_of(&view.observed.mesh))
        };
        // An additional VPN peer, for example, is not a reason to read the device: with thousands of peers
        // that takes long, and meanwhile the device is not changed. While endpoints are defended against late
        // packets, the next reading is put off: the defence must not wait for it.
        let look_again =
            if self.client.insists(now) { self.look_again + LOOK_SELDOM } else { self.look_again };
        if now >= look_again || is_another {
            if is_another {
                self.counts = Duration::ZERO;
            }
            self.locations = Locations::of(&mesh);
            self.look().await;
            if !self.is_off() {
                self.serve(Instant::now());
            }
        } else if self.maps.has_routes_changed() {
            self.write_ports();
        }
        if !self.is_off() {
            let outputs = self.client.turn(Instant::now(), micros(), &mut rand::random);
            self.act(outputs).await;
        }
        let refused = self.client.refused() + self.server.refused();
        self.context.metrics.relay_refused.inc_by(refused - self.refused);
        self.refused = refused;
        self.publish();
    }

    /// Reads the device, and evaluates the mesh for the gateways in it.
    async fn look(&mut self) {
        let started = Instant::now();
        let view = self.context.view.borrow().clone();
        let Some(device) = &view.device else { return };
        // A reconcile may just have read it.
        let Reading { at, took, peers } = match device.status_within(self.counts).await {
            Ok(reading) => reading,
            Err(error) => {
                tracing::debug!(%error, "failed to read WireGuard peers");
                self.look_again = started + LOOK;
                return;
            }
        };
        let now = Instant::now();
        self.far = FarGateways::of(&view, &self.context.relays, &peers);
        self.has_looked = true;
        let uses = self.is_on();
        // Pairs that a relay has abandoned must end in time.
        let is_pressing = uses || self.server.pairs() > 0;
        let counts = until_next_look(took, is_pressing);
        self.look_again = at + took + counts;
        self.counts = if is_pressing { Duration::ZERO } else { counts };
        let own = OwnEnd { uses_relays: uses, is_behind_nat: self.far.is_behind_nat };
        self.client.see(self.far.seen.clone(), own, now);
        let fresh = self.far.seen.iter().filter(|seen| seen.is_fresh() && uses && !seen.refuses);
        self.reachable = fresh
            .filter(|seen| !self.client.is_relayed(seen.id))
            .filter_map(|seen| Some((seen.id, seen.endpoint?)))
            .collect();
        self.write_keys(uses);
    }

    fn write_keys(&mut self, uses: bool) {
        let nodes = &self.far.nodes;
        let known: HashSet<_> = nodes.values().map(|(key, _)| *key).collect();
        self.keys.retain(|key, _| uses && known.contains(key));
        let mut desired = BTreeMap::new();
        // Gateways that carry packets come first, in case the map is too small.
        let (waiting, carrying): (Vec<_>, Vec<_>) =
            nodes.iter().partition(|(id, _)| self.far.stand_bys.contains(id));
        for (id, (key, _)) in carrying.into_iter().chain(waiting).filter(|_| uses).take(MOST_KEYS) {
            let own = &self.context.key;
            let derived = match self.keys.get(key) {
                Some(known) => Some(*known),
                None => signal_id::pair_key(own, key),
            };
            let Some(derived) = derived else { continue };
            self.keys.insert(*key, derived);
            desired.insert(*id, derived.0);
        }
        if let Err(error) = self.maps.write_keys(&desired) {
            tracing::warn!(%error, "failed to write the keys of relay messages");
        }
    }

    /// Does the work of a relay.
    fn serve(&mut self, now: Instant) {
        self.server.set_relays(self.is_on() && self.far.offers, now);
        let refuse: BTreeSet<_> =
            self.far.seen.iter().filter(|seen| seen.refuses).map(|seen| seen.id).collect();
        self.server.end_pairs_of(|id| refuse.contains(&id));
        if self.has_looked {
            self.server.end_pairs_without(|id| self.far.nodes.contains_key(&id), now);
        }
        self.server.see_relays(Arc::clone(&self.context.view.borrow().relay_addresses));
        self.server.see_stand_bys(self.far.stand_bys.clone());
        self.server.turn(&self.maps.ports(), now, micros());
        self.write_ports();
        self.ports.keep(&self.server.taken());
    }

    fn write_ports(&mut self) {
        if let Err(error) = self.maps.write_ports(&self.server.table(self.context.relay_rate)) {
            tracing::warn!(%error, "failed to write relay ports");
        }
    }

    async fn hear(&mut self, heard: &Heard) {
        let Some(message) = Message::read(&heard.bytes).filter(|_| self.is_on()) else { return };
        let address = |bytes: [u8; 16]| IpAddr::from(bytes).to_canonical();
        let source = SocketAddr::new(address(heard.source), heard.source_port);
        let now = Instant::now();
        if message.kind != Kind::Ask {
            let outputs = self.client.hear(&message, source, rand::random(), now);
            self.act(outputs).await;
            return;
        }
        if !self.far.offers {
            return;
        }
        let from =
            relay::Heard { source, local: address(heard.local), port: heard.port, ifindex: heard.ifindex };
        let (ports, changes) = (&mut self.ports, self.server.changes());
        let outputs = self.server.hear(
            &message,
            from,
            (self.own, &self.reachable),
            &mut |port| ports.take(port),
            &mut rand::random,
            now,
        );
        // An end sends as soon as it learns that it is bound, so the programs must know the port before.
        if self.server.changes() != changes {
            self.write_ports();
        }
        self.act(outputs).await;
    }

    async fn act(&mut self, outputs: Vec<Output>) {
        let mut keeping = Duration::ZERO;
        for output in outputs {
            match output {
                Output::Send { node, to, message } => self.send(node, to, &message),
                Output::Keep { node, to } => keeping += self.keep_endpoint(node, to).await,
                Output::Move { node, to } => self.move_endpoint(node, to).await,
            }
        }
        if !keeping.is_zero() {
            // In user space WireGuard goes through all its peers for each.
            self.keeps_each = (keeping * SHARE).clamp(INSISTS, BUSY.max(keeping));
        }
    }

    fn send(&mut self, node: NodeId, to: SocketAddr, message: &Message) {
        let key = self.far.nodes.get(&node).and_then(|(key, _)| self.keys.get(key));
        let Some(key) = key.copied() else { return };
        let Some((source, ifindex)) = self.paths.look_up(to.ip(), Instant::now()) else { return };
        let kilo = self.context.view.borrow().device.as_ref().map(kilo_host::wireguard::Device::index);
        // Inside the tunnel it would say nothing about the path outside.
        if kilo == Some(ifindex) {
            return;
        }
        let bytes = message.write(key);
        let packet = packets::udp((source, self.context.port), (to.ip(), to.port()), &bytes);
        let Some(packet) = packet else { return };
        if let Err(error) = self.signals.send(lead::SendVia::Out(ifindex), &packet) {
            tracing::debug!(%error, %to, kind = ?message.kind, "failed to send a relay message");
        }
    }

    /// Sets the endpoint once more; returns how long that took.
    async fn keep_endpoint(&mut self, node: NodeId, to: SocketAddr) -> Duration {
        let began = Instant::now();
        let device = self.context.view.borrow().device.clone();
        let (Some(device), Some((key, name))) = (device, self.far.nodes.get(&node)) else {
            return Duration::ZERO;
        };
        if let Err(error) = device.move_endpoint(*key, to).await {
            tracing::debug!(%error, node = name, %to, "failed to keep the endpoint of a tunnel");
        }
        began.elapsed()
    }

    async fn move_endpoint(&mut self, node: NodeId, to: SocketAddr) {
        // The next reconcile must not move it back.
        self.publish();
        let device = self.context.view.borrow().device.clone();
        let (Some(device), Some((key, name))) = (device, self.far.nodes.get(&node)) else { return };
        tracing::debug!(node = name, %to, "changing the endpoint of a tunnel");
        if let Err(error) = device.move_endpoint(*key, to).await {
            tracing::warn!(%error, node = name, %to, "failed to change the endpoint of a tunnel");
        }
        (self.look_again, self.counts) = (Instant::now(), Duration::ZERO);
        self.context.changed.notify_one();
    }

    /// Publishes paths and endpoints for reconciles, status and metrics, and logs changes.
    fn publish(&mut self) {
        let name = |id: &NodeId| self.far.nodes.get(id);
        let uses = self.is_on();
        let mut paths = self.client.paths();
        // Only tunnels that carry packets count here, not those of stand-bys.
        paths.retain(|id, _| !self.far.stand_bys.contains(id));
        let endpoints = if uses { self.client.endpoints() } else { BTreeMap::new() };
        for (id, path) in &paths {
            if self.said.get(id) != Some(path)
                && let Some((_, node)) = name(id)
                && (self.said.contains_key(id) || *path != Path::Direct)
            {
                let by = match path {
                    Path::Relayed(relay) => name(relay).map(|(_, name)| name.as_str()),
                    _ => None,
                };
                tracing::info!(node, path = path.kind().label(), by, "tunnel changed its path");
            }
        }
        let connected = |(id, path): (&NodeId, &Path)| {
            let relay = match path {
                Path::Relayed(relay) => name(relay).map(|(_, name)| name.clone()),
                _ => None,
            };
            let (key, node) = name(id)?;
            let through = PathWithRelay { path: path.kind(), relay };
            Some((*key, Connected { node: node.clone(), through }))
        };
        let connected: BTreeMap<_, _> = paths.iter().filter_map(connected).collect();
        self.context
            .metrics
            .set_tunnel_paths(connected.values().map(|one| one.through.path), self.server.pairs());
        let endpoints: BTreeMap<_, _> =
            endpoints.iter().filter_map(|(id, at)| Some((name(id)?.0, *at))).collect();
        let is_annotated = self.context.view.borrow().observed.own.as_ref().is_some_and(|own| own.relay);
        let offer = || super::offer(self.is_off(), self.far.is_gateway, self.far.is_behind_nat);
        let mut shared = self.context.relays.shared();
        shared.offer = is_annotated.then(offer);
        // The next plan has to set these peers' endpoints again.
        let is_left = shared.endpoints.keys().any(|key| !endpoints.contains_key(key));
        let before = std::mem::replace(&mut shared.endpoints, endpoints);
        shared.note_left(uses, before, Instant::now());
        shared.paths = connected;
        shared.knows = self.has_looked;
        shared.serves = self.server.pairs();
        drop(shared);
        if is_left {
            self.context.changed.notify_one();
        }
        self.said = paths;
    }
}

/// How long a reading of the device counts, given how long it took.
fn until_next_look(took: Duration, uses: bool) -> Duration {
    if uses {
        LOOK.max((took * SHARE).min(LOOK_SELDOM))
    } else {
        LOOK_OFF.max((took * SHARE_OFF).min(LOOK_RARELY))
    }
}

/// The time of day, so that message numbers continue those of earlier agents.
fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_slow_to_read_is_read_seldom() {
        let of = |took, uses| until_next_look(Duration::from_millis(took), uses).as_secs_f64();
        assert_eq!((of(2, true), of(2, false)), (1.0, 5.0));
        assert_eq!((of(40, true), of(40, false)), (1.0, 40.0));
        assert_eq!((of(100, true), of(100, false)), (2.0, 60.0));
        // A relay that falls silent is still noticed.
        assert_eq!((of(800, true), of(800, false)), (3.0, 60.0));
    }
}
