//! A leader whose endpoint is a name: its public address changes, and the name with it.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Result, ensure};

use super::{
    breaking::{Broken, LEADER, MEMBER},
    laptop,
};
use crate::{Lab, probe, wait};

/// The name, in every host's `/etc/hosts`.
const NAME: &str = "vpn.test";
/// The leader's public address, and the other one that it gets.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 19);
/// The annotation by which it leads.
const LEADS: (&str, &str) = ("leader", "true");
/// Longest wait until everybody knows that the endpoint is a name.
const KNOWN: Duration = Duration::from_secs(10);
/// For how long a static configuration is not renewed.
const OUTDATED: Duration = Duration::from_secs(2);

/// The laptop has a static configuration with the leader's name.
pub(super) fn static_by_name(lab: &mut Lab) -> Result<()> {
    let named = name_leader(lab).and_then(|()| lab.agents.configure_laptop(&lab.network, |peers| peers));
    or_undo(lab, named)?;
    laptop::settle_static(lab)
}

/// The laptop is connected by `kgctl connect`, to a leader with a name.
pub(super) fn connects_by_name(lab: &mut Lab) -> Result<()> {
    let named = name_leader(lab);
    or_undo(lab, named)?;
    laptop::connects(lab)?;
    wait::time_passes(Duration::from_secs(3), "a connection that ran before has resolved the new name");
    Ok(())
}

/// The leader's endpoint becomes the name of its address.
fn name_leader(lab: &Lab) -> Result<()> {
    resolve_to(lab, Some(ADDRESS))?;
    // Of nodes with public addresses those without a name come first.
    let annotations = [LEADS, ("force-endpoint", &format!("{NAME}:51820"))];
    lab.agents.write_node(lab.network.node(LEADER)?, &annotations)?;
    until_printed(lab, true)
}

/// Waits until `kgctl showconf` prints the name, or no longer does.
fn until_printed(lab: &Lab, is_named: bool) -> Result<()> {
    let line = format!("Endpoint = {NAME}:51820");
    let what = format!("whether `kgctl showconf` prints {line} is {is_named}");
    wait::until(&what, KNOWN, || {
        Ok(lab.agents.kgctl(&["showconf", "peer", "laptop"])?.contains(&line) == is_named)
    })
    .map(drop)
}

/// Makes the name stand for this address on every host, or for nothing.
fn resolve_to(lab: &Lab, address: Option<Ipv4Addr>) -> Result<()> {
    let line = address.map(|address| format!("{address} {NAME}\n")).unwrap_or_default();
    let mut hosts = lab.network.nodes.iter().map(|node| &node.netns).chain([&lab.network.laptop]);
    hosts.try_for_each(|host| {
        host.sh(&format!("printf '%s' '127.0.0.1 localhost\n{line}' > /etc/hosts")).map(drop)
    })
}

/// Replaces the leader's public address, and then what its name stands for.
fn moves(lab: &Lab, from: Ipv4Addr, to: Ipv4Addr) -> Result<()> {
    lab.network.node(LEADER)?.netns.sh(&format!(
        "ip address del {from}/24 dev eth1 2>/dev/null || true
         ip address replace {to}/24 dev eth1
         ip route replace default via 192.0.2.1"
    ))?;
    resolve_to(lab, Some(to))
}

/// `kgctl connect` resolves the name again with each resync, of 30 s.
pub(super) fn address_changes(lab: &mut Lab) -> Result<Broken> {
    let moved = moves(lab, ADDRESS, OTHER);
    or_undo(lab, moved)?;
    Ok(Broken::until(format!("{NAME} was {ADDRESS} and is {OTHER}"), |lab| undo(lab)))
}

/// The tunnel of a static configuration is turned off and on.
pub(super) fn address_changes_and_tunnel_is_renewed(lab: &mut Lab) -> Result<Broken> {
    let broken = address_changes(lab)?;
    let renewed = renew(lab);
    or_undo(lab, renewed)?;
    Ok(Broken::until(format!("{}; the tunnel was turned off and on", broken.said), |lab| {
        undo(lab)?;
        lab.agents.configure_laptop(&lab.network, |peers| peers)
    }))
}

/// Applies what the app was given once again; it is not printed anew.
fn renew(lab: &Lab) -> Result<()> {
    wait::fault_lasts(OUTDATED);
    let laptop = &lab.network.laptop;
    let answer = probe::from(laptop, lab.network.node(MEMBER)?.pod_ip(), Duration::from_secs(1));
    ensure!(answer.is_err(), "the laptop is answered at an address that the leader no longer has");
    lab.agents.renew_laptop(&lab.network)
}

/// The leader has its address again, and no name.
fn undo(lab: &Lab) -> Result<()> {
    moves(lab, OTHER, ADDRESS)?;
    let leader = lab.network.node(LEADER)?;
    lab.agents.write_node(leader, &[LEADS])?;
    until_printed(lab, false)?;
    lab.agents.write_node(leader, &[])?;
    resolve_to(lab, None)
}

/// Undoes everything when a step has failed.
fn or_undo(lab: &Lab, step: Result<()>) -> Result<()> {
    step.or_else(|error| undo(lab).and(Err(error)))
}
