//! What the control plane costs: `cargo xtask bench control` runs this and
//! keeps the figures. Run it in network and mount namespaces of its own
//! (`unshare --net --mount`). Argument: the file for the figures. Environment:
//! `KILO_BENCH_NODES` (sizes, comma separated), `KILO_BENCH_REST` (seconds),
//! `KILO_BENCH_LAUNCHER` (the program of `cargo xtask`, which confines the agent), `KILO_BENCH_PART` (slices, scale or
//! start: that part alone, as `cargo xtask bench slices` and so on want it).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "fails as a test does")]

mod by_slices;
mod check_ins;
mod compute;
mod counted;
mod first_packet;
mod objects;
mod process;
mod programs;
mod scale;
mod scenario;
mod slices;
mod start;
mod trace;

use std::path::PathBuf;

use kilo_test_support::{api, bpf, netns};

/// One figure, as `docs/benchmarks.json` has it.
#[derive(Clone, Debug, serde::Serialize)]
struct Figure {
    name: String,
    unit: &'static str,
    value: f64,
}

/// All figures so far, written to the file after every step.
struct Figures {
    path: PathBuf,
    all: Vec<Figure>,
}

impl Figures {
    fn add(&mut self, nodes: usize, what: &str, unit: &'static str, value: f64) {
        self.add_to("control", nodes, what, unit, value);
    }

    fn add_to(
        &mut self,
        group: &str,
        size: impl std::fmt::Display,
        what: &str,
        unit: &'static str,
        value: f64,
    ) {
        println!("bench: {group} {size:>6}  {what:46} {value:>12.3} {unit}");
        self.all.push(Figure { name: format!("{group}/{size}/{what}"), unit, value });
        std::fs::write(&self.path, serde_json::to_vec_pretty(&self.all).unwrap()).unwrap();
    }
}

fn main() {
    let path =
        std::env::args().nth(1).map(PathBuf::from).filter(|path| path.extension() == Some("json".as_ref()));
    let mut figures = Figures { path: path.unwrap_or_else(|| "/dev/null".into()), all: Vec::new() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _on_runtime = runtime.enter();
    match std::env::var("KILO_BENCH_PART").as_deref() {
        Ok("slices") => return runtime.block_on(slices::measure(&mut figures)),
        Ok("scale") => return runtime.block_on(scale::measure(&mut figures)),
        Ok("start") => return start::measure(&mut figures),
        _ => {}
    }
    let sizes = std::env::var("KILO_BENCH_NODES").unwrap_or_else(|_| "100,1000,10000".to_owned());
    let sizes: Vec<usize> = sizes.split(',').map(|size| size.parse().unwrap()).collect();
    programs::measure(&mut figures);
    runtime.block_on(async {
        for nodes in &sizes {
            compute::measure(&mut figures, *nodes);
        }
        for nodes in sizes {
            scenario::measure(&mut figures, nodes).await;
        }
    });
}
