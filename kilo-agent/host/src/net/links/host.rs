//! Pure: which interfaces lead out of the host, and what the plan needs to know about them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::IpNet;

use super::{
    super::sources::{self, MainRoute},
    Address, Link, LinkHeader,
};
use kilo_core::observed::{Elsewhere, HostLinks, Uplink};

/// What [`host_links`] needs besides links and paths.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostQuery<'a> {
    /// Index of the WireGuard device.
    pub kilo: u32,
    /// This node's private address.
    pub private: Option<IpAddr>,
    /// This node's own pod CIDRs: an interface with such an address is the CNI's.
    pub pod_cidrs: &'a [IpNet],
    /// Interfaces with a route that has a next hop, or with a default route: they lead out of the host even
    /// without an address of their own.
    pub next_hops: &'a [u32],
    /// Routes out of uplinks.
    pub main_routes: &'a [MainRoute],
    /// Uplinks so far, with their addresses.
    pub uplinks: Option<&'a BTreeMap<u32, Uplink>>,
}

/// Pure: uplinks, their MTUs and masquerade addresses, the private interface and the path to each node
/// address in `paths` (from route lookups).
///
/// An uplink is up, has a global address and is none of: loopback, the WireGuard device, an IPIP tunnel
/// (Kilo's `tunl0`), a dummy, an interface whose address lies in this node's pod CIDRs (CNI bridge, flannel,
/// pods' veths). An interface without an address is an uplink when a route with a next hop leads through it
/// (unnumbered); packets then get the host's own address, as the kernel chooses it. The private interface is
/// an uplink, too, unless the private address is on loopback or a dummy. An uplink that has lost its address, as
/// a DHCP client takes it away when the carrier goes, remains one: pods' packets would leave it untranslated
/// between the address's return and the next reconcile.
pub fn host_links(links: &[Link], query: &HostQuery<'_>, paths: &BTreeMap<IpAddr, u32>) -> HostLinks {
    let mut host = HostLinks { kilo: query.kilo, ..HostLinks::default() };
    let own = links.iter().flat_map(|link| &link.addresses).map(|address| address.net.addr()).collect();
    let borrowed = hosts_own(links, query);
    for link in links {
        let (mut uplink, others) = sources::choose(link, query.main_routes, &own);
        if is_pods(link, links, query.pod_cidrs) {
            host.pods.insert(link.index);
        }
        if is_within(link, query.kilo, query.pod_cidrs) {
            continue;
        }
        // One that is down keeps its programs: it may be up before an agent can attach them.
        if uplink == Uplink::default() {
            let borrows = link.up && query.next_hops.contains(&link.index);
            let before = query.uplinks.and_then(|uplinks| uplinks.get(&link.index));
            uplink = match before {
                _ if link.controller.is_some() => continue,
                // Without an address to borrow, the last one of its own still counts.
                _ if borrows && borrowed != Uplink::default() => borrowed,
                // What it borrowed goes with the route that needed it.
                Some(before) if *before != borrowed => *before,
                _ if borrows => borrowed,
                _ => continue,
            };
        }
        match link.header {
            LinkHeader::Ethernet => {}
            LinkHeader::None => {
                host.layer3.insert(link.index);
            }
            LinkHeader::Unknown(link_type) => {
                host.unknown_headers.insert(link.name.clone(), link_type);
                continue;
            }
        }
        host.uplinks.insert(link.index, uplink);
        host.masq_addrs.extend(others.into_iter().map(|(to, addr)| ((link.index, to), addr)));
        host.mtus.insert(link.index, link.mtu);
        host.networks.extend(link.addresses.iter().map(|address| (link.index, address.net)));
    }
    host.private = query.private.and_then(|private| {
        links
            .iter()
            .find(|link| {
                link.index != query.kilo
                    && !is_host_only(link)
                    && !host.unknown_headers.contains_key(&link.name)
                    && link.addresses.iter().any(|address| address.net.addr() == private)
            })
            .map(|link| link.index)
    });
    // A Service may have the address of a node, too.
    host.private_is_unbound = host.private.is_none()
        && query.private.is_some_and(|private| {
            let mut hosts = links.iter().filter(|link| has_hosts_addresses(link));
            hosts.any(|link| link.addresses.iter().any(|address| address.net.addr() == private))
        });
    host.towards = paths
        .iter()
        .filter(|(_, index)| **index != query.kilo && host.private != Some(**index))
        .map(|(address, index)| (*address, *index))
        .collect();
    host
}

/// Pure: adds the prefixes that routes of others lead out of this host.
pub fn add_elsewhere(host: &mut HostLinks, routes: &[(IpNet, u32, Elsewhere)]) {
    for (prefix, interface, route) in routes {
        if host.uplinks.contains_key(interface) || host.private == Some(*interface) {
            let known = host.elsewhere.entry(*prefix).or_default();
            *known = Elsewhere { on_link: known.on_link || route.on_link, wins: known.wins || route.wins };
        }
    }
}

/// Pure: adds the nodes' addresses in another CNI's overlay, the device that has the address of node `own`,
/// and the MTUs of the devices that lead there.
pub fn add_overlay(host: &mut HostLinks, links: &[Link], own: &str, addresses: BTreeMap<String, Ipv4Addr>) {
    let has =
        |link: &&Link, wanted: Ipv4Addr| link.addresses.iter().any(|a| a.net.addr() == IpAddr::V4(wanted));
    let device = addresses.get(own).and_then(|wanted| links.iter().find(|link| has(link, *wanted)));
    host.overlay_device = device.map(|link| link.index).filter(|index| *index != host.kilo);
    for link in links {
        let leads_there =
            addresses.values().any(|ip| host.towards.get(&IpAddr::V4(*ip)) == Some(&link.index));
        if leads_there {
            host.mtus.insert(link.index, link.mtu);
        }
    }
    host.overlay = addresses;
}

/// Whether its addresses are the host's own while no packet leaves or arrives there.
fn is_host_only(link: &Link) -> bool {
    link.loopback || link.kind == "dummy"
}

/// Source addresses that the kernel gives packets leaving by an interface without addresses: the private
/// address or the first global one, from loopback or a dummy.
fn hosts_own(links: &[Link], query: &HostQuery<'_>) -> Uplink {
    let mut own = Uplink::default();
    let usable = |address: &&Address| address.global && !address.unusable;
    let within = links.iter().filter(|link| has_hosts_addresses(link));
    for address in within.flat_map(|link| link.addresses.iter().filter(usable)) {
        let address = address.net.addr();
        let preferred = Some(address) == query.private;
        match address {
            IpAddr::V4(v4) if !v4.is_loopback() && !v4.is_link_local() => {
                own.v4 = own.v4.filter(|_| !preferred).or(Some(v4));
            }
            IpAddr::V6(v6) if !v6.is_loopback() && !v6.is_unicast_link_local() => {
                own.v6 = own.v6.filter(|_| !preferred).or(Some(v6));
            }
            _ => {}
        }
    }
    own
}

/// Loopback or a dummy, except those on which Kubernetes keeps Service addresses (IPVS, DNS cache).
pub fn has_hosts_addresses(link: &Link) -> bool {
    is_host_only(link) && link.up && !matches!(link.name.as_str(), "kube-ipvs0" | "nodelocaldns")
}

/// As [`is_within`]; other WireGuard devices count, too: their addresses do not belong to nodes.
pub fn is_internal(link: &Link, kilo: u32, pod_cidrs: &[IpNet]) -> bool {
    link.kind == "wireguard" || is_within(link, kilo, pod_cidrs)
}

/// Loopback, our WireGuard device, an IPIP tunnel or an interface of the CNI.
fn is_within(link: &Link, kilo: u32, pod_cidrs: &[IpNet]) -> bool {
    is_host_only(link)
        || link.index == kilo
        || link.kind == "ipip"
        // Cilium's address need not lie in the pod CIDR of the Node object.
        || matches!(link.name.as_str(), "kube-bridge" | "cilium_host")
        || has_pods_address(link, pod_cidrs)
}

/// Whether the other end of this interface is a pod's: see [`HostLinks::pods`].
fn is_pods(link: &Link, links: &[Link], pod_cidrs: &[IpNet]) -> bool {
    let controller = links.iter().find(|other| Some(other.index) == link.controller);
    link.kind == "veth" && link.other_namespace && has_pods_address(controller.unwrap_or(link), pod_cidrs)
}

fn has_pods_address(link: &Link, pod_cidrs: &[IpNet]) -> bool {
    let mut addresses = link.addresses.iter().map(|address| address.net.addr());
    addresses.any(|address| pod_cidrs.iter().any(|cidr| cidr.contains(&address)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn link(index: u32, name: &str, kind: &str, addresses: &[&str]) -> Link {
        Link {
            index,
            name: name.into(),
            kind: kind.into(),
            mtu: 1500,
            queue: 0,
            up: true,
            loopback: name == "lo",
            header: if matches!(kind, "tun" | "wireguard") { LinkHeader::None } else { LinkHeader::Ethernet },
            controller: None,
            other_namespace: false,
            addresses: addresses
                .iter()
                .map(|text| Address {
                    net: text.parse().unwrap(),
                    global: !text.starts_with("fe80") && !text.starts_with("127."),
                    secondary: false,
                    unusable: false,
                    deprecated: false,
                })
                .collect(),
        }
    }

    #[test]
    fn only_what_leads_out_is_an_uplink() {
        let [mut down, mut unused] = [link(8, "eth9", "", &["192.0.2.9/24"]), link(10, "eth8", "", &[])];
        (down.up, unused.up) = (false, false);
        let links = [
            link(1, "lo", "", &["127.0.0.1/8", "10.9.9.9/32"]),
            link(2, "eth0", "", &["10.0.0.5/24", "10.0.0.6/24", "fe80::1/64"]),
            link(3, "eth1", "veth", &["203.0.113.7/29", "2001:db8::7/64"]),
            link(4, "kilo0", "wireguard", &["10.4.0.1/16"]),
            link(5, "tunl0", "ipip", &["10.244.1.1/32"]),
            link(6, "cni0", "bridge", &["10.244.1.1/24"]),
            link(7, "veth1", "veth", &["fe80::2/64"]),
            down,
            unused,
            link(9, "eth2", "", &["169.254.1.1/16"]),
        ];
        let pods = ["10.244.1.0/24".parse().unwrap()];
        let private = Some("10.0.0.5".parse().unwrap());
        let query = HostQuery { kilo: 4, private, pod_cidrs: &pods, ..HostQuery::default() };
        let address = |text: &str| text.parse::<Ipv4Addr>().unwrap();
        let node = |text: &str| text.parse::<IpAddr>().unwrap();
        let paths = BTreeMap::from([(node("10.0.0.7"), 2), (node("203.0.113.2"), 3), (node("9.9.9.9"), 4)]);
        let host = host_links(&links, &query, &paths);
        let eth0 = Uplink { v4: Some(address("10.0.0.5")), v6: None };
        let eth1 = Uplink { v4: Some(address("203.0.113.7")), v6: Some("2001:db8::7".parse().unwrap()) };
        // Its programs see packets as soon as it is up again.
        let eth9 = Uplink { v4: Some(address("192.0.2.9")), v6: None };
        assert_eq!(host.uplinks, BTreeMap::from([(2, eth0), (3, eth1), (8, eth9)]));
        assert_eq!(host.mtus, BTreeMap::from([(2, 1500), (3, 1500), (8, 1500)]));
        assert_eq!(host.private, Some(2));
        assert_eq!(host.towards, BTreeMap::from([(node("203.0.113.2"), 3)]));
    }

    #[test]
    fn an_uplink_that_loses_its_address_remains_one_unless_it_becomes_part_of_another() {
        let before = Uplink { v4: Some("203.0.113.7".parse().unwrap()), v6: None };
        let borrowed = Uplink { v4: Some("10.9.9.9".parse().unwrap()), v6: None };
        let uplinks = BTreeMap::from([(3, before), (4, borrowed), (5, before), (6, before)]);
        let query = HostQuery { kilo: 9, uplinks: Some(&uplinks), ..HostQuery::default() };
        for up in [true, false] {
            let mut links = [
                link(2, "eth0", "", &["10.0.0.5/24"]),
                link(3, "eth1", "", &[]),
                // A route with a next hop led through it, without an address of its own.
                link(4, "eth2", "", &[]),
                link(5, "eth3", "", &["203.0.113.9/24"]),
                Link { controller: Some(7), ..link(6, "eth4", "", &[]) },
                link(8, "lo", "", &["127.0.0.1/8", "10.9.9.9/32"]),
            ];
            links[1].up = up;
            let host = host_links(&links, &query, &BTreeMap::new());
            assert_eq!(host.uplinks.keys().copied().collect::<Vec<_>>(), [2, 3, 5]);
            assert_eq!(host.uplinks[&3], before);
            assert_eq!(host.uplinks[&5].v4, Some("203.0.113.9".parse().unwrap()), "the present address");
        }
    }

    #[test]
    fn a_pods_interface_leads_into_its_namespace_by_the_cnis_bridge_or_with_an_address_of_its_own() {
        let pod = |index, controller, addresses: &[&str]| Link {
            controller,
            other_namespace: true,
            ..link(index, &format!("veth{index}"), "veth", addresses)
        };
        let links = [
            link(6, "cni0", "bridge", &["10.244.1.1/24"]),
            link(7, "docker0", "bridge", &["172.17.0.1/16"]),
            pod(10, Some(6), &[]),
            pod(11, None, &["10.244.1.1/32"]),
            // Containers of others, an interface whose other end is here, and one of another kind.
            pod(12, Some(7), &[]),
            pod(13, None, &["192.0.2.1/24"]),
            Link { controller: Some(6), ..link(14, "veth14", "veth", &[]) },
            Link { kind: "macvlan".into(), ..pod(15, Some(6), &[]) },
        ];
        let pods = ["10.244.1.0/24".parse().unwrap()];
        let query = HostQuery { pod_cidrs: &pods, ..HostQuery::default() };
        assert_eq!(host_links(&links, &query, &BTreeMap::new()).pods, [10, 11].into());
    }

    #[test]
    fn an_interface_without_address_behind_which_a_next_hop_is_gets_the_hosts_own() {
        let mut member = link(5, "eth3", "", &["fe80::5/64"]);
        member.controller = Some(9);
        let links = [
            link(1, "lo", "", &["127.0.0.1/8", "10.9.9.8/32", "10.9.9.9/32", "2001:db8::9/128"]),
            link(2, "eth0", "", &["fe80::1/64"]),
            link(3, "eth1", "", &[]),
            link(4, "eth2", "", &["fe80::3/64"]),
            member,
            link(6, "kube-ipvs0", "dummy", &["10.96.0.1/32"]),
            link(7, "tun0", "tun", &["192.0.2.7/32"]),
        ];
        let query = HostQuery {
            kilo: 9,
            private: Some("10.9.9.9".parse().unwrap()),
            next_hops: &[2, 3, 5, 6],
            ..HostQuery::default()
        };
        let host = host_links(&links, &query, &BTreeMap::new());
        let own = Uplink { v4: "10.9.9.9".parse().ok(), v6: "2001:db8::9".parse().ok() };
        let tun = Uplink { v4: "192.0.2.7".parse().ok(), v6: None };
        assert_eq!(host.uplinks, BTreeMap::from([(2, own), (3, own), (7, tun)]));
        assert_eq!(host.layer3, BTreeSet::from([7]));
        assert_eq!(host.private, None, "nothing arrives on loopback");
        assert!(host.private_is_unbound);
        let of_service = HostQuery { private: Some("10.96.0.1".parse().unwrap()), ..query };
        assert!(!host_links(&links, &of_service, &BTreeMap::new()).private_is_unbound, "kube-ipvs0 has it");
    }

    fn any_link(index: u32) -> impl Strategy<Value = Link> {
        let kinds = ["", "veth", "vlan", "bond", "bridge", "dummy", "tun", "gre", "ipip", "wireguard"];
        let nets = [
            "10.0.0.5/24",
            "10.0.0.6/24",
            "192.168.7.5/24",
            "203.0.113.5/24",
            "100.64.0.5/32",
            "169.254.7.7/16",
            "127.0.0.1/8",
            "10.244.1.1/24",
            "fe80::5/64",
            "fd00::5/64",
            "2001:db8::5/64",
            "2001:db8::6/128",
        ];
        let address =
            (prop::sample::select(nets.to_vec()), any::<[bool; 3]>()).prop_map(|(net, is)| Address {
                net: net.parse().unwrap(),
                global: is[0] || is[1],
                secondary: is[1] && is[2],
                deprecated: is[0] && is[1],
                unusable: is[0] && is[2],
            });
        let kind = prop::sample::select(kinds.to_vec());
        let header =
            prop::sample::select(vec![LinkHeader::Ethernet, LinkHeader::None, LinkHeader::Unknown(32)]);
        let addresses = prop::collection::vec(address, 0..4);
        (kind, header, addresses, any::<[bool; 3]>()).prop_map(move |(kind, header, addresses, is)| Link {
            index,
            name: format!("if{index}"),
            kind: kind.into(),
            mtu: 1500,
            queue: 0,
            up: is[0] || is[1],
            loopback: index == 1,
            header,
            controller: (is[1] && is[2]).then_some(99),
            other_namespace: is[0],
            addresses,
        })
    }

    proptest! {
        #[test]
        fn of_any_host_only_what_leads_out_gets_programs_and_addresses_that_are_the_hosts(
            links in (1u32..9).map(any_link).collect::<Vec<_>>(),
            kilo in 1u32..9,
            next_hops in prop::collection::vec(1u32..9, 0..4),
            private in prop::sample::select(vec!["10.0.0.5", "203.0.113.5", "fd00::5", "10.7.7.7"]),
        ) {
            let pods = ["10.244.1.0/24".parse().unwrap()];
            let private = private.parse().ok();
            let query = HostQuery { kilo, private, pod_cidrs: &pods, next_hops: &next_hops, main_routes: &[], uplinks: None };
            let host = host_links(&links, &query, &BTreeMap::new());
            let of = |index: u32| links.iter().find(|link| link.index == index).unwrap();
            for (index, uplink) in &host.uplinks {
                let link = of(*index);
                prop_assert!(link.up || !link.addresses.is_empty());
                prop_assert!(!link.loopback && *index != kilo && link.kind != "dummy");
                prop_assert!(!matches!(link.header, LinkHeader::Unknown(_)));
                prop_assert_eq!(host.layer3.contains(index), link.header == LinkHeader::None);
                prop_assert_eq!(host.mtus.get(index), Some(&link.mtu));
                let addresses = uplink.v4.map(IpAddr::V4).into_iter().chain(uplink.v6.map(IpAddr::V6));
                for address in addresses {
                    let holders = links.iter().filter(|link| {
                        link.addresses.iter().any(|has| has.net.addr() == address && has.global)
                    });
                    let own = holders.clone().any(|holder| holder.index == *index);
                    let borrowed = next_hops.contains(index) && holders.into_iter().any(is_host_only);
                    prop_assert!(own || borrowed, "{} is not the host's", address);
                }
            }
            prop_assert!(host.layer3.iter().all(|index| host.uplinks.contains_key(index)));
            if let Some(index) = host.private {
                prop_assert!(!is_host_only(of(index)) && index != kilo);
            }
        }
    }
}
