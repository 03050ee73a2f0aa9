//! What several nodes claim: private addresses, of which each may send but packets to one reach the node that
//! really has it; WireGuard keys, with which one node alone is a peer; and pod CIDRs. And what nodes claim of locations'
//! WireGuard addresses.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;

use super::Own;
use crate::{
    flat_map::sort_by_prefix,
    objects::events::EventReason,
    topology::{Member, Mesh},
    wireguard::key::PublicKey,
};

crate::label_values! {
    /// Kind of a conflict, each with a metric and an Event of its own: label `event` of `kilo_errors_total`.
    ConflictKind {
        /// About a private address.
        Address => "address_conflict",
        /// About a WireGuard key.
        Key => "key_conflict",
        /// About a pod CIDR, or about a WireGuard address.
        Prefix => "prefix_conflict",
    }
}

impl ConflictKind {
    /// Reason of the Event about a node that has a part in it.
    pub const fn event(self) -> EventReason {
        match self {
            Self::Address => EventReason::AddressConflict,
            Self::Key => EventReason::KeyConflict,
            Self::Prefix => EventReason::PrefixConflict,
        }
    }
}

/// What a node claims although another node, or the mesh, has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claimed {
    /// A private address of several nodes.
    Address(IpAddr),
    /// A WireGuard key of several nodes.
    Key(PublicKey),
    /// A pod CIDR in which other nodes' lie, or that they have, too.
    PodCidr(IpNet),
    /// A private address or a pod CIDR with a location's WireGuard address in it.
    Wireguard {
        /// What the node has.
        prefix: IpNet,
        /// The WireGuard address.
        address: IpAddr,
    },
}

impl Claimed {
    /// What it is about.
    pub const fn kind(&self) -> ConflictKind {
        match self {
            Self::Address(_) => ConflictKind::Address,
            Self::Key(_) => ConflictKind::Key,
            Self::PodCidr(_) | Self::Wireguard { .. } => ConflictKind::Prefix,
        }
    }

    /// `address/IP`, `key/KEY` or `prefix/CIDR`.
    pub fn object(&self) -> String {
        match self {
            Self::Address(address) => format!("address/{address}"),
            Self::Key(key) => format!("key/{key}"),
            Self::PodCidr(prefix) | Self::Wireguard { prefix, .. } => format!("prefix/{prefix}"),
        }
    }

    const fn consequence(&self) -> &'static str {
        match self {
            Self::Address(_) => "so packets for all of them go to the host that has it",
            Self::Key(_) => "so all but one of them are out of the mesh",
            Self::PodCidr(_) => "so packets for pods of one of them go to another one",
            Self::Wireguard { .. } => "so packets for that location's leader go to this node",
        }
    }

    /// What an operator does about it.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::Address(_) => {
                "delete the Node objects that are stale, or correct kilo.squat.ai/force-internal-ip"
            }
            Self::Key(_) => {
                "remove /var/lib/kilo/key on all but one of them and delete the pods of their agents, or delete the Node \
                 objects that are stale"
            }
            Self::PodCidr(_) => {
                "delete all but one of these Node objects, and register those nodes anew with pod CIDRs of their own"
            }
            Self::Wireguard { .. } => {
                "give all agents another --subnet, in which no node has an address or a pod CIDR"
            }
        }
    }
}

impl fmt::Display for Claimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "the private address {address}"),
            Self::Key(key) => write!(f, "the WireGuard key {key}"),
            Self::PodCidr(prefix) => write!(f, "the pod CIDR {prefix}"),
            Self::Wireguard { prefix, address } => {
                write!(f, "{prefix}, in which a location has its WireGuard address {address}")
            }
        }
    }
}

/// Names of nodes in the text of a conflict.
const NAMED: usize = 10;

/// What nodes claim although one of them, or the mesh, has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// What they claim.
    pub claimed: Claimed,
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claimed, nodes } = self;
        let claim = if nodes.len() == 1 { "claims" } else { "claim" };
        let more = match nodes.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named = nodes.get(..NAMED).unwrap_or(nodes).join(", ");
        let (consequence, remedy) = (claimed.consequence(), claimed.remedy());
        write!(f, "{named}{more} {claim} {claimed}, {consequence}: {remedy}")
    }
}

/// Conflicts that concern this node: those of its location, and those of its own with nodes elsewhere.
pub(super) fn of(own: &Own<'_>, mesh: &Mesh) -> Vec<Conflict> {
    let others = mesh.segments.iter().enumerate().filter(|(at, _)| *at != own.index);
    let elsewhere = others.flat_map(|(_, segment)| &segment.members);
    let clashes: [fn(&Member, &Member) -> bool; 3] = [share_address, share_key, share_pods];
    let meeting: Vec<&Member> =
        elsewhere.filter(|other| clashes.iter().any(|share| share(own.member, other))).collect();
    let near = || own.segment.members.iter();
    let with = |share: fn(&Member, &Member) -> bool| {
        near().chain(meeting.iter().copied().filter(move |other| share(own.member, other)))
    };
    let mut found = addresses(with(share_address));
    found.extend(keys(with(share_key)));
    found.extend(pod_cidrs(with(share_pods)));
    found.extend(around_wireguard_addresses(near(), mesh));
    found
}

/// All conflicts of the mesh.
pub fn all(mesh: &Mesh) -> Vec<Conflict> {
    let members = || mesh.segments.iter().flat_map(|segment| &segment.members);
    let mut found = addresses(members());
    found.extend(keys(members()));
    found.extend(pod_cidrs(members()));
    found.extend(around_wireguard_addresses(members(), mesh));
    found
}

fn share_address(one: &Member, other: &Member) -> bool {
    one.private_ip().is_some() && one.private_ip() == other.private_ip()
}

fn share_key(one: &Member, other: &Member) -> bool {
    one.node.key.is_some() && one.node.key == other.node.key
}

fn share_pods(one: &Member, other: &Member) -> bool {
    let theirs = &other.node.pod_cidrs;
    one.node.pod_cidrs.iter().any(|own| theirs.iter().any(|other| overlap(own, other)))
}

fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(other) || other.contains(one)
}

fn addresses<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<Conflict> {
    of_several(members.filter_map(|member| Some((Claimed::Address(member.private_ip()?), member))))
}

fn keys<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<Conflict> {
    of_several(members.filter_map(|member| Some((Claimed::Key(member.node.key?), member))))
}

/// What more than one node claims.
fn of_several<'a>(claims: impl Iterator<Item = (Claimed, &'a Member)>) -> Vec<Conflict> {
    let mut claims: Vec<_> = claims.collect();
    claims.sort_by_key(|(claimed, _)| *claimed);
    let several = claims.chunk_by(|(one, _), (other, _)| one == other).filter(|claims| claims.len() > 1);
    let conflict = |claims: &[(Claimed, &Member)]| {
        let mut nodes: Vec<String> = claims.iter().map(|(_, member)| member.name().to_owned()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        claims.first().filter(|_| nodes.len() > 1).map(|(claimed, _)| Conflict { claimed: *claimed, nodes })
    };
    several.filter_map(conflict).collect()
}

/// Pod CIDRs in which those of other nodes lie, each with all of these nodes.
fn pod_cidrs<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<Conflict> {
    let of = |member: &'a Member| {
        let cidrs = member.node.pod_cidrs.iter();
        cidrs.map(move |cidr| (cidr.trunc(), member.name()))
    };
    let mut claims: Vec<(IpNet, &str)> = members.flat_map(of).collect();
    // A prefix sorts before everything that lies in it.
    sort_by_prefix(&mut claims, |(cidr, _)| *cidr);
    let mut found: Vec<(IpNet, BTreeSet<&str>)> = Vec::new();
    for (cidr, node) in claims {
        match found.last_mut().filter(|(widest, _)| widest.contains(&cidr)) {
            Some((_, nodes)) => drop(nodes.insert(node)),
            None => found.push((cidr, BTreeSet::from([node]))),
        }
    }
    let conflict = |(cidr, nodes): (IpNet, BTreeSet<&str>)| Conflict {
        claimed: Claimed::PodCidr(cidr),
        nodes: nodes.into_iter().map(str::to_owned).collect(),
    };
    found.into_iter().filter(|(_, nodes)| nodes.len() > 1).map(conflict).collect()
}

/// What nodes have with a location's WireGuard address in it. Other addresses in the subnet are nodes' to have.
fn around_wireguard_addresses<'a>(members: impl Iterator<Item = &'a Member>, mesh: &Mesh) -> Vec<Conflict> {
    let taken: BTreeSet<IpAddr> = mesh.segments.iter().filter_map(|segment| segment.wireguard_ip).collect();
    let mut found = Vec::new();
    for member in members {
        let pods = member.node.pod_cidrs.iter().map(IpNet::trunc);
        for prefix in pods.chain(member.private_ip().map(IpNet::from)) {
            let first = taken.range(prefix.network()..=prefix.broadcast()).next();
            found.extend(first.map(|address| Conflict {
                claimed: Claimed::Wireguard { prefix, address: *address },
                nodes: vec![member.name().to_owned()],
            }));
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{settings::Granularity, topology::Node};

    fn node(name: &str, location: &str, n: u8) -> Node {
        Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: format!("192.0.2.{n}:51820").parse().ok(),
            key: Some(PublicKey([n; 32])),
            internal_ip: format!("10.1.0.{n}/24").parse().ok(),
            pod_cidrs: vec![format!("10.42.{n}.0/24").parse().unwrap()],
            ..Node::default()
        }
    }

    fn mesh(nodes: &[Node]) -> Mesh {
        Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    /// Each conflict of the mesh as text: what it is about, and the nodes.
    fn found(nodes: &[Node]) -> Vec<String> {
        let all = all(&mesh(nodes)).into_iter();
        all.map(|Conflict { claimed, nodes }| format!("{}: {}", claimed.object(), nodes.join(" "))).collect()
    }

    fn with_pods(node: Node, cidrs: &[&str]) -> Node {
        Node { pod_cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(), ..node }
    }

    #[test]
    fn nodes_with_one_key_are_named_wherever_they_are() {
        let [a1, a2, b3, b4] =
            [node("a1", "a", 1), node("a2", "a", 2), node("b3", "b", 3), node("b4", "b", 4)];
        let same = [a1.clone(), a2.clone(), Node { key: a1.key, ..b3 }, Node { key: a2.key, ..b4 }];
        let keys = [a1.key, a2.key].map(Option::unwrap);
        assert_eq!(found(&same), [format!("key/{}: a1 b3", keys[0]), format!("key/{}: a2 b4", keys[1])]);
        assert_eq!(found(&same[..2]), [""; 0]);
        let text = all(&mesh(&same))[0].to_string();
        assert!(text.starts_with("a1, b3 claim the WireGuard key AQEB"), "{text}");
        assert!(text.contains("remove /var/lib/kilo/key on all but one"), "{text}");
    }

    #[test]
    fn nodes_whose_pod_cidrs_overlap_are_named_with_the_widest_one() {
        let [a1, a2, b3] = [node("a1", "a", 1), node("a2", "a", 2), node("b3", "b", 3)];
        let same = with_pods(b3.clone(), &["10.42.1.0/24"]);
        assert_eq!(found(&[a1.clone(), a2.clone(), same]), ["prefix/10.42.1.0/24: a1 b3"]);
        let wide = with_pods(b3.clone(), &["10.42.0.0/16", "fd00::/64"]);
        let all_of_them = ["prefix/10.42.0.0/16: a1 a2 b3"];
        assert_eq!(found(&[a1.clone(), a2.clone(), wide.clone()]), all_of_them);
        let three = with_pods(a2.clone(), &["10.42.1.0/24"]);
        assert_eq!(found(&[a1.clone(), three, wide]), all_of_them);
        let twice = with_pods(b3, &["10.42.3.0/24", "10.42.3.0/24", "10.42.3.0/25", "10.42.4.0/24"]);
        assert_eq!(found(&[a1, a2, twice]), [""; 0], "its own do not count, nor do neighbours");
    }

    #[test]
    fn a_text_names_some_of_many_nodes() {
        let nodes = (0..13).map(|n| format!("n{n:02}")).collect();
        let text = Conflict { claimed: Claimed::Address([10, 1, 0, 1].into()), nodes }.to_string();
        assert!(
            text.starts_with("n00, n01, ") && text.contains(", n09 and 3 more claim the private"),
            "{text}"
        );
    }

    #[test]
    fn what_a_node_has_is_named_where_a_location_has_its_wireguard_address() {
        // The locations a and b have 10.4.0.1 and 10.4.0.2.
        let a1 = Node { internal_ip: "10.4.0.2/16".parse().ok(), ..node("a1", "a", 1) };
        let b2 = with_pods(node("b2", "b", 2), &["10.4.200.0/24", "10.4.0.0/24", "fd00::/64"]);
        let b3 = Node { internal_ip: "10.4.7.7/16".parse().ok(), ..node("b3", "b", 3) };
        let wanted = ["prefix/10.4.0.2/32: a1", "prefix/10.4.0.0/24: b2"];
        assert_eq!(found(&[a1.clone(), b2.clone(), b3]), wanted);
        let text = all(&mesh(&[a1, b2]))[0].to_string();
        let begin = "a1 claims 10.4.0.2/32, in which a location has its WireGuard address 10.4.0.2, so";
        assert!(text.starts_with(begin), "{text}");
        assert!(text.ends_with("in which no node has an address or a pod CIDR"), "{text}");
    }
}
