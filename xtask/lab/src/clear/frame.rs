//! Whether a frame on a wire of the lab shows what the mesh should have hidden: by its addresses, by the
//! marker that probes carry, and by its kind, as signals may be seen on a LAN.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use kilo_common::signal::{
    self, Kind,
    kernel::{self, KIND_AT, Taken},
};

use crate::{network::PRINTER, probe::MARKER};

/// What is seen in cleartext that should not be.
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
    Signal,
    Tunnelled,
}

impl Leak {
    /// Whether it was masqueraded like any packet to the outside, for an address that the mesh does not know.
    pub fn is_masqueraded_to(&self, is_unknown: impl FnOnce(IpAddr) -> bool) -> bool {
        matches!(self.what, What::Address | What::Probe)
            && !is_of_the_mesh(self.source)
            && is_unknown(self.target)
    }

    /// Whether it is a host's own probe, from its public address to a host of the location of `private`: once
    /// no interface has a private address, the kernel sends it by the default route.
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
            What::Signal => "a signal that should be in a tunnel",
            What::Tunnelled => "tunnelled, not encrypted",
        };
        write!(f, "{what}: {source} to {target}, protocol {protocol}")
    }
}

/// Where a frame was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// A public network: between locations, or to a host outside.
    Public,
    /// A location's own LAN: an outer header is enough there.
    Lan,
    /// A LAN where packets need no outer header, except towards the router.
    NativeLan,
}

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// EtherType of a VLAN's tag.
const VLAN: u16 = 0x8100;
/// First bytes of the router's link-layer addresses.
const ROUTER_MAC: [u8; 5] = [2, 0, 0, 0, 1];
/// UDP ports of VXLAN: ours, which signals share; that of flannel and Cilium; the registered one.
const VXLAN: [u16; 3] = [signal::PORT, 8472, 4789];
const IPIP: u8 = 4;
const IPV6: u8 = 41;
const GRE: u8 = 47;
const UDP: u8 = 17;
const UDP_LEN: usize = 8;
const FRAGMENT: u8 = 44;

/// The outermost IP header.
struct Packet<'a> {
    source: IpAddr,
    target: IpAddr,
    protocol: u8,
    /// `None` in later fragments.
    target_port: Option<u16>,
    payload: &'a [u8],
}

/// Returns what a frame shows that should be hidden on this link.
pub fn leak(frame: &[u8], link: Link) -> Option<Leak> {
    let kind = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let header = if kind(12)? == VLAN { ETHERNET + 4 } else { ETHERNET };
    if !matches!(kind(header - 2)?, 0x0800 | 0x86dd) {
        return None;
    }
    let packet = parse(frame.get(header..)?)?;
    let is_on_lan = link != Link::Public;
    let is_within_location = is_on_lan && packet.is_within_location();
    let signal = packet.signal();
    if is_within_location && signal.map_or(packet.is_tunnel(), is_of_the_lan) {
        return None;
    }
    let ends = [packet.source, packet.target];
    if is_on_lan && ends.contains(&PRINTER.into()) {
        return None;
    }
    if link == Link::NativeLan && !frame.starts_with(&ROUTER_MAC) {
        return None;
    }
    let what = match () {
        () if signal.is_some() => What::Signal,
        () if packet.is_tunnel() && packet.shows_inner_packet() => What::Tunnelled,
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

/// Whether signals of this kind may be seen on a LAN. Those between nodes of a location may, and all but
/// probes carry a tag. Those about prefixes carry none: WireGuard proves who sent them.
fn is_of_the_lan(kind: u8) -> bool {
    Kind::from_u8(kind).is_some_and(|kind| kernel::on_lan(kind) != Taken::Refuse)
}

impl Packet<'_> {
    fn is_tunnel(&self) -> bool {
        let is_vxlan = self.protocol == UDP && self.target_port.is_some_and(|port| VXLAN.contains(&port));
        is_vxlan || matches!(self.protocol, IPIP | IPV6 | GRE)
    }

    /// Kind of a signal, which may be unknown to this version; `None` for any other packet.
    fn signal(&self) -> Option<u8> {
        let datagram = self.payload.get(UDP_LEN..).filter(|_| self.protocol == UDP)?;
        let is_signal = self.target_port == Some(signal::PORT) && signal::begins(datagram.first_chunk()?);
        is_signal.then(|| datagram[KIND_AT])
    }

    /// Whether both addresses are private ones of the same location, which nobody else has.
    fn is_within_location(&self) -> bool {
        matches!([self.source, self.target].map(location), [Some(one), Some(other)] if one == other)
    }

    const fn leak(&self, what: What) -> Leak {
        Leak { what, source: self.source, target: self.target, protocol: self.protocol }
    }

    /// Whether a mesh packet can be read inside an outer header. An answer from outside may be for a client
    /// whose port happens to be VXLAN's.
    fn shows_inner_packet(&self) -> bool {
        let inner = match self.protocol {
            IPIP | IPV6 => self.payload,
            // UDP, VXLAN and Ethernet.
            UDP => self.payload.get(UDP_LEN + 8 + ETHERNET..).unwrap_or_default(),
            _ => &[],
        };
        let ours =
            parse(inner).is_some_and(|inner| [inner.source, inner.target].into_iter().any(is_of_the_mesh));
        ours || contains_marker(self.payload) && !self.is_with_outside()
    }

    /// Whether probes may be seen: to or from the outside, or between hosts of one location.
    fn may_be_read(&self) -> bool {
        self.is_with_outside() || self.is_within_location()
    }

    fn is_with_outside(&self) -> bool {
        [self.source, self.target].into_iter().any(is_outside)
    }
}

/// Whether the address is of a pod, WireGuard itself, a VPN peer or a network behind one.
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
    fn only_an_outer_header_from_a_node_to_another_of_its_location_is_one_of_the_mesh() {
        let is_leak = |source, target, link| {
            leak(&frame(&ipv4(IPIP, source, target, &ipv4(1, POD_A, POD_B, b"ping"))), link).is_some()
        };
        assert!(!is_leak(A2, A1, Link::Lan) && !is_leak(A2, A1, Link::NativeLan));
        assert!(is_leak(POD_A, POD_B, Link::Lan), "a tunnel of the pods' own");
        assert!(is_leak(A2, B2, Link::Lan), "another location");
        // A pod's own tunnel is a leak whatever it carries.
        let own = frame(&ipv4(GRE, POD_A, POD_B, &[0; 64]));
        assert!([Link::Lan, Link::Public].into_iter().all(|link| leak(&own, link).is_some()));
    }

    /// A signal, from its IP header on.
    fn signal(kind: u8, source: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let udp = [signal::PORT.to_be_bytes(), signal::PORT.to_be_bytes(), [0; 2], [0; 2]];
        let start = [0, 1, kind, 8, b'k', b'g', b's', b'1'];
        ipv4(UDP, source, target, &[udp.as_flattened(), &start, &[0; 56]].concat())
    }

    #[test]
    fn a_signal_is_in_clear_from_a_node_to_another_of_its_location_alone() {
        const WIREGUARD_B: [u8; 4] = [10, 4, 0, 2];
        let shown = |kind, source, target, link| leak(&frame(&signal(kind, source, target)), link);
        let is_leak = |kind, source, target, link| {
            shown(kind, source, target, link).is_some_and(|leak| leak.what == What::Signal)
        };
        for kind in [Kind::Probe, Kind::Reflected, Kind::Announce, Kind::Hello, Kind::Ready] {
            let kind = kind as u8;
            for link in [Link::Lan, Link::NativeLan] {
                assert_eq!(shown(kind, A2, A1, link), None, "{kind}");
            }
            for (source, target) in [(A2, B2), (A2, WIREGUARD_B), (POD_A, A1), (A1, PUBLIC_B), (PUBLIC_A, A2)]
            {
                assert!(is_leak(kind, source, target, Link::Lan), "{kind}: {source:?} to {target:?}");
            }
            for (source, target) in [(A1, A2), (A1, B2), (PUBLIC_A, PUBLIC_B)] {
                assert!(is_leak(kind, source, target, Link::Public), "{kind}: {source:?} to {target:?}");
            }
        }
        // These have no tag, and nobody answers a kind of another version.
        for kind in [Kind::Claim as u8, Kind::Moved as u8, Kind::End as u8, 99] {
            assert!(is_leak(kind, A2, A1, Link::Lan), "{kind}");
        }
        // A probe of the path through the leader, on its way to the leader.
        let probe = signal(Kind::Probe as u8, A2, WIREGUARD_B);
        assert_eq!(leak(&frame(&ipv4(IPIP, A2, A1, &probe)), Link::Lan), None);
        let mut to_router = frame(&probe);
        assert_eq!(leak(&to_router, Link::NativeLan), None, "no outer header is needed there");
        to_router[..5].copy_from_slice(&ROUTER_MAC);
        assert!(leak(&to_router, Link::NativeLan).is_some());
        let seen = shown(Kind::Probe as u8, PUBLIC_A, PUBLIC_B, Link::Public).unwrap();
        assert!(!seen.is_masqueraded_to(|_| true), "no pod sends any");
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
    fn an_answer_from_outside_may_be_for_a_port_that_vxlan_has() {
        let answer = |source, target| {
            frame(&ipv4(UDP, source, target, &[&[0x1b, 0x5f, 0xca, 0x6d, 0, 0, 0, 0][..], MARKER].concat()))
        };
        assert_eq!(leak(&answer([198, 51, 100, 2], [198, 51, 100, 1]), Link::Public), None);
        assert!(leak(&answer(PUBLIC_A, PUBLIC_B), Link::Public).is_some());
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
