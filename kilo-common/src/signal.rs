//! Signals: messages by which gateways and members of a location change the leader within half a second, as
//! UDP to port [`PORT`]. Programs and agents share this parser; docs/design/failover.md has the table.
//!
//! ```text
//!  0 u8 0   1 u8 version   2 u8 kind   3 u8 length / 8   4 "kgs1"
//!  8 u64 nonce   16 u64 term << 16   24 u64 sender   32 u64 location
//! 40 body, whole words   end: u64 tag, of kinds that have one
//! ```
//! Everything is big-endian but the tag, which is SipHash's own little-endian word. The first byte
//! distinguishes a signal from VXLAN, whose first byte is 8; the magic distinguishes it from replies to a
//! flow to which some NAT has given this port.

pub mod control;
pub mod kernel;

use crate::{
    encap::vxlan_header,
    lead::Term,
    maps::VXLAN_PORT,
    siphash::{self, Key},
    wire_enum::wire_enum,
};

/// UDP port, host byte order: that of VXLAN, which every node accepts anyway.
pub const PORT: u16 = VXLAN_PORT;
/// Bytes of a header, which the body follows.
pub const HEADER: usize = 40;
/// Bytes of a tag.
pub const TAG: usize = 8;
/// Bytes of each of the four kinds that programs read: ROLL, PRESENT, ANNOUNCE, FOLLOWS.
pub const KERNEL: usize = HEADER + 16 + TAG;
/// Most members that one signal can name.
pub const MAX_MEMBERS: usize = 128;
/// Bytes of the longest signal.
pub const LONGEST: usize = HEADER + 16 + 8 * MAX_MEMBERS + TAG;

const VERSION: u8 = 1;
const MAGIC: [u8; 4] = *b"kgs1";

wire_enum! {
    /// What a signal says.
    pub enum Kind {
        /// Asks a far leader's kernel to send it back.
        Probe = 1,
        /// The answer to PROBE: the probe itself, sent back.
        Reflected = 2,
        /// Asks a member's kernel whether it is there.
        Roll = 3,
        /// The answer to ROLL: the member's cookie and the gateway it uses.
        Present = 4,
        /// Asks a member to try the path through its leader.
        Witness = 5,
        /// The answer to WITNESS.
        Verdict = 6,
        /// Announces to a member's kernel that it is to use the sender from now on.
        Announce = 7,
        /// The answer of a kernel that obeys ANNOUNCE.
        Follows = 8,
        /// A member whose leader is silent asks to be led.
        Adopt = 9,
        /// A leader gives members away.
        Handover = 10,
        /// Reports what a gateway knows to the other gateways of its location.
        Hello = 11,
        /// Reports to a far leader that these members use the sender.
        Claim = 12,
        /// The answer to CLAIM: the claiming gateway's WireGuard peer has the members' prefixes.
        Moved = 13,
        /// The last thing a leader sends for members that it gives away, in band.
        End = 14,
        /// Asks a gateway to be ready for a planned change.
        Prepare = 15,
        /// The answer to PREPARE.
        Ready = 16,
    }
}

impl Kind {
    /// Whether it ends with a tag. A probe proves only that it came back, and WireGuard has authenticated
    /// what comes through a tunnel.
    #[inline(always)]
    pub const fn has_tag(self) -> bool {
        !matches!(self, Self::Probe | Self::Reflected | Self::Claim | Self::Moved | Self::End)
    }
}

/// What a witness has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Verdict {
    /// Nothing came back through the leader.
    #[default]
    Failed = 0,
    /// Something came back through the leader.
    Works = 1,
    /// The witness uses another leader.
    Elsewhere = 2,
}

/// A signal's first 40 bytes, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of signal.
    pub kind: Kind,
    /// Its whole length in bytes, a multiple of 8.
    pub length: usize,
    /// A random number that the answer repeats; in ADOPT, HANDOVER and PREPARE, a number that grows with each
    /// one a sender makes in one boot.
    pub nonce: u64,
    /// The term it is about.
    pub term: Term,
    /// First 8 bytes of SHA-256 of the sender's public key.
    pub sender: u64,
    /// First 8 bytes of SHA-256 of the location's name.
    pub location: u64,
}

/// Why bytes are not a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Another first byte, magic or version, or fewer bytes than a header has.
    Other,
    /// A kind that this version does not know.
    Kind(u8),
    /// A length that differs from what arrived, or that the kind cannot have.
    Length,
    /// A value that its field cannot have.
    Value,
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// True for the first 8 bytes of a signal of any version.
#[inline(always)]
#[must_use]
pub const fn begins(first: &[u8; 8]) -> bool {
    let [zero, _, _, _, a, b, c, d] = *first;
    zero == 0 && u32::from_be_bytes([a, b, c, d]) == u32::from_be_bytes(MAGIC)
}

/// True when a node's programs or its VXLAN device could take a datagram to [`PORT`] with these first 8
/// bytes. The device refuses flags other than "VNI is valid" (`vxlan_rcv` in
/// `drivers/net/vxlan/vxlan_core.c`); any VNI counts here.
#[inline(always)]
#[must_use]
pub const fn is_vxlan_or_signal(first: &[u8; 8]) -> bool {
    let ([a, b, c, d, ..], [w, x, y, z, ..]) = (*first, vxlan_header());
    u32::from_be_bytes([a, b, c, d]) == u32::from_be_bytes([w, x, y, z]) || begins(first)
}

/// Reads a header; `length` is the number of bytes behind the UDP header.
///
/// # Errors
/// When it is not a signal of this version with this length.
#[inline(always)]
pub fn header(bytes: &[u8; HEADER], length: usize) -> Result<Header, Malformed> {
    let words: [u64; 5] = core::array::from_fn(|i| word(bytes, i * 8).unwrap_or(0));
    if bytes[0] != 0 || bytes[1] != VERSION || bytes[4..8] != MAGIC {
        return Err(Malformed::Other);
    }
    let kind = Kind::from_u8(bytes[2]).ok_or(Malformed::Kind(bytes[2]))?;
    let said = usize::from(bytes[3]) * 8;
    let least = HEADER + if kind.has_tag() { TAG } else { 0 };
    // Anybody can send these two, so they may not be longer than a header, neither on the way back nor in the
    // ring.
    let most = if matches!(kind, Kind::Probe | Kind::Reflected) { HEADER } else { LONGEST };
    if said != length || said < least || said > most {
        return Err(Malformed::Length);
    }
    // In a node's own word these low bits are its hop id; signals leave them zero.
    if words[2] & 0xffff != 0 {
        return Err(Malformed::Value);
    }
    let [_, nonce, term, sender, location] = words;
    Ok(Header { kind, length, nonce, term: Term::from_bits(term >> 16), sender, location })
}

/// A list of words as stored in a signal, big-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words<'a>(&'a [[u8; 8]]);

/// A list of words: read from a signal, or made to be written.
pub trait List {
    /// Number of words.
    fn count(&self) -> usize;
    /// The word at this index; 0 when there is none.
    fn get(&self, at: usize) -> u64;
}

impl List for Words<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn get(&self, at: usize) -> u64 {
        self.0.get(at).map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }
}

impl<T: AsRef<[u64]>> List for T {
    fn count(&self) -> usize {
        self.as_ref().len()
    }

    fn get(&self, at: usize) -> u64 {
        self.as_ref().get(at).copied().unwrap_or(0)
    }
}

impl Words<'_> {
    /// Every word, in host byte order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|bytes| u64::from_be_bytes(*bytes))
    }
}

/// What follows the header. Ids are the first 8 bytes of SHA-256 of a node's
/// public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<L> {
    /// PROBE, REFLECTED.
    Empty,
    /// ROLL, PRESENT, ANNOUNCE, FOLLOWS. The question is as long as the answer, so that no kernel sends more
    /// than it receives.
    Word {
        /// The member's secret for this sender, drawn when the member starts (0 in ROLL).
        cookie: u64,
        /// The gateway it uses, or is to use.
        gateway: u64,
    },
    /// WITNESS.
    Question {
        /// Number of the question, which VERDICT repeats.
        id: u32,
        /// How long the witness waits for its own probes, in ms; the asking node knows the path better.
        patience: u32,
    },
    /// VERDICT.
    Witness {
        /// Number of the question, from WITNESS.
        id: u32,
        /// What was seen.
        verdict: Verdict,
    },
    /// ADOPT, HANDOVER.
    Members {
        /// The sender's own secret for the receiver, as its kernel reports it in PRESENT: of this boot.
        cookie: u64,
        /// How long the fault has lasted, in ms; 0 = there is no fault, the change is only wished for.
        age: u32,
        /// Members it is about.
        members: L,
    },
    /// HELLO.
    Hello {
        /// Whether its own tunnels work.
        is_fit: bool,
        /// Whether its own tunnels are overloaded: they lose probes while packets still come out of them.
        is_busy: bool,
        /// Whether it leads members in the signal's term.
        leads: bool,
        /// The gateway it uses.
        gateway: u64,
        /// The sender's secret for the receiver, drawn at boot: its numbers count within that boot.
        cookie: u64,
        /// Losses of leadership, as pairs of words: a gateway's id; their number << 32 | seconds since the
        /// last.
        losses: L,
    },
    /// CLAIM, MOVED, END.
    Claim {
        /// Gateway that the prefixes belong to from now on.
        gateway: u64,
        /// What becomes of the prefixes of no single member (WireGuard address, allowed-location-ips).
        shared: Shared,
        /// Index of this part, and the number of parts.
        part: (u16, u16),
        /// Members whose prefixes move.
        members: L,
    },
    /// PREPARE, READY.
    Change {
        /// As in `Members`; READY repeats that of its PREPARE.
        cookie: u64,
        /// The next leader.
        gateway: u64,
    },
}

/// What a CLAIM does with the prefixes that belong to no single member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Shared {
    /// They stay where they are.
    #[default]
    Stay = 0,
    /// They move, too.
    Move = 1,
    /// They move if the far leader itself gets nothing back from the old leader.
    MoveIfSilent = 2,
}

impl Shared {
    const fn from_u32(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::Stay),
            1 => Some(Self::Move),
            2 => Some(Self::MoveIfSilent),
            _ => None,
        }
    }
}

/// A whole signal; `L` is [`Words`] when read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal<L> {
    /// Kind of signal.
    pub kind: Kind,
    /// As in [`Header`].
    pub nonce: u64,
    /// As in [`Header`].
    pub term: Term,
    /// As in [`Header`].
    pub sender: u64,
    /// As in [`Header`].
    pub location: u64,
    /// What follows the header.
    pub body: Body<L>,
}

impl<L> Signal<L> {
    /// The same signal with another kind of list, e.g. with members of its own instead of borrowed ones.
    pub fn map_list<M>(self, change: impl FnOnce(L) -> M) -> Signal<M> {
        let Self { kind, nonce, term, sender, location, body } = self;
        let body = match body {
            Body::Empty => Body::Empty,
            Body::Word { cookie, gateway } => Body::Word { cookie, gateway },
            Body::Question { id, patience } => Body::Question { id, patience },
            Body::Witness { id, verdict } => Body::Witness { id, verdict },
            Body::Members { cookie, age, members } => Body::Members { cookie, age, members: change(members) },
            Body::Hello { is_fit, is_busy, leads, gateway, cookie, losses } => {
                Body::Hello { is_fit, is_busy, leads, gateway, cookie, losses: change(losses) }
            }
            Body::Claim { gateway, shared, part, members } => {
                Body::Claim { gateway, shared, part, members: change(members) }
            }
            Body::Change { cookie, gateway } => Body::Change { cookie, gateway },
        };
        Signal { kind, nonce, term, sender, location, body }
    }
}

const HELLO_FIT: u64 = 1;
const HELLO_LEADS: u64 = 2;
const HELLO_BUSY: u64 = 4;

/// Reads a signal from everything behind the UDP header. The tag is not checked:
/// [`is_authentic`] does that.
///
/// # Errors
/// When it is malformed; none of it may be used then.
pub fn parse(bytes: &[u8]) -> Result<Signal<Words<'_>>, Malformed> {
    let start = bytes.first_chunk::<HEADER>().ok_or(Malformed::Other)?;
    let Header { kind, length, nonce, term, sender, location } = header(start, bytes.len())?;
    let end = length - if kind.has_tag() { TAG } else { 0 };
    let body = bytes.get(HEADER..end).ok_or(Malformed::Length)?;
    let (words, []) = body.as_chunks::<8>() else { return Err(Malformed::Length) };
    let body = self::body(kind, words)?;
    Ok(Signal { kind, nonce, term, sender, location, body })
}

fn body(kind: Kind, words: &[[u8; 8]]) -> Result<Body<Words<'_>>, Malformed> {
    let number = |word: &[u8; 8]| u64::from_be_bytes(*word);
    let halves = |word: &[u8; 8]| ((number(word) >> 32) as u32, number(word) as u32);
    let members = |rest: &[[u8; 8]]| if rest.len() > MAX_MEMBERS { Err(Malformed::Length) } else { Ok(()) };
    Ok(match (kind, words) {
        (Kind::Probe | Kind::Reflected, []) => Body::Empty,
        (Kind::Roll | Kind::Present | Kind::Announce | Kind::Follows, [cookie, gateway]) => {
            Body::Word { cookie: number(cookie), gateway: number(gateway) }
        }
        (Kind::Witness, [word]) => {
            let (id, patience) = halves(word);
            Body::Question { id, patience }
        }
        (Kind::Verdict, [word]) => {
            let (id, verdict) = halves(word);
            let verdict = match verdict {
                0 => Verdict::Failed,
                1 => Verdict::Works,
                2 => Verdict::Elsewhere,
                _ => return Err(Malformed::Value),
            };
            Body::Witness { id, verdict }
        }
        (Kind::Adopt | Kind::Handover, [cookie, second, rest @ ..]) => {
            let (age, zero) = halves(second);
            if zero != 0 {
                return Err(Malformed::Value);
            }
            members(rest)?;
            Body::Members { cookie: number(cookie), age, members: Words(rest) }
        }
        (Kind::Hello, [flags, gateway, cookie, rest @ ..]) => {
            let flags = number(flags);
            if flags & !(HELLO_FIT | HELLO_LEADS | HELLO_BUSY) != 0 {
                return Err(Malformed::Value);
            }
            if !rest.len().is_multiple_of(2) {
                return Err(Malformed::Length);
            }
            members(rest)?;
            Body::Hello {
                is_fit: flags & HELLO_FIT != 0,
                is_busy: flags & HELLO_BUSY != 0,
                leads: flags & HELLO_LEADS != 0,
                gateway: number(gateway),
                cookie: number(cookie),
                losses: Words(rest),
            }
        }
        (Kind::Claim | Kind::Moved | Kind::End, [gateway, word, rest @ ..]) => {
            let (shared, parts) = halves(word);
            let part = ((parts >> 16) as u16, parts as u16);
            let shared = Shared::from_u32(shared).ok_or(Malformed::Value)?;
            if part.0 >= part.1 {
                return Err(Malformed::Value);
            }
            members(rest)?;
            Body::Claim { gateway: number(gateway), shared, part, members: Words(rest) }
        }
        (Kind::Prepare | Kind::Ready, [cookie, gateway]) => {
            Body::Change { cookie: number(cookie), gateway: number(gateway) }
        }
        _ => return Err(Malformed::Length),
    })
}

/// Writes a signal, with a tag if its kind has one, and returns the number of bytes. `None`: it names more
/// members than fit, or its kind needs a key and there is none.
pub fn write<L: List>(out: &mut [u8; LONGEST], signal: &Signal<L>, key: Option<Key>) -> Option<usize> {
    let mut at = HEADER;
    let mut put = |word: u64| {
        if let Some(room) = out.get_mut(at..at + 8) {
            room.copy_from_slice(&word.to_be_bytes());
        }
        at += 8;
    };
    let both = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let mut list = None;
    match &signal.body {
        Body::Empty => {}
        Body::Word { cookie, gateway } | Body::Change { cookie, gateway } => {
            put(*cookie);
            put(*gateway);
        }
        Body::Question { id, patience } => put(both(*id, *patience)),
        Body::Witness { id, verdict } => put(both(*id, *verdict as u32)),
        Body::Members { cookie, age, members } => {
            put(*cookie);
            put(both(*age, 0));
            list = Some(members);
        }
        Body::Hello { is_fit, is_busy, leads, gateway, cookie, losses } => {
            let flags = [(*is_fit, HELLO_FIT), (*leads, HELLO_LEADS), (*is_busy, HELLO_BUSY)];
            put(flags.iter().map(|(is_set, flag)| u64::from(*is_set) * flag).sum());
            put(*gateway);
            put(*cookie);
            list = Some(losses);
        }
        Body::Claim { gateway, shared, part, members } => {
            put(*gateway);
            put(both(*shared as u32, u32::from(part.0) << 16 | u32::from(part.1)));
            list = Some(members);
        }
    }
    if let Some(list) = list {
        if list.count() > MAX_MEMBERS {
            return None;
        }
        (0..list.count()).for_each(|i| put(list.get(i)));
    }
    let length = at + if signal.kind.has_tag() { TAG } else { 0 };
    out[..8].copy_from_slice(&[0, VERSION, signal.kind as u8, (length / 8) as u8, 0, 0, 0, 0]);
    out[4..8].copy_from_slice(&MAGIC);
    let words = [signal.nonce, signal.term.bits() << 16, signal.sender, signal.location];
    for (word, room) in words.iter().zip(out[8..HEADER].chunks_exact_mut(8)) {
        room.copy_from_slice(&word.to_be_bytes());
    }
    if signal.kind.has_tag() {
        let tag = siphash::of_bytes(key?, out.get(..at)?);
        out.get_mut(at..length)?.copy_from_slice(&tag.to_le_bytes());
    }
    Some(length)
}

/// Whether the tag at the end of these bytes was made with this key.
pub fn is_authentic(bytes: &[u8], key: Key) -> bool {
    bytes
        .split_last_chunk::<TAG>()
        .is_some_and(|(said, tag)| siphash::of_bytes(key, said) == u64::from_le_bytes(*tag))
}

#[cfg(test)]
mod tests;
