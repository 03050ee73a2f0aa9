//! Why the host's network could not be read or changed.

/// What failed; the label is a metric label.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    Socket(#[source] std::io::Error),
    /// The kernel refused a request.
    #[error("{what}: {source}{}", hint(source))]
    Request {
        /// What was asked.
        what: String,
        /// What the kernel said.
        #[source]
        source: rtnetlink::Error,
    },
    /// The kernel has no support for what was asked.
    #[error("{0}: not supported by this kernel")]
    Unsupported(String),
    /// Something that must be there is not.
    #[error("{0}: no answer")]
    Missing(String),
}

impl NetError {
    /// Metric label.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Socket(_) => "netlink_socket",
            Self::Request { .. } => "netlink_request",
            Self::Unsupported(_) => "netlink_unsupported",
            Self::Missing(_) => "netlink_missing",
        }
    }

    /// Says what was asked when the kernel refuses.
    pub(super) fn at(what: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> Self {
        let what = what.into();
        move |source| Self::Request { what, source }
    }
}

/// The errno of a netlink error message, positive.
pub(super) fn errno(error: &rtnetlink::Error) -> Option<i32> {
    match error {
        rtnetlink::Error::NetlinkError(message) => Some(message.raw_code().abs()),
        _ => None,
    }
}

fn hint(error: &rtnetlink::Error) -> &'static str {
    if errno(error) == Some(nix::errno::Errno::EPERM as i32) { "; kg needs CAP_NET_ADMIN" } else { "" }
}
