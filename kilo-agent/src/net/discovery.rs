//! Addresses a node finds for itself (parity with Kilo's order).

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    Link,
    links::{LinkKind, routed_addresses},
};

/// The private and the public address of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Address with the prefix length of its network.
    pub private: Option<IpNet>,
    /// Address others reach it at; the private one where there is no other.
    pub public: Option<IpNet>,
}

/// What discovery may look at.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// Addresses the host name resolves to.
    pub hostname: &'a [IpAddr],
    /// Interface of the default route.
    pub default_interface: Option<u32>,
    /// All links.
    pub links: &'a [Link],
    /// Name of the WireGuard device.
    pub kilo: &'a str,
    /// Pod CIDRs: an interface with such an address is the CNI's.
    pub pod_cidrs: &'a [IpNet],
    /// `--internal-cidr`: only these count as private; empty = any private address.
    pub internal_cidrs: &'a [IpNet],
}

/// Finds both addresses: of those the host name resolves to, then of the
/// default route's interface, then of any interface.
pub fn discover(sources: &Sources<'_>) -> Addresses {
    let usable: Vec<&Link> = sources.links.iter().filter(|link| is_usable(link, sources)).collect();
    let assigned: Vec<IpNet> = usable.iter().flat_map(|link| routed_addresses(link)).collect();
    let by_name =
        sources.hostname.iter().filter_map(|ip| assigned.iter().find(|net| net.addr() == *ip)).copied();
    let by_route = usable
        .iter()
        .filter(|link| Some(link.index) == sources.default_interface)
        .flat_map(|link| routed_addresses(link));
    let candidates: Vec<IpNet> = by_name.chain(by_route).chain(assigned.iter().copied()).collect();
    let internal = |net: &&IpNet| {
        sources.internal_cidrs.is_empty()
            || sources.internal_cidrs.iter().any(|cidr| cidr.contains(&net.addr()))
    };
    // An explicit list of internal ranges may name public ones.
    let is_private = |net: &&IpNet| !sources.internal_cidrs.is_empty() || !is_public(net.addr());
    let private = candidates.iter().filter(internal).find(is_private).copied();
    let public = candidates.iter().find(|net| is_public(net.addr())).copied();
    Addresses { private, public: public.or(private) }
}

fn is_usable(link: &Link, sources: &Sources<'_>) -> bool {
    let of_cni =
        link.addresses.iter().any(|net| sources.pod_cidrs.iter().any(|cidr| cidr.contains(&net.addr())));
    let tunnel = matches!(link.kind, LinkKind::IpTunnel | LinkKind::Wireguard);
    link.up && !link.loopback && link.name != sources.kilo && !of_cni && !tunnel
}

/// Public as Kilo means it: not RFC 1918, not `fd00::/16`.
fn is_public(ip: IpAddr) -> bool {
    crate::topology::is_public(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str, addresses: &[&str]) -> Link {
        Link {
            index,
            name: name.to_owned(),
            kind: LinkKind::Other,
            up: true,
            loopback: name == "lo",
            mtu: 1500,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            controller: None,
        }
    }

    fn run(links: &[Link], hostname: &[&str], default_interface: u32, internal: &[&str]) -> (String, String) {
        let hostname: Vec<IpAddr> = hostname.iter().map(|text| text.parse().unwrap()).collect();
        let internal: Vec<IpNet> = internal.iter().map(|text| text.parse().unwrap()).collect();
        let found = discover(&Sources {
            hostname: &hostname,
            default_interface: Some(default_interface),
            links,
            kilo: "kilo0",
            pod_cidrs: &["10.42.0.0/16".parse().unwrap()],
            internal_cidrs: &internal,
        });
        let text = |net: Option<IpNet>| net.map(|net| net.to_string()).unwrap_or_default();
        (text(found.private), text(found.public))
    }

    #[test]
    fn a_node_with_lan_and_wan_finds_both() {
        let links = [
            link(1, "lo", &["127.0.0.1/8"]),
            link(2, "eth0", &["10.1.0.11/24"]),
            link(3, "eth1", &["192.0.2.11/24"]),
            link(4, "kilo0", &["10.4.0.1/16"]),
            link(5, "kube-bridge", &["10.42.1.1/24"]),
        ];
        assert_eq!(run(&links, &[], 3, &[]), ("10.1.0.11/24".to_owned(), "192.0.2.11/24".to_owned()));
    }

    #[test]
    fn without_a_public_address_the_private_one_serves() {
        let links = [link(2, "eth0", &["10.1.0.12/24", "fe80::1/64"])];
        assert_eq!(run(&links, &[], 2, &[]), ("10.1.0.12/24".to_owned(), "10.1.0.12/24".to_owned()));
    }

    #[test]
    fn what_the_host_name_resolves_to_comes_first() {
        let links = [link(2, "eth0", &["10.1.0.12/24"]), link(3, "eth1", &["10.9.0.1/24"])];
        assert_eq!(run(&links, &["10.9.0.1"], 2, &[]).0, "10.9.0.1/24");
        assert_eq!(
            run(&links, &["10.8.0.1"], 2, &[]).0,
            "10.1.0.12/24",
            "an address of another host does not count"
        );
    }

    #[test]
    fn internal_cidrs_choose_among_addresses() {
        let links = [link(2, "eth0", &["10.1.0.12/24"]), link(3, "eth1", &["100.64.0.5/10"])];
        assert_eq!(run(&links, &[], 2, &["100.64.0.0/10"]).0, "100.64.0.5/10");
        assert_eq!(run(&links, &[], 2, &["192.168.0.0/16"]).0, "");
    }
}
