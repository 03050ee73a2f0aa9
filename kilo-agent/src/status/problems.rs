//! Whether a mesh is healthy, and its problems: plain values, without I/O. `kgctl status` and the agent's
//! page both use this; they differ only in the number of agents asked.

use serde::{Deserialize, Serialize};

use super::Status;

/// A condition that keeps packets from arriving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `node/NAME`, `location/NAME`, `peer/NAME`, `address/IP`, `key/KEY` or `prefix/CIDR`.
    pub object: String,
    /// What is wrong with it.
    pub what: String,
}

/// All problems, locations without a leader first. Invalid peers do not count: they affect nobody else. Peers that
/// overlap nodes do.
pub fn problems(status: &Status) -> Vec<Problem> {
    let problem = |kind: &str, name: &str, what: String| Problem { object: format!("{kind}/{name}"), what };
    let lost = status.locations.iter().filter(|location| location.leader.is_none());
    let lost = lost.map(|location| {
        let what = format!("nobody leads it: none of its {} nodes is ready", location.nodes);
        problem("location", &location.name, what)
    });
    let shut = status.locations.iter().filter_map(|location| Some((location, location.problem.as_ref()?)));
    let shut = shut.map(|(location, what)| problem("location", &location.name, what.clone()));
    let own = status.agent.iter().filter_map(|agent| Some((&agent.node, agent.unhealthy.as_ref()?)));
    let ill = own
        .chain(&status.unhealthy)
        .map(|(node, why)| problem("node", node, format!("its agent is not healthy: {why}")));
    // What the agent itself says is better than that its pod is not Ready.
    let silent = status.pods.iter().filter(|(node, _)| !status.unhealthy.contains_key(*node));
    let silent = silent.map(|(node, why)| problem("node", node, why.clone()));
    let out = status.nodes.iter().filter(|node| !node.ready);
    let out =
        out.map(|node| problem("node", &node.name, format!("not ready: {}", node.not_ready.join(", "))));
    let own = status.agent.iter().flat_map(|agent| agent.degraded.iter().map(|what| (&agent.node, what)));
    let asked = status.degraded.iter().flat_map(|(node, all)| all.iter().map(move |what| (node, what)));
    let degraded = own.chain(asked).map(|(node, what)| problem("node", node, format!("degraded: {what}")));
    let claimed = status
        .conflicts
        .iter()
        .map(|conflict| Problem { object: conflict.object.clone(), what: conflict.text.clone() });
    let overlapping = status.peers.iter().filter(|peer| peer.overlaps);
    let overlapping =
        overlapping.map(|peer| problem("peer", &peer.name, peer.reason.clone().unwrap_or_default()));
    let of_nodes = ill.chain(silent).chain(out).chain(degraded);
    let of_objects = of_nodes.chain(claimed).chain(overlapping);
    let mut found: Vec<Problem> = lost.chain(shut).chain(of_objects).collect();
    if status.nodes.is_empty() {
        found.push(problem("node", "*", "there are no nodes".to_owned()));
    }
    found
}

/// Summarises the status in one line.
pub fn verdict(status: &Status, problems: &[Problem]) -> String {
    let ready = status.nodes.iter().filter(|node| node.ready).count();
    let led = status.locations.iter().filter(|location| location.leader.is_some()).count();
    let (nodes, locations) = (status.nodes.len(), status.locations.len());
    // An agent knows only its own tunnels, so pages may differ: each names its agent.
    let whose = status.agent.as_ref().map(|agent| format!(", as {} sees it", agent.node)).unwrap_or_default();
    let counts =
        format!("{ready} of {nodes} nodes ready, {led} of {locations} locations have a leader{whose}");
    let verdict = match problems.len() {
        0 => format!("Healthy: {counts}."),
        1 => format!("Not healthy, 1 problem: {counts}."),
        many => format!("Not healthy, {many} problems: {counts}."),
    };
    match &status.unheard[..] {
        [] => verdict,
        [one] => format!("{verdict} The agent of {one} did not respond: nothing is known of its tunnels."),
        many => {
            format!(
                "{verdict} The agents of {} did not respond: nothing is known of their tunnels.",
                many.join(", ")
            )
        }
    }
}
