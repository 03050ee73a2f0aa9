//! What can go wrong with the WireGuard device.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::net::NetError;
use kilo_core::errors::{Cause, error_chain};

/// Failure to create, read or configure the WireGuard device.
#[derive(Debug, thiserror::Error)]
pub enum WireguardError {
    /// `--interface` is not an interface name.
    #[error("`{0}` is not a valid interface name: 1 to 15 bytes without slash, colon and white space")]
    InvalidName(String),
    /// The interface does not exist, and `--create-interface=false`.
    #[error(
        "interface {0} does not exist, and --create-interface=false; start the program that creates it, or drop the flag"
    )]
    Absent(String),
    /// Another kind of interface has the name.
    #[error(
        "interface {name} exists but is of kind `{kind}`, not WireGuard; rename or delete it, or choose another --interface"
    )]
    NotWireguard {
        /// Interface name.
        name: String,
        /// Kind, as the kernel calls it.
        kind: String,
    },
    /// A TUN device without a userspace process that answers for it.
    #[error(
        "interface {name} is a TUN device, but no userspace WireGuard answers at {socket}: {source}; delete the \
         interface (ip link delete {name}) or start the process that belongs to it"
    )]
    NoSocket {
        /// Interface name.
        name: String,
        /// Where the socket was looked for.
        socket: PathBuf,
        /// Why it cannot be used.
        source: io::Error,
    },
    /// `--wireguard userspace` while a kernel device exists, or the reverse.
    #[error(
        "interface {name} exists as a {found} WireGuard device, but {wanted} was requested; delete it (ip \
         link delete {name}) to change"
    )]
    OtherBackend {
        /// Interface name.
        name: String,
        /// Kind of device that exists.
        found: &'static str,
        /// Kind of device that was requested.
        wanted: &'static str,
    },
    /// The kernel has no WireGuard module.
    #[error(
        "this kernel has no WireGuard ({0}); load its module on the host (modprobe wireguard), or apply the manifest \
         of your platform and CNI that ends in -userspace.yaml, or the Helm chart with wireguard=container \
         (--wireguard=userspace)"
    )]
    NoKernelSupport(#[source] io::Error),
    /// The kernel has no WireGuard, and a userspace process did not start either.
    #[error(
        "this kernel has no WireGuard ({kernel}); load its module on the host (modprobe wireguard), or apply the \
         manifest of your platform and CNI that ends in -userspace.yaml, or the Helm chart with wireguard=container: \
         as it is, this agent cannot run WireGuard in userspace either ({userspace})"
    )]
    NoWireguard {
        /// What the kernel said.
        #[source]
        kernel: io::Error,
        /// Why the process did not start.
        userspace: Box<WireguardError>,
    },
    /// The agent lacks the right to create a device.
    #[error("creating {0} was refused; the agent needs CAP_NET_ADMIN in this network namespace")]
    MissingCapability(String),
    /// The interface went away or was replaced since it was opened.
    #[error("interface {0} is gone or was replaced; it is created again at the next reconcile")]
    Vanished(String),
    /// The UDP port belongs to another program.
    #[error(
        "UDP port {0} is in use by another program or WireGuard interface; stop it or choose another --port"
    )]
    PortInUse(u16),
    /// The userspace process did not come up.
    #[error("the userspace WireGuard process for {name} did not start: {source}{}", see(log.as_deref()))]
    NotStarted {
        /// Interface name.
        name: String,
        /// The error, or the last line of its log.
        source: Cause,
        /// Its log, if there is one.
        log: Option<PathBuf>,
    },
    /// Another userspace process serves this interface.
    #[error("a userspace WireGuard process for {0} is running already")]
    AlreadyRunning(String),
    /// A TUN device cannot be created.
    #[error(
        "cannot create the TUN device {name}: {}; the process needs /dev/net/tun and CAP_NET_ADMIN",
        error_chain(source.as_ref())
    )]
    Tun {
        /// Interface name.
        name: String,
        /// The library's error.
        source: Cause,
    },
    /// Reading or writing the device failed.
    #[error("{what}: {source}")]
    Device {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The key file cannot be read or written.
    #[error("private key {path}: {source}")]
    KeyFile {
        /// Path of the key file.
        path: PathBuf,
        /// The error underneath.
        source: io::Error,
    },
    /// The key file does not hold a key; it is not overwritten.
    #[error(
        "private key {0}: not a valid WireGuard key (base64 of 32 bytes); restore it from a backup, or remove it to get a new one"
    )]
    KeyContent(PathBuf),
    /// A request about links failed.
    #[error(transparent)]
    Net(#[from] NetError),
}

impl WireguardError {
    /// Short constant name for `kilo_errors_total{event}`.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::KeyFile { .. } | Self::KeyContent(_) => "key",
            Self::PortInUse(_) => "port",
            Self::Net(error) => error.label(),
            _ => "wireguard",
        }
    }

    pub(super) fn device(what: impl Into<String>, source: io::Error) -> Self {
        Self::Device { what: what.into(), source }
    }
}

fn see(log: Option<&Path>) -> String {
    log.map(|log| format!("; see {}", log.display())).unwrap_or_default()
}
