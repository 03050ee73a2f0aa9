//! Prefixes of nodes that were declared dead while their objects exist, or were known a moment ago: nobody
//! else has them, and packets to them are dropped, not left to the default route. The same goes for pod
//! CIDRs of nodes that have gone since, those that this node had before, and WireGuard addresses that no
//! location has any more.

use ipnet::IpNet;
use kilo_common::maps::{PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED};

use super::{Inputs, Own};
use crate::{settings::Tunnel, topology::Lost};

/// Each prefix, without host bits, with flags for what must not be sent there in cleartext; nothing is
/// masqueraded towards any of them.
pub(super) fn prefixes(inputs: &Inputs<'_>, own: &Own<'_>) -> Vec<(IpNet, u32)> {
    let mut all = Vec::new();
    // As while it took part: within the location, another CNI or the network may carry packets to its pods.
    let ours =
        |lost: &Lost| inputs.carries_pods() && own.tunnel(inputs.settings, &lost.member) != Tunnel::None;
    for lost in inputs.mesh.lost.iter().chain(&inputs.mesh.gone) {
        let pods = if !lost.is_in(own.segment) || ours(lost) { PREFIX_NEVER_CLEAR } else { 0 };
        all.extend(lost.member.node.pod_cidrs.iter().map(|cidr| (cidr.trunc(), pods)));
    }
    for lost in &inputs.mesh.lost {
        let (near, ours) = (lost.is_in(own.segment), ours(lost));
        let address = match () {
            // The host reaches it like any host of the network; pods needed an outer header.
            () if near && ours => PREFIX_PODS_STEERED,
            () if near => 0,
            // The API server that reports the node's return may run there.
            () if own.host_speaks_freely(&lost.member) => PREFIX_PODS_STEERED,
            () => PREFIX_NEVER_CLEAR,
        };
        all.extend(lost.member.private_ip().filter(|_| !near || ours).map(|ip| (ip.into(), address)));
    }
    // No route leads back to such a pod, and by the default route the answer would leave in cleartext.
    all.extend(inputs.links.former_pod_cidrs.iter().map(|cidr| (cidr.trunc(), PREFIX_NEVER_CLEAR)));
    // Packets may still be in flight to the address of a node that led a moment ago.
    all.extend(inputs.mesh.freed.iter().map(|address| ((*address).into(), PREFIX_NEVER_CLEAR)));
    all
}
