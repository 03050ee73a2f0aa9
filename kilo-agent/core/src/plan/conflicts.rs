//! What several nodes claim: private addresses, of which each may send but packets to one reach the node that
//! really has it; and WireGuard keys, with which one node alone is a peer.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Conflict, KeyConflict, Own, Remote};
use crate::{
    topology::{Member, Mesh},
    wireguard::key::PublicKey,
};

/// Conflicts that concern this node: those of its location, and one about its own address
/// with a node elsewhere.
pub(super) fn of(own: &Own<'_>, mesh: &Mesh, remote: &Remote) -> Vec<Conflict> {
    let mut claims: Vec<(IpAddr, &Member)> = addresses(&own.segment.members).collect();
    if let Some(address) = own.member.private_ip() {
        let prefix = IpNet::from(address);
        let elsewhere = remote.of(prefix).iter().filter_map(|claim| mesh.segments.get(claim.owner));
        let members = elsewhere.flat_map(|segment| &segment.members);
        claims.extend(members.filter(|it| it.private_ip() == Some(address)).map(|it| (address, it)));
    }
    conflicts(claims)
}

/// All conflicts of the mesh.
pub fn all(mesh: &Mesh) -> Vec<Conflict> {
    conflicts(mesh.segments.iter().flat_map(|segment| addresses(&segment.members)).collect())
}

/// Conflicts about keys that concern this node: those of its location, and one about its own key with a node
/// elsewhere.
pub(super) fn keys_of(own: &Own<'_>, mesh: &Mesh) -> Vec<KeyConflict> {
    let others = mesh.segments.iter().enumerate().filter(|(at, _)| *at != own.index);
    let others = others.flat_map(|(_, segment)| keys(&segment.members));
    let same = others.filter(|(key, _)| own.member.node.key == Some(*key));
    key_conflicts(keys(&own.segment.members).chain(same).collect())
}

/// All conflicts of the mesh about keys.
pub fn all_keys(mesh: &Mesh) -> Vec<KeyConflict> {
    key_conflicts(mesh.segments.iter().flat_map(|segment| keys(&segment.members)).collect())
}

fn addresses(members: &[Member]) -> impl Iterator<Item = (IpAddr, &Member)> {
    members.iter().filter_map(|member| Some((member.private_ip()?, member)))
}

fn keys(members: &[Member]) -> impl Iterator<Item = (PublicKey, &Member)> {
    members.iter().filter_map(|member| Some((member.node.key?, member)))
}

fn conflicts(claims: Vec<(IpAddr, &Member)>) -> Vec<Conflict> {
    among(claims).into_iter().map(|(address, nodes)| Conflict { address, nodes }).collect()
}

fn key_conflicts(claims: Vec<(PublicKey, &Member)>) -> Vec<KeyConflict> {
    among(claims).into_iter().map(|(key, nodes)| KeyConflict { key, nodes }).collect()
}

/// What more than one node claims, with their names.
fn among<T: Ord + Copy>(mut claims: Vec<(T, &Member)>) -> Vec<(T, Vec<String>)> {
    claims.sort_by_key(|(claimed, _)| *claimed);
    let several = claims.chunk_by(|(one, _), (other, _)| one == other).filter(|claims| claims.len() > 1);
    let conflict = |claims: &[(T, &Member)]| {
        let mut nodes: Vec<String> = claims.iter().map(|(_, member)| member.name().to_owned()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        claims.first().filter(|_| nodes.len() > 1).map(|(claimed, _)| (*claimed, nodes.clone()))
    };
    several.filter_map(conflict).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{settings::Granularity, topology::Node};

    #[test]
    fn nodes_with_one_key_are_named_wherever_they_are() {
        let node = |name: &str, location: &str, key: u8| Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: format!("192.0.2.{key}:51820").parse().ok(),
            key: Some(PublicKey([key; 32])),
            internal_ip: format!("10.1.0.{key}/24").parse().ok(),
            ..Node::default()
        };
        let keys = |nodes: &[Node]| {
            let subnet = "10.4.0.0/16".parse().unwrap();
            all_keys(&Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, subnet))
        };
        let all = [node("a1", "a", 1), node("a2", "a", 2), node("b1", "b", 1), node("b2", "b", 2)];
        let names: Vec<_> = keys(&all).into_iter().map(|conflict| (conflict.key, conflict.nodes)).collect();
        let pair = |key, nodes: [&str; 2]| (PublicKey([key; 32]), nodes.map(str::to_owned).to_vec());
        assert_eq!(names, [pair(1, ["a1", "b1"]), pair(2, ["a2", "b2"])]);
        assert!(keys(&all[..2]).is_empty());
        let text = keys(&all)[0].to_string();
        assert!(text.starts_with("a1, b1 claim the WireGuard key AQEB"), "{text}");
        assert!(text.contains("remove /var/lib/kilo/key on all but one"), "{text}");
    }
}
