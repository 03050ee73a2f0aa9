//! WireGuard in userspace, for kernels without it: a process of its own, so
//! that the tunnel outlives the agent, with the standard control socket.

use std::{
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gotatun::device::{self, uapi::UapiServer};
use tokio::signal::unix::{SignalKind, signal};

/// Where control sockets are (wireguard.com/xplatform).
const SOCKETS: &str = "/var/run/wireguard";

/// Name of the hidden subcommand of `kg` that runs the device.
pub const SUBCOMMAND: &str = "userspace-wireguard";

/// Control socket of an interface.
pub fn socket(interface: &str) -> PathBuf {
    Path::new(SOCKETS).join(format!("{interface}.sock"))
}

/// True when a process answers on the interface's control socket.
pub fn is_running(interface: &str) -> bool {
    std::os::unix::net::UnixStream::connect(socket(interface)).is_ok()
}

/// Runs the device until SIGTERM or SIGINT, then removes it.
///
/// # Errors
/// When the TUN device or the socket cannot be made.
pub async fn run(interface: &str) -> io::Result<()> {
    fs::create_dir_all(SOCKETS)?;
    let uapi = UapiServer::default_unix_socket(interface, None, None).map_err(io::Error::other)?;
    let device = device::build()
        .with_uapi(uapi)
        .with_default_udp()
        .create_tun(interface)
        .map_err(io::Error::other)?
        .build()
        .await
        .map_err(io::Error::other)?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    device.stop().await;
    let _ = fs::remove_file(socket(interface));
    Ok(())
}

/// Starts the device in a session of its own and waits until it answers.
///
/// # Errors
/// When it does not answer within five seconds.
pub fn spawn_detached(executable: &Path, interface: &str) -> io::Result<()> {
    let mut command = Command::new(executable);
    command.args([SUBCOMMAND, interface]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: setsid is async-signal-safe and touches no memory of ours.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(io::Error::from));
    }
    let mut child = command.spawn()?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        if is_running(interface) && nix::net::if_::if_nametoindex(interface).is_ok() {
            // Waited for by a thread, so that it leaves no zombie behind.
            std::thread::spawn(move || child.wait());
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!(
                "the userspace WireGuard process ended ({status}); is /dev/net/tun there and CAP_NET_ADMIN given?"
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    Err(io::Error::new(io::ErrorKind::TimedOut, "the userspace WireGuard process does not answer"))
}

/// Ends the process behind an interface; its TUN device goes with it.
pub fn stop(interface: &str) {
    let path = socket(interface);
    let Ok(stream) = std::os::unix::net::UnixStream::connect(&path) else { return };
    // The process at the other end of its control socket.
    if let Ok(peer) = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials) {
        let _ =
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(peer.pid()), nix::sys::signal::Signal::SIGTERM);
    }
    let deadline = Instant::now() + Duration::from_secs(3);
    while Instant::now() < deadline && nix::net::if_::if_nametoindex(interface).is_ok() {
        std::thread::sleep(Duration::from_millis(20));
    }
}
