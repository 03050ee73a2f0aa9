//! How agents must be after every check: with the rights of their manifest and no
//! others, on the hooks of this kernel, their programs never detached, and silent
//! but for what the check caused.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{Lab, counters, network::Node, topology::Topology};
use crate::confine;

/// What an agent logs when somebody detached a program.
pub const DETACHED: &str = "reattached it";
/// Another node leads its location for a while, one without a public address.
pub const LEADS: &str = "leads its location with the private endpoint";
/// A node's only interface is down.
pub const NO_ENDPOINT: &str = "no address of this host can be an endpoint";
/// A node's private interface is down and its uplink is not.
pub const ONLY_DEFAULT: &str = "only a default route leads to a node of this location";
/// The agent's own Node object is not there.
pub const NO_NODE: &str = "check --hostname";
/// An agent was asked to stop meanwhile.
pub const PODS_STAY: &str = "but pods or other containers still run here";
/// The WireGuard device went while an agent worked with it.
pub const NO_KILO0: &str = "kilo0 is gone or was replaced";
/// Counts the programs that an agent attached again.
pub const REATTACHED: &str = "kilo_reattached_total";
/// Interfaces that carry a node's packets out, with their programs.
const UPLINK_PROGRAMS: [&str; 2] = ["lan_ingress", "uplink_egress"];
/// TCX came with this kernel.
const TCX_SINCE: (u32, u32) = (6, 6);

/// What has been read of the agents' logs, and what may be there.
#[derive(Debug, Default)]
pub struct Watch {
    /// Bytes read of each node's log.
    read: BTreeMap<String, u64>,
    /// Programs each agent has attached again.
    reattached: BTreeMap<String, u64>,
    /// Parts of what the check that runs causes to be logged, and of what the one before did:
    /// a line may come late.
    caused: [Vec<String>; 2],
}

impl Watch {
    /// Whether a check caused this line.
    fn expects(&self, line: &str) -> bool {
        self.caused.iter().flatten().any(|part| line.contains(part.as_str()))
    }
}

impl Lab {
    /// Declares what this check makes agents warn about.
    pub fn caused(&mut self, parts: &[&str]) {
        self.watch.caused[0].extend(parts.iter().map(|&part| part.to_owned()));
    }

    /// Declares that this check has removed a node's object.
    pub fn removes(&mut self, node: &str) {
        self.removed.insert(node.to_owned());
    }

    /// Declares that this check has taken the interface down that a node has in its LAN.
    pub fn takes_from_lan(&mut self, node: &str) {
        self.without_lan.insert(node.to_owned());
    }

    /// Ends a check: fails when an agent is not well.
    pub fn all_well(&mut self) -> Result<()> {
        let result = lines(self).and_then(|lines| {
            ensure!(lines.is_empty(), "agents logged what the check did not cause:\n{}", lines.join("\n"));
            reattached(self)
        });
        let result = self.nothing_in_clear().and(result);
        self.removed.clear();
        self.without_lan.clear();
        self.watch.caused.rotate_right(1);
        self.watch.caused[0].clear();
        result
    }
}

/// New warnings and errors that nobody declared, each with its node.
fn lines(lab: &mut Lab) -> Result<Vec<String>> {
    let mut unexpected = Vec::new();
    for node in &lab.network.nodes {
        let read = lab.watch.read.get(node.name()).copied().unwrap_or(0);
        let text = rest(&lab.agents.log(node.name()), read)?;
        // A line that is not complete is read when it is.
        let complete = text.rfind('\n').map_or("", |end| &text[..=end]);
        lab.watch.read.insert(node.name().to_owned(), read + complete.len() as u64);
        let new = warnings(complete).into_iter().filter(|warning| !lab.watch.expects(warning));
        unexpected.extend(new.map(|warning| format!("    {}: {warning}", node.name())));
    }
    Ok(unexpected)
}

fn rest(log: &Path, from: u64) -> Result<String> {
    let mut file = fs::File::open(log).with_context(|| log.display().to_string())?;
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Warnings and errors; and all that is no line of the log as one, because a panic says it in many.
fn warnings(log: &str) -> Vec<String> {
    let (mut warnings, mut others) = (Vec::new(), Vec::new());
    for line in log.lines().filter(|line| !line.trim().is_empty()) {
        match serde_json::from_str::<serde_json::Value>(line) {
            Ok(entry) if entry["level"] == "WARN" || entry["level"] == "ERROR" => {
                warnings.push(line.to_owned());
            }
            Ok(_) => {}
            Err(_) => others.push(line),
        }
    }
    if !others.is_empty() {
        warnings.push(others.join("\n        "));
    }
    warnings
}

/// Fails when a program was attached again without a check having detached it.
fn reattached(lab: &mut Lab) -> Result<()> {
    let may = lab.watch.expects(DETACHED);
    let mut said = Vec::new();
    for node in running(lab) {
        // One that has just been started does not answer yet.
        let Ok(metrics) = counters::scrape(&node.netns) else { continue };
        let now = metrics.get(REATTACHED).copied().unwrap_or(0);
        let before = lab.watch.reattached.insert(node.name().to_owned(), now).unwrap_or(0);
        // A new agent begins with none.
        if !may && now != before && now != 0 {
            said.push(format!("{}: {REATTACHED} is {now}, and was {before}", node.name()));
        }
    }
    ensure!(said.is_empty(), "{}", said.join("; "));
    Ok(())
}

fn running(lab: &Lab) -> Vec<Node> {
    let nodes = lab.network.nodes.iter();
    nodes.filter(|node| lab.agents.pid(node.name()).is_some()).cloned().collect()
}

/// A check of its own: rights and hooks of every agent that runs.
pub fn as_deployed(lab: &mut Lab) -> Result<String> {
    let wanted = hook()?;
    let nodes = running(lab);
    let plain = lab.topology == Topology::Plain;
    for node in &nodes {
        let pid = lab.agents.pid(node.name()).context("no agent")?;
        confine::check(pid).with_context(|| node.name().to_owned())?;
        hooks(node, wanted, plain).with_context(|| node.name().to_owned())?;
    }
    Ok(format!("({} agents, all on {wanted})", nodes.len()))
}

/// The hook agents use on this kernel.
///
/// # Errors
/// When its release is not two numbers.
pub fn hook() -> Result<&'static str> {
    let release = nix::sys::utsname::uname()?.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok(if (major, minor) >= TCX_SINCE { "tcx" } else { "clsact" }),
        _ => bail!("kernel release {release:?}"),
    }
}

/// `plain`: the node's interfaces have the names they have in the lab's own network.
fn hooks(node: &Node, wanted: &str, plain: bool) -> Result<()> {
    let status = counters::status(&node.netns)?;
    let programs = status["agent"]["programs"].as_array().context("no programs in /status")?;
    for program in programs {
        ensure!(program["hook"] == wanted, "not on {wanted}: {program}");
    }
    if !plain {
        return Ok(());
    }
    let uplinks = if node.public.is_some() { &["eth0", "eth1"][..] } else { &["eth0"] };
    let uplinks = uplinks.iter().flat_map(|&uplink| UPLINK_PROGRAMS.map(|program| (uplink, program)));
    for (interface, name) in uplinks.chain([("kilo0", "kilo_egress"), ("kilo0", "kilo_ingress")]) {
        let is_there = |at: &&serde_json::Value| at["interface"] == interface && at["program"] == name;
        ensure!(programs.iter().any(|at| is_there(&at)), "{name} is not on {interface}: {programs:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_one_warning_and_an_information_is_none() {
        let log = "{\"level\":\"INFO\"}\n\nthread 'main' panicked at src/x.rs:1\n{\"level\":\"WARN\"}\nstack backtrace:\n";
        let said = warnings(log);
        assert_eq!(said.len(), 2, "{said:?}");
        assert_eq!(said[0], "{\"level\":\"WARN\"}");
        assert!(said[1].contains("panicked") && said[1].contains("backtrace"));
        assert!(warnings("{\"level\":\"INFO\"}\n").is_empty());
    }

    #[test]
    fn what_a_check_caused_may_come_during_the_next_and_not_later() {
        let mut watch = Watch { caused: [vec!["gone".to_owned()], Vec::new()], ..Watch::default() };
        assert!(watch.expects("it is gone"));
        watch.caused.rotate_right(1);
        watch.caused[0].clear();
        assert!(watch.expects("it is gone") && !watch.expects("other"));
        watch.caused.rotate_right(1);
        watch.caused[0].clear();
        assert!(!watch.expects("it is gone"));
    }
}
