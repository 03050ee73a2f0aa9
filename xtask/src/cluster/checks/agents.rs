//! What agents report about themselves, requested at their node's address as the kubelet does.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use crate::{cluster::Cluster, cluster::node::Node, lab::deployed_state};

/// Every agent's programs are on the hooks that this kernel has for them, and stayed there.
pub fn attached(cluster: &Cluster) -> Result<String> {
    let wanted = deployed_state::hook()?;
    let mut count = 0;
    for node in &cluster.nodes {
        count += programs(node, wanted).with_context(|| node.name().to_owned())?;
    }
    Ok(format!("{count} programs, all on {wanted}"))
}

fn programs(node: &Node, wanted: &str) -> Result<usize> {
    let status: serde_json::Value = serde_json::from_str(&ask(node, "/status")?)?;
    let programs = status["agent"]["programs"].as_array().context("no programs in /status")?;
    // The first node of a location is also on the public network.
    let uplinks = if node.site.public.is_some() { &["eth0", "eth1"][..] } else { &["eth0"] };
    deployed_state::on_hooks(programs, wanted, uplinks, &node.sh("ls /sys/class/net")?)?;
    match metric(node, deployed_state::REATTACHED)? {
        0 => Ok(programs.len()),
        count => {
            bail!(
                "{} is {count}: somebody detached a program, or the agent thinks so",
                deployed_state::REATTACHED
            )
        }
    }
}

/// Value of a metric of the node's agent.
pub fn metric(node: &Node, name: &str) -> Result<u64> {
    let text = ask(node, "/metrics")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).with_context(|| format!("no metric {name}"))
}

/// What the node's agent returns for a path.
pub fn ask(node: &Node, path: &'static str) -> Result<String> {
    let address = node.site.address;
    let ask = move || -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&(address, 1107).into(), Duration::from_secs(2))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text.split_once("\r\n\r\n").context("no HTTP answer")?.1.to_owned())
    };
    node.netns().spawn(ask).join().map_err(|_| anyhow::anyhow!("the asking thread ended"))??
}
