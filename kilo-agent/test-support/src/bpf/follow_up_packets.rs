//! Packets that follow others: replies, more of the same flow, and other pods' packets with the same ports.

use std::net::IpAddr;

use kilo_common::{maps::MASQ_SRC_ALWAYS, packet::protocol};
use kilo_core::plan::Tables;

use super::{
    flows::{Sign, sign},
    oracle::{Input, Ip, link_header_len, mac},
    random::{OTHER_UPLINKS, Random, ethernet},
};

/// A program's run on one packet.
#[derive(Clone, Debug)]
pub struct Step {
    pub program: &'static str,
    pub input: Input,
    /// The interface through which packets of its flow leave.
    pub leaves_by: u32,
}

impl Step {
    /// A packet that follows no other.
    pub fn first(program: &'static str, input: Input) -> Self {
        let leaves_by = input.ifindex;
        Self { program, input, leaves_by }
    }
}

/// A packet that passed.
#[derive(Clone, Debug)]
pub struct Seen {
    pub step: Step,
    /// The packet afterwards.
    pub out: Vec<u8>,
}

/// Programs on a flow's path, inbound and outbound.
const PROGRAM_PAIRS: [[&str; 2]; 3] =
    [["lan_ingress", "uplink_egress"], ["l3_ingress", "l3_egress"], ["kilo_ingress", "kilo_egress"]];

fn read(packet: &[u8], leaves: bool) -> Option<(Ip, Sign)> {
    let v6 = packet.first()? >> 4 == 6;
    let ip = Ip::read(packet, 0, v6).ok()?;
    let sign = sign(packet, &ip, leaves).ok()?;
    Some((ip, sign))
}

impl Random {
    /// A packet related to one that was seen.
    pub fn sequel(&mut self, tables: &Tables, seen: &Seen) -> Option<Step> {
        let Step { program, ref input, leaves_by } = seen.step;
        let link = link_header_len(program);
        let pair = PROGRAM_PAIRS.iter().find(|pair| pair.contains(&program))?;
        let left = pair[1] == program;
        let (before, after) = (input.frame.get(link..)?, seen.out.get(link..)?);
        let (program, packet, ifindex) = match self.below(6) {
            // More of the flow.
            0 => (program, self.like(before, left, false, None)?, input.ifindex),
            // Another pod's packet with the same ports.
            1 if left => {
                let src = self.pod(tables, before[0] >> 4 == 6)?;
                (program, self.like(before, true, false, Some(src))?, input.ifindex)
            }
            _ => {
                // Sometimes through another uplink.
                let elsewhere = left && pair[0] != "kilo_ingress" && self.chance(3);
                let ifindex = if elsewhere { self.pick(&OTHER_UPLINKS) } else { leaves_by };
                (pair[usize::from(!left)], self.like(after, left, true, None)?, ifindex)
            }
        };
        let mut frame = packet;
        if link != 0 {
            frame = ethernet(&frame, frame[0] >> 4 == 6);
            frame[..6].copy_from_slice(&mac(ifindex));
        }
        if self.chance(12) {
            let at = self.below(frame.len().min(80));
            frame[at] = self.byte();
        }
        Some(Step {
            program,
            input: Input { frame, gso: self.gso(), ifindex, brought_by: 0, priority: 0 },
            leaves_by,
        })
    }

    /// A packet of the same flow, in the other direction if it `answers`, from `src` if that is given.
    fn like(&mut self, packet: &[u8], left: bool, answers: bool, src: Option<IpAddr>) -> Option<Vec<u8>> {
        let (ip, sign) = read(packet, left)?;
        let (from, to) = if answers { (ip.dst, ip.src) } else { (src.unwrap_or(ip.src), ip.dst) };
        let mut start: [u8; 4] = packet.get(sign.at..sign.at + 4)?.try_into().ok()?;
        let mut payload = vec![0; 24 + self.below(60)];
        self.fill(&mut payload);
        match sign.flow.protocol {
            protocol::ICMP | protocol::ICMPV6 => {
                let (request, reply) = if ip.v6 { (128, 129) } else { (8, 0) };
                payload[0] = if sign.asks == answers { reply } else { request };
                payload[4..6].copy_from_slice(&sign.flow.near.1.to_be_bytes());
            }
            kind => {
                if answers {
                    start.rotate_left(2);
                }
                payload[..4].copy_from_slice(&start);
                if kind == protocol::TCP {
                    // SYN-ACK, ACK, ACK with PSH, FIN or RST, and SYN alone, which opens a connection.
                    payload[13] = self.pick(&[0x12, 0x10, 0x18, 0x11, 0x14, 0x02]);
                }
            }
        }
        Some(self.ip(from, to, sign.flow.protocol, &payload))
    }

    /// An address that packets are masqueraded from.
    fn pod(&mut self, tables: &Tables, v6: bool) -> Option<IpAddr> {
        let sources =
            tables.masq_src.iter().filter(|(net, how)| net.addr().is_ipv6() == v6 && *how == MASQ_SRC_ALWAYS);
        let sources: Vec<_> = sources.map(|(net, _)| *net).collect();
        if sources.is_empty() {
            return None;
        }
        let net = self.pick(&sources);
        Some(self.host(net))
    }
}
