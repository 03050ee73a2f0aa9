//! The far side: which gateway of a location has each member's prefixes, according to the words of members'
//! kernels, as gateways claim them.

mod check;

use std::collections::BTreeMap;

use self::check::{Answered, CHECKED, Check};
use crate::{
    Micros, NodeId, Params, Rule, SEC, Signal, Term,
    probes::Row,
    signal::{Body, Kind, Shared},
};

/// Why a CLAIM or an END is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// It is neither of these signals.
    Kind,
    /// It did not come from a gateway of the location, or claims for somebody else.
    Gateway,
    /// It names a node of another location, or an unknown one.
    Member,
    /// Its term is too many changes ahead of the latest that is known.
    Leap,
    /// The location has moved nodes too often lately: each move delays what else this agent has to do.
    Rate,
}

/// The term of owners that the device had. Real terms are later, since they count from one above 16 bits.
pub const SEED: Term = Term::from_bits(1);
/// The term of members that nobody claimed when others were claimed.
pub const UNCLAIMED_TERM: Term = Term::from_bits(2);
/// How long owners that the device had before the agent started are believed without a CLAIM: as long as
/// gateways take to repeat theirs three times.
pub const SEEDED: Micros = 30 * SEC;

/// One location as a far leader knows it.
#[derive(Clone, Debug, Default)]
pub struct Owners {
    members: BTreeMap<NodeId, (Term, NodeId)>,
    shared: (Term, NodeId),
    /// How far refused CLAIMs have led this agent up to later terms: one that has just started knows none.
    led_up: Term,
    check: Option<Check>,
    /// The last claim whose check the old leader answered.
    answered: Option<Answered>,
    /// Since when the acting leader has claimed others than Kilo's, and in which term.
    claims_others: Option<((Term, NodeId), Micros)>,
    /// The term in which each gateway's claim last moved something, and when the budget of such
    /// changes is whole again.
    moved: BTreeMap<NodeId, Term>,
    spent_until: Micros,
}

/// After this long a gateway has named all members that follow it: it claims all of them every 10 s, and
/// those that are not answered every second.
const NAMED_ALL: Micros = 15 * SEC;

/// What MOVED says about shared prefixes when its term is the latest that the far leader knows, and not
/// the term of the CLAIM.
const LATEST: Shared = Shared::Move;

/// Whether the term of MOVED is the latest that the far leader knows: no member that the CLAIM named
/// counts in an earlier one.
pub fn is_latest(signal: &Signal) -> bool {
    signal.kind == Kind::Moved && matches!(&signal.body, Body::Claim { shared, .. } if *shared == LATEST)
}

/// What follows from a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The gateway that has the members from now on.
    pub gateway: NodeId,
    /// Members whose prefixes move to it now.
    pub moves: Vec<NodeId>,
    /// Whether the shared prefixes move to it, too.
    pub moves_shared: bool,
    /// The old leader, which is to be probed twice before its shared prefixes move.
    pub asks: Option<NodeId>,
    /// MOVED, to be sent to the gateway once that is done.
    pub answer: Signal,
}

impl Owners {
    /// Owners as WireGuard has them when an agent starts: terms are unknown, and come with the next CLAIM.
    pub fn new(owners: impl IntoIterator<Item = (NodeId, NodeId)>, shared: NodeId) -> Self {
        let owners = owners.into_iter().map(|(member, gateway)| (member, (Term::NONE, gateway))).collect();
        Self { members: owners, shared: (Term::NONE, shared), ..Self::default() }
    }

    /// Sets the location's members; new ones are unclaimed.
    pub fn set_members(&mut self, members: &[NodeId]) {
        self.members.retain(|member, _| members.contains(member));
        for member in members {
            self.members.entry(*member).or_insert((Term::NONE, 0));
        }
    }

    /// Sets the location's gateways, Kilo's leader first. Members that used a gateway that is none any
    /// more use that leader by now, as their kernels' words say; a gateway that claims them in the same
    /// term or later counts again.
    pub fn set_gateways(&mut self, gateways: &[NodeId]) {
        self.moved.retain(|gateway, _| gateways.contains(gateway));
        let Some(first) = gateways.first() else { return };
        let is_gone = |gateway: NodeId| gateway != 0 && !gateways.contains(&gateway);
        for (term, gateway) in self.members.values_mut().filter(|(_, gateway)| is_gone(*gateway)) {
            (*term, *gateway) = (Term::from_bits(term.bits().saturating_sub(1)), *first);
        }
    }

    /// Records that a gateway led the location in this term, as was annotated before: it has what nobody else
    /// has claimed in any term. While nobody has, the term says how many changes there were.
    pub fn record_written_term(&mut self, term: Term, gateway: NodeId) {
        let latest = self.claimed_latest();
        if term > self.shared.0 && (latest.count() == 0 || term.is_near(latest)) {
            self.shared = (term, gateway);
        }
    }

    /// Sets the gateway that leads by Kilo's rule, as long as nobody has led in any term. It also has what
    /// nobody has claimed: kernels that no gateway has taken follow that rule, whichever gateways have
    /// claimed other members.
    pub fn set_default_leader(&mut self, gateway: NodeId) {
        if self.shared.0 != Term::NONE {
            return;
        }
        self.shared.1 = gateway;
        let unclaimed = self.members.values_mut().filter(|owner| owner.0 == UNCLAIMED_TERM);
        unclaimed.for_each(|owner| owner.1 = gateway);
    }

    /// Sets the owner that the device had for a member's prefixes before the agent started.
    pub fn seed(&mut self, member: NodeId, owner: (Term, NodeId)) {
        self.members.insert(member, owner);
    }

    /// Assigns members that nobody has claimed so far: they stay with this owner until somebody claims them.
    pub fn assign_unclaimed(&mut self, owner: (Term, NodeId)) {
        self.members.values_mut().filter(|known| known.0 == Term::NONE).for_each(|known| *known = owner);
    }

    /// Leaves Kilo's leader to itself when the gateway of `claim` leads in its place and claims all others:
    /// the leader has lost power, or the others do not hear it, and what it sends comes through its own
    /// tunnel. It is taken from the claimant if its term is `term`, that of unclaimed members: what a real
    /// CLAIM gave, or the device had elsewhere, stays. One signal may be a part of what its gateway has to
    /// say, or what is left of it; `is_all`: it names all the others.
    pub fn leave_to_itself(
        &mut self,
        leader: NodeId,
        term: Term,
        claim: (Term, NodeId),
        is_all: bool,
        now: Micros,
    ) {
        let (known, since) = self.claims_others.unwrap_or((claim, now));
        let since = if known == claim { since } else { now };
        self.claims_others = Some((claim, since));
        if !is_all && since + NAMED_ALL > now {
            return;
        }
        let Some(known) = self.members.get_mut(&leader) else { return };
        if *known == (term, claim.1) || known.0 <= term && known.1 == leader {
            *known = (term, leader);
        }
    }

    /// Forgets owners of this term and of earlier ones.
    pub fn forget(&mut self, term: Term) {
        self.members.values_mut().filter(|owner| owner.0 <= term).for_each(|owner| *owner = (Term::NONE, 0));
    }

    /// All members with their owners.
    pub fn owners(&self) -> impl Iterator<Item = (NodeId, (Term, NodeId))> + '_ {
        self.members.iter().map(|(member, owner)| (*member, *owner))
    }

    /// The gateway with the shared prefixes, and since which term.
    pub fn shared_since(&self) -> (Term, NodeId) {
        self.shared
    }

    /// The gateway with a member's prefixes, and since which term.
    pub fn owner(&self, member: NodeId) -> Option<(Term, NodeId)> {
        self.members.get(&member).copied()
    }

    /// The gateway with the shared prefixes.
    pub fn shared(&self) -> NodeId {
        self.shared.1
    }

    /// Handles a CLAIM of a gateway, or an END of the leader, that came through the sender's tunnel.
    /// `gateways` are the location's; `sender` is this node, for the answer. Changes that move prefixes have
    /// a budget, in which a claim in several parts counts once.
    ///
    /// # Errors
    /// When all of it is refused.
    pub fn claimed(
        &mut self,
        params: &Params,
        from: NodeId,
        signal: &Signal,
        gateways: &[NodeId],
        (sender, now): (NodeId, Micros),
    ) -> Result<Step, Refused> {
        let Body::Claim { gateway, shared, part, members } = &signal.body else { return Err(Refused::Kind) };
        let (gateway, term) = (*gateway, signal.term);
        let (is_end, to) = (signal.kind == Kind::End, (term, gateway));
        let is_own = match signal.kind {
            Kind::Claim => gateway == from,
            // Only the gateway that has members gives them away; a repeated END changes nothing. A part in
            // which nobody is known here gives nothing, but the next leader waits for the answer.
            Kind::End => {
                members.is_empty() || members.iter().any(|member| self.may_end(*member, from, gateway))
            }
            _ => return Err(Refused::Kind),
        };
        if !is_own || signal.sender != from || !gateways.contains(&from) || !gateways.contains(&gateway) {
            return Err(Refused::Gateway);
        }
        if !members.iter().all(|member| self.members.contains_key(member)) {
            return Err(Refused::Member);
        }
        if !term.is_near(self.latest()) && params.keeps(Rule::NoLeap) {
            // As with a kernel that has missed many changes: the next such CLAIM is a step nearer.
            self.led_up = self.latest().next_step();
            return Err(Refused::Leap);
        }
        let shared = if is_end && self.shared.1 != from { &Shared::Stay } else { shared };
        let would_move = |member: &NodeId| {
            let owner = self.members.get(member);
            owner.is_some_and(|owner| term > owner.0 && owner.1 != gateway)
                && (!is_end || self.may_end(*member, from, gateway))
        };
        let takes_shared = *shared != Shared::Stay && term > self.shared.0 && self.shared.1 != gateway;
        // Without budget left, a gateway is refused already when it asks whether it may lead.
        let asks = !is_end && members.is_empty() && term > self.latest();
        let moves_any = takes_shared || members.iter().any(would_move);
        if (moves_any || asks) && self.moved.get(&gateway) != Some(&term) {
            self.spend(params, moves_any.then_some(to), now)?;
        }
        let mut moves = Vec::new();
        let mut has = Vec::new();
        for member in members {
            if is_end && !self.may_end(*member, from, gateway) {
                continue;
            }
            let Some(owner) = self.members.get_mut(member) else { continue };
            if term > owner.0 || !params.keeps(Rule::FarLaterTerms) {
                if owner.1 != gateway {
                    moves.push(*member);
                }
                *owner = to;
            }
            if *owner == to {
                has.push(*member);
            }
        }
        let (moves_shared, asks) = self.claim_shared((term, gateway), *shared, now);
        // A gateway that has forgotten how many changes there were learns it when none of its claims can
        // count, as far as its kernels follow at a time.
        let latest = self.claimed_latest().min(term.last_step());
        let is_behind =
            !is_end && has.is_empty() && latest.count() > term.count() && params.keeps(Rule::CatchesUp);
        let (term, shared) = if is_behind { (latest, LATEST) } else { (term, Shared::Stay) };
        let body = Body::Claim { gateway, shared, part: *part, members: has };
        let answer = Signal { kind: Kind::Moved, sender, term, body, ..signal.clone() };
        Ok(Step { gateway, moves, moves_shared, asks, answer })
    }

    /// As [`Self::claimed`], for a location that `acting` leads as far as is known; `None`: no leader is
    /// known, or the signal names nobody. What nobody has claimed belongs to the acting leader from then on,
    /// whether the signal counts or not, and [`Self::leave_to_itself`] may follow.
    ///
    /// # Errors
    /// As [`Self::claimed`].
    pub fn claimed_of_led(
        &mut self,
        params: &Params,
        from: NodeId,
        signal: &Signal,
        (gateways, acting): (&[NodeId], Option<NodeId>),
        (sender, now): (NodeId, Micros),
    ) -> Result<Step, Refused> {
        // The device has them where the last plan put them, and only members that follow may move.
        acting.into_iter().for_each(|acting| self.assign_unclaimed((UNCLAIMED_TERM, acting)));
        let step = self.claimed(params, from, signal, gateways, (sender, now))?;
        if acting == Some(from)
            && signal.kind == Kind::Claim
            && let Some(first) = gateways.first().filter(|first| **first != from)
            && let Body::Claim { part: (_, parts), members, .. } = &signal.body
            && !members.contains(first)
        {
            let is_all = *parts == 1 && members.len() + 1 == self.members.len();
            self.leave_to_itself(*first, UNCLAIMED_TERM, (signal.term, from), is_all, now);
        }
        Ok(step)
    }

    /// Takes one change from the budget for a move to that gateway in that term; `None` only checks that
    /// one is left.
    fn spend(&mut self, params: &Params, to: Option<(Term, NodeId)>, now: Micros) -> Result<(), Refused> {
        let (burst, refill) = params.far_budget;
        let spent = self.spent_until.max(now) + refill;
        if spent > now + burst * refill {
            return Err(Refused::Rate);
        }
        if let Some((term, gateway)) = to {
            self.moved.insert(gateway, term);
            self.spent_until = spent;
        }
        Ok(())
    }

    /// The latest term that was claimed, annotated, or led up to.
    fn latest(&self) -> Term {
        self.claimed_latest().max(self.led_up)
    }

    fn claimed_latest(&self) -> Term {
        self.members.values().map(|(term, _)| *term).fold(self.shared.0, Term::max)
    }

    /// Whether an END of `from` may give a member to a gateway: `from` has it, or that gateway does already.
    fn may_end(&self, member: NodeId, from: NodeId, gateway: NodeId) -> bool {
        self.members.get(&member).is_some_and(|(_, owner)| *owner == from || *owner == gateway)
    }

    fn claim_shared(&mut self, to: (Term, NodeId), how: Shared, now: Micros) -> (bool, Option<NodeId>) {
        let later = to.0 > self.shared.0;
        let answered = self.answered.filter(|answered| answered.claim == to);
        let is_checked = answered.is_some_and(|answered| now < answered.at + CHECKED);
        match how {
            Shared::Move if later => {
                let moves = self.shared.1 != to.1;
                self.shared = to;
                self.check = None;
                (moves, None)
            }
            Shared::MoveIfSilent if later && to.1 != self.shared.1 && self.check.is_none() && !is_checked => {
                let old = self.shared.1;
                self.check = Some(Check { to, old, row: Row::default(), since: now });
                (false, Some(old))
            }
            _ => (false, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const A: NodeId = 1 << 48;
    pub(super) const B: NodeId = 2 << 48;
    const MEMBER: NodeId = 9;

    pub(super) fn acting() -> Owners {
        Owners::new([(A, A), (B, A), (MEMBER, A)], A)
    }

    pub(super) fn claim(
        kind: Kind,
        from: NodeId,
        gateway: NodeId,
        term: Term,
        shared: Shared,
        members: &[NodeId],
    ) -> Signal {
        let body = Body::Claim { gateway, shared, part: (0, 1), members: members.to_vec() };
        Signal { kind, nonce: 1, term, sender: from, location: 7, body }
    }

    pub(super) fn hears(acting: &mut Owners, from: NodeId, signal: &Signal) -> Result<Step, Refused> {
        hears_at(acting, from, signal, 0)
    }

    pub(super) fn hears_at(
        acting: &mut Owners,
        from: NodeId,
        signal: &Signal,
        now: Micros,
    ) -> Result<Step, Refused> {
        acting.claimed(&Params::default(), from, signal, &[A, B], (77, now))
    }

    #[test]
    fn who_goes_to_and_fro_is_refused_after_some_changes_and_one_a_second_goes_on() {
        let mut acting = acting();
        let mut term = Term::NONE;
        let mut moved_at = |acting: &mut Owners, now| {
            (0..50)
                .take_while(|_| {
                    let has_it = acting.owner(MEMBER).is_some_and(|(_, owner)| owner == B);
                    let (from, to) = if has_it { (B, A) } else { (B, B) };
                    term = term.next(to);
                    let kind = if from == to { Kind::Claim } else { Kind::End };
                    // In two parts, which are one change.
                    [A, MEMBER].into_iter().all(|member| {
                        let signal = claim(kind, from, to, term, Shared::Stay, &[member]);
                        hears_at(acting, from, &signal, now) != Err(Refused::Rate)
                    })
                })
                .count() as u64
        };
        let (burst, refill) = Params::default().far_budget;
        assert_eq!(moved_at(&mut acting, 0), burst);
        assert_eq!(moved_at(&mut acting, refill / 2), 0);
        assert_eq!(moved_at(&mut acting, refill), 1);
        assert_eq!(moved_at(&mut acting, 5 * refill), 4);
        // A claim that moves nothing costs nothing.
        let owner = acting.owner(MEMBER).unwrap_or_default();
        let same = claim(Kind::Claim, owner.1, owner.1, owner.0, Shared::Stay, &[MEMBER]);
        assert!(hears_at(&mut acting, owner.1, &same, 5 * refill).is_ok());
    }

    #[test]
    fn a_later_term_moves_and_an_earlier_one_changes_nothing() {
        let mut acting = acting();
        let (first, second) = (Term::NONE.next(B), Term::NONE.next(B).next(A));
        let by_b = claim(Kind::Claim, B, B, first, Shared::Move, &[B, MEMBER]);
        let step = hears(&mut acting, B, &by_b).unwrap();
        assert_eq!(
            (&step.moves[..], step.moves_shared, step.answer.kind),
            (&[B, MEMBER][..], true, Kind::Moved)
        );
        // Repeated: nothing moves, and it is answered.
        let again = hears(&mut acting, B, &by_b).unwrap();
        assert_eq!((again.moves.len(), again.moves_shared, &again.answer), (0, false, &step.answer));
        hears(&mut acting, A, &claim(Kind::Claim, A, A, second, Shared::Stay, &[MEMBER])).unwrap();
        let late = hears(&mut acting, B, &by_b).unwrap();
        assert_eq!(acting.owner(MEMBER), Some((second, A)));
        assert!(late.moves.is_empty());
        assert!(matches!(&late.answer.body, Body::Claim { members, .. } if members[..] == [B]));
    }

    #[test]
    fn who_may_not_claim_changes_nothing() {
        let term = Term::NONE.next(B);
        for (from, signal, why) in [
            (B, claim(Kind::Claim, B, A, term, Shared::Move, &[MEMBER]), Refused::Gateway),
            (B, claim(Kind::Claim, A, A, term, Shared::Move, &[MEMBER]), Refused::Gateway),
            (MEMBER, claim(Kind::Claim, MEMBER, MEMBER, term, Shared::Move, &[MEMBER]), Refused::Gateway),
            (B, claim(Kind::Claim, B, B, term, Shared::Move, &[MEMBER, 99]), Refused::Member),
            (B, claim(Kind::End, B, B, term, Shared::Move, &[MEMBER]), Refused::Gateway),
            (B, claim(Kind::Moved, B, B, term, Shared::Move, &[MEMBER]), Refused::Kind),
            (B, claim(Kind::Claim, B, B, Term::from_bits(u64::MAX), Shared::Move, &[MEMBER]), Refused::Leap),
            (A, claim(Kind::End, A, B, Term::from_bits(1_025 << 16), Shared::Move, &[MEMBER]), Refused::Leap),
        ] {
            let mut acting = acting();
            assert_eq!(hears(&mut acting, from, &signal), Err(why), "{signal:?}");
            assert_eq!((acting.owner(MEMBER), acting.shared()), (Some((Term::NONE, A)), A));
        }
        let mut acting = acting();
        // The leader gives away what it has.
        assert!(hears(&mut acting, A, &claim(Kind::End, A, B, term, Shared::Stay, &[MEMBER])).is_ok());
        assert_eq!(acting.owner(MEMBER), Some((term, B)));
    }

    #[test]
    fn who_used_a_gateway_that_is_none_any_more_uses_kilos_leader_until_somebody_claims_it() {
        let (term, later) = (Term::NONE.next(B), Term::NONE.next(B).next(A));
        let by_b = claim(Kind::Claim, B, B, term, Shared::Stay, &[B, MEMBER]);
        let owners = |acting: &Owners| [A, B, MEMBER].map(|node| acting.owner(node).unwrap().1);
        let mut known = acting();
        hears(&mut known, B, &by_b).unwrap();
        known.set_gateways(&[A, B]);
        assert_eq!(owners(&known), [A, B, B]);
        known.set_gateways(&[A]);
        assert_eq!(owners(&known), [A, A, A]);
        assert_eq!(known.latest().count(), term.count(), "how far terms are is not forgotten");
        // It is a gateway again. Members that have not noticed still follow it, and it claims them.
        known.set_gateways(&[A, B]);
        assert_eq!(owners(&known), [A, A, A]);
        let mut again = known.clone();
        hears(&mut again, B, &by_b).unwrap();
        assert_eq!(owners(&again), [A, B, B]);
        hears(&mut known, A, &claim(Kind::Claim, A, A, later, Shared::Stay, &[MEMBER])).unwrap();
        assert_eq!(known.owner(MEMBER), Some((later, A)));
    }

    #[test]
    fn what_is_written_says_how_far_terms_are() {
        let mut acting = acting();
        let (written, next) = (Term::from_bits(5_000 << 16), Term::from_bits(5_001 << 16));
        let by_b = claim(Kind::Claim, B, B, next, Shared::Move, &[MEMBER]);
        assert_eq!(hears(&mut acting, B, &by_b), Err(Refused::Leap), "nothing is known");
        acting.record_written_term(written, A);
        assert!(hears(&mut acting, B, &by_b).is_ok());
        acting.record_written_term(Term::from_bits(u64::MAX), A);
        assert_eq!(acting.shared_since(), (next, B), "an annotation does not leap either");
    }

    /// An agent that has started without the API server, in a location with many changes.
    #[test]
    fn who_knows_nothing_is_led_up_by_claims_that_are_repeated() {
        for (count, wanted) in [(1_024, 1), (1_025, 2), (5_000, 5), (100_000, 98)] {
            let mut acting = acting();
            let term = Term::from_bits((count - 1) << 16).next(B);
            let by_b = claim(Kind::Claim, B, B, term, Shared::Move, &[B, MEMBER]);
            let tries = (1..200).find(|_| hears(&mut acting, B, &by_b).is_ok());
            assert_eq!(tries, Some(wanted), "after {count} changes");
            assert_eq!((acting.owner(MEMBER), acting.shared()), (Some((term, B)), B));
        }
        // One signal near the maximum leads nobody there, and owns nothing.
        let mut acting = acting();
        let end = claim(Kind::Claim, B, B, Term::from_bits(u64::MAX), Shared::Move, &[MEMBER]);
        assert_eq!(hears(&mut acting, B, &end), Err(Refused::Leap));
        assert_eq!((acting.owner(MEMBER), acting.shared()), (Some((Term::NONE, A)), A));
        assert!(
            hears(&mut acting, A, &claim(Kind::Claim, A, A, Term::NONE.next(A), Shared::Stay, &[MEMBER]))
                .is_ok()
        );
    }

    #[test]
    fn an_end_gives_what_its_sender_has_and_is_answered_again() {
        let mut acting = acting();
        let (first, second) = (Term::NONE.next(B), Term::NONE.next(B).next(B));
        hears(&mut acting, B, &claim(Kind::Claim, B, B, first, Shared::Stay, &[B])).unwrap();
        let end = claim(Kind::End, A, B, second, Shared::Move, &[A, B, MEMBER]);
        let step = hears(&mut acting, A, &end).unwrap();
        // Members that B already has do not move.
        assert_eq!((&step.moves[..], step.moves_shared), (&[A, MEMBER][..], true));
        assert_eq!(acting.owner(B), Some((second, B)));
        let again = hears(&mut acting, A, &end).unwrap();
        assert_eq!((again.moves.len(), again.moves_shared, &again.answer), (0, false, &step.answer));
        // A part of END in which this far leader knows nobody.
        let part = hears(&mut acting, A, &claim(Kind::End, A, B, second, Shared::Move, &[])).unwrap();
        assert_eq!((part.moves.len(), part.moves_shared), (0, false));
        // A gateway that has nothing gives nothing, nor shared prefixes.
        let third = second.next(A);
        let late = claim(Kind::End, A, A, third, Shared::Move, &[A, MEMBER]);
        assert_eq!(hears(&mut acting, A, &late), Err(Refused::Gateway));
        assert_eq!(acting.shared_since(), (second, B));
    }
}
