//! The agents of the lab: the cluster's objects as files, one `kg` a node, and
//! the laptop that joins as a peer.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use super::{
    counters,
    netns::{Netns, run},
    network::{LAPTOP, LAPTOP6, Network, Node},
    takedown, wait,
};
use crate::confine;

/// How long an agent may take to stop, even on an emulated machine.
const STOPS_WITHIN: Duration = Duration::from_secs(120);

/// The laptop's Peer object.
const LAPTOP_FILE: &str = "peer-laptop.yaml";
/// Process id of the laptop's `kgctl connect`.
const CONNECT: &str = "/run/kgctl-connect.pid";

/// How the agents are run, and which run now.
#[derive(Debug, Serialize, Deserialize)]
pub struct Agents {
    bin: PathBuf,
    directory: PathBuf,
    wireguard: String,
    /// Extra flags of `kg` for every agent.
    flags: Vec<String>,
    /// The laptop's public key.
    laptop_key: String,
    /// Process ids by node.
    pids: std::collections::BTreeMap<String, u32>,
    /// Per-node flags, `--flag=value`, which override those of the same name in `flags`.
    #[serde(skip)]
    own_flags: std::collections::BTreeMap<String, Vec<String>>,
}

impl Agents {
    /// Writes the Node and Peer objects.
    pub fn prepare(
        bin: &Path,
        directory: &Path,
        wireguard: &str,
        flags: &[String],
        network: &Network,
    ) -> Result<Self> {
        for program in ["kg", "kgctl"] {
            let path = bin.join(program);
            if !path.exists() {
                bail!("{} does not exist; run `cargo build` first", path.display());
            }
        }
        let cluster = directory.join("cluster");
        fs::create_dir_all(&cluster)?;
        let private = run(Command::new("wg").arg("genkey"))?;
        let key = directory.join("laptop.key");
        fs::write(&key, &private)?;
        let public = run(Command::new("sh").args(["-c", "wg pubkey < \"$0\""]).arg(&key))?;
        let agents = Self {
            bin: bin.to_owned(),
            directory: directory.to_owned(),
            wireguard: wireguard.to_owned(),
            flags: flags.to_vec(),
            laptop_key: public.trim().to_owned(),
            pids: std::collections::BTreeMap::new(),
            own_flags: std::collections::BTreeMap::new(),
        };
        network.nodes.iter().try_for_each(|node| agents.write_node(node, &[]))?;
        agents.write_object(LAPTOP_FILE, &agents.laptop(&own_addresses(), None))?;
        Ok(agents)
    }

    /// Writes a Node object with these annotations (names without their prefix), as an operator does.
    pub fn write_node(&self, node: &Node, annotations: &[(&str, &str)]) -> Result<()> {
        let cidrs = node.pod_cidrs();
        let list: Vec<_> = annotations
            .iter()
            .map(|(name, value)| format!("\"kilo.squat.ai/{name}\": \"{value}\""))
            .collect();
        let yaml = format!(
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  annotations: {{{annotations}}}\n  labels:\n    \
             topology.kubernetes.io/region: {location}\nspec:\n  podCIDR: {}\n  podCIDRs: {cidrs:?}\n",
            cidrs[0],
            name = node.name(),
            annotations = list.join(", "),
            location = node.location,
        );
        self.write_object(&format!("node-{}.yaml", node.name()), &yaml)
    }

    /// Writes the laptop's Peer object.
    pub fn write_laptop(&self, allowed_ips: &[&str], preshared_key: Option<&str>) -> Result<()> {
        self.write_object(LAPTOP_FILE, &self.laptop(allowed_ips, preshared_key))
    }

    fn laptop(&self, allowed_ips: &[impl fmt::Debug], preshared_key: Option<&str>) -> String {
        let preshared_key = preshared_key.map(|key| format!("  presharedKey: {key}\n")).unwrap_or_default();
        format!(
            "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata:\n  name: laptop\nspec:\n  \
             allowedIPs: {allowed_ips:?}\n  publicKey: {}\n{preshared_key}  persistentKeepalive: 5\n",
            self.laptop_key
        )
    }

    /// Writes aside and renames, so that no agent reads half a file.
    fn write_object(&self, name: &str, yaml: &str) -> Result<()> {
        let (aside, path) = (self.directory.join(name), self.cluster().join(name));
        fs::write(&aside, yaml)?;
        fs::rename(&aside, &path).with_context(|| path.display().to_string())
    }

    /// Prepares agents and objects for another network, with the same programs.
    pub fn for_another(&self, directory: &Path, network: &Network) -> Result<Self> {
        Self::prepare(&self.bin, directory, &self.wireguard, &[], network)
    }

    /// Sets `--flag=value` for every agent started from here on, replacing an earlier value.
    pub fn set_flag(&mut self, flag: &str, value: &str) {
        self.flags.retain(|given| !given.starts_with(&format!("{flag}=")));
        self.flags.push(format!("{flag}={value}"));
    }

    /// Replaces all per-node flags: agents of these nodes that are started from here on get these,
    /// `--flag=value` each. Returns `false` when they were already set.
    pub fn set_own_flags(&mut self, nodes: &[&str], flags: &[&str]) -> bool {
        let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let wanted = nodes.iter().map(|node| ((*node).to_owned(), flags.clone())).collect();
        std::mem::replace(&mut self.own_flags, wanted) != self.own_flags
    }

    /// Directory of the Node and Peer objects.
    pub fn cluster(&self) -> PathBuf {
        self.directory.join("cluster")
    }

    /// Path of `kg` or `kgctl`.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// Process id of the node's agent; `None` when none was started.
    pub fn pid(&self, node: &str) -> Option<u32> {
        self.pids.get(node).copied()
    }

    /// Whether the agents are run with this flag.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.flags.iter().any(|given| given == flag)
    }

    /// Adds a flag for every agent started from here on.
    pub fn add_flag(&mut self, flag: &str) {
        self.flags.push(flag.to_owned());
    }

    /// Where the node's agent logs to.
    pub fn log(&self, node: &str) -> PathBuf {
        self.directory.join("logs").join(format!("{node}.log"))
    }

    /// Starts the node's agent.
    pub fn start(&mut self, node: &Node) -> Result<()> {
        self.start_with(node, &[])
    }

    /// Starts the node's agent with flags that others do not have.
    pub fn start_with(&mut self, node: &Node, flags: &[&str]) -> Result<()> {
        self.start_reading(node, &self.cluster(), flags)
    }

    /// Starts the node's agent with its wall clock offset by this many seconds, like "+3600".
    pub fn start_at(&mut self, node: &Node, clock: &str) -> Result<()> {
        self.start_faked(node, &[format!("FAKETIME={clock}")])
    }

    /// Starts the node's agent with a wall clock that is right until [`Self::set_clock`] moves it.
    pub fn start_with_clock(&mut self, node: &Node) -> Result<()> {
        self.set_clock(node.name(), "+0")?;
        let file = format!("FAKETIME_TIMESTAMP_FILE={}", self.clock(node.name()).display());
        // Seconds between two reads of the file.
        self.start_faked(node, &[file, "FAKETIME_CACHE_DURATION=1".to_owned()])
    }

    /// Offsets the wall clock of a running agent; it takes effect within a second or two.
    pub fn set_clock(&self, node: &str, clock: &str) -> Result<()> {
        let (path, aside) = (self.clock(node), self.clock(node).with_extension("aside"));
        fs::write(&aside, clock)?;
        fs::rename(&aside, &path).with_context(|| path.display().to_string())
    }

    fn clock(&self, node: &str) -> PathBuf {
        self.directory.join(format!("{node}.clock"))
    }

    fn start_faked(&mut self, node: &Node, clock: &[String]) -> Result<()> {
        let mut command = node.netns.command("env");
        // Debian's path of the library. The monotonic clock, by which the agent measures time, stays right.
        command
            .args(clock)
            .arg("FAKETIME_DONT_FAKE_MONOTONIC=1")
            .arg("LD_PRELOAD=/usr/$LIB/faketime/libfaketime.so.1")
            .args(self.confined()?);
        self.spawn(node, command, &self.cluster(), &[])
    }

    /// Starts the node's agent with its own directory of objects and extra flags.
    pub fn start_reading(&mut self, node: &Node, cluster: &Path, flags: &[&str]) -> Result<()> {
        let mut command = node.netns.command("env");
        command.args(self.confined()?);
        self.spawn(node, command, cluster, flags)
    }

    /// Command-line prefix that starts the agent with the rights of its DaemonSet.
    pub fn confined(&self) -> Result<Vec<PathBuf>> {
        confine::launcher(&self.program("kg"), &self.directory)
    }

    /// `command` must end with the program; the flags are appended.
    fn spawn(&mut self, node: &Node, mut command: Command, cluster: &Path, flags: &[&str]) -> Result<()> {
        let log = OpenOptions::new().create(true).append(true).open(self.log(node.name()))?;
        let own = self.own_flags.get(node.name()).map_or(&[] as &[String], Vec::as_slice);
        let name_of = |flag: &str| flag.split('=').next().map(str::to_owned);
        let is_replaced = |flag: &&String| own.iter().any(|own| name_of(own) == name_of(flag));
        command
            .args(["--backend", "file", "--backend-dir"])
            .arg(cluster)
            .args(["--wireguard", &self.wireguard, "--resync-period", "5s", "--log-level", "debug"])
            .args(self.flags.iter().filter(|flag| !is_replaced(flag)))
            .args(own)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        let child = takedown::make(|| Ok(command.spawn()?))?;
        self.pids.insert(node.name().to_owned(), child.id());
        Ok(())
    }

    /// Sends a signal to the node's agent and waits until it is gone.
    pub fn stop(&mut self, node: &str, signal: Signal) -> Result<()> {
        let pid = self.pids.remove(node).with_context(|| format!("no agent runs on {node}"))?;
        let pid = Pid::from_raw(pid.cast_signed());
        kill(pid, signal).with_context(|| format!("agent of {node}"))?;
        // As supervisors do: a stopped process handles no other signal.
        let _ = kill(pid, Signal::SIGCONT);
        let what = format!("the agent of {node} ends after {signal}; see {}", self.log(node).display());
        wait::until(&what, STOPS_WITHIN, || {
            // Reaps the agent, which is this process's child except after `--keep`.
            let _ = nix::sys::wait::waitpid(pid, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
            Ok(kill(pid, None).is_err())
        })
        .map(drop)
    }

    /// Forgets the node's agent, which has ended by itself.
    pub fn forget(&mut self, node: &str) {
        self.pids.remove(node);
    }

    /// Waits until every agent sees every node and has brought its data path up, as a kubelet's readiness probe
    /// does.
    pub fn wait_until_ready(&self, network: &Network, limit: Duration) -> Result<()> {
        let started = Instant::now();
        let mut shown = usize::MAX;
        let logs = || {
            let names = network.nodes.iter().map(Node::name);
            names.map(|name| format!("{name}:\n{}", tail(&self.log(name)))).collect::<Vec<_>>().join("\n")
        };
        wait::until("the mesh stands", limit, || {
            let ready = network.nodes.iter().filter(|node| self.is_ready(node, network.size())).count();
            if ready != shown {
                println!(
                    "lab:   {ready} of {} nodes ready, {:.1} s",
                    network.nodes.len(),
                    started.elapsed().as_secs_f32()
                );
                shown = ready;
            }
            if ready == network.nodes.len() {
                return Ok(Ok(()));
            }
            self.all_run()?;
            Ok(Err(fmt::from_fn(|to| to.write_str(&logs()))))
        })
    }

    /// Whether every agent sees every node.
    pub fn are_ready(&self, network: &Network) -> bool {
        network.nodes.iter().all(|node| self.is_ready(node, network.size()))
    }

    /// Fails with the end of its log when an agent that was started is gone.
    pub fn all_run(&self) -> Result<()> {
        for (node, &pid) in &self.pids {
            let pid = Pid::from_raw(pid.cast_signed());
            let _ = nix::sys::wait::waitpid(pid, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
            if kill(pid, None).is_err() {
                bail!("the agent of {node} ended:\n{}", tail(&self.log(node)));
            }
        }
        Ok(())
    }

    fn is_ready(&self, node: &Node, nodes: usize) -> bool {
        let Ok(metrics) = counters::scrape(&node.netns) else { return false };
        // Nodes are counted before the first reconcile has attached the programs.
        let is_healthy =
            || counters::health(&node.netns).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"));
        is_healthy()
            && metrics.get("kilo_nodes").is_some_and(|&seen| seen == nodes as u64)
            && metrics.get("kilo_peers").is_some_and(|&seen| seen == 1)
    }

    /// Runs kgctl on this machine against the lab's objects.
    pub fn kgctl(&self, arguments: &[&str]) -> Result<String> {
        run(Command::new(self.program("kgctl"))
            .args(["--backend", "file", "--backend-dir"])
            .arg(self.cluster())
            .args(arguments))
    }

    /// Whether all agents of this lab use the kernel's WireGuard, with no userspace implementation.
    pub fn have_kernel_wireguard(&self) -> bool {
        self.wireguard == "kernel"
    }

    /// Creates a WireGuard device with `kg userspace-wireguard`, whose process id is in /run/DEVICE.pid.
    pub fn userspace_wireguard(&self, netns: &Netns, device: &str) -> Result<()> {
        let mut command = netns.command("sh");
        command
            .args([
                "-c",
                // The process of a device that was just deleted ends a moment later.
                "for i in $(seq 100); do test -e /run/wireguard/\"$1\".sock || break; sleep 0.1; done; \
                 \"$0\" userspace-wireguard \"$1\" & echo $! > /run/\"$1\".pid; \
                 for i in $(seq 100); do wg show \"$1\" >/dev/null 2>&1 && break; sleep 0.1; done; \
                 echo configured; exec sleep infinity",
            ])
            .arg(self.program("kg"))
            .arg(device);
        let log = self.directory.join("logs").join(format!("{}-{device}.log", netns.name));
        start_and_wait(command, &log, "configured")
    }

    /// Makes the laptop a peer with plain wireguard-tools and the configuration that kgctl prints.
    pub fn join_laptop(&self, network: &Network) -> Result<()> {
        let laptop = &network.laptop;
        let kernel = self.wireguard != "userspace" && laptop.ip("link add kilo-vpn type wireguard").is_ok();
        if !kernel {
            self.userspace_wireguard(laptop, "kilo-vpn")?;
        }
        laptop.ip(&format!(
            "address add {LAPTOP}/32 dev kilo-vpn\naddress add {LAPTOP6}/128 dev kilo-vpn nodad\n\
             link set kilo-vpn mtu 1420 up\n"
        ))?;
        self.configure_laptop(network, |peers| peers)
    }

    /// Replaces the laptop's static configuration by `kgctl connect`, which follows gateways. Does nothing
    /// when that already runs.
    pub fn connect_laptop(&self, network: &Network, stand_bys: u8) -> Result<()> {
        let laptop = &network.laptop;
        if laptop.sh(&format!("kill -0 $(cat {CONNECT})")).is_ok() {
            return Ok(());
        }
        laptop.sh(
            "test ! -e /run/kilo-vpn.pid || kill $(cat /run/kilo-vpn.pid); ip link delete kilo-vpn 2>/dev/null || true; \
             for i in $(seq 100); do test -e /run/wireguard/kilo-vpn.sock || exit 0; sleep 0.1; done; exit 1",
        )?;
        self.begin_to_connect(network, stand_bys)?;
        wait_for(&self.log("laptop"), "this machine is connected to the mesh")?;
        // From then on any gateway may fail.
        let handshakes = laptop.sh("wg show kilo-vpn latest-handshakes")?;
        if handshakes.lines().any(|line| line.ends_with("\t0")) {
            bail!(
                "the laptop says that it is connected, and has not shaken hands with every gateway:\n{handshakes}"
            );
        }
        Ok(())
    }

    /// Makes the laptop's Peer and starts `kgctl connect`, without waiting for it to connect.
    pub fn begin_to_connect(&self, network: &Network, stand_bys: u8) -> Result<()> {
        let follows = "  name: laptop\n  annotations: {kilo.squat.ai/follows-gateways: \"true\"}\n";
        let yaml = self.laptop(&own_addresses(), None).replace("  name: laptop\n", follows);
        self.write_object(LAPTOP_FILE, &yaml)?;
        let key = self.directory.join("laptop.key");
        run(Command::new("chmod").arg("600").arg(&key))?;
        let script = format!("echo $$ > {CONNECT}; exec \"$0\" \"$@\"");
        let mut command = network.laptop.command("sh");
        command.args(["-c", &script]).arg(self.program("kgctl"));
        command.args(["--backend", "file", "--backend-dir"]).arg(self.cluster());
        command.args([
            "connect",
            "laptop",
            "--interface",
            "kilo-vpn",
            "--log-level",
            "debug",
            "--private-key",
        ]);
        command.arg(key).args(["--wireguard", &self.wireguard, "--stand-bys", &stand_bys.to_string()]);
        start_logged(command, &self.log("laptop"))
    }

    /// Ends `kgctl connect` on the laptop, and removes its Peer.
    pub fn disconnect_laptop(&self, network: &Network) -> Result<()> {
        // As this process's child it stays a zombie, so wait for its device to go instead.
        network.laptop.sh(&format!(
            "kill $(cat {CONNECT}); for i in $(seq 100); do ip link show kilo-vpn 2>/dev/null || exit 0; sleep 0.1; \
             done; exit 1"
        ))?;
        let path = self.cluster().join(LAPTOP_FILE);
        fs::remove_file(&path).with_context(|| path.display().to_string())
    }

    /// Configures the laptop from `kgctl showconf peer laptop`, edited by `change`, with `wg setconf`, and
    /// adds a route to each allowed IP.
    pub fn configure_laptop(&self, network: &Network, change: impl FnOnce(String) -> String) -> Result<()> {
        let laptop = &network.laptop;
        let private = fs::read_to_string(self.directory.join("laptop.key"))?;
        let mut peers = self.kgctl(&["showconf", "peer", "laptop"])?;
        // The laptop is on the Internet, so it cannot use the private addresses by which locations reach each other.
        for node in &network.nodes {
            if let Some(public) = node.public {
                let endpoint = |address| format!("Endpoint = {}", SocketAddr::new(address, 51_820));
                peers = peers.replace(&endpoint(node.private), &endpoint(public));
            }
        }
        let peers = change(peers);
        let allowed: Vec<&str> = peers
            .lines()
            .filter_map(|line| line.strip_prefix("AllowedIPs = "))
            .flat_map(|list| list.split(", "))
            .collect();
        if allowed.is_empty() {
            bail!("kgctl showconf peer laptop names no allowed IPs:\n{peers}");
        }
        let conf = self.laptop_conf();
        fs::write(&conf, format!("[Interface]\nPrivateKey = {}\n\n{peers}", private.trim()))?;
        self.renew_laptop(network)?;
        let routes = allowed.iter().map(|prefix| format!("route replace {prefix} dev kilo-vpn\n"));
        laptop.ip(&routes.collect::<String>())
    }

    /// Applies the laptop's static configuration again, so that names in it are resolved anew.
    pub fn renew_laptop(&self, network: &Network) -> Result<()> {
        network.laptop.sh(&format!("wg setconf kilo-vpn {}", self.laptop_conf().display())).map(drop)
    }

    /// The laptop's static configuration.
    fn laptop_conf(&self) -> PathBuf {
        self.directory.join("laptop.conf")
    }

    /// The topology as text: locations, leaders, addresses.
    pub fn describe(&self, network: &Network) -> Result<String> {
        let dot = self.kgctl(&["graph"])?;
        let mut text = String::new();
        for location in ["site-a", "site-b"] {
            text += &format!("  {location}\n");
            for node in network.nodes.iter().filter(|node| node.location == location) {
                let shown = dot.lines().find_map(|line| {
                    let line = line.trim().strip_prefix(&format!("\"{}\" [ label=\"", node.name()))?;
                    Some(line.split('"').next()?.replace("\\n", "  "))
                });
                text += &format!(
                    "    {}\n",
                    shown.unwrap_or_else(|| format!("{} (not in the mesh)", node.name()))
                );
            }
        }
        Ok(text)
    }

    /// Prints one line for each agent.
    pub fn print_status(&self, network: &Network) {
        for node in &network.nodes {
            let state = match self.pid(node.name()) {
                Some(pid) if kill(Pid::from_raw(pid.cast_signed()), None).is_ok() => {
                    format!("kg runs as {pid}")
                }
                _ => "no kg runs".to_owned(),
            };
            println!("{:4} {}  {}  {}", node.name(), node.location, node.private, state);
        }
    }
}

/// The laptop's addresses.
fn own_addresses() -> [String; 2] {
    [format!("{LAPTOP}/32"), format!("{LAPTOP6}/128")]
}

/// Starts a long-lived command and waits until it has printed `word`.
fn start_and_wait(command: Command, log: &Path, word: &str) -> Result<()> {
    start_logged(command, log)?;
    wait_for(log, word)
}

/// Starts a long-lived command without waiting, with its output in `log`.
fn start_logged(mut command: Command, log: &Path) -> Result<()> {
    command
        .stdin(Stdio::null())
        .stdout(File::create(log)?)
        .stderr(OpenOptions::new().append(true).open(log)?)
        .process_group(0)
        .spawn()?;
    Ok(())
}

/// Waits up to 90 s until the log contains `word`.
fn wait_for(log: &Path, word: &str) -> Result<()> {
    wait::until(&format!("{word:?} in {}", log.display()), Duration::from_secs(90), || {
        let there = fs::read_to_string(log)?.contains(word);
        Ok(if there { Ok(()) } else { Err(fmt::from_fn(|to| to.write_str(&tail(log)))) })
    })
}

/// The last lines of a log.
pub fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Waits until an agent that has just started answers, and has begun to set its host up.
pub fn wait_healthy(netns: &Netns, limit: Duration) -> Result<()> {
    wait_reconciles(netns, 1, limit)
}

/// Waits until an agent that has just started has set its host up: its second reconciliation has begun.
///
/// # Errors
/// When it does not within `limit`.
pub fn wait_set_up(netns: &Netns, limit: Duration) -> Result<()> {
    wait_reconciles(netns, 2, limit)
}

fn wait_reconciles(netns: &Netns, count: u64, limit: Duration) -> Result<()> {
    wait::until(&format!("the agent of {} begins reconciliation {count}", netns.name), limit, || {
        let metrics = counters::scrape(netns);
        Ok(metrics.is_ok_and(|metrics| metrics.get("kilo_reconciles_total").is_some_and(|&n| n >= count)))
    })
    .map(drop)
}
