//! The size of every map, and its reason: the table in docs/data-path.md.

use crate::{
    counters::COUNTERS,
    event::RING_BYTES,
    maps::{
        MAX_DEVICES, MAX_HOPS, MAX_INBOUND, MAX_MASQ_ADDRS, MAX_MASQ_PREFIXES, MAX_NAT, MAX_NODES,
        MAX_PREFIXES, PATH_MTU_RING, name,
    },
};

/// What fits in one map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Name of the map.
    pub map: &'static str,
    /// What it holds, in the words of the documentation.
    pub holds: &'static str,
    /// Entries; of ring buffers, bytes.
    pub size: u32,
    /// Why so many, and what happens to one more.
    pub reason: &'static str,
}

const fn bound(map: &'static str, holds: &'static str, size: u32, reason: &'static str) -> Bound {
    Bound { map, holds, size, reason }
}

/// Every map.
pub const BOUNDS: &[Bound] = &[
    bound(
        name::PREFIX_V4,
        "LPM prefix → hop id, flags",
        MAX_PREFIXES,
        "50 times a mesh of 5,000 nodes; memory by use. One more: the change is refused as a whole",
    ),
    bound(name::PREFIX_V6, "LPM prefix → hop id, flags", MAX_PREFIXES, "as `prefix_v4`"),
    bound(
        name::HOP,
        "id → kind, tunnel, interface, MTU, addresses",
        MAX_HOPS,
        "208 KiB from the start; ids 0 to 2 are fixed, so 4,093 other nodes of one location. \
         One more has no way to it: its packets are dropped, and the agent says so (`location_full`)",
    ),
    bound(
        name::NODE_V4,
        "outer source → hop id, leader flag",
        MAX_NODES,
        "as `hop`, one private address a node",
    ),
    bound(name::NODE_V6, "outer source → hop id, leader flag", MAX_NODES, "as `node_v4`"),
    bound(
        name::MASQ_SRC,
        "LPM prefix → how, both families (IPv4 as `::ffff:a.b.c.d`)",
        MAX_MASQ_PREFIXES,
        "as `prefix_v4`",
    ),
    bound(
        name::MASQ_DST,
        "LPM prefix → how, both families",
        MAX_MASQ_PREFIXES,
        "every known prefix once, as `prefix_v4`",
    ),
    bound(
        name::NAT,
        "LRU flow → new address and port, both families",
        MAX_NAT,
        "65,536 flows of two entries: as many as one address has ports towards one destination. \
         One more: the least recently used goes, and is written anew with its flow's next packet",
    ),
    bound(
        name::INBOUND,
        "LRU flow opened from outside → last packet, both families",
        MAX_INBOUND,
        "strangers may fill it, so it is a map of its own: they evict each other, never an entry of `nat`. \
         One more: the least recently used goes, and is written anew with its flow's next packet from outside",
    ),
    bound(
        name::MASQ_ADDR,
        "LPM interface, destination → masquerade address; and all such addresses",
        MAX_MASQ_ADDRS,
        "a few an address of an uplink, one a route with a source of its own. One more: the change is \
         refused as a whole",
    ),
    bound(name::NAT_WORK, "memory of the masquerading program, per CPU", 1, "no state"),
    bound(
        name::DEVICE,
        "interface → masquerade addresses",
        MAX_DEVICES,
        "interfaces with programs: uplinks, not pods'. One more: the change is refused as a whole",
    ),
    bound(
        name::PATH_MTU,
        "ring: what routers say they carry towards nodes",
        PATH_MTU_RING,
        "bytes: a page; what does not fit is lost, reports repeat themselves",
    ),
    bound(
        name::COUNT,
        "action or drop reason → packets, per CPU",
        COUNTERS,
        "indexes are fixed; the rest is room",
    ),
    bound(name::CONFIG, "this host", 1, "one host"),
    bound(
        name::EVENTS,
        "ring: drops for `kgctl monitor`",
        RING_BYTES,
        "bytes: 1,600 events; what does not fit is not shown",
    ),
    bound(name::MONITOR, "whether that runs", 1, "one listener"),
];

/// Entries (bytes) that fit in a map; 0 for a name that is none.
pub fn size(map: &str) -> u32 {
    BOUNDS.iter().find(|bound| bound.map == map).map_or(0, |bound| bound.size)
}
