//! Since when each location's leader has led, and how often it has changed, as this agent has seen it: for
//! `/status` and metrics. The leader is chosen in `leader.rs`.

use std::{collections::BTreeMap, time::Instant};

use super::Mesh;

/// A location's current leader, and since when it has led.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderSince {
    /// Name of the node that leads.
    pub leader: String,
    /// When it was first seen leading, without a break.
    pub since: Instant,
    /// How often this agent has seen the location's leader change.
    pub changes: u64,
}

/// Current leaders by name of the location, as [`Segment::location`](super::Segment::location).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeadersSince(BTreeMap<String, LeaderSince>);

impl LeadersSince {
    /// Records who leads now. A location that has gone and comes back keeps its count while the agent runs.
    pub fn observe(&mut self, mesh: &Mesh, now: Instant) {
        for segment in &mesh.segments {
            let Some(leading) = segment.leading() else { continue };
            match self.0.get_mut(&segment.location) {
                Some(lead) if lead.leader == leading.name() => {}
                Some(lead) => {
                    let changes = lead.changes + 1;
                    *lead = LeaderSince { leader: leading.name().to_owned(), since: now, changes };
                }
                None => {
                    let lead = LeaderSince { leader: leading.name().to_owned(), since: now, changes: 0 };
                    self.0.insert(segment.location.clone(), lead);
                }
            }
        }
    }

    /// What is known of a location.
    pub fn get(&self, location: &str) -> Option<&LeaderSince> {
        self.0.get(location)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    fn mesh(leader: &str) -> Mesh {
        let nodes = ["a", "b"].map(|name| Node {
            name: name.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            leader: name == leader,
            ..Node::default()
        });
        Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    #[test]
    fn a_leader_is_in_office_since_it_was_first_seen_leading() {
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        let mut leaders = LeadersSince::default();
        leaders.observe(&mesh("a"), start);
        leaders.observe(&mesh("a"), start + minute);
        let lead = leaders.get("location:").unwrap();
        assert_eq!((lead.leader.as_str(), lead.since, lead.changes), ("a", start, 0));
        leaders.observe(&mesh("b"), start + minute * 2);
        leaders.observe(&mesh("b"), start + minute * 3);
        let lead = leaders.get("location:").unwrap();
        assert_eq!((lead.leader.as_str(), lead.since, lead.changes), ("b", start + minute * 2, 1));
    }
}
