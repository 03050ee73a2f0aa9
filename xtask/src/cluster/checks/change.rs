//! What an operator sees of a leader change: metrics, `kgctl status`, a log line and an Event.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};

use super::{agents::metric, kgctl::kgctl};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    command::output,
};

/// Time limit for the new leader's agent to show the change.
const SHOWN: Duration = Duration::from_secs(20);
/// Time limit for the Event once the API server is back: agents retry every 30 s and wait 20 s for a
/// response.
const WRITTEN: Duration = Duration::from_secs(90);
/// Message that agents log.
const LINE: &str = "\"leadership changed\"";
/// Metric that counts the leader changes of this location.
const TERM: &str = "kilo_failover_term";

/// Why leadership changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The leader has lost power, and the API server may be away with it.
    Lost,
    /// Its Node is cordoned.
    Cordoned,
}

impl Why {
    /// Metrics of the new leader that count such a change.
    const fn counters(self) -> &'static [&'static str] {
        match self {
            Self::Lost => &[
                "kilo_failovers_total{cause=\"lost\"}",
                "kilo_suspicions_total{outcome=\"took_over\"}",
                "kilo_failover_seconds_count",
            ],
            Self::Cordoned => &["kilo_failovers_total{cause=\"planned\"}"],
        }
    }

    /// Text of log and `kgctl status` after the previous leader's name.
    const fn change(self) -> &'static str {
        match self {
            Self::Lost => " lost: no packet passed through it for ",
            Self::Cordoned => " handed leadership over (planned): its Node is cordoned",
        }
    }

    /// Text of the Event after that name.
    const fn reason(self) -> &'static str {
        match self {
            Self::Lost => " (lost: no packet passed through it for ",
            Self::Cordoned => " (planned: its Node is cordoned)",
        }
    }
}

/// An expected leader change, and the state before it: earlier changes have left the same traces.
pub struct Expected<'a> {
    cluster: &'a Cluster,
    from: &'a Node,
    to: &'a Node,
    why: Why,
    term: u64,
    counted: Vec<u64>,
    lines: usize,
    events: BTreeSet<String>,
}

impl<'a> Expected<'a> {
    /// Records the present state.
    pub fn new(cluster: &'a Cluster, from: &'a Node, to: &'a Node, why: Why) -> Result<Self> {
        let (term, counted) = (metric(to, TERM)?, counted(to, why)?);
        let (lines, events) = (0, BTreeSet::new());
        let expected = Self { cluster, from, to, why, term, counted, lines, events };
        let lines = expected.lines()?.len();
        let events = expected.events()?.into_iter().map(|(name, _)| name).collect();
        Ok(Self { lines, events, ..expected })
    }

    /// Waits for what appears at once, with or without the API server: the new leader's metrics, and
    /// `kgctl status`, which asks its agent. Returns it as text.
    pub fn await_shown(&self) -> Result<String> {
        let to = self.to.name();
        let term = until(&format!("{to} counts the change in its metrics"), SHOWN, || {
            let now = counted(self.to, self.why).ok()?;
            let have_grown = now.iter().zip(&self.counted).all(|(now, before)| now > before);
            metric(self.to, TERM).ok().filter(|term| have_grown && *term > self.term)
        })?;
        let mut last = String::new();
        let row = until(&format!("kgctl status says that {to} leads, and why"), SHOWN, || {
            last = self.status().unwrap_or_else(|error| format!("{error:#}"));
            failover_row(&last).filter(|row| self.is_right(row, term)).map(|row| row.join(" | "))
        });
        row.with_context(|| format!("kgctl status says:\n{last}"))
    }

    /// Waits for what an operator finds afterwards: the line in the new leader's log, and one Event about
    /// its Node. Returns it as text.
    pub fn await_reported(&self) -> Result<String> {
        let to = self.to.name();
        let line = until(&format!("{to} logs the change of leader"), SHOWN, || {
            let lines = self.lines().ok()?;
            (lines.len() > self.lines).then(|| lines.last().cloned()).flatten()
        })?;
        let mut last = Vec::new();
        let new = until(&format!("an Event LeadsLocation says that {to} leads, and why"), WRITTEN, || {
            last = self.events().ok()?;
            let new: Vec<_> = last.iter().filter(|(name, _)| !self.events.contains(name)).cloned().collect();
            (!new.is_empty()).then_some(new)
        });
        let new =
            new.with_context(|| format!("Events like it about {to}: {last:?}; its log says: {line}"))?;
        let [(_, text)] = new.as_slice() else { bail!("more than one Event says it: {new:?}") };
        let location = format!("leads location:{} after ", self.from.site.location());
        ensure!(text.starts_with(&location), "the Event names another location: {text}");
        Ok(format!("Event: {text}"))
    }

    /// Output of `kgctl status`; without an API server it asks the agent itself.
    fn status(&self) -> Result<String> {
        let to = self.to.name();
        if self.why == Why::Cordoned {
            return kgctl(self.cluster, &["status", to]);
        }
        let program = std::env::current_exe()?.with_file_name("kgctl");
        let agent = format!("--agent=http://{}:1107", self.to.site.address);
        output(self.to.netns().command(program).args(["status", to, &agent]))
    }

    /// Checks role, leader, term, since when, stand-bys and their fitness, and the last change with its
    /// cause.
    fn is_right(&self, row: &[String; 6], term: u64) -> bool {
        let [role, leader, shown, since, stand_bys, change] = row;
        let (from, to) = (self.from.name(), self.to.name());
        // Kilo's rule still selects the previous leader.
        let leads = *leader == format!("{to} (Kilo: {from})") && role == "leader";
        let mut others = stand_bys.split(", ").map(|stand_by| stand_by.split(' ').collect::<Vec<_>>());
        let before = others.find(|words| words[0] == from);
        let is_fit = before.as_ref().map(|words| words.get(1) == Some(&"fit"));
        leads
            && shown.parse::<u64>().is_ok_and(|shown| shown >= term)
            && since != "<unknown>"
            && is_fit == Some(self.why == Why::Cordoned)
            && change.starts_with(&format!("{from}{}", self.why.change()))
    }

    /// Lines about such a change in the new leader's log.
    fn lines(&self) -> Result<Vec<String>> {
        let pods = deploy::pods(self.cluster, "app.kubernetes.io/name=kilo")?;
        let pod = deploy::pod_on(&pods, self.to)?;
        let log = self.cluster.kubectl(&["-n", "kube-system", "logs", &pod.name, "-c", "kilo"])?;
        let change = format!("\"{}{}", self.from.name(), self.why.change());
        let is_such = |line: &&str| line.contains(LINE) && line.contains(&change);
        Ok(log.lines().filter(is_such).map(str::to_owned).collect())
    }

    /// Events about such a change: names and messages.
    fn events(&self) -> Result<Vec<(String, String)>> {
        let about =
            format!("involvedObject.kind=Node,involvedObject.name={},reason=LeadsLocation", self.to.name());
        let list = self.cluster.get(&["events", "-n", "default", "--field-selector", &about])?;
        let part = format!(" after {}{}", self.from.name(), self.why.reason());
        let text = |event: &serde_json::Value, pointer| {
            event.pointer(pointer).and_then(serde_json::Value::as_str).map(str::to_owned)
        };
        let events = list["items"].as_array().into_iter().flatten();
        let events =
            events.filter_map(|event| Some((text(event, "/metadata/name")?, text(event, "/message")?)));
        Ok(events.filter(|(_, message)| message.contains(&part)).collect())
    }
}

fn counted(node: &Node, why: Why) -> Result<Vec<u64>> {
    why.counters().iter().map(|name| metric(node, name)).collect()
}

/// The row below the heading FAILOVER of `kgctl status`.
fn failover_row(shown: &str) -> Option<[String; 6]> {
    let row = shown.lines().skip_while(|line| !line.starts_with("FAILOVER ")).nth(1)?;
    let cells: Vec<_> =
        row.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect();
    cells.try_into().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_row_of_failover_is_found_in_the_status() {
        let shown = "LOCATION          LEADER          SINCE   ...\n\
                     location:site-a   a2 (Kilo: a1)   41s     ...\n\n\
                     FAILOVER   LEADER          TERM   SINCE   STAND-BYS            LAST-CHANGE\n\
                     leader     a2 (Kilo: a1)   1      41s     a1 not fit, a3 fit   a1 lost: no packet passed through it for 268 ms, took over the location\n";
        let row = failover_row(shown).unwrap();
        assert_eq!(row[..4], ["leader", "a2 (Kilo: a1)", "1", "41s"].map(str::to_owned));
        assert_eq!(row[4], "a1 not fit, a3 fit");
        assert!(row[5].starts_with(&format!("a1{}", Why::Lost.change())), "{row:?}");
        assert_eq!(failover_row("FAILOVER   LEADER\n"), None);
    }
}
