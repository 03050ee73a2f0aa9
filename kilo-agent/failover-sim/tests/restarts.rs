//! Agents of gateways that restart, or are replaced by ones of another layout of the maps: no gateway loses
//! members, and planned changes end as they do otherwise.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kilo_failover_sim::{
    Sim,
    restarts::{self, How, Who},
};

const BOTH: [How; 2] = [How::Restarts, How::IsUpgraded];

/// Nobody was cut off, and each gateway claims all that use it.
fn nothing_happens(sim: &Sim, text: &str) {
    assert!(sim.counts.broken.is_empty() && sim.has_converged(), "{text}: {:?}", sim.counts);
    assert_eq!(sim.counts.longest, 0, "{text}: {:?}", sim.counts);
    assert!(sim.is_claimed(), "{text}: somebody uses a gateway that does not claim it");
}

#[test]
fn an_acting_leader_whose_agent_is_replaced_goes_on_with_all_that_follow_it() {
    for how in BOTH {
        for (nodes, seed) in [2, 3, 5, 20].into_iter().flat_map(|nodes| [(nodes, 1), (nodes, 2)]) {
            let sim = restarts::acting_leader(seed, how, nodes, false);
            let text = format!("{how:?}, {nodes} nodes, seed {seed}");
            nothing_happens(&sim, &text);
            assert_eq!(sim.loads()[1], nodes, "{text}");
            assert_eq!(sim.counts.flips as usize, nodes, "each has changed once, as planned: {text}");
        }
    }
}

#[test]
fn a_gateway_that_another_one_leads_keeps_a_member_of_a_later_term_over_a_restart() {
    for seed in 0..10 {
        let sim = restarts::alone_in_a_later_term(seed, How::Restarts, false);
        let text = format!("seed {seed}");
        nothing_happens(&sim, &text);
        assert_eq!(sim.loads(), [4, 1, 0], "{text}");
    }
}

#[test]
fn planned_changes_end_although_agents_restart_around_them() {
    const RUNS: u64 = 150;
    let mut taken_back = Vec::new();
    for (how, who) in BOTH.into_iter().flat_map(|how| [(how, Who::Giver), (how, Who::Any)]) {
        for seed in 0..RUNS {
            let sim = restarts::planned_change(seed, how, who, false);
            let text = format!("{who:?} {how:?}, seed {seed}");
            assert!(sim.counts.broken.is_empty() && sim.has_converged(), "{text}: {:?}", sim.counts);
            assert!(sim.is_claimed() && sim.counts.took.contains(&2), "{text}: {:?}", sim.counts);
            taken_back.extend((sim.counts.taken_back > 0).then_some(text));
        }
    }
    println!("{} of {} planned changes were taken back: {taken_back:?}", taken_back.len(), 4 * RUNS);
    // A taker whose agent ends after the giver has diverted does not go on with the change.
    assert!(taken_back.len() <= 6, "{taken_back:?}");
}
