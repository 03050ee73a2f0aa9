//! Whether a frame on a wire of the lab shows what the mesh should have hidden:
//! by its addresses, and by the marker that probes carry.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::{network::PRINTER, probe::MARKER};

/// What is seen in clear that should not be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leak {
    what: What,
    source: IpAddr,
    target: IpAddr,
    protocol: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Address,
    Probe,
    Tunnelled,
}

impl Leak {
    /// Leaves as any packet to the outside does, for an address nobody in the mesh knows.
    pub fn is_masqueraded_to(&self, is_unknown: impl FnOnce(IpAddr) -> bool) -> bool {
        self.what != What::Tunnelled && !is_of_the_mesh(self.source) && is_unknown(self.target)
    }

    /// A host's own probe, by its public address, to a host of the location that `private` is in: where no
    /// interface has a private address any more, the kernel sends it by the default route.
    pub fn is_from_host_to_location_of(&self, private: IpAddr) -> bool {
        let is_public = !is_of_the_mesh(self.source) && location(self.source).is_none();
        self.what == What::Probe && is_public && location(self.target) == location(private)
    }
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, source, target, protocol } = self;
        let what = match what {
            What::Address => "an address of the mesh",
            What::Probe => "a probe",
            What::Tunnelled => "tunnelled, not encrypted",
        };
        write!(f, "{what}: {source} to {target}, protocol {protocol}")
    }
}

/// Where a frame was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// What belongs to nobody: between locations, or to a host outside.
    Public,
    /// A location's own LAN: an outer header is enough there.
    Lan,
    /// A LAN where packets need no outer header, but towards the router.
    NativeLan,
}

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// EtherType of a VLAN's tag.
const VLAN: u16 = 0x8100;
/// First bytes of the router's link-layer addresses.
const ROUTER_MAC: [u8; 5] = [2, 0, 0, 0, 1];
/// UDP ports of VXLAN: ours, flannel's and Cilium's, the registered one.
const VXLAN: [u16; 3] = [51821, 8472, 4789];
const IPIP: u8 = 4;
const IPV6: u8 = 41;
const GRE: u8 = 47;
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;

/// The outermost IP header.
struct Packet<'a> {
    source: IpAddr,
    target: IpAddr,
    protocol: u8,
    /// None in later fragments.
    target_port: Option<u16>,
    payload: &'a [u8],
}

/// What a frame shows that it should not.
pub fn leak(frame: &[u8], link: Link) -> Option<Leak> {
    let kind = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let header = if kind(12)? == VLAN { ETHERNET + 4 } else { ETHERNET };
    if !matches!(kind(header - 2)?, 0x0800 | 0x86dd) {
        return None;
    }
    let packet = parse(frame.get(header..)?)?;
    if packet.is_tunnel() {
        return (link == Link::Public && packet.shows_inner_packet()?).then(|| packet.leak(What::Tunnelled));
    }
    let is_on_lan = link != Link::Public;
    let ends = [packet.source, packet.target];
    if is_on_lan && ends.contains(&PRINTER.into()) {
        return None;
    }
    if link == Link::NativeLan && !frame.starts_with(&ROUTER_MAC) {
        return None;
    }
    let what = match () {
        () if ends.into_iter().any(is_of_the_mesh) => What::Address,
        () if contains_marker(packet.payload) && !packet.may_be_read() => What::Probe,
        () => return None,
    };
    Some(packet.leak(what))
}

fn parse(bytes: &[u8]) -> Option<Packet<'_>> {
    let (source, target, protocol, header, first) = match bytes.first()? >> 4 {
        4 => {
            let address = |at: usize| <[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok().map(Ipv4Addr::from);
            let offset = u16::from_be_bytes(bytes.get(6..8)?.try_into().ok()?) & 0x1fff;
            let header = usize::from(bytes[0] & 0xf) * 4;
            (address(12)?.into(), address(16)?.into(), *bytes.get(9)?, header, offset == 0)
        }
        6 => {
            let address = |at: usize| <[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok().map(Ipv6Addr::from);
            let (source, target) = (address(8)?.into(), address(24)?.into());
            match *bytes.get(6)? {
                FRAGMENT => {
                    let offset = u16::from_be_bytes(bytes.get(42..44)?.try_into().ok()?) >> 3;
                    (source, target, *bytes.get(40)?, 48, offset == 0)
                }
                protocol => (source, target, protocol, 40, true),
            }
        }
        _ => return None,
    };
    let payload = bytes.get(header..)?;
    let port = || Some(u16::from_be_bytes(payload.get(2..4)?.try_into().ok()?));
    Some(Packet { source, target, protocol, target_port: first.then(port).flatten(), payload })
}

impl Packet<'_> {
    fn is_tunnel(&self) -> bool {
        let is_vxlan = self.protocol == UDP && self.target_port.is_some_and(|port| VXLAN.contains(&port));
        is_vxlan || matches!(self.protocol, IPIP | IPV6 | GRE)
    }

    const fn leak(&self, what: What) -> Leak {
        Leak { what, source: self.source, target: self.target, protocol: self.protocol }
    }

    /// An outer header hides nothing on a public network.
    fn shows_inner_packet(&self) -> Option<bool> {
        let inner = match self.protocol {
            IPIP | IPV6 => self.payload,
            // UDP, VXLAN and Ethernet.
            UDP => self.payload.get(8 + 8 + ETHERNET..)?,
            _ => &[],
        };
        let ours =
            parse(inner).is_some_and(|inner| [inner.source, inner.target].into_iter().any(is_of_the_mesh));
        Some(ours || contains_marker(self.payload))
    }

    /// Probes may be read where they are for the outside, or between hosts of one location.
    fn may_be_read(&self) -> bool {
        let ends = [self.source, self.target];
        ends.into_iter().any(is_outside) || matches!(ends.map(location), [Some(a), Some(b)] if a == b)
    }
}

/// Pods, WireGuard's own addresses, VPN peers and what is behind them.
fn is_of_the_mesh(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => matches!(address.octets(), [10, 4 | 5 | 42 | 77, ..]),
        IpAddr::V6(address) => matches!(address.segments()[0], 0xfd42 | 0xfd05),
    }
}

fn is_outside(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets().starts_with(&[198, 51, 100]),
        IpAddr::V6(address) => address.segments().starts_with(&[0x2001, 0xdb8, 0x51]),
    }
}

/// Number of the location whose private network this is.
fn location(address: IpAddr) -> Option<u16> {
    match address {
        IpAddr::V4(address) => match address.octets() {
            [10, site @ (1 | 2), ..] => Some(site.into()),
            _ => None,
        },
        IpAddr::V6(address) => match address.segments() {
            [0xfd00, site, ..] => Some(site),
            _ => None,
        },
    }
}

fn contains_marker(bytes: &[u8]) -> bool {
    bytes.windows(MARKER.len()).any(|window| window == MARKER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(protocol: u8, source: [u8; 4], target: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let length = (20 + payload.len()) as u16;
        let mut bytes = vec![0x45, 0];
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
        bytes.extend(source.iter().chain(&target).chain(payload));
        bytes
    }

    fn frame(packet: &[u8]) -> Vec<u8> {
        [&[0x02, 0, 0, 0, 9, 1, 2, 0, 0, 0, 9, 2, 8, 0][..], packet].concat()
    }

    const POD_A: [u8; 4] = [10, 42, 2, 2];
    const POD_B: [u8; 4] = [10, 42, 5, 2];
    const A1: [u8; 4] = [10, 1, 0, 11];
    const A2: [u8; 4] = [10, 1, 0, 12];
    const B2: [u8; 4] = [10, 2, 0, 12];
    const PUBLIC_A: [u8; 4] = [192, 0, 2, 11];
    const PUBLIC_B: [u8; 4] = [192, 0, 2, 21];

    #[test]
    fn a_pod_s_address_is_seen_everywhere_but_in_a_tunnel_of_a_lan() {
        let inner = ipv4(1, POD_A, POD_B, b"ping");
        assert!(leak(&frame(&inner), Link::Public).is_some());
        assert!(leak(&frame(&inner), Link::Lan).is_some());
        let wrapped = frame(&ipv4(IPIP, A2, A1, &inner));
        assert_eq!(leak(&wrapped, Link::Lan), None);
        assert!(leak(&wrapped, Link::Public).is_some_and(|leak| leak.what == What::Tunnelled));
        let vxlan =
            [&[0xca, 0x6d, 0xca, 0x6d, 0, 0, 0, 0][..], &[8, 0, 0, 0, 0, 0, 1, 0], &frame(&inner)].concat();
        let vxlan = frame(&ipv4(UDP, A2, A1, &vxlan));
        assert_eq!(leak(&vxlan, Link::Lan), None);
        assert!(leak(&vxlan, Link::Public).is_some());
    }

    #[test]
    fn a_probe_may_be_read_outside_and_between_hosts_of_one_location() {
        let probe = |source, target| frame(&ipv4(UDP, source, target, &[&[0; 8][..], MARKER].concat()));
        assert_eq!(leak(&probe(A1, A2), Link::Lan), None);
        assert_eq!(leak(&probe(PUBLIC_A, [198, 51, 100, 2]), Link::Public), None);
        assert!(leak(&probe(A2, B2), Link::Lan).is_some());
        assert!(leak(&probe(PUBLIC_A, PUBLIC_B), Link::Public).is_some());
        assert!(leak(&probe(PUBLIC_A, B2), Link::Public).is_some());
        let without = frame(&ipv4(UDP, PUBLIC_A, PUBLIC_B, &[7; 64]));
        assert_eq!(leak(&without, Link::Public), None);
    }

    #[test]
    fn without_outer_headers_only_what_goes_to_the_router_is_a_leak() {
        let mut clear = frame(&ipv4(1, POD_A, POD_B, b"ping"));
        assert_eq!(leak(&clear, Link::NativeLan), None);
        clear[..5].copy_from_slice(&ROUTER_MAC);
        assert!(leak(&clear, Link::NativeLan).is_some());
    }

    #[test]
    fn only_masqueraded_packets_may_be_for_an_address_nobody_knows() {
        let seen = |source| leak(&frame(&ipv4(1, source, POD_B, b"ping")), Link::Public).unwrap();
        assert!(seen(PUBLIC_A).is_masqueraded_to(|address| address == IpAddr::from(POD_B)));
        assert!(!seen(PUBLIC_A).is_masqueraded_to(|address| address == IpAddr::from(POD_A)));
        assert!(!seen(POD_A).is_masqueraded_to(|_| true));
        let inner = ipv4(1, POD_A, POD_B, b"ping");
        let tunnelled = leak(&frame(&ipv4(IPIP, PUBLIC_A, PUBLIC_B, &inner)), Link::Public).unwrap();
        assert!(!tunnelled.is_masqueraded_to(|_| true));
    }

    #[test]
    fn only_a_host_itself_may_send_to_its_location_by_the_default_route() {
        let probe = |source, target| {
            let bytes = frame(&ipv4(UDP, source, target, &[&[0; 8][..], MARKER].concat()));
            leak(&bytes, Link::Public).unwrap().is_from_host_to_location_of(A1.into())
        };
        assert!(probe(PUBLIC_A, A2));
        assert!(!probe(PUBLIC_A, B2), "another location");
        assert!(!probe(PUBLIC_A, POD_A), "a pod");
        assert!(!probe(POD_A, A2), "from a pod");
    }

    #[test]
    fn later_fragments_are_known_by_their_addresses() {
        let mut later = ipv4(UDP, POD_A, POD_B, &[0, 0, 0xca, 0x6d, 0, 0, 0, 0]);
        later[6..8].copy_from_slice(&185u16.to_be_bytes());
        assert!(leak(&frame(&later), Link::Lan).is_some());
    }

    #[test]
    fn rubbish_is_no_leak() {
        for length in 0..40 {
            assert_eq!(leak(&vec![0x45; length], Link::Public), None);
        }
    }
}
