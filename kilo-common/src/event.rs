//! What the programs report to a listener about a packet they drop. The drop reasons, with their descriptions
//! and remedies, are the table in `kilo-common/src/drop_reasons.rs`.

use crate::drop_reasons::DropReason;

/// Bytes of the packet an event carries: enough for Ethernet, VXLAN over IPv6
/// and an inner header. A power of two, for [`captured`].
pub const SNAP: usize = 128;
/// The program that dropped a packet.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// `kilo_egress`: what the host hands to the WireGuard device.
    KiloEgress = 0,
    /// `kilo_ingress`: what the WireGuard device has decrypted.
    KiloIngress = 1,
    /// `lan_ingress`: what arrives by an uplink with Ethernet headers.
    LanIngress = 2,
    /// `uplink_egress`: what leaves by such an uplink.
    UplinkEgress = 3,
    /// `tunnel_ingress`: what the VXLAN or IPIP device has decapsulated.
    TunnelIngress = 4,
    /// `l3_ingress`: what arrives by an uplink without link-layer headers.
    L3Ingress = 5,
    /// `l3_egress`: what leaves by such an uplink.
    L3Egress = 6,
    /// `pod_ingress`: what leaves a pod.
    PodIngress = 7,
}

impl Hook {
    const ALL: [Self; 8] = [
        Self::KiloEgress,
        Self::KiloIngress,
        Self::LanIngress,
        Self::UplinkEgress,
        Self::TunnelIngress,
        Self::L3Ingress,
        Self::L3Egress,
        Self::PodIngress,
    ];

    /// Name of the program, as `bpftool prog` shows it.
    pub const fn program(self) -> &'static str {
        match self {
            Self::KiloEgress => "kilo_egress",
            Self::KiloIngress => "kilo_ingress",
            Self::LanIngress => "lan_ingress",
            Self::UplinkEgress => "uplink_egress",
            Self::TunnelIngress => "tunnel_ingress",
            Self::L3Ingress => "l3_ingress",
            Self::L3Egress => "l3_egress",
            Self::PodIngress => "pod_ingress",
        }
    }

    /// Whether packets start with an Ethernet header on this hook.
    pub const fn has_ethernet(self) -> bool {
        !matches!(self, Self::KiloEgress | Self::KiloIngress | Self::L3Ingress | Self::L3Egress)
    }
}

/// Value of the `monitor` array: who listens, and to what. Zeroed: nobody.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Monitor {
    /// `bpf_ktime_get_ns` at which the listener counts as gone; 0 = nobody listens.
    pub deadline: u64,
    /// Bit n: the drop reason with index n is wanted.
    pub reasons: u64,
    /// One event in this many, at random; 0 and 1 = every one.
    pub one_in: u32,
    /// Always zero.
    pub pad: u32,
}

impl Monitor {
    /// Whether a drop for the reason with this index is reported; `random` and `now` (`bpf_ktime_get_ns`) are
    /// asked for only when they decide.
    #[inline(always)]
    pub fn wants(&self, reason: u32, now: impl FnOnce() -> u64, random: impl FnOnce() -> u32) -> bool {
        self.deadline != 0
            && self.reasons >> (reason & 63) & 1 != 0
            && now() < self.deadline
            && (self.one_in < 2 || random().checked_rem(self.one_in) == Some(0))
    }
}

/// Bytes captured of a packet of `length` bytes. Its last two operations alone keep it between 1 and
/// [`SNAP`]: verifiers before Linux 6.8 forget a comparison when the compiler makes it on a copy.
#[inline(always)]
pub const fn captured(length: u32) -> u32 {
    let most = if length > SNAP as u32 { SNAP as u32 } else { length };
    (most.wrapping_sub(1) & (SNAP as u32 - 1)) + 1
}

/// A dropped packet: a record of the ring `events`, which programs write and `kgctl monitor` reads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropEvent {
    /// `bpf_ktime_get_ns` of the drop.
    pub ktime: u64,
    /// [`DropReason::index`], host byte order; a newer program may write one that this code does not know.
    pub reason: u32,
    /// Index of the interface the program ran on.
    pub ifindex: u32,
    /// Bytes of the whole packet.
    pub length: u32,
    /// The program that dropped it, as a number of [`Hook`].
    pub hook: u8,
    /// Always zero.
    pub pad: [u8; 2],
    /// Bytes of `packet` that are set.
    pub captured: u8,
    /// The packet's first bytes.
    pub packet: [u8; SNAP],
}

/// Bytes of a [`DropEvent`].
pub const EVENT_BYTES: usize = 152;
const _: () = assert!(size_of::<DropEvent>() == EVENT_BYTES);
const _: () = assert!(size_of::<Monitor>() == 24);

// SAFETY: repr(C), Copy, integers only, and the size equals the sum of the fields.
#[cfg(feature = "user")]
unsafe impl aya::Pod for Monitor {}

impl DropEvent {
    /// Reads an event as a program of this machine wrote it.
    pub fn from_bytes(bytes: &[u8; EVENT_BYTES]) -> Self {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut ktime = [0; 8];
        ktime.copy_from_slice(&bytes[..8]);
        let mut packet = [0; SNAP];
        packet.copy_from_slice(&bytes[EVENT_BYTES - SNAP..]);
        Self {
            ktime: u64::from_ne_bytes(ktime),
            reason: word(8),
            ifindex: word(12),
            length: word(16),
            hook: bytes[20],
            pad: [0; 2],
            captured: bytes[23],
            packet,
        }
    }

    /// The bytes that were captured.
    pub fn bytes(&self) -> &[u8] {
        self.packet.get(..usize::from(self.captured)).unwrap_or(&self.packet)
    }

    /// Why it was dropped; `None` if the program is newer than this code.
    pub fn reason(&self) -> Option<DropReason> {
        DropReason::from_index(self.reason)
    }

    /// The program that dropped it; `None` as with [`Self::reason`].
    pub fn hook(&self) -> Option<Hook> {
        Hook::ALL.get(usize::from(self.hook)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_read_from_its_place() {
        let mut bytes = [0; EVENT_BYTES];
        bytes[..8].copy_from_slice(&7u64.to_ne_bytes());
        bytes[8..12].copy_from_slice(&DropReason::TooBig.index().to_ne_bytes());
        bytes[12..16].copy_from_slice(&3u32.to_ne_bytes());
        bytes[16..20].copy_from_slice(&1500u32.to_ne_bytes());
        bytes[20] = Hook::LanIngress as u8;
        bytes[23] = 2;
        bytes[24] = 0x45;
        let event = DropEvent::from_bytes(&bytes);
        assert_eq!((event.ktime, event.ifindex, event.length), (7, 3, 1500));
        assert_eq!((event.reason(), event.hook()), (Some(DropReason::TooBig), Some(Hook::LanIngress)));
        assert_eq!(event.bytes(), [0x45, 0]);
        for (index, hook) in Hook::ALL.iter().enumerate() {
            assert_eq!(index, *hook as usize);
        }
    }

    #[test]
    fn as_much_is_captured_as_there_is_and_fits() {
        for (length, wanted) in [(1, 1), (34, 34), (127, 127), (128, 128), (129, 128), (9000, 128)] {
            assert_eq!(captured(length), wanted, "{length}");
        }
        assert!(captured(0) <= SNAP as u32);
    }

    #[test]
    fn only_what_a_listener_that_still_lives_wants_is_reported() {
        let reason = DropReason::NoHop.index();
        let monitor = Monitor { deadline: 100, reasons: 1 << reason, one_in: 4, pad: 0 };
        assert!(monitor.wants(reason, || 99, || 8));
        assert!(!monitor.wants(reason, || 100, || 8), "it has gone");
        assert!(!monitor.wants(reason, || 99, || 9), "one in four");
        assert!(!monitor.wants(DropReason::NoPrefix.index(), || 99, || 8), "not asked for");
        let nobody = Monitor::default();
        assert!(!nobody.wants(reason, || unreachable!(), || unreachable!()), "costs nothing");
    }
}
