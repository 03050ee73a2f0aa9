//! Why every location has only one leader although several active leaders are configured: some node of
//! the mesh does not support them. Which ones are active is decided in `homes.rs`.

use super::{Member, Mesh};
use crate::settings::Granularity;

impl Mesh {
    /// The first node that does not know several active leaders, if there is one: it would send to one leader
    /// what another one has, so every location has one leader.
    pub(super) fn without_several(&self) -> Option<&Member> {
        let mut members = self.segments.iter().flat_map(|segment| &segment.members);
        members.find(|member| !member.node.is_capable() || member.node.leaders.is_none())
    }

    /// Why a segment, by its index, has one leader although several are configured, in words for the
    /// operator; `None`: it has several, or one is what was configured.
    pub fn one_leader_warning(&self, at: usize) -> Option<String> {
        let segment = self.segments.get(at)?;
        // A node on its own shares with nobody.
        if self.granularity() != Some(Granularity::Location) || segment.members.len() < 2 {
            return None;
        }
        let asks = |member: &Member| member.node.gateway || member.node.leaders.is_some_and(|it| it > 1);
        let node = &self.without_several().filter(|_| segment.members.iter().any(asks))?.node;
        let why = match node.is_capable() {
            true => "no annotation kilo.squat.ai/leaders: its agent is older",
            false => {
                "no annotation kilo.squat.ai/signal: --failover=off, an older agent, or no private address"
            }
        };
        Some(format!(
            "several active leaders are configured, but node {} does not support them ({why}), so every location \
             uses one leader",
            node.name
        ))
    }
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
        (0..mesh.segments.len()).map(|at| mesh.one_leader_warning(at)).collect()
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
}
