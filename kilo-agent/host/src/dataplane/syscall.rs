//! The system call bpf(2), for commands that aya does not offer.

use std::io;

use nix::libc;

/// Runs a command with its part of `union bpf_attr` (include/uapi/linux/bpf.h). Returns the kernel's result:
/// a descriptor, or zero.
///
/// # Errors
/// The kernel's error.
///
/// # Safety
/// The attributes must be those of the command, and every pointer in them must be valid during the call for
/// the size given beside it.
pub(super) unsafe fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: as the caller promises.
    let code =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(code).map_err(io::Error::other)
}
