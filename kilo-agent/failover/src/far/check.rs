//! Whether an old leader still has the shared prefixes: two probes ask it before a claim moves them.

use super::Owners;
use crate::{MS, Micros, NodeId, SEC, Term, probes::Row};

/// Probes to an old leader whose shared prefixes are claimed.
#[derive(Clone, Debug)]
pub(super) struct Check {
    pub(super) to: (Term, NodeId),
    pub(super) old: NodeId,
    pub(super) row: Row,
    pub(super) since: Micros,
}

/// A claim of shared prefixes that was refused because the old leader answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) claim: (Term, NodeId),
    /// When the old leader was asked: it is not asked again at once.
    pub(super) at: Micros,
    /// The old leader was asked for the same claim once more since then, and was silent.
    was_silent: bool,
}

/// How long an old leader that has answered is not asked again because of the same claim.
pub(super) const CHECKED: Micros = 10 * SEC;

impl Owners {
    /// Records that a probe was sent to the old leader.
    pub fn probed(&mut self, nonce: u64, now: Micros, patience: Micros) {
        if let Some(check) = &mut self.check {
            check.row.sent(nonce, now, now + patience.max(30 * MS));
        }
    }

    /// Handles an answer of the old leader: its shared prefixes stay.
    pub fn answered(&mut self, nonce: u64) {
        if let Some(check) = self.check.take_if(|check| check.row.answered(nonce).is_some()) {
            self.answered = Some(Answered { claim: check.to, at: check.since, was_silent: false });
        }
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        self.check.as_ref().map_or(Micros::MAX, |check| check.row.deadline())
    }

    /// Whether the shared prefixes move now, because both probes were missed.
    pub fn wake_up(&mut self, now: Micros) -> bool {
        let Some(check) = &mut self.check else { return false };
        if check.old != self.shared.1 || check.to.0 <= self.shared.0 {
            // Another gateway has them by now, about which the answer says nothing, or
            // has them in a later term.
            self.check = None;
            return false;
        }
        check.row.expire(now);
        if check.row.misses() < 2 {
            return false;
        }
        let to = check.to;
        self.check = None;
        // Claims are repeated as long as the gateway leads anybody: a check that loses two packets by chance
        // would move the prefixes some time. After an answer, two checks in a row have to be silent.
        if let Some(answered) = self.answered.as_mut().filter(|answered| answered.claim == to)
            && !std::mem::replace(&mut answered.was_silent, true)
        {
            return false;
        }
        self.shared = to;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{A, B, acting, claim, hears, hears_at},
        *,
    };
    use crate::signal::{Kind, Shared};

    #[test]
    fn a_claim_that_is_repeated_moves_nothing_by_chance() {
        let mut acting = acting();
        let signal = claim(Kind::Claim, B, B, Term::NONE.next(B), Shared::MoveIfSilent, &[B]);
        // What the old leader does when it is asked, every ten seconds, and who has the prefixes then.
        for (round, (answers, owner)) in
            [(true, A), (false, A), (true, A), (true, A), (false, A), (false, B)].into_iter().enumerate()
        {
            let now = round as u64 * CHECKED;
            assert_eq!(hears_at(&mut acting, B, &signal, now).unwrap().asks, Some(A), "round {round}");
            acting.probed(1, now, 100 * MS);
            acting.probed(2, now + 20 * MS, 100 * MS);
            if answers {
                acting.answered(1);
            }
            acting.wake_up(now + 130 * MS);
            assert_eq!(acting.shared(), owner, "round {round}");
        }
        // Meanwhile the old leader may be annotated as leading in a later term.
        let (mut acting, later) = (super::super::tests::acting(), Term::NONE.next(B).next(A));
        assert_eq!(hears(&mut acting, B, &signal).unwrap().asks, Some(A));
        acting.record_written_term(later, A);
        acting.probed(1, 0, 100 * MS);
        acting.probed(2, 20 * MS, 100 * MS);
        assert!(!acting.wake_up(130 * MS));
        assert_eq!(acting.shared_since(), (later, A));
    }

    #[test]
    fn of_two_nodes_shared_prefixes_move_when_the_old_leader_is_silent() {
        for answers in [false, true] {
            let mut acting = acting();
            let signal = claim(Kind::Claim, B, B, Term::NONE.next(B), Shared::MoveIfSilent, &[B]);
            let step = hears(&mut acting, B, &signal).unwrap();
            assert_eq!((step.moves_shared, step.asks), (false, Some(A)));
            acting.probed(1, 0, 100 * MS);
            acting.probed(2, 20 * MS, 100 * MS);
            if answers {
                acting.answered(2);
            }
            assert!(!acting.wake_up(110 * MS), "one missed probe is not silence");
            assert_eq!(acting.wake_up(130 * MS), !answers);
            assert_eq!(acting.shared(), if answers { A } else { B });
            let asks = |acting: &mut Owners, now| hears_at(acting, B, &signal, now).unwrap().asks;
            if answers {
                assert_eq!(asks(&mut acting, CHECKED - MS), None, "the same claim again");
                assert_eq!(asks(&mut acting, CHECKED + MS), Some(A));
            }
        }
    }
}
