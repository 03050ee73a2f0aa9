//! Addresses of the WireGuard device.
//!
//! The device is ours, and so is every address on it that is not link-local: one left by an earlier agent is
//! removed. Of other interfaces, only bridges of our CNI configuration are touched, and only in subnets that
//! the node no longer has.

use std::collections::BTreeSet;

use ipnet::IpNet;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    },
};

use super::{NetError, Refused, Rtnl, error, links};

/// Difference between the present and the wanted addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// To add, before anything is removed.
    pub add: Vec<IpNet>,
    /// To remove once the others are there.
    pub remove: Vec<IpNet>,
}

impl Changes {
    /// Pure: addresses to add before anything is removed; IPv4 addresses of a network that loses another one
    /// are added as host prefixes.
    fn bridged(&self, wanted: &BTreeSet<IpNet>) -> BTreeSet<IpNet> {
        let shrinks =
            |net: &IpNet| net.addr().is_ipv4() && self.remove.iter().any(|gone| gone.trunc() == net.trunc());
        let whole = self.add.iter().filter(|net| !shrinks(net)).copied();
        whole.chain(wanted.iter().filter(|net| shrinks(net)).map(|net| net.addr().into())).collect()
    }
}

/// Pure: what has to change.
pub fn diff(current: &BTreeSet<IpNet>, wanted: &BTreeSet<IpNet>) -> Changes {
    Changes {
        add: wanted.difference(current).copied().collect(),
        remove: current.difference(wanted).copied().collect(),
    }
}

/// Addresses of an interface that this module manages.
pub async fn read(rtnl: &Rtnl, index: u32) -> Result<BTreeSet<IpNet>, NetError> {
    Ok(links::addresses(rtnl)
        .await?
        .into_iter()
        .filter(|(of, address)| *of == index && address.global)
        .map(|(_, address)| address.net)
        .collect())
}

/// Brings the interface to the wanted addresses; returns the number of writes.
pub async fn apply(
    rtnl: &Rtnl,
    index: u32,
    wanted: &BTreeSet<IpNet>,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let mut writes = 0;
    // Removing a network's primary address removes its secondary ones, too (promote_secondaries=0), and
    // removing the last address removes all routes through the device: the new one is a host prefix until the
    // second round.
    for _ in 0..2 {
        let changes = diff(&read(rtnl, index).await?, wanted);
        for net in changes.bridged(wanted) {
            let what = format!("add address {net}");
            let message = RouteNetlinkMessage::NewAddress(message(index, net));
            writes += keep(refused, rtnl.write(&what, message, NLM_F_CREATE | NLM_F_EXCL).await)?;
        }
        for net in &changes.remove {
            let what = format!("remove address {net}");
            let message = RouteNetlinkMessage::DelAddress(message(index, *net));
            match rtnl.write(&what, message, 0).await {
                // It went with its network's primary address.
                Err(error) if error.errno() == Some(nix::libc::EADDRNOTAVAIL) => {}
                other => writes += keep(refused, other)?,
            }
        }
        if changes.remove.is_empty() || !refused.is_empty() {
            break;
        }
    }
    Ok(writes)
}

/// Removes the addresses of a bridge that lie in these subnets; returns the number of writes. The CNI plugin
/// adds a second IPv6 gateway and leaves the first: with it, the kernel would deliver packets for the node
/// that has the subnet now to this node's bridge.
pub async fn leave(rtnl: &Rtnl, bridge: &str, subnets: &[IpNet]) -> Result<usize, NetError> {
    let Some(link) = links::by_name(rtnl, bridge).await?.filter(|link| link.kind == "bridge") else {
        return Ok(0);
    };
    let mut refused = Vec::new();
    let mut writes = 0;
    for net in read(rtnl, link.index).await? {
        if subnets.contains(&net.trunc()) {
            let what = format!("remove address {net} of {bridge}");
            let message = RouteNetlinkMessage::DelAddress(message(link.index, net));
            writes += keep(&mut refused, rtnl.write(&what, message, 0).await)?;
        }
    }
    error::unless(refused, writes)
}

/// Counts a write, or notes its refusal; only a broken socket stops the rest.
pub(super) fn keep(refused: &mut Vec<Refused>, result: Result<(), NetError>) -> Result<usize, NetError> {
    match result {
        Ok(()) => Ok(1),
        Err(NetError::Kernel { what, source }) => {
            refused.push(Refused { what, source });
            Ok(0)
        }
        Err(other) => Err(other),
    }
}

fn message(index: u32, net: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = if net.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.prefix_len = net.prefix_len();
    message.header.scope = AddressScope::Universe;
    message.header.index = index;
    if net.addr().is_ipv6() {
        // A tunnel has no neighbours to ask, and no route may name an address that is still being checked.
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    message.attributes.push(AddressAttribute::Local(net.addr()));
    message.attributes.push(AddressAttribute::Address(net.addr()));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sets_need_nothing_and_others_only_their_difference() {
        let set =
            |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<IpNet>>();
        assert_eq!(diff(&set(&["10.4.0.1/16"]), &set(&["10.4.0.1/16"])), Changes::default());
        let changes = diff(&set(&["10.4.0.1/16", "fd00::1/64"]), &set(&["10.4.0.2/16", "fd00::1/64"]));
        assert_eq!(changes.add, vec!["10.4.0.2/16".parse::<IpNet>().unwrap()]);
        assert_eq!(changes.bridged(&set(&["10.4.0.2/16", "fd00::1/64"])), set(&["10.4.0.2/32"]));
        let elsewhere = diff(&set(&["10.4.0.1/16"]), &set(&["10.9.0.1/16"]));
        assert_eq!(elsewhere.bridged(&set(&["10.9.0.1/16"])), set(&["10.9.0.1/16"]));
        assert_eq!(changes.remove, vec!["10.4.0.1/16".parse::<IpNet>().unwrap()]);
    }
}
