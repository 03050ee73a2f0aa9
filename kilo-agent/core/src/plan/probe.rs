//! [`super::model`] with what else of a packet decides: its length and its
//! time to live.

use std::net::IpAddr;

use kilo_common::{
    counters::{Action, DropReason},
    maps::{CONFIG_PLAIN, HOP_LOCAL, PREFIX_ROUTE, PREFIX_SOURCE},
};

use super::{
    Hop, Tables,
    model::{Packet, Verdict, is_never_steered},
};
use crate::{settings::Tunnel, topology::prefixes::longest};

/// A packet as far as the steering programs look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Its addresses.
    pub packet: Packet,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Bytes of the packet, its IP header included; of a superpacket: those of
    /// one segment.
    pub length: u32,
}

impl Probe {
    /// True when a link with this MTU in bytes (0 = not known) carries it.
    pub const fn fits(&self, mtu: u32) -> bool {
        mtu == 0 || self.length <= mtu
    }

    /// Whether it goes on by itself, or by the stack, which answers it.
    fn forwarded(&self, action: Action, mtu: u32) -> Action {
        if self.ttl > 1 && self.fits(mtu) { action } else { Action::Punt }
    }
}

impl Tables {
    /// True for addresses that steered packets for this node are sent to.
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

    /// `kilo_egress` for a packet that is not masqueraded.
    pub fn leaving(&self, probe: &Probe) -> Verdict {
        match self.kilo_egress(probe.packet) {
            Ok((Action::Steer, Some(Hop::Node { mtu, .. }))) if !probe.fits(mtu) => Err(DropReason::TooBig),
            verdict => verdict,
        }
    }

    /// `kilo_ingress` for a packet that is no reply to a masqueraded one.
    pub fn decrypted(&self, probe: &Probe) -> Verdict {
        match self.kilo_ingress(probe.packet) {
            Ok((action @ Action::Forward, hop @ Some(Hop::Node { mtu, .. }))) => {
                let action = probe.forwarded(action, mtu);
                Ok((action, hop.filter(|_| action == Action::Forward)))
            }
            verdict => verdict,
        }
    }

    /// Whether packets with this outer source may come in by this interface.
    ///
    /// # Errors
    /// `UnknownSender` and `WrongInterface`.
    pub fn arrives(&self, outer_src: IpAddr, ifindex: u32) -> Result<(), DropReason> {
        let sender = self.node.get(&outer_src).ok_or(DropReason::UnknownSender)?;
        if sender.may_arrive_by(ifindex) { Ok(()) } else { Err(DropReason::WrongInterface) }
    }

    /// The same of a packet without outer header that [`Self::plain`] takes.
    ///
    /// # Errors
    /// `WrongInterface`.
    pub fn arrives_plain(&self, src: IpAddr, ifindex: u32) -> Result<(), DropReason> {
        match longest(&self.prefix, src).and_then(|value| self.way(value.hop)) {
            Some(Hop::Node { ifindex: towards, .. }) if *towards == ifindex => Ok(()),
            Some(Hop::Node { remote, .. }) => {
                self.arrives(*remote, ifindex).map_err(|_| DropReason::WrongInterface)
            }
            _ => Ok(()),
        }
    }

    /// `lan_ingress` for the inner packet of one that `outer_src` sent here.
    pub fn steered(&self, outer_src: IpAddr, probe: &Probe) -> Verdict {
        match self.lan_ingress(outer_src, probe.packet)? {
            (action @ (Action::Transit | Action::PassOn), _) => {
                Ok((probe.forwarded(action, self.config.kilo_mtu), None))
            }
            verdict => Ok(verdict),
        }
    }

    /// `lan_ingress` for a packet without outer header; `None`: left to the stack.
    pub fn plain(&self, probe: &Probe) -> Option<Action> {
        let Packet { src, dst } = probe.packet;
        if self.config.flags & CONFIG_PLAIN == 0 || is_never_steered(dst) {
            return None;
        }
        let source = longest(&self.prefix, src)?;
        if source.flags & PREFIX_SOURCE == 0 || source.hop == HOP_LOCAL {
            return None;
        }
        let Some(Hop::Node { tunnel: Tunnel::None, remote, .. }) = self.way(source.hop) else { return None };
        let action = match self.onward(self.node.get(remote), dst)? {
            action @ (Action::Transit | Action::PassOn) => probe.forwarded(action, self.config.kilo_mtu),
            action => action,
        };
        // To the stack by way of kilo0 only if the answer leaves there, too.
        (matches!(action, Action::Transit | Action::PassOn) || source.flags & PREFIX_ROUTE != 0)
            .then_some(action)
    }
}
