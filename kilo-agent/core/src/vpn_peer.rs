//! What a machine that joins the mesh as a VPN peer needs: WireGuard peers, addresses and routes. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;

use crate::{
    addresses::is_reached_from_anywhere,
    flat_map::FlatSet,
    net::{MAIN_TABLE, NetPlan, Route},
    showconf, signal_id,
    topology::{Lost, Member, Mesh, Peer, Segment},
    wireguard::{Endpoint, EndpointHost, WireguardPeer, WireguardPlan, conf::PeerSection},
};

/// Settings of this machine as a peer.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of its Peer object.
    pub peer: String,
    /// UDP port, host byte order.
    pub port: u16,
    /// MTU of the device in bytes.
    pub mtu: u32,
    /// Seconds between keepalives; 0: off.
    pub persistent_keepalive: u16,
    /// Further prefixes reached through the cluster (services, for example).
    pub more_prefixes: Vec<IpNet>,
}

/// The desired state of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectPlan {
    /// Peers of the WireGuard device.
    pub wireguard: WireguardPlan,
    /// Addresses and routes.
    pub net: NetPlan,
    /// Prefixes that get no route, because the tunnel's own packets go there.
    pub unrouted: Vec<IpNet>,
}

/// Addresses for a peer's device: those of its allowed IPs that are a single address.
pub fn addresses(peer: &Peer) -> BTreeSet<IpNet> {
    peer.allowed_ips.iter().filter(|prefix| prefix.prefix_len() == prefix.max_prefix_len()).copied().collect()
}

/// Plans for the peer of that name; `None` when the mesh does not have it. `resolved`: addresses of
/// endpoints that are DNS names.
pub fn plan(mesh: &Mesh, options: &Options, resolved: &BTreeMap<String, IpAddr>) -> Option<ConnectPlan> {
    let own = mesh.peers.iter().find(|peer| peer.name == options.peer)?;
    let mut more: &[IpNet] = &options.more_prefixes;
    let mut sections = Vec::new();
    for (at, section) in showconf::of_peer(mesh, &options.peer)?.peers.into_iter().enumerate() {
        // Services answer in every location: the first one that can be reached gets them.
        let here = if section.endpoint.is_some() { std::mem::take(&mut more) } else { &[] };
        let here = here.iter().map(IpNet::trunc);
        match mesh.segments.get(at) {
            Some(segment) if own.follows && mesh.fails_over(at) => {
                sections.extend(of_gateways(mesh, at, segment, &section, here));
            }
            _ => sections.push(PeerSection {
                allowed_ips: section.allowed_ips.into_iter().chain(here).collect(),
                ..section
            }),
        }
    }
    let control = own.follows.then(|| IpAddr::V6(signal_id::control_address(&own.public_key)));
    let mut addresses = addresses(own);
    let mut plan = ConnectPlan {
        wireguard: WireguardPlan { listen_port: options.port, peers: BTreeMap::new() },
        net: NetPlan { mtu: options.mtu, ..NetPlan::default() },
        unrouted: Vec::new(),
    };
    let endpoints: BTreeMap<_, _> = sections
        .iter()
        .map(|section| (section.public_key, section.endpoint.as_ref().and_then(|end| resolve(end, resolved))))
        .collect();
    let outer: BTreeSet<IpAddr> = endpoints.values().flatten().map(SocketAddr::ip).collect();
    let (open, pods) = (open(mesh), pods(mesh));
    // A prefix that two claim belongs to the first, as on the nodes.
    let (mut claimed, mut routes) = (BTreeSet::new(), Vec::new());
    for section in sections {
        let allowed_ips: FlatSet<IpNet> =
            section.allowed_ips.iter().map(IpNet::trunc).filter(|prefix| claimed.insert(*prefix)).collect();
        let endpoint = endpoints.get(&section.public_key).copied().flatten();
        for &prefix in &allowed_ips {
            let source = match control {
                Some(control) if signal_id::is_control(&prefix) => Some(control),
                _ => addresses.iter().map(IpNet::addr).find(|ip| ip.is_ipv4() == prefix.addr().is_ipv4()),
            };
            if outer.iter().any(|ip| prefix.contains(ip)) {
                plan.unrouted.extend(source.map(|_| prefix));
                continue;
            }
            // A default route is one of several.
            let closed = prefix.prefix_len() > 0 && !open.contains(&prefix);
            match source {
                Some(_) => {
                    routes.push(Route { destination: prefix, table: MAIN_TABLE, source, mtu: None, closed });
                }
                // Without an address of that family no answer would come back. Other prefixes may hold the
                // API server, or half of the Internet.
                None if pods.contains(&prefix) => {
                    plan.net.unreachable.insert(prefix);
                }
                None => {}
            }
        }
        plan.wireguard.peers.entry(section.public_key).or_insert(WireguardPeer {
            allowed_ips,
            endpoint,
            roams: endpoint.is_none() || mesh.discovered.contains_key(&section.public_key),
            persistent_keepalive: options.persistent_keepalive,
            preshared_key: section.preshared_key,
        });
    }
    plan.net.routes = routes.into_iter().collect();
    let lost = lost(mesh).filter(|prefix| !claimed.contains(prefix));
    plan.net.unreachable.extend(lost.filter(|prefix| !outer.iter().any(|ip| prefix.contains(ip))));
    addresses.extend(control.map(IpNet::from));
    plan.net.addresses = addresses;
    Some(plan)
}

/// Prefixes of nodes that are known and take no part now: nobody else has them.
fn lost(mesh: &Mesh) -> impl Iterator<Item = IpNet> + '_ {
    let pods = mesh.lost.iter().flat_map(|lost| &lost.member.node.pod_cidrs);
    let private = mesh.lost.iter().filter_map(|Lost { member, .. }| {
        let ip = member.private_ip()?;
        (!may_be_api_server(member, ip)).then(|| IpNet::from(ip))
    });
    pods.map(IpNet::trunc).chain(private)
}

/// Whether this may be the address of the API server, which says when a node is back, or of a
/// host outside the mesh.
fn may_be_api_server(member: &Member, ip: IpAddr) -> bool {
    member.node.control_plane || is_reached_from_anywhere(ip)
}

/// Addresses of nodes that this machine must reach whatever becomes of the tunnel.
fn open(mesh: &Mesh) -> BTreeSet<IpNet> {
    let members = mesh.segments.iter().flat_map(|segment| &segment.members);
    let open = members.filter_map(|member| member.private_ip().filter(|ip| may_be_api_server(member, *ip)));
    open.map(IpNet::from).collect()
}

/// Prefixes of all pods, to which nothing may be sent in cleartext before there is a [`plan`] of the whole mesh.
pub fn pods(mesh: &Mesh) -> BTreeSet<IpNet> {
    let members = || mesh.segments.iter().flat_map(|segment| &segment.members);
    let outer: Vec<_> =
        members().filter_map(|member| member.node.endpoint.as_ref().and_then(Endpoint::ip)).collect();
    let pods = members().flat_map(|member| member.node.pod_cidrs.iter().map(IpNet::trunc));
    pods.filter(|prefix| !outer.iter().any(|ip| prefix.contains(ip))).collect()
}

/// All gateways of a location, each with what it carries now. `section`: the section that its leader alone
/// would have; `more` goes to the acting leader.
fn of_gateways(
    mesh: &Mesh,
    at: usize,
    segment: &Segment,
    section: &PeerSection,
    more: impl Iterator<Item = IpNet>,
) -> Vec<PeerSection> {
    let gateways = mesh.gateways_of(at);
    let said = mesh.acting.of(segment);
    let mut carried = vec![Vec::new(); gateways.order.len()];
    for prefix in &segment.reach {
        carried[gateways.of_prefix(segment, said, prefix.member)].push(prefix.prefix);
    }
    carried[gateways.acting].extend(segment.allowed_location_ips.iter().map(IpNet::trunc).chain(more));
    let members = gateways.order.iter().map(|index| &segment.members[*index]);
    let sections = members.zip(carried).enumerate().filter_map(|(place, (member, mut allowed_ips))| {
        let key = member.node.key?;
        allowed_ips.push(IpAddr::V6(signal_id::control_address(&key)).into());
        let endpoint = if place == 0 { section.endpoint.clone() } else { stand_bys_endpoint(mesh, member) };
        Some(PeerSection { allowed_ips, endpoint, public_key: key, ..section.clone() })
    });
    sections.collect()
}

/// The endpoint of a stand-by from outside: where somebody sees it, else as configured.
fn stand_bys_endpoint(mesh: &Mesh, member: &Member) -> Option<Endpoint> {
    let node = &member.node;
    if let Some(seen) = node.key.and_then(|key| mesh.discovered.get(&key)) {
        return Some((*seen).into());
    }
    let is_outside = |ip| is_reached_from_anywhere(ip) || Some(ip) != member.private_ip();
    let is_reached = |endpoint: &&Endpoint| node.endpoint_forced || endpoint.ip().is_none_or(is_outside);
    node.endpoint.as_ref().filter(is_reached).cloned()
}

fn resolve(endpoint: &Endpoint, resolved: &BTreeMap<String, IpAddr>) -> Option<SocketAddr> {
    let ip = match &endpoint.host {
        EndpointHost::Ip(ip) => *ip,
        EndpointHost::Dns(name) => *resolved.get(name)?,
    };
    Some(SocketAddr::new(ip, endpoint.port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    fn mesh() -> Mesh {
        let node = |name: &str, key: u8, endpoint: &str, private: &str, pods: &str| Node {
            name: name.to_owned(),
            location: name.to_owned(),
            endpoint: endpoint.parse().ok(),
            key: Some(PublicKey([key; 32])),
            internal_ip: private.parse().ok(),
            pod_cidrs: vec![pods.parse().unwrap()],
            ..Node::default()
        };
        let nodes = [
            node("east", 1, "192.0.2.1:51820", "10.1.0.1/24", "10.42.1.0/24"),
            // Its private address is its endpoint.
            node("north", 2, "10.2.0.1:51820", "10.2.0.1/24", "fd00:42::/64"),
            node("west", 3, "vpn.example.com:51820", "10.3.0.1/24", "10.42.3.0/24"),
        ];
        let peer = |name: &str, key: u8, prefix: &str| Peer {
            name: name.to_owned(),
            allowed_ips: vec![prefix.parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([key; 32]),
            follows: false,
        };
        let peers = [peer("laptop", 8, "10.5.0.1/32"), peer("phone", 9, "10.5.0.2/32")];
        let peers = peers.into_iter().map(|peer| (peer.name.clone(), peer)).collect();
        Mesh::new(&nodes, &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    fn options() -> Options {
        Options {
            peer: "laptop".to_owned(),
            port: 51820,
            mtu: 1420,
            persistent_keepalive: 10,
            more_prefixes: vec!["10.43.0.0/16".parse().unwrap()],
        }
    }

    #[test]
    fn everything_of_the_mesh_is_routed_but_the_tunnels_own_way() {
        let resolved = BTreeMap::from([("vpn.example.com".to_owned(), "192.0.2.3".parse().unwrap())]);
        let plan = plan(&mesh(), &options(), &resolved).unwrap();
        let routes: Vec<String> = plan.net.routes.iter().map(|route| route.destination.to_string()).collect();
        for prefix in
            ["10.42.1.0/24", "10.1.0.1/32", "10.4.0.1/32", "10.42.3.0/24", "10.5.0.2/32", "10.43.0.0/16"]
        {
            assert!(routes.iter().any(|route| route == prefix), "{prefix} is missing: {routes:?}");
        }
        assert!(!routes.iter().any(|route| route.contains(':')), "the peer has no IPv6 address: {routes:?}");
        assert_eq!(plan.net.unreachable, BTreeSet::from(["fd00:42::/64".parse().unwrap()]));
        assert!(plan.net.routes.iter().all(|route| route.closed), "nothing goes another way in cleartext");
        assert_eq!(plan.unrouted, vec!["10.2.0.1/32".parse::<IpNet>().unwrap()]);
        let source = Some("10.5.0.1".parse().unwrap());
        assert!(plan.net.routes.iter().all(|route| route.source == source));
        assert_eq!(plan.net.addresses, BTreeSet::from(["10.5.0.1/32".parse().unwrap()]));
        let west = &plan.wireguard.peers[&PublicKey([3; 32])];
        assert_eq!(west.endpoint, Some("192.0.2.3:51820".parse().unwrap()));
        let east = &plan.wireguard.peers[&PublicKey([1; 32])];
        assert!(east.allowed_ips.contains(&"10.43.0.0/16".parse().unwrap()));
        assert_eq!(plan.wireguard.peers.len(), 4, "three locations and the other peer, not itself");
    }

    #[test]
    fn what_a_node_has_that_takes_no_part_is_unreachable_and_the_api_servers_address_is_not() {
        let node = |name: &str, n: u8, control_plane| {
            std::sync::Arc::new(Node {
                name: name.to_owned(),
                internal_ip: format!("10.1.0.{n}/24").parse().ok(),
                pod_cidrs: vec![format!("10.42.{n}.0/24").parse().unwrap()],
                key: Some(PublicKey([n; 32])),
                control_plane,
                ..Node::default()
            })
        };
        // Others have taken over what the last one had.
        let lost = [node("server", 7, true), node("worker", 8, false), node("old", 1, false)];
        let mesh = mesh().with_lost(&lost);
        let plan = plan(&mesh, &options(), &BTreeMap::new()).unwrap();
        let unreachable: Vec<String> = plan.net.unreachable.iter().map(ToString::to_string).collect();
        assert_eq!(unreachable, ["10.1.0.8/32", "10.42.7.0/24", "10.42.8.0/24", "fd00:42::/64"]);
        let pods: Vec<String> = pods(&mesh).iter().map(ToString::to_string).collect();
        assert_eq!(pods, ["10.42.1.0/24", "10.42.3.0/24", "fd00:42::/64"]);
    }

    #[test]
    fn a_prefix_around_an_endpoint_is_not_routed_into_its_own_tunnel() {
        let more_prefixes = vec!["192.0.0.0/8".parse().unwrap()];
        let plan = plan(&mesh(), &Options { more_prefixes, ..options() }, &BTreeMap::new()).unwrap();
        assert!(plan.unrouted.contains(&"192.0.0.0/8".parse().unwrap()));
        let west = &plan.wireguard.peers[&PublicKey([3; 32])];
        assert_eq!(west.endpoint, None, "a name that cannot be resolved stops nobody else");
    }
}
