//! Next hops the kernel keeps resolved (`ip neigh … managed`), marked with
//! [`PROTOCOL`].

use std::{collections::BTreeSet, net::IpAddr};

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

/// Those of ours.
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

/// Adds and removes; returns the number of writes.
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
