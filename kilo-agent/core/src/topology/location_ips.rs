//! Which of the prefixes that locations offer (`allowed-location-ips`) the mesh uses, and why not the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use super::{Mesh, Peer, Segment};
use crate::{objects::ObjectRef, prefixes::Prefixes};

/// A prefix of a node's annotation `allowed-location-ips` that is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnusedPrefix {
    /// Name of the node that has the annotation.
    node: String,
    prefix: IpNet,
    /// What stands in its way, as a sentence.
    why: String,
}

/// Drops allowed-location-ips that another location also offers, that start inside a prefix reached
/// otherwise, or that overlap a peer's; returns them. Locations are taken in order: one whose prefix was
/// dropped no longer stands in the way of the next.
pub(super) fn filter(segments: &mut [Arc<Segment>], peers: &[Peer]) -> Vec<UnusedPrefix> {
    if segments.iter().all(|segment| segment.offered.is_empty()) {
        return Vec::new();
    }
    let of_segment = |(at, segment): (usize, &Arc<Segment>)| {
        let prefixes: Vec<_> = segment.allowed_ips.iter().map(|prefix| (*prefix, at)).collect();
        prefixes
    };
    let allowed: Prefixes<usize> = segments.iter().enumerate().flat_map(of_segment).collect();
    let of_peer = |peer: &Peer| -> Vec<_> {
        peer.allowed_ips.iter().map(|prefix| (*prefix, peer.name.clone())).collect()
    };
    let of_peers: Prefixes<String> = peers.iter().flat_map(of_peer).collect();
    let mut offered: Prefixes<BTreeSet<usize>> = Prefixes::default();
    for (index, segment) in segments.iter().enumerate() {
        for prefix in &segment.offered {
            offered.entry(*prefix).insert(index);
        }
    }
    let names: Vec<String> = segments.iter().map(|segment| segment.location.clone()).collect();
    let mut unused = Vec::new();
    for (own, segment) in segments.iter_mut().enumerate() {
        let obstacle = |prefix: IpNet| {
            let mut meeting = offered.holding(prefix).chain(offered.covered_by(prefix));
            let elsewhere = meeting.find_map(|(other, offering)| {
                let index = offering.iter().find(|index| **index != own)?;
                Some(format!("{} offers {other}", names[*index]))
            });
            let reached = || {
                let (other, index) = allowed.holding(prefix.network().into()).next()?;
                Some(format!("it begins in {other} of {}", names[*index]))
            };
            let of_peer = || {
                let (other, peer) = of_peers.holding(prefix).chain(of_peers.covered_by(prefix)).next()?;
                Some(format!("it overlaps {other} of peer {peer}"))
            };
            elsewhere.or_else(reached).or_else(of_peer)
        };
        let mut kept = Vec::new();
        let mut dropped = BTreeMap::new();
        for prefix in &segment.offered {
            match obstacle(*prefix) {
                None => kept.push(*prefix),
                Some(why) => drop(dropped.insert(*prefix, why)),
            }
        }
        if segment.allowed_location_ips != kept {
            Arc::make_mut(segment).allowed_location_ips = kept;
        }
        for prefix in dropped.keys() {
            offered.entry(*prefix).remove(&own);
        }
        unused.extend(of_nodes(segment, &dropped));
    }
    unused
}

/// The dropped prefixes by the nodes that offer them.
fn of_nodes(segment: &Segment, dropped: &BTreeMap<IpNet, String>) -> Vec<UnusedPrefix> {
    if dropped.is_empty() {
        return Vec::new();
    }
    let nodes = segment.members.iter().map(|member| &member.node);
    let offers = nodes.flat_map(|node| node.allowed_location_ips.iter().map(move |prefix| (node, prefix)));
    let unused = offers.filter_map(|(node, prefix)| {
        Some(UnusedPrefix { node: node.name.clone(), prefix: *prefix, why: dropped.get(prefix)?.clone() })
    });
    unused.collect()
}

impl Mesh {
    /// Which prefixes of nodes' `allowed-location-ips` are not used, and why.
    pub fn unused_location_ips(&self) -> BTreeMap<ObjectRef, String> {
        let mut of_nodes: BTreeMap<ObjectRef, String> = BTreeMap::new();
        for UnusedPrefix { node, prefix, why } in &self.unused {
            let text = of_nodes.entry(ObjectRef::node(node)).or_default();
            if !text.is_empty() {
                text.push_str("; ");
            }
            text.push_str(&format!(
                "annotation kilo.squat.ai/allowed-location-ips: {prefix} is not used, because {why}"
            ));
        }
        of_nodes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn node(location: &str, n: u8, offered: &[&str]) -> Node {
        Node {
            name: format!("{location}{n}"),
            location: location.to_owned(),
            endpoint: format!("192.0.2.{n}:51820").parse().ok(),
            key: Some(PublicKey([n; 32])),
            internal_ip: format!("10.0.{n}.1/24").parse().ok(),
            pod_cidrs: vec![net(&format!("10.42.{n}.0/24"))],
            allowed_location_ips: offered.iter().map(|prefix| net(prefix)).collect(),
            ..Node::default()
        }
    }

    fn unused(nodes: &[Node]) -> BTreeMap<String, String> {
        let laptop = Peer {
            name: "laptop".to_owned(),
            allowed_ips: vec![net("10.5.0.1/32")],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([99; 32]),
            follows: false,
        };
        let peers = BTreeMap::from([("laptop".to_owned(), laptop)]);
        let mesh = Mesh::new(nodes, &peers, Granularity::Location, net("10.4.0.0/16"));
        mesh.unused_location_ips().into_iter().map(|(object, why)| (object.to_string(), why)).collect()
    }

    #[test]
    fn each_prefix_that_is_not_used_is_named_with_what_stands_in_its_way() {
        const NAME: &str = "annotation kilo.squat.ai/allowed-location-ips:";
        let one = |offered: &str| unused(&[node("a", 1, &[]), node("a", 2, &[offered]), node("b", 3, &[])]);
        assert_eq!(one("192.168.7.0/24"), BTreeMap::new());
        for (offered, why) in [
            ("10.42.3.8/29", "it begins in 10.42.3.0/24 of location:b"),
            ("10.0.1.1/32", "it begins in 10.0.1.1/32 of location:a"),
            ("10.5.0.0/16", "it overlaps 10.5.0.1/32 of peer laptop"),
        ] {
            let wanted = format!("{NAME} {offered} is not used, because {why}");
            assert_eq!(one(offered), BTreeMap::from([("node a2".to_owned(), wanted)]));
        }
        // The last one of those that offer it has it.
        let wide = [node("a", 1, &["192.168.0.0/16", "10.5.0.1/32"]), node("b", 3, &["192.168.7.0/24"])];
        let wanted = format!(
            "{NAME} 192.168.0.0/16 is not used, because location:b offers 192.168.7.0/24; {NAME} 10.5.0.1/32 is not \
             used, because it overlaps 10.5.0.1/32 of peer laptop"
        );
        assert_eq!(unused(&wide), BTreeMap::from([("node a1".to_owned(), wanted)]));
    }
}
