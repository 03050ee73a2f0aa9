//! The cluster's network: two locations with a LAN each, and a router that translates addresses towards an
//! outside host and counts packets with a pod's address.
//!
//! ```text
//!   site-a 10.11.0.0/24         router        site-b 10.12.0.0/24
//!   a1 .11 (control plane) ──┬── lan-a  lan-b ──┬── b1 .11
//!   a2 .12                 ──┘     │            └── b2 .12
//!   a1 192.0.2.11 ──────── wan 192.0.2.0/24 ─────── b1 192.0.2.21
//!                       outside 203.0.113.10, beyond NAT
//! ```
//!
//! The LANs also have `fd00:11::/64` and `fd00:12::/64`, and the outside host `2001:db8::10`.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, bail};

use crate::{
    lab::netns::{self, Netns},
    report::InClear,
};

/// Prefix of every namespace's name.
pub const NAME: &str = "kilo-cluster";
/// Prefix of pod addresses.
pub const PODS: &str = "10.244.0.0/16";
/// Prefix of Service addresses.
pub const SERVICES: &str = "10.96.0.0/16";
/// IPv6 counterpart of [`PODS`], where the API server has both families.
pub const PODS_V6: &str = "fd00:10:244::/56";
/// IPv6 counterpart of [`SERVICES`].
pub const SERVICES_V6: &str = "fd00:10:96::/112";
/// Address of the outside host.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
/// Source address of translated packets at the outside host.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);

/// The outside host's IPv6 address.
pub const OUTSIDE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x10);
/// IPv6 counterpart of [`ROUTER`].
pub const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// The router's address on the public network.
const WAN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A node's location and addresses.
#[derive(Clone, Debug)]
pub struct Site {
    /// Name of the node: `a1`.
    pub node: String,
    /// `a` or `b`.
    pub letter: char,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its IPv6 address.
    pub address_v6: Ipv6Addr,
    /// The router's address on its LAN.
    pub gateway: Ipv4Addr,
    /// The router's IPv6 address on its LAN.
    pub gateway_v6: Ipv6Addr,
    /// Address on the public network; only the first node of a location has one.
    pub public: Option<Ipv4Addr>,
}

impl Site {
    /// Value of the location annotation.
    pub fn location(&self) -> String {
        format!("site-{}", self.letter)
    }
}

/// The nodes of a cluster, alternating between the locations after the first two, which are in one.
pub fn sites(nodes: u8) -> Vec<Site> {
    let mut sites: Vec<_> = (0..nodes)
        .map(|index| {
            // a1 a2 b1 b2 a3 b3 a4 ...
            let (letter, number) = match index {
                0 | 1 => ('a', index + 1),
                2 | 3 => ('b', index - 1),
                _ => (if index % 2 == 0 { 'a' } else { 'b' }, index / 2 + 1),
            };
            let net = if letter == 'a' { 11 } else { 12 };
            Site {
                node: format!("{letter}{number}"),
                letter,
                address: Ipv4Addr::new(10, net, 0, 10 + number),
                address_v6: lan_v6(net, 10 + number),
                gateway: Ipv4Addr::new(10, net, 0, 1),
                gateway_v6: lan_v6(net, 1),
                public: (number == 1).then(|| Ipv4Addr::new(192, 0, 2, (net - 10) * 10 + 1)),
            }
        })
        .collect();
    sites.sort_by(|one, other| one.node.cmp(&other.node));
    sites
}

/// An address of `fd00:11::/64` or `fd00:12::/64`.
fn lan_v6(net: u8, host: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x10 + u16::from(net - 10), 0, 0, 0, 0, 0, u16::from(host))
}

fn netns(name: &str) -> Netns {
    Netns { name: name.to_owned(), id: format!("{NAME}-{name}"), holder: None }
}

/// Network namespace of the router, which joins the networks.
pub fn router() -> Netns {
    netns("router")
}

/// Network namespace of the outside host, which knows nothing of the cluster.
pub fn outside() -> Netns {
    netns("outside")
}

/// The network namespace of a node.
pub fn node(name: &str) -> Netns {
    netns(name)
}

/// Creates the router and the outside host.
pub fn build() -> Result<()> {
    for name in ["router", "outside"] {
        Netns::create(NAME, name)?;
    }
    let (router, outside) = (router(), outside());
    // Otherwise a bridge takes the lowest address of its ports, and changes it when that node's cable goes.
    router.ip(&format!(
        "link add lan-a address 02:00:00:00:02:0a type bridge\nlink set lan-a up\n\
         link add lan-b address 02:00:00:00:02:0b type bridge\nlink set lan-b up\n\
         link add wan address 02:00:00:00:02:0d type bridge\nlink set wan up\naddress add {WAN}/24 dev wan\n\
         address add 10.11.0.1/24 dev lan-a\naddress add 10.12.0.1/24 dev lan-b\n\
         address add {}/64 dev lan-a nodad\naddress add {}/64 dev lan-b nodad\n\
         link add outside type veth peer name eth0 netns {}\n\
         address add {ROUTER}/24 dev outside\naddress add {ROUTER_V6}/64 dev outside nodad\n\
         link set outside up\n",
        lan_v6(11, 1),
        lan_v6(12, 1),
        outside.id
    ))?;
    outside.ip(&format!(
        "address add {OUTSIDE}/24 dev eth0\naddress add {OUTSIDE_V6}/64 dev eth0 nodad\nlink set eth0 up\n\
         route add 10.11.0.0/16 via {ROUTER}\nroute add 10.12.0.0/16 via {ROUTER}\n\
         route add {}/64 via {ROUTER_V6}\nroute add {}/64 via {ROUTER_V6}\n",
        lan_v6(11, 0),
        lan_v6(12, 0)
    ))?;
    router.sh(&RULES.replace("PODS_V6", PODS_V6).replace("PODS", PODS))?;
    Ok(())
}

/// Creates a node's namespace and joins it to its LAN.
pub fn connect(site: &Site) -> Result<()> {
    let name = &site.node;
    Netns::create(NAME, name)?;
    router().ip(&format!(
        "link add {name} type veth peer name eth0 netns {NAME}-{name}\nlink set {name} master lan-{} up\n",
        site.letter
    ))?;
    node(name).ip(&format!(
        "address add {}/24 dev eth0\naddress add {}/64 dev eth0 nodad\nlink set eth0 up\n\
         route add default via {}\n",
        site.address, site.address_v6, site.gateway_v6
    ))?;
    let Some(public) = site.public else {
        return node(name).ip(&format!("route add default via {}\n", site.gateway));
    };
    join_public(site, public)
}

/// Gives a node this address on the public network, and a private line to the LANs.
pub fn join_public(site: &Site, public: Ipv4Addr) -> Result<()> {
    let name = &site.node;
    router().ip(&format!(
        "link add {name}-wan type veth peer name eth1 netns {NAME}-{name}\nlink set {name}-wan master wan up\n"
    ))?;
    // Until the mesh is up, a private line reaches the other location. Connections made then continue
    // through the mesh, because they use the node's private address.
    node(name).ip(&format!(
        "address add {public}/24 dev eth1\nlink set eth1 up\nroute replace default via {WAN}\n\
         route add 10.11.0.0/16 via {gateway}\nroute add 10.12.0.0/16 via {gateway}\n",
        gateway = site.gateway
    ))
}

/// Takes back what [`join_public`] has done for a node without a public address of its own.
pub fn leave_public(site: &Site) -> Result<()> {
    router().ip(&format!("link delete {}-wan\n", site.node))?;
    node(&site.node).ip(&format!(
        "route replace default via {gateway}\nroute delete 10.11.0.0/16 via {gateway}\n\
         route delete 10.12.0.0/16 via {gateway}\n",
        gateway = site.gateway
    ))
}

/// Removes a node's cable and namespace.
pub fn disconnect(name: &str) -> Result<()> {
    // The cable goes at once, the namespace when its last process has ended.
    for cable in [name.to_owned(), format!("{name}-wan")] {
        let _ = router().ip(&format!("link delete {cable}\n"));
    }
    netns::remove([node(name)])
}

/// Lets no UDP datagram pass between two nodes, over the public network or the private line.
pub fn block(sites: [&Site; 2]) -> Result<()> {
    let set = |site: &Site| {
        let public = site.public.map(|address| format!(", {address}")).unwrap_or_default();
        format!("{{ {}{public} }}", site.address)
    };
    let rule = |from: &Site, to: &Site| {
        format!(
            "ip saddr {} ip daddr {} meta l4proto udp counter name blocked drop\n\
             ip6 saddr {} ip6 daddr {} meta l4proto udp counter name blocked drop\n",
            set(from),
            set(to),
            from.address_v6,
            to.address_v6
        )
    };
    let [one, other] = sites;
    // What is routed passes the one, what is bridged the other.
    let table = |family: &str| {
        format!(
            "table {family} blocked {{\ncounter blocked {{ }}\nchain forward {{\n\
             type filter hook forward priority 0; policy accept;\n{}{}}}\n}}\n",
            rule(one, other),
            rule(other, one)
        )
    };
    router().sh(&format!("nft -f - <<'END'\n{}{}END", table("inet"), table("bridge"))).map(drop)
}

/// Datagrams that [`block`] has dropped.
pub fn blocked() -> Result<u64> {
    packets(&router().sh("nft list table inet blocked; nft list table bridge blocked")?)
}

/// Takes back what [`block`] has done, if anything.
pub fn unblock() -> Result<()> {
    let table = |family: &str| format!("add table {family} blocked\ndelete table {family} blocked\n");
    router().sh(&format!("nft -f - <<'END'\n{}{}END", table("inet"), table("bridge"))).map(drop)
}

/// Packets with a pod's address that the router has seen, and dropped.
pub fn clear_packets() -> Result<u64> {
    packets(&router().sh("nft list counters table inet cluster; nft list counters table bridge cluster")?)
}

/// The sum of the counters that nft lists, of which there are two at least.
fn packets(listed: &str) -> Result<u64> {
    let words: Vec<_> = listed.split_whitespace().collect();
    let counts: Vec<u64> = words
        .windows(2)
        .filter(|pair| pair[0] == "packets")
        .filter_map(|pair| pair[1].parse().ok())
        .collect();
    if counts.len() < 2 {
        bail!("the router has no counters");
    }
    Ok(counts.iter().sum())
}

/// Fails with [`InClear`], which gets no second try, when there were cleartext packets of pods.
pub fn none_in_clear(count: u64) -> Result<()> {
    match count {
        0 => Ok(()),
        _ => {
            Err(InClear(format!("{count} packets with pods' addresses were on the network in cleartext"))
                .into())
        }
    }
}

/// Starts to count packets from one node's pods at the cables of all nodes, or only at those of `sender`;
/// `pods` are the node's prefixes, separated by spaces.
pub fn count_from(pods: &str, sender: Option<&str>) -> Result<()> {
    let cables = sender.map(|name| format!("iifname {{ \"{name}\", \"{name}-wan\" }} ")).unwrap_or_default();
    let rule = |prefix: &str| {
        let family = if prefix.contains(':') { "ip6" } else { "ip" };
        format!("{cables}{family} saddr {prefix} counter name own\n")
    };
    let rules: String = pods.split_whitespace().map(rule).collect();
    let table = "add table bridge one\ndelete table bridge one\ntable bridge one {\ncounter own { }\nchain c {\n\
                 type filter hook prerouting priority -300\n";
    router().sh(&format!("nft -f - <<'END'\n{table}{rules}}}\n}}\nEND")).map(drop)
}

/// Ends the count and returns it.
pub fn counted() -> Result<u64> {
    let text = router().sh("nft list counters table bridge one; nft delete table bridge one")?;
    let mut words = text.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).and_then(|count| count.parse().ok()).context("the router has no counter")
}

/// Counts cleartext packets of pods where the router sees them: between its interfaces and on its bridges.
const RULES: &str = r#"
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
for f in /proc/sys/net/bridge/bridge-nf-call-ip*; do test -e $f && echo 0 > $f; done
nft -f - <<'END'
table inet cluster {
    counter clear { }
    chain prerouting {
        type filter hook prerouting priority -300; policy accept;
        ip saddr PODS counter name clear drop
        ip daddr PODS counter name clear drop
        ip6 saddr PODS_V6 counter name clear drop
        ip6 daddr PODS_V6 counter name clear drop
    }
}
table bridge cluster {
    counter clear { }
    chain forward {
        type filter hook forward priority 0; policy accept;
        ip saddr PODS counter name clear drop
        ip daddr PODS counter name clear drop
        ip6 saddr PODS_V6 counter name clear drop
        ip6 daddr PODS_V6 counter name clear drop
    }
}
table inet nat {
    chain postrouting {
        type nat hook postrouting priority 100;
        oifname "outside" masquerade
        oifname "wan" ip saddr { 10.11.0.0/24, 10.12.0.0/24 } masquerade
    }
}
END
"#;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_in_both_locations() {
        let names = |count| sites(count).into_iter().map(|site| site.node).collect::<Vec<_>>();
        assert_eq!(names(3), ["a1", "a2", "b1"]);
        assert_eq!(names(6), ["a1", "a2", "a3", "b1", "b2", "b3"]);
        assert_eq!(sites(4).last().unwrap().address, Ipv4Addr::new(10, 12, 0, 12));
    }
}
