//! What an operator does about a drop reason that grows.

use kilo_common::verdict::DropReason;

/// By label, so that the text stands apart from the layout both sides share.
const ADVICE: &[(&str, &str)] = &[
    (
        "no_hop",
        "The node that owns the destination has no usable private address or was given up, or the location has no \
         leader: `kgctl status`; `kgctl trace` names the node.",
    ),
    (
        "no_prefix",
        "Somebody routes into kilo0 what the mesh does not know: `ip route show dev kilo0`; compare with \
         `kgctl status`.",
    ),
    (
        "unknown_sender",
        "A host outside the location sends encapsulated packets here: look for its address in `kgctl status`. \
         A node of the location that has just joined is known within a second. Otherwise: spoofing, or two \
         clusters in one network.",
    ),
    (
        "foreign_source",
        "A node forwards packets whose source is not in its pod CIDRs: a pod with a spoofed address, a second \
         pod network, or spec.podCIDRs that differ from what the CNI gives out.",
    ),
    (
        "not_for_us",
        "The sender takes this node for the leader, or for the owner of the destination: compare \
         `kgctl status` on both. It ends when both see the same leader.",
    ),
    ("truncated", "A broken sender or driver: capture with `tcpdump -w`; try `ethtool -K DEV gro off`."),
    ("malformed", "A broken or hostile sender: `kgctl monitor --reason malformed -o json` has the bytes."),
    (
        "outer_fragment",
        "A link between the nodes carries less than the MTU their interfaces have: set --mtu, or repair the \
         MTU of the private interfaces.",
    ),
    (
        "encapsulation",
        "The kernel had no room for the outer header, mostly of packets that bear a tunnel of the pod's own: \
         check that the fallback devices exist (`ip -d link`), and report it.",
    ),
    (
        "too_big",
        "The sender ignores path MTU discovery: let ICMP \"fragmentation needed\" and \"packet too big\" \
         through firewalls, or lower --mtu.",
    ),
    (
        "nat_exhausted",
        "Pods hold too many connections to one destination: give the node more addresses or let them reuse \
         connections.",
    ),
    (
        "nat_unsupported",
        "Pods send a protocol outside the mesh that cannot be translated (let them use TCP, UDP, SCTP or echo, or \
         route it unmasqueraded: --service-cidr, allowed-location-ips), or the interface has no address of that family.",
    ),
    (
        "nat_fragment",
        "Fragments out of order, or of a datagram whose first part was dropped; the sender repeats. If it goes on, let \
         pods send what fits the MTU.",
    ),
    (
        "inside_tunnel",
        "Another location's leader speaks from its private address over a network both are in, instead of from its \
         endpoint. Its peer must speak first: set persistent-keepalive on the node that is behind NAT, or \
         force-endpoint to the address both use.",
    ),
    (
        "congestion",
        "Harmless: a router between the nodes is congested and marks packets instead of dropping them, but the \
         sender did not negotiate ECN and is told by a loss (RFC 6040). In numbers: the network between nodes of \
         this location is too slow for them.",
    ),
    (
        "not_encrypted",
        "The route that leads this packet into kilo0 is missing or overruled: check that kilo0 exists and is up (`ip \
         link show kilo0`), that the agent reconciles (`kgctl status`), and that no policy rule (`ip rule`) or more \
         specific route (`ip route get ADDRESS`) leads it elsewhere. Or the destination is a pod of this node that \
         is not there (any more), or of a node that was given up (`kgctl status`).",
    ),
    (
        "wrong_interface",
        "Somebody on another network forges a node's address, or that node's packets take a way back that this host \
         has no route for: compare `ip route get ADDRESS` with the interface `kgctl monitor` shows, and add the route.",
    ),
    (
        "unchecked",
        "IPIP or VXLAN for another address of this host than its private one, from a pod, a process or an interface \
         without programs: spoofing, or another tunnel on UDP port 51821 or without a device of its own for IPIP.",
    ),
    (
        "forged_vxlan",
        "A process or a pod sends UDP to port 51821 of another node, which carries the mesh: find it by \
         `ss -upn dport = :51821`, and give it another port.",
    ),
    ("nat_map_full", "More flows than the table holds: `bpftool map show name nat`; report it."),
    ("rewrite", "The kernel refused to change the packet, mostly for lack of memory: `dmesg`."),
    (
        "not_unicast",
        "Harmless: discovery protocols on kilo0. In numbers: something is bound to kilo0 that wants a LAN.",
    ),
];

/// What to do about it.
pub fn advice(reason: DropReason) -> &'static str {
    ADVICE.iter().find(|(label, _)| *label == reason.label()).map_or("", |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_drop_reason_has_its_advice_and_none_is_left_over() {
        for reason in DropReason::ALL {
            assert!(!advice(*reason).is_empty(), "{} has no advice", reason.label());
        }
        for (label, _) in ADVICE {
            assert!(
                DropReason::ALL.iter().any(|reason| reason.label() == *label),
                "{label} is no drop reason"
            );
        }
    }
}
