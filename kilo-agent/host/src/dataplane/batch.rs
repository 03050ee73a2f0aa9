//! Reads whole maps in a few calls, which aya does not offer.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use aya::Pod;
use nix::libc;

/// `bpf(2)` command `BPF_MAP_LOOKUP_BATCH` (include/uapi/linux/bpf.h).
const LOOKUP_BATCH: libc::c_long = 24;
/// Entries per call; one bucket of the kernel's hash must fit.
const BATCH: usize = 4_096;

/// The part of `union bpf_attr` for batch commands (include/uapi/linux/bpf.h).
#[repr(C)]
struct Attributes {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    flags: [u64; 2],
}

/// Returns all entries of a hash or an array; a hash that is written meanwhile may yield some twice.
///
/// # Safety
/// The map's keys and values must have the sizes of `K` and `V`, and its value slots must not be larger.
pub unsafe fn read<K: Pod + Default, V: Pod + Default>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    let mut all = Vec::new();
    let (mut keys, mut values) = (vec![K::default(); BATCH], vec![V::default(); BATCH]);
    let mut position: Option<u32> = None;
    loop {
        let mut next = 0u32;
        let mut attributes = Attributes {
            in_batch: position.as_ref().map_or(0, |position| std::ptr::from_ref(position) as u64),
            out_batch: std::ptr::from_mut(&mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: u32::try_from(BATCH).unwrap_or(u32::MAX),
            map: u32::try_from(map.as_raw_fd()).unwrap_or(u32::MAX),
            flags: [0; 2],
        };
        // SAFETY: the attributes are those of the command; the buffers have room for `count` entries, as the
        // caller promises.
        let code = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                LOOKUP_BATCH,
                std::ptr::from_mut(&mut attributes),
                size_of::<Attributes>(),
            )
        };
        let error = io::Error::last_os_error();
        let at_end = code < 0 && error.raw_os_error() == Some(libc::ENOENT);
        if code < 0 && !at_end {
            return Err(error);
        }
        let count = attributes.count as usize;
        all.extend(keys.iter().copied().zip(values.iter().copied()).take(count));
        if at_end || count == 0 {
            return Ok(all);
        }
        position = Some(next);
    }
}
