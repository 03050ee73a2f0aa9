//! Services as kube-proxy makes them: destination NAT on the client's node,
//! to pods anywhere, with strict reverse path filters and INVALID dropped.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    Lab,
    netns::Netns,
    network::{Network, Node},
    probe::{self, Protocol},
};

const TIMEOUT: Duration = Duration::from_secs(4);

/// Every pod and host sends requests to the service of every other node's pod.
pub fn run(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let rules = rules(network);
    for node in &network.nodes {
        // An agent that met a leader with a private endpoint, as when the mesh comes up, has
        // made kilo0 loose and leaves it so.
        node.netns.sh("for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $d; done")?;
        node.netns.sh(&format!("nft -f - <<'RULES'\n{rules}RULES"))?;
    }
    let result = ask_all(network).and_then(|asked| {
        strict(network)?;
        check_counters(network).map(|translated| (asked, translated))
    });
    for node in &network.nodes {
        node.netns.sh("nft delete table inet services")?;
    }
    let (asked, translated) = result?;
    Ok(format!("({asked} requests, {translated} connections translated)"))
}

/// Reverse path filters have been strict all the time: here no agent has a reason to change them.
fn strict(network: &Network) -> Result<()> {
    for node in &network.nodes {
        let filters =
            node.netns.sh("for d in all kilo0 eth0; do cat /proc/sys/net/ipv4/conf/$d/rp_filter; done")?;
        let values: Vec<_> = filters.split_whitespace().collect();
        ensure!(values == ["1"; 3], "{}: rp_filter of all, kilo0 and eth0 is {values:?}", node.name());
    }
    Ok(())
}

fn service(number: usize, v4: bool) -> IpAddr {
    match v4 {
        true => Ipv4Addr::new(10, 96, 0, number as u8 + 1).into(),
        false => Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, number as u16 + 1).into(),
    }
}

/// One table for all nodes. A client that is not a pod gets a source of the mesh (kube-proxy's
/// mark for masquerading).
fn rules(network: &Network) -> String {
    let mut translate = String::new();
    for (number, node) in network.nodes.iter().enumerate() {
        translate += &format!(
            "ip daddr {} counter name translated dnat ip to {}\nip6 daddr {} counter name translated dnat ip6 to {}\n",
            service(number, true),
            node.pod_ip(),
            service(number, false),
            node.pod_ip6()
        );
    }
    format!(
        "table inet services {{
    counter translated {{ }}
    counter invalid {{ }}
    chain services {{ {translate} }}
    chain prerouting {{ type nat hook prerouting priority -100; policy accept; jump services; }}
    chain output {{
        type nat hook output priority -100; policy accept;
        ip daddr 10.96.0.0/16 meta mark set meta mark or 0x4000
        ip6 daddr fd96::/16 meta mark set meta mark or 0x4000
        jump services
    }}
    chain postrouting {{ type nat hook postrouting priority 100; policy accept; meta mark and 0x4000 != 0 masquerade; }}
    chain forward {{
        type filter hook forward priority 0; policy accept;
        ct state invalid counter name invalid drop
    }}
}}
"
    )
}

/// Returns the number of requests that were answered.
fn ask_all(network: &Network) -> Result<usize> {
    let threads: Vec<_> = network
        .nodes
        .iter()
        .enumerate()
        .flat_map(|(number, node)| [(number, node, &node.pod, true), (number, node, &node.netns, false)])
        .map(|(number, node, netns, pod)| {
            let (own, node, netns) = (number, node.clone(), netns.clone());
            let services = network.nodes.len();
            netns.clone().spawn(move || ask(&node, &netns, own, services, pod))
        })
        .collect();
    let mut asked = 0;
    for thread in threads {
        asked += thread.join().map_err(|_| anyhow::anyhow!("client thread"))???;
    }
    Ok(asked)
}

fn ask(node: &Node, netns: &Netns, own: usize, services: usize, pod: bool) -> Result<usize> {
    let mut asked = 0;
    // A pod that asks itself needs kube-proxy's hairpin, which is not ours.
    for number in (0..services).filter(|&number| number != own) {
        for (protocol, v4) in [(Protocol::Tcp, true), (Protocol::Udp, true), (Protocol::Tcp, false)] {
            if !pod && !v4 {
                continue;
            }
            let target = service(number, v4);
            let seen = probe::probe(protocol, target, TIMEOUT)
                .with_context(|| format!("{} from {} to {target}", protocol.label(), netns.name))?;
            let wanted = if v4 { IpAddr::V4(node.pod_ip()) } else { node.pod_ip6().into() };
            ensure!(!pod || seen == Some(wanted), "{target} saw {seen:?} instead of {wanted}");
            asked += 1;
        }
    }
    Ok(asked)
}

/// Connections the rules translated; none of their packets may be INVALID.
fn check_counters(network: &Network) -> Result<u64> {
    network.nodes.iter().map(|node| translated(node, "services")).sum()
}

/// Connections the rules of that table translated on the node; an error when that
/// is none, or when a packet was INVALID.
pub fn translated(node: &Node, table: &str) -> Result<u64> {
    let read = |name: &str| -> Result<u64> {
        let text = node.netns.sh(&format!("nft list counter inet {table} {name}"))?;
        let packets = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
        packets.and_then(|number| number.parse().ok()).with_context(|| text.clone())
    };
    let (translated, invalid) = (read("translated")?, read("invalid")?);
    ensure!(translated > 0, "{} translated nothing", node.name());
    ensure!(invalid == 0, "{} found {invalid} packets INVALID", node.name());
    Ok(translated)
}
