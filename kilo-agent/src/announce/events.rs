//! Which agent writes which Event: each about its own node, and one agent about nodes that left.

use kilo_common::lead::Term;
use kilo_core::{
    objects::events::EventReason,
    topology::{
        Mesh,
        changes::{Absence, Change, Role, speaker},
    },
};

/// An Event to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The node it is about.
    pub node: String,
    /// Its reason.
    pub reason: EventReason,
    /// Its message.
    pub text: String,
}

/// The Events that the agent of `own` writes about the changes that led to `mesh`.
pub fn notices(changes: &[Change], mesh: &Mesh, own: &str) -> Vec<Notice> {
    let mut notices = Vec::new();
    for change in changes {
        match change {
            Change::NodeLeft { node, location, why } if node != own && speaker(mesh) == Some(own) => {
                let text = format!("left the mesh ({location}): {why}");
                notices.push(Notice { node: node.clone(), reason: EventReason::LeftMesh, text });
            }
            Change::Role { from, to } => notices.extend(of_role(from, to, changes, (mesh, own))),
            _ => {}
        }
    }
    notices
}

/// Whether a term decides the location's leader, whatever Kilo's rule says: failover reports that itself.
fn is_led_by_term(mesh: &Mesh, own: &str) -> bool {
    mesh.find(own).is_some_and(|(at, _)| mesh.gateways_of(at).term > Term::NONE)
}

fn of_role(from: &Role, to: &Role, changes: &[Change], (mesh, own): (&Mesh, &str)) -> Vec<Notice> {
    let of = |reason, text| Notice { node: own.to_owned(), reason, text };
    let mut notices = Vec::new();
    match (from, to) {
        (Role::Out, _) => notices.push(of(EventReason::JoinedMesh, format!("joined the mesh as {to}"))),
        (_, Role::Out) => {
            let why = changes.iter().find_map(|change| match change {
                Change::NodeLeft { node, why, .. } if node == own => Some(why.clone()),
                _ => None,
            });
            let why = why.unwrap_or(Absence::Silent);
            notices.push(of(EventReason::LeftMesh, format!("left the mesh ({from}): {why}")));
        }
        _ => {}
    }
    if is_led_by_term(mesh, own) {
        return notices;
    }
    match (from, to) {
        (_, Role::Leader { location }) => {
            let before = changes.iter().find_map(|change| match change {
                Change::LeaderMoved { to, from, why, .. } if to == own => Some(format!("{from} ({why})")),
                _ => None,
            });
            let text = match before {
                Some(before) => format!("leads {location} after {before}"),
                None => format!("leads {location}"),
            };
            notices.push(of(EventReason::LeadsLocation, text));
        }
        (Role::Leader { .. }, Role::Member { location, leader }) => {
            notices.push(of(
                EventReason::FollowsLeader,
                format!("follows {leader}, which leads {location} now"),
            ));
        }
        _ => {}
    }
    notices
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use kilo_core::{
        settings::Granularity,
        topology::{Node, changes::Succession},
        wireguard::key::PublicKey,
    };

    /// Nodes a1, a2, ... of one location; the first leads and is the one to report.
    fn mesh(count: u8) -> Mesh {
        let nodes: Vec<_> = (1..=count)
            .map(|number| Node {
                name: format!("a{number}"),
                location: "a".to_owned(),
                endpoint: format!("192.0.2.{number}:51820").parse().ok(),
                key: Some(PublicKey([number; 32])),
                internal_ip: format!("10.1.0.{number}/24").parse().ok(),
                pod_cidrs: format!("10.42.{number}.0/24").parse().into_iter().collect(),
                ..Node::default()
            })
            .collect();
        let subnet = "10.4.0.0/16".parse().unwrap_or_default();
        Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, subnet)
    }

    fn reasons(notices: &[Notice]) -> Vec<(&str, EventReason)> {
        notices.iter().map(|notice| (notice.node.as_str(), notice.reason)).collect()
    }

    fn left(node: &str) -> Change {
        Change::NodeLeft {
            node: node.to_owned(),
            location: "location:a".to_owned(),
            why: Absence::Incomplete(vec!["no key"]),
        }
    }

    fn member(leader: &str) -> Role {
        Role::Member { location: "location:a".to_owned(), leader: leader.to_owned() }
    }

    fn leader() -> Role {
        Role::Leader { location: "location:a".to_owned() }
    }

    #[test]
    fn of_a_thousand_agents_one_writes_about_a_node_that_left() {
        let (mesh, changes) = (mesh(200), [left("b1")]);
        let writers: Vec<_> = (1..=200)
            .map(|number| format!("a{number}"))
            .filter(|own| !notices(&changes, &mesh, own).is_empty())
            .collect();
        assert_eq!(writers, ["a1"]);
        let event = notices(&changes, &mesh, "a1").remove(0);
        assert_eq!((event.node.as_str(), event.reason), ("b1", EventReason::LeftMesh));
        assert_eq!(event.text, "left the mesh (location:a): it has no key");
    }

    #[test]
    fn a_change_of_leader_is_announced_by_the_two_and_by_no_member() {
        let mesh = mesh(3);
        let moved = |from: &str, to: &str| Change::LeaderMoved {
            location: "location:a".to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            why: Succession::Lost(Absence::Silent),
        };
        let of = |own: &str, from: Role, to: Role| {
            notices(&[moved("a9", "a1"), Change::Role { from, to }], &mesh, own)
        };
        let new = of("a1", member("a9"), leader());
        assert_eq!(reasons(&new), [("a1", EventReason::LeadsLocation)]);
        let text = "leads location:a after a9 (the previous leader left: its agent no longer checks in)";
        assert_eq!(new[0].text, text);
        assert_eq!(reasons(&of("a9", leader(), member("a1"))), [("a9", EventReason::FollowsLeader)]);
        assert_eq!(of("a2", member("a9"), member("a1")), []);
    }

    #[test]
    fn a_leader_of_a_term_is_announced_by_failover_and_not_by_the_order_of_kilo() {
        let mut nodes: Vec<_> =
            mesh(3).segments[0].members.iter().map(|member| (*member.node).clone()).collect();
        nodes.iter_mut().for_each(|node| node.signal = true);
        nodes[1].leading = Some(1 << 16);
        let subnet = "10.4.0.0/16".parse().unwrap_or_default();
        let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, subnet);
        let mesh = mesh.with_acting(2, std::sync::Arc::default());
        let of = |from: Role, to: Role| notices(&[Change::Role { from, to }], &mesh, "a1");
        assert_eq!(of(member("a2"), leader()), []);
        assert_eq!(of(leader(), member("a2")), []);
        assert_eq!(reasons(&of(Role::Out, leader())), [("a1", EventReason::JoinedMesh)]);
    }

    #[test]
    fn a_node_announces_that_it_joined_and_left_and_why() {
        let mesh = mesh(2);
        let of =
            |own: &str, from: Role, to: Role| notices(&[left(own), Change::Role { from, to }], &mesh, own);
        assert_eq!(reasons(&of("a2", Role::Out, member("a1"))), [("a2", EventReason::JoinedMesh)]);
        let leads = [("a1", EventReason::JoinedMesh), ("a1", EventReason::LeadsLocation)];
        assert_eq!(reasons(&of("a1", Role::Out, leader())), leads);
        let leaves = of("a2", member("a1"), Role::Out);
        assert_eq!(reasons(&leaves), [("a2", EventReason::LeftMesh)]);
        assert!(leaves[0].text.ends_with("it has no key"), "{}", leaves[0].text);
    }
}
