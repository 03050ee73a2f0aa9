//! Twelve or more members of one location that all send at the same rate, and their gateways.

use std::{
    collections::BTreeMap,
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{
    breaking::{self, Broken, LEADER, STAND_BY},
    cases::Limit,
    flood, state,
};
use crate::{
    Lab, counters,
    deployed_state::LEADS,
    faults::{nodes, traffic::Figures},
    network::{CROWD, Node},
    wait,
};

/// Time between two datagrams of each member; what is lost is scaled by it to a thousand datagrams a second.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// By how many percent the bytes of a gateway may differ from a fair share.
const MAY_DIFFER: f64 = 25.0;
/// How long packets and bytes are counted.
const COUNTED: Duration = Duration::from_secs(15);
/// Longest wait until a new active leader takes its own nodes, even when it has to wait a minute for another
/// one.
const TAKES: Duration = Duration::from_secs(150);
/// Longest wait until each of four active leaders has its own nodes; they take them a minute apart.
const AT_HOME: Duration = Duration::from_secs(300);
/// How many of a thousand datagrams a second a member may lose when it is moved.
const MOVED: u64 = 10;
/// The third active leader.
const THIRD: &str = "a3";
/// The fourth.
const LAST: &str = "a4";
/// Active leaders that lose power in turn.
const ACTIVE: [&str; 3] = [LEADER, STAND_BY, THIRD];
/// How often one of them has lost power.
static TURNS: AtomicUsize = AtomicUsize::new(0);

/// The members, by name.
pub(super) fn members(lab: &Lab) -> impl Iterator<Item = &Node> {
    lab.network.nodes.iter().filter(|node| node.name().starts_with('m'))
}

/// The members; where shares are counted, also the nodes that could lead and do not, since they get a share, too.
pub(super) fn senders<'a>(lab: &'a Lab, limit: &Limit, leaders: usize) -> impl Iterator<Item = &'a Node> {
    let counts = matches!(limit, Limit::NoSwitch);
    let others = lab.network.nodes.iter().filter(|node| node.name().starts_with('a'));
    members(lab).chain(others.skip(leaders).filter(move |_| counts))
}

/// Gateway in use by each member, as its agent reports, by member.
pub(super) fn uses(lab: &Lab) -> Result<BTreeMap<String, String>> {
    uses_of(members(lab))
}

fn uses_of<'a>(nodes: impl Iterator<Item = &'a Node>) -> Result<BTreeMap<String, String>> {
    let of = |node: &Node| {
        let status = counters::status(&node.netns)?;
        let leader = status.pointer("/agent/failover/leader").and_then(|leader| leader.as_str());
        let leader = leader.with_context(|| format!("{} does not say which leader it uses", node.name()))?;
        Ok((node.name().to_owned(), leader.to_owned()))
    };
    nodes.map(of).collect()
}

/// Waits until each member uses its home; with a single active leader, that is the leader by Kilo's rule.
pub(super) fn at_home(lab: &mut Lab) -> Result<()> {
    wait::until("all members use what they are to use", AT_HOME, || {
        let status = counters::status(&lab.network.node(LEADER)?.netns)?;
        let text = |node: &serde_json::Value, key: &str| node.get(key)?.as_str().map(str::to_owned);
        let nodes = status.get("nodes").and_then(|nodes| nodes.as_array()).context("no nodes")?;
        let homes: BTreeMap<String, String> =
            nodes.iter().filter_map(|node| Some((text(node, "name")?, text(node, "gateway")?))).collect();
        let uses = uses(lab)?;
        let home = |node: &str| homes.get(node).map_or(LEADER, String::as_str);
        let away = uses.iter().filter(|(node, gateway)| home(node) != *gateway);
        let away = away.count();
        Ok(if away == 0 { Ok(()) } else { Err(format!("{away} do not")) })
    })
}

/// Checks one flow per member against the gateways that it used before and after, and adds them up. `lost`:
/// the gateway that failed.
pub(super) fn sum_up(
    (limit, lost): (Limit, &str),
    flows: Vec<(String, Figures)>,
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Result<Figures> {
    let ticks = u64::try_from(TICK.as_millis())?;
    let mut sum = Figures {
        sent: 0,
        lost: 0,
        gap: Duration::ZERO,
        holes: Vec::new(),
        stall: Duration::ZERO,
        broken: None,
    };
    let mut moved = 0;
    for (name, figures) in flows {
        let is_its = match limit {
            Limit::OnlyIts(_) => before.get(&name).is_some_and(|gateway| gateway == lost),
            Limit::Third => before.get(&name) != after.get(&name),
            _ => true,
        };
        moved += u64::from(is_its);
        if !is_its {
            ensure!(
                figures.lost == 0,
                "{} datagrams of {name} were lost, whose gateway stayed",
                figures.lost
            );
        } else if let Limit::Third = limit {
            let lost = figures.lost * ticks;
            ensure!(
                lost <= MOVED,
                "{name} was moved and lost {lost} of 1,000 datagrams a second instead of {MOVED}: number and how many {:?}",
                figures.holes
            );
        }
        sum.sent += figures.sent;
        sum.lost += figures.lost * ticks;
        sum.gap = sum.gap.max(figures.gap);
        sum.holes.extend(figures.holes);
        sum.stall = sum.stall.max(figures.stall);
        sum.broken = sum.broken.or(figures.broken);
    }
    match limit {
        Limit::Third => {
            let third = u64::from(CROWD / 3);
            ensure!(moved.abs_diff(third) <= 1, "{moved} of {CROWD} members moved instead of {third}");
        }
        Limit::OnlyIts(_) => ensure!(moved > 0, "nobody used {lost}"),
        _ => {}
    }
    Ok(sum)
}

/// Traffic of a gateway's WireGuard device while all members send at the same rate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The gateway's name.
    pub gateway: String,
    /// How many members use it.
    pub members: u64,
    /// Packets to encrypt, per second.
    pub encrypted: u64,
    /// Decrypted packets, per second.
    pub decrypted: u64,
    /// Bytes in both directions, per second.
    pub bytes: u64,
}

impl Share {
    /// By how many percent the bytes of each differ from an equal share.
    pub fn deviations(shares: &[Self]) -> Vec<f64> {
        let fair = shares.iter().map(|share| share.bytes).sum::<u64>() as f64 / shares.len() as f64;
        shares.iter().map(|share| (share.bytes as f64 / fair - 1.0) * 100.0).collect()
    }

    /// Whether each carries about as many bytes as the others; where nothing was carried, none does.
    fn are_fair(shares: &[Self]) -> bool {
        Self::deviations(shares).iter().all(|deviation| deviation.abs() <= MAY_DIFFER)
    }
}

/// Packets sent and received by a node's kilo0, and the bytes of both.
fn carried(node: &Node) -> Result<[u64; 3]> {
    let text =
        node.netns.sh("cd /sys/class/net/kilo0/statistics; cat tx_packets rx_packets tx_bytes rx_bytes")?;
    let counts: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [sent, received, out, back] = counts[..] else { bail!("statistics of kilo0: {text}") };
    Ok([sent, received, out + back])
}

/// Counts what each of the first `gateways` nodes carries while all members send at the same rate.
fn shares(lab: &mut Lab, gateways: usize) -> Result<Broken> {
    lab.caused(&[flood::OVERLOADED]);
    let used = uses_of(senders(lab, &Limit::NoSwitch, gateways))?;
    let nodes: Vec<_> = lab.network.nodes.iter().take(gateways).collect();
    let before = nodes.iter().map(|node| carried(node)).collect::<Result<Vec<_>>>()?;
    wait::time_passes(COUNTED, "what gateways carry is counted");
    let after = nodes.iter().map(|node| carried(node)).collect::<Result<Vec<_>>>()?;
    let pairs = nodes.iter().zip(after.iter().zip(&before));
    let shares = pairs.map(|(node, (after, before))| {
        let [encrypted, decrypted, bytes] = [0, 1, 2].map(|at| (after[at] - before[at]) / COUNTED.as_secs());
        let members = used.values().filter(|gateway| *gateway == node.name()).count() as u64;
        Share { gateway: node.name().to_owned(), members, encrypted, decrypted, bytes }
    });
    let shares: Vec<_> = shares.collect();
    let deviations = Share::deviations(&shares);
    let parts = shares.iter().zip(&deviations).map(|(share, deviation)| {
        let Share { gateway, members, encrypted, decrypted, bytes } = share;
        format!(
            "{gateway} {members} members, {encrypted} packets/s encrypted, {decrypted} decrypted, {} kB/s, {deviation:+.1} %",
            bytes / 1000
        )
    });
    let said = parts.collect::<Vec<_>>().join("; ");
    ensure!(Share::are_fair(&shares), "bytes are not within {MAY_DIFFER} % of fair: {said}");
    Ok(Broken::done(said).with_shares(shares))
}

/// One of three active leaders loses power, a different one in each run.
pub(super) fn one_off(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[flood::OVERLOADED]);
    let name = ACTIVE[TURNS.fetch_add(1, Ordering::Relaxed) % ACTIVE.len()];
    breaking::node_off(lab, name)
}

/// The last of four active leaders loses power.
pub(super) fn last_off(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[flood::OVERLOADED]);
    breaking::node_off(lab, LAST)
}

pub(super) fn one(lab: &mut Lab) -> Result<Broken> {
    shares(lab, 1)
}

pub(super) fn two(lab: &mut Lab) -> Result<Broken> {
    shares(lab, 2)
}

pub(super) fn three(lab: &mut Lab) -> Result<Broken> {
    shares(lab, 3)
}

pub(super) fn four(lab: &mut Lab) -> Result<Broken> {
    shares(lab, 4)
}

fn annotate(lab: &mut Lab, name: &str) -> Result<()> {
    lab.caused(&[LEADS, flood::OVERLOADED]);
    let path = lab.agents.cluster().join(format!("node-{name}.yaml"));
    if fs::read_to_string(&path)?.contains("gateway:") {
        return Ok(());
    }
    nodes::put(&path, &nodes::annotated(lab, name, &[("gateway", "true")])?)?;
    state::acts(lab, name, TAKES)
}

/// Annotates the stand-by, so that two nodes lead.
pub(super) fn two_lead(lab: &mut Lab) -> Result<()> {
    annotate(lab, STAND_BY)?;
    at_home(lab)
}

/// Annotates a third node, which joins the active leaders.
pub(super) fn third_joins(lab: &mut Lab) -> Result<Broken> {
    annotate(lab, THIRD)?;
    at_home(lab)?;
    Ok(Broken::until("a3 leads beside a1 and a2 because its annotation says so", |lab| {
        for name in [STAND_BY, THIRD] {
            lab.agents.write_node(lab.network.node(name)?, &[])?;
        }
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_outside_of_a_quarter_of_its_fair_share_is_noticed() {
        let are_fair = |bytes: &[u64]| {
            let shares: Vec<_> = bytes.iter().map(|&bytes| Share { bytes, ..Share::default() }).collect();
            Share::are_fair(&shares)
        };
        assert!(are_fair(&[1200]) && are_fair(&[500, 400, 300]));
        assert!(!are_fair(&[502, 396, 302]));
        assert!(!are_fair(&[440, 440, 280, 440]), "the idlest counts, too");
        assert!(!are_fair(&[0, 0]));
    }
}
