//! Signals and relay messages as packets, with their IP and UDP headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kilo_common::packet::protocol::UDP;

const UDP_LEN: usize = 8;
/// Usual initial TTL or hop limit of a host; each steering hop decrements it.
const HOPS: u8 = 64;
/// Network control (RFC 4594), so that queued pod packets do not delay signals.
const CLASS: u8 = 0xc0;

/// One's complement sum of RFC 1071.
fn sum(mut from: u32, bytes: &[u8]) -> u32 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    for pair in pairs {
        from += u32::from(u16::from_be_bytes(*pair));
    }
    if let [last] = rest {
        from += u32::from(*last) << 8;
    }
    from
}

fn fold(mut sum: u32) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A UDP packet from its IP header on; `None` for addresses of different families, or an oversized payload.
pub fn udp(from: (IpAddr, u16), to: (IpAddr, u16), payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(UDP_LEN + payload.len()).ok()?;
    let mut packet = Vec::with_capacity(40 + usize::from(length));
    let addresses = match (from.0, to.0) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            header_v4(&mut packet, from, to, length)?;
            12..20
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            header_v6(&mut packet, from, to, length);
            8..40
        }
        _ => return None,
    };
    let header = packet.len();
    for word in [from.1, to.1, length, 0] {
        packet.extend(word.to_be_bytes());
    }
    packet.extend(payload);
    let pseudo = sum(u32::from(UDP) + u32::from(length), &packet[addresses]);
    // A checksum of zero would mean that there is none.
    let checksum = match fold(sum(pseudo, &packet[header..])) {
        0 => u16::MAX,
        checksum => checksum,
    };
    packet[header + 6..header + 8].copy_from_slice(&checksum.to_be_bytes());
    Some(packet)
}

fn header_v4(packet: &mut Vec<u8>, from: Ipv4Addr, to: Ipv4Addr, length: u16) -> Option<()> {
    let total = length.checked_add(20)?;
    packet.extend([0x45, CLASS]);
    packet.extend(total.to_be_bytes());
    // Identification 0 and "don't fragment".
    packet.extend([0, 0, 0x40, 0, HOPS, UDP, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    let checksum = fold(sum(0, packet));
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

fn header_v6(packet: &mut Vec<u8>, from: Ipv6Addr, to: Ipv6Addr, length: u16) {
    packet.extend([0x60 | CLASS >> 4, CLASS << 4, 0, 0]);
    packet.extend(length.to_be_bytes());
    packet.extend([UDP, HOPS]);
    packet.extend(from.octets());
    packet.extend(to.octets());
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn checksums_hold_and_lengths_fit() {
        for (from, to, header) in [("10.0.0.1", "10.4.0.1", 20), ("fd00::1", "fd00::2", 40)] {
            for payload in [&b"kgs1"[..], b"odd"] {
                let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
                let packet = udp((from, 50_000), (to, 51_821), payload).unwrap();
                assert_eq!(packet.len(), header + 8 + payload.len());
                let addresses = if header == 20 { &packet[12..20] } else { &packet[8..40] };
                let udp_length = (8 + payload.len()) as u32;
                let pseudo = sum(u32::from(UDP) + udp_length, addresses);
                assert_eq!(fold(sum(pseudo, &packet[header..])), 0, "UDP");
                if header == 20 {
                    assert_eq!(fold(sum(0, &packet[..20])), 0, "IPv4");
                    assert_eq!(packet[1], CLASS);
                } else {
                    assert_eq!((packet[0], packet[1]), (0x6c, 0));
                }
            }
        }
        let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        assert_eq!(udp((v4, 1), (v6, 1), b""), None);
        assert_eq!(udp((v4, 1), (v4, 1), &vec![0; 65_500]).map(|packet| packet.len()), Some(65_528));
        assert_eq!(udp((v4, 1), (v4, 1), &vec![0; 65_510]), None);
    }
}
