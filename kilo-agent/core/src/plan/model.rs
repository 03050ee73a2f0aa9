//! What the data path does with one packet, read from the tables alone: look-ups in whole tables around the
//! decisions of `kilo_common::forwarding`, which the BPF programs share. For `kgctl trace`, and for
//! conformance to Kilo.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::{
    counters::{Action, DropReason},
    forwarding::{self, Disposition},
    maps::{DEVICE_MASQUERADE, Device, HOP_LOCAL, HOP_REMOTE, NodeValue, PREFIX_PODS_STEERED, PrefixValue},
    nat,
    packet::{halves, never_steered, never_steered_v6},
};

use super::{Hop, HostPlan, Tables, probe::Probe};
use crate::{settings::Tunnel, topology::prefixes::longest};

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
}

/// What a program does: the action, and the node it sends to, if any.
pub type Verdict = Result<(Action, Option<Hop>), DropReason>;

/// Where a packet goes as seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Encrypted by this node's WireGuard.
    Wireguard,
    /// To another node of the own location.
    Gateway {
        /// Private address of that node.
        gateway: IpAddr,
        /// With an outer header.
        encapsulated: bool,
    },
    /// Not ours: this host's other routes decide.
    Other,
    /// Dropped.
    Dropped(DropReason),
}

impl Tables {
    pub(super) fn prefix(&self, addr: IpAddr) -> Option<PrefixValue> {
        longest(&self.prefix, addr)
    }

    /// True for addresses of this node and its pods.
    pub fn is_local(&self, addr: IpAddr) -> bool {
        self.prefix(addr).is_some_and(|value| value.hop == HOP_LOCAL)
    }

    /// Whether packets may reach WireGuard here.
    pub const fn is_gateway(&self) -> bool {
        forwarding::is_gateway(self.config.flags)
    }

    /// The hop id that a prefix's hop id stands for: hops 2 and 3 are words of `lead`.
    pub fn resolve(&self, id: u32) -> u32 {
        forwarding::hop_id(id, || false, |id| self.word(id))
    }

    /// The word of `lead` for hop 2 or 3.
    fn word(&self, id: u32) -> u64 {
        self.lead[(id & 1) as usize]
    }

    /// How a prefix's hop is reached from here.
    pub fn way(&self, id: u32) -> Option<&Hop> {
        self.hop.get(&self.resolve(id))
    }

    /// Whether a packet is source-translated when it leaves.
    pub fn masquerades(&self, packet: Packet) -> bool {
        nat::is_masqueraded(longest(&self.masq_src, packet.src), longest(&self.masq_dst, packet.dst))
    }

    /// The address a masqueraded packet gets that leaves by this interface; `None` where
    /// packets are not masqueraded. Unspecified: it has none of the family.
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

    /// `kilo_egress` for a small packet that is not masqueraded.
    pub fn kilo_egress(&self, packet: Packet) -> Verdict {
        self.leaving(&Probe::small(packet))
    }

    /// `uplink_egress` for a packet small enough, which is neither WireGuard's nor
    /// about neighbours: the hop it is handed to `kilo_egress` for; `None` when it
    /// leaves, perhaps masqueraded.
    ///
    /// # Errors
    /// The packet would be in clear.
    pub fn uplink_egress(&self, packet: Packet) -> Result<Option<Hop>, DropReason> {
        let Some(value) = self.prefix(packet.dst).filter(|value| forwarding::is_guarded(value.flags)) else {
            return Ok(None);
        };
        let on_link = || is_never_steered(packet.dst) || is_never_steered(packet.src);
        if !forwarding::guard(value.flags, self.is_of_mesh(packet.src), false, on_link)? {
            return Ok(None);
        }
        let hop = self.way(value.hop);
        self.mtu_beside(hop)?;
        Ok(hop.copied())
    }

    /// Largest packet in bytes that `uplink_egress` hands on for this hop; 0 = not known.
    ///
    /// # Errors
    /// `NoHop`.
    pub fn mtu_beside(&self, hop: Option<&Hop>) -> Result<u32, DropReason> {
        forwarding::beside(hop, self.config.kilo_mtu)
    }

    /// True for addresses of pods, of WireGuard and of VPN peers, which this host
    /// itself does not send from.
    pub fn is_of_mesh(&self, addr: IpAddr) -> bool {
        !self.is_private(addr) && forwarding::is_of_mesh(self.prefix(addr))
    }

    /// True when pods' packets to an address of another location are encrypted that
    /// the host's routes lead to by an uplink.
    pub fn steers_to_wireguard_by_source(&self) -> bool {
        // On a stand-by, too: what its leader steers to it comes in by the same device.
        let steered =
            |value: &PrefixValue| value.flags & PREFIX_PODS_STEERED != 0 && forwarding::is_remote(value.hop);
        self.is_gateway()
            && self.prefix.iter().any(|(prefix, value)| prefix.prefix_len() > 0 && steered(value))
    }

    /// `kilo_ingress` for a small packet with TTL left that does not answer a masqueraded one.
    pub fn kilo_ingress(&self, packet: Packet) -> Verdict {
        self.decrypted(&Probe::small(packet))
    }

    /// `lan_ingress` for a small encapsulated packet addressed to this node.
    pub fn lan_ingress(&self, outer_src: IpAddr, inner: Packet) -> Verdict {
        self.steered(outer_src, &Probe::small(inner))
    }

    /// Where a packet from a node of the location goes on, as far as its destination says.
    pub(super) fn disposition(&self, sender: Option<&NodeValue>, dst: IpAddr) -> Option<Disposition> {
        let is_mine = |id| self.resolve(id) == HOP_REMOTE;
        forwarding::disposition(self.config.flags, self.prefix(dst), sender, is_mine)
    }
}

impl HostPlan {
    /// Where a packet goes that starts on this host or arrives at its stack.
    pub fn route(&self, packet: Packet) -> Route {
        let dst = IpNet::from(packet.dst);
        // A local address is never sent.
        if self.tables.is_local(packet.dst) {
            return Route::Other;
        }
        if self.net.routes.iter().any(|route| route.destination.contains(&dst)) {
            return seen_from_outside(self.tables.kilo_egress(packet));
        }
        // The device's address brings a route of its own.
        if self.net.addresses.iter().any(|net| net.contains(&packet.dst)) {
            return Route::Other;
        }
        match self.tables.uplink_egress(packet) {
            Ok(Some(_)) => seen_from_outside(self.tables.kilo_egress(packet)),
            Ok(None) => Route::Other,
            Err(reason) => Route::Dropped(reason),
        }
    }

    /// Where a packet goes that comes out of the WireGuard device.
    pub fn route_from_kilo(&self, packet: Packet) -> Route {
        match self.tables.kilo_ingress(packet) {
            Ok((Action::Decrypt, _)) => self.route(packet),
            verdict => seen_from_outside(verdict),
        }
    }
}

fn seen_from_outside(verdict: Verdict) -> Route {
    match verdict {
        Ok((_, Some(Hop::Node { remote, tunnel, .. }))) => {
            Route::Gateway { gateway: remote, encapsulated: tunnel != Tunnel::None }
        }
        Ok((Action::Encrypt | Action::Transit, _)) => Route::Wireguard,
        Ok(_) => Route::Other,
        Err(reason) => Route::Dropped(reason),
    }
}

/// True for destinations that stay on a link or a host.
pub(super) fn is_never_steered(dst: IpAddr) -> bool {
    match dst {
        IpAddr::V4(dst) => never_steered(dst.octets()),
        IpAddr::V6(dst) => never_steered_v6(halves(dst.octets())),
    }
}
