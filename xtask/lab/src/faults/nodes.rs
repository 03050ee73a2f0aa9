//! Faults of agents and of what they read.

use std::{
    fs,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    Lab, agents, counters,
    deployed_state::{self, LEADS, NO_NODE},
    wait::{self, until},
};

const DAY: i64 = 86_400;

/// Names of all nodes.
pub(crate) fn names(lab: &Lab) -> Vec<String> {
    lab.network.nodes.iter().map(|node| node.name().to_owned()).collect()
}

/// Ends those agents, and starts them after a while.
pub(crate) fn stop_and_start(lab: &mut Lab, names: &[String], signal: Signal, pause: Duration) -> Result<()> {
    for name in names {
        lab.agents.stop(name, signal)?;
    }
    wait::fault_lasts(pause);
    for name in names {
        let node = lab.network.node(name)?.clone();
        lab.agents.start(&node)?;
    }
    for name in names {
        agents::wait_healthy(&lab.network.node(name)?.netns, Duration::from_secs(30))?;
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))
}

pub(crate) fn kill_all(lab: &mut Lab) -> Result<String> {
    stop_and_start(lab, &names(lab), Signal::SIGKILL, Duration::from_secs(2))?;
    Ok("5 processes killed".to_owned())
}

pub(super) fn restart_all(lab: &mut Lab) -> Result<String> {
    stop_and_start(lab, &names(lab), Signal::SIGTERM, Duration::from_millis(100))?;
    Ok("5 processes ended by SIGTERM".to_owned())
}

/// Debug builds of `kg` panic on SIGUSR2, in a task nobody waits for.
pub(super) fn task_panics(lab: &mut Lab) -> Result<String> {
    lab.caused(&["panicked"]);
    let node = lab.network.node("a1")?.clone();
    let agent = lab.agents.pid("a1").context("no agent")?;
    kill(Pid::from_raw(agent.cast_signed()), Signal::SIGUSR2)?;
    let mut last = String::new();
    until("/health fails", Duration::from_secs(10), || {
        last = counters::health(&node.netns).unwrap_or_else(|error| format!("{error:#}"));
        Ok(last.contains("503"))
    })?;
    ensure!(last.contains("panicked"), "/health does not say why: {last}");
    let took = until("the process ends", Duration::from_secs(20), || Ok(lab.agents.all_run().is_err()))?;
    lab.agents.forget("a1");
    wait::fault_lasts(Duration::from_secs(1));
    lab.agents.start(&node)?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    Ok(format!("/health said 503 and why, the process ended {} ms later", took.as_millis()))
}

/// State of the host, made by us or by others: rules, routes, nftables, links, filters.
const HOST: &str = "ip rule; ip -6 rule; ip route show table all | grep -v 'dev lo' | sort; nft list ruleset; \
                    ip -o link | sed 's/^[0-9]*: //; s/@.*//; s/:.*//' | sort; \
                    tc filter show dev eth0 ingress; tc filter show dev eth0 egress; ls /sys/fs/bpf";

pub(super) fn uninstall(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a3")?.clone();
    // Foreign objects, some of them like ours.
    node.netns.sh(
        "nft add table inet other; nft add chain inet other c; ip rule add from 203.0.113.1 lookup 77; \
         ip route add 203.0.113.0/24 via 10.1.1.1; ip route add 203.0.114.0/24 via 10.1.1.1 table 77; \
         ip link add other0 type veth peer name other1",
    )?;
    let run = |lab: &mut Lab| -> Result<String> {
        lab.agents.stop("a3", Signal::SIGTERM)?;
        let mut command = node.netns.command(lab.agents.program("kg"));
        command.args(["uninstall", "--backend", "file", "--backend-dir"]).arg(lab.agents.cluster());
        crate::netns::run(&mut command)?;
        node.netns.sh(HOST)
    };
    let first = run(lab)?;
    ensure!(!first.contains("kilo"), "something of ours is left:\n{first}");
    for other in ["inet other", "203.0.113.1 lookup 77", "203.0.113.0/24", "203.0.114.0/24", "other0"] {
        ensure!(first.contains(other), "{other} of somebody else is gone:\n{first}");
    }
    lab.agents.start(&node)?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    let second = run(lab)?;
    ensure!(first == second, "the host is not as it was before:\n{first}\n-- now\n{second}");
    lab.agents.start(&node)?;
    node.netns.sh(
        "nft delete table inet other; ip rule del from 203.0.113.1 lookup 77; ip route del 203.0.113.0/24; \
         ip route del 203.0.114.0/24 table 77; ip link del other0",
    )?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    Ok("nothing of ours left, everything of others still there".to_owned())
}

/// Replaces a file atomically, as editors do.
pub(crate) fn put(path: &Path, text: &str) -> Result<()> {
    let aside = path.with_extension("aside");
    fs::write(&aside, text)?;
    fs::rename(&aside, path).with_context(|| path.display().to_string())
}

/// Writes a file into the cluster's directory, runs `while_there`,
/// and puts back what was there.
fn with_file<T>(
    lab: &mut Lab,
    name: &str,
    text: &str,
    while_there: impl FnOnce(&mut Lab) -> Result<T>,
) -> Result<T> {
    let path = lab.agents.cluster().join(name);
    let before = fs::read_to_string(&path).ok();
    put(&path, text)?;
    let result = while_there(lab);
    match before {
        Some(before) => put(&path, &before)?,
        None => fs::remove_file(&path)?,
    }
    result
}

/// A node's file with more annotations.
pub(crate) fn annotated(lab: &Lab, node: &str, annotations: &[(&str, &str)]) -> Result<String> {
    let text = fs::read_to_string(lab.agents.cluster().join(format!("node-{node}.yaml")))?;
    let lines: String =
        annotations.iter().map(|(name, value)| format!("    kilo.squat.ai/{name}: {value:?}\n")).collect();
    Ok(text.replace("spec:\n", &format!("  annotations:\n{lines}spec:\n")))
}

/// A metric of the node's agent; 0 when it has none of that name.
pub(super) fn metric(lab: &Lab, node: &str, name: &str) -> Result<u64> {
    Ok(counters::scrape(&lab.network.node(node)?.netns)?.get(name).copied().unwrap_or(0))
}

/// How far an agent's wall clock is from the right time, in seconds, within a day.
pub(crate) fn off_by(lab: &Lab, name: &str) -> Result<i64> {
    let status = counters::status(&lab.network.node(name)?.netns)?;
    let time = status["time"].as_str().context("no time in /status")?;
    // 2026-05-28T20:26:40Z
    let part = |at: usize| -> Result<i64> { Ok(time.get(at..at + 2).context("time of day")?.parse()?) };
    let said = part(11)? * 3_600 + part(14)? * 60 + part(17)?;
    let off = said - UNIX_EPOCH.elapsed()?.as_secs().cast_signed();
    Ok((off + DAY / 2).rem_euclid(DAY) - DAY / 2)
}

pub(super) fn rubbish(lab: &mut Lab) -> Result<String> {
    const ERRORS: &str = "kilo_errors_total{event=\"invalid_object\"}";
    const REFUSED: &str = "annotation kilo.squat.ai/";
    lab.caused(&[REFUSED]);
    let annotations = [
        ("persistent-keepalive", "soon"),
        ("allowed-location-ips", "10.0.0.0/99"),
        ("force-endpoint", ":::"),
    ];
    let text = annotated(lab, "a3", &annotations)?;
    let log = lab.agents.log("a2");
    let (before, read) = (metric(lab, "a2", ERRORS)?, fs::metadata(&log)?.len());
    with_file(lab, "node-a3.yaml", &text, |lab| {
        until("the rubbish is noticed", Duration::from_secs(10), || Ok(metric(lab, "a2", ERRORS)? > before))?;
        // It is logged after it is counted.
        until("a2 logs each annotation that it refuses", Duration::from_secs(10), || {
            let said = deployed_state::rest(&log, read)?;
            let is_missing = |name: &&str| !said.contains(&format!("{REFUSED}{name}"));
            let missing: Vec<_> = annotations.iter().map(|(name, _)| *name).filter(is_missing).collect();
            Ok(if missing.is_empty() { Ok(()) } else { Err(format!("nothing of {}", missing.join(", "))) })
        })?;
        wait::fault_lasts(Duration::from_secs(1));
        Ok(())
    })?;
    Ok(format!("{} annotations refused by name", annotations.len()))
}

/// True when the agent of `node` leads.
pub(super) fn leads(lab: &Lab, node: &str) -> Result<bool> {
    Ok(metric(lab, node, "kilo_leader")? == 1)
}

pub(super) fn leader_moves(lab: &mut Lab) -> Result<String> {
    lab.caused(&[LEADS]);
    let text = annotated(lab, "a2", &[("leader", "true"), ("persistent-keepalive", "5")])?;
    let took = with_file(lab, "node-a2.yaml", &text, |lab| {
        let took = until("a2 leads", Duration::from_secs(20), || leads(lab, "a2"))?;
        wait::fault_lasts(Duration::from_secs(8));
        Ok(took)
    })?;
    let back = until("a1 leads again", Duration::from_secs(20), || Ok(!leads(lab, "a2")?))?;
    Ok(format!("a2 led after {} ms, a1 again after {} ms", took.as_millis(), back.as_millis()))
}

/// a1 reads another directory, in which a2 leads; for all others a1 does.
pub(super) fn two_leaders(lab: &mut Lab) -> Result<String> {
    let other = lab.agents.cluster().with_file_name("cluster-of-a1");
    let _ = fs::remove_dir_all(&other);
    fs::create_dir(&other)?;
    for entry in fs::read_dir(lab.agents.cluster())?.flatten() {
        fs::copy(entry.path(), other.join(entry.file_name()))?;
    }
    fs::write(other.join("node-a2.yaml"), annotated(lab, "a2", &[("leader", "true")])?)?;
    let node = lab.network.node("a1")?.clone();
    lab.agents.stop("a1", Signal::SIGTERM)?;
    lab.agents.start_reading(&node, &other, &[])?;
    until("a1 takes a2 for the leader", Duration::from_secs(20), || {
        agents::wait_healthy(&node.netns, Duration::from_secs(20))?;
        Ok(!leads(lab, "a1")?)
    })?;
    let packets = |lab: &Lab| -> Result<u64> {
        let a1 = counters::scrape(&lab.network.node("a1")?.netns)?;
        let a2 = counters::scrape(&lab.network.node("a2")?.netns)?;
        Ok(counters::action(&a1, "steer") + counters::action(&a2, "steer"))
    };
    let refused = |lab: &Lab| -> Result<u64> {
        let metrics = counters::scrape(&lab.network.node("a1")?.netns)?;
        Ok(counters::drops(&metrics).get("not_for_us").copied().unwrap_or(0))
    };
    let (before, refused_before) = (packets(lab)?, refused(lab)?);
    wait::time_passes(Duration::from_secs(2), "packets are counted");
    let (steered, refused) = (packets(lab)? - before, refused(lab)? - refused_before);
    // 1,000 datagrams and at most 200 TCP segments a second, once each.
    ensure!(steered < 5000, "{steered} packets were steered for 2 s of traffic: they go round");
    ensure!(refused > 500, "a1 refused {refused} packets: does it take a2 for the leader?");
    lab.agents.stop("a1", Signal::SIGTERM)?;
    lab.agents.start(&node)?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    Ok(format!("in 2 s {steered} packets steered, {refused} refused by the node that does not lead"))
}

pub(super) fn location_gone(lab: &mut Lab) -> Result<String> {
    let cluster = lab.agents.cluster();
    let files = ["node-b1.yaml", "node-b2.yaml"];
    lab.caused(&[NO_NODE]);
    for node in ["b1", "b2"] {
        lab.removes(node);
    }
    let texts = files.map(|file| fs::read_to_string(cluster.join(file)));
    for file in files {
        fs::remove_file(cluster.join(file))?;
    }
    let gone = until("site-b is gone", Duration::from_secs(20), || Ok(metric(lab, "a2", "kilo_nodes")? == 3));
    wait::fault_lasts(Duration::from_secs(1));
    let status = lab.agents.kgctl(&["status"]);
    for (file, text) in files.iter().zip(texts) {
        fs::write(cluster.join(file), text?)?;
    }
    gone?;
    let status = status?;
    ensure!(!status.contains("site-b"), "kgctl status still shows it:\n{status}");
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    let masqueraded = lab.in_clear_for_removed()?;
    Ok(format!("gone from kgctl status; {masqueraded} packets for its pods left masqueraded, in cleartext"))
}

/// YAML of a Peer object.
pub(super) fn peer(name: &str, address: &str, key: &str, endpoint: &str) -> String {
    format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata:\n  name: {name}\nspec:\n  \
         allowedIPs: [{address}]\n  publicKey: {key}\n{endpoint}"
    )
}

/// A public key whose private key nobody has.
pub(crate) fn key(number: u8) -> String {
    // 32 bytes in base64: 42 digits of 6 bits, one of 4, one of padding.
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let digit = digits[usize::from(number) % digits.len()] as char;
    format!("{}A=", String::from(digit).repeat(42))
}

pub(super) fn unresolvable(lab: &mut Lab) -> Result<String> {
    lab.caused(&["failed to resolve endpoint"]);
    let endpoint = "  endpoint:\n    dnsOrIP:\n      dns: nowhere.invalid\n    port: 51820\n";
    let text = peer("nowhere", "10.5.0.77/32", &key(3), endpoint);
    with_file(lab, "peer-nowhere.yaml", &text, |lab| {
        until("the peer is seen", Duration::from_secs(10), || {
            Ok(lab.network.node("a1")?.netns.sh("wg show kilo0 allowed-ips")?.contains("10.5.0.77/32"))
        })?;
        wait::fault_lasts(Duration::from_secs(1));
        Ok(())
    })?;
    Ok("the peer is configured without its endpoint".to_owned())
}

pub(super) fn same_key(lab: &mut Lab) -> Result<String> {
    let mut texts = vec![peer("one", "10.5.0.78/32", &key(4), ""), peer("two", "10.5.0.78/32", &key(4), "")];
    texts.push(peer("three", "10.5.0.0/24", &key(5), ""));
    with_file(lab, "peer-twice.yaml", &texts.join("---\n"), |lab| {
        until("a peer is seen", Duration::from_secs(10), || {
            Ok(lab.network.node("a1")?.netns.sh("wg show kilo0 allowed-ips")?.contains("10.5.0.78/32"))
        })?;
        wait::fault_lasts(Duration::from_secs(1));
        let laptop = lab.network.node("a1")?.netns.sh("wg show kilo0 allowed-ips")?;
        ensure!(laptop.contains("10.5.0.1/32"), "the laptop lost its address:\n{laptop}");
        Ok(())
    })?;
    Ok("3 peers, one key twice, one prefix around the others'".to_owned())
}

pub(super) fn peers_come(lab: &mut Lab) -> Result<String> {
    let shown = |lab: &Lab| lab.network.node("a1")?.netns.sh("wg show kilo0 allowed-ips");
    for number in 0..20 {
        let text = peer(&format!("p{number}"), &format!("10.5.1.{number}/32"), &key(10 + number), "");
        fs::write(lab.agents.cluster().join(format!("peer-p{number}.yaml")), text)?;
        wait::pace(Duration::from_millis(50));
    }
    let came =
        until("20 peers", Duration::from_secs(10), || Ok(shown(lab)?.matches("10.5.1.").count() == 20));
    for number in 0..20 {
        fs::remove_file(lab.agents.cluster().join(format!("peer-p{number}.yaml")))?;
    }
    came?;
    until("no more of them", Duration::from_secs(10), || Ok(!shown(lab)?.contains("10.5.1.")))?;
    Ok("20 peers added one by one and removed".to_owned())
}
