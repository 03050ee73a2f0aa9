//! What is shown of slices: metrics and status.

use std::{
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use kilo_core::objects::slices::Reason;

/// Where an agent reads nodes, and what it writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicesReport {
    /// It reads slices.
    pub reads: bool,
    /// Why it does not, or will not soon.
    pub against: Option<String>,
    /// It writes them for all.
    pub writes: bool,
    /// Writes of slices so far.
    pub written: u64,
    /// Writes of slices that failed so far.
    pub failed: u64,
    /// Slices that are missing, or cannot be read.
    pub bad: usize,
    /// Places that say something of a node that another says something of, too.
    pub twice: usize,
}

impl fmt::Display for SlicesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.reads { "slices" } else { "Nodes" })?;
        if let Some(against) = &self.against {
            write!(f, " ({against})")?;
        }
        f.write_str(if self.writes { "; this agent writes slices" } else { "" })
    }
}

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
        let mut known = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
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
        let (reads, against) = *self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
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
