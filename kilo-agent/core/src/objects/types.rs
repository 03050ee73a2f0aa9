//! A node and a VPN peer as their objects describe them: what a mesh is made of.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, SocketAddrV6},
};

use ipnet::IpNet;

use crate::{
    settings::Granularity,
    wireguard::{Endpoint, PublicKey, SecretKey},
};

/// One node as its object and annotations describe it, except for its heartbeat; overrides
/// (`force-endpoint`, `force-internal-ip`, `location`) are already applied.
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
    /// Where its WireGuard device is also reached by IPv6, as it published (`ipv6-endpoint`).
    pub ipv6_endpoint: Option<SocketAddrV6>,
    /// Its WireGuard public key (`key`); `None`: it has published none, and takes no part.
    pub key: Option<PublicKey>,
    /// Private address with the prefix length of its network.
    pub internal_ip: Option<IpNet>,
    /// Who says that it has this private address, or none.
    pub internal_ip_by: InternalIpBy,
    /// It asks to lead its location (`leader`).
    pub leader: bool,
    /// Name of its location; may be empty.
    pub location: String,
    /// Seconds between keepalives; 0: off.
    pub persistent_keepalive: u32,
    /// Pod CIDRs, `spec.podCIDR` first.
    pub pod_cidrs: Vec<IpNet>,
    /// Its WireGuard address, as it published it.
    pub wireguard_ip: Option<IpNet>,
    /// Endpoints at which its device sees others.
    pub discovered_endpoints: BTreeMap<PublicKey, SocketAddr>,
    /// Prefixes reachable through its location.
    pub allowed_location_ips: Vec<IpNet>,
    /// Granularity that its agent runs with (`granularity`); `None`: its agent has not published it.
    pub granularity: Option<Granularity>,
    /// Address of the foreign CNI's device (Cilium compatibility).
    pub cni_compatibility_ip: Option<IpNet>,
    /// Its labels say that the API server or etcd runs there.
    pub control_plane: bool,
    /// Its programs know signals, and its agent fails over (`signal`).
    pub signal: bool,
    /// The term since which it leads its location (`leading`), even where Kilo's rule chooses another node.
    pub leading: Option<u64>,
    /// Its agent knows several active leaders, and how many it is configured with (`leaders`).
    pub leaders: Option<usize>,
    /// It is to be one of its location's active leaders (`gateway`).
    pub gateway: bool,
    /// It offers to relay between locations that do not reach each other (`relay`).
    pub relay: bool,
    /// Its agent runs with `--relay=off`, as it published (`relay-off`).
    pub relay_off: bool,
    /// It is about to go, or to rest: another gateway leads in its place, where one can.
    pub leaving: Option<Leaving>,
    /// Seconds between its heartbeats, as its agent promises (`heartbeat`); `None`: it promises nothing, as
    /// Kilo's own agent does, which renews it every 30 s.
    pub heartbeat: Option<u16>,
    /// Whether it is alive, as the writer of slices has found from all its heartbeats; `None`: its
    /// own heartbeat decides.
    pub declared_alive: Option<bool>,
}

/// Who decides about a node's private address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InternalIpBy {
    /// Its agent has found the address, or none (`internal-ip`).
    #[default]
    Agent,
    /// `force-internal-ip` names the address.
    Forced,
    /// `force-internal-ip` says that the node has none.
    ForcedNone,
}

/// Why a node leads only if no other can; later variants are more pressing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leaving {
    /// It is cordoned.
    Cordoned,
    /// Something is about to remove it.
    Removed,
    /// Its machine shuts down.
    ShutsDown,
}

/// A valid Peer object: a machine outside of the cluster that joins the mesh by WireGuard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Name of the Peer object.
    pub name: String,
    /// Prefixes it may send from and is sent to.
    pub allowed_ips: Vec<IpNet>,
    /// Its endpoint, if it has a fixed one.
    pub endpoint: Option<Endpoint>,
    /// Seconds between keepalives; 0: off.
    pub persistent_keepalive: u32,
    /// Pre-shared key of its tunnels; `None`: there is none.
    pub preshared_key: Option<SecretKey>,
    /// Its WireGuard public key.
    pub public_key: PublicKey,
    /// It holds all gateways as peers, and moves prefixes as these claim them.
    pub follows: bool,
}
