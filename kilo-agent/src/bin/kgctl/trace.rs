//! `kgctl trace`: shows what a node would do with a packet, and why.

#[cfg(target_os = "linux")]
mod local;

use std::{net::IpAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use kilo_agent::cli::parse_ip;

#[cfg(not(target_os = "linux"))]
pub use crate::needs_linux::trace as run;
use crate::{
    cluster::{AgentsFlags, ApiFlags},
    complete,
    remote::BPFFS,
};
#[cfg(target_os = "linux")]
pub use local::run;

/// Options of `kgctl trace`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl trace a1 --src=10.42.1.2 --dst=10.42.4.2             on node a1, through the API server
  kgctl trace --src=10.42.1.2 --dst=10.42.4.2                on this node, as root
  kgctl trace b1 --src=10.42.1.2 --dst=10.42.4.2 --from=lan  on the next node
  kgctl trace a1 --src=10.42.1.2 --dst=192.0.2.1 --proto=udp --dport=53 -o json")]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "read where the kernel is Linux"))]
pub struct TraceArgs {
    /// Ask on this node: kgctl runs in its agent's pod, through the API server. Without a name this
    /// machine is the node.
    #[arg(add = complete::nodes())]
    pub node: Option<String>,
    /// Source address.
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    src: IpAddr,
    /// Destination address.
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    dst: IpAddr,
    /// Protocol.
    #[arg(long, default_value = "tcp")]
    proto: Proto,
    /// Source port.
    #[arg(long, value_name = "PORT", default_value = "40000")]
    sport: u16,
    /// Destination port.
    #[arg(long, value_name = "PORT", default_value = "80")]
    dport: u16,
    /// Length in bytes, IP header included.
    #[arg(long, value_name = "BYTES", default_value = "1400", value_parser = clap::value_parser!(u32).range(20..=65_535))]
    size: u32,
    /// Time to live.
    #[arg(long, default_value = "64")]
    ttl: u8,
    /// Where it comes from: a pod of this node, this host, kilo (decrypted by
    /// WireGuard), or lan (another node of the location). Default: what the tables
    /// say about --src, else pod.
    #[arg(long)]
    from: Option<From>,
    /// With --from=lan: private address of the node that sends it; default: the
    /// node --src belongs to.
    #[arg(long, value_name = "IP", value_parser = parse_ip)]
    sender: Option<IpAddr>,
    /// Format.
    #[arg(long, short, default_value = "text")]
    output: Output,
    /// Mount point of the BPF file system.
    #[arg(long, value_name = "DIR", default_value = BPFFS)]
    bpffs: PathBuf,
    #[command(flatten)]
    pub agents: AgentsFlags,
    #[command(flatten)]
    pub api: ApiFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Proto {
    Tcp,
    Udp,
    Icmp,
    Sctp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum From {
    Pod,
    Host,
    Kilo,
    Lan,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
}
