//! Why packets are dropped, with what an operator does about it. A new reason is one entry here, and the code
//! that uses it.

use crate::counters::counted;

counted! {
    /// Why a packet was dropped. 37 was `ttl_exceeded` and stays unused, because tools that store numbers
    /// read it as that.
    DropReason {
        /// The destination is in the mesh, but its node or location cannot be reached now.
        NoHop = 32 => "no_hop",
            "The node that owns the destination has no usable private address or was declared dead, or the \
             location has no leader: `kgctl status`; `kgctl trace` names the node.",
        /// On kilo0 of a node that does not lead, the destination matches no prefix of the mesh.
        NoPrefix = 33 => "no_prefix",
            "Something routes packets into kilo0 for destinations that the mesh does not know: `ip route show \
             dev kilo0`; compare with `kgctl status`.",
        /// Steered by an address that belongs to no node of this location.
        UnknownSender = 34 => "unknown_sender",
            "A host outside the location sends encapsulated packets here: look for its address in `kgctl \
             status`. A node of the location that has just joined is known within a second. Otherwise: \
             spoofing, or two clusters in one network.",
        /// Inner source does not belong to the node that sent it; or, on a gateway, a pod sends from an address
        /// of another node, location or VPN peer.
        ForeignSource = 35 => "foreign_source",
            "A node forwards packets whose source is not in its pod CIDRs: a pod with a spoofed address, a \
             second pod network, or spec.podCIDRs that differ from what the CNI gives out.",
        /// Steered to a node that neither owns nor forwards the destination.
        NotForUs = 36 => "not_for_us",
            "The sender takes this node for the leader, or for the owner of the destination: compare `kgctl \
             status` on both. It ends when both see the same leader.",
        /// Header that does not fit in the packet.
        Truncated = 38 => "truncated",
            "A broken sender or driver: capture with `tcpdump -w`; try `ethtool -K DEV gro off`.",
        /// Header whose fields contradict each other.
        Malformed = 39 => "malformed",
            "A broken or hostile sender: `kgctl monitor --reason malformed -o json` has the bytes.",
        /// Steered packet whose outer header is a fragment.
        OuterFragment = 40 => "outer_fragment",
            "A link between the nodes carries less than the MTU their interfaces have: set --mtu, or repair \
             the MTU of the private interfaces. On a relay the path from one end of a pair does: set --mtu there.",
        /// The kernel refused to add or remove the outer header.
        Encapsulation = 41 => "encapsulation",
            "The kernel had no room for the outer header, mostly of packets that already carry a pod's own \
             tunnel: check that the fallback devices exist (`ip -d link`), and report it.",
        /// Packet larger than the hop's MTU.
        TooBig = 42 => "too_big",
            "The sender ignores path MTU discovery: let ICMP \"fragmentation needed\" and \"packet too big\" \
             through firewalls, or lower --mtu.",
        /// None of the 16 ports that masquerading tried towards that destination was free.
        NatExhausted = 43 => "nat_exhausted",
            "Pods hold too many connections to one destination: give the node more addresses or let them \
             reuse connections.",
        /// Packet that needs masquerading but cannot be translated: its protocol, or no address of its
        /// family.
        NatUnsupported = 44 => "nat_unsupported",
            "Pods send a protocol outside the mesh that cannot be translated (let them use TCP, UDP, SCTP or \
             echo, or route it unmasqueraded: --service-cidr, allowed-location-ips), or the interface has no \
             address of that family.",
        /// A NAT entry could not be written.
        NatMapFull = 45 => "nat_map_full",
            "The kernel had no memory for the entry, or all were in use at that moment: compare `kilo_nat_entries` with \
             131,072, look at `dmesg`, and report it.",
        /// The kernel refused to rewrite the packet.
        Rewrite = 46 => "rewrite",
            "The kernel refused to change the packet, mostly for lack of memory: `dmesg`.",
        /// Multicast, broadcast or link-local address on kilo0.
        NotUnicast = 47 => "not_unicast",
            "Harmless: discovery protocols on kilo0. If there are many: something is bound to kilo0 that \
             expects a LAN.",
        /// Later fragment that needs masquerading, whose first fragment was not seen.
        NatFragment = 48 => "nat_fragment",
            "Fragments arrived out of order, or the first one was dropped; the sender retransmits. If it \
             persists, let pods send what fits the MTU.",
        /// WireGuard packet from or to an address that is itself routed through the tunnel; it would loop.
        InsideTunnel = 49 => "inside_tunnel",
            "Another location's leader sends from its private address over a network both are in, instead of \
             from its endpoint; or this leader's WireGuard sends to such an address. Its peer must speak first: set persistent-keepalive on the node that is \
             behind NAT, or force-endpoint to the address both use.",
        /// Steered packet from the address of a node, on an interface that does not lead to that node.
        WrongInterface = 53 => "wrong_interface",
            "A host on another network forges a node's address, or that node's packets return by an interface \
             that this host has no route for: compare `ip route get ADDRESS` with the interface that `kgctl \
             monitor` shows, and add the route.",
        /// Packet from a tunnel device of ours that has not passed the checks of `lan_ingress`.
        Unchecked = 54 => "unchecked",
            "IPIP or VXLAN from a pod, a process or an interface without programs, or to another address of this \
             host than its private one: either the packet is spoofed, or another tunnel uses UDP port 51821, or one \
             uses IPIP without a device of its own.",
        /// VXLAN packet, or apparent signal, to a node's VXLAN port that was not sent by Kilo; or IPIP of a
        /// pod to a node.
        ForgedVxlan = 55 => "forged_vxlan",
            "A process or a pod forges mesh traffic, or has a VXLAN of its own on UDP port 51821: find it by \
             `ss -upn dport = :51821`, and give it another port. Or a pod sends IPIP to a node: `kgctl monitor` \
             names its address.",
        /// A signal about a change of leader that is outdated: an earlier term, or recorded before this
        /// node's start; or one of many outdated relay messages from the same sender.
        StaleSignal = 59 => "stale_signal",
            "Harmless after a change of leader: signals are repeated until they are answered. If there are \
             many: somebody replays recorded signals or messages about relays; find the source with `kgctl \
             monitor --reason stale_signal`.",
        /// Signal whose tag or sender is not that of the node it comes from.
        ForgedSignal = 60 => "forged_signal",
            "A node that has changed its key within the last seconds; else a host on the network of the \
             nodes forges signals, or on kilo0 a gateway of another location speaks for another: `kgctl monitor \
             --reason forged_signal` shows the source and interface.",
        /// No room in the ring for a signal or a relay message: the agent does not read the ring, or receives
        /// replies to probes that it never sent.
        SignalRingFull = 51 => "signal_ring_full",
            "Signals and relay messages are sent again, and what anybody can send leaves room for the rest. If it \
             grows: the agent of this node hangs or lacks CPU (`kgctl status`), or somebody sends signals that were \
             never asked for: `kgctl monitor --reason signal_ring_full` shows from where.",
        /// Signal from a node that this one shares no key with, or of a kind that has no place here.
        UnknownSignal = 61 => "unknown_signal",
            "A node that has just joined, or become a gateway, is known within a second. Otherwise: `kgctl monitor \
             --reason unknown_signal` shows who sends; on a LAN `kgctl status` says whether it is a node of this \
             location, on kilo0 it is a VPN peer, or a node of another location that is not a gateway, whose CLAIM or \
             END does not count.",
        /// On a relay: a packet to a pair's port that is not from the end bound to it, or is not WireGuard's.
        RelayStranger = 62 => "relay_stranger",
            "A few are harmless: the NAT in front of one end of the pair has changed its port, which that \
             end reports within seconds. Otherwise a host scans ports or forges packets: `kgctl monitor --reason \
             relay_stranger` shows the source. Nothing is answered.",
        /// On a relay: a packet to a port of a pair whose ends have not both been bound yet.
        RelayUnbound = 63 => "relay_unbound",
            "Harmless while a pair is being connected. If it persists, the other end does not reach this relay on \
             UDP ports 51830 to 52829, or by the other IP family: open them, and see `kgctl status`.",
        /// On a relay, one end of a pair exceeded its rate; or one node sent more than 256 relay messages a
        /// second.
        RelayLimit = 50 => "relay_limit",
            "One end of a relayed pair exceeds this relay's --relay-rate. The excess is dropped, so the tunnel is \
             limited to that rate. Raise it, or give the two locations a direct path (`kgctl status` names relayed \
             tunnels). If neither location sends that much, somebody forges the packets of one. Where the node relays \
             nothing, a gateway of another location floods it with messages: `kgctl monitor --reason relay_limit` shows it.",
        /// The network marked the outer header as congested, and the inner packet does not support ECN.
        Congestion = 58 => "congestion",
            "Harmless: a router between the nodes is congested and marks packets instead of dropping them, \
             but the sender did not negotiate ECN and learns of it by loss (RFC 6040). If there are many: \
             the network between the nodes of this location is too slow for their traffic.",
        /// About to leave unencrypted by an uplink, although its destination is reached through WireGuard or
        /// a tunnel.
        NotEncrypted = 56 => "not_encrypted",
            "The route that leads this packet into kilo0 is missing or overruled: check that kilo0 exists and \
             is up (`ip link show kilo0`), that the agent reconciles (`kgctl status`), and that no policy \
             rule (`ip rule`) or more specific route (`ip route get ADDRESS`) leads it elsewhere. Or the \
             destination is a pod of this node that no longer exists, or of a node that was declared dead \
             (`kgctl status`); or a node of the location to which only a default route leads, because the \
             interface with this node's private address is down; or an address in `--subnet` that no location \
             has, as far as this node knows: a machine outside the mesh needs a more specific \
             route.",
        /// Arrived unencrypted on an uplink, although the mesh encrypts or encapsulates what goes from and to
        /// its addresses.
        ArrivedInClear = 52 => "arrived_in_clear",
            "A host in the network of this node sends from an address of the mesh: of a pod, of a node of another \
             location, in `--subnet`, or in what another location or a VPN peer offers. Capture with `tcpdump -eni \
             DEV src ADDRESS` for its link-layer address; a machine that has one of the latter needs a more \
             specific route on the nodes. Or the sender is a node with another `--encapsulate`, or `--tunnel none`, or one \
             whose programs were detached: compare the flags, and look at its log.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::{Action, COUNTERS};

    /// Indexes of former reasons. No other reason gets them while the map `count` has this layout: programs of an
    /// earlier build may count in it.
    const RETIRED: &[u32] = &[37];
    /// Indexes that no reason has ever had; a new one takes the first of them.
    const FREE: &[u32] = &[57];

    #[test]
    fn each_index_of_a_drop_reason_is_used_retired_or_free() {
        let used = DropReason::ALL.iter().map(|reason| reason.index());
        let mut all: Vec<u32> = used.chain(RETIRED.iter().copied()).chain(FREE.iter().copied()).collect();
        all.sort_unstable();
        assert!(
            all.iter().copied().eq(32..COUNTERS),
            "a retired index is used, or one is not listed: {all:?}"
        );
    }

    #[test]
    fn indexes_are_unique_and_fit_the_array() {
        let mut seen = std::collections::BTreeSet::new();
        let all = Action::ALL.iter().map(|a| a.index()).chain(DropReason::ALL.iter().map(|d| d.index()));
        for index in all {
            assert!(index < COUNTERS);
            assert!(seen.insert(index), "counter {index} is used twice");
        }
    }

    #[test]
    fn every_drop_reason_says_what_to_do() {
        for reason in DropReason::ALL {
            assert!(!reason.remedy().is_empty(), "{} has no remedy", reason.label());
        }
    }
}
