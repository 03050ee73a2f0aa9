//! Link-layer addresses of the next hop, from the kernel's routes and neighbours, so that the header is
//! written once and the packet does not pass the kernel's routing a second time. An answer is valid within
//! the same tick of the kernel's clock, a few milliseconds, and on one CPU.
//!
//! A neighbour entry goes stale while nobody sends by it, and the kernel validates it again only for what it
//! sends itself. So once a second a packet to each address takes the kernel's own path, which also finds out
//! that a router has another link-layer address; so does every packet while there is no valid entry.

use core::sync::atomic::AtomicU64;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup},
    btf_maps::PerCpuArray,
    helpers::{bpf_fib_lookup as look_up, bpf_jiffies64},
    macros::btf_map,
    programs::TcContext,
};
use kilo_common::{
    map_table,
    maps::{CONFIG_MASQUERADE, Config},
};

use crate::{
    masquerade::clock,
    packet,
    subprogram::{Skb, subprogram},
};

/// `AF_INET`.
const INET: u8 = 2;
/// Destination and source in an Ethernet header, in pairs of bytes.
pub type Ends = [u16; 6];

/// A cached answer of the kernel; `key` is the tick in which it was given, with the destination above it.
/// Kernels where programs on one CPU interrupt each other neither masquerade by programs nor use this.
#[repr(C, align(8))]
struct Link {
    key: u64,
    /// Source address and type of service, by which routes may differ.
    from: u64,
    ifindex: u32,
    ends: Ends,
    route: [u64; 8],
}

const _: () = assert!(size_of::<bpf_fib_lookup>() == size_of::<[u64; 8]>());

#[btf_map(name = "link")]
static LINK: PerCpuArray<Link, { map_table::LINK.size as usize }> = PerCpuArray::new();

/// The last packet that took the kernel's path, by the last bits of its destination: the second, with the
/// address above it. Packets to two addresses that share an entry take that path more often, never less.
static ASKED: [AtomicU64; map_table::LINK.size as usize] =
    [const { AtomicU64::new(0) }; map_table::LINK.size as usize];

/// Link-layer destination and source of a frame that leaves by this interface towards an IPv4 address;
/// `None`: the kernel must send it. IP addresses are words as they lie in memory.
#[inline(always)]
pub fn addresses(
    ctx: &TcContext,
    config: &Config,
    ifindex: u32,
    [src, dst]: [u32; 2],
    tos: u8,
) -> Option<&'static Ends> {
    // Before Linux 6.10 the helper does not follow routes by mark.
    if config.flags & CONFIG_MASQUERADE == 0 || packet::mark(ctx) != 0 {
        return None;
    }
    let place = u32::from_be(dst) & (map_table::LINK.size - 1);
    // SAFETY: the entry is this CPU's own.
    let link = unsafe { &mut *LINK.get_ptr_mut(place)? };
    // SAFETY: a helper without arguments.
    let tick = u64::from(dst) << 32 | unsafe { bpf_jiffies64() } & 0xffff_ffff;
    // Without the ECN bits, by which nothing is routed.
    let from = u64::from(tos & !3) << 32 | u64::from(src);
    if link.key == tick && link.from == from && link.ifindex == ifindex {
        return Some(&link.ends);
    }
    if ask(ctx.as_ptr().cast(), link, ifindex, u64::from(dst) << 32 | u64::from(src), u32::from(tos)) == 0 {
        return None;
    }
    (link.key, link.from, link.ifindex) = (tick, from, ifindex);
    Some(&link.ends)
}

subprogram! {
    /// Asks the kernel, unless this packet must take its path; zero: no addresses.
    fn ask(link: &mut Link, ifindex: u32, ends: u64, tos: u32) -> u32 = ask_kernel as link_ask
}

#[inline(always)]
fn ask_kernel(skb: Skb, link: &mut Link, ifindex: u32, ends: u64, tos: u32) -> u32 {
    let (src, dst) = (ends as u32, (ends >> 32) as u32);
    link.key = 0;
    let now = u64::from(dst) << 32 | u64::from(clock::glance());
    // SAFETY: a word of this program's, read and written at once; the linker knows no atomic loads and
    // stores.
    unsafe {
        let asked = ASKED[(u32::from_be(dst) & (map_table::LINK.size - 1)) as usize].as_ptr();
        if asked.read_volatile() != now {
            asked.write_volatile(now);
            return 0;
        }
    }
    let route: *mut bpf_fib_lookup = (&raw mut link.route).cast();
    // SAFETY: the memory is this CPU's, has this size and is aligned, and the context is valid.
    unsafe {
        route.cast::<u64>().write(u64::from(INET));
        (*route).ifindex = ifindex;
        (*route).__bindgen_anon_2.tos = tos as u8;
        (*route).__bindgen_anon_3.ipv4_src = src;
        (*route).__bindgen_anon_4.ipv4_dst = dst;
        ends_of(skb, &mut *route, ifindex, &mut link.ends)
    }
}

/// Asks the kernel for the link-layer addresses of a route out of this interface; zero: there are none, or
/// the route leads elsewhere.
#[inline(always)]
fn ends_of(skb: Skb, route: &mut bpf_fib_lookup, ifindex: u32, ends: &mut Ends) -> u32 {
    let size = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: callers pass the context, which is valid for the whole program, and the structure has that
    // size.
    let found = unsafe { look_up(skb.cast(), route, size, BPF_FIB_LOOKUP_OUTPUT) };
    if found != 0 || route.ifindex != ifindex {
        return 0;
    }
    // SAFETY: both addresses, one behind the other, in a structure aligned to eight bytes.
    let [a, b, c, d, e, f] = unsafe { *(&raw const route.smac).cast::<Ends>() };
    *ends = [d, e, f, a, b, c];
    // Without a link layer there are no addresses.
    u32::from(d | e | f != 0)
}

/// Writes the addresses at the start of a frame.
///
/// # Safety
/// There must be room for them.
#[inline(always)]
pub unsafe fn write(ends: &Ends, frame: *mut u16) {
    let mut i = 0;
    while i < ends.len() {
        // SAFETY: as the caller promises. Word by word: all at once would be a call that copies bytes.
        unsafe { frame.add(i).write_volatile(ends[i]) };
        i += 1;
    }
}
