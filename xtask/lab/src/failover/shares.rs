//! Several active leaders of one location.

use std::{fs, time::Duration};

use anyhow::Result;

use super::{
    breaking::{Broken, MEMBER},
    state,
};
use crate::{Lab, checks, faults::nodes, matrix, well::LEADS};

/// How long a new active leader works before it takes its own nodes, and a bit.
const TAKES: Duration = Duration::from_secs(40);

/// While each node uses its own leader, everybody reaches everybody.
pub(super) fn all_reach_all(lab: &mut Lab) -> Result<()> {
    let mut matrix = matrix::run(&lab.network)?;
    // The VPN peer finds out that its leaders have booted when nobody has answered it for 15 s.
    for _ in 0..2 {
        if matrix.passed() < matrix.total() {
            matrix = matrix::run(&lab.network)?;
        }
    }
    if matrix.passed() < matrix.total() {
        matrix.print();
    }
    checks::all_passed(&matrix)
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
