//! `cargo xtask bench gateways`: how much each of one to four active leaders encrypts while twelve members
//! send equally.
//!
//! It runs the lab's cases and takes the counters that they read. With two cores and WireGuard in user
//! space, bits per second mean nothing: it counts packets, and how many gateways' worth they could be.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};

use super::{BenchArgs, control::Measured};
use crate::{
    apt, build, build_ebpf,
    command::{own_program, show},
    lab::{
        PACKAGES,
        failover::{Run, Share},
    },
    workspace_root,
};

/// Cases of the lab, ordered by their number of active leaders.
const CASES: [&str; 4] = ["crowd-one", "crowd-two", "crowd-three", "crowd-four"];

/// Runs the cases and writes their figures to `results`.
pub fn measure(results: &Path, args: &BenchArgs) -> Result<()> {
    apt::install(PACKAGES)?;
    let bin = match &args.bin {
        Some(bin) => bin.clone(),
        None => {
            build_ebpf::build(false)?;
            build(&["--release", "--bin", "kg", "--bin", "kgctl"])?;
            workspace_root().join("target/release")
        }
    };
    let runs = results.with_extension("runs.json");
    let cases = CASES.join(",");
    show(
        Command::new(own_program()?)
            .args(["lab", "failover", "--name", "kilo-bench", "--case", &cases, "--json"])
            .arg(&runs)
            .arg("--bin")
            .arg(bin),
    )?;
    let runs: Vec<Run> = serde_json::from_slice(&fs::read(&runs)?)?;
    fs::write(results, serde_json::to_vec_pretty(&measured(&runs)?)?)
        .with_context(|| results.display().to_string())
}

/// Figures of the runs, with one column for each number of active leaders. Pure.
///
/// # Errors
/// When a case was not run; the lab has checked whether shares are fair.
fn measured(runs: &[Run]) -> Result<Vec<Measured>> {
    let mut all = Vec::new();
    for (count, case) in (1..).zip(CASES) {
        let run = runs.iter().find(|run| run.id == case).with_context(|| format!("{case} was not run"))?;
        ensure!(run.shares.len() == count, "{case} counted {} gateways", run.shares.len());
        let figures = of_shares(&run.shares).context(case)?.into_iter();
        all.extend(figures.map(|(name, unit, value)| Measured {
            name: format!("gateways/{count}/{name}"),
            unit: unit.to_owned(),
            value,
        }));
    }
    Ok(all)
}

/// Name, unit and value of each figure of one run.
fn of_shares(shares: &[Share]) -> Result<Vec<(&'static str, &'static str, f64)>> {
    let encrypted = || shares.iter().map(|share| share.encrypted);
    let (all, most) = (encrypted().sum::<u64>(), encrypted().max().unwrap_or(0));
    ensure!(most > 0, "nothing was encrypted");
    let fair = all as f64 / shares.len() as f64;
    let decrypted: u64 = shares.iter().map(|share| share.decrypted).sum();
    let largest = Share::deviations(shares).into_iter().fold(f64::MIN, f64::max);
    let members = shares.iter().map(|share| share.members).max().unwrap_or(0);
    Ok(vec![
        ("members of the gateway with most", "nodes", members as f64),
        ("encrypted by all gateways", "packets/s", all as f64),
        ("decrypted by all gateways", "packets/s", decrypted as f64),
        ("encrypted by the busiest gateway", "packets/s", most as f64),
        ("encrypted by the idlest gateway", "packets/s", encrypted().min().unwrap_or(0) as f64),
        ("the busiest's packets, of fair", "%", (most as f64 / fair - 1.0) * 100.0),
        ("the busiest's bytes, of fair", "%", largest),
        ("packets for each that the busiest encrypts", "", all as f64 / most as f64),
    ])
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn run(id: &str, encrypted: &[u64]) -> Run {
        let share = |&encrypted: &u64| Share {
            gateway: "a1".to_owned(),
            members: encrypted / 100,
            encrypted,
            decrypted: 2 * encrypted,
            bytes: 1000 * encrypted,
        };
        let shares = encrypted.iter().map(share).collect();
        Run { id: id.to_owned(), shares, ..Run::default() }
    }

    #[test]
    fn the_busiest_gateway_says_how_much_more_all_could_carry() {
        let shares = [&[1200][..], &[600, 600], &[500, 400, 300], &[300; 4]];
        let runs: Vec<_> = CASES.into_iter().zip(shares).map(|(case, shares)| run(case, shares)).collect();
        let figures = measured(&runs).unwrap();
        let value = |name: &str| figures.iter().find(|figure| figure.name == name).unwrap().value;
        assert_eq!(value("gateways/1/encrypted by all gateways"), 1200.0);
        assert_eq!(value("gateways/3/decrypted by all gateways"), 2400.0);
        assert_eq!(value("gateways/3/members of the gateway with most"), 5.0);
        assert_eq!(value("gateways/3/encrypted by the idlest gateway"), 300.0);
        assert_eq!(value("gateways/3/the busiest's packets, of fair"), 25.0);
        assert_eq!(value("gateways/3/the busiest's bytes, of fair"), 25.0);
        let times = [1, 2, 3, 4]
            .map(|count| value(&format!("gateways/{count}/packets for each that the busiest encrypts")));
        assert_eq!(times, [1.0, 2.0, 2.4, 4.0]);
        assert!(measured(&runs[..3]).is_err(), "one is missing");
        assert!(of_shares(&[Share::default()]).is_err(), "nothing was sent");
    }
}
