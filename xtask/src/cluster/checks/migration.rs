//! From Kilo in Go to ours and back within Kilo's own DaemonSet: only the image changes.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Skipped, both, flows::Flows, removal};
use crate::{
    cluster::{
        Cluster, deploy, network,
        node::Node,
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
    let mut steps = Steps { cluster, said: Vec::new(), clear: 0 };
    let shown = steps.all_steps(&original).and_then(|costs| costs.within_limits(cluster.nodes.len()));
    let clear = network::none_in_clear(steps.clear).context("after our agents had stopped");
    both(both(shown, clear), remove(cluster))?;
    Ok(steps.said.join("\n    "))
}

/// Steps of a migration.
struct Steps<'a> {
    cluster: &'a Cluster,
    /// Name and figures of each.
    said: Vec<String>,
    /// Packets in cleartext in those that may leave none.
    clear: u64,
}

impl Steps<'_> {
    fn all_steps(&mut self, original: &Original) -> Result<Costs> {
        let cluster = self.cluster;
        super::settled_beside_kilo(cluster).context("Kilo itself")?;
        let manifest = original.manifest()?;
        // Kilo removes its routes when it stops, and then nothing contains what its pods send.
        let original = self.of_kilo("Go to Go", || restart(cluster))?;
        self.of_kilo("Go to ours, by the image alone", || set_image(cluster, image::IMAGE))?;
        let back = self.contained("ours to Go", || set_image(cluster, original::IMAGE))?;
        let beside = self.of_kilo("ours comes up beside Go", || {
            cluster.apply(&takeover(cluster)?)?;
            deploy::wait_rolled_out(cluster, TAKEOVER, 120)
        })?;
        let taken = self.contained("Go to ours, taken over", || set_image(cluster, image::IMAGE))?;
        let left = self.contained("those that took over go", || {
            cluster.kubectl(&["-n", "kube-system", "delete", "ds", TAKEOVER, "--cascade=foreground"])?;
            agents_listen(cluster)
        })?;
        let ours = self.contained("ours to ours", || restart(cluster))?;
        let again = self.contained("ours to Go again", || set_image(cluster, original::IMAGE))?;
        set_image(cluster, image::IMAGE)?;
        super::settled_beside_kilo(cluster)?;
        let stay = self
            .contained("our manifest, applied over Kilo's DaemonSet", || deploy::apply(cluster).map(drop))?;
        let home = self.contained("Kilo's manifest, applied over ours", || {
            cluster.apply(&manifest)?;
            deploy::wait_rolled_out(cluster, "kilo", 180)
        })?;
        Ok(Costs { original, back, beside, taken, left, ours, again, stay, home })
    }

    /// Measures a step in which packets in cleartext do not count.
    fn of_kilo(&mut self, name: &str, code: impl FnOnce() -> Result<()>) -> Result<Step> {
        self.step(name, false, code)
    }

    /// Measures a step in which no packet of a pod may be in cleartext, even if the step fails.
    fn contained(&mut self, name: &str, code: impl FnOnce() -> Result<()>) -> Result<Step> {
        self.step(name, true, code)
    }

    fn step(&mut self, name: &str, counts: bool, code: impl FnOnce() -> Result<()>) -> Result<Step> {
        let (step, result) = measured(self.cluster, code).with_context(|| name.to_owned())?;
        self.clear += if counts { step.clear } else { 0 };
        let text = format!("{name}: {}", step.text);
        println!("    {text}");
        self.said.push(text.clone());
        result.context(text)?;
        Ok(step)
    }
}

/// What each step has cost, apart from Kilo to ours by the image alone, which has no goal.
#[derive(Default)]
struct Costs {
    original: Step,
    back: Step,
    beside: Step,
    taken: Step,
    left: Step,
    ours: Step,
    again: Step,
    stay: Step,
    home: Step,
}

impl Costs {
    /// Fails when a step has cost more than it may on that many nodes.
    fn within_limits(&self, nodes: usize) -> Result<()> {
        let Self { original, back, beside, taken, left, ours, again, stay, home } = self;
        if let Some(step) = [back, again].into_iter().find(|step| step.lost > original.lost) {
            bail!("a step back lost {} packets, one from Kilo to Kilo {}", step.lost, original.lost);
        }
        // Nothing steers between the end of our agent and the start of Kilo's, nor between two of Kilo's; both
        // gaps vary.
        for (what, home, original) in [
            ("within the location", home.lost_within, original.lost_within),
            ("to the other location", home.lost_beyond, original.lost_beyond),
        ] {
            if home > 2 * original {
                bail!("Kilo's manifest over ours lost {home} packets {what}, Kilo to Kilo {original}");
            }
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
        let most = MOST_TAKEN * u64::try_from(nodes)?;
        if taken.lost_within > most {
            bail!(
                "{} packets within the location were lost while nodes were taken over, not {most}",
                taken.lost_within
            );
        }
        if taken.gap > LONGEST_TAKEN {
            bail!("a flow had no answer for {} ms while nodes were taken over", taken.gap.as_millis());
        }
        Ok(())
    }
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

/// Removes Kilo's own DaemonSet, and the one that takes over, and puts ours back.
pub fn remove(cluster: &Cluster) -> Result<()> {
    let delete = ["-n", "kube-system", "delete", "ds", "kilo", TAKEOVER];
    cluster.kubectl(&[&delete[..], &["--ignore-not-found", "--cascade=foreground"]].concat())?;
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

fn restart(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
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
#[derive(Default)]
struct Step {
    text: String,
    /// Cleartext packets.
    clear: u64,
    /// Lost datagrams of all flows.
    lost: u64,
    /// Those lost from the leader to a member of its location, all families.
    lost_within: u64,
    /// Those lost from the leader to the other location, all families.
    lost_beyond: u64,
    /// Those lost to the outside host.
    lost_outside: u64,
    /// Longest time without a reply in any flow.
    gap: Duration,
}

/// Measures a step; its own result is the second value.
fn measured(cluster: &Cluster, code: impl FnOnce() -> Result<()>) -> Result<(Step, Result<()>)> {
    let flows = Flows::start(cluster, None)?;
    let result = code();
    // The flows count cleartext packets meanwhile; one of our steps fails by that count, whatever a later
    // try shows.
    let settled = super::settled_beside_kilo(cluster);
    let measured = flows.measure()?;
    let of = |is_wanted: &dyn Fn(&str) -> bool| -> u64 {
        measured.flows.iter().filter(|(name, _)| is_wanted(name)).map(|(_, figures)| figures.lost).sum()
    };
    let first = cluster.first();
    let to = |node: &Node| format!("{} to {}", first.name(), node.name());
    let beside = to(&cluster.nodes[1]);
    let others = cluster.nodes.iter().filter(|node| node.site.letter != first.site.letter);
    let others: Vec<_> = others.map(to).collect();
    let step = Step {
        text: format!("{measured}; {} packets in cleartext", measured.clear),
        clear: measured.clear,
        lost: measured.lost(),
        lost_within: of(&|name| name.starts_with(&beside)),
        lost_beyond: of(&|name| others.iter().any(|other| name.starts_with(other))),
        lost_outside: of(&|name| name.ends_with(" to outside")),
        gap: measured.flows.iter().map(|(_, figures)| figures.gap).max().unwrap_or_default(),
    };
    Ok((step, result.and(settled)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn kilos_manifest_over_ours_may_cost_twice_what_kilo_to_kilo_costs_in_each_direction() {
        let costs = |within: u64, beyond: u64| Costs {
            original: Step { lost: 900, lost_within: 300, lost_beyond: 600, ..Step::default() },
            home: Step { lost: within + beyond, lost_within: within, lost_beyond: beyond, ..Step::default() },
            ..Costs::default()
        };
        costs(600, 1200).within_limits(3).unwrap();
        let said = |costs: Costs| costs.within_limits(3).unwrap_err().to_string();
        let within = said(costs(601, 0));
        assert_eq!(
            within,
            "Kilo's manifest over ours lost 601 packets within the location, Kilo to Kilo 300"
        );
        let beyond = said(costs(0, 1201));
        assert!(beyond.contains("1201 packets to the other location, Kilo to Kilo 600"), "{beyond}");
    }
}
