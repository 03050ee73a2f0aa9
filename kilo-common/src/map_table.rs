//! The BPF maps, one row each: names, layouts, sizes, pins, gauges and the table in
//! docs/data-path.md all come from here.

use crate::{
    counters::COUNTERS,
    event::{DropEvent, Monitor},
    maps::{
        Config, Device, Heard, Hop, InboundValue, MasqAddr, NatKey, NatValue, NodeValue, PathMtu,
        PrefixValue, SignalKey,
    },
    pod_flow::{PodFlow, PodFlowKey},
    relay,
};

/// Kind of a map, as the kernel calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `BPF_MAP_TYPE_ARRAY`: all entries are there from the start, zeroed.
    Array,
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`: an array for each CPU.
    PerCpuArray,
    /// `BPF_MAP_TYPE_HASH`.
    Hash,
    /// `BPF_MAP_TYPE_LRU_HASH`: one entry too many evicts the least recently used.
    LruHash,
    /// `BPF_MAP_TYPE_LPM_TRIE`: the longest prefix matches.
    LpmTrie,
    /// `BPF_MAP_TYPE_RINGBUF`: records for the agent; its size is in bytes.
    RingBuf,
}

/// Who writes a map's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Writer {
    /// The agent, from its plan of the mesh. Of these entries, packets change only the acting leader's word.
    Plan,
    /// The agent, for the pairs that this host relays; and the packets of those pairs.
    Relay,
    /// `kgctl monitor`.
    Listener,
    /// The programs, from the packets that they see.
    Packets,
}

/// One row of the table: what programs, agent, gauges and documentation need to know about a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// Name, as pinned and as `bpftool map` shows it; at most 15 bytes.
    pub name: &'static str,
    /// Kernel map type; decides how keys match and what happens when the map is full.
    pub kind: Kind,
    /// Bytes of a key; for a trie, with the four of the prefix length; 0 for ring buffers.
    pub key: u32,
    /// Bytes of a value (on each CPU); 0 for ring buffers.
    pub value: u32,
    /// Number of entries; for ring buffers, of bytes.
    pub size: u32,
    /// Who writes it.
    pub writer: Writer,
    /// The earliest layout whose map of this name holds the same. A map pinned by that layout or a later one
    /// is taken over with its content; in place of an earlier one, a new map is made.
    pub since: u32,
    /// Pinned below the pin directory, so that it outlives the agent.
    pub is_pinned: bool,
    /// Has gauges `kilo_map_entries` and `kilo_map_capacity`: its content depends on the mesh or its traffic.
    pub has_gauge: bool,
    /// What it holds, in the words of the documentation.
    pub holds: &'static str,
    /// Why it has that size, and what happens with one entry more.
    pub reason: &'static str,
}

/// Bytes of a key in the kernel's layout. Ring buffers have neither key nor value of a fixed size.
const fn key_size<K>(kind: Kind) -> u32 {
    match kind {
        Kind::LpmTrie => size_of::<u32>() as u32 + size_of::<K>() as u32,
        Kind::RingBuf => 0,
        _ => size_of::<K>() as u32,
    }
}

const fn value_size<V>(kind: Kind) -> u32 {
    match kind {
        Kind::RingBuf => 0,
        _ => size_of::<V>() as u32,
    }
}

macro_rules! maps {
    ($($id:ident = $name:literal, $kind:ident<$key:ty, $value:ty>, size $size:expr, by $writer:ident,
        since $since:literal, pinned $pinned:literal, gauge $gauge:literal,
        holds $holds:literal, reason $reason:literal;)*) => {
        $(
            #[doc = concat!("`", $name, "`: ", $holds, ".")]
            pub const $id: MapSpec = MapSpec {
                name: $name,
                kind: Kind::$kind,
                key: key_size::<$key>(Kind::$kind),
                value: value_size::<$value>(Kind::$kind),
                size: $size,
                writer: Writer::$writer,
                since: $since,
                is_pinned: $pinned,
                has_gauge: $gauge,
                holds: $holds,
                reason: $reason,
            };
        )*

        /// Every map, in the order of the documentation.
        pub const MAPS: &[MapSpec] = &[$($id),*];

        /// Names of the maps.
        pub mod name {
            $(
                #[doc = concat!("Name of [`super::", stringify!($id), "`].")]
                pub const $id: &str = $name;
            )*
        }
    };
}

maps! {
    PREFIX_V4 = "prefix_v4", LpmTrie<[u8; 4], PrefixValue>, size 262_144, by Plan, since 5, pinned true, gauge true,
        holds "LPM prefix → hop id, flags",
        reason "50 times a mesh of 5,000 nodes; memory by use. One more: the change is refused as a whole";
    PREFIX_V6 = "prefix_v6", LpmTrie<[u8; 16], PrefixValue>, size 262_144, by Plan, since 5, pinned true, gauge true,
        holds "LPM prefix → hop id, flags",
        reason "as `prefix_v4`";
    DIRECT_V4 = "direct_v4", Array<u32, u64>, size 65_536, by Plan, since 6, pinned true, gauge false,
        holds "IPv4 prefixes as long as the own pod CIDR, by their last 16 bits → what `prefix_v4` says",
        reason "512 KiB from the start; prefixes sharing a slot are told apart by the trie";
    HOP = "hop", Array<u32, Hop>, size 4_096, by Plan, since 5, pinned true, gauge true,
        holds "id → kind, tunnel, interface, MTU, addresses",
        reason "208 KiB from the start; ids 0 to 3 are fixed, so 4,092 other nodes of one location. \
                One more gets no hop: packets for it are dropped, and the agent reports it (`location_full`)";
    LEAD = "lead", Array<u32, u64>, size 2, by Plan, since 5, pinned true, gauge false,
        holds "what hops 2 (Kilo's leader) and 3 (the acting leader) lead to: term, hop id",
        reason "two words";
    NODE_V4 = "node_v4", Hash<[u8; 4], NodeValue>, size 4_096, by Plan, since 5, pinned true, gauge true,
        holds "outer source → hop id, whether it is a gateway, whether this one leads it",
        reason "as `hop`, one private address per node";
    NODE_V6 = "node_v6", Hash<[u8; 16], NodeValue>, size 4_096, by Plan, since 5, pinned true, gauge true,
        holds "outer source → hop id, whether it is a gateway, whether this one leads it",
        reason "as `node_v4`";
    MASQ_SRC = "masq_src", LpmTrie<[u8; 16], u32>, size 262_144, by Plan, since 5, pinned true, gauge true,
        holds "LPM prefix → how, both families (IPv4 as `::ffff:a.b.c.d`)",
        reason "as `prefix_v4`";
    MASQ_DST = "masq_dst", LpmTrie<[u8; 16], u32>, size 262_144, by Plan, since 5, pinned true, gauge true,
        holds "LPM prefix → how, both families",
        reason "every known prefix once, as `prefix_v4`";
    NAT = "nat", LruHash<NatKey, NatValue>, size 131_072, by Packets, since 5, pinned true, gauge true,
        holds "LRU flow → new address and port, both families",
        reason "65,536 flows of two entries: as many as one address has ports towards one destination. \
                One more evicts the least recently used, which is written again with its flow's next packet";
    INBOUND = "inbound", LruHash<NatKey, InboundValue>, size 32_768, by Packets, since 5, pinned true, gauge false,
        holds "LRU flow opened from outside → last packet, both families",
        reason "a map of its own, because strangers may fill it: they evict each other, never an entry of \
                `nat`. It also lists fragments that are not translated. One more evicts the least recently used, which \
                is written again with its flow's next packet from outside";
    MASQ_ADDR = "masq_addr", LpmTrie<[u8; 20], MasqAddr>, size 4_096, by Plan, since 5, pinned true, gauge true,
        holds "LPM interface, destination → masquerade address; and all such addresses",
        reason "a few per address of an uplink, one per route with a source of its own. One more: the change is \
                refused as a whole";
    // Only the programs know the layout of their scratch memory.
    NAT_WORK = "nat_work", PerCpuArray<u32, ()>, size 1, by Packets, since 5, pinned false, gauge false,
        holds "memory of the masquerading program, per CPU",
        reason "no state";
    // As above.
    LINK = "link", PerCpuArray<u32, ()>, size 256, by Packets, since 6, pinned false, gauge false,
        holds "link-layer addresses found in this tick of the kernel's clock, per CPU",
        reason "no state; addresses that share a slot are looked up again";
    DEVICE = "device", Hash<u32, Device>, size 256, by Plan, since 5, pinned true, gauge true,
        holds "interface → masquerade addresses",
        reason "uplinks and kilo0; pods' interfaces need no entry. One more: the change is refused as a whole";
    PATH_MTU = "path_mtu", RingBuf<(), PathMtu>, size 4_096, by Packets, since 5, pinned true, gauge false,
        holds "ring: what routers say they carry towards nodes",
        reason "bytes: a page; what does not fit is lost, and routers report it again";
    SIGNAL_KEY = "signal_key", Hash<[u8; 16], SignalKey>, size 8_192, by Plan, since 5, pinned true, gauge true,
        holds "node's address → what its signals are checked with, both families; far gateways by their control addresses",
        reason "as `hop`: per node a private address and perhaps one in an overlay; a few far gateways per location";
    SIGNAL = "signal", RingBuf<(), Heard>, size 65_536, by Packets, since 5, pinned true, gauge false,
        holds "ring: signals for the agent",
        reason "bytes: 630 short signals or 56 of the longest; what does not fit is lost, and signals are sent again";
    POD_FLOW = "pod_flow", LruHash<PodFlowKey, PodFlow>, size 16_384, by Packets, since 6, pinned true, gauge false,
        holds "LRU flow of a pod → second in which the stack left it as it is (`--host-routing=auto`)",
        reason "1.5 MiB from the start. One more evicts the least recently used, which is written again when its next packet has passed the stack";
    RELAY = "relay", Hash<u32, relay::Port>, size 1_024, by Relay, since 6, pinned true, gauge false,
        holds "on a relay: port of a pair → who may send to it, and the end to which it is sent on",
        reason "two ports per pair, of 1,000. One more pair is refused";
    // Only the programs know the layout of this state.
    RELAY_STATE = "relay_state", Array<u32, ()>, size relay::PORTS, by Packets, since 6, pinned false, gauge false,
        holds "on a relay: port of a pair → what it may still send, and the next hop towards the other end",
        reason "one entry per port; a new agent does without its content";
    RELAY_KEY = "relay_key", Hash<u64, relay::Sender>, size 8_192, by Relay, since 6, pinned true, gauge false,
        holds "gateway's id → what its messages about relays are checked with, and the latest ones",
        reason "a few per location. Messages of one more are dropped";
    RELAY_HEARD = "relay_heard", RingBuf<(), relay::Heard>, size 65_536, by Packets, since 6, pinned true, gauge false,
        holds "ring: messages about relays, for the agent",
        reason "bytes: 580 messages; what does not fit is lost, and messages are repeated";
    COUNT = "count", PerCpuArray<u32, u64>, size COUNTERS, by Packets, since 5, pinned true, gauge false,
        holds "action or drop reason → packets, per CPU",
        reason "indexes are fixed; the rest is spare";
    CONFIG = "config", Array<u32, Config>, size 1, by Plan, since 6, pinned true, gauge false,
        holds "this host",
        reason "one host";
    EVENTS = "events", RingBuf<(), DropEvent>, size 262_144, by Packets, since 5, pinned true, gauge false,
        holds "ring: drops for `kgctl monitor`",
        reason "bytes: 1,600 events; what does not fit is not shown";
    MONITOR = "monitor", Array<u32, Monitor>, size 1, by Listener, since 5, pinned true, gauge false,
        holds "until when a `kgctl monitor` listens to `events`",
        reason "one listener";
}

impl MapSpec {
    /// The map of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        MAPS.iter().find(|map| map.name == name)
    }

    /// Whether entries of the agent's plan can fill it up.
    pub fn is_filled(&self) -> bool {
        self.writer == Writer::Plan && self.has_gauge
    }
}
