//! `cargo xtask lab nat`: two leaders behind NATs of every pair of kinds, with a third that relays: which way they
//! find, and how long it takes; then a relay under traffic, its end, and the way back.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::{Args, ValueEnum};
use nix::sys::signal::Signal;

use super::{
    agents::Agents,
    cni, counters,
    faults::traffic::Traffic,
    nat::{self, Kind, Shape},
    netns::Netns,
    network::{Network, Node, Underlay},
    probe, report, takedown, wait, well,
};
use crate::report::{InClear, TestOutcome};

const LIMIT: Duration = Duration::from_secs(240);
/// A pair has to have a way so long after its first attempt to shake hands.
const CONNECTS: Duration = Duration::from_secs(20);
/// A direct way is tried each minute, and then it has to be found.
const RETURNS: Duration = Duration::from_secs(100);

/// What a node says that leads its location, and one that stands by.
const LEADS: &str = "kilo_failover_role{role=\"leader\"}";
const STANDS_BY: &str = "kilo_failover_role{role=\"stand-by\"}";

/// Options of `cargo xtask lab nat`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// What to try (default: everything).
    #[arg(long, value_enum)]
    part: Vec<Part>,
    /// Write the outcomes as tests to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    outcomes: Option<PathBuf>,
}

/// What can be tried by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Every pair of kinds of NATs.
    Table,
    /// Two symmetric NATs alone.
    Symmetric,
    /// Two ends behind restricting NATs, and no node offers to relay.
    Unrelayed,
    /// Two symmetric NATs for IPv4, and IPv6 behind firewalls.
    DualStack,
    /// Both ends behind one NAT, in networks that do not reach each other.
    Hairpin,
    /// One end of a relayed pair refuses relays.
    Refused,
    /// Two relays under traffic: one's agent restarts, it dies, and the direct way works again.
    Relay,
    /// The same where all nodes have IPv6 alone.
    RelayV6,
    /// With failover: a relayed leader loses power, and then the relay, which has a stand-by.
    Failover,
}

/// What runs when nothing is named: the table has two symmetric NATs, too.
const ALL: [Part; 8] = [
    Part::Table,
    Part::Unrelayed,
    Part::DualStack,
    Part::Hairpin,
    Part::Refused,
    Part::Relay,
    Part::RelayV6,
    Part::Failover,
];

impl Part {
    fn run(self, setup: Setup<'_>) -> Result<()> {
        match self {
            Self::Table => table(setup),
            Self::Symmetric => {
                println!("symmetric and symmetric: {}", setup.pair([Kind::Symmetric; 2])?);
                Ok(())
            }
            Self::Unrelayed => unrelayed(setup),
            Self::DualStack => dual_stack(setup),
            Self::Hairpin => hairpin(setup),
            Self::Refused => refused(setup),
            Self::Relay => setup.relay(Underlay::V4),
            Self::RelayV6 => setup.relay(Underlay::V6),
            Self::Failover => failover(setup),
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs these parts, each whatever became of the one before, and prints tables in Markdown.
pub fn main(options: &Options, lab: &str, bin: &Path, wireguard: &str) -> Result<()> {
    let setup = Setup { lab, bin, wireguard, relays: true, flags: &[] };
    let mut outcomes = Vec::new();
    for part in if options.part.is_empty() { &ALL[..] } else { &options.part } {
        let began = Instant::now();
        let result = part.run(setup);
        if let Err(error) = &result {
            eprintln!("nat {}: {error:#}", part.name());
        }
        let (name, seconds) = (format!("nat {}", part.name()), began.elapsed().as_secs_f64());
        let outcome = if result.is_ok() { "passed" } else { "failed" };
        let is_final = result.is_err_and(|error| error.is::<InClear>());
        outcomes.push(TestOutcome { is_final, ..TestOutcome::new("lab", name, outcome, seconds) });
    }
    report(&outcomes, options.outcomes.as_deref())
}

fn table(setup: Setup<'_>) -> Result<()> {
    println!("| | {} |\n|---|---|---|---|---|", Kind::ALL.map(Kind::name).join(" | "));
    for (row, x) in Kind::ALL.into_iter().enumerate() {
        let mut cells = Vec::new();
        for (column, y) in Kind::ALL.into_iter().enumerate() {
            cells.push(if column < row { String::new() } else { setup.pair([x, y])? });
        }
        println!("| {} | {} |", x.name(), cells.join(" | "));
    }
    Ok(())
}

/// Restricting NATs without a relay: both ends send at once to where the third leader sees the other.
fn unrelayed(setup: Setup<'_>) -> Result<()> {
    let setup = Setup { relays: false, ..setup };
    for kinds in [[Kind::PortRestricted; 2], [Kind::AddressRestricted, Kind::Symmetric]] {
        println!("no relay offered, {}: {}", kinds.map(Kind::name).join(" and "), setup.pair(kinds)?);
    }
    Ok(())
}

/// Nothing passes between both by IPv4; by IPv6, which neither publishes as its endpoint, they meet, whether anybody
/// relays or not.
fn dual_stack(setup: Setup<'_>) -> Result<()> {
    for relays in [true, false] {
        let offer = if relays { "offered" } else { "not offered" };
        let found = both_families(Setup { relays, ..setup }).with_context(|| format!("relays {offer}"))?;
        println!("symmetric and symmetric, both with IPv6 behind firewalls, relays {offer}: {found}");
    }
    Ok(())
}

fn both_families(setup: Setup<'_>) -> Result<String> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], has_both: true, ..Shape::default() };
    setup.with(shape, &["z"], false, |mesh| {
        let (way, took) = mesh.wait_connected()?;
        ensure!(way == "direct", "both have IPv6, so the tunnel needs not be {way}");
        for (name, other) in [("x", "[2001:db8:a2::2]:51820"), ("y", "[2001:db8:a1::2]:51820")] {
            let endpoints = mesh.network.node(name)?.netns.sh("wg show kilo0 endpoints")?;
            ensure!(endpoints.contains(other), "{name} reaches the other elsewhere:\n{endpoints}");
        }
        Ok(format!("{way} by IPv6, {:.0} s", took.as_secs_f32()))
    })
}

/// Two kinds of ends behind one NAT, which sends nothing back that goes to its own address.
fn hairpin(setup: Setup<'_>) -> Result<()> {
    for kind in [Kind::PortRestricted, Kind::Symmetric] {
        let shape = Shape { kinds: [kind; 2], is_shared: true, ..Shape::default() };
        let found = setup.with(shape, &["z", "w"], false, |mesh| {
            let (way, took) = mesh.wait_connected()?;
            ensure!(way == "relayed", "nothing else leads from one to the other, so it cannot be {way}");
            mesh.check_drawn("relayed by ")?;
            Ok(format!("{way}, {:.0} s; {}", took.as_secs_f32(), mesh.one_relay_a_packet()?))
        })?;
        println!("both ends behind one NAT, {}: {found}", kind.name());
    }
    Ok(())
}

/// Two symmetric NATs, relayed; then the agent of one end gets `--relay=off`, and loses it again.
fn refused(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], ..Shape::default() };
    let found = setup.with(shape, &["z"], false, |mesh| {
        let (way, took) = mesh.wait_connected()?;
        ensure!(way == "relayed", "no two symmetric NATs meet, so the tunnel cannot be {way}");
        let y = mesh.network.node("y")?.clone();
        mesh.agents.stop("y", Signal::SIGTERM)?;
        mesh.agents.start_with(&y, &["--relay=off"])?;
        let began = Instant::now();
        wait::until("the relay has ended the pair", Duration::from_secs(30), || {
            let metrics = counters::scrape(&mesh.network.node("z")?.netns)?;
            let pairs = metrics.get("kilo_relayed_pairs").copied();
            Ok(if pairs == Some(0) { Ok(()) } else { Err(format!("{pairs:?} pairs")) })
        })?;
        let ended = began.elapsed();
        wait::time_passes(Duration::from_secs(2), "what is under way arrives");
        let before = mesh.relayed("z")?;
        let x = mesh.network.node("x")?.clone();
        let flow = Traffic::start_every(&x.pod, y.pod_ip().into(), Duration::from_millis(5));
        wait::time_passes(Duration::from_secs(5), "a packet through the relay would be counted");
        let figures = flow.finish()?;
        let passed = mesh.relayed("z")? - before;
        ensure!(passed == 0, "{passed} packets passed the relay that one end refuses");
        ensure!(
            figures.lost == figures.sent,
            "{} of {} datagrams got an answer, and no way but the relay leads there",
            figures.sent - figures.lost,
            figures.sent
        );
        mesh.agents.stop("y", Signal::SIGTERM)?;
        mesh.agents.start(&y)?;
        let began = Instant::now();
        probe::until_seen_as(&x.pod, y.pod_ip(), x.pod_ip(), LIMIT)?;
        mesh.wait_for_way("relayed", Duration::from_secs(10))?;
        Ok(format!(
            "{way} after {:.0} s, ended {:.0} s after y's agent began with --relay=off, 0 packets passed, {way} again \
             {:.0} s after it began without",
            took.as_secs_f32(),
            ended.as_secs_f32(),
            began.elapsed().as_secs_f32()
        ))
    })?;
    println!("one end refuses relays: {found}");
    Ok(())
}

/// Between two symmetric NATs: a leader's stand-by has a relayed tunnel of its own before it is needed, and so has the
/// relay's stand-by.
fn failover(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], has_second: true, ..Shape::default() };
    let setup = Setup { flags: &["--failover=auto"], ..setup };
    setup.with(shape, &["z", "z2"], false, |mesh| {
        let (way, took) = mesh.wait_connected()?;
        ensure!(way == "relayed", "no two symmetric NATs meet, so the tunnel cannot be {way}");
        println!("relayed {:.1} s after the first attempt", took.as_secs_f32());
        let (x2, y) = (mesh.network.node("x2")?.clone(), mesh.network.node("y")?.clone());
        // Whichever was relayed first leads until both have been well for a minute.
        mesh.wait_for_metrics("x2", &["kilo_stand_by_fit", STANDS_BY])?;
        mesh.wait_for_metrics("x", &[LEADS])?;
        let x = mesh.network.node("x")?.netns.clone();
        outage(mesh, (&x2, &y), "the leader of a relayed location is cut off", &x)?;
        mesh.wait_for_metrics("x2", &[LEADS])?;
        let relay = mesh.network.node(mesh.busiest(&["z", "z2"])?)?.netns.clone();
        outage(mesh, (&x2, &y), &format!("relay {} is cut off", relay.name), &relay)
    })
}

/// What a flow between pods of both nodes loses while a node is cut off whole.
fn outage(mesh: &mut Mesh, (from, to): (&Node, &Node), what: &str, off: &Netns) -> Result<()> {
    let flow = Traffic::start(&from.pod, to.pod_ip().into());
    flow.settle(LIMIT)?;
    off.ip("link set eth0 down\n")?;
    wait::fault_lasts(Duration::from_secs(8));
    let figures = flow.finish()?;
    let gap = figures.gap.as_millis();
    println!("{what}: {} of {} lost, {gap} ms without an answer", figures.lost, figures.sent);
    ensure!(figures.gap <= Duration::from_secs(2), "{what}: {gap} ms");
    mesh.cut_off += 1;
    Ok(())
}

/// What the meshes of this command are built with.
#[derive(Clone, Copy)]
struct Setup<'a> {
    lab: &'a str,
    bin: &'a Path,
    wireguard: &'a str,
    /// Whether the nodes with public addresses offer to relay.
    relays: bool,
    /// More flags of every agent.
    flags: &'a [&'static str],
}

impl Setup<'_> {
    /// One pair of kinds: the way, and the seconds it took.
    fn pair(self, kinds: [Kind; 2]) -> Result<String> {
        let shape = Shape { kinds, ..Shape::default() };
        let (way, took) = self
            .with(shape, &["z"], false, Mesh::wait_connected)
            .with_context(|| kinds.map(Kind::name).join(" and "))?;
        Ok(format!("{way}, {:.0} s", took.as_secs_f32()))
    }

    fn relay(self, underlay: Underlay) -> Result<()> {
        let shape = Shape { underlay, ..Shape::default() };
        self.with(shape, &["z", "w"], true, under_traffic)
    }

    /// Builds a mesh, does something with it, and takes it down; what went wrong is reported with its logs.
    fn with<T>(
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

struct Mesh {
    lab: String,
    underlay: Underlay,
    network: Network,
    agents: Agents,
    /// How many relays are cut off from all others.
    cut_off: usize,
    /// When x sent something to y for the first time.
    attempt: JoinHandle<Result<Instant>>,
}

impl Mesh {
    fn up(setup: Setup<'_>, shape: Shape, public: &[&'static str], is_blocked: bool) -> Result<Self> {
        let Setup { lab, bin, wireguard, relays, flags } = setup;
        super::stop_if_interrupted()?;
        super::down(lab)?;
        let directory = super::directory(lab);
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
        // The public ones are there first: it is the pair's time that counts.
        for node in network.nodes.iter().rev() {
            agents.start(node)?;
        }
        let attempt = first_attempt(network.node("x")?.netns.clone(), network.node("y")?.pod_ip());
        let mesh =
            Self { lab: lab.to_owned(), underlay: shape.underlay, network, agents, cut_off: 0, attempt };
        mesh.agents.wait_until_ready(&mesh.network, LIMIT)?;
        for node in &mesh.network.nodes {
            cni::connect(node)?;
            probe::serve(&node.pod, node.pod_ip().into())?;
        }
        Ok(mesh)
    }

    /// Waits until pods of both ends meet; the way, and the time since the first attempt to shake hands.
    fn wait_connected(&mut self) -> Result<(String, Duration)> {
        let (x, y) = (self.network.node("x")?, self.network.node("y")?);
        probe::until_seen_as(&x.pod, y.pod_ip(), x.pod_ip(), LIMIT)?;
        probe::until_seen_as(&y.pod, x.pod_ip(), y.pod_ip(), LIMIT)?;
        let now = Instant::now();
        let way = self.way("x", Duration::from_secs(10))?;
        let attempt = std::mem::replace(&mut self.attempt, std::thread::spawn(|| Ok(Instant::now())));
        let attempt =
            attempt.join().map_err(|_| anyhow!("the thread that watches WireGuard has panicked"))??;
        let took = now.saturating_duration_since(attempt);
        ensure!(took <= CONNECTS, "{way} after {} s", took.as_secs());
        Ok((way, took))
    }

    /// Both ends' packets pass one relay, and none passes two.
    fn one_relay_a_packet(&self) -> Result<String> {
        let relays: Vec<&str> =
            self.network.nodes.iter().filter(|node| node.public.is_some()).map(Node::name).collect();
        self.wait_for_way("relayed", Duration::from_secs(10))?;
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

    /// How a node says that its tunnel to the other end is connected; those to leaders with public addresses
    /// are direct.
    fn way(&self, of: &str, limit: Duration) -> Result<String> {
        wait::until(&format!("{of} says how its tunnel is connected"), limit, || {
            let metrics = counters::scrape(&self.network.node(of)?.netns)?;
            let count =
                |way: &str| metrics.get(&format!("kilo_tunnels{{way=\"{way}\"}}")).copied().unwrap_or(0);
            let others = (self.network.nodes.len() - 1 - self.cut_off) as u64;
            let way = ["relayed", "punched"].into_iter().find(|way| count(way) > 0);
            Ok(way.or((count("direct") == others).then_some("direct")).map(str::to_owned))
        })
    }

    /// Waits until both ends say that their tunnel is connected this way; how long that took.
    fn wait_for_way(&self, way: &str, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        wait::until(&format!("both tunnels are {way}"), limit, || {
            let ways = [self.way("x", Duration::ZERO), self.way("y", Duration::ZERO)];
            let all = ways.iter().all(|found| found.as_ref().is_ok_and(|found| found == way));
            Ok(if all { Ok(()) } else { Err(format!("{ways:?}")) })
        })?;
        Ok(began.elapsed())
    }

    /// The agent of x draws its tunnel with y as this.
    fn check_drawn(&self, way: &str) -> Result<()> {
        let picture = counters::picture(&self.network.node("x")?.netns)?;
        ensure!(picture.contains(&format!("x and y: {way}")), "the tunnel is not drawn as {way}:\n{picture}");
        Ok(())
    }

    /// Which of both relays sends on more, under traffic.
    fn relay_in_use(&self) -> Result<&'static str> {
        self.busiest(&["z", "w"])
    }

    /// Which of these relays sends on most.
    fn busiest(&self, relays: &[&'static str]) -> Result<&'static str> {
        let count = || relays.iter().map(|name| self.relayed(name)).collect::<Result<Vec<_>>>();
        let before = count()?;
        wait::time_passes(Duration::from_secs(1), "packets are counted");
        let passed = count()?.into_iter().zip(before).map(|(after, before)| after - before);
        let most = passed.zip(relays).max_by_key(|(passed, _)| *passed);
        most.map(|(_, name)| *name).context("no relay was named")
    }

    /// Waits until these metrics of a node are 1.
    fn wait_for_metrics(&self, name: &str, wanted: &[&str]) -> Result<()> {
        let netns = &self.network.node(name)?.netns;
        wait::until(&format!("{wanted:?} of {name} are 1"), LIMIT, || {
            let metrics = counters::scrape(netns)?;
            let found: Vec<_> = wanted.iter().map(|metric| metrics.get(*metric).copied()).collect();
            Ok(if found.iter().all(|value| *value == Some(1)) { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .map(drop)
    }

    /// What a node's programs have sent on.
    fn relayed(&self, of: &str) -> Result<u64> {
        Ok(counters::action(&counters::scrape(&self.network.node(of)?.netns)?, "relay"))
    }

    /// What a mesh ends with, as labs do: every agent has its rights and hooks, and nothing to warn about that no part causes.
    fn as_deployed(&self) -> Result<()> {
        // A node that is cut off has no link, and with failover it does not lead any more.
        let cut_off: &[&str] = if self.cut_off > 0 { &[well::NO_ENDPOINT, well::CHANGE] } else { &[] };
        let caused = [nat::CAUSED, cut_off].concat();
        well::mesh_as_deployed(&self.network, &self.agents, &caused).map(drop)
    }

    /// What is needed to see why.
    fn print_logs(&self) {
        for name in self.network.nodes.iter().map(Node::name) {
            println!("== {name}\n{}", super::agents::tail(&self.agents.log(name)));
        }
    }

    fn down(mut self) -> Result<()> {
        for node in &self.network.nodes {
            let _ = self.agents.stop(node.name(), Signal::SIGKILL);
        }
        super::down(&self.lab)
    }
}

/// Two NATs between which nothing passes, with two relays offered: the relay's agent restarts, the relay dies, and
/// the direct way works again.
fn under_traffic(mesh: &mut Mesh) -> Result<()> {
    let (way, took) = mesh.wait_connected()?;
    ensure!(way == "relayed", "nothing passes between both, so the tunnel cannot be {way}");
    println!("relayed {:.1} s after the first attempt, {:?}", took.as_secs_f32(), mesh.underlay);
    println!("{}", mesh.one_relay_a_packet()?);
    let before = [mesh.relayed("z")?, mesh.relayed("w")?];
    let (x, y) = (mesh.network.node("x")?.clone(), mesh.network.node("y")?.clone());
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let after = [mesh.relayed("z")?, mesh.relayed("w")?];
    let used = usize::from(after[1] - before[1] > after[0] - before[0]);
    let sums = [after[0] - before[0], after[1] - before[1]];
    println!("packets of relays z and w: {sums:?}");
    let relay = ["z", "w"][used];
    // Its agent restarts: kernels go on.
    mesh.agents.stop(relay, Signal::SIGKILL)?;
    wait::fault_lasts(Duration::from_secs(1));
    let node = mesh.network.node(relay)?.clone();
    mesh.agents.start(&node)?;
    super::agents::wait_healthy(&node.netns, LIMIT)?;
    wait::time_passes(Duration::from_secs(3), "what the new agent does meanwhile must lose nothing");
    let figures = flow.finish()?;
    println!(
        "the relay's agent killed and started again: {} of {} lost, {} ms without an answer",
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    let holes = &figures.holes;
    ensure!(figures.lost == 0, "{} datagrams were lost while an agent restarted: {holes:?}", figures.lost);
    mesh.wait_for_way("relayed", Duration::from_secs(10))?;
    wait::time_passes(Duration::from_secs(6), "devices settle for 5 s after an endpoint was moved");
    // Its offer is taken back: both ends go over to the other one, and it sends on meanwhile.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let relay = mesh.relay_in_use()?;
    let node = mesh.network.node(relay)?.clone();
    mesh.agents.write_node(&node, &[])?;
    wait::until("the ends have left the relay whose offer is taken back", Duration::from_secs(20), || {
        let used = mesh.relay_in_use()?;
        Ok(if used == relay { Err(used) } else { Ok(()) })
    })?;
    wait::time_passes(Duration::from_secs(32), "it forgets its pairs after half a minute");
    let figures = flow.finish()?;
    println!("the offer of relay {relay} is taken back: {} of {} lost", figures.lost, figures.sent);
    ensure!(figures.lost == 0, "{} datagrams were lost: {:?}", figures.lost, figures.holes);
    mesh.agents.write_node(&node, &[("relay", "true")])?;
    wait::time_passes(Duration::from_secs(15), "pairs hold it again as the other relay");
    // The one in use is cut off whole.
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    let relay = mesh.relay_in_use()?;
    mesh.network.node(relay)?.netns.ip("link set eth0 down\n")?;
    mesh.cut_off = 1;
    wait::fault_lasts(Duration::from_secs(6));
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
    nat::block(&mesh.lab, mesh.underlay, false)?;
    // Without translation it is where it says.
    let way = if mesh.underlay == Underlay::V4 { "punched" } else { "direct" };
    let took = mesh.wait_for_way(way, RETURNS)?;
    wait::time_passes(Duration::from_secs(3), "what follows the change must lose nothing");
    let figures = flow.finish()?;
    println!(
        "direct again after {:.1} s: {} of {} lost, {} ms without an answer",
        took.as_secs_f32(),
        figures.lost,
        figures.sent,
        figures.gap.as_millis()
    );
    ensure!(
        figures.lost == 0,
        "{} datagrams were lost at the return, of 1,000 a second: {:?}",
        figures.lost,
        figures.holes
    );
    breaks_again(mesh, (&x, &y))
}

/// The direct way breaks while a session is there.
fn breaks_again(mesh: &Mesh, (x, y): (&Node, &Node)) -> Result<()> {
    let flow = Traffic::start(&x.pod, y.pod_ip().into());
    flow.settle(LIMIT)?;
    nat::block(&mesh.lab, mesh.underlay, true)?;
    mesh.wait_for_way("relayed", CONNECTS + Duration::from_secs(10))?;
    wait::time_passes(Duration::from_secs(2), "packets pass the relay");
    let figures = flow.finish()?;
    println!("blocked again: {:.1} s without an answer", figures.gap.as_secs_f32());
    ensure!(figures.gap <= CONNECTS, "a session whose way broke took {:.1} s", figures.gap.as_secs_f32());
    Ok(())
}

/// When the tunnel to the node with this pod is sent into for the first time.
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
