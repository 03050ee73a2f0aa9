//! The lab's network: two locations on LANs of their own, a router between
//! them that translates addresses, an outside host, a laptop, pods.
//!
//! Pods have addresses of both families. The nodes' network is IPv4, or with
//! `--underlay v6` IPv6: 10.S.N.H becomes `fd00:S:N::H`, 192.0.2.H `2001:db8:2::H`.
//!
//! ```text
//!   site-a 10.1.0.0/24          router           site-b 10.2.0.0/24
//!   a1 (leader) .11 ──┐    ┌── lan-a  lan-b ──┐  ┌── b1 (leader) .11
//!   a2 .12          ──┴────┘  │               └──┴── b2 .12
//!   a3 10.1.1.13 ──── lan-c ──┘ (site-a, too)
//!   a1 192.0.2.11 ─────────── wan 192.0.2.0/24 ───── b1 192.0.2.21
//!   outside 198.51.100.2 ──── beyond NAT     laptop 172.16.9.2 behind NAT
//!   printer 10.1.0.200 on a1's LAN           office 10.77.0.2 behind the laptop
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{cni_conf, netns::Netns};

/// Family of the addresses nodes reach each other by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Underlay {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

impl Underlay {
    /// The same address in this family.
    pub fn address(self, v4: Ipv4Addr) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(v4),
            Self::V6 => IpAddr::V6(v6_of(v4)),
        }
    }
}

/// The IPv6 twin of an address of the lab.
fn v6_of(v4: Ipv4Addr) -> Ipv6Addr {
    match v4.octets() {
        [10, site, net, host] => Ipv6Addr::new(0xfd00, site.into(), net.into(), 0, 0, 0, 0, host.into()),
        [192, .., host] => Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, host.into()),
        [172, .., host] => Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, host.into()),
        [.., host] => Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, host.into()),
    }
}

/// A node of the lab: one network namespace for the host, and one for its only pod. Addresses are of the underlay's
/// family.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Node {
    /// Its namespaces.
    pub netns: Netns,
    /// Network namespace of its pod.
    pub pod: Netns,
    /// Value of the region label.
    pub location: String,
    /// Bridge of its LAN on the router.
    pub lan: String,
    /// Address of the router on that LAN.
    pub gateway: IpAddr,
    /// Address on the LAN.
    pub private: IpAddr,
    /// Address on the router's public network, which only leaders have.
    pub public: Option<IpAddr>,
    /// First three octets of its pod CIDR (/24).
    pub pod_prefix: [u8; 3],
    /// Pods have IPv6 addresses, too.
    pub dual_stack: bool,
}

impl Node {
    /// Name of the Node object, and of the host's namespace within the lab (`a1`).
    pub fn name(&self) -> &str {
        &self.netns.name
    }

    /// Address `host` in the node's pod CIDR.
    pub fn pod_address(&self, host: u8) -> Ipv4Addr {
        let [a, b, c] = self.pod_prefix;
        Ipv4Addr::new(a, b, c, host)
    }

    /// Address of the node's pod.
    pub fn pod_ip(&self) -> Ipv4Addr {
        self.pod_address(2)
    }

    /// IPv6 address the node's pod has where pods have both families.
    pub fn pod_ip6(&self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd42, 0, self.pod_prefix[2].into(), 0, 0, 0, 0, 2)
    }

    /// Addresses of the node's pod, IPv4 first.
    pub fn pod_ips(&self) -> Vec<IpAddr> {
        let v6 = self.dual_stack.then(|| self.pod_ip6().into());
        std::iter::once(self.pod_ip().into()).chain(v6).collect()
    }

    /// True for its private address and its pods' addresses.
    pub fn has(&self, address: IpAddr) -> bool {
        let is_of_a_pod = match address {
            IpAddr::V4(v4) => v4.octets().starts_with(&self.pod_prefix),
            IpAddr::V6(v6) => v6.segments()[..4] == self.pod_ip6().segments()[..4],
        };
        is_of_a_pod || address == self.private
    }

    /// The node's pod CIDRs, IPv4 first.
    pub fn pod_cidrs(&self) -> Vec<String> {
        let v6 = self.dual_stack.then(|| format!("fd42:0:{:x}::/64", self.pod_prefix[2]));
        std::iter::once(format!("{}/24", self.pod_address(0))).chain(v6).collect()
    }
}

/// Which nodes the lab has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shape {
    /// Three and two, one with a public address in each location.
    #[default]
    Plain,
    /// The same nodes, all with public addresses.
    Public,
    /// Four with public addresses and twelve without in one location, and one in the other.
    Crowd,
    /// Three in one location, one in the other, and [`MEMBERS`] more in the first that [`crate::members`]
    /// emulates.
    Large,
}

/// Name, location, bridge of its LAN, private and public address.
type NodeSpec = (String, &'static str, &'static str, Ipv4Addr, Option<Ipv4Addr>);

/// Members of [`Shape::Crowd`].
pub const CROWD: u8 = 12;

/// Members of [`Shape::Large`] that have no namespace of their own.
pub const MEMBERS: u16 = 1_000;
/// Their private addresses, on the LAN of a1.
pub const MEMBERS_NET: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 1, 4, 0), 22);
/// Bridge of that LAN.
const MEMBERS_LAN: &str = "lan-a";

/// Private address of a member that has no namespace of its own, by its number.
pub fn member_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(MEMBERS_NET.0.to_bits() + 1 + u32::from(number))
}

impl Shape {
    /// Every shape.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Public, Self::Crowd, Self::Large];

    /// The nodes, sorted by name. Except in a location of many, a router stands between a3 and the other
    /// nodes of its location.
    fn nodes(self) -> Vec<NodeSpec> {
        let public = |host: u8| Some(Ipv4Addr::new(192, 0, 2, host));
        let a = |host: u8| (format!("a{host}"), "site-a", "lan-a", Ipv4Addr::new(10, 1, 0, 10 + host));
        let b = |host: u8| (format!("b{host}"), "site-b", "lan-b", Ipv4Addr::new(10, 2, 0, 10 + host));
        let with = |(name, location, lan, private), public| (name, location, lan, private, public);
        let a3 = || ("a3".to_owned(), "site-a", "lan-c", Ipv4Addr::new(10, 1, 1, 13));
        match self {
            Self::Plain => vec![
                with(a(1), public(11)),
                with(a(2), None),
                with(a3(), None),
                with(b(1), public(21)),
                with(b(2), None),
            ],
            Self::Public => vec![
                with(a(1), public(11)),
                with(a(2), public(12)),
                with(a3(), public(13)),
                with(b(1), public(21)),
                with(b(2), public(22)),
            ],
            Self::Crowd => {
                let gateways = (1..=4).map(|host| with(a(host), public(10 + host)));
                let members = (1..=CROWD).map(|member| {
                    (format!("m{member:02}"), "site-a", "lan-a", Ipv4Addr::new(10, 1, 0, 100 + member), None)
                });
                gateways.chain([with(b(1), public(21))]).chain(members).collect()
            }
            Self::Large => {
                vec![with(a(1), public(11)), with(a(2), None), with(a(3), None), with(b(1), public(21))]
            }
        }
    }
}

/// Address of the outside host.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// Address the outside host sees for what the router translates.
pub const ROUTER_OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The same in an IPv6 underlay.
pub const ROUTER_OUTSIDE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, 1);
/// VPN address of the laptop.
pub const LAPTOP: Ipv4Addr = Ipv4Addr::new(10, 5, 0, 1);
/// IPv6 VPN address of the laptop.
pub const LAPTOP6: Ipv6Addr = Ipv6Addr::new(0xfd05, 0, 0, 0, 0, 0, 0, 1);
/// Address of the printer.
pub const PRINTER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 200);
/// Address of the machine behind the laptop.
pub const OFFICE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// IPv6 address of the outside host.
pub const OUTSIDE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, 2);

/// Every namespace of the lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// Family of the nodes' own addresses.
    pub underlay: Underlay,
    /// Connects all networks.
    pub router: Netns,
    /// A host that knows nothing of the mesh.
    pub outside: Netns,
    /// A VPN peer behind NAT.
    pub laptop: Netns,
    /// A machine on the LAN of a1 that knows nothing of the mesh, and no gateway.
    pub printer: Netns,
    /// A machine behind the laptop.
    pub office: Netns,
    /// The nodes, sorted by name.
    pub nodes: Vec<Node>,
    /// Another CNI provides the pods' network, and masquerades what leaves it.
    pub foreign_cni: bool,
    /// Leaders' private addresses are WireGuard's endpoints.
    pub private_endpoints: bool,
    /// Which nodes the lab has.
    pub shape: Shape,
    /// Namespace of the members that have none of their own.
    pub members: Option<Netns>,
}

impl Network {
    /// Every namespace, the router first.
    pub fn namespaces(&self) -> Vec<Netns> {
        let mut namespaces = vec![
            self.router.clone(),
            self.outside.clone(),
            self.laptop.clone(),
            self.printer.clone(),
            self.office.clone(),
        ];
        for node in &self.nodes {
            namespaces.push(node.pod.clone());
            namespaces.push(node.netns.clone());
        }
        namespaces.extend(self.members.clone());
        namespaces
    }

    /// How many nodes the mesh has.
    pub fn size(&self) -> usize {
        self.nodes.len() + self.members.as_ref().map_or(0, |_| usize::from(MEMBERS))
    }

    /// The namespace of that name.
    pub fn netns(&self, name: &str) -> Result<Netns> {
        let namespaces = self.namespaces();
        match namespaces.iter().find(|netns| netns.name == name) {
            Some(netns) => Ok(netns.clone()),
            None => {
                let names: Vec<_> = namespaces.iter().map(|netns| netns.name.as_str()).collect();
                bail!("{name:?} is not in the lab; choose one of: {}", names.join(", "))
            }
        }
    }

    /// The node of that name.
    ///
    /// # Errors
    /// When the lab has no such node.
    pub fn node(&self, name: &str) -> Result<&Node> {
        match self.nodes.iter().find(|node| node.name() == name) {
            Some(node) => Ok(node),
            None => bail!("{name:?} is not a node of the lab"),
        }
    }

    /// WireGuard address that agents give a node, numbered in the order of locations; `None` when it does not
    /// lead.
    pub fn wireguard_address(&self, node: &Node) -> Option<IpAddr> {
        let mut locations = std::collections::BTreeSet::new();
        let leaders = self.nodes.iter().filter(|node| node.public.is_some());
        let mut leaders = leaders.filter(|node| locations.insert(&node.location)).zip(1..);
        let (_, number) = leaders.find(|(leader, _)| leader.name() == node.name())?;
        Some(Ipv4Addr::new(10, 4, 0, number).into())
    }

    /// Names the namespaces without creating them, so that a half-built lab
    /// can be taken down.
    pub fn plan(lab: &str, underlay: Underlay) -> Self {
        Self::shaped(lab, underlay, Shape::Plain)
    }

    /// As [`Self::plan`], with other nodes.
    pub fn shaped(lab: &str, underlay: Underlay, shape: Shape) -> Self {
        let netns = |name: &str| Netns { name: name.to_owned(), id: format!("{lab}-{name}"), holder: None };
        let nodes = shape
            .nodes()
            .into_iter()
            .zip(1u8..)
            .map(|((name, location, lan, private, public), number)| Node {
                netns: netns(&name),
                pod: netns(&format!("pod-{name}")),
                location: location.to_owned(),
                lan: lan.to_owned(),
                gateway: {
                    let [a, b, c, _] = private.octets();
                    underlay.address(Ipv4Addr::new(a, b, c, 1))
                },
                private: underlay.address(private),
                public: public.map(|public| underlay.address(public)),
                pod_prefix: [10, 42, number],
                dual_stack: true,
            })
            .collect();
        Self {
            underlay,
            router: netns("router"),
            outside: netns("outside"),
            laptop: netns("laptop"),
            printer: netns("printer"),
            office: netns("office"),
            nodes,
            foreign_cni: false,
            private_endpoints: false,
            shape,
            members: (shape == Shape::Large).then(|| netns("members")),
        }
    }

    /// Lets another CNI provide the pods' network, in one family.
    pub fn give_pods_to_another_cni(&mut self) {
        self.foreign_cni = true;
        self.nodes.iter_mut().for_each(|node| node.dual_stack = false);
    }

    /// Creates every namespace, link, address and route.
    pub fn build(&mut self, lab: &str, logs: &std::path::Path) -> Result<()> {
        for netns in self.namespaces() {
            Netns::create(lab, &netns.name)?;
        }
        self.router.ip("link add lan-a address 02:00:00:00:01:0a type bridge\n\
             link add lan-b address 02:00:00:00:01:0b type bridge\n\
             link add lan-c address 02:00:00:00:01:0c type bridge\n\
             link add wan address 02:00:00:00:01:0d type bridge\n\
             link set lan-a up\nlink set lan-b up\nlink set lan-c up\nlink set wan up\n\
             address add 10.1.0.1/24 dev lan-a\naddress add 10.2.0.1/24 dev lan-b\n\
             address add 10.1.1.1/24 dev lan-c\naddress add fd00:1:1::1/64 dev lan-c nodad\n\
             address add fd00:1::1/64 dev lan-a nodad\naddress add fd00:2::1/64 dev lan-b nodad\n\
             address add 2001:db8:2::1/64 dev wan nodad\naddress add 192.0.2.1/24 dev wan\n")?;
        self.attach(&self.outside, "eth0", "outside", None)?;
        self.attach(&self.laptop, "eth0", "laptop", None)?;
        self.router.ip(
            "address add 198.51.100.1/24 dev outside\naddress add 172.16.9.1/24 dev laptop\n\
             address add 2001:db8:51::1/64 dev outside nodad\naddress add 2001:db8:9::1/64 dev laptop nodad\n",
        )?;
        self.outside.ip(&format!(
            "address add {OUTSIDE}/24 dev eth0\nroute add 192.0.2.0/24 via 198.51.100.1\n\
             address add {OUTSIDE6}/64 dev eth0 nodad\nroute add 2001:db8:2::/64 via 2001:db8:51::1\n"
        ))?;
        self.laptop.ip("address add 172.16.9.2/24 dev eth0\nroute add default via 172.16.9.1\n\
             address add 2001:db8:9::2/64 dev eth0 nodad\nroute add default via 2001:db8:9::1\n")?;
        self.attach(&self.printer, "eth0", "printer", Some("lan-a"))?;
        self.printer.ip(&format!("address add {PRINTER}/24 dev eth0\n"))?;
        self.laptop.ip(&format!(
            "link add office type veth peer name eth0 netns {}\nlink set office up\n\
             address add 10.77.0.1/24 dev office\n",
            self.office.id
        ))?;
        self.office.ip(&format!(
            "link set eth0 up\naddress add {OFFICE}/24 dev eth0\nroute add default via 10.77.0.1\n"
        ))?;
        self.router.sh(ROUTER_RULES)?;
        self.laptop.hold(&logs.join("laptop-namespaces.log"))?;
        self.laptop.sh("echo 1 > /proc/sys/net/ipv4/ip_forward")?;
        for node in &mut self.nodes {
            node.netns.hold(&logs.join(format!("{}-namespaces.log", node.netns.name)))?;
        }
        for node in &self.nodes {
            self.build_node(node)?;
        }
        if let Some(members) = &self.members {
            self.attach(members, "eth0", "members", Some(MEMBERS_LAN))?;
            let addresses = (0..MEMBERS)
                .map(|number| format!("address add {}/{} dev eth0\n", member_address(number), MEMBERS_NET.1));
            members
                .ip(&addresses.chain(["route add 10.1.0.0/24 dev eth0\n".to_owned()]).collect::<String>())?;
        }
        Ok(())
    }

    /// Joins `netns` to the router by a veth pair, and to a bridge there.
    pub fn attach(
        &self,
        netns: &Netns,
        device: &str,
        router_device: &str,
        bridge: Option<&str>,
    ) -> Result<()> {
        netns.ip(&format!(
            "link add {device} type veth peer name {router_device} netns {}\nlink set {device} up\n",
            self.router.id
        ))?;
        let master = bridge.map(|bridge| format!(" master {bridge}")).unwrap_or_default();
        self.router.ip(&format!("link set {router_device}{master} up\n"))
    }

    /// Lines of `ip` for a node's routes, with this verb.
    fn routes(&self, node: &Node, verb: &str) -> String {
        let gateway = node.gateway;
        let (net, length) = MEMBERS_NET;
        let members = self.members.iter().filter(|_| node.lan == MEMBERS_LAN);
        let members = members.map(|_| format!("route {verb} {net}/{length} dev eth0\n"));
        if node.public.is_none() {
            return members.chain([format!("route {verb} default via {gateway}\n")]).collect();
        }
        // The rest of the location is not beyond the public network.
        let other_lans =
            self.nodes.iter().filter(|other| other.location == node.location && other.lan != node.lan);
        let within = other_lans.map(|other| format!("route {verb} {} via {gateway}\n", other.private));
        let public = self.underlay.address(Ipv4Addr::new(192, 0, 2, 1));
        let elsewhere = self.nodes.iter().filter(|other| {
            self.private_endpoints && other.location != node.location && other.public.is_some()
        });
        let elsewhere = elsewhere.filter_map(|other| match other.private {
            // Both LANs of a location.
            IpAddr::V4(address) => ipnet::Ipv4Net::new(address, 23).ok(),
            IpAddr::V6(_) => None,
        });
        let elsewhere = elsewhere.map(|net| format!("route {verb} {} via {gateway}\n", net.trunc()));
        members
            .chain(within)
            .chain(elsewhere)
            .chain([format!("route {verb} default via {public}\n")])
            .collect()
    }

    /// Gives a node back the routes that went with its links.
    pub fn restore_routes(&self, node: &Node) -> Result<()> {
        node.netns.ip(&self.routes(node, "replace"))
    }

    fn build_node(&self, node: &Node) -> Result<()> {
        let name = node.name();
        self.attach(&node.netns, "eth0", &format!("{name}-lan"), Some(&node.lan))?;
        let (length, nodad) = if self.underlay == Underlay::V6 { (64, " nodad") } else { (24, "") };
        let mut batch = format!("address add {}/{length} dev eth0{nodad}\n", node.private);
        if let Some(public) = node.public {
            self.attach(&node.netns, "eth1", &format!("{name}-wan"), Some("wan"))?;
            batch += &format!("address add {public}/{length} dev eth1{nodad}\n");
        }
        batch += &self.routes(node, "add");
        node.netns.ip(&batch)?;
        cni_conf::install(&node.netns)?;
        // As the manifests require of nodes: the agent cannot write there.
        node.netns.sh(
            "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding; \
             for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $d; done",
        )?;
        Ok(())
    }
}

/// The router forwards, keeps the two LANs apart (as the Internet does), translates private addresses, and
/// counts what should never be there: a packet with a pod's address in cleartext. (`clear` sees what ports of a
/// LAN send each other.)
const ROUTER_RULES: &str = r#"
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
# A LAN is a switch: what it carries never meets the router's rules.
for f in /proc/sys/net/bridge/bridge-nf-call-ip*; do test -e $f && echo 0 > $f; done
nft -f - <<'RULES'
table inet lab {
    counter clear-pod-traffic { }
    # Before routing: there is no route to pods here.
    chain prerouting {
        type filter hook prerouting priority raw; policy accept;
        ip saddr 10.42.0.0/16 counter name clear-pod-traffic drop
        ip daddr 10.42.0.0/16 counter name clear-pod-traffic drop
        ip6 saddr fd42::/16 counter name clear-pod-traffic drop
        ip6 daddr fd42::/16 counter name clear-pod-traffic drop
    }
    chain forward {
        type filter hook forward priority 0; policy accept;
        iifname { "lan-a", "lan-c" } oifname "lan-b*" drop
        iifname "lan-b*" oifname { "lan-a", "lan-c" } drop
        iifname { "wan", "b1-ppp", "laptop", "outside" } oifname "lan-*" ct state new drop
    }
}
table ip6 lab-nat {
    chain postrouting {
        type nat hook postrouting priority 100;
        oifname { "wan", "outside" } ip6 saddr { fd00::/16, 2001:db8:9::/64 } masquerade
    }
}
table ip lab-nat {
    chain postrouting {
        type nat hook postrouting priority 100;
        oifname { "wan", "b1-ppp", "outside" } ip saddr { 10.1.0.0/23, 10.2.0.0/24, 172.16.9.0/24 } masquerade
    }
}
RULES
"#;
