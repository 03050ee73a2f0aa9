//! How long each program runs under traffic, as the kernel counts it
//! (`kernel.bpf_stats_enabled`).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::Path,
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use serde::Deserialize;

use super::{
    Lab, bulk,
    network::{Network, OUTSIDE},
    options::LabOptions,
    take_over,
};
use crate::command::{output, run};

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// Echo requests to each target, and bytes of a TCP transfer each way.
const ECHOES: usize = 20_000;
const BYTES: usize = 8 * 1024 * 1024;

/// What programs do under one kind of traffic.
pub struct RunTimes {
    /// `echo` or `TCP`.
    pub traffic: &'static str,
    /// Name of a program, how often it ran on all nodes together, and
    /// nanoseconds of a run.
    pub programs: Vec<(String, u64, f64)>,
}

/// A program as bpftool shows it.
#[derive(Deserialize)]
struct Program {
    id: u32,
    #[serde(default)]
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    run_time_ns: u64,
    #[serde(default)]
    run_cnt: u64,
}

/// Options as they are when none is given.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    lab: LabOptions,
}

/// Builds a lab with the binaries of `bin`, sends traffic, and takes it down.
///
/// # Errors
/// When something cannot be built, sent or read.
pub fn measure(bin: &Path) -> Result<Vec<RunTimes>> {
    let name = "kilo-bench";
    let mut args = Defaults::try_parse_from(["bench", "--name", name])?.lab;
    args.bin = Some(bin.to_owned());
    let others: BTreeSet<u32> = programs()?.into_iter().map(|program| program.id).collect();
    let _guard = take_over(name)?;
    let lab = Lab::up(&args, None)?;
    let _counting = Counting::start()?;
    let send = |traffic, send: fn(&Network) -> Result<()>| {
        let before = sums(&others)?;
        send(&lab.network).with_context(|| traffic)?;
        let programs = sums(&others)?.into_iter().filter_map(|(name, (time, count))| {
            let (time_before, count_before) = before.get(&name).copied().unwrap_or_default();
            let runs = count.checked_sub(count_before).filter(|&runs| runs > 0)?;
            Some((name, runs, (time - time_before) as f64 / runs as f64))
        });
        anyhow::Ok(RunTimes { traffic, programs: programs.collect() })
    };
    Ok(vec![send("echo", echoes)?, send("TCP", transfers)?])
}

/// Targets for a pod of a member: a pod of the other location, one of its own location, the outside.
fn targets(network: &Network) -> Result<[IpAddr; 3]> {
    Ok([network.node("b2")?.pod_ip().into(), network.node("a3")?.pod_ip().into(), OUTSIDE.into()])
}

fn echoes(network: &Network) -> Result<()> {
    for target in targets(network)? {
        let count = ECHOES.to_string();
        let ping = ["-f", "-q", "-s", "64", "-c", &count, "-w", "60"];
        run(network.node("a2")?.pod.command("ping").args(ping).arg(target.to_string()))?;
    }
    Ok(())
}

fn transfers(network: &Network) -> Result<()> {
    for target in targets(network)? {
        bulk::run(&network.node("a2")?.pod, target, BYTES)?;
    }
    Ok(())
}

/// Nanoseconds and runs by program name, of all nodes together.
fn sums(others: &BTreeSet<u32>) -> Result<BTreeMap<String, (u64, u64)>> {
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for program in programs()?.into_iter().filter(|program| !others.contains(&program.id)) {
        let sum = sums.entry(program.name).or_default();
        sum.0 += program.run_time_ns;
        sum.1 += program.run_cnt;
    }
    Ok(sums)
}

fn programs() -> Result<Vec<Program>> {
    let text = output(Command::new("bpftool").args(["-j", "prog", "show"]))?;
    let programs: Vec<Program> = serde_json::from_str(&text).context("bpftool -j prog show")?;
    Ok(programs.into_iter().filter(|program| program.kind == "sched_cls").collect())
}

/// Makes the kernel count until it is dropped, which restores the switch.
struct Counting {
    before: String,
}

impl Counting {
    fn start() -> Result<Self> {
        let before = fs::read_to_string(SWITCH).context(SWITCH)?;
        fs::write(SWITCH, "1").context(SWITCH)?;
        Ok(Self { before })
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let _ = fs::write(SWITCH, self.before.trim());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_runs_is_read_as_one_that_ran_never() {
        let text = r#"[{"id": 7, "type": "sched_cls", "name": "kilo_egress", "tag": "00"},
                       {"id": 8, "type": "sched_cls", "run_time_ns": 900, "run_cnt": 3}]"#;
        let programs: Vec<Program> = serde_json::from_str(text).unwrap();
        assert_eq!((programs[0].run_cnt, programs[1].run_cnt, programs[1].name.as_str()), (0, 3, ""));
    }
}
