//! What starting the programs costs: the first time, and when an agent of the same build has left them in the
//! kernel.

use std::time::{Duration, Instant};

use kilo_host::dataplane::{Dataplane, PROGRAMS};
use nix::time::{ClockId, clock_gettime};

use crate::{
    Figures, bpf,
    compute::{median, milliseconds},
};

const ROUNDS: usize = 9;

/// Columns of the table: the first start after a boot, and one of the same build after it.
const STARTS: [&str; 2] = ["first start", "next start"];

pub fn measure(figures: &mut Figures) {
    let (mut waited, mut ran) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for _ in 0..ROUNDS {
        let Some(fs) = bpf::bpffs() else { return };
        for start in 0..STARTS.len() {
            let (before, started) = (processor_time(), Instant::now());
            let dataplane = Dataplane::open(fs.path(), false).unwrap();
            waited[start].push(started.elapsed());
            ran[start].push(processor_time() - before);
            assert_eq!(dataplane.loaded() > 0, start == 0, "{}", STARTS[start]);
        }
    }
    for ((start, waited), ran) in STARTS.into_iter().zip(waited).zip(ran) {
        figures.add_to(
            "start",
            start,
            "until programs and maps are there",
            "ms",
            milliseconds(median(waited)),
        );
        figures.add_to("start", start, "processor time", "ms", milliseconds(median(ran)));
    }
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    for name in PROGRAMS {
        let info = dataplane.program(name).unwrap().info().unwrap();
        let verified = info.verified_instruction_count().unwrap_or(0);
        figures.add_to("verifier", "instructions", name, "verified", verified.into());
    }
}

/// CPU time of all threads of this process, user and system.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap().into()
}
