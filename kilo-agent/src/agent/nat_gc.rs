//! Schedules sweeps of the NAT table: every half a minute, more often when it fills up, and at once when a
//! flow found no port.

use std::time::Instant;

use kilo_common::drop_reasons::DropReason;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Metrics, gauge};
use kilo_host::dataplane::{
    CounterReader, DataplaneError,
    nat::{self, NatGc},
};

/// Sweeps until `stop`.
pub async fn run(mut gc: NatGc, counters: CounterReader, metrics: Metrics, stop: CancellationToken) {
    let mut due = Instant::now();
    let mut refused = refusals(&counters);
    let mut tick = tokio::time::interval(nat::PROMPT);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let now = refusals(&counters);
        if now == refused && Instant::now() < due {
            continue;
        }
        refused = now;
        // Reading a full table takes some milliseconds, so it runs on a blocking thread.
        let swept = tokio::task::spawn_blocking(move || {
            let swept = gc.sweep(nat::now());
            (gc, swept)
        });
        let Ok((back, swept)) = swept.await else { return };
        gc = back;
        due = Instant::now() + observe(&metrics, swept).next();
    }
}

/// Number of flows that found no free port or table entry.
fn refusals(counters: &CounterReader) -> u64 {
    let reasons = [DropReason::NatExhausted, DropReason::NatMapFull];
    reasons.iter().map(|reason| counters.drops(*reason).unwrap_or(0)).sum()
}

fn observe(metrics: &Metrics, swept: Result<nat::Sweep, DataplaneError>) -> nat::Sweep {
    match swept {
        Ok(sweep) => {
            metrics.nat_entries.set(gauge(sweep.entries));
            metrics.set_map_entries(kilo_common::map_table::NAT.name, sweep.entries);
            metrics.nat_collected.inc_by(sweep.removed as u64);
            tracing::debug!(entries = sweep.entries, removed = sweep.removed, "NAT table swept");
            sweep
        }
        Err(error) => {
            metrics.error(error.label());
            tracing::error!(%error, "failed to sweep the NAT table");
            nat::Sweep::default()
        }
    }
}
