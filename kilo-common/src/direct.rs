//! An array beside the trie for prefixes of one length: pod CIDRs mostly share theirs, and an array lookup
//! costs the same however many there are.
//!
//! A slot holds one prefix, and only one that contains no longer prefix, so that a hit is what the trie would
//! find. Everything else is left to the trie: other lengths, prefixes that contain longer ones, and all but
//! the first of those that share a slot. A slot is one word and records the prefix length it was written for,
//! so what an agent with another length left behind does not match. Slots that change or go are emptied
//! before anything else is written, and filled after everything else; meanwhile the trie answers.

use crate::{map_table::DIRECT_V4, maps::PrefixValue};

/// Bit in the upper half of a word: the slot is taken.
const TAKEN: u32 = 1 << 31;
/// Position, in that half, of the number of bits behind the prefix.
const SHIFT: u32 = 16;

const _: () = assert!(DIRECT_V4.size == 1 << 16 && size_of::<u64>() as u32 == DIRECT_V4.value);

/// The slot of an address's prefix, and the key that proves that the word there is for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index into the array.
    pub index: u32,
    /// Upper half of the word.
    key: u32,
}

impl Slot {
    /// The slot of the IPv4 prefix that leaves `shift` bits of this address behind it, 1 to 31.
    #[inline(always)]
    pub const fn of(addr: [u8; 4], shift: u16) -> Self {
        let net = u32::from_be_bytes(addr) >> (shift as u32 & 31);
        Self { index: net & (DIRECT_V4.size - 1), key: TAKEN | (shift as u32) << SHIFT | net >> 16 }
    }

    /// The value that a word of the array holds for this prefix; `None` when it is for another one.
    #[inline(always)]
    pub const fn read(self, word: u64) -> Option<PrefixValue> {
        if (word >> 32) as u32 == self.key {
            Some(PrefixValue { hop: word as u16 as u32, flags: (word >> 16) as u16 as u32 })
        } else {
            None
        }
    }

    /// The word with this value for the prefix; `None` when the hop id or the flags exceed 16 bits.
    pub const fn word(self, value: PrefixValue) -> Option<u64> {
        if value.hop > 0xffff || value.flags > 0xffff {
            return None;
        }
        Some((self.key as u64) << 32 | (value.flags as u64) << 16 | value.hop as u64)
    }
}

/// Bits behind a prefix of this length; 0 for lengths that the array cannot hold.
pub const fn shift(length: u8) -> u16 {
    if length == 0 || length >= 32 { 0 } else { 32 - length as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_is_found_by_every_address_of_its_prefix_and_by_no_other(
            addr: [u8; 4], other: [u8; 4], length in 1u8..32, of in 0u8..=32, hop: u16, flags: u16,
        ) {
            let value = PrefixValue { hop: hop.into(), flags: flags.into() };
            let slot = Slot::of(addr, shift(length));
            let word = slot.word(value).expect("it has room");
            let bits = |addr: [u8; 4]| u32::from_be_bytes(addr) >> (32 - length);
            for near in [other, (u32::from_be_bytes(addr) ^ u32::from_be_bytes(other) >> length).to_be_bytes()] {
                let found = Slot::of(near, shift(length));
                let same = bits(near) == bits(addr);
                prop_assert_eq!(found.index == slot.index && found.read(word).is_some(), same);
                prop_assert!(!same || found.read(word) == Some(value));
            }
            // Words of another length are not found, nor is anything where no length is given.
            let found = Slot::of(addr, shift(of)).read(word);
            prop_assert_eq!(found.is_some(), of == length);
            prop_assert_eq!(slot.read(0), None);
        }
    }

    #[test]
    fn what_does_not_fit_into_a_word_has_none() {
        let slot = Slot::of([10, 0, 0, 0], shift(24));
        assert_eq!(slot.word(PrefixValue { hop: 0x1_0000, flags: 0 }), None);
        assert_eq!(slot.word(PrefixValue { hop: 0, flags: 0x1_0000 }), None);
    }
}
