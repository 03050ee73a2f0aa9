//! Traces on this node, with its tables and routes.

use std::{fmt::Write as _, net::IpAddr};

use anyhow::{Context as _, Result, bail};
use kilo_common::{drop_reasons::DropReason, packet::protocol};
use kilo_core::plan::{
    model::Packet,
    sized_packet::SizedPacket,
    trace::{self, Host, Origin, Question},
};
use kilo_host::{
    dataplane::{self, interface_name},
    net::Net,
};

use super::{From, Output, Proto, TraceArgs};
use crate::remote;

impl TraceArgs {
    fn question(&self, origin: Origin) -> Result<Question> {
        if self.src.is_ipv4() != self.dst.is_ipv4() {
            bail!(
                "--src {} and --dst {} are of different families; give two IPv4 or two IPv6 addresses",
                self.src,
                self.dst
            );
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
            sized: SizedPacket { packet, ttl: self.ttl, length: self.size },
            protocol: number,
            ports: (self.proto != Proto::Icmp).then_some((self.sport, self.dport)),
            origin,
        })
    }
}

/// Returns the trace as text.
pub async fn run(args: &TraceArgs) -> Result<String> {
    let tables = dataplane::read_tables(&args.bpffs).context(remote::NOT_HERE)?;
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
            object.insert("remedy".to_owned(), reason.remedy().into());
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

/// The likely origin of a packet with this source, according to the tables.
fn origin_of(tables: &kilo_core::plan::Tables, src: IpAddr) -> From {
    use kilo_core::{plan::Hop, prefixes::longest_entry};
    match longest_entry(&tables.prefix, src) {
        Some((_, value)) => match tables.hop(value.hop) {
            Some(Hop::Node { .. }) => From::Lan,
            Some(Hop::Wireguard) => From::Kilo,
            Some(Hop::Local) if tables.is_private(src) => From::Host,
            _ => From::Pod,
        },
        None => From::Pod,
    }
}
