//! Interfaces by which another node's packets may come in. Its address alone proves nothing on
//! a network where anybody can send from it.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::maps::NODE_INTERFACES;

use crate::observed::HostLinks;

/// The interfaces for a node with this address, the likeliest first: where the route to
/// it leads, the private one (a router may take another path back), those of the route's
/// other next hops, the overlay's, those in whose network it is, and those in one
/// network with the first two (a router hands packets to whichever answered it). Those
/// that do not fit are left out.
pub(super) fn interfaces(links: &HostLinks, address: IpAddr) -> [u32; NODE_INTERFACES] {
    let networks = links.networks.iter().filter(|(_, net)| net.contains(&address)).map(|(index, _)| *index);
    let uplinks = links.uplinks.keys().copied().filter(|_| links.private_is_unbound);
    let towards = links.towards.get(&address).copied();
    let private = links.private.filter(|_| !links.private_is_unbound);
    let beside = towards.into_iter().chain(private).flat_map(|index| in_one_network(links, index));
    let all = towards.into_iter().chain(private);
    let all = all.chain(links.more_towards.get(&address).into_iter().flatten().copied());
    let all = all.chain(links.overlay_device).chain(networks).chain(beside).chain(uplinks);
    let mut found = [0; NODE_INTERFACES];
    for index in all.filter(|index| *index != 0) {
        if found.contains(&index) {
            continue;
        }
        let Some(free) = found.iter_mut().find(|it| **it == 0) else { break };
        *free = index;
    }
    found
}

/// Interfaces with an address in a network of this one; link-local networks do not count.
fn in_one_network(links: &HostLinks, index: u32) -> impl Iterator<Item = u32> {
    let is_link_local = |net: &IpNet| match net.addr() {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let usable = move || links.networks.iter().filter(move |(_, net)| !is_link_local(net));
    let own =
        move |net: &IpNet| usable().any(|(of, own)| *of == index && (own.contains(net) || net.contains(own)));
    usable().filter(move |(_, net)| own(net)).map(|(index, _)| *index)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::observed::Uplink;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn links() -> HostLinks {
        HostLinks {
            private: Some(2),
            uplinks: BTreeMap::from([(2, Uplink::default()), (3, Uplink::default())]),
            networks: vec![(2, "10.1.0.0/24".parse().unwrap()), (3, "192.0.2.0/24".parse().unwrap())],
            ..HostLinks::default()
        }
    }

    #[test]
    fn a_node_of_the_own_network_comes_by_its_interface_alone() {
        assert_eq!(interfaces(&links(), ip("10.1.0.12")), [2, 0, 0, 0]);
    }

    #[test]
    fn a_node_behind_a_router_comes_by_the_route_or_to_the_private_interface() {
        let towards = BTreeMap::from([(ip("10.9.0.12"), 3)]);
        assert_eq!(interfaces(&HostLinks { towards, ..links() }, ip("10.9.0.12")), [3, 2, 0, 0]);
    }

    #[test]
    fn several_interfaces_in_one_network_and_several_next_hops_are_all_taken() {
        let mut links = links();
        links.networks.push((4, "10.1.0.0/16".parse().unwrap()));
        assert_eq!(interfaces(&links, ip("10.1.0.12")), [2, 4, 0, 0]);
        links.more_towards = BTreeMap::from([(ip("10.1.0.12"), vec![5, 2, 6])]);
        assert_eq!(interfaces(&links, ip("10.1.0.12")), [2, 5, 6, 4]);
    }

    #[test]
    fn a_node_behind_a_router_comes_by_either_interface_of_one_network() {
        let mut links = links();
        links.networks.push((4, "10.1.0.112/24".parse().unwrap()));
        for index in [2, 3, 4] {
            links.networks.push((index, "fe80::1/64".parse().unwrap()));
        }
        assert_eq!(interfaces(&links, ip("10.1.1.13")), [2, 4, 0, 0]);
    }

    #[test]
    fn an_address_on_loopback_is_reached_by_every_uplink() {
        let links = HostLinks { private: Some(1), private_is_unbound: true, ..links() };
        assert_eq!(interfaces(&links, ip("10.1.0.12")), [2, 3, 0, 0]);
    }
}
