//! What a program returns: an action of the kernel, or a drop that is counted and reported.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::{counters::DropReason, event::Hook, maps::Config};

use crate::{maps, monitor, packet};

/// Goes on with the next program on the hook, and then with the stack.
pub const TC_ACT_UNSPEC: i32 = -1;
/// Goes on with the stack at once.
pub const TC_ACT_OK: i32 = 0;
/// Ends a packet.
pub const TC_ACT_SHOT: i32 = 2;
/// `bpf_redirect` (`BPF_F_INGRESS`): to the stack, as received on that interface.
pub const REDIRECT_INGRESS: u64 = 1;

/// Runs a program, and counts and reports what it drops.
#[expect(clippy::needless_pass_by_value, reason = "the entry points own their context")]
#[inline(always)]
pub fn verdict(
    ctx: TcContext,
    hook: Hook,
    program: impl FnOnce(&TcContext, &'static Config) -> Result<i32, DropReason>,
) -> i32 {
    // The array has its one entry from the start; zeroed it means: nothing is ours.
    let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
    match program(&ctx, config) {
        Ok(action) => action,
        Err(reason) => dropped(ctx.as_ptr().cast(), reason.index(), hook as u32),
    }
}

/// What a part of a program that has a stack of its own answers: an action
/// of the kernel, or the index of a drop reason (none is an action's number).
#[inline(always)]
pub fn to_code(result: Result<i32, DropReason>) -> i32 {
    match result {
        Ok(action) => action,
        Err(reason) => reason.index() as i32,
    }
}

/// The inverse of [`to_code`].
#[inline(always)]
pub fn from_code(code: i32) -> Result<i32, DropReason> {
    match DropReason::from_index(code as u32) {
        Some(reason) => Err(reason),
        None => Ok(code),
    }
}

/// Apart, because what a log record takes of the stack adds up in its callers.
#[inline(never)]
pub fn dropped(skb: *mut __sk_buff, reason: u32, hook: u32) -> i32 {
    let ctx = TcContext::new(skb);
    maps::count(reason);
    monitor::report(&ctx, hook, reason);
    // Loaded with the level off, the verifier removes this.
    aya_log_ebpf::debug!(&ctx, "dropped: reason {} on interface {}", reason, packet::ifindex(&ctx));
    TC_ACT_SHOT
}
