//! SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012), which makes the tags of
//! signals. It suits short messages, has 64 bits and needs neither tables nor multiplication, so that a BPF
//! program can check a tag.

/// A 128-bit key, as two little-endian words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Key(pub [u64; 2]);

impl Key {
    /// The key whose bytes these are.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        let whole = u128::from_le_bytes(bytes);
        Self([whole as u64, (whole >> 64) as u64])
    }
}

/// The four words of the state.
struct State([u64; 4]);

impl State {
    #[inline(always)]
    const fn new(key: Key) -> Self {
        Self([
            key.0[0] ^ 0x736f_6d65_7073_6575,
            key.0[1] ^ 0x646f_7261_6e64_6f6d,
            key.0[0] ^ 0x6c79_6765_6e65_7261,
            key.0[1] ^ 0x7465_6462_7974_6573,
        ])
    }

    #[inline(always)]
    const fn round(&mut self) {
        let [mut a, mut b, mut c, mut d] = self.0;
        a = a.wrapping_add(b);
        b = b.rotate_left(13) ^ a;
        a = a.rotate_left(32);
        c = c.wrapping_add(d);
        d = d.rotate_left(16) ^ c;
        a = a.wrapping_add(d);
        d = d.rotate_left(21) ^ a;
        c = c.wrapping_add(b);
        b = b.rotate_left(17) ^ c;
        c = c.rotate_left(32);
        self.0 = [a, b, c, d];
    }

    #[inline(always)]
    const fn word(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.round();
        self.0[0] ^= word;
    }

    /// `last`: the bytes that do not fill a word, and in the top byte the length.
    #[inline(always)]
    const fn finish(mut self, last: u64) -> u64 {
        self.word(last);
        self.0[2] ^= 0xff;
        let mut i = 0;
        while i < 4 {
            self.round();
            i += 1;
        }
        self.0[0] ^ self.0[1] ^ self.0[2] ^ self.0[3]
    }
}

/// The hash of `N` whole words, each read from its bytes as little-endian: the
/// loop has a constant bound, which the verifier of Linux 6.1 needs.
#[inline(always)]
pub const fn of_words<const N: usize>(key: Key, words: &[u64; N]) -> u64 {
    let mut state = State::new(key);
    let mut i = 0;
    while i < N {
        state.word(words[i]);
        i += 1;
    }
    state.finish(((N as u64 * 8) & 0xff) << 56)
}

/// The hash of any bytes.
pub fn of_bytes(key: Key, bytes: &[u8]) -> u64 {
    let mut state = State::new(key);
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        state.word(u64::from_le_bytes(*word));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    last[7] = bytes.len() as u8;
    state.finish(u64::from_le_bytes(last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: Key = Key::from_bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

    fn counting(length: u8) -> Vec<u8> {
        (0..length).collect()
    }

    #[test]
    fn the_vectors_of_the_authors_hold() {
        // Appendix A of the paper, and outputs its reference code publishes for bytes 0, 1, 2, …
        assert_eq!(of_bytes(KEY, &counting(15)), 0xa129_ca61_49be_45e5);
        for (length, expected) in [
            (0, [0x31, 0x0e, 0x0e, 0xdd, 0x47, 0xdb, 0x6f, 0x72]),
            (1, [0xfd, 0x67, 0xdc, 0x93, 0xc5, 0x39, 0xf8, 0x74]),
            (2, [0x5a, 0x4f, 0xa9, 0xd9, 0x09, 0x80, 0x6c, 0x0d]),
            (8, [0x62, 0x24, 0x93, 0x9a, 0x79, 0xf5, 0xf5, 0x93]),
        ] {
            assert_eq!(of_bytes(KEY, &counting(length)), u64::from_le_bytes(expected), "{length} bytes");
        }
    }

    proptest! {
        /// The standard library has the same function, deprecated.
        #[test]
        #[allow(deprecated, reason = "a second implementation to compare with; nothing else computes SipHash 2-4")]
        fn it_is_what_the_standard_library_computes(key in any::<[u64; 2]>(), bytes in any::<Vec<u8>>()) {
            use std::hash::{Hasher as _, SipHasher};
            let mut other = SipHasher::new_with_keys(key[0], key[1]);
            other.write(&bytes);
            prop_assert_eq!(of_bytes(Key(key), &bytes), other.finish());
        }

        #[test]
        fn words_and_bytes_agree(key in any::<[u64; 2]>(), words in any::<[u64; 7]>()) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            prop_assert_eq!(of_words(Key(key), &words), of_bytes(Key(key), &bytes));
        }
    }
}
