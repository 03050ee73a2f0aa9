//! Each rule of the design left out once: the simulation must notice. What it
//! notices is printed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kilo_failover::{Params, Rule};
use kilo_failover_sim::scenarios::named;

/// The rule, the fault that needs it, and what is broken without it.
const NEEDED: &[(Rule, &str, &str)] = &[
    (
        Rule::ReadFirst,
        "a stand-by's agent stalls 20 times, far leaders 240 ms away",
        "nobody is suspected without need",
    ),
    (
        Rule::DiscardWhenLate,
        "a stand-by pauses 20 times, far leaders 240 ms away",
        "nobody is suspected without need",
    ),
    (Rule::Proof, "all uplinks dead for 10 s", "changes of leader within the limit"),
    (Rule::Witnesses, "receives and does not forward", "outages within the limit"),
    (Rule::ClaimFollowers, "LAN in halves", "far leaders follow members' words"),
    (Rule::Rank, "a stand-by's terms leap to the end, then power off", "changes of leader within the limit"),
    (Rule::Budget, "gateways lose the LAN in turn, 20 times in 60 s", "changes of leader within the limit"),
    (Rule::Hold, "20 flaps in 60 s: power", "changes of leader within the limit"),
    (Rule::FarLaterTerms, "1 to 4 at random, 5 % loss, stalls", "one owner, of the latest term"),
    (Rule::KernelLaterTerms, "signals replayed; leaders and a member boot", "a word only rises"),
    (
        Rule::NoLeap,
        "a stand-by's terms leap to the end, then it is without power",
        "outages within the limit",
    ),
    (Rule::KernelCookie, "signals replayed; leaders and a member boot", "no replay counts"),
    (
        Rule::Boots,
        "a leader's clock is earlier after a boot, then its carrier goes",
        "outages within the limit",
    ),
    (Rule::Patience, "a flood: 60 % lost each way", "changes of leader within the limit"),
    (Rule::TwoHops, "leader's uplink dead; the next one boots in 0.2 s", "no loop"),
    (Rule::TimeToLive, "power off", "time to live"),
];

/// Most runs until a rule that is left out must have been noticed.
const RUNS: u64 = 400;

#[test]
fn each_rule_left_out_is_noticed() {
    let mut unnoticed = Vec::new();
    for (rule, fault, broken) in NEEDED {
        let scenario = named(fault).unwrap();
        let params = Params { without: Some(*rule), ..Params::default() };
        let seen = (1..=RUNS).find(|seed| scenario.one(*seed, &params, false).counts.broken.contains(broken));
        match seen {
            Some(seed) => {
                let kept = scenario.one(seed, &Params::default(), false).counts.broken;
                assert!(kept.is_empty(), "with {rule:?} kept: {kept:?} ({fault}, seed {seed})");
                println!("without {rule:?}: \"{broken}\" does not hold ({fault}, seed {seed})");
            }
            None => unnoticed.push(rule),
        }
    }
    assert!(unnoticed.is_empty(), "nothing shows that these are needed: {unnoticed:?}");
}
