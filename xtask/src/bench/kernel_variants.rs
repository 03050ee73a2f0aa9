//! The alternatives: plain routes, and the kernel's own IPIP device with the routes, policy rules and
//! iptables chains that Kilo sets up.

use std::fmt::Write as _;

use anyhow::Result;

use super::site::{Site, pods, private, remote_pods, remote_private};

/// Routing table of Kilo's policy rules.
const TABLE: u32 = 1107;

/// Plain routes without any outer header: the minimum cost of forwarding. Node 1 leads unless this node
/// does.
pub fn plain(site: &Site, leads: bool) -> Result<()> {
    let to_remote = if leads {
        site.wireguard("0.0.0.0/0")?;
        "dev kilo0".to_owned()
    } else {
        format!("via {}", private(1))
    };
    site.node.ip(&format!(
        "route add {}/24 {to_remote}\nroute add {}/24 via {}\n",
        remote_pods(0),
        pods(1),
        private(1)
    ))
}

/// A single MASQUERADE rule for the node's pods.
pub fn masquerade(site: &Site, restore: &str) -> Result<()> {
    site.restore(restore, &format!("*nat\n-A POSTROUTING -s {}/24 -o eth0 -j MASQUERADE\nCOMMIT\n", pods(0)))
}

/// Kilo's state on a node of a location with `nodes` nodes, beside a location with one. Node 1 leads unless
/// this node does.
pub fn kilo(site: &Site, nodes: usize, leads: bool, restore: &str) -> Result<()> {
    let own = private(0);
    let remote = [format!("{}/24", remote_pods(0)), format!("{}/32", remote_private(0))];
    let mut batch = String::from("link set tunl0 up\n");
    if leads {
        site.wireguard("0.0.0.0/0")?;
        for prefix in &remote {
            let _ =
                writeln!(batch, "route add {prefix} via 10.4.0.2 dev kilo0 src {own} proto static onlink");
        }
    } else {
        for prefix in remote.iter().map(String::as_str).chain(["10.4.0.1/32", "10.4.0.2/32"]) {
            let _ = writeln!(
                batch,
                "route add {prefix} via {} dev tunl0 src {own} proto static onlink",
                private(1)
            );
        }
    }
    for number in 1..nodes {
        let node = private(number);
        let _ = write!(
            batch,
            "route add {pods}/24 via {node} dev tunl0 src {own} proto static onlink\n\
             route add {node}/32 via {node} dev tunl0 src {own} table {TABLE} proto static onlink\n\
             rule add from {own_pods}/24 to {node}/32 table {TABLE}\n",
            pods = pods(number),
            own_pods = pods(0),
        );
        if leads {
            let _ = writeln!(batch, "rule add iif kilo0 to {node}/32 table {TABLE}");
        }
    }
    site.node.ip(&batch)?;
    site.restore(restore, &rules(nodes))
}

/// Kilo's chains on a node of that location.
fn rules(nodes: usize) -> String {
    let mut nat = String::from("*nat\n:KILO-NAT - [0:0]\n");
    let mut known = |prefix: String| {
        let _ = writeln!(nat, "-A KILO-NAT -d {prefix} -m comment --comment \"known to the mesh\" -j RETURN");
    };
    for number in 0..nodes {
        known(format!("{}/24", pods(number)));
        known(format!("{}/32", private(number)));
    }
    known("10.4.0.1/32".to_owned());
    known(format!("{}/24", remote_pods(0)));
    known(format!("{}/32", remote_private(0)));
    known("10.4.0.2/32".to_owned());
    let _ = write!(
        nat,
        "-A KILO-NAT -m comment --comment \"all else\" -j MASQUERADE\n\
         -A POSTROUTING -s {}/24 -m comment --comment \"pods of this node\" -j KILO-NAT\nCOMMIT\n",
        pods(0)
    );
    let mut filter = String::from("*filter\n:KILO-IPIP - [0:0]\n");
    for number in 0..nodes {
        let _ = writeln!(
            filter,
            "-A KILO-IPIP -s {}/32 -m comment --comment \"node of this location\" -j ACCEPT",
            private(number)
        );
    }
    filter += "-A INPUT -p 4 -m comment --comment \"IPIP of the mesh\" -j KILO-IPIP\n\
               -A INPUT -p 4 -m comment --comment \"other IPIP\" -j DROP\nCOMMIT\n";
    nat + &filter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_rules_a_node_keep_known_destinations_from_masquerade_and_one_lets_its_packets_in() {
        let count = |nodes, jump: &str| rules(nodes).lines().filter(|line| line.contains(jump)).count();
        assert_eq!(count(100, "-j RETURN") - count(5, "-j RETURN"), 2 * 95);
        assert_eq!(count(100, "-j ACCEPT"), 100);
    }
}
