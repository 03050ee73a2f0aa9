//! Rules of `--iptables-forward-rules`: traffic of this node's pods is accepted
//! in the FORWARD chain, whatever its policy.
//!
//! An accept in a table of our own would not do: a packet must be accepted by every base chain of the hook.
//! The rules therefore go into the chain itself, by the programs that own it: `iptables-nft`, and
//! `iptables-legacy` where this network namespace has such a table, because packets then pass both.

use std::{
    collections::BTreeSet,
    fs, io,
    time::{Duration, Instant},
};

use ipnet::IpNet;

use super::program::{self, ProgramError};

/// Our chain in the filter table.
pub const CHAIN: &str = "KILO-FORWARD";
/// Interval between checks whether others have flushed the rules.
const CHECK: Duration = Duration::from_secs(10);
/// Options that wait up to 5 s for the lock of the tables, which another program may hold.
const WAIT: [&str; 2] = ["-w", "5"];

/// Why the rules are not as they should be.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The program is missing or cannot be run.
    #[error("{program} cannot be run ({source}); install the package iptables or drop the flag")]
    Program {
        /// Its name.
        program: String,
        /// The error underneath.
        source: io::Error,
    },
    /// The program failed.
    #[error("{program}: {said}")]
    Refused {
        /// Its name.
        program: String,
        /// Its standard error.
        said: String,
    },
    /// The program did not end.
    #[error(
        "{program} was killed because it had not ended within {} s; kg tries again at the next reconcile. If this repeats, \
         find out why `{program} --list` takes so long on the host: very many rules, or processors that are busy",
        program::LIMIT.as_secs()
    )]
    Late {
        /// Its name.
        program: String,
    },
}

impl ForwardError {
    /// Label `event` of `kilo_errors_total`.
    pub const fn label(&self) -> &'static str {
        "iptables"
    }
}

/// One filter table: a flavour and a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Table {
    /// `iptables` or `ip6tables`.
    family: &'static str,
    /// Empty, `-nft` or `-legacy`.
    flavour: &'static str,
}

/// Keeps the rules that accept pods' traffic in place. It knows the pod CIDRs (truncated) of the last attempt,
/// and when the tables were last read; `None` before the first attempt and after a removal that failed.
#[derive(Debug, Default)]
pub struct Forward {
    wanted: Option<BTreeSet<IpNet>>,
    checked: Option<Instant>,
}

impl Forward {
    /// Accepts traffic from and to these pod CIDRs; without any, removes our rules. Reads the tables only
    /// when the CIDRs have changed or the last check was a while ago. Returns how many tables were written.
    ///
    /// # Errors
    /// The first failure; the other tables are written anyway.
    pub async fn apply(&mut self, pod_cidrs: &[IpNet], now: Instant) -> Result<u64, ForwardError> {
        let wanted: BTreeSet<IpNet> = pod_cidrs.iter().map(IpNet::trunc).collect();
        let same = self.wanted.as_ref() == Some(&wanted);
        let recent = self.checked.is_some_and(|checked| now.saturating_duration_since(checked) < CHECK);
        // Rules that are no longer wanted are removed once, and not checked for again.
        if same && (recent || wanted.is_empty()) {
            return Ok(0);
        }
        self.wanted = Some(wanted.clone());
        self.checked = Some(now);
        if !wanted.is_empty() {
            return apply_rules(&wanted).await;
        }
        let removed = remove().await;
        if removed.is_err() {
            // Tried again: nothing checks later for rules that are not wanted.
            self.wanted = None;
        }
        removed
    }
}

/// Removes our rules from every table; returns how many were written.
///
/// # Errors
/// The first failure. A missing program is not one: it has written nothing.
pub async fn remove() -> Result<u64, ForwardError> {
    match apply_rules(&BTreeSet::new()).await {
        Err(ForwardError::Program { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(0),
        other => other,
    }
}

async fn apply_rules(wanted: &BTreeSet<IpNet>) -> Result<u64, ForwardError> {
    let mut writes = 0;
    let mut first = None;
    for (family, v6) in [("iptables", false), ("ip6tables", true)] {
        let of_family: BTreeSet<IpNet> =
            wanted.iter().filter(|prefix| prefix.addr().is_ipv6() == v6).copied().collect();
        // Without pods of a family, a host without tables of that family is not an error.
        let needed = !of_family.is_empty();
        for table in tables(family, v6).await {
            match table.apply(&of_family).await {
                Ok(written) => writes += u64::from(written),
                Err(error) if needed || wanted.is_empty() => first = first.or(Some(error)),
                Err(error) => {
                    tracing::debug!(%error, "this iptables flavour is neither available nor needed");
                }
            }
        }
    }
    first.map_or(Ok(writes), Err)
}

/// The tables a packet of this family passes in this network namespace.
async fn tables(family: &'static str, v6: bool) -> Vec<Table> {
    let names =
        if v6 { "/proc/thread-self/net/ip6_tables_names" } else { "/proc/thread-self/net/ip_tables_names" };
    let legacy = fs::read_to_string(names).is_ok_and(|names| names.lines().any(|name| name == "filter"));
    let there = async |flavour| Table { family, flavour }.run("", &["--version"], None).await.is_ok();
    let mut tables = Vec::new();
    if there("-nft").await {
        tables.push(Table { family, flavour: "-nft" });
    }
    if legacy && there("-legacy").await {
        tables.push(Table { family, flavour: "-legacy" });
    }
    if tables.is_empty() {
        tables.push(Table { family, flavour: "" });
    }
    tables
}

impl Table {
    /// Runs one of its programs; returns its standard output.
    async fn run(
        self,
        suffix: &str,
        arguments: &[&str],
        input: Option<&str>,
    ) -> Result<String, ForwardError> {
        let program = format!("{}{}{suffix}", self.family, self.flavour);
        program::run(&program, arguments, input).await.map_err(|error| match error {
            ProgramError::Run(source) => ForwardError::Program { program, source },
            ProgramError::Refused(said) => ForwardError::Refused { program, said },
            ProgramError::Late => ForwardError::Late { program },
        })
    }

    /// Reads the table and writes the difference in one transaction; returns whether it wrote.
    async fn apply(self, wanted: &BTreeSet<IpNet>) -> Result<bool, ForwardError> {
        let there = self.run("", &[WAIT[0], WAIT[1], "-S"], None).await?;
        let Some(input) = changes(&there, wanted) else { return Ok(false) };
        self.run("-restore", &["--noflush", WAIT[0], WAIT[1]], Some(&input)).await?;
        tracing::info!(program = %format!("{}{}", self.family, self.flavour), "FORWARD rules written");
        Ok(true)
    }
}

fn jump() -> String {
    format!("-A FORWARD -j {CHAIN}")
}

/// Pure: the input of `iptables-restore --noflush` that turns a filter table (`iptables -S`) into the wanted
/// one; `None` when nothing differs.
fn changes(there: &str, wanted: &BTreeSet<IpNet>) -> Option<String> {
    let rules: Vec<String> = wanted
        .iter()
        .flat_map(|prefix| ["-s", "-d"].map(|side| format!("-A {CHAIN} {side} {prefix} -j ACCEPT")))
        .collect();
    let wanted_jumps = usize::from(!wanted.is_empty());
    let jumps = there.lines().filter(|line| *line == jump()).count();
    let chain = there.lines().any(|line| line == format!("-N {CHAIN}"));
    let ours = there.lines().filter(|line| line.starts_with(&format!("-A {CHAIN} ")));
    if ours.eq(&rules) && jumps == wanted_jumps && chain != wanted.is_empty() {
        return None;
    }
    // Declaring the chain creates or flushes it.
    let mut lines = vec!["*filter".to_owned(), format!(":{CHAIN} - [0:0]")];
    lines.extend(rules);
    if jumps < wanted_jumps {
        lines.push(jump());
    }
    lines.extend((wanted_jumps..jumps).map(|_| format!("-D FORWARD -j {CHAIN}")));
    if wanted.is_empty() {
        lines.push(format!("-X {CHAIN}"));
    }
    lines.push("COMMIT\n".to_owned());
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes(list: &[&str]) -> BTreeSet<IpNet> {
        list.iter().map(|prefix| prefix.parse().unwrap()).collect()
    }

    const CHAIN_ONLY: &str = "-P FORWARD DROP\n-N KILO-FORWARD";
    const RULES: &str =
        "-A KILO-FORWARD -s 10.42.1.0/24 -j ACCEPT\n-A KILO-FORWARD -d 10.42.1.0/24 -j ACCEPT";
    const JUMP: &str = "-A FORWARD -j KILO-FORWARD";

    #[test]
    fn rules_that_are_right_are_left_alone() {
        let wanted = prefixes(&["10.42.1.0/24"]);
        assert_eq!(changes(&format!("{CHAIN_ONLY}\n{JUMP}\n{RULES}"), &wanted), None);
        assert_eq!(changes("-P FORWARD DROP\n-A FORWARD -j OTHER", &BTreeSet::new()), None);
        for (there, jumps) in [
            (String::new(), 1),
            (CHAIN_ONLY.to_owned(), 1),
            (format!("{CHAIN_ONLY}\n{RULES}"), 1),
            (format!("{CHAIN_ONLY}\n{JUMP}"), 0),
            (format!("{CHAIN_ONLY}\n{JUMP}\n{RULES}\n-A KILO-FORWARD -j DROP"), 0),
        ] {
            let input = changes(&there, &wanted).unwrap();
            assert!(input.contains(RULES), "{input}");
            assert_eq!(input.matches("-A FORWARD").count(), jumps, "{input}");
        }
    }

    #[test]
    fn a_jump_too_many_goes_and_in_the_end_all_do() {
        let wanted = prefixes(&["10.42.1.0/24"]);
        let thrice = format!("{CHAIN_ONLY}\n{JUMP}\n{JUMP}\n{JUMP}\n{RULES}");
        assert_eq!(changes(&thrice, &wanted).unwrap().matches("-D FORWARD").count(), 2);
        let input = changes(&format!("{CHAIN_ONLY}\n{JUMP}"), &BTreeSet::new()).unwrap();
        assert!(input.contains("-D FORWARD -j KILO-FORWARD\n-X KILO-FORWARD\nCOMMIT"), "{input}");
        assert!(changes(CHAIN_ONLY, &BTreeSet::new()).is_some());
    }
}
