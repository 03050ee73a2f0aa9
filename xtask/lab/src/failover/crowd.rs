//! Twelve members of one location that all send alike, and their gateways.

use std::{
    collections::BTreeMap,
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use super::{
    breaking::{Broken, LEADER, STAND_BY},
    cases::Limit,
    flood, state,
};
use crate::{
    Lab, counters,
    faults::{nodes, traffic::Figures},
    network::{CROWD, Node},
    well::LEADS,
};

/// Between two datagrams of each member: what is lost of a thousand a second is so many times as much.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// How long bytes are counted.
const COUNTED: Duration = Duration::from_secs(15);
/// How long a new active leader works before it takes its own nodes, and one that comes a minute after another.
const TAKES: Duration = Duration::from_secs(150);
/// How long four active leaders take until each has its own nodes, one a minute after the other.
const AT_HOME: Duration = Duration::from_secs(300);
/// What a member may lose when it is moved, of a thousand datagrams a second.
const MOVED: u64 = 10;
/// The third active leader.
const THIRD: &str = "a3";

/// The members, by name.
pub(super) fn members(lab: &Lab) -> impl Iterator<Item = &Node> {
    lab.network.nodes.iter().filter(|node| node.name().starts_with('m'))
}

/// Which gateway each member uses, as it says itself.
pub(super) fn uses(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let of = |node: &Node| {
        let status = counters::status(&node.space)?;
        let leader = status.pointer("/agent/failover/leader").and_then(|leader| leader.as_str());
        let leader = leader.with_context(|| format!("{} does not say whom it uses", node.name()))?;
        Ok((node.name().to_owned(), leader.to_owned()))
    };
    members(lab).map(of).collect()
}

/// Waits until each member uses the gateway that it is to use, if there are several.
pub(super) fn at_home(lab: &mut Lab) -> Result<()> {
    let began = Instant::now();
    loop {
        let status = counters::status(&lab.network.node(LEADER)?.space)?;
        let text = |node: &serde_json::Value, key: &str| node.get(key)?.as_str().map(str::to_owned);
        let nodes = status.get("nodes").and_then(|nodes| nodes.as_array()).context("no nodes")?;
        let homes: BTreeMap<String, String> =
            nodes.iter().filter_map(|node| Some((text(node, "name")?, text(node, "gateway")?))).collect();
        let uses = uses(lab)?;
        let away =
            uses.iter().filter(|(node, gateway)| homes.get(*node).is_some_and(|home| home != *gateway));
        let away = away.count();
        if away == 0 {
            return Ok(());
        }
        ensure!(
            began.elapsed() < AT_HOME,
            "{away} members do not use what they are to use after {} s",
            AT_HOME.as_secs()
        );
        sleep(Duration::from_millis(500));
    }
}

/// One flow of each member, held against the gateway it used and the one it uses now.
pub(super) fn sum_up(
    limit: Limit,
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
            Limit::OnlyIts(_) => before.get(&name).is_some_and(|gateway| gateway == LEADER),
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
                "{name} was moved and lost {lost} of 1,000 datagrams a second instead of {MOVED}"
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
        Limit::OnlyIts(_) => ensure!(moved > 0, "nobody used {LEADER}"),
        _ => {}
    }
    Ok(sum)
}

/// Bytes and packets that a node's WireGuard has been given and has given.
fn carried(node: &Node) -> Result<[u64; 2]> {
    let sum = |what: &str| {
        let text = node.space.sh(&format!(
            "cd /sys/class/net/kilo0/statistics; echo $(($(cat tx_{what}) + $(cat rx_{what})))"
        ))?;
        Ok::<_, anyhow::Error>(text.trim().parse()?)
    };
    Ok([sum("bytes")?, sum("packets")?])
}

/// Counts what each of so many gateways carries while all members send alike.
fn shares(lab: &mut Lab, gateways: usize) -> Result<Broken> {
    lab.caused(&[flood::OVERLOADED]);
    let used = uses(lab)?;
    let nodes: Vec<_> = lab.network.nodes.iter().take(gateways).collect();
    let before = nodes.iter().map(|node| carried(node)).collect::<Result<Vec<_>>>()?;
    sleep(COUNTED);
    let after = nodes.iter().map(|node| carried(node)).collect::<Result<Vec<_>>>()?;
    let grown = |what: usize| {
        let pairs = after.iter().zip(&before);
        pairs.map(|(after, before)| after[what] - before[what]).collect::<Vec<_>>()
    };
    let (bytes, packets) = (grown(0), grown(1));
    let fair = bytes.iter().sum::<u64>() as f64 / gateways as f64;
    let parts = nodes.iter().enumerate().map(|(at, node)| {
        let members = used.values().filter(|gateway| *gateway == node.name()).count();
        let apart = (bytes[at] as f64 / fair - 1.0) * 100.0;
        let each = packets[at] / COUNTED.as_secs();
        format!("{} {members} members, {each} packets/s, {} kB, {apart:+.1} %", node.name(), bytes[at] / 1000)
    });
    let said = parts.collect::<Vec<_>>().join("; ");
    let is_fair = bytes.iter().all(|carried| (*carried as f64 - fair).abs() <= 0.25 * fair);
    ensure!(is_fair, "bytes are not within 25 % of fair: {said}");
    Ok(Broken::done(said))
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

/// Two of the annotated nodes lead.
pub(super) fn two_lead(lab: &mut Lab) -> Result<()> {
    annotate(lab, STAND_BY)?;
    at_home(lab)
}

/// A third one is annotated.
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
