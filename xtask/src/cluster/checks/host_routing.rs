//! Packets of pods bypass the host's stack where it leaves their flows as they are (`--host-routing=auto`).

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{
    agents::metric,
    both,
    flows::{Flows, TICK},
};
use crate::{
    cluster::{Cluster, deploy, node::Node},
    lab::wait,
};

/// Counts packets that bypassed.
const BYPASSED: &str = "kilo_packets_total{action=\"bypass\"}";
/// How long flows run.
const MEASURED: Duration = Duration::from_secs(5);

/// Pods, a Service and the outside are reached without a loss, while agents restart, too; UDP bypasses, and
/// TCP does once connection tracking tolerates gaps.
pub fn bypasses(cluster: &Cluster) -> Result<String> {
    let shown = deploy::add_argument(cluster, "--host-routing=auto").and_then(|()| both_protocols(cluster));
    let put_back = tolerate_gaps(cluster, false)
        .and_then(|()| deploy::apply_file(cluster, deploy::manifest_name()))
        .and_then(|()| deploy::wait_rolled_out(cluster, "kilo", 180))
        .map(drop);
    both(shown, put_back)
}

fn both_protocols(cluster: &Cluster) -> Result<String> {
    let from = cluster.first();
    let (datagrams, bypassed, figures) = measure(cluster, from, || Ok(()))?;
    ensure!(bypassed * 2 > datagrams, "{bypassed} packets bypassed the stack, of {datagrams} datagrams");
    // Metrics are asked for one after the other, and take a moment.
    ensure!(
        bypassed <= datagrams + datagrams / 10,
        "{bypassed} packets bypassed the stack: TCP, too, of {datagrams} datagrams"
    );
    tolerate_gaps(cluster, true)?;
    let restart = || {
        cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
        deploy::wait_rolled_out(cluster, "kilo", 180).map(drop)
    };
    let (sent, with_tcp, restarted) = measure(cluster, from, restart)?;
    let (after_datagrams, after, _) = measure(cluster, from, || Ok(()))?;
    ensure!(
        after > after_datagrams,
        "{after} packets bypassed the stack, of {after_datagrams} datagrams and TCP"
    );
    Ok(format!(
        "{bypassed} of {datagrams} datagrams bypassed, {after} packets of {after_datagrams} datagrams and TCP; {figures}; \
         agents restarted: {with_tcp} of {sent} and TCP; {restarted}"
    ))
}

/// Runs flows to pods elsewhere, a Service and the outside, none of which may lose anything. Returns how many
/// datagrams left for pods while packets were counted, how many packets bypassed the stack, and the figures.
fn measure(
    cluster: &Cluster,
    from: &Node,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<(u64, u64, String)> {
    let mut flows = Flows::start(cluster, None)?;
    let service = deploy::service_of(cluster, cluster.remote())?;
    flows.also(cluster, from, service, &format!("{} to a Service", from.name()))?;
    let (began, before) = (Instant::now(), metric(from, BYPASSED)?);
    meanwhile()?;
    wait::time_passes(MEASURED, "packets bypass the stack");
    let (bypassed, ticks) = (metric(from, BYPASSED)? - before, began.elapsed().div_duration_f64(TICK));
    let measured = flows.measure()?;
    let others = [" to outside", " to a Service", " by IPv6"];
    let is_to_a_pod = |name: &str| others.iter().all(|other| !name.ends_with(other));
    let to_pods = measured.flows.iter().filter(|(name, _)| is_to_a_pod(name)).count();
    let sent = (ticks * to_pods as f64) as u64;
    Ok((sent, bypassed, measured.all(|_, figures| figures.lost == 0)?))
}

/// Sets on every node whether connection tracking tolerates gaps in TCP.
fn tolerate_gaps(cluster: &Cluster, tolerate: bool) -> Result<()> {
    cluster.nodes.iter().try_for_each(|node| node.netns().tolerate_gaps_in_tcp(tolerate))
}
