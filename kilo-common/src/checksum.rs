//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//! Sums are over 16-bit words in network byte order.

/// Folds a sum of 16-bit words to 16 bits.
#[inline(always)]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Checksum of an IPv4 header of 20 bytes whose checksum field is zero.
#[inline(always)]
pub const fn header(bytes: &[u8; 20]) -> u16 {
    let mut sum = 0u32;
    let mut i = 0;
    while i < 20 {
        sum += (bytes[i] as u32) << 8 | bytes[i + 1] as u32;
        i += 2;
    }
    !fold(sum)
}

/// Checksum after one 16-bit word changed (RFC 1624, equation 3).
#[inline(always)]
pub const fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !fold(!checksum as u32 + !old as u32 + new as u32)
}

/// Checksum after the words of `old` became those of `new`; all three as they lie in memory.
#[inline(always)]
pub const fn update_word(checksum: u16, old: u32, new: u32) -> u16 {
    let sum = !checksum as u64 + !old as u64 + new as u64;
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Checksum after `old` became `new`, both of the same, even length.
#[inline(always)]
pub fn replace(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    let mut sum = u32::from(!checksum);
    for (old, new) in old.chunks_exact(2).zip(new.chunks_exact(2)) {
        sum += u32::from(!u16::from_be_bytes([old[0], old[1]]))
            + u32::from(u16::from_be_bytes([new[0], new[1]]));
    }
    !fold(sum)
}

/// What changing `old` to `new` (same length, a multiple of 4) adds to the
/// kernel's 32-bit partial sums, which are over words as they lie in memory.
#[inline(always)]
pub fn difference(old: &[u8], new: &[u8]) -> u32 {
    let mut sum = 0u64;
    for (old, new) in old.chunks_exact(4).zip(new.chunks_exact(4)) {
        sum += u64::from(!u32::from_ne_bytes([old[0], old[1], old[2], old[3]]))
            + u64::from(u32::from_ne_bytes([new[0], new[1], new[2], new[3]]));
    }
    add(sum as u32, (sum >> 32) as u32)
}

/// As [`difference`], for two addresses in halves as they lie in memory.
#[inline(always)]
pub const fn difference_of_halves(old: [u64; 2], new: [u64; 2]) -> u32 {
    let sum = (!old[0] & 0xffff_ffff)
        + (!old[0] >> 32)
        + (!old[1] & 0xffff_ffff)
        + (!old[1] >> 32)
        + (new[0] & 0xffff_ffff)
        + (new[0] >> 32)
        + (new[1] & 0xffff_ffff)
        + (new[1] >> 32);
    add(sum as u32, (sum >> 32) as u32)
}

/// A UDP checksum (as it lies in memory) after the bytes that it covers changed by a [`difference`]; never
/// zero, which would mean that there is none.
#[inline(always)]
pub const fn of_udp(checksum: u16, difference: u32) -> u16 {
    match !fold(add(difference, !checksum as u32)) {
        0 => u16::MAX,
        sum => sum,
    }
}

/// Whether a UDP checksum covers the whole datagram, judged by how the kernel changed it for a difference of
/// the addresses. False: it covers the pseudo-header alone, without ports, and a device completes it; or the
/// difference does not show which.
#[inline(always)]
pub const fn was_whole(before: u16, after: u16, difference: u32) -> bool {
    after != before && after == of_udp(before, difference)
}

/// Sum of two partial sums, with the carry carried around.
#[inline(always)]
pub const fn add(a: u32, b: u32) -> u32 {
    let (sum, carry) = a.overflowing_add(b);
    sum + carry as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The checksum over all words, as RFC 1071 defines it.
    fn full(bytes: &[u8]) -> u16 {
        !fold(bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum())
    }

    proptest! {
        #[test]
        fn replacing_words_equals_a_full_computation(
            rest in any::<[u8; 24]>(), old in any::<[u8; 16]>(), new in any::<[u8; 16]>(),
        ) {
            prop_assume!(rest != [0; 24]);
            let expected = full(&[&rest[..], &new].concat());
            let before = full(&[&rest[..], &old].concat());
            prop_assert_eq!(replace(before, &old, &new), expected);
            let halves = |a: [u8; 16]| {
                let (first, second) = a.split_at(8);
                [first, second].map(|half| u64::from_ne_bytes(half.try_into().unwrap()))
            };
            prop_assert_eq!(difference_of_halves(halves(old), halves(new)) % 0xffff, difference(&old, &new) % 0xffff);
            // The kernel folds its sum in the words' own byte order.
            let mut sum = u64::from(u16::from_be(!before)) + u64::from(difference(&old, &new));
            while sum > 0xffff { sum = (sum & 0xffff) + (sum >> 16); }
            prop_assert_eq!(!(sum as u16).to_be(), expected);
        }

        /// What the kernel does (`inet_proto_csum_replace_by_diff`) in either case.
        #[test]
        fn what_the_kernel_made_of_a_sum_shows_which_kind_it_is(
            before in 1..=u16::MAX, difference in prop_oneof![any::<u32>(), Just(0), Just(u32::MAX), 0..4u32],
        ) {
            let fold = |mut sum: u64| {
                while sum > 0xffff { sum = (sum & 0xffff) + (sum >> 16); }
                sum as u16
            };
            let mangled = |sum: u16| if sum == 0 { u16::MAX } else { sum };
            let whole = mangled(!fold(u64::from(difference) + u64::from(!u32::from(before))));
            let partial = mangled(fold(u64::from(difference) + u64::from(before)));
            prop_assert!(!was_whole(before, partial, difference), "a device completes it");
            if difference % 0xffff != 0 {
                prop_assert!(was_whole(before, whole, difference));
            }
        }

        #[test]
        fn replacing_one_word_as_it_lies_in_memory_equals_a_full_computation(
            rest in any::<[u8; 24]>(),
            old in prop_oneof![any::<u32>(), Just(0), Just(u32::MAX)],
            new in prop_oneof![any::<u32>(), Just(0), Just(u32::MAX)],
        ) {
            prop_assume!(rest != [0; 24]);
            let whole = |word: u32| full(&[&rest[..], &word.to_ne_bytes()].concat()).to_be();
            prop_assert_eq!(update_word(whole(old), old, new), whole(new));
        }

        #[test]
        fn an_incremental_update_equals_a_full_computation(
            mut bytes in any::<[u8; 20]>(), word in 0usize..10, new in any::<u16>(),
        ) {
            // The checksum field is not a word of its own sum; all-zero headers do not exist.
            prop_assume!(word != 5);
            bytes[0] = 0x45;
            prop_assume!(word != 0);
            bytes[10..12].copy_from_slice(&[0, 0]);
            let before = header(&bytes);
            let old = u16::from_be_bytes([bytes[word * 2], bytes[word * 2 + 1]]);
            bytes[word * 2..word * 2 + 2].copy_from_slice(&new.to_be_bytes());
            prop_assert_eq!(update(before, old, new), header(&bytes));
        }
    }

    #[test]
    fn the_example_of_rfc_1071_style_headers_sums_to_zero() {
        let mut bytes =
            [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
        assert_eq!(header(&bytes), 0xb861);
        bytes[10..12].copy_from_slice(&0xb861_u16.to_be_bytes());
        assert_eq!(header(&bytes), 0);
    }
}
