//! Gateways of other locations, according to the mesh.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    sync::{Arc, Weak},
};

use kilo_core::{
    addresses::is_reached_from_anywhere,
    relay::{RelayAddresses, Seen},
    signal_id::{self, NodeId},
    topology::{Gateways, Mesh, Node, ObservedMesh, Segment},
    wireguard::key::PublicKey,
};
use kilo_host::wireguard::{Device, PeerStatus};

use super::Relays;

/// What the relay task needs to know of the last reconcile.
#[derive(Clone, Debug, Default)]
pub struct RelayView {
    /// The mesh as this node sees it, and all objects.
    pub observed: Arc<ObservedMesh>,
    /// The WireGuard device; `None` until it exists.
    pub device: Option<Device>,
    /// Addresses of relays.
    pub relay_addresses: Arc<RelayAddresses>,
}

/// The nodes of a location that have tunnels to other locations, and whether each carries packets at the
/// moment: with failover others stand by.
pub fn gateways(mesh: &Mesh, index: usize) -> Vec<(&Node, bool)> {
    let gateways = mesh.gateways_of(index);
    let acting = gateways.order.get(gateways.acting);
    let is_active = |at: &usize| gateways.homes.as_ref().is_some_and(|homes| homes.active.contains(at));
    let members = mesh.segments.get(index).map_or(&[][..], |segment| &segment.members);
    let node = |at: &usize| Some((&*members.get(*at)?.node, acting == Some(at) || is_active(at)));
    gateways.order.iter().filter_map(node).collect()
}

/// Identifies a mesh's locations and gateways: if they are unchanged, so are the [`FarGateways`], and the
/// device need not be read. Consecutive meshes share unchanged locations.
#[derive(Clone, Debug, Default)]
pub struct Locations {
    segments: Vec<Weak<Segment>>,
    gateways: Vec<Gateways>,
}

impl Locations {
    /// Identifies the locations of a mesh, without keeping it alive.
    pub fn of(mesh: &Mesh) -> Self {
        Self { segments: mesh.segments.iter().map(Arc::downgrade).collect(), gateways: mesh.gateways.clone() }
    }

    /// Whether this mesh has the same locations.
    pub fn are_of(&self, mesh: &Mesh) -> bool {
        self.segments.len() == mesh.segments.len()
            && self.segments.iter().zip(&mesh.segments).all(|(a, b)| a.as_ptr() == Arc::as_ptr(b))
            && self.gateways == mesh.gateways
    }
}

/// Gateways of other locations, and this node's role as a gateway and relay.
#[derive(Clone, Debug, Default)]
pub struct FarGateways {
    /// Key and name of each, by id.
    pub nodes: BTreeMap<NodeId, (PublicKey, String)>,
    /// The same gateways with their state in the device.
    pub seen: Vec<Seen>,
    /// Gateways that carry no packets at the moment.
    pub stand_bys: BTreeSet<NodeId>,
    /// Whether this node is a gateway of its location.
    pub is_gateway: bool,
    /// Whether this node offers to relay.
    pub offers: bool,
    /// Whether the mesh has gateways that may need other paths: [`super::is_wanted`].
    pub is_wanted: bool,
    /// Whether other nodes see this one at another endpoint than it publishes.
    pub is_behind_nat: bool,
}

impl FarGateways {
    /// Evaluates a view and the device's peers.
    pub fn of(view: &RelayView, relays: &Relays, peers: &BTreeMap<PublicKey, PeerStatus>) -> Self {
        let mesh = &view.observed.mesh;
        let mut found = Self::default();
        let Some(own) = view.observed.own.as_deref() else { return found };
        let seen = seen_by_others(view);
        let own_location = mesh.find(&own.name).map(|(at, _)| at);
        let near = own_location.map(|at| gateways(mesh, at)).unwrap_or_default();
        let me = near.iter().find(|(node, _)| node.name == own.name);
        (found.is_gateway, found.offers) = (me.is_some(), me.is_some_and(|(node, _)| node.relay));
        found.is_wanted = super::is_wanted(mesh);
        let is_idle = me.is_some_and(|(_, carries)| !carries);
        // No tunnel leads to a gateway of this location.
        let far = (0..mesh.segments.len()).filter(|at| Some(*at) != own_location);
        for (node, carries) in far.flat_map(|at| gateways(mesh, at)) {
            let Some(key) = node.key else { continue };
            let (id, peer) = (signal_id::node(&key), peers.get(&key).cloned().unwrap_or_default());
            found.nodes.insert(id, (key, node.name.clone()));
            if !carries {
                found.stand_bys.insert(id);
            }
            found.seen.push(Seen {
                id,
                is_idle: is_idle && !carries,
                handshake_age: peer.handshake_age,
                sent: peer.tx_bytes,
                received: peer.rx_bytes,
                endpoint: peer.endpoint,
                published: published(relays, node),
                also_published: known_addresses(node, None),
                candidates: known_addresses(node, seen.get(&key)),
                relays: node.relay && !node.relay_off,
                refuses: node.relay_off,
            });
        }
        // Another one of its external addresses is not a sign of NAT.
        let own_addresses = known_addresses(own, None);
        let own_endpoint = published(relays, own);
        let is_own = |address: &SocketAddr| Some(*address) == own_endpoint || own_addresses.contains(address);
        let by_others = own.key.and_then(|key| seen.get(&key));
        found.is_behind_nat = by_others.is_some_and(|addresses| !addresses.iter().all(is_own));
        found
    }
}

/// Whether a node may be unreachable at its endpoint. It must have a keepalive, which keeps a NAT mapping
/// open, and either the address is private and not forced by an annotation, or another node sees it (`seen`)
/// at an address that it does not name. An IPv6 address where it is seen says nothing about an IPv4 endpoint,
/// and is seen only because other paths are searched for. Endpoints with a DNS name do not count, because
/// nodes may resolve it differently.
pub fn may_need_another_path(node: &Node, seen: &BTreeMap<PublicKey, Vec<SocketAddr>>) -> bool {
    if node.persistent_keepalive == 0 {
        return false;
    }
    let Some(endpoint) = &node.endpoint else { return true };
    let Some(ip) = endpoint.ip() else { return false };
    let (at, known) = (SocketAddr::new(ip, endpoint.port), known_addresses(node, None));
    let is_elsewhere =
        |seen: &SocketAddr| (seen.is_ipv4() || ip.is_ipv6()) && *seen != at && !known.contains(seen);
    let is_private = !node.endpoint_forced && !is_reached_from_anywhere(ip);
    is_private || node.key.and_then(|key| seen.get(&key)).is_some_and(|seen| seen.iter().any(is_elsewhere))
}

fn published(relays: &Relays, node: &Node) -> Option<SocketAddr> {
    relays.address(node.endpoint.as_ref()?)
}

/// Endpoints at which nodes see each other, without those of relays; collected in one pass over all nodes.
fn seen_by_others(view: &RelayView) -> HashMap<PublicKey, BTreeSet<SocketAddr>> {
    let mut seen: HashMap<_, BTreeSet<_>> = HashMap::new();
    for (key, at) in view.observed.snapshot.nodes.iter().flat_map(|node| &node.node.discovered_endpoints) {
        if !view.relay_addresses.contains(*at) {
            seen.entry(*key).or_default().insert(*at);
        }
    }
    seen
}

/// All known addresses of a node: where others see it, its external addresses, and its published IPv6
/// endpoint.
fn known_addresses(node: &Node, seen: Option<&BTreeSet<SocketAddr>>) -> Vec<SocketAddr> {
    let port = node.endpoint.as_ref().map(|endpoint| endpoint.port);
    let external = node.external_ips.iter().filter_map(|address| Some(SocketAddr::new(*address, port?)));
    let seen = seen.into_iter().flatten().copied();
    let ipv6 = node.ipv6_endpoint.map(SocketAddr::from);
    seen.chain(external).chain(ipv6).collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV6;

    use kilo_core::{
        objects::{CheckedIn, Snapshot},
        settings::Granularity,
        topology::{Acting, Peer},
    };

    use super::*;

    #[test]
    fn one_vpn_peer_more_is_no_reason_to_read_the_device_and_another_leader_is() {
        let node = |name: &str, number: u8| {
            let node = Node {
                name: name.to_owned(),
                key: Some(PublicKey([number; 32])),
                location: name.to_owned(),
                endpoint: format!("192.0.2.{number}:51820").parse().ok(),
                internal_ip: format!("10.0.0.{number}/24").parse().ok(),
                ..Node::default()
            };
            Arc::new(node)
        };
        let laptop = Peer {
            name: "laptop".to_owned(),
            allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([9; 32]),
            follows: false,
        };
        let mut nodes = [node("a", 1), node("b", 2)];
        let (none, one) = (BTreeMap::new(), BTreeMap::from([("laptop".to_owned(), laptop)]));
        let (granularity, subnet) = (Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let mesh = Mesh::default().next(&nodes, &none, granularity, subnet);
        let locations = Locations::of(&mesh);
        let with_peer = mesh.next(&nodes, &one, granularity, subnet);
        assert!(locations.are_of(&mesh) && locations.are_of(&with_peer));
        nodes[1] = node("b", 3);
        assert!(!locations.are_of(&with_peer.next(&nodes, &one, granularity, subnet)), "another leader");
        assert!(
            !locations.are_of(&with_peer.next(&nodes[..1], &one, granularity, subnet)),
            "a location less"
        );
        assert!(!Locations::default().are_of(&mesh));
    }

    #[test]
    fn stand_bys_are_ends_of_pairs_and_relay_and_members_do_neither() {
        let node = |name: &str, number: u8, relay| {
            Arc::new(Node {
                name: name.to_owned(),
                key: Some(PublicKey([number; 32])),
                location: name[..1].to_owned(),
                endpoint: format!("192.0.2.{number}:51820").parse().ok(),
                internal_ip: format!("10.0.0.{number}/24").parse().ok(),
                signal: true,
                relay,
                ..Node::default()
            })
        };
        let nodes = [
            node("a1", 1, false),
            node("a2", 2, false),
            node("a3", 3, true),
            node("b1", 4, false),
            node("b2", 5, true),
            node("b3", 6, false),
        ];
        let subnet = "10.4.0.0/16".parse().unwrap();
        let mut mesh = Mesh::default().next(&nodes, &BTreeMap::new(), Granularity::Location, subnet);
        let of = |mesh: &Mesh, own: usize| {
            let own = Some(Arc::clone(&nodes[own]));
            let observed =
                ObservedMesh { mesh: Arc::new(mesh.clone()), own, ..ObservedMesh::default() }.into();
            let view = RelayView { observed, ..RelayView::default() };
            let far = FarGateways::of(&view, &Relays::default(), &BTreeMap::new());
            let name = |seen: &Seen| {
                let name = far.nodes[&seen.id].1.clone();
                if seen.is_idle { format!("({name})") } else { name }
            };
            let mut names: Vec<_> = far.seen.iter().map(name).collect();
            names.sort_unstable();
            (names.join(" "), far.is_gateway, far.offers, far.is_wanted)
        };
        assert_eq!(of(&mesh, 0), ("b1".to_owned(), true, false, false), "without failover");
        assert!(!super::super::is_wanted(&mesh));
        let acting = Acting::default();
        mesh.gateways = mesh.segments.iter().map(|segment| acting.gateways(segment, 1)).collect();
        assert_eq!(of(&mesh, 0), ("b1 b2".to_owned(), true, false, true));
        let idle = "(b2) b1".to_owned();
        assert_eq!(
            of(&mesh, 1),
            (idle, true, false, true),
            "the stand-by is an end, too, towards the leader"
        );
        assert_eq!(
            of(&mesh, 2),
            ("b1 b2".to_owned(), false, false, true),
            "a member is none, and does not relay"
        );
        assert_eq!(of(&mesh, 4), ("(a2) a1".to_owned(), true, true, true), "a stand-by relays");
        assert!(super::super::is_wanted(&mesh));
    }

    #[test]
    fn other_paths_are_wanted_where_two_locations_are_behind_nats() {
        let node = |name: &str, endpoint: &str, keepalive: u32| Node {
            name: name.to_owned(),
            key: Some(PublicKey([name.as_bytes()[0]; 32])),
            location: name.to_owned(),
            endpoint: endpoint.parse().ok(),
            internal_ip: "10.0.0.1/24".parse().ok(),
            persistent_keepalive: keepalive,
            ..Node::default()
        };
        let is_wanted = |nodes: [Node; 3]| {
            let nodes = nodes.map(Arc::new);
            let subnet = "10.4.0.0/16".parse().unwrap();
            super::super::is_wanted(&Mesh::default().next(
                &nodes,
                &BTreeMap::new(),
                Granularity::Location,
                subnet,
            ))
        };
        let cloud = || node("z", "192.0.2.3:51820", 0);
        let home = |name| node(name, "192.168.1.2:51820", 25);
        assert!(is_wanted([home("a"), home("b"), cloud()]));
        assert!(!is_wanted([home("a"), node("b", "192.0.2.2:51820", 25), cloud()]), "one of them alone");
        // Private networks that reach each other directly use no keepalives.
        let office = |name| node(name, "192.168.1.2:51820", 0);
        assert!(!is_wanted([office("a"), office("b"), office("c")]));
        let forced = |name| Node { endpoint_forced: true, ..home(name) };
        assert!(!is_wanted([forced("a"), forced("b"), cloud()]));
        // The observed endpoint outweighs the published one.
        let publishes_public = |name| node(name, "192.0.2.7:51820", 25);
        let sees = |at: &str| {
            let key = |name: u8| PublicKey([name; 32]);
            let at = at.parse().unwrap();
            Node { discovered_endpoints: [(key(b'a'), at), (key(b'b'), at)].into(), ..cloud() }
        };
        assert!(is_wanted([publishes_public("a"), publishes_public("b"), sees("203.0.113.9:40001")]));
        assert!(!is_wanted([publishes_public("a"), publishes_public("b"), sees("192.0.2.7:51820")]));
        // Also in the view of the node that reaches the other by the IPv6 address it publishes, and therefore
        // is the first to see it.
        let key = |name: u8| PublicKey([name; 32]);
        let v6: SocketAddrV6 = "[2001:db8::7]:51820".parse().unwrap();
        let both = |name| Node { ipv6_endpoint: Some(v6), ..publishes_public(name) };
        let reaches = Node { discovered_endpoints: [(key(b'b'), v6.into())].into(), ..both("a") };
        assert!(is_wanted([reaches.clone(), both("b"), sees("203.0.113.9:40001")]));
        // IPv6 observations alone say nothing about an IPv4 endpoint, even of nodes that no longer publish an
        // IPv6 address.
        let elsewhere = "[2001:db8::9]:51820";
        assert!(!is_wanted([reaches.clone(), both("b"), sees(elsewhere)]));
        assert!(!is_wanted([publishes_public("a"), publishes_public("b"), sees(elsewhere)]));
        let by_v6 = |name| node(name, "[2001:db8::7]:51820", 25);
        assert!(is_wanted([by_v6("a"), by_v6("b"), sees(elsewhere)]));
        assert!(
            is_wanted([by_v6("a"), by_v6("b"), sees("203.0.113.9:40001")]),
            "nodes without IPv6 have to meet them there"
        );
    }

    #[test]
    fn a_leader_with_a_name_as_endpoint_is_where_the_name_leads() {
        let node = |name: &str, endpoint: &str, number: u8| {
            Arc::new(Node {
                name: name.to_owned(),
                key: Some(PublicKey([number; 32])),
                location: name.to_owned(),
                endpoint: endpoint.parse().ok(),
                internal_ip: format!("10.0.0.{number}/24").parse().ok(),
                ..Node::default()
            })
        };
        let nodes = [node("a", "192.0.2.1:51820", 1), node("b", "home.example:51821", 2)];
        let subnet = "10.4.0.0/16".parse().unwrap();
        let mesh = Mesh::default().next(&nodes, &BTreeMap::new(), Granularity::Location, subnet);
        let relays = Relays::default();
        let own = Some(Arc::clone(&nodes[0]));
        let observed = ObservedMesh { mesh: Arc::new(mesh), own, ..ObservedMesh::default() }.into();
        let view = RelayView { observed, ..RelayView::default() };
        let published = || FarGateways::of(&view, &relays, &BTreeMap::new()).seen[0].published;
        assert_eq!(published(), None, "nobody has answered yet");
        relays.resolves(&[("home.example".to_owned(), "198.51.100.7".parse().unwrap())].into());
        assert_eq!(published(), "198.51.100.7:51821".parse().ok());
    }

    #[test]
    fn another_external_address_is_no_nat_and_another_address_where_others_see_the_node_is() {
        let node = |name: &str, number: u8, discovered: &[(u8, &str)]| {
            Arc::new(Node {
                name: name.to_owned(),
                key: Some(PublicKey([number; 32])),
                location: name.to_owned(),
                endpoint: format!("192.0.2.{number}:51820").parse().ok(),
                internal_ip: format!("10.0.0.{number}/24").parse().ok(),
                external_ips: vec![
                    format!("192.0.2.{number}").parse().unwrap(),
                    "2001:db8::1".parse().unwrap(),
                ],
                discovered_endpoints: discovered
                    .iter()
                    .map(|(key, at)| (PublicKey([*key; 32]), at.parse().unwrap()))
                    .collect(),
                ..Node::default()
            })
        };
        let is_behind_nat = |seen_at: &str| {
            let nodes = [node("a", 1, &[]), node("b", 2, &[(1, seen_at)])];
            let subnet = "10.4.0.0/16".parse().unwrap();
            let mesh = Mesh::default().next(&nodes, &BTreeMap::new(), Granularity::Location, subnet);
            let snapshot = Snapshot {
                nodes: nodes.iter().map(|node| CheckedIn { node: Node::clone(node), last_seen: 0 }).collect(),
                ..Snapshot::default()
            };
            let observed = ObservedMesh {
                mesh: Arc::new(mesh),
                snapshot: Arc::new(snapshot),
                own: Some(Arc::clone(&nodes[0])),
                ..ObservedMesh::default()
            };
            let view = RelayView { observed: observed.into(), ..RelayView::default() };
            FarGateways::of(&view, &Relays::default(), &BTreeMap::new()).is_behind_nat
        };
        assert!(!is_behind_nat("192.0.2.1:51820"));
        assert!(!is_behind_nat("[2001:db8::1]:51820"));
        assert!(is_behind_nat("203.0.113.1:45001"));
    }
}
