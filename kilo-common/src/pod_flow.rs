//! Flows of pods that the stack leaves as they are (`--host-routing=auto`). Once a second a packet of each
//! flow passes the stack: `pod_ingress` tags it where it leaves the pod, and `kilo_egress` vouches for the flow
//! when it gets that packet as it was, but for a TTL that is one lower. For the rest of the second the flow's
//! packets go from the pod's interface straight to the WireGuard device.

use crate::{
    ecn,
    encap::segment_len,
    packet::{
        Ipv4Header,
        tcp_flags::{FIN, RST, SYN},
    },
};

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
        Self { src, dst, ports, protocol: header.protocol, tos: header.tos & !ecn::MASK, pad: [0; 2] }
    }
}

/// What is known about such a flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodFlow {
    /// Second of `CLOCK_MONOTONIC` in which `kilo_egress` last vouched for it; 0 = not yet.
    pub vouched: u32,
    /// Index of the interface by which its packets leave the pod.
    pub ifindex: u32,
    /// Largest packet in bytes that goes straight on; the stack answers a larger one.
    pub mtu: u32,
    /// `skb->priority` that the stack gives its packets.
    pub priority: u32,
    /// Link-layer destination of its packets: another pod may be the pod's router.
    pub gateway: [u16; 3],
    /// Random, so that no other flow's tags fit, nor those of an earlier entry of this one.
    pub secret: u16,
    /// TTL with which its packets leave the pod.
    pub ttl: u8,
    /// Always zero.
    pub pad: [u8; 3],
}

impl PodFlow {
    /// Whether a packet with this TTL, by this interface to this link-layer destination, goes straight on in
    /// this second.
    #[inline(always)]
    pub const fn is_vouched(&self, ifindex: u32, gateway: [u16; 3], ttl: u8, second: u32) -> bool {
        self.vouched == second && self.is_of(ifindex, gateway, ttl)
    }

    /// Whether the entry is about packets with this TTL, by this interface to this link-layer destination.
    #[inline(always)]
    pub const fn is_of(&self, ifindex: u32, gateway: [u16; 3], ttl: u8) -> bool {
        let [a, b, c] = gateway;
        let is_same_way =
            self.ifindex == ifindex && self.gateway[0] == a && self.gateway[1] == b && self.gateway[2] == c;
        is_same_way && self.ttl == ttl
    }

    /// Whether a packet of `len` bytes fits: as a whole, or cut into segments of `gso_size` bytes (0: it is not
    /// cut), each behind `headers` bytes.
    #[inline(always)]
    pub const fn fits(&self, len: u32, gso_size: u32, headers: u32) -> bool {
        len <= self.mtu || segment_len(len, gso_size, headers) <= self.mtu
    }

    /// What `skb->tc_index` says of a packet of this flow on its way through the stack; never zero. `sample`:
    /// words of its transport header, as they lie in memory. Rules may translate a packet, whose flow then has
    /// another entry, or none; and they may change its sequence numbers or its payload.
    #[inline(always)]
    pub const fn tag(&self, header: &Ipv4Header, sample: [u32; 3]) -> u16 {
        let [a, b, c] = sample;
        let id = (header.id as u32) << 16 | header.fragment as u32;
        let mixed = id ^ a.rotate_left(7) ^ b.rotate_left(14) ^ c.rotate_left(21) ^ header.total_len as u32;
        let tag = (mixed.wrapping_mul(SPREAD) >> u16::BITS) as u16 ^ self.secret;
        tag + (tag == 0) as u16
    }

    /// Whether a packet that has passed the stack may be one that left the pod as this entry says.
    #[inline(always)]
    pub const fn is_one_hop_on(&self, ttl: u8) -> bool {
        self.ttl == ttl.wrapping_add(1)
    }
}

/// Segments with any of these flags pass the stack, so that connection tracking sees connections begin and
/// end.
pub const TCP_STATE: u8 = FIN | SYN | RST;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FLOW: PodFlow = PodFlow {
        vouched: 9,
        ifindex: 4,
        mtu: 1420,
        priority: 0,
        gateway: [1, 2, 3],
        secret: 0x5a5a,
        ttl: 64,
        pad: [0; 3],
    };

    fn header(src: u32, dst: u32, protocol: u8, tos: u8) -> Ipv4Header {
        let (total_len, id, fragment, ttl, checksum) = (0, 0, 0, 64, 0);
        Ipv4Header { version_len: 0x45, tos, total_len, id, fragment, ttl, protocol, checksum, src, dst }
    }

    proptest! {
        #[test]
        fn a_tag_is_never_zero(id: u16, sample: [u32; 3], secret: u16) {
            let packet = Ipv4Header { id, ..header(1, 2, 17, 0) };
            prop_assert_ne!(PodFlow { secret, ..FLOW }.tag(&packet, sample), 0);
        }

        #[test]
        fn congestion_marks_do_not_make_another_flow(src: u32, dst: u32, ports: u32, tos: u8, mark in 0u8..4) {
            let key = |tos| PodFlowKey::of(&header(src, dst, 17, tos), ports);
            prop_assert_eq!(key(tos), key(tos & !3 | mark));
        }
    }

    #[test]
    fn a_packet_that_the_stack_changed_has_another_tag_nearly_always() {
        let packet = Ipv4Header { id: 7, total_len: 1400_u16.to_be(), ..header(1, 2, 6, 0) };
        let sample = [0x1234_5678, 0x0506_0708, 0x9abc];
        let own = FLOW.tag(&packet, sample);
        let same = (1..=u16::MAX).filter(|&by| {
            let [a, b, c] = sample;
            let by = u32::from(by);
            let others = [[a ^ by, b, c], [a, b ^ by << 8, c], [a, b, c ^ by]];
            let id = Ipv4Header { id: 7 ^ by as u16, ..packet };
            others.into_iter().any(|sample| FLOW.tag(&packet, sample) == own) || FLOW.tag(&id, sample) == own
        });
        // Four by chance, and a few that become 1 instead of 0.
        assert!(same.count() < 24);
    }

    #[test]
    fn a_flow_is_vouched_for_by_interface_router_ttl_and_second() {
        assert!(FLOW.is_vouched(4, [1, 2, 3], 64, 9));
        assert!(!FLOW.is_vouched(5, [1, 2, 3], 64, 9) && !FLOW.is_vouched(4, [1, 2, 4], 64, 9));
        assert!(!FLOW.is_vouched(4, [1, 2, 3], 64, 10) && !FLOW.is_vouched(4, [1, 2, 3], 64, 8));
        assert!(!FLOW.is_vouched(4, [1, 2, 3], 63, 9));
    }

    #[test]
    fn what_fits_is_whole_or_in_segments_that_do() {
        assert!(FLOW.fits(1420, 0, 28) && !FLOW.fits(1421, 0, 28));
        assert!(FLOW.fits(60_000, 1380, 40) && !FLOW.fits(60_000, 1381, 40));
    }

    #[test]
    fn the_stack_lowers_the_ttl_by_one() {
        assert!(FLOW.is_one_hop_on(63) && !FLOW.is_one_hop_on(64) && !FLOW.is_one_hop_on(62));
    }
}
