//! Schedules of faults that several scenarios have in common.

use kilo_failover::{Micros, SEC};

use crate::{
    faults::{self, Fault, NEVER, Schedule},
    rng::Rng,
};

pub(super) fn flaps(
    rng: &mut Rng,
    start: Micros,
    lasts: (Micros, Micros),
    fault: impl Fn(u64) -> Fault,
) -> Schedule {
    let flap = |i| {
        let at = start + i * 3 * SEC;
        (at, at + rng.between(lasts.0, lasts.1), fault(i))
    };
    Schedule::new((0..20).map(flap).collect(), start + 65 * SEC)
}

pub(super) fn flood(percent: u8, seconds: u64, start: Micros) -> Schedule {
    let end = start + seconds * SEC;
    Schedule::new(vec![(start, end, Fault::Flood(percent))], end + 8 * SEC)
}

pub(super) fn halves(rng: &mut Rng, nodes: usize, start: Micros) -> Schedule {
    let half = |node| match node {
        0 => false,
        2 => true,
        _ => rng.chance(0.5),
    };
    Schedule::new(
        vec![(start, start + 20 * SEC, Fault::Halves((0..nodes).map(half).collect()))],
        start + 25 * SEC,
    )
}

/// Every node is off, and each comes back within a second of the others.
pub(super) fn boots_whole(nodes: usize, at: Micros, rng: &mut Rng) -> Schedule {
    let boots = |node| (at, at + 3 * SEC + rng.between(0, SEC), Fault::Power(node));
    Schedule::new((0..nodes).map(boots).collect(), at + 35 * SEC)
}

pub(super) fn dies_in_trial(rng: &mut Rng, t: Micros, fault: Fault) -> Schedule {
    let at = t + 65 * SEC + rng.between(0, 3 * SEC);
    Schedule::new(vec![(t, t + 5 * SEC, Fault::Power(0)), (at, NEVER, fault)], t + 85 * SEC).without(&[0])
}

pub(super) fn three_dead(rng: &mut Rng, at: Micros) -> [faults::Scheduled; 3] {
    let first = rng.index(3);
    [0, 1, 2].map(|more| (at, NEVER, Fault::Far(first + more)))
}

pub(super) fn and_power(more: Vec<faults::Scheduled>, start: Micros) -> Schedule {
    let mut faults = more;
    faults.push((start, NEVER, Fault::Power(0)));
    Schedule::new(faults, start + 15 * SEC)
}
