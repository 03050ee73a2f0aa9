//! Debian's Prometheus and promtool.

use std::path::PathBuf;

use anyhow::Result;

use crate::apt::{self, Suites};

/// Directory of both programs, unpacked once.
pub fn programs() -> Result<PathBuf> {
    let directory = apt::cache_directory()?.join("prometheus");
    if !directory.join("usr/bin/promtool").is_file() {
        Suites::open(&apt::cache_directory()?, &["bookworm"], false)?.unpack("prometheus", &directory)?;
    }
    Ok(directory.join("usr/bin"))
}

/// Path of promtool in the cache, or else on this machine. Without it the test counts as skipped.
#[cfg(test)]
pub fn promtool_or_skip() -> Option<PathBuf> {
    let cached = apt::cache_directory().ok().map(|directory| directory.join("prometheus/usr/bin/promtool"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let of_machine = std::env::split_paths(&path).map(|directory| directory.join("promtool"));
    let found = cached.into_iter().chain(of_machine).find(|program| program.is_file());
    if found.is_none() {
        println!("kilo-skip: promtool is missing; `cargo xtask kube-tools` gets it");
    }
    found
}
