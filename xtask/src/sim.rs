//! `cargo xtask sim`: the table of docs/design/failover.md, from fault schedules run over the modules that
//! choose the leader.

use anyhow::{Result, bail, ensure};
use clap::Args;
use kilo_failover::{MS, Params};
use kilo_failover_sim::{
    planned,
    report::{self, NOISES},
    scenarios::{SCENARIOS, Scenario},
};

/// Options of the simulation.
#[derive(Args, Debug)]
pub struct SimArgs {
    /// Runs of each fault.
    #[arg(default_value_t = 1_000)]
    runs: u64,
    /// The first seed; the same seed gives the same runs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only faults whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// One run of the fault that `--only` names, of this seed, with a log.
    #[arg(long, requires = "only")]
    log: Option<u64>,
    /// Probe interval in ms.
    #[arg(long, default_value_t = 40)]
    interval: u64,
    /// Hours without a fault, for each kind of noise.
    #[arg(long, default_value_t = 24)]
    hours: u64,
}

/// Runs the command.
pub fn main(args: &SimArgs) -> Result<()> {
    let params = Params::new(args.interval * MS)?;
    let is_asked = |scenario: &&Scenario| args.only.as_ref().is_none_or(|only| scenario.name.contains(only));
    let scenarios: Vec<_> = SCENARIOS.iter().filter(is_asked).collect();
    if let (Some(seed), [scenario, ..]) = (args.log, &scenarios[..]) {
        let sim = scenario.one(seed, &params, true);
        println!("{}, seed {seed}: {:?}", scenario.name, sim.counts);
        return Ok(());
    }
    ensure!(!scenarios.is_empty(), "no fault has such a name: leave --only away to see all");
    println!("{}", Scenario::head());
    let mut broken = 0;
    for scenario in &scenarios {
        let figures = scenario.many((args.runs * scenario.share / 100).max(1), args.seed, &params);
        println!("{}", scenario.row(&figures));
        broken += figures.broken.len();
    }
    if args.only.is_none() {
        without_faults(args);
    }
    if broken > 0 {
        bail!("{broken} rules or limits did not hold: repeat one with --only NAME --log SEED");
    }
    Ok(())
}

fn without_faults(args: &SimArgs) {
    println!(
        "\nwithout a fault, {} h each: takeovers of the location, of a stand-by alone, words changed",
        args.hours
    );
    for (name, nodes, noise) in NOISES {
        let (location, alone, words) = report::without_fault(args.hours, args.seed, *nodes, *noise);
        println!("{name:<50} {location:>6} {alone:>6} {words:>6}");
    }
    println!("\nprobes and signals a second that agents send without a fault");
    for nodes in [2, 5, 20, 100, 1_000] {
        println!("{nodes:>5} nodes {:>6}", report::load(nodes));
    }
    println!(
        "\nplanned changes at 1,000 packets a second, 500 each: lost in the median, at most; taken back"
    );
    for (name, member) in [("a member", 4), ("another gateway", 2), ("the next leader", 1), ("the leader", 0)]
    {
        let mut costs: Vec<_> =
            (0..500).map(|seed| planned::change(args.seed * 10_000 + seed, member, 0.0)).collect();
        costs.sort_by_key(|cost| cost.lost);
        let lost = |at: usize| costs.get(at).map_or(0, |cost| cost.lost);
        let taken_back: u32 = costs.iter().map(|cost| cost.taken_back).sum();
        println!("{name:<50} {:>6} {:>6} {taken_back:>6}", lost(250), lost(499));
    }
}
