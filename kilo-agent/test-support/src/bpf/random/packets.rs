//! Random packets related to tables.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use kilo_common::{
    checksum,
    encap::vxlan_header,
    maps::{
        HOP_ACTING, HOP_FIRST_NODE, HOP_LOCAL, HOP_REMOTE, NODE_GATEWAY, PREFIX_VIA_WIREGUARD, PrefixValue,
        VXLAN_PORT,
    },
    packet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, protocol},
};
use kilo_core::plan::Tables;
use rand::{RngExt as _, seq::IteratorRandom as _};

use super::{
    super::{
        IFINDEX,
        oracle::{BY_DEVICE, CHECKED, Input, mac},
        signals,
    },
    CONTAINER, OTHER_UPLINKS, Random, WIREGUARD_PORT, private,
};

const SPECIAL: [&str; 13] = [
    "0.0.0.0",
    "127.0.0.1",
    "169.254.7.7",
    "224.0.0.5",
    "255.255.255.255",
    "240.0.0.1",
    "::",
    "::1",
    "fe80::1",
    "ff02::1",
    "ff05::1:3",
    "198.51.100.2",
    "2001:db8:ffff::1",
];

impl Random {
    /// A packet for this program.
    pub fn input(&mut self, program: &str, tables: &Tables) -> Input {
        let mut frame = match program {
            "lan_ingress" if self.chance(8) => self.signal_on_lan(tables),
            "l3_ingress" if self.chance(8) => self.signal_on_lan(tables).split_off(14),
            "kilo_ingress" if self.chance(6) => self.signal_in_tunnel(tables),
            "lan_ingress" if !self.chance(4) => self.steered(tables),
            "l3_ingress" if !self.chance(4) => self.steered(tables).split_off(14),
            "lan_ingress" | "uplink_egress" | "tunnel_ingress" => {
                let v6 = self.chance(3);
                let (mut src, mut dst) = (self.address(tables, v6), self.address(tables, v6));
                if program == "uplink_egress" && self.chance(3) {
                    // From a pod of this node to another node's own address.
                    let own = self.within(tables, v6, |_, value| value.hop == HOP_LOCAL);
                    src = own.unwrap_or(src);
                    dst = private(1 + self.below(3), v6);
                }
                let packet = if program == "uplink_egress" && self.chance(6) {
                    // Packets that only a device may send there.
                    dst = private(1 + self.below(3), v6);
                    let payload = self.vxlan(VXLAN_PORT, &[0; 40], v6);
                    self.ip(src, dst, protocol::UDP, &payload)
                } else {
                    self.packet(src, dst)
                };
                ethernet(&packet, v6)
            }
            _ => {
                let v6 = self.chance(2);
                // Sources that the kernel reads correctly; see `V4`.
                let read =
                    |prefix: &IpNet| prefix.addr().to_string().starts_with(if v6 { "fd00" } else { "8." });
                let known = !self.chance(8);
                let src = known.then(|| self.within(tables, v6, |prefix, _| read(prefix))).flatten();
                let dst = self.address(tables, v6);
                let src = src.unwrap_or_else(|| self.address(tables, v6));
                self.packet(src, dst)
            }
        };
        self.spoil(&mut frame);
        let shortest = shortest(&frame);
        frame.resize(frame.len().max(shortest), 0);
        let gso = self.gso();
        let ifindex = match self.below(3) {
            _ if program.starts_with("kilo_") => tables.config.kilo_ifindex,
            0 => self.pick(&OTHER_UPLINKS),
            _ => IFINDEX,
        };
        if !program.starts_with("kilo_") && !program.starts_with("l3_") && frame[..6] == [0; 6] {
            frame[..6].copy_from_slice(&mac(ifindex));
        }
        let priority = self.pick(&[0, 0, 0, 6, CHECKED, CHECKED | 5, BY_DEVICE, BY_DEVICE | 3]);
        let is_read = matches!(program, "uplink_egress" | "l3_egress" | "tunnel_ingress");
        let brought_by = match self.below(6) {
            _ if !program.ends_with("_egress") => 0,
            0 | 1 => tables.config.kilo_ifindex,
            2 => CONTAINER,
            3 => IFINDEX,
            _ => 0,
        };
        Input { frame, gso, ifindex, brought_by, priority: if is_read { priority } else { 0 } }
    }

    /// An address that the tables may know, of one family.
    fn address(&mut self, tables: &Tables, v6: bool) -> IpAddr {
        if self.chance(20) {
            let special = SPECIAL.iter().map(|text| text.parse::<IpAddr>().unwrap());
            return special.filter(|addr| addr.is_ipv6() == v6).choose(&mut self.0).unwrap();
        }
        if self.chance(20) {
            return if v6 {
                Ipv6Addr::from(self.0.random::<u128>()).into()
            } else {
                Ipv4Addr::from(self.0.random::<u32>()).into()
            };
        }
        if self.chance(20) {
            let index = self.below(4);
            return private(index, v6);
        }
        self.within(tables, v6, |prefix, _| prefix.prefix_len() > 0).unwrap_or(if v6 {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::new(8, 0, 1, 9).into()
        })
    }

    /// An address in one of the selected prefixes.
    fn within(
        &mut self,
        tables: &Tables,
        v6: bool,
        wanted: impl Fn(&IpNet, &PrefixValue) -> bool,
    ) -> Option<IpAddr> {
        let of_family = tables.prefix.iter().filter(|(prefix, _)| prefix.addr().is_ipv6() == v6);
        let chosen = of_family.filter(|(prefix, value)| wanted(prefix, value)).choose(&mut self.0);
        let chosen = chosen?.0;
        Some(self.host(chosen))
    }

    /// Differentiated services, and ECN: not capable, ECT(1), ECT(0), congested.
    fn tos(&mut self) -> u8 {
        self.pick(&[0, 0, 0, 0x10, 0xb8]) | self.pick(&[0, 0, 0, 1, 2, 3])
    }

    fn ttl(&mut self) -> u8 {
        self.pick(&[64, 64, 64, 255, 2, 1, 0])
    }

    /// An IP packet: TCP, UDP, ICMP or another protocol, sometimes with options or extension headers.
    fn packet(&mut self, src: IpAddr, dst: IpAddr) -> Vec<u8> {
        let v6 = src.is_ipv6();
        let icmp = if v6 { protocol::ICMPV6 } else { protocol::ICMP };
        if self.chance(10) {
            return self.nested(src, dst);
        }
        let kind = self.pick(&[protocol::TCP, protocol::UDP, protocol::UDP, icmp, 47, protocol::SCTP]);
        let length = if self.chance(3) { self.below(1500) } else { self.below(120) };
        // Ports that cannot be changed are used once only, as the model has it.
        let length = if kind == protocol::SCTP { length.max(8) } else { length };
        let mut payload = vec![0; length];
        self.0.fill(&mut payload[..]);
        if kind == icmp && length > 0 {
            payload[0] = if v6 {
                self.pick(&[128, 129, 1, 2, 3, 133, 135, 136, 137])
            } else {
                self.pick(&[8, 8, 0, 3, 11])
            };
        }
        if kind == protocol::UDP && length > 1 && self.chance(6) {
            payload[..2].copy_from_slice(&WIREGUARD_PORT.to_be_bytes());
        }
        self.ip(src, dst, kind, &payload)
    }

    /// A packet that is itself a tunnel's: IP in IP, or VXLAN to our port.
    fn nested(&mut self, src: IpAddr, dst: IpAddr) -> Vec<u8> {
        let within: [IpAddr; 2] = if self.chance(2) {
            [Ipv4Addr::new(8, 0, 1, 7).into(), Ipv4Addr::new(10, 42, 4, 7).into()]
        } else {
            [Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
        };
        let v6 = within[0].is_ipv6();
        let inner = self.ip(within[0], within[1], protocol::UDP, &[7; 20]);
        if self.chance(2) {
            return self.ip(src, dst, if v6 { protocol::IPV6 } else { protocol::IPIP }, &inner);
        }
        let vxlan = self.vxlan(VXLAN_PORT, &inner, v6);
        self.ip(src, dst, protocol::UDP, &vxlan)
    }

    pub fn ip(&mut self, src: IpAddr, dst: IpAddr, kind: u8, payload: &[u8]) -> Vec<u8> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let options = if self.chance(8) { 4 * self.below(11) } else { 0 };
                let mut header = vec![1; 20 + options];
                let total = u16::try_from(header.len() + payload.len()).unwrap();
                header[0] = 0x40 | u8::try_from(header.len() / 4).unwrap();
                header[1] = self.tos();
                header[2..4].copy_from_slice(&total.to_be_bytes());
                let fragment: u16 =
                    self.pick(&[0x4000, 0x4000, 0x4000, 0x4000, 0x4000, 0, 0, 0x2000, 0x00b9]);
                // A random id, because the model does not know which fragments came before.
                header[4..6].copy_from_slice(&self.0.random::<[u8; 2]>());
                header[6..8].copy_from_slice(&fragment.to_be_bytes());
                header[8] = self.ttl();
                header[9] = kind;
                header[10..12].fill(0);
                header[12..16].copy_from_slice(&src.octets());
                header[16..20].copy_from_slice(&dst.octets());
                let words = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
                let sum = !checksum::fold(words.sum());
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                [&header[..], payload].concat()
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                // Extension headers before the payload, sometimes more than programs follow.
                let mut count = usize::from(self.chance(3));
                if count > 0 && self.chance(3) {
                    count += self.below(6);
                }
                let mut next = kind;
                let mut behind = payload.to_vec();
                for _ in 0..count {
                    let extension = self.pick(&[0, 43, 60, protocol::FRAGMENT]);
                    let header = if extension == protocol::FRAGMENT {
                        let place = self.pick(&[1, 1, 8, 0]);
                        [&[next, 0, 0, place][..], &self.0.random::<[u8; 4]>()].concat()
                    } else {
                        // The length is in units of eight bytes, and may lie.
                        let units = self.pick(&[0, 0, 0, 1, 2, 255]);
                        let mut header = vec![0; 8 + 8 * usize::from(if units == 255 { 0 } else { units })];
                        header[..3].copy_from_slice(&[next, units, 1]);
                        header
                    };
                    behind.splice(0..0, header);
                    next = extension;
                }
                let mut header = vec![0x60, 0, 0, 0];
                let class = self.tos();
                header[0] |= class >> 4;
                header[1] |= class << 4;
                header.extend(u16::try_from(behind.len()).unwrap().to_be_bytes());
                header.extend([next, self.ttl()]);
                header.extend(src.octets());
                header.extend(dst.octets());
                header.extend(behind);
                header
            }
            _ => panic!("two families"),
        }
    }

    /// A signal from another node, mostly for this one.
    fn signal_on_lan(&mut self, tables: &Tables) -> Vec<u8> {
        let v6 = tables.config.private_v6 != [0; 16];
        let key = tables.signal_key.iter().filter(|(addr, _)| addr.is_ipv6() == v6).choose(&mut self.0);
        let (from, key) = match key {
            Some((addr, key)) if !self.chance(8) => (*addr, *key),
            _ => (private(self.below(4), v6), signals::key(self, HOP_FIRST_NODE)),
        };
        let payload = signals::datagram(self, &key);
        let packet = self.ip(from, private(0, v6), protocol::UDP, &payload);
        ethernet(&packet, v6)
    }

    /// A signal out of a tunnel, mostly for this node.
    fn signal_in_tunnel(&mut self, tables: &Tables) -> Vec<u8> {
        let v6 = self.chance(2);
        let own = [
            private(0, v6),
            if v6 { tables.config.wireguard_v6.into() } else { tables.config.wireguard_v4.into() },
        ];
        let dst = if self.chance(8) { self.address(tables, v6) } else { self.pick(&own) };
        let read = |prefix: &IpNet| prefix.addr().to_string().starts_with(if v6 { "fd00" } else { "8." });
        let remote = |prefix: &IpNet, value: &PrefixValue| {
            read(prefix) && matches!(value.hop, HOP_REMOTE | HOP_ACTING)
        };
        let src = self.within(tables, v6, remote).unwrap_or(private(2, v6));
        let key = signals::key(self, HOP_FIRST_NODE);
        let payload = signals::datagram(self, &key);
        self.ip(src, dst, protocol::UDP, &payload)
    }

    /// A packet of either family with an outer header of either, mostly for this node.
    fn steered(&mut self, tables: &Tables) -> Vec<u8> {
        let inner_v6 = self.chance(3);
        let (mut src, mut dst) = (self.address(tables, inner_v6), self.address(tables, inner_v6));
        let outer_v6 = tables.config.private_v6 != [0; 16] && !self.chance(8);
        let mut from = private(self.below(4), outer_v6);
        if outer_v6 == inner_v6 && self.chance(6) {
            src = from;
        }
        let to = private(if self.chance(12) { self.below(4) } else { 0 }, outer_v6);
        let sender = tables.node.iter().filter(|(addr, _)| addr.is_ipv6() == outer_v6).choose(&mut self.0);
        if let Some((addr, node)) = sender
            && !self.chance(4)
        {
            // As an honest node would send it.
            from = *addr;
            let carries = |value: &PrefixValue| {
                value.hop == node.hop
                    || (matches!(value.hop, HOP_REMOTE | HOP_ACTING) && node.flags & NODE_GATEWAY != 0)
            };
            src = self.within(tables, inner_v6, |_, value| carries(value)).unwrap_or(src);
            let hop = self.pick(&[HOP_LOCAL, HOP_LOCAL, HOP_REMOTE, HOP_ACTING]);
            dst = self.within(tables, inner_v6, |_, value| value.hop == hop).unwrap_or(dst);
        }
        let inner = self.packet(src, dst);
        let ipip = if inner_v6 { protocol::IPV6 } else { protocol::IPIP };
        let (kind, payload) = if self.chance(3) {
            // VXLAN's usual port, WireGuard's, or ours.
            let port = if self.chance(6) { self.pick(&[4789, WIREGUARD_PORT]) } else { VXLAN_PORT };
            if port == WIREGUARD_PORT {
                let found = self.within(tables, outer_v6, |_, value| value.flags & PREFIX_VIA_WIREGUARD != 0);
                from = found.unwrap_or(from);
            }
            (protocol::UDP, self.vxlan(port, &inner, inner_v6))
        } else {
            (ipip, inner)
        };
        let packet = self.ip(from, to, kind, &payload);
        ethernet(&packet, outer_v6)
    }

    /// A UDP datagram with VXLAN.
    fn vxlan(&mut self, port: u16, inner: &[u8], v6: bool) -> Vec<u8> {
        // A random source port, so that no flow occurs twice.
        let mut vxlan = self.0.random::<u16>().to_be_bytes().to_vec();
        vxlan.extend(port.to_be_bytes());
        vxlan.extend(u16::try_from(30 + inner.len()).unwrap().to_be_bytes());
        vxlan.extend([0, 0]);
        vxlan.extend(vxlan_header());
        if self.chance(12) {
            // Of another network, or unrelated traffic with this port.
            let at = self.pick(&[8, 12]);
            vxlan[at] ^= 1;
        }
        vxlan.extend(ethernet(inner, v6));
        vxlan
    }

    /// Corrupts some frames.
    fn spoil(&mut self, frame: &mut Vec<u8>) {
        if self.chance(6) {
            let at = self.below(frame.len().min(120));
            frame[at] = self.0.random();
        }
        if self.chance(10) {
            let length = self.0.random_range(shortest(frame).min(frame.len())..=frame.len());
            frame.truncate(length);
        }
        if self.chance(12) {
            frame.extend([0; 6]);
        }
        if self.chance(40) && frame.len() > 14 {
            // VLAN tags that the device did not remove: one, or an outer one as well.
            frame.splice(12..12, [0x81, 0, 0, 7]);
            if self.chance(3) {
                frame.splice(12..12, [0x88, 0xa8, 0, 9]);
            }
        }
        if self.chance(60) {
            self.0.fill(&mut frame[..]);
        }
    }
}

/// The least that `BPF_PROG_TEST_RUN` accepts: two headers (since Linux 6.17).
fn shortest(frame: &[u8]) -> usize {
    if frame.get(12..14) == Some(&ETHERTYPE_IPV6.to_be_bytes()) { 54 } else { 34 }
}

pub fn ethernet(packet: &[u8], v6: bool) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend((if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }).to_be_bytes());
    frame.extend(packet);
    frame
}
