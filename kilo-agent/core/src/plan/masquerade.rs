//! Tables of masquerading: whose packets are translated, and which destinations are exempt.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use kilo_common::maps::{
    CONFIG_OFFERED, CONFIG_ONE_V4, CONFIG_ONE_V6, CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6,
    DEVICE_BY_DESTINATION, DEVICE_MASQUERADE, Device, MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS,
    MASQ_SRC_EXEMPT,
};

use super::{Inputs, Own, Remote, Tables};
use crate::observed::{HostLinks, Uplink};
use crate::{flat_map::FlatMap, prefixes};

pub(super) fn fill(
    inputs: &Inputs<'_>,
    own: &Own<'_>,
    remote: &Remote,
    lost: &[(IpNet, u32)],
    tables: &mut Tables,
) {
    let peers = inputs.mesh.peers.iter().flat_map(|peer| &peer.allowed_ips).copied();
    // An offered prefix counts only where it is something else, too.
    let elsewhere = remote.claims().filter(|claim| !claim.offered && !claim.is_hosts(inputs.links));
    let elsewhere = elsewhere.map(|claim| claim.prefix);
    let here = own.segment.allowed_ips.iter().chain(&inputs.settings.service_cidrs).copied();
    let lost = lost.iter().map(|(prefix, _)| *prefix);
    let mut known = Vec::with_capacity(remote.claims().len() + own.segment.allowed_ips.len());
    let prefixes = elsewhere.chain(here.map(|prefix| prefix.trunc())).chain(lost);
    known.extend(prefixes.map(|prefix| (prefix, MASQ_EXCLUDE)));
    let known: FlatMap<IpNet, u32> = known.into_iter().collect();
    let (mut forced, mut sources) = (Vec::new(), Vec::new());
    for prefix in own.segment.allowed_location_ips.iter().map(IpNet::trunc) {
        // A known prefix must win; the trie would prefer the longer one.
        if prefixes::holding(&known, prefix).next().is_none() {
            forced.push((prefix, MASQ_FORCE));
        }
        // Between prefixes of this location addresses stay as they are (squat/kilo#496), unless
        // the prefix also holds prefixes from elsewhere.
        if prefixes::covered_by(&known, prefix).next().is_none() {
            sources.push((prefix, MASQ_SRC_EXEMPT));
        }
    }
    tables.masq_dst = known;
    tables.masq_dst.extend(forced);
    // Pods with former addresses reach nobody, but must not be seen outside with them either.
    let pods = own.member.node.pod_cidrs.iter().chain(&inputs.links.former_pod_cidrs);
    let pods = pods.copied().filter(|_| inputs.settings.cni);
    sources.extend(pods.chain(peers).map(|prefix| (prefix.trunc(), MASQ_SRC_ALWAYS)));
    tables.masq_src = sources.into_iter().collect();
    let links = inputs.links;
    tables.masq_addr = links.masq_addrs.clone();
    let devices = links.uplinks.iter().map(|(ifindex, uplink)| (*ifindex, *uplink));
    for (ifindex, uplink) in devices.chain([(links.kilo, tunnel_addresses(own))]) {
        let device = Device {
            masq_v4: uplink.v4.map(|addr| addr.octets()).unwrap_or_default(),
            masq_v6: uplink.v6.map(|addr| addr.octets()).unwrap_or_default(),
            flags: DEVICE_MASQUERADE
                | if links.masq_addrs.keys().any(|(of, _)| *of == ifindex) {
                    DEVICE_BY_DESTINATION
                } else {
                    0
                },
        };
        // Without an address nothing is masqueraded, but the programs tell an uplink from a pod's interface.
        if uplink != Uplink::default() {
            tables.device.insert(ifindex, device);
        } else if ifindex != links.kilo {
            tables.device.insert(ifindex, Device::default());
        }
    }
}

/// True for the addresses of one family.
type Family = fn(&IpAddr) -> bool;

/// `CONFIG_*` bits that spare the programs look-ups.
pub(super) fn flags(links: &HostLinks, private: Option<IpAddr>, remote: &Remote) -> u32 {
    let offered = remote.claims().any(|claim| claim.offered);
    let families: [(Family, u32, u32); 2] = [
        (IpAddr::is_ipv4, CONFIG_ONE_V4, CONFIG_SEVERAL_V4),
        (IpAddr::is_ipv6, CONFIG_ONE_V6, CONFIG_SEVERAL_V6),
    ];
    let mut flags = if offered { CONFIG_OFFERED } else { 0 };
    for (family, one, several) in families {
        flags |= if is_one_address(links, private, family) { one } else { 0 };
        flags |= if are_several(&addresses(links, family), links) { several } else { 0 };
    }
    flags
}

/// Whether an uplink may bring answers to an address that it does not give to packets itself. The kernel tells
/// neighbours on any link that it has any of its IPv4 addresses (kernel Documentation/networking/ip-sysctl,
/// `arp_ignore`).
fn are_several(addresses: &BTreeSet<IpAddr>, links: &HostLinks) -> bool {
    let has_none = |uplink: &Uplink| uplink.v4.is_none();
    let is_v4 = addresses.first().is_some_and(IpAddr::is_ipv4);
    addresses.len() > 1 || is_v4 && links.uplinks.values().any(has_none)
}

/// All addresses of a family that masqueraded packets get at uplinks.
fn addresses(links: &HostLinks, family: Family) -> BTreeSet<IpAddr> {
    let usual =
        links.uplinks.values().flat_map(|uplink| [uplink.v4.map(IpAddr::V4), uplink.v6.map(IpAddr::V6)]);
    usual.flatten().chain(links.masq_addrs.values().copied()).filter(family).collect()
}

/// True when this private address is of that family, and is what masqueraded packets get at
/// every uplink. Programs then masquerade wherever they are attached, without looking up
/// the device: so each such interface, an overlay's too, must be an uplink, because
/// nothing is masqueraded on others.
fn is_one_address(links: &HostLinks, private: Option<IpAddr>, family: Family) -> bool {
    let mut others = links.private.iter().chain(&links.overlay_device);
    let is_masqueraded = others.all(|ifindex| links.uplinks.contains_key(ifindex));
    private.filter(family).filter(|_| is_masqueraded).is_some_and(|private| {
        links.uplinks.values().all(|uplink| match private {
            IpAddr::V4(addr) => uplink.v4 == Some(addr),
            IpAddr::V6(addr) => uplink.v6 == Some(addr),
        }) && addresses(links, family).len() <= 1
    })
}

/// What masqueraded packets get when they leave through the WireGuard device: addresses that the
/// other locations route back through it.
fn tunnel_addresses(own: &Own<'_>) -> Uplink {
    let private = own.member.private_ip();
    let addrs = if own.acts { [own.segment.wireguard_ip, private] } else { [private, None] };
    let mut uplink = Uplink::default();
    for addr in addrs.into_iter().flatten() {
        match addr {
            IpAddr::V4(addr) => uplink.v4 = uplink.v4.or(Some(addr)),
            IpAddr::V6(addr) => uplink.v6 = uplink.v6.or(Some(addr)),
        }
    }
    uplink
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_uplink_has_the_private_address_or_there_is_not_one_address() {
        let with = |v4: &str| Uplink { v4: v4.parse().ok(), v6: "fd00::1".parse().ok() };
        let is_one = |uplinks: &[Uplink], private: &str, family| {
            let uplinks = (2..).zip(uplinks.iter().copied()).collect();
            let links = HostLinks { uplinks, ..HostLinks::default() };
            is_one_address(&links, private.parse().ok(), family)
        };
        let (own, other, none) = (with("10.1.0.11"), with("192.0.2.11"), with(""));
        assert!(is_one(&[own, own], "10.1.0.11", IpAddr::is_ipv4));
        assert!(is_one(&[own, other], "fd00::1", IpAddr::is_ipv6));
        for (uplinks, private) in [
            ([own, other], "10.1.0.11"),
            ([own, none], "10.1.0.11"),
            ([own, own], "fd00::1"),
            ([own, own], ""),
        ] {
            assert!(!is_one(&uplinks, private, IpAddr::is_ipv4), "{uplinks:?} {private}");
        }
    }

    #[test]
    fn an_uplink_without_ipv4_may_bring_answers_to_another_ones_address() {
        let uplink = |v4: &str, v6: &str| Uplink { v4: v4.parse().ok(), v6: v6.parse().ok() };
        let found = |uplinks: &[Uplink]| {
            let uplinks = (2..).zip(uplinks.iter().copied()).collect();
            let links = HostLinks { uplinks, ..HostLinks::default() };
            flags(&links, None, &Remote::default()) & (CONFIG_SEVERAL_V4 | CONFIG_SEVERAL_V6)
        };
        let both = uplink("192.0.2.11", "2001:db8::11");
        assert_eq!(found(&[both]), 0);
        assert_eq!(found(&[both, both]), 0);
        assert_eq!(found(&[both, uplink("", "2001:db8::11")]), CONFIG_SEVERAL_V4);
        assert_eq!(found(&[both, uplink("192.0.2.11", "")]), 0, "IPv6 addresses stay on their links");
        assert_eq!(found(&[uplink("", "2001:db8::11")]), 0, "there is no IPv4 address");
    }

    #[test]
    fn an_attached_interface_where_nothing_is_masqueraded_means_that_there_is_not_one_address() {
        let addr: IpAddr = "10.1.0.11".parse().unwrap();
        let uplink = Uplink { v4: Some("10.1.0.11".parse().unwrap()), v6: None };
        let is_one = |private, overlay_device| {
            let uplinks = [(2, uplink)].into();
            let links = HostLinks { private, uplinks, overlay_device, ..HostLinks::default() };
            is_one_address(&links, Some(addr), IpAddr::is_ipv4)
        };
        assert!(is_one(None, None));
        assert!(is_one(Some(2), None));
        assert!(!is_one(Some(2), Some(7)));
        assert!(!is_one(Some(3), None));
    }
}
