//! What must hold on a real cluster.

mod accounts;
mod agents;
mod bad_input;
mod change;
mod confined;
mod flows;
mod host_routing;
mod kgctl;
mod logs;
mod migration;
mod mixed;
mod monitoring;
mod names;
mod no_kube_proxy;
mod nodes;
mod relay;
mod removal;
mod shipped;
mod stand_by;
mod updates;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{Cluster, ClusterPart, matrix, network, until};
use crate::report::{InClear, Outcome, TestOutcome};
use logs::{ANYTHING, AWAY, BOOTS, Causes, ENDED, LEADERS, Logs, RELAY};

/// One check: its name, its function, and the part that it runs with.
pub struct Check {
    name: &'static str,
    run: fn(&Cluster) -> Result<String>,
    part: ClusterPart,
    /// Warnings of agents that it causes.
    causes: Causes,
}

const fn check(name: &'static str, run: fn(&Cluster) -> Result<String>) -> Check {
    Check { name, run, part: ClusterPart::Always, causes: &[] }
}

const fn of_operators(name: &'static str, run: fn(&Cluster) -> Result<String>) -> Check {
    Check { part: ClusterPart::Operators, ..check(name, run) }
}

const fn of_nodes(name: &'static str, run: fn(&Cluster) -> Result<String>) -> Check {
    Check { part: ClusterPart::Nodes, ..check(name, run) }
}

impl Check {
    const fn causing(self, causes: Causes) -> Self {
        Self { causes, ..self }
    }
}

const CHECKS: &[Check] = &[
    check("every pod of Kilo is ready within a minute", ready),
    check("pods, nodes, Services and the outside reach each other", everybody),
    check("a Service's name is resolved from every node, by UDP and TCP", names::resolve),
    check("rollout restart of Kilo loses nothing", updates::rollout_restart),
    check("deleted pods of Kilo lose nothing", updates::delete_pods),
    check("another image tag of Kilo loses nothing", updates::set_image),
    check("kubelet killed and restarted loses nothing", updates::kubelet).causing(&[AWAY]),
    check("containerd killed and restarted loses nothing", updates::containerd).causing(&[AWAY]),
    check("every container has the seccomp profile that its manifest names", confined::as_named),
    check("the API server calls the webhook of its manifest", shipped::webhook),
    check("kgctl: looks into every node through the API server", kgctl::into_nodes),
    check("kgctl: sysdump has something of every node, and no key", kgctl::sysdump),
    check(
        "kgctl: connectivity-test is green, red where something is cut, and leaves nothing",
        kgctl::connectivity,
    ),
    check(ATTACHED, agents::attached),
    check("a drained node takes nothing with it", nodes::drain),
    check("a node that joins again gets another pod CIDR and is reached", nodes::join_again)
        .causing(&[AWAY, BOOTS]),
    check("a node that boots sends nothing in cleartext", nodes::boot).causing(&[AWAY, BOOTS]),
    check("Prometheus finds the agents, and returns the dashboard and the alerts", monitoring::prometheus),
    of_operators(
        "kgctl: a connectivity-test that is interrupted or killed leaves nothing in the end",
        kgctl::ended,
    ),
    of_operators("agents run with the runtime's default seccomp profile, too", confined::by_default),
    of_operators("a policy keeps each agent to its own node, and what agents do goes on", shipped::own_node),
    of_operators(
        "bad input is said in the termination message, the log and kgctl status",
        bad_input::everything,
    )
    .causing(&[ANYTHING]),
    of_operators(
        "a kernel without WireGuard is named in the termination message, the log and kgctl status",
        bad_input::no_wireguard,
    )
    .causing(&[ANYTHING]),
    of_operators("agents start in a cluster without kube-proxy", no_kube_proxy::agents_start)
        .causing(&[ANYTHING]),
    of_operators("the uninstall manifest takes everything off every node", removal::manifest)
        .causing(&[AWAY, BOOTS]),
    of_operators("kgctl uninstall takes everything off every node", removal::kgctl).causing(&[AWAY, BOOTS]),
    of_operators("Kilo's own DaemonSet gets our image, and its own again", migration::there_and_back)
        .causing(&[ANYTHING]),
    of_nodes(
        "the leader's machine loses power, and its stand-by leads within half a second",
        stand_by::leader_dies,
    )
    .causing(&[AWAY, BOOTS, LEADERS]),
    of_nodes(
        "the leader's machine is drained, and its stand-by leads before it goes",
        stand_by::leader_is_drained,
    )
    .causing(&[AWAY, BOOTS, LEADERS]),
    of_nodes("in a mesh where nodes are Kilo in Go, the leader's machine loses power", mixed::leader_dies)
        .causing(&[ANYTHING]),
    of_nodes("packets of pods bypass the host's stack, and nothing is lost", host_routing::bypasses),
    of_nodes(
        "a relay joins two locations that cannot reach each other, until they can again",
        relay::takes_over,
    )
    // The relay's node moves to a location of its own and back, and its connections with it.
    .causing(&[AWAY, LEADERS, RELAY]),
    of_nodes("a node that is deleted while it runs sends nothing in cleartext", nodes::deleted_while_it_runs)
        .causing(&[AWAY, BOOTS, ENDED]),
    of_nodes("twenty boots send nothing in cleartext", nodes::many_boots).causing(&[AWAY, BOOTS]),
    of_nodes("the check of boots sees what a CNI configuration on disk lets out", nodes::boot_with_a_file)
        .causing(&[AWAY, BOOTS]),
];

/// Name of the check of what those before it have left.
const ATTACHED: &str = "every program is on this kernel's hooks, and none was attached again";
/// Runs after all the others, whichever were chosen.
const LAST: Check = check(
    "in the end every program is on this kernel's hooks, and none was attached again",
    agents::attached,
);

/// Whether a check of this name is about what those before it have left: alone, on a cluster that has just
/// come up, it shows nothing.
pub fn is_about_those_before(name: &str) -> bool {
    name == ATTACHED || name == LAST.name
}

/// Which checks run.
#[derive(Debug)]
pub enum Choice<'a> {
    /// Every check.
    All,
    /// Those with one of these in their name.
    Named(&'a [String]),
    /// Those of these parts.
    Parts(&'a [ClusterPart]),
}

impl<'a> Choice<'a> {
    /// What `--only`, `--part` and `--all` choose.
    pub const fn of(only: &'a [String], parts: &'a [ClusterPart], all: bool) -> Self {
        match (only, all) {
            (_, true) => Self::All,
            ([], false) => Self::Parts(parts),
            (only, false) => Self::Named(only),
        }
    }

    /// Whether every ordinary check runs, and first that everybody reaches everybody.
    fn has_ordinary(&self) -> bool {
        match self {
            Self::All => true,
            Self::Named(_) => false,
            Self::Parts(parts) => parts.contains(&ClusterPart::Always),
        }
    }

    fn has(&self, check: &Check) -> bool {
        match self {
            Self::All => true,
            Self::Named(words) => words.iter().any(|words| check.name.contains(words.as_str())),
            Self::Parts(parts) => parts.contains(&check.part),
        }
    }
}

/// Runs the chosen checks, and then the last one; one outcome each. A check also fails
/// when an agent is refused something or logs a warning that the check does not cause.
pub fn run(cluster: &Cluster, choice: &Choice) -> Vec<TestOutcome> {
    let mut outcomes = Vec::new();
    let started = Instant::now();
    // Pods that have just started may not have an IPv6 address that answers yet.
    if !choice.has_ordinary()
        && let Err(error) = settled(cluster)
    {
        outcomes.push(outcome("everybody reaches everybody before the first check", started, Some(&error)));
    }
    let mut logs = Logs::start(cluster);
    for check in CHECKS.iter().filter(|check| choice.has(check)).chain([&LAST]) {
        let started = Instant::now();
        let result = match ((check.run)(cluster), logs.ended(check.causes)) {
            (Ok(figures), logged) => logged.map(|_| figures),
            (Err(error), Err(logged)) if error.is::<Skipped>() => Err(logged),
            // What agents log may explain the failure.
            (Err(error), Err(logged)) => Err(error.context(format!("{logged:#}"))),
            (Err(error), Ok(_)) => Err(error),
        };
        if let Ok(figures) = &result
            && !figures.is_empty()
        {
            println!("    {figures}");
        }
        outcomes.push(outcome(check.name, started, result.as_ref().err()));
    }
    outcomes
}

/// What must hold on any cluster that has just come up: no cleartext packets, every program on its hook,
/// and no warnings of agents.
///
/// # Errors
/// The first of these that does not hold.
pub fn as_deployed(cluster: &Cluster) -> Result<String> {
    network::none_in_clear(network::clear_packets()?)?;
    let attached = agents::attached(cluster)?;
    let lines = Logs::start(cluster).ended(&[])?;
    Ok(format!("{attached}; nothing in cleartext; nothing to warn about in {lines} lines of logs"))
}

/// Why a check cannot run here.
#[derive(Debug)]
pub struct Skipped(&'static str);

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Skipped {}

/// Prints and returns the outcome of a check.
pub fn outcome(name: &str, started: Instant, error: Option<&anyhow::Error>) -> TestOutcome {
    let result = match error {
        None => Outcome::Passed,
        Some(error) => {
            if let Some(reason) = error.downcast_ref::<Skipped>() {
                println!("    {reason}");
                Outcome::Skipped
            } else {
                println!("    {error:#}");
                Outcome::Failed
            }
        }
    };
    println!("test {name} ... {result} ({:.1} s)", started.elapsed().as_secs_f32());
    TestOutcome::new("cluster", name, result, started.elapsed().as_secs_f64()).because_of(error)
}

fn ready(cluster: &Cluster) -> Result<String> {
    match cluster.ready_after {
        Some(time) if time > Duration::from_secs(60) => bail!("it took {:.1} s", time.as_secs_f32()),
        Some(time) => Ok(format!("{:.1} s after kubectl apply", time.as_secs_f32())),
        None => Ok("the cluster stood already".to_owned()),
    }
}

/// Runs the matrix; no packet of a pod may be in cleartext.
pub fn everybody(cluster: &Cluster) -> Result<String> {
    let before = network::clear_packets()?;
    let matrix = matrix::run(cluster)?;
    network::none_in_clear(network::clear_packets()? - before)?;
    let failures = matrix.failures();
    if !failures.is_empty() {
        bail!("{} of {} probes failed:\n    {}", failures.len(), matrix.total(), failures.join("\n    "));
    }
    Ok(format!("{} probes", matrix.total()))
}

/// Waits until everybody reaches everybody: agents learn of changes through their watches.
pub fn settled(cluster: &Cluster) -> Result<()> {
    succeeds("everybody reaches everybody", || everybody(cluster)).map(drop)
}

/// Like [`settled`], but tolerates cleartext packets, where Kilo in Go runs or has just stopped: it removes
/// its routes first, and does not contain what pods send then.
pub fn settled_beside_kilo(cluster: &Cluster) -> Result<()> {
    tried("everybody reaches everybody", || everybody(cluster), |_| false).map(drop)
}

/// Retries for a minute. Returns the last error, or the first one about cleartext packets, which stay sent
/// whatever comes later.
pub fn succeeds<T>(what: &str, code: impl Fn() -> Result<T>) -> Result<T> {
    tried(what, code, anyhow::Error::is::<InClear>)
}

/// Runs `code`, while which no packet of a pod may be in cleartext. One that was counts also where `code` failed.
fn never_in_clear<T>(code: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = network::clear_packets()?;
    let shown = code();
    both(shown, network::clear_packets().and_then(|now| network::none_in_clear(now - before)))
}

/// Result of a check after its clean-up. Of two errors the first counts, except that cleartext packets come
/// before everything else: a check that saw some gets no second try.
fn both<T>(shown: Result<T>, put_back: Result<()>) -> Result<T> {
    match put_back {
        Err(error) if error.is::<InClear>() => Err(error),
        put_back => shown.and_then(|shown| put_back.map(|()| shown)),
    }
}

/// Retries for a minute, or until an error that a retry cannot mend.
fn tried<T>(
    what: &str,
    code: impl Fn() -> Result<T>,
    is_final: impl Fn(&anyhow::Error) -> bool,
) -> Result<T> {
    let mut last = None;
    let ended = until(what, Duration::from_secs(60), || match code() {
        Err(error) if !is_final(&error) => {
            last = Some(error);
            None
        }
        ended => Some(ended),
    });
    ended.unwrap_or_else(|error| Err(last.unwrap_or(error)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::cell::Cell;

    use anyhow::{Context as _, anyhow};

    use super::*;

    /// Fails the first time only.
    fn after(tries: &Cell<u32>, failure: Result<()>) -> Result<()> {
        tries.set(tries.get() + 1);
        if tries.get() == 1 { failure } else { Ok(()) }
    }

    #[test]
    fn packets_in_clear_are_not_tried_again_and_all_else_is() {
        let tries = Cell::new(0);
        succeeds("it passes", || after(&tries, Err(anyhow!("not yet")))).unwrap();
        assert_eq!(tries.get(), 2);
        let tries = Cell::new(0);
        let in_clear = || network::none_in_clear(3).context("an agent was away");
        let error = succeeds("it passes", || after(&tries, in_clear())).unwrap_err();
        assert!(error.is::<InClear>(), "{error:#}");
        assert_eq!(tries.get(), 1);
    }

    #[test]
    fn packets_in_clear_count_before_another_error() {
        let text = |result: Result<&'static str>| result.map_err(|error| error.to_string());
        let wrong = || Err(anyhow!("wrong"));
        assert_eq!(text(both(Ok("shown"), Ok(()))), Ok("shown"));
        assert_eq!(text(both(Ok("shown"), wrong())), Err("wrong".to_owned()));
        assert_eq!(text(both(Err(anyhow!("first")), wrong())), Err("first".to_owned()));
        assert!(both::<()>(wrong(), network::none_in_clear(1)).unwrap_err().is::<InClear>());
    }
}
