//! Every probe interval that may be asked for: faults and planned changes are noticed
//! as many intervals later.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kilo_failover::{MS, Params, params};
use kilo_failover_sim::{Invariant, scenarios::named};

/// Faults that somebody has to take over for, and changes that are planned.
const CASES: [(&str, u32); 5] = [
    ("power off", 1),
    ("uplink dead, carrier stays", 1),
    ("leader cordoned", 1),
    ("leader cordoned for 5 s, return", 2),
    ("annotation moved, and back after 10 s", 2),
];
const RUNS: u64 = 8;

#[test]
fn the_shortest_and_the_longest_interval_fail_over_and_give_leadership_back() {
    let mut bad = Vec::new();
    for interval in [params::SHORTEST, 100 * MS, params::LONGEST] {
        let params = Params::new(interval).unwrap();
        let longer = interval.max(40 * MS) as f64 / (40 * MS) as f64;
        for (name, changes) in CASES {
            let scenario = named(name).unwrap();
            for seed in 0..RUNS {
                let counts = scenario.one(seed, &params, false).counts;
                let broken: Vec<_> =
                    counts.broken.iter().filter(|rule| **rule != Invariant::Outages).collect();
                let limit = (scenario.goal * MS) as f64 * longer;
                if !broken.is_empty() || counts.longest as f64 > limit || counts.switches() < changes {
                    bad.push(format!(
                        "{} ms, {name}, seed {seed}: {} ms, {} changes, {broken:?}",
                        interval / MS,
                        counts.longest / MS,
                        counts.switches()
                    ));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
