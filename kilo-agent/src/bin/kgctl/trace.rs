//! `kgctl trace`: what this node would do with a packet, and why.

use std::{fmt::Write as _, net::IpAddr, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use kilo_common::{counters::DropReason, packet::protocol};
use kilo_core::plan::{
    model::Packet,
    probe::Probe,
    trace::{self, Host, Origin, Question},
};
use kilo_host::{
    dataplane::{self, BPFFS, interface_name},
    net::Net,
};

/// Options of `kgctl trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Source address.
    #[arg(long, value_name = "IP")]
    src: IpAddr,
    /// Destination address.
    #[arg(long, value_name = "IP")]
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
    /// WireGuard), or lan (another node of the location). Default: pod, or what
    /// the tables know of --src.
    #[arg(long)]
    from: Option<From>,
    /// With --from=lan: private address of the node that sends it; default: the
    /// node --src belongs to.
    #[arg(long, value_name = "IP")]
    sender: Option<IpAddr>,
    /// Format.
    #[arg(long, short, default_value = "text")]
    output: Output,
    /// The BPF file system.
    #[arg(long, value_name = "DIR", default_value = BPFFS)]
    bpffs: PathBuf,
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

impl TraceArgs {
    fn question(&self, origin: Origin) -> Result<Question> {
        if self.src.is_ipv4() != self.dst.is_ipv4() {
            bail!("--src and --dst are of different families");
        }
        let number = match (self.proto, self.src) {
            (Proto::Tcp, _) => protocol::TCP,
            (Proto::Udp, _) => protocol::UDP,
            (Proto::Icmp, IpAddr::V4(_)) => protocol::ICMP,
            (Proto::Icmp, IpAddr::V6(_)) => protocol::ICMPV6,
            (Proto::Sctp, _) => 132,
        };
        let packet = Packet { src: self.src, dst: self.dst };
        Ok(Question {
            probe: Probe { packet, ttl: self.ttl, length: self.size },
            protocol: number,
            ports: (self.proto != Proto::Icmp).then_some((self.sport, self.dport)),
            origin,
        })
    }
}

/// The trace as text.
pub async fn run(args: &TraceArgs) -> Result<String> {
    let tables = dataplane::read_tables(&args.bpffs)?;
    let origin = match args.from.unwrap_or_else(|| origin_of(&tables, args.src)) {
        From::Pod => Origin::Pod,
        From::Host => Origin::Host,
        From::Kilo => Origin::Kilo,
        From::Lan => Origin::Lan(args.sender),
    };
    let question = args.question(origin)?;
    let route = Net::new()?.interface_towards(args.dst).await?;
    let name = |ifindex| interface_name(ifindex).unwrap_or_else(|| format!("interface {ifindex}"));
    let found = trace::trace(&tables, &question, &Host { route, name: &name });
    let todo = found.reason.and_then(|label| DropReason::ALL.iter().find(|reason| reason.label() == label));
    if args.output == Output::Json {
        let mut value = serde_json::to_value(&found)?;
        if let (Some(reason), Some(object)) = (todo, value.as_object_mut()) {
            object.insert("advice".to_owned(), reason.remedy().into());
        }
        return Ok(serde_json::to_string_pretty(&value)? + "\n");
    }
    let from = match origin {
        Origin::Pod => "a pod of this node",
        Origin::Host => "this host",
        Origin::Kilo => "WireGuard",
        Origin::Lan(_) => "the network",
    };
    let mut text = format!("{question}, from {from}\n");
    for step in &found.steps {
        writeln!(text, "  {:<13} {}", step.at, step.finding)?;
    }
    let outcome = found.reason.map_or_else(|| found.outcome.to_owned(), |reason| format!("drop, {reason}"));
    writeln!(text, "=> {outcome}: {}", found.text)?;
    if let Some(reason) = todo {
        writeln!(text, "   {}", reason.remedy())?;
    }
    Ok(text)
}

/// Where a packet with this source comes from, as the tables know it.
fn origin_of(tables: &kilo_core::plan::Tables, src: IpAddr) -> From {
    use kilo_core::{plan::Hop, topology::prefixes::longest_entry};
    match longest_entry(&tables.prefix, src) {
        Some((_, value)) => match tables.way(value.hop) {
            Some(Hop::Node { .. }) => From::Lan,
            Some(Hop::Wireguard) => From::Kilo,
            Some(Hop::Local) if tables.is_private(src) => From::Host,
            _ => From::Pod,
        },
        None => From::Pod,
    }
}
