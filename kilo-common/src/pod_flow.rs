//! Flows of pods that the stack leaves as they are (`--host-routing=auto`). Once a second a packet of each
//! flow passes the stack: `pod_ingress` notes it where it leaves the pod, and `kilo_egress` vouches for the
//! flow when it gets that packet with nothing changed but its TTL. For the rest of the second the flow's
//! packets go from the pod's interface straight to the WireGuard device.

use crate::packet::Ipv4Header;

/// Bits of the type of service that congestion changes (RFC 3168); packets of one flow may differ in them.
const ECN: u8 = 3;
/// Odd, with bits all over: the golden ratio in 32 bits.
const SPREAD: u32 = 0x9e37_79b1;

/// A flow as its packets leave the pod; addresses and ports as they lie in memory.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodFlowKey {
    /// Source address.
    pub src: u32,
    /// Destination address.
    pub dst: u32,
    /// Source and destination port.
    pub ports: u32,
    /// IP protocol number.
    pub protocol: u8,
    /// Type of service without the bits of ECN: rules may route, or rewrite, by it.
    pub tos: u8,
    /// Always zero.
    pub pad: [u8; 2],
}

impl PodFlowKey {
    /// The flow of a packet; `ports`: the first four bytes behind its header.
    #[inline(always)]
    pub const fn of(header: &Ipv4Header, ports: u32) -> Self {
        let (src, dst) = (header.src, header.dst);
        Self { src, dst, ports, protocol: header.protocol, tos: header.tos & !ECN, pad: [0; 2] }
    }

    /// What `skb->tc_index` says of a packet's flow on the way through the stack, never zero: a packet that
    /// was translated belongs to another flow, whose note differs in all but one case of some 65,000.
    #[inline(always)]
    pub const fn note(&self) -> u16 {
        let rest = (self.protocol as u32) << 8 | self.tos as u32;
        let mixed = self.src ^ self.dst.rotate_left(11) ^ self.ports.rotate_left(21) ^ rest;
        let note = (mixed.wrapping_mul(SPREAD) >> u16::BITS) as u16;
        note + (note == 0) as u16
    }
}

/// What is known about such a flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodFlow {
    /// Second of `CLOCK_MONOTONIC` in which `kilo_egress` last vouched for it; 0 = not yet.
    pub vouched: u32,
    /// Index of the interface by which its last noted packet left the pod.
    pub ifindex: u32,
    /// Largest packet in bytes that goes straight on; the stack answers a larger one.
    pub mtu: u32,
    /// Link-layer destination of that packet: another pod may be the pod's router.
    pub gateway: [u16; 3],
    /// TTL of that packet.
    pub ttl: u8,
    /// Always zero.
    pub pad: u8,
}

impl PodFlow {
    /// Whether a packet by this interface, to this link-layer destination, goes straight on in this second.
    #[inline(always)]
    pub const fn is_vouched(&self, ifindex: u32, gateway: [u16; 3], second: u32) -> bool {
        self.vouched == second && self.is_from(ifindex, gateway)
    }

    /// Whether the last noted packet came by this interface, to this link-layer destination.
    #[inline(always)]
    pub const fn is_from(&self, ifindex: u32, gateway: [u16; 3]) -> bool {
        let [a, b, c] = gateway;
        self.ifindex == ifindex && self.gateway[0] == a && self.gateway[1] == b && self.gateway[2] == c
    }

    /// Whether a packet of `len` bytes fits: as a whole, or cut into segments of `gso_size` bytes (0: it is not
    /// cut), each behind `headers` bytes.
    #[inline(always)]
    pub const fn carries(&self, len: u32, gso_size: u32, headers: u32) -> bool {
        len <= self.mtu || gso_size != 0 && gso_size + headers <= self.mtu
    }

    /// Whether a packet with this TTL may be the noted one, one hop on.
    #[inline(always)]
    pub const fn is_one_hop_on(&self, ttl: u8) -> bool {
        self.ttl == ttl.wrapping_add(1)
    }
}

/// FIN, SYN and RST (RFC 9293): segments with any of these flags pass the stack, so that connection tracking
/// sees connections begin and end.
pub const TCP_STATE: u8 = 0x07;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(src: u32, dst: u32, protocol: u8, tos: u8) -> Ipv4Header {
        let (total_len, id, fragment, ttl, checksum) = (0, 0, 0, 64, 0);
        Ipv4Header { version_len: 0x45, tos, total_len, id, fragment, ttl, protocol, checksum, src, dst }
    }

    proptest! {
        #[test]
        fn a_note_is_never_zero(src: u32, dst: u32, ports: u32, protocol: u8, tos: u8) {
            prop_assert_ne!(PodFlowKey::of(&header(src, dst, protocol, tos), ports).note(), 0);
        }

        #[test]
        fn congestion_marks_do_not_make_another_flow(src: u32, dst: u32, ports: u32, tos: u8, mark in 0u8..4) {
            let key = |tos| PodFlowKey::of(&header(src, dst, 17, tos), ports);
            prop_assert_eq!(key(tos), key(tos & !3 | mark));
        }
    }

    #[test]
    fn a_translated_packets_note_differs_nearly_always() {
        let [src, dst] = [[10, 0, 0, 1], [10, 96, 0, 10]].map(u32::from_ne_bytes);
        let own = PodFlowKey::of(&header(src, dst, 6, 0), 0x5000_1f90).note();
        let same = (0..=u16::MAX).filter(|low| {
            let [a, b] = low.to_be_bytes();
            let to = u32::from_ne_bytes([10, 4, a, b]);
            PodFlowKey::of(&header(src, to, 6, 0), 0x5000_1f90).note() == own
        });
        // One by chance.
        assert!(same.count() < 8);
    }

    #[test]
    fn a_flow_is_vouched_for_by_interface_router_and_second() {
        let flow = PodFlow { vouched: 9, ifindex: 4, mtu: 1420, gateway: [1, 2, 3], ttl: 64, pad: 0 };
        assert!(flow.is_vouched(4, [1, 2, 3], 9));
        assert!(!flow.is_vouched(5, [1, 2, 3], 9) && !flow.is_vouched(4, [1, 2, 4], 9));
        assert!(!flow.is_vouched(4, [1, 2, 3], 10) && !flow.is_vouched(4, [1, 2, 3], 8));
        assert!(flow.carries(1420, 0, 28) && !flow.carries(1421, 0, 28));
        assert!(flow.carries(60_000, 1380, 40) && !flow.carries(60_000, 1381, 40));
        assert!(flow.is_one_hop_on(63) && !flow.is_one_hop_on(64) && !flow.is_one_hop_on(62));
    }
}
