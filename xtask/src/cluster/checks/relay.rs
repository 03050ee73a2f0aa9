//! Two locations that cannot reach each other directly, and a node of a third that relays for them.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Result, ensure};
use kilo_core::tunnel_path::{PathWithRelay, TunnelPath};

use super::{agents, both, flows::Flows, kgctl::kgctl, settled};
use crate::{
    cluster::{Cluster, network, node::Node, until},
    lab::wait,
};

/// Longest time without an answer from when the path is cut until the relay is in use.
const CONNECTS: Duration = Duration::from_secs(20);
/// Longest time until a path that works again is used: it is tried once a minute.
const RETURNS: Duration = Duration::from_secs(120);
/// Longer than a path takes to be given up that works in one direction only.
const STAYS: Duration = Duration::from_secs(8);
/// The relay's address, which it has for this check alone: nobody reaches the ports of a relay behind NAT.
const PUBLIC: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 12);
/// Annotations that make a node a location of its own, which relays for others.
const RELAYS: [&str; 2] = ["kilo.squat.ai/location=site-relay", "kilo.squat.ai/relay=true"];

/// Nothing passes directly between the leaders of both locations: a relay is used within 20 s. It passes again, and the
/// return to it loses nothing.
pub fn takes_over(cluster: &Cluster) -> Result<String> {
    let relay = cluster.node("a2")?;
    network::join_public(&relay.site, PUBLIC)?;
    let shown = annotate(cluster, relay, &RELAYS)
        .and_then(|()| settled(cluster))
        .and_then(|()| there_and_back(cluster, relay));
    let location = format!("kilo.squat.ai/location={}", relay.site.location());
    let put_back = network::unblock()
        .and_then(|()| annotate(cluster, relay, &[&location, "kilo.squat.ai/relay-"]))
        .and_then(|()| network::leave_public(&relay.site))
        .and_then(|()| settled(cluster));
    both(shown, put_back)
}

fn annotate(cluster: &Cluster, node: &Node, annotations: &[&str]) -> Result<()> {
    cluster.kubectl(&[&["annotate", "--overwrite", "node", node.name()], annotations].concat()).map(drop)
}

fn there_and_back(cluster: &Cluster, relay: &Node) -> Result<String> {
    let ends = [cluster.first(), cluster.node("b1")?];
    let flows = Flows::start(cluster, Some(relay.name()))?;
    network::block(ends.map(|node| &node.site))?;
    let relayed = wait_for(ends, TunnelPath::Relayed, Duration::from_secs(60));
    let shown = relayed.and_then(|()| shown(cluster, ends, relay));
    wait::time_passes(Duration::from_secs(2), "what follows the change is counted, too");
    let mut cut = String::new();
    let measured = flows.measure().and_then(|measured| {
        cut = measured.all(|name, figures| {
            figures.gap <= CONNECTS && (!name.ends_with(" to outside") || figures.lost == 0)
        })?;
        Ok(())
    });
    let shown = both(shown, measured)?;
    ensure!(network::blocked()? > 0, "nothing was blocked between {} and {}", ends[0].name(), ends[1].name());

    let flows = Flows::start(cluster, Some(relay.name()))?;
    network::unblock()?;
    let direct = wait_for(ends, TunnelPath::Direct, RETURNS);
    wait::time_passes(STAYS, "the pair may fall back to the relay");
    let stayed = direct.and_then(|()| wait_for(ends, TunnelPath::Direct, Duration::from_secs(1)));
    let returned = both(flows.finish(), stayed)?;
    Ok(format!("{shown}; cut: {cut}; return: {returned}"))
}

/// Waits until each end has both its tunnels, one of them by this path.
fn wait_for(ends: [&Node; 2], path: TunnelPath, limit: Duration) -> Result<()> {
    let wanted = if path == TunnelPath::Direct { 2 } else { 1 };
    let metric = format!("kilo_tunnels{{path=\"{path}\"}}");
    until(&format!("both ends have a tunnel that is {path}"), limit, || {
        let has = |node: &Node| agents::metric(node, &metric).is_ok_and(|count| count == wanted);
        ends.iter().all(|node| has(node)).then_some(())
    })
}

/// What an administrator sees of it.
fn shown(cluster: &Cluster, ends: [&Node; 2], relay: &Node) -> Result<String> {
    let status = kgctl(cluster, &["status"])?;
    println!("$ kgctl status\n{status}");
    let relay = Some(relay.name().to_owned());
    let row = PathWithRelay { path: TunnelPath::Relayed, relay }.to_string();
    ensure!(status.lines().any(|line| line.ends_with(&row)), "no tunnel is {row}");
    let drawn = format!("{} and {}: {row}", ends[0].name(), ends[1].name());
    let picture = agents::ask(ends[0], "/graph")?;
    ensure!(picture.contains(&drawn), "the graph does not have {drawn:?}:\n{picture}");
    Ok(row)
}
