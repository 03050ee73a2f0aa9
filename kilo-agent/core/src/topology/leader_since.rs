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

/// Locations that have gone whose counts are kept. A node on its own is a location, too, and where nodes come and go
/// all the time, as with an autoscaler, their names would fill memory without a bound.
const MOST_GONE: usize = 1000;

/// Current leaders by name of the location, as [`Segment::location`](super::Segment::location).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeadersSince(BTreeMap<String, LeaderSince>);

impl LeadersSince {
    /// Records who leads now. A location that has gone and comes back keeps its count while the agent runs, until
    /// more than [`MOST_GONE`] have gone.
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
        if self.0.len() > mesh.segments.len() + MOST_GONE {
            let known =
                |name: &String| mesh.segments.binary_search_by(|segment| segment.location.cmp(name)).is_ok();
            self.0.retain(|name, _| known(name));
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
    fn locations_that_have_gone_are_not_kept_without_end() {
        let (mut leaders, now) = (LeadersSince::default(), Instant::now());
        for number in 0..3 * MOST_GONE {
            // Without private addresses, so that each node is its own location.
            let nodes = ["stays".to_owned(), format!("node-{number}")].map(|name| Node {
                name,
                endpoint: "192.0.2.1:51820".parse().ok(),
                key: Some(PublicKey([1; 32])),
                ..Node::default()
            });
            let subnet = "10.4.0.0/16".parse().unwrap();
            leaders.observe(&Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, subnet), now);
        }
        assert!(leaders.0.len() <= MOST_GONE + 2, "{}", leaders.0.len());
        assert!(leaders.get("node:stays").is_some() && leaders.get("node:node-2999").is_some());
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
