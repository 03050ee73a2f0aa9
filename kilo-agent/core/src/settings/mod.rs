//! Settings that come from flags: the values a flag may have, their defaults, and the settings of the mesh
//! that plans depend on.

pub mod defaults;

use std::str::FromStr;

use clap::ValueEnum;
use ipnet::IpNet;

/// Which nodes are meshed directly (`--mesh-granularity`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub enum Granularity {
    /// One leader per location.
    #[default]
    Location,
    /// Every node with every node.
    Full,
    /// Every node with every node of the other locations (squat/kilo#328).
    Cross,
}

impl Granularity {
    /// The value as flags and annotations write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Location => "location",
            Self::Full => "full",
            Self::Cross => "cross",
        }
    }
}

impl FromStr for Granularity {
    type Err = UnknownValue;
    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        parse_value("mesh granularity", text)
    }
}

/// A value that is not one of a fixed list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value:?} is unknown; possible values are: {possible}")]
pub struct UnknownValue {
    /// What was being set, in words, for the message: `mesh granularity`, for example.
    pub what: &'static str,
    /// The text given, at most its first 40 characters.
    pub value: String,
    /// The accepted texts, comma separated.
    pub possible: String,
}

/// Parses a value of a fixed list outside the command line: in an annotation or a query.
///
/// # Errors
/// Names `what` was being set and the possible values.
pub fn parse_value<T: ValueEnum>(what: &'static str, text: &str) -> Result<T, UnknownValue> {
    T::from_str(text, false).map_err(|_| {
        let possible = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let possible: Vec<_> = possible.map(|value| value.get_name().to_owned()).collect();
        UnknownValue { what, value: text.chars().take(40).collect(), possible: possible.join(", ") }
    })
}

/// When packets between nodes of one location are encapsulated (`--encapsulate`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub enum Encapsulate {
    /// Never: the network carries pod addresses.
    Never,
    /// Only to nodes outside the own subnet.
    #[value(name = "crosssubnet")]
    CrossSubnet,
    /// Always.
    #[default]
    Always,
}

/// How packets to another node of the location are carried (`--tunnel`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tunnel {
    /// Sent on the link as it is; the network carries pod addresses.
    None,
    /// IP in IP: protocols 4 and 41, as Kilo's `tunl0`.
    #[default]
    Ipip,
    /// VXLAN, where the network carries nothing but TCP and UDP.
    Vxlan,
}

/// Who translates the source of pods' packets (`--masquerade`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Masquerade {
    /// By the TC programs.
    Ebpf,
    /// By rules of nftables.
    Nftables,
    /// Nobody here: the operator sees to it.
    Off,
}

/// Way to attach programs (`--attach`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttachMode {
    /// TCX links, else clsact filters.
    Auto,
    /// TCX links (Linux 6.6 and later).
    Tcx,
    /// Filters of the clsact qdisc.
    Clsact,
}

/// Outer header of packets between nodes of a location, as given on the command line (`--tunnel`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TunnelMode {
    /// VXLAN beside another CNI (`--compatibility`), whose cloud may carry
    /// TCP and UDP only; else IPIP.
    Auto,
    /// IP in IP, as Kilo.
    Ipip,
    /// VXLAN.
    Vxlan,
    /// No encapsulation: the network carries pod addresses.
    None,
}

impl TunnelMode {
    /// The outer header of the packets this node steers.
    pub const fn decide(self, compatibility: Compatibility) -> Tunnel {
        match (self, compatibility) {
            (Self::Ipip, _) | (Self::Auto, Compatibility::None) => Tunnel::Ipip,
            (Self::Vxlan | Self::Auto, _) => Tunnel::Vxlan,
            (Self::None, _) => Tunnel::None,
        }
    }
}

/// Which WireGuard implementation the agent may use (`--wireguard`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WireguardMode {
    /// The kernel's, else our own.
    Auto,
    /// The kernel's.
    Kernel,
    /// Our own, in a process of its own.
    Userspace,
}

/// CNI that owns routing inside a location (`--compatibility`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compatibility {
    /// No other CNI.
    #[value(name = "", hide = true)]
    None,
    /// Flannel manages routes inside a location.
    Flannel,
    /// Cilium manages routes inside a location.
    Cilium,
}

/// Source of the endpoint (`--endpoint-from`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EndpointFrom {
    /// A public address of an interface, else the Node's `ExternalIP`, else a private address.
    Auto,
    /// Addresses of interfaces only, as Kilo.
    Interface,
    /// The Node's `ExternalIP`, else an address of an interface.
    ExternalIp,
}

/// Settings of the mesh that come from flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `--mesh-granularity`: which nodes have tunnels; the same for all agents of a mesh.
    pub granularity: Granularity,
    /// `--encapsulate`: when packets between nodes of one location get an outer header.
    pub encapsulate: Encapsulate,
    /// `--tunnel`, with `auto` decided.
    pub tunnel: Tunnel,
    /// `--local`: manage routes inside the location.
    pub local: bool,
    /// `--cni`: this node's pods are ours, so their traffic is masqueraded.
    pub cni: bool,
    /// `--subnet`: the prefix from which leaders get their WireGuard addresses.
    pub subnet: IpNet,
    /// `--service-cidr`: never masqueraded.
    pub service_cidrs: Vec<IpNet>,
    /// `--port`: WireGuard port of this node.
    pub port: u16,
}

/// Whether tunnels may go other ways than to published endpoints (`--relay`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Relay {
    /// Holes are punched, and where no direct path is found and nodes offer to relay, relays are used.
    Auto,
    /// No relays, and no tries at other places than endpoints; nor does this node relay for others.
    Off,
}

/// Whether packets from pods may bypass the host's stack (`--host-routing`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostRouting {
    /// Where the stack left a packet of the same flow unchanged within the same second.
    Auto,
    /// Every packet passes the stack, as with Kilo.
    Off,
}

/// Slices of the list of nodes (`--slices`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Slices {
    /// Read instead of Nodes where every agent is Kilo on eBPF and has the rights; one of them writes the slices.
    Auto,
    /// Neither read nor written.
    Off,
}

/// Whether stand-bys replace failed leaders (`--failover`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Failover {
    /// In locations with two nodes or more that know signals.
    Auto,
    /// Not at all: leaders are replaced when they are declared dead, as with Kilo.
    Off,
}

/// Where Node and Peer objects are read and annotations are written (`--backend`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// Node and Peer objects of a Kubernetes API server.
    Kubernetes,
    /// A directory of Node and Peer YAML.
    File,
}

/// Who sees more of an agent than health and metrics (`--page-access`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageAccess {
    /// Everybody who reaches the port.
    Open,
    /// Those whose bearer token the API server accepts.
    Token,
}

/// The least severe lines of the log that are written (`--log-level`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Everything.
    All,
    /// Also each reconcile, and each packet that is dropped.
    Debug,
    /// What an operator wants to know.
    Info,
    /// What may need attention.
    Warn,
    /// What failed.
    Error,
    /// Nothing.
    None,
}
