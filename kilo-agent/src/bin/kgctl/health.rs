//! Whether a mesh is healthy, and what is wrong first: plain values, without I/O.

use kilo_agent::status::Status;

/// Something that keeps packets from arriving.
#[derive(Debug, PartialEq, Eq)]
pub struct Problem {
    /// `node/NAME`, `location/NAME` or `address/IP`.
    pub object: String,
    /// What is wrong with it.
    pub what: String,
}

/// All that is wrong, locations without a leader first. Invalid peers are not: they stop nobody else.
pub fn problems(status: &Status) -> Vec<Problem> {
    let problem = |kind: &str, name: &str, what: String| Problem { object: format!("{kind}/{name}"), what };
    let lost = status.locations.iter().filter(|location| location.leader.is_none());
    let lost = lost.map(|location| {
        let what = format!("nobody leads it: none of its {} nodes is ready", location.nodes);
        problem("location", &location.name, what)
    });
    let ill = status.agent.iter().filter_map(|agent| {
        Some(problem("node", &agent.node, format!("its agent is not healthy: {}", agent.unhealthy.as_ref()?)))
    });
    let out = status.nodes.iter().filter(|node| !node.ready);
    let out =
        out.map(|node| problem("node", &node.name, format!("not ready: {}", node.not_ready.join(", "))));
    let own = status.agent.iter().flat_map(|agent| agent.degraded.iter().map(|what| (&agent.node, what)));
    let asked = status.degraded.iter().flat_map(|(node, all)| all.iter().map(move |what| (node, what)));
    let degraded = own.chain(asked).map(|(node, what)| problem("node", node, format!("degraded: {what}")));
    let claimed = status.conflicts.iter().map(|conflict| {
        problem("address", &conflict.address.to_string(), format!("claimed by {}", conflict.nodes.join(", ")))
    });
    let mut found: Vec<Problem> = lost.chain(ill).chain(out).chain(degraded).chain(claimed).collect();
    if status.nodes.is_empty() {
        found.push(problem("node", "*", "there are no nodes".to_owned()));
    }
    found
}

/// One line that says how it is.
pub fn verdict(status: &Status, problems: &[Problem]) -> String {
    let ready = status.nodes.iter().filter(|node| node.ready).count();
    let led = status.locations.iter().filter(|location| location.leader.is_some()).count();
    let (nodes, locations) = (status.nodes.len(), status.locations.len());
    let counts = format!("{ready} of {nodes} nodes ready, {led} of {locations} locations have a leader");
    match problems.len() {
        0 => format!("Healthy: {counts}."),
        1 => format!("Not healthy, 1 problem: {counts}."),
        many => format!("Not healthy, {many} problems: {counts}."),
    }
}

/// Keeps the nodes of one location: `east`, or as it is shown, `location:east`. False when there is none.
pub fn retain_location(status: &mut Status, wanted: &str) -> bool {
    let is_wanted =
        |name: &str| name == wanted || name.split_once(':').is_some_and(|(_, name)| name == wanted);
    status.locations.retain(|location| is_wanted(&location.name));
    status.nodes.retain(|node| is_wanted(&node.location));
    status.peers.clear();
    let names: Vec<_> = status.nodes.iter().map(|node| node.name.clone()).collect();
    status.degraded.retain(|node, _| names.contains(node));
    status.conflicts.retain(|conflict| conflict.nodes.iter().any(|node| names.contains(node)));
    !status.nodes.is_empty() || !status.locations.is_empty()
}

/// Keeps the nodes with a problem.
pub fn retain_not_ready(status: &mut Status) {
    status.nodes.retain(|node| !node.ready);
    status.locations.retain(|location| location.ready < location.nodes || location.leader.is_none());
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub mod tests {
    use super::*;
    use serde_json::json;

    /// Nodes of two locations; the others are ready.
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
        let none = Status { nodes: vec![], locations: vec![], ..healthy };
        assert_eq!(problems(&none)[0].what, "there are no nodes");
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
