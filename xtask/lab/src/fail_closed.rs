//! Nodes whose WireGuard device is gone, down, or without its port: packets of the
//! mesh are dropped and counted, not sent in cleartext; and everything comes back.

use std::{
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{Lab, counters, network::Node, probe, wait};

/// A node that does not lead, and one that does.
const NODES: [&str; 2] = ["a2", "a1"];
/// A pod of the other location, not its leader's.
const TARGET: &str = "b2";
/// Echo requests per attempt.
const ECHOES: u64 = 20;
const WIREGUARD_PORT: u16 = 51_820;

/// The device is set down and deleted while no agent runs.
pub fn without_agent(lab: &mut Lab) -> Result<String> {
    let mut dropped = 0;
    for name in NODES {
        let node = lab.network.node(name)?.clone();
        for gone in ["link set kilo0 down\n", "link delete kilo0\n"] {
            let before = refused(&node)?;
            let seen = counters::clear_pod_packets(&lab.network)?;
            lab.agents.stop(name, Signal::SIGTERM)?;
            node.netns.ip(gone)?;
            cut_off(lab, &node).context("with the unreachable routes")?;
            // These routes are the second line of defence: without them packets get as far as the uplink.
            for family in ["-4", "-6"] {
                node.netns
                    .sh(&format!("ip {family} route flush table main type unreachable proto 107 || true"))?;
            }
            cut_off(lab, &node).context("by the default route")?;
            lab.agents.start(&node)?;
            back(lab, &node)?;
            let counted = refused(&node)?.saturating_sub(before);
            ensure!(counted >= ECHOES, "{name}: {counted} packets counted as not_encrypted after {gone}");
            clear(lab, seen)?;
            dropped += counted;
        }
    }
    Ok(format!("({dropped} packets dropped as not_encrypted)"))
}

/// The device is deleted under a running agent, again and again: where the mesh stands, and
/// while the agent still sets up the one it has just made.
pub fn under_agent(lab: &mut Lab) -> Result<String> {
    // Logged by the agent, or by the process that has just made the device, when the device goes away.
    lab.caused(&[
        "kilo0 is gone or was replaced",
        "failed to run userspace WireGuard: look up an interface",
        "No such device (os error 19)",
        "link kilo0 does not exist",
        // The device that was just made is there before its process listens.
        "no userspace WireGuard answers at",
    ]);
    let seen = counters::clear_pod_packets(&lab.network)?;
    let mut deleted = 0;
    for name in NODES {
        let node = lab.network.node(name)?.clone();
        let target = lab.network.node(TARGET)?.pod_ip();
        let mut pings = node.pod.command("ping").args(["-q", "-i", "0.01", &target.to_string()]).spawn()?;
        let result = (0..2).try_for_each(|_| {
            delete_device(&node)?;
            delete_device(&node)?;
            deleted += 2;
            back(lab, &node)
        });
        pings.kill()?;
        pings.wait()?;
        result?;
    }
    clear(lab, seen)?;
    Ok(format!("(deleted {deleted} times)"))
}

/// Deletes kilo0, which is there, and waits until the agent has made another.
fn delete_device(node: &Node) -> Result<()> {
    let index = || node.netns.sh("cat /sys/class/net/kilo0/ifindex 2>/dev/null || true");
    let before = index()?;
    // Without the second line of defence, so that the first one is seen to hold.
    node.netns.sh("ip -4 route flush table main type unreachable proto 107 || true; ip link delete kilo0")?;
    let what = format!("kilo0 of {} is made again", node.name());
    wait::until(&what, Duration::from_secs(60), || {
        let now = index()?;
        Ok(!now.is_empty() && now != before)
    })
    .map(drop)
}

/// Another program has WireGuard's port when the agent starts.
pub fn port_taken(lab: &mut Lab) -> Result<String> {
    lab.caused(&["UDP port 51820 is in use by another program"]);
    for name in NODES {
        let node = lab.network.node(name)?.clone();
        let seen = counters::clear_pod_packets(&lab.network)?;
        lab.agents.stop(name, Signal::SIGTERM)?;
        node.netns.sh("ip link delete kilo0; ip route flush proto 107; ip -6 route flush proto 107")?;
        let taken = node.netns.spawn(|| take_port(Duration::from_secs(10))).join();
        let taken = taken.map_err(|_| anyhow::anyhow!("thread"))???;
        lab.agents.start(&node)?;
        let result = put_right_but_wireguard(lab, &node);
        drop(taken);
        result.with_context(|| format!("{name}, without WireGuard's port"))?;
        back(lab, &node)?;
        clear(lab, seen)?;
    }
    Ok(String::new())
}

/// Binds the port in both families; the process of a device that was just deleted ends a moment later.
fn take_port(limit: Duration) -> Result<[UdpSocket; 2]> {
    wait::until(&format!("port {WIREGUARD_PORT} is free"), limit, || {
        Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, WIREGUARD_PORT)).and_then(|v4| {
            let v6 = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::DGRAM, None)?;
            v6.set_only_v6(true)?;
            v6.bind(&std::net::SocketAddr::from((Ipv6Addr::UNSPECIFIED, WIREGUARD_PORT)).into())?;
            Ok([v4, v6.into()])
        }))
    })
}

/// Everything that does not need the port is set up: routes lead to kilo0 or are unreachable.
fn put_right_but_wireguard(lab: &Lab, node: &Node) -> Result<()> {
    let target = lab.network.node(TARGET)?.pod_ip();
    wait::until("routes are made", Duration::from_secs(30), || {
        let routes = node.netns.sh("ip route show table main proto 107")?;
        Ok(if routes.contains("unreachable") { Ok(()) } else { Err(routes) })
    })?;
    let way = node.netns.sh(&format!("ip route get {target} 2>&1 || true"))?;
    ensure!(way.contains("kilo0") || way.contains("No route to host"), "{target}: {way}");
    match NODES.iter().position(|name| *name == node.name()) {
        // A node that does not lead needs no port where its device goes up without.
        Some(0) => ask(lab, node).map(drop),
        _ => cut_off(lab, node),
    }
}

/// Sends echo requests to the other location; returns what `ping` says.
fn ask(lab: &Lab, node: &Node) -> Result<String> {
    let target = lab.network.node(TARGET)?.pod_ip();
    node.pod.sh(&format!("ping -q -n -c {ECHOES} -i 0.05 -W 1 {target} 2>&1 || true"))
}

/// Fails when an echo is answered.
fn cut_off(lab: &Lab, node: &Node) -> Result<()> {
    let said = ask(lab, node)?;
    ensure!(said.contains(" 0 received"), "{}: {said}", node.name());
    Ok(())
}

/// Waits until the agents have nothing left to do and the node's pod reaches the other location again.
fn back(lab: &Lab, node: &Node) -> Result<()> {
    let target = lab.network.node(TARGET)?.pod_ip();
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(180))?;
    probe::until_seen_as(&node.pod, target, node.pod_ip(), Duration::from_secs(60))
}

fn refused(node: &Node) -> Result<u64> {
    Ok(counters::drops(&counters::scrape(&node.netns)?).get("not_encrypted").copied().unwrap_or(0))
}

fn clear(lab: &Lab, before: u64) -> Result<()> {
    let seen = counters::clear_pod_packets(&lab.network)?.saturating_sub(before);
    ensure!(seen == 0, "the router saw {seen} packets with pod addresses in cleartext");
    Ok(())
}
