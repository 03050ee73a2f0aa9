//! Whose a prefix is that a Peer claims, too: a node's, a location's, or of the subnet of WireGuard addresses.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
};

use ipnet::IpNet;

use super::{LocationPrefix, Mesh, Segment};

/// The owner of a prefix that somebody else claims, or of a wider one around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixOwner {
    /// What somebody else claims.
    claimed: IpNet,
    /// What the owner has: the same, or a wider prefix.
    prefix: IpNet,
    /// What it is, and whose.
    whose: String,
    /// It is the subnet: its addresses are not assigned yet.
    spare: bool,
}

impl PrefixOwner {
    /// Whether the owner keeps the prefix although a Peer claims it: of two that overlap the longer one counts, and
    /// of two equal ones that of a node.
    pub(super) fn keeps(&self) -> bool {
        !self.spare && self.claimed == self.prefix
    }

    /// Whether the owner loses packets when a Peer claims the prefix.
    pub(super) fn is_deprived(&self) -> bool {
        !self.spare && self.claimed != self.prefix
    }

    /// What comes of it that a Peer claims the prefix.
    pub(super) fn consequence(&self) -> &'static str {
        match () {
            () if self.spare => "a location that gets an address in it takes that from this peer",
            () if self.keeps() => "packets for it do not go to this peer",
            () => "packets for it go to this peer instead",
        }
    }
}

impl fmt::Display for PrefixOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claimed, prefix, whose, .. } = self;
        match claimed == prefix {
            true => write!(f, "{claimed} is {whose}"),
            false => write!(f, "{claimed} lies in {prefix}, {whose}"),
        }
    }
}

/// The prefixes of nodes and locations with their owners, for many questions.
pub(super) struct PrefixOwners<'a> {
    subnet: IpNet,
    owners: HashMap<IpNet, (&'a Segment, &'a LocationPrefix)>,
    /// The lengths that these prefixes have: so few that a question costs few lookups.
    lengths: BTreeSet<u8>,
}

impl<'a> PrefixOwners<'a> {
    pub fn new(mesh: &'a Mesh) -> Self {
        let mut owners = HashMap::new();
        for segment in &mesh.segments {
            for reach in &segment.reach {
                owners.entry(reach.prefix).or_insert((&**segment, reach));
            }
        }
        let lengths = owners.keys().map(IpNet::prefix_len).collect();
        Self { subnet: mesh.subnet.trunc(), owners, lengths }
    }

    /// The owner of this prefix, or of the longest one around it; `None`: it is free.
    pub fn find(&self, claimed: IpNet) -> Option<PrefixOwner> {
        let claimed = claimed.trunc();
        let around = self.lengths.range(..=claimed.prefix_len()).rev();
        let mut around = around.filter_map(|length| Some(IpNet::new(claimed.addr(), *length).ok()?.trunc()));
        let owned = around.find_map(|prefix| Some((prefix, self.owners.get(&prefix)?)));
        if let Some((prefix, (segment, reach))) = owned {
            return Some(PrefixOwner { claimed, prefix, whose: whose(segment, reach), spare: false });
        }
        // Without nodes nobody has chosen a subnet.
        (!self.owners.is_empty() && self.subnet.contains(&claimed)).then(|| PrefixOwner {
            claimed,
            prefix: self.subnet,
            whose: "the subnet of WireGuard addresses (--subnet)".to_owned(),
            spare: true,
        })
    }
}

fn whose(segment: &Segment, reach: &LocationPrefix) -> String {
    let member = reach.member.and_then(|at| segment.members.get(at as usize));
    match member {
        Some(member) if reach.private => format!("the private address of node {}", member.name()),
        Some(member) => format!("the pod CIDR of node {}", member.name()),
        None => format!("the WireGuard address of {}", segment.location),
    }
}

impl Mesh {
    /// Whose this prefix is, or a wider one around it; `None`: a Peer may have it.
    pub fn owner_of(&self, prefix: IpNet) -> Option<PrefixOwner> {
        PrefixOwners::new(self).find(prefix)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    #[test]
    fn each_prefix_of_a_node_and_what_lies_in_it_has_an_owner_and_wider_ones_have_none() {
        let node = Node {
            name: "a1".to_owned(),
            location: "a".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.1.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.1.0/24".parse().unwrap(), "fd00:42::/64".parse().unwrap()],
            ..Node::default()
        };
        let mesh = |nodes: &[Node]| {
            Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
        };
        let all = mesh(&[node]);
        let owner = |prefix: &str| all.owner_of(prefix.parse().unwrap()).map(|owner| owner.to_string());
        for (prefix, whose) in [
            ("10.1.0.1/32", "10.1.0.1/32 is the private address of node a1"),
            ("10.4.0.1/32", "10.4.0.1/32 is the WireGuard address of location:a"),
            ("10.42.1.0/24", "10.42.1.0/24 is the pod CIDR of node a1"),
            ("10.42.1.7/24", "10.42.1.0/24 is the pod CIDR of node a1"),
            ("10.42.1.7/32", "10.42.1.7/32 lies in 10.42.1.0/24, the pod CIDR of node a1"),
            ("fd00:42::7/128", "fd00:42::7/128 lies in fd00:42::/64, the pod CIDR of node a1"),
            ("10.4.0.2/32", "10.4.0.2/32 lies in 10.4.0.0/16, the subnet of WireGuard addresses (--subnet)"),
            ("10.4.0.0/16", "10.4.0.0/16 is the subnet of WireGuard addresses (--subnet)"),
        ] {
            assert_eq!(owner(prefix).as_deref(), Some(whose));
        }
        for free in ["0.0.0.0/0", "10.42.0.0/16", "10.0.0.0/13", "10.5.0.1/32", "10.1.0.2/32", "::/0"] {
            assert_eq!(owner(free), None, "{free}");
        }
        assert_eq!(mesh(&[]).owner_of("10.4.0.1/32".parse().unwrap()), None);
    }
}
