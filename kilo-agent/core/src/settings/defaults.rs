//! Defaults of flags that are also used elsewhere, or that flags of several programs share: a flag takes its
//! default from here, and its help shows it.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// `--subnet`: CIDR from which WireGuard addresses are allocated; Kilo's own.
pub const SUBNET: IpNet = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(10, 4, 0, 0)), 16);
/// `--topology-label`: node label that names the location; Kilo's own.
pub const TOPOLOGY_LABEL: &str = "topology.kubernetes.io/region";
/// `--interface`: name of the WireGuard interface.
pub const INTERFACE: &str = "kilo0";
/// `--port`: UDP port of WireGuard.
pub const WIREGUARD_PORT: u16 = 51820;
/// `--listen`: port of health, metrics and graph; that of the agents in the manifests, too.
pub const AGENT_PORT: u16 = 1107;
/// `--stand-bys`: nodes of a location that can take over from its leader.
pub const STAND_BYS: u8 = 2;
/// `--resync-period`: interval between full resyncs.
pub const RESYNC_PERIOD: &str = "30s";
/// Directory of `--cni-path`.
pub const CNI_DIRECTORY: &str = "/etc/cni/net.d";
