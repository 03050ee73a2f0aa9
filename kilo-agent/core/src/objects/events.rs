//! Reasons of the Events that agents write about Node and Peer objects: one table.

/// Whether an operator should look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// As it should be.
    Normal,
    /// Something should be looked at.
    Warning,
}

impl Severity {
    /// Value of the Event's field `type`; the API server accepts these two alone.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident $severity:ident $kind:literal $meaning:literal)+) => {
        /// `reason` of an Event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum EventReason {
            $($(#[doc = $doc])+ $name,)+
        }

        impl EventReason {
            /// Every reason, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Value of the Event's field `reason`: the variant's name, by which `kubectl get events` selects.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),+ }
            }

            /// `type` of the Event.
            pub const fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity),+ }
            }

            /// Kind of the object it is about.
            pub const fn kind(self) -> &'static str {
                match self { $(Self::$name => $kind),+ }
            }

            /// What has happened, and who writes it.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning),+ }
            }
        }
    };
}

reasons! {
    /// The node takes part.
    JoinedMesh Normal "Node" "The node takes part in the mesh. Written by its agent."
    /// The node no longer takes part.
    LeftMesh Warning "Node" "The node no longer takes part; the message says why. Written by its agent while that runs, and by the leader of the first location."
    /// The node has not taken part yet.
    NotInMesh Warning "Node" "The agent has run for 30 s and its node is not in the mesh; the message says what is missing. Written by its agent."
    /// The node has become the leader.
    LeadsLocation Normal "Node" "The node leads its location from now on; the message names the previous leader and the reason: lost, handed over, or planned. Written by its agent."
    /// The node was the leader.
    FollowsLeader Normal "Node" "The node led its location and now follows another. Written by its agent."
    /// A tunnel of the node gets no answer.
    TunnelSilent Warning "Node" "The node sends into a WireGuard tunnel that has no valid handshake. Written by the agent of a leader."
    /// A tunnel that was silent answers.
    TunnelAnswers Normal "Node" "A tunnel that was silent has a handshake. Written by its agent."
    /// Another node claims the same private address.
    AddressConflict Warning "Node" "Another node claims the same private address. Written by the agent of each node that claims it."
    /// Another node claims the same WireGuard key.
    KeyConflict Warning "Node" "Another node has the same WireGuard key, so one of them is out of the mesh. Written by the agent of each node that has it."
    /// A pod CIDR or an address of the node belongs to another node, or to the mesh.
    PrefixConflict Warning "Node" "A pod CIDR of the node overlaps another node's, or a location's WireGuard address is in one of its pod CIDRs or is its private address. Written by the agent of each node concerned."
    /// The node leads a location that has no WireGuard address.
    NoWireguardAddress Warning "Node" "The node leads a location for which `--subnet` has no WireGuard address left. Written by its agent."
    /// The node leads its location with an endpoint that other
    /// locations may not reach.
    PrivateEndpoint Warning "Node" "The node leads its location with an endpoint that others may not reach. Written by its agent."
    /// The peer is in the mesh.
    PeerAccepted Normal "Peer" "Leaders accept the peer. Written by the leader of the first location."
    /// The peer is not in the mesh.
    PeerRefused Warning "Peer" "The peer is not used; the message says why. Written by the leader of the first location."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_words_as_kubernetes_wants_them() {
        for reason in EventReason::ALL {
            let text = reason.as_str();
            assert!(text.len() <= 128 && text.chars().all(char::is_alphabetic), "{text}");
            assert!(text.starts_with(char::is_uppercase), "{text}");
            assert!(matches!(reason.kind(), "Node" | "Peer"), "{text}");
            assert!(reason.meaning().ends_with('.'), "{text}");
        }
    }
}
