//! Addresses in the overlay of another CNI (`--compatibility`). Clouds may not
//! carry IP protocol 4, so that IPIP to the leader travels through that CNI's
//! own tunnel: it is sent to the leader's address there.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::IpNet;

use crate::{
    settings::Compatibility,
    topology::{LocalMesh, Member},
};

/// Overlay address of each node of this node's location, itself included; empty
/// unless another CNI manages the location. Whatever this node sends, a node with
/// Kilo sends IPIP packets there.
///
/// Flannel's VXLAN device has the first address of the node's pod CIDR; with
/// Cilium nodes publish that of `cilium_host`.
pub fn overlay_addresses(mesh: &LocalMesh<'_>, compatibility: Compatibility) -> BTreeMap<String, Ipv4Addr> {
    let Some((segment, _)) = mesh.own() else { return BTreeMap::new() };
    let address = |member: &Member| match compatibility {
        Compatibility::None => None,
        Compatibility::Flannel => member.node.pod_cidrs.iter().find_map(|cidr| v4(cidr.network())),
        Compatibility::Cilium => member.node.cni_compatibility_ip.and_then(|net| v4(net.addr())),
    };
    let members = mesh.segments[segment].members.iter();
    members.filter_map(|member| Some((member.name().to_owned(), address(member)?))).collect()
}

fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

/// What a node publishes for the others: the IPv4 address of `cilium_host`
/// among `addresses` of that device.
pub fn published(compatibility: Compatibility, cilium_host: &[IpNet]) -> Option<IpNet> {
    let first = cilium_host.iter().find(|net| net.addr().is_ipv4()).copied();
    first.filter(|_| compatibility == Compatibility::Cilium)
}
