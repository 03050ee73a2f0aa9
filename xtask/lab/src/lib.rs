//! `cargo xtask lab`: a mesh on this machine, with a real agent per node.

#![deny(clippy::disallowed_methods)]

pub mod agents;
mod args;
mod bulk;
mod check;
mod checks;
mod cilium;
mod clear;
mod cloud;
mod cni;
mod cni_conf;
pub mod command;
pub mod confine;
pub mod counters;
pub mod deployed_state;
mod descendants;
mod durations;
mod fail_closed;
pub mod failover;
pub mod faults;
mod flannel;
mod forward_policy;
mod granularity;
mod kernel_ipip;
mod matrix;
mod members;
mod modes;
mod nat;
mod nat_pairs;
pub mod netns;
mod network;
mod node_ports;
mod offloads;
mod options;
mod path_mtu;
pub mod plugins;
mod pod_tunnels;
pub mod point_to_point_link;
mod printer;
pub mod probe;
mod raw_udp;
pub mod report;
pub mod run_times;
mod scenario;
mod services;
pub mod takedown;
mod topology;
pub mod tunl0;
mod udp_segment;
mod vpn;
pub mod wait;
mod wireguard_go;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum as _;
use kilo_common::maps::LAYOUT_VERSION;
use serde::{Deserialize, Serialize};

pub use args::LabArgs;
pub use cilium::OBJECT as CILIUM_OBJECT;

use agents::Agents;
use args::{FaultOptions, LabCommand};
use members::Members;
use netns::Netns;
use network::{Network, Node, Shape, Underlay};
use options::LabOptions;
use scenario::Scenario;
use takedown::{Takedown, stop_if_interrupted};
use topology::Topology;

use crate::report::TestOutcome;

/// Debian packages the lab needs.
pub const PACKAGES: &[&str] = &[
    "iproute2",
    "nftables",
    "wireguard-tools",
    "iputils-ping",
    "iperf3",
    "bpftool",
    "containernetworking-plugins",
    "iptables",
    "strace",
    "ethtool",
    "wireguard-go",
    "faketime",
];

/// Gives every packet between nodes an outer header.
const ALWAYS: &str = "--encapsulate=always";

/// A running lab, as its state file describes it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Lab {
    name: String,
    directory: PathBuf,
    network: Network,
    agents: Agents,
    /// What differs from the lab's own network.
    #[serde(skip)]
    topology: Topology,
    /// How far the agents' logs have been read.
    #[serde(skip)]
    watch: deployed_state::Watch,
    /// Members without a namespace of their own, in the process that built the lab.
    #[serde(skip)]
    members: Option<Members>,
    /// Inspects all frames, in the process that built the lab.
    #[serde(skip)]
    clear: Option<clear::Watch>,
    /// Nodes whose objects the check that runs has removed.
    #[serde(skip)]
    removed: BTreeSet<String>,
    /// Nodes whose interface in their LAN the check that runs has taken down.
    #[serde(skip)]
    without_lan: BTreeSet<String>,
    /// Each node's metrics once the mesh was up: until then, whichever node starts first may lead.
    #[serde(skip)]
    stood: BTreeMap<String, counters::Metrics>,
}

/// Runs `cargo xtask lab`.
pub fn main(LabArgs { options, command }: LabArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the lab makes network namespaces and loads BPF programs: run it as root");
    }
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if options.name.is_empty() || options.name.len() > 32 || !options.name.chars().all(valid) {
        bail!("--name {:?}: use 1 to 32 letters, digits and hyphens", options.name);
    }
    match command {
        None => show(&options),
        Some(LabCommand::Exec { netns, command }) => exec(&options.name, &netns, &command),
        Some(LabCommand::Status) => {
            let lab = Lab::load(&options.name)?;
            lab.agents.print_status(&lab.network);
            counters::print(&lab.network);
            Ok(())
        }
        Some(LabCommand::Down) => down(&options.name),
        Some(LabCommand::Inject { ref netns, ref rule, seconds }) => {
            let injected = rule.inject(&Lab::load(&options.name)?.network.netns(netns)?)?;
            wait::fault_lasts(Duration::from_secs(seconds));
            let (seen, dropped) = injected.hits()?;
            println!("{seen} packets matched, {dropped} of them dropped or late");
            Ok(())
        }
        Some(LabCommand::Faults(ref faults)) => under_traffic(&options, faults),
        Some(LabCommand::Nat(ref pairs)) => {
            let _guard = take_over(&options.name)?;
            let bin = options.bin.clone().map_or_else(own_directory, Ok)?;
            nat_pairs::main(pairs, &options.name, &bin, &options.wireguard)
        }
        Some(LabCommand::Failover(ref cases)) => failover::main(&options, cases),
        Some(LabCommand::Soak { seed, time, ref outcomes }) => {
            soak(&options, seed, time, outcomes.as_deref())
        }
        Some(LabCommand::Test { ref json, ref prefix, ref modes }) => {
            let _guard = take_over(&options.name)?;
            let checks = options.checks.checks().into_iter().flatten().chain(options.topology.checks());
            let mut outcomes =
                checks::run(Lab::up(&options, None)?, Instant::now(), prefix, &options, checks);
            let wanted = |mode: &&modes::Mode| modes.as_ref().is_some_and(|name| mode.name.contains(name));
            for mode in modes::MODES.iter().filter(wanted) {
                down(&options.name)?;
                outcomes.extend(mode.run(&options, prefix));
            }
            report(&outcomes, json.as_deref())
        }
        Some(LabCommand::Scenario { ref names, ref json, ref prefix }) => {
            let _guard = take_over(&options.name)?;
            let mut outcomes = Vec::new();
            for scenario in if names.is_empty() { Scenario::value_variants() } else { names } {
                down(&options.name)?;
                outcomes.extend(scenario.run(&options, prefix));
            }
            report(&outcomes, json.as_deref())
        }
    }
}

/// Makes faults while traffic flows, and writes what each cost.
fn under_traffic(args: &LabOptions, options: &FaultOptions) -> Result<()> {
    let _guard = take_over(&args.name)?;
    if let Some(time) = options.away {
        faults::control_plane::set_length(time);
    }
    let only_faults = &options.only_faults;
    let mut lab = Lab::up(args, None)?;
    let rows = faults::run(&mut lab, only_faults, options.part);
    let mut ended = faults::outcomes(&rows, "");
    ended.push(checks::as_deployed(&mut lab, "faults: "));
    let mut all: Vec<faults::Row> = match &options.json {
        Some(path) if options.docs && !only_faults.is_empty() => serde_json::from_slice(&fs::read(path)?)?,
        _ => Vec::new(),
    };
    all.retain(|row| !faults::is_chosen(&row.id, only_faults));
    all.extend(rows.iter().cloned());
    all.sort_by_key(|row| faults::place(&row.id));
    if let Some(path) = &options.json {
        write_json(path, &all)?;
    }
    if let Some(path) = &options.outcomes {
        write_json(path, &ended)?;
    }
    if options.docs {
        faults::write_page(&all, failover::kept_lines()?)?;
    }
    report(&ended, None)
}

/// Injects random faults for that long.
fn soak(args: &LabOptions, seed: Option<u64>, time: Duration, outcomes: Option<&Path>) -> Result<()> {
    let mut guard = take_over(&args.name)?;
    let only = args.only.as_deref();
    let by_clock = || UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
    let (seed, started) = (seed.unwrap_or_else(by_clock), Instant::now());
    let result = Lab::up(args, None).and_then(|mut lab| faults::soak::run(&mut lab, seed, time, only));
    if let Some(path) = outcomes {
        write_json(path, &[faults::soak::outcome(&result, seed, started)])?;
    }
    // With `--keep` a failed lab stays for inspection.
    guard.keep = args.keep && result.is_err();
    result.map(|_| ())
}

fn write_json<T: Serialize>(path: &Path, rows: &[T]) -> Result<()> {
    fs::write(path, serde_json::to_vec_pretty(rows)?).with_context(|| path.display().to_string())
}

/// Writes the outcomes; an error when a check failed.
fn report(outcomes: &[TestOutcome], json: Option<&Path>) -> Result<()> {
    if let Some(path) = json {
        write_json(path, outcomes)?;
    }
    let failed = outcomes.iter().filter(|outcome| outcome.is_failed()).count();
    if failed > 0 {
        bail!("{failed} of {} checks failed", outcomes.len());
    }
    Ok(())
}

/// Removes what an earlier lab of that name left, and arranges that this one
/// goes away on return, Ctrl-C and SIGTERM.
fn take_over(name: &str) -> Result<Takedown<impl Fn() -> Result<()>>> {
    if directory(name).exists() {
        down(name)?;
    }
    let name = name.to_owned();
    Takedown::arrange("lab", move || down(&name))
}

fn show(args: &LabOptions) -> Result<()> {
    let mut guard = take_over(&args.name)?;
    let started = Instant::now();
    let mut lab = Lab::up(args, None)?;
    println!("\n== Topology (kgctl graph; circles lead)\n{}", lab.agents.describe(&lab.network)?);
    println!("== Reachability: TCP with 8 KB, UDP and ICMP echo, each way, with the source address checked");
    let matrix = matrix::run(&lab.network)?;
    matrix.print();
    println!("\n== Which way they went (packets; `kilo_packets_total` of each agent)");
    counters::print(&lab.network);
    let clear = lab.nothing_in_clear();
    match &clear {
        Ok(()) => println!("no packet of the mesh was seen in cleartext on any LAN"),
        Err(error) => println!("{error:#}"),
    }
    let deployed = deployed_state::as_deployed(&mut lab);
    match &deployed {
        Ok(figure) => println!("agents have their manifest's rights, and nothing to warn about {figure}"),
        Err(error) => println!("agents are not as they are deployed: {error:#}"),
    }
    println!(
        "\nlab: {} of {} probes passed, {:.1} s",
        matrix.passed(),
        matrix.total(),
        started.elapsed().as_secs_f32()
    );
    println!(
        "\n{}",
        if args.keep {
            "The lab stays up. Look around:"
        } else {
            "`cargo xtask lab --keep` leaves it up to look around:"
        }
    );
    let dump = format!("lab exec a2 -- bpftool map dump pinned /sys/fs/bpf/kilo/v{LAYOUT_VERSION}/prefix_v4");
    for line in [
        "lab status",
        "lab exec a2 -- ip route",
        "lab exec a1 -- wg",
        "lab exec a2 -- bpftool prog",
        dump.as_str(),
        "lab exec pod-a2 -- ping -c 3 10.42.5.2",
        "lab down",
    ] {
        println!("  cargo xtask {line}");
    }
    guard.keep = args.keep;
    if matrix.passed() < matrix.total() {
        bail!("{} probes failed", matrix.total() - matrix.passed());
    }
    clear.and(deployed).map(drop)
}

fn exec(name: &str, netns: &str, command: &[String]) -> Result<()> {
    let lab = Lab::load(name)?;
    let (program, arguments) = command.split_first().context("no command")?;
    let status = lab.network.netns(netns)?.command(program).args(arguments).status()?;
    std::process::exit(status.code().unwrap_or(1));
}

fn directory(name: &str) -> PathBuf {
    std::env::temp_dir().join(name)
}

fn down(name: &str) -> Result<()> {
    let directory = directory(name);
    // The plan names every namespace, so a lab that was only half built goes too.
    let shapes = Shape::ALL.map(|shape| Network::shaped(name, Underlay::default(), shape).namespaces());
    let namespaces: BTreeMap<String, Netns> =
        shapes.into_iter().flatten().map(|netns| (netns.id.clone(), netns)).collect();
    netns::remove(namespaces.into_values().chain(nat::namespaces(name)).chain(node_ports::namespaces(name)))?;
    if directory.exists() {
        fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())?;
    }
    Ok(())
}

impl Lab {
    /// Builds namespaces, writes the cluster's objects, starts the agents and the laptop, and waits until the
    /// mesh is up.
    fn up(args: &LabOptions, scenario: Option<Scenario>) -> Result<Self> {
        let directory = directory(&args.name);
        let logs = directory.join("logs");
        fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
        let own = args.topology.flags().iter().map(|&flag| flag.to_owned());
        let flags: Vec<_> = own.chain(args.kg_flags.iter().cloned()).collect();
        step("namespaces, links, addresses, NAT");
        let mut network = Network::shaped(&args.name, args.underlay, args.shape);
        network.build(&args.name, &logs)?;
        let native = args.kg_flags.iter().any(|flag| flag.starts_with("--encapsulate=") && flag != ALWAYS);
        args.topology.prepare(&mut network)?;
        let clear = Some(clear::Watch::start(&network.router, native)?);
        if let Some(scenario) = scenario {
            scenario.prepare(&mut network)?;
        }
        let bin = match &args.bin {
            Some(bin) => bin.clone(),
            None => own_directory()?,
        };
        let mut agents = Agents::prepare(&bin, &directory, &args.wireguard, &flags, &network)?;
        let members = network.members.is_some();
        let members =
            members.then(|| Members::start(&network, &agents.cluster(), &["a1", "a2"])).transpose()?;
        step(&format!("an agent on each of {} nodes", network.nodes.len()));
        for node in &network.nodes {
            agents.start(node)?;
        }
        let watch = deployed_state::Watch::default();
        let mut lab = Self {
            topology: args.topology,
            name: args.name.clone(),
            directory,
            network,
            agents,
            watch,
            members,
            clear,
            removed: BTreeSet::new(),
            without_lan: BTreeSet::new(),
            stood: BTreeMap::new(),
        };
        // Until all agents run, the node that starts first leads.
        lab.caused(&[deployed_state::LEADS]);
        lab.save()?;
        step("waiting for the mesh");
        lab.agents.wait_until_ready(&lab.network, Duration::from_secs(240))?;
        if let Some(scenario) = scenario {
            scenario.complete(&lab.network)?;
        }
        step("pods' interfaces, by Debian's CNI plugins");
        for node in &lab.network.nodes {
            cni::connect(node)?;
        }
        step("a VPN peer, configured by `kgctl showconf peer laptop`");
        lab.agents.join_laptop(&lab.network)?;
        step("TCP and UDP servers everywhere");
        matrix::serve(&lab.network)?;
        matrix::settle(&lab.network, Duration::from_secs(60))?;
        for node in &lab.network.nodes {
            lab.stood.insert(node.name().to_owned(), counters::scrape(&node.netns)?);
        }
        lab.save()?;
        Ok(lab)
    }

    /// Packets of each action at a node since the mesh was up.
    fn counted(&self, node: &Node) -> Result<impl Fn(&str) -> u64 + use<>> {
        let before = self.stood.get(node.name()).cloned().unwrap_or_default();
        let now = counters::scrape(&node.netns)?;
        // A new agent goes on with the counters of the one before.
        Ok(move |name: &str| counters::action(&now, name).saturating_sub(counters::action(&before, name)))
    }

    fn save(&self) -> Result<()> {
        let path = self.directory.join("state.json");
        fs::write(&path, serde_json::to_vec_pretty(self)?).with_context(|| path.display().to_string())
    }

    fn load(name: &str) -> Result<Self> {
        let path = directory(name).join("state.json");
        let text = fs::read(&path)
            .with_context(|| format!("no lab named {name} is up; start one with `cargo xtask lab --keep`"))?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// Directory of this program, which also contains `kg`.
fn own_directory() -> Result<PathBuf> {
    std::env::current_exe()?.parent().map(Path::to_owned).context("no directory of this program")
}

/// Prints one line of progress.
fn step(what: &str) {
    println!("lab: {what} ...");
}

/// Root of this workspace.
pub fn workspace_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}
