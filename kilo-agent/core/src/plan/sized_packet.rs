//! One program's decision about one packet, with all that it depends on, including length and
//! time to live: the programs' look-ups around the decisions of `kilo_common::forwarding`.

use std::net::IpAddr;

use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    forwarding::{self, HopFields, Ingress},
};

use super::{
    Hop, Tables,
    lookup::{Packet, Verdict, is_never_steered},
};
use crate::settings::Tunnel;

/// A packet as far as the steering programs look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizedPacket {
    /// Its addresses.
    pub packet: Packet,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Bytes of the packet, its IP header included; of a GSO packet: those of
    /// one segment.
    pub length: u32,
}

impl SizedPacket {
    /// A packet that every link carries, far from its last hop.
    pub const fn small(packet: Packet) -> Self {
        Self { packet, ttl: u8::MAX, length: 0 }
    }

    /// True when a link with this MTU in bytes (0 = not known) carries it.
    pub const fn fits(&self, mtu: u32) -> bool {
        mtu == 0 || self.length <= mtu
    }
}

impl Tables {
    /// `kilo_egress` for a packet that is not masqueraded.
    pub fn leaving(&self, sized: &SizedPacket) -> Verdict {
        let Packet { src, dst } = sized.packet;
        if is_never_steered(dst) || is_never_steered(src) {
            return Err(DropReason::NotUnicast);
        }
        let flags = self.config.flags;
        let Some(to) = forwarding::routed(self.prefix(dst)) else {
            return Ok((forwarding::unrouted(flags)?, None));
        };
        let hop = self.hop(to.hop);
        let fits = || hop.is_some_and(|hop| sized.fits(hop.mtu()));
        let action = forwarding::egress(flags, hop.map(HopFields::kind), fits)?;
        Ok((action, hop.copied().filter(|_| action == Action::Steer)))
    }

    /// `kilo_ingress` for a packet that does not answer a masqueraded one.
    pub fn decrypted(&self, sized: &SizedPacket) -> Verdict {
        let hop = || self.hop.get(&forwarding::routed(self.prefix(sized.packet.dst))?.hop);
        Ok(match forwarding::ingress(self.config.flags, hop, sized.ttl, |mtu| sized.fits(mtu)) {
            Ingress::Forward(hop) => (Action::Forward, Some(*hop)),
            Ingress::Punt => (Action::Punt, None),
            Ingress::Decrypt => (Action::Decrypt, None),
        })
    }

    /// `lan_ingress` for the inner packet of one that `outer_src` sent here.
    pub fn steered(&self, outer_src: IpAddr, sized: &SizedPacket) -> Verdict {
        let Packet { src, dst } = sized.packet;
        let sender = self.node.get(&outer_src).ok_or(DropReason::UnknownSender)?;
        let found = self.disposition(Some(sender), dst);
        forwarding::check_source(sender, self.prefix(src), found)?;
        let disposition = forwarding::received(found, sized.ttl, || sized.fits(self.config.kilo_mtu))?;
        Ok((disposition.action(), None))
    }

    /// Whether `lan_ingress` accepts a packet without an outer header.
    ///
    /// # Errors
    /// `ArrivedInClear`.
    pub fn arrives_in_clear(&self, packet: Packet) -> Result<(), DropReason> {
        if self.is_private(packet.dst) {
            return Ok(());
        }
        let prefix = |address| self.prefix(address);
        forwarding::arrives_in_clear(self.config.flags, || prefix(packet.dst), || prefix(packet.src))
    }

    /// `lan_ingress` for a packet without an outer header; `None`: left to the stack.
    pub fn native(&self, sized: &SizedPacket) -> Option<Action> {
        let Packet { src, dst } = sized.packet;
        let source = forwarding::native_source(self.config.flags, || self.prefix(src))?;
        let Hop::Node { tunnel: Tunnel::None, remote, .. } = self.hop(source.hop)? else { return None };
        if is_never_steered(dst) {
            return None;
        }
        let found = self.disposition(self.node.get(remote), dst)?;
        if found.leaves_host() && sized.ttl > 1 && sized.fits(self.config.kilo_mtu) {
            return Some(found.action());
        }
        forwarding::is_answered_by_tunnel(source).then_some(found.inward().action())
    }
}
