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
    topology::{LocalMesh, Member, Node},
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

/// Why nobody in another location reaches the pods of a node: Cilium takes their addresses, and that of
/// `cilium_host`, from a range of its own. `None`: they are in the Node's pod CIDRs.
pub fn foreign_pods(own: &Node) -> Option<String> {
    let address = own.cni_compatibility_ip?.addr();
    if own.pod_cidrs.iter().any(|cidr| cidr.contains(&address)) {
        return None;
    }
    let cidrs: Vec<_> = own.pod_cidrs.iter().map(ToString::to_string).collect();
    Some(format!(
        "cilium_host has the address {address}, which is in no pod CIDR of the Node object ({}), and the mesh routes \
         only those. Pods with addresses of that range cannot be reached from other locations: run Cilium with \
         ipam.mode=kubernetes",
        cidrs.join(", ")
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn pods_are_foreign_where_cilium_has_an_address_of_another_range() {
        let node = |address: Option<&str>| Node {
            cni_compatibility_ip: address.map(|address| address.parse().unwrap()),
            pod_cidrs: ["fd00::/64", "10.42.1.0/24"].map(|cidr| cidr.parse().unwrap()).to_vec(),
            ..Node::default()
        };
        assert_eq!(foreign_pods(&node(None)), None, "no Cilium");
        assert_eq!(foreign_pods(&node(Some("10.42.1.7/32"))), None, "ipam.mode=kubernetes");
        let said = foreign_pods(&node(Some("10.0.3.7/32"))).unwrap();
        assert!(said.starts_with("cilium_host has the address 10.0.3.7, which is in no pod CIDR"), "{said}");
        assert!(said.contains("(fd00::/64, 10.42.1.0/24)"), "{said}");
        assert!(said.ends_with("run Cilium with ipam.mode=kubernetes"), "{said}");
    }
}
