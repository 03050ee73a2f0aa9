//! A mesh of its own beside the lab's: two locations behind NATs of their own that let in only replies, and a
//! third with a public address.
//!
//! ```text
//!   x 192.168.1.2 ── nat-x 203.0.113.1:45001 ──┐
//!   y 192.168.2.2 ── nat-y 203.0.113.2:45002 ──┼── internet
//!   z 203.0.113.3 ─────────────────────────────┘
//! ```
//!
//! Both may be behind nat-x, and all of it may be IPv6: then NATs are firewalls, and x is `2001:db8:a1::2`. It may
//! have both families: NATs for IPv4, and firewalls for IPv6. The location of x may have a second node, x2, in the same
//! network; then those with public addresses are one location, with a private network.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{
    Lab,
    agents::Agents,
    cni, cni_conf, deployed_state,
    netns::{self, Netns},
    network::{Network, Node, Underlay},
    probe,
};

const LIMIT: Duration = Duration::from_secs(180);
/// Logged by agents of such a mesh: ends behind NATs lead their locations with private addresses.
pub const CAUSED: &[&str] = &[deployed_state::LEADS];

/// The namespaces, those of the mesh's nodes and pods included.
pub fn namespaces(lab: &str) -> Vec<Netns> {
    let nodes = ["x", "x2", "y", "z", "z2", "w"];
    let pods = nodes.map(|name| format!("pod-{name}"));
    let names = ["internet", "nat-x", "nat-y"].into_iter().chain(nodes);
    names.chain(pods.iter().map(String::as_str)).map(|name| planned(lab, name)).collect()
}

fn planned(lab: &str, name: &str) -> Netns {
    Netns { id: format!("{lab}-{name}"), name: name.to_owned(), holder: None }
}

/// Builds the mesh, tries it, takes it down.
pub fn run(lab: &mut Lab) -> Result<String> {
    let result = try_it(lab);
    netns::remove(namespaces(&lab.name))?;
    result
}

fn try_it(lab: &Lab) -> Result<String> {
    let directory = lab.directory.join("nat");
    fs::create_dir_all(directory.join("logs"))?;
    let network = build(&lab.name, &directory, Shape::default(), &["z"])?;
    let mut agents = lab.agents.for_another(&directory, &network)?;
    let behind_nat = [("persistent-keepalive", "5")];
    for node in &network.nodes {
        let annotations = if node.public.is_some() { &[][..] } else { &behind_nat };
        agents.write_node(node, annotations)?;
        agents.start(node)?;
    }
    let result = meet(&agents, &network).and_then(|met| {
        Ok(format!("{met} {}", deployed_state::mesh_as_deployed(&network, &agents, CAUSED)?))
    });
    for node in &network.nodes {
        agents.stop(node.name(), nix::sys::signal::Signal::SIGKILL)?;
    }
    result
}

/// x and y learn each other's public endpoint from z, and reach it there.
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
        let endpoints = network.node(name)?.netns.sh("wg show kilo0 endpoints")?;
        ensure!(endpoints.contains(other), "{name} reaches the other elsewhere:\n{endpoints}");
    }
    Ok(format!("(all pods meet after {:.1} s)", took.as_secs_f32()))
}

/// How x and y are connected.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Kind of NAT in front of each.
    pub kinds: [Kind; 2],
    /// Both are behind the same NAT, in networks that do not reach each other.
    pub is_shared: bool,
    /// Family of the nodes' addresses.
    pub underlay: Underlay,
    /// All have IPv6 beside IPv4.
    pub has_both: bool,
    /// The location of x has a second node, and those with public addresses are one location.
    pub has_second: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            kinds: [Kind::PortRestricted; 2],
            is_shared: false,
            underlay: Underlay::V4,
            has_both: false,
            has_second: false,
        }
    }
}

impl Shape {
    /// This shape in each of its families, the nodes' own first.
    fn families(self) -> impl Iterator<Item = Self> {
        let other = self.has_both.then_some(Self { underlay: Underlay::V6, ..self });
        std::iter::once(self).chain(other)
    }

    /// A public address.
    fn public(self, number: u8) -> IpAddr {
        self.underlay.address(Ipv4Addr::new(203, 0, 113, number))
    }

    /// A private address behind a NAT.
    fn private(self, number: u8, host: u8) -> IpAddr {
        match self.underlay {
            Underlay::V4 => Ipv4Addr::new(192, 168, number, host).into(),
            Underlay::V6 => {
                Ipv6Addr::new(0x2001, 0xdb8, 0xa0 + u16::from(number), 0, 0, 0, 0, host.into()).into()
            }
        }
    }

    /// Number of the NAT in front of an end; a shared NAT is the first.
    const fn nat(self, number: u8) -> u8 {
        if self.is_shared { 1 } else { number }
    }
}

const ENDS: [(&str, u8); 2] = [("x", 1), ("y", 2)];
/// The second node of x's location: its name, and the number of its pods' network.
const SECOND: (&str, u8) = ("x2", 9);

/// Builds x and y with this shape, and leaders with public addresses.
pub fn build(lab: &str, directory: &Path, shape: Shape, public: &[&'static str]) -> Result<Network> {
    for netns in namespaces(lab) {
        Netns::create(lab, &netns.name)?;
    }
    let internet = planned(lab, "internet");
    for bridge in ["inet", "lan-z"] {
        internet.ip(&format!("link add {bridge} type bridge\nlink set {bridge} up\n"))?;
    }
    let mut nodes = Vec::new();
    for (name, number) in ENDS {
        let nat = planned(lab, &format!("nat-{}", ENDS[usize::from(shape.nat(number)) - 1].0));
        if shape.nat(number) == number {
            port(&nat, "wan", &internet, (&nat.name, "inet"))?;
            shape.families().try_for_each(|shape| address(&nat, "wan", shape.public(number)))?;
        }
        let lan = format!("lan-{name}");
        nat.ip(&format!("link add {lan} type bridge\nlink set {lan} up\n"))?;
        shape.families().try_for_each(|shape| address(&nat, &lan, shape.private(number, 1)))?;
        let second = (shape.has_second && name == ENDS[0].0).then_some((SECOND, 3));
        for ((name, pods), host) in [((name, number), 2)].into_iter().chain(second) {
            let (private, gateway) = (shape.private(number, host), shape.private(number, 1));
            let mut node = node(lab, name, private, gateway, None, pods);
            port(&node.netns, "eth0", &nat, (&format!("port-{name}"), &lan))?;
            for shape in shape.families() {
                address(&node.netns, "eth0", shape.private(number, host))?;
                node.netns.ip(&format!("route add default via {}\n", shape.private(number, 1)))?;
            }
            finish(&mut node, directory)?;
            nodes.push(node);
        }
    }
    for (name, number) in public.iter().zip(3u8..) {
        let public = shape.public(number);
        let private = if shape.has_second { shape.private(3, number) } else { public };
        let mut node = node(lab, name, private, shape.private(number, 1), Some(public), number);
        port(&node.netns, "eth0", &internet, (name, "inet"))?;
        if shape.has_second {
            port(&node.netns, "eth1", &internet, (&format!("private-{name}"), "lan-z"))?;
            address(&node.netns, "eth1", private)?;
        }
        shape.families().try_for_each(|shape| address(&node.netns, "eth0", shape.public(number)))?;
        finish(&mut node, directory)?;
        nodes.push(node);
    }
    for (name, number) in ENDS.into_iter().filter(|(_, number)| shape.nat(*number) == *number) {
        shape.families().try_for_each(|shape| become_nat(lab, shape, name, number))?;
    }
    if let Some(shape) = shape.families().find(|shape| shape.underlay == Underlay::V6) {
        route_v6(lab, shape, public)?;
    }
    Ok(Network { router: internet, nodes, ..Network::plan(lab, shape.underlay) })
}

fn node(lab: &str, name: &str, private: IpAddr, gateway: IpAddr, public: Option<IpAddr>, number: u8) -> Node {
    Node {
        netns: planned(lab, name),
        pod: planned(lab, &format!("pod-{name}")),
        // x2 is where x is.
        location: format!("site-{}", &name[..1]),
        lan: "inet".to_owned(),
        gateway,
        private,
        public,
        pod_prefix: [10, 42, number],
        dual_stack: false,
    }
}

fn address(netns: &Netns, device: &str, address: IpAddr) -> Result<()> {
    let length = if address.is_ipv4() { "24" } else { "64 nodad" };
    netns.ip(&format!("address add {address}/{length} dev {device}\n"))
}

/// Without translation everybody on the internet needs a route to the ends.
fn route_v6(lab: &str, shape: Shape, public: &[&str]) -> Result<()> {
    for (name, number) in ENDS {
        let gateway = shape.public(shape.nat(number));
        let nats = ENDS.iter().filter(|(other, _)| *other != name).map(|(other, _)| format!("nat-{other}"));
        for from in nats.chain(public.iter().map(|&name| name.to_owned())) {
            let to = shape.private(number, 0);
            planned(lab, &from).ip(&format!("route add {to}/64 via {gateway}\n"))?;
        }
    }
    Ok(())
}

fn finish(node: &mut Node, directory: &Path) -> Result<()> {
    let name = node.name().to_owned();
    {
        node.netns.hold(&directory.join(format!("logs/{name}-namespaces.log")))?;
        cni_conf::install(&node.netns)?;
        node.netns
            .sh("echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding")?;
    }
    Ok(())
}

/// How a NAT maps ports, and what it lets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One public port for all destinations, which lets in everybody.
    FullCone,
    /// One public port, which lets in addresses that were sent to, from any port.
    AddressRestricted,
    /// One public port, which lets in replies.
    PortRestricted,
    /// A random port for each destination, which lets in replies.
    Symmetric,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] =
        [Self::FullCone, Self::AddressRestricted, Self::PortRestricted, Self::Symmetric];

    /// Name for tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullCone => "full cone",
            Self::AddressRestricted => "address-restricted",
            Self::PortRestricted => "port-restricted",
            Self::Symmetric => "symmetric",
        }
    }
}

/// Makes a host on the internet outside the mesh that counts what it receives, ICMP errors separately.
pub fn stranger(lab: &str, name: &str, at: Ipv4Addr) -> Result<Netns> {
    let stranger = planned(lab, name);
    port(&stranger, "eth0", &planned(lab, "internet"), (name, "inet"))?;
    address(&stranger, "eth0", at.into())?;
    stranger.sh(&format!(
        "nft -f - <<'RULES'
         table inet stranger {{
             counter answers {{ }}
             counter unreachable {{ }}
             chain in {{
                 type filter hook prerouting priority 0;
                 icmp type destination-unreachable counter name unreachable accept
                 ip daddr {at} counter name answers
             }}
         }}\nRULES"
    ))?;
    Ok(stranger)
}

/// Makes the network between both NATs drop, or no longer drop, all that one sends to the other.
pub fn block(lab: &str, underlay: Underlay, is_blocked: bool) -> Result<()> {
    let shape = Shape { underlay, ..Shape::default() };
    for ((name, _), (_, other)) in ENDS.into_iter().zip([ENDS[1], ENDS[0]]) {
        let to = match underlay {
            Underlay::V4 => format!("ip daddr {}", shape.public(other)),
            Underlay::V6 => format!("ip6 daddr {}/64", shape.private(other, 0)),
        };
        let drop = format!(
            "table inet between {{\n chain out {{ type filter hook postrouting priority 200; \
             oifname wan {to} drop; }}\n}}\n"
        );
        let rules = "table inet between { }\ndelete table inet between\n";
        let drop = if is_blocked { &*drop } else { "" };
        planned(lab, &format!("nat-{name}")).sh(&format!("nft -f - <<'RULES'\n{rules}{drop}RULES"))?;
    }
    Ok(())
}

/// Makes the router in front of an end a NAT, or with IPv6 a firewall. Unsolicited packets are dropped before
/// they are tracked, or they would block the mapping that they are to meet.
fn become_nat(lab: &str, shape: Shape, name: &str, number: u8) -> Result<()> {
    let nat = planned(lab, &format!("nat-{name}"));
    let behind = ENDS.into_iter().filter(|(_, end)| shape.nat(*end) == number);
    let (mut inward, mut out) = (String::new(), String::new());
    for (_, end) in behind.filter(|_| shape.underlay == Underlay::V4) {
        let (public, private, port) = (shape.public(number), shape.private(end, 2), 45_000 + u16::from(end));
        let kind = shape.kinds[usize::from(end) - 1];
        out += &match kind {
            Kind::Symmetric => {
                format!("oifname wan ip saddr {}/24 masquerade fully-random\n", shape.private(end, 0))
            }
            _ => format!("oifname wan ip saddr {private} udp sport 51820 snat to {public}:{port}\n"),
        };
        inward += &match kind {
            Kind::FullCone => format!("iifname wan udp dport {port} dnat to {private}:51820\n"),
            Kind::AddressRestricted => {
                format!("iifname wan ip saddr @asked udp dport {port} dnat to {private}:51820\n")
            }
            _ => String::new(),
        };
    }
    let translation = match shape.underlay {
        Underlay::V6 => String::new(),
        Underlay::V4 => format!(
            "set asked {{ type ipv4_addr; flags dynamic,timeout; timeout 180s; }}
             chain prerouting {{
                 type nat hook prerouting priority -100;
                 {inward}
             }}
             chain postrouting {{
                 type nat hook postrouting priority 100;
                 {out} oifname wan masquerade
             }}
             chain asks {{
                 type filter hook forward priority -10;
                 oifname wan update @asked {{ ip daddr }}
             }}"
        ),
    };
    let family = if shape.underlay == Underlay::V4 { "ip" } else { "ip6" };
    nat.sh(&format!(
        "echo 1 > /proc/sys/net/ipv4/ip_forward
         echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
         nft -f - <<'RULES'
         table {family} nat-router {{ }}
         delete table {family} nat-router
         table {family} nat-router {{
             {translation}
             chain input {{ type filter hook input priority 0; iifname wan ct state new meta l4proto udp drop; }}
             chain forward {{
                 type filter hook forward priority 0;
                 iifname lan-x oifname lan-y drop
                 iifname lan-y oifname lan-x drop
                 iifname wan ct state new ct status dnat accept
                 iifname wan ct state new drop
             }}
         }}\nRULES"
    ))?;
    Ok(())
}

/// Makes a veth pair: a device, and a port of a bridge in `there`.
fn port(netns: &Netns, device: &str, there: &Netns, (port, bridge): (&str, &str)) -> Result<()> {
    netns.ip(&format!(
        "link add {device} type veth peer name {port} netns {}\nlink set {device} up\n",
        there.id
    ))?;
    there.ip(&format!("link set {port} master {bridge} up\n"))
}
