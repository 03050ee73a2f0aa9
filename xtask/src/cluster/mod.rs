//! `cargo xtask cluster`: a real Kubernetes on this machine, and Kilo on it as its manifests say.

mod checks;
mod deploy;
mod images;
mod kubeadm;
mod matrix;
mod network;
mod node;
mod original;
pub mod release;
mod run_directory;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::{
    apt,
    command::output,
    image,
    lab::{
        netns,
        takedown::{self, Takedown, stop_if_interrupted},
        wait,
    },
    report::TestOutcome,
    workspace_root,
};
use checks::Choice;
pub use checks::is_about_those_before;
use node::{Node, Parts};
use release::Release;

/// Debian packages that the cluster needs on this machine.
const PACKAGES: &[&str] = &["iproute2", "nftables", "util-linux", "containerd"];

/// Name of the outcome that says whether the cluster came up.
pub const COMES_UP: &str = "Kubernetes and Kilo come up";

/// Checks of the cluster that run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum ClusterPart {
    /// Those of every run.
    Always,
    /// What operators do: policies, bad input, removal, Kilo's own program and back.
    Operators,
    /// What happens to nodes: leaders that go, relays, boots, deleted Nodes.
    Nodes,
}

/// Options and subcommands of the cluster.
#[derive(Args, Clone, Debug)]
pub struct ClusterArgs {
    /// Leave the cluster up when everything has been shown.
    #[arg(long, global = true)]
    keep: bool,
    /// Number of nodes, in two locations.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=20), global = true)]
    nodes: u8,
    /// Debian's Kubernetes 1.20.2, even where a newer one is available.
    #[arg(long, global = true)]
    old: bool,
    /// An image that `cargo xtask image` wrote (default: one of the binaries built here).
    #[arg(long, value_name = "FILE", global = true)]
    image: Option<PathBuf>,
    /// Multiply most timeouts by this number, for an emulated machine.
    #[arg(long, value_name = "TIMES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=60), global = true)]
    patience: u32,
    #[command(subcommand)]
    command: Option<ClusterCommand>,
}

#[derive(Subcommand, Clone, Debug)]
enum ClusterCommand {
    /// Run a command on a node, or on the router or the outside host.
    Exec {
        /// Name of the node.
        node: String,
        /// The command.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run kubectl as the cluster's administrator; files are those of this machine.
    Kubectl {
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Take the cluster down.
    Down,
    /// Bring a cluster up, run every check, take it down; on one that stands with --keep, run checks.
    Test {
        /// Only checks with one of these in their name (repeatable).
        #[arg(long, value_name = "WORDS")]
        only: Vec<String>,
        /// Checks of these parts (repeatable).
        #[arg(long = "part", value_enum, default_value = "always", conflicts_with = "only")]
        parts: Vec<ClusterPart>,
        /// Every check.
        #[arg(long, conflicts_with_all = ["only", "parts"])]
        all: bool,
        /// Use the cluster that stands.
        #[arg(long)]
        standing: bool,
        /// Write the outcomes to this file as JSON.
        #[arg(long, value_name = "FILE", hide = true)]
        json: Option<PathBuf>,
    },
    /// Build or find everything a cluster is made of, without starting one.
    Prepare,
}

impl ClusterArgs {
    /// True when binaries must be built first: those of the default image, and `kgctl`, which checks run.
    pub const fn needs_build(&self) -> bool {
        match self.command {
            Some(ClusterCommand::Test { standing, .. }) => !standing,
            None | Some(ClusterCommand::Prepare) => self.image.is_none(),
            Some(_) => false,
        }
    }
}

/// State of a cluster that outlives a command.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    nodes: u8,
    version: String,
}

/// A running cluster.
pub struct Cluster {
    /// The nodes, sorted by name; the control plane is the first.
    pub nodes: Vec<Node>,
    /// Its Kubernetes release.
    pub release: Release,
    /// Time from `kubectl apply` until every pod of Kilo was ready; `None` when the cluster was already up.
    pub ready_after: Option<Duration>,
}

/// Factor for all time limits.
static PATIENCE: OnceLock<u32> = OnceLock::new();

/// Runs `cargo xtask cluster`.
pub fn main(args: &ClusterArgs) -> Result<()> {
    PATIENCE.get_or_init(|| args.patience);
    if !nix::unistd::geteuid().is_root() {
        bail!("a cluster makes namespaces, mounts and control groups: run it as root");
    }
    match &args.command {
        None => show(args),
        Some(ClusterCommand::Exec { node, command }) => exec(node, command),
        Some(ClusterCommand::Kubectl { arguments }) => {
            let status = Cluster::load()?.first().kubectl()?.args(arguments).status()?;
            std::process::exit(status.code().unwrap_or(1));
        }
        Some(ClusterCommand::Down) => down(),
        Some(ClusterCommand::Prepare) => {
            let _guard = takedown::end_children_with_us("cluster")?;
            prepare(args).map(drop)
        }
        Some(ClusterCommand::Test { only, parts, all, standing, json }) => {
            let started = Instant::now();
            let (guard, cluster) = if *standing {
                (None, Cluster::load())
            } else {
                let guard = take_over()?;
                (Some(guard), Cluster::up(args))
            };
            let mut outcomes = vec![checks::outcome(COMES_UP, started, cluster.as_ref().err())];
            if let Ok(cluster) = &cluster {
                outcomes.extend(checks::run(cluster, &Choice::of(only, parts, *all)));
            }
            drop(guard);
            report(&outcomes, json.as_deref())
        }
    }
}

/// Writes the outcomes; fails when a check failed.
fn report(outcomes: &[TestOutcome], json: Option<&Path>) -> Result<()> {
    if let Some(path) = json {
        fs::write(path, serde_json::to_vec_pretty(outcomes)?).with_context(|| path.display().to_string())?;
    }
    match outcomes.iter().filter(|outcome| outcome.is_failed()).count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} checks failed", outcomes.len()),
    }
}

fn show(args: &ClusterArgs) -> Result<()> {
    let mut guard = take_over()?;
    // A cluster that does not come up is kept, too, for inspection.
    guard.keep = args.keep;
    let started = Instant::now();
    let cluster = Cluster::up(args)?;
    println!("\n== Nodes\n{}", cluster.kubectl(&["get", "nodes", "-o", "wide"])?);
    println!("== Pods\n{}", cluster.kubectl(&["get", "pods", "-A", "-o", "wide"])?);
    println!("== Reachability: TCP, UDP and ICMP echo of pods and nodes, with the source address checked");
    let matrix = matrix::run(&cluster)?;
    matrix.print();
    let deployed = checks::as_deployed(&cluster);
    match &deployed {
        Ok(said) => println!("{said}"),
        Err(error) => println!("not as it should be: {error:#}"),
    }
    println!(
        "\ncluster: {} of {} probes passed, {:.0} s",
        matrix.passed(),
        matrix.total(),
        started.elapsed().as_secs_f32()
    );
    println!(
        "\n{}",
        if args.keep {
            "The cluster stays up. Look around:"
        } else {
            "`cargo xtask cluster --keep` leaves it up to look around:"
        }
    );
    for line in [
        "cluster kubectl get nodes",
        "cluster kubectl -n kube-system logs ds/kilo",
        "cluster exec b1 -- ip route",
        "cluster exec outside -- ping -c 1 10.11.0.11",
        "cluster test --standing --only restart",
        "cluster down",
    ] {
        println!("  cargo xtask {line}");
    }
    match matrix.total() - matrix.passed() {
        0 => deployed.map(drop),
        failed => bail!("{failed} probes failed"),
    }
}

fn exec(name: &str, command: &[String]) -> Result<()> {
    let (program, arguments) = command.split_first().context("no command")?;
    let cluster = Cluster::load()?;
    let mut inside = match name {
        "router" => network::router().command(program),
        "outside" => network::outside().command(program),
        node => cluster.node(node)?.command(program)?,
    };
    std::process::exit(inside.args(arguments).status()?.code().unwrap_or(1));
}

/// Removes what an earlier cluster left, and arranges for this one to be removed on return, Ctrl-C and
/// SIGTERM.
fn take_over() -> Result<Takedown<impl Fn() -> Result<()>>> {
    down()?;
    Takedown::arrange("cluster", down)
}

/// Removes every trace of a cluster, even of a half-built one.
fn down() -> Result<()> {
    let run = run_directory::path()?;
    let parts = Parts {
        run: run.clone(),
        base: PathBuf::new(),
        bin: PathBuf::new(),
        pause: String::new(),
        has_ipv6: false,
    };
    for site in network::sites(20) {
        let node = Node::new(site, &parts);
        if node.disk().exists() || node.netns().path().exists() {
            node.cut()?;
        }
    }
    netns::remove([network::outside(), network::router()])?;
    node::remove_groups(Path::new(network::NAME));
    run_directory::remove(&run)
}

/// This time limit, multiplied by the patience.
fn extended(limit: Duration) -> Duration {
    limit * PATIENCE.get().copied().unwrap_or(1)
}

/// Calls `ask` until it returns something.
fn until<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Result<T> {
    wait::until(what, extended(limit), || {
        let answer = ask();
        if answer.is_none() {
            stop_if_interrupted()?;
        }
        Ok(answer)
    })
}

/// What a cluster is built from.
struct Prepared {
    release: Release,
    bin: PathBuf,
    images: images::Images,
    kilo: PathBuf,
}

fn prepare(args: &ClusterArgs) -> Result<Prepared> {
    apt::install(PACKAGES)?;
    let release = if args.old { release::DEBIAN } else { Release::newest()? };
    let bin = release.programs()?;
    let images = images::prepare(release, &bin)?;
    let kilo = match &args.image {
        Some(file) => file.clone(),
        None => {
            let file = workspace_root().join("target/image/kilo-quick.tar");
            let bin = std::env::current_exe()?;
            let bin = bin.parent().context("no directory of this program")?;
            image::quick(&image::buildah::Buildah::open()?, bin, &file, image::Layers::Kept)?;
            file
        }
    };
    Ok(Prepared { release, bin, images, kilo })
}

impl Cluster {
    /// Brings up nodes, Kubernetes, Kilo and test pods.
    fn up(args: &ClusterArgs) -> Result<Self> {
        let started = Instant::now();
        let step = |what: &str| println!("cluster: {:5.1} s  {what} ...", started.elapsed().as_secs_f32());
        let prepared = prepare(args)?;
        let release = prepared.release;
        let parts = Parts {
            run: run_directory::path()?,
            base: prepared.images.root.clone(),
            bin: prepared.bin,
            pause: images::pause(release),
            has_ipv6: release.has_two_families(),
        };
        run_directory::make(&parts.run)?;
        step("images on every node");
        let stored = parts.run.join("containerd");
        images::add_kilo(&prepared.images.containerd, &stored, &prepared.kilo)?;
        let nodes: Vec<_> =
            network::sites(args.nodes).into_iter().map(|site| Node::new(site, &parts)).collect();
        for node in &nodes {
            images::copy(&stored, &node.disk().join("containerd"))?;
        }
        step(&format!("{} nodes, a router, an outside host", nodes.len()));
        network::build()?;
        for node in &nodes {
            stop_if_interrupted()?;
            node.start()?;
        }
        let mut cluster = Self { nodes, release, ready_after: None };
        cluster.save(&parts.run)?;
        step(&format!("kubeadm init of Kubernetes {}", release.version));
        kubeadm::init(cluster.first(), release)?;
        step("kubeadm join");
        cluster.each(&cluster.nodes[1..], |node| kubeadm::join(node, cluster.first()))?;
        step("Kilo, by its manifests");
        let applied = deploy::apply(&cluster)?;
        println!("cluster: every pod of Kilo was ready {:.1} s after kubectl apply", applied.as_secs_f32());
        cluster.ready_after = Some(applied);
        step("test pods and services");
        deploy::test_pods(&cluster)?;
        step("the cluster is up");
        Ok(cluster)
    }

    fn save(&self, run: &Path) -> Result<()> {
        let state = State {
            nodes: u8::try_from(self.nodes.len()).unwrap_or(u8::MAX),
            version: self.release.version.to_owned(),
        };
        Ok(fs::write(run.join("state.json"), serde_json::to_vec(&state)?)?)
    }

    fn load() -> Result<Self> {
        let run = run_directory::path()?;
        let text = fs::read(run.join("state.json"))
            .context("no cluster is up; start one with `cargo xtask cluster --keep`")?;
        let state: State = serde_json::from_slice(&text)?;
        let release =
            if state.version == release::DEBIAN.version { release::DEBIAN } else { release::CURRENT };
        let bin = release.programs()?;
        let base = images::prepare(release, &bin)?.root;
        let (pause, has_ipv6) = (images::pause(release), release.has_two_families());
        let parts = Parts { run, base, bin, pause, has_ipv6 };
        let nodes = network::sites(state.nodes).into_iter().map(|site| Node::new(site, &parts)).collect();
        Ok(Self { nodes, release, ready_after: None })
    }

    /// The node with the control plane.
    pub fn first(&self) -> &Node {
        &self.nodes[0]
    }

    /// The node with that name.
    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).with_context(|| {
            let names: Vec<_> = self.nodes.iter().map(Node::name).collect();
            format!(
                "{name:?} is not a node of the cluster; choose one of: {}, router, outside",
                names.join(", ")
            )
        })
    }

    /// A node in the second location.
    pub fn remote(&self) -> &Node {
        &self.nodes[self.nodes.len() - 1]
    }

    /// Runs `code` for several nodes in parallel.
    pub fn each(&self, nodes: &[Node], code: impl Fn(&Node) -> Result<()> + Sync) -> Result<()> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(|| code(node))).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().map_err(|_| anyhow::anyhow!("the thread of a node ended"))?
            })
        })
    }

    /// Runs kubectl and returns its standard output. A `--timeout` in seconds is multiplied by the
    /// patience.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let seconds = |argument: &str| argument.strip_prefix("--timeout=")?.strip_suffix('s')?.parse().ok();
        let arguments = arguments.iter().map(|argument| match seconds(argument) {
            Some(seconds) => format!("--timeout={}s", extended(Duration::from_secs(seconds)).as_secs()),
            None => (*argument).to_owned(),
        });
        output(self.first().command("kubectl")?.args(arguments))
    }

    /// Objects as `kubectl get -o json` lists them.
    pub fn get(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let text = self.kubectl(&[&["get", "-o", "json"], arguments].concat())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// `kubectl apply` of a text.
    pub fn apply(&self, text: &str) -> Result<()> {
        self.feed(&["apply", "-f", "-"], text)
    }

    /// Runs kubectl with a text as its standard input.
    pub fn feed(&self, arguments: &[&str], text: &str) -> Result<()> {
        let mut command: Command = self.first().command("kubectl")?;
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(text.as_bytes())?;
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }
}
