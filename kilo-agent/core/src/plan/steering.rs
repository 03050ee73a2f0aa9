//! Tables of the steering programs: prefixes, hops, and who may send.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::{IpNet, Ipv4Net};
use kilo_common::{
    encap::{IPIP_OVERHEAD, IPIP_OVERHEAD_V6, VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6},
    lead::{self, Term},
    maps::{
        HOP_ACTING, HOP_LOCAL, HOP_NONE, HOP_REMOTE, NODE_GATEWAY, NODE_LED, NodeValue, PREFIX_ENDPOINT,
        PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED, PREFIX_ROUTE, PREFIX_SOURCE,
        PREFIX_VIA_WIREGUARD, PrefixValue,
    },
};

use super::{Hop, HopIds, Inputs, Own, Remote, Tables, arrival::interfaces, remote::PrefixClaim};
use crate::observed::Elsewhere;
use crate::{
    flat_map::{FlatMap, Key},
    net::MIN_IPV6_MTU,
    prefixes,
    settings::Tunnel,
    topology::Member,
};

/// Hop ids of the other nodes of the location. Nodes that claim one private address share one hop, that with
/// their lowest id: packets steered there all reach the node that has the address, and packets from there
/// may be from any of them.
struct Ids<'a> {
    hops: &'a HopIds,
    by_address: BTreeMap<IpAddr, u32>,
}

impl<'a> Ids<'a> {
    fn new(hops: &'a HopIds, own: &Own<'_>) -> Self {
        let mut by_address = BTreeMap::new();
        for member in own.others() {
            if let (Some(id), Some(address)) = (hops.get(member.name()), member.private_ip()) {
                by_address.entry(address).and_modify(|first: &mut u32| *first = id.min(*first)).or_insert(id);
            }
        }
        Self { hops, by_address }
    }

    fn get(&self, member: &Member) -> Option<u32> {
        let id = self.hops.get(member.name())?;
        Some(member.private_ip().and_then(|address| self.by_address.get(&address).copied()).unwrap_or(id))
    }
}

pub(super) fn tables(inputs: &Inputs<'_>, own: &Own<'_>, remote: &Remote, lost: &[(IpNet, u32)]) -> Tables {
    let ids = Ids::new(inputs.hops, own);
    // Plus a few of this location.
    let mut prefixes = Vec::with_capacity(remote.claims().len() + own.segment.members.len() * 2);
    let mut add = |prefix: IpNet, hop: u32, flags: u32| {
        prefixes.push((prefix.trunc(), PrefixValue { hop, flags: PREFIX_SOURCE | flags }));
    };
    let routed = |yes: bool| if yes { PREFIX_ROUTE } else { 0 };
    // Beside another CNI the routes lead into its overlay. But packets that a leader decrypts take the path
    // of the answers: in its stack, the CNI's masquerading would see half connections and translate them.
    let beside_cni = inputs.links.overlay.contains_key(inputs.mesh.node());
    let ours = inputs.carries_pods();
    // Before the first pod, and without the bridge, the stack would forward these by the default route.
    let never_clear = if ours { PREFIX_NEVER_CLEAR } else { 0 };
    for cidr in &own.member.node.pod_cidrs {
        add(*cidr, HOP_LOCAL, PREFIX_ROUTE | never_clear);
    }
    if let Some(ip) = own.member.private_ip() {
        add(ip.into(), HOP_LOCAL, PREFIX_ROUTE);
    }
    // Without an outer header, the network carries packets to the node.
    let by_tunnel = |member: &Member| {
        if own.tunnel(inputs.settings, member) == Tunnel::None { 0 } else { PREFIX_NEVER_CLEAR }
    };
    let own_wireguard_ip = own.segment.wireguard_ip.map(IpNet::from);
    if let (Some(prefix), Some(leader)) = (own_wireguard_ip, own.acting) {
        match ids.get(leader) {
            // The device may not have the address yet, or no longer.
            _ if own.acts => add(prefix, HOP_LOCAL, PREFIX_ROUTE | PREFIX_NEVER_CLEAR),
            Some(hop) => add(prefix, hop, PREFIX_ROUTE | by_tunnel(leader)),
            None => {}
        }
    }
    for member in own.others() {
        let Some(hop) = ids.get(member) else { continue };
        for cidr in &member.node.pod_cidrs {
            let closed = if ours { by_tunnel(member) } else { 0 };
            add(*cidr, hop, routed(inputs.settings.local || beside_cni) | closed);
        }
        let private_is_steered = inputs.settings.local && own.encapsulates(inputs.settings, member);
        if let Some(ip) = member.private_ip() {
            let pods = if private_is_steered { PREFIX_PODS_STEERED } else { 0 };
            add(ip.into(), hop, routed(private_is_steered || beside_cni) | pods);
        }
        if let Some(ip) = member.wireguard_ip {
            add(ip.into(), hop, PREFIX_ROUTE | by_tunnel(member));
        }
    }
    let nearer = prefixes.len();
    // Prefixes in which this host may have routes of its own.
    let mut chosen = BTreeSet::new();
    for claim in remote.claims() {
        let flags = of_claim(own, claim);
        if claim.chosen {
            chosen.insert(claim.prefix);
        }
        match prefixes[nearer..].last_mut() {
            Some((prefix, value)) if *prefix == claim.prefix => value.flags = join(value.flags, flags),
            _ => {
                let flags = PREFIX_ROUTE | PREFIX_SOURCE | flags;
                // A peer that does not follow claims is reached through Kilo's leader.
                let follows = own.gateways.len() > 1 && inputs.mesh.follows(claim.owner);
                let hop = if follows { HOP_ACTING } else { HOP_REMOTE };
                prefixes.push((claim.prefix, PrefixValue { hop, flags }));
            }
        }
    }
    // The first claim of a prefix wins: nearer ones were added first.
    prefixes.sort_by_key(|(prefix, _)| prefix.rank());
    prefixes.dedup_by_key(|(prefix, _)| *prefix);
    let mut tables = Tables { prefix: prefixes.into_iter().collect(), ..Tables::default() };
    close_lost(lost, &chosen, &mut tables.prefix);
    chosen.extend(close_subnet(inputs, own, &mut tables.prefix));
    leave_out_elsewhere(&inputs.links.elsewhere, &chosen, &mut tables.prefix);
    fill_hops(inputs, own, &ids, &mut tables);
    tables
}

/// Drops packets to nodes that were declared dead. A node that takes part loses nothing by that: its
/// prefixes, and all within them, stay its own. A wider prefix that an operator has chosen does not count:
/// it merely holds the lost one.
fn close_lost(lost: &[(IpNet, u32)], chosen: &BTreeSet<IpNet>, table: &mut FlatMap<IpNet, PrefixValue>) {
    let flags = PREFIX_ROUTE | PREFIX_SOURCE;
    let mut closed = Vec::new();
    for &(prefix, clear) in lost.iter().filter(|(_, clear)| *clear != 0) {
        let owned = |(held_by, _): (IpNet, &PrefixValue)| held_by == prefix || !chosen.contains(&held_by);
        if !prefixes::holding(table, prefix).any(owned) {
            closed.push((prefix, PrefixValue { hop: HOP_NONE, flags: flags | clear }));
        }
    }
    // Of several that claim one prefix the strictest wins: `extend` keeps the last.
    closed.sort_by_key(|(_, value)| value.flags & PREFIX_NEVER_CLEAR);
    table.extend(closed);
}

/// Closes the subnet of WireGuard addresses, for those of locations that this node has not heard of
/// yet, as after a boot; returns it if it is closed. No route of ours goes with it: a host that reaches
/// the whole subnet by a route of its own keeps that, and what is offered around the subnet goes
/// through WireGuard as before.
///
/// A host that is itself in the subnet shares the range with the mesh: there nothing can be
/// closed before it is known.
fn close_subnet(
    inputs: &Inputs<'_>,
    own: &Own<'_>,
    table: &mut FlatMap<IpNet, PrefixValue>,
) -> Option<IpNet> {
    let (subnet, links) = (inputs.mesh.subnet.trunc(), inputs.links);
    let networks = links.networks.iter().map(|(_, network)| network.addr());
    let is_shared = own.member.private_ip().into_iter().chain(networks).any(|addr| subnet.contains(&addr));
    let held = prefixes::holding(table, subnet).next().map(|(by, value)| (by, *value));
    if is_shared || links.elsewhere.contains_key(&subnet) || held.is_some_and(|(by, _)| by == subnet) {
        return None;
    }
    let value = match held {
        // A prefix offered around it may be open where the host has routes of its own, but
        // not the subnet within.
        Some((_, PrefixValue { hop, flags })) if !matches!(hop, HOP_NONE | HOP_LOCAL) => {
            PrefixValue { hop, flags: flags | PREFIX_NEVER_CLEAR }
        }
        // Nobody may send from there: the owners are not known.
        _ => PrefixValue { hop: HOP_NONE, flags: PREFIX_NEVER_CLEAR },
    };
    table.insert(subnet, value);
    Some(subnet)
}

/// Flags for packets to a prefix of another location or a VPN peer.
fn of_claim(own: &Own<'_>, claim: &PrefixClaim) -> u32 {
    let via_wireguard = if own.is_gateway && claim.via_wireguard { PREFIX_VIA_WIREGUARD } else { 0 };
    let is_endpoint = own.is_gateway && claim.endpoint;
    // A default route is one of several: the host may have its own reasons to use another.
    let by_host = claim.prefix.prefix_len() == 0 || is_endpoint;
    via_wireguard
        | if is_endpoint { PREFIX_ENDPOINT } else { 0 }
        | match () {
            () if !by_host => PREFIX_NEVER_CLEAR,
            () if claim.prefix.prefix_len() == 0 || claim.free => PREFIX_PODS_STEERED,
            // Of the host's own packets, only WireGuard's must go there in cleartext.
            () => PREFIX_PODS_STEERED | PREFIX_HOST_STEERED,
        }
}

/// The flags of a prefix that two owners claim: what the host must send in cleartext for one of them cannot be
/// refused for the other.
const fn join(one: u32, other: u32) -> u32 {
    const fn is_hosts(flags: u32) -> bool {
        flags & (PREFIX_PODS_STEERED | PREFIX_HOST_STEERED) == PREFIX_PODS_STEERED
    }
    let both = one | other;
    let refused = match () {
        () if is_hosts(one) || is_hosts(other) => PREFIX_NEVER_CLEAR | PREFIX_HOST_STEERED,
        () if both & PREFIX_PODS_STEERED != 0 => PREFIX_NEVER_CLEAR,
        () => 0,
    };
    both & !refused
}

/// A prefix that somebody offers may also hold networks that this host reaches by itself, and the
/// kernel takes the longer prefix. Within prefixes that belong to a node or its pods only the links
/// themselves are left out: a route by a gateway there is a mistake, or another CNI's, and would lead
/// the mesh's packets away.
fn leave_out_elsewhere(
    elsewhere: &BTreeMap<IpNet, Elsewhere>,
    chosen: &BTreeSet<IpNet>,
    table: &mut FlatMap<IpNet, PrefixValue>,
) {
    let mut left_out = Vec::new();
    for (prefix, route) in elsewhere {
        let Some((held_by, value)) = prefixes::holding(table, *prefix).next() else { continue };
        let equal = held_by == *prefix;
        let closed = match (equal, value.flags & (PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED)) {
            (_, 0) => continue,
            // As `PrefixClaim::is_hosts`: the kernel refuses our route, or never takes it, or there is none of ours.
            (true, flags) if route.wins || route.on_link && chosen.contains(prefix) => {
                flags & !PREFIX_NEVER_CLEAR
            }
            (false, _) if route.on_link || chosen.contains(&held_by) => 0,
            _ => continue,
        };
        let flags = value.flags & !(PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED) | closed;
        left_out.push((*prefix, PrefixValue { hop: value.hop, flags }));
    }
    table.extend(left_out);
}

fn fill_hops(inputs: &Inputs<'_>, own: &Own<'_>, ids: &Ids<'_>, tables: &mut Tables) {
    tables.hop.insert(HOP_LOCAL, Hop::Local);
    let mut in_overlay = Vec::new();
    let (mut to_leader, mut to_acting) = (HOP_NONE, HOP_NONE);
    let leader = own.segment.leading().map(Member::name);
    let is_gateway =
        |member: &Member| own.gateways.iter().any(|at| own.segment.members[*at].name() == member.name());
    for member in own.others() {
        let (Some(id), Some(remote)) = (ids.get(member), member.private_ip()) else { continue };
        // Two nodes with one private address: packets sent there would come back here.
        if own.member.private_ip() == Some(remote) {
            continue;
        }
        let leads = Some(member.name()) == leader;
        let overlay = inputs.links.overlay.get(member.name()).copied().map(IpAddr::from);
        // Only IPIP needs the overlay, and only once a route leads through it: at boot
        // the CNI may come later.
        let ipip = (is_gateway(member) || own.is_gateway) && inputs.settings.tunnel == Tunnel::Ipip;
        let by_overlay = |address: &IpAddr| ipip && inputs.links.towards.contains_key(address);
        let sent_to = overlay.filter(by_overlay).filter(|_| remote.is_ipv4()).unwrap_or(remote);
        let Some(hop) = node_hop(inputs, own, member, sent_to) else { continue };
        // The first of several nodes with one address: where packets are sent is the same for all of them.
        tables.hop.entry(id).or_insert(hop);
        if leads {
            to_leader = id;
        }
        if own.acting.is_some_and(|acting| acting.name() == member.name()) {
            to_acting = id;
        }
        let led = member.node.key.is_some_and(|key| inputs.mesh.acting.leads(&key));
        let flags = if is_gateway(member) { NODE_GATEWAY } else { 0 } | if led { NODE_LED } else { 0 };
        let mut sender = sender(&tables.prefix, id, flags, &member.node.pod_cidrs);
        sender.interfaces = interfaces(inputs.links, remote);
        let claim = |known: &mut NodeValue| {
            known.flags |= flags;
            if known.sources_mask == [0; 4] {
                (known.sources, known.sources_mask) = (sender.sources, sender.sources_mask);
            }
        };
        tables.node.entry(remote).and_modify(claim).or_insert(sender);
        in_overlay.extend(overlay.map(|source| (source, sender)));
    }
    // Packets that Kilo sends through an overlay come from the address there. Inserted last, so that an
    // overlay address that a node publishes takes no private address from another.
    for (source, mut sender) in in_overlay {
        sender.interfaces = interfaces(inputs.links, source);
        tables.node.entry(source).or_insert(sender);
    }
    if own.is_gateway {
        tables.hop.insert(HOP_REMOTE, Hop::Wireguard);
    }
    if own.leads {
        to_leader = HOP_REMOTE;
    }
    if own.acts {
        to_acting = HOP_REMOTE;
    }
    // Both words are equal until leadership moves without Kilo's rule: then the second is the kernel's own.
    let word = |term, to| lead::word(term, u16::try_from(to).unwrap_or(0));
    tables.lead = [to_leader, if own.stays { to_acting } else { to_leader }].map(|to| word(Term::NONE, to));
    let in_term = own.term.count() > 0 && to_acting != HOP_NONE;
    tables.lead_of_term = in_term.then(|| word(own.term, to_acting));
}

/// The node behind a hop as a sender, without its interfaces. It gets the first IPv4 prefix of `cidrs` that
/// is that node's with everything more specific in it.
pub fn sender(table: &FlatMap<IpNet, PrefixValue>, hop: u32, flags: u32, cidrs: &[IpNet]) -> NodeValue {
    let is_whole = |cidr: &Ipv4Net| {
        let cidr = IpNet::V4(*cidr);
        let mut within = prefixes::covered_by(table, cidr);
        table.contains(&cidr) && within.all(|(_, value)| value.hop == hop && value.flags & PREFIX_SOURCE != 0)
    };
    let v4 = cidrs.iter().filter_map(|cidr| match cidr.trunc() {
        IpNet::V4(cidr) if cidr.prefix_len() > 0 => Some(cidr),
        _ => None,
    });
    let mut whole = v4.filter(is_whole);
    let (sources, sources_mask) = match whole.next() {
        Some(cidr) => (cidr.network().octets(), cidr.netmask().octets()),
        None => ([0; 4], [0; 4]),
    };
    NodeValue { hop, flags, sources, sources_mask, ..NodeValue::default() }
}

/// How another node of the location is reached.
fn node_hop(inputs: &Inputs<'_>, own: &Own<'_>, member: &Member, remote: IpAddr) -> Option<Hop> {
    let local = own.member.private_ip()?;
    let links = inputs.links;
    let ifindex = links.towards.get(&remote).copied().or(links.private).unwrap_or(0);
    let tunnel = own.tunnel(inputs.settings, member);
    let overhead = overhead(tunnel, remote, member);
    // Every IPv6 path must carry that much (RFC 8200, section 5).
    let ipv6 = own.member.node.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6());
    let least = if ipv6 { MIN_IPV6_MTU + overhead } else { 0 };
    let path = links.path_mtus.get(&remote).map(|mtu| *mtu.max(&least));
    let mtu = links.mtus.get(&ifindex).copied().into_iter().chain(path).min();
    let mtu = mtu.map_or(0, |mtu| mtu.saturating_sub(overhead));
    Some(Hop::Node { tunnel, ifindex, mtu, local, remote })
}

/// Bytes by which packets to a node grow. Without encapsulation, packets of the family that its private
/// address is not of are encapsulated all the same.
fn overhead(tunnel: Tunnel, remote: IpAddr, member: &Member) -> u32 {
    let v6 = remote.is_ipv6();
    let mixed = member.node.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6() != v6);
    let bytes = match tunnel {
        Tunnel::None if !mixed => 0,
        Tunnel::None | Tunnel::Ipip if v6 => IPIP_OVERHEAD_V6,
        Tunnel::None | Tunnel::Ipip => IPIP_OVERHEAD,
        Tunnel::Vxlan if v6 => VXLAN_OVERHEAD_V6,
        Tunnel::Vxlan => VXLAN_OVERHEAD,
    };
    u32::try_from(bytes).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const NODE: u32 = 7;

    /// What `sender` finds for 10.42.1.0/24 with these other prefixes in the table.
    fn sources(others: &[(&str, u32, u32)]) -> ([u8; 4], [u8; 4]) {
        let cidr: IpNet = "10.42.1.0/24".parse().unwrap();
        let mut prefixes = FlatMap::from_iter([(cidr, PrefixValue { hop: NODE, flags: PREFIX_SOURCE })]);
        prefixes.extend(
            others
                .iter()
                .map(|&(prefix, hop, flags)| (prefix.parse::<IpNet>().unwrap(), PrefixValue { hop, flags })),
        );
        let sender = sender(&prefixes, NODE, 0, &["fd00::/64".parse().unwrap(), cidr]);
        (sender.sources, sender.sources_mask)
    }

    #[test]
    fn a_sender_is_known_by_the_prefix_that_is_its_own_as_a_whole() {
        let own = ([10, 42, 1, 0], [255, 255, 255, 0]);
        assert_eq!(sources(&[]), own);
        assert_eq!(sources(&[("10.42.0.0/16", 9, 0), ("10.42.2.0/24", 9, 0), ("10.42.0.255/32", 9, 0)]), own);
        assert_eq!(sources(&[("10.42.1.9/32", NODE, PREFIX_SOURCE)]), own);
        for (covered, hop, flags) in [
            ("10.42.1.0/25", HOP_REMOTE, PREFIX_SOURCE),
            ("10.42.1.255/32", HOP_REMOTE, PREFIX_SOURCE),
            ("10.42.1.9/32", NODE, PREFIX_ROUTE),
            ("10.42.1.0/24", HOP_LOCAL, PREFIX_SOURCE),
        ] {
            assert_eq!(sources(&[(covered, hop, flags)]), ([0; 4], [0; 4]), "{covered}");
        }
    }
}
