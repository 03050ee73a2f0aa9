//! The mesh as SVG without Graphviz: locations on a circle, each leader in the middle of its nodes, and lines
//! between leaders and to the peers. Several active leaders of a location stand around its middle, each in
//! front of the nodes that use it, with lines to those of other locations.

use std::{
    collections::BTreeMap,
    f64::consts::TAU,
    fmt::{self, Write as _},
};

use kilo_core::topology::{Member, Mesh, Segment, TunnelPaths, acting};

/// Half the width and half the height of a node's ellipse.
const NODE: (f64, f64) = (66.0, 24.0);
/// Space that a node takes on its circle.
const ROOM: f64 = 150.0;
/// Space between locations, and margin of the picture.
const GAP: f64 = 50.0;
/// Maximum number of lines: more would only blacken the picture.
const MOST_LINES: usize = 10_000;
/// Maximum characters in an ellipse; the tooltip has the full text.
const LONGEST: usize = 16;

/// The style sheet, embedded in the picture.
pub const STYLE: &str = "\
text{font:12px sans-serif;text-anchor:middle}\
.small{font-size:10px;fill:#555}\
.location{fill:none;stroke:#999;stroke-dasharray:6 4}\
.node{fill:#eef4fb;stroke:#456}\
.leader{fill:#cfe3c4;stroke:#274;stroke-width:2}\
.gateway{fill:#eef4fb;stroke:#274;stroke-width:2}\
.peer{fill:#fbf1dc;stroke:#964}\
line{stroke:#8899aa}\
.dashed{stroke-dasharray:5 4}\
.punched{stroke:#2a6db0;stroke-width:2}\
.relayed{stroke:#b0602a;stroke-width:2;stroke-dasharray:2 4}";

type Point = (f64, f64);

/// Draws a complete SVG document; tunnels known not to be direct are marked.
pub fn svg(mesh: &Mesh, paths: &TunnelPaths) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write(mesh, paths, &mut text);
    text
}

/// Layout of a location's nodes.
struct LocationLayout {
    centre: Point,
    radius: f64,
    /// Centre of each member, in their order.
    members: Vec<Point>,
    /// The index of the member that each member uses.
    uses: Vec<usize>,
    /// Indices of the leaders through which other locations' nodes reach it.
    gateways: Vec<usize>,
}

fn write(mesh: &Mesh, paths: &TunnelPaths, out: &mut String) -> fmt::Result {
    let used = mesh.gateways_in_use();
    let mut layouts: Vec<LocationLayout> =
        mesh.segments.iter().map(|segment| LocationLayout::of(segment, &used)).collect();
    let radii: Vec<f64> = layouts.iter().map(|layout| layout.radius).collect();
    let (centres, extent) = around(&radii);
    for (layout, centre) in layouts.iter_mut().zip(&centres) {
        layout.move_to(*centre);
    }
    let peers = outside(mesh.peers.len(), extent);
    let things = centres.iter().copied().zip(radii.iter().copied());
    let (left, top, right, bottom) = bounds(things.chain(peers.iter().map(|at| (*at, NODE.0))));
    let (width, height) = (right - left, bottom - top);
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"{left:.0} {top:.0} {width:.0} {height:.0}\" \
         width=\"{width:.0}\" height=\"{height:.0}\">"
    )?;
    let middle = left + width / 2.0;
    writeln!(out, "<style>{STYLE}</style>")?;
    let subnet = escape(&mesh.subnet.to_string());
    writeln!(out, "<text x=\"{middle:.0}\" y=\"{:.0}\">{subnet}</text>", top + 18.0)?;
    let lines = tunnels(&layouts) + layouts.len() * peers.len();
    if lines > MOST_LINES {
        let y = top + 34.0;
        writeln!(
            out,
            "<text class=\"small\" x=\"{middle:.0}\" y=\"{y:.0}\">all leaders are joined to each other and to the peers; \
             {lines} lines are left out</text>"
        )?;
    } else {
        for ((index, from), segment) in layouts.iter().enumerate().zip(&mesh.segments) {
            for (other, to) in layouts.iter().enumerate().skip(index + 1) {
                for ((at, one), (to, other)) in
                    from.ends(mesh, index).flat_map(|from| to.ends(mesh, other).map(move |to| (from, to)))
                {
                    tunnel(out, (at, to), (one, other), paths)?;
                }
            }
            // Peers know only one key per location.
            let leader = from.members.get(segment.leader).copied().unwrap_or(from.centre);
            for to in &peers {
                line(out, leader, *to, " class=\"dashed\"")?;
            }
        }
    }
    for (segment, layout) in mesh.segments.iter().zip(&layouts) {
        location(out, segment, layout)?;
    }
    for (peer, at) in mesh.peers.iter().zip(&peers) {
        let prefixes: Vec<_> = peer.allowed_ips.iter().map(ToString::to_string).collect();
        let endpoint = peer.endpoint.as_ref().map(ToString::to_string).unwrap_or_default();
        let about = format!("peer {}\n{}\n{endpoint}", peer.name, prefixes.join(", "));
        let first = prefixes.first().map_or("", String::as_str);
        ellipse(out, *at, "peer", &peer.name, first, &about)?;
    }
    writeln!(out, "</svg>")
}

/// Number of lines between gateways of different locations.
fn tunnels(layouts: &[LocationLayout]) -> usize {
    let mut before = 0;
    let mut lines = 0;
    for layout in layouts {
        lines += before * layout.gateways.len();
        before += layout.gateways.len();
    }
    lines
}

impl LocationLayout {
    /// Lays out a location around the origin. `used`: in locations with several active leaders, the one that
    /// each node uses.
    fn of(segment: &Segment, used: &BTreeMap<&str, &str>) -> Self {
        let members = segment.members.len();
        let by_name = |name: &str| segment.members.iter().position(|member| member.name() == name);
        let gateway = |name: &str| used.get(name).and_then(|gateway| by_name(gateway));
        let uses: Vec<usize> =
            segment.members.iter().map(|it| gateway(it.name()).unwrap_or(segment.leader)).collect();
        let gateways: Vec<usize> = (0..members).filter(|at| uses[*at] == *at).collect();
        let mut others: Vec<usize> = (0..members).filter(|at| uses[*at] != *at).collect();
        // Groups the nodes of each gateway; shares are equal, so a gateway stands in front of its own.
        others.sort_by_key(|at| uses[*at]);
        let mut points = vec![(0.0, 0.0); members];
        let mut radius = NODE.0 + 20.0;
        let mut distance = 0.0;
        let is_shared = gateways.len() > 1;
        if is_shared {
            distance = ring(gateways.len());
            radius = distance + NODE.0 + 14.0;
            stand(&mut points, &gateways, distance, 0.5);
        }
        if !others.is_empty() {
            let outer = if is_shared { distance + 2.0 * NODE.0 + 14.0 } else { 0.0 };
            distance = ring(others.len()).max(outer);
            radius = distance + NODE.0 + 14.0;
            stand(&mut points, &others, distance, if is_shared { 0.5 } else { 0.0 });
        }
        Self { centre: (0.0, 0.0), radius, members: points, uses, gateways }
    }

    fn move_to(&mut self, centre: Point) {
        self.centre = centre;
        for point in &mut self.members {
            *point = (point.0 + centre.0, point.1 + centre.1);
        }
    }

    /// Ends of the lines to other locations, with the tunnels' gateways: with one leader, the acting leader.
    fn ends<'a>(&'a self, mesh: &'a Mesh, location: usize) -> impl Iterator<Item = (Point, &'a str)> + 'a {
        let is_shared = self.gateways.len() > 1;
        self.gateways.iter().map(move |at| {
            let name = match is_shared {
                true => mesh.segments[location].members.get(*at).map_or("", Member::name),
                false => acting(mesh, location),
            };
            (self.members[*at], name)
        })
    }
}

/// Puts the points `which` on a circle, the first one `first` steps after the top.
fn stand(points: &mut [Point], which: &[usize], distance: f64, first: f64) {
    for (place, index) in which.iter().enumerate() {
        points[*index] = at(distance, (place as f64 + first) / which.len() as f64);
    }
}

/// Radius of a circle for this many nodes.
fn ring(nodes: usize) -> f64 {
    (nodes as f64 * ROOM / TAU).max(NODE.0 + 40.0)
}

/// Centres of circles with these radii, side by side around the origin, and the extent of the whole.
fn around(radii: &[f64]) -> (Vec<Point>, f64) {
    let largest = radii.iter().copied().fold(0.0, f64::max);
    if radii.len() < 2 {
        return (vec![(0.0, 0.0); radii.len()], largest);
    }
    let round: f64 = radii.iter().map(|radius| 2.0 * radius + GAP).sum();
    // The chord is shorter than the arc: few circles need more room.
    let distance = (round / TAU * 1.15).max(largest + GAP);
    let mut arc = 0.0;
    let centres = radii.iter().map(|radius| {
        let middle = arc + radius + GAP / 2.0;
        arc += 2.0 * radius + GAP;
        at(distance, middle / round)
    });
    (centres.collect(), distance + largest)
}

/// Positions for this many peers outside of `extent`.
fn outside(peers: usize, extent: f64) -> Vec<Point> {
    let distance = (extent + GAP + NODE.0).max(peers as f64 * ROOM / TAU);
    // Half a step aside, so that few peers do not hide behind the first location.
    (0..peers).map(|peer| at(distance, (peer as f64 + 0.5) / peers as f64)).collect()
}

/// Left, top, right and bottom of the circles, with space for titles and a margin.
fn bounds(circles: impl Iterator<Item = (Point, f64)>) -> (f64, f64, f64, f64) {
    let mut found = (-NODE.0, -NODE.1, NODE.0, NODE.1);
    for ((x, y), radius) in circles {
        found.0 = found.0.min(x - radius);
        found.1 = found.1.min(y - radius);
        found.2 = found.2.max(x + radius);
        found.3 = found.3.max(y + radius);
    }
    (found.0 - GAP / 2.0, found.1 - GAP - 16.0, found.2 + GAP / 2.0, found.3 + GAP / 2.0)
}

/// The point at a fraction of a turn (0 = top, clockwise) on a circle.
fn at(distance: f64, turn: f64) -> Point {
    let angle = TAU * turn;
    (distance * angle.sin(), -distance * angle.cos())
}

fn location(out: &mut String, segment: &Segment, layout: &LocationLayout) -> fmt::Result {
    let ((x, y), radius) = (layout.centre, layout.radius);
    writeln!(out, "<circle class=\"location\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\"/>")?;
    let top = y - radius - 6.0;
    writeln!(out, "<text x=\"{x:.1}\" y=\"{top:.1}\">{}</text>", escape(&segment.location))?;
    for (index, gateway) in layout.uses.iter().enumerate().filter(|(index, gateway)| index != *gateway) {
        line(out, layout.members[*gateway], layout.members[index], "")?;
    }
    let is_shared = layout.gateways.len() > 1;
    for (index, member) in segment.members.iter().enumerate() {
        let leads = index == segment.leader;
        let is_gateway = is_shared && layout.uses[index] == index;
        let cidrs: Vec<_> = member.node.pod_cidrs.iter().map(ToString::to_string).collect();
        let address = member.private_ip().map(|ip| ip.to_string()).unwrap_or_default();
        let mut about = format!("{}\npods {}\nprivate address {address}", member.name(), cidrs.join(", "));
        if leads {
            let wireguard = segment.wireguard_ip.map(|ip| ip.to_string()).unwrap_or_default();
            about +=
                &format!("\nleads: {}\nWireGuard {wireguard} at {}", segment.leader_reason, segment.endpoint);
        }
        if is_gateway {
            let nodes = layout.uses.iter().filter(|gateway| **gateway == index).count();
            about += &format!("\ngateway of {nodes} nodes, itself among them");
        } else if is_shared {
            about += &format!("\nuses gateway {}", segment.members[layout.uses[index]].name());
        }
        let class = if leads {
            "leader"
        } else if is_gateway {
            "gateway"
        } else {
            "node"
        };
        let first = cidrs.first().map_or("", String::as_str);
        ellipse(out, layout.members[index], class, member.name(), first, &about)?;
    }
    Ok(())
}

/// Draws the line between two gateways, labelled with their tunnel's path if that is known not to be direct.
fn tunnel(
    out: &mut String,
    (from, to): (Point, Point),
    (one, other): (&str, &str),
    paths: &TunnelPaths,
) -> fmt::Result {
    let Some(path) = paths.between(one, other) else { return line(out, from, to, "") };
    let class = path.path;
    let about = escape(&format!("{one} and {other}: {path}"));
    write!(out, "<g><title>{about}</title>")?;
    line(out, from, to, &format!(" class=\"{class}\""))?;
    let (x, y) = (f64::midpoint(from.0, to.0), f64::midpoint(from.1, to.1) - 4.0);
    writeln!(out, "<text class=\"small\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text></g>", escape(&path.to_string()))
}

fn line(out: &mut String, from: Point, to: Point, more: &str) -> fmt::Result {
    let ((x1, y1), (x2, y2)) = (from, to);
    writeln!(out, "<line{more} x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>")
}

fn ellipse(out: &mut String, at: Point, class: &str, name: &str, below: &str, about: &str) -> fmt::Result {
    let ((x, y), (rx, ry)) = (at, NODE);
    writeln!(
        out,
        "<g><title>{}</title><ellipse class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" rx=\"{rx}\" ry=\"{ry}\"/>\
         <text x=\"{x:.1}\" y=\"{:.1}\">{}</text><text class=\"small\" x=\"{x:.1}\" y=\"{:.1}\">{}</text></g>",
        escape(about),
        y - 2.0,
        escape(&short(name)),
        y + 12.0,
        escape(&short(below)),
    )
}

fn short(text: &str) -> String {
    if text.chars().count() <= LONGEST + 2 {
        return text.to_owned();
    }
    text.chars().take(LONGEST).chain(['…']).collect()
}

/// Escapes text for XML; characters that XML cannot hold are replaced.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push('\n'),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            other if other.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use kilo_core::{
        settings::Granularity,
        topology::{Node, Peer},
        tunnel_path::{PathWithRelay, TunnelPath},
        wireguard::key::PublicKey,
    };

    fn mesh(locations: usize, nodes: usize, peers: usize) -> Mesh {
        let node = |index: usize| Node {
            name: format!("n{index}<&>"),
            location: format!("l{}", index % locations.max(1)),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        let nodes: Vec<_> = (0..nodes).map(node).collect();
        let peer = |index: usize| Peer {
            name: format!("p{index}"),
            allowed_ips: Vec::new(),
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([2; 32]),
            follows: false,
        };
        let peers: BTreeMap<_, _> = (0..peers).map(|index| (format!("p{index}"), peer(index))).collect();
        Mesh::new(&nodes, &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    #[test]
    fn every_node_and_peer_is_drawn_and_names_cannot_break_out() {
        for (locations, nodes, peers) in [(0, 0, 0), (1, 1, 0), (1, 5, 1), (3, 7, 2), (40, 200, 30)] {
            let text = svg(&mesh(locations, nodes, peers), &TunnelPaths::default());
            assert_eq!(text.matches("<ellipse").count(), nodes + peers);
            assert_eq!(text.matches("class=\"location\"").count(), locations);
            assert_eq!(text.matches("class=\"leader\"").count(), locations);
            assert!(!text.contains("<&>") && !text.contains("NaN") && !text.contains("inf"), "{text}");
            assert_eq!(text.matches("<g>").count(), text.matches("</g>").count());
        }
    }

    /// Two locations with this many nodes and active leaders each.
    fn shared(nodes: usize, leaders: usize) -> Mesh {
        let node = |index: usize| Node {
            name: format!("n{index:02}"),
            location: format!("l{}", index % 2),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([index as u8 + 1; 32])),
            internal_ip: format!("10.0.0.{}/24", index + 1).parse().ok(),
            signal: true,
            leaders: Some(leaders),
            ..Node::default()
        };
        let nodes: Vec<_> = (0..2 * nodes).map(node).collect();
        Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    #[test]
    fn active_leaders_are_drawn_each_with_its_nodes_and_joined_to_all_others() {
        for (nodes, leaders) in [(2, 2), (5, 2), (9, 3), (12, 5)] {
            let mesh = shared(nodes, leaders);
            let text = svg(&mesh, &TunnelPaths::default());
            assert_eq!(text.matches("class=\"leader\"").count(), 2, "{text}");
            assert_eq!(text.matches("class=\"gateway\"").count(), 2 * (leaders - 1), "{text}");
            assert_eq!(text.matches("uses gateway").count(), 2 * (nodes - leaders), "{text}");
            // One for each node that uses another one, and one for each pair of gateways.
            assert_eq!(text.matches("<line").count(), 2 * (nodes - leaders) + leaders * leaders, "{text}");
            let used = mesh.gateways_in_use();
            for segment in &mesh.segments {
                let layout = LocationLayout::of(segment, &used);
                for (index, (x, y)) in layout.members.iter().enumerate() {
                    let gateway = segment.members[layout.uses[index]].name();
                    assert_eq!(used[segment.members[index].name()], gateway);
                    assert!(x.hypot(*y) + NODE.0 < layout.radius, "node {index} of {nodes}");
                    for (other, (ox, oy)) in layout.members.iter().enumerate().skip(index + 1) {
                        let is_apart = (x - ox).abs() > 2.0 * NODE.0 || (y - oy).abs() > 2.0 * NODE.1;
                        assert!(is_apart, "{nodes} nodes, {leaders} leaders: {index} and {other}");
                    }
                }
            }
        }
    }

    #[test]
    fn tunnels_that_are_not_direct_are_marked_and_named() {
        let mesh = mesh(3, 3, 0);
        let path = |ends: [&str; 2], path, relay: Option<&str>| {
            (ends.map(str::to_owned), PathWithRelay { path, relay: relay.map(str::to_owned) })
        };
        let paths = [
            path(["n1<&>", "n0<&>"], TunnelPath::Relayed, Some("<z>")),
            path(["n1<&>", "n2<&>"], TunnelPath::Punched, None),
        ];
        let text = svg(&mesh, &paths.into_iter().collect());
        assert_eq!(text.matches("<line x1").count(), 1, "{text}");
        assert_eq!(text.matches("<line class=\"relayed\"").count(), 1, "{text}");
        assert_eq!(text.matches("<line class=\"punched\"").count(), 1, "{text}");
        let relayed = "<title>n0&lt;&amp;&gt; and n1&lt;&amp;&gt;: relayed by &lt;z&gt;</title>";
        assert!(text.contains(relayed) && text.contains(">punched</text></g>"), "{text}");
        assert!(!svg(&mesh, &TunnelPaths::default()).contains("class=\"relayed\""));
    }

    #[test]
    fn locations_and_nodes_do_not_overlap() {
        for radii in [vec![86.0, 86.0], vec![86.0, 400.0, 90.0], vec![100.0; 50]] {
            let (centres, _) = around(&radii);
            for (index, (x, y)) in centres.iter().enumerate() {
                for other in index + 1..centres.len() {
                    let distance = (x - centres[other].0).hypot(y - centres[other].1);
                    assert!(distance > radii[index] + radii[other], "{radii:?}: {index} and {other}");
                }
            }
        }
    }

    #[test]
    fn a_mesh_of_a_thousand_locations_stays_small() {
        let text = svg(&mesh(1000, 1000, 10), &TunnelPaths::default());
        assert!(text.len() < 2_000_000 && text.contains("lines are left out"), "{}", text.len());
    }
}
