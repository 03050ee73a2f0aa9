//! Moves the words of `lead` and sends signals, by programs that are on no hook but run by this process
//! (`BPF_PROG_TEST_RUN`): a word is never lowered, and no right to open packet sockets is needed.

use std::{
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
};

use aya::{
    maps::{Array, Map, MapData, RingBuf},
    programs::SchedClassifier,
};
use kilo_common::{
    inject::Inject,
    lead,
    map_table::name,
    maps::{LEAD_ACTING, LEAD_KILO},
};
use nix::libc;

use super::{
    DataplaneError,
    load::{FOLLOW, INJECT},
    programs::Programs,
};

/// Bytes of the Ethernet header, which `BPF_PROG_TEST_RUN` strips.
const LINK: usize = 14;
/// Minimum number of bytes behind that: an IPv6 header.
const LEAST: usize = 40;

/// A compare-and-swap of a word of `lead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// Word the map must hold for the swap to happen.
    pub current: u64,
    /// Word to store; its term must not be earlier.
    pub new: u64,
}

/// Moves the acting leader's word by the same rule as the data path: never to an earlier term, and only from
/// the word expected. Returns the word the map holds afterwards, perhaps another writer's.
pub(super) fn swap(follow: &SchedClassifier, swap: Swap) -> Result<u64, DataplaneError> {
    run_follow(&descriptor(follow)?, swap)
}

fn run_follow(program: &OwnedFd, swap: Swap) -> Result<u64, DataplaneError> {
    let mut packet = vec![0; LINK + LEAST];
    packet[12] = 8;
    let mut context = Context::default();
    let words = [swap.current, swap.new].map(|word| [word as u32, (word >> 32) as u32]);
    context.cb[..4].copy_from_slice(words.as_flattened());
    run(program, &packet, &mut context)?;
    Ok(u64::from(context.cb[0]) | u64::from(context.cb[1]) << 32)
}

/// Where a signal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendVia {
    /// Through the host's stack like its own packets: to another location by the gateway that the word names.
    Stack,
    /// Into this node's own tunnel.
    Tunnel,
    /// To a node of the location, by the interface that leads there.
    Lan,
    /// Out of the interface with this index, to the next hop of the kernel's routes.
    Out(u32),
}

/// Reads and moves the words of `lead`, and sends signals.
pub struct Signals {
    inject: OwnedFd,
    follow: OwnedFd,
    lead: Array<MapData, u64>,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signals")
    }
}

impl Signals {
    pub(super) fn of(programs: &Programs, directory: &Path) -> Result<Self, DataplaneError> {
        let lead = Array::try_from(Map::Array(super::open_pin(directory, name::LEAD)?))?;
        let (inject, follow) = (descriptor(programs.get(INJECT)?)?, descriptor(programs.get(FOLLOW)?)?);
        Ok(Self { inject, follow, lead })
    }

    /// What hops 2 (Kilo's leader) and 3 (the acting leader) lead to now ([`kilo_common::lead`]).
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn words(&self) -> Result<[u64; 2], DataplaneError> {
        Ok([self.lead.get(&LEAD_KILO, 0)?, self.word()?])
    }

    /// The acting leader's word alone.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn word(&self) -> Result<u64, DataplaneError> {
        Ok(self.lead.get(&LEAD_ACTING, 0)?)
    }

    /// Moves the acting leader's word to a later term, as this agent has decided. Returns the word the map
    /// holds afterwards.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn follow(&self, offered: u64) -> Result<u64, DataplaneError> {
        loop {
            let current = self.word()?;
            if current == offered || !lead::is_later(offered, current) {
                return Ok(current);
            }
            if run_follow(&self.follow, Swap { current, new: offered })? == offered {
                return Ok(offered);
            }
        }
    }

    /// Moves the acting leader's word to another one of the same or a later term, as when a gateway loses its
    /// hop id. Returns the word the map holds afterwards.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn swap(&self, swap: Swap) -> Result<u64, DataplaneError> {
        run_follow(&self.follow, swap)
    }

    /// Sends a packet, which starts with its IP header.
    ///
    /// # Errors
    /// When the program cannot be run, or the kernel does not accept the packet.
    pub fn send(&self, via: SendVia, packet: &[u8]) -> Result<(), DataplaneError> {
        let v6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
        let mut frame = Vec::with_capacity(LINK + packet.len());
        frame.extend([0; LINK - 2]);
        frame.extend((if v6 { 0x86dd_u16 } else { 0x0800 }).to_be_bytes());
        frame.extend_from_slice(packet);
        let (via, ifindex) = match via {
            SendVia::Stack => (Inject::Stack, 0),
            SendVia::Tunnel => (Inject::Tunnel, 0),
            SendVia::Lan => (Inject::Lan, 0),
            SendVia::Out(ifindex) => (Inject::Out, ifindex),
        };
        let mut context = Context { cb: [via as u32, ifindex, 0, 0, 0], ..Context::default() };
        match run(&self.inject, &frame, &mut context)? {
            0 => Ok(()),
            code => Err(DataplaneError::Injected { code: code.cast_signed() }),
        }
    }
}

/// Opens the ring buffer of received signals. It allows one reader; its descriptor is readable while it has
/// entries.
///
/// # Errors
/// When the pinned map cannot be opened.
pub fn heard(bpffs: &Path) -> Result<RingBuf<MapData>, DataplaneError> {
    let data = super::open_pin(&super::pin_directory(bpffs), name::SIGNAL)?;
    Ok(RingBuf::try_from(Map::RingBuf(data))?)
}

fn descriptor(program: &SchedClassifier) -> Result<OwnedFd, DataplaneError> {
    let failed = |source| DataplaneError::Run { source };
    program.fd()?.as_fd().try_clone_to_owned().map_err(failed)
}

/// `struct __sk_buff` as passed to `BPF_PROG_TEST_RUN` (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Context {
    before: [u32; 12],
    cb: [u32; 5],
    behind: [u32; 31],
}
const _: () = assert!(std::mem::offset_of!(Context, cb) == 48 && size_of::<Context>() == 192);

/// The attributes of `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    program: u32,
    returned: u32,
    data_in_size: u32,
    data_out_size: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_in_size: u32,
    context_out_size: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Runs a program once on a frame; returns its return value.
fn run(program: &OwnedFd, frame: &[u8], context: &mut Context) -> Result<u32, DataplaneError> {
    const BPF_PROG_TEST_RUN: libc::c_long = 10;
    let given = *context;
    let size = u32::try_from(size_of::<Context>()).unwrap_or(0);
    let mut attributes = Attributes {
        program: program.as_raw_fd().cast_unsigned(),
        data_in_size: u32::try_from(frame.len()).unwrap_or(u32::MAX),
        data_in: frame.as_ptr() as u64,
        repeat: 1,
        context_in_size: size,
        context_out_size: size,
        context_in: (&raw const given) as u64,
        context_out: std::ptr::from_mut(context) as u64,
        ..Attributes::default()
    };
    // SAFETY: every pointer in the attributes is valid for the size beside it during the call.
    unsafe { super::syscall::bpf(BPF_PROG_TEST_RUN, &mut attributes) }
        .map_err(|source| DataplaneError::Run { source })?;
    Ok(attributes.returned)
}
