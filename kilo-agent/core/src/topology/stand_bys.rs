//! Locations whose leaders nobody can replace in time, because agents are configured with too few stand-bys.

use super::{Member, Mesh, Segment};

impl Mesh {
    /// What an operator should know about the stand-bys of a segment, by its index, as the agent that has
    /// planned this mesh knows them; `None`: there is nothing to report, or failover is off.
    pub fn stand_by_warning(&self, at: usize) -> Option<String> {
        let segment = self.segments.get(at).filter(|_| self.fails_over(at))?;
        match self.unforeseen(at) {
            Some(acting) => Some(format!(
                "{0} leads but does not count as a stand-by with this agent's --stand-bys: set the same --stand-bys on \
                 all agents and kgctl connect. If it is the same everywhere, nodes that rank before {0} have joined, \
                 which is harmless",
                acting.name()
            )),
            None if self.is_of_another_family(at, segment) => Some(
                "no stand-by can take over: its nodes have private addresses of another IP version than --subnet, and \
                 so none of them can test a tunnel; give all agents a --subnet of the version of these addresses"
                    .to_owned(),
            ),
            None if self.lacks_stand_bys(at, segment) => Some(if self.gateways_of(at).homes.is_some() {
                "its active leaders have no stand-bys, so after a failure each node needs 1 to 2 s to detect it: \
                 give all agents --stand-bys=1 or more"
                    .to_owned()
            } else {
                format!(
                    "it has no stand-by: if {} fails, no node takes over until it is declared dead; give all agents \
                     --stand-bys=1 or more",
                    segment.leading().map_or("its leader", Member::name)
                )
            }),
            None => None,
        }
    }

    /// The acting leader of a location, if it is not one of the gateways that this agent would have chosen.
    pub fn unforeseen(&self, at: usize) -> Option<&Member> {
        let gateways = self.gateways.get(at).filter(|gateways| gateways.is_unforeseen)?;
        self.segments.get(at)?.members.get(*gateways.order.get(gateways.acting)?)
    }

    /// Whether stand-bys can probe no other location, because WireGuard addresses are of another IP
    /// version than the private address that a probe comes from.
    fn is_of_another_family(&self, at: usize, segment: &Segment) -> bool {
        let Some(private) = segment.leading().and_then(Member::private_ip) else { return false };
        let others = self.segments.iter().enumerate();
        let others = others.filter(|(other, _)| *other != at && self.fails_over(*other));
        let mut far = others.filter_map(|(_, far)| far.wireguard_ip);
        let first = far.next();
        self.gateways_of(at).order.len() > 1
            && first.is_some()
            && first.into_iter().chain(far).all(|address| address.is_ipv4() != private.is_ipv4())
    }

    /// Whether there are nodes that could stand by, and none does.
    fn lacks_stand_bys(&self, at: usize, segment: &Segment) -> bool {
        let gateways = self.gateways_of(at);
        let has_none = match &gateways.homes {
            Some(homes) => homes.stand_bys.is_empty(),
            None => gateways.order.len() < 2,
        };
        let could = |(at, member): (usize, &Member)| {
            !gateways.order.contains(&at) && member.node.is_capable() && member.node.leaving.is_none()
        };
        has_none && segment.members.iter().enumerate().any(could)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use kilo_common::lead::Term;

    use super::*;
    use crate::{
        settings::Granularity,
        signal_id,
        topology::{Acting, Node},
        wireguard::key::PublicKey,
    };

    fn node(name: &str, leaders: Option<usize>) -> Node {
        Node {
            name: name.to_owned(),
            location: "x".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([name.as_bytes()[0]; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            signal: true,
            leaders,
            ..Node::default()
        }
    }

    fn warning(nodes: &[Node], stand_bys: usize) -> Option<String> {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        assert_eq!(mesh.stand_by_warning(0), None, "without failover");
        mesh.with_acting(stand_bys, Arc::new(Acting::default())).stand_by_warning(0)
    }

    #[test]
    fn a_location_without_stand_bys_is_warned_about_where_there_are_nodes() {
        let one = ["a", "b", "c"].map(|name| node(name, None));
        let said = warning(&one, 0).unwrap();
        assert!(said.contains("if a fails, no node takes over") && said.contains("--stand-bys=1"), "{said}");
        assert_eq!(warning(&one, 1), None);
        assert_eq!(warning(&one[..1], 0), None, "there is nobody else");
        let mut kilos = one.clone();
        (kilos[1].signal, kilos[2].signal) = (false, false);
        assert_eq!(warning(&kilos, 0), None, "nobody else could");
        let two = ["a", "b", "c"].map(|name| node(name, Some(2)));
        let said = warning(&two, 0).unwrap();
        assert!(said.contains("1 to 2 s"), "{said}");
        assert_eq!(warning(&two, 1), None);
        assert_eq!(warning(&two[..2], 0), None, "all are gateways");
    }

    #[test]
    fn a_location_whose_addresses_are_of_another_ip_version_is_warned_about() {
        let far = Node { location: "y".to_owned(), ..node("f", None) };
        for (address, is_warned) in [("10.0.0.1/24", false), ("fd00::1/64", true)] {
            let own = ["a", "b"].map(|name| Node { internal_ip: address.parse().ok(), ..node(name, None) });
            let said = warning(&[own[0].clone(), own[1].clone(), far.clone()], 1);
            assert_eq!(said.is_some_and(|said| said.contains("another IP version than --subnet")), is_warned);
            // Without another location there is nothing to fail over to.
            assert_eq!(warning(&own, 1), None);
        }
    }

    #[test]
    fn a_leader_whom_the_own_flag_does_not_name_is_warned_about() {
        let mut nodes = ["a", "b", "c"].map(|name| node(name, None));
        let term = |name: u8| Term::NONE.next(signal_id::node(&PublicKey([name; 32])));
        nodes[2].leading = Some(term(b'c').bits());
        let said = warning(&nodes, 1).unwrap();
        assert!(
            said.starts_with("c leads")
                && said.contains("the same --stand-bys")
                && said.contains("nodes that rank before c have joined"),
            "{said}"
        );
        assert_eq!(warning(&nodes, 2), None, "it is one of two");
        (nodes[1].leading, nodes[2].leading) = (Some(term(b'b').bits()), None);
        assert_eq!(warning(&nodes, 1), None);
    }
}
