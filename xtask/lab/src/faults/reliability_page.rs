//! Writes docs/reliability.md from the requirements and the rows of a run.

use std::{fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context as _, Result};

use super::{Row, requirements::REQUIREMENTS};

const HEAD: &str = "# Reliability

For people who decide whether to rely on Kilo on eBPF: what the mesh survives, and what that costs. `cargo xtask lab faults --docs` writes this page: it
makes each fault in a lab of five nodes while 1,000 datagrams a second and one TCP connection flow
between pods of two locations, and counts what got no answer. `cargo xtask lab faults --fault kilo0,uplink-down`
runs some of them, `--json FILE` keeps the rows. A row fails when more is lost than its goal allows,
when the TCP connection ends or carries other bytes, or when a router sees a pod's address in cleartext.

\"Lost\" is datagrams without an answer, \"gap\" the longest time without one, \"TCP\" the longest time
the connection stood still, which after a loss includes TCP's own wait. Agents run with
`--resync-period 5s` and WireGuard in user space; the figures are of one run on two cores.

## What is promised

- **Static stability.** Agents dead, the cluster's objects out of reach and a node that does not lead
  rebooting at the same time: established and new flows of all other nodes go on (`static-stability`). The data
  path needs an agent only for changes. A node that boots has none of it before its agent runs: where our manifests
  make Kilo the pods' network, no pod starts before that; beside another CNI, what pods send until then leaves by the
  default route, in cleartext ([limits](data-path.md#known-limits)).
- **Whatever happens, the mesh heals by itself.** `cargo xtask lab soak` makes one or two random faults at a
  time (agents killed, stopped or restarted, kilo0 deleted or flushed, WireGuard's process
  killed, programs detached, links down, addresses and keys changed, leaders moved, nodes and peers
  that come and go, rubbish, lost packets, sysctls) while every pod, node, VPN peer and the outside
  probes every other once per second. After each fault, full reachability must return within 60 s; in the end
  links, addresses, routes, rules, filters, pins, processes, open files, threads and memory must be
  what they were. It takes turns with the other long parts of `cargo xtask test --rotate` and then runs for ten minutes; its seed is printed;
  `--seed N` has the same faults again, `--time 2h` more of them, `--only key,kilo0` some of them, by their ids or first words of these.
- **A panic ends the agent.** A missing task would go unnoticed, so `/health` says why for 2 s,
  the process ends, the next one goes on, and packets notice nothing (`task-panics`).
";

/// Heading above the rows of a run.
const UNDER_TRAFFIC: &str = "\n## Faults under traffic\n\n";
/// Heading above the requirements.
const EVERY_LINE: &str = "\n## Every line\n\n";

fn path() -> PathBuf {
    crate::workspace_root().join("docs/reliability.md")
}

/// Writes the page. `failover`: what failover's runs have shown, by requirement.
pub fn write(rows: &[Row], failover: impl Fn(u8) -> Vec<String>) -> Result<()> {
    write_text(&page(&under_traffic(rows), failover))
}

/// Writes the page with its present faults under traffic, because failover's results have changed.
pub fn write_requirements(failover: impl Fn(u8) -> Vec<String>) -> Result<()> {
    write_text(&renewed(failover)?)
}

/// The page with its present faults under traffic and `failover`'s results.
pub fn renewed(failover: impl Fn(u8) -> Vec<String>) -> Result<String> {
    let there = fs::read_to_string(path()).with_context(|| path().display().to_string())?;
    Ok(page(rows_of(&there).context("the page has no faults under traffic")?, failover))
}

fn write_text(page: &str) -> Result<()> {
    fs::write(path(), page).with_context(|| path().display().to_string())
}

/// Pure: rows of a page as [`under_traffic`] has written them.
fn rows_of(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once(UNDER_TRAFFIC)?;
    let (table, _) = rest.split_once(EVERY_LINE)?;
    Some(&table[table.find("\n| `")? + 1..])
}

/// Pure: the rows of a run.
fn under_traffic(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let Row { id, requirement, fault, injected, sent, lost, gap_ms, stall_ms, goal, problem, .. } = row;
        let state =
            problem.as_ref().map_or("ok".to_owned(), |problem| format!("**falls short**: {}", cell(problem)));
        let injected = cell(injected);
        let _ = writeln!(
            text,
            "| `{id}` | {requirement} | {fault} | {injected} | {sent} | {lost} | {gap_ms} | {stall_ms} | {goal} | {state} |"
        );
    }
    text
}

/// Pure: the page.
fn page(rows: &str, failover: impl Fn(u8) -> Vec<String>) -> String {
    let mut text = format!(
        "{HEAD}{UNDER_TRAFFIC}| id | line | fault | that it happened | sent | lost | gap ms | TCP ms | goal | |\n\
         |---|---|---|---|---|---|---|---|---|---|\n{rows}{EVERY_LINE}\
         \"traffic\" is the table above, \"failover\" what `cargo xtask lab failover` has seen; other names are \
         tests of `cargo xtask test`.\n\n\
         | line | fault | shown by | not shown |\n|---|---|---|---|\n"
    );
    for requirement in REQUIREMENTS {
        let number = format!(" {} ", requirement.number);
        let watched =
            rows.lines().any(|row| row.split('|').nth(2) == Some(&number)).then(|| "traffic".to_owned());
        let tests = requirement.tests.iter().map(|test| cell(test));
        let seen = Some(requirement.seen.to_owned()).filter(|seen| !seen.is_empty());
        let shown: Vec<_> =
            watched.into_iter().chain(failover(requirement.number)).chain(seen).chain(tests).collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            requirement.number,
            requirement.fault,
            shown.join("<br>"),
            requirement.missing
        );
    }
    text
}

/// Text that fits into a cell of a table.
fn cell(text: &str) -> String {
    let whole = text.strip_prefix('(').and_then(|text| text.strip_suffix(')')).unwrap_or(text);
    whole.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_list_of_tests_is_the_one_in_the_code() {
        let page = fs::read_to_string(crate::workspace_root().join("docs/reliability.md")).unwrap();
        let (_, page) = page.split_once("## Every line").unwrap();
        for requirement in REQUIREMENTS {
            let start = format!("| {} | {} |", requirement.number, requirement.fault);
            let row = page.lines().find(|row| row.starts_with(&start));
            let row = row.unwrap_or_else(|| {
                panic!("line {}: run `cargo xtask lab faults --docs`", requirement.number)
            });
            let is_listed = requirement.tests.iter().all(|test| row.contains(&cell(test)))
                && row.contains(requirement.missing);
            assert!(is_listed, "line {}: run `cargo xtask lab faults --docs`", requirement.number);
        }
    }
}
