//! Commands and flags of `kg`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Arg, ArgGroup, Args, CommandFactory as _, Parser, Subcommand};
use ipnet::IpNet;
use kilo_agent::cli::{
    PrefixList, parse_bool, parse_cidr, parse_failover_interval, parse_interface, parse_label, parse_listen,
    parse_node_name, parse_number, parse_period, parse_rate, parse_secret, parse_wireguard_port,
};
use kilo_core::settings::{
    AttachMode, BackendKind, Compatibility, Encapsulate, EndpointFrom, Failover, Granularity, HostRouting,
    LogLevel, Masquerade, PageAccess, Relay, Slices, TunnelMode, WireguardMode, defaults,
};
use kilo_failover::Params;
use kilo_host::{cni::boot, net::mtu::Mtu, wireguard::userspace};

/// Run the Kilo agent: joins this node to the mesh, with WireGuard between locations and TC
/// programs inside them.
#[derive(Parser, Debug)]
#[command(name = "kg", version, disable_version_flag = true, args_override_self = true)]
pub struct Cli {
    /// Print the version.
    #[arg(long, short = 'V')]
    pub version: bool,
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub flags: Flags,
}

/// Flags of the agent that `kg uninstall` uses, too: where the agent is, and what it is called.
const OF_UNINSTALL: [&str; 9] = [
    "backend",
    "backend_dir",
    "cni_path",
    "cni_run_dir",
    "hostname",
    "interface",
    "kubeconfig",
    "log_level",
    "master",
];
const OF_WEBHOOK: [&str; 1] = ["log_level"];

/// The command line. Every command accepts the agent's flags that some command uses, before its name and behind
/// it, so that it can be given the agent's own arguments; its help shows those that it uses itself.
pub fn command() -> clap::Command {
    let command = Cli::command();
    let shared: Vec<Arg> = command.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    command.mut_subcommands(|below| {
        let used: &[&str] = match below.get_name() {
            "uninstall" => &OF_UNINSTALL,
            "webhook" => &OF_WEBHOOK,
            _ => &[],
        };
        let own: Vec<_> = below.get_arguments().map(Arg::get_id).cloned().collect();
        let unused =
            shared.iter().filter(|arg| !used.contains(&arg.get_id().as_str()) && !own.contains(arg.get_id()));
        // clap gives a command no global flag that it has already.
        below.args(unused.map(|arg| arg.clone().hide(true)))
    })
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Print the version.
    Version,
    /// Print a completion script.
    Completion {
        /// bash, zsh, fish, elvish or powershell.
        shell: clap_complete::Shell,
    },
    /// Run the admission webhook, which rejects invalid Peer objects.
    Webhook(WebhookArgs),
    /// Remove everything the agent set up on this node, including its annotations, and print what was removed. Fails while the agent runs.
    Uninstall(UninstallArgs),
    /// Run the userspace WireGuard device (started by the agent itself).
    #[command(name = userspace::SUBCOMMAND, hide = true)]
    UserspaceWireguard {
        /// Interface to make.
        interface: String,
    },
}

#[derive(Args, Debug, Default)]
pub struct UninstallArgs {
    /// Keep the WireGuard interface with its peers and sessions, so that another agent can take it over.
    #[arg(long)]
    pub keep_interface: bool,
    /// Also remove the CNI configuration (--cni-path) and its bridge; pods of this node lose their network.
    #[arg(long)]
    pub remove_cni: bool,
    /// Leave the Node object as it is: `kgctl uninstall` removes the annotations with its own rights.
    #[arg(long)]
    pub keep_annotations: bool,
    /// Also write what was removed, and what was not, to this file: /dev/termination-log shows it in the pod's status.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("certificate").args(["cert_file", "secret"]).required(true))]
pub struct WebhookArgs {
    /// Certificate chain in PEM; reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate in PEM; reloaded when it changes.
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// Secret in which the webhook keeps a certificate that it creates and renews itself, instead of --cert-file and --key-file.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = parse_secret, conflicts_with = "cert_file")]
    pub secret: Option<(String, String)>,
    /// With --secret: the Service of this webhook, in the same namespace.
    #[arg(long, value_name = "NAME", default_value = "peer-validation")]
    pub service: String,
    /// With --secret: the ValidatingWebhookConfiguration whose CA bundle is updated.
    #[arg(long, value_name = "NAME", default_value = "peers.kilo.squat.ai")]
    pub configuration: String,
    /// Address on which reviews are served: POST /validate over TLS.
    #[arg(long, default_value = ":8443", value_parser = parse_listen)]
    pub listen: SocketAddr,
    /// Address on which metrics and health are served.
    #[arg(long, default_value = format!(":{}", defaults::AGENT_PORT), value_parser = parse_listen)]
    pub listen_metrics: SocketAddr,
}

#[derive(Args, Debug)]
pub struct Flags {
    /// How BPF programs are attached: auto (TCX if the kernel has it, otherwise clsact), tcx or clsact.
    #[arg(long, default_value = "auto")]
    pub attach: AttachMode,
    /// Source of nodes and peers: kubernetes or file.
    #[arg(long, default_value = "kubernetes", global = true)]
    pub backend: BackendKind,
    /// Directory of Node and Peer objects for --backend=file.
    #[arg(long, value_name = "DIR", global = true)]
    pub backend_dir: Option<PathBuf>,
    /// On shutdown, remove everything that the agent set up if its Node object is gone and no pods run any more. A
    /// restart removes nothing.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub clean_up: bool,
    /// With --clean-up, also delete the WireGuard interface.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub clean_up_interface: bool,
    /// Create the WireGuard interface if it does not exist.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool, global = true)]
    pub create_interface: bool,
    /// Write the node's pod CIDRs into the CNI configuration and masquerade its pods' traffic.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub cni: bool,
    /// Path of the CNI configuration list.
    #[arg(long, value_name = "FILE", default_value = format!("{}/10-kilo.conflist", defaults::CNI_DIRECTORY), global = true)]
    pub cni_path: PathBuf,
    /// Template of the CNI configuration; published at --cni-path once the data path is up, and withdrawn by a reboot.
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true)]
    pub cni_source: String,
    /// Directory of the host on a tmpfs, mounted at the same path, that holds what --cni-source publishes.
    #[arg(long, value_name = "DIR", default_value = boot::DIRECTORY, global = true)]
    pub cni_run_dir: PathBuf,
    /// CNI that manages routes inside a location: flannel or cilium.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub compatibility: Compatibility,
    /// When to encapsulate packets inside a location: never, crosssubnet or always.
    #[arg(long, default_value = "always")]
    pub encapsulate: Encapsulate,
    /// Source of the WireGuard endpoint: auto (a public address of an interface, else the Node's
    /// ExternalIP, else a private address), interface or external-ip. The annotation force-endpoint overrides it.
    #[arg(long, default_value = "auto")]
    pub endpoint_from: EndpointFrom,
    /// Fast failover of leaders: auto (in locations with at least two nodes that can lead) or off. Must be the same on
    /// every node.
    #[arg(long, default_value = "off")]
    pub failover: Failover,
    /// Probe interval, 20ms to 200ms: a stand-by probes its leader every 1.5 intervals, and every 0.75 while answers are
    /// missing. Detection times scale with it; hold-down times, such as the minute before a leader returns, do not.
    /// Should be the same on every node.
    #[arg(long, value_name = "DURATION", default_value = "40ms", value_parser = parse_failover_interval)]
    pub failover_interval: Params,
    /// Whether packets of a pod's flow to other nodes bypass the host's network stack for the rest of each second in which
    /// one of them passed it unchanged: auto (IPv4, from Linux 6.6 on; TCP only where connection tracking tolerates gaps)
    /// or off. Rules that must see every packet (rate limits, accounting) need off.
    #[arg(long, default_value = "off")]
    pub host_routing: HostRouting,
    /// Name of this node; defaults to the host name.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = parse_node_name, global = true)]
    pub hostname: String,
    /// Name of the WireGuard interface.
    #[arg(long, default_value = defaults::INTERFACE, value_parser = parse_interface, global = true)]
    pub interface: String,
    /// CIDRs in which the node's private address is looked for (comma separated, repeatable).
    #[arg(long, value_name = "CIDR")]
    pub internal_cidr: Vec<PrefixList>,
    /// Accept traffic of local pods in the FORWARD chains of iptables, whatever the chains' policy.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub iptables_forward_rules: bool,
    /// Path of the kubeconfig; defaults to the in-cluster configuration.
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true, global = true)]
    pub kubeconfig: String,
    /// Address of the Kubernetes API server; overrides the one in the kubeconfig.
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true, global = true)]
    pub master: String,
    /// Number of active leaders per location, 1 to 8; each node is assigned to one of them. Needs --failover=auto. Must
    /// be the same on every node of the mesh.
    #[arg(long, default_value = "1", value_parser = parse_number::<1, 8>)]
    pub leaders: u8,
    /// Address on which the page, health, metrics, status and graph are served.
    #[arg(long, default_value = format!(":{}", defaults::AGENT_PORT), value_parser = parse_listen)]
    pub listen: SocketAddr,
    /// Manage routes inside the location.
    #[arg(long, default_value = "true", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub local: bool,
    /// Log level: all, debug, info, warn, error or none.
    #[arg(long, default_value = "info", global = true)]
    pub log_level: LogLevel,
    /// How traffic that leaves the mesh is masqueraded: ebpf, nftables or off.
    #[arg(long, default_value = "ebpf")]
    pub masquerade: Masquerade,
    /// Which nodes are meshed directly: location, full or cross.
    #[arg(long, default_value = "location")]
    pub mesh_granularity: Granularity,
    /// Encapsulation inside a location: auto (vxlan beside another CNI, else ipip), ipip, vxlan or none. Every
    /// node understands all of them.
    #[arg(long, default_value = "auto")]
    pub tunnel: TunnelMode,
    /// MTU of the WireGuard interface: auto, or a number of bytes.
    #[arg(long, default_value = "auto")]
    pub mtu: Mtu,
    /// Who sees more than health and metrics at --listen: open (everybody who reaches it) or token (those with a
    /// bearer token that the API server accepts, and the right to get /status, /events, /graph or /).
    #[arg(long, default_value = "open")]
    pub page_access: PageAccess,
    /// UDP port of WireGuard. 51821 is refused, because nodes use it among themselves; avoid 51830 to 52829, which relays
    /// use.
    #[arg(long, default_value_t = defaults::WIREGUARD_PORT, value_parser = parse_wireguard_port)]
    pub port: u16,
    /// Use the private address as the WireGuard endpoint.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub prioritise_private_addresses: bool,
    /// Whether agents look for another path between leaders whose endpoints do not reach each other: through the NATs of
    /// both, by IPv6, or through nodes annotated kilo.squat.ai/relay=true, which see ciphertext only: auto or off.
    #[arg(long, default_value = "auto")]
    pub relay: Relay,
    /// Maximum rate, in Mbit/s, at which this node, as a relay, forwards traffic from each end of a pair; excess is
    /// dropped. 0 = unlimited.
    #[arg(long, default_value = "1000", value_name = "MBITS", value_parser = parse_rate)]
    pub relay_rate: u16,
    /// Interval between full resyncs.
    #[arg(long, default_value = defaults::RESYNC_PERIOD, value_parser = parse_period)]
    pub resync_period: Duration,
    /// CIDRs of services, to which traffic is never masqueraded (comma separated, repeatable).
    #[arg(long, value_name = "CIDR")]
    pub service_cidr: Vec<PrefixList>,
    /// Read the mesh from slices, objects that one elected agent writes, instead of watching all Nodes: auto (when every
    /// agent is Kilo on eBPF and RBAC allows it) or off. For hundreds of nodes and more.
    #[arg(long, default_value = "off")]
    pub slices: Slices,
    /// CIDR from which WireGuard addresses are allocated.
    #[arg(long, default_value_t = defaults::SUBNET, value_parser = parse_cidr)]
    pub subnet: IpNet,
    /// Number of nodes of a location that can take over from its leader, 0 to 4. Must be the same on every node.
    #[arg(long, default_value_t = defaults::STAND_BYS, value_parser = parse_number::<0, 4>)]
    pub stand_bys: u8,
    /// Prepare everything beside Kilo's own agent without touching this host, and take the host over when that agent
    /// stops. For the DaemonSet that `kgctl takeover` prints.
    #[arg(long, default_value = "false", action = clap::ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_bool)]
    pub take_over_from_kilo: bool,
    /// Node label that names the location.
    #[arg(long, default_value = defaults::TOPOLOGY_LABEL, value_parser = parse_label, global = true)]
    pub topology_label: String,
    /// WireGuard implementation: auto, kernel or userspace.
    #[arg(long, default_value = "auto", global = true)]
    pub wireguard: WireguardMode,
}
