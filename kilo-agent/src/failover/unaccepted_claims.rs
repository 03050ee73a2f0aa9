//! Claimed prefixes of other locations that the device has not accepted. [`Owners`] already assigns them to
//! the claiming gateway, so a repeated CLAIM alone moves nothing: the missing ones are moved along with it,
//! before it is answered.

use std::collections::{BTreeMap, BTreeSet};

use kilo_failover::{Far, NodeId, far::Owners};

/// Prefixes moved to a gateway's peer in one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Move {
    /// The gateway that receives them.
    pub gateway: NodeId,
    /// Members whose prefixes move.
    pub members: Vec<NodeId>,
    /// Whether the shared prefixes move, too.
    pub shared: bool,
}

impl Move {
    /// Whether there is nothing to move.
    pub const fn is_empty(&self) -> bool {
        self.members.is_empty() && !self.shared
    }
}

/// Prefixes that the device has not accepted, by location. Those that a reconcile has moved meanwhile are
/// sent once more, which changes nothing.
#[derive(Debug, Default)]
pub struct Unmoved(BTreeMap<Far, Missing>);

#[derive(Debug, Default)]
struct Missing {
    /// The gateway that each member was to be moved to.
    members: BTreeMap<NodeId, NodeId>,
    shared: Option<NodeId>,
}

impl Unmoved {
    /// Forgets locations that no longer exist.
    pub fn retain(&mut self, is_there: impl Fn(&Far) -> bool) {
        self.0.retain(|far, _| is_there(far));
    }

    /// Moves these prefixes, together with those that failed for this gateway before. Returns what was moved;
    /// `None` on failure, which is retried with a later move.
    pub fn move_all(
        &mut self,
        far: Far,
        acting: &Owners,
        wanted: Move,
        takes: impl FnOnce(&Move) -> bool,
    ) -> Option<Move> {
        let missing = self.0.entry(far).or_default();
        let whole = missing.added_to(wanted, acting);
        let is_taken = takes(&whole);
        missing.record(&whole, is_taken);
        if missing.members.is_empty() && missing.shared.is_none() {
            self.0.remove(&far);
        }
        is_taken.then_some(whole)
    }
}

impl Missing {
    /// Adds what is still missing for this gateway, as long as it owns it.
    fn added_to(&mut self, wanted: Move, acting: &Owners) -> Move {
        self.members.retain(|member, to| acting.owner(*member).is_some_and(|(_, owner)| owner == *to));
        self.shared = self.shared.filter(|to| acting.shared() == *to);
        let Move { gateway, members, shared } = wanted;
        let missing = self.members.iter().filter(|(_, to)| **to == gateway).map(|(member, _)| *member);
        let members: BTreeSet<NodeId> = missing.chain(members).collect();
        Move {
            gateway,
            members: members.into_iter().collect(),
            shared: shared || self.shared == Some(gateway),
        }
    }

    fn record(&mut self, asked: &Move, is_taken: bool) {
        if is_taken {
            self.members.retain(|member, _| !asked.members.contains(member));
            self.shared = self.shared.filter(|_| !asked.shared);
        } else {
            self.members.extend(asked.members.iter().map(|member| (*member, asked.gateway)));
            self.shared = self.shared.filter(|_| !asked.shared).or(asked.shared.then_some(asked.gateway));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_common::signal::{Body, Kind, Shared};
    use kilo_failover::{Params, Signal, Term};

    use super::*;

    const A: NodeId = 1 << 48;
    const B: NodeId = 2 << 48;
    const MEMBERS: [NodeId; 2] = [8, 9];
    const FAR: Far = 7;

    struct World {
        acting: Owners,
        unmoved: Unmoved,
        /// Which gateway the device has for each member's prefixes, and for the shared ones.
        device: BTreeMap<NodeId, NodeId>,
        shared: NodeId,
    }

    impl World {
        fn new() -> Self {
            let owners = MEMBERS.map(|member| (member, A));
            let (acting, unmoved) = (Owners::new(owners, A), Unmoved::default());
            Self { acting, unmoved, device: owners.into(), shared: A }
        }

        /// A CLAIM by this gateway; returns the members that are confirmed to it.
        fn claims(
            &mut self,
            gateway: NodeId,
            term: Term,
            members: &[NodeId],
            takes: bool,
        ) -> Option<Vec<NodeId>> {
            let body = Body::Claim { gateway, shared: Shared::Move, part: (0, 1), members: members.to_vec() };
            let signal = Signal { kind: Kind::Claim, nonce: 1, term, sender: gateway, location: FAR, body };
            let gateways = [A, B];
            let step = self.acting.claimed(&Params::default(), gateway, &signal, &gateways, (77, 0)).unwrap();
            let wanted = Move { gateway, members: step.moves, shared: step.moves_shared };
            let (device, shared) = (&mut self.device, &mut self.shared);
            let moved = self.unmoved.move_all(FAR, &self.acting, wanted, |all| {
                if takes {
                    device.extend(all.members.iter().map(|member| (*member, gateway)));
                    *shared = if all.shared { gateway } else { *shared };
                }
                takes || all.is_empty()
            });
            let Body::Claim { members, .. } = step.answer.body else { return None };
            moved.map(|_| members)
        }
    }

    #[test]
    fn no_gateway_is_told_that_it_has_what_the_device_did_not_take() {
        let mut world = World::new();
        let term = Term::NONE.next(B);
        assert_eq!(world.claims(B, term, &MEMBERS, false), None);
        assert_eq!(world.claims(B, term, &MEMBERS, false), None, "again, and the device still refuses");
        assert_eq!(world.claims(B, term, &MEMBERS, true), Some(MEMBERS.to_vec()));
        assert_eq!((world.device, world.shared), (MEMBERS.map(|member| (member, B)).into(), B));
        assert!(world.unmoved.0.is_empty());
    }

    #[test]
    fn what_a_later_claim_moves_is_not_moved_back() {
        let mut world = World::new();
        let term = Term::NONE.next(B);
        assert_eq!(world.claims(B, term, &MEMBERS, false), None);
        // The old leader takes the location back, while one member stays with the other gateway.
        let term = term.next(A);
        assert_eq!(world.claims(A, term, &MEMBERS[..1], true), Some(MEMBERS[..1].to_vec()));
        let term = term.next(B);
        assert_eq!(world.claims(B, term, &MEMBERS[1..], true), Some(MEMBERS[1..].to_vec()));
        assert_eq!(world.device, [(MEMBERS[0], A), (MEMBERS[1], B)].into());
        assert!(world.unmoved.0.is_empty());
        assert_eq!(world.claims(B, term.next(B), &MEMBERS, false), None);
        world.unmoved.retain(|far| *far != FAR);
        assert!(world.unmoved.0.is_empty(), "the location has gone");
    }
}
