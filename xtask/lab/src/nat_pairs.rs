//! `cargo xtask lab nat`: two leaders behind NATs of every pair of kinds, with a third that relays: which way they
//! find, and how long it takes; then a relay under traffic, its end, and the way back.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use nix::sys::signal::Signal;

use super::{
    agents::Agents,
    cni, counters,
    faults::traffic::Traffic,
    nat::{self, Kind},
    network::Network,
    probe, space,
};

const LIMIT: Duration = Duration::from_secs(240);
/// A direct way is tried each minute, and then it has to be found.
const RETURNS: Duration = Duration::from_secs(100);

/// Options of `cargo xtask lab nat`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Only the relay under traffic, without the table of kinds.
    #[arg(long)]
    relay_only: bool,
    /// Only the table of kinds.
    #[arg(long, conflicts_with = "relay_only")]
    table_only: bool,
    /// Only two symmetric NATs.
    #[arg(long, conflicts_with_all = ["relay_only", "table_only"])]
    symmetric_only: bool,
}

/// Runs all, and prints tables in Markdown.
pub fn main(options: &Options, lab: &str, bin: &Path, wireguard: &str) -> Result<()> {
    if options.symmetric_only {
        println!("symmetric and symmetric: {}", pair(lab, bin, wireguard, [Kind::Symmetric; 2])?);
        return Ok(());
    }
    if !options.relay_only {
        println!("| | {} |\n|---|---|---|---|---|", Kind::ALL.map(Kind::name).join(" | "));
        for (row, x) in Kind::ALL.into_iter().enumerate() {
            let mut cells = Vec::new();
            for (column, y) in Kind::ALL.into_iter().enumerate() {
                cells.push(if column < row { String::new() } else { pair(lab, bin, wireguard, [x, y])? });
            }
            println!("| {} | {} |", x.name(), cells.join(" | "));
        }
    }
    if !options.table_only {
        let mut bench = Bench::up(lab, bin, wireguard, [Kind::PortRestricted; 2], &["z", "w"], true)?;
        let result = under_traffic(&mut bench);
        if result.is_err() {
            bench.tell();
        }
        bench.down()?;
        result?;
    }
    Ok(())
}

/// One pair of kinds: the way and the seconds from the start of both agents.
fn pair(lab: &str, bin: &Path, wireguard: &str, kinds: [Kind; 2]) -> Result<String> {
    let bench = Bench::up(lab, bin, wireguard, kinds, &["z"], false)?;
    let found = bench.connects();
    if found.is_err() {
        bench.tell();
    }
    bench.down()?;
    let (way, took) = found.with_context(|| kinds.map(Kind::name).join(" and "))?;
    Ok(format!("{way}, {:.0} s", took.as_secs_f32()))
}

struct Bench {
    lab: String,
    directory: PathBuf,
    network: Network,
    agents: Agents,
    started: Instant,
}

impl Bench {
    fn up(
        lab: &str,
        bin: &Path,
        wireguard: &str,
        kinds: [Kind; 2],
        public: &[&'static str],
        is_blocked: bool,
    ) -> Result<Self> {
        space::remove(nat::spaces(lab))?;
        let directory = std::env::temp_dir().join(format!("{lab}-nat"));
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::create_dir_all(directory.join("logs"))?;
        let network = nat::build(lab, &directory, kinds, public)?;
        nat::block(lab, is_blocked)?;
        let mut agents = Agents::prepare(bin, &directory, wireguard, &[], &network)?;
        for node in &network.nodes {
            let annotation =
                if node.public.is_some() { ("relay", "true") } else { ("persistent-keepalive", "5") };
            agents.write_node(node, &[annotation])?;
        }
        // The public ones are there first: it is the pair's time that counts.
        let started = Instant::now();
        for node in network.nodes.iter().rev() {
            agents.start(node)?;
        }
        let bench = Self { lab: lab.to_owned(), directory, network, agents, started };
        bench.agents.wait_until_ready(&bench.network, LIMIT)?;
        for node in &bench.network.nodes {
            cni::connect(node)?;
            probe::serve(&node.pod, node.pod_ip().into())?;
        }
        Ok(bench)
    }

    /// Waits until pods of both ends meet; the way, and the time since the agents were started.
    fn connects(&self) -> Result<(String, Duration)> {
        let (x, y) = (self.network.node("x")?, self.network.node("y")?);
        probe::until_seen_as(&x.pod, y.pod_ip(), x.pod_ip(), LIMIT)?;
        probe::until_seen_as(&y.pod, x.pod_ip(), y.pod_ip(), LIMIT)?;
        let took = self.started.elapsed();
        Ok((self.way("x", Duration::from_secs(10))?, took))
    }

    /// How a node says that its tunnel to the other end is connected; those to leaders with public addresses
    /// are direct.
    fn way(&self, of: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let metrics = counters::scrape(&self.network.node(of)?.space)?;
            let count =
                |way: &str| metrics.get(&format!("kilo_tunnels{{way=\"{way}\"}}")).copied().unwrap_or(0);
            let others = self.network.nodes.len() as u64 - 1;
            match ["relayed", "punched"].into_iter().find(|way| count(way) > 0) {
                Some(way) => return Ok(way.to_owned()),
                None if count("direct") == others => return Ok("direct".to_owned()),
                None => {}
            }
            ensure!(Instant::now() < deadline, "{of} does not say how its tunnel is connected");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn until(&self, way: &str, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        loop {
            let ways = [self.way("x", Duration::ZERO), self.way("y", Duration::ZERO)];
            if ways.iter().all(|found| found.as_ref().is_ok_and(|found| found == way)) {
                return Ok(began.elapsed());
            }
            ensure!(began.elapsed() < limit, "not {way} after {} s: {ways:?}", limit.as_secs());
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// What a node's programs have sent on.
    fn relayed(&self, of: &str) -> Result<u64> {
        Ok(counters::action(&counters::scrape(&self.network.node(of)?.space)?, "relay"))
    }

    /// What is needed to see why.
    fn tell(&self) {
        for name in ["x", "y", "z"] {
            println!("== {name}\n{}", super::agents::tail(&self.agents.log(name)));
        }
    }

    fn down(mut self) -> Result<()> {
        for node in &self.network.nodes {
            let _ = self.agents.stop(node.name(), Signal::SIGKILL);
        }
        space::remove(nat::spaces(&self.lab))?;
        fs::remove_dir_all(&self.directory).with_context(|| self.directory.display().to_string())
    }
}

/// Two NATs between which nothing passes, with two relays offered: the relay's agent restarts, the relay dies, and
/// the direct way works again.
fn under_traffic(bench: &mut Bench) -> Result<()> {
    let (way, took) = bench.connects()?;
    ensure!(way == "relayed", "nothing passes between both, so the tunnel cannot be {way}");
    println!("relayed {:.1} s after the agents' start", took.as_secs_f32());
    bench.until("relayed", Duration::from_secs(10))?;
    std::thread::sleep(Duration::from_secs(6));
    let before = [bench.relayed("z")?, bench.relayed("w")?];
    let (x, y) = (bench.network.node("x")?.clone(), bench.network.node("y")?.clone());
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let after = [bench.relayed("z")?, bench.relayed("w")?];
    let used = usize::from(after[1] - before[1] > after[0] - before[0]);
    let sums = [after[0] - before[0], after[1] - before[1]];
    println!("packets of relays z and w: {sums:?}");
    let relay = ["z", "w"][used];
    // Its agent restarts: kernels go on.
    bench.agents.stop(relay, Signal::SIGKILL)?;
    std::thread::sleep(Duration::from_secs(1));
    let node = bench.network.node(relay)?.clone();
    bench.agents.start(&node)?;
    std::thread::sleep(Duration::from_secs(5));
    let figures = flow.finish()?;
    println!(
        "the relay's agent killed and started again: {} of {} lost, {} ms without an answer",
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    bench.until("relayed", Duration::from_secs(10))?;
    std::thread::sleep(Duration::from_secs(6));
    // It is cut off whole.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let before = [bench.relayed("z")?, bench.relayed("w")?];
    std::thread::sleep(Duration::from_secs(1));
    let after = [bench.relayed("z")?, bench.relayed("w")?];
    let relay = ["z", "w"][usize::from(after[1] - before[1] > after[0] - before[0])];
    bench.network.node(relay)?.space.ip("link set eth0 down\n")?;
    std::thread::sleep(Duration::from_secs(6));
    let figures = flow.finish()?;
    println!(
        "relay {relay} cut off: {} of {} lost, {} ms without an answer",
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    ensure!(figures.gap <= Duration::from_secs(2), "another relay took {} ms", figures.gap.as_millis());
    // The network between both NATs works again.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    nat::block(&bench.lab, false)?;
    let took = bench.until("punched", RETURNS)?;
    std::thread::sleep(Duration::from_secs(3));
    let figures = flow.finish()?;
    println!(
        "direct again after {:.1} s: {} of {} lost, {} ms without an answer",
        took.as_secs_f32(),
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    ensure!(figures.lost == 0, "{} datagrams were lost at the return", figures.lost);
    Ok(())
}
