//! Why the data path could not be set up.

use std::path::PathBuf;

use aya::{EbpfError, maps::MapError, programs::ProgramError};

use crate::net::NetError;
use kilo_core::errors::{Cause, error_chain};

/// What failed; [`DataplaneError::label`] is its metric label.
#[derive(Debug, thiserror::Error)]
pub enum DataplaneError {
    /// The BPF file system is not there and cannot be mounted.
    #[error("{path}: cannot mount the BPF file system ({source}); mount it on the host: mount -t bpf bpf {path}", path = path.display())]
    Bpffs {
        /// Mount point.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A map that every data path has does not exist, or is not visible.
    #[error(
        "{path} does not exist: kg does not run on this host, is of another version, or you are not root \
         (on a node: kubectl exec into the kilo pod)",
        path = path.display()
    )]
    Absent {
        /// Path of the pin.
        path: PathBuf,
    },
    /// The ring buffer of drop events has another reader; it allows only one.
    #[error(
        "another reader is listening to this node's drops; end that `kgctl monitor` first, or wait 3 s if it was killed"
    )]
    Monitored,
    /// A pin cannot be made, read or removed.
    #[error("{path}: {source}", path = path.display())]
    Pin {
        /// Path of the pin.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The kernel refused the object.
    #[error(
        "the kernel refused to load the BPF programs: {}; kg needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, \
         and a kernel from 6.1 on with CONFIG_NET_CLS_ACT and CONFIG_DEBUG_INFO_BTF (/sys/kernel/btf/vmlinux)",
        error_chain(.0.as_ref())
    )]
    Load(#[source] Cause),
    /// A program or map is not in the object.
    #[error("the BPF object has no {0}; build it again with `cargo xtask build-ebpf`")]
    Object(&'static str),
    /// A program cannot be attached.
    #[error("interface {ifindex}: cannot attach {program}: {}", error_chain(source.as_ref()))]
    Attach {
        /// Interface index.
        ifindex: u32,
        /// Program name.
        program: &'static str,
        /// What the kernel said.
        source: Cause,
    },
    /// A qdisc of another kind is in the place of clsact.
    #[error(
        "interface {interface} has an ingress qdisc, which has no egress hook, and without TCX (Linux 6.6 or later) kg \
         needs clsact: remove the qdisc (`tc qdisc delete dev {interface} ingress`), and kg adds clsact, which can \
         hold its filters, too"
    )]
    NoEgressHook {
        /// Interface name.
        interface: String,
    },
    /// A hook cannot be queried.
    #[error(
        "interface {interface}: cannot determine whether {program} is still attached: {source}; kg needs \
         CAP_NET_ADMIN for that"
    )]
    Query {
        /// Interface name.
        interface: String,
        /// Program name.
        program: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// Attached filters cannot be listed.
    #[error("programs on interfaces cannot be listed: {0}")]
    List(#[from] NetError),
    /// A map cannot be read or written.
    #[error("BPF map: {}", error_chain(.0))]
    Map(#[from] MapError),
    /// The kernel refused to run a program that the agent runs itself.
    #[error("the kernel refused to run a BPF program for kg: {source}; kg needs CAP_BPF and CAP_NET_ADMIN")]
    Run {
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A signal could not be sent.
    #[error("a signal could not be sent: {}", not_sent(*code))]
    Injected {
        /// Return code of `bpf_clone_redirect`: a negative errno, or positive when a program dropped the
        /// packet.
        code: i32,
    },
    /// The table of masqueraded flows cannot be swept.
    #[error("BPF map nat cannot be swept: {0}; flows that have ended keep their ports")]
    Sweep(#[source] std::io::Error),
    /// On this `PREEMPT_RT` kernel, masquerading programs could mix up packets.
    #[error(
        "Linux {release} is a PREEMPT_RT kernel on which programs on one processor may interrupt each other, and \
         masquerading by the programs could mix up packets: use --masquerade=nftables, or a kernel with \
         CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y (kg looks for it in /boot of the host, which it must be able to read)"
    )]
    Realtime {
        /// Release of the kernel.
        release: String,
    },
    /// The plan has more entries than a map can hold.
    #[error(
        "BPF map {map} has room for {capacity} entries, but {wanted} are needed. Nothing was changed: use \
         fewer prefixes (pod CIDRs, allowed IPs), nodes or interfaces, or merge prefixes"
    )]
    Full {
        /// Name of the map.
        map: &'static str,
        /// Maximum number of entries.
        capacity: u32,
        /// Number of entries in the plan.
        wanted: usize,
    },
}

impl DataplaneError {
    /// The part of the data path that failed: label `event` of `kilo_errors_total`.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Bpffs { .. } => "bpffs",
            Self::Absent { .. } | Self::Pin { .. } => "bpf_pin",
            Self::Monitored => "monitored",
            Self::Load(_) => "bpf_load",
            Self::Object(_) => "bpf_object",
            Self::Attach { .. } | Self::NoEgressHook { .. } | Self::Query { .. } | Self::List(_) => {
                "bpf_attach"
            }
            Self::Map(_) | Self::Sweep(_) => "bpf_map",
            Self::Run { .. } | Self::Injected { .. } => "signal",
            Self::Realtime { .. } => "realtime",
            Self::Full { .. } => "bpf_map_full",
        }
    }
}

/// Describes a return code of `bpf_clone_redirect`.
fn not_sent(code: i32) -> String {
    if code < 0 {
        std::io::Error::from_raw_os_error(code.saturating_neg()).to_string()
    } else {
        "it was dropped on the way; `kgctl monitor` shows why".to_owned()
    }
}

impl From<EbpfError> for DataplaneError {
    fn from(error: EbpfError) -> Self {
        Self::Load(error.into())
    }
}

impl From<ProgramError> for DataplaneError {
    fn from(error: ProgramError) -> Self {
        Self::Load(error.into())
    }
}
