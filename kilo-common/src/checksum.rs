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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
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
