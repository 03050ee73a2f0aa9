//! Changes of leaders as seen by one agent: kept in memory in limited number, for its page.

use std::{collections::VecDeque, sync::Arc};

use kilo_core::topology::{Mesh, changes::Change};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::acting;
use crate::timestamp::Timestamp;

/// Maximum number of changes; older ones are in the log and in Events.
const KEPT: usize = 200;

/// A change of a location's leader, as seen by one agent: an element of `leaderChanges` in the page's JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaderChange {
    /// When this agent saw it.
    pub time: Timestamp,
    /// Name of the location, as in the status.
    pub location: String,
    /// The former leader; absent when there was none, or the location is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The new leader; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The reason, as a phrase.
    pub why: String,
}

/// The latest changes; clones share them.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<VecDeque<LeaderChange>>>);

impl History {
    /// Records the changes of leaders in `changes`, and acting leaders that differ between `before` and
    /// `now`.
    pub fn observe(&self, changes: &[Change], before: Option<&Mesh>, now: &Mesh, time: Timestamp) {
        let chosen = changes.iter().filter_map(|change| of_change(change, time));
        let acted = before.into_iter().flat_map(|before| of_failover(before, now, time));
        let mut kept = self.0.lock();
        for change in chosen.chain(acted) {
            if kept.len() == KEPT {
                kept.pop_back();
            }
            kept.push_front(change);
        }
    }

    /// All recorded changes, the latest first.
    pub fn all(&self) -> Vec<LeaderChange> {
        self.0.lock().iter().cloned().collect()
    }
}

fn of_change(change: &Change, time: Timestamp) -> Option<LeaderChange> {
    let (location, from, to, why) = match change {
        Change::LocationAppeared { location, leader, rule } => {
            (location, None, Some(leader), format!("the location joined: {rule}"))
        }
        Change::LocationVanished { location, leader, why } => {
            (location, Some(leader), None, format!("no node is ready: {why}"))
        }
        Change::LeaderMoved { location, from, to, why } => (location, Some(from), Some(to), why.to_string()),
        _ => return None,
    };
    Some(LeaderChange { time, location: location.clone(), from: from.cloned(), to: to.cloned(), why })
}

/// Locations where the acting leader has changed, or where Kilo's choice leads again.
fn of_failover(before: &Mesh, now: &Mesh, time: Timestamp) -> Vec<LeaderChange> {
    let pairs = now.segments.iter().filter_map(|new| {
        let old = before.segments.iter().find(|old| old.location == new.location)?;
        (!Arc::ptr_eq(old, new)).then_some((old, new))
    });
    let change = pairs.filter_map(|(old, new)| {
        let acts = |segment| acting(segment).map(|acting| acting.name().to_owned());
        let (from, to) = (acts(old), acts(new));
        let chosen = new.leading()?.name().to_owned();
        let why = match (&from, &to) {
            (from, to) if from == to => return None,
            (_, Some(_)) => format!("failover: it acts in the place of {chosen}"),
            (_, None) => "failover: Kilo's choice leads again".to_owned(),
        };
        let from = from.or_else(|| Some(old.leading()?.name().to_owned()));
        let to = to.unwrap_or(chosen);
        let location = new.location.clone();
        (from.as_ref() != Some(&to)).then_some(LeaderChange { time, location, from, to: Some(to), why })
    });
    change.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use kilo_core::{
        settings::Granularity,
        topology::{LeaderReason, Node, changes::Succession},
        wireguard::key::PublicKey,
    };

    fn moved(number: usize) -> Change {
        Change::LeaderMoved {
            location: "location:a".to_owned(),
            from: format!("n{number}"),
            to: format!("n{}", number + 1),
            why: Succession::Rule(LeaderReason::Asks),
        }
    }

    #[test]
    fn the_newest_come_first_and_the_oldest_are_forgotten() {
        let (history, mesh) = (History::default(), Mesh::default());
        for number in 0..KEPT + 7 {
            history.observe(&[moved(number)], None, &mesh, Timestamp(number as i64));
        }
        let all = history.all();
        assert_eq!(all.len(), KEPT);
        assert_eq!((all[0].from.as_deref(), all[0].time), (Some("n206"), Timestamp(206)));
        assert_eq!(all[KEPT - 1].from.as_deref(), Some("n7"));
        assert_eq!(all[0].why, "the new leader takes precedence: asks to lead");
    }

    #[test]
    fn a_node_that_acts_as_leader_is_a_change_and_so_is_the_way_back() {
        let mesh = |term: Option<u64>| {
            let node = |name: &str, leading: Option<u64>| Node {
                name: name.to_owned(),
                endpoint: "192.0.2.1:51820".parse().ok(),
                key: Some(PublicKey([1; 32])),
                internal_ip: "10.0.0.1/24".parse().ok(),
                leading,
                signal: true,
                ..Node::default()
            };
            let nodes = [node("a", None), node("b", term)];
            Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
        };
        let (history, quiet, over) = (History::default(), mesh(None), mesh(Some(3)));
        history.observe(&[], Some(&quiet), &mesh(None), Timestamp(1));
        assert_eq!(history.all(), [], "nothing has changed");
        history.observe(&[], Some(&quiet), &over, Timestamp(2));
        history.observe(&[], Some(&over), &quiet, Timestamp(3));
        let all: Vec<_> = history.all().into_iter().map(|it| (it.from, it.to)).collect();
        let pair = |from: &str, to: &str| (Some(from.to_owned()), Some(to.to_owned()));
        assert_eq!(all, [pair("b", "a"), pair("a", "b")]);
    }
}
