//! What a program does with a signal: whether it answers, obeys, hands it to the agent or drops it. The
//! four kinds of [`KERNEL`] bytes are read here in words, as they lie in memory.

use super::{Header, KERNEL, Kind};
use crate::{
    checksum,
    drop_reasons::DropReason,
    lead::{self, Term},
    maps::{HOP_FIRST_NODE, SIGNAL_GATEWAY, SignalKey},
    siphash::{self, Key},
};

/// Words of such a signal.
pub const WORDS: usize = KERNEL / 8;
/// A signal of [`KERNEL`] bytes, in words as they lie in memory.
pub type Raw = [u64; WORDS];

/// Indexes of its words.
const FIRST: usize = 0;
const TERM: usize = 2;
const SENDER: usize = 3;
const COOKIE: usize = 5;
const GATEWAY: usize = 6;
const TAGGED: usize = 7;

/// Offset of the kind in a signal, in bytes.
pub const KIND_AT: usize = 2;

/// What becomes of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is sent back as it is, but as [`Kind::Reflected`].
    Reflect,
    /// The program answers it in place.
    Answer,
    /// Only the agent reads it.
    Agent,
    /// As `Agent`, if its addresses are control addresses: it is from a gateway of another location.
    Control,
    /// It is not valid here.
    Refuse,
}

/// What a node does with a signal from the network between the nodes.
#[inline(always)]
pub const fn on_lan(kind: Kind) -> Taken {
    match kind {
        Kind::Probe => Taken::Reflect,
        Kind::Roll | Kind::Announce => Taken::Answer,
        Kind::Claim | Kind::Moved | Kind::End => Taken::Refuse,
        _ => Taken::Agent,
    }
}

/// What a node does with a signal that came through a tunnel.
#[inline(always)]
pub const fn in_tunnel(kind: Kind) -> Taken {
    match kind {
        Kind::Probe => Taken::Reflect,
        Kind::Reflected => Taken::Agent,
        Kind::Claim | Kind::Moved | Kind::End => Taken::Control,
        _ => Taken::Refuse,
    }
}

/// Eighths of the agent's ring that may hold unread records when a signal of this kind and length, in bytes,
/// comes; with more it is dropped. Only the tag of [`KERNEL`] bytes is checked before the ring, so what others
/// send must leave room: a LAN's strangers and VPN peers for gateways of other locations, these for the answers
/// to this node's own probes, and all of them for signals whose tag is right.
#[inline(always)]
pub const fn eighths_of_ring(kind: Kind, length: usize) -> u64 {
    match kind {
        Kind::Reflected => 6,
        Kind::Claim | Kind::End => 5,
        Kind::Moved => 4,
        _ if length == KERNEL => 8,
        _ => 4,
    }
}

/// Checks that a tagged signal bears the id of the node whose key this is.
///
/// # Errors
/// [`DropReason::ForgedSignal`].
#[inline(always)]
pub const fn check_sender(header: &Header, key: &SignalKey) -> Result<(), DropReason> {
    if header.sender == key.sender { Ok(()) } else { Err(DropReason::ForgedSignal) }
}

/// Checks that a CLAIM or END that came through a tunnel is from the gateway of another location whose entry
/// this is.
///
/// # Errors
/// [`DropReason::ForgedSignal`] when it bears another id, and [`DropReason::UnknownSignal`] when that node is
/// not a gateway.
#[inline(always)]
pub const fn check_gateway(header: &Header, key: &SignalKey) -> Result<(), DropReason> {
    match check_sender(header, key) {
        Ok(()) if key.flags & SIGNAL_GATEWAY == 0 => Err(DropReason::UnknownSignal),
        result => result,
    }
}

/// Checks the tag with the key of the node that has sent the signal.
///
/// # Errors
/// [`DropReason::ForgedSignal`] when the tag does not match.
#[inline(always)]
pub const fn authentic(raw: &Raw, key: &SignalKey) -> Result<(), DropReason> {
    if tag(raw, key) == u64::from_le(raw[TAGGED]) { Ok(()) } else { Err(DropReason::ForgedSignal) }
}

#[inline(always)]
const fn tag(raw: &Raw, key: &SignalKey) -> u64 {
    // Little-endian words, as on every machine this runs on.
    const { assert!(cfg!(target_endian = "little")) };
    let [a, b, c, d, e, f, g, _] = *raw;
    siphash::of_words(Key(key.key), &[a, b, c, d, e, f, g])
}

/// The word that an authentic ANNOUNCE offers.
///
/// # Errors
/// [`DropReason::StaleSignal`] when it does not bear this boot's cookie, [`DropReason::ForgedSignal`] when it
/// names another gateway than its sender, or one that may not lead, and [`DropReason::NoHop`] when no hop
/// leads to that gateway.
#[inline(always)]
pub const fn announced(raw: &Raw, header: &Header, key: &SignalKey) -> Result<u64, DropReason> {
    if u64::from_be(raw[GATEWAY]) != header.sender || key.flags & SIGNAL_GATEWAY == 0 {
        return Err(DropReason::ForgedSignal);
    }
    if key.cookie == 0 || u64::from_be(raw[COOKIE]) != key.cookie {
        return Err(DropReason::StaleSignal);
    }
    if key.hop < HOP_FIRST_NODE || key.hop > 0xffff {
        return Err(DropReason::NoHop);
    }
    Ok(lead::word(header.term, key.hop as u16))
}

/// What an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// [`Kind::Present`] or [`Kind::Follows`].
    pub kind: Kind,
    /// Term of the current word.
    pub term: Term,
    /// Id of the node that answers.
    pub sender: u64,
    /// The cookie in PRESENT, otherwise 0.
    pub cookie: u64,
    /// Id of the gateway that the node uses.
    pub gateway: u64,
}

/// Turns the question into its answer, in place: with the same length, nonce and location, and a tag of its
/// own. Returns what the change adds to the kernel's partial sums.
#[inline(always)]
pub const fn answer(raw: &mut Raw, answer: Answer, key: &SignalKey) -> u32 {
    const KIND: u64 = 0xff << (8 * KIND_AT);
    let removed = sum(raw, u64::MAX);
    let first = u64::from_le(raw[FIRST]) & !KIND | (answer.kind as u64) << (8 * KIND_AT);
    raw[FIRST] = first.to_le();
    raw[TERM] = (answer.term.bits() << 16).to_be();
    raw[SENDER] = answer.sender.to_be();
    raw[COOKIE] = answer.cookie.to_be();
    raw[GATEWAY] = answer.gateway.to_be();
    raw[TAGGED] = tag(raw, key).to_le();
    let sum = removed + sum(raw, 0);
    checksum::add(sum as u32, (sum >> 32) as u32)
}

/// The sum of the words' 32-bit halves, with the bits in `turned` inverted.
#[inline(always)]
const fn sum(raw: &Raw, turned: u64) -> u64 {
    let mut sum = 0u64;
    let mut i = 0;
    while i < WORDS {
        let word = raw[i] ^ turned;
        sum += (word & 0xffff_ffff) + (word >> 32);
        i += 1;
    }
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::*, *};

    fn raw(bytes: &[u8]) -> Raw {
        let (words, _) = bytes.as_chunks::<8>();
        core::array::from_fn(|i| u64::from_ne_bytes(words[i]))
    }

    fn bytes(raw: &Raw) -> Vec<u8> {
        raw.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// The Internet checksum's sum of the words.
    fn folded(raw: &Raw) -> u16 {
        let words = bytes(raw);
        let (pairs, _) = words.as_chunks::<2>();
        checksum::fold(pairs.iter().map(|pair| u32::from(u16::from_ne_bytes(*pair))).sum())
    }

    fn written(signal: &Signal<Vec<u64>>, key: [u64; 2]) -> Vec<u8> {
        let mut out = [0; LONGEST];
        let length = write(&mut out, signal, Some(Key(key))).unwrap();
        out[..length].to_vec()
    }

    fn signal(kind: Kind, term: u64, sender: u64, gateway: u64, cookie: u64) -> Signal<Vec<u64>> {
        Signal {
            kind,
            nonce: 7,
            term: Term::from_bits(term),
            sender,
            location: 9,
            body: Body::Word { cookie, gateway },
        }
    }

    proptest! {
        /// The answer is what the agent's parser reads, authentic, and as long as its question.
        #[test]
        fn an_answer_is_read_as_it_was_meant(key: [u64; 2], term in 0u64..1 << 48, cookie: u64, a: u64, b: u64, c: u64) {
            let mut question = raw(&written(&signal(Kind::Roll, 1, a, 0, 0), key));
            let key = SignalKey { key, ..SignalKey::default() };
            prop_assert_eq!(authentic(&question, &key), Ok(()));
            let said = Answer { kind: Kind::Present, term: Term::from_bits(term), sender: b, cookie, gateway: c };
            let before = folded(&question);
            let difference = checksum::fold(answer(&mut question, said, &key));
            prop_assert_eq!(authentic(&question, &key), Ok(()));
            // Zero has two forms.
            let after = checksum::fold(u32::from(before) + u32::from(difference));
            prop_assert_eq!(after % 0xffff, folded(&question) % 0xffff);
            let bytes = bytes(&question);
            prop_assert!(is_authentic(&bytes, Key(key.key)));
            let read = parse(&bytes).unwrap();
            prop_assert_eq!((read.kind, read.nonce, read.location), (Kind::Present, 7, 9));
            prop_assert_eq!((read.term.bits(), read.sender), (term, b));
            prop_assert_eq!(read.body, Body::Word { cookie, gateway: c });
        }

        #[test]
        fn every_changed_bit_is_noticed(key: [u64; 2], at in 0usize..KERNEL * 8) {
            let mut bytes = written(&signal(Kind::Announce, 5, 3, 3, 4), key);
            let key = SignalKey { key, ..SignalKey::default() };
            prop_assert_eq!(authentic(&raw(&bytes), &key), Ok(()));
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert_eq!(authentic(&raw(&bytes), &key), Err(DropReason::ForgedSignal));
        }
    }

    #[test]
    fn an_announce_counts_with_the_cookie_of_a_gateway_that_there_is_a_way_to() {
        let key = SignalKey { key: [1, 2], cookie: 4, sender: 3, hop: HOP_FIRST_NODE, flags: SIGNAL_GATEWAY };
        let offered = |cookie, gateway, key: &SignalKey| {
            let bytes = written(&signal(Kind::Announce, 5, 3, gateway, cookie), key.key);
            let header = header(bytes.first_chunk().unwrap(), bytes.len()).unwrap();
            announced(&raw(&bytes), &header, key)
        };
        assert_eq!(offered(4, 3, &key), Ok(lead::word(Term::from_bits(5), HOP_FIRST_NODE as u16)));
        assert_eq!(offered(5, 3, &key), Err(DropReason::StaleSignal));
        assert_eq!(offered(0, 3, &SignalKey { cookie: 0, ..key }), Err(DropReason::StaleSignal));
        assert_eq!(offered(4, 2, &key), Err(DropReason::ForgedSignal));
        assert_eq!(offered(4, 3, &SignalKey { flags: 0, ..key }), Err(DropReason::ForgedSignal));
        assert_eq!(offered(4, 3, &SignalKey { hop: HOP_FIRST_NODE - 1, ..key }), Err(DropReason::NoHop));
    }

    #[test]
    fn a_claim_counts_with_the_id_of_a_gateway() {
        let bytes = written(&signal(Kind::Announce, 5, 3, 3, 4), [0; 2]);
        let header = header(bytes.first_chunk().unwrap(), bytes.len()).unwrap();
        let of = |sender, flags| check_gateway(&header, &SignalKey { sender, flags, ..SignalKey::default() });
        assert_eq!(of(3, SIGNAL_GATEWAY), Ok(()));
        assert_eq!(of(4, SIGNAL_GATEWAY), Err(DropReason::ForgedSignal));
        assert_eq!(of(3, 0), Err(DropReason::UnknownSignal));
    }

    #[test]
    fn what_anybody_can_send_leaves_room_for_what_fewer_can() {
        let of = |kind| eighths_of_ring(kind, LONGEST);
        assert!(of(Kind::Hello) == of(Kind::Moved) && of(Kind::Witness) == of(Kind::Moved));
        assert!(of(Kind::Moved) < of(Kind::Claim) && of(Kind::Claim) == of(Kind::End));
        assert!(of(Kind::Claim) < of(Kind::Reflected) && of(Kind::Reflected) < 8);
        for kind in [Kind::Present, Kind::Follows] {
            assert_eq!(eighths_of_ring(kind, KERNEL), 8, "{kind:?}");
        }
    }

    #[test]
    fn every_kind_has_one_place_at_most() {
        for kind in (0..=u8::MAX).filter_map(Kind::from_u8) {
            let places = [on_lan(kind), in_tunnel(kind)];
            let by_tag = if kind.has_tag() { places[1] } else { places[0] };
            let probes = matches!(kind, Kind::Probe | Kind::Reflected);
            assert!(probes || by_tag == Taken::Refuse, "{kind:?}");
            assert!(places.iter().any(|taken| *taken != Taken::Refuse), "{kind:?}");
        }
    }
}
