//! Rewriting an address and a port through the kernel's helpers, which know
//! about checksums left to the device.

use crate::subprogram::{Skb, subprogram};
use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    helpers::bpf_csum_update,
    programs::TcContext,
};
use kilo_common::drop_reasons::DropReason;
use kilo_common::{nat::flow::layout, packet::protocol};

use super::{DONE, IPV6, scratch::this_cpu};

/// The destination is rewritten, not the source.
pub const DESTINATION: u32 = 4;
/// The packet has a transport header with ports: those of `this_cpu().key`'s protocol.
pub const FLOW: u32 = 8;
/// The packet is an ICMP error.
pub const ERROR: u32 = 16;
/// The packet is the one inside an ICMP error.
pub const INNER: u32 = 32;
/// The transport checksum is not in the packet, or left out.
pub const UNSEALED: u32 = 64;

subprogram! {
    /// Rewrites one end of the packet at `offset`, with its transport header at
    /// `payload`: from `this_cpu().old` and `old_port` to `new` and `new_port`.
    pub fn packet(offset: u32, payload: u32, flags: u32) -> u32 = rewritten as masquerade_rewrite
}

#[inline(always)]
fn rewritten(skb: Skb, offset: u32, payload: u32, flags: u32) -> u32 {
    match rewrite(&TcContext::new(skb), offset as usize, payload as usize, flags) {
        Ok(()) => DONE,
        Err(_) => DropReason::Rewrite.index(),
    }
}

#[inline(always)]
fn rewrite(ctx: &TcContext, offset: usize, payload: usize, flags: u32) -> Result<(), i64> {
    let Some(work) = this_cpu() else { return Err(0) };
    let v6 = flags & IPV6 != 0;
    let address = work.address_difference();
    // Inside an error the sum over the whole packet is not ours to follow.
    let pseudo = if flags & INNER == 0 { u64::from(BPF_F_PSEUDO_HDR) } else { 0 };
    if flags & FLOW != 0 {
        let Some(layout) = layout(work.key.protocol) else { return Err(0) };
        // A UDP checksum of zero means that there is none.
        let mangled = if work.key.protocol == protocol::UDP { u64::from(BPF_F_MARK_MANGLED_0) } else { 0 };
        let checksum = layout.checksum.filter(|_| flags & UNSEALED == 0).map(|at| payload + at);
        if work.old_port != work.new_port {
            if let Some(checksum) = checksum {
                let old = u64::from(u16::from_ne_bytes(work.old_port));
                let new = u64::from(u16::from_ne_bytes(work.new_port));
                ctx.l4_csum_replace(checksum, old, new, mangled | 2)?;
            }
            let at = if flags & DESTINATION == 0 { layout.src_port } else { layout.dst_port };
            ctx.store(payload + at, &work.new_port, 0)?;
        }
        if work.old == work.new {
            return Ok(());
        }
        if layout.pseudo_header
            && let Some(checksum) = checksum
        {
            ctx.l4_csum_replace(checksum, 0, u64::from(address), mangled | pseudo)?;
        }
    } else if flags & ERROR != 0 && v6 {
        ctx.l4_csum_replace(payload + 2, 0, u64::from(address), pseudo)?;
    }
    let destination = flags & DESTINATION != 0;
    if v6 {
        if flags & INNER == 0 {
            // A sum over the whole packet that the device computed: the helper
            // above counts on a header checksum, which IPv6 lacks.
            // SAFETY: the context is valid; without such a sum the helper refuses.
            let _ = unsafe { bpf_csum_update(ctx.skb.skb.cast(), address) };
        }
        ctx.store(offset + if destination { 24 } else { 8 }, &work.new, 0)
    } else {
        ctx.l3_csum_replace(offset + 10, 0, u64::from(address), 0)?;
        let Some(last) = work.new.last_chunk::<4>() else { return Err(0) };
        ctx.store(offset + if destination { 16 } else { 12 }, last, 0)
    }
}
