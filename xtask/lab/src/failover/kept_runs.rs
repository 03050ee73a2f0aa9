//! The kept runs, docs/failover.json, from which the pages' tables are made.

use std::{fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context as _, Result};

use super::{Run, cases::CASES};

fn path() -> PathBuf {
    crate::workspace_root().join("docs/failover.json")
}

/// Reads all kept runs; none when there is no file.
pub fn read() -> Result<Vec<Run>> {
    let path = path();
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read(&path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

/// Pure: replaces all kept runs of the same cases and the same WireGuard by `new`, in the order of the cases;
/// runs of removed cases are dropped.
pub fn replace(kept: Vec<Run>, new: &[Run]) -> Vec<Run> {
    let is_same =
        |one: &Run, other: &Run| one.id == other.id && one.kernel.is_empty() == other.kernel.is_empty();
    let others = kept.into_iter().filter(|kept| !new.iter().any(|new| is_same(kept, new)));
    let mut all: Vec<_> = others.chain(new.iter().cloned()).collect();
    let place = |run: &Run| CASES.iter().position(|case| case.id == run.id);
    all.retain(|run| place(run).is_some());
    all.sort_by_key(|run| (place(run), !run.kernel.is_empty()));
    all
}

/// Writes one run per line, so that a diff shows which ones changed.
pub fn write(runs: &[Run]) -> Result<()> {
    let mut text = String::new();
    for (number, run) in runs.iter().enumerate() {
        let before = if number == 0 { "[\n" } else { ",\n" };
        let _ = write!(text, "{before}{}", serde_json::to_string(run)?);
    }
    let path = path();
    fs::write(&path, text + "\n]\n").with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_faults_is_made_of_its_own_rows_and_the_runs_that_are_kept() {
        let there = fs::read_to_string(crate::workspace_root().join("docs/reliability.md")).unwrap();
        let again = crate::faults::renewed_page(crate::failover::kept_lines().unwrap()).unwrap();
        let differs = again.lines().zip(there.lines()).find(|(new, old)| new != old);
        assert_eq!(differs, None, "run `cargo xtask lab failover --from FILE --docs`");
        assert_eq!(again.len(), there.len());
        assert!(again.contains("| 25 | kilo0 deleted, renamed, renumbered | traffic<br>net::"), "{again}");
    }

    fn run(id: &str, gap_ms: u64) -> Run {
        Run { id: id.to_owned(), gap_ms, ..Run::default() }
    }

    #[test]
    fn new_runs_replace_all_of_their_case_and_no_other() {
        let kept = vec![run("power-off", 1), run("gone", 2), run("power-off", 3), run("halves", 4)];
        let all = replace(kept, &[run("two-lose-power", 5), run("power-off", 6)]);
        let all: Vec<_> = all.iter().map(|run| (run.id.as_str(), run.gap_ms)).collect();
        assert_eq!(all, [("power-off", 6), ("halves", 4), ("two-lose-power", 5)]);
    }

    #[test]
    fn runs_with_wireguard_in_the_kernel_are_kept_beside_the_others() {
        let in_kernel = |gap_ms| Run { kernel: "6.12".to_owned(), ..run("power-off", gap_ms) };
        let kept = vec![run("halves", 1), in_kernel(2), run("power-off", 3)];
        let all = replace(kept, &[in_kernel(4)]);
        assert_eq!(all.iter().map(|run| run.gap_ms).collect::<Vec<_>>(), [3, 4, 1]);
    }
}
