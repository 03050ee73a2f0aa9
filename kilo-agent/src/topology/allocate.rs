//! WireGuard addresses: the n-th location gets the n-th address of the subnet.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// Addresses of `subnet` in order, without its network address; without its
/// broadcast address unless the subnet is a /31 or /32.
pub fn addresses(subnet: Ipv4Net) -> impl Iterator<Item = Ipv4Addr> {
    subnet.hosts()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_address_is_the_one_after_the_network() {
        let subnet = "10.4.0.0/16".parse().unwrap();
        let first: Vec<_> = addresses(subnet).take(2).collect();
        assert_eq!(first, [Ipv4Addr::new(10, 4, 0, 1), Ipv4Addr::new(10, 4, 0, 2)]);
    }
}
