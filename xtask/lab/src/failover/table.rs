//! The tables of docs/failover.md and docs/reliability.md, from the runs.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::{Context as _, Result};

use super::{
    Run,
    cases::{CASES, Case, UNLISTED},
};

/// The table stands between these lines.
const MARKS: [&str; 2] = ["<!-- figures -->", "<!-- end of figures -->"];

/// So few runs have no 95th percentile of their own: their majority decides.
pub const FEW: usize = 3;

/// All runs of a case with the same WireGuard.
pub struct Sum<'a> {
    pub case: &'a Case,
    /// Release of the kernel whose WireGuard carried the packets; empty for userspace WireGuard.
    kernel: &'a str,
    pub runs: usize,
    /// Runs with a longer time without an answer than 95 of 100 may have.
    late: usize,
    /// Longest times without an answer, ms.
    pub median: u64,
    pub p95: u64,
    pub longest: u64,
    lost: u64,
    switches: u64,
    /// Wall time of the longest run, s.
    seconds: u64,
    failed: Vec<&'a str>,
}

/// Pure: sums up each case that was run, in the order of the cases; separately for WireGuard in the kernel.
pub fn sums(runs: &[Run]) -> impl Iterator<Item = Sum<'_>> {
    let both = |case| [false, true].map(|in_kernel| (case, in_kernel));
    CASES.iter().flat_map(both).filter_map(|(case, in_kernel)| sum(case, in_kernel, runs))
}

fn sum<'a>(case: &'a Case, in_kernel: bool, runs: &'a [Run]) -> Option<Sum<'a>> {
    let is_wanted = |run: &&Run| run.id == case.id && run.kernel.is_empty() != in_kernel;
    let of_case: Vec<_> = runs.iter().filter(is_wanted).collect();
    let mut gaps: Vec<_> = of_case.iter().filter(|run| run.sent > 0).map(|run| run.gap_ms).collect();
    gaps.sort_unstable();
    let most = |value: fn(&Run) -> u64| of_case.iter().map(|run| value(run)).max().unwrap_or(0);
    Some(Sum {
        case,
        kernel: &of_case.last()?.kernel,
        runs: of_case.len(),
        late: gaps.iter().filter(|gap| case.p95.is_some_and(|most| **gap > most)).count(),
        median: part(&gaps, 50),
        p95: part(&gaps, 95),
        longest: part(&gaps, 100),
        lost: most(|run| run.lost),
        switches: most(|run| run.switches),
        seconds: most(|run| run.seconds as u64),
        failed: of_case.iter().filter_map(|run| run.problem.as_deref()).collect(),
    })
}

impl Sum<'_> {
    /// Whether a single run took longer than 95 of 100 may: one of 20 does so by chance, so others decide.
    pub fn is_doubtful(&self) -> bool {
        self.runs == 1 && self.late == 1 && self.failed.is_empty()
    }

    /// Whether the 95th percentile exceeds the case's limit. A single run says nothing about that, and of a few
    /// most have to: two of three do so by chance in 0.7 % of cases.
    fn is_late(&self) -> bool {
        match self.runs {
            0 | 1 => false,
            runs if runs <= FEW => 2 * self.late > runs,
            _ => self.case.p95.is_some_and(|most| self.p95 > most),
        }
    }

    /// Number of runs; for a single long run also its length, which `--for` may have set.
    fn said_of_runs(&self) -> String {
        match self.runs {
            1 if self.seconds >= 300 => format!("1, of {} min", self.seconds / 60),
            runs => runs.to_string(),
        }
    }

    /// The 95th percentile in ms; a dash for a single run.
    fn said_of_p95(&self) -> String {
        if self.runs > 1 { self.p95.to_string() } else { "–".to_owned() }
    }

    /// Why the runs miss what their case accepts.
    pub fn problem(&self) -> Option<String> {
        let failed =
            (!self.failed.is_empty()).then(|| format!("{} of {} fall short", self.failed.len(), self.runs));
        let late = self.is_late().then(|| match self.runs {
            runs if runs <= FEW => format!("{} of {runs} took longer than 95 of 100 may", self.late),
            _ => format!("p95 is {} ms", self.p95),
        });
        let all: Vec<_> = failed.into_iter().chain(late).collect();
        (!all.is_empty()).then(|| format!("{}: {}", self.case.id, all.join(", ")))
    }

    /// Suffix of the case's name: the kernel, or nothing for userspace WireGuard.
    fn wireguard(&self) -> String {
        if self.kernel.is_empty() { String::new() } else { format!(", WireGuard of Linux {}", self.kernel) }
    }

    fn state(&self) -> String {
        let Some(problem) = self.problem() else { return "ok".to_owned() };
        format!("**{}**", problem.trim_start_matches(self.case.id).trim_start_matches(": "))
    }

    /// A line of figures, printed at the end of a case.
    pub fn line(&self) -> String {
        format!(
            "{}{}: {} runs; without answer {} ms in the median, p95 {}, longest {}; accepted: {}; {}",
            self.case.name,
            self.wireguard(),
            self.runs,
            self.median,
            self.p95,
            self.longest,
            self.case.accepted(),
            self.state()
        )
    }
}

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

/// Pure: a row for each case, and below it why runs fell short.
fn table(runs: &[Run]) -> String {
    let mut text =
        "| line | fault (`--case`) | runs | without answer, ms: median | p95 | longest | lost, most | \
                    changes of leader, most | accepted | |\n|---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    let mut short = String::new();
    for sum in sums(runs) {
        let Sum { case, median, longest, lost, switches, .. } = &sum;
        let (runs, p95) = (sum.said_of_runs(), sum.said_of_p95());
        let line = if case.line == UNLISTED { "–".to_owned() } else { case.line.to_string() };
        let (accepted, state) = (case.accepted(), sum.state());
        let _ = writeln!(
            text,
            "| {line} | {} (`{}`){} | {runs} | {median} | {p95} | {longest} | {lost} | {switches} | {accepted} | {state} |",
            case.name,
            case.id,
            sum.wireguard(),
        );
        if !sum.failed.is_empty() {
            let mut why = BTreeMap::<_, usize>::new();
            for problem in &sum.failed {
                *why.entry(brief(problem)).or_default() += 1;
            }
            let why: Vec<_> = why.iter().map(|(why, times)| format!("{times} × {why}")).collect();
            let _ = writeln!(short, "- `{}`: {}", case.id, why.join("; "));
        }
    }
    if !short.is_empty() {
        let _ = write!(text, "\nWhat fell short:\n\n{short}");
    }
    text
}

/// The first line of a problem, cut after 120 characters.
fn brief(problem: &str) -> String {
    let line = problem.lines().next().unwrap_or_default().trim_end_matches(':');
    let end = line.char_indices().nth(120).map_or(line.len(), |(at, _)| at);
    line[..end].replace('|', "\\|")
}

/// Pure: what the cases of a line of docs/reliability.md showed.
pub fn of_line(runs: &[Run], line: u8) -> Vec<String> {
    let cases = CASES.iter().filter(|case| case.line == line);
    let said = cases.flat_map(|case| {
        let of_case: Vec<_> =
            [false, true].into_iter().filter_map(|in_kernel| sum(case, in_kernel, runs)).collect();
        let figures = of_case.iter().map(|sum| {
            let Sum { runs, p95, longest, .. } = sum;
            let said = if *runs > 1 {
                format!("{runs} runs, p95 {p95} ms")
            } else {
                format!("one run, {longest} ms at most")
            };
            format!("`{}`{}: {said}, {}", case.id, sum.wireguard(), sum.state())
        });
        let none = of_case.is_empty().then(|| format!("`{}`: not run", case.id));
        let all: Vec<_> = none.into_iter().chain(figures).collect();
        all.into_iter().map(|text| format!("[failover](failover.md#what-was-seen) {text}"))
    });
    said.collect()
}

/// A percentile of sorted values; 0 when there are none.
pub fn part(sorted: &[u64], percent: usize) -> u64 {
    let place = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power_off(gaps: &[u64]) -> Vec<Run> {
        let run = |&gap_ms: &u64| Run { id: "power-off".to_owned(), sent: 1, gap_ms, ..Run::default() };
        gaps.iter().map(run).collect()
    }

    fn problem(gaps: &[u64]) -> Option<String> {
        sums(&power_off(gaps)).next().and_then(|sum| sum.problem())
    }

    #[test]
    fn a_part_is_the_smallest_value_that_so_many_do_not_exceed() {
        let values: Vec<u64> = (1..=20).collect();
        assert_eq!([50, 95, 100].map(|percent| part(&values, percent)), [10, 19, 20]);
        assert_eq!((part(&[7], 50), part(&[], 95)), (7, 0));
    }

    #[test]
    fn one_run_of_twenty_may_exceed_what_95_of_100_may_not() {
        let mut gaps = [200; 20];
        gaps[7] = 900;
        assert_eq!(problem(&gaps), None);
        gaps[3] = 501;
        assert_eq!(problem(&gaps).as_deref(), Some("power-off: p95 is 501 ms"));
        assert_eq!(problem(&[501]), None, "one run alone has no p95");
    }

    #[test]
    fn a_single_late_run_is_doubtful_and_the_majority_of_three_decides() {
        let is_doubtful = |gaps: &[u64]| sums(&power_off(gaps)).all(|sum| sum.is_doubtful());
        assert!(is_doubtful(&[501]) && !is_doubtful(&[500]) && !is_doubtful(&[501, 200, 200]));
        assert_eq!(problem(&[501, 200, 500]), None);
        let late = problem(&[501, 200, 700]);
        assert_eq!(late.as_deref(), Some("power-off: 2 of 3 took longer than 95 of 100 may"));
        let mut failed = power_off(&[1200]);
        failed[0].problem = Some("1200 ms without an answer instead of 1000".to_owned());
        assert!(sums(&failed).all(|sum| !sum.is_doubtful()), "it is decided");
    }

    #[test]
    fn one_run_has_no_p95_and_says_how_long_it_was() {
        let mut runs = power_off(&[150]);
        assert!(table(&runs).contains("(`power-off`) | 1 | 150 | – | 150 |"));
        runs[0].seconds = 3_630.0;
        assert!(table(&runs).contains("(`power-off`) | 1, of 60 min | 150 | – | 150 |"));
    }

    #[test]
    fn wireguard_of_a_kernel_has_a_row_of_its_own() {
        let mut runs = power_off(&[150, 170]);
        runs[1].kernel = "6.12.95".to_owned();
        let text = table(&runs);
        assert!(text.contains("(`power-off`) | 1 | 150 |"), "{text}");
        assert!(text.contains("(`power-off`), WireGuard of Linux 6.12.95 | 1 | 170 |"), "{text}");
        let shown = of_line(&runs, 17);
        assert!(
            shown[1].ends_with("`power-off`, WireGuard of Linux 6.12.95: one run, 170 ms at most, ok"),
            "{shown:?}"
        );
    }

    #[test]
    fn what_fell_short_is_named_with_its_reasons() {
        let mut runs = power_off(&[900, 1200]);
        runs[1].problem = Some("1200 ms without an answer instead of 1000\nand more".to_owned());
        let text = table(&runs);
        assert!(
            text.contains("| 17 | the leader loses power (`power-off`) | 2 | 900 | 1200 | 1200 | 0 | 0 |"),
            "{text}"
        );
        assert!(text.contains("**1 of 2 fall short, 2 of 2 took longer than 95 of 100 may** |"), "{text}");
        assert!(text.ends_with("- `power-off`: 1 × 1200 ms without an answer instead of 1000\n"), "{text}");
        let shown = of_line(&runs, 17);
        assert_eq!(shown.len(), 1);
        assert!(shown[0].contains("2 runs, p95 1200 ms, **1 of 2"), "{shown:?}");
    }
}
