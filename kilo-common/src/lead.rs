//! Who leads a node: one word of the map `lead`, and the two rules that apply to it.
//!
//! The word is `term << 16 | hop`: the gateway that this node's packets for other locations use, as a hop id
//! of this host, and the term in which it was chosen. It fits one compare-and-exchange, so a change is
//! atomic.

/// Bits of a term; the rest of a word is the hop id.
pub const TERM_BITS: u32 = 48;
/// Low bits of a term, taken from the id of the gateway that made it.
const TIE_BITS: u32 = 16;
/// How many changes of leader a node may have missed. A term further ahead is refused: a count near its
/// maximum would leave the location no later one.
pub const LEAP: u32 = 1_024;

/// Highest count of leader changes that is believed, whatever its source: one per minute for 30 years.
pub const MOST_CHANGES: u32 = 1 << 24;

/// A node in signals and relay messages: first 8 bytes of SHA-256 of its public key.
pub type NodeId = u64;

/// Number of a change of leader. No two gateways use the same one: the low 16 bits are the gateway's own, so
/// every node and every far leader agrees which of two simultaneous changes is later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Term(u64);

impl Term {
    /// No change so far: the leader is the one by Kilo's rule.
    pub const NONE: Self = Self(0);

    /// A term from its 48 bits, as signals carry them; higher bits are dropped.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits & ((1 << TERM_BITS) - 1))
    }

    /// The 48 bits, as signals carry them and, shifted by 16, words.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Number of changes so far, as shown to users.
    pub const fn count(self) -> u32 {
        (self.0 >> TIE_BITS) as u32
    }

    /// Whether this is at most [`LEAP`] changes after the latest that is known.
    pub const fn is_near(self, known: Self) -> bool {
        self.count() <= known.count().saturating_add(LEAP)
    }

    /// The furthest term to accept after a single signal has claimed a later one: [`LEAP`] changes more.
    #[must_use]
    pub const fn next_step(self) -> Self {
        Self((self.count().saturating_add(LEAP) as u64) << TIE_BITS)
    }

    /// The latest term after which [`Self::next`] is still obeyed by a node that knows this one.
    #[must_use]
    pub const fn last_step(self) -> Self {
        Self((self.count().saturating_add(LEAP - 1) as u64) << TIE_BITS)
    }

    /// The next term, made by `gateway` (its [`crate::signal`] id).
    #[must_use]
    pub const fn next(self, gateway: u64) -> Self {
        let count = self.count().saturating_add(1) as u64;
        Self(count << TIE_BITS | (gateway >> (64 - TIE_BITS)))
    }

    /// Whether `gateway` made this term: who follows a gateway does so in a term of that gateway. Of 65,536
    /// others one looks the same.
    #[must_use]
    pub const fn is_by(self, gateway: u64) -> bool {
        self.count() > 0 && self.0 & ((1 << TIE_BITS) - 1) == gateway >> (64 - TIE_BITS)
    }
}

/// The word for a hop id in a term.
#[inline(always)]
pub const fn word(term: Term, hop: u16) -> u64 {
    term.0 << 16 | hop as u64
}

/// The term of a word.
#[inline(always)]
pub const fn term_of(word: u64) -> Term {
    Term(word >> 16)
}

/// The hop id of a word.
#[inline(always)]
pub const fn hop_of(word: u64) -> u16 {
    word as u16
}

/// Whether the term of a word is later than that of another.
#[inline(always)]
pub const fn is_later(word: u64, than: u64) -> bool {
    word >> 16 > than >> 16
}

/// Whether a node whose word is `current` obeys an ANNOUNCE of `offered`. Only a later term moves it, so a
/// repeated or delayed one never does; a term more than [`LEAP`] changes ahead is refused.
#[inline(always)]
pub const fn obeys(current: u64, offered: u64) -> bool {
    is_later(offered, current) && offered >> 32 <= (current >> 32) + LEAP as u64
}

/// Who has sent a packet for another location to this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A member that this gateway leads (`NODE_LED`), or this node itself.
    Led,
    /// Another gateway of the location, which this one does not lead.
    Gateway,
    /// Any other member: it has not heard of a change yet.
    Member,
}

/// What a gateway does with a packet for another location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Gives it to WireGuard.
    WireGuard,
    /// Sends it to the gateway that its own word names, with the TTL lowered by one.
    PassOn,
    /// Drops it: the next gateway would be its third.
    Drop,
}

/// What a gateway does with a packet for another location; `is_mine`: its own word names itself. For a while,
/// a relieved leader serves members that have not heard of the change, over two LAN hops at most: a packet
/// from another gateway goes no further.
#[inline(always)]
pub const fn exit(sender: Sender, is_mine: bool) -> Exit {
    match sender {
        Sender::Led => Exit::WireGuard,
        _ if is_mine => Exit::WireGuard,
        Sender::Member => Exit::PassOn,
        Sender::Gateway => Exit::Drop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_holds_both_and_only_a_later_term_moves_it(term in 0u64..1 << 48, hop: u16, other in 0u64..1 << 48, to: u16) {
            let (old, new) = (word(Term(term), hop), word(Term(other), to));
            prop_assert_eq!((term_of(old), hop_of(old)), (Term(term), hop));
            prop_assert_eq!(is_later(new, old), other > term);
            prop_assert_eq!(obeys(old, new), other > term && Term(other).is_near(Term(term)));
            prop_assert!(!(obeys(old, new) && obeys(new, old)));
        }

        #[test]
        fn the_next_term_is_later_and_its_gateways_own(bits in 0u64..1 << 47, a: u64, b: u64) {
            let term = Term::from_bits(bits);
            prop_assert!(term.next(a) > term);
            prop_assert_eq!(term.next(a).count(), term.count() + 1);
            prop_assert_eq!(term.next(a) == term.next(b), a >> 48 == b >> 48);
        }
    }

    #[test]
    fn nobody_obeys_a_count_that_leaps() {
        let at = |count: u64| word(Term(count << TIE_BITS | 0xffff), 7);
        for known in [0, 5, 1 << 20] {
            assert!(obeys(at(known), at(known + 1)) && obeys(at(known), at(known + u64::from(LEAP))));
            assert!(!obeys(at(known), at(known + u64::from(LEAP) + 1)));
            assert!(!obeys(at(known), u64::MAX));
        }
        let end = Term::from_bits(u64::MAX);
        assert!(end.is_near(end) && Term::NONE.is_near(end) && !end.is_near(Term::NONE.next(9)));
    }

    #[test]
    fn what_comes_from_a_gateway_is_never_passed_on() {
        for is_mine in [false, true] {
            assert_eq!(exit(Sender::Led, is_mine), Exit::WireGuard);
            assert_ne!(exit(Sender::Gateway, is_mine), Exit::PassOn);
        }
        assert_eq!(exit(Sender::Member, false), Exit::PassOn);
        assert_eq!(exit(Sender::Member, true), Exit::WireGuard);
    }
}
