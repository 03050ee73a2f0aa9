//! The maps as the programs see them; names and sizes are in `kilo_common::map_table`.

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use kilo_common::{
    counters::Action,
    map_table,
    maps::{
        Config, Device, Heard, Hop, InboundValue, MasqAddr, NatKey, NatValue, NodeValue, PathMtu,
        PrefixValue, SignalKey,
    },
    pod_flow::{PodFlow, PodFlowKey},
    relay,
};

#[btf_map(name = "prefix_v4")]
pub static PREFIX_V4: LpmTrie<[u8; 4], PrefixValue, { map_table::PREFIX_V4.size as usize }> = LpmTrie::new();
#[btf_map(name = "prefix_v6")]
pub static PREFIX_V6: LpmTrie<[u8; 16], PrefixValue, { map_table::PREFIX_V6.size as usize }> = LpmTrie::new();
#[btf_map(name = "direct_v4")]
pub static DIRECT_V4: Array<u64, { map_table::DIRECT_V4.size as usize }> = Array::new();
#[btf_map(name = "hop")]
static HOP: Array<Hop, { map_table::HOP.size as usize }> = Array::new();
#[btf_map(name = "lead")]
pub static LEAD: Array<u64, { map_table::LEAD.size as usize }> = Array::new();
#[btf_map(name = "signal_key")]
pub static SIGNAL_KEY: HashMap<[u8; 16], SignalKey, { map_table::SIGNAL_KEY.size as usize }> = HashMap::new();
#[btf_map(name = "signal")]
pub static SIGNAL: RingBuf<Heard, { map_table::SIGNAL.size as usize }> = RingBuf::new();
#[btf_map(name = "relay")]
pub static RELAY: HashMap<u32, relay::Port, { map_table::RELAY.size as usize }> = HashMap::new();
#[btf_map(name = "relay_key")]
pub static RELAY_KEY: HashMap<u64, relay::Sender, { map_table::RELAY_KEY.size as usize }> = HashMap::new();
#[btf_map(name = "relay_heard")]
pub static RELAY_HEARD: RingBuf<relay::Heard, { map_table::RELAY_HEARD.size as usize }> = RingBuf::new();
#[btf_map(name = "node_v4")]
pub static NODE_V4: HashMap<[u8; 4], NodeValue, { map_table::NODE_V4.size as usize }> = HashMap::new();
#[btf_map(name = "node_v6")]
pub static NODE_V6: HashMap<[u8; 16], NodeValue, { map_table::NODE_V6.size as usize }> = HashMap::new();
#[btf_map(name = "masq_src")]
pub static MASQ_SRC: LpmTrie<[u8; 16], u32, { map_table::MASQ_SRC.size as usize }> = LpmTrie::new();
#[btf_map(name = "masq_dst")]
pub static MASQ_DST: LpmTrie<[u8; 16], u32, { map_table::MASQ_DST.size as usize }> = LpmTrie::new();
#[btf_map(name = "nat")]
pub static NAT: LruHashMap<NatKey, NatValue, { map_table::NAT.size as usize }> = LruHashMap::new();
#[btf_map(name = "inbound")]
pub static INBOUND: LruHashMap<NatKey, InboundValue, { map_table::INBOUND.size as usize }> =
    LruHashMap::new();
#[btf_map(name = "pod_flow")]
pub static POD_FLOW: LruHashMap<PodFlowKey, PodFlow, { map_table::POD_FLOW.size as usize }> =
    LruHashMap::new();
#[btf_map(name = "masq_addr")]
pub static MASQ_ADDR: LpmTrie<[u8; 20], MasqAddr, { map_table::MASQ_ADDR.size as usize }> = LpmTrie::new();
#[btf_map(name = "device")]
static DEVICE: HashMap<u32, Device, { map_table::DEVICE.size as usize }> = HashMap::new();
#[btf_map(name = "path_mtu")]
pub static PATH_MTU: RingBuf<PathMtu, { map_table::PATH_MTU.size as usize }> = RingBuf::new();
#[btf_map(name = "count")]
static COUNT: PerCpuArray<u64, { map_table::COUNT.size as usize }> = PerCpuArray::new();
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

/// The entry of the interface with this index.
#[inline(always)]
pub fn device(ifindex: u32) -> Option<&'static Device> {
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    unsafe { DEVICE.get(&ifindex) }
}
