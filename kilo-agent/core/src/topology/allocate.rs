//! WireGuard addresses: the n-th location gets the n-th address of the subnet.

use std::net::IpAddr;

use ipnet::IpNet;

/// Addresses of `subnet` in order, without its network address and, for IPv4,
/// without its broadcast address.
pub fn addresses(subnet: IpNet) -> impl Iterator<Item = IpAddr> {
    subnet.hosts().filter(move |addr| *addr != subnet.network())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_address_is_the_one_after_the_network() {
        for (subnet, wanted) in
            [("10.4.0.0/16", ["10.4.0.1", "10.4.0.2"]), ("fd00:4::/64", ["fd00:4::1", "fd00:4::2"])]
        {
            let first: Vec<_> = addresses(subnet.parse().unwrap()).take(2).collect();
            assert_eq!(first, wanted.map(|addr| addr.parse::<IpAddr>().unwrap()));
        }
    }
}
