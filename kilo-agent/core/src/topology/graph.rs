//! The mesh as Graphviz text, with the look Kilo's users know.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use super::{Member, Mesh, Segment};

/// DOT: one dashed cluster a location, its leader joined to its members, the
/// leaders to each other, peers to every leader.
pub fn dot(mesh: &Mesh) -> String {
    let mut text = String::new();
    write(mesh, &mut text).map_or_else(|_| String::new(), |()| text)
}

fn write(mesh: &Mesh, out: &mut String) -> std::fmt::Result {
    writeln!(out, "digraph kilo {{")?;
    writeln!(out, "\tlabel={};", quote(&mesh.subnet.to_string()))?;
    writeln!(out, "\tlabelloc=t;\n\toutputorder=nodesfirst;\n\toverlap=false;")?;
    let leader = |segment: &Segment| quote(segment.leading().map_or("", Member::name));
    // Of several active leaders each stands before the nodes that are to use it.
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
        let apart = |other: &&Arc<Segment>| segment.group.is_none() || other.group != segment.group;
        for other in mesh.segments[index + 1..].iter().filter(apart) {
            writeln!(out, "\t{} -> {} [ dir=both ];", leader(segment), leader(other))?;
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
