//! Packets of both families, and the programs that translate them.

mod addresses;
mod errors;
mod outside;

use errors::error;

use std::net::{IpAddr, Ipv6Addr};

use kilo_common::{
    checksum,
    maps::CONFIG_MASQUERADE,
    nat::{
        flow::layout,
        transport::{self, Transport},
    },
    packet::{Ipv4, protocol},
};
use kilo_core::plan::Tables;
use kilo_host::dataplane::Dataplane;

use crate::bpf::{
    self, OUTSIDE, OWN_POD, PUBLIC, PUBLIC_V6, leader_tables,
    packet::{Ran, run},
};

/// The addresses of one family.
pub struct Side {
    pub pod: IpAddr,
    pub public: IpAddr,
    pub outside: IpAddr,
    pub icmp: u8,
    pub echo: u8,
    pub echo_reply: u8,
    pub unreachable: u8,
}

pub fn sides() -> [Side; 2] {
    let v6 = |text: &str| IpAddr::V6(text.parse::<Ipv6Addr>().unwrap());
    [
        Side {
            pod: OWN_POD.into(),
            public: PUBLIC.into(),
            outside: OUTSIDE.into(),
            icmp: protocol::ICMP,
            echo: 8,
            echo_reply: 0,
            unreachable: 3,
        },
        Side {
            pod: v6("fd42:1::2"),
            public: PUBLIC_V6.into(),
            outside: v6("2001:db8:9::53"),
            icmp: protocol::ICMPV6,
            echo: 128,
            echo_reply: 129,
            unreachable: 1,
        },
    ]
}

pub fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

/// Checksum over pseudo header and transport segment; 0xffff when it is valid.
pub fn sum(src: IpAddr, dst: IpAddr, kind: u8, segment: &[u8]) -> u16 {
    let pseudo = if kind == protocol::ICMP {
        Vec::new()
    } else {
        let length = u32::try_from(segment.len()).unwrap();
        [octets(src), octets(dst), length.to_be_bytes().to_vec(), vec![0, 0, 0, kind]].concat()
    };
    let words = |bytes: &[u8]| -> u32 {
        bytes
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| u32::from(low)))
            .sum()
    };
    checksum::fold(words(&pseudo) + words(segment))
}

/// A packet with an IP header before `behind`.
pub fn ip(src: IpAddr, dst: IpAddr, kind: u8, behind: &[u8]) -> Vec<u8> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => bpf::packet::ipv4(src.octets(), dst.octets(), kind, 64, behind),
        _ => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(u16::try_from(behind.len()).unwrap().to_be_bytes());
            header.extend([kind, 64]);
            header.extend(octets(src));
            header.extend(octets(dst));
            header.extend(behind);
            header
        }
    }
}

/// A transport segment with its checksum; a sum of zero is sent as all ones, because zero means none (RFC
/// 768).
pub fn segment(src: IpAddr, dst: IpAddr, kind: u8, mut bytes: Vec<u8>) -> Vec<u8> {
    let Some(at) = layout(kind).unwrap().checksum else { return bytes };
    bytes[at..at + 2].fill(0);
    let sum = !sum(src, dst, kind, &bytes);
    let sum = if kind == protocol::UDP && sum == 0 { 0xffff } else { sum };
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    bytes
}

pub fn udp(src: IpAddr, dst: IpAddr, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + data.len()).unwrap();
    let header = [ports.0, ports.1, length, 0].map(u16::to_be_bytes).concat();
    ip(src, dst, protocol::UDP, &segment(src, dst, protocol::UDP, [&header[..], data].concat()))
}

pub fn tcp(src: IpAddr, dst: IpAddr, ports: (u16, u16), flags: u8) -> Vec<u8> {
    let mut bytes = [ports.0, ports.1].map(u16::to_be_bytes).concat();
    bytes.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    ip(src, dst, protocol::TCP, &segment(src, dst, protocol::TCP, bytes))
}

pub fn echo(src: IpAddr, dst: IpAddr, side: &Side, kind: u8, id: u16) -> Vec<u8> {
    let bytes = [&[kind, 0, 0, 0][..], &id.to_be_bytes(), &[0, 1, 7, 8, 9, 10]].concat();
    ip(src, dst, side.icmp, &segment(src, dst, side.icmp, bytes))
}

pub fn frame(ip: &[u8]) -> Vec<u8> {
    let ethertype = if ip[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] };
    [&[0; 12][..], &ethertype, ip].concat()
}

/// Fields of a packet.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub ports: (u16, u16),
}

pub fn transport(ip: &[u8]) -> Transport {
    if ip[0] >> 4 == 6 {
        transport::ipv6(ip[6], |at| ip.get(at..at + 8)?.try_into().ok()).unwrap()
    } else {
        transport::ipv4(&Ipv4::parse(ip.first_chunk().unwrap(), usize::MAX).unwrap(), [ip[4], ip[5]])
    }
}

pub fn addresses(ip: &[u8]) -> (IpAddr, IpAddr) {
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap());
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
    if ip[0] >> 4 == 6 { (v6(8), v6(24)) } else { (v4(12), v4(16)) }
}

/// Reads a packet and asserts its checksums.
pub fn read(frame: &[u8]) -> Seen {
    let ip = &frame[14..];
    let (src, dst) = addresses(ip);
    let found = transport(ip);
    let segment = &ip[found.offset..];
    if ip[0] >> 4 == 4 {
        assert_eq!(checksum::header(ip.first_chunk().unwrap()), 0, "the header's checksum holds");
    }
    assert_eq!(sum(src, dst, found.protocol, segment), 0xffff, "the transport's checksum holds");
    Seen { src, dst, ports: ports(ip) }
}

pub fn ports(ip: &[u8]) -> (u16, u16) {
    let found = transport(ip);
    let layout = layout(found.protocol).unwrap();
    let at = |at: usize| u16::from_be_bytes([ip[found.offset + at], ip[found.offset + at + 1]]);
    (at(layout.src_port), at(layout.dst_port))
}

/// The packet as two fragments, the first with `cut` bytes of payload.
pub fn fragments(whole: &[u8], id: u16, cut: usize) -> [Vec<u8>; 2] {
    let found = transport(whole);
    let (src, dst) = addresses(whole);
    let payload = &whole[found.offset..];
    let offset = u16::try_from(cut).unwrap();
    if src.is_ipv4() {
        [(&payload[..cut], 0x2000), (&payload[cut..], offset / 8)].map(|(part, field)| {
            let mut packet = ip(src, dst, found.protocol, part);
            packet[4..6].copy_from_slice(&id.to_be_bytes());
            packet[6..8].copy_from_slice(&field.to_be_bytes());
            packet[10..12].fill(0);
            let sum = checksum::header(packet.first_chunk().unwrap());
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            packet
        })
    } else {
        [(&payload[..cut], 1), (&payload[cut..], offset)].map(|(part, field)| {
            let mut behind = vec![found.protocol, 0];
            behind.extend(field.to_be_bytes());
            behind.extend([0, 0]);
            behind.extend(id.to_be_bytes());
            behind.extend(part);
            ip(src, dst, protocol::FRAGMENT, &behind)
        })
    }
}

pub struct World {
    _fs: bpf::BpfFs,
    pub dataplane: Dataplane,
    pub tables: Tables,
}

impl World {
    pub fn new() -> Option<Self> {
        let fs = bpf::bpffs()?;
        let tables = leader_tables();
        assert_ne!(tables.config.flags & CONFIG_MASQUERADE, 0);
        let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
        dataplane.write(&tables).unwrap();
        Some(Self { _fs: fs, dataplane, tables })
    }

    pub fn out(&mut self, ip: &[u8]) -> Ran {
        run(&mut self.dataplane, "uplink_egress", &frame(ip))
    }

    pub fn back(&mut self, ip: &[u8]) -> Ran {
        run(&mut self.dataplane, "lan_ingress", &frame(ip))
    }
}

/// The same address with another last byte.
pub fn neighbour(addr: IpAddr, last: u8) -> IpAddr {
    let mut octets = octets(addr);
    *octets.last_mut().unwrap() = last;
    match <[u8; 4]>::try_from(octets.as_slice()) {
        Ok(octets) => octets.into(),
        Err(_) => <[u8; 16]>::try_from(octets.as_slice()).unwrap().into(),
    }
}
