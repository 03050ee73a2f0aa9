//! Filters of `kgctl status` (`--location`, `--not-ready`): plain values, without I/O.

use kilo_agent::status::Status;

/// Keeps the nodes of one location, given as `east` or, as displayed, `location:east`. False when there is
/// none.
pub fn retain_location(status: &mut Status, wanted: &str) -> bool {
    let is_wanted =
        |name: &str| name == wanted || name.split_once(':').is_some_and(|(_, name)| name == wanted);
    status.locations.retain(|location| is_wanted(&location.name));
    status.nodes.retain(|node| is_wanted(&node.location));
    status.peers.clear();
    let names: Vec<_> = status.nodes.iter().map(|node| node.name.clone()).collect();
    status.degraded.retain(|node, _| names.contains(node));
    status.unhealthy.retain(|node, _| names.contains(node));
    status.pods.retain(|node, _| names.contains(node));
    status.unheard.retain(|node| names.contains(node));
    status.conflicts.retain(|conflict| conflict.nodes.iter().any(|node| names.contains(node)));
    !status.nodes.is_empty() || !status.locations.is_empty()
}

/// Keeps the nodes that are not ready, and the locations with a problem.
pub fn retain_not_ready(status: &mut Status) {
    status.nodes.retain(|node| !node.ready);
    status.locations.retain(|location| location.ready < location.nodes || location.leader.is_none());
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub mod tests {
    use super::*;
    use kilo_agent::status::{ConflictStatus, Problem, problems, verdict};
    use serde_json::json;

    /// Nodes of two locations; those not in `not_ready` are ready.
    pub fn status(nodes: usize, not_ready: &[usize]) -> Status {
        let node = |at: usize| {
            let ready = !not_ready.contains(&at);
            json!({
                "name": format!("n{at:03}"), "location": format!("location:{}", if at.is_multiple_of(2) { "even" } else { "odd" }),
                "leads": at < 2 && ready, "ready": ready, "notReady": if ready { vec![] } else { vec!["asleep"] },
                "podCIDRs": [],
            })
        };
        let location = |name: &str, first: usize| {
            let members = (first..nodes).step_by(2);
            let ready = members.clone().filter(|at| !not_ready.contains(at)).count();
            json!({
                "name": format!("location:{name}"), "leader": (ready > 0).then(|| format!("n{first:03}")),
                "ready": ready, "nodes": members.count(),
            })
        };
        serde_json::from_value(json!({
            "time": "2026-01-01T00:00:00Z", "granularity": "location", "subnet": "10.4.0.0/16",
            "locations": [location("even", 0), location("odd", 1)],
            "nodes": (0..nodes).map(node).collect::<Vec<_>>(), "peers": [], "problems": {},
        }))
        .unwrap()
    }

    #[test]
    fn what_stops_packets_is_a_problem_and_comes_in_order() {
        let healthy = status(6, &[]);
        assert_eq!(problems(&healthy), []);
        assert!(verdict(&healthy, &[]).starts_with("Healthy: 6 of 6 nodes ready, 2 of 2 locations"));
        let mut ill = status(4, &[0, 1, 3]);
        ill.degraded.insert("n002".to_owned(), vec!["no handshake with location:odd".to_owned()]);
        let found = problems(&ill);
        let objects: Vec<_> = found.iter().map(|problem| problem.object.as_str()).collect();
        assert_eq!(objects, ["location/location:odd", "node/n000", "node/n001", "node/n003", "node/n002"]);
        assert_eq!(found[1].what, "not ready: asleep");
        assert!(verdict(&ill, &found).starts_with("Not healthy, 5 problems: 1 of 4 nodes ready, 1 of 2"));
        // kgctl reports for that leader what the leader's own page reports for its agent.
        ill.unhealthy.insert("n002".to_owned(), "no route socket".to_owned());
        assert_eq!(problems(&ill)[1].what, "its agent is not healthy: no route socket");
        ill.unheard.push("n002".to_owned());
        assert!(
            verdict(&ill, &[])
                .ends_with("The agent of n002 did not respond: nothing is known of its tunnels.")
        );
        let none = Status { nodes: vec![], locations: vec![], ..healthy };
        assert_eq!(problems(&none)[0].what, "there are no nodes");
    }

    #[test]
    fn a_location_without_address_is_a_problem() {
        let mut status = status(4, &[]);
        let what = "it has no WireGuard address: --subnet 10.4.0.0/32 has 1 address for 2 locations";
        status.locations[1].problem = Some(what.to_owned());
        let wanted = Problem { object: "location/location:odd".to_owned(), what: what.to_owned() };
        assert_eq!(problems(&status), [wanted]);
        assert!(verdict(&status, &problems(&status)).starts_with("Not healthy, 1 problem"));
    }

    #[test]
    fn what_two_nodes_claim_is_a_problem_of_both() {
        let mut status = status(4, &[]);
        status.conflicts.push(ConflictStatus {
            object: "key/AQEB".to_owned(),
            nodes: vec!["n000".to_owned(), "n001".to_owned()],
            text: "n000, n001 claim it: remove one".to_owned(),
        });
        let found = problems(&status);
        let wanted =
            Problem { object: "key/AQEB".to_owned(), what: "n000, n001 claim it: remove one".to_owned() };
        assert_eq!(found, [wanted]);
        assert!(retain_location(&mut status.clone(), "odd") && status.retain_node("n001"));
        assert_eq!(problems(&status), found);
        assert!(status.conflicts.len() == 1 && status.nodes.len() == 1);
    }

    #[test]
    fn a_peer_is_a_problem_when_it_overlaps_nodes_and_not_when_it_is_refused() {
        let mut status = status(4, &[]);
        status.peers = serde_json::from_value(json!([
            {"name": "a", "valid": true, "allowedIPs": [], "reason": "in a pod CIDR", "overlaps": true},
            {"name": "b", "valid": false, "allowedIPs": [], "reason": "no key"},
        ]))
        .unwrap();
        let wanted = Problem { object: "peer/a".to_owned(), what: "in a pod CIDR".to_owned() };
        assert_eq!(problems(&status), [wanted]);
    }

    #[test]
    fn a_location_is_named_with_and_without_its_kind() {
        for wanted in ["odd", "location:odd"] {
            let mut all = status(5, &[3]);
            assert!(retain_location(&mut all, wanted));
            assert_eq!((all.nodes.len(), all.locations.len()), (2, 1));
            retain_not_ready(&mut all);
            assert_eq!(all.nodes[0].name, "n003");
        }
        assert!(!retain_location(&mut status(5, &[]), "north"));
    }
}
