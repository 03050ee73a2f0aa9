//! What the data path does with one packet, read from the tables alone, in
//! plain Rust: the reference for the BPF programs, and for conformance to Kilo.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::{
    counters::{Action, DropReason},
    lead::{self, Exit, Sender},
    maps::{
        CONFIG_GATEWAY, DEVICE_MASQUERADE, Device, HOP_ACTING, HOP_FIRST_NODE, HOP_LOCAL, HOP_REMOTE,
        NODE_GATEWAY, NODE_LED, NodeValue, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED,
        PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue,
    },
    nat,
    packet::{halves, never_steered, never_steered_v6},
};

use super::{Hop, HostPlan, Tables};
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
    fn prefix(&self, addr: IpAddr) -> Option<PrefixValue> {
        longest(&self.prefix, addr)
    }

    fn routed(&self, dst: IpAddr) -> Option<u32> {
        self.prefix(dst).filter(|value| value.flags & PREFIX_ROUTE != 0).map(|value| value.hop)
    }

    /// True for addresses of this node and its pods.
    pub fn is_local(&self, addr: IpAddr) -> bool {
        self.prefix(addr).is_some_and(|value| value.hop == HOP_LOCAL)
    }

    /// Whether packets may reach WireGuard here.
    pub const fn is_gateway(&self) -> bool {
        self.config.flags & CONFIG_GATEWAY != 0
    }

    /// The hop id that a prefix's hop id stands for: hops 2 and 3 are words of `lead`.
    pub fn resolve(&self, id: u32) -> u32 {
        match id {
            HOP_REMOTE | HOP_ACTING => {
                u32::from(lead::hop_of(self.lead.get((id - HOP_REMOTE) as usize).copied().unwrap_or(0)))
            }
            id => id,
        }
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

    /// `kilo_egress` for a packet that is not masqueraded.
    pub fn kilo_egress(&self, packet: Packet) -> Verdict {
        if is_never_steered(packet.dst) || is_never_steered(packet.src) {
            return Err(DropReason::NotUnicast);
        }
        let Some(id) = self.routed(packet.dst) else {
            return if self.is_gateway() { Ok((Action::Pass, None)) } else { Err(DropReason::NoPrefix) };
        };
        match self.way(id) {
            Some(Hop::Wireguard) if self.is_gateway() => Ok((Action::Encrypt, None)),
            Some(hop @ Hop::Node { .. }) => Ok((Action::Steer, Some(*hop))),
            Some(Hop::Local) => Err(DropReason::NoPrefix),
            _ => Err(DropReason::NoHop),
        }
    }

    /// `uplink_egress` for a packet small enough, which is neither WireGuard's nor
    /// about neighbours: the hop it is handed to `kilo_egress` for; `None` when it
    /// leaves, perhaps masqueraded.
    ///
    /// # Errors
    /// The packet would be in clear.
    pub fn uplink_egress(&self, packet: Packet) -> Result<Option<Hop>, DropReason> {
        let Some(value) = self.prefix(packet.dst) else { return Ok(None) };
        if value.flags & PREFIX_NEVER_CLEAR != 0 {
            return Err(DropReason::NotEncrypted);
        }
        let on_link = is_never_steered(packet.dst) || is_never_steered(packet.src);
        let steered = value.flags & PREFIX_HOST_STEERED != 0 || self.is_of_mesh(packet.src);
        if value.flags & PREFIX_PODS_STEERED == 0 || on_link || !steered {
            return Ok(None);
        }
        match self.way(value.hop) {
            Some(hop @ (Hop::Node { .. } | Hop::Wireguard)) => Ok(Some(*hop)),
            _ => Err(DropReason::NoHop),
        }
    }

    /// True for addresses of pods, of WireGuard and of VPN peers, which this host
    /// itself does not send from.
    pub fn is_of_mesh(&self, addr: IpAddr) -> bool {
        let known =
            |owner: PrefixValue| owner.flags & PREFIX_SOURCE != 0 && owner.flags & PREFIX_PODS_STEERED == 0;
        !self.is_private(addr) && self.prefix(addr).is_some_and(known)
    }

    /// True when pods' packets to an address of another location are encrypted that
    /// the host's routes lead to by an uplink.
    pub fn steers_to_wireguard_by_source(&self) -> bool {
        // On a stand-by, too: what its leader steers to it comes in by the same device.
        let steered = |value: &PrefixValue| {
            value.flags & PREFIX_PODS_STEERED != 0 && matches!(value.hop, HOP_REMOTE | HOP_ACTING)
        };
        self.is_gateway()
            && self.prefix.iter().any(|(prefix, value)| prefix.prefix_len() > 0 && steered(value))
    }

    /// Largest packet in bytes that a hop carries; 0 = not known.
    pub const fn mtu_of(&self, hop: &Hop) -> u32 {
        match hop {
            Hop::Node { mtu, .. } => *mtu,
            Hop::Wireguard | Hop::Local => self.config.kilo_mtu,
        }
    }

    /// `kilo_ingress` for a packet with TTL left that is no reply to a masqueraded one.
    pub fn kilo_ingress(&self, packet: Packet) -> Verdict {
        let hop = self.routed(packet.dst).and_then(|id| self.hop.get(&id));
        match hop {
            Some(hop @ Hop::Node { .. }) if self.is_gateway() => Ok((Action::Forward, Some(*hop))),
            _ => Ok((Action::Decrypt, None)),
        }
    }

    /// `lan_ingress` for an encapsulated packet addressed to this node.
    pub fn lan_ingress(&self, outer_src: IpAddr, inner: Packet) -> Verdict {
        let sender = self.node.get(&outer_src).ok_or(DropReason::UnknownSender)?;
        let owner = self.prefix(inner.src).ok_or(DropReason::ForeignSource)?;
        let action = self.onward(Some(sender), inner.dst);
        if owner.flags & PREFIX_SOURCE == 0 || !may_carry(sender, owner.hop, action) {
            return Err(DropReason::ForeignSource);
        }
        Ok((action.ok_or(DropReason::NotForUs)?, None))
    }

    /// Where a packet from a node of the location goes on: `Deliver`, `Transit` or
    /// `PassOn`; `None` when it is not for this node. What comes from nobody knows whom is not passed on.
    pub(super) fn onward(&self, sender: Option<&NodeValue>, dst: IpAddr) -> Option<Action> {
        let value = self.prefix(dst)?;
        match value.hop {
            HOP_LOCAL => Some(Action::Deliver),
            HOP_REMOTE | HOP_ACTING if value.flags & PREFIX_ROUTE != 0 && self.is_gateway() => {
                let is_mine = self.resolve(value.hop) == HOP_REMOTE;
                match lead::exit(sender.map_or(Sender::Gateway, |node| sent_by(node, value.hop)), is_mine) {
                    Exit::WireGuard => Some(Action::Transit),
                    Exit::PassOn => Some(Action::PassOn),
                    Exit::Drop => None,
                }
            }
            _ => None,
        }
    }
}

/// Who sends to this gateway, for [`lead::exit`]: only what goes by the acting leader is ever led.
pub(super) const fn sent_by(sender: &NodeValue, hop: u32) -> Sender {
    match () {
        () if hop == HOP_ACTING && sender.flags & NODE_LED != 0 => Sender::Led,
        () if sender.flags & NODE_GATEWAY != 0 => Sender::Gateway,
        () => Sender::Member,
    }
}

/// Whether a node may send what belongs to the owner of this hop: its own; a gateway what
/// comes from other locations, and what it passes on for another node.
const fn may_carry(sender: &NodeValue, owner: u32, action: Option<Action>) -> bool {
    let is_gateway = sender.flags & NODE_GATEWAY != 0;
    owner == sender.hop
        || is_gateway && matches!(owner, HOP_REMOTE | HOP_ACTING)
        || is_gateway && owner >= HOP_FIRST_NODE && matches!(action, Some(Action::Transit))
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
