//! A relayed pair under 1,000 datagrams a second.

use std::time::Duration;

use anyhow::{Result, ensure};
use kilo_core::tunnel_path::TunnelPath;
use nix::sys::signal::Signal;

use super::{CONNECTS, LIMIT, RETURNS, mesh::Mesh};
use crate::{
    agents,
    faults::traffic::Traffic,
    nat,
    network::{Node, Underlay},
    wait,
};

/// Two NATs between which nothing passes, with two relays offered: the relay's agent restarts, the relay
/// dies, and the direct path works again.
pub(super) fn under_traffic(mesh: &mut Mesh) -> Result<()> {
    let (path, took) = mesh.wait_connected()?;
    ensure!(path == TunnelPath::Relayed, "nothing passes between both, so the tunnel cannot be {path}");
    println!("relayed {:.1} s after the first attempt, {:?}", took.as_secs_f32(), mesh.underlay);
    println!("{}", mesh.one_relay_a_packet()?);
    let before = [mesh.relayed("z")?, mesh.relayed("w")?];
    let (x, y) = (mesh.network.node("x")?.clone(), mesh.network.node("y")?.clone());
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let after = [mesh.relayed("z")?, mesh.relayed("w")?];
    let used = usize::from(after[1] - before[1] > after[0] - before[0]);
    let sums = [after[0] - before[0], after[1] - before[1]];
    println!("packets of relays z and w: {sums:?}");
    let relay = ["z", "w"][used];
    // Its agent restarts; the kernel goes on.
    mesh.agents.stop(relay, Signal::SIGKILL)?;
    wait::fault_lasts(Duration::from_secs(1));
    let node = mesh.network.node(relay)?.clone();
    mesh.agents.start(&node)?;
    agents::wait_healthy(&node.netns, LIMIT)?;
    wait::time_passes(Duration::from_secs(3), "what the new agent does meanwhile must lose nothing");
    let figures = flow.finish()?;
    println!(
        "the relay's agent killed and started again: {} of {} lost, {} ms without an answer",
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    let holes = &figures.holes;
    ensure!(figures.lost == 0, "{} datagrams were lost while an agent restarted: {holes:?}", figures.lost);
    mesh.wait_for_path(TunnelPath::Relayed, Duration::from_secs(10))?;
    wait::time_passes(Duration::from_secs(6), "devices settle for 5 s after an endpoint was moved");
    // Its offer is withdrawn: both ends move to the other relay, while it still forwards.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let relay = mesh.relay_in_use()?;
    let node = mesh.network.node(relay)?.clone();
    mesh.agents.write_node(&node, &[])?;
    wait::until("the ends have left the relay whose offer is taken back", Duration::from_secs(20), || {
        let used = mesh.relay_in_use()?;
        Ok(if used == relay { Err(used) } else { Ok(()) })
    })?;
    wait::time_passes(Duration::from_secs(32), "it forgets its pairs after half a minute");
    let figures = flow.finish()?;
    println!("the offer of relay {relay} is taken back: {} of {} lost", figures.lost, figures.sent);
    ensure!(figures.lost == 0, "{} datagrams were lost: {:?}", figures.lost, figures.holes);
    mesh.agents.write_node(&node, &[("relay", "true")])?;
    wait::time_passes(Duration::from_secs(15), "pairs hold it again as the other relay");
    // The one in use is cut off entirely.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let relay = mesh.relay_in_use()?;
    mesh.network.node(relay)?.netns.ip("link set eth0 down\n")?;
    mesh.cut_off = 1;
    wait::fault_lasts(Duration::from_secs(6));
    let figures = flow.finish()?;
    println!(
        "relay {relay} cut off: {} of {} lost, {} ms without an answer",
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    ensure!(figures.gap <= Duration::from_secs(2), "another relay took {} ms", figures.gap.as_millis());
    meets_again(mesh, (&x, &y))?;
    breaks_again(mesh, (&x, &y))
}

/// The network between both NATs works again.
fn meets_again(mesh: &Mesh, (x, y): (&Node, &Node)) -> Result<()> {
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    nat::block(&mesh.lab, mesh.underlay, false)?;
    // Without translation each end is at the address that it publishes.
    let path = if mesh.underlay == Underlay::V4 { TunnelPath::Punched } else { TunnelPath::Direct };
    let took = mesh.wait_for_path(path, RETURNS)?;
    wait::time_passes(Duration::from_secs(8), "a path that late packets undo is left after 5 s");
    mesh.wait_for_path(path, Duration::ZERO)?;
    let figures = flow.finish()?;
    println!(
        "direct again after {:.1} s: {} of {} lost, {} ms without an answer",
        took.as_secs_f32(),
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    ensure!(
        figures.lost == 0,
        "{} datagrams were lost at the return, of 1,000 a second: {:?}",
        figures.lost,
        figures.holes
    );
    Ok(())
}

/// The direct path breaks during a session.
fn breaks_again(mesh: &Mesh, (x, y): (&Node, &Node)) -> Result<()> {
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    nat::block(&mesh.lab, mesh.underlay, true)?;
    let took = mesh.wait_for_path(TunnelPath::Relayed, CONNECTS + Duration::from_secs(10))?;
    wait::time_passes(Duration::from_secs(2), "packets pass the relay");
    let figures = flow.finish()?;
    println!(
        "blocked again: relayed after {:.1} s, {} of {} lost, {:.1} s without an answer",
        took.as_secs_f32(),
        figures.lost,
        figures.sent,
        figures.gap.as_secs_f32()
    );
    ensure!(figures.gap <= CONNECTS, "a session whose path broke took {:.1} s", figures.gap.as_secs_f32());
    Ok(())
}
