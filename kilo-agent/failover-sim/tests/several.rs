//! Several active leaders, and the prefixes that belong to no single node: whichever fails, far leaders send them
//! to a gateway that works.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kilo_failover::{Micros, Params, SEC};
use kilo_failover_sim::{
    Noise, Shape, Sim,
    faults::{Fault, NEVER, Schedule, Scheduled},
    several::{START, Size, after},
};

const SEEDS: std::ops::Range<u64> = 0..12;

/// Nobody who is off has the shared prefixes.
fn moved(size: Size, faults: &[Scheduled], lasts: Micros) {
    check(size, faults, lasts, false);
}

fn check(size: Size, faults: &[Scheduled], lasts: Micros, is_all_served: bool) {
    let is_off = |node: &usize| faults.iter().any(|(.., fault)| *fault == Fault::Power(*node));
    for seed in SEEDS {
        let sim = after(seed, size, faults, lasts, false);
        let text = format!("{size:?}, {faults:?}, seed {seed}: {:?}", sim.counts);
        assert!(sim.counts.broken.is_empty() && sim.shared_are_served(), "{text}");
        assert!(!sim.shared().iter().any(is_off), "{:?}: {text}", sim.shared());
        assert!(!is_all_served || sim.has_converged(), "{text}");
    }
}

/// As [`moved`], and everybody is served.
fn served(size: Size, faults: &[Scheduled], lasts: Micros) {
    check(size, faults, lasts, true);
}

#[test]
fn an_acting_leader_without_stand_bys_leaves_the_shared_prefixes_to_another_one() {
    let dies = [(START, NEVER, Fault::Power(0))];
    for size in [(2, 2, 2), (2, 2, 3), (2, 2, 8), (3, 3, 3), (3, 3, 12), (4, 4, 4)] {
        moved(size, &dies, SEC);
        served(size, &[(START, NEVER, Fault::Uplink(0))], 3 * SEC);
    }
    // Its stand-bys are there, and could not lead.
    let unfit = |node| (START - 5 * SEC, NEVER, Fault::Uplink(node));
    served((2, 4, 12), &[unfit(2), dies[0].clone()], 2 * SEC);
    served((2, 4, 4), &[unfit(2), dies[0].clone()], 2 * SEC);
    // It dies with them, or after the next one.
    served((2, 4, 12), &[(START, NEVER, Fault::Power(2)), dies[0].clone()], 5 * SEC);
    served((3, 3, 12), &[(START, NEVER, Fault::Power(1)), (START + SEC, NEVER, Fault::Power(0))], 5 * SEC);
}

/// Far leaders still reach it, and it reaches nobody.
#[test]
fn an_acting_leader_without_stand_bys_and_without_lan_loses_the_shared_prefixes() {
    for size in [(2, 2, 8), (3, 3, 12), (4, 4, 12)] {
        served(size, &[(START, NEVER, Fault::Lan(0))], 8 * SEC);
    }
}

#[test]
fn one_that_works_keeps_them_although_another_one_does_not_hear_it() {
    for seed in SEEDS {
        let apart = [(START, START + 20 * SEC, Fault::Link(0, 1))];
        let sim = after(seed, (3, 3, 12), &apart, 40 * SEC, false);
        assert!(sim.counts.broken.is_empty() && sim.has_converged(), "seed {seed}: {:?}", sim.counts);
        assert_eq!(sim.shared(), [0, 0], "seed {seed}");
    }
}

#[test]
fn without_annotations_a_second_failure_in_a_row_moves_the_shared_prefixes_again() {
    let away = (START - SEC, NEVER, Fault::Api);
    let dies = |after: u64, node| (START + after * SEC, NEVER, Fault::Power(node));
    // 0 acts; 3 and 6 are its stand-bys.
    served((3, 9, 18), &[away.clone(), dies(0, 0), dies(20, 3)], 25 * SEC);
    let gives = (START + 20 * SEC, NEVER, Fault::Carrier(3));
    served((3, 9, 18), &[away.clone(), dies(0, 0), gives], 25 * SEC);
    // 3 is its only one, and its members find others.
    served((3, 6, 18), &[away.clone(), dies(0, 0), dies(20, 3)], 30 * SEC);
    served((3, 6, 6), &[away.clone(), dies(0, 0), dies(20, 3)], 30 * SEC);
    // Neither has any.
    served((3, 3, 12), &[away, dies(0, 0), dies(20, 1)], 25 * SEC);
}

#[test]
fn a_stand_by_that_takes_over_from_another_one_takes_nothing_from_the_acting_leader() {
    for seed in SEEDS {
        let sim = after(seed, (3, 6, 18), &[(START, NEVER, Fault::Power(1))], 30 * SEC, false);
        assert!(sim.counts.broken.is_empty() && sim.has_converged(), "seed {seed}: {:?}", sim.counts);
        assert_eq!(sim.shared(), [0, 0], "seed {seed}");
    }
}

#[test]
fn gateways_that_join_at_once_take_their_members_one_after_the_other_a_minute_apart() {
    let until = START + 300 * SEC;
    let shape = Shape { nodes: 24, gateways: 4, fars: 2, delay: None, go: None };
    // They boot, or have been stand-bys before.
    let boots = [2, 3].map(|node| (SEC, START, Fault::NoGateway(node))).to_vec();
    for (seed, faults) in SEEDS.take(6).flat_map(|seed| [(seed, boots.clone()), (seed, Vec::new())]) {
        let mut sim = Sim::new(seed, shape, Noise::default(), Params::default());
        sim.set_active(2, until);
        sim.set_active_at(4, START);
        sim.run(Schedule::new(faults, until), START);
        assert!(sim.counts.broken.is_empty() && sim.has_converged(), "seed {seed}: {:?}", sim.counts);
        let took: Vec<_> = sim.counts.took_home.iter().filter(|(at, _)| *at >= START).collect();
        for gateway in [2, 3] {
            assert!(took.iter().any(|(_, taker)| *taker == gateway), "seed {seed}: {took:?}");
        }
        for pair in took.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
            let apart = pair[1].0 - pair[0].0;
            assert!((60 * SEC..=180 * SEC).contains(&apart), "seed {seed}: {took:?}");
        }
    }
}
