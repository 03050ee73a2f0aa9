//! The probes and their results, as a table, and a remedy for each failed cell: plain values.

use std::fmt::Write as _;

use kilo_agent::status;
use serde::Serialize;

use super::probe::Kind;

/// The kind of a probe's destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// A pod of another node, or of its own.
    Pod,
    /// The pods' Service.
    Service,
    /// A node's own address.
    Node,
    /// An address given by `--outside`.
    Outside,
    /// A VPN peer.
    Peer,
}

/// One probe and its result.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The node whose pod probed.
    pub from: String,
    /// The location of that node.
    #[serde(skip)]
    pub from_location: String,
    /// What kind of destination was probed.
    pub target: Target,
    /// Name of the destination.
    pub to: String,
    /// The location of the destination's node; empty for other targets.
    #[serde(skip)]
    pub to_location: String,
    /// Protocol of the probe.
    pub kind: Kind,
    /// The address, with its port.
    pub address: std::net::SocketAddr,
    /// Why the probe failed; `None` on success.
    pub error: Option<String>,
}

impl Cell {
    /// Whether the packets pass through WireGuard.
    pub fn crosses(&self) -> bool {
        !self.to_location.is_empty() && self.from_location != self.to_location
    }

    fn column(&self) -> String {
        match self.target {
            Target::Pod => format!("pod@{}", self.to),
            Target::Node => format!("node/{}", self.to),
            Target::Service => "service".to_owned(),
            Target::Outside => "outside".to_owned(),
            Target::Peer => format!("peer/{}", self.to),
        }
    }

    /// What an operator can do about the failure.
    fn remedy(&self) -> String {
        let family = if self.address.is_ipv4() { "IPv4" } else { "IPv6" };
        match (self.target, self.kind) {
            (Target::Pod, Kind::Bulk | Kind::Full) => format!(
                "small packets may pass and large ones not: compare the MTU of the network with `kgctl trace {} \
                 --src=POD --dst={}`, and look for `too_big` in `kgctl monitor {}`",
                self.from,
                self.address.ip(),
                self.from
            ),
            (Target::Pod, _) if self.crosses() => format!(
                "between locations: `kgctl status {}` and `kgctl status {}` show their tunnels; UDP 51820 of both \
                 leaders must be open",
                self.from, self.to
            ),
            (Target::Pod | Target::Node, _) => format!(
                "`kgctl trace {} --src=POD --dst={}` shows where the packet goes, and `kgctl monitor {}` what the other \
                 side drops",
                self.from,
                self.address.ip(),
                if self.to.is_empty() { &self.from } else { &self.to }
            ),
            (Target::Service, _) => format!(
                "if the pods themselves are reached over {family}, kube-proxy on {} does not translate the Service's address: \
                 see its log, and `kubectl get endpointslices`",
                self.from
            ),
            (Target::Outside, _) => format!(
                "packets of pods leave {} masqueraded: see `kgctl trace {} --src=POD --dst={}`, and check that the target \
                 is up and its firewall lets the node in",
                self.from,
                self.from,
                self.address.ip()
            ),
            (Target::Peer, _) => format!(
                "compare the peer's configuration with `kgctl showconf peer {}`: {}'s allowed IPs may be missing, or the \
                 peer's firewall may drop the packets",
                self.to, self.from
            ),
        }
    }
}

/// An observation about the whole mesh rather than a single path.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What was checked.
    pub what: String,
    /// Whether the check passed; `None` = it could not be made.
    pub good: Option<bool>,
    /// The observation, and a remedy when the check failed.
    pub text: String,
}

/// Everything that was tested.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// All probes with their results.
    pub probes: Vec<Cell>,
    /// Checks of the whole mesh.
    pub findings: Vec<Finding>,
}

impl Report {
    /// True when nothing failed.
    pub fn is_good(&self) -> bool {
        self.probes.iter().all(|cell| cell.error.is_none())
            && self.findings.iter().all(|finding| finding.good != Some(false))
    }

    /// A table of sources (rows) and targets (columns), followed by failures and remedies.
    pub fn table(&self) -> String {
        let unique = |name: &dyn Fn(&Cell) -> String| {
            let mut names: Vec<String> = Vec::new();
            for name in self.probes.iter().map(name) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            names
        };
        let rows = unique(&|cell| cell.from.clone());
        let columns = unique(&Cell::column);
        let head: Vec<_> = std::iter::once("FROM").chain(columns.iter().map(String::as_str)).collect();
        let line = |row: &String| {
            let shown = columns.iter().map(|column| {
                let cells = self.probes.iter().filter(|cell| cell.from == *row && cell.column() == *column);
                let (passed, all) = cells.fold((0, 0), |(passed, all), cell| {
                    (passed + usize::from(cell.error.is_none()), all + 1)
                });
                match all {
                    0 => "-".to_owned(),
                    all if passed == all => format!("ok {passed}/{all}"),
                    all => format!("FAIL {passed}/{all}"),
                }
            });
            std::iter::once(row.clone()).chain(shown).collect()
        };
        let mut text = status::columns(&head, rows.iter().map(line));
        text.push('\n');
        for finding in &self.findings {
            let word = match finding.good {
                Some(true) => "ok",
                Some(false) => "FAIL",
                None => "not seen",
            };
            let _ = writeln!(text, "{word:<8} {}: {}", finding.what, finding.text);
        }
        for cell in &self.probes {
            let Some(error) = &cell.error else { continue };
            let kind = format!("{:?}", cell.kind).to_lowercase();
            let _ = writeln!(
                text,
                "\nFAIL     {} -> {} at {}, {kind}: {error}",
                cell.from,
                cell.column(),
                cell.address
            );
            let _ = writeln!(text, "         {}", cell.remedy());
        }
        let failed = self.probes.iter().filter(|cell| cell.error.is_some()).count();
        let _ = match failed {
            0 => writeln!(text, "\nAll {} probes passed.", self.probes.len()),
            _ => writeln!(text, "\n{failed} of {} probes failed.", self.probes.len()),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(from: &str, to: &str, target: Target, kind: Kind, error: Option<&str>) -> Cell {
        let location = |node: &str| node.chars().take(1).collect();
        Cell {
            from: from.to_owned(),
            from_location: location(from),
            target,
            to: to.to_owned(),
            to_location: if matches!(target, Target::Pod | Target::Node) {
                location(to)
            } else {
                String::new()
            },
            kind,
            address: ([10, 42, 1, 2], 8080).into(),
            error: error.map(ToOwned::to_owned),
        }
    }

    #[test]
    fn red_cells_say_what_to_do_and_green_ones_do_not() {
        let mut report = Report {
            probes: vec![
                cell("a1", "b1", Target::Pod, Kind::Tcp, None),
                cell("a1", "b1", Target::Pod, Kind::Bulk, None),
                cell("a1", "", Target::Service, Kind::Tcp, None),
                cell("b1", "a1", Target::Pod, Kind::Tcp, None),
            ],
            findings: vec![Finding {
                what: "cleartext".to_owned(),
                good: Some(true),
                text: "none".to_owned(),
            }],
        };
        assert!(report.is_good());
        let text = report.table();
        assert!(text.contains("a1     ok 2/2   ok 1/1    -"), "{text}");
        assert!(
            text.contains("ok       cleartext: none\n") && text.ends_with("\nAll 4 probes passed.\n"),
            "{text}"
        );
        assert!(!text.contains("kgctl"), "{text}");
        let failures = [
            (cell("a1", "b1", Target::Pod, Kind::Tcp, Some("no answer")), "UDP 51820"),
            (cell("a1", "a2", Target::Pod, Kind::Udp, Some("no answer")), "kgctl monitor a2"),
            (cell("a1", "b1", Target::Pod, Kind::Bulk, Some("no answer")), "MTU"),
            (cell("a1", "b1", Target::Pod, Kind::Full, Some("no answer")), "MTU"),
            (cell("a1", "b1", Target::Node, Kind::Reach, Some("no answer")), "kgctl trace a1"),
            (cell("a1", "", Target::Service, Kind::Tcp, Some("no answer")), "kube-proxy on a1"),
            (cell("a1", "", Target::Outside, Kind::Reach, Some("no answer")), "masqueraded"),
            (
                cell("a1", "laptop", Target::Peer, Kind::Reach, Some("no answer")),
                "kgctl showconf peer laptop",
            ),
        ];
        for (failed, remedy) in failures {
            let text = Report { probes: vec![failed], findings: vec![] }.table();
            assert!(text.contains("FAIL 0/1") && text.contains(remedy), "{text}");
            assert!(text.ends_with("\n1 of 1 probes failed.\n"), "{text}");
        }
        report.findings[0].good = Some(false);
        assert!(!report.is_good() && report.table().contains("FAIL     cleartext"), "{}", report.table());
    }
}
