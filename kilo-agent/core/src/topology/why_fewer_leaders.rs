//! Why a location has fewer active leaders than its nodes or annotations ask for. Which ones are active is
//! decided in `homes.rs`.

use super::{Member, Mesh, Segment, homes::MOST_LEADERS};
use crate::settings::Granularity;

/// Maximum number of nodes that a warning names.
const NAMED: usize = 5;

impl Mesh {
    /// The first node that does not know several active leaders, if there is one: it would send to one leader
    /// what another one has, so every location has one leader.
    pub(super) fn without_several(&self) -> Option<&Member> {
        let mut members = self.segments.iter().flat_map(|segment| &segment.members);
        members.find(|member| !member.node.is_capable() || member.node.leaders.is_none())
    }

    /// Why a segment, by its index, has fewer active leaders than it is configured with, in words for the
    /// operator; `None`: it has as many, or one is what was configured.
    pub fn fewer_leaders_warning(&self, at: usize) -> Option<String> {
        let segment = self.segments.get(at)?;
        // A node on its own shares with nobody.
        if self.granularity() != Some(Granularity::Location) || segment.members.len() < 2 {
            return None;
        }
        let asks = |member: &Member| member.node.gateway || member.node.leaders.is_some_and(|it| it > 1);
        if !segment.members.iter().any(asks) {
            return None;
        }
        match self.without_several() {
            Some(member) => Some(unsupported(member)),
            None if segment.members.iter().any(|member| member.node.gateway) => {
                self.annotated_warning(segment)
            }
            None => different_numbers(segment),
        }
    }

    /// Where nodes are annotated, `--leaders` does not count, and no more than [`MOST_LEADERS`] lead.
    fn annotated_warning(&self, segment: &Segment) -> Option<String> {
        let unused = segment.annotated_in_vain(&self.lost_of(segment));
        if !unused.is_empty() {
            return Some(format!(
                "a location has {MOST_LEADERS} active leaders at most, so the annotation kilo.squat.ai/gateway of {} \
                 has no effect: remove it there, or from others",
                names(unused.into_iter().map(str::to_owned).collect())
            ));
        }
        let asked = segment.leaders_asked();
        let others = segment.members.iter().enumerate().filter(|(at, _)| *at != segment.leader);
        let is_leader_alone = others.map(|(_, member)| member).all(|member| !member.node.gateway);
        let leader = segment.leading().filter(|_| asked > 1 && is_leader_alone)?;
        Some(format!(
            "--leaders={asked} has no effect here, because the annotation kilo.squat.ai/gateway names the active \
             leaders, and only node {} has it: annotate more nodes, or remove it",
            leader.name()
        ))
    }
}

/// The warning about a node that keeps every location from having several active leaders.
fn unsupported(member: &Member) -> String {
    let why = match member.node.is_capable() {
        true => "no annotation kilo.squat.ai/leaders: its agent is older",
        false => "no annotation kilo.squat.ai/signal: --failover=off, an older agent, or no private address",
    };
    format!(
        "several active leaders are configured, but node {} does not support them ({why}), so every location uses \
         one leader",
        member.name()
    )
}

/// The warning that nodes of a segment ask for different numbers of active leaders.
fn different_numbers(segment: &Segment) -> Option<String> {
    let asked = |member: &Member| member.node.leaders.unwrap_or(1);
    let most = segment.members.iter().map(asked).max()?;
    let fewer: Vec<_> = segment.members.iter().filter(|member| asked(member) < most).collect();
    if fewer.is_empty() {
        return None;
    }
    Some(format!(
        "nodes ask for {most} active leaders, but {} for fewer, and the smallest number counts: {}; give all agents \
         the same --leaders",
        names(
            fewer.iter().map(|member| format!("{} (--leaders={})", member.name(), asked(member))).collect()
        ),
        segment.leaders_asked()
    ))
}

/// The first names, and how many more there are.
fn names(mut all: Vec<String>) -> String {
    let more = all.len().saturating_sub(NAMED);
    all.truncate(NAMED);
    let first = all.join(", ");
    if more > 0 { format!("{first} and {more} more") } else { first }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{topology::Node, wireguard::key::PublicKey};

    fn node(name: &str, location: &str, leaders: Option<usize>) -> Node {
        Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([name.as_bytes()[1]; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            signal: leaders.is_some(),
            leaders,
            ..Node::default()
        }
    }

    fn warnings(nodes: &[Node], granularity: Granularity) -> Vec<Option<String>> {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), granularity, "10.4.0.0/16".parse().unwrap());
        (0..mesh.segments.len()).map(|at| mesh.fewer_leaders_warning(at)).collect()
    }

    #[test]
    fn who_keeps_locations_from_having_several_leaders_is_named() {
        let mut nodes = [
            node("x1", "x", Some(2)),
            node("x2", "x", Some(2)),
            node("y3", "y", Some(1)),
            node("y4", "y", None),
            node("z5", "z", Some(2)),
        ];
        let said = warnings(&nodes, Granularity::Location);
        let of_x = said[0].as_deref().unwrap();
        assert!(
            of_x.contains("node y4 does not support them (no annotation kilo.squat.ai/signal:"),
            "{of_x}"
        );
        assert_eq!(said[1], None, "nobody asks for several there");
        assert_eq!(said[2], None, "one node shares with no other");
        assert_eq!(warnings(&nodes, Granularity::Full), [const { None }; 5], "nothing is shared");
        // An agent that knows failover, but not several leaders.
        nodes[3].signal = true;
        let said = warnings(&nodes, Granularity::Location);
        assert!(said[0].as_deref().unwrap().contains("no annotation kilo.squat.ai/leaders:"), "{said:?}");
        nodes[3].leaders = Some(1);
        assert_eq!(warnings(&nodes, Granularity::Location), [None, None, None]);
        // A node is annotated as a gateway where nobody knows failover.
        let mut off = [node("x1", "x", None), node("x2", "x", None)];
        off[1].gateway = true;
        let said = warnings(&off, Granularity::Location);
        assert!(said[0].as_deref().unwrap().contains("node x1"), "{said:?}");
    }

    #[test]
    fn nodes_that_ask_for_fewer_than_others_are_named_with_both_numbers() {
        let all = [
            node("x1", "x", Some(3)),
            node("x2", "x", Some(1)),
            node("x3", "x", Some(2)),
            node("y4", "y", Some(2)),
            node("y5", "y", Some(2)),
        ];
        let said = warnings(&all, Granularity::Location);
        let of_x = said[0].as_deref().unwrap();
        for words in ["nodes ask for 3", "x2 (--leaders=1), x3 (--leaders=2) for fewer", "counts: 1;"] {
            assert!(of_x.contains(words), "{of_x}");
        }
        assert_eq!(said[1], None, "all ask for the same there");
        let many: Vec<_> =
            (1..=9).map(|n| node(&format!("x{n}"), "x", Some(if n == 1 { 2 } else { 1 }))).collect();
        let said = warnings(&many, Granularity::Location);
        assert!(said[0].as_deref().unwrap().contains("x6 (--leaders=1) and 3 more"), "{said:?}");
    }

    #[test]
    fn annotations_that_leave_one_leader_or_are_not_used_are_reported() {
        let mut all: Vec<_> = (1..=9).map(|n| node(&format!("x{n}"), "x", Some(3))).collect();
        all[0].gateway = true;
        let said = warnings(&all, Granularity::Location);
        let of_x = said[0].as_deref().unwrap();
        assert!(of_x.starts_with("--leaders=3 has no effect") && of_x.contains("only node x1"), "{of_x}");
        // Annotations count in place of --leaders: different numbers of these do not matter.
        all[1].gateway = true;
        all[2].leaders = Some(1);
        assert_eq!(warnings(&all, Granularity::Location), [None]);
        // Eight annotated ones, and the leader, which is not.
        (all[0].gateway, all[0].leader) = (false, true);
        all[2..].iter_mut().for_each(|node| node.gateway = true);
        let said = warnings(&all, Granularity::Location);
        let of_x = said[0].as_deref().unwrap();
        assert!(of_x.contains("8 active leaders at most") && of_x.contains("gateway of x9 has"), "{of_x}");
    }
}
