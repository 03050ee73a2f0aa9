//! What can go wrong when the host's network is read or changed.

use std::io;

/// A single item the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct Refused {
    /// What was asked, in words.
    pub what: String,
    /// Error the kernel returned for this item.
    pub source: io::Error,
}

/// Failure to read or change links, addresses, routes or rules.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A netlink socket cannot be opened.
    #[error("cannot open a netlink socket: {0}; does the security policy allow AF_NETLINK?")]
    Socket(#[source] io::Error),
    /// The kernel closed the socket or the runtime ended; open a new one.
    #[error("the netlink socket was closed during a request; restart the agent if this repeats")]
    Closed,
    /// The kernel refused a request.
    #[error("{what}: {source}{}", hint(source))]
    Kernel {
        /// What was asked, in words.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Several items of one apply were refused; the others are in place.
    #[error("{} change(s) refused, {writes} made; first: {first}{}", 1 + others.len(), hint(&first.source))]
    Refused {
        /// Changes that were made nevertheless.
        writes: usize,
        /// What was refused first.
        #[source]
        first: Refused,
        /// What was refused after it, in order.
        others: Vec<Refused>,
    },
    /// A kernel setting cannot be read or written.
    #[error("{path}: {source}; set it on the host (sysctl) or let the agent write /proc/sys")]
    Sysctl {
        /// File of the setting.
        path: &'static str,
        /// The error underneath.
        source: io::Error,
    },
    /// Something does not exist, or no longer exists.
    #[error("{0} does not exist (any more); retrying at the next reconcile")]
    Missing(String),
    /// The agent found no usable address.
    #[error(
        "no usable IP address on any interface; set the annotations kilo.squat.ai/force-internal-ip and \
         kilo.squat.ai/force-endpoint, or check --internal-cidr"
    )]
    NoAddress,
}

impl NetError {
    /// Short constant name for `kilo_errors_total{event}`.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Socket(_) | Self::Closed => "netlink",
            Self::Kernel { .. } | Self::Refused { .. } | Self::Missing(_) => "network",
            Self::Sysctl { .. } => "sysctl",
            Self::NoAddress => "discovery",
        }
    }

    /// The kernel's error number, when there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { source, .. } | Self::Socket(source) => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Returns the number of changes made; an error when some were refused.
pub(super) fn unless(refused: Vec<Refused>, writes: usize) -> Result<usize, NetError> {
    let mut refused = refused.into_iter();
    match refused.next() {
        Some(first) => Err(NetError::Refused { writes, first, others: refused.collect() }),
        None => Ok(writes),
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => "; the agent needs CAP_NET_ADMIN",
        // WireGuard takes its port when the interface goes up.
        io::ErrorKind::AddrInUse => {
            "; the WireGuard port belongs to another program or interface: stop it or choose another --port"
        }
        _ => "",
    }
}
