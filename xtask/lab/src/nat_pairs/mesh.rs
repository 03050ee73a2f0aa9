//! A mesh of two leaders behind NATs and the nodes that relay for them.

use std::{
    fs,
    net::Ipv4Addr,
    path::Path,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kilo_core::tunnel_path::TunnelPath;
use nix::sys::signal::Signal;

use super::{CONNECTS, LIMIT, expected, traffic};
use crate::{
    agents::Agents,
    cni, counters, deployed_state,
    faults::traffic::Traffic,
    nat::{self, Kind, Shape},
    netns::Netns,
    network::{Network, Node, Underlay},
    probe, takedown, wait,
};

/// What the meshes of this command are built with.
#[derive(Clone, Copy)]
pub(super) struct Setup<'a> {
    pub(super) lab: &'a str,
    pub(super) bin: &'a Path,
    pub(super) wireguard: &'a str,
    /// Whether the nodes with public addresses offer to relay.
    pub(super) relays: bool,
    /// More flags of every agent.
    pub(super) flags: &'a [&'static str],
}

impl Setup<'_> {
    /// Tries one pair of kinds, which must connect by the [expected] path; returns that path, and the seconds
    /// that took.
    pub(super) fn pair(self, kinds: [Kind; 2]) -> Result<String> {
        let shape = Shape { kinds, ..Shape::default() };
        let (path, took) = self
            .with(shape, &["z"], false, |mesh| {
                let (path, took) = mesh.wait_connected()?;
                let wanted = expected::path(kinds);
                ensure!(path == wanted, "{path} after {:.0} s, instead of {wanted}", took.as_secs_f32());
                mesh.check_drawn(path.label()).map(|()| (path, took))
            })
            .with_context(|| kinds.map(Kind::name).join(" and "))?;
        Ok(format!("{path}, {:.0} s", took.as_secs_f32()))
    }

    pub(super) fn relay(self, underlay: Underlay) -> Result<()> {
        let shape = Shape { underlay, ..Shape::default() };
        self.with(shape, &["z", "w"], true, traffic::under_traffic)
    }

    /// Builds a mesh, runs `what` on it, and takes it down; a failure is reported with the agents' logs.
    pub(super) fn with<T>(
        self,
        shape: Shape,
        public: &[&'static str],
        is_blocked: bool,
        what: impl FnOnce(&mut Mesh) -> Result<T>,
    ) -> Result<T> {
        let mut mesh = Mesh::up(self, shape, public, is_blocked)?;
        let result = what(&mut mesh).and_then(|found| mesh.as_deployed().map(|()| found));
        if result.is_err() {
            mesh.print_logs();
        }
        mesh.down()?;
        result
    }
}

pub(super) struct Mesh {
    pub(super) lab: String,
    pub(super) underlay: Underlay,
    pub(super) network: Network,
    pub(super) agents: Agents,
    /// How many relays are cut off from all others.
    pub(super) cut_off: usize,
    /// Parts of warnings that agents may log because of what is done.
    pub(super) causes: &'static [&'static str],
    /// When x first sent something to y.
    attempt: JoinHandle<Result<Instant>>,
}

impl Mesh {
    fn up(setup: Setup<'_>, shape: Shape, public: &[&'static str], is_blocked: bool) -> Result<Self> {
        let Setup { lab, bin, wireguard, relays, flags } = setup;
        crate::stop_if_interrupted()?;
        crate::down(lab)?;
        let directory = crate::directory(lab);
        takedown::make(|| Ok(fs::create_dir_all(directory.join("logs"))?))?;
        let network = nat::build(lab, &directory, shape, public)?;
        if !shape.is_shared {
            nat::block(lab, shape.underlay, is_blocked)?;
        }
        let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let mut agents = Agents::prepare(bin, &directory, wireguard, &flags, &network)?;
        for node in &network.nodes {
            let annotation = match node.public {
                Some(_) => relays.then_some(("relay", "true")),
                None => Some(("persistent-keepalive", "5")),
            };
            agents.write_node(node, annotation.as_slice())?;
        }
        // Public nodes start first: only the pair's time counts.
        for node in network.nodes.iter().rev() {
            agents.start(node)?;
        }
        let attempt = first_attempt(network.node("x")?.netns.clone(), network.node("y")?.pod_ip());
        let mesh = Self {
            lab: lab.to_owned(),
            underlay: shape.underlay,
            network,
            agents,
            cut_off: 0,
            causes: &[],
            attempt,
        };
        mesh.agents.wait_until_ready(&mesh.network, LIMIT)?;
        for node in &mesh.network.nodes {
            cni::connect(node)?;
            probe::serve(&node.pod, node.pod_ip().into())?;
        }
        Ok(mesh)
    }

    /// Waits until pods of both ends meet; returns how the tunnel is connected, and the time since the first
    /// handshake attempt.
    pub(super) fn wait_connected(&mut self) -> Result<(TunnelPath, Duration)> {
        let (x, y) = (self.network.node("x")?, self.network.node("y")?);
        probe::until_seen_as(&x.pod, y.pod_ip(), x.pod_ip(), LIMIT)?;
        probe::until_seen_as(&y.pod, x.pod_ip(), y.pod_ip(), LIMIT)?;
        let now = Instant::now();
        let path = self.path("x", Duration::from_secs(10))?;
        let attempt = std::mem::replace(&mut self.attempt, std::thread::spawn(|| Ok(Instant::now())));
        let attempt =
            attempt.join().map_err(|_| anyhow!("the thread that watches WireGuard has panicked"))??;
        let took = now.saturating_duration_since(attempt);
        ensure!(took <= CONNECTS, "{path} after {} s", took.as_secs());
        Ok((path, took))
    }

    /// Checks that both ends' packets pass one relay, and none passes two.
    pub(super) fn one_relay_a_packet(&self) -> Result<String> {
        let relays: Vec<&str> =
            self.network.nodes.iter().filter(|node| node.public.is_some()).map(Node::name).collect();
        self.wait_for_path(TunnelPath::Relayed, Duration::from_secs(10))?;
        wait::time_passes(Duration::from_secs(2), "the pair may still settle on one of two relays");
        let count = || relays.iter().map(|name| self.relayed(name)).collect::<Result<Vec<_>>>();
        let (x, y) = (self.network.node("x")?, self.network.node("y")?);
        let before = count()?;
        let flow = Traffic::start_every(&x.pod, y.pod_ip().into(), Duration::from_millis(5));
        wait::time_passes(Duration::from_secs(3), "packets are counted");
        let figures = flow.finish()?;
        let after = count()?;
        let passed: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        // Questions, answers, a TCP stream both ways, and the pair's own messages.
        let (used, idle) =
            (passed.iter().max().copied().unwrap_or(0), passed.iter().min().copied().unwrap_or(0));
        ensure!(used >= 2 * figures.sent, "{passed:?} packets relayed, of {} questions", figures.sent);
        ensure!(idle * 20 <= used, "both relays relay: {passed:?}");
        ensure!(figures.lost == 0, "{} of {} lost: {:?}", figures.lost, figures.sent, figures.holes);
        Ok(format!("{used} packets by one relay, {idle} by the other"))
    }

    /// How a node reports that its tunnel to the other end is connected; its tunnels to leaders with public
    /// addresses are direct.
    fn path(&self, of: &str, limit: Duration) -> Result<TunnelPath> {
        wait::until(&format!("{of} says how its tunnel is connected"), limit, || {
            let metrics = counters::scrape(&self.network.node(of)?.netns)?;
            let count = |path: TunnelPath| metrics.get(&tunnels(path)).copied().unwrap_or(0);
            let others = (self.network.nodes.len() - 1 - self.cut_off) as u64;
            let path = [TunnelPath::Relayed, TunnelPath::Punched].into_iter().find(|path| count(*path) > 0);
            Ok(path.or((count(TunnelPath::Direct) == others).then_some(TunnelPath::Direct)))
        })
    }

    /// Waits until both ends report that their tunnel is connected this way; returns how long that took.
    pub(super) fn wait_for_path(&self, path: TunnelPath, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        wait::until(&format!("both tunnels are {path}"), limit, || {
            let paths = [self.path("x", Duration::ZERO), self.path("y", Duration::ZERO)];
            let all = paths.iter().all(|found| found.as_ref().is_ok_and(|found| *found == path));
            Ok(if all { Ok(()) } else { Err(format!("{paths:?}")) })
        })?;
        Ok(began.elapsed())
    }

    /// Checks how the agent of x draws its tunnel with y.
    pub(super) fn check_drawn(&self, path: &str) -> Result<()> {
        let picture = counters::picture(&self.network.node("x")?.netns)?;
        ensure!(
            picture.contains(&format!("x and y: {path}")),
            "the tunnel is not drawn as {path}:\n{picture}"
        );
        Ok(())
    }

    /// Which of the two relays forwards more, under traffic.
    pub(super) fn relay_in_use(&self) -> Result<&'static str> {
        self.busiest(&["z", "w"])
    }

    /// Which of these relays forwards most.
    pub(super) fn busiest(&self, relays: &[&'static str]) -> Result<&'static str> {
        let count = || relays.iter().map(|name| self.relayed(name)).collect::<Result<Vec<_>>>();
        let before = count()?;
        wait::time_passes(Duration::from_secs(1), "packets are counted");
        let passed = count()?.into_iter().zip(before).map(|(after, before)| after - before);
        let most = passed.zip(relays).max_by_key(|(passed, _)| *passed);
        most.map(|(_, name)| *name).context("no relay was named")
    }

    /// Waits until these metrics of a node are 1.
    pub(super) fn wait_for_metrics(&self, name: &str, wanted: &[&str]) -> Result<()> {
        let netns = &self.network.node(name)?.netns;
        wait::until(&format!("{wanted:?} of {name} are 1"), LIMIT, || {
            let metrics = counters::scrape(netns)?;
            let found: Vec<_> = wanted.iter().map(|metric| metrics.get(*metric).copied()).collect();
            Ok(if found.iter().all(|value| *value == Some(1)) { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .map(drop)
    }

    /// Packets that a node's programs have relayed.
    pub(super) fn relayed(&self, of: &str) -> Result<u64> {
        Ok(counters::action(&counters::scrape(&self.network.node(of)?.netns)?, "relay"))
    }

    /// The check that a mesh ends with, as labs do: every agent has its rights and hooks, and warns only of
    /// what a part causes.
    fn as_deployed(&self) -> Result<()> {
        // A node that is cut off has no link, and with failover it does not lead any more.
        let cut_off: &[&str] =
            if self.cut_off > 0 { &[deployed_state::NO_ENDPOINT, deployed_state::CHANGE] } else { &[] };
        let caused = [nat::CAUSED, cut_off, self.causes].concat();
        deployed_state::mesh_as_deployed(&self.network, &self.agents, &caused).map(drop)
    }

    /// Prints what is needed to find the cause of a failure.
    fn print_logs(&self) {
        for name in self.network.nodes.iter().map(Node::name) {
            println!("== {name}\n{}", crate::agents::tail(&self.agents.log(name)));
        }
    }

    fn down(mut self) -> Result<()> {
        for node in &self.network.nodes {
            let _ = self.agents.stop(node.name(), Signal::SIGKILL);
        }
        crate::down(&self.lab)
    }
}

/// The metric that counts the tunnels with this path.
pub fn tunnels(path: TunnelPath) -> String {
    format!("kilo_tunnels{{path=\"{path}\"}}")
}

/// Waits until something is first sent into the tunnel to the node with this pod; returns when.
fn first_attempt(from: Netns, pod: Ipv4Addr) -> JoinHandle<Result<Instant>> {
    let prefix = format!("{}/24", Ipv4Addr::from_bits(pod.to_bits() & 0xffff_ff00));
    std::thread::spawn(move || {
        wait::until(&format!("something is sent to {prefix}"), LIMIT, || {
            // Key, preshared key, endpoint, allowed IPs, handshake, bytes received, bytes sent, keepalive.
            let dump = from.sh("wg show kilo0 dump").unwrap_or_default();
            let mut peers = dump.lines().map(|line| line.split('\t').collect::<Vec<_>>());
            let sent = peers.any(|peer| {
                peer.get(3).is_some_and(|ips| ips.contains(&prefix)) && peer.get(6) != Some(&"0")
            });
            Ok(sent.then(Instant::now))
        })
    })
}
