//! Who leads, and whether a stand-by could: read from the agents' metrics.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{breaking, cases::Case};
use crate::{Lab, counters, faults::nodes, network::Shape, wait};

/// Nodes of the location whose leader fails.
const LOCATION: &str = "site-a";
/// The leader by Kilo's rule.
const LEADER: &str = "a1";
/// How long all roles must stay in place before a case begins.
const SETTLED: Duration = Duration::from_secs(4);
/// Flags of a node that knows no failover.
pub const OFF: &[&str] = &["--failover=off", "--leaders=1"];
const ROLE_LEADER: &str = "kilo_failover_role{role=\"leader\"}";
const ROLE_STAND_BY: &str = "kilo_failover_role{role=\"stand-by\"}";
const FIT: &str = "kilo_stand_by_fit";
const TERM: &str = "kilo_failover_term";

fn metric(lab: &Lab, node: &str, name: &str) -> Option<u64> {
    let node = lab.network.node(node).ok()?;
    counters::scrape(&node.netns).ok()?.get(name).copied()
}

/// Nodes of the location, whether their agents run or not.
fn location(lab: &Lab) -> Vec<String> {
    let nodes = lab.network.nodes.iter().filter(|node| node.location == LOCATION);
    nodes.map(|node| node.name().to_owned()).collect()
}

/// Role that the node's agent reports; "member" when it reports no other, or does not answer.
pub fn role(lab: &Lab, node: &str) -> &'static str {
    let roles = [(ROLE_LEADER, "leader"), (ROLE_STAND_BY, "stand-by")];
    let found = roles.into_iter().find(|(name, _)| metric(lab, node, name) == Some(1));
    found.map_or("member", |(_, role)| role)
}

/// Changes of leader that agents know of, in all locations together.
pub fn changes(lab: &Lab) -> u64 {
    let mut known: BTreeMap<&str, u64> = BTreeMap::new();
    for node in &lab.network.nodes {
        let changes = metric(lab, node.name(), TERM).unwrap_or(0);
        let most = known.entry(node.location.as_str()).or_default();
        *most = changes.max(*most);
    }
    known.values().sum()
}

/// Role and term metrics of each node of the location; `None` where no agent answers.
pub fn words(lab: &Lab) -> Result<Vec<(String, [Option<u64>; 3])>> {
    let word = |node: String| {
        let names = [ROLE_LEADER, ROLE_STAND_BY, TERM];
        let known = names.map(|name| metric(lab, &node, name));
        (node, known)
    };
    let words: Vec<_> = location(lab).into_iter().map(word).collect();
    ensure!(words.iter().any(|(_, known)| known[2].is_some()), "nobody says who leads");
    Ok(words)
}

/// Waits until Kilo's leader leads, and each stand-by could. When a leader has changed, or the case needs
/// other flags, all nodes are rebooted first, as after a power cut of the whole site.
pub fn begin_anew(lab: &mut Lab, case: &Case, limit: Duration) -> Result<()> {
    let stand_bys = case.stand_bys;
    let flag = format!("--stand-bys={stand_bys}");
    let leaders = format!("--leaders={}", case.leaders);
    if lab.agents.set_own_flags(case.off, OFF)
        || !lab.agents.has_flag(&flag)
        || !lab.agents.has_flag(&leaders)
        || case.shape != Shape::Crowd && has_changed(lab)
    {
        lab.agents.set_flag("--stand-bys", &stand_bys.to_string());
        lab.agents.set_flag("--leaders", &case.leaders.to_string());
        breaking::reboot_all(lab)?;
    }
    if case.shape == Shape::Crowd {
        // Active leaders take their own nodes in terms of their own: each case waits until they have.
        return Ok(());
    }
    in_place(lab, case.off, stand_bys, limit)
}

/// Waits until Kilo's leader leads, and each stand-by could. `off`: nodes without failover.
pub fn in_place(lab: &Lab, off: &[&str], stand_bys: u8, limit: Duration) -> Result<()> {
    // Where Kilo itself leads, nobody stands by.
    let stand_bys = if off.contains(&LEADER) { 0 } else { stand_bys };
    // A stand-by is not fit while its tunnels end at nodes that answer no signals or do not know of
    // stand-bys.
    let is_answered = ![breaking::FAR, LEADER].iter().any(|node| off.contains(node));
    let is_ready = |node: &String| {
        metric(lab, node, ROLE_STAND_BY) == Some(1) && (!is_answered || metric(lab, node, FIT) == Some(1))
    };
    let mut settled_since = None;
    let what = format!("{LEADER} and {} lead, and all stand-bys could", breaking::FAR);
    wait::until(&what, limit, || {
        // Two stand-bys behind NAT have no tunnel: in the other location nobody else may lead, either.
        let is_leader = |node| off.contains(node) || metric(lab, node, ROLE_LEADER) == Some(1);
        let leads = [LEADER, breaking::FAR].iter().all(is_leader);
        let ready = location(lab).iter().filter(|node| is_ready(node)).count();
        if !leads || ready != usize::from(stand_bys) {
            settled_since = None;
            return Ok(Err(format!("they lead: {leads}; {ready} of {stand_bys} stand-bys could")));
        }
        // Of nodes that boot at once another one may be ready first, and take the lead a moment later.
        let since: &mut Instant = settled_since.get_or_insert_with(Instant::now);
        Ok(if since.elapsed() > SETTLED { Ok(()) } else { Err("that is new".to_owned()) })
    })
}

/// Whether any agent knows of a change of leader, in any location.
fn has_changed(lab: &Lab) -> bool {
    nodes::names(lab).iter().any(|node| metric(lab, node, TERM).is_some_and(|term| term > 0))
}

/// Waits until Kilo's leader leads again; returns how long that took.
pub fn leads_again(lab: &Lab, limit: Duration) -> Result<Duration> {
    let began = Instant::now();
    acts(lab, LEADER, limit)?;
    Ok(began.elapsed())
}

/// Waits until this node leads.
pub fn acts(lab: &Lab, node: &str, limit: Duration) -> Result<()> {
    wait::until(&format!("{node} leads"), limit, || Ok(metric(lab, node, ROLE_LEADER) == Some(1))).map(drop)
}
