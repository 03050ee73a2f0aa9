//! Foreign TC programs, which pass every packet on.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, links::FdLink, tc::TcAttachOptions};
use nix::libc;

/// `mov64 r0, -1; exit`: returns `TC_ACT_UNSPEC`, so that the next program runs.
// Encoded by hand: aya loads only ELF objects, and two instructions need no BPF compiler.
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

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: the attributes have the layout of this command and live through the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Loads a program and pins it at `pin`.
pub fn program(pin: &Path) -> SchedClassifier {
    load("foreign", &PASS_ON, pin).unwrap()
}

fn load(name: &str, instructions: &[u64], pin: &Path) -> io::Result<SchedClassifier> {
    let mut prog_name = [0; 16];
    for (to, from) in prog_name.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    let mut log = vec![0u8; 1 << 16];
    let attributes = LoadAttributes {
        prog_type: BPF_PROG_TYPE_SCHED_CLS,
        insn_cnt: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 1,
        log_size: 1 << 16,
        log_buf: log.as_mut_ptr() as u64,
        prog_name,
        ..LoadAttributes::default()
    };
    let fd = bpf(BPF_PROG_LOAD, &attributes).map_err(|error| {
        let said: Vec<u8> = log.iter().copied().take_while(|byte| *byte != 0).collect();
        io::Error::other(format!("{name}: {error}: {}", String::from_utf8_lossy(&said)))
    })?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just given us this descriptor.
    let program = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let bpf_fd = program.as_raw_fd().cast_unsigned();
    bpf(BPF_OBJ_PIN, &PinAttributes { pathname: path.as_ptr() as u64, bpf_fd, file_flags: 0 })?;
    SchedClassifier::from_pin(pin).map_err(io::Error::other)
}

/// Attaches it with TCX; dropping the link detaches.
///
/// # Errors
/// Those of the kernel.
pub fn attach_tcx(
    program: &mut SchedClassifier,
    interface: &str,
    hook: TcAttachType,
    order: LinkOrder,
) -> io::Result<FdLink> {
    let id = program
        .attach_with_options(interface, hook, TcAttachOptions::TcxOrder(order))
        .map_err(io::Error::other)?;
    program.take_link(id).map_err(io::Error::other)?.try_into().map_err(io::Error::other)
}
