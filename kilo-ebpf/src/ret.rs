//! What programs return: one type in Rust, one number between BPF functions and to the kernel.

use crate::subprogram::{Skb, subprogram};
use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_redir_neigh,
    helpers::{bpf_redirect, bpf_redirect_neigh},
    programs::TcContext,
};
use kilo_common::{drop_reasons::DropReason, event::Hook, maps::Config};

use crate::{maps, monitor, orphaned, packet};

/// What becomes of a packet: an action of the kernel, or a drop that is counted and reported.
pub type Verdict = Result<Act, DropReason>;

/// An action of the kernel (`TC_ACT_*`, or what a helper that redirects has returned).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Act(i32);

impl Act {
    /// Goes on with the next program on the hook, and then with the stack.
    pub const NEXT: Self = Self(-1);
    /// Goes on with the stack at once.
    pub const STACK: Self = Self(0);
    /// Ends the packet here (`TC_ACT_SHOT`).
    pub const END: Self = Self(2);

    /// Sends the packet out of an interface as it is, so it must have a link-layer header if the interface
    /// uses one.
    #[inline(always)]
    pub fn transmit(ifindex: u32) -> Self {
        Self::redirect(ifindex, false)
    }

    /// Hands the packet to the stack, as received on that interface.
    #[inline(always)]
    pub fn receive(ifindex: u32) -> Self {
        Self::redirect(ifindex, true)
    }

    /// [`Self::receive`] or [`Self::transmit`], by `received`.
    #[inline(always)]
    pub fn redirect(ifindex: u32, received: bool) -> Self {
        // `BPF_F_INGRESS`.
        let flags = u64::from(received);
        // SAFETY: a helper without pointers.
        Self(unsafe { bpf_redirect(ifindex, flags) } as i32)
    }

    /// Sends the packet to the next hop by the kernel's routes; the kernel also resolves its link-layer
    /// address.
    #[inline(always)]
    pub fn neighbour(ifindex: u32) -> Self {
        // SAFETY: no parameters are passed.
        Self(unsafe { bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0) } as i32)
    }

    /// As [`Self::neighbour`], to a known next hop; the kernel takes its link-layer address from its
    /// neighbour table.
    #[inline(always)]
    pub fn next_hop(ifindex: u32, hop: &mut bpf_redir_neigh) -> Self {
        let size = size_of::<bpf_redir_neigh>() as i32;
        // SAFETY: the helper reads the structure, which has that size.
        Self(unsafe { bpf_redirect_neigh(ifindex, hop, size, 0) } as i32)
    }

    /// What a helper that redirects, or a function that ends packets, has returned.
    #[inline(always)]
    pub const fn of(returned: i32) -> Self {
        Self(returned)
    }

    /// The number that the kernel expects.
    #[inline(always)]
    pub const fn code(self) -> i32 {
        self.0
    }
}

/// Runs a program, and counts and reports what it drops.
#[expect(clippy::needless_pass_by_value, reason = "the entry points own their context")]
#[inline(always)]
pub fn run(ctx: TcContext, hook: Hook, program: impl FnOnce(&TcContext, &'static Config) -> Verdict) -> i32 {
    // The array has its one entry from the start; zeroed it means: nothing is ours.
    let Some(config) = maps::CONFIG.get(0) else { return Act::NEXT.code() };
    if orphaned::is_over(&ctx, config, hook) {
        return Act::NEXT.code();
    }
    match program(&ctx, config) {
        Ok(act) => act.code(),
        Err(reason) => dropped(ctx.as_ptr().cast(), reason.index(), hook as u32),
    }
}

/// What a subprogram returns: an action of the kernel, or the index of a drop reason (no index is an action's
/// number).
#[inline(always)]
pub fn to_code(verdict: Verdict) -> i32 {
    match verdict {
        Ok(act) => act.code(),
        Err(reason) => reason.index() as i32,
    }
}

/// The inverse of [`to_code`].
#[inline(always)]
pub fn from_code(code: i32) -> Verdict {
    match DropReason::from_index(code as u32) {
        Some(reason) => Err(reason),
        None => Ok(Act(code)),
    }
}

subprogram! {
    /// Counts and reports a packet that is dropped. A subprogram, because the stack for a log record would
    /// add to its callers'.
    pub fn dropped(reason: u32, hook: u32) -> i32 = drop_packet as dropped_packet
}

#[inline(always)]
fn drop_packet(skb: Skb, reason: u32, hook: u32) -> i32 {
    let ctx = TcContext::new(skb);
    maps::count(reason);
    monitor::report(&ctx, hook, reason);
    // Loaded with the level off, the verifier removes this.
    aya_log_ebpf::debug!(&ctx, "dropped: reason {} on interface {}", reason, packet::ifindex(&ctx));
    Act::END.code()
}
