//! Creates the largest map while aya's loader reads the kernel's BTF: the kernel clears 20 MB for it, which
//! takes as long. The loader then finds the map pinned.

use std::{
    io,
    os::fd::{AsFd as _, FromRawFd as _, OwnedFd},
    path::Path,
};

use aya::maps::MapData;
use kilo_common::map_table::NAT;
use kilo_core::errors::Cause;

use super::{DataplaneError, syscall};

/// `bpf(2)` command (include/uapi/linux/bpf.h).
const BPF_BTF_LOAD: nix::libc::c_long = 18;

/// The part of `union bpf_attr` for `BPF_BTF_LOAD` that every kernel knows.
#[repr(C)]
struct Attributes {
    types: u64,
    log: u64,
    types_len: u32,
    log_len: u32,
    log_level: u32,
    /// Must be zero: newer kernels have a field here.
    rest: u32,
}

/// Creates and pins the map unless it is pinned. Also detects the kernel's BPF features, which the loader
/// would do otherwise.
///
/// # Errors
/// The loader runs into the same failure again, and reports what to do.
pub(super) fn make(object: &[u8], directory: &Path) -> Result<(), Cause> {
    let features = aya::features().btf();
    let path = directory.join(NAT.name);
    if path.exists() {
        return Ok(());
    }
    let mut object = aya_obj::Object::parse(object)?;
    // As the loader does, so that `bpftool` shows named fields.
    let types = match features {
        Some(features) => object.fixup_and_sanitize_btf(features)?.map(aya_obj::btf::Btf::to_bytes),
        None => None,
    };
    let types = types.map(|types| load(&types)).transpose()?;
    let map = object.maps.remove(NAT.name).ok_or(DataplaneError::Object(NAT.name))?;
    let types = types.as_ref().map(OwnedFd::as_fd);
    Ok(MapData::create(map, NAT.name, types)?.pin(path)?)
}

/// Loads the object's BTF into the kernel.
fn load(types: &[u8]) -> io::Result<OwnedFd> {
    let mut attributes = Attributes {
        types: types.as_ptr() as u64,
        log: 0,
        types_len: u32::try_from(types.len()).map_err(io::Error::other)?,
        log_len: 0,
        log_level: 0,
        rest: 0,
    };
    // SAFETY: `types` lives until the call has ended, and is as long as the attributes say.
    let descriptor = unsafe { syscall::bpf(BPF_BTF_LOAD, &mut attributes) }?;
    // SAFETY: the kernel has just made this descriptor, and no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
