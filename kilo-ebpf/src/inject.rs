//! Sends what the agent has written: it runs this program (`BPF_PROG_TEST_RUN`) instead of opening packet
//! sockets. Everything goes into the WireGuard device, whose program does the rest.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, helpers::bpf_clone_redirect, programs::TcContext};
use kilo_common::inject::Inject;

use crate::{cb, maps::CONFIG};

/// `EINVAL`: the agent named an unknown destination kind.
const INVALID: i32 = -22;

/// Sends the packet to where the first word of its control block says ([`Inject`]); returns 0, or the
/// kernel's error.
#[inline(always)]
pub fn inject(ctx: &TcContext) -> i32 {
    const STACK: u32 = Inject::Stack as u32;
    const TUNNEL: u32 = Inject::Tunnel as u32;
    const LAN: u32 = Inject::Lan as u32;
    const OUT: u32 = Inject::Out as u32;
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    let Some(config) = CONFIG.get(0) else { return INVALID };
    // SAFETY: the context is valid for the whole program.
    match unsafe { (*skb).cb[0] } {
        STACK => cb::forget(ctx),
        TUNNEL => cb::transit(ctx),
        LAN => cb::to_lan(ctx),
        // SAFETY: as above.
        OUT => cb::out(ctx, unsafe { (*skb).cb[1] }),
        _ => return INVALID,
    }
    // SAFETY: the context is valid.
    (unsafe { bpf_clone_redirect(skb, config.kilo_ifindex, 0) }) as i32
}
