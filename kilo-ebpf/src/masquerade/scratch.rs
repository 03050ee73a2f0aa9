//! Per-CPU memory that the parts of masquerading share, besides the stack.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use kilo_common::{
    checksum,
    maps::{NatKey, NatValue},
    nat::is_masqueraded,
    packet::IPV4_LEN,
};

use crate::{
    ip::octets,
    maps::{MASQ_DST, MASQ_SRC},
    word_memory::WholeAddress,
};

/// What a packet turned out to be.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing that can be translated.
    Unknown = 0,
    /// A packet with ports, or the first fragment of one.
    Flow = 1,
    /// An ICMP error.
    Error = 2,
    /// A later fragment.
    Later = 3,
    /// The answer to an echo request, on the way out.
    EchoReply = 4,
}

/// What the parts pass to each other about one packet.
#[repr(C, align(8))]
pub struct Work {
    /// The flow, as seen on this packet before anything is rewritten.
    pub key: NatKey,
    /// Key of the entry that belongs to it.
    pub partner: NatKey,
    /// An entry to be written.
    pub value: NatValue,
    /// The entry for replies, to be written.
    pub back: NatValue,
    /// The address that masqueraded packets get on this interface.
    pub addr: [u8; 16],
    /// The address that is rewritten.
    pub old: [u8; 16],
    /// The address that replaces it.
    pub new: [u8; 16],
    /// For an ICMP error: its own address, while `old` and `new` are those of the packet inside.
    pub outer: [u8; 16],
    /// First bytes of the transport header.
    pub start: [u8; 8],
    /// The port that is rewritten.
    pub old_port: [u8; 2],
    /// The port that replaces it.
    pub new_port: [u8; 2],
    /// Identification of a fragmented datagram.
    pub id: [u8; 4],
    /// An IPv4 header.
    pub header: [u8; IPV4_LEN],
    /// Offset of the transport header in the packet.
    pub transport: u32,
    /// Nonzero for a part of a fragmented datagram.
    pub fragment: u32,
    /// Flags of a TCP segment.
    pub tcp_flags: u32,
    /// What rewriting the packet inside an ICMP error adds to the error's checksum.
    pub difference: u32,
}

/// Second half of `::ffff:0.0.0.0`.
const MAPPED: u64 = 0xffff_0000_u64.to_le();

#[btf_map(name = "nat_work")]
static WORK: PerCpuArray<Work, 1> = PerCpuArray::new();

/// This CPU's memory; programs on one CPU do not preempt each other.
#[inline(always)]
pub fn this_cpu() -> Option<&'static mut Work> {
    // SAFETY: the entry is this CPU's own and all bytes are values; parts that
    // call each other do not keep it in use across the call.
    WORK.get_ptr_mut(0).map(|work| unsafe { &mut *work })
}

/// An address in halves, to be copied without a call: everything here and in
/// the table is aligned to 8 bytes.
#[inline(always)]
pub fn halves(addr: &[u8; 16]) -> [u64; 2] {
    // SAFETY: aligned, as said.
    unsafe { *addr.as_ptr().cast() }
}

/// Copies an address.
#[inline(always)]
pub fn copy(addr: &[u8; 16]) -> [u8; 16] {
    octets(halves(addr))
}

/// Copies an address into a field of [`Work`], half by half: all at once would be a call that moves bytes.
#[inline(always)]
pub fn put(to: &mut [u8; 16], from: &[u8; 16]) {
    let [first, second] = halves(from);
    let to: *mut u64 = to.as_mut_ptr().cast();
    // SAFETY: aligned, as said, and sixteen bytes.
    unsafe {
        to.write(first);
        to.add(1).write(second);
    }
}

/// Writes an entry, as [`put`] does.
#[inline(always)]
pub fn put_value(
    to: &mut NatValue,
    addr: &[u8; 16],
    port: [u8; 2],
    [tcp_flags, flags]: [u8; 2],
    last_seen: u32,
) {
    put(&mut to.addr, addr);
    (to.port, to.tcp_flags, to.flags, to.last_seen) = (port, tcp_flags, flags, last_seen);
}

impl Work {
    /// The value that `masq_dst` holds for the packet's destination; 0 = none.
    #[inline(always)]
    pub fn destination(&self) -> u32 {
        MASQ_DST.get(WholeAddress::new(halves(&self.key.dst)).key()).copied().unwrap_or(0)
    }

    /// True when the tables say that the packet is masqueraded.
    #[inline(always)]
    pub fn is_due(&self) -> bool {
        let source = MASQ_SRC.get(WholeAddress::new(halves(&self.key.src)).key()).copied().unwrap_or(0);
        is_masqueraded(Some(source), Some(self.destination()))
    }

    #[inline(always)]
    pub const fn fragmented(&self) -> bool {
        self.fragment != 0
    }

    /// True when the interface has no address of the packet's family.
    #[inline(always)]
    pub fn addr_is_missing(&self) -> bool {
        let [first, second] = halves(&self.addr);
        first == 0 && (second == 0 || second == MAPPED)
    }

    /// Puts the key of this datagram's fragments into `partner`.
    #[inline(always)]
    pub fn fragment_key(&mut self, direction: u8) {
        put(&mut self.partner.src, &self.key.src);
        put(&mut self.partner.dst, &self.key.dst);
        [
            self.partner.src_port[0],
            self.partner.src_port[1],
            self.partner.dst_port[0],
            self.partner.dst_port[1],
        ] = self.id;
        self.partner.protocol = self.key.protocol;
        self.partner.direction = direction;
        self.partner.pad = [0; 2];
    }

    /// What the change of the address adds to the kernel's partial sums.
    #[inline(always)]
    pub fn address_difference(&self) -> u32 {
        checksum::difference_of_halves(halves(&self.old), halves(&self.new))
    }

    /// What the change of the port adds to the kernel's partial sums.
    #[inline(always)]
    pub fn port_difference(&self) -> u32 {
        let port = |port: [u8; 2]| u32::from(u16::from_ne_bytes(port));
        checksum::add(!port(self.old_port), port(self.new_port))
    }
}
