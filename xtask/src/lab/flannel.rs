//! The kernel's state on nodes with flannel's VXLAN backend, the CNI
//! configuration its plugin hands on, and a cloud that drops IP protocol 4.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    Lab,
    checks::{self, Check, no_drops, nothing_in_clear},
    cni, counters, matrix,
    network::{Network, Node},
};

/// Flags of the agents, as in the manifests beside flannel.
pub const FLAGS: &[&str] = &["--compatibility=flannel", "--cni=false", "--local=false"];

/// What is checked when the mesh stands.
pub const CHECKS: &[Check] = &[
    ("members steer to their leader, and flannel carries what stays in the location", ways),
    ("no pod packet is seen in clear between the locations", nothing_in_clear),
    ("no mesh packet was dropped on the way", no_drops),
    ("the cloud dropped no IPIP, though it drops what there is", nothing_for_the_cloud),
    ("IPIP to a leader that itself sends VXLAN travels inside flannel's packets", ipip_inside),
    ("flannel's routes inside the location are left alone", routes_inside),
];

/// MTU of flannel's device and of pods: what VXLAN leaves of 1500.
const MTU: u32 = 1450;

/// Sets up every node, and the cloud's rule.
pub fn install(network: &mut Network) -> Result<()> {
    network.give_pods_to_another_cni();
    for node in &network.nodes {
        overlay(network, node)?;
        configure_pods(node)?;
    }
    forbid_ipip(network)
}

/// Hardware address of the node's VXLAN device.
fn hardware_address(node: &Node) -> String {
    format!("02:f1:00:00:00:{:02x}", node.pod_prefix[2])
}

/// The device, and for each other node of the cluster a neighbour, a
/// forwarding entry and a route.
fn overlay(network: &Network, node: &Node) -> Result<()> {
    let own = node.pod_address(0);
    let mut ip = format!(
        "link add flannel.1 address {} mtu {MTU} type vxlan id 1 dev eth0 local {} dstport 8472 nolearning\n\
         address add {own}/32 dev flannel.1\nlink set flannel.1 up\n",
        hardware_address(node),
        node.private,
    );
    let mut bridge = String::new();
    for other in network.nodes.iter().filter(|other| other.name() != node.name()) {
        let (address, hardware) = (other.pod_address(0), hardware_address(other));
        ip += &format!(
            "neighbour add {address} lladdr {hardware} dev flannel.1 nud permanent\n\
             route add {address}/24 via {address} dev flannel.1 onlink\n"
        );
        bridge += &format!("bridge fdb append {hardware} dev flannel.1 dst {}\n", other.private);
    }
    node.space.ip(&ip)?;
    node.space.sh(&bridge)?;
    Ok(())
}

/// Pods on a bridge with addresses of the node's pod CIDR; what leaves the
/// pods' network is masqueraded.
fn configure_pods(node: &Node) -> Result<()> {
    let cidr = node.pod_address(0);
    let conf = serde_json::json!({
        "cniVersion": "0.3.1",
        "name": "cbr0",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "mtu": MTU,
            "isGateway": true,
            "isDefaultGateway": true,
            "hairpinMode": true,
            "ipMasq": false,
            "ipam": { "type": "host-local", "subnet": format!("{cidr}/24") },
        }],
    });
    node.space.sh(&format!(
        "cat > {} <<'CONF'\n{conf}\nCONF\n\
         iptables -t nat -N FLANNEL-POSTRTG\n\
         iptables -t nat -A POSTROUTING -j FLANNEL-POSTRTG\n\
         iptables -t nat -A FLANNEL-POSTRTG -s {cidr}/24 -d 10.42.0.0/16 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG -s 10.42.0.0/16 -d {cidr}/24 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG ! -s 10.42.0.0/16 -d {cidr}/24 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG -s 10.42.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully\n\
         iptables -t nat -A FLANNEL-POSTRTG ! -s 10.42.0.0/16 -d 10.42.0.0/16 -j MASQUERADE --random-fully",
        cni::CONF
    ))?;
    Ok(())
}

/// Between nodes of a LAN (a bridge) and between LANs IPIP is dropped and
/// counted; IPIP inside VXLAN is only counted.
fn forbid_ipip(network: &Network) -> Result<()> {
    // Behind UDP, VXLAN and Ethernet headers of 30 bytes: the protocol of the packet inside.
    let rules = |family: &str| {
        format!(
            "table {family} cloud {{\n counter ipip {{ }}\n counter ipip-inside {{ }}\n chain forward {{\n \
             type filter hook forward priority -10; policy accept;\n \
             meta protocol ip ip protocol {{ 4, 41 }} counter name ipip drop\n \
             meta protocol ip udp dport 8472 @th,312,8 4 counter name ipip-inside\n }}\n}}\n"
        )
    };
    network.router.sh(&format!("nft -f - <<'RULES'\n{}{}RULES", rules("bridge"), rules("inet")))?;
    Ok(())
}

/// What the cloud counted under that name, on LANs and between them.
fn counted(network: &Network, name: &str) -> Result<[u64; 2]> {
    Ok([
        counters::nft(&network.router, &format!("bridge cloud {name}"))?,
        counters::nft(&network.router, &format!("inet cloud {name}"))?,
    ])
}

fn ways(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let metrics = counters::scrape(&node.space)?;
        let count = |name| counters::action(&metrics, name);
        let shown = format!("{}: {metrics:?}", node.name());
        if node.public.is_some() {
            for name in ["encrypt", "decrypt", "transit", "forward"] {
                ensure!(count(name) > 0, "leader counts no {name}; {shown}");
            }
            ensure!(count("steer") == 0, "leader keeps its own packets from flannel; {shown}");
        } else {
            ensure!(
                count("steer") > 0 && count("deliver") > 0,
                "member steers or is brought nothing; {shown}"
            );
            ensure!(count("encrypt") == 0 && count("transit") == 0, "member encrypts; {shown}");
        }
        for direction in ["rx", "tx"] {
            let file = format!("/sys/class/net/flannel.1/statistics/{direction}_packets");
            let packets: u64 = node.space.sh(&format!("cat {file}"))?.trim().parse()?;
            ensure!(packets > 30, "{}: flannel.1 has {packets} packets ({direction})", node.name());
        }
    }
    Ok(String::new())
}

/// Sends one packet of protocol 4.
fn send_ipip(from: &Node, to: IpAddr) -> Result<()> {
    let sent = from.space.spawn(move || -> Result<usize> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4)))?;
        Ok(socket.send_to(&[0x45; 20], &std::net::SocketAddr::from((to, 0)).into())?)
    });
    sent.join().map_err(|_| anyhow::anyhow!("sender"))??.context("an IPIP packet")?;
    Ok(())
}

fn nothing_for_the_cloud(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let before = counted(network, "ipip")?;
    ensure!(before == [0, 0], "the cloud dropped {before:?} IPIP packets");
    // The rule does what it says: one packet on the LAN, one between LANs.
    let leader = network.node("a1")?.private;
    send_ipip(network.node("a2")?, leader)?;
    send_ipip(network.node("a3")?, leader)?;
    let after = counted(network, "ipip")?;
    ensure!(after == [1, 1], "of one packet each way the cloud dropped {after:?}");
    Ok(String::new())
}

/// Leaders go on with their flags, members get IPIP.
fn ipip_inside(lab: &mut Lab) -> Result<String> {
    let dropped = counted(&lab.network, "ipip")?;
    ensure!(counted(&lab.network, "ipip-inside")? == [0, 0], "there was IPIP before");
    let members: Vec<_> = lab.network.nodes.iter().filter(|node| node.public.is_none()).cloned().collect();
    for node in &members {
        lab.agents.stop(node.name(), Signal::SIGTERM)?;
        lab.agents.start_with(node, &["--tunnel=ipip"])?;
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    matrix::settle(&lab.network, Duration::from_secs(60))?;
    let matrix = matrix::run(&lab.network)?;
    checks::all_passed(&matrix)?;
    let inside = counted(&lab.network, "ipip-inside")?;
    ensure!(inside[0] > 100 && inside[1] > 100, "IPIP in flannel's packets: {inside:?}");
    ensure!(counted(&lab.network, "ipip")? == dropped, "IPIP was sent in clear");
    no_drops(lab)?;
    Ok(format!("({} probes; {} packets)", matrix.total(), inside[0] + inside[1]))
}

fn routes_inside(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let routes = node.space.sh("ip route show dev flannel.1")?;
        let others = |other: &&Node| other.location == node.location && other.name() != node.name();
        let wanted: Vec<_> = lab.network.nodes.iter().filter(others).collect();
        ensure!(routes.lines().count() == wanted.len(), "{}: {routes}", node.name());
        for other in wanted {
            let route = format!("{0}/24 via {0} onlink", other.pod_address(0));
            ensure!(routes.contains(&route), "{}: no {route} in {routes}", node.name());
        }
    }
    Ok(String::new())
}
