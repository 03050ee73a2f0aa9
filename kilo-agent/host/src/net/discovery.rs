//! The private and the public address a node finds for itself.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use ipnet::IpNet;

use super::{Net, NetError, links, links::Link};
use kilo_core::{
    addresses::{is_global_v6, is_public, is_reached_from_anywhere},
    settings::EndpointFrom,
};

/// How long a host name may take to resolve.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A node's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// Address inside the location, with its network's prefix length.
    pub private: Option<IpNet>,
    /// Address for the WireGuard endpoint.
    pub public: IpNet,
}

/// Input of [`discover`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts<'a> {
    /// What the host name resolves to.
    pub resolved: &'a [IpAddr],
    /// Interface of the default route.
    pub default_interface: Option<u32>,
    /// All links with their addresses.
    pub links: &'a [Link],
    /// The WireGuard device, 0 when there is none yet.
    pub kilo: u32,
    /// This node's pod CIDRs: an interface with such an address is the CNI's.
    pub pod_cidrs: &'a [IpNet],
    /// `--internal-cidr`: when given, only addresses inside are private ones.
    pub internal_cidrs: &'a [IpNet],
}

/// Pure: chooses the addresses in Kilo's order (host name, default route's interface, any interface; within
/// each, IPv4 before IPv6, then by text). A host whose uplinks have no addresses (unnumbered) has its own on
/// loopback or a dummy.
pub fn discover(facts: &Facts<'_>) -> Option<Discovered> {
    let mut usable =
        addresses(facts, |link| link.up && !links::is_internal(link, facts.kilo, facts.pod_cidrs));
    if usable.is_empty() {
        usable = addresses(facts, links::has_hosts_addresses);
    }
    let tiers: [Vec<IpNet>; 3] = [
        sorted(usable.iter().filter(|(_, net)| facts.resolved.contains(&net.addr()))),
        sorted(usable.iter().filter(|(index, _)| Some(*index) == facts.default_interface)),
        sorted(usable.iter()),
    ];
    let first = |wanted: &dyn Fn(&IpNet) -> bool| tiers.iter().flatten().find(|net| wanted(net)).copied();
    let private = first(&|net| {
        !is_public(net.addr())
            && (facts.internal_cidrs.is_empty()
                || facts.internal_cidrs.iter().any(|cidr| cidr.contains(&net.addr())))
    });
    let private = private.or_else(|| {
        // Addresses of --internal-cidr count as private whatever they look like.
        first(&|net| facts.internal_cidrs.iter().any(|cidr| cidr.contains(&net.addr())))
    });
    let public = first(&|net| is_public(net.addr())).or(private)?;
    Some(Discovered { private, public })
}

/// An unused address in the IPv6 internet: the source address towards it is the one used for all destinations
/// without a more specific route.
pub const ANYWHERE: Ipv6Addr = Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 1);

/// Pure: the source address of packets into the IPv6 internet, if it is public and an interface that is up
/// has it. A privacy address counts, too: it is what others see, and it is published anew when it changes.
pub fn public_ipv6(links: &[Link], source: IpAddr) -> Option<Ipv6Addr> {
    let has =
        |link: &&Link| link.addresses.iter().any(|address| address.global && address.net.addr() == source);
    links.iter().filter(|link| link.up).find(has)?;
    match source {
        IpAddr::V6(source) if is_global_v6(source) => Some(source),
        _ => None,
    }
}

/// Pure: the address at which others reach this node's WireGuard device. `external`: the Node's addresses of
/// type `ExternalIP`, which a cloud's NAT translates to those of an interface.
pub fn endpoint(
    found: Option<Discovered>,
    external: &[IpAddr],
    from: EndpointFrom,
    prefer_private: bool,
) -> Option<IpAddr> {
    let usable = external.iter().filter(|ip| !is_local(**ip)).copied();
    // As for interfaces: public before private, IPv4 before IPv6.
    let external = usable.min_by_key(|ip| (!is_public(*ip), ip.is_ipv6()));
    let public = found.map(|found| found.public.addr());
    let interface = found.and_then(|found| found.private).filter(|_| prefer_private).map(|net| net.addr());
    let interface = interface.or(public);
    match from {
        EndpointFrom::ExternalIp => external.or(interface),
        EndpointFrom::Interface => interface,
        EndpointFrom::Auto if prefer_private || public.is_some_and(is_reached_from_anywhere) => interface,
        EndpointFrom::Auto => external.or(interface),
    }
}

fn addresses(facts: &Facts<'_>, wanted: impl Fn(&Link) -> bool) -> Vec<(u32, IpNet)> {
    let all = facts.links.iter().filter(|link| wanted(link));
    all.flat_map(|link| link.addresses.iter().map(move |address| (link, address)))
        .filter(|(_, address)| address.global && !is_local(address.net.addr()))
        .filter(|(_, address)| !address.unusable)
        // A privacy address changes by the hour: nothing to publish.
        .filter(|(_, address)| address.net.addr().is_ipv4() || !address.secondary)
        .map(|(link, address)| (link.index, address.net))
        .collect()
}

fn sorted<'a>(nets: impl Iterator<Item = &'a (u32, IpNet)>) -> Vec<IpNet> {
    let mut nets: Vec<IpNet> = nets.map(|(_, net)| *net).collect();
    nets.sort_by_key(|net| (net.addr().is_ipv6(), net.to_string()));
    nets
}

fn is_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_link_local() || address.is_unspecified(),
        IpAddr::V6(address) => {
            address == Ipv6Addr::LOCALHOST || address.is_unicast_link_local() || address.is_multicast()
        }
    }
}

/// Reads the facts and chooses. A host name that does not resolve in time is skipped.
pub async fn run(
    net: &Net,
    hostname: &str,
    kilo: u32,
    pod_cidrs: &[IpNet],
    internal_cidrs: &[IpNet],
) -> Result<Discovered, NetError> {
    let links = net.links().await?;
    let default_interface = net.routes_out(&[kilo]).await?.0.default;
    let lookup = tokio::net::lookup_host((hostname, 0));
    let resolved: Vec<IpAddr> = match tokio::time::timeout(RESOLVE_TIMEOUT, lookup).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
        _ => Vec::new(),
    };
    let facts =
        Facts { resolved: &resolved, default_interface, links: &links, kilo, pod_cidrs, internal_cidrs };
    discover(&facts).ok_or(NetError::NoAddress)
}

#[cfg(test)]
mod tests {
    use super::{super::links::Address, *};

    fn link(index: u32, kind: &str, addresses: &[&str]) -> Link {
        let addresses = addresses
            .iter()
            .map(|text| Address {
                net: text.parse().unwrap(),
                global: true,
                secondary: false,
                unusable: false,
                deprecated: false,
            })
            .collect();
        Link {
            index,
            name: format!("if{index}"),
            kind: kind.into(),
            mtu: 1500,
            up: true,
            addresses,
            ..Link::default()
        }
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn check(facts: Facts<'_>, private: Option<&str>, public: Option<&str>) {
        let found = discover(&facts);
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        assert_eq!(found.and_then(|found| found.private), private.map(net));
        assert_eq!(found.map(|found| found.public), public.map(net));
    }

    #[test]
    fn order_is_host_name_then_default_route_then_any() {
        let links = [
            link(2, "", &["10.0.0.5/24", "198.51.100.5/24"]),
            link(3, "", &["10.1.0.5/16", "203.0.113.5/24"]),
            link(4, "", &["10.0.0.1/8"]),
        ];
        let facts = Facts { links: &links, ..Facts::default() };
        check(facts, Some("10.0.0.1/8"), Some("198.51.100.5/24"));
        check(Facts { default_interface: Some(3), ..facts }, Some("10.1.0.5/16"), Some("203.0.113.5/24"));
        let resolved = ["10.0.0.5".parse().unwrap(), "192.0.2.77".parse().unwrap()];
        check(
            Facts { default_interface: Some(3), resolved: &resolved, ..facts },
            Some("10.0.0.5/24"),
            Some("203.0.113.5/24"),
        );
    }

    #[test]
    fn the_source_of_what_leaves_by_ipv6_is_published_when_it_is_public_and_an_interface_has_it() {
        let mut links = [link(2, "", &["203.0.113.5/24", "fd00::5/64"]), link(3, "", &["2001:db8:3::5/64"])];
        let found = |links: &[Link], source: &str| public_ipv6(links, source.parse().unwrap());
        assert_eq!(found(&links, "2001:db8:3::5").map(IpAddr::from), "2001:db8:3::5".parse().ok());
        for none in ["fd00::5", "2001:db8:3::6", "203.0.113.5", "::1"] {
            assert_eq!(found(&links, none), None, "{none}");
        }
        links[1].up = false;
        assert_eq!(found(&links, "2001:db8:3::5"), None);
    }

    #[test]
    fn text_order_and_ipv4_first_as_kilo_sorts() {
        let links = [link(2, "", &["10.0.0.9/24", "10.0.0.10/24", "fd00::1/64"])];
        check(Facts { links: &links, ..Facts::default() }, Some("10.0.0.10/24"), Some("10.0.0.10/24"));
    }

    #[test]
    fn no_private_address_is_possible_no_address_is_an_error() {
        let links = [link(2, "", &["203.0.113.5/24"])];
        check(Facts { links: &links, ..Facts::default() }, None, Some("203.0.113.5/24"));
        check(Facts::default(), None, None);
    }

    #[test]
    fn the_external_ip_of_the_node_is_the_endpoint_where_no_interface_is_public() {
        use EndpointFrom::{Auto, ExternalIp, Interface};
        let found = |private: &str, public: &str| {
            let (private, public) = (private.parse().ok(), public.parse().unwrap());
            Some(Discovered { private, public })
        };
        let cloud = found("10.0.0.5/24", "10.0.0.5/24");
        let public = found("10.0.0.5/24", "198.51.100.5/24");
        let shared = found("10.0.0.5/24", "100.64.7.7/16");
        let local = found("10.0.0.5/24", "fd12::5/64");
        let elastic = ["203.0.113.9"].as_slice();
        let both = ["2001:db8::9", "203.0.113.9"].as_slice();
        let mixed = ["192.168.7.7", "2001:db8::9"].as_slice();
        let unusable = ["127.0.0.1", "0.0.0.0", "169.254.0.1", "fe80::1"].as_slice();
        let cases = [
            (cloud, elastic, Auto, false, Some("203.0.113.9")),
            (cloud, both, Auto, false, Some("203.0.113.9")),
            (cloud, mixed, Auto, false, Some("2001:db8::9")),
            (cloud, unusable, Auto, false, Some("10.0.0.5")),
            (cloud, &[], Auto, false, Some("10.0.0.5")),
            (cloud, elastic, Interface, false, Some("10.0.0.5")),
            (cloud, elastic, Auto, true, Some("10.0.0.5")),
            (public, elastic, Auto, false, Some("198.51.100.5")),
            (public, elastic, ExternalIp, false, Some("203.0.113.9")),
            (public, &[], ExternalIp, false, Some("198.51.100.5")),
            (public, &[], ExternalIp, true, Some("10.0.0.5")),
            (shared, elastic, Auto, false, Some("203.0.113.9")),
            (shared, &[], Auto, false, Some("100.64.7.7")),
            (local, elastic, Auto, false, Some("203.0.113.9")),
            (None, elastic, Auto, false, Some("203.0.113.9")),
            (None, &[], Auto, false, None),
        ];
        for (found, external, from, prefer_private, wanted) in cases {
            let external: Vec<IpAddr> = external.iter().map(|text| text.parse().unwrap()).collect();
            assert_eq!(
                endpoint(found, &external, from, prefer_private),
                wanted.map(|text| text.parse().unwrap()),
                "{found:?} {external:?} {from:?} {prefer_private}"
            );
        }
    }

    #[test]
    fn internal_cidrs_filter_the_private_choice_only() {
        let links = [link(2, "", &["10.0.0.5/24", "192.168.1.5/24", "203.0.113.5/24"])];
        let internal = nets(&["192.168.0.0/16"]);
        let facts = Facts { links: &links, internal_cidrs: &internal, ..Facts::default() };
        check(facts, Some("192.168.1.5/24"), Some("203.0.113.5/24"));
        let odd = nets(&["203.0.113.0/24"]);
        check(Facts { internal_cidrs: &odd, ..facts }, Some("203.0.113.5/24"), Some("203.0.113.5/24"));
        let none = nets(&["172.16.0.0/12"]);
        check(Facts { internal_cidrs: &none, ..facts }, None, Some("203.0.113.5/24"));
    }

    #[test]
    fn a_host_with_unnumbered_uplinks_has_its_addresses_on_loopback_or_a_dummy() {
        let named = |name: &str, kind: &str, addresses: &[&str]| Link {
            name: name.into(),
            loopback: name == "lo",
            ..link(9, kind, addresses)
        };
        let links = [
            named("lo", "", &["127.0.0.1/8", "10.0.0.5/32"]),
            named("dummy0", "dummy", &["203.0.113.5/32"]),
            named("kube-ipvs0", "dummy", &["10.0.0.1/32"]),
            link(2, "", &["fe80::1/64"]),
        ];
        check(Facts { links: &links, ..Facts::default() }, Some("10.0.0.5/32"), Some("203.0.113.5/32"));
        let numbered = [&links[..], &[link(3, "", &["10.9.0.5/24"])]].concat();
        let facts = Facts { links: &numbered, ..Facts::default() };
        check(facts, Some("10.9.0.5/24"), Some("10.9.0.5/24"));
    }

    #[test]
    fn tunnels_the_cni_and_local_addresses_do_not_count() {
        let mut privacy = link(8, "", &["2001:db8::77/64"]);
        privacy.addresses[0].secondary = true;
        let mut down = link(9, "", &["10.0.0.2/24"]);
        down.up = false;
        let links = [
            link(2, "", &["10.9.0.5/24"]),
            link(3, "wireguard", &["10.4.0.1/16"]),
            link(4, "ipip", &["10.0.0.3/32"]),
            link(5, "bridge", &["10.244.3.1/24"]),
            link(6, "", &["169.254.3.3/16", "fe80::1/64", "127.0.0.1/8"]),
            link(7, "tun", &["10.4.0.9/16"]),
            privacy,
            down,
        ];
        let pods = nets(&["10.244.3.0/24"]);
        let facts = Facts { links: &links, kilo: 7, pod_cidrs: &pods, ..Facts::default() };
        check(facts, Some("10.9.0.5/24"), Some("10.9.0.5/24"));
    }
}
