//! Wall clocks that jump while agents run, forward on some nodes and back on others: no decision may depend
//! on them.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::{
    FIT,
    breaking::{self, Broken, FAR, LEADER, STAND_BY},
    state,
};
use crate::{Lab, agents, faults::nodes::off_by, wait};

/// Nodes whose clocks jump.
const WHOSE: [&str; 3] = [LEADER, STAND_BY, FAR];
/// Offsets of their clocks, in seconds, one row after the other.
const JUMPS: [[i64; 3]; 3] = [[3_600, -3_600, 3_600], [-3_600, 3_600, -3_600], [0, 3_600, 0]];
/// Longest wait for an agent to start, and to see its new time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Restarts those agents with clocks that can be moved.
pub(super) fn restart_with_clocks(lab: &mut Lab) -> Result<()> {
    for name in WHOSE {
        lab.agents.stop(name, Signal::SIGTERM)?;
        let node = breaking::node(lab, name)?;
        lab.agents.start_with_clock(&node)?;
        agents::wait_healthy(&node.netns, PATIENCE)?;
    }
    lab.agents.wait_until_ready(&lab.network, PATIENCE)?;
    state::in_place(lab, &[], 1, FIT)
}

/// The leader must not change while clocks jump; one that dies then is replaced as usual.
pub(super) fn jump(lab: &mut Lab) -> Result<Broken> {
    let before = state::changes(lab);
    for clocks in JUMPS {
        for (name, clock) in WHOSE.into_iter().zip(clocks) {
            lab.agents.set_clock(name, &format!("{clock:+}"))?;
        }
        for (name, clock) in WHOSE.into_iter().zip(clocks) {
            wait::until(&format!("the clock of {name} is off by {clock} s"), PATIENCE, || {
                let off = off_by(lab, name)?;
                Ok(if (off - clock).abs() < 60 { Ok(()) } else { Err(off) })
            })?;
        }
        wait::fault_lasts(breaking::length());
        let changes = state::changes(lab).saturating_sub(before);
        ensure!(changes == 0, "the leader changed {changes} times when clocks jumped to {clocks:?} s");
    }
    let off = breaking::power_off(lab)?;
    let said = format!("clocks of {} were off by {JUMPS:?} s; {}", WHOSE.join(", "), off.said);
    Ok(off.saying(said))
}
