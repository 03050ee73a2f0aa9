//! Seconds of `CLOCK_MONOTONIC`, as the agent's NAT GC reads them.

use core::sync::atomic::AtomicU64;

use aya_ebpf::helpers::{bpf_jiffies64, bpf_ktime_get_coarse_ns};

/// The second that was read last, with the low half of its tick above it. Both are read and written as one
/// word, by all CPUs.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The second, as of the last tick: cheaper than the exact time.
#[inline(always)]
pub fn now() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_ktime_get_coarse_ns() } / 1_000_000_000) as u32
}

/// As [`now`], without a helper call if another packet has read the clock in this tick (`bpf_jiffies64`
/// becomes a load). It may be late by a tick or, with a chance of one in 2^32, as old as the last packet:
/// compare entries with it, but do not write it.
#[inline(always)]
pub fn glance() -> u32 {
    // SAFETY: a helper without arguments.
    let tick = unsafe { bpf_jiffies64() } as u32;
    // SAFETY: a word of this program's; the linker knows no atomic loads and stores, and
    // needs none: one of 8 bytes is one instruction.
    let last = unsafe { LAST.as_ptr().read_volatile() };
    if (last >> 32) as u32 == tick {
        return last as u32;
    }
    let now = now();
    // SAFETY: as above.
    unsafe { LAST.as_ptr().write_volatile(u64::from(tick) << 32 | u64::from(now)) };
    now
}
