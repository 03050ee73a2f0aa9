//! Next hops the kernel keeps resolved (`ip neigh … managed`), marked with
//! [`PROTOCOL`].

use std::{collections::BTreeSet, fs, net::IpAddr};

use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_REPLACE},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourMessage},
        route::RouteProtocol,
    },
};

use super::{NetError, PROTOCOL, Refused, Rtnl, addresses::keep};

/// Interface index and address.
pub type Neighbour = (u32, IpAddr);

/// Default of `gc_thresh1`: up to this many neighbours, the kernel keeps all.
const ALWAYS: usize = 128;

/// A warning with a remedy when the neighbour table is too small for these addresses, all of them on-link;
/// `None` when it is large enough or its size cannot be read.
///
/// The kernel has one table per family for all network namespaces of the machine. From `gc_thresh2` on it
/// forgets neighbours that were not used for seconds; beyond `gc_thresh3` it accepts no new ones and drops
/// their packets (kernel Documentation/networking/ip-sysctl).
pub fn table_warning(neighbours: impl Iterator<Item = IpAddr>) -> Option<String> {
    let (v4, v6): (Vec<_>, Vec<_>) = neighbours.partition(IpAddr::is_ipv4);
    [("ipv4", v4.len()), ("ipv6", v6.len())].into_iter().find_map(|(family, count)| {
        if count <= ALWAYS {
            return None;
        }
        let path = format!("/proc/sys/net/{family}/neigh/default/gc_thresh2");
        warning(count, fs::read_to_string(path).ok()?.trim().parse().ok()?, family)
    })
}

fn warning(count: usize, size: usize, family: &str) -> Option<String> {
    let wanted = (count * 4).next_power_of_two();
    (count > size).then(|| {
        format!(
            "this node sends to {count} nodes and peers on its own networks, and the kernel's neighbour table, which all \
             containers of this host share, is made for {size}; when it is full, packets to nodes are lost \
             (\"neighbor table overflow\" in the kernel's log). Enlarge it: sysctl net.{family}.neigh.default.gc_thresh3={} \
             net.{family}.neigh.default.gc_thresh2={wanted}",
            wanted * 2
        )
    })
}

/// Neighbours that this agent has made.
pub async fn read(rtnl: &Rtnl) -> Result<BTreeSet<Neighbour>, NetError> {
    let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
    let answers = rtnl.dump("list neighbours", request).await?;
    Ok(answers
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewNeighbour(neighbour) => parse(&neighbour),
            _ => None,
        })
        .collect())
}

fn parse(message: &NeighbourMessage) -> Option<Neighbour> {
    let (mut ours, mut address) = (false, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Protocol(protocol) => ours = u8::from(*protocol) == PROTOCOL,
            NeighbourAttribute::Destination(NeighbourAddress::Inet(found)) => address = Some((*found).into()),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(found)) => {
                address = Some((*found).into());
            }
            _ => {}
        }
    }
    address.filter(|_| ours).map(|address| (message.header.ifindex, address))
}

/// Brings our neighbours to the wanted ones; returns the number of writes.
pub(super) async fn apply(
    rtnl: &Rtnl,
    wanted: &BTreeSet<Neighbour>,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let present = read(rtnl).await?;
    let mut writes = 0;
    for neighbour in wanted.difference(&present) {
        let mut message = message(*neighbour);
        message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        let message = RouteNetlinkMessage::NewNeighbour(message);
        let what = format!("keep neighbour {} resolved", neighbour.1);
        writes += keep(refused, rtnl.write(&what, message, NLM_F_CREATE | NLM_F_REPLACE).await)?;
    }
    for neighbour in present.difference(wanted) {
        let message = RouteNetlinkMessage::DelNeighbour(message(*neighbour));
        match rtnl.write(&format!("let go of neighbour {}", neighbour.1), message, 0).await {
            // It went with its interface.
            Err(error) if matches!(error.errno(), Some(nix::libc::ENOENT | nix::libc::ENODEV)) => {}
            other => writes += keep(refused, other)?,
        }
    }
    Ok(writes)
}

fn message((ifindex, address): Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = ifindex;
    message.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }));
    message.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::from(PROTOCOL)));
    message
}

#[cfg(test)]
mod tests {
    use super::warning;

    #[test]
    fn a_table_smaller_than_the_neighbours_is_warned_of_with_sizes_that_suffice() {
        assert_eq!(warning(512, 512, "ipv4"), None);
        let text = warning(1000, 512, "ipv6").expect("a warning");
        assert!(text.contains("sends to 1000 nodes") && text.contains("made for 512"), "{text}");
        assert!(
            text.ends_with("net.ipv6.neigh.default.gc_thresh3=8192 net.ipv6.neigh.default.gc_thresh2=4096"),
            "{text}"
        );
    }
}
