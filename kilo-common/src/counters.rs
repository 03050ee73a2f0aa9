//! Counters of the data path: what was done with a packet is here, why it was dropped is in `drop_reasons`.
//! Both index the per-CPU array `count` and name a metric label.

macro_rules! counted {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident = $index:literal => $label:literal $(, $remedy:literal)?,)* }) => {
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

            /// What an operator does when this counter grows; empty when nothing needs to be done.
            pub const fn remedy(self) -> &'static str {
                match self { $($name::$variant => concat!($($remedy)?),)* }
            }

            /// The variant's doc comment: one sentence for users.
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
        /// On a gateway that does not lead the sender: sent on to the gateway that does.
        PassOn = 10 => "pass_on",
        /// A signal answered by the program itself.
        Reflect = 11 => "reflect",
        /// A signal handed to the agent.
        Hear = 12 => "hear",
        /// On a relay: WireGuard's ciphertext, sent on to the pair's other end.
        Relay = 13 => "relay",
        /// Sent from a pod's interface straight to kilo0, past the stack; counted there again.
        Bypass = 14 => "bypass",
    }
}

pub(crate) use counted;
