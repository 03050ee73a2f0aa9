//! Inputs of the topology.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use ipnet::IpNet;

use crate::wireguard::key::{PublicKey, SecretKey};

/// The host part of a WireGuard endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointHost {
    /// A literal address.
    Ip(IpAddr),
    /// A name to resolve (RFC 1123).
    Dns(String),
}

/// Where a peer is reached: host and UDP port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// Address or name.
    pub host: EndpointHost,
    /// UDP port, host byte order.
    pub port: u16,
}

impl Endpoint {
    /// The address, when the host is one.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.host {
            EndpointHost::Ip(ip) => Some(ip),
            EndpointHost::Dns(_) => None,
        }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(addr: SocketAddr) -> Self {
        Self { host: EndpointHost::Ip(addr.ip()), port: addr.port() }
    }
}

impl fmt::Display for Endpoint {
    /// `1.2.3.4:51820`, `[2001:db8::1]:51820`, `vpn.example.com:51820`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            EndpointHost::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            EndpointHost::Dns(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Which nodes are meshed directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Granularity {
    /// One leader a location.
    #[default]
    Location,
    /// Every node with every node.
    Full,
    /// Every node with every node of the other locations (squat/kilo#328).
    Cross,
}

impl Granularity {
    /// Possible values, as flags and annotations write them.
    pub const VALUES: &'static [&'static str] = &["location", "full", "cross"];

    /// The flag's and annotation's text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Location => "location",
            Self::Full => "full",
            Self::Cross => "cross",
        }
    }
}

/// A value that is not one of a fixed list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value:?} is unknown; possible values are: {possible}")]
pub struct UnknownValue {
    /// What was being set.
    pub what: &'static str,
    /// The text given.
    pub value: String,
    /// The accepted texts, comma separated.
    pub possible: String,
}

impl FromStr for Granularity {
    type Err = UnknownValue;
    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        match text {
            "location" => Ok(Self::Location),
            "full" => Ok(Self::Full),
            "cross" => Ok(Self::Cross),
            _ => Err(UnknownValue {
                what: "mesh granularity",
                value: text.to_owned(),
                possible: Self::VALUES.join(", "),
            }),
        }
    }
}

/// When packets between nodes of one location are encapsulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Encapsulate {
    /// Never: the network carries pod addresses.
    Never,
    /// Only to nodes outside the own subnet.
    CrossSubnet,
    /// Always.
    #[default]
    Always,
}

impl Encapsulate {
    /// Possible values of the flag.
    pub const VALUES: &'static [&'static str] = &["never", "crosssubnet", "always"];
}

impl FromStr for Encapsulate {
    type Err = UnknownValue;
    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        match text {
            "never" => Ok(Self::Never),
            "crosssubnet" => Ok(Self::CrossSubnet),
            "always" => Ok(Self::Always),
            _ => Err(UnknownValue {
                what: "encapsulation",
                value: text.to_owned(),
                possible: Self::VALUES.join(", "),
            }),
        }
    }
}

/// How packets to another node of the location are carried (`--tunnel`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tunnel {
    /// Plainly on the link; the network carries pod addresses.
    None,
    /// IP in IP: protocols 4 and 41, as Kilo's `tunl0`.
    #[default]
    Ipip,
    /// VXLAN, where the network carries nothing but TCP and UDP.
    Vxlan,
}

/// One node as its object and annotations describe it, but for its sign of
/// life; overrides (`force-endpoint`, `force-internal-ip`, `location`) already applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Name of the Node object.
    pub name: String,
    /// Where its WireGuard device is reached (`force-endpoint`, else `endpoint`).
    pub endpoint: Option<Endpoint>,
    /// True when `endpoint` comes from `force-endpoint`.
    pub endpoint_forced: bool,
    /// Addresses of type `ExternalIP` in the Node's status, in its order.
    pub external_ips: Vec<IpAddr>,
    /// Its public key.
    pub key: Option<PublicKey>,
    /// Private address with the prefix length of its network.
    pub internal_ip: Option<IpNet>,
    /// True when `internal_ip` comes from `force-internal-ip`.
    pub internal_ip_forced: bool,
    /// `force-internal-ip` says that the node has none.
    pub no_internal_ip: bool,
    /// It asks to lead.
    pub leader: bool,
    /// Name of its location; may be empty.
    pub location: String,
    /// Seconds; 0 = off.
    pub persistent_keepalive: u32,
    /// Pod CIDRs, `spec.podCIDR` first.
    pub pod_cidrs: Vec<IpNet>,
    /// Its WireGuard address, as it published it.
    pub wireguard_ip: Option<IpNet>,
    /// Endpoints its device sees others at.
    pub discovered_endpoints: BTreeMap<PublicKey, SocketAddr>,
    /// Prefixes reachable through its location.
    pub allowed_location_ips: Vec<IpNet>,
    /// Granularity it runs with.
    pub granularity: Option<Granularity>,
    /// Address of the foreign CNI's device (Cilium compatibility).
    pub cni_compatibility_ip: Option<IpNet>,
}

/// One VPN peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Name of the Peer object.
    pub name: String,
    /// Prefixes it may send from and is sent to.
    pub allowed_ips: Vec<IpNet>,
    /// Where it is reached, if it has a fixed place.
    pub endpoint: Option<Endpoint>,
    /// Seconds; 0 = off.
    pub persistent_keepalive: u32,
    /// Optional symmetric key.
    pub preshared_key: Option<SecretKey>,
    /// Its public key.
    pub public_key: PublicKey,
}

/// Settings of the mesh that come from flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `--mesh-granularity`.
    pub granularity: Granularity,
    /// `--encapsulate`.
    pub encapsulate: Encapsulate,
    /// `--tunnel`, with `auto` decided.
    pub tunnel: Tunnel,
    /// `--local`: manage routes inside the location.
    pub local: bool,
    /// `--cni`: this node's pods are ours, so their traffic is masqueraded.
    pub cni: bool,
    /// `--subnet`: WireGuard addresses.
    pub subnet: IpNet,
    /// `--service-cidr`: never masqueraded.
    pub service_cidrs: Vec<IpNet>,
    /// `--port`: WireGuard port of this node.
    pub port: u16,
}
