//! Checks by the agents' counters whether packets between locations went through WireGuard.

use std::collections::BTreeMap;

use kilo_agent::{status::Status, timestamp::Timestamp};

use super::{
    matrix::{Cell, Finding},
    probe::{BULK, Kind},
};
use crate::{cluster::Cluster, progress::Progress, remote};

/// Drop reason of packets that would have left in cleartext.
const NOT_ENCRYPTED: &str = "not_encrypted";
/// Handshakes older than this many seconds are of peers that are away.
const RECENT: i64 = 180;

/// Counters of the leaders at one moment, by node.
#[derive(Clone, Debug, Default)]
pub struct Figures(BTreeMap<String, Figure>);

#[derive(Clone, Copy, Debug, Default)]
struct Figure {
    /// Bytes that the node's tunnels have sent, keepalives and handshakes included.
    sent: u64,
    /// Packets dropped before they left in cleartext.
    dropped: u64,
}

impl Figures {
    /// Asks the agents of all leaders; empty when one of them does not answer.
    pub async fn read(cluster: &Cluster, seen: &Status) -> Self {
        let mut figures = BTreeMap::new();
        for (node, status) in leaders(cluster, seen).await {
            let Some(agent) = status.and_then(|status| status.agent) else { return Self::default() };
            let figure = Figure {
                sent: agent.tunnels.iter().map(|tunnel| tunnel.sent_bytes).sum(),
                dropped: agent.drops.get(NOT_ENCRYPTED).copied().unwrap_or_default(),
            };
            figures.insert(node, figure);
        }
        Self(figures)
    }
}

/// The status of each leader's agent; `None` where it does not answer.
async fn leaders(cluster: &Cluster, seen: &Status) -> Vec<(String, Option<Status>)> {
    let leaders = seen.leading();
    let progress = Progress::new("asking the leaders' agents", leaders.len());
    let asked = leaders.into_iter().map(async |node| {
        let status = remote::status_on(cluster, &node).await.ok();
        progress.step();
        (node, status)
    });
    futures::future::join_all(asked).await
}

/// Peers that had a handshake with some leader in the last minutes.
pub async fn peers_with_handshake(cluster: &Cluster, seen: &Status) -> Vec<String> {
    let now = Timestamp::now().0;
    let statuses = leaders(cluster, seen).await;
    let tunnels =
        statuses.into_iter().filter_map(|(_, status)| status?.agent).flat_map(|agent| agent.tunnels);
    let recent = tunnels.filter(|tunnel| tunnel.last_handshake.is_some_and(|at| now - at.0 < RECENT));
    recent.filter_map(|tunnel| Some(tunnel.name?.strip_prefix("peer:")?.to_owned())).collect()
}

/// What the counters show about the probes between `before` and `after`.
pub fn findings(before: &Figures, after: &Figures, probes: &[Cell]) -> Vec<Finding> {
    let what = "cleartext between locations".to_owned();
    let bulk = probes
        .iter()
        .filter(|cell| cell.crosses() && cell.kind == Kind::Bulk && cell.error.is_none())
        .count();
    if bulk == 0 {
        let text = "no bytes were sent from one location to another".to_owned();
        return vec![Finding { what, good: None, text }];
    }
    if after.0.is_empty() || before.0.keys().ne(after.0.keys()) {
        let text = "not every leader's agent answers through the API server (get on pods/proxy)".to_owned();
        return vec![Finding { what, good: None, text }];
    }
    let grown = |pick: fn(&Figure) -> u64| -> u64 {
        let of =
            |(node, now): (&String, &Figure)| pick(now).saturating_sub(before.0.get(node).map_or(0, pick));
        after.0.iter().map(of).sum()
    };
    let (sent, dropped) = (grown(|figure| figure.sent), grown(|figure| figure.dropped));
    // Bytes count in both directions.
    let least = 2 * (bulk * BULK) as u64;
    let good = sent >= least && dropped == 0;
    let mut text = format!(
        "the tunnels carried {} KiB of at least {} KiB; {dropped} packets were dropped as {NOT_ENCRYPTED}",
        sent >> 10,
        least >> 10
    );
    if sent < least {
        text += ". Something other than WireGuard carries packets between locations: `kgctl trace NODE` shows the path";
    }
    if dropped > 0 {
        text += ". A route leads past kilo0: `kgctl monitor NODE --reason=not_encrypted` shows the packets";
    }
    vec![Finding { what, good: Some(good), text }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connectivity::matrix::Target;

    fn figures(sent: u64, dropped: u64) -> Figures {
        Figures(BTreeMap::from([("a1".to_owned(), Figure { sent, dropped })]))
    }

    #[test]
    fn bytes_that_no_tunnel_carried_and_drops_are_bad() {
        let cell = |to: &str| Cell {
            from: "a1".to_owned(),
            from_location: "a".to_owned(),
            target: Target::Pod,
            to: format!("{to}1"),
            to_location: to.to_owned(),
            kind: Kind::Bulk,
            address: ([10, 42, 1, 2], 8080).into(),
            error: None,
        };
        let (across, within) = ([cell("b")], [cell("a")]);
        let good = |sent, dropped, probes: &[Cell]| {
            findings(&figures(5, 1), &figures(sent, dropped), probes)[0].good
        };
        let enough = 5 + 2 * BULK as u64;
        assert_eq!(good(enough, 1, &across), Some(true));
        assert_eq!(good(enough - 1, 1, &across), Some(false));
        assert_eq!(good(enough, 2, &across), Some(false));
        assert_eq!(good(enough, 1, &within), None);
        assert_eq!(findings(&figures(5, 1), &Figures::default(), &across)[0].good, None);
    }
}
