//! Path MTUs end to end: whatever link is small, senders of packets that must
//! not be fragmented learn what fits, and TCP goes on.

use std::{
    io::{BufRead as _, BufReader},
    net::IpAddr,
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    Lab, bulk,
    netns::Netns,
    network::{Network, Node, OUTSIDE, OUTSIDE6, ROUTER_OUTSIDE, ROUTER_OUTSIDE6, Underlay},
    wait,
};

/// Bytes in front of a ping's payload: IP and ICMP header.
const PING_HEADERS: [u32; 2] = [28, 48];
/// Bytes that TCP carries each way.
const BYTES: usize = 300_000;
/// Sizes tried, in bytes with the IP header, largest first.
const SIZES: [u32; 6] = [9000, 4000, 1500, 1421, 1400, 1280];

/// A link made small, and what then fits between two pods.
struct Scenario {
    name: &'static str,
    /// Links set before, as (namespace, device, MTU).
    links: &'static [(&'static str, &'static str, u32)],
    from: &'static str,
    /// A pod, or a node by its private address.
    to: &'static str,
    /// Largest packet that fits, with the IP header, over an IPv4 underlay by IPIP.
    fits: u32,
}

/// The default routes' interfaces have 1500, so WireGuard carries 1420.
const SCENARIOS: [Scenario; 9] = [
    Scenario { name: "from another leader's pod", links: &[], from: "pod-a1", to: "pod-b1", fits: 1420 },
    Scenario { name: "through both leaders", links: &[], from: "pod-a2", to: "pod-b2", fits: 1420 },
    Scenario {
        name: "into a location with a small LAN",
        links: &[("b1", "eth0", 1320), ("b2", "eth0", 1320)],
        from: "pod-a2",
        to: "pod-b2",
        fits: 1300,
    },
    Scenario {
        name: "out of a location with a small LAN",
        links: &[("b1", "eth0", 1320), ("b2", "eth0", 1320)],
        from: "pod-b2",
        to: "pod-a2",
        // Its own kilo0 follows the default route's interface, but not below IPv6's minimum.
        fits: 1280,
    },
    Scenario {
        name: "through a leader with a small uplink",
        links: &[("a1", "eth1", 1400)],
        from: "pod-a2",
        to: "pod-b2",
        fits: 1320,
    },
    Scenario {
        name: "past a router of the location with a small link",
        links: &[("router", "lan-c", 1360)],
        from: "pod-a2",
        to: "pod-a3",
        fits: 1340,
    },
    Scenario {
        name: "from another location past that router",
        links: &[("router", "lan-c", 1360)],
        from: "pod-b2",
        to: "pod-a3",
        fits: 1340,
    },
    Scenario {
        name: "to another node of the location itself",
        links: &[],
        from: "pod-a2",
        to: "a1",
        fits: 1480,
    },
    Scenario {
        name: "to another node itself past that router",
        links: &[("router", "lan-c", 1360)],
        from: "pod-a2",
        to: "a3",
        fits: 1340,
    },
];

/// Runs every scenario in both families, from the pod and from its host.
pub fn run(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    // A pod's /sys is the machine's, so ask `ip` in the pod.
    let link = network.nodes[0].pod.sh("ip -o link show eth0")?;
    let mtu = link.split_whitespace().skip_while(|word| *word != "mtu").nth(1);
    let before: u32 = mtu.context("eth0 of a pod has no MTU")?.parse()?;
    let result = pods_carry(network, 9100).and_then(|()| try_all(network));
    let restored = pods_carry(network, before).and_then(|()| forget(network));
    let figure = result?;
    restored?;
    Ok(figure)
}

fn try_all(network: &Network) -> Result<String> {
    let mut probes = try_answers(network)?;
    if network.underlay != Underlay::V4 {
        return Ok(format!("({probes} paths of answers; scenarios are for IPv4 underlays)"));
    }
    let mut was_small = false;
    for scenario in &SCENARIOS {
        let result = set_links(network, scenario, |small| small).and_then(|()| {
            forget(network)?;
            // The agents follow the links, also when the ones of the scenario before are restored.
            if !scenario.links.is_empty() || was_small {
                wait::time_passes(Duration::from_millis(1500), "agents follow links without a word");
            }
            try_scenario(network, scenario).with_context(|| scenario.name.to_owned())
        });
        let restored = set_links(network, scenario, |_| 1500);
        probes += result?;
        restored?;
        was_small = !scenario.links.is_empty();
    }
    Ok(format!("({} scenarios, {probes} paths)", SCENARIOS.len()))
}

/// Sets the MTU of each link of the scenario, derived from its small one.
fn set_links(network: &Network, scenario: &Scenario, mtu: impl Fn(u32) -> u32) -> Result<()> {
    for (netns, device, small) in scenario.links {
        network.netns(netns)?.ip(&format!("link set {device} mtu {}\n", mtu(*small)))?;
    }
    Ok(())
}

/// Gives pods' own links this MTU: with a large one, only the path is small.
fn pods_carry(network: &Network, mtu: u32) -> Result<()> {
    for node in &network.nodes {
        node.pod.ip(&format!("link set eth0 mtu {mtu}\n"))?;
        node.netns.sh(&format!(
            "for d in /sys/class/net/kube-bridge/brif/*; do ip link set ${{d##*/}} mtu {mtu}; done; \
             ip link set kube-bridge mtu {mtu}"
        ))?;
    }
    Ok(())
}

/// Answers from outside that are too big for a pod's network, which the pod does not know: the node notifies
/// the sender, which knows only the node. Once where the node's address is public, once behind the router's
/// translation.
fn try_answers(network: &Network) -> Result<usize> {
    const CARRIED: u32 = 1300;
    let (outside, router): (IpAddr, IpAddr) = match network.underlay {
        Underlay::V4 => (OUTSIDE.into(), ROUTER_OUTSIDE.into()),
        Underlay::V6 => (OUTSIDE6.into(), ROUTER_OUTSIDE6.into()),
    };
    forget(network)?;
    let nodes = ["a1", "a2"];
    for name in nodes {
        let node = network.node(name)?;
        node.netns.ip(&format!("link set kube-bridge mtu {CARRIED}\n"))?;
        bulk::run(&node.pod, outside, BYTES)?;
        let seen = node.public.unwrap_or(router);
        let route = network.outside.sh(&format!("ip route get {seen}"))?;
        ensure!(
            route.contains(&format!("mtu {CARRIED}")),
            "outside has not learnt what {name} said: {route}"
        );
        node.netns.ip("link set kube-bridge mtu 9100\n")?;
    }
    forget(network)?;
    Ok(nodes.len())
}

/// Flushes the path MTUs that kernels have learnt in earlier scenarios.
fn forget(network: &Network) -> Result<()> {
    for netns in network.namespaces() {
        netns.sh("ip route flush cache; ip -6 route flush cache")?;
    }
    Ok(())
}

fn try_scenario(network: &Network, scenario: &Scenario) -> Result<usize> {
    let node = |pod: &str| network.node(pod.trim_start_matches("pod-"));
    let (from, to) = (node(scenario.from)?, node(scenario.to)?);
    if !scenario.to.starts_with("pod-") {
        return try_node(from, to, scenario.fits);
    }
    let targets = to.pod_ips();
    let mut paths = 0;
    for (&target, headers) in targets.iter().zip(PING_HEADERS) {
        learns(&from.pod, target, headers, scenario.fits)?;
        bulk::run(&from.pod, target, BYTES)?;
        paths += 1;
    }
    // The host's own packets take the same way.
    learns(&from.netns, targets[0], PING_HEADERS[0], scenario.fits)?;
    Ok(paths + 1)
}

/// From a pod to another node itself, directly and by a service's address: the errors that the sender gets
/// must bear the address it knows. Between the nodes themselves there is no outer header.
fn try_node(from: &Node, to: &Node, fits: u32) -> Result<usize> {
    let service: IpAddr = [10, 96, 0, 77].into();
    from.netns.sh(&format!(
        "nft 'add table ip lab-mtu; add chain ip lab-mtu pre {{ type nat hook prerouting priority -100; }}; \
         add rule ip lab-mtu pre ip daddr {service} dnat to {}'",
        to.private
    ))?;
    let targets = [to.private, service];
    let result = targets.into_iter().try_for_each(|target| {
        learns(&from.pod, target, PING_HEADERS[0], fits)?;
        bulk::run(&from.pod, target, BYTES).map(drop)
    });
    let removed = from.netns.sh("nft delete table ip lab-mtu");
    result?;
    removed?;
    Ok(targets.len())
}

/// Whatever size a sender begins with, it learns what fits, from hop to hop,
/// until a packet passes; and that one is as large as can be.
fn learns(netns: &Netns, target: IpAddr, headers: u32, fits: u32) -> Result<()> {
    let ping = |size: u32| ping(netns, target, size - headers);
    for start in SIZES {
        let mut size = start;
        let mut said = String::new();
        let passed = (0..10).any(|_| {
            let Ok((passed, text)) = ping(size) else { return false };
            match mtu_in(&text) {
                Some(mtu) => size = size.min(mtu),
                // The agent hears of a router inside the location before the sender does.
                None if !passed => wait::pace(Duration::from_millis(300)),
                None => {}
            }
            said = text;
            passed
        });
        let expected = start.min(fits);
        ensure!(
            passed && size == expected,
            "{} to {target} with {start} bytes: passes {passed} with {size} instead of {expected}; {said}",
            netns.name
        );
    }
    Ok(())
}

/// One ping with that payload: whether it was answered, and what was printed, spaces removed.
fn ping(netns: &Netns, target: IpAddr, payload: u32) -> Result<(bool, String)> {
    let line = format!("exec ping -M do -c 1 -W 1 -s {payload} {target} 2>&1");
    let mut ping = netns.command("sh").args(["-c", &line]).stdout(Stdio::piped()).spawn()?;
    let mut said = String::new();
    for line in BufReader::new(ping.stdout.take().context("no output")?).lines() {
        said += &line?.replace(' ', "");
        said.push('\n');
        // ping waits for an answer even to what the kernel refused to send.
        if mtu_in(&said).is_some() {
            ping.kill()?;
            break;
        }
    }
    Ok((ping.wait()?.success(), said))
}

/// The MTU in ping's answer, spaces removed: `mtu=1300)` or `mtu:1300`.
fn mtu_in(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("mtu=").or_else(|| text.split_once("mtu:"))?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}
