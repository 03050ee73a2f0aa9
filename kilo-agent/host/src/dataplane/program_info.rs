//! What the kernel reports about a program by its descriptor. (To list its maps, aya turns the program's id
//! into a descriptor, which needs `CAP_SYS_ADMIN`; this needs no privilege.)

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

/// Command and program type (include/uapi/linux/bpf.h).
const BPF_OBJ_GET_INFO_BY_FD: nix::libc::c_long = 15;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
/// A program uses at most 64 maps (`MAX_USED_MAPS`, `include/linux/bpf_verifier.h`).
const MOST_MAPS: usize = 64;

/// The beginning of `struct bpf_prog_info`: the kernel fills as much as there is room for.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    xlated_len: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    created_by: u32,
    map_count: u32,
    map_ids: u64,
}

/// The part of `union bpf_attr` for `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct Attributes {
    fd: i32,
    info_len: u32,
    info: u64,
}

/// What distinguishes one loaded program from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Hash of its instructions, in which maps count as zero.
    pub tag: [u8; 8],
    /// Ids of the maps it uses, unique until the next boot.
    pub maps: Vec<u32>,
}

/// Identity of the program behind a descriptor; `None` when that is not a TC program.
///
/// # Errors
/// The kernel's error, such as `EINVAL` for a descriptor of something else.
pub fn identity(fd: BorrowedFd<'_>) -> io::Result<Option<Identity>> {
    let mut maps = vec![0u32; MOST_MAPS];
    let mut info = Info {
        map_count: u32::try_from(MOST_MAPS).unwrap_or(0),
        map_ids: maps.as_mut_ptr() as u64,
        ..Info::default()
    };
    let mut attributes = Attributes {
        fd: fd.as_raw_fd(),
        info_len: u32::try_from(size_of::<Info>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: `info` is as long as the attributes say, and `maps` has room for `map_count` ids.
    unsafe { super::syscall::bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attributes) }?;
    // A map's descriptor is accepted as well, and returns less.
    if info.kind != BPF_PROG_TYPE_SCHED_CLS || (attributes.info_len as usize) < size_of::<Info>() {
        return Ok(None);
    }
    maps.truncate(info.map_count as usize);
    Ok(Some(Identity { tag: info.tag, maps }))
}
