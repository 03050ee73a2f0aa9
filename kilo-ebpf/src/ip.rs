//! The two IP families behind one trait: steering is written once and compiled
//! for each.

use aya_ebpf::{btf_maps::lpm_trie::Key, programs::TcContext};
use kilo_common::{
    direct::Slot,
    drop_reasons::DropReason,
    maps::{CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, Config, Device, NodeValue, PrefixValue},
    packet::{IPV4_LEN, IPV6_LEN, Ipv4, Ipv4Header, Ipv6, never_steered, never_steered_v6, protocol},
};

use crate::{
    maps::{DIRECT_V4, NODE_V4, NODE_V6, PREFIX_V4, PREFIX_V6},
    packet,
    word_memory::WholeAddress,
};

/// Offsets of type of service and checksum in an IPv4 header.
const TOS: usize = 1;
const CHECKSUM: usize = 10;

/// A header of one family, and the tables with its addresses.
pub trait Ip: Copy {
    /// An address in network byte order.
    type Addr: Copy + PartialEq;
    /// True for IPv6.
    const V6: bool;
    /// Bytes of the header without options or extension headers.
    const HEADER_LEN: usize;
    /// `Config::flags`: masqueraded packets get different addresses on this node.
    const SEVERAL: u32;

    /// Reads the header at `offset`.
    fn read(ctx: &TcContext, offset: usize) -> Result<Self, DropReason>;
    fn src(&self) -> Self::Addr;
    fn dst(&self) -> Self::Addr;
    fn set_src(&mut self, addr: Self::Addr);
    fn set_dst(&mut self, addr: Self::Addr);
    /// Type of service or traffic class.
    fn tos(&self) -> u8;
    /// Time to live or hop limit.
    fn ttl(&self) -> u8;
    /// Protocol behind the header.
    fn protocol(&self) -> u8;
    /// Bytes to the payload, as far as the header itself says.
    fn header_len(&self) -> usize;
    /// True for parts of a fragmented packet.
    fn is_fragment(&self) -> bool;
    /// Type of service or traffic class of the packet at `offset`, which may be anywhere.
    fn tos_at(ctx: &TcContext, offset: usize) -> Result<u8, DropReason>;
    /// Writes the type of service or traffic class of the packet at `offset`.
    fn set_tos(ctx: &TcContext, offset: usize, tos: u8) -> Result<(), DropReason>;
    /// Where the UDP header is, if the packet that starts at `offset` has one: a datagram as a
    /// whole, or its first fragment.
    fn udp(&self, ctx: &TcContext, offset: usize) -> Option<usize>;
    /// Identification of the UDP datagram that the packet at `offset` is a fragment of; IPv4's in the
    /// last two bytes.
    fn udp_id(&self, ctx: &TcContext, offset: usize) -> Option<[u8; 4]>;
    /// Lowers the TTL or hop limit in the packet; it must be above 1.
    fn lower_ttl(&self, ctx: &TcContext, offset: usize) -> Result<(), DropReason>;

    /// The longest prefix that holds this address.
    fn prefix(config: &Config, addr: Self::Addr) -> Option<PrefixValue>;
    /// The node that sends from this outer address.
    fn sender(addr: Self::Addr) -> Option<&'static NodeValue>;
    /// True when the node's own entry shows that it may send from this address.
    fn is_known_source(sender: &NodeValue, src: Self::Addr) -> bool;
    /// True for addresses that stay on a link or a host.
    fn never_steered(addr: Self::Addr) -> bool;
    /// True for addresses whose last byte is zero.
    fn ends_in_zero(addr: Self::Addr) -> bool;
    /// True for this node's addresses to which steered packets are sent.
    fn is_private(config: &Config, addr: Self::Addr) -> bool;
    /// True for the location's WireGuard address.
    fn is_wireguard(config: &Config, addr: Self::Addr) -> bool;
    /// Address that masqueraded packets get on a device.
    fn masq_addr(device: &Device) -> Self::Addr;
    /// An address of either family as the keys of masquerading hold it.
    fn mapped(addr: Self::Addr) -> [u64; 2];
    /// The inverse of [`Self::mapped`].
    fn unmapped(addr: &[u8; 16]) -> Self::Addr;
}

impl Ip for Ipv4 {
    type Addr = [u8; 4];
    const V6: bool = false;
    const HEADER_LEN: usize = IPV4_LEN;
    const SEVERAL: u32 = CONFIG_SEVERAL_V4;

    #[inline(always)]
    fn read(ctx: &TcContext, offset: usize) -> Result<Self, DropReason> {
        let header = packet::bytes::<IPV4_LEN>(ctx, offset).ok_or(DropReason::Truncated)?;
        // SAFETY: `bytes` checked the bounds, and programs may read packets at any address.
        let header = unsafe { &*header.cast::<Ipv4Header>() };
        Self::new(header, (ctx.len() as usize).wrapping_sub(offset))
    }
    #[inline(always)]
    fn src(&self) -> [u8; 4] {
        self.src
    }
    #[inline(always)]
    fn dst(&self) -> [u8; 4] {
        self.dst
    }
    #[inline(always)]
    fn set_src(&mut self, addr: [u8; 4]) {
        self.src = addr;
    }
    #[inline(always)]
    fn set_dst(&mut self, addr: [u8; 4]) {
        self.dst = addr;
    }
    #[inline(always)]
    fn tos(&self) -> u8 {
        self.tos
    }
    #[inline(always)]
    fn ttl(&self) -> u8 {
        self.ttl
    }
    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.protocol
    }
    #[inline(always)]
    fn header_len(&self) -> usize {
        self.header_len
    }
    #[inline(always)]
    fn is_fragment(&self) -> bool {
        Ipv4::is_fragment(self)
    }
    #[inline(always)]
    fn tos_at(ctx: &TcContext, offset: usize) -> Result<u8, DropReason> {
        ctx.load(offset + TOS).map_err(|_| DropReason::Truncated)
    }
    #[inline(always)]
    fn set_tos(ctx: &TcContext, offset: usize, tos: u8) -> Result<(), DropReason> {
        let start: [u8; 2] = ctx.load(offset).map_err(|_| DropReason::Truncated)?;
        let [old, new] = [start[TOS], tos].map(|tos| u64::from(u16::from_ne_bytes([start[0], tos])));
        ctx.l3_csum_replace(offset + CHECKSUM, old, new, 2).map_err(|_| DropReason::Rewrite)?;
        ctx.store(offset + TOS, &tos, 0).map_err(|_| DropReason::Rewrite)
    }
    #[inline(always)]
    fn udp(&self, _: &TcContext, offset: usize) -> Option<usize> {
        let is_first = self.fragment & 0x1fff == 0;
        (self.protocol == protocol::UDP && is_first).then_some(offset + self.header_len)
    }
    #[inline(always)]
    fn udp_id(&self, ctx: &TcContext, offset: usize) -> Option<[u8; 4]> {
        if self.protocol != protocol::UDP || !Ipv4::is_fragment(self) {
            return None;
        }
        let [high, low]: [u8; 2] = ctx.load(offset + 4).ok()?;
        Some([0, 0, high, low])
    }
    #[inline(always)]
    fn lower_ttl(&self, ctx: &TcContext, offset: usize) -> Result<(), DropReason> {
        let header = packet::bytes::<IPV4_LEN>(ctx, offset).ok_or(DropReason::Truncated)?;
        // SAFETY: as in `read`; the kernel makes the packet writable before the program runs.
        unsafe { &mut *header.cast::<Ipv4Header>() }.lower_ttl().ok_or(DropReason::Malformed)
    }
    #[inline(always)]
    fn prefix(config: &Config, addr: [u8; 4]) -> Option<PrefixValue> {
        if let Some(value) = direct(config, addr) {
            return Some(value);
        }
        PREFIX_V4.get(&Key::new(32, addr)).copied()
    }
    #[inline(always)]
    fn sender(addr: [u8; 4]) -> Option<&'static NodeValue> {
        // SAFETY: entries are only replaced by the agent; one replaced meanwhile was valid a moment ago.
        unsafe { NODE_V4.get(&addr) }
    }
    #[inline(always)]
    fn is_known_source(sender: &NodeValue, src: [u8; 4]) -> bool {
        sender.may_send_from(src)
    }
    #[inline(always)]
    fn never_steered(addr: [u8; 4]) -> bool {
        never_steered(addr)
    }
    #[inline(always)]
    fn ends_in_zero(addr: [u8; 4]) -> bool {
        addr[3] == 0
    }
    #[inline(always)]
    fn is_private(config: &Config, addr: [u8; 4]) -> bool {
        addr == config.private_v4 || (addr == config.overlay_v4 && addr != [0; 4])
    }
    #[inline(always)]
    fn is_wireguard(config: &Config, addr: [u8; 4]) -> bool {
        addr == config.wireguard_v4
    }
    #[inline(always)]
    fn masq_addr(device: &Device) -> [u8; 4] {
        device.masq_v4
    }
    #[inline(always)]
    fn mapped(addr: [u8; 4]) -> [u64; 2] {
        const PREFIX: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);
        [0, (u64::from(PREFIX.to_le()) | u64::from(u32::from_le_bytes(addr)) << 32).to_le()]
    }
    #[inline(always)]
    fn unmapped(addr: &[u8; 16]) -> [u8; 4] {
        [addr[12], addr[13], addr[14], addr[15]]
    }
}

/// The value that `direct_v4` holds for an address; `None` leaves it to the trie.
#[inline(always)]
pub fn direct(config: &Config, addr: [u8; 4]) -> Option<PrefixValue> {
    let slot = Slot::of(addr, config.direct_shift);
    // SAFETY: the entry is aligned to 8 bytes, and written at once.
    slot.read(unsafe { DIRECT_V4.get_ptr(slot.index)?.read_volatile() })
}

/// An IPv6 header, its addresses as halves: sixteen bytes one by one would
/// fill the stack.
#[derive(Clone, Copy)]
pub struct V6 {
    pub src: [u64; 2],
    pub dst: [u64; 2],
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub next_header: u8,
}

/// A header whose addresses are aligned.
#[repr(C, align(8))]
struct Aligned([u8; IPV6_LEN]);

/// An address as maps hold it.
#[inline(always)]
pub fn octets(halves: [u64; 2]) -> [u8; 16] {
    // SAFETY: sixteen bytes either way.
    unsafe { core::mem::transmute(halves) }
}

/// The halves of an address in a structure aligned to four bytes.
#[inline(always)]
pub fn halves(addr: &[u8; 16]) -> [u64; 2] {
    // SAFETY: callers pass fields of map values, which are aligned to four bytes.
    packet::halves(unsafe { &*addr.as_ptr().cast() })
}

impl V6 {
    /// Reads the header at `offset` of a packet that an error quotes, whose
    /// end may be cut off.
    #[inline(always)]
    pub fn read_part(ctx: &TcContext, offset: usize) -> Result<Self, DropReason> {
        Self::load(ctx, offset, usize::MAX)
    }

    #[inline(always)]
    fn load(ctx: &TcContext, offset: usize, available: usize) -> Result<Self, DropReason> {
        let header: Aligned = ctx.load(offset).map_err(|_| DropReason::Truncated)?;
        let ip = Ipv6::parse(&header.0, available)?;
        let half = |at: usize| -> u64 {
            // SAFETY: within the header, and aligned like it.
            unsafe { *header.0.as_ptr().add(at).cast() }
        };
        Ok(Self {
            src: [half(8), half(16)],
            dst: [half(24), half(32)],
            traffic_class: ip.traffic_class,
            hop_limit: ip.hop_limit,
            next_header: ip.next_header,
        })
    }
}

impl Ip for V6 {
    type Addr = [u64; 2];
    const V6: bool = true;
    const HEADER_LEN: usize = IPV6_LEN;
    const SEVERAL: u32 = CONFIG_SEVERAL_V6;

    #[inline(always)]
    fn read(ctx: &TcContext, offset: usize) -> Result<Self, DropReason> {
        Self::load(ctx, offset, (ctx.len() as usize).saturating_sub(offset))
    }
    #[inline(always)]
    fn src(&self) -> [u64; 2] {
        self.src
    }
    #[inline(always)]
    fn dst(&self) -> [u64; 2] {
        self.dst
    }
    #[inline(always)]
    fn set_src(&mut self, addr: [u64; 2]) {
        self.src = addr;
    }
    #[inline(always)]
    fn set_dst(&mut self, addr: [u64; 2]) {
        self.dst = addr;
    }
    #[inline(always)]
    fn tos(&self) -> u8 {
        self.traffic_class
    }
    #[inline(always)]
    fn ttl(&self) -> u8 {
        self.hop_limit
    }
    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.next_header
    }
    #[inline(always)]
    fn header_len(&self) -> usize {
        IPV6_LEN
    }
    #[inline(always)]
    fn is_fragment(&self) -> bool {
        self.next_header == protocol::FRAGMENT
    }
    #[inline(always)]
    fn tos_at(ctx: &TcContext, offset: usize) -> Result<u8, DropReason> {
        let [high, low]: [u8; 2] = ctx.load(offset).map_err(|_| DropReason::Truncated)?;
        Ok(high << 4 | low >> 4)
    }
    #[inline(always)]
    fn set_tos(ctx: &TcContext, offset: usize, tos: u8) -> Result<(), DropReason> {
        /// Makes the kernel correct a sum over the whole packet, which no header checksum balances here.
        const RECOMPUTE_CSUM: u64 = 1;
        let start: [u8; 2] = ctx.load(offset).map_err(|_| DropReason::Truncated)?;
        let start = [start[0] & 0xf0 | tos >> 4, start[1] & 0xf | tos << 4];
        ctx.store(offset, &start, RECOMPUTE_CSUM).map_err(|_| DropReason::Rewrite)
    }
    #[inline(always)]
    fn udp(&self, ctx: &TcContext, offset: usize) -> Option<usize> {
        /// Bytes of a fragment header (RFC 8200, section 4.5).
        const FRAGMENT_LEN: usize = 8;
        let behind = offset + IPV6_LEN;
        match self.next_header {
            protocol::UDP => Some(behind),
            protocol::FRAGMENT => {
                let [next, _, high, low]: [u8; 4] = ctx.load(behind).ok()?;
                let is_first = u16::from_be_bytes([high, low]) >> 3 == 0;
                (next == protocol::UDP && is_first).then_some(behind + FRAGMENT_LEN)
            }
            _ => None,
        }
    }
    #[inline(always)]
    fn udp_id(&self, ctx: &TcContext, offset: usize) -> Option<[u8; 4]> {
        if self.next_header != protocol::FRAGMENT {
            return None;
        }
        let header: [u8; 8] = ctx.load(offset + IPV6_LEN).ok()?;
        (header[0] == protocol::UDP).then_some([header[4], header[5], header[6], header[7]])
    }
    #[inline(always)]
    fn lower_ttl(&self, ctx: &TcContext, offset: usize) -> Result<(), DropReason> {
        let limit = self.hop_limit.saturating_sub(1);
        ctx.store(offset + 7, &limit, 0).map_err(|_| DropReason::Rewrite)
    }
    #[inline(always)]
    fn prefix(_: &Config, addr: [u64; 2]) -> Option<PrefixValue> {
        PREFIX_V6.get(WholeAddress::new(addr).key()).copied()
    }
    #[inline(always)]
    fn sender(addr: [u64; 2]) -> Option<&'static NodeValue> {
        // SAFETY: as above.
        unsafe { NODE_V6.get(&octets(addr)) }
    }
    #[inline(always)]
    fn is_known_source(_: &NodeValue, _: [u64; 2]) -> bool {
        false
    }
    #[inline(always)]
    fn never_steered(addr: [u64; 2]) -> bool {
        never_steered_v6(addr)
    }
    #[inline(always)]
    fn ends_in_zero(addr: [u64; 2]) -> bool {
        u64::from_be(addr[1]) & 0xff == 0
    }
    #[inline(always)]
    fn is_private(config: &Config, addr: [u64; 2]) -> bool {
        addr == halves(&config.private_v6)
    }
    #[inline(always)]
    fn is_wireguard(config: &Config, addr: [u64; 2]) -> bool {
        addr == halves(&config.wireguard_v6)
    }
    #[inline(always)]
    fn masq_addr(device: &Device) -> [u64; 2] {
        halves(&device.masq_v6)
    }
    #[inline(always)]
    fn mapped(addr: [u64; 2]) -> [u64; 2] {
        addr
    }
    #[inline(always)]
    fn unmapped(addr: &[u8; 16]) -> [u64; 2] {
        halves(addr)
    }
}
