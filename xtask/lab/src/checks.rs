//! What the lab proves, one named check at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use kilo_common::maps::LAYOUT_VERSION;
use nix::sys::signal::Signal;

use super::{
    Lab, agents,
    check::{Check, outcome},
    clear,
    counters::{self, action, drops},
    deployed_state, fail_closed, forward_policy, granularity, matrix, nat,
    network::Node,
    node_ports, offloads,
    options::{Choice, LabOptions},
    path_mtu, pod_tunnels, printer, services, udp_segment, vpn, wait, wireguard_go,
};
use crate::report::{InClear, TestOutcome};

const CHECKS: &[Check] = &[
    ("non-leaders steer and never encrypt; leaders encrypt, forward and carry transit", roles),
    ("datagrams that pods hand over many at once arrive whole", udp_segment::run),
    (
        "tunnels of pods' own carry known bytes, by the device where no outer header can be written",
        pod_tunnels::run,
    ),
    ("no packet of the mesh is seen in cleartext", nothing_in_clear),
    ("packets in cleartext are seen when they are sent on purpose", clear::sees_leaks),
    ("no mesh packet was dropped on the way", no_drops),
    ("pod traffic to the outside is masqueraded", masquerade),
    ("offloads on or off, pods receive the bytes that were sent", offloads::run),
    ("service addresses lead to pods of every node, with rp_filter=1 and INVALID dropped", services::run),
    ("senders learn the path MTU whatever link is small, and TCP goes on", path_mtu::run),
    ("bpftool shows named programs and readable map fields", bpftool),
    ("a reconcile with nothing new writes nothing", quiet),
    ("an undisturbed ping and TCP flow lose nothing", undisturbed),
    ("killing kg with SIGKILL loses no packet and a restarted one adopts", kill_agents),
    ("restarting kg cleanly loses no packet", restart_agents),
    ("a second agent on a node waits and sets nothing up", second_agent),
];

/// Uses of the mesh in which WireGuard itself plays a part.
const WIREGUARD: &[Check] = &[
    ("a VPN peer to which NAT gives another address and port in mid-flow loses no connection", vpn::roams),
    ("a VPN peer needs the pre-shared key of its Peer object", vpn::preshared_key),
    ("a VPN peer is the gateway to a network behind it, and to a service there", vpn::gateway),
    ("a VPN peer reaches services through a node, and the outside with that node's address", vpn::internet),
    ("a printer of one location is reached from everywhere while allowed-location-ips say so", printer::run),
    ("two leaders behind port-restricted NATs find each other through a third", nat::run),
    ("a node on its own by annotation, live, is reached by all and loses no connection", granularity::mixed),
    (
        "a leader with wireguard-go and --create-interface=false meets leaders with another WireGuard",
        wireguard_go::run,
    ),
];

/// Faults of WireGuard's device and port, addresses that lead to pods from outside, and changes of granularity.
const DEVICE_AND_ACCESS: &[Check] = &[
    (
        "kilo0 down or deleted while no agent runs leaks nothing, and is mended by the next",
        fail_closed::without_agent,
    ),
    ("kilo0 deleted again and again under traffic leaks nothing", fail_closed::under_agent),
    (
        "without WireGuard's port everything else is put right, and nothing leaves in cleartext",
        fail_closed::port_taken,
    ),
    (
        "node ports and host ports lead to pods from outside and from other nodes' pods, whose own flows stay apart",
        node_ports::run,
    ),
    (
        "switching between granularities interrupts no connection for longer than a reconcile",
        granularity::run,
    ),
];

/// Last, because they change every node.
const LAST: &[Check] = &[
    ("pods pass a FORWARD policy DROP with --iptables-forward-rules, and not without", forward_policy::run),
    ("after `kg uninstall` nothing of ours is left", uninstall),
];

/// The first of [`CHECKS`], which depend on how packets are carried: enough for one more way to carry them.
const CARRIED: &[Check] = CHECKS.split_at(6).0;

/// Name of the check that runs after all others, whichever are chosen.
const AS_DEPLOYED_CHECK: &str =
    "agents have the rights of the manifest and no others, and the hooks of this kernel";

impl Choice {
    /// The checks, in their order.
    pub const fn checks(self) -> [&'static [Check]; 4] {
        match self {
            Self::All => [CHECKS, WIREGUARD, DEVICE_AND_ACCESS, LAST],
            Self::Carried => [CARRIED, &[], &[], &[]],
            Self::Transport => [CHECKS, &[], &[], LAST],
            Self::Wireguard => [CARRIED, WIREGUARD, &[], &[]],
        }
    }
}

/// Runs every check of these; the lab is taken down by the caller.
pub fn run(
    mut lab: Lab,
    started: Instant,
    prefix: &str,
    args: &LabOptions,
    checks: impl IntoIterator<Item = &'static Check>,
) -> Vec<TestOutcome> {
    let mut outcomes = vec![outcome(prefix, "the mesh comes up", started, &Ok(String::new()))];
    let began = Instant::now();
    match matrix::run(&lab.network) {
        Ok(matrix) => {
            matrix.print();
            outcomes.extend(by_kind(&matrix, prefix, began));
        }
        Err(error) => outcomes.push(outcome(prefix, "the matrix runs", began, &Err(error))),
    }
    outcomes.push(outcome(
        prefix,
        "agents have found nothing to warn about so far",
        began,
        &quiet_logs(&mut lab),
    ));
    let wanted = |name: &str| args.only.as_ref().is_none_or(|words| name.contains(words));
    for (name, check) in checks.into_iter().filter(|(name, _)| wanted(name)) {
        let began = Instant::now();
        let result = check(&mut lab);
        // Report both: what the agents log may explain the failure.
        let result = match (result, lab.all_well()) {
            (Ok(figure), well) => well.map(|()| figure),
            (Err(error), Ok(())) => Err(error),
            // An error keeps its kind: packets in cleartext are not retried.
            (Err(error), Err(well)) if well.is::<InClear>() => Err(well.context(format!("{error:#}"))),
            (Err(error), Err(well)) => Err(error.context(format!("{well:#}"))),
        };
        outcomes.push(outcome(prefix, name, began, &result));
    }
    outcomes.push(as_deployed(&mut lab, prefix));
    if outcomes.iter().any(TestOutcome::is_failed) {
        for node in &lab.network.nodes {
            println!(
                "-- last lines of the agent of {}\n{}",
                node.name(),
                agents::tail(&lab.agents.log(node.name()))
            );
        }
    }
    outcomes
}

/// The check that every lab ends with, whichever others ran.
pub fn as_deployed(lab: &mut Lab, prefix: &str) -> TestOutcome {
    let began = Instant::now();
    outcome(prefix, AS_DEPLOYED_CHECK, began, &deployed_state::as_deployed(lab))
}

/// No agent logs trouble while the mesh comes up, nor while everybody reaches everybody.
fn quiet_logs(lab: &mut Lab) -> Result<String> {
    lab.all_well().map(|()| String::new())
}

/// One outcome for each kind of path, so that a report says what works.
fn by_kind(matrix: &matrix::Matrix, prefix: &str, began: Instant) -> Vec<TestOutcome> {
    let kinds: BTreeSet<_> =
        matrix.cells.iter().map(|cell| (cell.source_kind, cell.target_kind, cell.label())).collect();
    kinds
        .into_iter()
        .map(|kind| {
            let cells =
                matrix.cells.iter().filter(|cell| (cell.source_kind, cell.target_kind, cell.label()) == kind);
            let failed: Vec<_> = cells
                .clone()
                .filter_map(|cell| {
                    Some(format!("{} -> {}: {}", cell.source, cell.target, cell.error.as_ref()?))
                })
                .collect();
            let result = if failed.is_empty() {
                Ok(format!("({} paths)", cells.count()))
            } else {
                Err(anyhow::anyhow!(failed.join("\n    ")))
            };
            let name = format!("{} reaches {} by {}", kind.0, kind.1, kind.2);
            outcome(prefix, &name, began, &result)
        })
        .collect()
}

fn roles(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let count = lab.counted(node)?;
        let shown = format!("{}: {:?}", node.name(), counters::scrape(&node.netns)?);
        if node.public.is_some() {
            for name in ["encrypt", "decrypt", "transit", "forward"] {
                ensure!(count(name) > 0, "leader counts no {name}; {shown}");
            }
        } else {
            ensure!(
                count("steer") > 0 && count("deliver") > 0,
                "non-leader steers or delivers nothing; {shown}"
            );
            ensure!(count("encrypt") == 0 && count("transit") == 0, "non-leader encrypts; {shown}");
        }
    }
    Ok(String::new())
}

fn masquerade(lab: &mut Lab) -> Result<String> {
    let mut sum = 0;
    for node in &lab.network.nodes {
        let metrics = counters::scrape(&node.netns)?;
        let (out, back) = (action(&metrics, "masquerade"), action(&metrics, "unmasquerade"));
        ensure!(out > 0 && back > 0, "{}: {out} masqueraded, {back} back", node.name());
        sum += out;
    }
    Ok(format!("({sum} packets)"))
}

/// No LAN showed a packet of the mesh.
pub fn nothing_in_clear(lab: &mut Lab) -> Result<String> {
    lab.nothing_in_clear().map(|()| String::new())
}

/// No program dropped a packet of the mesh.
pub fn no_drops(lab: &mut Lab) -> Result<String> {
    let dropped = mesh_drops(lab)?;
    ensure!(dropped.values().all(BTreeMap::is_empty), "dropped: {dropped:?}");
    Ok(String::new())
}

/// Mesh packets that the programs of each node have dropped so far, by reason.
fn mesh_drops(lab: &Lab) -> Result<BTreeMap<String, BTreeMap<String, u64>>> {
    let of = |node: &Node| {
        let mut drops = drops(&counters::scrape(&node.netns)?);
        // The kernel's own neighbour discovery on the device.
        drops.remove("not_unicast");
        Ok((node.name().to_owned(), drops))
    };
    lab.network.nodes.iter().map(of).collect()
}

fn bpftool(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let programs = node.netns.sh("bpftool prog list")?;
        for name in ["kilo_egress", "kilo_ingress", "lan_ingress", "tunnel_ingress", "uplink_egress"] {
            ensure!(
                programs.contains(&format!("name {name} ")),
                "{}: no program {name}:\n{programs}",
                node.name()
            );
        }
        let maps = format!("bpftool map dump pinned /sys/fs/bpf/kilo/v{LAYOUT_VERSION}");
        let dump = node.netns.sh(&format!("{maps}/prefix_v4"))?;
        ensure!(
            dump.contains("\"hop\"") && dump.contains("\"flags\""),
            "{}: no field names:\n{dump}",
            node.name()
        );
        let dump = node.netns.sh(&format!("{maps}/hop | head -40"))?;
        ensure!(
            dump.contains("\"kind\"") && dump.contains("\"tunnel\""),
            "{}: no field names:\n{dump}",
            node.name()
        );
    }
    Ok(String::new())
}

fn quiet(lab: &mut Lab) -> Result<String> {
    let read = |lab: &Lab| -> Result<Vec<(u64, u64)>> {
        lab.network
            .nodes
            .iter()
            .map(|node| {
                let metrics = counters::scrape(&node.netns)?;
                let value = |name: &str| {
                    metrics.get(name).copied().with_context(|| format!("{} has no {name}", node.name()))
                };
                Ok((value("kilo_reconciles_total")?, value("kilo_writes_total")?))
            })
            .collect()
    };
    let before = read(lab)?;
    // Of two reconciles begun since, at least one has ended.
    let after = wait::until("every agent has reconciled twice", Duration::from_secs(60), || {
        let after = read(lab)?;
        let have = after.iter().zip(&before).all(|(after, before)| after.0 >= before.0 + 2);
        Ok(have.then_some(after))
    })?;
    let mut reconciles = 0;
    for (node, (before, after)) in lab.network.nodes.iter().zip(before.iter().zip(&after)) {
        ensure!(after.1 == before.1, "{} wrote {} times", node.name(), after.1 - before.1);
        reconciles += after.0 - before.0;
    }
    Ok(format!("({reconciles} reconciles, 0 writes)"))
}

/// A ping and a TCP flow between pods of the two locations.
struct Traffic {
    ping: Child,
    server: Child,
    flow: Child,
}

impl Traffic {
    fn start(lab: &Lab, seconds: u64) -> Result<Self> {
        let (from, to) = (lab.network.node("a2")?, lab.network.node("b2")?);
        let target = to.pod_ip().to_string();
        let server = quiet_child(to.pod.command("iperf3").args(["-s", "-1", "-p", "5201"]))?;
        wait::until("iperf3 listens", Duration::from_secs(10), || {
            Ok(!to.pod.sh("ss -Hltn sport = :5201")?.trim().is_empty())
        })?;
        // Modest rates: under emulation a flood measures the emulator's queues.
        let interval = "0.02";
        let count = (seconds * 50).to_string();
        let ping =
            quiet_child(from.pod.command("ping").args(["-n", "-q", "-i", interval, "-c", &count, &target]))?;
        let flow = quiet_child(from.pod.command("iperf3").args([
            "-c",
            &target,
            "-p",
            "5201",
            "-J",
            "-b",
            "4M",
            "-i",
            "0.5",
            "-t",
            &seconds.to_string(),
        ]))?;
        Ok(Self { ping, server, flow })
    }

    /// Waits for the end; returns a sentence with the figures, or fails with what was lost.
    fn finish(self) -> Result<String> {
        let Self { ping, mut server, flow } = self;
        let ping = ping.wait_with_output()?;
        let flow = flow.wait_with_output()?;
        let _ = server.kill();
        let _ = server.wait();
        let text = String::from_utf8_lossy(&ping.stdout).into_owned();
        let line =
            text.lines().find(|line| line.contains("packets transmitted")).context("ping said nothing")?;
        ensure!(line.contains(" 0% packet loss"), "ping: {line}");
        let json: serde_json::Value = serde_json::from_slice(&flow.stdout).context("iperf3 wrote no JSON")?;
        if let Some(error) = json.get("error") {
            bail!("iperf3: {error}");
        }
        let intervals =
            json.pointer("/intervals").and_then(|v| v.as_array()).context("iperf3: no intervals")?;
        let stalled = intervals
            .iter()
            .filter(|interval| interval.pointer("/sum/bytes").and_then(serde_json::Value::as_u64) == Some(0))
            .count();
        ensure!(stalled == 0, "the TCP flow stood still in {stalled} of {} half seconds", intervals.len());
        let bytes = json.pointer("/end/sum_received/bytes").and_then(serde_json::Value::as_u64).unwrap_or(0);
        ensure!(bytes > 0, "iperf3 received nothing");
        Ok(format!("({}; iperf3 {} KB, no stall)", line.trim(), bytes / 1000))
    }
}

fn quiet_child(command: &mut Command) -> Result<Child> {
    Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?)
}

/// Ends and restarts the agents one after the other while traffic flows.
fn each_agent(lab: &mut Lab, signal: Signal, down_for: Duration) -> Result<String> {
    let names: Vec<_> = lab.network.nodes.iter().map(|node| node.name().to_owned()).collect();
    let before: Vec<_> =
        lab.network.nodes.iter().map(|node| counters::scrape(&node.netns)).collect::<Result<_>>()?;
    // Path MTU checks have already caused drops of oversized packets.
    let dropped = mesh_drops(lab)?;
    let traffic = Traffic::start(lab, 25)?;
    for name in &names {
        lab.agents.stop(name, signal)?;
        wait::fault_lasts(down_for);
        let node = lab.network.node(name)?.clone();
        lab.agents.start(&node)?;
        agents::wait_healthy(&node.netns, Duration::from_secs(120))?;
    }
    let figures = traffic.finish().with_context(|| where_lost(lab))?;
    for (node, before) in lab.network.nodes.iter().zip(before) {
        let after = counters::scrape(&node.netns)?;
        for name in ["steer", "encrypt", "decrypt", "masquerade"] {
            ensure!(
                action(&after, name) >= action(&before, name),
                "{}: {name} counted {} before and {} after: the maps were not adopted",
                node.name(),
                action(&before, name),
                action(&after, name)
            );
        }
        let copies = copies_attached(&node.netns)?;
        let interfaces = if node.public.is_some() { 2 } else { 1 };
        ensure!(
            copies == 3 + 2 * interfaces,
            "{}: {copies} programs are attached, {} are wanted",
            node.name(),
            3 + 2 * interfaces
        );
    }
    let now = mesh_drops(lab)?;
    ensure!(now == dropped, "dropped {dropped:?} before and {now:?} after");
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(180))?;
    Ok(figures)
}

/// Counters of each node for packets that did not get through.
fn where_lost(lab: &Lab) -> String {
    let places = lab.network.nodes.iter().map(|node| {
        let ours = counters::scrape(&node.netns).map(|metrics| drops(&metrics)).unwrap_or_default();
        let kernel = node.netns.sh(
            "awk '{print \"backlog\", $2, $3}' /proc/net/softnet_stat; nstat -az 2>/dev/null | awk '/ReversePath|OutNoRoutes|InDiscards|OutDiscards|IpInAddr/ && $2 > 0'; \
             ip -s -o link show kilo0; ip -s -o link show eth0; tc -s qdisc show | grep -B1 dropped | head -40",
        );
        format!("{}: ours {ours:?}; kernel: {}", node.name(), kernel.unwrap_or_default())
    });
    places.collect::<Vec<_>>().join("\n")
}

/// How many of our programs are attached on this node, by TCX links or clsact filters; without those of pods'
/// interfaces (`--host-routing`).
fn copies_attached(netns: &super::netns::Netns) -> Result<usize> {
    let text = netns.sh(
        "ls /sys/fs/bpf/kilo/links 2>/dev/null | sed /^pod_ingress_/d | wc -l; \
         for d in kilo0 kilo-vxlan eth0 eth1; do for h in ingress egress; do tc filter show dev $d $h 2>/dev/null; done; done \
         | grep -cE 'kilo_|lan_ingress|uplink_egress|tunnel_ingress' || true",
    )?;
    Ok(text.split_whitespace().filter_map(|word| word.parse::<usize>().ok()).sum())
}

/// Baseline for the checks with faults: the same traffic without one.
fn undisturbed(lab: &mut Lab) -> Result<String> {
    Traffic::start(lab, 10)?.finish().with_context(|| where_lost(lab))
}

fn kill_agents(lab: &mut Lab) -> Result<String> {
    each_agent(lab, Signal::SIGKILL, Duration::from_secs(2))
}

fn restart_agents(lab: &mut Lab) -> Result<String> {
    each_agent(lab, Signal::SIGTERM, Duration::from_millis(500))
}

/// Exit status of `timeout` when it had to end the program.
const TIMED_OUT: i32 = 124;

fn second_agent(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a2")?;
    let output = node
        .netns
        .command("timeout")
        .arg("5")
        .args(lab.agents.confined()?)
        .args(["--backend", "file", "--backend-dir"])
        .arg(lab.agents.cluster())
        .args(["--listen", ":1108"])
        .output()?;
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(TIMED_OUT), "it did not wait: {said}");
    ensure!(said.contains("already runs on this node"), "it does not say why it waits: {said}");
    ensure!(said.contains("it has not set anything up"), "it did not stop when it was asked to: {said}");
    counters::scrape(&node.netns).context("the first agent no longer answers")?;
    Ok(String::new())
}

fn uninstall(lab: &mut Lab) -> Result<String> {
    uninstall_from(lab, &["a1", "a2"])
}

/// Ends these nodes' agents and removes what they made.
pub fn uninstall_from(lab: &mut Lab, names: &[&str]) -> Result<String> {
    // Another node leads when the leader's annotations are gone.
    lab.caused(&[deployed_state::LEADS]);
    for name in names {
        lab.agents.stop(name, Signal::SIGKILL)?;
        let node = lab.network.node(name)?;
        let kg = lab.agents.program("kg");
        let output = node
            .netns
            .command(&kg)
            .args(["uninstall", "--backend", "file", "--backend-dir"])
            .arg(lab.agents.cluster())
            .output()?;
        ensure!(output.status.success(), "kg uninstall: {}", String::from_utf8_lossy(&output.stderr));
        let left = node.netns.sh(
            "ls -d /sys/fs/bpf/kilo 2>/dev/null || true; ip -o link | grep kilo || true; ip rule | grep 1107 || true; \
             ip route show table all | grep kilo0 || true; for d in kilo0 kilo-vxlan eth0 eth1; do for h in ingress egress; do tc filter show dev $d $h 2>/dev/null; done; done \
             | grep -E 'kilo_|lan_ingress|uplink_' || true",
        )?;
        ensure!(left.trim().is_empty(), "{name} still has:\n{left}");
        let yaml = read_all(&lab.agents.cluster(), name)?;
        ensure!(!yaml.contains("kilo.squat.ai/key"), "{name} still has annotations:\n{yaml}");
    }
    Ok(String::new())
}

/// Contents of all files in the cluster directory whose names contain the node's.
fn read_all(directory: &Path, node: &str) -> Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir(directory)?.flatten() {
        if entry.file_name().to_string_lossy().contains(node) {
            text += &fs::read_to_string(entry.path())?;
        }
    }
    Ok(text)
}
