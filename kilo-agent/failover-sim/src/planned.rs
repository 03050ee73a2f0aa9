//! A planned change packet by packet: a member sends 1,000 a second through the two
//! leaders, whose machines are the ones that ship.

use std::collections::BTreeMap;

use kilo_failover::{
    MS, Micros, SEC, Term,
    planned::{Act, Giver, STRAGGLERS, Taker},
};

use crate::rng::Rng;

/// What one change has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Packets that no peer's allowed IPs let in.
    pub lost: u32,
    /// The longest extra delay.
    pub late: Micros,
    /// Whether the prefixes are the new leader's in the end.
    pub done: bool,
}

enum Event {
    Prepare,
    Ready(Term, bool),
    End(Term),
    Moved(Term),
    Giver,
    Taker,
    Move(Term),
}

/// The wires between two leaders and one far leader.
struct Wires {
    rng: Rng,
    delay: Micros,
    skew: i64,
    loss: f64,
}

impl Wires {
    fn lan(&mut self) -> Micros {
        self.rng.between(100, 600)
    }

    /// To or from the far leader, by the old leader or the new one.
    fn wan(&mut self, is_new: bool) -> Micros {
        let base = self.delay as i64 + if is_new { self.skew } else { 0 };
        base.max(500) as Micros + self.rng.exponential(400.0)
    }
}

/// One change. `holds`: the new leader holds packets. `loss`: of signals.
pub fn change(seed: u64, holds: bool, loss: f64) -> Cost {
    let mut rng = Rng::new(seed);
    let delay = rng.between(2, 60) * MS;
    let skew = rng.between(0, 6 * MS) as i64 - 3 * MS as i64;
    let mut wires = Wires { rng, delay, skew, loss };
    let moments = run(&mut wires, holds);
    cost(&mut wires, &moments)
}

/// When what happened.
#[derive(Default)]
struct Moments {
    diverted: Option<Micros>,
    taken_back: Option<Micros>,
    /// At the far leader: to the new leader, and back.
    moved: Option<Micros>,
    moved_back: Option<Micros>,
    held: Option<Micros>,
    released: Option<Micros>,
    announced: Option<Micros>,
}

fn run(wires: &mut Wires, holds: bool) -> Moments {
    let mut moments = Moments::default();
    let mut queue: BTreeMap<(Micros, u64), Event> = BTreeMap::new();
    let mut number = 0;
    let mut at = |queue: &mut BTreeMap<_, _>, time: Micros, event| {
        number += 1;
        queue.insert((time, number), event);
    };
    let start = SEC + wires.rng.between(0, MS);
    let mut giver = Giver::new(vec![0], start);
    let mut taker: Option<Taker> = None;
    at(&mut queue, start, Event::Giver);
    while let Some(((now, _), event)) = queue.pop_first() {
        let acts = match event {
            Event::Giver => giver.wake_up(now),
            Event::Taker => taker.as_mut().map(|taker| taker.wake_up(now)).unwrap_or_default(),
            Event::Prepare => match &taker {
                Some(taker) => vec![taker.again()],
                None => {
                    let (new, acts) = Taker::new(Term::from_bits(1 << 16), &[0], holds, now);
                    taker = Some(new);
                    acts
                }
            },
            Event::Ready(term, is_done) => giver.ready(term, is_done, now),
            Event::End(term) => {
                if moments.moved.is_none() {
                    at(&mut queue, now + STRAGGLERS + wires.rng.between(MS, 5 * MS), Event::Move(term));
                }
                Vec::new()
            }
            Event::Move(term) => {
                moments.moved.get_or_insert(now);
                if !wires.rng.chance(wires.loss) {
                    at(&mut queue, now + wires.wan(true), Event::Moved(term));
                }
                Vec::new()
            }
            Event::Moved(term) => taker.as_mut().map(|taker| taker.moved(0, term, now)).unwrap_or_default(),
        };
        let is_done = taker.as_ref().is_some_and(Taker::is_done);
        for act in acts {
            let lost = wires.rng.chance(wires.loss);
            match act {
                Act::Prepare if !lost => at(&mut queue, now + wires.lan(), Event::Prepare),
                Act::Ready(term) if !lost => at(&mut queue, now + wires.lan(), Event::Ready(term, is_done)),
                Act::End(_, term) if !lost => at(&mut queue, now + wires.wan(false), Event::End(term)),
                Act::Hold => moments.held = Some(now),
                Act::Release => moments.released = Some(now),
                Act::Divert(_) => moments.diverted = Some(now),
                Act::Lead(_) => moments.announced = Some(now + wires.rng.between(MS, 5 * MS)),
                Act::TakeBack(_) => {
                    moments.taken_back = Some(now);
                    moments.moved_back = Some(now + wires.wan(false) + 5 * MS);
                }
                _ => {}
            }
        }
        if giver.wake() != Micros::MAX {
            at(&mut queue, giver.wake().max(now + 1), Event::Giver);
        }
        if let Some(wake) = taker.as_ref().map(Taker::wake).filter(|wake| *wake != Micros::MAX) {
            at(&mut queue, wake.max(now + 1), Event::Taker);
        }
    }
    moments
}

fn cost(wires: &mut Wires, moments: &Moments) -> Cost {
    let after = |at: Micros, moment: Option<Micros>| moment.is_some_and(|moment| at >= moment);
    let mut cost = Cost { done: moments.moved.is_some() && moments.taken_back.is_none(), ..Cost::default() };
    for packet in 0..2_500u64 {
        let sent = packet * MS + wires.rng.between(0, 999);
        let at_old = sent + wires.lan();
        let follows = after(sent, moments.announced) && moments.taken_back.is_none();
        let diverted = after(at_old, moments.diverted) && !after(at_old, moments.taken_back);
        let (far_at, by_new) = if follows || diverted {
            let at_new = if follows { at_old } else { at_old + wires.lan() };
            let is_held = after(at_new, moments.held) && !after(at_new, moments.released);
            let leaves = if is_held { moments.released.unwrap_or(at_new) } else { at_new };
            (leaves + wires.wan(true), true)
        } else {
            (at_old + wires.wan(false), false)
        };
        let owner_is_new = after(far_at, moments.moved) && !after(far_at, moments.moved_back);
        cost.lost += u32::from(owner_is_new != by_new);
        cost.late = cost.late.max(far_at.saturating_sub(sent + wires.delay));
    }
    cost
}
