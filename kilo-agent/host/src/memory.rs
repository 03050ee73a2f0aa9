//! Returns memory to the kernel that was needed only briefly: the kernel's BTF while programs are loaded,
//! whole lists of objects.

/// Allocations of at least this many bytes have pages of their own, which go back to the kernel when they are
/// freed.
#[cfg(target_env = "gnu")]
const PAGES_OF_ITS_OWN: nix::libc::c_int = 128 << 10;

/// Fixes glibc's threshold for allocations with pages of their own; to be called before anything large is
/// allocated. By default glibc raises it when the first such allocation is freed, and then takes smaller ones
/// from its heap, where long-lived allocations end up between them.
pub fn prepare() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and locks what it changes.
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, PAGES_OF_ITS_OWN);
    }
}

/// Returns free memory to the kernel; glibc would keep what threads have freed for good.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and locks what it looks at.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// Allocations with pages of their own, in the whole process.
    fn pieces() -> usize {
        // SAFETY: it takes no pointers.
        unsafe { nix::libc::mallinfo2() }.hblks
    }

    #[test]
    fn large_pieces_have_pages_of_their_own_also_after_one_was_freed() {
        prepare();
        drop(std::hint::black_box(Vec::<u8>::with_capacity(8 << 20)));
        let before = pieces();
        let large: Vec<Vec<u8>> =
            (0..32).map(|_| std::hint::black_box(Vec::with_capacity(1 << 20))).collect();
        let made = pieces().saturating_sub(before);
        // Other tests of this process free a few meanwhile.
        assert!(made >= large.len() - 8, "{made}");
    }
}
