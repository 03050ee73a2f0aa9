//! Faults of WireGuard, of links and of what depends on them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{
    injector::{Direction, Drop, Family, Rule},
    number,
};
use crate::{
    Lab, agents,
    deployed_state::{DETACHED, LEADS},
    topology::detach_from_kilo,
    wait::{self, until},
};

/// Waits until the interface exists again, with a new index.
fn back(lab: &Lab, node: &str, device: &str, old: u64) -> Result<String> {
    let netns = lab.network.node(node)?.netns.clone();
    let index = format!("cat /sys/class/net/{device}/ifindex 2>/dev/null || echo 0");
    let took = until(&format!("{device} of {node} is back"), Duration::from_secs(30), || {
        Ok(![0, old].contains(&number(&netns, &index)?))
    })?;
    Ok(format!("{device} is back after {} ms", took.as_millis()))
}

fn deleted(lab: &mut Lab, node: &str) -> Result<String> {
    // The device may go between being found and being attached to.
    lab.caused(&["No such device"]);
    let netns = lab.network.node(node)?.netns.clone();
    let old = number(&netns, "cat /sys/class/net/kilo0/ifindex")?;
    netns.ip("link delete kilo0\n")?;
    back(lab, node, "kilo0", old)
}

pub(super) fn member_deleted(lab: &mut Lab) -> Result<String> {
    deleted(lab, "a2")
}

pub(super) fn leader_deleted(lab: &mut Lab) -> Result<String> {
    deleted(lab, "a1")
}

pub(super) fn renamed(lab: &mut Lab) -> Result<String> {
    lab.caused(&["WireGuard device was renamed"]);
    let netns = lab.network.node("a2")?.netns.clone();
    let old = number(&netns, "cat /sys/class/net/kilo0/ifindex")?;
    netns.ip("link set kilo0 down\nlink set kilo0 name renamed0\nlink set renamed0 up\n")?;
    let there = "cat /sys/class/net/kilo0/ifindex 2>/dev/null || echo 0";
    let took = until("kilo0 is back", Duration::from_secs(15), || Ok(number(&netns, there)? != 0));
    if took.is_err() {
        netns.ip("link delete renamed0\n")?;
        back(lab, "a2", "kilo0", old)?;
    }
    Ok(format!("kilo0 is back after {} ms", took?.as_millis()))
}

pub(super) fn renumbered(lab: &mut Lab) -> Result<String> {
    let netns = lab.network.node("a1")?.netns.clone();
    let shown = "ip -o -4 address show dev kilo0 | wc -l";
    let before = number(&netns, shown)?;
    netns.sh("ip address flush dev kilo0; ip route flush dev kilo0")?;
    let took =
        until("the addresses are back", Duration::from_secs(20), || Ok(number(&netns, shown)? >= before))?;
    Ok(format!("addresses back after {} ms", took.as_millis()))
}

/// Replaces the key, and then restores the first one, which peers outside the mesh know.
pub(super) fn key_rotated(lab: &mut Lab) -> Result<String> {
    let first = rekey(lab, "mv /var/lib/kilo/key /var/lib/kilo/first")?;
    wait::fault_lasts(Duration::from_secs(1));
    let second = rekey(lab, "mv /var/lib/kilo/first /var/lib/kilo/key")?;
    Ok(format!("known to the other location after {} and {} ms", first.as_millis(), second.as_millis()))
}

fn rekey(lab: &mut Lab, script: &str) -> Result<Duration> {
    let node = lab.network.node("a1")?.clone();
    let old = node.netns.sh("wg show kilo0 public-key")?;
    lab.agents.stop("a1", Signal::SIGTERM)?;
    node.netns.sh(script)?;
    lab.agents.start(&node)?;
    agents::wait_healthy(&node.netns, Duration::from_secs(20))?;
    let mut new = old.clone();
    until("the key is another", Duration::from_secs(10), || {
        new = node.netns.sh("wg show kilo0 public-key")?;
        Ok(new != old)
    })?;
    let other = lab.network.node("b1")?.netns.clone();
    until("the other location has the new key", Duration::from_secs(20), || {
        Ok(other.sh("wg show kilo0 peers")?.contains(new.trim()))
    })
}

/// A handshake's first message has 148 bytes (WireGuard paper, 5.4.2), with headers 176.
pub(super) fn key_and_handshakes(lab: &mut Lab) -> Result<String> {
    let rule = Rule {
        direction: Direction::In,
        family: Family::V4,
        protocol: "udp".to_owned(),
        port: Some(51820),
        shortest: 176,
        longest: 176,
        drop: Drop::First(2),
        delay: None,
    };
    let injected = ["a1", "b1"]
        .iter()
        .map(|node| rule.inject(&lab.network.node(node)?.netns))
        .collect::<Result<Vec<_>>>()?;
    let said = key_rotated(lab)?;
    let dropped = || injected.iter().map(|rule| Ok(rule.hits()?.1)).sum::<Result<u64>>();
    until("two handshakes are lost", Duration::from_secs(40), || Ok(dropped()? >= 2))?;
    Ok(format!("{} handshakes dropped; {said}", dropped()?))
}

pub(super) fn key_and_late_handshakes(lab: &mut Lab) -> Result<String> {
    let (a1, a2) = (lab.network.node("a1")?.clone(), lab.network.node("a2")?.clone());
    let late = |protocol: &str, port, length| Rule {
        direction: Direction::In,
        family: Family::V4,
        protocol: protocol.to_owned(),
        port,
        shortest: length,
        longest: length,
        drop: Drop::Every(1),
        delay: Some(300),
    };
    // First check that the delay works: an echo request of 84 bytes.
    let injected = late("icmp", None, 84).inject(&a1.netns)?;
    let ping =
        format!("ping -c 2 -W 3 {} | grep -o 'time=[0-9]*' | cut -d= -f2 | sort -n | head -1", a1.private);
    let took = number(&a2.netns, &ping)?;
    ensure!((300..3000).contains(&took), "an echo that waits 300 ms took {took} ms");
    drop(injected);
    let rule = late("udp", Some(51820), 176);
    let injected = rule.inject(&a1.netns)?;
    let said = key_rotated(lab)?;
    until("a handshake was late", Duration::from_secs(40), || Ok(injected.hits()?.1 > 0))?;
    Ok(format!("{} handshakes 300 ms late, and an echo {took} ms; {said}", injected.hits()?.1))
}

pub(super) fn roams(lab: &mut Lab) -> Result<String> {
    let laptop = lab.network.laptop.clone();
    laptop.sh("ip address add 172.16.9.3/24 dev eth0 && ip route replace default via 172.16.9.1 src 172.16.9.3 && ip address del 172.16.9.2/24 dev eth0 && ip address add 172.16.9.3/24 dev eth0 2>/dev/null; ip route replace default via 172.16.9.1")?;
    // The router chooses ports by address, so that the mesh sees another endpoint, too.
    let endpoints = "wg show kilo0 endpoints";
    wait::fault_lasts(Duration::from_secs(3));
    let seen = lab.network.node("b1")?.netns.sh(endpoints)?;
    laptop.sh("ip address add 172.16.9.2/24 dev eth0 && ip address del 172.16.9.3/24 dev eth0; ip address add 172.16.9.2/24 dev eth0 2>/dev/null; ip route replace default via 172.16.9.1")?;
    wait::fault_lasts(Duration::from_secs(2));
    let endpoint =
        seen.lines().find_map(|line| line.split_once('\t')?.1.strip_prefix("192.0.2.1:").map(str::to_owned));
    Ok(format!(
        "172.16.9.2 became .3 and back; seen from port {}",
        endpoint.context("the laptop has no endpoint")?
    ))
}

pub(super) fn address_changes(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a1")?.netns.clone();
    let other = lab.network.node("b1")?.netns.clone();
    let moves = |from: u8, to: u8| -> Result<Duration> {
        node.ip(&format!(
            "address del 192.0.2.{from}/24 dev eth1\naddress add 192.0.2.{to}/24 dev eth1\n\
             route replace default via 192.0.2.1\n"
        ))?;
        until("the other location knows the address", Duration::from_secs(30), || {
            Ok(other.sh("wg show kilo0 endpoints")?.contains(&format!("192.0.2.{to}:")))
        })
    };
    let result = moves(11, 13);
    wait::fault_lasts(Duration::from_secs(1));
    let back = moves(13, 11);
    // The laptop's configuration names the first address.
    Ok(format!(
        "known to the other after {} ms, the old one again after {} ms",
        result?.as_millis(),
        back?.as_millis()
    ))
}

pub(super) fn uplink_down(lab: &mut Lab) -> Result<String> {
    lab.caused(&[LEADS]);
    let node = lab.network.node("a1")?.netns.clone();
    node.ip("link set eth1 down\n")?;
    wait::fault_lasts(Duration::from_secs(2));
    // The default route went with the link; the host's network configuration would add it again.
    node.ip("link set eth1 up\nroute replace default via 192.0.2.1\n")?;
    Ok("down for 2 s".to_owned())
}

pub(super) fn detached(lab: &mut Lab) -> Result<String> {
    lab.caused(&[DETACHED]);
    let node = lab.network.node("a2")?.netns.clone();
    let (links, took) = detach_from_kilo(&node)?;
    Ok(format!("{links} links removed, back after {} ms", took.as_millis()))
}
