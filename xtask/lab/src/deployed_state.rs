//! What must be true of agents after every check: they have the rights of their manifest and no others, their
//! programs are on the hooks of this kernel and were never detached, and they warn of nothing but what the
//! check caused.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Seek as _, SeekFrom},
    path::Path,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    Lab,
    agents::Agents,
    counters,
    network::{Network, Node},
    topology,
};
use crate::confine;

/// What an agent logs when somebody detached a program.
pub const DETACHED: &str = "reattached it";
/// Leadership moved to another gateway.
pub const CHANGE: &str = "leadership changed";
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
/// Programs on an uplink.
const UPLINK_PROGRAMS: [&str; 2] = ["lan_ingress", "uplink_egress"];
/// Programs on an uplink without Ethernet headers.
const LAYER3_PROGRAMS: [&str; 2] = ["l3_ingress", "l3_egress"];
/// Our devices that decapsulate; which of them a node has depends on its kernel and its agent.
const TUNNELS: [&str; 2] = ["kilo-vxlan", "kilo-ipip"];
/// Program on those devices.
const TUNNEL_PROGRAM: &str = "tunnel_ingress";
/// First kernel with TCX.
const TCX_SINCE: (u32, u32) = (6, 6);

/// How far the agents' logs have been read, and what they may contain.
#[derive(Debug, Default)]
pub struct Watch {
    /// Bytes read of each node's log.
    read: BTreeMap<String, u64>,
    /// Programs each agent has attached again.
    reattached: BTreeMap<String, u64>,
    /// Parts of the lines that the running check causes to be logged, and that the one before did: a line may
    /// come late.
    caused: [Vec<String>; 2],
}

impl Watch {
    /// Fails when there are new warnings and errors that nobody declared, or a program was attached again.
    fn look(&mut self, network: &Network, agents: &Agents) -> Result<()> {
        let lines = self.lines(network, agents)?;
        ensure!(lines.is_empty(), "agents logged what the check did not cause:\n{}", lines.join("\n"));
        self.reattached(network, agents)
    }

    /// New warnings and errors that nobody declared, each with its node.
    fn lines(&mut self, network: &Network, agents: &Agents) -> Result<Vec<String>> {
        let mut unexpected = Vec::new();
        for node in &network.nodes {
            let read = self.read.get(node.name()).copied().unwrap_or(0);
            let text = rest(&agents.log(node.name()), read)?;
            // A line that is not complete is read when it is.
            let complete = text.rfind('\n').map_or("", |end| &text[..=end]);
            self.read.insert(node.name().to_owned(), read + complete.len() as u64);
            let new = warnings(complete).into_iter().filter(|warning| !self.expects(warning));
            unexpected.extend(new.map(|warning| format!("    {}: {warning}", node.name())));
        }
        Ok(unexpected)
    }

    /// Fails when a program was attached again without a check having detached it.
    fn reattached(&mut self, network: &Network, agents: &Agents) -> Result<()> {
        let may = self.expects(DETACHED);
        let mut said = Vec::new();
        for (node, _) in running(network, agents) {
            // An agent that has just been started does not answer yet.
            let Ok(metrics) = counters::scrape(&node.netns) else { continue };
            let now = metrics.get(REATTACHED).copied().unwrap_or(0);
            let before = self.reattached.insert(node.name().to_owned(), now).unwrap_or(0);
            // A new agent begins at 0.
            if !may && now != before && now != 0 {
                said.push(format!("{}: {REATTACHED} is {now}, and was {before}", node.name()));
            }
        }
        ensure!(said.is_empty(), "{}", said.join("; "));
        Ok(())
    }

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
        let result = self.watch.look(&self.network, &self.agents);
        let result = self.nothing_in_clear().and(result);
        self.removed.clear();
        self.without_lan.clear();
        self.watch.caused.rotate_right(1);
        self.watch.caused[0].clear();
        result
    }
}

/// What has been logged after so many bytes.
pub(crate) fn rest(log: &Path, from: u64) -> Result<String> {
    let mut file = fs::File::open(log).with_context(|| log.display().to_string())?;
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Warnings and errors; all text that is not a line of the log counts as one, because a panic prints many
/// lines.
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

/// The nodes on which an agent runs, with its process.
fn running<'a>(network: &'a Network, agents: &'a Agents) -> impl Iterator<Item = (&'a Node, u32)> {
    network.nodes.iter().filter_map(|node| Some((node, agents.pid(node.name())?)))
}

/// The check that a lab ends with: nobody has anything more to warn about, and every agent that runs has its
/// rights and hooks.
///
/// # Errors
/// When something differs.
pub fn as_deployed(lab: &mut Lab) -> Result<String> {
    lab.all_well()?;
    let topology = lab.topology;
    rights_and_hooks(&lab.network, &lab.agents, |node| topology.uplinks(node))
}

/// As [`as_deployed`], for a mesh beside a lab: everything that its agents have logged is checked. `caused`
/// are parts of what they may have logged, and each node's only uplink is eth0.
///
/// # Errors
/// When something differs.
pub fn mesh_as_deployed(network: &Network, agents: &Agents, caused: &[&str]) -> Result<String> {
    let mut watch = Watch::default();
    watch.caused[0].extend(caused.iter().map(|&part| part.to_owned()));
    watch.look(network, agents)?;
    rights_and_hooks(network, agents, |_| vec!["eth0"])
}

/// Rights and hooks of every agent that runs; `uplinks` are the devices that carry a node's packets out.
fn rights_and_hooks(
    network: &Network,
    agents: &Agents,
    uplinks: impl Fn(&Node) -> Vec<&'static str>,
) -> Result<String> {
    let wanted = hook()?;
    let mut count = 0;
    for (node, pid) in running(network, agents) {
        confine::check(pid).with_context(|| node.name().to_owned())?;
        hooks(node, wanted, &uplinks(node)).with_context(|| node.name().to_owned())?;
        count += 1;
    }
    Ok(format!("({count} agents, all on {wanted})"))
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

/// Checks that every program is on the right kind of hook, and each device that is to have one has it.
/// Devices of others (flannel, Cilium and pods' bridges) are left to the checks of those scenarios.
fn hooks(node: &Node, wanted: &str, uplinks: &[&str]) -> Result<()> {
    let status = counters::status(&node.netns)?;
    let programs = status["agent"]["programs"].as_array().context("no programs in /status")?;
    let devices = node.netns.sh("ls /sys/class/net")?;
    on_hooks(programs, wanted, uplinks, &devices)
}

/// Pure: whether these are the programs that a node with these uplinks has; `devices` are all its devices,
/// one per line.
///
/// # Errors
/// Names the program that is on another kind of hook, or missing.
pub fn on_hooks(programs: &[serde_json::Value], wanted: &str, uplinks: &[&str], devices: &str) -> Result<()> {
    for program in programs {
        ensure!(program["hook"] == wanted, "not on {wanted}: {program}");
    }
    let of_uplink = |uplink: &&str| if *uplink == topology::PPP { LAYER3_PROGRAMS } else { UPLINK_PROGRAMS };
    let uplinks = uplinks.iter().flat_map(|uplink| of_uplink(uplink).map(|program| (*uplink, program)));
    let tunnels = devices.lines().filter(|device| TUNNELS.contains(device));
    let tunnels = tunnels.map(|tunnel| (tunnel, TUNNEL_PROGRAM));
    let own = [("kilo0", "kilo_egress"), ("kilo0", "kilo_ingress")];
    for (interface, name) in uplinks.chain(own).chain(tunnels) {
        let is_there = |at: &serde_json::Value| at["interface"] == interface && at["program"] == name;
        ensure!(programs.iter().any(is_there), "{name} is not on {interface}: {programs:?}");
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
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
    fn each_device_of_a_node_has_its_programs_on_the_kernels_hooks() {
        let on = |interface: &str, program: &str, hook: &str| serde_json::json!({"interface": interface, "program": program, "hook": hook});
        let own = [on("kilo0", "kilo_egress", "tcx"), on("kilo0", "kilo_ingress", "tcx")];
        let uplink = |device, names: [&str; 2]| names.map(|name| on(device, name, "tcx"));
        let eth0 = uplink("eth0", UPLINK_PROGRAMS);
        let programs = [&own[..], &eth0].concat();
        on_hooks(&programs, "tcx", &["eth0"], "eth0\nlo").unwrap();
        for (uplinks, devices, missing) in [
            (&["eth0", "eth1"][..], "eth0\neth1", "lan_ingress is not on eth1"),
            (&["eth0", topology::PPP], "eth0\nppp0", "l3_ingress is not on ppp0"),
            (&["eth0"], "eth0\nkilo-vxlan\nlo", "tunnel_ingress is not on kilo-vxlan"),
        ] {
            let error = on_hooks(&programs, "tcx", uplinks, devices).unwrap_err().to_string();
            assert!(error.starts_with(missing), "{error}");
        }
        let more = [&programs[..], &[on("kilo-vxlan", TUNNEL_PROGRAM, "clsact")]].concat();
        on_hooks(&more, "tcx", &["eth0"], "kilo-vxlan").unwrap_err();
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
