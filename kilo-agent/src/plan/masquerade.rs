//! Tables of masquerading: who is translated, and towards what never.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::maps::{
    DEVICE_MASQUERADE, Device, MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT,
};

use super::{Inputs, Own, Tables};
use crate::topology::prefixes::Prefixes;

pub(super) fn fill(inputs: &Inputs<'_>, own: &Own<'_>, tables: &mut Tables) {
    let peers = inputs.mesh.peers.iter().flat_map(|peer| &peer.allowed_ips).copied();
    let known: Prefixes<()> = inputs
        .mesh
        .segments
        .iter()
        .flat_map(|segment| &segment.allowed_ips)
        .copied()
        .chain(peers.clone())
        .chain(inputs.settings.service_cidrs.iter().copied())
        .collect();
    for prefix in own.segment.allowed_location_ips.iter().map(IpNet::trunc) {
        // A known prefix always wins; the trie would prefer the longer one.
        if known.holding(prefix).next().is_none() {
            tables.masq_dst.insert(prefix, MASQ_FORCE);
        }
        // Between prefixes of the own location addresses stay as they are
        // (squat/kilo#496), unless the prefix also holds what lies elsewhere.
        if known.inside(prefix).next().is_none() {
            tables.masq_src.insert(prefix, MASQ_SRC_EXEMPT);
        }
    }
    tables.masq_dst.extend(known.keys().map(|prefix| (prefix, MASQ_EXCLUDE)));
    let pods = own.member.pod_cidrs.iter().copied().filter(|_| inputs.settings.cni);
    for prefix in pods.chain(peers).map(|prefix| prefix.trunc()) {
        tables.masq_src.insert(prefix, MASQ_SRC_ALWAYS);
    }
    for (ifindex, addr) in &inputs.links.uplinks {
        tables.device.insert(*ifindex, Device { masq_addr: addr.octets(), flags: DEVICE_MASQUERADE });
    }
    if let Some(addr) = tunnel_address(own) {
        tables.device.insert(inputs.links.kilo, Device { masq_addr: addr, flags: DEVICE_MASQUERADE });
    }
}

/// What masqueraded packets get that leave through the WireGuard device: an
/// address the other locations route back through it.
fn tunnel_address(own: &Own<'_>) -> Option<[u8; 4]> {
    let addr = if own.leads { own.segment.wireguard_ip } else { own.member.private_ip() };
    match addr {
        Some(IpAddr::V4(ip)) => Some(ip.octets()),
        _ => None,
    }
}
