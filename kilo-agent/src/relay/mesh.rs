//! What the mesh says of the leaders of other locations.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use kilo_core::{
    relay::{NodeId, RelayPlaces, Seen},
    signal_id,
    topology::{Mesh, Node},
    wireguard::key::PublicKey,
};
use kilo_host::wireguard::PeerStatus;

use crate::status::View;

/// The node that carries a location's packets.
pub fn leader(mesh: &Mesh, index: usize) -> Option<&Node> {
    let segment = mesh.segments.get(index)?;
    let gateways = mesh.gateways_of(index);
    let acting = *gateways.order.get(gateways.acting)?;
    segment.members.get(acting).map(|member| &*member.node)
}

/// Leaders of other locations, and whether this node is one and relays.
#[derive(Clone, Debug, Default)]
pub struct Leaders {
    /// By id: key and name.
    pub nodes: BTreeMap<NodeId, (PublicKey, String)>,
    /// As the device shows them.
    pub seen: Vec<Seen>,
    /// This node leads its location.
    pub leads: bool,
    /// It offers to relay.
    pub offers: bool,
    /// Anybody does.
    pub is_offered: bool,
    /// Others see this node where it does not say that it is.
    pub is_behind_nat: bool,
}

impl Leaders {
    /// Of a view, without a look at the device.
    pub fn of(view: &View, peers: &BTreeMap<PublicKey, PeerStatus>) -> Self {
        let mesh = &view.mesh;
        let mut found = Self::default();
        let Some(own) = view.own.as_deref() else { return found };
        let relays = RelayPlaces::of(&view.snapshot.nodes, &own.discovered_endpoints);
        for index in 0..mesh.segments.len() {
            let Some(node) = leader(mesh, index) else { continue };
            found.is_offered |= node.relay;
            if node.name == own.name {
                (found.leads, found.offers) = (true, node.relay);
                continue;
            }
            let Some(key) = node.key else { continue };
            let (id, peer) = (signal_id::node(&key), peers.get(&key).cloned().unwrap_or_default());
            found.nodes.insert(id, (key, node.name.clone()));
            found.seen.push(Seen {
                id,
                handshake_age: peer.handshake_age,
                sent: peer.tx_bytes,
                received: peer.rx_bytes,
                endpoint: peer.endpoint,
                published: published(node),
                places: places(view, node, &key, &relays),
                relays: node.relay,
            });
        }
        let says = published(own);
        found.is_behind_nat = own
            .key
            .is_some_and(|key| places(view, own, &key, &relays).iter().any(|place| Some(*place) != says));
        found
    }
}

fn published(node: &Node) -> Option<SocketAddr> {
    let endpoint = node.endpoint.as_ref()?;
    Some(SocketAddr::new(endpoint.ip()?, endpoint.port))
}

/// Where other nodes see it, and at which addresses of its cloud it may be, of either family.
fn places(view: &View, node: &Node, key: &PublicKey, relays: &RelayPlaces) -> Vec<SocketAddr> {
    let seen = view.snapshot.nodes.iter().filter_map(|other| other.discovered_endpoints.get(key).copied());
    let port = node.endpoint.as_ref().map(|endpoint| endpoint.port);
    let external = node.external_ips.iter().filter_map(|address| Some(SocketAddr::new(*address, port?)));
    let seen = seen.filter(|at| !relays.contains(*at));
    seen.chain(external).collect::<BTreeSet<_>>().into_iter().collect()
}
