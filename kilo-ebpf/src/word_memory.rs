//! Memory that is written word by word. For a value that it zeroes or copies as a whole, the compiler calls a
//! function that writes byte by byte. That is slow for packets, and for the verifier, which follows each
//! iteration.

use core::mem::MaybeUninit;

use aya_ebpf::btf_maps::lpm_trie::Key;

/// Memory for a structure of plain integers, `WORDS` words of 8 bytes; nothing is written yet.
pub struct Words<T, const WORDS: usize> {
    words: MaybeUninit<[u64; WORDS]>,
    holds: core::marker::PhantomData<T>,
}

impl<T, const WORDS: usize> Words<T, WORDS> {
    #[inline(always)]
    pub const fn new() -> Self {
        const { assert!(size_of::<T>() <= WORDS * size_of::<u64>() && align_of::<T>() <= align_of::<u64>()) };
        Self { words: MaybeUninit::uninit(), holds: core::marker::PhantomData }
    }

    /// Zeroes the memory; all-zero bytes must be a value of the structure.
    #[inline(always)]
    pub fn zero(&mut self) -> &mut T {
        let first: *mut u64 = self.words.as_mut_ptr().cast();
        let mut i = 0;
        while i < WORDS {
            // SAFETY: within the memory, which is aligned. Volatile, so that no call is made of it.
            unsafe { first.add(i).write_volatile(0) };
            i += 1;
        }
        // SAFETY: there is room, as is asserted, and all of it is written.
        unsafe { &mut *first.cast() }
    }
}

/// Trie key for one whole address, in halves; the layout keeps the address aligned.
#[repr(C, align(8))]
pub struct WholeAddress {
    pad: u32,
    bits: u32,
    first: u64,
    second: u64,
}

impl WholeAddress {
    #[inline(always)]
    pub const fn new([first, second]: [u64; 2]) -> Self {
        Self { pad: 0, bits: 128, first, second }
    }

    #[inline(always)]
    pub fn key(&self) -> &Key<[u8; 16]> {
        // SAFETY: its length and its sixteen bytes, one behind the other, follow the four bytes of padding.
        unsafe { &*(&raw const *self).cast::<u8>().add(size_of_val(&self.pad)).cast() }
    }
}

/// The same for `masq_addr`, whose keys have the interface index before the address (`masq_addr_key`).
#[repr(C, align(8))]
pub struct OnInterface {
    bits: u32,
    ifindex: u32,
    first: u64,
    second: u64,
}

impl OnInterface {
    #[inline(always)]
    pub const fn new(ifindex: u32, [first, second]: [u64; 2]) -> Self {
        Self { bits: 160, ifindex: ifindex.to_be(), first, second }
    }

    #[inline(always)]
    pub fn key(&self) -> &Key<[u8; 20]> {
        // SAFETY: the structure is its length and twenty bytes.
        unsafe { &*(&raw const *self).cast() }
    }
}
