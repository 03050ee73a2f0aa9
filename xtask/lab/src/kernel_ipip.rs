//! Nodes as Kilo sets them up: routes over `tunl0`, rules, iptables chains, and on a leader WireGuard as
//! `kgctl showconf` configures it. No agent runs there.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail, ensure};
use ipnet::Ipv4Net;
use nix::sys::signal::Signal;

use super::{
    Lab,
    check::Check,
    counters, matrix,
    network::{LAPTOP, Network, Node},
    tunl0, wait,
};

/// Flags of the agents: what Kilo's nodes understand.
pub const FLAGS: &[&str] = &["--tunnel=ipip"];

/// Checks that run once the mesh is up.
pub const CHECKS: &[Check] = &[
    ("new leader with an old and a new member; old leader with a new member", |lab| {
        round(lab, &["a2", "b1"])
    }),
    ("old leader with an old and a new member; new leader with an old member", |lab| {
        round(lab, &["a1", "a2", "b2"])
    }),
    ("all nodes are old", |lab| round(lab, &["a1", "a2", "a3", "b1", "b2"])),
    ("all nodes are new again", |lab| round(lab, &[])),
];

/// Kilo's tunnel carries IPv4 only. Nodes send packets as they are on a wire:
/// checksums filled in and segmented, because `tunl0` may be a program.
pub fn install(network: &mut Network) -> Result<()> {
    network.nodes.iter_mut().for_each(|node| node.dual_stack = false);
    network.nodes.iter().try_for_each(|node| node.netns.sh("ethtool -K eth0 tx off").map(drop))
}

/// Makes these nodes old and the rest new; then everybody reaches everybody.
fn round(lab: &mut Lab, old: &[&str]) -> Result<String> {
    for node in lab.network.nodes.clone() {
        match (old.contains(&node.name()), lab.agents.pid(node.name()).is_none()) {
            (true, false) => replace_by_old(lab, &node)?,
            (false, true) => replace_by_new(lab, &node)?,
            _ => {}
        }
    }
    matrix::settle(&lab.network, Duration::from_secs(60))?;
    let before = drops(lab, old)?;
    let matrix = matrix::run(&lab.network)?;
    matrix.all_passed()?;
    let after = drops(lab, old)?;
    ensure!(before == after, "new nodes dropped packets: {before:?}, then {after:?}");
    Ok(format!("({} probes)", matrix.total()))
}

/// What the programs of the new nodes have dropped.
fn drops(lab: &Lab, old: &[&str]) -> Result<Vec<std::collections::BTreeMap<String, u64>>> {
    let new = lab.network.nodes.iter().filter(|node| !old.contains(&node.name()));
    let of = |node: &Node| -> Result<_> {
        let mut drops = counters::drops(&counters::scrape(&node.netns)?);
        // The kernel's own neighbour discovery on the device.
        drops.remove("not_unicast");
        Ok(drops)
    };
    new.map(of).collect()
}

fn replace_by_old(lab: &mut Lab, node: &Node) -> Result<()> {
    let cluster = lab.agents.cluster();
    let said = cluster.join(format!("{}.kilo.yaml", node.name()));
    let annotations = fs::read_to_string(&said).with_context(|| said.display().to_string())?;
    let nodes = &lab.network.nodes;
    let leader = nodes.iter().find(|other| other.location == node.location && other.public.is_some());
    let leader = leader.context("no leader")?;
    let peers = lab.agents.kgctl(&["showconf", "node", leader.name()])?;
    let key = node.netns.sh("cat /var/lib/kilo/key")?;
    lab.agents.stop(node.name(), Signal::SIGTERM)?;
    let (kg, cluster) = (lab.agents.program("kg"), cluster.display().to_string());
    node.netns.sh(&format!("{} uninstall --backend file --backend-dir {cluster} 2>&1", kg.display()))?;
    stay_in_the_mesh(&said, &marker(lab, node), annotations.clone())?;
    tunl0::make(node, "tunl0", &nodes.iter().map(ipv4).collect::<Result<Vec<_>>>()?)?;
    if node.public.is_some() {
        let conf = lab.directory.join(format!("{}-old.conf", node.name()));
        let own = format!("[Interface]\nPrivateKey = {}\n", key.trim());
        fs::write(&conf, peers.replacen("[Interface]\n", &own, 1))?;
        lab.agents.userspace_wireguard(&node.netns, "kilo0")?;
        node.netns.sh(&format!("wg setconf kilo0 {}", conf.display()))?;
        let label = "kilo.squat.ai/wireguard-ip: ";
        let address = annotations.lines().find_map(|line| line.trim().strip_prefix(label));
        let address = address.context("the leader has no WireGuard address")?;
        node.netns.ip(&format!("address add {address} dev kilo0\nlink set kilo0 mtu 1420 up\n"))?;
    }
    let remote = remote_prefixes(&peers);
    node.netns.ip(&routes(&lab.network, node, leader, &remote)?)?;
    node.netns.sh(&chains(&lab.network, node, &remote)?)?;
    Ok(())
}

/// Removes what Kilo made, as Kilo does when it is stopped; then starts an agent.
fn replace_by_new(lab: &mut Lab, node: &Node) -> Result<()> {
    node.netns.sh("if test -e /run/kilo0.pid; then kill $(cat /run/kilo0.pid); rm /run/kilo0.pid; fi; \
         ip link delete tunl0; while ip rule delete table 1107 2>/dev/null; do :; done; \
         iptables-save | grep -v KILO | grep -v 'INPUT -p ipencap -j DROP' | iptables-restore")?;
    fs::remove_file(marker(lab, node))?;
    lab.agents.start(node)?;
    // Between the removal of Kilo's routes and ours, pods' packets leave by the default route.
    super::agents::wait_set_up(&node.netns, Duration::from_secs(30))
}

/// While this file exists the node counts as one with Kilo.
fn marker(lab: &Lab, node: &Node) -> std::path::PathBuf {
    lab.directory.join(format!("old-{}", node.name()))
}

/// Renews what Kilo's agent would renew, until the marker is gone.
fn stay_in_the_mesh(said: &Path, marker: &Path, annotations: String) -> Result<()> {
    fs::write(marker, "")?;
    let (said, marker, aside) = (said.to_owned(), marker.to_owned(), marker.with_extension("yaml"));
    let renew = move || -> Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
        let fresh = |line: &str| match line.split_once("last-seen: ") {
            Some((start, _)) => format!("{start}last-seen: '{now}'\n"),
            None => format!("{line}\n"),
        };
        fs::write(&aside, annotations.lines().map(fresh).collect::<String>())?;
        Ok(fs::rename(&aside, &said)?)
    };
    renew()?;
    std::thread::spawn(move || {
        for second in 1.. {
            wait::pace(Duration::from_secs(1));
            if !marker.exists() || (second % 10 == 0 && renew().is_err()) {
                return;
            }
        }
    });
    Ok(())
}

fn ipv4(node: &Node) -> Result<Ipv4Addr> {
    match node.private {
        IpAddr::V4(address) => Ok(address),
        IpAddr::V6(address) => bail!("{address}: Kilo's tunnel is IPv4"),
    }
}

/// Prefixes outside the location: allowed IPs of the leader's peers.
fn remote_prefixes(peers: &str) -> Vec<Ipv4Net> {
    let lists = peers.lines().filter_map(|line| line.strip_prefix("AllowedIPs = "));
    lists.flat_map(|list| list.split(", ")).filter_map(|prefix| prefix.parse().ok()).collect()
}

/// Routes and rules, as a batch for `ip`.
fn routes(network: &Network, node: &Node, leader: &Node, remote: &[Ipv4Net]) -> Result<String> {
    let source = ipv4(node)?;
    let mut batch = String::new();
    // A leader encrypts; other nodes encapsulate to the leader.
    let (device, via) = match node.public {
        Some(_) => ("kilo0", None),
        None => ("tunl0", Some(ipv4(leader)?)),
    };
    let own = |prefix: &Ipv4Net| prefix.prefix_len() == 32 && prefix.addr().octets().starts_with(&[10, 4]);
    for prefix in remote.iter().filter(|prefix| via.is_some() || !own(prefix)) {
        let via = via.map(|via| format!(" via {via} onlink")).unwrap_or_default();
        batch += &format!("route replace {prefix}{via} dev {device} proto static src {source}\n");
    }
    for other in network.nodes.iter().filter(|other| other.location == node.location) {
        if other.name() == node.name() {
            continue;
        }
        let (pods, address) = (other.pod_address(0), ipv4(other)?);
        let tunnel = format!("via {address} dev tunl0 onlink proto static");
        batch += &format!("route replace {pods}/24 {tunnel} src {source}\n");
        batch += &format!("route replace {address}/32 {tunnel} table 1107\n");
        batch += &format!("rule add from {}/24 to {address} lookup 1107\n", node.pod_address(0));
        if node.public.is_some() {
            batch += &format!("rule add to {address} iif kilo0 lookup 1107\n");
        }
    }
    if let Some(leader) = via {
        let tunnel = format!("via {leader} dev tunl0 onlink proto static");
        // The leader's own WireGuard address is the location's.
        let site = if node.location == "site-a" { 1 } else { 2 };
        batch += &format!("route replace 10.4.0.{site}/32 {tunnel} src {source}\n");
    }
    Ok(batch)
}

/// iptables commands: who may send IPIP, and what is masqueraded.
fn chains(network: &Network, node: &Node, remote: &[Ipv4Net]) -> Result<String> {
    let mut script = String::from("iptables -N KILO-IPIP\niptables -A INPUT -p 4 -j KILO-IPIP\n");
    let mut known: Vec<String> = remote.iter().map(ToString::to_string).collect();
    for other in network.nodes.iter().filter(|other| other.location == node.location) {
        let address = ipv4(other)?;
        script += &format!("iptables -A KILO-IPIP -s {address} -j ACCEPT\n");
        known.extend([format!("{}/24", other.pod_address(0)), address.to_string()]);
    }
    known.extend(["10.4.0.1".to_owned(), "10.4.0.2".to_owned()]);
    script += "iptables -A INPUT -p 4 -j DROP\niptables -t nat -N KILO-NAT\n";
    for prefix in known {
        script += &format!("iptables -t nat -A KILO-NAT -d {prefix} -j RETURN\n");
    }
    script += &format!(
        "iptables -t nat -A KILO-NAT -j MASQUERADE\n\
         iptables -t nat -A POSTROUTING -s {}/24 -j KILO-NAT\n\
         iptables -t nat -A POSTROUTING -s {LAPTOP}/32 -j KILO-NAT\n",
        node.pod_address(0)
    );
    Ok(script)
}
