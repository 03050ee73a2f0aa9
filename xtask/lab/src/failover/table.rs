//! The table of docs/failover.md, from the runs.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::{Run, cases::CASES};

/// The table stands between these lines.
const MARKS: [&str; 2] = ["<!-- figures -->", "<!-- end of figures -->"];

/// Writes the table into the page.
pub fn write(runs: &[Run]) -> Result<()> {
    let path = crate::workspace_root().join("docs/failover.md");
    let page = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let [begin, end] = MARKS;
    let (head, rest) = page.split_once(begin).with_context(|| format!("the page has no {begin}"))?;
    let (_, tail) = rest.split_once(end).with_context(|| format!("the page has no {end}"))?;
    std::fs::write(&path, format!("{head}{begin}\n{}{end}{tail}", table(runs)))?;
    Ok(())
}

/// Pure: a row for each case that was run, in the order of the cases.
fn table(runs: &[Run]) -> String {
    let mut text =
        "| line | fault (`--case`) | runs | without answer, ms: median | p95 | longest | lost, most | \
                    changes of leader, most | accepted | |\n|---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for case in CASES {
        let of_case: Vec<_> = runs.iter().filter(|run| run.id == case.id).collect();
        let mut gaps: Vec<_> = of_case.iter().filter(|run| run.sent > 0).map(|run| run.gap_ms).collect();
        gaps.sort_unstable();
        let most = |value: fn(&Run) -> u64| of_case.iter().map(|run| value(run)).max().unwrap_or(0);
        let failed = of_case.iter().filter(|run| run.problem.is_some()).count();
        let (Some(longest), false) = (gaps.last(), of_case.is_empty()) else { continue };
        let state = if failed == 0 { "ok".to_owned() } else { format!("**{failed} fall short**") };
        let _ = writeln!(
            text,
            "| {} | {} (`{}`) | {} | {} | {} | {longest} | {} | {} | {} | {state} |",
            case.line,
            case.name,
            case.id,
            of_case.len(),
            part(&gaps, 50),
            part(&gaps, 95),
            most(|run| run.lost),
            most(|run| run.switches),
            case.limit,
        );
    }
    text
}

/// The value that so many percent of the sorted values do not exceed; 0 of none.
pub fn part(sorted: &[u64], percent: usize) -> u64 {
    let place = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_smallest_value_that_so_many_do_not_exceed() {
        let values: Vec<u64> = (1..=20).collect();
        assert_eq!([50, 95, 100].map(|percent| part(&values, percent)), [10, 19, 20]);
        assert_eq!((part(&[7], 50), part(&[], 95)), (7, 0));
    }
}
