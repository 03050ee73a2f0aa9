//! A node's flow state, in plain Rust: flows that it masquerades, and flows opened from outside. The
//! outcome for a packet follows from the tables and this state; only the port of a flow that cannot keep
//! its own is taken from what the programs sent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    maps::{
        CONFIG_MASQUERADE, CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, Config, DEVICE_BY_DESTINATION,
        DEVICE_MASQUERADE, Device, MASQ_EXCLUDE,
    },
    nat::{
        self, flow,
        transport::{self, Part},
    },
    packet::{Ipv4, protocol},
};
use kilo_core::{plan::Tables, prefixes::longest};

use super::oracle::{Input, Ip};

/// Address, and port or ICMP echo identifier.
pub type End = (IpAddr, u16);

/// A flow by its packets between a node and the network: the end on the node's side, and the other. For
/// ICMP echo, the near end has the identifier and the far end nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    pub protocol: u8,
    pub near: End,
    pub far: End,
}

/// What a packet shows of its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sign {
    pub flow: Flow,
    /// Offset of the transport header in the IP packet.
    pub at: usize,
    /// False for an echo reply.
    pub asks: bool,
    tcp_flags: u8,
    fragment: bool,
}

const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
/// Port ranges of up to this size are searched completely.
const TRIED: u16 = 15;

/// Reads the transport header of a packet; `leaves` says which end is near.
///
/// # Errors
/// Why such a packet cannot be masqueraded.
pub fn sign(packet: &[u8], ip: &Ip, leaves: bool) -> Result<Sign, DropReason> {
    let found = if ip.v6 {
        let load = |at: usize| packet.get(at..at + 8)?.try_into().ok();
        transport::ipv6(ip.protocol, load).ok_or(DropReason::NatUnsupported)?
    } else {
        let header = Ipv4::parse(packet.first_chunk().ok_or(DropReason::Truncated)?, packet.len())?;
        transport::ipv4(&header, [packet[4], packet[5]])
    };
    if found.part == Part::Later {
        return Err(DropReason::NatFragment);
    }
    let payload = packet.get(found.offset..).unwrap_or_default();
    let start = payload.first_chunk::<8>().ok_or(DropReason::NatUnsupported)?;
    let word = |at: usize| u16::from_be_bytes([start[at], start[at + 1]]);
    let (request, reply) = if ip.v6 { (128, 129) } else { (8, 0) };
    let icmp = if ip.v6 { protocol::ICMPV6 } else { protocol::ICMP };
    let (src, dst) = match found.protocol {
        protocol::TCP | protocol::UDP | protocol::SCTP => (word(0), word(2)),
        // Errors quote packets; random quotes belong to no flow and are refused like everything else.
        kind if kind == icmp && (start[0] == request || start[0] == reply) => {
            if leaves {
                (word(4), 0)
            } else {
                (0, word(4))
            }
        }
        _ => return Err(DropReason::NatUnsupported),
    };
    let ends = [(ip.src, src), (ip.dst, dst)];
    let [near, far] = if leaves { ends } else { [ends[1], ends[0]] };
    let is_tcp = found.protocol == protocol::TCP;
    Ok(Sign {
        flow: Flow { protocol: found.protocol, near, far },
        at: found.offset,
        asks: found.protocol != icmp || start[0] == request,
        tcp_flags: if is_tcp { payload.get(13).copied().unwrap_or(0) } else { 0 },
        fragment: found.part == Part::First,
    })
}

impl Sign {
    /// State to keep for such a packet, the first of its flow.
    fn masqueraded(&self, packet: &[u8], addr: IpAddr) -> Remembered {
        let within = flow::layout(self.flow.protocol).unwrap().src_port;
        Remembered::Masqueraded { flow: self.flow, addr, port: packet.len() - self.at - within }
    }
}

/// A translated end of a packet, with updated checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    pub addr: IpAddr,
    /// `None`: any free port.
    pub port: Option<u16>,
    /// True for the destination of an arriving packet.
    pub destination: bool,
    /// Counter of the translation, if any.
    pub action: Option<Action>,
}

/// State to keep after a packet has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remembered {
    /// Its flow is masqueraded as this address; its port is this many bytes before the packet's end.
    Masqueraded { flow: Flow, addr: IpAddr, port: usize },
    /// Its flow was opened from outside.
    FromOutside(Flow),
    /// Its flow is known.
    Known,
}

/// Translation of one end of a packet, and the state to keep.
pub type Outcome = (Option<Translation>, Option<Remembered>);

/// State since the tables were written.
#[derive(Clone, Debug, Default)]
pub struct Flows {
    /// Translated near end of each flow.
    became: BTreeMap<Flow, End>,
    /// Original near end, by the flow as the network sees it.
    owners: BTreeMap<Flow, End>,
    from_outside: BTreeSet<Flow>,
}

impl Flows {
    /// An outgoing packet. `uplink` is the length of the uplink's link-layer header; `None` is the
    /// WireGuard device, which has one address.
    ///
    /// # Errors
    /// Why it is dropped.
    pub fn leaving(
        &self,
        tables: &Tables,
        input: &Input,
        uplink: Option<usize>,
        ip: &Ip,
    ) -> Result<Outcome, DropReason> {
        let Some(device) = translating(tables, input.ifindex) else { return Ok((None, None)) };
        let usual = usual(device, ip.v6);
        let chosen = chosen(tables, input.ifindex, device, usual, ip.dst);
        let packet = &input.frame[uplink.unwrap_or_default()..];
        if ip.src == usual || uplink.is_some() && is_some_uplinks(tables, ip.src) {
            return self.hosts(tables, packet, ip);
        }
        let due = nat::is_masqueraded(longest(&tables.masq_src, ip.src), longest(&tables.masq_dst, ip.dst));
        if !due {
            return Ok((None, None));
        }
        let sign = sign(packet, ip, true)?;
        let flow = sign.flow;
        let established = self.became.get(&flow).filter(|_| sign.asks);
        if let Some((addr, port)) = established.filter(|(addr, _)| *addr == usual || *addr == chosen) {
            let translation = Translation {
                addr: *addr,
                port: Some(*port),
                destination: false,
                action: Some(Action::Masquerade),
            };
            return Ok((Some(translation), Some(Remembered::Known)));
        }
        // A packet that opens a flow is not a reply.
        let opens = match flow.protocol {
            protocol::TCP => sign.tcp_flags & (SYN | ACK) == SYN,
            protocol::ICMP | protocol::ICMPV6 => sign.asks,
            _ => false,
        };
        if !opens && self.from_outside.contains(&flow) {
            return Ok((None, Some(Remembered::Known)));
        }
        if !sign.asks || chosen.is_unspecified() {
            return Err(DropReason::NatUnsupported);
        }
        let port = self.port(&tables.config, &flow, chosen)?;
        // The TCP header is cut off before its checksum.
        let checksum = flow::layout(flow.protocol).and_then(|layout| layout.checksum);
        if checksum.is_some_and(|checksum| packet.len() < sign.at + checksum + 2) {
            return Err(DropReason::Rewrite);
        }
        let translation =
            Translation { addr: chosen, port, destination: false, action: Some(Action::Masquerade) };
        Ok((Some(translation), Some(sign.masqueraded(packet, chosen))))
    }

    /// A packet of the host itself: its port changes when a pod's flow has it, and its echoes claim
    /// identifiers as pods' do.
    fn hosts(&self, tables: &Tables, packet: &[u8], ip: &Ip) -> Result<Outcome, DropReason> {
        // A host without an address sends from the unspecified one.
        let excluded = longest(&tables.masq_dst, ip.dst) == Some(MASQ_EXCLUDE) || ip.src.is_unspecified();
        let Ok(sign) = sign(packet, ip, true) else { return Ok((None, None)) };
        let flow = sign.flow;
        let (protocol, (addr, port)) = (flow.protocol, flow.near);
        if excluded || sign.fragment || !sign.asks || nat::is_reserved(protocol, port, &tables.config) {
            return Ok((None, None));
        }
        let contested = self.became.contains_key(&flow)
            || self.owners.get(&flow).is_some_and(|(owner, _)| *owner != addr);
        if !contested && !flow::is_icmp(protocol) {
            return Ok((None, None));
        }
        let (port, remembered) = match self.became.get(&flow) {
            Some((_, port)) => (Some(*port), Remembered::Known),
            None => (self.port(&tables.config, &flow, addr)?, sign.masqueraded(packet, addr)),
        };
        Ok((Some(Translation { addr, port, destination: false, action: None }), Some(remembered)))
    }

    /// An arriving packet, if it is a reply to a masqueraded flow. `anywhere`: the flow may have left
    /// through another uplink.
    pub fn answer(&self, tables: &Tables, input: &Input, offset: usize, ip: &Ip, anywhere: bool) -> Outcome {
        let Some(device) = translating(tables, input.ifindex) else { return (None, None) };
        let own = ip.dst == usual(device, ip.v6) || anywhere && is_some_uplinks(tables, ip.dst);
        let Ok(sign) = sign(&input.frame[offset..], ip, false) else { return (None, None) };
        let (protocol, (_, port)) = (sign.flow.protocol, sign.flow.near);
        let request = flow::is_icmp(protocol) && sign.asks;
        if !own || request || nat::is_reserved(protocol, port, &tables.config) {
            return (None, None);
        }
        let Some((addr, port)) = self.owners.get(&sign.flow) else { return (None, None) };
        let action = (*addr != ip.dst).then_some(Action::Unmasquerade);
        let translation = Translation { addr: *addr, port: Some(*port), destination: true, action };
        (Some(translation), Some(Remembered::Known))
    }

    /// State to keep for an untranslated packet from outside: its flow, if replies would otherwise be
    /// masqueraded.
    pub fn arrived(&self, tables: &Tables, input: &Input, offset: usize, ip: &Ip) -> Option<Remembered> {
        let device = translating(tables, input.ifindex)?;
        let due = nat::is_masqueraded(longest(&tables.masq_src, ip.dst), longest(&tables.masq_dst, ip.src));
        let sign = sign(&input.frame[offset..], ip, false).ok()?;
        // A reset opens no flow.
        let opens = sign.asks && sign.tcp_flags & RST == 0;
        let from_outside = due && opens && ip.dst != usual(device, ip.v6);
        from_outside.then_some(Remembered::FromOutside(sign.flow))
    }

    /// Port of a new flow: its own if that is free. `None`: any free one.
    fn port(&self, config: &Config, flow: &Flow, addr: IpAddr) -> Result<Option<u16>, DropReason> {
        let own = flow.near.1;
        if self.is_free(config, flow, (addr, own)) {
            return Ok(Some(own));
        }
        let range = config.nat_port_min..=config.nat_port_max;
        let changes = flow::layout(flow.protocol).is_some_and(|layout| layout.port_changes);
        let some = range.len() > usize::from(TRIED)
            || range.clone().any(|port| self.is_free(config, flow, (addr, port)));
        if changes && some { Ok(None) } else { Err(DropReason::NatExhausted) }
    }

    fn is_free(&self, config: &Config, flow: &Flow, end: End) -> bool {
        let owner = self.owners.get(&Flow { near: end, ..*flow });
        !nat::is_reserved(flow.protocol, end.1, config) && owner.is_none_or(|owner| *owner == flow.near)
    }

    /// Stores the state to keep, now that the sent packet shows the port.
    ///
    /// # Errors
    /// When the assigned port is wrong.
    pub fn remember(&mut self, config: &Config, what: Option<Remembered>, sent: &[u8]) -> Result<(), String> {
        match what {
            None | Some(Remembered::Known) => {}
            Some(Remembered::FromOutside(flow)) => drop(self.from_outside.insert(flow)),
            Some(Remembered::Masqueraded { flow, addr, port }) => {
                let at = sent.len() - port;
                let port = u16::from_be_bytes([sent[at], sent[at + 1]]);
                let range = config.nat_port_min..=config.nat_port_max;
                if !self.is_free(config, &flow, (addr, port)) || port != flow.near.1 && !range.contains(&port)
                {
                    return Err(format!("{flow:?} got port {port}"));
                }
                self.became.insert(flow, (addr, port));
                self.owners.insert(Flow { near: (addr, port), ..flow }, flow.near);
            }
        }
        Ok(())
    }
}

fn translating(tables: &Tables, ifindex: u32) -> Option<&Device> {
    let masquerades = tables.config.flags & CONFIG_MASQUERADE != 0;
    tables.device.get(&ifindex).filter(|device| masquerades && device.flags & DEVICE_MASQUERADE != 0)
}

fn usual(device: &Device, v6: bool) -> IpAddr {
    if v6 { device.masq_v6.into() } else { device.masq_v4.into() }
}

/// The address towards this destination: that of the longest prefix that contains it, the last one of equal
/// length.
fn chosen(tables: &Tables, ifindex: u32, device: &Device, usual: IpAddr, dst: IpAddr) -> IpAddr {
    let (mut addr, mut best) = (usual, 0);
    for ((of, prefix), other) in &tables.masq_addr {
        let considered = *of == ifindex && device.flags & DEVICE_BY_DESTINATION != 0;
        if considered && prefix.contains(&dst) && prefix.prefix_len() >= best {
            (addr, best) = (*other, prefix.prefix_len());
        }
    }
    addr
}

/// True for addresses to which packets are masqueraded on any uplink, where there are several.
fn is_some_uplinks(tables: &Tables, addr: IpAddr) -> bool {
    let several = if addr.is_ipv6() { CONFIG_SEVERAL_V6 } else { CONFIG_SEVERAL_V4 };
    let uplinks = tables.device.iter().filter(|(ifindex, _)| **ifindex != tables.config.kilo_ifindex);
    let mut usual = uplinks.flat_map(|(_, device)| [IpAddr::from(device.masq_v4), device.masq_v6.into()]);
    tables.config.flags & several != 0
        && !addr.is_unspecified()
        && (usual.any(|other| other == addr) || tables.masq_addr.values().any(|other| *other == addr))
}
