//! Desired addresses and routes of a host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::flat_map::{FlatSet, Key};

/// Desired addresses and routes of this host. Only these are managed; all others
/// belong to somebody else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetPlan {
    /// MTU of the WireGuard device in bytes.
    pub mtu: u32,
    /// Addresses of the WireGuard device.
    pub addresses: BTreeSet<IpNet>,
    /// Routes, all through the WireGuard device.
    pub routes: FlatSet<Route>,
    /// Prefixes without a route of ours that no default route may take: pods of this node while
    /// nothing holds them, and prefixes of nodes that were declared dead.
    pub unreachable: BTreeSet<IpNet>,
    /// Next hops the kernel keeps resolved, with their interface.
    pub neighbours: BTreeSet<(u32, IpAddr)>,
}

/// Route through the WireGuard device (scope link).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Prefix, without host bits, that is routed into the WireGuard device.
    pub destination: IpNet,
    /// Routing table ID; desired routes are all in [`MAIN_TABLE`].
    pub table: u32,
    /// Source of the host's own packets on this route; `None` leaves the choice to the kernel.
    pub source: Option<IpAddr>,
    /// Largest packet in bytes, where it is less than the device's MTU: the
    /// stack notifies senders of larger ones.
    pub mtu: Option<u32>,
    /// No other route may take these packets: an `unreachable` route with a high
    /// metric backs this one.
    pub closed: bool,
}

impl Key for Route {
    type Rank = (<IpNet as Key>::Rank, u32, Option<IpAddr>, Option<u32>, bool);
    fn rank(&self) -> Self::Rank {
        (self.destination.rank(), self.table, self.source, self.mtu, self.closed)
    }
}

/// MTU in bytes that every link and path must have that carries IPv6: below it the kernel removes IPv6 from a
/// device (RFC 8200, section 5).
pub const MIN_IPV6_MTU: u32 = 1280;

/// The main routing table.
pub const MAIN_TABLE: u32 = 254;
