//! Collects what metrics and status show about slices: the parts of a [`SlicesReport`].

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use kilo_core::objects::slices::Reason;
use parking_lot::Mutex;

use crate::backend::SlicesReport;

#[derive(Debug, Default)]
pub(in crate::backend::kubernetes) struct Report {
    chosen: Mutex<(bool, Option<Reason>)>,
    writes: AtomicBool,
    written: AtomicU64,
    failed: AtomicU64,
    bad: AtomicUsize,
    twice: AtomicUsize,
}

impl Report {
    pub(super) fn choose(&self, reads: bool, against: Option<Reason>) {
        let mut known = self.chosen.lock();
        *known = (reads, against);
    }

    pub(super) fn wrong(&self, bad: usize, twice: usize) {
        self.bad.store(bad, Ordering::Relaxed);
        self.twice.store(twice, Ordering::Relaxed);
    }

    pub(super) fn set_writes(&self, writes: bool) {
        self.writes.store(writes, Ordering::Relaxed);
    }

    pub(super) fn wrote(&self) {
        self.written.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::backend::kubernetes) fn read(&self) -> SlicesReport {
        let (reads, against) = *self.chosen.lock();
        SlicesReport {
            reads,
            against: against.map(|reason| reason.to_string()),
            writes: self.writes.load(Ordering::Relaxed),
            written: self.written.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            bad: self.bad.load(Ordering::Relaxed),
            twice: self.twice.load(Ordering::Relaxed),
        }
    }
}
