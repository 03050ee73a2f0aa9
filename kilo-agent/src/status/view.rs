//! The agent's state, kept for status, page and metrics.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{AgentStatus, FailoverStatus, History, StandByStatus, Status, Tunnel, of_objects};
use crate::{
    failover::{Report, Reporter, StandBy},
    relay::{Connected, Relays},
    timestamp::Timestamp,
};
use kilo_core::{
    objects::Snapshot,
    observed::Attached,
    settings::Granularity,
    topology::{CheckedIn, Mesh, ObservedMesh, TunnelEnd, TunnelPaths, tunnel_ends},
    tunnel_path::TunnelPath,
    wireguard::key::PublicKey,
};
use kilo_host::{
    dataplane::Counters,
    wireguard::{Device, PeerStatus as DevicePeer, Reading, WireguardError},
};

/// The state after a reconciliation.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The node of the agent.
    pub node: String,
    /// Its WireGuard interface.
    pub interface: String,
    /// The mesh as this node sees it, and all objects.
    pub observed: Arc<ObservedMesh>,
    /// `--mesh-granularity`.
    pub granularity: Granularity,
    /// Former leaders.
    pub history: History,
    /// Programs attached to interfaces.
    pub programs: Vec<Attached>,
    /// Problems of the host, with remedies.
    pub warnings: Vec<String>,
    /// The WireGuard device; `None` until it exists.
    pub device: Option<Device>,
    /// Source of other nodes, if there is a choice.
    pub nodes_from: Option<String>,
    /// State of failover, if it is on.
    pub failover: Option<Reporter>,
    /// Paths of tunnels.
    pub relays: Relays,
}

impl View {
    /// All objects, with this node as it is now.
    fn objects(&self) -> Snapshot {
        let ObservedMesh { snapshot, own, .. } = &*self.observed;
        let mut objects = Snapshot::clone(snapshot);
        if let Some(own) = own.as_deref() {
            let last_seen = snapshot.nodes.get(&own.name).map_or(0, |own| own.last_seen);
            objects.nodes.insert(CheckedIn { node: own.clone(), last_seen });
        }
        objects
    }

    /// The WireGuard device's peers as of now; empty before there is a device.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub async fn peers(&self) -> Result<BTreeMap<PublicKey, DevicePeer>, WireguardError> {
        Ok(self.reading(Duration::ZERO).await?.peers)
    }

    /// [`Self::peers`] with the time of reading; a reading no older than `age` may be reused.
    ///
    /// # Errors
    /// When the device has to be read, but cannot be.
    pub async fn reading(&self, age: Duration) -> Result<Reading, WireguardError> {
        match &self.device {
            Some(device) => device.status_within(age).await,
            None => Ok(Reading::nothing(Instant::now())),
        }
    }

    /// Paths of this node's tunnels that are not direct, for the graph.
    pub fn paths(&self) -> TunnelPaths {
        let paths = self.relays.paths();
        let others = paths.values().filter(|connected| connected.through.path != TunnelPath::Direct);
        let path =
            |Connected { node, through }: &Connected| ([self.node.clone(), node.clone()], through.clone());
        others.map(path).collect()
    }

    /// Builds the current status; the caller provides `counters`, `unhealthy` and `degraded`. Reads the
    /// WireGuard device.
    pub async fn status(
        &self,
        counters: Result<Counters, String>,
        unhealthy: Option<String>,
        degraded: Vec<String>,
    ) -> Status {
        let time = Timestamp::now();
        let ObservedMesh { mesh, leaders, .. } = &*self.observed;
        let ready = self.observed.ready_nodes().map(|node| node.name.as_str()).collect();
        let mut status = of_objects(mesh, &self.objects(), &ready, self.granularity, time);
        let now = Instant::now();
        for location in &mut status.locations {
            if let Some(lead) = leaders.get(&location.name) {
                location.since = Some(time.before(now.saturating_duration_since(lead.since)));
                location.changes = Some(lead.changes);
            }
        }
        let mut errors = Vec::new();
        let counters = counters.unwrap_or_else(|error| {
            errors.push(error);
            Counters::default()
        });
        let peers = self.peers().await.unwrap_or_else(|error| {
            errors.push(error.to_string());
            BTreeMap::new()
        });
        let counted = |counters: BTreeMap<&'static str, u64>| {
            counters.into_iter().map(|(label, count)| (label.to_owned(), count)).collect()
        };
        status.agent = Some(AgentStatus {
            node: self.node.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            interface: self.interface.clone(),
            unhealthy,
            degraded,
            tunnels: tunnels(mesh, peers, &self.relays.paths(), time),
            relays: self.relays.serves(),
            relay: self.relays.offer().map(str::to_owned),
            packets: counted(counters.actions),
            drops: counted(counters.drops),
            programs: self.programs.clone(),
            nodes_from: self.nodes_from.clone(),
            failover: self.failover.as_ref().map(|reporter| failover(reporter.report(), now, time)),
            warnings: self.warnings.clone(),
            errors,
        });
        status
    }
}

/// Converts the report; `now` and `time` are the same moment.
fn failover(report: Report, now: Instant, time: Timestamp) -> FailoverStatus {
    let stand_by = |stand_by: StandBy| StandByStatus {
        node: stand_by.node,
        fit: stand_by.fit,
        round_trip: stand_by.round_trip,
    };
    FailoverStatus {
        role: report.role.to_owned(),
        leader: report.leader,
        kilos_leader: report.kilos_leader,
        term: report.term,
        since: report.since.map(|since| time.before(now.saturating_duration_since(since))),
        stand_bys: report.stand_bys.into_iter().map(stand_by).collect(),
        last_change: report.last_change,
    }
}

fn tunnels(
    mesh: &Mesh,
    peers: BTreeMap<PublicKey, DevicePeer>,
    paths: &BTreeMap<PublicKey, Connected>,
    time: Timestamp,
) -> Vec<Tunnel> {
    let ends = tunnel_ends(mesh);
    let tunnel = |(key, peer): (PublicKey, DevicePeer)| Tunnel {
        name: ends.get(&key).map(TunnelEnd::name),
        key,
        endpoint: peer.endpoint,
        last_handshake: peer.handshake_age.map(|age| time.before(age)),
        received_bytes: peer.rx_bytes,
        sent_bytes: peer.tx_bytes,
        path: paths.get(&key).map(|connected| connected.through.path),
        relay: paths.get(&key).and_then(|connected| connected.through.relay.clone()),
    };
    let mut tunnels: Vec<_> = peers.into_iter().map(tunnel).collect();
    tunnels.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
    tunnels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_when_a_leader_is_used_does_not_jump_with_the_clock() {
        let since = Instant::now();
        let now = since + Duration::from_secs(41);
        // An hour ahead, an hour behind.
        for time in [1_780_000_000, 1_780_003_600, 1_779_996_400].map(Timestamp) {
            let report = Report { since: Some(since), ..Report::default() };
            assert_eq!(failover(report, now, time).since, Some(Timestamp(time.0 - 41)));
            assert_eq!(failover(Report::default(), now, time).since, None, "since before its agent");
        }
    }
}
