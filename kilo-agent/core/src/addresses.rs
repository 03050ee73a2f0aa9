//! Classification of IP addresses.

use std::net::{IpAddr, Ipv6Addr};

/// Whether an address is public as Kilo means it: not RFC 1918, not in `fd00::/16`.
pub fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_private(),
        IpAddr::V6(v6) => v6.segments()[0] != 0xfd00,
    }
}

/// Whether an address is public in fact: neither private (RFC 1918, `fc00::/7`) nor behind
/// carrier-grade NAT (RFC 6598).
pub fn is_reached_from_anywhere(ip: IpAddr) -> bool {
    is_public(ip)
        && match ip {
            IpAddr::V4(v4) => v4.octets()[0] != 100 || v4.octets()[1] & 0xc0 != 64,
            IpAddr::V6(v6) => !v6.is_unique_local(),
        }
}

/// Whether an address is in `2000::/3`, all of the IPv6 Internet that is assigned (RFC 4291).
pub const fn is_global_v6(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xe000 == 0x2000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_ranges_are_those_kilo_knows() {
        for (ip, public) in
            [("10.1.1.1", false), ("172.31.0.1", false), ("192.168.0.1", false), ("100.64.0.1", true)]
        {
            assert_eq!(is_public(ip.parse().unwrap()), public, "{ip}");
        }
        assert!(!is_public("fd00::1".parse().unwrap()));
        assert!(is_public("fd01::1".parse().unwrap()));
    }
}
