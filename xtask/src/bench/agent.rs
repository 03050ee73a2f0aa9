//! Our variant: the real agent configures the node from Node objects and ends before anything is measured;
//! the data path stays.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use kilo_common::{
    lead::{self, Term},
    maps::{HOP_REMOTE, LEAD_ACTING, NODE_LED},
};

use super::{
    frames::Wrap,
    site::{
        OWN_V6, PORT, RELAY_PORTS, REMOTE_V6, SECOND_REMOTE_V6, Site, pods, private, public, remote_pods,
        remote_private,
    },
};
use crate::{
    confine,
    lab::{agents::tail, counters, wait},
};

/// Default of `--relay-rate`.
const RELAY_RATE: u16 = 1000;
/// Most Node objects in one file.
const NODES_PER_FILE: usize = 1000;

/// The cluster that the agent sees, and its flags.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Nodes of this location.
    pub nodes: usize,
    /// Other locations, each with `remote_nodes` nodes.
    pub remote_locations: usize,
    /// Nodes in each other location.
    pub remote_nodes: usize,
    /// Whether this node leads; else node 1 does.
    pub leads: bool,
    /// Whether this node relays while it is a leader or stand-by.
    pub relays: bool,
    /// Active leaders of the location, each with its own members; `None`: no failover.
    pub leaders: Option<u8>,
    /// Value of `--tunnel`.
    pub wrap: Wrap,
    /// Value of `--masquerade`.
    pub masquerade: &'static str,
    /// Whether packets of pods may bypass the stack.
    pub host_routing: bool,
}

impl Setup {
    /// Number of the active leader that is not the one by Kilo's rule: this node if it leads.
    pub const fn second(&self) -> usize {
        if self.leads { 0 } else { 3 }
    }

    fn all(&self) -> usize {
        self.nodes + self.remote_locations * self.remote_nodes
    }

    /// Node objects as agents would have annotated them.
    fn objects(&self, remote_key: &str, now: u64) -> Vec<String> {
        let has_several = self.leaders.is_some_and(|leaders| leaders > 1);
        // With several leaders, Kilo's rule selects another node than this one.
        let leader = usize::from(!self.leads || has_several);
        let knows = self.leaders.map(|leaders| {
            format!("    kilo.squat.ai/signal: \"1\"\n    kilo.squat.ai/leaders: \"{leaders}\"\n")
        });
        let knows = knows.unwrap_or_default();
        let own = (0..self.nodes).map(|number| {
            let mut annotations = format!("    kilo.squat.ai/location: own\n{knows}");
            if has_several && number == self.second() {
                annotations += "    kilo.squat.ai/gateway: \"true\"\n";
            }
            if number > 0 {
                annotations +=
                    &checked_in(&format!("{}:{PORT}", private(number)), private(number), &key(number), now);
            }
            if number == leader {
                annotations += "    kilo.squat.ai/leader: \"\"\n";
            }
            if number == 0 && self.relays {
                annotations += "    kilo.squat.ai/relay: \"true\"\n";
            }
            node(&format!("own-{number:05}"), &annotations, pods(number))
        });
        let remote = (0..self.remote_locations * self.remote_nodes).map(|number| {
            let location = number % self.remote_locations;
            let key = if number == 0 { remote_key.to_owned() } else { key(self.nodes + number) };
            let endpoint = format!("{}:{PORT}", public(location));
            let mut annotations = format!("    kilo.squat.ai/location: remote-{location:03}\n{knows}");
            annotations += &checked_in(&endpoint, remote_private(number), &key, now);
            if number < self.remote_locations {
                annotations += "    kilo.squat.ai/leader: \"\"\n";
            }
            node(&format!("remote-{number:05}"), &annotations, remote_pods(number))
        });
        own.chain(remote).collect()
    }
}

fn node(name: &str, annotations: &str, pods: std::net::Ipv4Addr) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  annotations:\n{annotations}spec:\n  podCIDR: {pods}/24\n"
    )
}

fn checked_in(endpoint: &str, private: std::net::Ipv4Addr, key: &str, now: u64) -> String {
    format!(
        "    kilo.squat.ai/endpoint: {endpoint}\n    kilo.squat.ai/internal-ip: {private}/16\n    \
         kilo.squat.ai/key: {key}\n    kilo.squat.ai/last-seen: \"{now}\"\n"
    )
}

/// A public key whose private half nobody has.
fn key(number: usize) -> String {
    format!("{number:042}A=")
}

/// Sets the node up with the agent, then ends the agent.
pub fn set_up(site: &Site, setup: &Setup, kg: &Path) -> Result<()> {
    let cluster = write_objects(site, setup)?;
    site.node.sh(&format!(
        "mkdir -p /var/lib/kilo && install -m 600 {} /var/lib/kilo/key",
        site.directory.join("node.key").display()
    ))?;
    let failover =
        setup.leaders.map(|leaders| ["--failover=auto".to_owned(), format!("--leaders={leaders}")]);
    let log = site.directory.join("kg.log");
    let file = OpenOptions::new().create(true).append(true).open(&log)?;
    let mut child = site
        .node
        .command("env")
        .args(confine::launcher(kg, &site.directory)?)
        .args(["--backend", "file", "--backend-dir"])
        .arg(cluster)
        .args(["--hostname", "own-00000", "--internal-cidr", "10.1.0.0/16", "--resync-period", "5s"])
        .args(["--wireguard", "kernel"])
        .args(["--tunnel", setup.wrap.flag(), "--masquerade", setup.masquerade])
        .args(failover.into_iter().flatten())
        .args(setup.host_routing.then_some("--host-routing=auto"))
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()?;
    let started = Instant::now();
    let (mut last, mut quiet_since) = (None, started);
    let result = loop {
        match writes(site, setup.all()) {
            // In large meshes the agent pauses between computing and writing.
            Some(count) if Some(count) == last => {
                if quiet_since.elapsed() > Duration::from_secs(3 + setup.all() as u64 / 500) {
                    break Ok(());
                }
            }
            now => (last, quiet_since) = (now, Instant::now()),
        }
        if let Some(status) = child.try_wait()? {
            break Err(anyhow::anyhow!("kg ended: {status}"));
        }
        if started.elapsed() > Duration::from_secs(600) {
            break Err(anyhow::anyhow!("kg does not see {} nodes", setup.all()));
        }
        wait::pace(Duration::from_millis(200));
    };
    child.kill()?;
    child.wait()?;
    result.with_context(|| tail(&log))
}

fn write_objects(site: &Site, setup: &Setup) -> Result<PathBuf> {
    let cluster = site.directory.join("cluster");
    let _ = fs::remove_dir_all(&cluster);
    fs::create_dir_all(&cluster)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let objects = setup.objects(&site.remote_key, now);
    for (number, part) in objects.chunks(NODES_PER_FILE).enumerate() {
        fs::write(cluster.join(format!("nodes-{number}.yaml")), part.join("---\n"))?;
    }
    Ok(cluster)
}

/// Number of the agent's writes to the kernel; `None` until it sees all nodes and has written something.
fn writes(site: &Site, nodes: usize) -> Option<u64> {
    let metrics = counters::scrape(&site.node).ok()?;
    let seen = metrics.get("kilo_nodes").is_some_and(|&seen| seen == nodes as u64);
    let writes =
        metrics.iter().filter(|(name, _)| name.starts_with("kilo_writes_total")).map(|(_, &count)| count);
    Some(writes.sum()).filter(|&count| seen && count > 0)
}

/// Fills the maps as agents of several active leaders do once each has its members: the second leader
/// carries its own packets and those of one member, and that member's `lead` word names the second leader.
pub fn give_its_own(site: &Site, setup: &Setup) -> Result<()> {
    let maps = "/sys/fs/bpf/kilo/v*";
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!(" {byte:02x}")).collect::<String>();
    let write = |map: &str, key: &[u8], value: &[u8]| {
        let (key, value) = (hex(key), hex(value));
        site.node
            .sh(&format!("bpftool map update pinned {maps}/{map} key hex{key} value hex{value}"))
            .map(drop)
    };
    // `kilo_common::maps::NodeValue`: hop id, flags.
    let node = |number: usize| {
        let key = private(number).octets();
        let found =
            site.node.sh(&format!("bpftool -j map lookup pinned {maps}/node_v4 key hex{}", hex(&key)))?;
        let found: serde_json::Value = serde_json::from_str(&found)?;
        let bytes = found["value"].as_array().context("no node of that address")?;
        let bytes = bytes.iter().map(|byte| {
            let digits = byte.as_str().unwrap_or_default().trim_start_matches("0x");
            u8::from_str_radix(digits, 16).context("a byte of node_v4")
        });
        Ok::<_, anyhow::Error>((key, bytes.collect::<Result<Vec<u8>>>()?))
    };
    let hop = if setup.leads {
        let (key, mut value) = node(site.member)?;
        *value.get_mut(4).context("flags of node_v4")? |= NODE_LED as u8;
        write("node_v4", &key, &value)?;
        HOP_REMOTE as u16
    } else {
        let (_, value) = node(setup.second())?;
        u16::from_ne_bytes([value[0], value[1]])
    };
    let term = Term::NONE.next(1 << 48);
    write("lead", &LEAD_ACTING.to_ne_bytes(), &lead::word(term, hop).to_ne_bytes())
}

/// Binds a pair in the relay's map, as its agent does once both ends are known: the leader elsewhere and
/// one more.
pub fn bind_pair(site: &Site) -> Result<()> {
    bind(site, [public(0), private(0), public(1)].map(|addr| addr.to_ipv6_mapped().octets()), 1)
}

/// IPv6 counterpart of [`bind_pair`], on a node that had IPv4 only.
pub fn bind_pair_v6(site: &Site) -> Result<()> {
    site.enable_ipv6()?;
    bind(site, [REMOTE_V6, OWN_V6, SECOND_REMOTE_V6].map(|addr| addr.octets()), 2)
}

/// Binds the port to a pair: one end, the relay itself, the other end. `written` counts the writes of this
/// port.
fn bind(site: &Site, [from, own, to]: [[u8; 16]; 3], written: u32) -> Result<()> {
    let ifindex: u32 = site.node.sh("cat /sys/class/net/eth0/ifindex")?.trim().parse().context("ifindex")?;
    // `kilo_common::relay::Port`.
    let mut port: Vec<u8> = [from, own, to, own].concat();
    port.extend([0; 24]);
    port.extend(ifindex.to_ne_bytes());
    port.extend([PORT, PORT, RELAY_PORTS.1, RELAY_RATE].into_iter().flat_map(u16::to_ne_bytes));
    port.extend(written.to_ne_bytes());
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!(" {byte:02x}")).collect::<String>();
    let key = hex(&u32::from(RELAY_PORTS.0).to_ne_bytes());
    let update =
        format!("bpftool map update pinned /sys/fs/bpf/kilo/v*/relay key hex{key} value hex{}", hex(&port));
    site.node.sh(&update).map(drop)
}

/// The counters of the data path that are not zero, for an error message.
pub fn counts(site: &Site) -> String {
    let text = site.node.sh("bpftool -j map dump name count 2>/dev/null || true").unwrap_or_default();
    let entries: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap_or_default();
    let counts: Vec<_> = entries
        .iter()
        .filter_map(|entry| {
            let count = entry["formatted"]["values"][0]["value"].as_u64().filter(|&count| count > 0)?;
            Some(format!("{}: {count}", entry["formatted"]["key"]))
        })
        .collect();
    format!("counters {}", counts.join(", "))
}

/// Fails when the binary is missing.
pub fn check_binary(kg: &Path) -> Result<()> {
    if kg.exists() {
        return Ok(());
    }
    bail!("{} does not exist", kg.display())
}
