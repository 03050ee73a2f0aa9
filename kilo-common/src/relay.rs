//! Relaying WireGuard's datagrams between two locations that cannot reach each other, and the
//! messages by which gateways arrange that; docs/design/relay.md describes the whole.
//!
//! Messages are UDP datagrams of [`LENGTH`] bytes beside WireGuard's own, from its port:
//!
//! ```text
//!  0 u8 0   1 u8 version   2 u8 kind   3 u8 flags   4 "kgr1"
//!  8 u64 nonce   16 u64 sequence   24 u64 sender   32 u64 other   40 u64 token
//! 48 u16 port   50 zero   56 u64 tag
//! ```
//! Everything is big-endian but the tag, which is SipHash's own little-endian word. WireGuard's first byte is
//! 1 to 4, so neither is mistaken for the other.

use crate::{
    drop_reasons::DropReason,
    siphash::{self, Key},
    wire_enum::wire_enum,
};

pub use budget::Budget;
pub use sender::{LATE, MOST, Sender};

/// First UDP port that a relay gives to a pair, host byte order.
pub const FIRST_PORT: u16 = 51_830;
/// Last such port, host byte order.
pub const LAST_PORT: u16 = 52_829;
/// How many such ports there are; each pair takes two.
pub const PORTS: u32 = (LAST_PORT - FIRST_PORT) as u32 + 1;
/// Bytes of every message.
pub const LENGTH: usize = 64;

const VERSION: u8 = 1;
const MAGIC: [u8; 4] = *b"kgr1";
/// Words of a message.
const WORDS: usize = LENGTH / 8;
const SEQUENCE: usize = 2;
const SENDER: usize = 3;
const TAG: usize = 7;

wire_enum! {
    /// What a message says.
    pub enum Kind {
        /// Asks a relay for a port that leads to `other`; sent to that port, it binds its own source address
        /// to it.
        Ask = 1,
        /// The relay's answer, sent to the endpoint at which its WireGuard knows the asker.
        Offer = 2,
        /// The relay notifies the other end that somebody asks for it.
        Invite = 3,
        /// Asks the other end, over any path, whether that path works.
        Try = 4,
        /// The answer to TRY, over the same path.
        Tried = 5,
    }
}

/// [`Message::flags`] of OFFER: the asker is bound.
pub const BOUND: u8 = 1;
/// [`Message::flags`] of OFFER: both ends are bound, packets pass.
pub const BOTH: u8 = 2;
/// [`Message::flags`] of TRY: the other end is to try directly as well, now.
pub const START: u8 = 1;

/// A message between a gateway and a relay, or two gateways, without its tag; numbers in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Kind of message, which says what the other fields mean.
    pub kind: Kind,
    /// [`BOUND`], [`BOTH`], [`START`].
    pub flags: u8,
    /// A random number that the answer repeats.
    pub nonce: u64,
    /// Grows with every message of a sender; the answer repeats it.
    pub sequence: u64,
    /// First 8 bytes of SHA-256 of the sender's public key.
    pub sender: u64,
    /// The same for the other end of the pair; in TRY and TRIED, for the receiver.
    pub other: u64,
    /// What the relay has given the asker to bind with; 0 = nothing yet.
    pub token: u64,
    /// Port of the relay that the asker sends to; 0 = refused.
    pub port: u16,
}

/// A message in words, as they lie in memory.
pub type Raw = [u64; WORDS];

/// True for the first 8 bytes of a message of any version.
#[inline(always)]
#[must_use]
pub const fn begins(first: &[u8; 8]) -> bool {
    let [zero, _, _, _, a, b, c, d] = *first;
    zero == 0 && u32::from_be_bytes([a, b, c, d]) == u32::from_be_bytes(MAGIC)
}

/// True for the first 8 bytes of what WireGuard sends.
#[inline(always)]
const fn is_wireguard(first: &[u8; 8]) -> bool {
    matches!(first[0], 1..=4) && first[1] == 0 && first[2] == 0 && first[3] == 0
}

/// The id a message says its sender has.
#[inline(always)]
pub const fn sender(raw: &Raw) -> u64 {
    u64::from_be(raw[SENDER])
}

/// Checks that the tag was made with this key.
///
/// # Errors
/// [`DropReason::ForgedSignal`] when it was not.
#[inline(always)]
pub const fn authentic(raw: &Raw, key: [u64; 2]) -> Result<(), DropReason> {
    if tag(raw, key) == u64::from_le(raw[TAG]) { Ok(()) } else { Err(DropReason::ForgedSignal) }
}

#[inline(always)]
const fn tag(raw: &Raw, key: [u64; 2]) -> u64 {
    const { assert!(cfg!(target_endian = "little")) };
    let [a, b, c, d, e, f, g, _] = *raw;
    siphash::of_words(Key(key), &[a, b, c, d, e, f, g])
}

impl Message {
    /// The bytes of the message, with its tag.
    #[must_use]
    pub fn write(&self, key: Key) -> [u8; LENGTH] {
        let mut out = [0; LENGTH];
        out[..8].copy_from_slice(&[0, VERSION, self.kind as u8, self.flags, 0, 0, 0, 0]);
        out[4..8].copy_from_slice(&MAGIC);
        let words = [self.nonce, self.sequence, self.sender, self.other, self.token];
        for (word, room) in words.iter().zip(out[8..48].chunks_exact_mut(8)) {
            room.copy_from_slice(&word.to_be_bytes());
        }
        out[48..50].copy_from_slice(&self.port.to_be_bytes());
        let tag = siphash::of_bytes(key, &out[..56]);
        out[56..].copy_from_slice(&tag.to_le_bytes());
        out
    }

    /// Reads a message whose tag the program that received it has checked. `None`: another version, an
    /// unknown kind, or bytes set that this version does not use.
    #[must_use]
    pub fn read(bytes: &[u8; LENGTH]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        if bytes[0] != 0 || bytes[1] != VERSION || bytes[4..8] != MAGIC || bytes[50..56] != [0; 6] {
            return None;
        }
        Some(Self {
            kind: Kind::from_u8(bytes[2])?,
            flags: bytes[3],
            nonce: word(8)?,
            sequence: word(16)?,
            sender: word(24)?,
            other: word(32)?,
            token: word(40)?,
            port: u16::from_be_bytes([bytes[48], bytes[49]]),
        })
    }
}

/// What a relay knows of one of its ports; written by its agent, read by programs. Addresses are
/// of either family, IPv4 as `::ffff:a.b.c.d`; ports are in host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// Address of the end that has this port: it alone may send to it.
    pub from: [u8; 16],
    /// This host's address that the end sends to.
    pub at: [u8; 16],
    /// Address of the other end, to which packets are sent on.
    pub to: [u8; 16],
    /// This host's address that they get as their source.
    pub by: [u8; 16],
    /// Id of the node at `from`, and of that at `to`.
    pub ids: [u64; 2],
    /// Packets sent on so far.
    pub packets: u64,
    /// Interface towards `to`.
    pub ifindex: u32,
    /// UDP port of `from`; 0 = it is not bound.
    pub from_port: u16,
    /// UDP port of `to`; 0 = it is not bound.
    pub to_port: u16,
    /// Source port of packets sent on: the port of the pair's other end.
    pub by_port: u16,
    /// Megabits a second that may come from `from` ([`Budget`]); 0 = not limited.
    pub rate: u16,
    /// Changes with each write of the agent, so that programs look up the route to `to` again; 0 = not
    /// written yet.
    pub written: u32,
}

impl Port {
    /// Whether it is bound, and `local` is the address of this host that its end sends to.
    #[inline(always)]
    #[must_use]
    pub const fn is_at(&self, local: [u64; 2]) -> bool {
        let at = halves(&self.at);
        self.from_port != 0 && local[0] == at[0] && local[1] == at[1]
    }
}

/// A message that a program has received: a record of the ring `relay_heard`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Source address; IPv4 as `::ffff:a.b.c.d`.
    pub source: [u8; 16],
    /// Address of this host that it was sent to.
    pub local: [u8; 16],
    /// The message as it came: what [`Message::read`] takes.
    pub bytes: [u8; LENGTH],
    /// Index of the interface it came by.
    pub ifindex: u32,
    /// Source port, host byte order.
    pub source_port: u16,
    /// Port that it was sent to, host byte order.
    pub port: u16,
}

/// Bytes of a [`Heard`]: the length of a record in the ring `relay_heard`.
pub const HEARD: usize = 104;

impl Heard {
    /// Reads a record of the ring; `None` when it is too short.
    #[must_use]
    pub fn read(record: &[u8]) -> Option<Self> {
        let at = |at: usize| record.get(at..);
        Some(Self {
            source: *record.first_chunk()?,
            local: *at(16)?.first_chunk()?,
            bytes: *at(32)?.first_chunk()?,
            ifindex: u32::from_ne_bytes(*at(96)?.first_chunk()?),
            source_port: u16::from_ne_bytes(*at(100)?.first_chunk()?),
            port: u16::from_ne_bytes(*at(102)?.first_chunk()?),
        })
    }
}

/// What becomes of a datagram to WireGuard's port or a relay's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is not for a relay.
    Stack,
    /// It is a message, if its tag is right.
    Hear,
    /// It is sent on to the pair's other end.
    Forward,
    /// It is dropped.
    Drop(DropReason),
}

/// A datagram as it arrives; ports in host byte order.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Source address as `Port::from`: its 16 bytes as they lie in memory, in two halves.
    pub source: [u64; 2],
    /// Address it was sent to, likewise.
    pub local: [u64; 2],
    /// UDP source port; a bound end sends from [`Port::from_port`].
    pub source_port: u16,
    /// UDP destination port: WireGuard's, or one of a pair.
    pub port: u16,
    /// First bytes of the payload.
    pub first: [u8; 8],
    /// Whether it is a fragment: the later ones of its datagram have no ports.
    pub is_fragment: bool,
}

/// True for ports that a relay gives to pairs.
#[inline(always)]
#[must_use]
pub const fn is_port(port: u16) -> bool {
    port >= FIRST_PORT && port <= LAST_PORT
}

/// Index of a port in the array `relay_state`; for all but relays' ports it is beyond the end.
#[inline(always)]
#[must_use]
pub const fn slot(port: u16) -> u32 {
    (port as u32).wrapping_sub(FIRST_PORT as u32)
}

/// The halves of an address of a [`Port`] as they lie in memory.
#[inline(always)]
const fn halves(addr: &[u8; 16]) -> [u64; 2] {
    // SAFETY: sixteen bytes of a field of `Port`, each of which is aligned to eight. Read byte by byte, as an
    // array of bytes otherwise is, they would take forty instructions.
    unsafe { *core::ptr::from_ref(addr).cast() }
}

/// What becomes of a datagram to WireGuard's own port.
#[inline(always)]
#[must_use]
pub const fn at_wireguard(arrival: &Arrival) -> Fate {
    if !arrival.is_fragment && begins(&arrival.first) { Fate::Hear } else { Fate::Stack }
}

/// What becomes of a datagram to a port that [`is_port`]; `entry` is what the relay knows of it. Datagrams to
/// a port of no pair, or to another address than the bound one, are the stack's. The caller must know whether
/// an address that is not bound is this host's.
#[inline(always)]
#[must_use]
pub const fn at_port(arrival: &Arrival, entry: Option<&Port>) -> Fate {
    let Some(entry) = entry else { return Fate::Stack };
    let is_message = begins(&arrival.first);
    // An end may be behind a NAT that has given it another port: its ASK says so.
    if is_message && arrival.first[2] == Kind::Ask as u8 && !arrival.is_fragment {
        return Fate::Hear;
    }
    if entry.from_port != 0 && !entry.is_at(arrival.local) {
        return Fate::Stack;
    }
    if arrival.is_fragment {
        return Fate::Drop(DropReason::OuterFragment);
    }
    let is_relayed = is_message || is_wireguard(&arrival.first);
    let from = halves(&entry.from);
    let is_known = entry.from_port != 0
        && arrival.source[0] == from[0]
        && arrival.source[1] == from[1]
        && arrival.source_port == entry.from_port;
    // Answers to pods' flows that the host's own NAT has given this port.
    if !is_known && !is_relayed {
        return Fate::Stack;
    }
    if entry.from_port == 0 {
        return Fate::Drop(DropReason::RelayUnbound);
    }
    if !is_known || !is_relayed {
        return Fate::Drop(DropReason::RelayStranger);
    }
    if entry.to_port == 0 {
        return Fate::Drop(DropReason::RelayUnbound);
    }
    Fate::Forward
}

mod budget;
mod sender;
#[cfg(test)]
mod tests;
