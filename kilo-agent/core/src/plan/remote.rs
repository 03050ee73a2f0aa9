//! The prefixes behind WireGuard: those of other locations and of VPN peers, sorted once for everything that
//! is computed from them.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{Inputs, Own, endpoints::gateway_endpoint};
use crate::{
    flat_map::sort_by_prefix,
    observed::HostLinks,
    signal_id,
    topology::{LocationPrefix, Member},
};

/// One prefix and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixClaim {
    /// The prefix, without host bits.
    pub prefix: IpNet,
    /// Index of the segment, or the number of segments plus the index of a VPN peer.
    pub owner: usize,
    /// The gateway of the segment that carries it: index in their order.
    pub gateway: usize,
    /// It is one of the location's allowed-location-ips.
    pub offered: bool,
    /// It is a private or WireGuard address that a gateway reaches through the tunnel: not an endpoint.
    pub via_wireguard: bool,
    /// WireGuard sends to this address: the tunnel cannot carry its own outer packets.
    pub endpoint: bool,
    /// For an endpoint: the host's own packets may go there in cleartext, too.
    pub free: bool,
    /// An operator has chosen the prefix: it does not belong to a node or its pods.
    pub chosen: bool,
}

impl PrefixClaim {
    /// Whether a prefix that an operator has chosen is left to a route of this host's own. The kernel refuses a
    /// second route beside one without a metric, or never takes it; and ours would win against the route to a
    /// network that the host is in where that has a metric, as network managers give it.
    pub fn is_hosts(&self, links: &HostLinks) -> bool {
        self.chosen && links.elsewhere.get(&self.prefix).is_some_and(|route| route.wins || route.on_link)
    }
}

/// Claims sorted by prefix; those of one prefix are in the order of the mesh.
#[derive(Clone, Debug, Default)]
pub(super) struct Remote(Vec<PrefixClaim>);

impl Remote {
    /// Everything outside this location.
    pub fn new(inputs: &Inputs<'_>, own: &Own<'_>) -> Self {
        let mesh = inputs.mesh;
        let others = mesh.segments.iter().enumerate().filter(|(index, _)| *index != own.index);
        let of_segments = mesh.segments.iter().map(|segment| segment.reach.len());
        let mut claims = Vec::with_capacity(of_segments.chain([mesh.peers.len()]).sum());
        let of_node = |prefix, owner| PrefixClaim {
            prefix,
            owner,
            gateway: 0,
            offered: false,
            via_wireguard: false,
            endpoint: false,
            free: false,
            chosen: false,
        };
        for (owner, segment) in others {
            let gateways = mesh.gateways_of(owner);
            let of_gateways = gateways.order.iter().filter_map(|index| segment.members.get(*index));
            let endpoints: Vec<IpNet> = of_gateways
                .enumerate()
                .filter_map(|(place, member)| gateway_endpoint(inputs, member, place == 0))
                .map(|endpoint| IpNet::from(endpoint.ip()))
                .collect();
            let has = |member: &&Member| {
                member.private_ip().is_some_and(|address| endpoints.contains(&IpNet::from(address)))
            };
            let free = || segment.members.iter().filter(has).any(|member| own.host_speaks_freely(member));
            let said = mesh.acting.of(segment);
            let gateway = |member| gateways.of_prefix(segment, said, member);
            claims.extend(segment.reach.iter().map(|&LocationPrefix { prefix, private, member }| {
                let endpoint = endpoints.contains(&prefix);
                // Addresses of WireGuard and of pods are the mesh's alone.
                let free = endpoint && (!private || free());
                // A gateway in user space sends from the WireGuard address towards private ones: it must
                // not become an endpoint either.
                let (via_wireguard, gateway) = ((private || member.is_none()) && !endpoint, gateway(member));
                PrefixClaim { gateway, via_wireguard, endpoint, free, ..of_node(prefix, owner) }
            }));
            let offered = segment.allowed_location_ips.iter().map(IpNet::trunc);
            claims.extend(offered.map(|prefix| PrefixClaim {
                offered: true,
                endpoint: endpoints.contains(&prefix),
                free: true,
                chosen: true,
                gateway: gateways.acting,
                ..of_node(prefix, owner)
            }));
        }
        for (index, peer) in mesh.peers.iter().enumerate() {
            let owner = mesh.segments.len() + index;
            let prefixes = peer.allowed_ips.iter().map(IpNet::trunc);
            claims.extend(prefixes.map(|prefix| PrefixClaim { chosen: true, ..of_node(prefix, owner) }));
        }
        // No object may claim a gateway's control address.
        claims.retain(|claim| !signal_id::is_control(&claim.prefix));
        sort_by_prefix(&mut claims, |claim| claim.prefix);
        Self(claims)
    }

    /// Prefixes that only the host's own routes lead to ([`PrefixClaim::is_hosts`]).
    pub fn left_to_host(&self, links: &HostLinks) -> BTreeSet<IpNet> {
        self.claims().filter(|claim| claim.is_hosts(links)).map(|claim| claim.prefix).collect()
    }

    /// Every claim, sorted by prefix.
    pub fn claims(&self) -> impl ExactSizeIterator<Item = &PrefixClaim> {
        self.0.iter()
    }
}
