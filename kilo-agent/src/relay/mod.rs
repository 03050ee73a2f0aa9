//! Relays: runs the decisions of `kilo_core::relay` beside the reconciles. Messages are sent from WireGuard's
//! own port by the program `inject`, and received by `lan_ingress`; docs/design/relay.md says why.
//!
//! ```text
//! view ── mesh, device ──> task ── endpoints ──> next reconcile; paths ──> status, metrics, graph
//! ```

mod mesh;
mod paths;
mod task;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Instant,
};

use kilo_core::{
    relay::{EndpointOverride, RESTS, RelayInputs},
    topology::{Mesh, Node},
    tunnel_path::PathWithRelay,
    wireguard::{Endpoint, EndpointHost, key::PublicKey},
};
use kilo_host::dataplane::{
    Dataplane, DataplaneError,
    relay::{RelayMaps, RelayRing},
};
use parking_lot::{Mutex, MutexGuard};

pub use mesh::RelayView;
pub use paths::source_towards;
pub use task::Context;

/// The task's findings: read by reconciles, status, metrics and the graph.
#[derive(Clone, Default)]
pub struct Relays(Arc<Mutex<RelayFindings>>);

impl std::fmt::Debug for Relays {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Relays")
    }
}

/// Path of a tunnel to another location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// Name of the other location's gateway.
    pub node: String,
    /// How it is connected.
    pub through: PathWithRelay,
}

#[derive(Clone, Debug, Default)]
struct RelayFindings {
    /// Endpoints that override those of the mesh; true: through a relay.
    endpoints: BTreeMap<PublicKey, (SocketAddr, bool)>,
    paths: BTreeMap<PublicKey, Connected>,
    /// Peers that were relayed when relays stopped being used, and when that was.
    left: BTreeMap<PublicKey, Instant>,
    /// Addresses of DNS names in endpoints, from the last plan.
    resolved: BTreeMap<String, IpAddr>,
    /// The task has read the device: its findings replace what an earlier agent left.
    knows: bool,
    /// Pairs that this node relays for.
    serves: usize,
    /// Effect of this node's annotation `relay`.
    offer: Option<&'static str>,
}

impl RelayFindings {
    /// Takes note of relays that were in use until now, when none is used any more.
    fn note_left(&mut self, uses: bool, before: BTreeMap<PublicKey, (SocketAddr, bool)>, now: Instant) {
        if uses {
            self.left.clear();
        } else {
            let relayed = before.into_iter().filter(|(_, (_, is_relayed))| *is_relayed);
            self.left.extend(relayed.map(|(key, _)| (key, now)));
        }
    }

    /// Whether the peer's packets may still come by a relay that this node has stopped using: the other end may not
    /// know yet.
    fn is_left(&self, key: &PublicKey, now: Instant) -> bool {
        self.left.get(key).is_some_and(|since| now.saturating_duration_since(*since) < RESTS)
    }
}

impl Relays {
    fn shared(&self) -> MutexGuard<'_, RelayFindings> {
        self.0.lock()
    }

    /// Paths of this node's working tunnels.
    pub fn paths(&self) -> BTreeMap<PublicKey, Connected> {
        self.shared().paths.clone()
    }

    /// Number of pairs of other locations that this node relays for.
    pub fn serves(&self) -> usize {
        self.shared().serves
    }

    /// Effect of this node's annotation `relay`; `None` without the annotation.
    pub fn offer(&self) -> Option<&'static str> {
        self.shared().offer
    }

    /// Takes the addresses of DNS names in endpoints.
    pub fn resolves(&self, resolved: &BTreeMap<String, IpAddr>) {
        self.shared().resolved.clone_from(resolved);
    }

    /// Address of an endpoint, as resolved for the last plan.
    fn address(&self, endpoint: &Endpoint) -> Option<SocketAddr> {
        let ip = match &endpoint.host {
            EndpointHost::Ip(ip) => *ip,
            EndpointHost::Dns(name) => *self.shared().resolved.get(name)?,
        };
        Some(SocketAddr::new(ip, endpoint.port))
    }

    /// Whether a peer is reached through a relay: the address where it is seen is then useless to others.
    pub fn is_relayed(&self, key: &PublicKey) -> bool {
        let shared = self.shared();
        shared.endpoints.get(key).is_some_and(|(_, relayed)| *relayed) || shared.is_left(key, Instant::now())
    }

    /// Inputs for the next plan: endpoints that the task has found, and whether programs look for relay
    /// messages. `held`: peers whose endpoint in the device is a relay.
    pub fn inputs(
        &self,
        listens: bool,
        held: impl IntoIterator<Item = (PublicKey, SocketAddr)>,
    ) -> RelayInputs {
        let shared = self.shared();
        let held = held.into_iter().filter_map(|(key, endpoint)| match (listens, shared.knows) {
            // A relay that an earlier agent found stays in use until the task knows more.
            (true, false) => Some((key, EndpointOverride::At(endpoint))),
            (true, true) => None,
            // With `--relay=off` relays are abandoned.
            (false, _) => Some((key, EndpointOverride::LeavesRelay)),
        });
        // They are abandoned, too, when the last offer ends: the mesh no longer shows which ports are relays'.
        let now = Instant::now();
        let left = shared.left.keys().filter(|key| !listens && shared.is_left(key, now));
        let left = left.map(|key| (*key, EndpointOverride::LeavesRelay));
        let found =
            shared.endpoints.iter().map(|(key, (endpoint, _))| (*key, EndpointOverride::At(*endpoint)));
        RelayInputs { listens, endpoints: held.chain(left).chain(found).collect() }
    }
}

/// Whether gateways may need paths other than their published endpoints: one of them offers to relay, or
/// those of two locations may be unreachable. All agents come to the same result, except for moments in which
/// one knows more than another, because it depends only on what nodes publish.
pub fn is_wanted(mesh: &Mesh) -> bool {
    let of_each = || (0..mesh.segments.len()).map(|index| mesh::gateways(mesh, index));
    if of_each().flatten().any(|(node, _)| node.relay) {
        return true;
    }
    let kept: BTreeSet<PublicKey> = of_each()
        .flatten()
        .filter(|(node, _)| node.persistent_keepalive > 0)
        .filter_map(|(node, _)| node.key)
        .collect();
    let mut seen: BTreeMap<PublicKey, Vec<SocketAddr>> = BTreeMap::new();
    if !kept.is_empty() {
        for (key, at) in mesh.sightings().filter(|(key, _)| kept.contains(key)) {
            seen.entry(key).or_default().push(at);
        }
    }
    let may_need = |gateways: &Vec<(&Node, bool)>| {
        gateways.iter().any(|(node, _)| mesh::may_need_another_path(node, &seen))
    };
    of_each().filter(may_need).take(2).count() == 2
}

/// Effect of a node's annotation `relay`.
const fn offer(is_off: bool, is_gateway: bool, is_behind_nat: bool) -> &'static str {
    match (is_off, is_gateway, is_behind_nat) {
        (true, ..) => "no; annotated, but this agent runs with --relay=off",
        (_, false, _) => "no; annotated, but only leaders and stand-bys relay, and this node is neither",
        (.., true) => {
            "offered, but others see this node at another address than it publishes: behind a NAT a relay needs \
             its ports forwarded, and the annotation force-endpoint"
        }
        (.., false) => "offered to other locations",
    }
}

/// Opens the programs and maps for the task.
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
    use super::*;

    #[test]
    fn an_annotation_without_effect_is_visible() {
        assert_eq!(offer(false, true, false), "offered to other locations");
        assert!(offer(false, true, true).contains("behind a NAT"));
        assert!(offer(false, false, false).contains("neither"));
        assert!(offer(true, true, false).contains("--relay=off"));
    }

    #[test]
    fn a_first_plan_keeps_a_relay_that_is_in_use_and_relay_off_leaves_it() {
        let key = PublicKey([1; 32]);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (relay, found) = (at("198.51.100.1:51900"), at("192.0.2.7:40000"));
        let planned = |knows, listens, endpoint: Option<SocketAddr>| {
            let relays = Relays::default();
            relays.shared().knows = knows;
            relays.shared().endpoints.extend(endpoint.map(|endpoint| (key, (endpoint, false))));
            let inputs = relays.inputs(listens, [(key, relay)]);
            assert_eq!(inputs.listens, listens);
            inputs.endpoints.get(&key).copied()
        };
        let is_at = |at| Some(EndpointOverride::At(at));
        assert_eq!(planned(false, true, None), is_at(relay), "before the task has looked");
        assert_eq!(planned(true, true, None), None, "the published endpoint");
        assert_eq!(planned(true, true, Some(found)), is_at(found), "what the task has found");
        assert_eq!(planned(false, false, None), Some(EndpointOverride::LeavesRelay), "--relay=off");
    }

    #[test]
    fn where_the_last_offer_ends_a_relay_is_left_and_nobody_is_told_of_its_port() {
        let (key, relays) = (PublicKey([1; 32]), Relays::default());
        let relay = "198.51.100.1:51900".parse::<SocketAddr>().unwrap();
        let planned = |listens| relays.inputs(listens, []).endpoints.get(&key).copied();
        let before = || [(key, (relay, true))].into();
        relays.shared().note_left(false, before(), Instant::now());
        assert_eq!(planned(false), Some(EndpointOverride::LeavesRelay));
        assert!(relays.is_relayed(&key));
        // Until the other end knows, too.
        relays.shared().note_left(false, before(), Instant::now().checked_sub(RESTS).unwrap());
        assert_eq!(planned(false), None);
        assert!(!relays.is_relayed(&key));
        relays.shared().note_left(false, before(), Instant::now());
        assert_eq!(planned(true), None, "another offer");
        relays.shared().note_left(true, before(), Instant::now());
        assert!(!relays.is_relayed(&key));
    }
}
