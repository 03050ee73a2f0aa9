//! How often an agent renews its heartbeat: as often as somebody needs it.

use super::{CheckedInRef, Mesh, Node};
use crate::settings::Granularity;

/// Seconds between two heartbeats where anybody may tell by them who is alive: Kilo's own interval.
pub const OFTEN: u16 = 30;
/// Seconds between two heartbeats where probes and WireGuard show who is alive.
pub const SELDOM: u16 = 300;

/// Seconds until this node's heartbeat is to be renewed. `may_rest`: this agent is configured to rely on
/// something other than heartbeats (`--failover=auto`, `--slices=auto`) and writes no slices; without that,
/// it is [`OFTEN`] whatever others do.
///
/// Kilo's own agents take a node for dead after 60 s: with one of them anywhere, all heartbeats are renewed
/// every 30 s, as they are while any node lacks failover. Leaders that others could succeed always renew
/// theirs that often, so that they are declared dead in a minute even when failover has failed. A node counts
/// by its object, alive or not; one without a heartbeat, or with `last-seen` 0, does not.
pub fn seconds<'a>(
    mut nodes: impl Iterator<Item = CheckedInRef<'a>>,
    own: &str,
    mesh: &Mesh,
    may_rest: bool,
) -> u16 {
    let leads_others =
        || mesh.find(own).is_some_and(|(at, _)| mesh.segments[at].members.len() > 1 && mesh.leads(own));
    let counts = |known: &CheckedInRef<'_>| known.last_seen != 0 && known.key.is_some();
    let is_needed = |known: CheckedInRef<'_>| {
        // The agent's own promise takes effect with its next heartbeat.
        let promises = known.heartbeat.is_some() || known.name == own;
        counts(&known) && !(promises && fails_over(known.node))
    };
    if !may_rest || nodes.any(is_needed) || leads_others() { OFTEN } else { SELDOM }
}

/// Whether the node's agent knows failover, or has nobody to fail over to.
fn fails_over(node: &Node) -> bool {
    node.signal || node.internal_ip.is_none() || node.granularity == Some(Granularity::Full)
}

/// Whether the node's agent is Kilo's own, or one of ours from before promises; one that
/// has never run is neither.
pub fn is_foreign(known: CheckedInRef<'_>) -> bool {
    known.last_seen != 0 && known.key.is_some() && known.heartbeat.is_none()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        objects::{CheckedIn, Nodes},
        wireguard::PublicKey,
    };

    fn node(name: &str, number: u8) -> CheckedIn {
        let node = Node {
            name: name.to_owned(),
            key: Some(PublicKey([number; 32])),
            endpoint: format!("192.0.2.{number}:51820").parse().ok(),
            internal_ip: format!("10.1.0.{number}/24").parse().ok(),
            pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
            granularity: Some(Granularity::Location),
            signal: true,
            heartbeat: Some(OFTEN),
            ..Node::default()
        };
        CheckedIn { node, last_seen: 1_000 }
    }

    fn wanted(own: &str, list: &[CheckedIn]) -> u16 {
        wanted_where(own, list, true)
    }

    fn wanted_where(own: &str, list: &[CheckedIn], may_rest: bool) -> u16 {
        let nodes: Nodes = list.iter().cloned().collect();
        let members = nodes.iter().map(|known| known.node);
        let subnet = "10.4.0.0/16".parse().unwrap();
        let mesh = Mesh::default().next(members, &BTreeMap::new(), Granularity::Location, subnet);
        seconds(nodes.iter(), own, &mesh, may_rest)
    }

    #[test]
    fn who_leads_nobody_rests_where_all_promise_and_fail_over() {
        let all = [node("a", 1), node("b", 2)];
        assert_eq!((wanted("a", &all), wanted("b", &all)), (OFTEN, SELDOM), "a leads b");
        assert_eq!(wanted("a", &[node("a", 1)]), SELDOM, "nobody could succeed it");
        let mut new = all.clone();
        new[1].node.heartbeat = None;
        assert_eq!(wanted("b", &new), SELDOM, "this agent is about to promise");
    }

    #[test]
    fn an_agent_with_default_flags_never_rests() {
        let mut alone = node("a", 1);
        (alone.node.internal_ip, alone.node.signal) = (None, false);
        assert_eq!(wanted("a", std::slice::from_ref(&alone)), SELDOM, "nobody to fail over to");
        assert_eq!(wanted_where("a", &[alone], false), OFTEN, "and it was not told to");
    }

    #[test]
    fn one_node_of_kilos_own_or_without_failover_keeps_all_awake() {
        let mut all = [node("a", 1), node("b", 2), node("c", 3)];
        all[2].node.heartbeat = None;
        assert_eq!(wanted("b", &all), OFTEN);
        assert!(is_foreign(CheckedInRef { node: &all[2].node.clone().into(), last_seen: 1 }));
        all[2].last_seen = 0;
        assert_eq!(wanted("b", &all), SELDOM, "it has been declared dead");
        all[2] = node("c", 3);
        all[2].node.signal = false;
        assert_eq!(wanted("b", &all), OFTEN, "--failover=off");
        all[2].node.internal_ip = None;
        assert_eq!(wanted("b", &all), SELDOM, "a location of its own");
        all[2].node.key = None;
        all[2].node.heartbeat = None;
        assert_eq!(wanted("b", &all), SELDOM, "its agent has never run");
    }
}
