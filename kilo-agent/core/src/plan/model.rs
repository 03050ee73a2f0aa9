//! What the data path does with one packet, read from the tables alone: look-ups in whole tables around the
//! decisions of `kilo_common::forwarding`, which the BPF programs share. For `kgctl trace`, and for
//! conformance to Kilo.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::{counters::Action, drop_reasons::DropReason, forwarding};

pub use super::lookup::{Packet, Verdict};
use super::{Hop, HostPlan, Tables, lookup::is_never_steered, sized_packet::SizedPacket};
use crate::settings::Tunnel;

/// Where a packet goes, as seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Encrypted by this node's WireGuard.
    Wireguard,
    /// To another node of this location.
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
    /// `kilo_egress` for a small packet that is not masqueraded.
    pub fn kilo_egress(&self, packet: Packet) -> Verdict {
        self.leaving(&SizedPacket::small(packet))
    }

    /// `uplink_egress` for a small packet of this host or its pods that is neither WireGuard's nor
    /// neighbour discovery: the hop for which it is handed to `kilo_egress`; `None` when it
    /// leaves, perhaps masqueraded.
    ///
    /// # Errors
    /// The packet would be sent in cleartext.
    pub fn uplink_egress(&self, packet: Packet) -> Result<Option<Hop>, DropReason> {
        self.guarded(packet, false)
    }

    /// As [`Self::uplink_egress`]; `is_decrypted`: the packet came from the WireGuard device.
    fn guarded(&self, packet: Packet, is_decrypted: bool) -> Result<Option<Hop>, DropReason> {
        let Some(value) = self.prefix(packet.dst).filter(|value| forwarding::is_guarded(value.flags)) else {
            return Ok(None);
        };
        let on_link = || is_never_steered(packet.dst) || is_never_steered(packet.src);
        let of_mesh = self.is_of_mesh(packet.src, is_decrypted);
        if !forwarding::guard(value.flags, of_mesh, false, on_link)? {
            return Ok(None);
        }
        let hop = self.hop(value.hop);
        self.mtu_beside(hop)?;
        Ok(hop.copied())
    }

    /// `kilo_ingress` for a small packet with TTL left that does not answer a masqueraded one.
    pub fn kilo_ingress(&self, packet: Packet) -> Verdict {
        self.decrypted(&SizedPacket::small(packet))
    }

    /// `lan_ingress` for a small encapsulated packet addressed to this node.
    pub fn lan_ingress(&self, outer_src: IpAddr, inner: Packet) -> Verdict {
        self.steered(outer_src, &SizedPacket::small(inner))
    }
}

impl HostPlan {
    /// Where a packet goes that is sent by this host or arrives at its stack.
    pub fn route(&self, packet: Packet) -> Route {
        self.routed(packet, false)
    }

    fn routed(&self, packet: Packet, is_decrypted: bool) -> Route {
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
        match self.tables.guarded(packet, is_decrypted) {
            Ok(Some(_)) => seen_from_outside(self.tables.kilo_egress(packet)),
            Ok(None) => Route::Other,
            Err(reason) => Route::Dropped(reason),
        }
    }

    /// Where a packet goes that comes out of the WireGuard device.
    pub fn route_from_kilo(&self, packet: Packet) -> Route {
        match self.tables.kilo_ingress(packet) {
            Ok((Action::Decrypt, _)) => self.routed(packet, true),
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
