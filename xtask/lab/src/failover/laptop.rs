//! A machine outside the cluster that follows gateways.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::Result;

use super::{
    breaking::{self, Broken, LEADER, MEMBER, STAND_BY},
    flood,
    new_flows::Fresh,
};
use crate::{Lab, counters, network::LAPTOP, probe, wait};

/// Age of the connection when a gateway loses power, in ms, used in turn. By 5 s every gateway has answered.
const AGES: [u64; 6] = [0, 200, 500, 1000, 2000, 4000];
/// How often a gateway has lost power.
static TURNS: AtomicUsize = AtomicUsize::new(0);
/// How long agents take to forget a Peer.
const FORGOTTEN: Duration = Duration::from_secs(3);
/// Longest wait for the laptop's sessions with all gateways.
const SESSIONS: Duration = Duration::from_secs(60);
/// How long a new connection is watched.
const WATCHED: Duration = Duration::from_secs(8);

/// Makes the laptop a peer with `kgctl connect`, and waits for its tunnels.
pub(super) fn connects(lab: &mut Lab) -> Result<()> {
    lab.caused(&[flood::OVERLOADED]);
    lab.agents.connect_laptop(&lab.network, 1)?;
    // Rebooted hosts have no session with it, and its WireGuard notices that after 15 s without an answer.
    let gateways = [LEADER, STAND_BY, breaking::FAR];
    wait::until("the laptop's tunnels to all gateways are up", SESSIONS, || {
        let out = gateways.iter().filter(|name| !hears_laptop(lab, name)).count();
        Ok(if out == 0 { Ok(()) } else { Err(format!("{out} gateways have no session with it")) })
    })
    .map(drop)
}

/// Keeps the laptop's static configuration, and waits until it has noticed that its leaders have rebooted.
/// Its WireGuard takes processor time from leaders' probes.
pub(super) fn settle_static(lab: &mut Lab) -> Result<()> {
    lab.caused(&[flood::OVERLOADED]);
    for name in [MEMBER, breaking::FAR] {
        let pod = lab.network.node(name)?.pod_ip();
        probe::until_seen_as(&lab.network.laptop, pod, LAPTOP, SESSIONS)?;
    }
    Ok(())
}

/// Whether this node's WireGuard has a session with the laptop.
fn hears_laptop(lab: &Lab, name: &str) -> bool {
    let read = || -> Result<bool> {
        let status = counters::status(&lab.network.node(name)?.netns)?;
        let tunnels = status.pointer("/agent/tunnels").and_then(|tunnels| tunnels.as_array());
        let is_laptop = |tunnel: &&serde_json::Value| {
            tunnel.get("name").and_then(|name| name.as_str()).is_some_and(|name| name.ends_with("laptop"))
        };
        let laptop = tunnels.into_iter().flatten().find(is_laptop);
        Ok(laptop.is_some_and(|tunnel| tunnel.get("lastHandshake").is_some_and(|at| !at.is_null())))
    };
    read().unwrap_or(false)
}

/// Makes the laptop's Peer object, lets it begin to connect and cuts the leader's power a moment later. New
/// flows show how long the laptop gets no answer.
pub(super) fn begins(lab: &mut Lab) -> Result<Broken> {
    let age = AGES[TURNS.fetch_add(1, Ordering::Relaxed) % AGES.len()];
    lab.agents.disconnect_laptop(&lab.network)?;
    wait::time_passes(FORGOTTEN, "agents forget a Peer that is gone, and nobody says when all have");
    lab.agents.begin_to_connect(&lab.network, 1)?;
    wait::time_passes(Duration::from_millis(age), "the connection is to be so old");
    let broken = breaking::node_off(lab, LEADER)?;
    let target = lab.network.node(MEMBER)?.pod_ip();
    // Until the routes exist, packets leave in cleartext, as from any machine that is not connected.
    lab.network.laptop.sh(&format!(
        "for i in $(seq 1000); do ip route get {target} 2>&1 | grep -q 'kilo-vpn\\|nreachable\\|No route' && exit 0
             sleep 0.01; done; exit 1"
    ))?;
    let fresh = Fresh::start(&lab.network.laptop, target.into());
    wait::time_passes(WATCHED, "what is lost meanwhile is counted");
    let said = format!("{}, and the connection is {age} ms old", broken.said);
    Ok(broken.with(fresh).saying(said))
}
