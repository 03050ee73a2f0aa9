//! Link-layer addresses of the next hop, asked of the kernel's routes and neighbours for each packet: so the
//! header is written once, and the packet needs no second way through the kernel's routing.
//!
//! A neighbour's entry grows old while nobody sends by it, and the kernel proves it anew only by what it sends
//! itself. So once a second a packet towards each address goes the kernel's own way, which also finds out
//! that a router has another link-layer address; and so does every packet while there is no valid entry.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup},
    helpers::bpf_fib_lookup as look_up,
    programs::TcContext,
};
use core::sync::atomic::AtomicU64;

use crate::masquerade::{clock, work::this_cpu};

/// `AF_INET`.
const INET: u8 = 2;
/// Bytes of destination and source in an Ethernet header.
pub const ADDRESSES: usize = 12;

/// The last packets that went the kernel's way, by the last bits of the address they went to: the second, and the
/// address above. Two addresses with one place ask more often, and never less.
static ASKED: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Destination and source of a frame that leaves by this interface towards an IPv4 address; `None`: the kernel is to
/// send it. Addresses are words as they lie in memory.
#[inline(always)]
pub fn addresses(
    ctx: &TcContext,
    ifindex: u32,
    src: u32,
    dst: u32,
    tos: u8,
) -> Option<&'static [u16; ADDRESSES / 2]> {
    let place = u32::from_be(dst) as usize & (ASKED.len() - 1);
    let now = u64::from(dst) << 32 | u64::from(clock::glance());
    // SAFETY: words of this program's, of which each is read and written at once; the linker knows no atomic
    // loads and stores.
    unsafe {
        let asked = ASKED[place].as_ptr();
        if asked.read_volatile() != now {
            asked.write_volatile(now);
            return None;
        }
    }
    let work = this_cpu()?;
    let route: *mut bpf_fib_lookup = (&raw mut work.route).cast();
    // SAFETY: the memory is this CPU's, has this size and is aligned, and the context is valid.
    let answer = unsafe {
        route.cast::<u64>().write(u64::from(INET));
        (*route).ifindex = ifindex;
        (*route).__bindgen_anon_2.tos = tos;
        (*route).__bindgen_anon_3.ipv4_src = src;
        (*route).__bindgen_anon_4.ipv4_dst = dst;
        look_up(ctx.as_ptr().cast(), route, size_of::<bpf_fib_lookup>() as i32, BPF_FIB_LOOKUP_OUTPUT)
    };
    // SAFETY: as above.
    let (found, ends) =
        unsafe { ((*route).ifindex, &mut *(&raw mut (*route).smac).cast::<[u16; ADDRESSES / 2]>()) };
    let [a, b, c, d, e, f] = *ends;
    // Without a link layer there are no addresses.
    if answer != 0 || found != ifindex || d | e | f == 0 {
        return None;
    }
    *ends = [d, e, f, a, b, c];
    Some(ends)
}
