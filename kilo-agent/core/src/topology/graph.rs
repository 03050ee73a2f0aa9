//! The mesh as Graphviz text, with the look Kilo's users know.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use super::{Member, Mesh, Segment};
use crate::tunnel_path::{PathWithRelay, TunnelPath};

/// How tunnels between leaders are connected, by the names of both nodes. Tunnels that are direct, or of which
/// nothing is known, are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunnelPaths(BTreeMap<[String; 2], PathWithRelay>);

impl TunnelPaths {
    /// How the tunnel between two nodes is connected.
    pub fn between(&self, one: &str, other: &str) -> Option<&PathWithRelay> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&pair([one, other].map(str::to_owned)))
    }
}

impl FromIterator<([String; 2], PathWithRelay)> for TunnelPaths {
    fn from_iter<I: IntoIterator<Item = ([String; 2], PathWithRelay)>>(paths: I) -> Self {
        Self(paths.into_iter().map(|(ends, path)| (pair(ends), path)).collect())
    }
}

/// A key that is the same for both directions.
fn pair(mut ends: [String; 2]) -> [String; 2] {
    ends.sort();
    ends
}

/// DOT: one dashed cluster per location; edges join its leader to its members, leaders to each other, and
/// peers to every leader. `paths` label the edges between leaders.
pub fn dot(mesh: &Mesh, paths: &TunnelPaths) -> String {
    let mut text = String::new();
    write(mesh, paths, &mut text).map_or_else(|_| String::new(), |()| text)
}

fn write(mesh: &Mesh, paths: &TunnelPaths, out: &mut String) -> std::fmt::Result {
    writeln!(out, "digraph kilo {{")?;
    writeln!(out, "\tlabel={};", quote(&mesh.subnet.to_string()))?;
    writeln!(out, "\tlabelloc=t;\n\toutputorder=nodesfirst;\n\toverlap=false;")?;
    let leader = |segment: &Segment| quote(segment.leading().map_or("", Member::name));
    // Each of several active leaders is joined to the nodes that are to use it.
    let used = mesh.gateways_in_use();
    for segment in &mesh.segments {
        for (index, member) in segment.members.iter().enumerate() {
            let gateway = used.get(member.name()).filter(|gateway| **gateway != member.name());
            if index != segment.leader {
                let from = gateway.map_or_else(|| leader(segment), |gateway| quote(gateway));
                writeln!(out, "\t{from} -> {} [ dir=both ];", quote(member.name()))?;
            }
        }
    }
    for (index, segment) in mesh.segments.iter().enumerate() {
        let apart = |other: &Arc<Segment>| segment.lan.is_none() || other.lan != segment.lan;
        let others = mesh.segments.iter().enumerate().skip(index + 1).filter(|(_, other)| apart(other));
        for (other_index, other) in others {
            let path =
                paths.between(acting(mesh, index), acting(mesh, other_index)).map_or_else(String::new, style);
            writeln!(out, "\t{} -> {} [ dir=both{path} ];", leader(segment), leader(other))?;
        }
    }
    for segment in &mesh.segments {
        for peer in &mesh.peers {
            writeln!(out, "\t{} -> {} [ dir=both, style=dashed ];", leader(segment), quote(&peer.name))?;
        }
    }
    for segment in &mesh.segments {
        write_segment(segment, &used, out)?;
    }
    writeln!(out, "\tsubgraph \"cluster_peers\" {{\n\t\tlabel=\"peers\";\n\t\tstyle=\"dashed,rounded\";")?;
    for peer in &mesh.peers {
        let endpoint = peer.endpoint.as_ref().map(ToString::to_string);
        let label = lines([Some(peer.name.clone()), endpoint]);
        writeln!(out, "\t\t{} [ label=\"{label}\", shape=ellipse ];", quote(&peer.name))?;
    }
    writeln!(out, "\t}}\n}}")
}

fn write_segment(segment: &Segment, used: &BTreeMap<&str, &str>, out: &mut String) -> std::fmt::Result {
    writeln!(out, "\tsubgraph {} {{", quote(&format!("cluster_location_{}", segment.location)))?;
    writeln!(out, "\t\tlabel={};\n\t\tstyle=\"dashed,rounded\";", quote(&segment.location))?;
    for (index, member) in segment.members.iter().enumerate() {
        let leads = index == segment.leader;
        let is_gateway = used.get(member.name()) == Some(&member.name());
        let label = lines([
            Some(segment.location.clone()),
            Some(member.name().to_owned()),
            member.node.pod_cidrs.first().map(ToString::to_string),
            member.private_ip().map(|ip| ip.to_string()),
            segment.wireguard_ip.filter(|_| leads).map(|ip| ip.to_string()),
            leads.then(|| segment.endpoint.to_string()),
            member.node.endpoint.as_ref().filter(|_| is_gateway && !leads).map(ToString::to_string),
        ]);
        let rank = if leads || is_gateway { ", rank=1" } else { "" };
        writeln!(out, "\t\t{} [ label=\"{label}\"{rank}, shape=ellipse ];", quote(member.name()))?;
    }
    writeln!(out, "\t}}")
}

/// Name of the node that has the tunnels of a location, by its index: the line is drawn to
/// Kilo's leader all the same.
pub fn acting(mesh: &Mesh, location: usize) -> &str {
    let gateways = mesh.gateways_of(location);
    let acting = gateways.order.get(gateways.acting).copied();
    let member = acting.and_then(|acting| mesh.segments.get(location)?.members.get(acting));
    member.map_or("", Member::name)
}

/// Further attributes of an edge that is not direct.
fn style(path: &PathWithRelay) -> String {
    let dotted = if path.path == TunnelPath::Relayed { ", style=dotted" } else { "" };
    format!(", label={}{dotted}", quote(&path.to_string()))
}

fn quote(text: &str) -> String {
    format!("\"{}\"", escape(text))
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// Lines of a label, with DOT's own line break.
fn lines<const N: usize>(parts: [Option<String>; N]) -> String {
    parts.into_iter().flatten().map(|part| escape(&part)).collect::<Vec<_>>().join("\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    #[test]
    fn ways_that_are_not_direct_stand_beside_their_lines() {
        let node = |(index, name): (usize, &str)| Node {
            name: name.to_owned(),
            location: name.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([index as u8 + 1; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            ..Node::default()
        };
        let nodes: Vec<_> = ["a", "b", "c"].into_iter().enumerate().map(node).collect();
        let subnet = "10.4.0.0/16".parse().unwrap();
        let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, subnet);
        let ends = |ends: [&str; 2]| ends.map(str::to_owned);
        let paths = [
            (ends(["b", "a"]), PathWithRelay { path: TunnelPath::Relayed, relay: Some("z".to_owned()) }),
            (ends(["a", "c"]), PathWithRelay { path: TunnelPath::Punched, relay: None }),
        ];
        let drawn = dot(&mesh, &paths.into_iter().collect());
        for line in [
            "\t\"a\" -> \"b\" [ dir=both, label=\"relayed by z\", style=dotted ];\n",
            "\t\"a\" -> \"c\" [ dir=both, label=\"punched\" ];\n",
            "\t\"b\" -> \"c\" [ dir=both ];\n",
        ] {
            assert!(drawn.contains(line), "{line}{drawn}");
        }
    }
}
