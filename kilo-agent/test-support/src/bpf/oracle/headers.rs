//! Headers of a packet, read in plain Rust.

use std::net::IpAddr;

use kilo_common::{
    drop_reasons::DropReason,
    encap::{UDP_LEN, VXLAN_INNER, VXLAN_LEN, segment_len, vxlan_header},
    maps::VXLAN_PORT,
    packet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_LEN, IPV6_LEN, Ipv4, Ipv6, protocol},
};
use kilo_core::plan::{model::Packet, sized_packet::SizedPacket};

use super::Input;

/// A header of either family.
#[derive(Clone, Copy, Debug)]
pub struct Ip {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub v6: bool,
    pub header_len: usize,
    pub protocol: u8,
    pub(super) ttl: u8,
    pub(super) tos: u8,
    pub fragment: bool,
}

impl Ip {
    pub(super) const fn shortest(v6: bool) -> usize {
        if v6 { IPV6_LEN } else { IPV4_LEN }
    }

    /// # Errors
    /// Why it cannot be read.
    pub fn read(frame: &[u8], offset: usize, v6: bool) -> Result<Self, DropReason> {
        let bytes = frame.get(offset..).unwrap_or_default();
        if v6 {
            let ip = Ipv6::parse(bytes.first_chunk().ok_or(DropReason::Truncated)?, bytes.len())?;
            Ok(Self {
                src: ip.src.into(),
                dst: ip.dst.into(),
                v6,
                header_len: IPV6_LEN,
                protocol: ip.next_header,
                ttl: ip.hop_limit,
                tos: ip.traffic_class,
                fragment: ip.next_header == protocol::FRAGMENT,
            })
        } else {
            let ip = Ipv4::parse(bytes.first_chunk().ok_or(DropReason::Truncated)?, bytes.len())?;
            Ok(Self {
                src: ip.src.into(),
                dst: ip.dst.into(),
                v6,
                header_len: ip.header_len,
                protocol: ip.protocol,
                ttl: ip.ttl,
                tos: ip.tos,
                fragment: ip.is_fragment(),
            })
        }
    }

    pub(super) fn sized(&self, input: &Input, offset: usize) -> SizedPacket {
        let packet = Packet { src: self.src, dst: self.dst };
        let mut length = u32::try_from(input.frame.len() - offset).unwrap();
        if input.gso != 0 {
            let transport = offset + self.header_len;
            let headers = match self.protocol {
                protocol::TCP => {
                    input.frame.get(transport + 12).map_or(60, |byte| usize::from(byte >> 4) * 4)
                }
                _ => 8,
            };
            let headers = u32::try_from(self.header_len + headers).unwrap();
            length = length.min(segment_len(length, input.gso, headers));
        }
        SizedPacket { packet, ttl: self.ttl, length }
    }
}

/// Address family by the frame's EtherType, true for IPv6; `None` for everything else.
pub(super) fn family(frame: &[u8]) -> Option<bool> {
    match u16::from_be_bytes([frame[12], frame[13]]) {
        ETHERTYPE_IPV4 => Some(false),
        ETHERTYPE_IPV6 => Some(true),
        _ => None,
    }
}

/// Whether this is a datagram to the VXLAN device, or its first fragment, with or without options. Traffic
/// that only happens to have the port is not.
pub(super) fn to_vxlan(input: &Input, link: usize, ip: &Ip) -> bool {
    let Some(udp) = udp_header(&input.frame, link, ip) else { return false };
    let ours = match udp.get(8..16) {
        Some(first) => first.starts_with(&[8, 0, 0, 0]) || first[0] == 0 && first.ends_with(b"kgs1"),
        None => ip.fragment,
    };
    udp.get(2..4) == Some(&VXLAN_PORT.to_be_bytes()) && (ours || input.gso != 0)
}

/// The datagram, or its first fragment, from its UDP header on.
pub(super) fn udp_header<'a>(frame: &'a [u8], link: usize, ip: &Ip) -> Option<&'a [u8]> {
    let behind = &frame[link + ip.header_len.min(frame.len() - link)..];
    let udp = match (ip.protocol, ip.v6) {
        (protocol::UDP, true) => Some(0),
        (protocol::UDP, false) => {
            let fragment = u16::from_be_bytes([frame[link + 6], frame[link + 7]]);
            (fragment & 0x1fff == 0).then_some(0)
        }
        (protocol::FRAGMENT, true) => behind
            .first_chunk::<4>()
            .and_then(|[next, _, high, low]| (*next == protocol::UDP && *high == 0 && *low < 8).then_some(8)),
        _ => None,
    };
    behind.get(udp?..)
}

pub(super) fn destination_port(frame: &[u8], link: usize, outer: &Ip) -> Option<u16> {
    let bytes = frame.get(link + outer.header_len..)?.get(2..4)?;
    (outer.header_len == Ip::shortest(outer.v6)).then(|| u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// Address family of the packet inside one of our VXLAN packets.
pub(super) fn vxlan(frame: &[u8], link: usize, outer: &Ip) -> Option<bool> {
    if outer.fragment || outer.header_len != Ip::shortest(outer.v6) {
        return None;
    }
    let bytes = frame.get(link + outer.header_len..)?.get(..VXLAN_INNER)?;
    let ours =
        bytes[2..4] == VXLAN_PORT.to_be_bytes() && bytes[UDP_LEN..UDP_LEN + VXLAN_LEN] == vxlan_header();
    ours.then(|| family(&bytes[UDP_LEN + VXLAN_LEN..]))?
}

/// Destination of a packet whose header is inconsistent.
pub(super) fn destination(frame: &[u8], link: usize, v6: bool) -> Option<IpAddr> {
    let header = &frame[link..];
    Some(if v6 {
        <[u8; 16]>::try_from(header.get(24..40)?).ok()?.into()
    } else {
        <[u8; 4]>::try_from(header.get(16..20)?).ok()?.into()
    })
}
