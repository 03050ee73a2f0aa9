//! How the soak makes its faults: each lasts a while and is mended; neither step waits for the mesh to heal.

use std::fs;

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{Injected, rng::Rng};
use crate::{
    Lab,
    faults::{
        injector::{Direction, Drop, Family, Rule},
        nodes::{annotated, key, names, peer, put},
    },
    netns,
    network::Node,
};

/// Why faults heal that agents put right.
const AGENT: &str = "its agent puts it right";
/// Why faults heal that were not made after all.
const NOT_MADE: &str = "another fault left nothing to break";

fn any_node(lab: &Lab, rng: &mut Rng) -> Node {
    rng.pick(&lab.network.nodes).clone()
}

/// A node with a public address.
fn any_leader(lab: &Lab, rng: &mut Rng) -> Node {
    let leaders: Vec<_> = lab.network.nodes.iter().filter(|node| node.public.is_some()).collect();
    (*rng.pick(&leaders)).clone()
}

/// Starts the agents of these nodes that do not run.
fn start_again(lab: &mut Lab, nodes: &[String]) -> Result<()> {
    for name in nodes {
        if lab.agents.pid(name).is_none() {
            let node = lab.network.node(name)?.clone();
            lab.agents.start(&node)?;
        }
    }
    Ok(())
}

/// Ends the agents of these nodes that run.
fn stop(lab: &mut Lab, nodes: &[String], signal: Signal) -> Result<()> {
    for name in nodes {
        if lab.agents.pid(name).is_some() {
            lab.agents.stop(name, signal)?;
        }
    }
    Ok(())
}

pub fn agents_killed(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let all = names(lab);
    let first = rng.below(all.len());
    let count = 1 + rng.below(all.len());
    let nodes: Vec<_> = (0..count).map(|more| all[(first + more) % all.len()].clone()).collect();
    stop(lab, &nodes, Signal::SIGKILL)?;
    Ok(Injected::until(nodes.join(", "), move |lab| start_again(lab, &nodes)))
}

pub fn agent_restarts(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let nodes = vec![any_node(lab, rng).name().to_owned()];
    stop(lab, &nodes, Signal::SIGTERM)?;
    start_again(lab, &nodes)?;
    Ok(Injected::heals(nodes.join(", "), "the agent runs again"))
}

pub fn agent_stands_still(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let name = any_node(lab, rng).name().to_owned();
    let Some(agent) = lab.agents.pid(&name) else {
        return Ok(Injected::heals(format!("{name}, which has none"), NOT_MADE));
    };
    let agent = Pid::from_raw(agent.cast_signed());
    kill(agent, Signal::SIGSTOP)?;
    // It may have been killed meanwhile.
    let mend = move |_: &mut Lab| {
        let _ = kill(agent, Signal::SIGCONT);
        Ok(())
    };
    Ok(Injected::until(name, mend))
}

pub fn device_deleted(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    node.netns.sh("ip link delete kilo0 2>/dev/null || true")?;
    Ok(Injected::heals(node.name(), AGENT))
}

pub fn device_flushed(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    node.netns.sh("ip address flush dev kilo0 || true; ip route flush dev kilo0 || true")?;
    Ok(Injected::heals(node.name(), AGENT))
}

pub fn wireguard_killed(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    let is_wireguard = |process: &u32| {
        fs::read_to_string(format!("/proc/{process}/cmdline"))
            .is_ok_and(|words| words.contains("userspace-wireguard"))
    };
    for process in netns::processes(&node.netns)?.into_iter().filter(is_wireguard) {
        let _ = kill(Pid::from_raw(process.cast_signed()), Signal::SIGKILL);
    }
    Ok(Injected::heals(node.name(), AGENT))
}

pub fn detached(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    node.netns.sh(
        "rm -f /sys/fs/bpf/kilo/links/kilo_*; for d in kilo0 eth0; do tc qdisc del dev $d clsact 2>/dev/null || true; done",
    )?;
    Ok(Injected::heals(node.name(), AGENT))
}

pub fn link_down(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    let device = if node.public.is_some() && rng.below(2) == 0 { "eth1" } else { "eth0" };
    // Routes go with the link; the host's network configuration would add them again.
    let routes = format!("ip route save dev {device} scope global > /run/routes-{device}");
    node.netns.sh(&format!("{routes}; ip link set {device} down"))?;
    if device == "eth0" {
        lab.takes_from_lan(node.name());
    }
    let said = format!("{device} of {}", node.name());
    let mend = move |_: &mut Lab| {
        node.netns
            .sh(&format!("ip link set {device} up; ip route restore < /run/routes-{device} || true"))?;
        Ok(())
    };
    Ok(Injected::until(said, mend))
}

pub fn neighbours_forgotten(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    node.netns.sh("ip neighbour flush all || true; ip -6 neighbour flush all || true")?;
    Ok(Injected::heals(node.name(), "the kernel asks for them again"))
}

pub fn address_changes(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_leader(lab, rng);
    let public = node.public.context("a leader has a public address")?;
    let other = format!("192.0.2.1{}", 3 + rng.below(5));
    let moves = move |node: &Node, from: &str, to: &str| {
        node.netns.sh(&format!(
            "ip address del {from}/24 dev eth1 || true; ip address add {to}/24 dev eth1; \
             ip route replace default via 192.0.2.1 || true"
        ))
    };
    moves(&node, &public.to_string(), &other)?;
    let said = format!("{} from {public} to {other}", node.name());
    let mend = move |_: &mut Lab| moves(&node, &other, &public.to_string()).map(|_| ());
    Ok(Injected::until(said, mend))
}

pub fn key_rotated(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_leader(lab, rng);
    let nodes = vec![node.name().to_owned()];
    stop(lab, &nodes, Signal::SIGTERM)?;
    node.netns.sh("mv /var/lib/kilo/key /var/lib/kilo/first")?;
    start_again(lab, &nodes)?;
    let said = nodes.join("");
    // The laptop knows the first key.
    let mend = move |lab: &mut Lab| {
        stop(lab, &nodes, Signal::SIGTERM)?;
        node.netns.sh("mv /var/lib/kilo/first /var/lib/kilo/key")?;
        start_again(lab, &nodes)
    };
    Ok(Injected::until(said, mend))
}

/// Writes other text into an object's file, or removes it; mending restores it.
fn written(lab: &Lab, file: &str, text: Option<&str>, said: String) -> Result<Injected> {
    let path = lab.agents.cluster().join(file);
    let before = fs::read_to_string(&path).ok();
    match text {
        Some(text) => put(&path, text)?,
        None => fs::remove_file(&path)?,
    }
    let mend = move |_: &mut Lab| match before {
        Some(before) => put(&path, &before),
        None => fs::remove_file(&path).with_context(|| path.display().to_string()),
    };
    Ok(Injected::until(said, mend))
}

/// Whether another fault has removed the node from the cluster.
fn is_gone(lab: &Lab, node: &str) -> bool {
    !lab.agents.cluster().join(format!("node-{node}.yaml")).exists()
}

pub fn leader_moves(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let others: Vec<_> = lab.network.nodes.iter().filter(|node| node.public.is_none()).collect();
    let name = rng.pick(&others).name().to_owned();
    if is_gone(lab, &name) {
        return Ok(Injected::heals(format!("{name}, which is gone"), NOT_MADE));
    }
    let text = annotated(lab, &name, &[("leader", "true"), ("persistent-keepalive", "5")])?;
    written(lab, &format!("node-{name}.yaml"), Some(&text), name)
}

pub fn node_leaves(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let name = any_node(lab, rng).name().to_owned();
    lab.removes(&name);
    written(lab, &format!("node-{name}.yaml"), None, name)
}

pub fn rubbish(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let name = any_node(lab, rng).name().to_owned();
    let all = [
        ("persistent-keepalive", "soon"),
        ("allowed-location-ips", "10.0.0.0/99"),
        ("force-endpoint", ":::"),
        ("force-internal-ip", "everywhere"),
        ("wireguard-ip", "10.4"),
        ("key", "none"),
        ("last-seen", "-1e9"),
    ];
    let (annotation, value) = *rng.pick(&all);
    if is_gone(lab, &name) {
        return Ok(Injected::heals(format!("{name}, which is gone"), NOT_MADE));
    }
    let text = annotated(lab, &name, &[(annotation, value)])?;
    written(lab, &format!("node-{name}.yaml"), Some(&text), format!("{annotation} of {name}"))
}

pub fn peer_comes(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let number = u8::try_from(rng.below(40))?;
    let name = format!("random-{number}");
    let text = peer(&name, &format!("10.5.2.{number}/32"), &key(number), "");
    written(lab, &format!("peer-{name}.yaml"), Some(&text), name)
}

pub fn packets_lost(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_leader(lab, rng);
    let drop = match rng.below(3) {
        0 => Drop::First(1 + rng.below(10) as u32),
        1 => Drop::Every(2 + rng.below(9) as u32),
        _ => Drop::Nth(1 + rng.below(10) as u32),
    };
    let delay = (rng.below(2) == 0).then(|| 10 + rng.below(200) as u64);
    let direction = if rng.below(2) == 0 { Direction::In } else { Direction::Out };
    let rule = Rule {
        direction,
        family: Family::V4,
        protocol: "udp".to_owned(),
        port: Some(51820),
        shortest: 0,
        longest: 65535,
        drop,
        delay,
    };
    let injected = rule.inject(&node.netns)?;
    let late = delay.map(|delay| format!(" {delay} ms late")).unwrap_or_default();
    let said = format!("{drop:?}, {direction:?}, of WireGuard's at {}{late}", node.name());
    // It ends with its guard.
    let mend = move |_: &mut Lab| injected.hits().map(|_| ());
    Ok(Injected::until(said, mend))
}

pub fn rp_filter(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let value = rng.below(3);
    let set = |lab: &Lab, value: usize| {
        lab.network.nodes.iter().try_for_each(|node| {
            let script = format!("for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo {value} > $d; done");
            node.netns.sh(&script).map(|_| ())
        })
    };
    set(lab, value)?;
    Ok(Injected::until(format!("to {value} everywhere"), move |lab| set(lab, 1)))
}

pub fn forwarding_off(lab: &mut Lab, rng: &mut Rng) -> Result<Injected> {
    let node = any_node(lab, rng);
    node.netns.sh("echo 0 > /proc/sys/net/ipv4/ip_forward")?;
    // The agent sees /proc/sys read-only, and informs the operator.
    let said = node.name().to_owned();
    let mend = move |_: &mut Lab| node.netns.sh("sysctl -q net.ipv4.ip_forward=1").map(|_| ());
    Ok(Injected::until(said, mend))
}
