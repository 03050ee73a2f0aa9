//! Explicit congestion notification on decapsulation (RFC 6040, section 4.2).

/// The ECN bits of a type of service or traffic class.
pub const MASK: u8 = 3;
/// Not ECN-capable: the sender learns of congestion only from packet loss.
const NOT_ECT: u8 = 0;
const ECT_1: u8 = 1;
const ECT_0: u8 = 2;
/// Congestion experienced.
const CE: u8 = 3;

/// Whether this outer type of service can change the inner one on decapsulation.
#[inline(always)]
pub const fn matters(outer: u8) -> bool {
    outer & ECT_1 != 0
}

/// The inner type of service after decapsulation. `None`: drop the packet, because its sender cannot learn of
/// the congestion in any other way.
#[inline(always)]
pub const fn decapsulated(outer: u8, inner: u8) -> Option<u8> {
    match (outer & MASK, inner & MASK) {
        (CE, NOT_ECT) => None,
        (CE, _) => Some(inner | CE),
        (ECT_1, ECT_0) => Some(inner & !MASK | ECT_1),
        _ => Some(inner),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_header_gets_what_the_table_of_the_rfc_says() {
        // Rows: inner Not-ECT, ECT(0), ECT(1), CE; columns: outer in the same order.
        let table = [
            (NOT_ECT, [Some(NOT_ECT), Some(NOT_ECT), Some(NOT_ECT), None]),
            (ECT_0, [Some(ECT_0), Some(ECT_0), Some(ECT_1), Some(CE)]),
            (ECT_1, [Some(ECT_1), Some(ECT_1), Some(ECT_1), Some(CE)]),
            (CE, [Some(CE); 4]),
        ];
        for (inner, row) in table {
            for (outer, wanted) in [NOT_ECT, ECT_0, ECT_1, CE].into_iter().zip(row) {
                let with_class = |bits: u8, class: u8| class << 2 | bits;
                for class in [0, 0x2e, 0x3f] {
                    let found = decapsulated(with_class(outer, !class), with_class(inner, class));
                    assert_eq!(found, wanted.map(|bits| with_class(bits, class)), "{outer} {inner} {class}");
                    assert!(matters(outer) || found == Some(with_class(inner, class)));
                }
            }
        }
    }
}
