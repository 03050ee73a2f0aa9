//! Fast path for most relayed packets: does what [`arrived`](super::arrived) does, with fewer instructions,
//! for whole datagrams of a bound pair in an Ethernet frame while the next hop towards the other end is
//! known.
//!
//! The next hop is cached by port, for at most [`LASTS`] ticks of the kernel's clock, and until the agent
//! writes the port again, as it does when an end is bound again or routes change. The kernel gets the hop's
//! address with each packet, and takes its link-layer address from its neighbour table, which it keeps valid
//! as for its own packets. All CPUs share the cache: a hop that changes while two of them read it costs a
//! packet.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup, bpf_redir_neigh,
    },
    btf_maps::Array,
    helpers::{bpf_csum_update, bpf_fib_lookup as look_up, bpf_jiffies64, bpf_ktime_get_coarse_ns},
    macros::btf_map,
    programs::TcContext,
};
use kilo_common::{
    checksum::{add, difference_of_halves, of_udp, update_word, was_whole},
    counters::Action,
    drop_reasons::DropReason,
    encap::UDP_LEN,
    map_table,
    maps::{CONFIG_RELAY, Config},
    packet::{ETHERNET_LEN, IPV6_LEN, Ipv4, Ipv4Header, protocol},
    relay::{self, Arrival, Budget, Fate, Port},
};

use crate::{
    cb,
    ip::{Ip, V6, halves},
    maps::{RELAY, count_action},
    ret::{Act, Verdict, from_code},
    subprogram::{Skb, subprogram},
    word_memory::Words,
};

/// Ticks for which a cached next hop is valid: 2.5 to 25 s, by the kernel's clock. Changes of routes while no
/// agent runs take effect that much later.
const LASTS: u64 = 2_500;
/// Offset of the checksum in a UDP header.
const UDP_CHECKSUM: usize = 6;
/// Result of a subprogram: nothing was done.
const NOTHING: i32 = 1002;
const _: () = assert!(DropReason::from_index(NOTHING as u32).is_none());

/// State of a port that is kept between packets.
#[repr(C, align(8))]
pub struct PortState {
    budget: Budget,
    /// The tick of the last route lookup.
    asked: u64,
    /// What was looked up ([`key`]).
    key: u64,
    hop: bpf_redir_neigh,
}

#[btf_map(name = "relay_state")]
static RELAY_STATE: Array<PortState, { map_table::RELAY_STATE.size as usize }> = Array::new();

/// The state of this port; `None`: the port is not one of a relay's.
#[inline(always)]
pub fn state(port: u16) -> Option<&'static mut PortState> {
    let state = RELAY_STATE.get_ptr_mut(relay::slot(port))?;
    // SAFETY: entries of an array are there as long as the program.
    Some(unsafe { &mut *state })
}

/// The time while one packet is handled: the tick, and nanoseconds, which are read only if needed because
/// they take a helper.
pub struct Clock {
    tick: u64,
    nanoseconds: u64,
}

impl Clock {
    #[inline(always)]
    pub fn new() -> Self {
        // SAFETY: a helper without arguments.
        Self { tick: unsafe { bpf_jiffies64() }, nanoseconds: 0 }
    }

    #[inline(always)]
    fn nanoseconds(&mut self) -> u64 {
        if self.nanoseconds == 0 {
            // SAFETY: as above.
            self.nanoseconds = unsafe { bpf_ktime_get_coarse_ns() };
        }
        self.nanoseconds
    }
}

/// Whether the port may send this packet on.
#[inline(always)]
pub fn may_pass(ctx: &TcContext, state: &mut PortState, port: &Port, clock: &mut Clock) -> bool {
    state.budget.spend(ctx.len(), port, clock.tick, || clock.nanoseconds())
}

/// Ingress of an uplink with Ethernet header; `None`: nothing is done, and `lan_ingress` must decide.
#[inline(always)]
pub fn take<O: Whole>(ctx: &TcContext, config: &Config) -> Option<Verdict> {
    if config.flags & CONFIG_RELAY == 0 || protocol_of::<O>(ctx) != protocol::UDP {
        return None;
    }
    match whole::<O>(ctx.as_ptr().cast()) {
        NOTHING => None,
        code => Some(from_code(code)),
    }
}

/// Protocol of the packet, as its header says; 0 when that is not in the linear part.
#[inline(always)]
fn protocol_of<O: Whole>(ctx: &TcContext) -> u8 {
    let start = ctx.data() + ETHERNET_LEN;
    if start + O::HEADER_LEN > ctx.data_end() {
        return 0;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    unsafe { *((start + O::PROTOCOL) as *const u8) }
}

/// How a whole packet's header of either family is read, and gets the relay's addresses.
pub trait Whole: Ip {
    type Header;
    /// Offset of the protocol in the header.
    const PROTOCOL: usize;

    /// Type of service or traffic class, and length, of a packet without options that may travel on; `None`:
    /// the slow path decides.
    fn plain(header: &Self::Header) -> Option<(u8, u32)>;
    /// Source and destination as maps hold them.
    fn ends(header: &Self::Header) -> [[u64; 2]; 2];
    /// What this change of addresses adds to the kernel's partial sums.
    fn difference(old: [[u64; 2]; 2], new: [[u64; 2]; 2]) -> u32;
    /// Writes these addresses and lowers the TTL; `None` when that is used up.
    fn rewrite(header: &mut Self::Header, ends: [[u64; 2]; 2]) -> Option<()>;
    /// Fills in the lookup of a route between two addresses.
    fn ask(route: &mut bpf_fib_lookup, tos: u32, ends: [[u64; 2]; 2]);
}

/// The last word of an address as maps hold it: all of an IPv4 address.
#[inline(always)]
const fn last_word(addr: [u64; 2]) -> u32 {
    (u64::from_le(addr[1]) >> 32) as u32
}

impl Whole for Ipv4 {
    type Header = Ipv4Header;
    const PROTOCOL: usize = 9;

    #[inline(always)]
    fn plain(ip: &Ipv4Header) -> Option<(u8, u32)> {
        let is_plain = ip.is_plain() && ip.ttl > 1;
        is_plain.then_some((ip.tos, u32::from(u16::from_be(ip.total_len))))
    }
    #[inline(always)]
    fn ends(ip: &Ipv4Header) -> [[u64; 2]; 2] {
        [ip.src, ip.dst].map(|addr| Self::mapped(addr.to_ne_bytes()))
    }
    #[inline(always)]
    fn difference(old: [[u64; 2]; 2], new: [[u64; 2]; 2]) -> u32 {
        let changed = |at: usize| add(!last_word(old[at]), last_word(new[at]));
        add(changed(0), changed(1))
    }
    #[inline(always)]
    fn rewrite(ip: &mut Ipv4Header, ends: [[u64; 2]; 2]) -> Option<()> {
        let [by, to] = ends.map(last_word);
        // The header's checksum cancels what the addresses add to a sum over the whole packet.
        ip.checksum = update_word(update_word(ip.checksum, ip.src, by), ip.dst, to);
        (ip.src, ip.dst) = (by, to);
        ip.lower_ttl()
    }
    #[inline(always)]
    fn ask(route: &mut bpf_fib_lookup, tos: u32, ends: [[u64; 2]; 2]) {
        const INET: u8 = 2;
        route.family = INET;
        route.__bindgen_anon_2.tos = tos as u8;
        [route.__bindgen_anon_3.ipv4_src, route.__bindgen_anon_4.ipv4_dst] = ends.map(last_word);
    }
}

/// An IPv6 header as it stands in a packet.
#[repr(C)]
pub struct V6Header {
    /// Version, traffic class, flow label.
    first: u32,
    payload_len: u16,
    next_header: u8,
    hop_limit: u8,
    ends: [[u64; 2]; 2],
}

const _: () = assert!(size_of::<V6Header>() == IPV6_LEN);

impl Whole for V6 {
    type Header = V6Header;
    const PROTOCOL: usize = 6;

    #[inline(always)]
    fn plain(ip: &V6Header) -> Option<(u8, u32)> {
        let first = u32::from_be(ip.first);
        let is_plain = first >> 28 == 6 && ip.hop_limit > 1;
        is_plain.then_some(((first >> 20) as u8, u32::from(u16::from_be(ip.payload_len)) + IPV6_LEN as u32))
    }
    #[inline(always)]
    fn ends(ip: &V6Header) -> [[u64; 2]; 2] {
        ip.ends
    }
    #[inline(always)]
    fn difference(old: [[u64; 2]; 2], new: [[u64; 2]; 2]) -> u32 {
        add(difference_of_halves(old[0], new[0]), difference_of_halves(old[1], new[1]))
    }
    #[inline(always)]
    fn rewrite(ip: &mut V6Header, ends: [[u64; 2]; 2]) -> Option<()> {
        ip.hop_limit = ip.hop_limit.checked_sub(1)?;
        ip.ends = ends;
        Some(())
    }
    #[inline(always)]
    fn ask(route: &mut bpf_fib_lookup, tos: u32, [src, dst]: [[u64; 2]; 2]) {
        const INET6: u8 = 10;
        route.family = INET6;
        route.__bindgen_anon_2.flowinfo = (tos << 20).to_be();
        // SAFETY: sixteen bytes either state.
        unsafe {
            route.__bindgen_anon_3.ipv6_src = core::mem::transmute::<[u64; 2], [u32; 4]>(src);
            route.__bindgen_anon_4.ipv6_dst = core::mem::transmute::<[u64; 2], [u32; 4]>(dst);
        }
    }
}

/// The headers at the start of a frame, and the first bytes of the payload.
struct Frame<'a, O: Whole> {
    ip: &'a mut O::Header,
    /// Ports, length, checksum.
    udp: &'a mut [u16; 4],
    first: &'a [u8; 8],
}

#[inline(always)]
const fn whole_len<O: Whole>() -> usize {
    ETHERNET_LEN + O::HEADER_LEN + UDP_LEN + 8
}

#[inline(always)]
fn frame<O: Whole>(ctx: &TcContext) -> Option<Frame<'_, O>> {
    let start = ctx.data();
    if start + whole_len::<O>() > ctx.data_end() {
        return None;
    }
    let udp = start + ETHERNET_LEN + O::HEADER_LEN;
    // SAFETY: the bounds are checked, programs may read and write packets at any address, and the parts do
    // not overlap.
    Some(unsafe {
        Frame {
            ip: &mut *((start + ETHERNET_LEN) as *mut _),
            udp: &mut *(udp as *mut _),
            first: &*((udp + UDP_LEN) as *const _),
        }
    })
}

subprogram! {
    fn whole[O: Whole]() -> i32 = relay_whole;
    by O::V6 => {
        false => relay_forward_whole[Ipv4],
        true => relay_forward_whole_v6[V6],
    }
}

#[inline(always)]
fn relay_whole<O: Whole>(skb: Skb) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(old) = frame::<O>(&ctx) else { return NOTHING };
    let Some((tos, length)) = O::plain(old.ip) else { return NOTHING };
    let ends = O::ends(old.ip);
    let (ports, checksum) = ([old.udp[0], old.udp[1]], old.udp[3]);
    let [source_port, port] = ports.map(u16::from_be);
    if !relay::is_port(port)
        || length < (whole_len::<O>() - ETHERNET_LEN) as u32
        || length + ETHERNET_LEN as u32 > ctx.len()
    {
        return NOTHING;
    }
    let Some(entry) = RELAY.get_ptr_mut(&u32::from(port)) else { return NOTHING };
    let [source, local] = ends;
    let arrival = Arrival { source, local, source_port, port, first: *old.first, is_fragment: false };
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    let pair = unsafe { &*entry };
    if relay::at_port(&arrival, Some(pair)) != Fate::Forward {
        return NOTHING;
    }
    let Some(state) = state(port) else { return NOTHING };
    let clock = &mut Clock::new();
    if !is_known::<O>(skb, state, pair, u32::from(tos & !3), clock.tick) {
        return NOTHING;
    }
    if !may_pass(&ctx, state, pair, clock) {
        return DropReason::RelayLimit.index() as i32;
    }
    // SAFETY: as above; that a packet is counted twice or not at all by two CPUs harms nobody.
    unsafe { (*entry).packets += 1 };
    let new_ends = [halves(&pair.by), halves(&pair.to)];
    let new_ports = [pair.by_port.to_be(), pair.to_port.to_be()];
    let address = O::difference(ends, new_ends);
    // A UDP checksum of zero means that there is none.
    if checksum != 0 {
        let at = ETHERNET_LEN + O::HEADER_LEN + UDP_CHECKSUM;
        let kind = u64::from(BPF_F_MARK_MANGLED_0 | BPF_F_PSEUDO_HDR);
        if ctx.l4_csum_replace(at, 0, u64::from(address), kind).is_err() {
            return DropReason::Rewrite.index() as i32;
        }
    }
    if checksum != 0 {
        let Some(new) = frame::<O>(&ctx) else { return DropReason::Rewrite.index() as i32 };
        let changed = |at: usize| u32::from(!ports[at]) + u32::from(new_ports[at]);
        let difference = changed(0) + changed(1);
        // As the helper would, which takes six times as long; sums that it may leave alone are passed to it.
        if was_whole(checksum, new.udp[3], address) {
            new.udp[3] = of_udp(new.udp[3], difference);
        } else if !ports_by_kernel::<O>(&ctx, difference) {
            return DropReason::Rewrite.index() as i32;
        }
    }
    let Some(new) = frame::<O>(&ctx) else { return DropReason::Rewrite.index() as i32 };
    if O::V6 {
        // As in masquerading: a sum over the whole packet that the device computed.
        // SAFETY: the context is valid; without such a sum the helper refuses.
        let _ = unsafe { bpf_csum_update(skb.cast(), address) };
    }
    if O::rewrite(new.ip, new_ends).is_none() {
        return DropReason::Malformed.index() as i32;
    }
    (new.udp[0], new.udp[1]) = (new_ports[0], new_ports[1]);
    cb::sent(&ctx);
    count_action(Action::Relay);
    Act::next_hop(pair.ifindex, &mut state.hop).code()
}

/// Applies the change of the ports through the kernel, which knows whether a device completes the checksum.
#[inline(always)]
fn ports_by_kernel<O: Whole>(ctx: &TcContext, difference: u32) -> bool {
    let at = ETHERNET_LEN + O::HEADER_LEN + UDP_CHECKSUM;
    ctx.l4_csum_replace(at, 0, u64::from(difference), u64::from(BPF_F_MARK_MANGLED_0)).is_ok()
}

/// What a cached next hop is for: the type of service, and the agent's last write, whose number changes when
/// an end is bound again or routes change.
#[inline(always)]
const fn key(pair: &Port, tos: u32) -> u64 {
    (pair.written as u64) << 32 | tos as u64
}

/// Whether the next hop towards the pair's other end is known.
#[inline(always)]
fn is_known<O: Whole>(skb: Skb, state: &mut PortState, pair: &Port, tos: u32, tick: u64) -> bool {
    // Before Linux 6.10 the helper does not follow routes by mark.
    // SAFETY: the context is valid for the whole program.
    if unsafe { (*skb).mark } != 0 {
        return false;
    }
    let key = key(pair, tos);
    if tick.wrapping_sub(state.asked) < LASTS && state.key == key {
        return true;
    }
    if ask::<O>(skb, state, pair, tos) == 0 {
        return false;
    }
    (state.asked, state.key) = (tick, key);
    true
}

subprogram! {
    /// Looks up the next hop; zero: there is none, its link-layer address is not known yet, or the packet is
    /// too long.
    fn ask[O: Whole](state: &mut PortState, pair: &Port, tos: u32) -> u32 = ask_kernel;
    by O::V6 => {
        false => relay_ask[Ipv4],
        true => relay_ask_v6[V6],
    }
}

#[inline(always)]
fn ask_kernel<O: Whole>(skb: Skb, state: &mut PortState, pair: &Port, tos: u32) -> u32 {
    state.asked = 0;
    let mut route = Words::<bpf_fib_lookup, 8>::new();
    let route = route.zero();
    route.ifindex = pair.ifindex;
    O::ask(route, tos, [halves(&pair.by), halves(&pair.to)]);
    let size = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: the context is valid for the whole program, and the structure has that size.
    let found = unsafe { look_up(skb.cast(), route, size, BPF_FIB_LOOKUP_OUTPUT) };
    // SAFETY: both families' addresses begin there, and the bytes behind the shorter one are zero.
    state.hop.__bindgen_anon_1.ipv6_nh = unsafe { route.__bindgen_anon_4.ipv6_dst };
    state.hop.nh_family = u32::from(route.family);
    u32::from(found == 0 && route.ifindex == pair.ifindex)
}
