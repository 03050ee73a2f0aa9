//! The maps; layouts and sizes are `kilo_common::maps`.

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use kilo_common::{
    counters::{Action, COUNTERS},
    maps::{
        Config, Device, Hop, InboundValue, MAX_DEVICES, MAX_HOPS, MAX_INBOUND, MAX_MASQ_ADDRS,
        MAX_MASQ_PREFIXES, MAX_NAT, MAX_NODES, MAX_PREFIXES, MasqAddr, NatKey, NatValue, NodeValue,
        PATH_MTU_RING, PathMtu, PrefixValue,
    },
};

#[btf_map(name = "prefix_v4")]
pub static PREFIX_V4: LpmTrie<[u8; 4], PrefixValue, { MAX_PREFIXES as usize }> = LpmTrie::new();
#[btf_map(name = "prefix_v6")]
pub static PREFIX_V6: LpmTrie<[u8; 16], PrefixValue, { MAX_PREFIXES as usize }> = LpmTrie::new();
#[btf_map(name = "hop")]
static HOP: Array<Hop, { MAX_HOPS as usize }> = Array::new();
#[btf_map(name = "node_v4")]
pub static NODE_V4: HashMap<[u8; 4], NodeValue, { MAX_NODES as usize }> = HashMap::new();
#[btf_map(name = "node_v6")]
pub static NODE_V6: HashMap<[u8; 16], NodeValue, { MAX_NODES as usize }> = HashMap::new();
#[btf_map(name = "masq_src")]
pub static MASQ_SRC: LpmTrie<[u8; 16], u32, { MAX_MASQ_PREFIXES as usize }> = LpmTrie::new();
#[btf_map(name = "masq_dst")]
pub static MASQ_DST: LpmTrie<[u8; 16], u32, { MAX_MASQ_PREFIXES as usize }> = LpmTrie::new();
#[btf_map(name = "nat")]
pub static NAT: LruHashMap<NatKey, NatValue, { MAX_NAT as usize }> = LruHashMap::new();
#[btf_map(name = "inbound")]
pub static INBOUND: LruHashMap<NatKey, InboundValue, { MAX_INBOUND as usize }> = LruHashMap::new();
#[btf_map(name = "masq_addr")]
pub static MASQ_ADDR: LpmTrie<[u8; 20], MasqAddr, { MAX_MASQ_ADDRS as usize }> = LpmTrie::new();
#[btf_map(name = "device")]
static DEVICE: HashMap<u32, Device, { MAX_DEVICES as usize }> = HashMap::new();
#[btf_map(name = "path_mtu")]
pub static PATH_MTU: RingBuf<PathMtu, { PATH_MTU_RING as usize }> = RingBuf::new();
#[btf_map(name = "count")]
static COUNT: PerCpuArray<u64, { COUNTERS as usize }> = PerCpuArray::new();
#[btf_map(name = "config")]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Counts one packet.
#[inline(always)]
pub fn count(index: u32) {
    if let Some(counter) = COUNT.get_ptr_mut(index) {
        // SAFETY: the entry is this CPU's own, and programs on one CPU do not preempt each other.
        unsafe { *counter += 1 };
    }
}

/// Counts one packet that was not dropped.
#[inline(always)]
pub fn count_action(action: Action) {
    count(action.index());
}

/// The entry of a hop id.
#[inline(always)]
pub fn hop(id: u32) -> Option<&'static Hop> {
    HOP.get(id)
}

/// What is known of the interface a program runs on.
#[inline(always)]
pub fn device(ifindex: u32) -> Option<&'static Device> {
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    unsafe { DEVICE.get(&ifindex) }
}
