//! Lists and changes links; [`host`] finds those that lead out of the host.

mod host;

use ipnet::IpNet;
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
    link::{LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage},
};

pub use self::host::{HostQuery, add_elsewhere, add_overlay, host_links};
pub(super) use self::host::{has_hosts_addresses, is_internal};
use super::{NetError, Rtnl};

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Kind as the kernel calls it (`wireguard`, `tun`, `veth`); empty for hardware.
    pub kind: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Most packets that may wait for the device (`txqueuelen`).
    pub queue: u32,
    /// Administratively up, whatever its carrier.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// What stands in front of the IP header of its packets.
    pub header: LinkHeader,
    /// Index of the bridge or bond it belongs to.
    pub controller: Option<u32>,
    /// Its other end, or the device below it, is in another network namespace.
    pub other_namespace: bool,
    /// Its addresses, in the kernel's order (the primary one first).
    pub addresses: Vec<Address>,
}

/// What stands in front of the IP header of an interface's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkHeader {
    /// 14 bytes: Ethernet, and loopback.
    #[default]
    Ethernet,
    /// Nothing: TUN, PPP, point-to-point GRE, WireGuard, modems.
    None,
    /// Something the programs cannot read, with the kernel's number of the link type (`ARPHRD_*`).
    Unknown(u16),
}

impl LinkHeader {
    /// The header on an interface of this link type (`include/uapi/linux/if_arp.h`).
    const fn of(link_type: u16, point_to_point: bool) -> Self {
        match link_type {
            // Ethernet, loopback.
            1 | 772 => Self::Ethernet,
            // GRE over IPv4 and IPv6 has its outer header there when it is not point-to-point.
            778 | 823 if !point_to_point => Self::Unknown(link_type),
            // PPP, raw IP (modems), IPIP, IPv6 tunnels, SIT, GRE over IPv4 and IPv6, none (TUN, WireGuard).
            512 | 519 | 768 | 769 | 776 | 778 | 823 | 0xfffe => Self::None,
            other => Self::Unknown(other),
        }
    }
}

/// An address of an interface, as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Address with its prefix length.
    pub net: IpNet,
    /// Valid everywhere (not link-local or host-local).
    pub global: bool,
    /// A second IPv4 address of the same network, or an IPv6 privacy address.
    pub secondary: bool,
    /// IPv6 address that is not to be used for new connections: tentative, a duplicate, or deprecated.
    pub unusable: bool,
    /// IPv6 address whose preferred lifetime has ended: used when there is no other.
    pub deprecated: bool,
}

/// All links with their addresses.
pub async fn list(rtnl: &Rtnl) -> Result<Vec<Link>, NetError> {
    let mut request = LinkMessage::default();
    request.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let mut links: Vec<Link> = rtnl
        .dump("list interfaces", RouteNetlinkMessage::GetLink(request))
        .await?
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) => Some(parse_link(link)),
            _ => None,
        })
        .collect();
    for (index, address) in addresses(rtnl).await? {
        if let Some(link) = links.iter_mut().find(|link| link.index == index) {
            link.addresses.push(address);
        }
    }
    Ok(links)
}

/// The link of that name, without addresses; `None` when there is none.
pub async fn by_name(rtnl: &Rtnl, name: &str) -> Result<Option<Link>, NetError> {
    let mut request = LinkMessage::default();
    request.attributes.push(LinkAttribute::IfName(name.to_owned()));
    single(rtnl.get("look up an interface", RouteNetlinkMessage::GetLink(request)).await)
}

/// The link of that index, without addresses; `None` when there is none.
pub async fn by_index(rtnl: &Rtnl, index: u32) -> Result<Option<Link>, NetError> {
    let mut request = LinkMessage::default();
    request.header.index = index;
    single(rtnl.get("look up an interface", RouteNetlinkMessage::GetLink(request)).await)
}

fn single(answer: Result<Vec<RouteNetlinkMessage>, NetError>) -> Result<Option<Link>, NetError> {
    match answer {
        Ok(messages) => Ok(messages.into_iter().find_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) => Some(parse_link(link)),
            _ => None,
        })),
        Err(error) if error.errno() == Some(nix::libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// All addresses of the namespace, each with its interface index.
pub(super) async fn addresses(rtnl: &Rtnl) -> Result<Vec<(u32, Address)>, NetError> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let answers = rtnl.dump("list addresses", request).await?;
    Ok(answers
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewAddress(address) => parse_address(&address),
            _ => None,
        })
        .collect())
}

fn parse_link(message: LinkMessage) -> Link {
    let flags = message.header.flags;
    let mut link = Link {
        index: message.header.index,
        up: flags.contains(LinkFlags::Up),
        loopback: flags.contains(LinkFlags::Loopback),
        header: LinkHeader::of(message.header.link_layer_type.into(), flags.contains(LinkFlags::Pointopoint)),
        ..Link::default()
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::TxQueueLen(packets) => link.queue = packets,
            LinkAttribute::Controller(index) => link.controller = Some(index),
            LinkAttribute::LinkNetNsId(_) => link.other_namespace = true,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        link.kind = kind.to_string();
                    }
                }
            }
            _ => {}
        }
    }
    link
}

fn parse_address(message: &AddressMessage) -> Option<(u32, Address)> {
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    let (mut local, mut address) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Flags(more) => flags |= *more,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the peer's, IFA_LOCAL ours.
    let net = IpNet::new(local.or(address)?, message.header.prefix_len).ok()?;
    let unusable = AddressFlags::Tentative | AddressFlags::Dadfailed | AddressFlags::Deprecated;
    Some((
        message.header.index,
        Address {
            net,
            global: message.header.scope == AddressScope::Universe,
            secondary: flags.contains(AddressFlags::Secondary),
            unusable: net.addr().is_ipv6() && flags.intersects(unusable),
            deprecated: net.addr().is_ipv6()
                && flags.contains(AddressFlags::Deprecated)
                && !flags.intersects(AddressFlags::Tentative | AddressFlags::Dadfailed),
        },
    ))
}

/// Pure: names of the interfaces that lead to pods and other containers. Their other ends are in other
/// network namespaces, and they have no address with a network: where the host is itself a container, its
/// uplink has one.
pub fn to_containers(links: &[Link]) -> Vec<&str> {
    let in_a_network = |link: &Link| {
        let mut addresses = link.addresses.iter().filter(|address| address.global);
        addresses.any(|address| address.net.prefix_len() < address.net.max_prefix_len())
    };
    let leads = links.iter().filter(|link| link.other_namespace && !in_a_network(link));
    leads.map(|link| &*link.name).collect()
}

/// Most packets that may wait for a WireGuard process. By default a TUN device has room for 500
/// (`TUN_READQ_SIZE`, drivers/net/tun.c), which is half a second at 1,000 packets a second: packets were lost
/// whenever the process waited longer for a processor.
const TUN_QUEUE: u32 = 2000;

/// Sets MTU (unless 0) and up flag where they differ, and enlarges the queue of a TUN device that has less;
/// returns the number of writes (0 or 1).
pub async fn bring_up(rtnl: &Rtnl, index: u32, mtu: u32) -> Result<usize, NetError> {
    let link = by_index(rtnl, index).await?.ok_or_else(|| NetError::Kernel {
        what: format!("interface with index {index} is gone; it is created again at the next reconcile"),
        source: std::io::Error::from_raw_os_error(nix::libc::ENODEV),
    })?;
    let mut message = LinkMessage::default();
    message.header.index = index;
    if mtu != 0 && link.mtu != mtu {
        message.attributes.push(LinkAttribute::Mtu(mtu));
    }
    if link.kind == "tun" && link.queue < TUN_QUEUE {
        message.attributes.push(LinkAttribute::TxQueueLen(TUN_QUEUE));
    }
    if !link.up {
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
    }
    if link.up && message.attributes.is_empty() {
        return Ok(0);
    }
    let what = format!("set interface {} up with MTU {mtu}", link.name);
    rtnl.write(&what, RouteNetlinkMessage::SetLink(message), 0).await.map(|()| 1)
}

/// Sets an interface down.
///
/// # Errors
/// When the kernel refuses.
pub async fn bring_down(rtnl: &Rtnl, index: u32) -> Result<(), NetError> {
    let mut down = LinkMessage::default();
    down.header.index = index;
    down.header.change_mask = LinkFlags::Up;
    rtnl.write("set an interface down", RouteNetlinkMessage::SetLink(down), 0).await
}

/// Deletes a link; false when it was gone already.
pub async fn delete(rtnl: &Rtnl, index: u32) -> Result<bool, NetError> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    match rtnl.write("delete an interface", RouteNetlinkMessage::DelLink(message), 0).await {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == Some(nix::libc::ENODEV) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives an interface this name; it is down afterwards, because older kernels do not rename an interface that
/// is up.
///
/// # Errors
/// When the kernel refuses.
pub async fn rename(rtnl: &Rtnl, index: u32, name: &str) -> Result<(), NetError> {
    bring_down(rtnl, index).await?;
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    rtnl.write("rename an interface", RouteNetlinkMessage::SetLink(message), 0).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_type_says_what_stands_before_the_ip_header() {
        use LinkHeader::{Ethernet, None, Unknown};
        for (link_type, point_to_point, header) in [
            (1, false, Ethernet),
            (772, false, Ethernet),
            (0xfffe, true, None),
            (512, true, None),
            (519, false, None),
            (776, false, None),
            (778, true, None),
            (778, false, Unknown(778)),
            (823, false, Unknown(823)),
            (32, false, Unknown(32)),
        ] {
            assert_eq!(LinkHeader::of(link_type, point_to_point), header, "{link_type}");
        }
    }

    #[test]
    fn what_leads_to_containers_is_told_from_what_leads_a_container_out() {
        let link = |name: &str, other_namespace: bool, net: Option<&str>| Link {
            name: name.into(),
            other_namespace,
            addresses: net
                .map(|net| Address {
                    net: net.parse().unwrap(),
                    global: !net.starts_with("fe80"),
                    secondary: false,
                    unusable: false,
                    deprecated: false,
                })
                .into_iter()
                .collect(),
            ..Link::default()
        };
        let links = [
            link("eth0", true, Some("172.18.0.2/16")),
            link("eth1", false, None),
            link("kube-bridge", false, Some("10.42.1.1/24")),
            link("veth1", true, None),
            link("lxc2", true, Some("fe80::2/64")),
            link("ptp3", true, Some("10.42.1.1/32")),
        ];
        assert_eq!(to_containers(&links), ["veth1", "lxc2", "ptp3"]);
    }
}
