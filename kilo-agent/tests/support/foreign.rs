//! Programs of somebody else: they count their runs and pass every packet on.

use std::{ffi::CString, io, os::fd::FromRawFd as _, path::Path};

use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, links::FdLink, tc::TcAttachOptions};
use nix::libc;

/// `mov64 r0, -1; exit`: TC_ACT_UNSPEC.
const PASS_ON: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;

#[repr(C)]
#[derive(Default)]
struct LoadAttributes {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
}

#[repr(C)]
struct PinAttributes {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> i32 {
    // SAFETY: the attributes are laid out as this command wants them and live through the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    assert!(answer >= 0, "bpf({command}): {}", io::Error::last_os_error());
    i32::try_from(answer).unwrap()
}

/// Loads a program and pins it there.
pub fn program(pin: &Path) -> SchedClassifier {
    let attributes = LoadAttributes {
        prog_type: BPF_PROG_TYPE_SCHED_CLS,
        insn_cnt: 2,
        insns: PASS_ON.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        prog_name: *b"foreign\0\0\0\0\0\0\0\0\0",
        ..LoadAttributes::default()
    };
    let fd = bpf(BPF_PROG_LOAD, &attributes);
    // SAFETY: the kernel has just given us this descriptor.
    let _owner = unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) };
    let path = CString::new(pin.to_str().unwrap()).unwrap();
    bpf(
        BPF_OBJ_PIN,
        &PinAttributes { pathname: path.as_ptr() as u64, bpf_fd: fd.cast_unsigned(), file_flags: 0 },
    );
    SchedClassifier::from_pin(pin).unwrap()
}

/// Attaches it over TCX; dropping the link detaches.
pub fn attach_tcx(
    program: &mut SchedClassifier,
    interface: &str,
    hook: TcAttachType,
    order: LinkOrder,
) -> io::Result<FdLink> {
    let id = program
        .attach_with_options(interface, hook, TcAttachOptions::TcxOrder(order))
        .map_err(io::Error::other)?;
    program.take_link(id).unwrap().try_into().map_err(io::Error::other)
}
