//! Memory that was needed for a moment: the kernel's types while programs are loaded, whole lists of objects.

/// What is at least this large has pages of its own, which go back to the kernel when it is freed.
#[cfg(target_env = "gnu")]
const PAGES_OF_ITS_OWN: nix::libc::c_int = 128 << 10;

/// To be called before anything large is needed. The allocator of glibc gives large pieces pages of their own only until the
/// first of them was freed: from then on it takes smaller ones out of its heap, where what is kept comes to lie between them.
pub fn prepare() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and locks what it changes.
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, PAGES_OF_ITS_OWN);
    }
}

/// Gives what is free back to the kernel. The allocator of glibc keeps what threads have freed, for good.
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

    /// Pieces with pages of their own, in the whole process.
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
