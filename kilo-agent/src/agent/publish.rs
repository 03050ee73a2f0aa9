//! What this agent publishes: its node's annotations, Events, and the status of peers.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, SocketAddrV6},
};

use super::{
    Agent,
    host_state::{HostState, SeenEndpoints},
    last_good_writer::LastGoodWriter,
    network_condition::Availability,
    peer_reports::PeerReports,
    publisher::Publisher,
};
use crate::{announce, backend::Backend, failover::Failover, relay};
use ipnet::IpNet;
use kilo_core::{
    objects::{InternalIpBy, Published, Snapshot, events::EventReason},
    plan,
    settings::{Granularity, Relay},
    topology::{
        CheckedInRef, Mesh, Node, ObservedMesh,
        changes::{self, speaker},
        peer_acceptances,
    },
    wireguard::{Endpoint, PublicKey},
};
use kilo_host::net::{discovery, links::Link};

/// Cilium's device, which has the node's overlay address.
const CILIUM_HOST: &str = "cilium_host";

/// Most endpoints of others that a node publishes, at 119 bytes each: the API server refuses a Node whose annotations
/// are longer than 256 KiB together, and with them its heartbeat.
const MOST_SEEN: usize = 1000;

/// What writes beside the reconciles, because an API server or a disk may hang.
pub(super) struct Writers<B> {
    /// This node's annotations.
    pub publisher: Publisher<B>,
    /// The status of Peer objects.
    pub peer_reports: PeerReports,
    /// The condition NetworkUnavailable.
    pub availability: Availability,
    /// What an agent that starts without API server begins with; `None`: it is not saved.
    pub last_good: Option<LastGoodWriter>,
}

impl<B: Backend> Writers<B> {
    /// Waits for the writes that must not be lost.
    pub async fn finish(mut self) {
        self.publisher.finish().await;
        if let Some(last_good) = self.last_good {
            last_good.finish().await;
        }
    }
}

impl<B: Backend> Agent<B> {
    /// One agent, that of the first location's leader, writes into each Peer object whether it is part of the
    /// mesh.
    pub(super) fn report_peers(&mut self) {
        let ObservedMesh { mesh, snapshot, .. } = &*self.state.observed;
        if speaker(mesh) == Some(&self.options.hostname) {
            self.writers.peer_reports.report(&self.backend, peer_acceptances(mesh, snapshot));
        } else {
            self.writers.peer_reports.forget();
        }
    }

    /// Writes an Event about each of these conflicts that this node has a part in, beside the reconciles.
    pub(super) fn report_conflicts(&self, conflicts: &[plan::Conflict]) {
        let own = |conflict: &&plan::Conflict| conflict.nodes.contains(&self.options.hostname);
        for conflict in conflicts.iter().filter(own) {
            self.report(conflict.claimed.kind().event(), conflict.to_string());
        }
    }

    /// Writes an Event when this node has become its location's leader, possibly against Kilo's rule.
    pub(super) fn report_successions(&self, mesh: &Mesh) {
        let Some(failover) = &self.sources.failover else { return };
        for why in failover.successions() {
            let location = mesh.find(&self.options.hostname);
            let location = location.map_or("its location", |(at, _)| mesh.segments[at].location.as_str());
            self.report(EventReason::LeadsLocation, format!("leads {location} after {why}"));
        }
    }

    /// Writes an Event about this node, beside the reconciles.
    pub(super) fn report(&self, reason: EventReason, text: String) {
        announce::write_event(&self.backend, self.options.hostname.clone(), reason, text);
    }

    /// Describes this node as all others should see it.
    pub(super) async fn describe_own_node(
        &mut self,
        seen: &Node,
        host: &HostState,
        seen_endpoints: &SeenEndpoints,
    ) -> Node {
        let links = &host.links;
        let hostname = self.sources.resolver.resolve_own(&self.options.hostname).await;
        let found = discovery::discover(&discovery::Facts {
            resolved: &hostname,
            default_interface: host.routes_out.default,
            links,
            kilo: host.interface.index,
            pod_cidrs: &seen.pod_cidrs,
            internal_cidrs: &self.options.internal_cidrs,
        });
        let mut own = seen.clone();
        own.key = Some(self.key.public());
        own.granularity = Some(self.options.settings.granularity);
        // A relayed peer is not seen at its own address.
        let at_own_addresses = seen_endpoints.peers_at_own_addresses();
        own.discovered_endpoints =
            at_own_addresses.filter(|(key, _)| !self.sources.relays.is_relayed(key)).collect();
        let cilium = links.iter().find(|link| link.name == CILIUM_HOST);
        let addresses: Vec<_> = cilium.iter().flat_map(|link| &link.addresses).map(|a| a.net).collect();
        own.cni_compatibility_ip = plan::published_overlay(self.options.compatibility, &addresses);
        set_failover_part(&mut own, found.and_then(|found| found.private), self.sources.failover.as_ref());
        if !own.endpoint_forced {
            let (from, prefer_private) = (self.options.endpoint_from, self.options.prefer_private);
            let address = discovery::endpoint(found, &seen.external_ips, from, prefer_private);
            own.endpoint = address.map(|ip| SocketAddr::new(ip, self.options.settings.port).into());
        }
        own
    }

    /// An IPv6 address where others may try this node besides its endpoint. Published only by gateways, where
    /// gateways may need alternative paths. It is the source address of what WireGuard sends, so replies to
    /// it pass firewalls.
    fn ipv6_endpoint(&self, own: &Node, mesh: &Mesh, links: &[Link]) -> Option<SocketAddrV6> {
        let is_ipv6 = own.endpoint.as_ref().and_then(Endpoint::ip).is_some_and(|ip| ip.is_ipv6());
        if self.options.relay == Relay::Off || is_ipv6 || !concerns_relays(own, mesh) {
            return None;
        }
        let address = discovery::public_ipv6(links, relay::source_towards(discovery::ANYWHERE.into())?)?;
        Some(SocketAddrV6::new(address, self.options.settings.port, 0, 0))
    }

    /// The annotations of this node; its heartbeat stays as others know it.
    pub(super) fn published(
        &self,
        own: &Node,
        seen: CheckedInRef<'_>,
        observed: &ObservedMesh,
        links: &[Link],
    ) -> Published {
        let ObservedMesh { mesh, snapshot, .. } = observed;
        Published {
            endpoint: own.endpoint.clone(),
            ipv6_endpoint: self.ipv6_endpoint(own, mesh, links),
            relay_off: self.options.relay == Relay::Off && concerns_relays(own, mesh),
            internal_ip: own.internal_ip,
            key: own.key,
            last_seen: seen.last_seen,
            wireguard_ip: plan::wireguard_address(mesh, &self.options.hostname),
            discovered_endpoints: roaming_endpoints(own, mesh, snapshot),
            granularity: Some(self.options.settings.granularity),
            cni_compatibility_ip: own.cni_compatibility_ip,
            signal: own.signal,
            leading: own.leading,
            leaders: own.leaders,
            // Filled in by the publisher, which knows what was promised.
            heartbeat: None,
            state: Some(changes::state(&self.options.hostname, observed)),
        }
    }
}

/// Whether this node is a gateway in a mesh where gateways may need paths other than their endpoints.
fn concerns_relays(own: &Node, mesh: &Mesh) -> bool {
    relay::is_wanted(mesh) && is_gateway(mesh, &own.name)
}

/// Where this node sees roaming gateways and peers: others need no other endpoints. Of more than [`MOST_SEEN`] the
/// gateways come first, whose locations nobody else may reach.
fn roaming_endpoints(own: &Node, mesh: &Mesh, snapshot: &Snapshot) -> BTreeMap<PublicKey, SocketAddr> {
    let gateways = mesh.segments.iter().enumerate().flat_map(|(at, segment)| {
        let order = mesh.gateways_of(at).into_owned().order;
        order.into_iter().filter_map(|gateway| segment.members.get(gateway))
    });
    let gateways: BTreeSet<_> = gateways
        .filter(|gateway| gateway.node.persistent_keepalive > 0)
        .filter_map(|gateway| gateway.node.key)
        .collect();
    let roams = mesh.peers.iter().filter(|peer| peer.persistent_keepalive > 0);
    let peers: BTreeSet<_> =
        roams.map(|peer| peer.public_key).filter(|key| !gateways.contains(key)).collect();
    let seen = [gateways, peers].into_iter().flatten().filter_map(|key| {
        let at = *own.discovered_endpoints.get(&key)?;
        (!publishes_itself(snapshot, &key, &at)).then_some((key, at))
    });
    seen.take(MOST_SEEN).collect()
}

/// Whether this node may carry its location's packets.
fn is_gateway(mesh: &Mesh, name: &str) -> bool {
    mesh.find(name).is_some_and(|(at, _)| {
        let order = mesh.gateways_of(at).into_owned().order;
        order.iter().filter_map(|gateway| mesh.segments[at].members.get(*gateway)).any(|it| it.name() == name)
    })
}

/// Whether a node is seen at the IPv6 endpoint it publishes itself: others choose between that and its
/// endpoint by what they can reach, not by what this node has reached.
fn publishes_itself(snapshot: &Snapshot, key: &PublicKey, at: &SocketAddr) -> bool {
    let SocketAddr::V6(at) = at else { return false };
    snapshot.nodes.iter().any(|node| node.key == Some(*key) && node.ipv6_endpoint == Some(*at))
}

/// Sets the private address, which may be the discovered one, and the node's failover annotations. Without
/// failover or a private address the node hears no signals of its location and answers no CLAIM, so it must
/// not publish that it does.
fn set_failover_part(own: &mut Node, found: Option<IpNet>, failover: Option<&Failover>) {
    match own.internal_ip_by {
        InternalIpBy::Agent => own.internal_ip = found,
        InternalIpBy::Forced => {}
        InternalIpBy::ForcedNone => own.internal_ip = None,
    }
    let is_in_a_location = own.granularity == Some(Granularity::Location) && own.internal_ip.is_some();
    let failover = failover.filter(|_| is_in_a_location);
    own.signal = failover.is_some();
    own.leading = failover.and_then(|failover| failover.leading(own.leading));
    own.leaders = failover.and_then(Failover::leaders);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Notify;

    use super::*;
    use crate::failover::Options;
    use kilo_core::{objects::annotations::wanted, topology::Peer};

    #[test]
    fn a_node_without_private_address_or_failover_says_nothing_of_signals() {
        let options = Options { stand_bys: 2, leaders: 2, params: kilo_failover::Params::default() };
        let failover = Failover::new(options, Arc::new(Notify::new())).unwrap();
        // As others know it: it took part before.
        let seen = Node {
            granularity: Some(Granularity::Location),
            internal_ip: "10.1.0.1/24".parse().ok(),
            signal: true,
            leading: Some(1 << 16),
            leaders: Some(2),
            ..Node::default()
        };
        let published = |node: &Node, found: Option<&str>, failover: Option<&Failover>| {
            let mut own = node.clone();
            set_failover_part(&mut own, found.map(|found| found.parse().unwrap()), failover);
            (own.signal, own.leading, own.leaders)
        };
        let (all, nothing) = ((true, Some(1 << 16), Some(2)), (false, None, None));
        assert_eq!(published(&seen, Some("10.1.0.1/24"), Some(&failover)), all);
        assert_eq!(published(&seen, None, Some(&failover)), nothing, "public addresses alone");
        assert_eq!(published(&seen, Some("10.1.0.1/24"), None), nothing, "--failover=off");
        let forced = Node { internal_ip_by: InternalIpBy::Forced, ..seen.clone() };
        assert_eq!(published(&forced, None, Some(&failover)), all, "force-internal-ip");
        let without = Node { internal_ip_by: InternalIpBy::ForcedNone, internal_ip: None, ..seen.clone() };
        assert_eq!(published(&without, Some("10.1.0.1/24"), Some(&failover)), nothing, "it is to have none");
        let full = Node { granularity: Some(Granularity::Full), ..seen };
        assert_eq!(published(&full, Some("10.1.0.1/24"), Some(&failover)), nothing, "each node leads itself");
    }

    #[test]
    fn however_many_peers_roam_their_endpoints_fit_into_an_annotation_and_gateways_come_first() {
        let key = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            PublicKey(bytes)
        };
        let at =
            |number: u32| SocketAddr::new([0x2001, 0xdb8, !0, !0, !0, !0, 0x1234, !0].into(), number as u16);
        let peer = |number: u32| Peer {
            name: format!("peer-{number}"),
            allowed_ips: Vec::new(),
            endpoint: None,
            persistent_keepalive: 25,
            preshared_key: None,
            public_key: key(number),
            follows: false,
        };
        let peers = (0..10_000).map(|number| (format!("peer-{number:05}"), peer(number))).collect();
        let behind_nat = Node {
            name: "b1".to_owned(),
            key: Some(key(10_000)),
            endpoint: "192.0.2.1:51820".parse().ok(),
            persistent_keepalive: 25,
            ..Node::default()
        };
        let mesh = Mesh::new([&behind_nat], &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let own = Node {
            discovered_endpoints: (0..=10_000).map(|number| (key(number), at(number))).collect(),
            ..Node::default()
        };
        let seen = roaming_endpoints(&own, &mesh, &Snapshot::default());
        assert_eq!(seen.get(&key(10_000)), Some(&at(10_000)), "a gateway");
        let published = Published { discovered_endpoints: seen, ..Published::default() };
        let texts = wanted(&published).into_iter().filter_map(|(name, text)| Some(name.len() + text?.len()));
        let bytes: usize = texts.sum();
        assert!(bytes < 128 << 10, "{bytes} of the 262,144 bytes that all annotations of a Node may have");
    }
}
