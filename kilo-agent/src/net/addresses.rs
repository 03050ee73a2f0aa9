//! Addresses of the WireGuard device.

use std::collections::BTreeSet;

use ipnet::IpNet;
use nix::errno::Errno;
use rtnetlink::{
    Handle,
    packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressMessage},
    },
};

use super::{Link, NetError, error::errno, is_local_scope};

/// Adds what is missing, then removes what is too much; link-local addresses
/// are the kernel's own.
pub(super) async fn apply(handle: &Handle, kilo: &Link, desired: &BTreeSet<IpNet>) -> Result<u64, NetError> {
    let mut writes = 0;
    for net in desired.iter().filter(|net| !kilo.addresses.contains(net)) {
        let request = handle.address().add(kilo.index, net.addr(), net.prefix_len());
        match request.execute().await {
            Err(error) if errno(&error) == Some(Errno::EEXIST as i32) => {}
            other => other.map_err(NetError::at(format!("add address {net} to {}", kilo.name)))?,
        }
        writes += 1;
    }
    for net in kilo.addresses.iter().filter(|net| !desired.contains(net) && !is_local_scope(net.addr())) {
        let mut message = AddressMessage::default();
        message.header.index = kilo.index;
        message.header.prefix_len = net.prefix_len();
        message.header.family = if net.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        message.attributes.push(AddressAttribute::Local(net.addr()));
        match handle.address().del(message).execute().await {
            Err(error) if errno(&error) == Some(Errno::EADDRNOTAVAIL as i32) => {}
            other => other.map_err(NetError::at(format!("remove address {net} from {}", kilo.name)))?,
        }
        writes += 1;
    }
    Ok(writes)
}
