//! `kgctl showconf`: WireGuard configurations of nodes and peers.

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use ipnet::IpNet;
use kilo_agent::cli::{parse_cidr, parse_port};
use kilo_core::{
    objects::{Snapshot, peer},
    settings::defaults,
    showconf,
    topology::{Member, Mesh, Peer, Segment},
    wireguard::conf::{Conf, PeerSection},
};

use crate::{
    complete,
    source::{self, Flags, UnusedPort},
};

#[derive(Subcommand, Debug)]
pub enum Showconf {
    /// Show the configuration of a node that leads its location.
    #[command(mut_arg("name", |name| name.add(complete::nodes())), after_help = "Examples:
  kgctl showconf node a1                      the configuration of leader a1, without its key
  kgctl showconf node a1 --as-peer -o yaml    its location as a Peer of another cluster
  kgctl showconf node a1 --as-peer --allowed-ips=10.43.0.0/16")]
    Node {
        /// WireGuard port of the configuration.
        #[arg(long, default_value_t = defaults::WIREGUARD_PORT, value_parser = parse_port)]
        port: u16,
        #[command(flatten)]
        args: ShowconfArgs,
    },
    /// Show the configuration of a VPN peer.
    #[command(mut_arg("name", |name| name.add(complete::peers())), after_help = "Examples:
  kgctl showconf peer laptop                  for that machine; add its private key
  kgctl showconf peer laptop --as-peer -o yaml")]
    Peer {
        #[command(flatten)]
        _port: UnusedPort,
        #[command(flatten)]
        args: ShowconfArgs,
    },
}

#[derive(Args, Debug)]
pub struct ShowconfArgs {
    /// Name of the node or peer.
    name: String,
    /// Print it as a Peer that another cluster or host can use.
    #[arg(long)]
    as_peer: bool,
    /// Format of --as-peer.
    #[arg(long, short, default_value = "wireguard")]
    output: Output,
    /// Allowed IPs to add to --as-peer.
    #[arg(long, value_delimiter = ',', value_parser = parse_cidr)]
    allowed_ips: Vec<IpNet>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// WireGuard's INI.
    Wireguard,
    /// A Peer object in YAML.
    Yaml,
    /// A Peer object in JSON.
    Json,
}

/// The configuration as text.
pub async fn run(of: &Showconf) -> Result<String> {
    let (Showconf::Node { args, .. } | Showconf::Peer { args, .. }) = of;
    let (snapshot, _) = source::snapshot(&args.flags).await?;
    let mesh = source::mesh_in_use(&snapshot, &args.flags.mesh)?;
    match of {
        Showconf::Node { port, .. } => showconf_node(&mesh, &snapshot, *port, args),
        Showconf::Peer { .. } => showconf_peer(&mesh, args),
    }
}

fn showconf_node(mesh: &Mesh, snapshot: &Snapshot, port: u16, args: &ShowconfArgs) -> Result<String> {
    let node =
        snapshot.nodes.get(&args.name).with_context(|| format!("node {:?} does not exist", args.name))?;
    let Some((own, _)) = mesh.find(&args.name) else {
        bail!(
            "node {:?} is not ready: it needs an endpoint, a key, a pod CIDR and a recent last-seen; `kgctl status --not-ready` \
             says what is missing",
            args.name
        );
    };
    if !mesh.leads(&args.name) {
        let leader = mesh.segments[own].leading().map_or("", Member::name);
        bail!("node {:?} does not lead its location, {leader:?} does", args.name);
    }
    let mesh = mesh.clone().seen_by(&node.discovered_endpoints);
    let segment = &mesh.segments[own];
    if args.as_peer {
        return as_peer(
            &args.name,
            with_allowed_ips(showconf::as_peer(segment), segment, &args.allowed_ips),
            args.output,
        );
    }
    only_wireguard(args)?;
    // The private key never leaves the node, so the [Interface] section has none.
    let mesh = mesh.as_seen_from(&args.name);
    let own = mesh.own().map_or(own, |(own, _)| own);
    let conf = showconf::of_node(
        &mesh,
        own,
        kilo_core::wireguard::key::SecretKey::from_bytes([0; 32]),
        port,
        node.persistent_keepalive,
    );
    Ok(format!("[Interface]\nListenPort = {port}\n\n{}", Conf { interface: None, ..conf }.to_ini()))
}

fn showconf_peer(mesh: &Mesh, args: &ShowconfArgs) -> Result<String> {
    let peer = mesh.peers.iter().find(|peer| peer.name == args.name);
    let peer = peer.with_context(|| {
        let names: Vec<_> = mesh.peers.iter().map(|peer| peer.name.as_str()).collect();
        let instead = match names.is_empty() {
            true => "there are no valid peers: `kgctl status` lists all, and why each is not used".to_owned(),
            false => format!("choose one of: {}", names.join(", ")),
        };
        format!("peer {:?} does not exist, or agents do not use it; {instead}", args.name)
    })?;
    if args.as_peer {
        let mut allowed_ips = peer.allowed_ips.clone();
        allowed_ips.extend(&args.allowed_ips);
        let section = PeerSection {
            allowed_ips,
            endpoint: peer.endpoint.clone(),
            persistent_keepalive: peer.persistent_keepalive,
            preshared_key: peer.preshared_key,
            public_key: peer.public_key,
        };
        return as_peer(&args.name, without_duplicates(section), args.output);
    }
    only_wireguard(args)?;
    let conf = showconf::of_peer(mesh, &args.name).context("the peer no longer exists")?;
    Ok(conf.to_ini())
}

fn only_wireguard(args: &ShowconfArgs) -> Result<()> {
    if args.output != Output::Wireguard || !args.allowed_ips.is_empty() {
        bail!("--output and --allowed-ips need --as-peer");
    }
    Ok(())
}

fn with_allowed_ips(section: PeerSection, segment: &Segment, more: &[IpNet]) -> PeerSection {
    let allowed_ips = segment.allowed_ips.iter().chain(more).copied().collect();
    without_duplicates(PeerSection { allowed_ips, ..section })
}

fn without_duplicates(section: PeerSection) -> PeerSection {
    let mut seen = std::collections::BTreeSet::new();
    let allowed_ips = section.allowed_ips.iter().copied().filter(|prefix| seen.insert(*prefix)).collect();
    PeerSection { allowed_ips, ..section }
}

fn as_peer(name: &str, section: PeerSection, output: Output) -> Result<String> {
    let object = peer::to_object(&Peer {
        name: name.to_owned(),
        allowed_ips: section.allowed_ips.clone(),
        endpoint: section.endpoint.clone(),
        persistent_keepalive: section.persistent_keepalive,
        preshared_key: section.preshared_key,
        public_key: section.public_key,
        follows: false,
    });
    match output {
        Output::Wireguard => Ok(Conf { interface: None, peers: vec![section] }.to_ini()),
        Output::Yaml => Ok(serde_yaml_ng::to_string(&object)?),
        Output::Json => Ok(serde_json::to_string_pretty(&object)? + "\n"),
    }
}
