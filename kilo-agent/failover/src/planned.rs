//! A planned change, make before break: everybody is ready before the first packet takes another path, and a
//! change that does not end is taken back.
//!
//! ```text
//! giver  PREPARE ──> taker asks far leaders, READY ──> giver diverts, END to every far leader
//! far leader moves the prefixes, MOVED ──> taker leads them, READY ──> the giver is done
//! ```
//! Nothing is held back. END follows the last packet on the old path, so far leaders move at once: what comes
//! on the new path before that is lost.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Far, MS, Micros, NodeId, Term};

/// Minimum time that a giver waits for the end after it has diverted.
const PATIENCE: Micros = 300 * MS;
/// Time between two tries of an unanswered signal.
const AGAIN: Micros = 20 * MS;
/// How long a taker and its far leaders are asked, in addition to their round trips.
const ASKS: Micros = 200 * MS;
/// Bits of a PREPARE's number that encode the cause.
const CAUSE_BITS: u64 = 7;

/// Why leadership is given without a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The leader's Node is cordoned.
    Cordoned = 1,
    /// It is about to be removed.
    Removed = 2,
    /// It shuts down.
    ShutsDown = 3,
    /// Kilo's order names another gateway, as when the annotation `leader` moves.
    Order = 4,
    /// The old leader is back, and has been healthy for long enough.
    Returns = 5,
}

impl Cause {
    /// The number of a PREPARE: it grows as `stamp` does, and encodes the cause.
    pub fn number(self, stamp: u64) -> u64 {
        stamp & !CAUSE_BITS | self as u64
    }

    /// The cause in such a number; one that this version does not know is Kilo's order.
    pub fn of(number: u64) -> Self {
        let known = [Self::Cordoned, Self::Removed, Self::ShutsDown, Self::Returns];
        known.into_iter().find(|cause| *cause as u64 == number & CAUSE_BITS).unwrap_or(Self::Order)
    }

    /// After how many tries in a row a far leader that never answers is no longer waited for: its agent is
    /// dead, and its location is cut off until that is back. A leader that is about to go has no time to
    /// wait; one that has only returned loses nothing.
    pub fn tries(self) -> Option<u32> {
        match self {
            Self::Cordoned | Self::Removed | Self::ShutsDown => Some(3),
            Self::Order => Some(6),
            Self::Returns => None,
        }
    }

    /// The cause in words, after the name of the node that gives leadership.
    pub fn text(self) -> &'static str {
        match self {
            Self::Cordoned => "its Node is cordoned",
            Self::Removed => "its Node is about to be removed",
            Self::ShutsDown => "its Node shuts down",
            Self::Order => "the order of leaders has changed",
            Self::Returns => "the leader of Kilo's order has returned",
        }
    }

    /// The cause in words, as the node that gives leadership says it.
    pub fn own_text(self) -> &'static str {
        match self {
            Self::Cordoned => "this node is cordoned",
            Self::Removed => "this node is about to be removed",
            Self::ShutsDown => "this node shuts down",
            Self::Order | Self::Returns => self.text(),
        }
    }
}

/// What one side has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Send PREPARE to the taker.
    Prepare,
    /// Ask this far leader whether it would answer, with a CLAIM of nobody in this term.
    Ask(Far, Term),
    /// Send READY in this term to the giver: it may divert.
    Ready(Term),
    /// Send everything to the taker from now on, by the kernel's word in the taker's term.
    Divert(Term),
    /// Send END to this far leader, behind the last packet.
    End(Far, Term),
    /// Lead these members in this term: far leaders have moved them.
    Lead(Term, Vec<NodeId>),
    /// Report to the giver that the change has ended.
    Done(Term),
    /// The change has ended: the taker leads.
    Given,
    /// The change did not end: lead them again, in a term after this one.
    TakeBack(Term),
    /// The taker does not answer, or some far leaders do not answer it: nothing has changed.
    GiveUp,
}

/// What PREPARE carries and its READY repeats: a READY recorded in an earlier try does not answer this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Try {
    /// The number of the PREPARE, which grows within the giver's boot.
    pub number: u64,
    /// The giver's cookie for the taker in that boot.
    pub cookie: u64,
}

/// The giver's side of a planned change of leadership: whom it gives to, which far leaders have answered, and
/// what it does next. All times are microseconds of the monotonic clock.
#[derive(Clone, Debug)]
pub struct Giver {
    /// Gateway that is to lead.
    pub to: NodeId,
    /// Why leadership changes.
    pub cause: Cause,
    /// Members that are given: END names them.
    pub members: Vec<NodeId>,
    fars: Vec<Far>,
    /// The number of its first PREPARE.
    first: Option<u64>,
    asks_until: Micros,
    patience: Micros,
    next: Micros,
    diverted: Option<(Micros, Term)>,
    is_over: bool,
}

impl Giver {
    /// Starts a change; the first [`Self::wake_up`] is due now. `trip`: the longest
    /// round trip to a far leader.
    pub fn new(to: NodeId, cause: Cause, fars: Vec<Far>, trip: Micros, now: Micros) -> Self {
        Self {
            to,
            cause,
            members: Vec::new(),
            fars,
            first: None,
            asks_until: now + ASKS + 2 * trip,
            patience: PATIENCE.max(ASKS + 2 * trip),
            next: now,
            diverted: None,
            is_over: false,
        }
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether its packets go to the taker already.
    pub fn has_diverted(&self) -> bool {
        self.diverted.is_some()
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        match self.diverted {
            _ if self.is_over => Micros::MAX,
            Some((at, _)) => self.next.min(at + self.patience),
            None => self.next,
        }
    }

    /// Records that PREPARE is sent with this number.
    pub fn asked(&mut self, number: u64) {
        self.first.get_or_insert(number);
    }

    /// Whether a PREPARE of this number belongs to this try.
    pub fn has_asked(&self, number: u64) -> bool {
        self.first.is_some_and(|first| number >= first)
    }

    /// Handles READY: the taker is ready, or, with `is_done`, leads.
    pub fn ready(&mut self, term: Term, is_done: bool, now: Micros) -> Vec<Act> {
        match self.diverted {
            _ if self.is_over => Vec::new(),
            None if !is_done => {
                self.diverted = Some((now, term));
                self.next = now + AGAIN;
                let mut acts = vec![Act::Divert(term)];
                acts.extend(self.fars.iter().map(|far| Act::End(*far, term)));
                acts
            }
            Some((_, diverted)) if is_done && diverted == term => {
                self.is_over = true;
                vec![Act::Given]
            }
            _ => Vec::new(),
        }
    }

    /// Steps that are due.
    pub fn wake_up(&mut self, now: Micros) -> Vec<Act> {
        if self.is_over {
            return Vec::new();
        }
        match self.diverted {
            Some((at, term)) if now >= at + self.patience => {
                self.is_over = true;
                vec![Act::TakeBack(term)]
            }
            None if now >= self.asks_until => {
                self.is_over = true;
                vec![Act::GiveUp]
            }
            _ if now < self.next => Vec::new(),
            Some((_, term)) => {
                self.next = now + AGAIN;
                self.fars.iter().map(|far| Act::End(*far, term)).collect()
            }
            None => {
                self.next = now + AGAIN;
                vec![Act::Prepare]
            }
        }
    }
}

/// The gateway that is to lead.
#[derive(Clone, Debug)]
pub struct Taker {
    /// Leader that gives.
    pub from: NodeId,
    /// Why leadership changes.
    pub cause: Cause,
    term: Term,
    /// The latest PREPARE, which READY answers.
    answers: Try,
    /// Far leaders that have not answered yet.
    asked: BTreeSet<Far>,
    /// Parts of END that each far leader still has to do; `None`: it has done nothing yet.
    moves: BTreeMap<Far, Option<BTreeSet<u16>>>,
    members: BTreeSet<NodeId>,
    is_done: bool,
    end: Micros,
}

impl Taker {
    /// Starts the change that a PREPARE asks for. `term`: the next one of this gateway.
    pub fn new(from: NodeId, cause: Cause, term: Term, fars: &[Far]) -> Self {
        Self {
            from,
            cause,
            term,
            answers: Try::default(),
            asked: fars.iter().copied().collect(),
            moves: fars.iter().map(|far| (*far, None)).collect(),
            members: BTreeSet::new(),
            is_done: false,
            end: Micros::MAX,
        }
    }

    /// Term in which this gateway is to lead.
    pub fn term(&self) -> Term {
        self.term
    }

    /// The PREPARE that READY answers.
    pub fn asked_in(&self) -> Try {
        self.answers
    }

    /// Whether everything has moved.
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// Handles PREPARE, which comes for the first time or because an answer was lost.
    /// `trip`: as in [`Giver::new`].
    pub fn prepare(&mut self, asked: Try, trip: Micros, now: Micros) -> Vec<Act> {
        self.answers = asked;
        if self.end == Micros::MAX {
            // Counted from the first one: who only asks must not keep this gateway busy for ever.
            let asks = ASKS + 2 * trip;
            self.end = now + 2 * asks + PATIENCE.max(asks);
        }
        if self.moves.is_empty() && !self.is_done {
            // No far leader is waited for, so no MOVED will come: it leads the nodes that use the giver.
            self.is_done = true;
            return vec![Act::Ready(self.term), Act::Lead(self.term, Vec::new()), Act::Done(self.term)];
        }
        if self.asked.is_empty() {
            return vec![Act::Ready(self.term)];
        }
        self.asked.iter().map(|far| Act::Ask(*far, self.term)).collect()
    }

    /// Far leaders that have not answered yet.
    pub fn silent(&self) -> impl Iterator<Item = Far> + '_ {
        self.asked.iter().copied()
    }

    /// Whether it has sent READY: packets may come from the giver.
    pub fn is_ready(&self) -> bool {
        self.asked.is_empty()
    }

    /// When it is forgotten.
    pub fn end(&self) -> Micros {
        self.end
    }

    /// Handles the answer of a far leader: it is there, if `moved` is empty, or has moved
    /// a part of the members.
    pub fn moved(&mut self, far: Far, term: Term, part: (u16, u16), moved: &[NodeId]) -> Vec<Act> {
        if term != self.term {
            return Vec::new();
        }
        // In a large location, a far leader may know nobody of one part of END.
        if moved.is_empty() && (part.1 == 1 || self.asked.contains(&far)) {
            let is_last = self.asked.remove(&far) && self.asked.is_empty();
            return is_last.then_some(Act::Ready(self.term)).into_iter().collect();
        }
        if self.is_done {
            // The giver sends END again: the answer was lost.
            return vec![Act::Done(self.term)];
        }
        let Some(parts) = self.moves.get_mut(&far) else { return Vec::new() };
        // Repeated parts could let this grow without end.
        if parts.get_or_insert_with(|| (0..part.1).collect()).remove(&part.0) {
            self.members.extend(moved);
        }
        if !self.moves.values().all(|parts| parts.as_ref().is_some_and(BTreeSet::is_empty)) {
            return Vec::new();
        }
        self.is_done = true;
        let members = std::mem::take(&mut self.members).into_iter().collect();
        vec![Act::Lead(self.term, members), Act::Done(self.term)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERM: Term = Term::from_bits(7 << 16);
    const A: NodeId = 1 << 48;

    fn giver() -> Giver {
        Giver::new(A, Cause::Cordoned, vec![1, 2], 0, 0)
    }

    #[test]
    fn a_number_grows_and_says_why() {
        for cause in [Cause::Cordoned, Cause::Removed, Cause::ShutsDown, Cause::Order, Cause::Returns] {
            assert_eq!(Cause::of(cause.number(1_000_007)), cause);
            assert!(cause.number(1_000_007 + 20 * MS) > Cause::Returns.number(1_000_007));
        }
        assert_eq!(Cause::of(8), Cause::Order);
    }

    #[test]
    fn a_taker_that_is_silent_changes_nothing() {
        let mut giver = giver();
        let mut acts = Vec::new();
        while !giver.is_over() {
            acts.extend(giver.wake_up(giver.wake()));
        }
        assert_eq!(acts.pop(), Some(Act::GiveUp));
        assert!(acts.len() >= 9 && acts.iter().all(|act| *act == Act::Prepare), "{acts:?}");
        assert_eq!(giver.ready(TERM, false, 1), [], "too late");
    }

    #[test]
    fn an_end_that_nobody_confirms_is_taken_back_once() {
        let mut giver = giver();
        assert_eq!(giver.ready(TERM, true, 4), [], "nothing was diverted yet");
        assert_eq!(giver.ready(TERM, false, 5), [Act::Divert(TERM), Act::End(1, TERM), Act::End(2, TERM)]);
        let mut acts = Vec::new();
        let mut now = 5;
        while !giver.is_over() {
            now = giver.wake();
            acts.extend(giver.wake_up(now));
        }
        assert_eq!((acts.pop(), now), (Some(Act::TakeBack(TERM)), 5 + PATIENCE));
        assert_eq!(giver.ready(TERM, true, now + 1), [], "too late");
    }

    #[test]
    fn nobody_is_ready_until_every_far_leader_answers() {
        let mut taker = Taker::new(A, Cause::Order, TERM, &[1, 2]);
        assert_eq!(taker.prepare(Try::default(), 0, 0), [Act::Ask(1, TERM), Act::Ask(2, TERM)]);
        assert_eq!(taker.moved(1, TERM, (0, 1), &[]), []);
        assert_eq!(taker.prepare(Try::default(), 0, 0), [Act::Ask(2, TERM)]);
        assert_eq!(taker.moved(2, Term::from_bits(6 << 16), (0, 1), &[]), [], "of an earlier question");
        assert_eq!(taker.moved(2, TERM, (0, 1), &[]), [Act::Ready(TERM)]);
        assert_eq!(taker.prepare(Try::default(), 0, 0), [Act::Ready(TERM)], "its answer was lost");
    }

    #[test]
    fn who_waits_for_no_far_leader_leads_at_once() {
        let mut taker = Taker::new(A, Cause::Cordoned, TERM, &[]);
        assert_eq!(
            taker.prepare(Try::default(), 0, 0),
            [Act::Ready(TERM), Act::Lead(TERM, vec![]), Act::Done(TERM)]
        );
        assert!(taker.is_done());
    }

    proptest! {
        #[test]
        fn it_leads_once_and_after_every_part_has_moved_everywhere(
            order in Just((1u64..4).flat_map(|far| (0u16..3).map(move |part| (far, part))).collect::<Vec<_>>())
                .prop_shuffle(),
            repeated in prop::collection::vec(0usize..9, 0..9),
        ) {
            let mut taker = Taker::new(A, Cause::Order, TERM, &[1, 2, 3]);
            for far in 1..4 {
                taker.moved(far, TERM, (0, 1), &[]);
            }
            let (last, all) = order.split_last().unwrap();
            let again = repeated.iter().filter_map(|at| all.get(*at));
            for (far, part) in all.iter().chain(again) {
                prop_assert_eq!(taker.moved(*far, TERM, (*part, 3), &[NodeId::from(*part) + 10]), []);
            }
            let acts = taker.moved(last.0, TERM, (last.1, 3), &[NodeId::from(last.1) + 10]);
            prop_assert_eq!(acts, [Act::Lead(TERM, vec![10, 11, 12]), Act::Done(TERM)]);
            prop_assert_eq!(taker.moved(1, TERM, (0, 3), &[10]), [Act::Done(TERM)]);
        }
    }
}
