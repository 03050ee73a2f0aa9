//! Links: reading them all, and the few changes made to ours.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use futures::TryStreamExt as _;
use ipnet::IpNet;
use nix::errno::Errno;
use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkWireguard,
    packet_route::{
        address::AddressAttribute,
        link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo},
    },
};

use super::{NetError, error::errno, is_local_scope};
use crate::plan::HostLinks;

/// What a link is made by, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Kernel WireGuard.
    Wireguard,
    /// TUN device (userspace WireGuard).
    Tun,
    /// Bridge.
    Bridge,
    /// One end of a veth pair.
    Veth,
    /// IP-in-IP tunnel.
    IpTunnel,
    /// Anything else, physical interfaces too.
    Other,
}

/// One link with its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// What it is.
    pub kind: LinkKind,
    /// Administratively up.
    pub up: bool,
    /// Is the loopback device.
    pub loopback: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Addresses with prefix lengths, in the kernel's order (primary first).
    pub addresses: Vec<IpNet>,
    /// Index of the bridge it is a port of.
    pub controller: Option<u32>,
}

pub(super) async fn list(handle: &Handle) -> Result<Vec<Link>, NetError> {
    let mut links = BTreeMap::new();
    let mut messages = handle.link().get().execute();
    while let Some(message) = messages.try_next().await.map_err(NetError::at("list links"))? {
        let mut link = Link {
            index: message.header.index,
            name: String::new(),
            kind: LinkKind::Other,
            up: message.header.flags.contains(LinkFlags::Up),
            loopback: message.header.flags.contains(LinkFlags::Loopback),
            mtu: 0,
            addresses: Vec::new(),
            controller: None,
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::Controller(index) => link.controller = Some(index),
                LinkAttribute::LinkInfo(infos) => {
                    link.kind = infos
                        .iter()
                        .find_map(|info| match info {
                            LinkInfo::Kind(InfoKind::Wireguard) => Some(LinkKind::Wireguard),
                            LinkInfo::Kind(InfoKind::Tun) => Some(LinkKind::Tun),
                            LinkInfo::Kind(InfoKind::Bridge) => Some(LinkKind::Bridge),
                            LinkInfo::Kind(InfoKind::Veth) => Some(LinkKind::Veth),
                            LinkInfo::Kind(InfoKind::IpIp) => Some(LinkKind::IpTunnel),
                            _ => None,
                        })
                        .unwrap_or(LinkKind::Other);
                }
                _ => {}
            }
        }
        links.insert(link.index, link);
    }
    let mut messages = handle.address().get().execute();
    while let Some(message) = messages.try_next().await.map_err(NetError::at("list addresses"))? {
        // On point-to-point links IFA_LOCAL is ours and IFA_ADDRESS the other end's.
        let find =
            |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
        let local = find(|attribute| match attribute {
            AddressAttribute::Local(ip) => Some(*ip),
            _ => None,
        });
        let address = find(|attribute| match attribute {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        });
        if let Some(ip) = local.or(address)
            && let Ok(net) = IpNet::new(ip, message.header.prefix_len)
            && let Some(link) = links.get_mut(&message.header.index)
        {
            link.addresses.push(net);
        }
    }
    Ok(links.into_values().collect())
}

pub(super) async fn create_wireguard(handle: &Handle, name: &str) -> Result<(), NetError> {
    let what = format!("create WireGuard device {name}");
    match handle.link().add(LinkWireguard::new(name).build()).execute().await {
        Ok(()) => Ok(()),
        Err(error) if errno(&error) == Some(Errno::EOPNOTSUPP as i32) => Err(NetError::Unsupported(what)),
        Err(error) => Err(NetError::at(what)(error)),
    }
}

pub(super) async fn set_mtu(handle: &Handle, index: u32, mtu: u32) -> Result<(), NetError> {
    let message = LinkMessageBuilder::<LinkUnspec>::new().index(index).mtu(mtu).build();
    handle.link().set(message).execute().await.map_err(NetError::at(format!("set MTU {mtu} on link {index}")))
}

pub(super) async fn set_up(handle: &Handle, index: u32) -> Result<(), NetError> {
    let message = LinkMessageBuilder::<LinkUnspec>::new().index(index).up().build();
    handle.link().set(message).execute().await.map_err(NetError::at(format!("set link {index} up")))
}

pub(super) async fn delete(handle: &Handle, index: u32) -> Result<(), NetError> {
    match handle.link().del(index).execute().await {
        Err(error) if errno(&error) == Some(Errno::ENODEV as i32) => Ok(()),
        other => other.map_err(NetError::at(format!("delete link {index}"))),
    }
}

/// Interfaces that lead out of the host: up, with an address that is routed,
/// and neither loopback nor a tunnel nor a bridge or port for pods.
pub fn host_links(links: &[Link], kilo: &str, private: Option<IpAddr>, pod_cidrs: &[IpNet]) -> HostLinks {
    let mut host = HostLinks::default();
    for link in links {
        if link.name == kilo {
            host.kilo = link.index;
            continue;
        }
        if !leads_out(link, pod_cidrs) {
            continue;
        }
        if private.is_some_and(|ip| link.addresses.iter().any(|net| net.addr() == ip)) {
            host.private = Some(link.index);
        }
        let first = link.addresses.iter().find_map(|net| match net.addr() {
            IpAddr::V4(ip) if !is_local_scope(IpAddr::V4(ip)) => Some(ip),
            _ => None,
        });
        if let Some(addr) = first {
            host.uplinks.insert(link.index, addr);
            host.mtus.insert(link.index, link.mtu);
        }
    }
    host
}

fn leads_out(link: &Link, pod_cidrs: &[IpNet]) -> bool {
    let for_pods = link.addresses.iter().any(|net| pod_cidrs.iter().any(|cidr| cidr.contains(&net.addr())));
    let tunnel = matches!(link.kind, LinkKind::Wireguard | LinkKind::Tun | LinkKind::IpTunnel);
    link.up
        && !link.loopback
        && !tunnel
        && !for_pods
        && link.controller.is_none()
        && !link.name.starts_with("cilium_")
}

/// Address of a link that is not one of the CNI's, in the order of discovery.
pub(super) fn routed_addresses(link: &Link) -> impl Iterator<Item = IpNet> + '_ {
    link.addresses.iter().copied().filter(|net| !is_local_scope(net.addr()))
}

/// Addresses of nodes of the own location whose interface is looked up.
pub fn ipv4_only(addresses: impl IntoIterator<Item = IpAddr>) -> Vec<Ipv4Addr> {
    addresses
        .into_iter()
        .filter_map(|ip| match ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
        .collect()
}
