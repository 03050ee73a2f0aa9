//! A mesh of its own beside the lab's: two locations behind NATs of their own
//! that let in only what answers, and a third with a public address.
//!
//! ```text
//!   x 192.168.1.2 ── nat-x 203.0.113.1:45001 ──┐
//!   y 192.168.2.2 ── nat-y 203.0.113.2:45002 ──┼── internet
//!   z 203.0.113.3 ─────────────────────────────┘
//! ```

use std::{
    fs,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{
    Lab,
    agents::Agents,
    cni,
    network::{Network, Node, Underlay},
    probe,
    space::{self, Space},
};

const LIMIT: Duration = Duration::from_secs(180);

/// The namespaces, those of the mesh's nodes and pods included.
pub fn spaces(lab: &str) -> Vec<Space> {
    let names = ["internet", "nat-x", "nat-y", "x", "y", "z", "w", "pod-x", "pod-y", "pod-z", "pod-w"];
    names.map(|name| planned(lab, name)).into()
}

fn planned(lab: &str, name: &str) -> Space {
    Space { netns: format!("{lab}-{name}"), name: name.to_owned(), holder: None }
}

/// Builds the mesh, tries it, takes it down.
pub fn run(lab: &mut Lab) -> Result<String> {
    let result = try_it(lab);
    space::remove(spaces(&lab.name))?;
    result
}

fn try_it(lab: &Lab) -> Result<String> {
    let directory = lab.directory.join("nat");
    fs::create_dir_all(directory.join("logs"))?;
    let network = build(&lab.name, &directory, [Kind::PortRestricted; 2], &["z"])?;
    let mut agents = lab.agents.for_another(&directory, &network)?;
    let behind_nat = [("persistent-keepalive", "5")];
    for node in &network.nodes {
        let annotations = if node.public.is_some() { &[][..] } else { &behind_nat };
        agents.write_node(node, annotations)?;
        agents.start(node)?;
    }
    let result = meet(&agents, &network);
    for node in &network.nodes {
        agents.stop(node.name(), nix::sys::signal::Signal::SIGKILL)?;
    }
    result
}

/// x and y get to know from z where the other is seen, and reach it there.
fn meet(agents: &Agents, network: &Network) -> Result<String> {
    agents.wait_until_ready(network, LIMIT)?;
    for node in &network.nodes {
        cni::connect(node)?;
        probe::serve(&node.pod, node.pod_ip().into())?;
    }
    let started = Instant::now();
    for from in &network.nodes {
        for to in network.nodes.iter().filter(|to| to.name() != from.name()) {
            probe::until_seen_as(&from.pod, to.pod_ip(), from.pod_ip(), LIMIT)?;
        }
    }
    let took = started.elapsed();
    for (name, other) in [("x", "203.0.113.2:45002"), ("y", "203.0.113.1:45001")] {
        let endpoints = network.node(name)?.space.sh("wg show kilo0 endpoints")?;
        ensure!(endpoints.contains(other), "{name} reaches the other elsewhere:\n{endpoints}");
    }
    Ok(format!("(all pods meet after {:.1} s)", took.as_secs_f32()))
}

/// x and y behind NATs of these kinds, and leaders with public addresses.
pub fn build(
    lab: &str,
    directory: &std::path::Path,
    kinds: [Kind; 2],
    public: &[&'static str],
) -> Result<Network> {
    for space in spaces(lab) {
        Space::create(lab, &space.name)?;
    }
    let internet = planned(lab, "internet");
    internet.ip("link add inet type bridge\nlink set inet up\n")?;
    let mut nodes = Vec::new();
    let behind = kinds.map(Some);
    let ends = [("x", behind[0]), ("y", behind[1])];
    let all = ends.into_iter().chain(public.iter().map(|name| (*name, None)));
    for ((name, kind), number) in all.zip(1u8..) {
        let public = Ipv4Addr::new(203, 0, 113, number);
        let (private, gateway) = (Ipv4Addr::new(192, 168, number, 2), Ipv4Addr::new(192, 168, number, 1));
        let mut node = Node {
            space: planned(lab, name),
            pod: planned(lab, &format!("pod-{name}")),
            location: format!("site-{name}"),
            lan: "inet".to_owned(),
            gateway: gateway.into(),
            private: if kind.is_none() { public.into() } else { private.into() },
            public: kind.is_none().then_some(public.into()),
            pod_prefix: [10, 42, number],
            dual_stack: false,
        };
        let Some(kind) = kind else {
            link(&node.space, "eth0", &internet, name)?;
            node.space.ip(&format!("address add {public}/24 dev eth0\n"))?;
            finish(&mut node, directory)?;
            nodes.push(node);
            continue;
        };
        let nat = planned(lab, &format!("nat-{name}"));
        link(&nat, "wan", &internet, &nat.name)?;
        nat.ip(&format!("address add {public}/24 dev wan\n"))?;
        link(&node.space, "eth0", &nat, "lan")?;
        nat.ip(&format!("address add {gateway}/24 dev lan\n"))?;
        become_nat(lab, name, kind)?;
        node.space.ip(&format!("address add {private}/24 dev eth0\nroute add default via {gateway}\n"))?;
        finish(&mut node, directory)?;
        nodes.push(node);
    }
    Ok(Network { router: internet, nodes, ..Network::plan(lab, Underlay::V4) })
}

fn finish(node: &mut Node, directory: &std::path::Path) -> Result<()> {
    let name = node.name().to_owned();
    {
        node.space.hold(&directory.join(format!("logs/{name}-namespaces.log")))?;
        cni::install(node)?;
        node.space
            .sh("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")?;
    }
    Ok(())
}

/// What a NAT does with ports, and with what comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One public port whatever the destination; everybody may come in by it.
    FullCone,
    /// The same; in comes who was sent to, from whatever port.
    AddressRestricted,
    /// The same; in comes what answers.
    PortRestricted,
    /// A random port for each destination; in comes what answers.
    Symmetric,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::FullCone, Self::AddressRestricted, Self::PortRestricted, Self::Symmetric];

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullCone => "full cone",
            Self::AddressRestricted => "address-restricted",
            Self::PortRestricted => "port-restricted",
            Self::Symmetric => "symmetric",
        }
    }
}

/// Whether the network between both NATs loses all that one sends to the other.
pub fn block(lab: &str, is_blocked: bool) -> Result<()> {
    let rules = "table ip between { }\ndelete table ip between\n";
    let drop = "table ip between {\n chain out { type filter hook postrouting priority 200; \
                oifname wan ip daddr 203.0.113.2 drop; }\n}\n";
    let drop = if is_blocked { drop } else { "" };
    planned(lab, "nat-x").sh(&format!("nft -f - <<'RULES'\n{rules}{drop}RULES"))?;
    let drop = drop.replace("203.0.113.2", "203.0.113.1");
    planned(lab, "nat-y").sh(&format!("nft -f - <<'RULES'\n{rules}{drop}RULES"))?;
    Ok(())
}

/// Makes the router in front of an end a NAT. What nobody asked for is
/// dropped before it is tracked, else it would block the mapping it wants to meet.
fn become_nat(lab: &str, end: &str, kind: Kind) -> Result<()> {
    let number = if end == "x" { 1u8 } else { 2 };
    let (nat, port) = (planned(lab, &format!("nat-{end}")), 45_000 + u16::from(number));
    let (public, private) = (Ipv4Addr::new(203, 0, 113, number), Ipv4Addr::new(192, 168, number, 2));
    let out = match kind {
        Kind::Symmetric => "oifname wan masquerade fully-random".to_owned(),
        _ => format!("oifname wan udp sport 51820 snat to {public}:{port}\n oifname wan masquerade"),
    };
    let inward = match kind {
        Kind::FullCone => format!("iifname wan udp dport {port} dnat to {private}:51820"),
        Kind::AddressRestricted => {
            format!("iifname wan ip saddr @asked udp dport {port} dnat to {private}:51820")
        }
        _ => String::new(),
    };
    nat.sh(&format!(
        "echo 1 > /proc/sys/net/ipv4/ip_forward
         nft -f - <<'RULES'
         table ip nat-router {{ }}
         delete table ip nat-router
         table ip nat-router {{
             set asked {{ type ipv4_addr; flags dynamic,timeout; timeout 180s; }}
             chain prerouting {{
                 type nat hook prerouting priority -100;
                 {inward}
             }}
             chain postrouting {{
                 type nat hook postrouting priority 100;
                 {out}
             }}
             chain input {{ type filter hook input priority 0; iifname wan ct state new drop; }}
             chain forward {{
                 type filter hook forward priority 0;
                 oifname wan update @asked {{ ip daddr }}
                 iifname wan ct state new ct status dnat accept
                 iifname wan ct state new drop
             }}
         }}\nRULES"
    ))?;
    Ok(())
}

/// A veth pair; at the internet's end it joins the bridge.
fn link(space: &Space, device: &str, to: &Space, device_there: &str) -> Result<()> {
    space.ip(&format!(
        "link add {device} type veth peer name {device_there} netns {}\nlink set {device} up\n",
        to.netns
    ))?;
    let master = if device_there == "lan" { "" } else { " master inet" };
    to.ip(&format!("link set {device_there}{master} up\n"))
}
