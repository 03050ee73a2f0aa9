//! From Kilo in Go to ours and back within Kilo's own DaemonSet: only the image changes.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Skipped, flows::Flows, removal};
use crate::{
    cluster::{
        Cluster, deploy, network,
        original::{self, Original, Tunnels},
        until,
    },
    command::output,
    image,
};

/// Removes what Kilo leaves, as in docs/migration.md.
const LEFT_BY_KILO: &str = "
    iptables-save | grep -v KILO | iptables-restore; ip6tables-save | grep -v KILO | ip6tables-restore
    ip route flush table 1107 2> /dev/null || true; ip link delete tunl0 2> /dev/null || true";

/// Datagrams that a flow within the location may lose while programs run without an agent: one second's
/// worth.
const MOST_LOST: u64 = 200;

/// Datagrams that a masqueraded flow may lose when a node goes back to Kilo: 0.1 s, because rules translate
/// it anew.
const MOST_OUTSIDE: u64 = 20;

/// Datagrams that a flow within the location may lose for each node taken over from Kilo: 0.7 s.
const MOST_TAKEN: u64 = 140;

/// Longest time without a reply, in any flow, while nodes are taken over from Kilo.
const LONGEST_TAKEN: Duration = Duration::from_millis(700);

/// The DaemonSet that `kgctl takeover` prints.
const TAKEOVER: &str = "kilo-takeover";

/// Runs all steps, each while pods talk.
pub fn there_and_back(cluster: &Cluster) -> Result<String> {
    let Some(original) = Original::find()? else {
        return Err(Skipped("neither Kilo's program nor its source is here ($KILO_GO_SOURCE)").into());
    };
    let _tunnels = install(cluster, &original)?;
    super::settled_beside_kilo(cluster).context("Kilo itself")?;
    let mut said = Vec::new();
    let mut step = |name: &str, code: &dyn Fn() -> Result<()>| -> Result<Step> {
        let step = measured(cluster, code).with_context(|| name.to_owned())?;
        println!("    {name}: {}", step.text);
        said.push(format!("{name}: {}", step.text));
        Ok(step)
    };
    let manifest = original.manifest()?;
    let original = step("Go to Go", &|| {
        cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
        deploy::wait_rolled_out(cluster, "kilo", 180)
    })?;
    step("Go to ours, by the image alone", &|| set_image(cluster, image::IMAGE))?;
    // Kilo removes its routes when it stops, and then nothing contains what its pods send.
    let back = step("ours to Go", &|| set_image(cluster, original::IMAGE))?;
    let beside = step("ours comes up beside Go", &|| {
        cluster.apply(&takeover(cluster)?)?;
        deploy::wait_rolled_out(cluster, TAKEOVER, 120)
    })?;
    let taken = step("Go to ours, taken over", &|| set_image(cluster, image::IMAGE))?;
    let left = step("those that took over go", &|| {
        cluster.kubectl(&["-n", "kube-system", "delete", "ds", TAKEOVER, "--cascade=foreground"])?;
        agents_listen(cluster)
    })?;
    let ours = step("ours to ours", &|| {
        cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
        deploy::wait_rolled_out(cluster, "kilo", 180)
    })?;
    let again = step("ours to Go again", &|| set_image(cluster, original::IMAGE))?;
    set_image(cluster, image::IMAGE)?;
    super::settled_beside_kilo(cluster)?;
    let stay = step("our manifest, applied over Kilo's DaemonSet", &|| deploy::apply(cluster).map(drop))?;
    let home = step("Kilo's manifest, applied over ours", &|| {
        cluster.apply(&manifest)?;
        deploy::wait_rolled_out(cluster, "kilo", 180)
    })?;
    let steps = [&back, &taken, &left, &ours, &again, &stay, &home];
    let clear: u64 = steps.iter().map(|step| step.clear).sum();
    remove(cluster)?;
    network::none_in_clear(clear).context("after our agents had stopped")?;
    let dearer = [&back, &again].into_iter().find(|step| step.lost > original.lost);
    if let Some(step) = dearer {
        bail!("a step back lost {} packets, one from Kilo to Kilo {}", step.lost, original.lost);
    }
    // Nothing steers between the end of our agent and the start of Kilo's, nor between two of Kilo's; both
    // gaps vary.
    if home.lost_within > 2 * original.lost_within {
        bail!(
            "Kilo's manifest over ours lost {} packets within the location, Kilo to Kilo {}",
            home.lost_within,
            original.lost_within
        );
    }
    let outside = back.lost_outside.max(again.lost_outside).max(home.lost_outside);
    if outside > MOST_OUTSIDE {
        bail!("{outside} masqueraded packets were lost on the way back, not {MOST_OUTSIDE}");
    }
    let lost = ours.lost_within + left.lost_within + stay.lost_within;
    if lost > MOST_LOST {
        bail!("{lost} packets within the location were lost from our agents to our agents");
    }
    // On this one machine all agents start at once, and userspace WireGuard to the other location has to
    // wait.
    if beside.lost_within + beside.clear > 0 {
        bail!("agents that wait beside Kilo disturb it: {}", beside.text);
    }
    let most = MOST_TAKEN * u64::try_from(cluster.nodes.len())?;
    if taken.lost_within > most {
        bail!(
            "{} packets within the location were lost while nodes were taken over, not {most}",
            taken.lost_within
        );
    }
    if taken.gap > LONGEST_TAKEN {
        bail!("a flow had no answer for {} ms while nodes were taken over", taken.gap.as_millis());
    }
    Ok(said.join("\n    "))
}

/// Replaces our program on every node by Kilo's own. Dropping the value ends the substitute for the
/// kernel's IPIP.
pub fn install(cluster: &Cluster, original: &Original) -> Result<Option<Tunnels>> {
    original.load(cluster)?;
    let tunnels = if deploy::has_ipip() { None } else { Some(Tunnels::keep(cluster)?) };
    let removed = removal::by_kgctl(cluster).context("kgctl uninstall")?;
    println!("    kgctl uninstall: {removed}");
    keep_wireguard(cluster)?;
    cluster.apply(&original.manifest()?)?;
    deploy::wait_rolled_out(cluster, "kilo", 120)?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s"])?;
    removal::new_pods(cluster)?;
    Ok(tunnels)
}

/// Removes Kilo's own DaemonSet and puts ours back.
pub fn remove(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["-n", "kube-system", "delete", "ds", "kilo", "--cascade=foreground"])?;
    for node in &cluster.nodes {
        node.sh(LEFT_BY_KILO)?;
    }
    removal::put_back(cluster)
}

/// Keeps the process that owns the WireGuard device where the kernel has none: a kernel device would stay,
/// whichever agent runs.
fn keep_wireguard(cluster: &Cluster) -> Result<()> {
    if deploy::has_wireguard() {
        return Ok(());
    }
    let text = deploy::manifest(deploy::manifest_name())?;
    let daemon_set = text.split("\n---\n").find(|part| part.contains("\n  name: kilo-wireguard\n"));
    cluster.apply(daemon_set.context("no DaemonSet kilo-wireguard")?)?;
    let made = || deploy::wireguard_is_ready(cluster).ok();
    until("the pods of kilo-wireguard are ready", Duration::from_secs(30), made)
}

fn set_image(cluster: &Cluster, image: &str) -> Result<()> {
    let image = image.trim_start_matches("docker.io/");
    let containers = [format!("kilo={image}"), format!("install-cni={image}")];
    cluster.kubectl(&["-n", "kube-system", "set", "image", "ds/kilo", &containers[0], &containers[1]])?;
    deploy::wait_rolled_out(cluster, "kilo", 180)
}

/// Output of `kgctl takeover` on the first node.
fn takeover(cluster: &Cluster) -> Result<String> {
    let image = format!("--image={}", image::IMAGE.trim_start_matches("docker.io/"));
    output(cluster.first().command(removal::KGCTL)?.args(["takeover", &image])).context("kgctl takeover")
}

/// Waits until an agent listens on every node: those of a deleted DaemonSet have released the port.
fn agents_listen(cluster: &Cluster) -> Result<()> {
    for node in &cluster.nodes {
        let listens =
            || node.netns().sh("ss --no-header -ltn 'sport = 1107'").ok().filter(|said| !said.is_empty());
        until(&format!("an agent of {} listens", node.name()), Duration::from_secs(30), listens)?;
    }
    Ok(())
}

/// Measurements of one step, until everybody was reachable again.
struct Step {
    text: String,
    /// Cleartext packets.
    clear: u64,
    /// Lost datagrams of all flows.
    lost: u64,
    /// Those lost from the leader to a member of its location, all families.
    lost_within: u64,
    /// Those lost to the outside host.
    lost_outside: u64,
    /// Longest time without a reply in any flow.
    gap: Duration,
}

fn measured(cluster: &Cluster, code: impl FnOnce() -> Result<()>) -> Result<Step> {
    let flows = Flows::start(cluster, None)?;
    let result = code();
    // The flows count cleartext packets meanwhile; one of our steps fails by that count, whatever a later
    // try shows.
    let settled = super::settled_beside_kilo(cluster);
    let measured = flows.measure()?;
    let of = |is_wanted: &dyn Fn(&str) -> bool| -> u64 {
        measured.flows.iter().filter(|(name, _)| is_wanted(name)).map(|(_, figures)| figures.lost).sum()
    };
    let beside = format!("{} to {}", cluster.nodes[0].site.node, cluster.nodes[1].site.node);
    let lost_within = of(&|name| name.starts_with(&beside));
    let lost_outside = of(&|name| name.ends_with(" to outside"));
    let (clear, lost) = (measured.clear, measured.lost());
    let gap = measured.flows.iter().map(|(_, figures)| figures.gap).max().unwrap_or_default();
    let text = format!("{measured}; {clear} packets in cleartext");
    result.with_context(|| text.clone())?;
    settled.with_context(|| text.clone())?;
    Ok(Step { text, clear, lost, lost_within, lost_outside, gap })
}
