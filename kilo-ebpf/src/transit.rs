//! What `lan_ingress` has found out about a packet in transit, told to
//! `kilo_egress` in the packet's control block (`skb->cb`), so that tables are
//! not asked twice. The stack writes its own data there before it sends
//! anything, so nobody else can tell this; where a kernel does not carry the
//! block over a redirection, `kilo_egress` asks the tables.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::maps::{CONFIG_LEADER, Config, HOP_KIND_WIREGUARD, HOP_REMOTE};

use crate::maps::hop;

/// Two words no other user of the control block writes by chance: "kilotran".
const CHECKED: [u32; 2] = [u32::from_be_bytes(*b"kilo"), u32::from_be_bytes(*b"tran")];

/// Says that WireGuard may have the packet: another node of the location sent
/// it from a prefix of its own, so it is not to be masqueraded, and it is for
/// another location.
#[inline(always)]
pub fn mark(ctx: &TcContext) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and these words are a program's to write.
    unsafe {
        (*skb).cb[0] = CHECKED[0];
        (*skb).cb[1] = CHECKED[1];
    }
}

/// True when [`mark`] was said of this packet, and WireGuard is the way out of
/// the location. Apart, so that what is known of the configuration here does
/// not make the verifier go through the rest of the program again.
#[inline(never)]
pub fn is_for_wireguard(skb: *mut __sk_buff, config: &Config) -> bool {
    // SAFETY: the context is valid for the whole program.
    let marked = unsafe { (*skb).cb[0] == CHECKED[0] && (*skb).cb[1] == CHECKED[1] };
    marked
        && config.flags & CONFIG_LEADER != 0
        && hop(HOP_REMOTE).is_some_and(|hop| hop.kind == HOP_KIND_WIREGUARD)
}
