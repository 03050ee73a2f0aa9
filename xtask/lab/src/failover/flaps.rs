//! Hosts and links that flap: leadership must not move each time.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{
    breaking::{self, Broken, LEADER, STAND_BY},
    flood::OVERLOADED,
};
use crate::Lab;
use crate::wait;

/// Number of flaps and length of each, the second half of which is without the fault.
const TIMES: u32 = 20;
const EACH: Duration = Duration::from_secs(3);

/// Breaks something for the first half of each turn, and mends it for the second.
fn flap(
    lab: &mut Lab,
    mut breaks: impl FnMut(&mut Lab, u32) -> Result<()>,
    mut mends: impl FnMut(&mut Lab, u32) -> Result<()>,
) -> Result<Broken> {
    let began = Instant::now();
    for time in 0..TIMES {
        let until =
            |half: u32| wait::fault_lasts((EACH / 2 * (2 * time + half)).saturating_sub(began.elapsed()));
        until(0);
        breaks(lab, time)?;
        until(1);
        mends(lab, time)?;
    }
    Ok(Broken::done(format!("{TIMES} times in {} s", began.elapsed().as_secs())))
}

pub(super) fn power(lab: &mut Lab) -> Result<Broken> {
    // While a host boots, tunnels to it lose some probes and not all.
    lab.caused(&[OVERLOADED]);
    flap(lab, |lab, _| breaking::cut_power(lab, LEADER), |lab, _| breaking::boot(lab, LEADER))
}

pub(super) fn uplink(lab: &mut Lab) -> Result<Broken> {
    flap(
        lab,
        |lab, _| breaking::silence(&lab.network.router, "a1-wan"),
        |lab, _| lab.network.router.sh("nft delete table netdev silent").map(drop),
    )
}

pub(super) fn in_turn(lab: &mut Lab) -> Result<Broken> {
    let whose = |time: u32| if time.is_multiple_of(2) { LEADER } else { STAND_BY };
    flap(lab, |lab, time| breaking::cut_power(lab, whose(time)), |lab, time| breaking::boot(lab, whose(time)))
}
