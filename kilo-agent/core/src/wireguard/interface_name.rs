//! Names that the kernel takes for network interfaces.

/// Whether Linux takes this as the name of a network interface (`dev_valid_name` in `net/core/dev.c`).
pub fn is_interface_name(name: &str) -> bool {
    // The kernel's `isspace` reads bytes as Latin-1, where 0xa0 is the no-break space.
    let is_refused = |byte: u8| matches!(byte, b'/' | b':' | b' ' | b'\t'..=b'\r' | 0xa0 | 0);
    (1..=15).contains(&name.len()) && name != "." && name != ".." && !name.bytes().any(is_refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_kernel_takes() {
        for name in ["kilo0", "a", "...", "wg-site.1", "fifteen-letters", "Ünder"] {
            assert!(is_interface_name(name), "{name}");
        }
        for name in
            ["", ".", "..", "a/b", "kilo0:1", "a b", "a\tb", "a\u{b}b", "sixteen-letters0", "à", "ÜÜÜÜÜÜÜÜ"]
        {
            assert!(!is_interface_name(name), "{name:?}");
        }
    }
}
