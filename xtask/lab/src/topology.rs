//! Networks that differ from the lab's own in one thing each, as users have them.

use std::{
    net::{IpAddr, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use super::{
    Lab,
    check::Check,
    netns::Netns,
    network::{Network, Node, PRINTER},
    point_to_point_link,
    probe::{self, Protocol},
    wait::{self, until},
};

/// Longest wait until something configured works.
const LIMIT: Duration = Duration::from_secs(40);

/// The uplink without Ethernet header.
pub const PPP: &str = "ppp0";

/// What differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Topology {
    /// Nothing.
    #[default]
    Plain,
    /// a2 has a second NIC in its LAN; neighbours send what is for a2 to that one.
    TwoNics,
    /// The private network of site-b is a VLAN above interfaces that have addresses, too.
    Vlan,
    /// The uplink of b1 has no Ethernet header, as PPP and tunnels have none.
    PointToPoint,
    /// A host on the LAN of a1 has a static route to the pods' network.
    StaticRoute,
    /// Routers carry the LANs' own addresses between locations, and WireGuard goes between these.
    PrivateEndpoints,
}

impl Topology {
    /// Flags of every agent.
    pub const fn flags(self) -> &'static [&'static str] {
        match self {
            // The operator has to say which of the addresses is the private one.
            Self::Vlan => &["--internal-cidr=10.1.0.0/16,10.2.0.0/16"],
            Self::PrivateEndpoints => &["--prioritise-private-addresses"],
            _ => &[],
        }
    }

    /// Devices that carry a node's packets out: interfaces with an address of their own.
    pub fn uplinks(self, node: &Node) -> Vec<&'static str> {
        let usual = if node.public.is_some() { &["eth0", "eth1"][..] } else { &["eth0"] };
        match (self, node.name()) {
            (Self::TwoNics, "a2") => vec!["eth0", "eth2"],
            // The interface below it has an address, too.
            (Self::Vlan, "b1" | "b2") => [usual, &["eth0.100"]].concat(),
            (Self::PointToPoint, "b1") => vec!["eth0", PPP],
            _ => usual.to_vec(),
        }
    }

    /// Additional checks of this topology.
    pub const fn checks(self) -> &'static [Check] {
        match self {
            Self::StaticRoute => &[(
                "a LAN host with a static route opens connections to pods, answered by their own addresses",
                from_the_lan,
            )],
            Self::PrivateEndpoints => &[
                (
                    "hosts and pods reach leaders at the addresses WireGuard itself sends to, encrypted",
                    by_endpoints,
                ),
                ("kilo0's programs detached at a leader leak nothing of another leader's host", detached),
            ],
            _ => &[],
        }
    }

    /// Why this kernel cannot have it, if it cannot.
    pub fn missing(self) -> Option<&'static str> {
        // Any other error means that the kernel knows the type.
        let knows = |kind: &str| {
            let probe = format!("link add kilo-probe link lo type {kind} id 1");
            let output = Command::new("unshare").args(["--net", "ip"]).args(probe.split(' ')).output();
            output
                .is_ok_and(|output| !String::from_utf8_lossy(&output.stderr).contains("Unknown device type"))
        };
        (self == Self::Vlan && !knows("vlan")).then_some("this kernel has no VLAN devices")
    }

    /// Changes a network that has just been built.
    ///
    /// # Errors
    /// When something cannot be set up.
    pub fn prepare(self, network: &mut Network) -> Result<()> {
        match self {
            Self::Plain => Ok(()),
            Self::TwoNics => two_nics(network),
            Self::Vlan => vlan(network),
            Self::PointToPoint => point_to_point(network),
            Self::PrivateEndpoints => private_endpoints(network),
            Self::StaticRoute => {
                // Pods of another node of the location are reached through that node: a1 may not send it what
                // another host has sent (`foreign_source`). All others are reached through the leader.
                let a2 = network.node("a2")?;
                let own = format!("route add {}/24 via {}\n", a2.pod_address(0), a2.private);
                network.printer.ip(&format!("route add 10.42.0.0/16 via 10.1.0.11\n{own}"))
            }
        }
    }
}

fn two_nics(network: &Network) -> Result<()> {
    let node = network.node("a2")?;
    network.attach(&node.netns, "eth2", "a2-second-lan", Some(&node.lan))?;
    node.netns.ip("address add 10.1.0.112/24 dev eth2\n")?;
    // A strict filter would accept nothing on the NIC by which it does not answer.
    node.netns.sh("for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 2 > $d; done")?;
    let mac = node.netns.sh("cat /sys/class/net/eth2/address")?;
    let neighbour =
        |device: &str| format!("neigh replace {} lladdr {} dev {device}\n", node.private, mac.trim());
    network.node("a1")?.netns.ip(&neighbour("eth0"))?;
    network.router.ip(&neighbour(&node.lan))
}

fn vlan(network: &Network) -> Result<()> {
    let above = |parent: &str, own: &str, private: &str, length: u8| {
        format!(
            "address del {private}/24 dev {parent}\naddress add {own}/24 dev {parent}\n\
             link add link {parent} name {parent}.100 type vlan id 100\nlink set {parent}.100 up\n\
             address add {private}/{length} dev {parent}.100\n"
        )
    };
    network.router.ip(&above("lan-b", "10.8.0.1", "10.2.0.1", 24))?;
    network.node("b1")?.netns.ip(&above("eth0", "10.8.0.11", "10.2.0.11", 24))?;
    let b2 = above("eth0", "10.8.0.12", "10.2.0.12", 24);
    network.node("b2")?.netns.ip(&format!("{b2}route replace default via 10.2.0.1\n"))
}

fn point_to_point(network: &Network) -> Result<()> {
    let node = network.node("b1")?;
    let public = node.public.context("b1 has a public address")?;
    node.netns.ip("link delete eth1\n")?;
    point_to_point_link::start((&node.netns, PPP), (&network.router, "b1-ppp"))?;
    node.netns.ip(&format!(
        "address add {public} peer 192.0.2.1 dev {PPP}\nlink set {PPP} up\nroute add default dev {PPP}\n"
    ))?;
    network.router.ip(&format!("link set b1-ppp up\nroute add {public} dev b1-ppp\n"))?;
    network.router.sh("echo 1 > /proc/sys/net/ipv4/conf/wan/proxy_arp").map(drop)
}

fn private_endpoints(network: &mut Network) -> Result<()> {
    network.private_endpoints = true;
    network.router.sh("nft flush chain inet lab forward")?;
    ["a1", "b1"].iter().try_for_each(|name| network.restore_routes(network.node(name)?))
}

/// Hosts and pods of leaders probe the other leader's endpoint; packets in cleartext meanwhile fail every check.
fn by_endpoints(lab: &mut Lab) -> Result<String> {
    let ends = [("a1", "b1"), ("b1", "a1")];
    for (from, to) in ends {
        let target = lab.network.node(to)?.private;
        let node = lab.network.node(from)?;
        let endpoint = node.netns.sh("wg show kilo0 endpoints")?;
        ensure!(endpoint.contains(&format!("{target}:51820")), "{from} sends to {endpoint}");
        for (who, netns) in [("host", &node.netns), ("pod", &node.pod)] {
            for protocol in Protocol::ALL {
                let timeout = Duration::from_secs(3);
                let asked = netns.spawn(move || probe::probe(protocol, target, timeout)).join();
                asked
                    .map_err(|_| anyhow::anyhow!("probe thread"))??
                    .with_context(|| format!("{who} of {from} to {target} by {}", protocol.label()))?;
            }
        }
    }
    Ok(format!("({} ways)", ends.len() * 2 * Protocol::ALL.len()))
}

/// Detaches the programs of kilo0, and waits until the agent has attached them again; returns how many links
/// there were, and how long that took.
///
/// # Errors
/// When they do not come back.
pub fn detach_from_kilo(node: &Netns) -> Result<(usize, Duration)> {
    // A pinned TCX link ends with its pin; a clsact filter with the qdisc.
    let removed =
        node.sh("rm -v /sys/fs/bpf/kilo/links/kilo_* 2>/dev/null || tc qdisc del dev kilo0 clsact")?;
    let attached = "(ls /sys/fs/bpf/kilo/links; for way in egress ingress; do tc filter show dev kilo0 $way; done) \
                    | grep -oE 'kilo_(egress|ingress)' | sort -u | wc -l";
    let took = until("kilo0's programs are back", LIMIT, || Ok(node.sh(attached)?.trim() == "2"))?;
    Ok((removed.lines().count(), took))
}

/// The host of a1 sends to that of b2 while b1, which forwards it, loses kilo0's programs again and again.
fn detached(lab: &mut Lab) -> Result<String> {
    const BETWEEN: Duration = Duration::from_millis(1);
    lab.caused(&["reattached it"]);
    let target = lab.network.node("b2")?.private;
    let node = lab.network.node("b1")?.netns.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&stop);
    let from = lab.network.node("a1")?;
    // WireGuard's endpoint address, as in the host's answers.
    let source = from.private;
    let sender = from.netns.spawn(move || -> std::io::Result<u64> {
        let socket = UdpSocket::bind((source, 0))?;
        let mut sent = 0;
        while !ended.load(Ordering::Relaxed) {
            // While b1 loses its programs the kernel may say that nobody is there.
            sent += u64::from(socket.send_to(probe::MARKER, (target, probe::PORT)).is_ok());
            wait::pace(BETWEEN);
        }
        Ok(sent)
    });
    let result = (0..3).try_for_each(|_| detach_from_kilo(&node).map(drop));
    stop.store(true, Ordering::Relaxed);
    let sent = sender.join().map_err(|_| anyhow::anyhow!("sending thread"))???;
    result?;
    lab.nothing_in_clear()?;
    ensure!(sent > 1000, "only {sent} datagrams were sent");
    Ok(format!("({sent} datagrams, detached 3 times)"))
}

/// Probes from the LAN to pods of its location, then to one of another by `allowed-location-ips`.
fn from_the_lan(lab: &mut Lab) -> Result<String> {
    for name in ["a1", "a2"] {
        let pod = lab.network.node(name)?.pod_ip().into();
        for protocol in Protocol::ALL {
            asks(lab, protocol, pod).with_context(|| format!("pod-{name} by {}", protocol.label()))?;
        }
    }
    let a2 = lab.network.node("a2")?;
    lab.agents.write_node(a2, &[("allowed-location-ips", &format!("{PRINTER}/32"))])?;
    let pod = lab.network.node("b2")?.pod_ip();
    let reached = probe::until_seen_as(&lab.network.printer, pod, PRINTER, LIMIT);
    lab.agents.write_node(lab.network.node("a2")?, &[])?;
    reached.map(|()| String::new())
}

/// Sends a probe from the printer, whose socket accepts answers of the target only.
fn asks(lab: &Lab, protocol: Protocol, target: IpAddr) -> Result<()> {
    let timeout = Duration::from_secs(3);
    let seen = lab.network.printer.spawn(move || probe::probe(protocol, target, timeout)).join();
    let seen = seen.map_err(|_| anyhow::anyhow!("probe thread"))???;
    ensure!(seen.is_none_or(|seen| seen == IpAddr::from(PRINTER)), "the pod saw {seen:?}");
    Ok(())
}
