//! The kernel's state on nodes with flannel's VXLAN backend, and the CNI
//! configuration its plugin hands on.

use anyhow::{Result, ensure};

use super::{
    Lab,
    check::Check,
    checks::{no_drops, nothing_in_clear},
    cloud, cni, cni_conf,
    network::{Network, Node},
};

/// Flags of the agents, as in the manifests beside flannel.
pub const FLAGS: &[&str] = &["--compatibility=flannel", "--cni=false", "--local=false"];

/// Checks that run once the mesh is up.
pub const CHECKS: &[Check] = &[
    ("members steer to their leader, and flannel carries what stays in the location", members_steer),
    ("no packet of the mesh is seen in cleartext", nothing_in_clear),
    ("no mesh packet was dropped on the way", no_drops),
    ("the cloud dropped no IPIP, though it drops what there is", cloud::nothing_dropped),
    ("IPIP to a leader that itself sends VXLAN travels inside flannel's packets", cloud::ipip_in_overlay),
    ("flannel's routes inside the location are left alone", routes_of_location),
];

/// MTU of flannel's device and of pods: 1500 minus VXLAN's overhead.
const MTU: u32 = 1450;

/// Sets up every node, and the cloud's rule.
pub fn install(network: &mut Network) -> Result<()> {
    network.give_pods_to_another_cni();
    for node in &network.nodes {
        overlay(network, node)?;
        configure_pods(node)?;
    }
    cloud::forbid_ipip(network)
}

/// Hardware address of the node's VXLAN device.
fn hardware_address(node: &Node) -> String {
    format!("02:f1:00:00:00:{:02x}", node.pod_prefix[2])
}

/// Creates the device, and for each other node of the cluster a neighbour, a forwarding entry and a route.
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
    node.netns.ip(&ip)?;
    node.netns.sh(&bridge)?;
    Ok(())
}

/// Writes a CNI configuration that puts pods on a bridge, with addresses of the node's pod CIDR; what leaves
/// the pods' network is masqueraded.
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
    node.netns.sh(&format!(
        "cat > {} <<'CONF'\n{conf}\nCONF\n\
         iptables -t nat -N FLANNEL-POSTRTG\n\
         iptables -t nat -A POSTROUTING -j FLANNEL-POSTRTG\n\
         iptables -t nat -A FLANNEL-POSTRTG -s {cidr}/24 -d 10.42.0.0/16 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG -s 10.42.0.0/16 -d {cidr}/24 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG ! -s 10.42.0.0/16 -d {cidr}/24 -j RETURN\n\
         iptables -t nat -A FLANNEL-POSTRTG -s 10.42.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully\n\
         iptables -t nat -A FLANNEL-POSTRTG ! -s 10.42.0.0/16 -d 10.42.0.0/16 -j MASQUERADE --random-fully",
        cni_conf::CONF
    ))?;
    Ok(())
}

fn members_steer(lab: &mut Lab) -> Result<String> {
    cni::packets_beside(lab, "flannel.1")
}

fn routes_of_location(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let routes = node.netns.sh("ip route show dev flannel.1")?;
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
