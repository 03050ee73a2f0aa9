//! A planned change, make before break: the next leader is ready and holds what it
//! gets, the old one sends it everything and says END behind its last packet, far
//! leaders move the prefixes, and what was held follows. Nothing is lost and nothing
//! comes twice.
//!
//! ```text
//! giver  PREPARE ──> taker holds, READY ──> giver diverts, END to every far leader
//! far leader waits for stragglers, moves, MOVED ──> taker releases, ANNOUNCE, READY
//! ```
//! The second READY ends it. Without it the giver takes back, in a later term.

use std::collections::BTreeSet;

use crate::{Far, MS, Micros, Term};

/// How long the taker holds packets at most.
pub const LONGEST_HOLD: Micros = 250 * MS;
/// How long the giver waits for the end, since it diverted.
pub const PATIENCE: Micros = 300 * MS;
/// How long a far leader waits for packets behind an END.
pub const STRAGGLERS: Micros = 5 * MS;
/// Between two tries of an unanswered signal.
const AGAIN: Micros = 20 * MS;
/// How long the taker is asked.
const ASKS: Micros = 200 * MS;

/// What one side is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Send PREPARE to the taker.
    Prepare,
    /// Send READY in this term to the giver.
    Ready(Term),
    /// Keep what comes for other locations.
    Hold,
    /// Send what was kept, in order, and everything after it.
    Release,
    /// Send everything to the taker from now on: its term, by the kernel's word.
    Divert(Term),
    /// Send END to this far leader, behind the last packet.
    End(Far, Term),
    /// Lead them in this term: ANNOUNCE; far leaders have moved them.
    Lead(Term),
    /// It did not end: lead them again, in a term after this one.
    TakeBack(Term),
    /// The taker does not answer: nothing has changed.
    GiveUp,
}

/// The leader that gives.
#[derive(Clone, Debug)]
pub struct Giver {
    fars: Vec<Far>,
    since: Micros,
    next: Micros,
    diverted: Option<(Micros, Term)>,
    is_over: bool,
}

impl Giver {
    /// Starts; the first [`Self::wake_up`] is now.
    pub fn new(fars: Vec<Far>, now: Micros) -> Self {
        Self { fars, since: now, next: now, diverted: None, is_over: false }
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        match self.diverted {
            _ if self.is_over => Micros::MAX,
            Some((at, _)) => self.next.min(at + PATIENCE),
            None => self.next,
        }
    }

    /// READY came: the first diverts, a later one ends it.
    pub fn ready(&mut self, term: Term, is_done: bool, now: Micros) -> Vec<Act> {
        match self.diverted {
            _ if self.is_over => Vec::new(),
            None => {
                self.diverted = Some((now, term));
                self.next = now + AGAIN;
                let mut acts = vec![Act::Divert(term)];
                acts.extend(self.fars.iter().map(|far| Act::End(*far, term)));
                acts
            }
            Some((_, diverted)) => {
                self.is_over = is_done && diverted == term;
                Vec::new()
            }
        }
    }

    /// What is due.
    pub fn wake_up(&mut self, now: Micros) -> Vec<Act> {
        if self.is_over {
            return Vec::new();
        }
        match self.diverted {
            Some((at, term)) if now >= at + PATIENCE => {
                self.is_over = true;
                vec![Act::TakeBack(term)]
            }
            None if now >= self.since + ASKS => {
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
    term: Term,
    waits_for: BTreeSet<Far>,
    holds_until: Option<Micros>,
    released: Option<Micros>,
}

impl Taker {
    /// PREPARE came. `term`: the next one of this gateway. `holds`: it can hold packets.
    pub fn new(term: Term, fars: &[Far], holds: bool, now: Micros) -> (Self, Vec<Act>) {
        let holds_until = holds.then_some(now + LONGEST_HOLD);
        let taker = Self { term, waits_for: fars.iter().copied().collect(), holds_until, released: None };
        let mut acts = vec![Act::Ready(term)];
        if holds {
            acts.insert(0, Act::Hold);
        }
        (taker, acts)
    }

    /// PREPARE came again: its answer was lost.
    pub fn again(&self) -> Act {
        Act::Ready(self.term)
    }

    /// Whether far leaders have moved everything, or the time is over.
    pub fn is_done(&self) -> bool {
        self.released.is_some()
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        match self.released {
            Some(_) => Micros::MAX,
            None => self.holds_until.unwrap_or(Micros::MAX),
        }
    }

    /// A far leader has moved everybody.
    pub fn moved(&mut self, far: Far, term: Term, now: Micros) -> Vec<Act> {
        if term != self.term || !self.waits_for.remove(&far) || !self.waits_for.is_empty() {
            return Vec::new();
        }
        self.release(now, true)
    }

    /// What is due.
    pub fn wake_up(&mut self, now: Micros) -> Vec<Act> {
        if self.holds_until.is_some_and(|until| now >= until) { self.release(now, false) } else { Vec::new() }
    }

    /// Nothing is held longer than it must; only what has moved is led.
    fn release(&mut self, now: Micros, moved: bool) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.holds_until.take().is_some() {
            acts.push(Act::Release);
        }
        if moved && self.released.is_none() {
            self.released = Some(now);
            acts.extend([Act::Lead(self.term), Act::Ready(self.term)]);
        }
        acts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERM: Term = Term::from_bits(7 << 16);

    #[test]
    fn a_taker_that_is_silent_changes_nothing() {
        let mut giver = Giver::new(vec![1, 2], 0);
        let mut acts = Vec::new();
        while !giver.is_over() {
            acts.extend(giver.wake_up(giver.wake()));
        }
        assert_eq!(acts.pop(), Some(Act::GiveUp));
        assert!(acts.len() >= 9 && acts.iter().all(|act| *act == Act::Prepare), "{acts:?}");
    }

    #[test]
    fn an_end_that_nobody_confirms_is_taken_back_once() {
        let mut giver = Giver::new(vec![1, 2], 0);
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

    proptest! {
        #[test]
        fn what_is_held_is_released_once_and_in_time(moved in prop::collection::vec((1u64..4, 0u64..400), 0..8)) {
            let (mut taker, acts) = Taker::new(TERM, &[1, 2, 3], true, 0);
            prop_assert_eq!(acts, [Act::Hold, Act::Ready(TERM)]);
            let mut moved = moved;
            moved.sort_by_key(|(_, at)| *at);
            let all = (1..4).all(|far| moved.iter().any(|(other, _)| *other == far));
            let mut done = Vec::new();
            for (far, at) in moved {
                let at = at * MS;
                if taker.wake() <= at {
                    let wake = taker.wake();
                    done.extend(taker.wake_up(wake).into_iter().map(|act| (wake, act)));
                }
                done.extend(taker.moved(far, TERM, at).into_iter().map(|act| (at, act)));
            }
            let end = 500 * MS;
            let wake = taker.wake().min(end);
            done.extend(taker.wake_up(wake).into_iter().map(|act| (wake, act)));
            let released: Vec<_> = done.iter().filter(|(_, act)| *act == Act::Release).collect();
            prop_assert_eq!(released.len(), 1);
            prop_assert!(released[0].0 <= LONGEST_HOLD);
            prop_assert_eq!(done.iter().filter(|(_, act)| *act == Act::Lead(TERM)).count(), usize::from(all));
        }
    }
}
