//! Keys and values of the BPF maps (`repr(C)`, no implicit padding); the maps themselves are in
//! [`crate::map_table`].
//!
//! IPv4 addresses are `[u8; 4]` and IPv6 addresses `[u8; 16]`, in network byte
//! order; interface indexes, lengths and flags are in host byte order.

/// Version of everything in this module; part of the pin path. Two layouts share a map only where
/// [`crate::map_table::MapSpec::since`] says that it holds the same in both.
pub const LAYOUT_VERSION: u32 = 6;

/// Hop id no prefix may point to: the array's zeroed entry drops.
pub const HOP_NONE: u32 = 0;
/// Hop id of this node itself.
pub const HOP_LOCAL: u32 = 1;
/// Hop id of destinations outside this location that are reached through the leader by Kilo's rule: `lead[0]`
/// names the hop. In a word of `lead` it is this node's own WireGuard, and so is the entry of this id in
/// `hop`, on gateways only.
pub const HOP_REMOTE: u32 = 2;
/// Hop id of destinations outside this location that are reached through the acting leader: `lead[1]` names
/// the hop. The entry of this id in `hop` stays zeroed.
pub const HOP_ACTING: u32 = 3;
/// First hop id given to a node of this location.
pub const HOP_FIRST_NODE: u32 = 4;

/// Index in `lead` of the word for [`HOP_REMOTE`].
pub const LEAD_KILO: u32 = 0;
/// Index in `lead` of the word for [`HOP_ACTING`], which an ANNOUNCE moves.
pub const LEAD_ACTING: u32 = 1;

/// `PrefixValue::flags`: destinations in this prefix are steered to the hop.
pub const PREFIX_ROUTE: u32 = 1;
/// `PrefixValue::flags`: steered packets may have an inner source in this
/// prefix when they come from this hop (`HOP_REMOTE`, `HOP_ACTING`: from a gateway).
pub const PREFIX_SOURCE: u32 = 2;
/// `PrefixValue::flags`: on a gateway, the only address in this prefix is that of a node reached through
/// WireGuard, so it cannot be a WireGuard endpoint.
pub const PREFIX_VIA_WIREGUARD: u32 = 4;
/// `PrefixValue::flags`: packets to this prefix leave only through the WireGuard device. One that reaches an
/// uplink without having been sent there by our programs is dropped, whatever the routes say.
pub const PREFIX_NEVER_CLEAR: u32 = 8;
/// `PrefixValue::flags`: no route leads to the WireGuard device, because the host itself sends to this prefix
/// by its uplinks. `uplink_egress` hands packets from pods and other mesh sources to the WireGuard device.
pub const PREFIX_PODS_STEERED: u32 = 16;
/// `PrefixValue::flags`, with [`PREFIX_PODS_STEERED`]: the host sends only WireGuard's own packets and
/// neighbour discovery to this prefix by its uplinks. Everything else, from any sender, is handed to the
/// WireGuard device.
pub const PREFIX_HOST_STEERED: u32 = 32;
/// `PrefixValue::flags`: on a gateway, the prefix is an address of another location to which WireGuard sends.
/// Nobody on this host has it, although nothing else says so: the host may send there by its uplinks.
pub const PREFIX_ENDPOINT: u32 = 64;

/// `PrefixValue::flags`, in `direct_v4` only: the hop's node may send from here, and the address and
/// interface of its entry in `hop` suffice to recognise it as the sender.
pub const PREFIX_KNOWN_SENDER: u32 = 1 << 14;
/// `PrefixValue::flags`, in `direct_v4` only: no masqueraded packet gets an address in this prefix.
pub const PREFIX_NOT_TRANSLATED: u32 = 1 << 13;
/// `PrefixValue::flags`, in `direct_v4` only: nothing to this prefix is masqueraded.
pub const PREFIX_NOT_MASQUERADED: u32 = 1 << 15;

// The flags that the array adds must not overlap those of the trie's entries.
const _: () = {
    let says = [
        PREFIX_ROUTE,
        PREFIX_SOURCE,
        PREFIX_VIA_WIREGUARD,
        PREFIX_NEVER_CLEAR,
        PREFIX_PODS_STEERED,
        PREFIX_HOST_STEERED,
        PREFIX_ENDPOINT,
    ];
    let adds = PREFIX_KNOWN_SENDER | PREFIX_NOT_TRANSLATED | PREFIX_NOT_MASQUERADED;
    let mut i = 0;
    while i < says.len() {
        assert!(says[i] & adds == 0);
        i += 1;
    }
};

/// Where a prefix leads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixValue {
    /// Index into `hop`.
    pub hop: u32,
    /// `PREFIX_*` bits.
    pub flags: u32,
}

/// `Hop::kind`: drop and count (also the zeroed entry: fail closed).
pub const HOP_KIND_DROP: u32 = 0;
/// `Hop::kind`: this node's own stack.
pub const HOP_KIND_LOCAL: u32 = 1;
/// `Hop::kind`: this node's WireGuard encrypts.
pub const HOP_KIND_WIREGUARD: u32 = 2;
/// `Hop::kind`: another node of this location.
pub const HOP_KIND_NODE: u32 = 3;

/// `Hop::tunnel`: native routing: the IP packet as it is, to the node's link-layer address.
pub const TUNNEL_NONE: u32 = 0;
/// `Hop::tunnel`: IP in IP, RFC 2003 and RFC 2473 (protocols 4 and 41).
pub const TUNNEL_IPIP: u32 = 1;
/// `Hop::tunnel`: VXLAN, RFC 7348, for networks that carry TCP and UDP only.
pub const TUNNEL_VXLAN: u32 = 2;

/// UDP port of our VXLAN packets, host byte order: one above WireGuard's default, and not one of the ports
/// that CNIs use for theirs (4789, 8472).
pub const VXLAN_PORT: u16 = 51_821;
/// VXLAN network identifier of steered packets ("kg").
pub const VXLAN_VNI: u32 = 0x6b67;

/// Outer address family: IPv4.
pub const FAMILY_V4: u32 = 4;
/// Outer address family: IPv6.
pub const FAMILY_V6: u32 = 6;

/// How to reach a hop.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hop {
    /// `HOP_KIND_*`.
    pub kind: u32,
    /// `TUNNEL_*`; meaningful for [`HOP_KIND_NODE`].
    pub tunnel: u32,
    /// Index of the interface towards the node.
    pub ifindex: u32,
    /// Largest inner packet in bytes; 0 = no limit known.
    pub mtu: u32,
    /// `FAMILY_*` of the outer addresses.
    pub family: u32,
    /// Outer source: this node's private address. IPv4 in the first 4 bytes.
    pub local: [u8; 16],
    /// Outer destination: the node's private address. IPv4 in the first 4 bytes.
    pub remote: [u8; 16],
}

/// `NodeValue::flags`: this node is or was a gateway of the location, so its packets may have inner sources
/// in any remote prefix.
pub const NODE_GATEWAY: u32 = 1;
/// `NodeValue::flags`: this gateway leads that member, whatever this gateway's own word says: the member's
/// packets to [`HOP_ACTING`] go to WireGuard here.
pub const NODE_LED: u32 = 2;

/// How many interfaces one node's packets may arrive on.
pub const NODE_INTERFACES: usize = 4;

/// A node that may send us steered packets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeValue {
    /// Hop id of that node.
    pub hop: u32,
    /// `NODE_*` bits.
    pub flags: u32,
    /// A prefix whose addresses may all be inner sources of that node, so that most packets need no lookup in
    /// `prefix_v4`. All zero = none.
    pub sources: [u8; 4],
    /// Mask of that prefix; zero = none.
    pub sources_mask: [u8; 4],
    /// Indexes of the interfaces that packets with this outer source may arrive on; zero = none.
    pub interfaces: [u32; NODE_INTERFACES],
}

impl NodeValue {
    /// True when the address lies in [`Self::sources`].
    #[inline(always)]
    pub const fn may_send_from(&self, src: [u8; 4]) -> bool {
        let mask = u32::from_ne_bytes(self.sources_mask);
        mask != 0 && u32::from_ne_bytes(src) & mask == u32::from_ne_bytes(self.sources)
    }

    /// True when the interface with this index (never zero) is one of [`Self::interfaces`].
    #[inline(always)]
    pub const fn may_arrive_by(&self, ifindex: u32) -> bool {
        let [first, second, third, fourth] = self.interfaces;
        first == ifindex || second == ifindex || third == ifindex || fourth == ifindex
    }
}

/// Value of `masq_src`: masqueraded unless the destination is excluded.
pub const MASQ_SRC_ALWAYS: u32 = 1;
/// Value of `masq_src`: not masqueraded towards a forced destination either
/// (squat/kilo#496: two prefixes of one location's allowed-location-ips).
pub const MASQ_SRC_EXEMPT: u32 = 2;

/// Value of `masq_dst`: never masqueraded.
pub const MASQ_EXCLUDE: u32 = 1;
/// Value of `masq_dst`: masqueraded whatever the source.
pub const MASQ_FORCE: u32 = 2;

/// `NatKey::direction`: as the packet leaves, before translation.
pub const NAT_EGRESS: u8 = 0;
/// `NatKey::direction`: the reply as it arrives, before translation back.
pub const NAT_INGRESS: u8 = 1;

/// `NatKey::direction`: later fragments as they leave; the identification fills both port fields.
pub const NAT_FRAGMENT_EGRESS: u8 = 2;
/// `NatKey::direction`: later fragments as they arrive.
pub const NAT_FRAGMENT_INGRESS: u8 = 3;

/// One direction of a translated flow, as seen on the packet before it is rewritten; or a fragmented
/// datagram. IPv4 addresses are `::ffff:a.b.c.d`. For ICMP echo, both ports hold the identifier.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NatKey {
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
    /// Source port, network byte order.
    pub src_port: [u8; 2],
    /// Destination port, network byte order.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
    /// `NAT_*`.
    pub direction: u8,
    /// Always zero.
    pub pad: [u8; 2],
}

/// `NatValue::flags`: a packet of this direction was seen.
pub const NAT_SEEN: u8 = 1;

/// What the packet is rewritten to: the source on egress, the destination on
/// ingress.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NatValue {
    /// New address.
    pub addr: [u8; 16],
    /// New port or ICMP identifier, network byte order.
    pub port: [u8; 2],
    /// TCP flags seen so far in this direction (or-ed), for NAT GC.
    pub tcp_flags: u8,
    /// `NAT_SEEN` or 0.
    pub flags: u8,
    /// Time of the last packet: `CLOCK_MONOTONIC` in seconds.
    pub last_seen: u32,
}

/// A flow that was opened from outside to an address whose packets are otherwise masqueraded. Its key is that
/// of the answers, [`NAT_EGRESS`] (or [`NAT_FRAGMENT_EGRESS`], for later fragments of an answer), which are
/// not translated.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InboundValue {
    /// Time of the last packet: `CLOCK_MONOTONIC` in seconds.
    pub last_seen: u32,
    /// TCP flags seen from the side that opened it (or-ed).
    pub opener_flags: u8,
    /// TCP flags seen in answers (or-ed).
    pub answer_flags: u8,
    /// `NAT_SEEN` once it was answered, or 0.
    pub flags: u8,
    /// Always zero.
    pub pad: u8,
}

/// An address that masqueraded packets get.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MasqAddr {
    /// The address; IPv4 as `::ffff:a.b.c.d`.
    pub addr: [u8; 16],
    /// The interface that gives it to packets, or [`MASQ_ADDR_SHARED`].
    pub ifindex: u32,
}

/// [`MasqAddr::ifindex`] of an address that several interfaces give to packets, such as one on loopback.
pub const MASQ_ADDR_SHARED: u32 = 0;

/// Interface index in those keys of `masq_addr` that list the masquerade addresses themselves, of all
/// uplinks.
pub const MASQ_ADDR_OWN: u32 = 0;

/// Bits of the interface index, which comes before the destination in a key of `masq_addr`.
pub const MASQ_ADDR_INDEX_BITS: u32 = 32;

/// The key of `masq_addr`: interface index, then the destination (IPv4 as
/// `::ffff:a.b.c.d`); both in network byte order.
#[inline(always)]
pub const fn masq_addr_key(ifindex: u32, destination: &[u8; 16]) -> [u8; 20] {
    let mut key = [0; 20];
    let index = ifindex.to_be_bytes();
    let mut i = 0;
    while i < 20 {
        key[i] = if i < 4 { index[i] } else { destination[i - 4] };
        i += 1;
    }
    key
}

/// `Device::flags`: packets that leave through it may be masqueraded.
pub const DEVICE_MASQUERADE: u32 = 1;
/// `Device::flags`: for some destinations, `masq_addr` names another address.
pub const DEVICE_BY_DESTINATION: u32 = 2;

/// An interface with our programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    /// Address that masqueraded IPv4 packets get, unless `masq_addr` names another; zero = none.
    pub masq_v4: [u8; 4],
    /// IPv6 counterpart of [`Self::masq_v4`]; zero = none.
    pub masq_v6: [u8; 16],
    /// `DEVICE_*` bits.
    pub flags: u32,
}

/// `Config::flags`: this node leads its location by Kilo's rule.
pub const CONFIG_LEADER: u32 = 1;
/// `Config::flags`: masquerading is done by our programs.
pub const CONFIG_MASQUERADE: u32 = 2;
/// `Config::flags`: native routing: nodes of the location may send packets without an outer header.
pub const CONFIG_NATIVE: u32 = 4;

/// `Config::flags`: other locations offer prefixes (allowed-location-ips). The WireGuard device then also
/// brings packets from addresses that masquerading does not exclude, and packets masqueraded on it may get an
/// address that uplinks have, too. So an entry in `nat` does not prove that a flow may leave by an uplink.
pub const CONFIG_OFFERED: u32 = 8;

/// `Config::flags`: masqueraded IPv4 packets get `private_v4` at every uplink, so packets from it are the
/// host's own.
pub const CONFIG_ONE_V4: u32 = 16;
/// `Config::flags`: the same for IPv6 and `private_v6`.
pub const CONFIG_ONE_V6: u32 = 32;

/// `Config::flags`: masqueraded IPv4 packets get different addresses, by uplink or by destination, or some
/// uplinks have none. `masq_addr` lists them all.
pub const CONFIG_SEVERAL_V4: u32 = 64;
/// `Config::flags`: IPv6 packets get different addresses.
pub const CONFIG_SEVERAL_V6: u32 = 128;

/// `Config::flags`: this node's WireGuard device has peers, because it leads its location or is a stand-by.
/// Without this flag, nothing may reach WireGuard.
pub const CONFIG_GATEWAY: u32 = 256;

/// `Config::flags`: a node offers to relay, or gateways may be unreachable at their endpoints, so programs
/// look for relays' messages.
pub const CONFIG_RELAY: u32 = 512;

/// `Config::flags`: every node of the location sends to the others in an outer header only
/// (`--encapsulate=always`): a packet without one, from and to addresses of the mesh, is forged.
pub const CONFIG_ENCAPSULATED: u32 = 1024;

/// `Config::flags`: TCP segments may bypass the stack (`--host-routing=auto`): connection tracking does not
/// compare sequence numbers (`nf_conntrack_tcp_be_liberal`), or is not loaded.
pub const CONFIG_TCP_BYPASSES: u32 = 2048;

/// `SignalKey::flags`: that node may lead this one, so its ANNOUNCE is obeyed. For another location's
/// gateway: its CLAIM and END are accepted.
pub const SIGNAL_GATEWAY: u32 = 1;

/// What the signals of one node of the location are checked with, by its private address (IPv4 as
/// `::ffff:a.b.c.d`). A node reached at an address in another CNI's overlay has a second entry for that
/// address. Gateways of other locations are entered by their control addresses, with id and flag only:
/// WireGuard has authenticated them.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SignalKey {
    /// The key that both nodes derive, as two little-endian words.
    pub key: [u64; 2],
    /// Cookie that an ANNOUNCE of that node has to carry; 0 = none is obeyed.
    pub cookie: u64,
    /// Its id: first 8 bytes of SHA-256 of its public key.
    pub sender: u64,
    /// Its hop id, which the acting leader's word gets when it announces itself.
    pub hop: u32,
    /// `SIGNAL_*` bits.
    pub flags: u32,
}

impl core::fmt::Debug for SignalKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Neither key nor cookie is for logs.
        f.debug_struct("SignalKey")
            .field("sender", &self.sender)
            .field("hop", &self.hop)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}

/// A signal in the ring `signal`; its bytes follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Time of arrival: `CLOCK_MONOTONIC` in nanoseconds.
    pub time: u64,
    /// Source address; IPv4 as `::ffff:a.b.c.d`.
    pub source: [u8; 16],
    /// Bytes of the signal, which follows this head.
    pub length: u32,
    /// The program that received it, as a number of `event::Hook`.
    pub hook: u32,
}

/// Bytes of a record of the ring in front of the signal.
pub const HEARD: usize = size_of::<Heard>();

impl Heard {
    /// Splits a record of the ring into head and signal; `None` when it is shorter than its head says.
    pub fn read(record: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = record.split_first_chunk::<HEARD>()?;
        let time = u64::from_ne_bytes(*head.first_chunk()?);
        let source = *head.get(8..)?.first_chunk()?;
        let length = u32::from_ne_bytes(*head.get(24..)?.first_chunk()?);
        let hook = u32::from_ne_bytes(*head.get(28..)?.first_chunk()?);
        Some((Self { time, source, length, hook }, rest.get(..length as usize)?))
    }
}

/// What every program needs to know about this host.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Config {
    /// Interface index of the WireGuard device.
    pub kilo_ifindex: u32,
    /// `CONFIG_*` bits.
    pub flags: u32,
    /// First port masquerading may choose when a port is taken.
    pub nat_port_min: u16,
    /// Last port masquerading may choose (inclusive).
    pub nat_port_max: u16,
    /// WireGuard's UDP port, host byte order.
    pub wireguard_port: u16,
    /// Bits behind the prefixes in `direct_v4` ([`crate::direct`]); zero = it holds none.
    pub direct_shift: u16,
    /// Largest packet WireGuard carries, in bytes.
    pub kilo_mtu: u32,
    /// Interface index of the VXLAN device; 0 = none.
    pub vxlan_ifindex: u32,
    /// Interface index of the IPIP device, for packets that cannot be given an outer header in place; 0 =
    /// none.
    pub ipip_ifindex: u32,
    /// Address steered packets are sent to, if it is IPv4; zero = none.
    pub private_v4: [u8; 4],
    /// A second such address: this node in the CNI's overlay; zero = none.
    pub overlay_v4: [u8; 4],
    /// Address steered packets are sent to, if it is IPv6; zero = none.
    pub private_v6: [u8; 16],
    /// This node's [control address](crate::signal::control); zero = none.
    pub control: [u8; 16],
    /// The location's WireGuard address, if it is IPv6; zero = none.
    pub wireguard_v6: [u8; 16],
    /// The location's WireGuard address, if it is IPv4; zero = none.
    pub wireguard_v4: [u8; 4],
    /// From this second of `CLOCK_MONOTONIC` on, the programs let every packet pass, because no agent has
    /// taken them over; zero = never.
    pub ends: u32,
}

impl Config {
    /// The configuration for programs that are orphaned until that second: netfilter rules translate from now
    /// on, and the tunnel devices are gone. Packets that only a tunnel device could send are dropped.
    #[must_use]
    pub const fn left_until(self, second: u32) -> Self {
        Self {
            flags: self.flags & !CONFIG_MASQUERADE,
            vxlan_ifindex: 0,
            ipip_ifindex: 0,
            ends: second,
            ..self
        }
    }
}

/// A router's report that a link on the path to a node cannot carry a packet of ours.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathMtu {
    /// The node: outer destination of the packet that did not fit. IPv4 in the first 4 bytes.
    pub remote: [u8; 16],
    /// `FAMILY_*` of `remote`.
    pub family: u32,
    /// Bytes of the packet with its outer header. The MTU that the router reports is not trusted: the agent
    /// probes the path.
    pub size: u32,
}

macro_rules! plain_old_data {
    ($($t:ty: $size:literal),* $(,)?) => {
        $(
            const _: () = assert!(core::mem::size_of::<$t>() == $size);
            // SAFETY: repr(C), Copy, integers only, and the size equals the sum of the fields.
            #[cfg(feature = "user")]
            unsafe impl aya::Pod for $t {}
        )*
    };
}
plain_old_data!(PrefixValue: 8, Hop: 52, NodeValue: 32, NatKey: 40, NatValue: 24, InboundValue: 8, MasqAddr: 20, Device: 24, Config: 92, PathMtu: 24, SignalKey: 40, Heard: 32, crate::relay::Port: 104, crate::relay::Heard: 104, crate::relay::Sender: 88);
