//! What an operator sees of a change of leader: metrics, `kgctl status`, a line in the log and an Event.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};

use super::{agents::metric, kgctl::kgctl};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    command::output,
};

/// How long the new leader's agent may take to show it.
const SHOWN: Duration = Duration::from_secs(20);
/// How long an Event may take once the API server is there: agents try again each 30 s, and wait 20 s for an answer.
const WRITTEN: Duration = Duration::from_secs(90);
/// What agents log.
const LINE: &str = "\"leadership changed\"";
/// Which change of this location it was.
const TERM: &str = "kilo_failover_term";

/// Why leadership goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The leader has lost power, and the API server may be away with it.
    Lost,
    /// Its Node is cordoned.
    Cordoned,
}

impl Why {
    /// Metrics of the new leader that count it.
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

    /// What log and `kgctl status` say behind the name of the leader before.
    const fn change(self) -> &'static str {
        match self {
            Self::Lost => " lost: no packet passed through it for ",
            Self::Cordoned => " handed leadership over (planned): its Node is cordoned",
        }
    }

    /// What the Event says behind that name.
    const fn reason(self) -> &'static str {
        match self {
            Self::Lost => " (lost: no packet passed through it for ",
            Self::Cordoned => " (planned: its Node is cordoned)",
        }
    }
}

/// A change of leader that is to come, and what is there of it before: an earlier one has left the same traces.
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
    /// Notes what is there.
    pub fn new(cluster: &'a Cluster, from: &'a Node, to: &'a Node, why: Why) -> Result<Self> {
        let (term, counted) = (metric(to, TERM)?, counted(to, why)?);
        let (lines, events) = (0, BTreeSet::new());
        let expected = Self { cluster, from, to, why, term, counted, lines, events };
        let lines = expected.lines()?.len();
        let events = expected.events()?.into_iter().map(|(name, _)| name).collect();
        Ok(Self { lines, events, ..expected })
    }

    /// Waits for what is there at once, with the API server or without: the new leader's metrics, and `kgctl status`,
    /// which asks its agent; as text.
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

    /// Waits for what an operator finds afterwards: the line in the new leader's log, and one Event about its Node; as
    /// text.
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

    /// Without an API server the agent itself is asked.
    fn status(&self) -> Result<String> {
        let to = self.to.name();
        if self.why == Why::Cordoned {
            return kgctl(self.cluster, &["status", to]);
        }
        let program = std::env::current_exe()?.with_file_name("kgctl");
        let agent = format!("--agent=http://{}:1107", self.to.site.address);
        output(self.to.netns().command(program).args(["status", to, &agent]))
    }

    /// Role, leader, term, since when, stand-bys and their fitness, and the last change and why.
    fn is_right(&self, row: &[String; 6], term: u64) -> bool {
        let [role, leader, shown, since, stand_bys, change] = row;
        let (from, to) = (self.from.name(), self.to.name());
        // Kilo's order is what it was.
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

    /// Lines of the new leader's log about such a change.
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
