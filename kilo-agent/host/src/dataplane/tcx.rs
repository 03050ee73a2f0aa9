//! Queries TCX hooks with no more than the capabilities of the DaemonSet: listing ids of programs and links
//! needs `CAP_NET_ADMIN`, while turning an id into a descriptor (`BPF_PROG_GET_FD_BY_ID`) needs
//! `CAP_SYS_ADMIN`.

use std::io;

/// Command and attach types (include/uapi/linux/bpf.h).
const BPF_PROG_QUERY: nix::libc::c_long = 16;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// A hook takes at most 64 programs (`BPF_MPROG_MAX`, `include/linux/bpf_mprog.h`).
const MOST_PROGRAMS: usize = 64;

/// The part of `union bpf_attr` for `BPF_PROG_QUERY`.
#[repr(C)]
struct QueryAttributes {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    pad: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The programs on a hook and their links, in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hook {
    /// Ids of the programs, as `bpftool prog` shows them.
    pub programs: Vec<u32>,
    /// Id of each program's link; 0 when it is attached without one.
    pub links: Vec<u32>,
}

/// Queries the ingress or egress hook of an interface; empty when the interface does not exist.
///
/// # Errors
/// The kernel's error otherwise, such as `EINVAL` before Linux 6.6.
pub fn query(ifindex: u32, egress: bool) -> io::Result<Hook> {
    let (mut programs, mut links) = (vec![0u32; MOST_PROGRAMS], vec![0u32; MOST_PROGRAMS]);
    let mut attributes = QueryAttributes {
        ifindex,
        attach_type: if egress { BPF_TCX_EGRESS } else { BPF_TCX_INGRESS },
        query_flags: 0,
        attach_flags: 0,
        program_ids: programs.as_mut_ptr() as u64,
        count: u32::try_from(MOST_PROGRAMS).unwrap_or(u32::MAX),
        pad: 0,
        program_attach_flags: 0,
        link_ids: links.as_mut_ptr() as u64,
        link_attach_flags: 0,
        revision: 0,
    };
    // SAFETY: the attributes are those of the command; both arrays have room for `count` ids.
    if let Err(error) = unsafe { super::syscall::bpf(BPF_PROG_QUERY, &mut attributes) } {
        return if error.raw_os_error() == Some(nix::libc::ENODEV) {
            Ok(Hook::default())
        } else {
            Err(error)
        };
    }
    programs.truncate(attributes.count as usize);
    links.truncate(attributes.count as usize);
    Ok(Hook { programs, links })
}
