//! The programs' decisions, implemented a second time: from whole tables, without the functions of
//! `kilo_common::forwarding`, which programs and model share.

use std::net::IpAddr;

use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    lead::hop_of,
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_GATEWAY, CONFIG_NATIVE, HOP_ACTING, HOP_FIRST_NODE, HOP_LOCAL,
        HOP_REMOTE, NODE_GATEWAY, NODE_LED, NodeValue, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR,
        PREFIX_PODS_STEERED, PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue,
    },
    packet::{halves, never_steered, never_steered_v6},
};
use kilo_core::{
    plan::{
        Hop, Tables,
        model::{Packet, Verdict},
        sized_packet::SizedPacket,
    },
    prefixes::longest,
    settings::Tunnel,
};

/// The programs' decisions on these tables.
pub struct Decisions<'a>(pub &'a Tables);

impl Decisions<'_> {
    fn prefix(&self, addr: IpAddr) -> Option<PrefixValue> {
        longest(&self.0.prefix, addr)
    }

    fn routed(&self, dst: IpAddr) -> Option<u32> {
        self.prefix(dst).filter(|value| value.flags & PREFIX_ROUTE != 0).map(|value| value.hop)
    }

    const fn is_gateway(&self) -> bool {
        self.0.config.flags & CONFIG_GATEWAY != 0
    }

    fn resolve(&self, id: u32) -> u32 {
        match id {
            HOP_REMOTE => u32::from(hop_of(self.0.lead[0])),
            HOP_ACTING => u32::from(hop_of(self.0.lead[1])),
            id => id,
        }
    }

    fn hop(&self, id: u32) -> Option<&Hop> {
        self.0.hop.get(&self.resolve(id))
    }

    fn kilo_egress(&self, packet: Packet) -> Verdict {
        if is_never_steered(packet.dst) || is_never_steered(packet.src) {
            return Err(DropReason::NotUnicast);
        }
        let Some(id) = self.routed(packet.dst) else {
            return if self.is_gateway() { Ok((Action::Pass, None)) } else { Err(DropReason::NoPrefix) };
        };
        match self.hop(id) {
            Some(Hop::Wireguard) if self.is_gateway() => Ok((Action::Encrypt, None)),
            Some(hop @ Hop::Node { .. }) => Ok((Action::Steer, Some(*hop))),
            Some(Hop::Local) => Err(DropReason::NoPrefix),
            _ => Err(DropReason::NoHop),
        }
    }

    /// `uplink_egress` for a packet that fits, and is neither WireGuard's nor neighbour discovery: the hop
    /// for which it is handed to `kilo_egress`; `None` when it leaves, perhaps masqueraded. `of_mesh`:
    /// [`Self::is_of_mesh`] of its source.
    ///
    /// # Errors
    /// When the packet would leave in cleartext.
    pub fn uplink_egress(&self, packet: Packet, of_mesh: bool) -> Result<Option<Hop>, DropReason> {
        let Some(value) = self.prefix(packet.dst) else { return Ok(None) };
        if value.flags & PREFIX_NEVER_CLEAR != 0 {
            return Err(DropReason::NotEncrypted);
        }
        let on_link = is_never_steered(packet.dst) || is_never_steered(packet.src);
        let steered = value.flags & PREFIX_HOST_STEERED != 0 || of_mesh;
        if value.flags & PREFIX_PODS_STEERED == 0 || on_link || !steered {
            return Ok(None);
        }
        match self.hop(value.hop) {
            Some(hop @ (Hop::Node { .. } | Hop::Wireguard)) => Ok(Some(*hop)),
            _ => Err(DropReason::NoHop),
        }
    }

    /// True for addresses of pods, WireGuard and VPN peers, which this host itself does not send from.
    /// After decryption, no source that the mesh knows is this host's.
    pub fn is_of_mesh(&self, addr: IpAddr, is_decrypted: bool) -> bool {
        let known = |owner: PrefixValue| {
            owner.flags & PREFIX_SOURCE != 0 && (is_decrypted || owner.flags & PREFIX_PODS_STEERED == 0)
        };
        !self.0.is_private(addr) && self.prefix(addr).is_some_and(known)
    }

    /// Largest packet in bytes that a hop carries; 0: unknown.
    pub const fn mtu_of(&self, hop: &Hop) -> u32 {
        match hop {
            Hop::Node { mtu, .. } => *mtu,
            Hop::Wireguard | Hop::Local => self.0.config.kilo_mtu,
        }
    }

    /// `lan_ingress` for an encapsulated packet addressed to this node.
    pub fn lan_ingress(&self, outer_src: IpAddr, inner: Packet) -> Verdict {
        let sender = self.0.node.get(&outer_src).ok_or(DropReason::UnknownSender)?;
        let owner = self.prefix(inner.src).ok_or(DropReason::ForeignSource)?;
        let action = self.disposition(Some(sender), inner.dst);
        if owner.flags & PREFIX_SOURCE == 0 || !may_carry(sender, owner.hop, action) {
            return Err(DropReason::ForeignSource);
        }
        Ok((action.ok_or(DropReason::NotForUs)?, None))
    }

    /// Disposition of a packet from a node of the location: `Deliver`, `Transit` or `PassOn`; `None` when
    /// it is not for this node. A packet from an unknown sender is not passed on.
    fn disposition(&self, sender: Option<&NodeValue>, dst: IpAddr) -> Option<Action> {
        let value = self.prefix(dst)?;
        match value.hop {
            HOP_LOCAL => Some(Action::Deliver),
            HOP_REMOTE | HOP_ACTING if value.flags & PREFIX_ROUTE != 0 && self.is_gateway() => {
                let flags = sender.map_or(NODE_GATEWAY, |node| node.flags);
                let is_led = value.hop == HOP_ACTING && flags & NODE_LED != 0;
                match (is_led || self.resolve(value.hop) == HOP_REMOTE, flags & NODE_GATEWAY != 0) {
                    (true, _) => Some(Action::Transit),
                    (false, false) => Some(Action::PassOn),
                    (false, true) => None,
                }
            }
            _ => None,
        }
    }

    /// `kilo_egress` for a packet that is not masqueraded.
    pub fn leaving(&self, sized: &SizedPacket) -> Verdict {
        match self.kilo_egress(sized.packet) {
            Ok((Action::Steer, Some(Hop::Node { mtu, .. }))) if !sized.fits(mtu) => Err(DropReason::TooBig),
            verdict => verdict,
        }
    }

    /// `kilo_ingress` for a packet that is not a reply to a masqueraded one.
    pub fn decrypted(&self, sized: &SizedPacket) -> (Action, Option<Hop>) {
        let hop = self.routed(sized.packet.dst).and_then(|id| self.0.hop.get(&id));
        match hop {
            Some(hop @ Hop::Node { mtu, .. }) if self.is_gateway() => {
                let action = forwarded(sized, Action::Forward, *mtu);
                (action, Some(*hop).filter(|_| action == Action::Forward))
            }
            _ => (Action::Decrypt, None),
        }
    }

    /// Checks that packets with this outer source may arrive on this interface.
    ///
    /// # Errors
    /// `UnknownSender` and `WrongInterface`.
    pub fn arrives(&self, outer_src: IpAddr, ifindex: u32) -> Result<(), DropReason> {
        let sender = self.0.node.get(&outer_src).ok_or(DropReason::UnknownSender)?;
        if sender.may_arrive_by(ifindex) { Ok(()) } else { Err(DropReason::WrongInterface) }
    }

    /// The same for a packet without outer header that [`Self::native`] accepts.
    ///
    /// # Errors
    /// `WrongInterface`.
    pub fn arrives_native(&self, src: IpAddr, ifindex: u32) -> Result<(), DropReason> {
        match longest(&self.0.prefix, src).and_then(|value| self.hop(value.hop)) {
            Some(Hop::Node { ifindex: towards, .. }) if *towards == ifindex => Ok(()),
            Some(Hop::Node { remote, .. }) => {
                self.arrives(*remote, ifindex).map_err(|_| DropReason::WrongInterface)
            }
            _ => Ok(()),
        }
    }

    /// `lan_ingress` for the inner packet that `outer_src` has steered here.
    pub fn steered(&self, outer_src: IpAddr, sized: &SizedPacket) -> Verdict {
        match self.lan_ingress(outer_src, sized.packet)? {
            (action @ (Action::Transit | Action::PassOn), _) => {
                Ok((forwarded(sized, action, self.0.config.kilo_mtu), None))
            }
            verdict => Ok(verdict),
        }
    }

    /// Whether `lan_ingress` drops a packet without outer header, because neither of its addresses may be
    /// in cleartext.
    pub fn arrived_in_clear(&self, Packet { src, dst }: Packet) -> bool {
        let is_closed = |address| {
            let owner = longest(&self.0.prefix, address);
            owner.is_some_and(|owner| owner.flags & PREFIX_NEVER_CLEAR != 0)
        };
        self.0.config.flags & CONFIG_ENCAPSULATED != 0
            && !self.0.is_private(dst)
            && is_closed(src)
            && is_closed(dst)
    }

    /// `lan_ingress` for a packet without outer header; `None`: it is left to the stack.
    pub fn native(&self, sized: &SizedPacket) -> Option<Action> {
        let Packet { src, dst } = sized.packet;
        if self.0.config.flags & CONFIG_NATIVE == 0 || is_never_steered(dst) {
            return None;
        }
        let source = longest(&self.0.prefix, src)?;
        if source.flags & PREFIX_SOURCE == 0 || source.hop == HOP_LOCAL {
            return None;
        }
        let Some(Hop::Node { tunnel: Tunnel::None, remote, .. }) = self.hop(source.hop) else { return None };
        let action = match self.disposition(self.0.node.get(remote), dst)? {
            action @ (Action::Transit | Action::PassOn) => forwarded(sized, action, self.0.config.kilo_mtu),
            action => action,
        };
        // Through kilo0 to the stack only when the reply leaves there, too.
        (matches!(action, Action::Transit | Action::PassOn) || source.flags & PREFIX_ROUTE != 0)
            .then_some(action)
    }
}

/// Whether a node may send packets from the owner of this hop: its own, and as a gateway those from other
/// locations, and those it passes on for another node.
const fn may_carry(sender: &NodeValue, owner: u32, action: Option<Action>) -> bool {
    let is_gateway = sender.flags & NODE_GATEWAY != 0;
    owner == sender.hop
        || is_gateway && matches!(owner, HOP_REMOTE | HOP_ACTING)
        || is_gateway && owner >= HOP_FIRST_NODE && matches!(action, Some(Action::Transit))
}

/// True for addresses that stay on a link or a host.
fn is_never_steered(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => never_steered(addr.octets()),
        IpAddr::V6(addr) => never_steered_v6(halves(addr.octets())),
    }
}

/// Whether the program forwards it, or leaves it to the stack, which sends an ICMP error.
fn forwarded(sized: &SizedPacket, action: Action, mtu: u32) -> Action {
    if sized.ttl > 1 && sized.fits(mtu) { action } else { Action::Punt }
}
