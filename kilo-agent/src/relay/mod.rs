//! Relays: the decisions of `kilo_core::relay` beside the reconciles. Messages go from WireGuard's own
//! port by the program `inject`, and are heard by `lan_ingress`; docs/design/relay.md says why.
//!
//! ```text
//! view ── mesh, device ──> task ── endpoints ──> next reconcile; ways ──> status, metrics, graph
//! ```

mod mesh;
mod paths;
mod task;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kilo_common::maps::CONFIG_RELAY;
use kilo_core::{
    plan::HostPlan,
    topology::Mesh,
    wireguard::{Endpoint, EndpointHost, WireguardPlan, key::PublicKey},
};
use kilo_host::dataplane::{
    Dataplane, DataplaneError,
    relay::{RelayMaps, RelayRing},
};

pub use mesh::MeshView;
pub use paths::source_towards;
pub use task::Context;

/// What the task has found: read by reconciles, status, metrics and the graph.
#[derive(Clone, Default)]
pub struct Relays(Arc<Mutex<Said>>);

impl std::fmt::Debug for Relays {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Relays")
    }
}

/// How a tunnel with another location is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The other location's gateway.
    pub node: String,
    /// `direct`, `punched` or `relayed`.
    pub way: &'static str,
    /// The node that relays.
    pub by: Option<String>,
}

#[derive(Clone, Debug, Default)]
struct Said {
    /// Endpoints that differ from what the mesh says; true: through a relay.
    endpoints: BTreeMap<PublicKey, (SocketAddr, bool)>,
    ways: BTreeMap<PublicKey, Connected>,
    /// Addresses of DNS names in endpoints, as the last plan knew them.
    resolved: BTreeMap<String, IpAddr>,
    /// The task has read the device: what it says replaces what an earlier agent has left there.
    knows: bool,
    /// Pairs that this node relays for.
    serves: usize,
    /// What its annotation has come to.
    offer: Option<&'static str>,
}

impl Relays {
    fn said(&self) -> MutexGuard<'_, Said> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How tunnels of this node that work are connected.
    pub fn ways(&self) -> BTreeMap<PublicKey, Connected> {
        self.said().ways.clone()
    }

    /// Pairs of other locations that this node relays for.
    pub fn serves(&self) -> usize {
        self.said().serves
    }

    /// What this node's annotation `relay` has come to; `None`: it has none.
    pub fn offer(&self) -> Option<&'static str> {
        self.said().offer
    }

    /// Takes the addresses of DNS names in endpoints.
    pub fn resolves(&self, resolved: &BTreeMap<String, IpAddr>) {
        self.said().resolved.clone_from(resolved);
    }

    /// Where an endpoint is, as the last plan knew it.
    fn address(&self, endpoint: &Endpoint) -> Option<SocketAddr> {
        let ip = match &endpoint.host {
            EndpointHost::Ip(ip) => *ip,
            EndpointHost::Dns(name) => *self.said().resolved.get(name)?,
        };
        Some(SocketAddr::new(ip, endpoint.port))
    }

    /// Whether a peer is reached through a relay: where it is seen then is of no use to others.
    pub fn is_relayed(&self, key: &PublicKey) -> bool {
        self.said().endpoints.get(key).is_some_and(|(_, relayed)| *relayed)
    }

    /// Changes a plan by what was found: endpoints of peers, which may roam from there, and whether programs look for
    /// relay messages. `held`: peers whose endpoint in the device is a relay.
    pub fn plan(&self, plan: &mut HostPlan, looks: bool, held: &BTreeMap<PublicKey, SocketAddr>) {
        self.place(&mut plan.wireguard, looks, held);
        if looks && !plan.wireguard.peers.is_empty() {
            plan.tables.config.flags |= CONFIG_RELAY;
        }
    }

    fn place(&self, plan: &mut WireguardPlan, looks: bool, held: &BTreeMap<PublicKey, SocketAddr>) {
        let said = self.said();
        for (key, place) in held {
            match plan.peers.get_mut(key) {
                // A relay that an earlier agent has found stays in use until the task knows more.
                Some(peer) if looks && !said.knows => (peer.endpoint, peer.roams) = (Some(*place), true),
                // `--relay=off` leaves relays.
                Some(peer) if !looks => peer.roams = false,
                _ => {}
            }
        }
        for (key, (place, _)) in &said.endpoints {
            if let Some(peer) = plan.peers.get_mut(key) {
                (peer.endpoint, peer.roams) = (Some(*place), true);
            }
        }
    }
}

/// Whether any gateway of the mesh offers to relay.
pub fn is_offered(mesh: &Mesh) -> bool {
    (0..mesh.segments.len()).any(|index| mesh::gateways(mesh, index).iter().any(|(node, _)| node.relay))
}

/// What a node's annotation `relay` has come to.
const fn offer(is_annotated: bool, is_off: bool, is_gateway: bool) -> Option<&'static str> {
    match (is_annotated, is_off, is_gateway) {
        (false, ..) => None,
        (_, true, _) => Some("no; annotated, but this agent runs with --relay=off"),
        (_, _, false) => {
            Some("no; annotated, but only leaders and stand-bys relay, and this node is neither")
        }
        (_, _, true) => Some("offered to other locations"),
    }
}

/// What the task works with.
///
/// # Errors
/// When a program is not loaded, or a pinned map cannot be opened.
pub fn tools(dataplane: &Dataplane, bpffs: &Path) -> Result<task::Tools, DataplaneError> {
    Ok(task::Tools {
        signals: dataplane.signals()?,
        maps: RelayMaps::open(bpffs)?,
        ring: RelayRing::open(bpffs)?,
    })
}

/// Runs until it is asked to stop.
pub async fn run(context: Context, tools: task::Tools) {
    task::Task::new(context, tools).run().await;
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use kilo_core::wireguard::WireguardPeer;

    use super::*;

    #[test]
    fn an_annotation_without_effect_is_visible() {
        let says =
            |is_annotated, is_off, is_gateway| offer(is_annotated, is_off, is_gateway).unwrap_or("nothing");
        assert_eq!(says(false, true, false), "nothing");
        assert_eq!(says(true, false, true), "offered to other locations");
        assert!(says(true, false, false).contains("neither"));
        assert!(says(true, true, true).contains("--relay=off"));
    }

    #[test]
    fn a_first_plan_keeps_a_relay_that_is_in_use_and_relay_off_leaves_it() {
        let key = PublicKey([1; 32]);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (published, relay) = (at("203.0.113.1:51820"), at("198.51.100.1:51900"));
        let planned = |knows, looks, roams| {
            let relays = Relays::default();
            relays.said().knows = knows;
            let mut plan = WireguardPlan::default();
            let peer = WireguardPeer { endpoint: Some(published), roams, ..WireguardPeer::default() };
            plan.peers.insert(key, peer);
            relays.place(&mut plan, looks, &[(key, relay)].into());
            let peer = plan.peers.get(&key).unwrap();
            (peer.endpoint.unwrap(), peer.roams)
        };
        assert_eq!(planned(false, true, false), (relay, true), "before the task has looked");
        assert_eq!(planned(true, true, false), (published, false));
        assert_eq!(planned(false, false, true), (published, false), "--relay=off");
    }
}
