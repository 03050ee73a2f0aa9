//! Look-ups in the tables, as the BPF programs make them in their maps.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv6Net};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    forwarding::{self, Disposition},
    maps::{DEVICE_MASQUERADE, Device, HOP_LOCAL, HOP_REMOTE, NodeValue, PREFIX_PODS_STEERED, PrefixValue},
    nat,
    packet::{halves, never_steered, never_steered_v6},
};

use super::{Hop, Tables};
use crate::prefixes::longest;

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
}

/// What a program does: the action, and the node it sends to, if any; or why it drops.
pub type Verdict = Result<(Action, Option<Hop>), DropReason>;

impl Tables {
    pub(super) fn prefix(&self, addr: IpAddr) -> Option<PrefixValue> {
        longest(&self.prefix, addr)
    }

    /// Whether some prefix is of IPv6.
    pub fn has_ipv6(&self) -> bool {
        !self.prefix.since(&IpNet::V6(Ipv6Net::default())).is_empty()
    }

    /// True for addresses of this node and its pods.
    pub fn is_local(&self, addr: IpAddr) -> bool {
        self.prefix(addr).is_some_and(|value| value.hop == HOP_LOCAL)
    }

    /// Whether packets may reach WireGuard here.
    pub const fn is_gateway(&self) -> bool {
        forwarding::is_gateway(self.config.flags)
    }

    /// Resolves the hop id of a prefix: hops 2 and 3 are words of `lead`, which name another id.
    pub fn resolve(&self, id: u32) -> u32 {
        forwarding::hop_id(id, || false, |id| self.word(id))
    }

    /// The word of `lead` for hop 2 or 3.
    fn word(&self, id: u32) -> u64 {
        self.lead[(id & 1) as usize]
    }

    /// How a prefix's hop is reached from here; `None`: there is no such hop.
    pub fn hop(&self, id: u32) -> Option<&Hop> {
        self.hop.get(&self.resolve(id))
    }

    /// Whether a packet is source-translated when it leaves.
    pub fn masquerades(&self, packet: Packet) -> bool {
        nat::is_masqueraded(longest(&self.masq_src, packet.src), longest(&self.masq_dst, packet.dst))
    }

    /// The address that a masqueraded packet gets when it leaves by this interface; `None` where
    /// packets are not masqueraded. Unspecified: the interface has none of the family.
    pub fn masquerade_address(&self, ifindex: u32, dst: IpAddr) -> Option<IpAddr> {
        let device = self.device.get(&ifindex).filter(|device| device.flags & DEVICE_MASQUERADE != 0)?;
        let holds = |to: &IpNet| to.contains(&dst);
        let others = self.masq_addr.iter().filter(|((of, to), _)| *of == ifindex && holds(to));
        let special = others.max_by_key(|((_, to), _)| to.prefix_len()).map(|(_, addr)| *addr);
        let usual = if dst.is_ipv6() { device.masq_v6.into() } else { device.masq_v4.into() };
        Some(special.unwrap_or(usual))
    }

    /// True for addresses that masqueraded packets get, on whatever interface.
    pub fn is_masquerade_address(&self, addr: IpAddr) -> bool {
        let usual = |device: &Device| {
            if addr.is_ipv6() { IpAddr::from(device.masq_v6) } else { IpAddr::from(device.masq_v4) }
        };
        !addr.is_unspecified()
            && (self.device.values().any(|device| usual(device) == addr)
                || self.masq_addr.values().any(|other| *other == addr))
    }

    /// True for this node's addresses to which steered packets are sent.
    pub fn is_private(&self, addr: IpAddr) -> bool {
        let config = &self.config;
        match addr {
            IpAddr::V4(addr) => {
                let addr = addr.octets();
                addr == config.private_v4 || (addr == config.overlay_v4 && addr != [0; 4])
            }
            IpAddr::V6(addr) => addr.octets() == config.private_v6,
        }
    }

    /// Largest packet in bytes that `uplink_egress` hands on for this hop; 0 = not known.
    ///
    /// # Errors
    /// `NoHop`.
    pub fn mtu_beside(&self, hop: Option<&Hop>) -> Result<u32, DropReason> {
        forwarding::beside(hop, self.config.kilo_mtu)
    }

    /// True for addresses of pods, of WireGuard and of VPN peers, which this host itself does
    /// not send from; `is_decrypted`: the packet came from the WireGuard device.
    pub fn is_of_mesh(&self, addr: IpAddr, is_decrypted: bool) -> bool {
        !self.is_private(addr) && forwarding::is_of_mesh(self.prefix(addr), is_decrypted)
    }

    /// True when pods' packets to some address of another location are encrypted although the
    /// host's routes lead there by an uplink.
    pub fn steers_to_wireguard_by_source(&self) -> bool {
        // Also on a stand-by: what its leader steers to it comes in by the same device.
        let steered =
            |value: &PrefixValue| value.flags & PREFIX_PODS_STEERED != 0 && forwarding::is_remote(value.hop);
        self.is_gateway()
            && self.prefix.iter().any(|(prefix, value)| prefix.prefix_len() > 0 && steered(value))
    }

    /// Where a packet from a node of the location goes on, as far as its destination decides.
    pub(super) fn disposition(&self, sender: Option<&NodeValue>, dst: IpAddr) -> Option<Disposition> {
        let is_mine = |id| self.resolve(id) == HOP_REMOTE;
        forwarding::disposition(self.config.flags, self.prefix(dst), sender, is_mine)
    }
}

/// True for destinations that stay on a link or a host.
pub(super) fn is_never_steered(dst: IpAddr) -> bool {
    match dst {
        IpAddr::V4(dst) => never_steered(dst.octets()),
        IpAddr::V6(dst) => never_steered_v6(halves(dst.octets())),
    }
}
