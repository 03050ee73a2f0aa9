//! Pods' interfaces as a cluster has them: the configuration of the manifests,
//! completed by the agent, executed by Debian's CNI plugins.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize as _;
use serde_yaml_ng::{Deserializer, Value};

use super::{
    network::Node,
    plugins::{self, Pod},
};

/// The node's configuration list, in its own /run.
pub const CONF: &str = "/run/10-kilo.conflist";

/// Puts the configuration where the agent will find it.
pub fn install(node: &Node) -> Result<()> {
    let manifest = include_str!("../../../manifests/kilo-kubeadm.yaml");
    let documents = Deserializer::from_str(manifest).map(Value::deserialize);
    let documents = documents.collect::<Result<Vec<_>, _>>()?;
    let conf = documents.iter().find_map(|document| document.get("data")?.get("cni-conf.json")?.as_str());
    let conf = conf.context("the manifest has no cni-conf.json")?;
    node.space.sh(&format!("cat > {CONF} <<'CONF'\n{conf}CONF"))?;
    Ok(())
}

/// Makes the pod's interface, once the agent has written the node's pod CIDRs.
pub fn connect(node: &Node) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let list = loop {
        let list = node.space.sh(&format!("cat {CONF}"))?;
        if list.contains("subnet") {
            break list;
        }
        if Instant::now() > deadline {
            bail!("the agent of {} has written no pod CIDR into {CONF}", node.name());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    // The node has a /run of its own; this process sees the names of namespaces.
    let netns = format!("/proc/{}/root{}", std::process::id(), node.pod.path().display());
    let pod = Pod { id: &node.pod.name, netns: &netns, port_mappings: &[] };
    let result = plugins::add(&list, pod, |program| node.space.command(program))?;
    let length = |ip: &std::net::IpAddr| if ip.is_ipv4() { 24 } else { 64 };
    let wanted: Vec<_> = node.pod_ips().iter().map(|ip| format!("{ip}/{}", length(ip))).collect();
    let found: Vec<_> =
        result["ips"].as_array().into_iter().flatten().filter_map(|ip| ip["address"].as_str()).collect();
    if found != wanted {
        bail!("the pod of {} was to have {wanted:?}: {result}", node.name());
    }
    Ok(())
}
