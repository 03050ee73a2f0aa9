//! Where the transport header of a packet is, behind options and extension
//! headers, and which part of a fragmented packet it is.

use crate::packet::{IPV6_LEN, Ipv4, protocol};

/// Extension headers looked through; packets with more have no known transport.
pub const EXTENSION_HEADERS: usize = 4;

/// Which part of a datagram a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The whole datagram.
    Whole,
    /// The first fragment, which has the transport header.
    First,
    /// Another fragment.
    Later,
}

/// Where the transport header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// IP protocol number; for a later IPv6 fragment, what its fragment header says.
    pub protocol: u8,
    /// Bytes from the start of the IP header.
    pub offset: usize,
    /// Which part of its datagram the packet is.
    pub part: Part,
    /// Identification of a fragmented datagram, network byte order; IPv4's in
    /// the last two bytes.
    pub id: [u8; 4],
}

/// Finds the transport header of an IPv4 packet; `id` are bytes 4 and 5 of its header.
#[inline(always)]
pub const fn ipv4(ip: &Ipv4, id: [u8; 2]) -> Transport {
    let part = match (ip.is_fragment(), ip.fragment & 0x1fff) {
        (false, _) => Part::Whole,
        (true, 0) => Part::First,
        _ => Part::Later,
    };
    Transport { protocol: ip.protocol, offset: ip.header_len, part, id: [0, 0, id[0], id[1]] }
}

/// Finds the transport header of an IPv6 packet (RFC 8200, section 4); `load` reads 8 bytes at an offset from
/// the start of its header. `None` when the transport header is not there, or is behind something that hides
/// the final destination.
#[inline(always)]
pub fn ipv6(next_header: u8, mut load: impl FnMut(usize) -> Option<[u8; 8]>) -> Option<Transport> {
    let mut found = Transport { protocol: next_header, offset: IPV6_LEN, part: Part::Whole, id: [0; 4] };
    let mut walked = 0;
    while walked < EXTENSION_HEADERS {
        match found.protocol {
            protocol::HOP_BY_HOP | protocol::DESTINATION_OPTIONS | protocol::ROUTING | protocol::FRAGMENT => {
            }
            _ => return Some(found),
        }
        let header = load(found.offset)?;
        if found.protocol == protocol::FRAGMENT {
            let offset_and_more = u16::from_be_bytes([header[2], header[3]]) & 0xfff9;
            let first = offset_and_more & 0xfff8 == 0;
            found.id = [header[4], header[5], header[6], header[7]];
            // An atomic fragment (RFC 6946) is a whole packet.
            if offset_and_more != 0 {
                found.part = if first { Part::First } else { Part::Later };
            }
            found.protocol = header[0];
            found.offset += 8;
            if !first {
                return Some(found);
            }
        } else if found.protocol == protocol::ROUTING && header[3] != 0 {
            // With segments left the destination is not the one checksums are over.
            return None;
        } else {
            found.protocol = header[0];
            found.offset += (header[1] as usize + 1) * 8;
        }
        walked += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn find(next_header: u8, behind: &[u8]) -> Option<Transport> {
        ipv6(next_header, |at| Some(behind.get(at - IPV6_LEN..at - IPV6_LEN + 8)?.try_into().unwrap()))
    }

    #[test]
    fn extension_headers_are_walked_to_the_transport() {
        let mut behind = vec![0; 40];
        (behind[0], behind[1]) = (protocol::DESTINATION_OPTIONS, 1);
        (behind[16], behind[17]) = (protocol::ROUTING, 0);
        behind[24] = protocol::UDP;
        let expected = Transport { protocol: protocol::UDP, offset: 40 + 32, part: Part::Whole, id: [0; 4] };
        assert_eq!(find(protocol::HOP_BY_HOP, &behind), Some(expected));
        behind[24 + 3] = 1;
        assert_eq!(find(protocol::HOP_BY_HOP, &behind), None, "segments left: the destination is not final");
        assert_eq!(find(protocol::HOP_BY_HOP, &behind[..20]), None, "cut off");
    }

    #[test]
    fn a_chain_without_end_is_given_up() {
        assert_eq!(find(protocol::HOP_BY_HOP, &[0; 80]), None);
    }

    #[test]
    fn fragments_are_distinguished_from_whole_packets() {
        for (bits, part) in [(0u16, Part::Whole), (1, Part::First), (8, Part::Later), (9, Part::Later)] {
            let mut behind = [protocol::UDP, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0];
            behind[2..4].copy_from_slice(&bits.to_be_bytes());
            let found = find(protocol::FRAGMENT, &behind).unwrap();
            let expected = Transport { protocol: protocol::UDP, offset: 48, part, id: [1, 2, 3, 4] };
            assert_eq!(found, expected);
        }
        let mut bytes = [0u8; 20];
        (bytes[0], bytes[3], bytes[4], bytes[5], bytes[9]) = (0x45, 20, 7, 8, protocol::UDP);
        for (bits, part) in
            [(0x4000u16, Part::Whole), (0x2000, Part::First), (0x2001, Part::Later), (1, Part::Later)]
        {
            bytes[6..8].copy_from_slice(&bits.to_be_bytes());
            let found = ipv4(&Ipv4::parse(&bytes, 20).unwrap(), [7, 8]);
            assert_eq!((found.part, found.id), (part, [0, 0, 7, 8]), "{bits:#x}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_without_a_panic(next in any::<u8>(), behind in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = find(next, &behind);
        }
    }
}
