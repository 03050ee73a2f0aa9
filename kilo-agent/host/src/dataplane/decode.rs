//! The headers of a captured packet, outermost first.

use std::{fmt, net::IpAddr};

use kilo_common::packet::{
    ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_LEN, IPV6_LEN, Ipv4, Ipv6, protocol,
};
use serde::Serialize;

/// Most headers read from one packet; packets of ours have fewer.
const DEEPEST: usize = 4;

/// One IP header, with the ports or the ICMP type behind it if there are any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Protocol of the payload: a name, or its number.
    pub protocol: String,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Bytes from the start of this header to the end of the packet, as the header claims.
    pub length: usize,
    /// Part of a fragmented packet.
    pub fragment: bool,
    /// Source port of TCP, UDP and SCTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub src_port: Option<u16>,
    /// Destination port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dst_port: Option<u16>,
    /// Type and code of ICMP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icmp: Option<(u8, u8)>,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |f: &mut fmt::Formatter<'_>, ip: IpAddr, port: Option<u16>| match (ip, port) {
            (_, None) => write!(f, "{ip}"),
            (IpAddr::V4(_), Some(port)) => write!(f, "{ip}:{port}"),
            (IpAddr::V6(_), Some(port)) => write!(f, "[{ip}]:{port}"),
        };
        end(f, self.src, self.src_port)?;
        f.write_str(" > ")?;
        end(f, self.dst, self.dst_port)?;
        write!(f, " {}", self.protocol)?;
        if let Some((kind, code)) = self.icmp {
            write!(f, " type {kind} code {code}")?;
        }
        if self.fragment {
            f.write_str(" fragment")?;
        }
        write!(f, " ttl {}", self.ttl)
    }
}

/// Reads the headers of a packet of `length` bytes from its first `bytes`. A truncated or malformed header
/// ends the list.
pub fn headers(bytes: &[u8], length: usize, ethernet: bool) -> Vec<Header> {
    let (mut at, mut next) = if ethernet {
        let ethertype = bytes.get(12..14).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        match ethertype {
            Some(ETHERTYPE_IPV4) => (ETHERNET_LEN, protocol::IPIP),
            Some(ETHERTYPE_IPV6) => (ETHERNET_LEN, protocol::IPV6),
            _ => return Vec::new(),
        }
    } else {
        (0, if bytes.first().is_some_and(|byte| byte >> 4 == 6) { protocol::IPV6 } else { protocol::IPIP })
    };
    let mut headers = Vec::new();
    while headers.len() < DEEPEST
        && let Some((header, size, payload)) =
            header(bytes.get(at..).unwrap_or_default(), length.saturating_sub(at), next)
    {
        headers.push(header);
        at += size;
        next = payload;
    }
    headers
}

/// Parses one header; returns it, its size, and the protocol behind it.
fn header(bytes: &[u8], available: usize, version: u8) -> Option<(Header, usize, u8)> {
    let (mut header, size, payload) = match version {
        protocol::IPIP => {
            let ip = Ipv4::parse(bytes.first_chunk::<IPV4_LEN>()?, available).ok()?;
            let header = Header {
                src: ip.src.into(),
                dst: ip.dst.into(),
                protocol: String::new(),
                ttl: ip.ttl,
                length: ip.total_len as usize,
                fragment: ip.is_fragment(),
                src_port: None,
                dst_port: None,
                icmp: None,
            };
            (header, ip.header_len, ip.protocol)
        }
        protocol::IPV6 => {
            let ip = Ipv6::parse(bytes.first_chunk::<IPV6_LEN>()?, available).ok()?;
            let header = Header {
                src: ip.src.into(),
                dst: ip.dst.into(),
                protocol: String::new(),
                ttl: ip.hop_limit,
                length: IPV6_LEN + usize::from(ip.payload_len),
                fragment: ip.next_header == protocol::FRAGMENT,
                src_port: None,
                dst_port: None,
                icmp: None,
            };
            (header, IPV6_LEN, ip.next_header)
        }
        _ => return None,
    };
    header.protocol = protocol_name(payload);
    let behind = bytes.get(size..).unwrap_or_default();
    match payload {
        _ if header.fragment => {}
        protocol::TCP | protocol::UDP | SCTP => {
            header.src_port = behind.first_chunk().copied().map(u16::from_be_bytes);
            header.dst_port = behind.get(2..4).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        }
        protocol::ICMP | protocol::ICMPV6 => {
            header.icmp = behind.first_chunk().map(|[kind, code]| (*kind, *code));
        }
        _ => {}
    }
    Some((header, size, payload))
}

const SCTP: u8 = 132;

/// Name of an IP protocol as `tcpdump` prints it, else its number.
pub fn protocol_name(number: u8) -> String {
    match number {
        protocol::ICMP => "icmp".to_owned(),
        protocol::IPIP => "ipip".to_owned(),
        protocol::TCP => "tcp".to_owned(),
        protocol::UDP => "udp".to_owned(),
        protocol::IPV6 => "ip6".to_owned(),
        protocol::ICMPV6 => "icmp6".to_owned(),
        SCTP => "sctp".to_owned(),
        other => format!("proto {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(src: [u8; 4], dst: [u8; 4], protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes =
            vec![0x45, 0, 0, u8::try_from(20 + payload.len()).unwrap(), 0, 0, 0, 0, 64, protocol, 0, 0];
        bytes.extend(src);
        bytes.extend(dst);
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn a_steered_packet_shows_both_headers_and_the_ports() {
        let inner = ipv4([10, 42, 1, 2], [10, 42, 2, 2], 17, &[0, 53, 1, 0, 0, 8, 0, 0]);
        let mut frame = vec![0; 12];
        frame.extend([8, 0]);
        frame.extend(ipv4([10, 1, 0, 1], [10, 1, 0, 2], 4, &inner));
        let found = headers(&frame, frame.len(), true);
        let text: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["10.1.0.1 > 10.1.0.2 ipip ttl 64", "10.42.1.2:53 > 10.42.2.2:256 udp ttl 64"]);
    }

    #[test]
    fn an_ipv6_packet_shows_its_type_of_icmp() {
        let mut bytes = vec![0x60, 0, 0, 0, 0, 8, 58, 3];
        bytes.extend([0xfd; 32]);
        bytes.extend([128, 0, 0, 0, 0, 0, 0, 0]);
        let found = headers(&bytes, bytes.len(), false);
        assert_eq!((found.len(), found[0].icmp, found[0].ttl), (1, Some((128, 0)), 3));
    }

    #[test]
    fn any_prefix_of_any_bytes_is_read_without_a_panic() {
        let mut frame = vec![0; 12];
        frame.extend([8, 0]);
        frame.extend(ipv4([1, 1, 1, 1], [2, 2, 2, 2], 4, &ipv4([3, 3, 3, 3], [4, 4, 4, 4], 6, &[0; 20])));
        for length in 0..frame.len() {
            headers(&frame[..length], frame.len(), true);
            headers(&frame[..length], length, false);
        }
    }
}
