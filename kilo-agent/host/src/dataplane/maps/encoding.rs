//! Converts between the tables of a plan and the content of the maps, where each family has its own map or
//! IPv4 is mapped into IPv6.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kilo_common::maps::{
    FAMILY_V4, FAMILY_V6, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, Hop, MASQ_ADDR_OWN,
    MASQ_ADDR_SHARED, MasqAddr, NodeValue, PrefixValue, SignalKey, TUNNEL_IPIP, TUNNEL_NONE, TUNNEL_VXLAN,
};
use kilo_core::{
    flat_map::{FlatMap, Key},
    settings::Tunnel,
    tables::{self, Tables},
};

use super::Content;

/// The desired content, in key order. Tables that already have the form of the map are not copied.
pub(super) struct Desired<'a> {
    pub(super) tables: &'a Tables,
    pub(super) masq_src: FlatMap<Ipv6Net, u32>,
    pub(super) masq_dst: FlatMap<Ipv6Net, u32>,
    pub(super) masq_addr: BTreeMap<Towards, MasqAddr>,
    pub(super) signal_key: BTreeMap<Ipv6Addr, SignalKey>,
}

impl<'a> Desired<'a> {
    pub(super) fn new(tables: &'a Tables) -> Self {
        Self {
            tables,
            masq_src: mapped(&tables.masq_src),
            masq_dst: mapped(&tables.masq_dst),
            masq_addr: masq_addrs(tables),
            signal_key: tables.signal_key.iter().map(|(addr, key)| (in_v6(*addr), *key)).collect(),
        }
    }

    pub(super) fn hop(&self) -> impl Iterator<Item = (u32, Hop)> {
        self.tables.hop.iter().filter_map(|(id, hop)| Some((*id, raw_hop(hop)?)))
    }

    pub(super) fn prefix_v4(&self) -> impl Iterator<Item = (Ipv4Net, PrefixValue)> {
        self.tables.prefix.iter().filter_map(|(prefix, value)| match prefix {
            IpNet::V4(prefix) => Some((*prefix, *value)),
            IpNet::V6(_) => None,
        })
    }

    pub(super) fn prefix_v6(&self) -> impl Iterator<Item = (Ipv6Net, PrefixValue)> {
        self.tables.prefix.iter().filter_map(|(prefix, value)| match prefix {
            IpNet::V4(_) => None,
            IpNet::V6(prefix) => Some((*prefix, *value)),
        })
    }

    pub(super) fn signal_key(&self) -> impl Iterator<Item = (Ipv6Addr, SignalKey)> {
        self.signal_key.iter().map(|(addr, key)| (*addr, *key))
    }

    pub(super) fn node_v4(&self) -> impl Iterator<Item = (Ipv4Addr, NodeValue)> {
        self.tables.node.iter().filter_map(|(addr, value)| match addr {
            IpAddr::V4(addr) => Some((*addr, *value)),
            IpAddr::V6(_) => None,
        })
    }

    pub(super) fn node_v6(&self) -> impl Iterator<Item = (Ipv6Addr, NodeValue)> {
        self.tables.node.iter().filter_map(|(addr, value)| match addr {
            IpAddr::V4(_) => None,
            IpAddr::V6(addr) => Some((*addr, *value)),
        })
    }
}

/// Number of array slots up to the highest id.
pub(super) fn slots(last: Option<u32>) -> usize {
    last.map_or(0, |id| id as usize + 1)
}

/// Where the masquerading maps, which are shared by both families, have IPv4: `::ffff:0:0/96` (RFC 4291,
/// section 2.5.5.2).
const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);
/// Value of an entry that only keeps shorter prefixes from matching.
const MASQ_NOTHING: u32 = 0;

fn mapped(table: &FlatMap<IpNet, u32>) -> FlatMap<Ipv6Net, u32> {
    let v4 = table.iter().filter_map(|(prefix, value)| match prefix {
        IpNet::V4(v4) => {
            let length = MAPPED.prefix_len() + v4.prefix_len();
            Some((Ipv6Net::new_assert(v4.network().to_ipv6_mapped(), length), *value))
        }
        IpNet::V6(_) => None,
    });
    let v6 = || {
        table.since(&IpNet::V6(Ipv6Net::default())).iter().filter_map(|(prefix, value)| match prefix {
            IpNet::V4(_) => None,
            IpNet::V6(v6) => Some((*v6, *value)),
        })
    };
    // IPv4 sorts between the IPv6 prefixes before and behind its range.
    let before = v6().filter(|(prefix, _)| *prefix < MAPPED);
    let behind = v6().filter(|(prefix, _)| *prefix >= MAPPED);
    // An IPv6 prefix that contains the range of IPv4, such as `::/0`, must not match IPv4.
    let is_held = v6().any(|(prefix, _)| prefix != MAPPED && prefix.contains(&MAPPED));
    let nothing = is_held.then_some((MAPPED, MASQ_NOTHING));
    before.chain(nothing).chain(v4).chain(behind).collect()
}

/// An interface and a prefix of destinations, IPv4 as `::ffff:a.b.c.d`: a key of `masq_addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Towards(pub(super) u32, pub(super) Ipv6Net);

impl Key for Towards {
    type Rank = (u32, <Ipv6Net as Key>::Rank);
    fn rank(&self) -> Self::Rank {
        (self.0, self.1.rank())
    }
}

/// An address of either family, IPv4 as `::ffff:a.b.c.d`.
const fn in_v6(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    }
}

/// Content of `masq_addr`: the addresses by interface and destination, and under [`MASQ_ADDR_OWN`] each
/// address that an uplink gives to packets.
fn masq_addrs(tables: &Tables) -> BTreeMap<Towards, MasqAddr> {
    let map = in_v6;
    let mut all = BTreeMap::new();
    let (mut own, mut wide) = (BTreeMap::new(), Vec::new());
    for (&(ifindex, prefix), &addr) in &tables.masq_addr {
        let prefix = match prefix {
            IpNet::V4(net) => {
                Ipv6Net::new_assert(map(net.network().into()), MAPPED.prefix_len() + net.prefix_len())
            }
            IpNet::V6(net) => net.trunc(),
        };
        if prefix != MAPPED && prefix.contains(&MAPPED) {
            wide.push(ifindex);
        }
        all.insert(Towards(ifindex, prefix), MasqAddr { addr: map(addr).octets(), ifindex });
        note_giver(&mut own, map(addr), ifindex);
    }
    for (&ifindex, device) in &tables.device {
        let [v4, v6] = [Ipv4Addr::from(device.masq_v4).to_ipv6_mapped(), Ipv6Addr::from(device.masq_v6)];
        if wide.contains(&ifindex) {
            // A shorter prefix is meant for IPv6 only.
            let usual = MasqAddr { addr: v4.octets(), ifindex };
            all.entry(Towards(ifindex, MAPPED)).or_insert(usual);
        }
        // Packets that leave by the WireGuard device get one address, which may be an uplink's, too.
        if ifindex != tables.config.kilo_ifindex {
            note_giver(&mut own, v4, ifindex);
            note_giver(&mut own, v6, ifindex);
        }
    }
    let nothing = [Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), Ipv6Addr::UNSPECIFIED];
    own.retain(|addr, _| !nothing.contains(addr));
    all.extend(own.into_iter().map(|(addr, ifindex)| {
        (Towards(MASQ_ADDR_OWN, addr.into()), MasqAddr { addr: addr.octets(), ifindex })
    }));
    all
}

/// Notes that this interface gives the address to packets.
fn note_giver(own: &mut BTreeMap<Ipv6Addr, u32>, addr: Ipv6Addr, ifindex: u32) {
    let given_by = own.entry(addr).or_insert(ifindex);
    if *given_by != ifindex {
        *given_by = MASQ_ADDR_SHARED;
    }
}

/// The inverse of [`masq_addrs`], without the addresses that are in `device`.
fn unmapped_addrs(content: &Content) -> BTreeMap<(u32, IpNet), IpAddr> {
    let of_interfaces = content.masq_addr.iter().filter(|(Towards(ifindex, _), _)| *ifindex != MASQ_ADDR_OWN);
    let all = of_interfaces.filter_map(|(Towards(ifindex, net), value)| {
        let addr = Ipv6Addr::from(value.addr).to_canonical();
        let prefix = match net.addr().to_ipv4_mapped() {
            Some(v4) if MAPPED.contains(net) => {
                IpNet::V4(Ipv4Net::new(v4, net.prefix_len() - MAPPED.prefix_len()).ok()?)
            }
            _ => IpNet::V6(*net),
        };
        let usual = content.device.get(ifindex).map(|device| IpAddr::from(device.masq_v4));
        let is_usual = prefix.prefix_len() == 0 && prefix.addr().is_ipv4() && usual == Some(addr);
        (!is_usual).then_some(((*ifindex, prefix), addr))
    });
    all.collect()
}

/// The inverse of [`mapped`].
fn unmapped(table: &BTreeMap<Ipv6Net, u32>) -> FlatMap<IpNet, u32> {
    let prefix = |prefix: &Ipv6Net| match prefix.addr().to_ipv4_mapped() {
        Some(v4) if MAPPED.contains(prefix) => {
            Ipv4Net::new(v4, prefix.prefix_len() - MAPPED.prefix_len()).map_or(IpNet::V6(*prefix), IpNet::V4)
        }
        _ => IpNet::V6(*prefix),
    };
    table.iter().filter(|(_, value)| **value != MASQ_NOTHING).map(|(p, value)| (prefix(p), *value)).collect()
}

impl From<&Content> for Tables {
    fn from(content: &Content) -> Self {
        Self {
            prefix: (content.prefix_v4.iter().map(|(prefix, value)| (IpNet::V4(*prefix), *value)))
                .chain(content.prefix_v6.iter().map(|(prefix, value)| (IpNet::V6(*prefix), *value)))
                .collect(),
            hop: content.hop.iter().filter_map(|(id, hop)| Some((*id, plan_hop(hop)?))).collect(),
            lead: content.lead,
            lead_of_term: None,
            signal_key: content
                .signal_key
                .iter()
                .map(|(addr, key)| (IpAddr::V6(*addr).to_canonical(), *key))
                .collect(),
            node: content.held_senders(),
            masq_src: unmapped(&content.masq_src),
            masq_dst: unmapped(&content.masq_dst),
            device: content.device.clone(),
            masq_addr: unmapped_addrs(content),
            config: content.config,
        }
    }
}

/// The inverse of [`raw_hop`]; `None` for a hop that drops.
fn plan_hop(hop: &Hop) -> Option<tables::Hop> {
    let addr = |octets: [u8; 16]| match (hop.family, octets) {
        (FAMILY_V6, octets) => IpAddr::from(octets),
        (_, [a, b, c, d, ..]) => IpAddr::from([a, b, c, d]),
    };
    match hop.kind {
        HOP_KIND_LOCAL => Some(tables::Hop::Local),
        HOP_KIND_WIREGUARD => Some(tables::Hop::Wireguard),
        HOP_KIND_NODE => Some(tables::Hop::Node {
            tunnel: match hop.tunnel {
                TUNNEL_NONE => Tunnel::None,
                TUNNEL_IPIP => Tunnel::Ipip,
                TUNNEL_VXLAN => Tunnel::Vxlan,
                _ => return None,
            },
            ifindex: hop.ifindex,
            mtu: hop.mtu,
            local: addr(hop.local),
            remote: addr(hop.remote),
        }),
        _ => None,
    }
}

/// A hop in the form of the map; `None` when its addresses are of two families: packets to it are dropped and
/// counted.
fn raw_hop(hop: &tables::Hop) -> Option<Hop> {
    match *hop {
        tables::Hop::Local => Some(Hop { kind: HOP_KIND_LOCAL, ..Hop::default() }),
        tables::Hop::Wireguard => Some(Hop { kind: HOP_KIND_WIREGUARD, ..Hop::default() }),
        tables::Hop::Node { local, remote, .. } if local.is_ipv4() != remote.is_ipv4() => None,
        tables::Hop::Node { tunnel, ifindex, mtu, local, remote } => Some(Hop {
            kind: HOP_KIND_NODE,
            tunnel: match tunnel {
                Tunnel::None => TUNNEL_NONE,
                Tunnel::Ipip => TUNNEL_IPIP,
                Tunnel::Vxlan => TUNNEL_VXLAN,
            },
            ifindex,
            mtu,
            family: if remote.is_ipv4() { FAMILY_V4 } else { FAMILY_V6 },
            local: octets(local),
            remote: octets(remote),
        }),
    }
}

fn octets(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&addr.octets());
            octets
        }
        IpAddr::V6(addr) => addr.octets(),
    }
}
