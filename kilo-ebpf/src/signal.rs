//! Signals (docs/design/failover.md): probes are reflected, the roll call and ANNOUNCE are answered
//! whether or not an agent lives, all else goes to the agent by a ring and never to the stack.

use core::mem::offset_of;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::{bpf_ktime_get_ns, bpf_ringbuf_query, bpf_skb_load_bytes},
    programs::TcContext,
};
use kilo_common::{
    counters::{Action, DropReason},
    encap::UDP_LEN,
    event::Hook,
    forwarding::is_remote,
    lead::{Term, hop_of, term_of},
    map_table,
    maps::{
        CONFIG_GATEWAY, CONTROL_PREFIX, Config, FAMILY_V6, HOP_ACTING, HOP_REMOTE, Heard, SignalKey,
        sender_id,
    },
    packet::{Ipv4, protocol},
    signal::{
        self, HEADER, Header, KERNEL, Kind, LONGEST,
        kernel::{self, Answer, KIND_AT, Raw, Taken},
    },
};
use network_types::udp::UdpHdr;

use crate::{
    cb,
    decap::{DESTINATION_PORT, sender_of},
    ip::{Ip, halves, octets},
    lead,
    maps::{SIGNAL, SIGNAL_KEY, count_action, hop},
    packet, relay,
    ret::{Act, Verdict, to_code},
};

/// Where UDP has its length and its checksum.
const UDP_LENGTH: usize = offset_of!(UdpHdr, len);
const UDP_CHECKSUM: usize = offset_of!(UdpHdr, check);

/// First half of the control prefix, and the bits of it that count.
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

/// True for control addresses, which stand for a gateway inside tunnels alone.
#[inline(always)]
pub fn is_control<I: Ip>(addr: I::Addr) -> bool {
    I::V6 && I::mapped(addr)[0] & CONTROL_MASK == CONTROL
}

/// True for a whole datagram without options that begins as a signal does, to this port; the
/// caller knows that it is for this node.
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

/// A signal from the network between the nodes, addressed to this one. A function of its own for the
/// verifier, with its own share of the stack.
#[inline(never)]
pub fn from_lan<O: Ip, const LINK: usize>(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(O::read(&ctx, LINK).and_then(|ip| taken_from_lan::<O, LINK>(&ctx, config, &ip)))
}

#[inline(always)]
fn taken_from_lan<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &O) -> Verdict {
    sender_of::<O>(ctx, ip)?;
    let start = LINK + O::HEADER_LEN + UDP_LEN;
    let header = header(ctx, start)?;
    let address = octets(O::mapped(ip.src()));
    let hook = if LINK == 0 { Hook::L3Ingress } else { Hook::LanIngress };
    let taken = kernel::on_lan(header.kind);
    if taken == Taken::Reflect {
        rename(ctx, start)?;
        return turn_back::<O, LINK>(ctx, ip);
    }
    if header.kind == Kind::Reflected {
        return heard(ctx, hook, &address, start, &header);
    }
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    let key = unsafe { SIGNAL_KEY.get(&address) }.ok_or(DropReason::UnknownSignal)?;
    kernel::is_of(&header, key)?;
    match taken {
        Taken::Answer => {
            answer(ctx, config, start, &header, key)?;
            turn_back::<O, LINK>(ctx, ip)
        }
        Taken::Agent => {
            if header.length == KERNEL {
                let raw: Raw = ctx.load(start).map_err(|_| DropReason::Malformed)?;
                kernel::authentic(&raw, key)?;
            }
            heard(ctx, hook, &address, start, &header)
        }
        _ => Err(DropReason::UnknownSignal),
    }
}

/// A signal that came through a tunnel, addressed to this node.
#[inline(never)]
pub fn from_tunnel<I: Ip>(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(I::read(&ctx, 0).and_then(|ip| taken_from_tunnel::<I>(&ctx, config, &ip)))
}

#[inline(always)]
fn taken_from_tunnel<I: Ip>(ctx: &TcContext, config: &Config, ip: &I) -> Verdict {
    let start = I::HEADER_LEN + UDP_LEN;
    let header = header(ctx, start)?;
    let from_gateway = is_control::<I>(ip.src());
    // Of another location: what this one's nodes send comes by the network between them.
    if !from_gateway && !I::prefix(config, ip.src()).is_some_and(|owner| is_remote(owner.hop)) {
        return Err(DropReason::UnknownSignal);
    }
    let to_gateway = is_control::<I>(ip.dst());
    match kernel::in_tunnel(header.kind) {
        Taken::Reflect
            if config.flags & CONFIG_GATEWAY != 0 && (to_gateway || is_wireguard::<I>(config, ip.dst())) =>
        {
            rename(ctx, start)?;
            turn_around::<I>(ctx, 0)?;
            // Its peer has the address it came from.
            cb::transit(ctx);
            count_action(Action::Reflect);
            Ok(Act::transmit(config.kilo_ifindex))
        }
        Taken::Agent => heard(ctx, Hook::KiloIngress, &octets(I::mapped(ip.src())), start, &header),
        Taken::Control if from_gateway && to_gateway => {
            let source = octets(I::mapped(ip.src()));
            // VPN peers have control addresses, too, and say MOVED alone.
            if header.kind != Kind::Moved {
                // SAFETY: as above.
                let key = unsafe { SIGNAL_KEY.get(&source) }.ok_or(DropReason::UnknownSignal)?;
                kernel::is_of_gateway(&header, key)?;
            }
            heard(ctx, Hook::KiloIngress, &source, start, &header)
        }
        _ => Err(DropReason::UnknownSignal),
    }
}

/// True for addresses that signals in tunnels are sent to, if they are for this node.
#[inline(always)]
pub fn is_own<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    I::is_private(config, addr)
        || is_wireguard::<I>(config, addr)
        || I::V6 && I::mapped(addr) == halves(&config.control) && is_control::<I>(addr)
}

/// True for the location's WireGuard address.
#[inline(always)]
fn is_wireguard<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    I::is_wireguard(config, addr)
}

/// The signal's header, if its length is what UDP says and what is there.
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

/// Makes a probe the answer to it.
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

/// Writes the answer to ROLL or ANNOUNCE over it; this is where a kernel obeys.
#[inline(always)]
fn answer(
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
        if !lead::obey(kernel::announced(&raw, header, key)?) {
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

/// The term of the own word, and the id of the gateway it names; 0: of one that has none.
#[inline(always)]
fn stands(own: u64) -> (Term, u64) {
    let word = lead::word(HOP_ACTING);
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
fn turn_back<I: Ip, const LINK: usize>(ctx: &TcContext, _: &I) -> Verdict {
    turn_around::<I>(ctx, LINK)?;
    if LINK != 0 {
        let [to, from]: [[u8; 6]; 2] = ctx.load(0).map_err(|_| DropReason::Rewrite)?;
        ctx.store(0, &[from, to], 0).map_err(|_| DropReason::Rewrite)?;
    }
    cb::sent(ctx);
    count_action(Action::Reflect);
    Ok(Act::transmit(packet::ifindex(ctx)))
}

/// Swaps the addresses, which leaves every checksum as it is. Ports stay: each probe has another source port,
/// as a new flow has, and its answer is a signal to the same port as all others.
#[inline(always)]
fn turn_around<I: Ip>(ctx: &TcContext, offset: usize) -> Result<(), DropReason> {
    const V4: usize = 12;
    const V6: usize = 8;
    if I::V6 {
        let [src, dst]: [[u64; 2]; 2] = ctx.load(offset + V6).map_err(|_| DropReason::Rewrite)?;
        ctx.store(offset + V6, &[dst, src], 0).map_err(|_| DropReason::Rewrite)
    } else {
        let [src, dst]: [u32; 2] = ctx.load(offset + V4).map_err(|_| DropReason::Rewrite)?;
        ctx.store(offset + V4, &[dst, src], 0).map_err(|_| DropReason::Rewrite)
    }
}

/// Room in the ring for `N` bytes of a signal.
#[repr(C)]
struct Record<const N: usize> {
    head: Heard,
    bytes: [u8; N],
}

/// A number of which the compiler knows nothing: the verifier must see each bound, and would not if
/// the compiler left one out or made one comparison of two.
#[inline(always)]
fn opaque(mut number: u64) -> u64 {
    // SAFETY: the register stays as it is.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}

/// Tells the agent; the packet ends here. Answers to what it has asked bear the time and are read when
/// their time is over, or with what wakes it, and so is HELLO: most of its wake-ups would be for nothing. Anybody in another
/// location can send such answers, so in a ring that fills up they wait no longer.
#[inline(always)]
fn heard(ctx: &TcContext, hook: Hook, source: &[u8; 16], start: usize, header: &Header) -> Verdict {
    let can_wait = matches!(header.kind, Kind::Reflected | Kind::Present | Kind::Hello) && unread() < CROWDED;
    // The kernel's own choice wakes nobody while anything is unread.
    let wake = if can_wait { BPF_RB_NO_WAKEUP } else { BPF_RB_FORCE_WAKEUP };
    if header.length <= KERNEL {
        record::<KERNEL>(ctx, hook, source, start, header.length, wake)
    } else {
        record::<LONGEST>(ctx, hook, source, start, header.length, wake)
    }
}

/// Bytes of unread records from which on every record wakes the agent.
const CROWDED: u64 = map_table::SIGNAL.size as u64 / 4;

/// Bytes of records that the agent has not read.
#[inline(always)]
fn unread() -> u64 {
    // SAFETY: the ring is a static, and the helper reads its positions only.
    unsafe { bpf_ringbuf_query((&raw const SIGNAL).cast_mut().cast(), u64::from(BPF_RB_AVAIL_DATA)) }
}

#[inline(always)]
fn record<const N: usize>(
    ctx: &TcContext,
    hook: Hook,
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
    // A full ring: signals are repeated. Not counted as a drop: nobody can do anything about it.
    let Some(mut entry) = SIGNAL.reserve_untyped::<Record<N>>(0) else { return Ok(Act::END) };
    let record: *mut Record<N> = entry.as_mut_ptr();
    // SAFETY: the entry is ours until it is submitted, and the helper writes at most N bytes.
    let copied = unsafe {
        (&raw mut (*record).head).write(Heard {
            time: bpf_ktime_get_ns(),
            source: *source,
            length: length as u32,
            hook: hook as u32,
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

/// Sends a signal that the agent has written to a node of the location; it has no link-layer header yet.
#[inline(never)]
pub fn to_lan<I: Ip>(skb: *mut __sk_buff) -> i32 {
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
