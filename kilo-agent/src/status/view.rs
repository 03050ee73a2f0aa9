//! What an agent knows, kept for those who ask it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use super::{AgentStatus, Attached, Leaders, Status, Timestamp, Tunnel, of_objects};
use crate::{
    backend::Snapshot,
    dataplane::Counters,
    topology::{Granularity, Mesh, Node},
    wireguard::{Device, PeerStatus as DevicePeer, WireguardError, key::PublicKey},
};

/// The state after a reconciliation.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The node of the agent.
    pub node: String,
    /// Its WireGuard interface.
    pub interface: String,
    /// The mesh as this node sees it.
    pub mesh: Arc<Mesh>,
    /// All objects.
    pub snapshot: Arc<Snapshot>,
    /// The own node as it is now.
    pub own: Option<Node>,
    /// Nodes that take part.
    pub ready: BTreeSet<Arc<str>>,
    /// `--mesh-granularity`.
    pub granularity: Granularity,
    /// Since when who leads.
    pub leaders: Leaders,
    /// Programs on interfaces.
    pub programs: Vec<Attached>,
    /// The WireGuard device, once there is one.
    pub device: Option<Device>,
}

impl View {
    /// All objects, the own node as it is now.
    fn known(&self) -> Snapshot {
        let mut known = Snapshot::clone(&self.snapshot);
        known.nodes.extend(self.own.clone().map(|own| (own.name.as_str().into(), own.into())));
        known
    }

    /// Nodes that take part, the own one as it is now.
    pub fn ready_nodes(&self) -> impl Iterator<Item = &Node> {
        among(with_own(&self.snapshot, self.own.as_ref()), &self.ready).map(|(_, node)| node)
    }

    /// What the WireGuard device says of its peers now; none before there is a device.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub async fn peers(&self) -> Result<BTreeMap<PublicKey, DevicePeer>, WireguardError> {
        match &self.device {
            Some(device) => device.read_status().await,
            None => Ok(BTreeMap::new()),
        }
    }

    /// The status now: `counters` and `unhealthy` come from others. Reads the
    /// WireGuard device.
    pub async fn status(&self, counters: Result<Counters, String>, unhealthy: Option<String>) -> Status {
        let time = Timestamp::now();
        let mut status = of_objects(&self.mesh, &self.known(), &self.ready, self.granularity, time);
        let now = Instant::now();
        for location in &mut status.locations {
            if let Some(lead) = self.leaders.get(&location.name) {
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
            tunnels: tunnels(&self.mesh, peers, time),
            packets: counted(counters.actions),
            drops: counted(counters.drops),
            programs: self.programs.clone(),
            errors,
        });
        status
    }
}

/// All nodes with their names, with `own` in the place of the one of its name.
pub fn with_own<'a>(
    snapshot: &'a Snapshot,
    own: Option<&'a Node>,
) -> impl Iterator<Item = (&'a Arc<str>, &'a Node)> + Clone {
    let known = own.and_then(|own| Some((snapshot.nodes.get_key_value(own.name.as_str())?.0, own)));
    snapshot.nodes.iter().map(move |(name, node)| {
        let own = known.filter(|(own, _)| Arc::ptr_eq(own, name)).map(|(_, own)| own);
        (name, own.unwrap_or(node))
    })
}

/// Those of `nodes`, sorted by name, that are named in `ready`.
pub fn among<'a>(
    nodes: impl Iterator<Item = (&'a Arc<str>, &'a Node)>,
    ready: &BTreeSet<Arc<str>>,
) -> impl Iterator<Item = (&'a Arc<str>, &'a Node)> {
    let mut ready = ready.iter().peekable();
    nodes.filter(move |(name, _)| {
        // Mostly the same text, and then it need not be read.
        if ready.next_if(|ready| Arc::ptr_eq(ready, name)).is_some() {
            return true;
        }
        while ready.next_if(|ready| ready < name).is_some() {}
        ready.next_if(|ready| ready == name).is_some()
    })
}

fn tunnels(mesh: &Mesh, peers: BTreeMap<PublicKey, DevicePeer>, time: Timestamp) -> Vec<Tunnel> {
    let names: BTreeMap<PublicKey, String> = mesh
        .peers
        .iter()
        .map(|peer| (peer.public_key, format!("peer:{}", peer.name)))
        .chain(mesh.segments.iter().map(|segment| (segment.key, segment.location.clone())))
        .collect();
    let tunnel = |(key, peer): (PublicKey, DevicePeer)| Tunnel {
        name: names.get(&key).cloned(),
        key,
        endpoint: peer.endpoint,
        last_handshake: peer.handshake_age.map(|age| time.before(age)),
        received_bytes: peer.rx_bytes,
        sent_bytes: peer.tx_bytes,
    };
    let mut tunnels: Vec<_> = peers.into_iter().map(tunnel).collect();
    tunnels.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
    tunnels
}
