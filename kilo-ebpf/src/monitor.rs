//! Reports drops to a listener (`kgctl monitor`). Without one, a drop costs one
//! array lookup. The drop reasons and their remedies are the table in `kilo-common/src/drop_reasons.rs`.

use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    btf_maps::{Array, RingBuf},
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns, bpf_skb_load_bytes},
    macros::btf_map,
    programs::TcContext,
};
use kilo_common::{
    event::{DropEvent, Monitor, captured},
    map_table,
};

use crate::packet;

#[btf_map(name = "events")]
static EVENTS: RingBuf<DropEvent, { map_table::EVENTS.size as usize }> = RingBuf::new();
#[btf_map(name = "monitor")]
static MONITOR: Array<Monitor, 1> = Array::new();

/// Reports a packet that is about to be dropped, if a listener wants it. `hook` is the number of the `Hook`
/// it is on, `reason` the index of the `DropReason`.
#[inline(always)]
pub fn report(ctx: &TcContext, hook: u32, reason: u32) {
    let Some(monitor) = MONITOR.get(0) else { return };
    // SAFETY: helpers without arguments.
    if !monitor.wants(reason, || unsafe { bpf_ktime_get_ns() }, || unsafe { bpf_get_prandom_u32() }) {
        return;
    }
    // With a full ring the listener misses events; the counters still have the whole number.
    let Some(mut entry) = EVENTS.reserve(0) else { return };
    let event: *mut DropEvent = entry.as_mut_ptr();
    let length = ctx.len();
    let captured = captured(length);
    // SAFETY: the entry is ours until it is submitted and as large as an event;
    // the helper writes at most SNAP bytes.
    unsafe {
        (&raw mut (*event).ktime).write(bpf_ktime_get_ns());
        (&raw mut (*event).reason).write(reason);
        (&raw mut (*event).ifindex).write(packet::ifindex(ctx));
        (&raw mut (*event).length).write(length);
        (&raw mut (*event).hook).write(hook as u8);
        (&raw mut (*event).pad).write([0; 2]);
        let at = (&raw mut (*event).packet).cast();
        let skb: *const __sk_buff = ctx.as_ptr().cast();
        let copied = bpf_skb_load_bytes(skb.cast(), 0, at, captured) == 0;
        (&raw mut (*event).captured).write(if copied { captured as u8 } else { 0 });
    }
    entry.submit(0);
}
