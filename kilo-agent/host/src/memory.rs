//! Memory that was needed for a moment: the kernel's types while programs are loaded, whole lists of objects.

/// Gives what is free back to the kernel. The allocator of glibc keeps what threads have freed, for good.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and locks what it looks at.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
