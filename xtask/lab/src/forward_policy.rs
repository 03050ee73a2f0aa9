//! Hosts whose FORWARD chains drop what nobody accepted, as Docker leaves them.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::{
    Lab,
    network::Network,
    probe::{self, Protocol},
};

/// Nodes whose pods try to connect: two members, two leaders, and two members of one location.
const PATHS: [(&str, &str); 3] = [("a2", "b2"), ("a1", "b1"), ("a2", "a3")];

/// Sets the policy, checks that pods are cut off, restarts the agents with the flag, and checks that all pods
/// are reached. The agents keep the flag: `kg uninstall` has to remove the rules.
pub fn run(lab: &mut Lab) -> Result<String> {
    policy(&lab.network, "DROP")?;
    let result = with_and_without(lab);
    policy(&lab.network, "ACCEPT")?;
    let accepted = result?;
    Ok(format!("({accepted} packets accepted by the rules)"))
}

fn with_and_without(lab: &mut Lab) -> Result<u64> {
    let timeout = Duration::from_millis(700);
    for path in reached(&lab.network, timeout)? {
        ensure!(!path.1, "{} without --iptables-forward-rules: is the policy in force?", path.0);
    }
    lab.agents.add_flag("--iptables-forward-rules");
    let nodes = lab.network.nodes.clone();
    for node in &nodes {
        lab.agents.stop(node.name(), Signal::SIGTERM)?;
        lab.agents.start(node)?;
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(180))?;
    // Handshakes and rules take their time on an emulated machine.
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        let paths = reached(&lab.network, Duration::from_secs(5))?;
        match paths.iter().find(|path| !path.1) {
            None => break,
            Some(path) => ensure!(
                Instant::now() < deadline,
                "{} with --iptables-forward-rules: nothing comes back",
                path.0
            ),
        }
    }
    let mut accepted = 0;
    for node in &nodes {
        for program in ["iptables", "ip6tables"] {
            let text = node.netns.sh(&format!("{program} -w 5 -nvxL KILO-FORWARD"))?;
            let packets = text.lines().filter_map(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            accepted += packets.sum::<u64>();
        }
    }
    ensure!(accepted > 0, "the rules counted nothing");
    Ok(accepted)
}

/// Tries a TCP connection on each path in both families; whether it was established.
fn reached(network: &Network, timeout: Duration) -> Result<Vec<(String, bool)>> {
    let mut threads = Vec::new();
    for (from, to) in PATHS {
        let (from, to) = (network.node(from)?, network.node(to)?);
        for target in [IpAddr::V4(to.pod_ip()), IpAddr::V6(to.pod_ip6())] {
            let name = format!("{} to {target}", from.pod.name);
            threads
                .push((name, from.pod.spawn(move || probe::probe(Protocol::Tcp, target, timeout).is_ok())));
        }
    }
    let join = |(name, thread): (String, std::thread::JoinHandle<Result<bool>>)| {
        Ok((name, thread.join().map_err(|_| anyhow::anyhow!("probe thread"))??))
    };
    threads.into_iter().map(join).collect()
}

fn policy(network: &Network, policy: &str) -> Result<()> {
    for node in &network.nodes {
        node.netns.sh(&format!("for p in iptables ip6tables; do $p -w 5 -P FORWARD {policy}; done"))?;
    }
    Ok(())
}
