//! Explicit congestion notification where an outer header is taken off (RFC 6040, section 4.2).

/// The two bits of a type of service or traffic class.
const MASK: u8 = 3;
/// The sender learns of congestion by a loss alone.
const NOT_ECT: u8 = 0;
const ECT_1: u8 = 1;
const ECT_0: u8 = 2;
/// Congestion experienced.
const CE: u8 = 3;

/// True for outer headers that can change what the inner one says.
#[inline(always)]
pub const fn matters(outer: u8) -> bool {
    outer & ECT_1 != 0
}

/// The inner type of service once the outer header is off. `None`: the packet is to be
/// dropped, because its sender would not hear of the congestion otherwise.
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
