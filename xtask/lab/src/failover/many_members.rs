//! A location of a thousand members: what its agents cost at rest, and how long members keep following a
//! leader that has lost power.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{
    breaking::{self, Broken, FAR, LEADER, STAND_BY},
    cost_at_rest,
};
use crate::{
    Lab,
    network::{MEMBERS, MEMBERS_NET},
    wait,
};

/// Longest wait until every member follows.
const FOLLOWED: Duration = Duration::from_secs(1);
/// Percentage of one core that an agent's failover thread may take. Debug builds take about three times as
/// much, and agents are mostly built like this program.
const MOST: f64 = if cfg!(debug_assertions) { 4.0 } else { 1.0 };
/// Longest wait until the prefixes have moved.
const LOOK: Duration = Duration::from_secs(5);

/// How many of the members' prefixes the far leader's device routes to this gateway.
fn prefixes(lab: &Lab, gateway: &str) -> Result<usize> {
    let key = lab.network.node(gateway)?.netns.sh("wg show kilo0 public-key")?;
    let listed = lab.network.node(FAR)?.netns.sh("wg show kilo0 allowed-ips")?;
    let [a, b, c, _] = MEMBERS_NET.0.octets();
    let is_members = |prefix: &&str| {
        prefix.starts_with("10.43.")
            || prefix.parse::<ipnet::Ipv4Net>().is_ok_and(|net| {
                net.prefix_len() == 32 && net.addr().octets()[..2] == [a, b] && net.addr().octets()[2] >= c
            })
    };
    let line = listed.lines().find_map(|line| line.strip_prefix(key.trim()));
    Ok(line.map_or(0, |line| line.split_whitespace().filter(is_members).count()))
}

/// Waits until the far leader's device routes all members' prefixes to Kilo's leader.
pub(super) fn at_rest(lab: &mut Lab) -> Result<()> {
    wait::until("all members' prefixes are the leader's", Duration::from_secs(60), || {
        let count = prefixes(lab, LEADER)?;
        Ok(if count == 2 * usize::from(MEMBERS) { Ok(()) } else { Err(count) })
    })
}

/// Measures what agents cost, then cuts the leader's power.
pub(super) fn power_off(lab: &mut Lab) -> Result<Broken> {
    let members = lab.members.as_ref().context("no members are there")?;
    let before = members.counts().0;
    let costs = cost_at_rest::failover(lab, breaking::length())?;
    let members = lab.members.as_ref().context("no members are there")?;
    let answered = (members.counts().0 - before) as f64 / breaking::length().as_secs_f64();
    let costs_said: Vec<_> = costs.iter().map(|(node, part)| format!("{node} {part:.2} %")).collect();
    let began = Instant::now();
    breaking::cut_power(lab, LEADER)?;
    let members = lab.members.as_ref().context("no members are there")?;
    let all = usize::from(MEMBERS);
    let followed = wait::until("all members follow the stand-by", FOLLOWED, || {
        let (count, last) = members.using(STAND_BY);
        Ok(if count == all { Ok(last) } else { Err(count) })
    });
    let moved = wait::until("the far leader has all of their prefixes with it", LOOK, || {
        let count = prefixes(lab, STAND_BY)?;
        Ok(if count == 2 * all { Ok(began.elapsed()) } else { Err(count) })
    });
    let (answered_in_all, refused) = members.counts();
    println!(
        "failover many-members: at rest {}; {answered:.0} signals a second; {} more since, refused {refused:?}",
        costs_said.join(", "),
        answered_in_all - before
    );
    let most = costs.iter().map(|(_, part)| *part).fold(0.0, f64::max);
    let seen = followed.and_then(|last| {
        let last = last.map_or(0, |last| last.saturating_duration_since(began).as_millis());
        let said = format!(
            "failover threads at rest: {}; {answered:.0} signals a second answered; a1 has neither links nor \
             processes; all {all} members follow a2 after {last} ms, and b1 was seen to have their {} prefixes with it \
             after {} ms; refused: {refused:?}",
            costs_said.join(", "),
            2 * all,
            moved?.as_millis(),
        );
        ensure!(most <= MOST, "one thread takes more than {MOST} % of a core: {said}");
        Ok(said)
    });
    let boot = |lab: &mut Lab| breaking::boot(lab, LEADER);
    match seen {
        Ok(said) => Ok(Broken::until(said, boot)),
        Err(error) => {
            boot(lab)?;
            Err(error)
        }
    }
}
