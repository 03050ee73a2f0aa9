//! What can happen to a packet: one enum for what was done, one for why it was
//! dropped. Both index the per-CPU array `count` and name a metric label.

macro_rules! counted {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident = $index:literal => $label:literal,)* }) => {
        $(#[$meta])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[doc = $doc])+ $variant = $index,)* }

        impl $name {
            /// Every variant, in the order of its counter.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// Index of this counter in the `count` array.
            pub const fn index(self) -> u32 {
                self as u32
            }

            /// The variant whose counter has this index.
            #[inline(always)]
            pub const fn from_index(index: u32) -> Option<Self> {
                match index { $($index => Some($name::$variant),)* _ => None }
            }

            /// Metric label and name in `kgctl`.
            pub const fn label(self) -> &'static str {
                match self { $($name::$variant => $label,)* }
            }

            /// One sentence for people.
            pub const fn describe(self) -> &'static str {
                match self { $($name::$variant => concat!($($doc),+).trim_ascii(),)* }
            }
        }
    };
}

/// Entries of the `count` array.
pub const COUNTERS: u32 = 64;

counted! {
    /// What a program did with a packet it did not drop.
    Action {
        /// Not ours; left to the stack untouched.
        Pass = 0 => "pass",
        /// Sent from kilo0 to another node of the location.
        Steer = 1 => "steer",
        /// Left to WireGuard, which encrypts it.
        Encrypt = 2 => "encrypt",
        /// On a leader: from a node of the location straight to WireGuard.
        Transit = 3 => "transit",
        /// On a leader: decrypted and sent on to a node of the location.
        Forward = 4 => "forward",
        /// Decapsulated and given to this node's stack as received on kilo0.
        Deliver = 5 => "deliver",
        /// Decrypted, for this node's stack.
        Decrypt = 6 => "decrypt",
        /// Source translated on the way out.
        Masquerade = 7 => "masquerade",
        /// Destination translated back on the way in.
        Unmasquerade = 8 => "unmasquerade",
        /// On a leader: a packet in transit given to the stack, which answers
        /// it (time exceeded, too big) or fragments it.
        Punt = 9 => "punt",
    }
}

counted! {
    /// Why a packet was dropped.
    DropReason {
        /// The table names a hop that does not exist or says drop.
        NoHop = 32 => "no_hop",
        /// On kilo0 of a node that does not lead, no prefix matches.
        NoPrefix = 33 => "no_prefix",
        /// Steered by an address that is no node of this location.
        UnknownSender = 34 => "unknown_sender",
        /// Inner source does not belong to the node that sent it.
        ForeignSource = 35 => "foreign_source",
        /// Steered to a node that neither owns nor forwards the destination.
        NotForUs = 36 => "not_for_us",
        /// Header does not fit in the packet.
        Truncated = 38 => "truncated",
        /// Header fields contradict each other.
        Malformed = 39 => "malformed",
        /// Steered packet whose outer header is a fragment.
        OuterFragment = 40 => "outer_fragment",
        /// The kernel refused to add or remove the outer header.
        Encapsulation = 41 => "encapsulation",
        /// Larger than the hop carries.
        TooBig = 42 => "too_big",
        /// Every port masquerading may use towards that destination is taken.
        NatExhausted = 43 => "nat_exhausted",
        /// To be masqueraded, but of a kind that cannot be (protocol, no address of its family).
        NatUnsupported = 44 => "nat_unsupported",
        /// A NAT entry could not be written.
        NatMapFull = 45 => "nat_map_full",
        /// The kernel refused to rewrite the packet.
        Rewrite = 46 => "rewrite",
        /// A multicast, broadcast or link-local address on kilo0.
        NotUnicast = 47 => "not_unicast",
        /// To be masqueraded, but a later fragment whose first one did not pass before.
        NatFragment = 48 => "nat_fragment",
        /// WireGuard's, from an address that is reached through WireGuard: the answer would go round.
        InsideTunnel = 49 => "inside_tunnel",
        /// Steered packet from the address of a node, on an interface that does not lead to that node.
        WrongInterface = 53 => "wrong_interface",
        /// Came out of a tunnel device of ours and had not passed the checks of `lan_ingress`.
        Unchecked = 54 => "unchecked",
        /// Sent to the VXLAN port of a node, and not by our programs or devices.
        ForgedVxlan = 55 => "forged_vxlan",
        /// The network marked the outer header as congested, and the inner packet cannot bear the mark.
        Congestion = 58 => "congestion",
        /// About to leave by an uplink in clear, although its destination is reached through WireGuard or a tunnel.
        NotEncrypted = 56 => "not_encrypted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_are_unique_and_fit_the_array() {
        let mut seen = std::collections::BTreeSet::new();
        let all = Action::ALL.iter().map(|a| a.index()).chain(DropReason::ALL.iter().map(|d| d.index()));
        for index in all {
            assert!(index < COUNTERS);
            assert!(seen.insert(index), "counter {index} is used twice");
        }
    }
}
