//! IP forwarding in this network namespace: pods and leaders need it, and something may have turned it off.

use std::{fs, path::Path};

use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    link::{AfSpecInet, AfSpecUnspec, InetDevConf, LinkAttribute, LinkMessage},
};

use super::Rtnl;

const IPV4: &str = "/proc/sys/net/ipv4/ip_forward";
const IPV6: &str = "/proc/sys/net/ipv6/conf/all/forwarding";
const IPV6_INTERFACES: &str = "/proc/sys/net/ipv6/conf";

/// Turns forwarding on where it is off, for IPv6 only with `ipv6` (the mesh has such prefixes); returns the
/// number of writes. Failures are only logged.
pub fn enable(ipv6: bool) -> u64 {
    let mut writes = turn_on(IPV4, "IPv4", "net.ipv4.ip_forward=1");
    if ipv6 && is_off(IPV6) {
        writes += keep_router_advertisements();
        writes += turn_on(IPV6, "IPv6", "net.ipv6.conf.all.forwarding=1");
    }
    writes
}

/// True when the host forwards IPv4. This program gets no event when that changes.
pub fn is_on() -> bool {
    !is_off(IPV4)
}

fn is_off(path: &str) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.trim() == "0")
}

fn turn_on(path: &str, family: &str, hint: &str) -> u64 {
    if !is_off(path) {
        return 0;
    }
    match fs::write(path, "1") {
        Ok(()) => {
            tracing::warn!("{family} forwarding was off; turned it on");
            1
        }
        Err(error) => {
            tracing::error!(%error, "{family} forwarding is off and cannot be turned on: sysctl {hint}");
            0
        }
    }
}

/// True where the kernel takes no IPv6 addresses and routes for this interface, because IPv6 is off
/// (`disable_ipv6`) or not there.
pub fn has_no_ipv6(interface: &str) -> bool {
    match fs::read_to_string(format!("{IPV6_INTERFACES}/{interface}/disable_ipv6")) {
        Ok(text) => text.trim() != "0",
        // Without `/proc/sys` nothing is known.
        Err(_) => Path::new(IPV4).exists() && !Path::new(IPV6_INTERFACES).exists(),
    }
}

/// Loosens a strict `rp_filter` of the WireGuard device, so that replies may arrive there from addresses that
/// the host itself reaches by an uplink; returns the number of writes. WireGuard has checked the source of
/// what arrives there. Set by rtnetlink, because an unprivileged container sees /proc/sys read-only.
pub async fn accept_by_tunnel(rtnl: &Rtnl, interface: &str, index: u32) -> u64 {
    let value = |interface: &str| {
        let path = format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter");
        fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u8>().ok()).unwrap_or(0)
    };
    // The larger of the two counts (kernel Documentation/networking/ip-sysctl).
    if value("all").max(value(interface)) != 1 {
        return 0;
    }
    let mut settings = InetDevConf::default();
    settings.rp_filter = 2;
    let mut message = LinkMessage::default();
    message.header.index = index;
    let settings = AfSpecUnspec::Inet(vec![AfSpecInet::DevConfRequest(settings)]);
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![settings]));
    match rtnl.write("set rp_filter of an interface", RouteNetlinkMessage::SetLink(message), 0).await {
        Ok(()) => 1,
        Err(error) => {
            tracing::error!(
                %error,
                "failed to loosen rp_filter, so pods get no answers from addresses that are WireGuard endpoints of other leaders; set it on the host: sysctl net.ipv4.conf.{interface}.rp_filter=2"
            );
            0
        }
    }
}

/// A host that forwards ignores router advertisements unless `accept_ra` is 2
/// (kernel Documentation/networking/ip-sysctl); it would lose its default route.
fn keep_router_advertisements() -> u64 {
    let Ok(interfaces) = fs::read_dir(IPV6_INTERFACES) else { return 0 };
    let paths = interfaces.flatten().map(|entry| entry.path().join("accept_ra"));
    let accepting = paths.filter(|path| fs::read_to_string(path).is_ok_and(|text| text.trim() == "1"));
    accepting.filter(|path| fs::write(path, "2").is_ok()).count() as u64
}
