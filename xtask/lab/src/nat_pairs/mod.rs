//! `cargo xtask lab nat`: two leaders behind NATs of every pair of kinds, with a third that relays: how they
//! connect, and how long that takes; then a relay under traffic, its end, and the return to the direct path.

mod expected;
mod mesh;
mod repeats;
mod stranger;
mod traffic;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use kilo_core::tunnel_path::TunnelPath;
use nix::sys::signal::Signal;

use super::{
    counters, deployed_state,
    faults::traffic::Traffic,
    nat::{Kind, Shape},
    netns::Netns,
    network::{Node, Underlay},
    probe, report, wait,
};
use crate::report::TestOutcome;
use mesh::{Mesh, Setup};

const LIMIT: Duration = Duration::from_secs(240);
/// Longest time from a pair's first handshake attempt until it is connected.
const CONNECTS: Duration = Duration::from_secs(20);
/// Longest wait for a direct path, which is tried each minute.
const RETURNS: Duration = Duration::from_secs(100);

/// Metrics of a node that leads its location, and of one that stands by.
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
    /// Two relays under traffic: one's agent restarts, it dies, and the direct path works again.
    Relay,
    /// The same where all nodes have IPv6 alone.
    RelayV6,
    /// With failover: a relayed leader loses power, and then the relay, which has a stand-by.
    Failover,
    /// With two active leaders in the location of a relayed one: each has a relayed tunnel of its own.
    Leaders,
    /// A stranger sends to the ports of a relay, and repeats what it has recorded.
    Stranger,
    /// A stranger repeats a pair's messages as soon as it hears them, also in the name of a victim.
    Repeats,
}

/// Parts that run by default: the table has two symmetric NATs, too.
const ALL: [Part; 11] = [
    Part::Table,
    Part::Unrelayed,
    Part::DualStack,
    Part::Hairpin,
    Part::Refused,
    Part::Relay,
    Part::RelayV6,
    Part::Failover,
    Part::Leaders,
    Part::Stranger,
    Part::Repeats,
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
            Self::Leaders => leaders(setup),
            Self::Stranger => stranger::run(setup),
            Self::Repeats => repeats::run(setup),
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs these parts, each whatever the outcome of the one before, and prints tables in Markdown.
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
        let outcome = result.is_ok().into();
        outcomes.push(TestOutcome::new("lab", name, outcome, seconds));
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

/// Nothing passes between both by IPv4; by IPv6, which neither publishes as its endpoint, they connect,
/// whether anybody relays or not.
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
        let (path, took) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Direct, "both have IPv6, so the tunnel needs not be {path}");
        for (name, other) in [("x", "[2001:db8:a2::2]:51820"), ("y", "[2001:db8:a1::2]:51820")] {
            let endpoints = mesh.network.node(name)?.netns.sh("wg show kilo0 endpoints")?;
            ensure!(endpoints.contains(other), "{name} reaches the other elsewhere:\n{endpoints}");
        }
        Ok(format!("{path} by IPv6, {:.0} s", took.as_secs_f32()))
    })
}

/// Two kinds of ends behind one NAT that does no hairpinning.
fn hairpin(setup: Setup<'_>) -> Result<()> {
    for kind in [Kind::PortRestricted, Kind::Symmetric] {
        let shape = Shape { kinds: [kind; 2], is_shared: true, ..Shape::default() };
        let found = setup.with(shape, &["z", "w"], false, |mesh| {
            let (path, took) = mesh.wait_connected()?;
            ensure!(
                path == TunnelPath::Relayed,
                "nothing else leads from one to the other, so it cannot be {path}"
            );
            mesh.check_drawn(&format!("{path} by "))?;
            Ok(format!("{path}, {:.0} s; {}", took.as_secs_f32(), mesh.one_relay_a_packet()?))
        })?;
        println!("both ends behind one NAT, {}: {found}", kind.name());
    }
    Ok(())
}

/// Two symmetric NATs, relayed; then the agent of one end gets `--relay=off`, and loses it again.
fn refused(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], ..Shape::default() };
    let found = setup.with(shape, &["z"], false, |mesh| {
        let (path, took) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Relayed, "no two symmetric NATs meet, so the tunnel cannot be {path}");
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
            "{} of {} datagrams got an answer, and no path but the relay leads there",
            figures.sent - figures.lost,
            figures.sent
        );
        mesh.agents.stop("y", Signal::SIGTERM)?;
        mesh.agents.start(&y)?;
        let began = Instant::now();
        probe::until_seen_as(&x.pod, y.pod_ip(), x.pod_ip(), LIMIT)?;
        mesh.wait_for_path(TunnelPath::Relayed, Duration::from_secs(10))?;
        Ok(format!(
            "{path} after {:.0} s, ended {:.0} s after y's agent began with --relay=off, 0 packets passed, {path} again \
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
        let (path, took) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Relayed, "no two symmetric NATs meet, so the tunnel cannot be {path}");
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

/// What a flow between pods of both nodes loses while a node is cut off entirely.
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

/// Both active leaders of a location are behind one symmetric NAT: packets of each one's pods go by its own
/// relayed tunnel.
fn leaders(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], has_second: true, ..Shape::default() };
    let setup = Setup { flags: &["--failover=auto", "--leaders=2"], ..setup };
    setup.with(shape, &["z", "z2"], false, |mesh| {
        let (path, took) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Relayed, "no two symmetric NATs meet, so the tunnel cannot be {path}");
        mesh.causes = &[deployed_state::CHANGE];
        let y = mesh.network.node("y")?.clone();
        let mut said = Vec::new();
        for name in ["x", "x2"] {
            let node = mesh.network.node(name)?.clone();
            mesh.wait_for_metrics(name, &[LEADS, &mesh::tunnels(TunnelPath::Relayed)])?;
            probe::until_seen_as(&node.pod, y.pod_ip(), node.pod_ip(), LIMIT)?;
            let encrypted =
                || Ok::<_, anyhow::Error>(counters::action(&counters::scrape(&node.netns)?, "encrypt"));
            let before = encrypted()?;
            let flow = Traffic::start_every(&node.pod, y.pod_ip().into(), Duration::from_millis(5));
            flow.settle(LIMIT)?;
            wait::time_passes(Duration::from_secs(3), "packets are counted");
            let figures = flow.finish()?;
            let count = encrypted()? - before;
            ensure!(
                count >= figures.sent,
                "{name} encrypted {count} packets, and its pod sent {}",
                figures.sent
            );
            ensure!(
                figures.lost == 0,
                "{name}: {} of {} lost: {:?}",
                figures.lost,
                figures.sent,
                figures.holes
            );
            said.push(format!(
                "{name} encrypted {count} for its pod's {} datagrams and a TCP stream",
                figures.sent
            ));
        }
        println!(
            "two active leaders, relayed {:.1} s after the first attempt: {}",
            took.as_secs_f32(),
            said.join(", ")
        );
        Ok(())
    })
}
