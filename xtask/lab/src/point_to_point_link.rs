//! A wire without Ethernet: two TUN devices in two namespaces, and a process that
//! carries packets from one to the other.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use nix::{
    libc,
    sched::{CloneFlags, setns},
};

use super::netns::Netns;
use crate::command::own_program;
use crate::wait;

/// Longest wait for both devices.
const PATIENCE: Duration = Duration::from_secs(20);
/// Larger than any packet.
const LARGEST: usize = 65536;

/// Both ends, each a network namespace and a name.
#[derive(Args, Debug)]
pub struct WireArgs {
    /// Path of the first namespace.
    first: PathBuf,
    /// Name of the device there.
    first_name: String,
    /// Path of the second namespace.
    second: PathBuf,
    /// Name of the device there.
    second_name: String,
}

/// Makes both devices. Their process ends with the second namespace, and so do they.
///
/// # Errors
/// When they do not appear.
pub fn start(first: (&Netns, &str), second: (&Netns, &str)) -> Result<()> {
    let mut command = Command::new(own_program()?);
    command.arg("wire").arg(first.0.path()).arg(first.1).arg(second.0.path()).arg(second.1);
    command.stdin(Stdio::null()).spawn().context("the wire's process")?;
    for (netns, name) in [first, second] {
        wait::until(&format!("{name} appears in {}", netns.name), PATIENCE, || {
            Ok(netns.ip(&format!("link show {name}\n")).is_ok())
        })?;
    }
    Ok(())
}

/// Runs the hidden subcommand: carries packets until a device is gone.
///
/// # Errors
/// When a device cannot be made.
pub fn main(args: &WireArgs) -> Result<()> {
    let first = open(&args.first, &args.first_name)?;
    // The process stays in this namespace, and ends with it.
    let second = open(&args.second, &args.second_name)?;
    std::thread::scope(|scope| {
        scope.spawn(|| carry(&first, &second));
        carry(&second, &first);
    });
    Ok(())
}

fn open(namespace: &Path, name: &str) -> Result<File> {
    let file = File::open(namespace).with_context(|| namespace.display().to_string())?;
    setns(file, CloneFlags::CLONE_NEWNET).context("setns")?;
    let tun = File::options().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
    // SAFETY: plain integers and bytes; zero is a value of each.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI)?;
    // SAFETY: the kernel reads and writes a request of this type.
    let answer = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    ensure!(answer == 0, "{name}: {}", std::io::Error::last_os_error());
    Ok(tun)
}

fn carry(mut from: &File, mut to: &File) {
    let mut packet = vec![0; LARGEST];
    loop {
        match from.read(&mut packet) {
            // The write fails while the other end is down: such a packet is lost, as on any wire.
            Ok(length) => drop(to.write(&packet[..length])),
            // The device is there but down.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {
                wait::pace(Duration::from_millis(20));
            }
            Err(_) => return,
        }
    }
}
