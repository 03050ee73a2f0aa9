//! Tunnel devices for what the programs cannot encapsulate or decapsulate in place. Both are "external": the
//! programs say where each packet goes. As they also decapsulate anybody's packets, they are up only while a
//! program of ours checks what arrives on them.

use std::collections::BTreeSet;

use kilo_common::{encap::VXLAN_DEVICE_MAC, maps::VXLAN_PORT};
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoData, InfoIpTunnel, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage},
    },
};

use super::{NetError, Rtnl, links};

/// Name of the VXLAN device.
pub const VXLAN: &str = "kilo-vxlan";
/// Name of the IPIP device.
pub const IPIP: &str = "kilo-ipip";
/// Not a limit: routes and hops have the MTUs. The kernel lowers it to what it allows.
const MTU: u32 = 65_000;

/// The present tunnel devices.
#[derive(Debug, Default)]
pub struct Tunnels {
    /// Index of [`VXLAN`].
    pub vxlan: Option<u32>,
    /// Index of [`IPIP`].
    pub ipip: Option<u32>,
    /// Indexes of the devices that are not up.
    pub down: BTreeSet<u32>,
    /// How many were created.
    pub created: u64,
    /// Why a device is not available.
    pub problems: Vec<NetError>,
}

impl Tunnels {
    /// Sets each device up that a program guards, and all others down: the kernel would forward whatever
    /// anybody sends to them. Returns the number of writes.
    ///
    /// # Errors
    /// When the kernel refuses for one of them; the other is set nevertheless.
    pub async fn guard(&mut self, rtnl: &Rtnl, unguarded: &BTreeSet<u32>) -> Result<u64, NetError> {
        let (mut writes, mut failed) = (0, None);
        for index in self.vxlan.into_iter().chain(self.ipip) {
            let written = match (unguarded.contains(&index), self.down.contains(&index)) {
                (false, true) => links::bring_up(rtnl, index, 0).await.map(|count| count as u64),
                (true, false) => links::bring_down(rtnl, index).await.map(|()| 1),
                _ => continue,
            };
            match written {
                Ok(count) => {
                    writes += count;
                    if !self.down.remove(&index) {
                        self.down.insert(index);
                    }
                }
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        failed.map_or(Ok(writes), Err)
    }

    fn found(&mut self, device: Device) -> u32 {
        self.created += u64::from(device.created);
        if !device.up {
            self.down.insert(device.index);
        }
        device.index
    }
}

#[derive(Clone, Copy)]
struct Device {
    index: u32,
    up: bool,
    created: bool,
}

/// Finds the devices, or creates them down: see [`Tunnels::guard`]. A kernel without IPIP, or whose only
/// external IPIP device belongs to something else (Cilium), does without: VXLAN suffices.
pub async fn ensure(rtnl: &Rtnl) -> Tunnels {
    let mut tunnels = Tunnels::default();
    let vxlan = vec![
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Port(VXLAN_PORT),
        InfoVxlan::Learning(false),
        InfoVxlan::UDPZeroCsumTX(true),
        InfoVxlan::UDPZeroCsumRX(true),
    ];
    match device(rtnl, VXLAN, InfoKind::Vxlan, InfoData::Vxlan(vxlan), Some(VXLAN_DEVICE_MAC)).await {
        Ok(device) => tunnels.vxlan = Some(tunnels.found(device)),
        Err(error) => tunnels.problems.push(error),
    }
    let ipip = vec![InfoIpTunnel::CollectMetadata];
    match device(rtnl, IPIP, InfoKind::IpIp, InfoData::IpTunnel(ipip), None).await {
        Ok(device) => tunnels.ipip = Some(tunnels.found(device)),
        Err(error) if matches!(error.errno(), Some(nix::libc::EOPNOTSUPP | nix::libc::EEXIST)) => {}
        Err(error) => tunnels.problems.push(error),
    }
    tunnels
}

/// Removes both devices; returns the number of writes.
pub async fn remove(rtnl: &Rtnl) -> Result<usize, NetError> {
    let mut writes = 0;
    for (name, kind) in [(VXLAN, "vxlan"), (IPIP, "ipip")] {
        if let Some(link) = links::by_name(rtnl, name).await?.filter(|link| link.kind == kind) {
            writes += usize::from(links::delete(rtnl, link.index).await?);
        }
    }
    Ok(writes)
}

async fn device(
    rtnl: &Rtnl,
    name: &'static str,
    kind: InfoKind,
    data: InfoData,
    mac: Option<[u8; 6]>,
) -> Result<Device, NetError> {
    let expected = kind.to_string();
    let found = links::by_name(rtnl, name).await?;
    let created = found.is_none();
    let link = match found {
        Some(link) => link,
        None => {
            let mut message = LinkMessage::default();
            message.attributes.push(LinkAttribute::IfName(name.to_owned()));
            message.attributes.push(LinkAttribute::Mtu(MTU));
            if let Some(mac) = mac {
                message.attributes.push(LinkAttribute::Address(mac.to_vec()));
            }
            message
                .attributes
                .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind), LinkInfo::Data(data)]));
            let message = RouteNetlinkMessage::NewLink(message);
            rtnl.write(&format!("create interface {name}"), message, NLM_F_CREATE | NLM_F_EXCL).await?;
            links::by_name(rtnl, name).await?.ok_or_else(|| NetError::Missing(format!("link {name}")))?
        }
    };
    if link.kind != expected {
        return Err(NetError::Missing(format!(
            "link {name} of kind {expected}: there is one of kind {:?}; remove it",
            link.kind
        )));
    }
    Ok(Device { index: link.index, up: link.up, created })
}
