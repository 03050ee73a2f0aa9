//! Parts that fail while others work: forwarding, and the LAN between some of its hosts.

use anyhow::{Context as _, Result, ensure};

use super::{
    breaking::{self, Broken, LEADER, MEMBER, STAND_BY},
    new_flows::Fresh,
};
use crate::{Lab, deployed_state::LEADS, netns::Netns, probe};

/// Node to which the watched traffic goes.
const TO: &str = "b2";
/// UDP port of signals.
const SIGNAL_PORT: u16 = 51_821;

/// The leader sends nothing into WireGuard for others: packets of the location's other nodes and their pods
/// are dropped. Its own packets, handshakes and probes pass.
pub(super) fn forwards_nothing(lab: &mut Lab) -> Result<Broken> {
    drops_of_others(lab, &[])
}

/// As [`forwards_nothing`], except for flows that it has forwarded before: the watched traffic, and probes
/// between the usual ports. New flows are watched, too.
pub(super) fn drops_new_flows(lab: &mut Lab) -> Result<Broken> {
    let (from, to) = (lab.network.netns(&format!("pod-{MEMBER}"))?, breaking::node(lab, TO)?.pod_ip());
    let old = old_flows(&from)?;
    let but: Vec<_> = old.into_iter().chain([SIGNAL_PORT]).map(|port| ("sport", port)).collect();
    let fresh = Fresh::start(&from, to.into());
    Ok(drops_of_others(lab, &but)?.with(fresh))
}

/// Source ports of the watched traffic.
fn old_flows(from: &Netns) -> Result<Vec<u16>> {
    let said = from.sh(&format!("ss -Htun state established '( dport = :{} )'", probe::PORT))?;
    let port = |line: &str| line.split_whitespace().nth(3)?.rsplit_once(':')?.1.parse().ok();
    let ports: Vec<_> = said.lines().filter_map(port).collect();
    ensure!(ports.len() == 2, "one stream of datagrams and one connection are watched:\n{said}");
    Ok(ports)
}

/// Drops in the leader what others send through it, except on these ports (`sport` or `dport`).
fn drops_of_others(lab: &mut Lab, but: &[(&str, u16)]) -> Result<Broken> {
    let leader = breaking::node(lab, LEADER)?;
    let others = [STAND_BY, MEMBER].map(|name| breaking::node(lab, name));
    // BPF programs redirect past netfilter, so a queue of one byte drops: no packet fits.
    let mut script = "tc qdisc add dev kilo0 root handle 1: htb default 1
        tc class add dev kilo0 parent 1: classid 1:1 htb rate 10gbit
        tc class add dev kilo0 parent 1: classid 1:2 htb rate 10gbit
        tc qdisc add dev kilo0 parent 1:2 handle 2: bfifo limit 1\n"
        .to_owned();
    for (which, port) in but {
        script += &format!(
            "tc filter add dev kilo0 parent 1: prio 1 protocol ip u32 match ip {which} {port} 0xffff flowid 1:1\n"
        );
    }
    for other in others {
        let other = other?;
        for source in [format!("{}/32", other.private), format!("{}/24", other.pod_address(0))] {
            script += &format!(
                "tc filter add dev kilo0 parent 1: prio 2 protocol ip u32 match ip src {source} flowid 1:2\n"
            );
        }
    }
    leader.netns.sh(&script)?;
    Ok(Broken::until("kilo0 of a1 takes packets of a1 alone", move |_| {
        let said = leader.netns.sh("tc -s qdisc show dev kilo0; tc qdisc del dev kilo0 root")?;
        let dropped = said.split("dropped ").filter_map(|rest| rest.split([',', ' ']).next()?.parse().ok());
        let dropped: u64 = dropped.max().unwrap_or(0);
        ensure!(dropped > 0, "nothing was dropped:\n{said}");
        Ok(())
    }))
}

/// Cuts two parts of the LAN off from each other; uplinks stay.
fn cut(lab: &mut Lab, one: &[&str], other: &[&str]) -> Result<Broken> {
    lab.caused(&[LEADS]);
    let addresses = |names: &[&str]| -> Result<String> {
        let all: Result<Vec<_>> =
            names.iter().map(|name| Ok(breaking::node(lab, name)?.private.to_string())).collect();
        Ok(all?.join(", "))
    };
    let (first, second) = (addresses(one)?, addresses(other)?);
    let ports: Vec<_> = one.iter().chain(other).map(|name| format!("\"{name}-lan\"")).collect();
    let router = lab.network.router.clone();
    router
        .sh(&format!(
            "nft 'table netdev cut {{ chain in {{
                 type filter hook ingress devices = {{ {} }} priority 0; policy accept;
                 ip saddr {{ {first} }} ip daddr {{ {second} }} drop
                 ip saddr {{ {second} }} ip daddr {{ {first} }} drop
             }}; }}'",
            ports.join(", ")
        ))
        .context("the LAN is cut")?;
    let said = format!("{} | {}", one.join(" "), other.join(" "));
    Ok(Broken::until(said, move |_| router.sh("nft delete table netdev cut").map(drop)))
}

pub(super) fn leader_cut_off(lab: &mut Lab) -> Result<Broken> {
    cut(lab, &[LEADER], &[STAND_BY, MEMBER])
}

pub(super) fn stand_by_cut_off(lab: &mut Lab) -> Result<Broken> {
    cut(lab, &[LEADER, MEMBER], &[STAND_BY])
}
