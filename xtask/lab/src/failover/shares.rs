//! Several active leaders of one location.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::{
    breaking::{Broken, MEMBER, STAND_BY},
    flood, state,
};
use crate::{
    Lab,
    deployed_state::{LEADS, NO_ENDPOINT},
    faults::nodes,
    matrix, wait,
};

/// Longest wait until a new active leader takes its own nodes.
const TAKES: Duration = Duration::from_secs(120);

/// While each node uses its own leader, everybody reaches everybody.
pub(super) fn all_reach_all(lab: &mut Lab) -> Result<()> {
    // Everybody probes everybody at once, through userspace WireGuard.
    lab.caused(&[flood::OVERLOADED]);
    let mut matrix = matrix::run(&lab.network)?;
    // The VPN peer notices that its leaders have rebooted after 15 s without an answer.
    for _ in 0..2 {
        if matrix.passed() < matrix.total() {
            matrix = matrix::run(&lab.network)?;
        }
    }
    if matrix.passed() < matrix.total() {
        matrix.print();
    }
    matrix.all_passed()
}

/// The annotation makes a node lead beside the others.
pub(super) fn joins(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS]);
    let path = lab.agents.cluster().join(format!("node-{MEMBER}.yaml"));
    let before = fs::read_to_string(&path)?;
    let text = nodes::annotated(lab, MEMBER, &[("gateway", "true")])?;
    nodes::put(&path, &text)?;
    state::acts(lab, MEMBER, TAKES)?;
    Ok(Broken::until("a3 leads itself because its annotation says so", move |_| nodes::put(&path, &before)))
}

/// The node without failover, which looks like one with Kilo itself.
const KILO: &str = "b2";

/// Beside a node with Kilo itself every location has one leader, and everybody reaches everybody.
pub(super) fn one_leads_beside_kilo(lab: &mut Lab) -> Result<()> {
    all_reach_all(lab)?;
    for node in [STAND_BY, MEMBER] {
        ensure!(state::role(lab, node) != "leader", "{node} leads beside a node with Kilo itself");
    }
    Ok(())
}

/// A node of the other location becomes one with Kilo itself: one gateway takes over from the others.
pub(super) fn kilo_joins(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS]);
    let node = lab.network.node(KILO)?.clone();
    lab.agents.set_own_flags(&[KILO], state::OFF);
    lab.agents.stop(KILO, Signal::SIGTERM)?;
    lab.agents.start(&node)?;
    let began = Instant::now();
    wait::until("a2 does not lead beside a node with Kilo itself", TAKES, || {
        Ok(state::role(lab, STAND_BY) != "leader")
    })?;
    let said = format!("a2 has stopped leading {} s after b2 became Kilo", began.elapsed().as_secs());
    Ok(Broken::until(said, move |lab| {
        lab.agents.set_own_flags(&[], &[]);
        lab.agents.stop(KILO, Signal::SIGTERM)?;
        lab.agents.start(&node)
    }))
}

/// The last node with Kilo itself leaves: each gateway takes its own.
pub(super) fn kilo_leaves(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS, NO_ENDPOINT]);
    let node = lab.network.node(KILO)?.clone();
    lab.agents.stop(KILO, Signal::SIGTERM)?;
    for file in [format!("node-{KILO}.yaml"), format!("{KILO}.kilo.yaml")] {
        let _ = fs::remove_file(lab.agents.cluster().join(file));
    }
    let began = Instant::now();
    state::acts(lab, STAND_BY, TAKES)?;
    let said = format!("a2 leads itself {} s after b2 has left", began.elapsed().as_secs());
    Ok(Broken::until(said, move |lab| {
        lab.agents.write_node(&node, &[])?;
        lab.agents.start(&node)
    }))
}
