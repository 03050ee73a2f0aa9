//! Desired map content against what the maps hold: only differences are
//! written, in an order in which no packet sees a prefix without its hop.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use aya::{
    Ebpf, Pod,
    maps::{
        Array, HashMap, MapData, MapError,
        lpm_trie::{Key as TrieKey, LpmTrie},
    },
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kilo_common::{
    map_table::{MapSpec, name},
    maps::{
        Config, Device, FAMILY_V4, FAMILY_V6, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, Hop,
        LEAD_ACTING, LEAD_KILO, MASQ_ADDR_INDEX_BITS, MASQ_ADDR_OWN, MASQ_EXCLUDE, MasqAddr, NodeValue,
        PrefixValue, SignalKey, TUNNEL_IPIP, TUNNEL_NONE, TUNNEL_VXLAN, masq_addr_key,
    },
};

use super::{
    DataplaneError, lead,
    load::{Maps, map},
};
use kilo_core::{
    flat_map::{FlatMap, Key, merge},
    plan,
    settings::Tunnel,
};

/// Map content as the programs read it: each family in maps of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    prefix_v4: BTreeMap<Ipv4Net, PrefixValue>,
    prefix_v6: BTreeMap<Ipv6Net, PrefixValue>,
    hop: BTreeMap<u32, Hop>,
    node_v4: BTreeMap<Ipv4Addr, NodeValue>,
    node_v6: BTreeMap<Ipv6Addr, NodeValue>,
    masq_src: BTreeMap<Ipv6Net, u32>,
    masq_dst: BTreeMap<Ipv6Net, u32>,
    masq_addr: BTreeMap<Towards, MasqAddr>,
    device: BTreeMap<u32, Device>,
    signal_key: BTreeMap<Ipv6Addr, SignalKey>,
    /// As read last: kernels write the second.
    lead: [u64; 2],
    config: Config,
}

impl Content {
    /// Places taken in each map the agent fills.
    pub(super) fn entries(&self) -> [(&'static str, usize); 10] {
        [
            (name::PREFIX_V4, self.prefix_v4.len()),
            (name::PREFIX_V6, self.prefix_v6.len()),
            (name::NODE_V4, self.node_v4.len()),
            (name::NODE_V6, self.node_v6.len()),
            (name::MASQ_SRC, self.masq_src.len()),
            (name::MASQ_DST, self.masq_dst.len()),
            (name::MASQ_ADDR, self.masq_addr.len()),
            (name::DEVICE, self.device.len()),
            (name::SIGNAL_KEY, self.signal_key.len()),
            (name::HOP, places(self.hop.keys().last().copied())),
        ]
    }

    pub(super) fn held_keys(&self) -> BTreeMap<IpAddr, SignalKey> {
        self.signal_key.iter().map(|(addr, key)| (IpAddr::V6(*addr).to_canonical(), *key)).collect()
    }

    pub(super) fn held_senders(&self) -> BTreeMap<IpAddr, NodeValue> {
        let v4 = self.node_v4.iter().map(|(addr, node)| (IpAddr::V4(*addr), *node));
        v4.chain(self.node_v6.iter().map(|(addr, node)| (IpAddr::V6(*addr), *node))).collect()
    }
}

/// The desired content, in order. What the tables have in the same form is not copied.
struct Desired<'a> {
    tables: &'a plan::Tables,
    masq_src: FlatMap<Ipv6Net, u32>,
    masq_dst: FlatMap<Ipv6Net, u32>,
    masq_addr: BTreeMap<Towards, MasqAddr>,
    signal_key: BTreeMap<Ipv6Addr, SignalKey>,
}

impl<'a> Desired<'a> {
    fn new(tables: &'a plan::Tables) -> Self {
        Self {
            tables,
            masq_src: mapped(&tables.masq_src),
            masq_dst: mapped(&tables.masq_dst),
            masq_addr: masq_addrs(tables),
            signal_key: tables.signal_key.iter().map(|(addr, key)| (in_v6(*addr), *key)).collect(),
        }
    }

    fn hop(&self) -> impl Iterator<Item = (u32, Hop)> {
        self.tables.hop.iter().filter_map(|(id, hop)| Some((*id, raw_hop(hop)?)))
    }

    fn prefix_v4(&self) -> impl Iterator<Item = (Ipv4Net, PrefixValue)> {
        self.tables.prefix.iter().filter_map(|(prefix, value)| match prefix {
            IpNet::V4(prefix) => Some((*prefix, *value)),
            IpNet::V6(_) => None,
        })
    }

    fn prefix_v6(&self) -> impl Iterator<Item = (Ipv6Net, PrefixValue)> {
        self.tables.prefix.iter().filter_map(|(prefix, value)| match prefix {
            IpNet::V4(_) => None,
            IpNet::V6(prefix) => Some((*prefix, *value)),
        })
    }

    fn signal_key(&self) -> impl Iterator<Item = (Ipv6Addr, SignalKey)> {
        self.signal_key.iter().map(|(addr, key)| (*addr, *key))
    }

    fn node_v4(&self) -> impl Iterator<Item = (Ipv4Addr, NodeValue)> {
        self.tables.node.iter().filter_map(|(addr, value)| match addr {
            IpAddr::V4(addr) => Some((*addr, *value)),
            IpAddr::V6(_) => None,
        })
    }

    fn node_v6(&self) -> impl Iterator<Item = (Ipv6Addr, NodeValue)> {
        self.tables.node.iter().filter_map(|(addr, value)| match addr {
            IpAddr::V4(_) => None,
            IpAddr::V6(addr) => Some((*addr, *value)),
        })
    }

    /// Places taken in each map the agent fills.
    fn entries(&self) -> [(&'static str, usize); 10] {
        [
            (name::PREFIX_V4, self.prefix_v4().count()),
            (name::PREFIX_V6, self.prefix_v6().count()),
            (name::NODE_V4, self.node_v4().count()),
            (name::NODE_V6, self.node_v6().count()),
            (name::MASQ_SRC, self.masq_src.len()),
            (name::MASQ_DST, self.masq_dst.len()),
            (name::MASQ_ADDR, self.masq_addr.len()),
            (name::DEVICE, self.tables.device.len()),
            (name::SIGNAL_KEY, self.tables.signal_key.len()),
            (name::HOP, places(self.hop().last().map(|(id, _)| id))),
        ]
    }
}

/// An array has places up to the highest id.
fn places(last: Option<u32>) -> usize {
    last.map_or(0, |id| id as usize + 1)
}

/// Where IPv4 stands in the tables of masquerading, which are one for both
/// families: `::ffff:0:0/96` (RFC 4291, section 2.5.5.2).
const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);
/// Value of a prefix that is there so that no shorter one counts.
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
        table.range(IpNet::V6(Ipv6Net::default())..).filter_map(|(prefix, value)| match prefix {
            IpNet::V4(_) => None,
            IpNet::V6(v6) => Some((*v6, *value)),
        })
    };
    // IPv4 stands between what sorts before and behind it.
    let before = v6().filter(|(prefix, _)| *prefix < MAPPED);
    let behind = v6().filter(|(prefix, _)| *prefix >= MAPPED);
    // `::/0` speaks of IPv6 only, whatever else is said of all IPv4.
    let is_held = v6().any(|(prefix, _)| prefix != MAPPED && prefix.contains(&MAPPED));
    let nothing = is_held.then_some((MAPPED, MASQ_NOTHING));
    before.chain(nothing).chain(v4).chain(behind).collect()
}

/// An interface and a prefix of destinations, IPv4 as `::ffff:a.b.c.d`: a key of `masq_addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Towards(u32, Ipv6Net);

impl Key for Towards {
    type Rank = (u32, <Ipv6Net as Key>::Rank);
    fn rank(&self) -> Self::Rank {
        (self.0, self.1.rank())
    }
}

impl Prefix for Towards {
    type Octets = [u8; 20];
    fn key(&self) -> TrieKey<[u8; 20]> {
        let Self(ifindex, net) = self;
        let bits = MASQ_ADDR_INDEX_BITS + u32::from(net.prefix_len());
        TrieKey::new(bits, masq_addr_key(*ifindex, &net.network().octets()))
    }
    fn from_key(key: &TrieKey<[u8; 20]>) -> Option<Self> {
        let octets = key.data();
        let (ifindex, addr) = octets.split_first_chunk::<4>()?;
        let length = u8::try_from(key.prefix_len().checked_sub(MASQ_ADDR_INDEX_BITS)?).ok()?;
        let net = Ipv6Net::new(Ipv6Addr::from(<[u8; 16]>::try_from(addr).ok()?), length).ok()?;
        Some(Self(u32::from_be_bytes(*ifindex), net))
    }
}

/// An address of either family, IPv4 as `::ffff:a.b.c.d`.
const fn in_v6(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    }
}

/// What `masq_addr` holds: the addresses by interface and destination, and each address
/// that an uplink gives once more by itself.
fn masq_addrs(tables: &plan::Tables) -> BTreeMap<Towards, MasqAddr> {
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
        own.entry(map(addr)).or_insert(ifindex);
    }
    for (&ifindex, device) in &tables.device {
        let [v4, v6] = [Ipv4Addr::from(device.masq_v4).to_ipv6_mapped(), Ipv6Addr::from(device.masq_v6)];
        if wide.contains(&ifindex) {
            // A short prefix speaks of IPv6 only.
            let usual = MasqAddr { addr: v4.octets(), ifindex };
            all.entry(Towards(ifindex, MAPPED)).or_insert(usual);
        }
        // What leaves by the WireGuard device has one address, which an uplink may have, too.
        if ifindex != tables.config.kilo_ifindex {
            own.entry(v4).or_insert(ifindex);
            own.entry(v6).or_insert(ifindex);
        }
    }
    let nothing = [Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), Ipv6Addr::UNSPECIFIED];
    own.retain(|addr, _| !nothing.contains(addr));
    all.extend(own.into_iter().map(|(addr, ifindex)| {
        (Towards(MASQ_ADDR_OWN, addr.into()), MasqAddr { addr: addr.octets(), ifindex })
    }));
    all
}

/// The inverse, without what `device` says already.
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

impl From<&Content> for plan::Tables {
    fn from(content: &Content) -> Self {
        Self {
            prefix: (content.prefix_v4.iter().map(|(prefix, value)| (IpNet::V4(*prefix), *value)))
                .chain(content.prefix_v6.iter().map(|(prefix, value)| (IpNet::V6(*prefix), *value)))
                .collect(),
            hop: content.hop.iter().filter_map(|(id, hop)| Some((*id, plan_hop(hop)?))).collect(),
            lead: content.lead,
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

/// The inverse of [`raw_hop`]; `None` for what drops.
fn plan_hop(hop: &Hop) -> Option<plan::Hop> {
    let addr = |octets: [u8; 16]| match (hop.family, octets) {
        (FAMILY_V6, octets) => IpAddr::from(octets),
        (_, [a, b, c, d, ..]) => IpAddr::from([a, b, c, d]),
    };
    match hop.kind {
        HOP_KIND_LOCAL => Some(plan::Hop::Local),
        HOP_KIND_WIREGUARD => Some(plan::Hop::Wireguard),
        HOP_KIND_NODE => Some(plan::Hop::Node {
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

/// Addresses of two families have no hop: it drops, counted.
fn raw_hop(hop: &plan::Hop) -> Option<Hop> {
    match *hop {
        plan::Hop::Local => Some(Hop { kind: HOP_KIND_LOCAL, ..Hop::default() }),
        plan::Hop::Wireguard => Some(Hop { kind: HOP_KIND_WIREGUARD, ..Hop::default() }),
        plan::Hop::Node { local, remote, .. } if local.is_ipv4() != remote.is_ipv4() => None,
        plan::Hop::Node { tunnel, ifindex, mtu, local, remote } => Some(Hop {
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

/// A prefix of one family, as the key of its trie.
trait Prefix: Ord + Key {
    type Octets: Pod;
    fn key(&self) -> TrieKey<Self::Octets>;
    fn from_key(key: &TrieKey<Self::Octets>) -> Option<Self>;
}

impl Prefix for Ipv4Net {
    type Octets = [u8; 4];
    fn key(&self) -> TrieKey<[u8; 4]> {
        TrieKey::new(u32::from(self.prefix_len()), self.network().octets())
    }
    fn from_key(key: &TrieKey<[u8; 4]>) -> Option<Self> {
        Self::new(Ipv4Addr::from(key.data()), u8::try_from(key.prefix_len()).ok()?).ok()
    }
}

impl Prefix for Ipv6Net {
    type Octets = [u8; 16];
    fn key(&self) -> TrieKey<[u8; 16]> {
        TrieKey::new(u32::from(self.prefix_len()), self.network().octets())
    }
    fn from_key(key: &TrieKey<[u8; 16]>) -> Option<Self> {
        Self::new(Ipv6Addr::from(key.data()), u8::try_from(key.prefix_len()).ok()?).ok()
    }
}

/// Reads everything the maps hold.
pub fn read(maps: &mut impl Maps) -> Result<Content, DataplaneError> {
    let mut tables = Content {
        prefix_v4: read_trie(maps, name::PREFIX_V4)?,
        prefix_v6: read_trie(maps, name::PREFIX_V6)?,
        masq_src: read_trie(maps, name::MASQ_SRC)?,
        masq_dst: read_trie(maps, name::MASQ_DST)?,
        masq_addr: read_trie(maps, name::MASQ_ADDR)?,
        ..Content::default()
    };
    let hops = Array::<_, Hop>::try_from(maps.get(name::HOP)?)?;
    for id in 0..hops.len() {
        let hop = hops.get(&id, 0)?;
        if hop != Hop::default() {
            tables.hop.insert(id, hop);
        }
    }
    tables.node_v4 = read_hash(maps, name::NODE_V4, |addr: [u8; 4]| addr.into())?;
    tables.node_v6 = read_hash(maps, name::NODE_V6, |addr: [u8; 16]| addr.into())?;
    tables.device = read_hash(maps, name::DEVICE, |ifindex: u32| ifindex)?;
    tables.signal_key = read_hash(maps, name::SIGNAL_KEY, |addr: [u8; 16]| addr.into())?;
    tables.lead = read_lead(maps)?;
    tables.config = Array::<_, Config>::try_from(maps.get(name::CONFIG)?)?.get(&0, 0)?;
    Ok(tables)
}

/// Both words.
pub fn read_lead(maps: &mut impl Maps) -> Result<[u64; 2], DataplaneError> {
    let lead = Array::<_, u64>::try_from(maps.get(name::LEAD)?)?;
    Ok([lead.get(&LEAD_KILO, 0)?, lead.get(&LEAD_ACTING, 0)?])
}

fn read_trie<P: Prefix, V: Pod>(
    maps: &mut impl Maps,
    name: &'static str,
) -> Result<BTreeMap<P, V>, DataplaneError> {
    let trie = LpmTrie::<_, P::Octets, V>::try_from(maps.get(name)?)?;
    let mut content = BTreeMap::new();
    for entry in &trie {
        let (key, value) = entry?;
        content.extend(P::from_key(&key).map(|prefix| (prefix, value)));
    }
    Ok(content)
}

fn read_hash<P: Pod, K: Ord, V: Pod>(
    maps: &mut impl Maps,
    name: &'static str,
    key: impl Fn(P) -> K,
) -> Result<BTreeMap<K, V>, DataplaneError> {
    let hash = HashMap::<_, P, V>::try_from(maps.get(name)?)?;
    let mut content = BTreeMap::new();
    for entry in &hash {
        let (raw, value) = entry?;
        content.insert(key(raw), value);
    }
    Ok(content)
}

/// What one map needs: entries to write, keys to remove.
struct Difference<K, V> {
    write: Vec<(K, V)>,
    remove: Vec<K>,
}

/// One walk over both: they are sorted.
fn difference<K: Key, V: PartialEq + Copy>(
    present: &BTreeMap<K, V>,
    desired: impl Iterator<Item = (K, V)>,
) -> Difference<K, V> {
    let (mut write, mut remove) = (Vec::new(), Vec::new());
    let present = present.iter().map(|(key, value)| (*key, *value));
    let order = |one: &(K, V), other: &(K, V)| one.0.rank().cmp(&other.0.rank());
    merge(present, desired, order, |present, desired| match (present, desired) {
        (Some((_, before)), Some((_, value))) if before == value => {}
        (_, Some(entry)) => write.push(entry),
        (Some((gone, _)), None) => remove.push(gone),
        (None, None) => {}
    });
    Difference { write, remove }
}

/// What [`apply`] did.
pub struct Applied {
    /// Number of writes.
    pub writes: u64,
    /// Destinations that are never masqueraded, which may have been before.
    pub excluded: Vec<Ipv6Net>,
}

/// Writes what differs and keeps `present` true.
pub fn apply(
    bpf: &mut Ebpf,
    present: &mut Content,
    tables: &plan::Tables,
) -> Result<Applied, DataplaneError> {
    let desired = Desired::new(tables);
    check_capacity(&desired)?;
    let mut writes = 0;
    // First what others point to, then the pointers; on the way back the other way round.
    let hops = difference(&present.hop, desired.hop());
    let nodes_v4 = difference(&present.node_v4, desired.node_v4());
    let nodes_v6 = difference(&present.node_v6, desired.node_v6());
    let devices =
        difference(&present.device, tables.device.iter().map(|(ifindex, device)| (*ifindex, *device)));
    let keys = difference(&present.signal_key, desired.signal_key());
    let prefixes_v4 = difference(&present.prefix_v4, desired.prefix_v4());
    let prefixes_v6 = difference(&present.prefix_v6, desired.prefix_v6());
    let of = |(prefix, value): (&Ipv6Net, &u32)| (*prefix, *value);
    let addrs = difference(&present.masq_addr, desired.masq_addr.iter().map(|(to, addr)| (*to, *addr)));
    let sources = difference(&present.masq_src, desired.masq_src.iter().map(of));
    let destinations = difference(&present.masq_dst, desired.masq_dst.iter().map(of));
    let excluded = destinations.write.iter().filter(|(_, value)| *value == MASQ_EXCLUDE);
    let excluded = excluded.map(|(prefix, _)| *prefix).collect();

    let mut map_of_hops = Array::<_, Hop>::try_from(map(bpf, name::HOP)?)?;
    for (id, hop) in hops.write {
        map_of_hops.set(id, hop, 0)?;
        present.hop.insert(id, hop);
        writes += 1;
    }
    present.lead = read_lead(bpf)?;
    if present.lead[0] != tables.lead[0] {
        Array::<_, u64>::try_from(map(bpf, name::LEAD)?)?.set(LEAD_KILO, tables.lead[0], 0)?;
        present.lead[0] = tables.lead[0];
        writes += 1;
    }
    if present.lead[1] != tables.lead[1] && !kilo_common::lead::is_later(present.lead[1], tables.lead[1]) {
        let swap = lead::Swap { current: present.lead[1], new: tables.lead[1] };
        present.lead[1] = lead::swap(bpf, swap)?;
        writes += 1;
    }
    writes += write_hash(bpf, name::SIGNAL_KEY, keys, &mut present.signal_key, |addr| addr.octets())?;
    // What must not be masqueraded is known before anything is.
    writes += write_trie(bpf, name::MASQ_DST, &destinations.write, &mut present.masq_dst)?;
    writes += write_trie(bpf, name::MASQ_ADDR, &addrs.write, &mut present.masq_addr)?;
    writes += write_hash(bpf, name::DEVICE, devices, &mut present.device, |key| key)?;
    writes += write_hash(bpf, name::NODE_V4, nodes_v4, &mut present.node_v4, |addr| addr.octets())?;
    writes += write_hash(bpf, name::NODE_V6, nodes_v6, &mut present.node_v6, |addr| addr.octets())?;
    writes += write_trie(bpf, name::PREFIX_V4, &prefixes_v4.write, &mut present.prefix_v4)?;
    writes += write_trie(bpf, name::PREFIX_V6, &prefixes_v6.write, &mut present.prefix_v6)?;
    writes += write_trie(bpf, name::MASQ_SRC, &sources.write, &mut present.masq_src)?;
    if present.config != tables.config {
        Array::<_, Config>::try_from(map(bpf, name::CONFIG)?)?.set(0, tables.config, 0)?;
        present.config = tables.config;
        writes += 1;
    }
    writes += remove_trie(bpf, name::PREFIX_V4, &prefixes_v4.remove, &mut present.prefix_v4)?;
    writes += remove_trie(bpf, name::PREFIX_V6, &prefixes_v6.remove, &mut present.prefix_v6)?;
    writes += remove_trie(bpf, name::MASQ_ADDR, &addrs.remove, &mut present.masq_addr)?;
    writes += remove_trie(bpf, name::MASQ_SRC, &sources.remove, &mut present.masq_src)?;
    writes += remove_trie(bpf, name::MASQ_DST, &destinations.remove, &mut present.masq_dst)?;
    let mut map_of_hops = Array::<_, Hop>::try_from(map(bpf, name::HOP)?)?;
    for id in hops.remove {
        map_of_hops.set(id, Hop::default(), 0)?;
        present.hop.remove(&id);
        writes += 1;
    }
    Ok(Applied { writes, excluded })
}

/// Nothing is written of what does not fit as a whole: half of the exclusions
/// would let mesh traffic be masqueraded.
fn check_capacity(desired: &Desired<'_>) -> Result<(), DataplaneError> {
    for (map, wanted) in desired.entries() {
        let capacity = MapSpec::named(map).map_or(0, |map| map.size);
        if wanted > capacity as usize {
            return Err(DataplaneError::Full { map, capacity, wanted });
        }
    }
    Ok(())
}

fn write_trie<P: Prefix, V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    entries: &[(P, V)],
    present: &mut BTreeMap<P, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, P::Octets, V> = map(bpf, name)?.try_into()?;
    for (prefix, value) in entries {
        trie.insert(&prefix.key(), value, 0)?;
        present.insert(*prefix, *value);
    }
    Ok(entries.len() as u64)
}

fn remove_trie<P: Prefix, V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    prefixes: &[P],
    present: &mut BTreeMap<P, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, P::Octets, V> = map(bpf, name)?.try_into()?;
    for prefix in prefixes {
        gone(trie.remove(&prefix.key()))?;
        present.remove(prefix);
    }
    Ok(prefixes.len() as u64)
}

fn write_hash<K: Ord + Copy, P: Pod, V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    difference: Difference<K, V>,
    present: &mut BTreeMap<K, V>,
    raw: impl Fn(K) -> P,
) -> Result<u64, DataplaneError> {
    let mut hash: HashMap<&mut MapData, P, V> = map(bpf, name)?.try_into()?;
    let writes = difference.write.len() + difference.remove.len();
    for (key, value) in difference.write {
        hash.insert(raw(key), value, 0)?;
        present.insert(key, value);
    }
    for key in difference.remove {
        gone(hash.remove(&raw(key)))?;
        present.remove(&key);
    }
    Ok(writes as u64)
}

/// An entry that somebody else has removed is removed.
fn gone(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}
