//! Signals (docs/design/failover.md): probes are reflected, and the roll call and ANNOUNCE are answered even
//! while no agent runs. All other signals go to the agent through a ring, and never to the stack.

use core::mem::offset_of;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_F_MARK_MANGLED_0, BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::{bpf_ktime_get_ns, bpf_ringbuf_query, bpf_skb_load_bytes},
    programs::TcContext,
};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    encap::UDP_LEN,
    event::Hook,
    forwarding::is_remote,
    lead::{Term, hop_of, term_of},
    map_table,
    maps::{CONFIG_GATEWAY, Config, FAMILY_V6, HOP_ACTING, HOP_LOCAL, HOP_REMOTE, Heard, SignalKey},
    packet::{ETHERNET_LEN, Ipv4, protocol},
    signal::{
        self, HEADER, Header, KERNEL, Kind, LONGEST,
        control::{CONTROL_PREFIX, sender_id},
        kernel::{self, Answer, KIND_AT, Raw, Taken},
    },
};
use network_types::udp::UdpHdr;

use crate::{
    cb,
    ip::{Ip, V6, halves, octets},
    leader_word,
    maps::{SIGNAL, SIGNAL_KEY, count_action, hop},
    packet, relay,
    ret::{Act, Verdict, from_code, to_code},
    sender::{DESTINATION_PORT, sender_of},
    subprogram::{Skb, subprogram},
};

/// Offsets of length and checksum in a UDP header.
const UDP_LENGTH: usize = offset_of!(UdpHdr, len);
const UDP_CHECKSUM: usize = offset_of!(UdpHdr, check);

/// Offsets of the source in IP headers; the destination follows right behind it.
const SOURCE_V4: usize = 12;
const SOURCE_V6: usize = 8;

/// The control prefix in the first half of an address, and the mask of its bits.
const CONTROL: u64 = u64::from_ne_bytes([
    CONTROL_PREFIX[0],
    CONTROL_PREFIX[1],
    CONTROL_PREFIX[2],
    CONTROL_PREFIX[3],
    CONTROL_PREFIX[4],
    CONTROL_PREFIX[5],
    0,
    0,
]);
const CONTROL_MASK: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);

/// True for control addresses, which stand for a gateway only inside tunnels.
#[inline(always)]
pub fn is_control<I: Ip>(addr: I::Addr) -> bool {
    I::V6 && I::mapped(addr)[0] & CONTROL_MASK == CONTROL
}

/// True for a whole datagram without IP options to the port of signals that begins like a signal. The caller
/// has checked that it is for this node.
#[inline(always)]
pub fn is_signal<I: Ip>(ctx: &TcContext, offset: usize, ip: &I) -> bool {
    let udp = offset + I::HEADER_LEN;
    ip.protocol() == protocol::UDP
        && !ip.is_fragment()
        && ip.header_len() == I::HEADER_LEN
        && packet::gso_size(ctx) == 0
        && packet::linear_word(ctx, udp + DESTINATION_PORT)
            .unwrap_or_else(|| ctx.load(udp + DESTINATION_PORT).unwrap_or(0))
            == signal::PORT.to_be()
        && ctx.load(udp + UDP_LEN).is_ok_and(|first| signal::begins(&first))
}

/// Result of [`taken_from_lan`]: the kernel answers the signal. The caller calls the functions that do so,
/// because the stacks of functions that call each other add up.
const ANSWER: i32 = 1003;
const _: () = assert!(DropReason::from_index(ANSWER as u32).is_none());

/// Takes a signal from the network between the nodes, addressed to this one.
#[inline(always)]
pub fn from_lan<O: Ip, const LINK: usize>(skb: Skb, config: &Config) -> i32 {
    match taken_from_lan::<O, LINK>(skb) {
        ANSWER => match answer(skb, config, (LINK + O::HEADER_LEN + UDP_LEN) as u32, u32::from(O::V6)) {
            ANSWER => answered::<O, LINK>(skb),
            code => code,
        },
        code => code,
    }
}

subprogram! {
    fn taken_from_lan[O: Ip, const LINK: usize]() -> i32 = read_from_lan;
    by (LINK, O::V6) => {
        (0, false) => signal_l3_v4[Ipv4, 0],
        (0, true) => signal_l3_v6[V6, 0],
        (_, false) => signal_lan_v4[Ipv4, ETHERNET_LEN],
        (_, true) => signal_lan_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn read_from_lan<O: Ip, const LINK: usize>(skb: Skb) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(O::read(&ctx, LINK).and_then(|ip| decide::<O, LINK>(&ctx, &ip)))
}

#[inline(always)]
fn decide<O: Ip, const LINK: usize>(ctx: &TcContext, ip: &O) -> Verdict {
    let skb = ctx.as_ptr().cast();
    sender_of::<O>(ctx, ip)?;
    let start = LINK + O::HEADER_LEN + UDP_LEN;
    let header = header(ctx, start)?;
    let address = octets(O::mapped(ip.src()));
    let hook = if LINK == 0 { Hook::L3Ingress } else { Hook::LanIngress } as u32;
    let taken = kernel::on_lan(header.kind);
    if taken == Taken::Reflect {
        rename(ctx, start)?;
        return reflect::<O, LINK>(ctx);
    }
    if header.kind == Kind::Reflected {
        has_room(&header)?;
        return from_code(heard(skb, &address, start, hook));
    }
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    let key = unsafe { SIGNAL_KEY.get(&address) }.ok_or(DropReason::UnknownSignal)?;
    kernel::check_sender(&header, key)?;
    match taken {
        Taken::Answer => Ok(Act::of(ANSWER)),
        Taken::Agent => {
            if header.length == KERNEL {
                from_code(prove(skb, key, start))?;
            }
            has_room(&header)?;
            from_code(heard(skb, &address, start, hook))
        }
        _ => Err(DropReason::UnknownSignal),
    }
}

subprogram! {
    /// Takes a signal that came through a tunnel, addressed to this node.
    pub fn from_tunnel[I: Ip](config: &Config) -> i32 = read_from_tunnel;
    by I::V6 => { false => signal_tunnel_v4[Ipv4], true => signal_tunnel_v6[V6] }
}

#[inline(always)]
fn read_from_tunnel<I: Ip>(skb: Skb, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(I::read(&ctx, 0).and_then(|ip| taken_from_tunnel::<I>(&ctx, config, &ip)))
}

#[inline(always)]
fn taken_from_tunnel<I: Ip>(ctx: &TcContext, config: &Config, ip: &I) -> Verdict {
    let skb = ctx.as_ptr().cast();
    let start = I::HEADER_LEN + UDP_LEN;
    let header = header(ctx, start)?;
    let (address, hook) = (octets(I::mapped(ip.src())), Hook::KiloIngress as u32);
    let from_gateway = is_control::<I>(ip.src());
    // From another location only: signals of this one's nodes come by the network between them.
    if !from_gateway && !I::prefix(config, ip.src()).is_some_and(|owner| is_remote(owner.hop)) {
        return Err(DropReason::UnknownSignal);
    }
    match kernel::in_tunnel(header.kind) {
        Taken::Reflect if config.flags & CONFIG_GATEWAY != 0 && !I::is_private(config, ip.dst()) => {
            rename(ctx, start)?;
            swap_addresses::<I>(ctx, 0)?;
            // WireGuard finds the peer by the address that the probe came from.
            cb::transit(ctx);
            count_action(Action::Reflect);
            Ok(Act::transmit(config.kilo_ifindex))
        }
        Taken::Agent => {
            has_room(&header)?;
            from_code(heard(skb, &address, start, hook))
        }
        Taken::Control if from_gateway && is_control::<I>(ip.dst()) => {
            // VPN peers have control addresses, too, and send only MOVED, without a tag.
            if header.kind != Kind::Moved {
                // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
                let key = unsafe { SIGNAL_KEY.get(&address) }.ok_or(DropReason::UnknownSignal)?;
                kernel::check_gateway(&header, key)?;
            }
            has_room(&header)?;
            from_code(heard(skb, &address, start, hook))
        }
        _ => Err(DropReason::UnknownSignal),
    }
}

/// True for those of this node's addresses to which signals in tunnels are sent.
#[inline(always)]
pub fn is_own<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    I::is_private(config, addr)
        || is_wireguard::<I>(config, addr)
        || I::V6 && I::mapped(addr) == halves(&config.control) && is_control::<I>(addr)
}

/// True for the first address of a pod CIDR of this gateway, which no pod has: unlike the location's WireGuard
/// address, it stays the same when locations come and go, so path probes are sent there, too. Where a pod CIDR
/// is larger than 256 addresses, true for others as well.
#[inline(always)]
pub fn is_of_pods<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    config.flags & CONFIG_GATEWAY != 0
        && I::ends_in_zero(addr)
        && I::prefix(config, addr).is_some_and(|owner| owner.hop == HOP_LOCAL)
}

/// True for the location's WireGuard address.
#[inline(always)]
fn is_wireguard<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    I::is_wireguard(config, addr)
}

/// The header of the signal at `start`, if its length agrees with that of UDP and fits the packet.
#[inline(always)]
fn header(ctx: &TcContext, start: usize) -> Result<Header, DropReason> {
    let bytes: [u8; 2] = ctx.load(start - UDP_LEN + UDP_LENGTH).map_err(|_| DropReason::Malformed)?;
    let length = (u16::from_be_bytes(bytes) as usize).wrapping_sub(UDP_LEN);
    if length > LONGEST || start + length > ctx.len() as usize {
        return Err(DropReason::Malformed);
    }
    let head: [u8; HEADER] = ctx.load(start).map_err(|_| DropReason::Malformed)?;
    signal::header(&head, length).map_err(|_| DropReason::Malformed)
}

/// Turns a probe into its answer.
#[inline(always)]
fn rename(ctx: &TcContext, start: usize) -> Result<(), DropReason> {
    let old: u16 = ctx.load(start + KIND_AT).map_err(|_| DropReason::Malformed)?;
    let [_, length] = old.to_ne_bytes();
    let new = u16::from_ne_bytes([Kind::Reflected as u8, length]);
    let flags = u64::from(BPF_F_MARK_MANGLED_0) | 2;
    ctx.store(start + KIND_AT, &new, 0).map_err(|_| DropReason::Rewrite)?;
    ctx.l4_csum_replace(start - UDP_LEN + UDP_CHECKSUM, u64::from(old), u64::from(new), flags)
        .map_err(|_| DropReason::Rewrite)
}

subprogram! {
    /// Checks the tag of the signal at `start`, which has [`KERNEL`] bytes.
    fn prove(key: &SignalKey, start: usize) -> i32 = prove_signal as signal_prove
}

#[inline(always)]
fn prove_signal(skb: Skb, key: &SignalKey, start: usize) -> i32 {
    let raw = TcContext::new(skb).load(start).map_err(|_| DropReason::Malformed);
    to_code(raw.and_then(|raw| kernel::authentic(&raw, key)).map(|()| Act::STACK))
}

subprogram! {
    /// Overwrites ROLL or ANNOUNCE, right behind its headers at `start`, with the answer, and returns
    /// [`ANSWER`].
    fn answer(config: &Config, start: u32, v6: u32) -> i32 = answer_signal as signal_answer
}

#[inline(always)]
fn answer_signal(skb: Skb, config: &Config, start: u32, v6: u32) -> i32 {
    let ctx = TcContext::new(skb);
    let start = start as usize;
    let written = header(&ctx, start).and_then(|header| {
        let ip = start - UDP_LEN;
        let source = if v6 == 0 {
            ctx.load(ip - Ipv4::HEADER_LEN + SOURCE_V4).map(Ipv4::mapped)
        } else {
            ctx.load::<[u64; 2]>(ip - V6::HEADER_LEN + SOURCE_V6)
        };
        let source = octets(source.map_err(|_| DropReason::Malformed)?);
        // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
        let key = unsafe { SIGNAL_KEY.get(&source) }.ok_or(DropReason::UnknownSignal)?;
        // Again, because the agent may have changed it meanwhile.
        kernel::check_sender(&header, key)?;
        write_answer(&ctx, config, start, &header, key)
    });
    to_code(written.map(|()| Act::of(ANSWER)))
}

subprogram! {
    /// Sends the answer back.
    fn answered[O: Ip, const LINK: usize]() -> i32 = send_answer;
    by (LINK, O::V6) => {
        (0, false) => signal_answered_l3_v4[Ipv4, 0],
        (0, true) => signal_answered_l3_v6[V6, 0],
        (_, false) => signal_answered_v4[Ipv4, ETHERNET_LEN],
        (_, true) => signal_answered_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn send_answer<O: Ip, const LINK: usize>(skb: Skb) -> i32 {
    to_code(reflect::<O, LINK>(&TcContext::new(skb)))
}

/// Writes the answer over ROLL or ANNOUNCE. Applies an ANNOUNCE first: moves this node's word.
#[inline(always)]
fn write_answer(
    ctx: &TcContext,
    config: &Config,
    start: usize,
    header: &Header,
    key: &SignalKey,
) -> Result<(), DropReason> {
    if header.length != KERNEL {
        return Err(DropReason::Malformed);
    }
    let mut raw: Raw = ctx.load(start).map_err(|_| DropReason::Malformed)?;
    kernel::authentic(&raw, key)?;
    let sender = sender_id(&config.control);
    let said = if header.kind == Kind::Announce {
        if !leader_word::obey(kernel::announced(&raw, header, key)?) {
            return Err(DropReason::StaleSignal);
        }
        Answer { kind: Kind::Follows, term: header.term, sender, cookie: 0, gateway: header.sender }
    } else {
        let (term, gateway) = stands(sender);
        Answer { kind: Kind::Present, term, sender, cookie: key.cookie, gateway }
    };
    let difference = kernel::answer(&mut raw, said, key);
    ctx.store(start, &raw, 0).map_err(|_| DropReason::Rewrite)?;
    ctx.l4_csum_replace(
        start - UDP_LEN + UDP_CHECKSUM,
        0,
        u64::from(difference),
        u64::from(BPF_F_MARK_MANGLED_0),
    )
    .map_err(|_| DropReason::Rewrite)
}

/// The term of this node's word, and the id of the gateway that it names; 0 when that has none.
#[inline(always)]
fn stands(own: u64) -> (Term, u64) {
    let word = leader_word::word(HOP_ACTING);
    let id = u32::from(hop_of(word));
    if id == HOP_REMOTE {
        return (term_of(word), own);
    }
    let gateway = hop(id).map_or(0, |hop| {
        let remote = &hop.remote;
        let address = if hop.family == FAMILY_V6 {
            halves(remote)
        } else {
            Ipv4::mapped([remote[0], remote[1], remote[2], remote[3]])
        };
        // SAFETY: as above.
        unsafe { SIGNAL_KEY.get(&octets(address)) }.map_or(0, |key| key.sender)
    });
    (term_of(word), gateway)
}

/// Sends a packet back to where it came from, by the interface it came in by.
#[inline(always)]
fn reflect<I: Ip, const LINK: usize>(ctx: &TcContext) -> Verdict {
    swap_addresses::<I>(ctx, LINK)?;
    if LINK != 0 {
        let [to, from]: [[u8; 6]; 2] = ctx.load(0).map_err(|_| DropReason::Rewrite)?;
        ctx.store(0, &[from, to], 0).map_err(|_| DropReason::Rewrite)?;
    }
    cb::sent(ctx);
    count_action(Action::Reflect);
    Ok(Act::transmit(packet::ifindex(ctx)))
}

/// Swaps the addresses, which leaves every checksum valid. Ports stay: each probe has another source port,
/// like a new flow, and its answer is a signal to the same port as all others.
#[inline(always)]
fn swap_addresses<I: Ip>(ctx: &TcContext, offset: usize) -> Result<(), DropReason> {
    if I::V6 {
        let [src, dst]: [[u64; 2]; 2] = ctx.load(offset + SOURCE_V6).map_err(|_| DropReason::Rewrite)?;
        ctx.store(offset + SOURCE_V6, &[dst, src], 0).map_err(|_| DropReason::Rewrite)
    } else {
        let [src, dst]: [u32; 2] = ctx.load(offset + SOURCE_V4).map_err(|_| DropReason::Rewrite)?;
        ctx.store(offset + SOURCE_V4, &[dst, src], 0).map_err(|_| DropReason::Rewrite)
    }
}

/// Room in the ring for `N` bytes of a signal.
#[repr(C)]
struct Record<const N: usize> {
    head: Heard,
    bytes: [u8; N],
}

/// The same number, of which the compiler knows nothing: the verifier must see each bound, but the compiler
/// would leave one out or merge two comparisons.
#[inline(always)]
fn opaque(mut number: u64) -> u64 {
    // SAFETY: the register stays as it is.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}

subprogram! {
    /// Reports the signal at `start`, its source and the hook it came by to the agent.
    fn heard(source: &[u8; 16], start: usize, hook: u32) -> i32 = hear_signal as signal_heard
}

#[inline(always)]
fn hear_signal(skb: Skb, source: &[u8; 16], start: usize, hook: u32) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(header(&ctx, start).and_then(|header| hear(&ctx, hook, source, start, &header)))
}

/// Reports the signal to the agent; the packet ends here. Answers to the agent's own questions carry their
/// time of arrival; they and HELLO are read at the agent's next deadline or wake-up, because most wake-ups
/// for them alone would be for nothing. Anybody in another location can send such answers, so they wake the
/// agent once the ring fills up.
#[inline(always)]
fn hear(ctx: &TcContext, hook: u32, source: &[u8; 16], start: usize, header: &Header) -> Verdict {
    let can_wait = matches!(header.kind, Kind::Reflected | Kind::Present | Kind::Hello) && unread() < CROWDED;
    // The kernel's own choice wakes nobody while anything is unread.
    let wake = if can_wait { BPF_RB_NO_WAKEUP } else { BPF_RB_FORCE_WAKEUP };
    if header.length <= KERNEL {
        record::<KERNEL>(ctx, hook, source, start, header.length, wake)
    } else {
        record::<LONGEST>(ctx, hook, source, start, header.length, wake)
    }
}

/// Whether the ring has room for a signal of this kind. The caller of [`heard`] asks, because the stacks of
/// functions that call each other add up.
#[inline(always)]
fn has_room(header: &Header) -> Result<(), DropReason> {
    let full = RING / 8 * kernel::eighths_of_ring(header.kind, header.length);
    if unread() < full { Ok(()) } else { Err(DropReason::SignalRingFull) }
}

/// Bytes of the ring.
const RING: u64 = map_table::SIGNAL.size as u64;

/// Bytes of unread records from which on every record wakes the agent.
const CROWDED: u64 = RING / 4;

/// Bytes of records that the agent has not read.
#[inline(always)]
fn unread() -> u64 {
    // SAFETY: the ring is a static, and the helper reads its positions only.
    unsafe { bpf_ringbuf_query((&raw const SIGNAL).cast_mut().cast(), u64::from(BPF_RB_AVAIL_DATA)) }
}

#[inline(always)]
fn record<const N: usize>(
    ctx: &TcContext,
    hook: u32,
    source: &[u8; 16],
    start: usize,
    length: usize,
    wake: u32,
) -> Verdict {
    let length = opaque(length as u64);
    if length > N as u64 {
        return Err(DropReason::Malformed);
    }
    let length = opaque(length);
    // Verifiers before Linux 6.8 learn nothing of a comparison with zero.
    if length < HEADER as u64 {
        return Err(DropReason::Malformed);
    }
    let length = opaque(length);
    let Some(mut entry) = SIGNAL.reserve_untyped::<Record<N>>(0) else {
        return Err(DropReason::SignalRingFull);
    };
    let record: *mut Record<N> = entry.as_mut_ptr();
    // SAFETY: the entry is ours until it is submitted, and the helper writes at most N bytes.
    let copied = unsafe {
        (&raw mut (*record).head).write(Heard {
            time: bpf_ktime_get_ns(),
            source: *source,
            length: length as u32,
            hook,
        });
        bpf_skb_load_bytes(
            ctx.as_ptr().cast(),
            start as u32,
            (&raw mut (*record).bytes).cast(),
            length as u32,
        )
    };
    if copied == 0 {
        entry.submit(u64::from(wake));
        count_action(Action::Hear);
        Ok(Act::END)
    } else {
        entry.discard(0);
        Err(DropReason::Malformed)
    }
}

subprogram! {
    /// Sends a signal that the agent has written to a node of the location; it has no link-layer header yet.
    pub fn to_lan[I: Ip]() -> i32 = write_to_lan;
    by I::V6 => { false => signal_to_lan_v4[Ipv4], true => signal_to_lan_v6[V6] }
}

#[inline(always)]
fn write_to_lan<I: Ip>(skb: Skb) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(I::read(&ctx, 0).and_then(|ip| sent_to_lan(&ctx, &ip)))
}

#[inline(always)]
fn sent_to_lan<I: Ip>(ctx: &TcContext, ip: &I) -> Verdict {
    let named = cb::named(ctx);
    let ifindex = if named == 0 {
        let node = I::sender(ip.dst()).ok_or(DropReason::UnknownSignal)?;
        // The likeliest comes first.
        let [ifindex, ..] = node.interfaces;
        ifindex
    } else {
        named
    };
    relay::framed::<I>(ctx)?;
    cb::sent(ctx);
    count_action(Action::Steer);
    Ok(Act::neighbour(ifindex))
}
