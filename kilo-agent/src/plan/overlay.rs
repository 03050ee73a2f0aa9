//! Beside another CNI, its overlay carries IPIP packets to the leader: the
//! network between the nodes may drop IP protocol 4, the overlay does not.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

use super::{Inputs, Own};
use crate::topology::{Member, Tunnel};

/// A CNI that manages routes inside a location (`--compatibility`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cni {
    /// Flannel: a node is the first address of its pod CIDR.
    Flannel,
    /// Cilium: a node is the address of its `cilium_host`, which it publishes.
    Cilium,
}

/// This host's part of a CNI's overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// Whose it is.
    pub cni: Cni,
    /// Interfaces its packets come in by.
    pub interfaces: BTreeSet<u32>,
}

impl Cni {
    /// A node's address in the overlay; `None` while it is not known.
    pub fn address(self, member: &Member) -> Option<Ipv4Addr> {
        let v4 = |ip| match ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        };
        match self {
            Self::Flannel => member.pod_cidrs.iter().find_map(|cidr| v4(cidr.network())),
            Self::Cilium => member.cni_compatibility_ip.and_then(v4),
        }
    }
}

/// A node's address in the overlay beside this host.
pub(super) fn address(inputs: &Inputs<'_>, member: &Member) -> Option<Ipv4Addr> {
    inputs.links.overlay.as_ref().and_then(|overlay| overlay.cni.address(member))
}

/// Outer addresses of IPIP packets to the leader, own and its; `None` when
/// they are the private ones: also where the overlay is not the way there
/// (not up yet, or a CNI that routes without one).
pub(super) fn to_leader(
    inputs: &Inputs<'_>,
    own: &Own<'_>,
    member: &Member,
    tunnel: Tunnel,
) -> Option<(IpAddr, IpAddr)> {
    let leads = own.segment.leading().is_some_and(|leader| leader.name == member.name);
    let (local, remote) = (address(inputs, own.member)?, address(inputs, member)?);
    let (local, remote) = (IpAddr::from(local), IpAddr::from(remote));
    let there = inputs.links.towards.contains_key(&remote);
    (leads && there && tunnel == Tunnel::Ipip && local != remote).then_some((local, remote))
}
