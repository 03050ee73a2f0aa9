//! What hosts and agents hold before and after a soak.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{Lab, netns, wait};

/// Idle threads and last connections take their time to go.
const PATIENCE: Duration = Duration::from_secs(90);

/// State of a host, one item per line, without numbers that change with each interface, filter or packet, and
/// without link-local addresses, which are random.
const HOST: &str = "
    ip -o link | sed 's/^[0-9]*: //; s/@.*//; s/:.*//' | sed 's/^/link /'
    ip -o address | awk '{print \"address\", $2, $4}' | grep -v ' fe80:' || true
    (ip rule; ip -6 rule) | sed 's/^/rule /'
    (ip route show table all; ip -6 route show table all) | grep -v -e 'dev lo' -e fe80: -e ff00: \
        | sed 's/expires [0-9]*sec//; s/ *$//; s/^/route /'
    nft list ruleset | sed 's/packets [0-9]* bytes [0-9]*//; s/^/nft /'
    for d in $(ls /sys/class/net); do
        (tc filter show dev $d ingress; tc filter show dev $d egress) | grep -o 'kilo_[a-z_]*' | sed \"s/^/filter $d /\" || true
    done
    bpftool net show | grep -o '^[a-z0-9]*([0-9]*) [a-z/]* [a-z_]*' | sed 's/([0-9]*)//; s/^/program /' || true
    find /sys/fs/bpf | sed 's/[0-9]*$//; s/^/pin /'";

/// What hosts and agents hold at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Lines of each node, and how often each occurs.
    hosts: BTreeMap<String, BTreeMap<String, usize>>,
    /// What each agent holds: open files of each kind, threads.
    agents: BTreeMap<String, BTreeMap<String, usize>>,
    /// An agent's own memory in KiB.
    memory: BTreeMap<String, u64>,
}

impl Inventory {
    /// Waits until nothing has changed for three seconds, at most for `PATIENCE`.
    pub fn settled(lab: &Lab) -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let mut before = Self::taken(lab)?;
        loop {
            wait::time_passes(Duration::from_secs(3), "it is to stay the same for so long");
            let now = Self::taken(lab)?;
            if now.hosts == before.hosts && now.agents == before.agents || Instant::now() > deadline {
                return Ok(now);
            }
            before = now;
        }
    }

    fn taken(lab: &Lab) -> Result<Self> {
        let mut inventory = Self::default();
        for node in &lab.network.nodes {
            let name = node.name().to_owned();
            let mut lines: BTreeMap<String, usize> = BTreeMap::new();
            let processes = netns::processes(&node.netns)?;
            let programs = processes.iter().map(|process| format!("process {}", command(*process)));
            for line in node.netns.sh(HOST)?.lines().map(str::to_owned).chain(programs) {
                *lines.entry(line).or_default() += 1;
            }
            inventory.hosts.insert(name.clone(), lines);
            if let Some(agent) = lab.agents.pid(&name) {
                inventory.agents.insert(name.clone(), held(agent));
                inventory.memory.insert(name, memory(agent));
            }
        }
        Ok(inventory)
    }

    /// What differs from `before` on the hosts, and what agents hold in addition.
    fn more_than(&self, before: &Self, memory: u64) -> Vec<String> {
        let mut said = Vec::new();
        for (name, lines) in &self.hosts {
            let there = &before.hosts[name];
            for line in lines.keys().chain(there.keys()).collect::<BTreeSet<_>>() {
                let count = |lines: &BTreeMap<String, usize>| lines.get(line).copied().unwrap_or(0);
                if count(lines) != count(there) {
                    said.push(format!("{name}: {} instead of {}: {line}", count(lines), count(there)));
                }
            }
        }
        for (name, held) in &self.agents {
            for (kind, &count) in held {
                let there = before.agents.get(name).and_then(|held| held.get(kind)).copied().unwrap_or(0);
                if count > there {
                    said.push(format!("{name}: its agent holds {count} instead of {there} {kind}"));
                }
            }
            let (now, then) = (self.memory[name], before.memory.get(name).copied().unwrap_or(0));
            if now > then + memory {
                said.push(format!("{name}: its agent has {now} KiB of its own instead of {then}"));
            }
        }
        said
    }
}

/// Waits until nothing is there that was not before, and nothing is gone.
///
/// # Errors
/// Lists what is left over or gone.
pub fn nothing(lab: &Lab, before: &Inventory, memory: u64) -> Result<()> {
    wait::until("nothing is left over, or gone", PATIENCE, || {
        let said = Inventory::taken(lab)?.more_than(before, memory);
        Ok(if said.is_empty() { Ok(()) } else { Err(said.join("\n")) })
    })
}

/// A process's program and arguments, without what differs each time.
fn command(process: u32) -> String {
    let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&words);
    let mut words = words.split('\0').filter(|word| !word.is_empty());
    let program = words.next().and_then(|path| path.rsplit('/').next()).unwrap_or_default().to_owned();
    let first = words.next().unwrap_or_default();
    format!("{program} {first}")
}

/// How many open files of each kind a process has, and threads.
fn held(process: u32) -> BTreeMap<String, usize> {
    let process = Path::new("/proc").join(process.to_string());
    let threads = fs::read_dir(process.join("task")).map_or(0, Iterator::count);
    let mut held = BTreeMap::from([("threads".to_owned(), threads)]);
    for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        // Numbers of sockets and pipes differ.
        let name = target.to_string_lossy().into_owned();
        let kind = name.strip_prefix("anon_inode:").or(name.split_once(":[").map(|(kind, _)| kind));
        *held.entry(kind.unwrap_or(&name).to_owned()).or_default() += 1;
    }
    held
}

/// Resident memory that is the process's own, in KiB; 0 when it is gone.
fn memory(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
