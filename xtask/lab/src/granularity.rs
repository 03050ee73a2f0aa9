//! Granularities, switched while connections are open: all agents restart with another flag, or a node
//! becomes a location of its own by annotation.

use std::{
    net::{IpAddr, TcpStream},
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    Lab,
    counters::{self, action},
    deployed_state::LEADS,
    network::Network,
    probe, wait,
};

/// Longest wait until all pods reach each other.
const LIMIT: Duration = Duration::from_secs(40);
/// The agents' `--resync-period` here: no connection may stand still longer.
const RECONCILE: Duration = Duration::from_secs(5);
/// Milliseconds between two echo requests.
const INTERVAL: u64 = 20;

/// Granularity of the lab.
const USUAL: &str = "location";

/// Switches through all granularities and back to the first.
pub fn run(lab: &mut Lab) -> Result<String> {
    // A node that is its own location leads, with or without a public address.
    lab.caused(&[LEADS]);
    let result = route_wireguard(&lab.network).and_then(|()| through_all(lab));
    if result.is_err() {
        // The checks that follow find the mesh as it was; the first error counts.
        let _ = switch_to(lab, USUAL);
    }
    let unrouted = unroute_wireguard(&lab.network);
    let figures = result?;
    unrouted?;
    Ok(figures)
}

fn through_all(lab: &mut Lab) -> Result<String> {
    let mut figures = Vec::new();
    for granularity in ["full", "cross", USUAL] {
        let flow = Flow::start(&lab.network, "a2", "b2")?;
        let began = Instant::now();
        switch_to(lab, granularity)?;
        // On an emulated kernel the agents take longer to start than to reconcile.
        let limit = began.elapsed().max(RECONCILE);
        all_pods_meet(&lab.network).context(granularity)?;
        figures.push(format!("{granularity}: {}", flow.finish(limit).context(granularity)?));
        let encrypted =
            || -> Result<u64> { Ok(action(&counters::scrape(&lab.network.node("a2")?.netns)?, "encrypt")) };
        let before = encrypted()?;
        all_pods_meet(&lab.network)?;
        let own_tunnels = encrypted()? > before;
        ensure!(own_tunnels == (granularity != USUAL), "{granularity}: a2 encrypts: {own_tunnels}");
    }
    Ok(format!("({})", figures.join("; ")))
}

/// Restarts every agent with this granularity, whatever happens to another one; the first error counts.
fn switch_to(lab: &mut Lab, granularity: &str) -> Result<()> {
    lab.agents.set_flag("--mesh-granularity", granularity);
    let nodes = lab.network.nodes.clone();
    let mut result = Ok(());
    for node in &nodes {
        let stopped = lab.agents.stop(node.name(), Signal::SIGTERM);
        result = result.and(stopped).and(lab.agents.start(node));
    }
    let ready = lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60));
    result.and(ready)
}

/// a3, behind NAT, loses its private address by annotation, and gets it back. a1
/// and a3 also reach each other from LAN to LAN, where a1 has another address
/// than its endpoint; WireGuard must not take that for one.
pub fn mixed(lab: &mut Lab) -> Result<String> {
    let result = alone_and_back(lab);
    if result.is_err() {
        // The checks that follow find the mesh as it was.
        lab.agents.write_node(lab.network.node("a3")?, &[])?;
    }
    result
}

fn alone_and_back(lab: &Lab) -> Result<String> {
    let network = &lab.network;
    let a3 = network.node("a3")?;
    let mut figures = Vec::new();
    let alone = [("force-internal-ip", "-"), ("persistent-keepalive", "5")];
    for (annotations, leads) in [(&alone[..], true), (&[][..], false)] {
        let flow = Flow::start(network, "a2", "a3")?;
        let at_work = || -> Result<Vec<f64>> {
            network.nodes.iter().map(|node| counters::at_work(&node.netns)).collect()
        };
        let before = at_work()?;
        lab.agents.write_node(a3, annotations)?;
        let started = Instant::now();
        let has_address = || a3.netns.sh("ip -o address show dev kilo0").map(|text| text.contains("10.4."));
        wait::until(&format!("a3 leads: {leads}"), LIMIT, || Ok(has_address()? == leads))?;
        // The others start once a3's agent has, and take long on an emulated kernel.
        let limit = started.elapsed() + RECONCILE;
        all_pods_meet(network)?;
        let longest = at_work()?.iter().zip(&before).map(|(now, before)| now - before).fold(0.0, f64::max);
        let limit = limit + Duration::from_secs_f64(longest);
        figures.push(flow.finish(limit)?);
        let a1 = network.node("a1")?;
        for (node, other) in [(a1, "\t10.4.0."), (a3, "\t10.4.0."), (a3, "\t10.1.0.11:")] {
            let endpoints = node.netns.sh("wg show kilo0 endpoints")?;
            ensure!(
                !endpoints.contains(other),
                "{}: an endpoint inside the tunnel:\n{endpoints}",
                node.name()
            );
        }
    }
    Ok(format!("(alone: {}; with the others: {})", figures[0], figures[1]))
}

/// Routes only WireGuard between the LANs: without it, nodes that are their own location and share a NAT
/// cannot reach each other.
fn route_wireguard(network: &Network) -> Result<()> {
    let rules = "nft insert rule inet lab forward udp dport 51820 accept
                 nft insert rule inet lab forward udp sport 51820 accept";
    network.router.sh(rules).map(drop)
}

fn unroute_wireguard(network: &Network) -> Result<()> {
    let rules = network.router.sh("nft -a list chain inet lab forward")?;
    let ours = rules.lines().filter(|line| line.contains("51820"));
    for handle in ours.filter_map(|line| line.rsplit(' ').next()) {
        network.router.sh(&format!("nft delete rule inet lab forward handle {handle}"))?;
    }
    Ok(())
}

/// Every pod reaches every other, with its own address.
fn all_pods_meet(network: &Network) -> Result<()> {
    std::thread::scope(|scope| {
        let sources = network.nodes.iter().map(|from| {
            scope.spawn(move || {
                let others = network.nodes.iter().filter(|to| to.name() != from.name());
                others
                    .into_iter()
                    .try_for_each(|to| probe::until_seen_as(&from.pod, to.pod_ip(), from.pod_ip(), LIMIT))
            })
        });
        let threads: Vec<_> = sources.collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("probe thread"))?)
    })
}

/// A ping and a TCP connection between two pods.
struct Flow {
    started: Instant,
    ping: Child,
    stop: Arc<AtomicBool>,
    /// Returns the longest time without an echo.
    connection: JoinHandle<Result<std::io::Result<Duration>>>,
}

impl Flow {
    fn start(network: &Network, from: &str, to: &str) -> Result<Self> {
        let (from, to) = (network.node(from)?, network.node(to)?);
        let target = to.pod_ip();
        let (started, interval) = (Instant::now(), format!("0.{INTERVAL:03}"));
        let ping = from
            .pod
            .command("ping")
            .args(["-n", "-q", "-i", &interval, "-w", "120", &target.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let connection = from.pod.spawn(move || converse(target.into(), &stopped));
        wait::time_passes(Duration::from_millis(500), "both have begun to talk before something changes");
        Ok(Self { started, ping, stop, connection })
    }

    /// Returns what was lost, or fails when that is more than `limit`.
    fn finish(self, limit: Duration) -> Result<String> {
        self.stop.store(true, Ordering::SeqCst);
        kill(Pid::from_raw(self.ping.id().cast_signed()), Signal::SIGINT)?;
        let ran = self.started.elapsed();
        let text = self.ping.wait_with_output()?.stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        let line =
            text.lines().find(|line| line.contains("packets transmitted")).context("ping said nothing")?;
        let numbers: Vec<u64> = line.split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
        let [sent, received, ..] = numbers[..] else { anyhow::bail!("ping: {line}") };
        let lost = sent.saturating_sub(received);
        let pause = self.connection.join().map_err(|_| anyhow::anyhow!("connection thread"))?;
        let pause = pause?.with_context(|| format!("the TCP connection; {line}"))?;
        // On a busy machine pings are further apart than asked for.
        let apart = ran.as_secs_f64() / sent.max(1) as f64;
        ensure!(lost as f64 * apart <= limit.as_secs_f64(), "{line}");
        ensure!(pause <= limit, "the TCP connection stood still for {pause:?}; {line}");
        Ok(format!("{lost} of {sent} pings lost, TCP paused {} ms", pause.as_millis()))
    }
}

/// Sends and awaits echoes on one connection until stopped; returns the longest pause.
fn converse(target: IpAddr, stop: &AtomicBool) -> std::io::Result<Duration> {
    use std::io::{BufRead as _, BufReader, Write as _};
    let mut stream = TcpStream::connect((target, probe::PORT))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut answers = BufReader::new(stream.try_clone()?).lines();
    answers.next().transpose()?;
    let mut longest = Duration::ZERO;
    while !stop.load(Ordering::SeqCst) {
        let asked = Instant::now();
        stream.write_all(b"echo\n")?;
        let answer = answers.next().transpose().map_err(|error| {
            std::io::Error::other(format!(
                "{error}, {:?} after the last question, {longest:?} at most before",
                asked.elapsed()
            ))
        })?;
        if answer.as_deref() != Some("echo") {
            return Err(std::io::Error::other(format!("another answer: {answer:?}")));
        }
        longest = longest.max(asked.elapsed());
        wait::pace(Duration::from_millis(INTERVAL));
    }
    Ok(longest)
}
