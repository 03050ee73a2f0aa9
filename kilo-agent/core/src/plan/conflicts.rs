//! Private addresses that several nodes claim: each of them may send from the address, but
//! packets to it reach the one that really has it.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Conflict, Own, Remote};
use crate::topology::{Member, Mesh};

/// Conflicts that concern this node: those of its location, and one about its own address
/// with a node elsewhere.
pub(super) fn of(own: &Own<'_>, mesh: &Mesh, remote: &Remote) -> Vec<Conflict> {
    let mut claims: Vec<(IpAddr, &Member)> =
        own.segment.members.iter().filter_map(|member| Some((member.private_ip()?, member))).collect();
    if let Some(address) = own.member.private_ip() {
        let prefix = IpNet::from(address);
        let elsewhere = remote.of(prefix).iter().filter_map(|claim| mesh.segments.get(claim.owner));
        let members = elsewhere.flat_map(|segment| &segment.members);
        claims.extend(members.filter(|it| it.private_ip() == Some(address)).map(|it| (address, it)));
    }
    among(claims)
}

/// All conflicts of the mesh.
pub fn all(mesh: &Mesh) -> Vec<Conflict> {
    let members = mesh.segments.iter().flat_map(|segment| &segment.members);
    among(members.filter_map(|member| Some((member.private_ip()?, member))).collect())
}

fn among(mut claims: Vec<(IpAddr, &Member)>) -> Vec<Conflict> {
    claims.sort_by_key(|(address, _)| *address);
    let several = claims.chunk_by(|(one, _), (other, _)| one == other).filter(|claims| claims.len() > 1);
    let conflict = |claims: &[(IpAddr, &Member)]| {
        let mut nodes: Vec<String> = claims.iter().map(|(_, member)| member.name().to_owned()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        claims
            .first()
            .filter(|_| nodes.len() > 1)
            .map(|(address, _)| Conflict { address: *address, nodes: nodes.clone() })
    };
    several.filter_map(conflict).collect()
}
