//! Leaves out each rule of the design once: the simulation must notice, and each of its invariants must be
//! seen to fail at least once. Prints what it notices.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kilo_failover::{Params, Rule};
use kilo_failover_sim::{Invariant, scenarios::named};

/// The rule, the fault that needs it, and what does not hold without it.
const NEEDED: &[(Rule, &str, Invariant)] = &[
    (Rule::ReadFirst, "a stand-by's agent stalls 20 times, far leaders 240 ms away", Invariant::Unsuspected),
    (Rule::DiscardWhenLate, "a stand-by pauses 20 times, far leaders 240 ms away", Invariant::Unsuspected),
    (Rule::Proof, "all uplinks dead for 10 s", Invariant::Changes),
    (Rule::Proof, "a far leader dead", Invariant::Undisturbed),
    (Rule::Witnesses, "receives and does not forward", Invariant::Outages),
    (Rule::Witnesses, "the leader is Go Kilo; power off", Invariant::SharedServed),
    (Rule::SharedNeedsLan, "a stand-by cut off the LAN", Invariant::SharedServed),
    (Rule::Watch, "a leader tries to return, and the acting one loses power", Invariant::Outages),
    (Rule::ClaimFollowers, "LAN in halves", Invariant::FarFollows),
    (Rule::ClaimFollowers, "a stand-by cut off the LAN", Invariant::Served),
    (Rule::Rank, "a stand-by's terms leap to the end, then power off", Invariant::Changes),
    (Rule::Budget, "gateways lose the LAN in turn, 20 times in 60 s", Invariant::Changes),
    (Rule::BudgetSparesOthers, "20 flaps in turn; the third's uplink dead for 30 s", Invariant::Changes),
    (Rule::AsksWhoLeads, "a stand-by boots, the acting leader's agent stalls", Invariant::Changes),
    (Rule::Hold, "20 flaps in 60 s: power", Invariant::Changes),
    (Rule::FarLaterTerms, "1 to 4 at random, 5 % loss, stalls", Invariant::LatestTerm),
    (Rule::KernelLaterTerms, "signals replayed; leaders and a member boot", Invariant::WordRises),
    (Rule::TakesLeftBehind, "a member boots that nobody leads any more", Invariant::Served),
    (Rule::CatchesUp, "a whole location boots, then power off", Invariant::Outages),
    (Rule::NoLeap, "a stand-by's terms leap to the end, then it is without power", Invariant::Outages),
    (Rule::RaisesSlowly, "a stand-by's HELLOs raise terms, it is gone, then power off", Invariant::Outages),
    (Rule::KernelCookie, "signals replayed; leaders and a member boot", Invariant::NoReplay),
    (Rule::Boots, "a leader's clock is earlier after a boot, then its carrier goes", Invariant::Outages),
    (Rule::Patience, "a flood: 60 % lost each way", Invariant::Changes),
    (Rule::TwoTargets, "locations come and go: other WireGuard addresses", Invariant::Undisturbed),
    (Rule::TwoHops, "leader's uplink dead; the next one boots in 0.2 s", Invariant::NoLoop),
    (Rule::TwoHops, "leader's uplink dead; the next one boots in 0.2 s", Invariant::TwoHops),
    (Rule::TimeToLive, "power off", Invariant::TimeToLive),
];

/// Maximum number of runs until a rule that is left out must have been noticed.
const RUNS: u64 = 400;

#[test]
fn each_rule_has_a_fault_that_needs_it() {
    let is_needed = |rule: &&Rule| NEEDED.iter().any(|(needed, ..)| needed == *rule);
    let missing: Vec<_> = Rule::ALL.iter().filter(|rule| !is_needed(rule)).collect();
    assert!(missing.is_empty(), "no fault is named that needs these: {missing:?}");
}

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

#[test]
fn each_invariant_is_seen_to_fail() {
    let fails = |invariant: &&Invariant| NEEDED.iter().any(|(.., broken)| broken == *invariant);
    let unseen: Vec<_> = Invariant::ALL.iter().filter(|invariant| !fails(invariant)).collect();
    assert!(unseen.is_empty(), "nothing shows that these can fail: {unseen:?}");
}
