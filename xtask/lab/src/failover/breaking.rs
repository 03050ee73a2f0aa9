//! How hosts are broken, and mended once the figures are read.

use std::{
    fs,
    process::Child,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{crowd::Share, flood::OVERLOADED, new_flows::Fresh, state};
use crate::{
    Lab,
    deployed_state::{LEADS, NO_ENDPOINT},
    faults::{
        control_plane::{NO_PODS, PODS_AGAIN, REBOOT},
        nodes,
    },
    members::Members,
    netns::Netns,
    network::Node,
    wait,
};

/// The leader when a case begins.
pub(super) const LEADER: &str = "a1";
/// Its first stand-by.
pub(super) const STAND_BY: &str = "a2";
/// Leader of the other location.
pub(super) const FAR: &str = "b1";
/// A node of the location that is neither; traffic is watched from its pod.
pub(super) const MEMBER: &str = "a3";
/// How long a returned leader may take until it leads again: a minute of health, doubled by a loss.
const RETURN: Duration = Duration::from_secs(150);
/// How long a leader that has booted may take until it knows who leads.
const ASKED: Duration = Duration::from_secs(10);
/// How long everybody may take to follow a leader that has returned.
const FOLLOW: Duration = Duration::from_secs(3);
/// How long the mesh has to notice a planned change.
const NOTICED: Duration = Duration::from_secs(20);

/// Time between resuming a stopped agent and stopping the next one.
const AWAKE: Duration = Duration::from_secs(3);

/// Suffix of the files that agents write beside the cluster's objects.
pub(super) const PUBLISHED: &str = ".kilo.yaml";

/// Duration of lasting faults, in seconds.
static LENGTH: AtomicU64 = AtomicU64::new(30);

/// Duration of lasting faults.
pub(super) fn length() -> Duration {
    Duration::from_secs(LENGTH.load(Ordering::Relaxed))
}

/// Sets the duration of lasting faults.
pub fn set_length(time: Duration) {
    LENGTH.store(time.as_secs(), Ordering::Relaxed);
}

type Mend = Box<dyn FnOnce(&mut Lab) -> Result<()>>;

/// A fault that was made, and how to mend it.
pub struct Broken {
    /// What happened, for the report.
    pub said: String,
    /// The node that failed.
    pub of: &'static str,
    /// New flows, opened continuously since the fault.
    pub fresh: Option<Fresh>,
    /// What each gateway carried.
    pub shares: Vec<Share>,
    mend: Option<Mend>,
}

impl Broken {
    /// A fault that is over: nothing is left to mend.
    pub(super) fn done(said: impl Into<String>) -> Self {
        Self { said: said.into(), of: LEADER, fresh: None, shares: Vec::new(), mend: None }
    }

    /// A fault that lasts until `mend` undoes it.
    pub(super) fn until(
        said: impl Into<String>,
        mend: impl FnOnce(&mut Lab) -> Result<()> + 'static,
    ) -> Self {
        Self { mend: Some(Box::new(mend)), ..Self::done(said) }
    }

    /// Replaces what is reported.
    pub(super) fn saying(self, said: String) -> Self {
        Self { said, ..self }
    }

    /// Adds new flows, whose outage is counted, too.
    pub(super) fn with(self, fresh: Fresh) -> Self {
        Self { fresh: Some(fresh), ..self }
    }

    /// Adds what each gateway carried meanwhile.
    pub(super) fn with_shares(self, shares: Vec<Share>) -> Self {
        Self { shares, ..self }
    }

    /// Mends the fault, if that is still to be done.
    pub fn mend(&mut self, lab: &mut Lab) -> Result<()> {
        self.mend.take().map_or(Ok(()), |mend| mend(lab))
    }
}

pub(super) fn node(lab: &Lab, name: &str) -> Result<Node> {
    lab.network.node(name).cloned()
}

/// Leaves the host without processes and links; what is in its kernel is lost with the next [`boot`].
pub(super) fn cut_power(lab: &mut Lab, name: &str) -> Result<()> {
    lab.caused(&[LEADS, NO_ENDPOINT]);
    // Processes first: an agent that saw one link go before the other would log what no power cut lets it log.
    lab.agents.stop(name, Signal::SIGKILL)?;
    node(lab, name)?
        .netns
        .sh("for d in eth0 eth1; do ip link set $d down 2>/dev/null || true; done")
        .map(drop)
}

/// Boots a host whose power was cut: nothing of ours is in its kernel.
pub(super) fn boot(lab: &mut Lab, name: &str) -> Result<()> {
    let node = node(lab, name)?;
    node.netns.sh(REBOOT)?;
    node.netns.sh("for d in eth0 eth1; do ip link set $d up 2>/dev/null || true; done")?;
    lab.network.restore_routes(&node)?;
    lab.agents.start(&node)
}

/// Starts every host on which no agent runs.
pub(super) fn boot_all_without_power(lab: &mut Lab) -> Result<()> {
    let names = nodes::names(lab).into_iter().filter(|name| lab.agents.pid(name).is_none());
    names.collect::<Vec<_>>().iter().try_for_each(|name| boot(lab, name))
}

/// Reboots every host, as after a power cut of all sites; nobody remembers who led.
pub fn reboot_all(lab: &mut Lab) -> Result<()> {
    lab.caused(&[LEADS, NO_ENDPOINT]);
    let names = nodes::names(lab);
    for name in &names {
        if lab.agents.pid(name).is_some() {
            lab.agents.stop(name, Signal::SIGKILL)?;
        }
    }
    for name in &names {
        let node = node(lab, name)?;
        node.netns.sh(NO_PODS)?;
        node.netns.sh(REBOOT)?;
        // What its agent has published says who led, too.
        let _ = fs::remove_file(lab.agents.cluster().join(format!("{name}{PUBLISHED}")));
    }
    lab.members.as_ref().map_or(Ok(()), Members::boot)?;
    for name in &names {
        let node = node(lab, name)?;
        lab.agents.start(&node)?;
    }
    let ready = lab.agents.wait_until_ready(&lab.network, Duration::from_secs(120));
    for name in &names {
        node(lab, name)?.netns.sh(PODS_AGAIN)?;
    }
    ready
}

pub(super) fn power_off(lab: &mut Lab) -> Result<Broken> {
    node_off(lab, LEADER)
}

/// The first stand-by, or the second active leader, loses power.
pub(super) fn stand_by_off(lab: &mut Lab) -> Result<Broken> {
    node_off(lab, STAND_BY)
}

/// A leader that runs Kilo itself loses power. Nodes do not declare it dead at the same moment, so the far
/// leader's probes may reach one that does not lead yet.
pub(super) fn kilo_off(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[OVERLOADED]);
    power_off(lab)
}

/// A node loses power.
pub(super) fn node_off(lab: &mut Lab, name: &'static str) -> Result<Broken> {
    cut_power(lab, name)?;
    let said = format!("{name} has neither links nor processes");
    Ok(Broken { of: name, ..Broken::until(said, move |lab| boot(lab, name)) })
}

pub(super) fn two_lose_power(lab: &mut Lab) -> Result<Broken> {
    cut_power(lab, LEADER)?;
    cut_power(lab, STAND_BY)?;
    Ok(Broken::until("a1 and a2 have neither links nor processes", |lab| {
        boot(lab, LEADER)?;
        boot(lab, STAND_BY)
    }))
}

pub(super) fn power_off_with_dead_agent(lab: &mut Lab) -> Result<Broken> {
    lab.agents.stop(MEMBER, Signal::SIGKILL)?;
    wait::fault_lasts(Duration::from_secs(1));
    cut_power(lab, LEADER)?;
    Ok(Broken::until("a1 has neither links nor processes, and a3 no agent", |lab| {
        boot(lab, LEADER)?;
        let member = node(lab, MEMBER)?;
        lab.agents.start(&member)
    }))
}

pub(super) fn power_off_cluster_away(lab: &mut Lab) -> Result<Broken> {
    let there = lab.agents.cluster();
    let away = there.with_file_name("cluster-away");
    lab.caused(&["cluster", "reading", "backend", "publish"]);
    fs::rename(&there, &away)?;
    wait::fault_lasts(length());
    cut_power(lab, LEADER)?;
    let said = format!("{} s without a cluster, then a1 without links and processes", length().as_secs());
    Ok(Broken::until(said, move |lab| {
        fs::rename(&away, &there).context("the cluster's directory")?;
        boot(lab, LEADER)
    }))
}

/// The router drops everything from and to this port, while its carrier stays.
pub(super) fn silence(router: &Netns, port: &str) -> Result<()> {
    router
        .sh(&format!(
            "nft 'table netdev silent {{
                 chain in {{ type filter hook ingress device \"{port}\" priority 0; policy drop; }}
                 chain out {{ type filter hook egress device \"{port}\" priority 0; policy drop; }}
             }}'"
        ))
        .map(drop)
}

fn silent(lab: &mut Lab, port: &'static str) -> Result<Broken> {
    lab.caused(&[LEADS]);
    silence(&lab.network.router, port)?;
    Ok(Broken::until(format!("nothing passes {port}"), |lab| {
        lab.network.router.sh("nft delete table netdev silent").map(drop)
    }))
}

pub(super) fn uplink_silent(lab: &mut Lab) -> Result<Broken> {
    silent(lab, "a1-wan")
}

pub(super) fn lan_dead(lab: &mut Lab) -> Result<Broken> {
    silent(lab, "a1-lan")
}

/// The kernel removes the LAN's routes, and the default route leads to its nodes.
pub(super) fn lan_down(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS, NO_ENDPOINT, OVERLOADED]);
    node(lab, LEADER)?.netns.ip("link set eth0 down\n")?;
    Ok(Broken::until("eth0 of a1 is down, eth1 is not", |lab| {
        let leader = node(lab, LEADER)?;
        leader.netns.ip("link set eth0 up\n")?;
        lab.network.restore_routes(&leader)
    }))
}

pub(super) fn carrier_down(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS, NO_ENDPOINT]);
    lab.network.router.ip("link set a1-wan down\n")?;
    Ok(Broken::until("eth1 of a1 has no carrier", |lab| {
        lab.network.router.ip("link set a1-wan up\n")?;
        let leader = node(lab, LEADER)?;
        lab.network.restore_routes(&leader)
    }))
}

pub(super) fn kilo0_down(lab: &mut Lab) -> Result<Broken> {
    // Its agent would set it up again at once.
    let agent = agent(lab, LEADER)?;
    kill(agent, Signal::SIGSTOP)?;
    node(lab, LEADER)?.netns.ip("link set kilo0 down\n")?;
    Ok(Broken::until("kilo0 of a1 is down, and its agent stands still", move |_| {
        kill(agent, Signal::SIGCONT).context("the agent of a1")
    }))
}

/// The leader has lost power and is back, and its stand-by leads.
pub(super) fn leader_was_away(lab: &mut Lab) -> Result<()> {
    cut_power(lab, LEADER)?;
    wait::fault_lasts(Duration::from_secs(2));
    boot(lab, LEADER)?;
    // Until it has asked who leads it takes itself for the leader.
    wait::time_passes(ASKED, "a node that boots asks who leads, and nothing shows that it has");
    state::acts(lab, STAND_BY, NOTICED)
}

/// The leader loses power, and has it again before a machine that knows no other has tried for long.
pub(super) fn leader_reboots(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[OVERLOADED]);
    cut_power(lab, LEADER)?;
    wait::fault_lasts(Duration::from_secs(5));
    boot(lab, LEADER)?;
    Ok(Broken::done("a1 had neither links nor processes for 5 s"))
}

pub(super) fn leader_returns(lab: &mut Lab) -> Result<Broken> {
    let term = state::changes(lab);
    let took = state::leads_again(lab, RETURN)?;
    // The stand-by follows first, then everybody else.
    wait::time_passes(FOLLOW, "changes of the leader are counted");
    Ok(Broken::done(format!(
        "a1 leads again after {} s, {} changes in all",
        took.as_secs(),
        state::changes(lab).saturating_sub(term)
    )))
}

pub(super) fn leader_cordoned(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS]);
    let path = lab.agents.cluster().join("node-a1.yaml");
    let before = fs::read_to_string(&path)?;
    nodes::put(&path, &before.replace("spec:\n", "spec:\n  unschedulable: true\n"))?;
    state::acts(lab, STAND_BY, NOTICED)?;
    Ok(Broken::until("a2 leads, a1 is cordoned", move |lab| {
        nodes::put(&path, &before)?;
        state::acts(lab, LEADER, RETURN)
    }))
}

pub(super) fn leader_moves(lab: &mut Lab) -> Result<Broken> {
    lab.caused(&[LEADS]);
    let path = lab.agents.cluster().join("node-a2.yaml");
    let before = fs::read_to_string(&path)?;
    let text = nodes::annotated(lab, STAND_BY, &[("leader", "true")])?;
    nodes::put(&path, &text)?;
    state::acts(lab, STAND_BY, NOTICED)?;
    Ok(Broken::until("a2 leads because its annotation says so", move |lab| {
        nodes::put(&path, &before)?;
        state::acts(lab, LEADER, NOTICED)
    }))
}

pub(super) fn agents_killed(lab: &mut Lab) -> Result<Broken> {
    nodes::kill_all(lab).map(Broken::done)
}

pub(super) fn agents_restarted(lab: &mut Lab) -> Result<Broken> {
    for name in nodes::names(lab) {
        nodes::stop_and_start(lab, &[name], Signal::SIGTERM, Duration::from_millis(100))?;
    }
    Ok(Broken::done("5 processes, one after the other"))
}

pub(super) fn agent(lab: &Lab, name: &str) -> Result<Pid> {
    let pid = lab.agents.pid(name).with_context(|| format!("no agent runs on {name}"))?;
    Ok(Pid::from_raw(pid.cast_signed()))
}

/// Stops these agents for so long.
pub(super) fn stand_still(agents: &[Pid], time: Duration) -> Result<()> {
    agents.iter().try_for_each(|agent| kill(*agent, Signal::SIGSTOP))?;
    wait::fault_lasts(time);
    agents.iter().try_for_each(|agent| kill(*agent, Signal::SIGCONT)).context("agents that stand still")
}

pub(super) fn agents_stopped(lab: &mut Lab) -> Result<Broken> {
    for name in [LEADER, STAND_BY, MEMBER, FAR] {
        stand_still(&[agent(lab, name)?], length())?;
        wait::time_passes(AWAKE, "what an agent does once it is awake must cost nothing");
    }
    Ok(Broken::done(format!("SIGSTOP and, {} s later, SIGCONT", length().as_secs())))
}

pub(super) fn agents_stalled(lab: &mut Lab) -> Result<Broken> {
    let agents = nodes::names(lab).iter().map(|name| agent(lab, name)).collect::<Result<Vec<_>>>()?;
    for _ in 0..6 {
        stand_still(&agents, Duration::from_millis(200))?;
        wait::pace(Duration::from_secs(5));
    }
    Ok(Broken::done("6 times 200 ms"))
}

pub(super) fn loss(lab: &mut Lab) -> Result<Broken> {
    let ports = lab.network.nodes.iter().flat_map(|node| {
        let wan = node.public.is_some().then(|| format!("\"{}-wan\"", node.name()));
        std::iter::once(format!("\"{}-lan\"", node.name())).chain(wan)
    });
    let ports = ports.collect::<Vec<_>>().join(", ");
    let router = lab.network.router.clone();
    router.sh(&format!(
        "nft 'table netdev silent {{ counter lost {{ }}; chain in {{
             type filter hook ingress devices = {{ {ports} }} priority 0; policy accept;
             numgen random mod 100 < 5 counter name lost drop
         }}; }}'"
    ))?;
    // Probes are lost like everything else.
    lab.caused(&[OVERLOADED]);
    let busy = Busy::all(&router).map(|busy| {
        wait::fault_lasts(length());
        drop(busy);
    });
    let lost = crate::counters::nft(&router, "netdev silent lost");
    router.sh("nft delete table netdev silent")?;
    busy?;
    let lost = lost?;
    ensure!(lost > 0, "no packet was dropped in {} s", length().as_secs());
    Ok(Broken::done(format!("{lost} packets were dropped in {} s", length().as_secs())))
}

/// Processes that busy-loop until they are dropped.
struct Busy(Vec<Child>);

impl Busy {
    /// One for each CPU, in a namespace of the lab: they end with it when the lab is interrupted.
    fn all(netns: &Netns) -> Result<Self> {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        // Those that run end when another one cannot be started.
        let mut all = Self(Vec::new());
        for _ in 0..count {
            let one = netns.command("sh").args(["-c", "while :; do :; done"]).spawn();
            all.0.push(one.context("a process that keeps a CPU busy")?);
        }
        Ok(all)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
