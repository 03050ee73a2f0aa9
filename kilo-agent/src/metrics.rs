//! Metrics of the agent: those with Kilo's names, and the data path's counters.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, atomic::Ordering},
};

use kilo_common::map_table::MAPS;
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text::encode},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};

use crate::backend::SlicesReport;
use crate::failover::FailoverMetrics;
use crate::timestamp::Timestamp;
use kilo_core::{
    plan::ConflictKind, topology::TunnelEnd, tunnel_path::TunnelPath, wireguard::key::PublicKey,
};
use kilo_host::{
    dataplane::{Counters, DataplaneError},
    wireguard::PeerStatus,
};

/// Label `event` of errors: the step that failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EventLabel {
    /// The failing step.
    pub event: String,
}

/// How a tunnel is connected.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TunnelPathLabel {
    path: &'static str,
}

/// Label `map` of gauges about BPF maps.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct MapLabel {
    /// Name of the map, as in its pin.
    pub map: &'static str,
}

/// Reads the data path's packet counters.
type ReadCounters = Box<dyn Fn() -> Result<Counters, DataplaneError> + Send + Sync>;

/// Values that are collected at each scrape.
#[derive(Default)]
struct Samples {
    /// Reader of the packet counters.
    counters: Option<ReadCounters>,
    /// WireGuard peers, and when they were read.
    peers: (BTreeMap<PublicKey, PeerStatus>, Timestamp),
    /// The far ends of the tunnels.
    ends: BTreeMap<PublicKey, TunnelEnd>,
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Samples")
            .field("peers", &self.peers)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Samples {
    /// The data path's current counters; empty before there is a data path.
    fn read_counters(&self) -> Result<Counters, DataplaneError> {
        self.counters.as_ref().map_or_else(|| Ok(Counters::default()), |read| read())
    }

    /// Labels of a tunnel: its key and its far end.
    fn labels(&self, key: &PublicKey) -> Vec<(&'static str, String)> {
        let mut labels = vec![("public_key", key.to_string())];
        match self.ends.get(key) {
            Some(TunnelEnd::Location { location, node }) => {
                labels.extend([("location", location.clone()), ("node", node.clone())]);
            }
            Some(TunnelEnd::Peer { peer, .. }) => labels.push(("peer", peer.clone())),
            None => {}
        }
        labels
    }
}

#[derive(Debug)]
struct SampleCollector(Arc<Mutex<Samples>>);

impl Collector for SampleCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let samples = self.0.lock();
        let counted = samples.read_counters().unwrap_or_else(|error| {
            tracing::error!(%error, "failed to read packet counters");
            Counters::default()
        });
        let counter = |value: &u64| ConstCounter::new(*value);
        by_label(
            &mut encoder,
            "kilo_packets",
            "Packets handled by the data path, by action",
            counted.actions.iter().map(|(label, value)| (one("action", label), counter(value))),
        )?;
        by_label(
            &mut encoder,
            "kilo_dropped_packets",
            "Packets dropped by the data path, by reason",
            counted.drops.iter().map(|(label, value)| (one("reason", label), counter(value))),
        )?;
        let (peers, read_at) = &samples.peers;
        by_label(
            &mut encoder,
            "kilo_wireguard_received_bytes",
            "Bytes received from a WireGuard peer",
            peers.iter().map(|(key, sample)| (samples.labels(key), counter(&sample.rx_bytes))),
        )?;
        by_label(
            &mut encoder,
            "kilo_wireguard_sent_bytes",
            "Bytes sent to a WireGuard peer",
            peers.iter().map(|(key, sample)| (samples.labels(key), counter(&sample.tx_bytes))),
        )?;
        by_label(
            &mut encoder,
            "kilo_wireguard_last_handshake_seconds",
            "Unix time of the last handshake with a WireGuard peer",
            peers.iter().filter_map(|(key, sample)| {
                Some((samples.labels(key), ConstGauge::new(read_at.before(sample.handshake_age?).0)))
            }),
        )
    }
}

type Labels = Vec<(&'static str, String)>;

fn one(label: &'static str, text: &str) -> Labels {
    vec![(label, text.to_owned())]
}

fn by_label<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (Labels, M)>,
) -> Result<(), fmt::Error> {
    let mut metric = None;
    for (labels, value) in values {
        if metric.is_none() {
            metric = Some(encoder.encode_descriptor(name, help, None, value.metric_type())?);
        }
        if let Some(metric) = &mut metric {
            value.encode(metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// Metrics with a handle, one row each: field, initial value, name and help text. Counters are exposed with
/// the suffix `_total`.
macro_rules! metrics {
    ($($(#[doc = $doc:literal])+ $vis:vis $field:ident: $type:ty = $start:expr, $name:literal, $help:literal;)*) => {
        /// Handles of all metrics; clones share them.
        #[derive(Clone, Debug)]
        pub struct Metrics {
            registry: Arc<Registry>,
            $($(#[doc = $doc])+ $vis $field: $type,)*
            /// Metrics of slices of the list of nodes.
            pub slices: SlicesMetrics,
            /// Metrics of failover.
            pub failover: FailoverMetrics,
            samples: Arc<Mutex<Samples>>,
        }

        impl Metrics {
            /// Creates all metrics and registers them; the caller still has to store the registry.
            fn registered(registry: &mut Registry) -> Self {
                let metrics = Self {
                    registry: Arc::default(),
                    $($field: $start,)*
                    slices: SlicesMetrics::register(registry),
                    failover: FailoverMetrics::register(registry),
                    samples: Arc::default(),
                };
                $(registry.register($name, $help, metrics.$field.clone());)*
                metrics
            }
        }
    };
}

metrics! {
    /// Errors, by the step that failed.
    pub errors: Family<EventLabel, Counter> = Family::default(), "kilo_errors", "Errors by the step that failed";
    /// 1 when Kilo's rule chose this node as leader; see `kilo_failover_role` for who carries packets.
    pub leader: Gauge = Gauge::default(),
        "kilo_leader", "Whether Kilo's rule chose this node as leader of its location";
    /// Nodes in the mesh.
    pub nodes: Gauge = Gauge::default(), "kilo_nodes", "Nodes in the mesh";
    /// Private addresses that several nodes claim.
    address_conflicts: Gauge = Gauge::default(),
        "kilo_address_conflicts",
        "Private addresses claimed by several nodes, in this location or involving this node";
    /// WireGuard keys that several nodes claim.
    key_conflicts: Gauge = Gauge::default(),
        "kilo_key_conflicts",
        "WireGuard keys claimed by several nodes, in this location or involving this node";
    /// Pod CIDRs that overlap, and locations' WireGuard addresses that nodes have.
    prefix_conflicts: Gauge = Gauge::default(),
        "kilo_prefix_conflicts",
        "Overlapping pod CIDRs of nodes, and nodes' prefixes that contain a location's WireGuard address, in this location or involving this node";
    /// VPN peers.
    pub peers: Gauge = Gauge::default(), "kilo_peers", "VPN peers in the mesh";
    /// Tunnels that do not answer although bytes are sent.
    pub silent_tunnels: Gauge = Gauge::default(),
        "kilo_silent_tunnels", "WireGuard tunnels with outgoing traffic and no valid handshake";
    /// Working tunnels to other locations, by path.
    tunnel_paths: Family<TunnelPathLabel, Gauge> = Family::default(),
        "kilo_tunnels", "Working tunnels to other locations, by path: direct, punched or relayed";
    /// Pairs of other locations that this node relays for.
    relayed_pairs: Gauge = Gauge::default(),
        "kilo_relayed_pairs", "Pairs of other locations that this node relays for";
    /// Relay messages rejected as replayed or too old.
    pub relay_refused: Counter = Counter::default(),
        "kilo_relay_messages_refused", "Relay messages rejected by the agent because they are repeated, older than 2 s, or with a sequence number ahead of the request";
    /// Locations without a leader, because none of their nodes is in the mesh.
    leaderless: Gauge = Gauge::default(),
        "kilo_locations_without_leader", "Locations without a leader, because none of their nodes is in the mesh";
    /// Nodes with a key that are not in the mesh.
    left_out: Gauge = Gauge::default(), "kilo_nodes_left_out", "Nodes with a key that are not in the mesh";
    /// Unix time of this node's heartbeat, as received from the backend.
    pub last_check_in: Gauge = Gauge::default(),
        "kilo_last_check_in_seconds",
        "Unix time of this node's last heartbeat, as the API server returned it";
    /// Seconds between two heartbeats of this node.
    pub heartbeat_seconds: Gauge = Gauge::default(),
        "kilo_heartbeat_interval_seconds", "Seconds between two heartbeats of this node";
    /// Reconciles, successful or not.
    pub reconciles: Counter = Counter::default(), "kilo_reconciles", "Reconciliation attempts";
    /// How long a reconcile took, from 1 ms to 8 s.
    pub reconcile_seconds: Histogram = Histogram::new(exponential_buckets(0.001, 2.0, 14)),
        "kilo_reconcile_duration_seconds", "Duration of a reconciliation";
    /// Changes made to the kernel.
    pub writes: Counter = Counter::default(),
        "kilo_writes", "Changes made to links, routes, WireGuard and maps";
    /// Programs reattached to their hooks.
    pub reattached: Counter = Counter::default(),
        "kilo_reattached", "BPF programs reattached after something else had detached them";
    /// Entries of masqueraded flows, two per flow, as of the last sweep.
    pub nat_entries: Gauge = Gauge::default(),
        "kilo_nat_entries", "NAT entries as of the last sweep, two per flow";
    /// Entries of ended flows that NAT GC removed.
    pub nat_collected: Counter = Counter::default(),
        "kilo_nat_collected", "NAT entries removed because their flows had ended";
    /// Number of entries in each BPF map.
    map_entries: Family<MapLabel, Gauge> = Family::default(), "kilo_map_entries", "Entries in a BPF map";
}

/// Metrics of the backend's slices.
#[derive(Clone, Debug, Default)]
pub struct SlicesMetrics {
    wanted: Gauge,
    in_use: Gauge,
    writer: Gauge,
    written: Counter,
    failed: Counter,
    problems: Gauge,
}

impl SlicesMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        for (name, help, gauge) in [
            ("kilo_slices_wanted", "Whether this agent runs with --slices=auto", &metrics.wanted),
            ("kilo_slices_in_use", "Whether this agent reads slices instead of Nodes", &metrics.in_use),
            ("kilo_slices_writer", "Whether this agent writes slices", &metrics.writer),
            (
                "kilo_slice_problems",
                "Missing or unreadable slices, and nodes listed in several",
                &metrics.problems,
            ),
        ] {
            registry.register(name, help, gauge.clone());
        }
        for (name, help, counter) in [
            ("kilo_slices_written", "Slices written by this agent", &metrics.written),
            ("kilo_slices_failed", "Writes of slices by this agent that failed", &metrics.failed),
        ] {
            registry.register(name, help, counter.clone());
        }
        metrics
    }

    /// Takes the backend's report; `None` when slices are not used.
    pub fn observe(&self, report: Option<&SlicesReport>) {
        let Some(report) = report else { return };
        self.wanted.set(1);
        self.in_use.set(report.reads.into());
        self.writer.set(report.writes.into());
        // The backend counts from its own start, which is the agent's.
        self.written.inner().store(report.written, Ordering::Relaxed);
        self.failed.inner().store(report.failed, Ordering::Relaxed);
        self.problems.set(gauge(report.bad + report.twice));
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let metrics = Self::registered(&mut registry);
        let build = [("version", env!("CARGO_PKG_VERSION")), ("architecture", std::env::consts::ARCH)];
        registry.register("kilo_build", "Version of the agent", Info::new(build.to_vec()));
        let capacity = Family::<MapLabel, Gauge>::default();
        for map in MAPS.iter().filter(|map| map.has_gauge) {
            metrics.set_map_entries(map.name, 0);
            capacity.get_or_create(&MapLabel { map: map.name }).set(map.size.into());
        }
        registry.register("kilo_map_capacity", "Capacity of a BPF map in entries", capacity);
        registry.register_collector(Box::new(SampleCollector(Arc::clone(&metrics.samples))));
        Self { registry: Arc::new(registry), ..metrics }
    }
}

/// Converts a count for a gauge, saturating.
pub fn gauge(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

impl Metrics {
    /// Counts one error of that kind.
    pub fn error(&self, event: &str) {
        self.errors.get_or_create(&EventLabel { event: event.to_owned() }).inc();
    }

    /// Number of conflicts of a kind, in this location or involving this node.
    pub const fn conflicts(&self, kind: ConflictKind) -> &Gauge {
        match kind {
            ConflictKind::Address => &self.address_conflicts,
            ConflictKind::Key => &self.key_conflicts,
            ConflictKind::Prefix => &self.prefix_conflicts,
        }
    }

    /// Sets the number of entries in a map.
    pub fn set_map_entries(&self, map: &'static str, entries: usize) {
        self.map_entries.get_or_create(&MapLabel { map }).set(gauge(entries));
    }

    /// Sets how many locations have no leader, and how many nodes are left out.
    pub fn set_missing(&self, leaderless: usize, left_out: usize) {
        self.leaderless.set(gauge(leaderless));
        self.left_out.set(gauge(left_out));
    }

    /// Sets the number of working tunnels by path, and of pairs that this node relays for.
    pub fn set_tunnel_paths(&self, paths: impl Iterator<Item = TunnelPath>, relayed_pairs: usize) {
        let mut counts: BTreeMap<_, _> = TunnelPath::ALL.iter().map(|path| (*path, 0)).collect();
        paths.for_each(|path| *counts.entry(path).or_insert(0) += 1);
        for (path, count) in counts {
            self.tunnel_paths.get_or_create(&TunnelPathLabel { path: path.label() }).set(count);
        }
        self.relayed_pairs.set(gauge(relayed_pairs));
    }

    /// Sets the reader of the data path's counters.
    pub fn set_counters(&self, read: impl Fn() -> Result<Counters, DataplaneError> + Send + Sync + 'static) {
        self.samples.lock().counters = Some(Box::new(read));
    }

    /// The data path's current counters; empty before there is a data path.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn counters(&self) -> Result<Counters, DataplaneError> {
        self.samples.lock().read_counters()
    }

    /// Replaces the WireGuard peers, the far ends of their tunnels, and the time of reading.
    pub fn set_peers(
        &self,
        peers: BTreeMap<PublicKey, PeerStatus>,
        ends: BTreeMap<PublicKey, TunnelEnd>,
        read_at: Timestamp,
    ) {
        let mut samples = self.samples.lock();
        samples.peers = (peers, read_at);
        samples.ends = ends;
    }

    /// Encodes all metrics as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_those_kilo_users_scrape() {
        let metrics = Metrics::default();
        metrics.error("apply");
        metrics.reconciles.inc();
        let key = PublicKey([1; 32]);
        let age = Some(Duration::from_secs(7));
        let peer = PeerStatus { rx_bytes: 5, tx_bytes: 6, handshake_age: age, ..PeerStatus::default() };
        let laptop = PublicKey([2; 32]);
        let peers = BTreeMap::from([(key, peer.clone()), (laptop, peer)]);
        let (location, node) = ("location:b".to_owned(), "b1".to_owned());
        let ends = BTreeMap::from([
            (key, TunnelEnd::Location { location, node }),
            (laptop, TunnelEnd::Peer { peer: "laptop".to_owned(), roams: true }),
        ]);
        metrics.set_peers(peers, ends, Timestamp(100));
        let text = metrics.encode().unwrap();
        for line in [
            "kilo_errors_total{event=\"apply\"} 1",
            "kilo_reconciles_total 1",
            "kilo_leader 0",
            "kilo_nodes 0",
            "kilo_peers 0",
            &format!(
                "kilo_build_info{{version=\"{}\",architecture=\"{}\"}} 1",
                env!("CARGO_PKG_VERSION"),
                std::env::consts::ARCH
            ),
            &format!(
                "kilo_wireguard_received_bytes_total{{public_key=\"{key}\",location=\"location:b\",node=\"b1\"}} 5"
            ),
            &format!("kilo_wireguard_received_bytes_total{{public_key=\"{laptop}\",peer=\"laptop\"}} 5"),
            &format!(
                "kilo_wireguard_sent_bytes_total{{public_key=\"{key}\",location=\"location:b\",node=\"b1\"}} 6"
            ),
            &format!("kilo_wireguard_sent_bytes_total{{public_key=\"{laptop}\",peer=\"laptop\"}} 6"),
            &format!(
                "kilo_wireguard_last_handshake_seconds{{public_key=\"{key}\",location=\"location:b\",node=\"b1\"}} 93"
            ),
            &format!("kilo_wireguard_last_handshake_seconds{{public_key=\"{laptop}\",peer=\"laptop\"}} 93"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing from\n{text}");
        }
    }
}
