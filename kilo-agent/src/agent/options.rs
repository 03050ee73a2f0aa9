//! All settings of an agent.

use std::{path::PathBuf, time::Duration};

use ipnet::IpNet;

use crate::failover;
use kilo_core::settings::{
    AttachMode, Compatibility, EndpointFrom, HostRouting, Masquerade, Relay, Settings,
};
use kilo_host::{cni::CniConfiguration, interface, net::mtu::Mtu};

/// All settings from the flags.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of this node.
    pub hostname: String,
    /// The WireGuard device.
    pub interface: interface::Options,
    /// Settings of the mesh.
    pub settings: Settings,
    /// MTU of the WireGuard device, or how it is found (`--mtu`).
    pub mtu: Mtu,
    /// CNI that owns routing inside a location (`--compatibility`).
    pub compatibility: Compatibility,
    /// Interval between full resyncs (`--resync-period`).
    pub resync: Duration,
    /// Prefixes in which the node's private address is looked for (`--internal-cidr`).
    pub internal_cidrs: Vec<IpNet>,
    /// Which addresses may become the node's WireGuard endpoint (`--endpoint-from`).
    pub endpoint_from: EndpointFrom,
    /// Prefer a private address as endpoint (`--prioritise-private-addresses`).
    pub prefer_private: bool,
    /// The CNI configuration list that pod CIDRs are written into.
    pub cni: CniConfiguration,
    /// Who translates the source of pods' packets (`--masquerade`).
    pub masquerade: Masquerade,
    /// Accept pods' traffic in the FORWARD chains of iptables.
    pub forward_rules: bool,
    /// Where the last good topology is saved; `None`: nowhere.
    pub last_good: Option<PathBuf>,
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// How programs are attached.
    pub attach: AttachMode,
    /// Load the programs with logging enabled.
    pub debug: bool,
    /// Settings of failover; `None` when it is off.
    pub failover: Option<failover::Options>,
    /// Whether packets from pods may bypass the stack (`--host-routing`).
    pub host_routing: HostRouting,
    /// Whether tunnels may go through relays (`--relay`).
    pub relay: Relay,
    /// Megabits per second that a relay forwards for each end of a pair (`--relay-rate`); 0 = unlimited.
    pub relay_rate: u16,
}
