//! What would happen to a packet on this node, step by step, read from the tables.
//! Pure: it uses the programs' own decisions.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    forwarding,
    maps::{
        CONFIG_MASQUERADE, HOP_ACTING, HOP_LOCAL, HOP_NONE, HOP_REMOTE, MASQ_EXCLUDE, MASQ_FORCE,
        MASQ_SRC_ALWAYS, NODE_GATEWAY, NODE_LED, PREFIX_ROUTE, PrefixValue,
    },
    nat,
    packet::protocol,
};
use serde::Serialize;

use super::{
    Hop, Tables,
    model::{Packet, Verdict},
    sized_packet::SizedPacket,
};
use crate::{prefixes::longest_entry, settings::Tunnel};

/// Where a packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A pod of this node: the stack routes it.
    Pod,
    /// A process of this host.
    Host,
    /// WireGuard has decrypted it.
    Kilo,
    /// The network the node is in; encapsulated by the node with this private
    /// address, if one is named.
    Lan(Option<IpAddr>),
}

/// The packet to be traced.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Addresses, TTL and length.
    pub sized: SizedPacket,
    /// IP protocol number.
    pub protocol: u8,
    /// Source and destination port, where the protocol has ports.
    pub ports: Option<(u16, u16)>,
    /// Where it comes from.
    pub origin: Origin,
}

/// What the pure part needs to know from the kernel: a route,
/// and names of interfaces.
pub struct Host<'a> {
    /// Interface of the kernel's route to the destination, if there is one.
    pub route: Option<u32>,
    /// Name of an interface.
    pub name: &'a dyn Fn(u32) -> String,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Program or table.
    pub at: &'static str,
    /// What was found there, and why.
    pub finding: String,
}

/// The complete trace of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trace {
    /// Findings in order.
    pub steps: Vec<Step>,
    /// Label of an action, `drop`, or `stack` for what no program takes.
    pub outcome: &'static str,
    /// Label of the drop reason, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// The outcome in a sentence.
    pub text: String,
}

impl Trace {
    fn at(&mut self, at: &'static str, finding: impl fmt::Display) {
        self.steps.push(Step { at, finding: finding.to_string() });
    }

    fn passed(mut self, action: Action, text: impl fmt::Display) -> Self {
        (self.outcome, self.text) = (action.label(), text.to_string());
        self
    }

    fn dropped(mut self, reason: DropReason) -> Self {
        (self.outcome, self.reason) = ("drop", Some(reason.label()));
        reason.describe().clone_into(&mut self.text);
        self
    }

    fn stack(mut self, text: impl fmt::Display) -> Self {
        (self.outcome, self.text) = ("stack", text.to_string());
        self
    }
}

/// Follows the packet through the programs of this node.
pub fn trace(tables: &Tables, question: &Question, host: &Host<'_>) -> Trace {
    let empty = Trace { steps: Vec::new(), outcome: "", reason: None, text: String::new() };
    let tracer = Tracer { tables, question, host, trace: empty };
    match question.origin {
        Origin::Pod | Origin::Host => tracer.routed(),
        Origin::Kilo => tracer.decrypted(),
        Origin::Lan(sender) => tracer.received(sender),
    }
}

struct Tracer<'a> {
    tables: &'a Tables,
    question: &'a Question,
    host: &'a Host<'a>,
    trace: Trace,
}

impl Tracer<'_> {
    const fn packet(&self) -> Packet {
        self.question.sized.packet
    }

    /// The kernel's decision: the routes to kilo0 are those of the tables.
    fn routed(mut self) -> Trace {
        let Packet { dst, .. } = self.packet();
        let kilo = self.tables.config.kilo_ifindex;
        let name = |ifindex| (self.host.name)(ifindex);
        if self.tables.is_local(dst) {
            self.trace.at("route", format!("{dst} is this node's own, or one of its pods"));
            return self.trace.stack("The packet stays on this node.");
        }
        let beside = self.tables.uplink_egress(self.packet());
        let steered =
            longest_entry(&self.tables.prefix, dst).filter(|(_, value)| value.flags & PREFIX_ROUTE != 0);
        let out = match (self.question.origin, steered) {
            (Origin::Pod, Some((prefix, _))) if !matches!(beside, Ok(Some(_))) => {
                self.trace.at("route", format!("{prefix} leads to {}", name(kilo)));
                Some(kilo)
            }
            _ => {
                let text = self.host.route.map_or_else(|| "no route".to_owned(), name);
                self.trace.at("route", format!("the kernel's route to {dst}: {text}"));
                self.host.route
            }
        };
        match out {
            None => self.trace.stack("The kernel has no route: it answers that the network is unreachable."),
            Some(out) if out == kilo => self.leaving(),
            Some(out) => {
                match beside {
                    Ok(Some(hop)) => return self.beside(out, &hop),
                    Ok(None) => {}
                    Err(reason) => return self.refused(out, reason),
                }
                if let Err(reason) = self.masquerade(out) {
                    return self.trace.dropped(reason);
                }
                self.trace.stack("This host's other routes decide: it leaves outside the mesh.")
            }
        }
    }

    /// The route leads a packet of the mesh out of an uplink, which drops it.
    fn refused(mut self, out: u32, reason: DropReason) -> Trace {
        self.destination();
        let name = |ifindex| (self.host.name)(ifindex);
        let owner = longest_entry(&self.tables.prefix, self.packet().dst);
        let text = if owner.is_some_and(|(_, value)| value.hop == HOP_NONE && value.flags & PREFIX_ROUTE == 0)
        {
            format!("{} may not send it: no location that this node knows has the address", name(out))
        } else {
            let kilo = name(self.tables.config.kilo_ifindex);
            format!(
                "{} may not send it: only {kilo} may, and the route there is missing or overruled",
                name(out)
            )
        };
        self.trace.at("uplink_egress", text);
        self.trace.dropped(reason)
    }

    /// A pod's packet to another node itself.
    fn beside(mut self, out: u32, hop: &Hop) -> Trace {
        let name = |ifindex| (self.host.name)(ifindex);
        let (kilo, Packet { src, dst }) = (self.tables.config.kilo_ifindex, self.packet());
        let mtu = self.tables.mtu_beside(Some(hop)).unwrap_or(0);
        match hop {
            // The host itself is not notified: what it learned would hold
            // for its WireGuard, too.
            _ if self.tables.is_of_mesh(src, false) && !self.question.sized.fits(mtu) => {
                let text = format!("larger than the {mtu} bytes that fit on the path to {dst}");
                self.trace.at("uplink_egress", text);
                self.trace.reason = Some(DropReason::TooBig.label());
                self.trace.stack("The sender is notified (fragmentation needed, packet too big).")
            }
            Hop::Wireguard => {
                let text = format!(
                    "from {} to {}: WireGuard itself sends to {dst}, so no route leads there; pods' packets are \
                     encrypted all the same",
                    name(out),
                    name(kilo)
                );
                self.trace.at("uplink_egress", text);
                self.leaving()
            }
            _ => {
                let text = format!(
                    "from {} to {}: {dst} is a node of this location, and the network between may not route pods' \
                     addresses",
                    name(out),
                    name(kilo)
                );
                self.trace.at("uplink_egress", text);
                self.leaving()
            }
        }
    }

    /// Adds prefix and hop of the destination.
    fn destination(&mut self) {
        let Packet { dst, .. } = self.packet();
        match longest_entry(&self.tables.prefix, dst) {
            Some((prefix, value)) => {
                let text = format!("{dst} is in {prefix} -> {}", self.hop(value));
                self.trace.at("prefix", text);
            }
            None => self.trace.at("prefix", format!("no prefix holds {dst}")),
        }
    }

    fn hop(&self, value: PrefixValue) -> String {
        let whose = match value.hop {
            HOP_LOCAL => "this node",
            id @ (HOP_REMOTE | HOP_ACTING) if self.tables.resolve(id) == HOP_REMOTE => "outside the location",
            HOP_REMOTE => "outside the location, by the leader",
            HOP_ACTING => "outside the location, by the gateway that this node uses",
            _ => "a node of the location",
        };
        let route = if value.flags & PREFIX_ROUTE == 0 { ", not routed to kilo0" } else { "" };
        let how = match self.tables.hop(value.hop) {
            None => "no such hop: drop".to_owned(),
            Some(Hop::Local) => "the stack".to_owned(),
            Some(Hop::Wireguard) => "WireGuard".to_owned(),
            Some(Hop::Node { tunnel, ifindex, mtu, local, remote }) => {
                let tunnel = match tunnel {
                    Tunnel::None => "native",
                    Tunnel::Ipip => "ipip",
                    Tunnel::Vxlan => "vxlan",
                };
                let mtu = if *mtu == 0 { "unknown".to_owned() } else { format!("{mtu} bytes") };
                format!("{remote} ({tunnel} from {local} over {}, MTU {mtu})", (self.host.name)(*ifindex))
            }
        };
        format!("hop {} ({whose}): {how}{route}", value.hop)
    }

    fn leaving(mut self) -> Trace {
        let kilo = self.tables.config.kilo_ifindex;
        let verdict = self.tables.leaving(&self.question.sized);
        if verdict == Err(DropReason::NotUnicast) {
            return self.trace.dropped(DropReason::NotUnicast);
        }
        if let Err(reason) = self.masquerade(kilo) {
            return self.trace.dropped(reason);
        }
        self.destination();
        if verdict == Err(DropReason::TooBig) {
            // The routes carry the hop's MTU.
            return self.trace.stack(
                "Larger than the route's MTU: the stack fragments it, or notifies the sender (fragmentation \
                 needed, packet too big). Larger packets that still reach the program are dropped (too_big).",
            );
        }
        self.conclude("kilo_egress", verdict)
    }

    fn decrypted(mut self) -> Trace {
        self.reply();
        self.destination();
        let verdict = self.tables.decrypted(&self.question.sized);
        self.conclude("kilo_ingress", verdict)
    }

    fn received(mut self, sender: Option<IpAddr>) -> Trace {
        let Packet { src, .. } = self.packet();
        let owner = longest_entry(&self.tables.prefix, src);
        match owner {
            Some((prefix, value)) => {
                let text = format!("{src} is in {prefix}, which belongs to {}", self.hop(value));
                self.trace.at("source", text);
            }
            None => self.trace.at("source", format!("no prefix contains {src}: no node may send from it")),
        }
        let sender = sender.or_else(|| {
            let nodes = &self.tables.node;
            let owns = |(addr, node): (&IpAddr, &kilo_common::maps::NodeValue)| {
                let (_, value) = owner?;
                forwarding::check_source(node, Some(value), None).is_ok().then_some(*addr)
            };
            nodes.iter().find_map(owns)
        });
        if let Some(action) = self.tables.native(&self.question.sized) {
            self.trace.at("lan_ingress", "its node sends without an outer header");
            self.destination();
            return self.conclude("lan_ingress", Ok((action, None)));
        }
        let Some(sender) = sender else {
            self.reply();
            if let Err(reason) = self.tables.arrives_in_clear(self.packet()) {
                self.trace.at(
                    "lan_ingress",
                    "no node of this location sends from this source, and such packets must not arrive in cleartext",
                );
                return self.conclude("lan_ingress", Err(reason));
            }
            self.trace.at(
                "lan_ingress",
                "no node of this location sends from this source; without an outer header it is left to the stack",
            );
            return self.trace.stack("This host's stack decides.");
        };
        let known = match self.tables.node.get(&sender) {
            Some(node) if node.flags & NODE_LED != 0 => "a node that this one leads",
            Some(node) if node.flags & NODE_GATEWAY != 0 => "a gateway",
            Some(_) => "a node of the location",
            None => "no node of the location",
        };
        self.trace.at("sender", format!("encapsulated by {sender}: {known}"));
        self.destination();
        let verdict = self.tables.steered(sender, &self.question.sized);
        self.conclude("lan_ingress", verdict)
    }

    /// Adds that the packet may be a reply to a masqueraded flow.
    fn reply(&mut self) {
        let Packet { dst, .. } = self.packet();
        if self.tables.is_masquerade_address(dst) {
            self.trace.at(
                "unmasquerade",
                format!(
                    "pods are masqueraded to {dst}: a reply goes to the pod that the flow's entry in nat names"
                ),
            );
        }
    }

    /// Adds whether the source is translated on the way out of this interface.
    fn masquerade(&mut self, out: u32) -> Result<(), DropReason> {
        let Packet { src, dst } = self.packet();
        let addr = self.tables.masquerade_address(out, dst);
        let (Some(addr), true) = (addr, self.tables.config.flags & CONFIG_MASQUERADE != 0) else {
            self.trace.at("masquerade", format!("not on {}", (self.host.name)(out)));
            return Ok(());
        };
        if self.tables.is_masquerade_address(src) {
            self.trace.at("masquerade", "no: not a source of ours to translate");
            return Ok(());
        }
        let source = longest_entry(&self.tables.masq_src, src);
        let destination = longest_entry(&self.tables.masq_dst, dst);
        let said = |entry: Option<(IpNet, u32)>, table: &str| match entry {
            None => format!("not in {table}"),
            Some((prefix, MASQ_EXCLUDE)) if table == "masq_dst" => format!("in {prefix}, never"),
            Some((prefix, MASQ_FORCE)) if table == "masq_dst" => format!("in {prefix}, always"),
            Some((prefix, MASQ_SRC_ALWAYS)) => format!("in {prefix}, yes"),
            Some((prefix, _)) => format!("in {prefix}, exempt"),
        };
        let why =
            format!("source {}; destination {}", said(source, "masq_src"), said(destination, "masq_dst"));
        if !self.tables.masquerades(self.packet()) {
            self.trace.at("masquerade", format!("no: {why}"));
            return Ok(());
        }
        self.trace.at(
            "masquerade",
            format!(
                "yes, {src} becomes {addr}, with the same port if that is free, unless the other side opened the \
                 flow: {why}"
            ),
        );
        if addr.is_unspecified() || nat::flow::layout(self.question.protocol).is_none() {
            return Err(DropReason::NatUnsupported);
        }
        Ok(())
    }

    fn conclude(mut self, program: &'static str, verdict: Verdict) -> Trace {
        let SizedPacket { ttl, length, .. } = self.question.sized;
        let (action, hop) = match verdict {
            Err(reason) => {
                self.trace.at(program, format!("drops: {}", reason.label()));
                return self.trace.dropped(reason);
            }
            Ok(verdict) => verdict,
        };
        self.trace.at(program, format!("{}: {length} bytes, ttl {ttl}", action.label()));
        let text = match (action, hop) {
            (_, Some(Hop::Node { remote, .. })) => format!("Sent to {remote}, which takes it from there."),
            (Action::Punt, _) => "The stack answers the sender: time exceeded, or too big.".to_owned(),
            _ => action.describe().to_owned(),
        };
        self.trace.passed(action, text)
    }
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Packet { src, dst } = self.sized.packet;
        let protocol = match self.protocol {
            protocol::TCP => "tcp".to_owned(),
            protocol::UDP => "udp".to_owned(),
            protocol::ICMP => "icmp".to_owned(),
            protocol::ICMPV6 => "icmp6".to_owned(),
            other => format!("protocol {other}"),
        };
        write!(f, "{src} > {dst} {protocol}")?;
        if let Some((src, dst)) = self.ports {
            write!(f, " {src} > {dst}")?;
        }
        write!(f, ", {} bytes, ttl {}", self.sized.length, self.sized.ttl)
    }
}
