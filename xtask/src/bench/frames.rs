//! Wire format of the packets that the benchmark sends.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const TCP: usize = 20;
/// How much shorter the payload is when TCP replaces UDP in a packet of the same length.
pub const TCP_OVER_UDP: usize = TCP - UDP;
const PROTOCOL_IPIP: u8 = 4;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
/// Port and VNI of the mesh's VXLAN (`kilo_common::maps`).
pub const VXLAN_PORT: u16 = 51_821;
pub const VXLAN_VNI: u32 = 0x6b67;

/// Bytes in each segment of a GSO packet, and the number of segments: the most whose IPv4 length still fits
/// with every outer header.
const SEGMENT: usize = 1360;
pub const SEGMENTS: usize = 48;
/// Fields of `struct virtio_net_hdr`, which precedes a frame on a packet socket (`<linux/virtio_net.h>`).
const NEEDS_CHECKSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
/// Offset of the checksum in a TCP header.
const TCP_CHECKSUM: usize = 16;

/// First bytes of a WireGuard transport data message.
const TRANSPORT_DATA: [u8; 4] = [4, 0, 0, 0];

/// Encapsulation of packets between nodes of one location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wrap {
    /// No outer header.
    None,
    /// IP in IP.
    Ipip,
    /// The mesh's VXLAN.
    Vxlan,
}

impl Wrap {
    /// Value of `--tunnel`.
    pub fn flag(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Ipip => "ipip",
            Self::Vxlan => "vxlan",
        }
    }
}

/// What a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// A UDP datagram with this many bytes.
    Udp(usize),
    /// A WireGuard datagram with this many bytes of ciphertext.
    Encrypted(usize),
    /// A segment of an established TCP connection with this many bytes.
    Tcp(usize),
    /// Many segments in one packet, as TCP hands them to a device (GSO) and as devices merge what they
    /// receive (GRO).
    Gso,
}

impl Load {
    /// Bytes of payload.
    pub const fn payload(self) -> usize {
        match self {
            Self::Udp(payload) | Self::Encrypted(payload) | Self::Tcp(payload) => payload,
            Self::Gso => SEGMENTS * SEGMENT,
        }
    }
}

/// One UDP or TCP packet and its encapsulation.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Address and port of the sender.
    pub from: (Ipv4Addr, u16),
    /// Address and port of the receiver.
    pub to: (Ipv4Addr, u16),
    /// What it carries.
    pub load: Load,
    /// Its outer header.
    pub wrap: Wrap,
    /// Outer source and destination, both nodes.
    pub nodes: (Ipv4Addr, Ipv4Addr),
}

impl Flow {
    /// The Ethernet frame, addressed to `to`. A GSO packet follows its `virtio_net_hdr` and has no outer
    /// header, which a device of the generator adds.
    pub fn frame(&self, to: [u8; 6]) -> Vec<u8> {
        let payload = vec![0x55; self.load.payload()];
        let inner = match self.load {
            Load::Udp(_) => udp_packet(self.from, self.to, &payload),
            // WireGuard's UDP datagrams have a checksum.
            Load::Encrypted(_) => sealed_udp_packet(
                self.from,
                self.to,
                &[&TRANSPORT_DATA[..], &payload[TRANSPORT_DATA.len()..]].concat(),
            ),
            Load::Tcp(_) => tcp_packet(self.from, self.to, &payload, false),
            Load::Gso => return self.gso(to, &payload),
        };
        let packet = match self.wrap {
            Wrap::None => inner,
            Wrap::Ipip => ipv4(self.nodes.0, self.nodes.1, PROTOCOL_IPIP, &inner),
            Wrap::Vxlan => {
                let mut payload = vec![8, 0, 0, 0];
                payload.extend((VXLAN_VNI << 8).to_be_bytes());
                payload.extend(ethernet([2, 0, 0, 0, 0, 2]));
                payload.extend(inner);
                udp_packet((self.nodes.0, 50_000), (self.nodes.1, VXLAN_PORT), &payload)
            }
        };
        let mut frame = ethernet(to).to_vec();
        frame.extend(packet);
        frame
    }

    fn gso(&self, to: [u8; 6], payload: &[u8]) -> Vec<u8> {
        let link = match self.wrap {
            Wrap::None => ethernet(to).to_vec(),
            // IPIP devices take packets without a link-layer header.
            Wrap::Ipip => Vec::new(),
            Wrap::Vxlan => ethernet([2, 0, 0, 0, 0, 2]).to_vec(),
        };
        let transport = link.len() + IPV4;
        let mut frame = vec![NEEDS_CHECKSUM, GSO_TCPV4];
        for field in [transport + TCP, SEGMENT, transport, TCP_CHECKSUM] {
            frame.extend((field as u16).to_le_bytes());
        }
        frame.extend(link);
        frame.extend(tcp_packet(self.from, self.to, payload, true));
        frame
    }
}

fn ethernet(to: [u8; 6]) -> [u8; ETHERNET] {
    let mut header = [0; ETHERNET];
    header[..6].copy_from_slice(&to);
    header[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    header[12..].copy_from_slice(&ETHERTYPE_IPV4);
    header
}

/// A UDP packet without checksum, which IPv4 allows (RFC 768).
fn udp_packet(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(UDP + payload.len());
    datagram.extend(from.1.to_be_bytes());
    datagram.extend(to.1.to_be_bytes());
    datagram.extend(((UDP + payload.len()) as u16).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    ipv4(from.0, to.0, PROTOCOL_UDP, &datagram)
}

/// Like [`udp_packet`], with a checksum.
fn sealed_udp_packet(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let mut packet = udp_packet(from, to, payload);
    let (header, datagram) = packet.split_at_mut(IPV4);
    let length = (datagram.len() as u16).to_be_bytes();
    let sum = checksum(&[&header[12..], &[0, PROTOCOL_UDP], &length, datagram].concat());
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// A frame to `mac` with a WireGuard datagram over IPv6 that carries `payload` bytes of ciphertext.
pub fn encrypted_v6(from: (Ipv6Addr, u16), to: (Ipv6Addr, u16), payload: usize, mac: [u8; 6]) -> Vec<u8> {
    let length = ((UDP + payload) as u16).to_be_bytes();
    let mut datagram = [from.1.to_be_bytes(), to.1.to_be_bytes(), length, [0, 0]].concat();
    datagram.extend(TRANSPORT_DATA);
    datagram.resize(UDP + payload, 0x55);
    let addresses = [from.0.octets(), to.0.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, PROTOCOL_UDP], &length, &datagram].concat());
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    let mut frame = ethernet(mac).to_vec();
    frame[ETHERNET - 2..].copy_from_slice(&[0x86, 0xdd]);
    frame.extend([0x60, 0, 0, 0, length[0], length[1], PROTOCOL_UDP, 64]);
    frame.extend(addresses);
    frame.extend(datagram);
    frame
}

/// A data segment with only ACK and PSH set (RFC 9293). With `partial`, its checksum covers addresses and
/// length alone, as devices with checksum offload expect.
fn tcp_packet(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8], partial: bool) -> Vec<u8> {
    let mut segment = Vec::with_capacity(TCP + payload.len());
    segment.extend(from.1.to_be_bytes());
    segment.extend(to.1.to_be_bytes());
    segment.extend([0, 0, 16, 0, 0, 0, 32, 0, ((TCP / 4) << 4) as u8, 0x18, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(payload);
    let mut summed = Vec::from(from.0.octets());
    summed.extend(to.0.octets());
    summed.extend([0, PROTOCOL_TCP]);
    summed.extend((segment.len() as u16).to_be_bytes());
    let sum = if partial {
        !checksum(&summed)
    } else {
        summed.extend(&segment);
        checksum(&summed)
    };
    segment[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
    ipv4(from.0, to.0, PROTOCOL_TCP, &segment)
}

fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0];
    packet.extend(((IPV4 + payload.len()) as u16).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(payload);
    packet
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn flow(wrap: Wrap) -> Flow {
        Flow {
            from: ("10.64.1.2".parse().unwrap(), 4000),
            to: ("10.128.0.2".parse().unwrap(), 5000),
            load: Load::Udp(64),
            wrap,
            nodes: ("10.1.0.12".parse().unwrap(), "10.1.0.11".parse().unwrap()),
        }
    }

    #[test]
    fn a_wrapped_frame_holds_the_bare_packet_behind_its_outer_headers() {
        let bare = flow(Wrap::None).frame([1; 6]);
        assert_eq!(bare.len(), ETHERNET + IPV4 + UDP + 64);
        for (wrap, overhead) in [(Wrap::Ipip, 20), (Wrap::Vxlan, 50)] {
            let frame = flow(wrap).frame([1; 6]);
            assert_eq!(frame.len(), bare.len() + overhead);
            assert_eq!(frame[ETHERNET + overhead..], bare[ETHERNET..]);
        }
    }

    #[test]
    fn a_segment_is_as_long_as_the_datagram_it_takes_the_place_of_and_its_checksum_holds() {
        let udp = flow(Wrap::None).frame([1; 6]);
        let tcp = Flow { load: Load::Tcp(64 - TCP_OVER_UDP), ..flow(Wrap::None) }.frame([1; 6]);
        assert_eq!(tcp.len(), udp.len());
        let (addresses, segment) = (&tcp[ETHERNET + 12..ETHERNET + IPV4], &tcp[ETHERNET + IPV4..]);
        let pseudo = [addresses, &[0, PROTOCOL_TCP, 0, segment.len() as u8], segment].concat();
        assert_eq!(checksum(&pseudo), 0);
    }

    #[test]
    fn a_gso_packet_fits_into_one_packet_with_every_outer_header_and_says_where_its_checksum_belongs() {
        for (wrap, link, overhead) in [(Wrap::None, 14, 0), (Wrap::Ipip, 0, 20), (Wrap::Vxlan, 14, 50)] {
            let frame = Flow { load: Load::Gso, ..flow(wrap) }.frame([1; 6]);
            let field = |at: usize| usize::from(u16::from_le_bytes([frame[at], frame[at + 1]]));
            let (packet, start) = (&frame[10 + link..], field(6));
            assert_eq!((start, field(8)), (link + IPV4, TCP_CHECKSUM));
            assert_eq!(usize::from(u16::from_be_bytes([packet[2], packet[3]])), packet.len());
            assert!(u16::try_from(packet.len() + overhead).is_ok());
            // A device completes the checksum by summing the segment from `start` on.
            let mut segment = frame[10 + start..].to_vec();
            let sum = checksum(&segment);
            segment[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
            let addresses = &packet[12..IPV4];
            let length = (segment.len() as u16).to_be_bytes();
            let pseudo = [addresses, &[0, PROTOCOL_TCP], &length, &segment].concat();
            assert_eq!(checksum(&pseudo), 0);
        }
    }

    #[test]
    fn a_datagram_over_ipv6_has_its_checksum() {
        let (from, to) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
        let frame = encrypted_v6((from, 1), (to, 2), 64, [1; 6]);
        assert_eq!(frame.len(), ETHERNET + 40 + UDP + 64);
        let (addresses, datagram) = frame[ETHERNET + 8..].split_at(32);
        let length = (datagram.len() as u16).to_be_bytes();
        assert_eq!(checksum(&[addresses, &[0, PROTOCOL_UDP], &length, datagram].concat()), 0);
    }

    #[test]
    fn a_header_with_its_checksum_sums_to_zero() {
        let frame = flow(Wrap::Ipip).frame([1; 6]);
        assert_eq!(checksum(&frame[ETHERNET..ETHERNET + IPV4]), 0);
    }
}
