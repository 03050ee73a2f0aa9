//! The order of VXLAN packets. The device decapsulates GSO packets and fragments, which then wait in a queue of
//! its own (`net/core/gro_cells.c`) until this CPU is done with the batch that its NIC handed over.
//! A packet behind them that the programs decapsulated would overtake them, and TCP takes that for loss.

use core::sync::atomic::AtomicU64;

use aya_ebpf::helpers::bpf_jiffies64;

/// For how long the device may hold a packet: 20 ms to 200 ms, depending on the kernel's `HZ`.
const TICKS: u64 = 20;

/// The tick in which the device was last given a packet, on any CPU.
static LAST: AtomicU64 = AtomicU64::new(0);

#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() }
}

#[inline(always)]
fn last() -> u64 {
    // SAFETY: a word of this program's; the linker knows no atomic loads, and one of 8 bytes is one instruction.
    unsafe { LAST.as_ptr().read_volatile() }
}

/// Records that the device gets a packet whose order matters.
#[inline(always)]
pub fn given_to_device() {
    let now = now();
    // CPUs share the word, so it is written once in a tick.
    if last() != now {
        // SAFETY: as in `last`.
        unsafe { LAST.as_ptr().write_volatile(now) };
    }
}

/// True while the device may still hold a packet: those that follow take the same way.
#[inline(always)]
pub fn device_may_hold_packets() -> bool {
    // In this order: another CPU may write the next tick in between.
    let last = last();
    now().wrapping_sub(last) < TICKS
}
