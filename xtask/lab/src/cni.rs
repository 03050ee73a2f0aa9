//! Pods' interfaces as a cluster has them: the configuration of the manifests,
//! completed by the agent, executed by Debian's CNI plugins.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::{
    Lab,
    cni_conf::CONF,
    counters,
    network::Node,
    plugins::{self, Pod},
    wait,
};

/// Makes the pod's interface, once the agent has written the node's pod CIDRs.
pub fn connect(node: &Node) -> Result<()> {
    let what = format!("the agent of {} writes its pod CIDR into {CONF}", node.name());
    let list = wait::until(&what, Duration::from_secs(20), || {
        let list = node.netns.sh(&format!("cat {CONF}"))?;
        Ok(if list.contains("subnet") { Ok(list) } else { Err(list) })
    })?;
    // The node has a /run of its own; this process sees the names of namespaces.
    let netns = format!("/proc/{}/root{}", std::process::id(), node.pod.path().display());
    let pod = Pod { id: &node.pod.name, netns: &netns, port_mappings: &[] };
    let result = plugins::add(&list, pod, |program| node.netns.command(program))?;
    let length = |ip: &std::net::IpAddr| if ip.is_ipv4() { 24 } else { 64 };
    let wanted: Vec<_> = node.pod_ips().iter().map(|ip| format!("{ip}/{}", length(ip))).collect();
    let found: Vec<_> =
        result["ips"].as_array().into_iter().flatten().filter_map(|ip| ip["address"].as_str()).collect();
    if found != wanted {
        bail!("the pod of {} was to have {wanted:?}: {result}", node.name());
    }
    Ok(())
}

/// Beside another CNI, members steer to their leader, and that CNI's `device` carries traffic within the
/// location.
pub fn packets_beside(lab: &Lab, device: &str) -> Result<String> {
    for node in &lab.network.nodes {
        let count = lab.counted(node)?;
        let shown = format!("{}: {:?}", node.name(), counters::scrape(&node.netns)?);
        if node.public.is_some() {
            for name in ["encrypt", "decrypt", "transit", "forward"] {
                ensure!(count(name) > 0, "leader counts no {name}; {shown}");
            }
            ensure!(count("steer") == 0, "leader keeps its own packets from the CNI; {shown}");
        } else {
            ensure!(
                count("steer") > 0 && count("deliver") > 0,
                "member steers or is brought nothing; {shown}"
            );
            ensure!(count("encrypt") == 0 && count("transit") == 0, "member encrypts; {shown}");
        }
        for direction in ["rx", "tx"] {
            let file = format!("/sys/class/net/{device}/statistics/{direction}_packets");
            let packets: u64 = node.netns.sh(&format!("cat {file}"))?.trim().parse()?;
            ensure!(packets > 30, "{}: {device} has {packets} packets ({direction})", node.name());
        }
    }
    Ok(String::new())
}
