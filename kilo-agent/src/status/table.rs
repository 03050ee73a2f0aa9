//! Formats the status as tables for people, in the style of kubectl.

use std::collections::{BTreeMap, BTreeSet};

use super::{AgentStatus, FailoverStatus, LocationStatus, NodeStatus, PeerStatus, Status, Tunnel};
use crate::timestamp::Timestamp;
use kilo_core::{observed::Attached, tunnel_path::TunnelPath};

/// Tables of locations, nodes and peers, then of what the agent knows. `wide`: with endpoints and keys of
/// nodes.
pub fn table(status: &Status, wide: bool) -> String {
    let mut parts = Vec::new();
    let now = status.time;
    parts.push(columns(
        &["LOCATION", "LEADER", "SINCE", "WHY", "ENDPOINT", "WIREGUARD-IP", "READY"],
        status.locations.iter().map(|location| location_row(location, now)),
    ));
    let warned = status.locations.iter();
    let warned = warned.filter_map(|location| Some(vec![location.name.clone(), location.warning.clone()?]));
    parts.push(columns(&["LOCATION", "WARNING"], warned));
    let acting: BTreeSet<_> = status.locations.iter().filter_map(|it| it.acting.as_deref()).collect();
    let node_row = |node: &NodeStatus| node_row(node, acting.contains(node.name.as_str()), now);
    let nodes = status.nodes.iter();
    parts.push(if wide {
        columns(
            &[
                "NODE",
                "LOCATION",
                "ROLE",
                "READY",
                "PRIVATE-IP",
                "POD-CIDRS",
                "LAST-SEEN",
                "ENDPOINT",
                "KEY",
                "REASON",
            ],
            nodes.map(|node| {
                let mut row = node_row(node);
                let endpoint = node.endpoint.clone().unwrap_or_else(none);
                let key = node.key.map_or_else(none, |key| key.to_string());
                row.splice(7..7, [endpoint, key]);
                row
            }),
        )
    } else {
        columns(
            &["NODE", "LOCATION", "ROLE", "READY", "PRIVATE-IP", "POD-CIDRS", "LAST-SEEN", "REASON"],
            nodes.map(node_row),
        )
    });
    let direct = std::iter::repeat_n(TunnelPath::Direct, status.direct_tunnels);
    if let Some(paths) = counted_paths(direct.chain(status.indirect_tunnels.iter().map(|tunnel| tunnel.path)))
    {
        parts.push(format!("tunnels between locations: {paths}\n"));
    }
    let others = status.indirect_tunnels.iter().map(|tunnel| {
        let [one, other] = &tunnel.nodes;
        vec![one.clone(), other.clone(), tunnel.connection().to_string()]
    });
    parts.push(columns(&["LEADER", "LEADER", "PATH"], others));
    parts.push(columns(
        &["PEER", "VALID", "ALLOWED-IPS", "ENDPOINT", "REASON"],
        status.peers.iter().map(peer_row),
    ));
    parts.push(columns(
        &["IGNORED", "REASON"],
        status.problems.iter().map(|(object, problem)| vec![object.clone(), problem.clone()]),
    ));
    parts.push(columns(
        &["CLAIMED", "CLAIMED-BY"],
        status.conflicts.iter().map(|it| vec![it.object.clone(), it.nodes.join(", ")]),
    ));
    let degraded = status.degraded.iter();
    let degraded =
        degraded.flat_map(|(node, all)| all.iter().map(move |what| vec![node.clone(), what.clone()]));
    parts.push(columns(&["NODE", "DEGRADED"], degraded));
    if let Some(agent) = &status.agent {
        parts.push(agent_tables(agent, now));
    }
    parts.retain(|part| !part.is_empty());
    if parts.is_empty() { "No nodes found.\n".to_owned() } else { parts.join("\n") }
}

fn agent_tables(agent: &AgentStatus, now: Timestamp) -> String {
    let health = if agent.degraded.is_empty() { "healthy" } else { "degraded" };
    let health = agent.unhealthy.as_deref().unwrap_or(health);
    let mut text = format!("Agent of {} (kg {}): {health}\n", agent.node, agent.version);
    if let Some(source) = &agent.nodes_from {
        text += &format!("other nodes from: {source}\n");
    }
    for warning in agent.degraded.iter().chain(&agent.warnings) {
        text += &format!("warning: {warning}\n");
    }
    if let Some(relay) = &agent.relay {
        text += &format!("relay: {relay}\n");
    }
    if agent.relays > 0 {
        let pairs = if agent.relays == 1 { "pair" } else { "pairs" };
        text += &format!("relays for {} {pairs} of other locations\n", agent.relays);
    }
    for error in &agent.errors {
        text += &format!("error: {error}\n");
    }
    if let Some(paths) = counted_paths(agent.tunnels.iter().filter_map(|tunnel| tunnel.path)) {
        text += &format!("tunnels with other locations: {paths}\n");
    }
    let age = |time: Option<Timestamp>| time.map_or_else(|| "never".to_owned(), |time| ago(now, time));
    // The column is omitted when all tunnels are direct.
    let paths = agent.tunnels.iter().any(|tunnel| tunnel.path.is_some_and(|path| path != TunnelPath::Direct));
    let tunnels = agent.tunnels.iter().map(|tunnel| {
        let mut row = vec![
            tunnel.name.clone().unwrap_or_else(|| tunnel.key.to_string()),
            tunnel.endpoint.map_or_else(none, |endpoint| endpoint.to_string()),
            age(tunnel.last_handshake),
            bytes(tunnel.received_bytes),
            bytes(tunnel.sent_bytes),
        ];
        if paths {
            row.insert(2, path(tunnel));
        }
        row
    });
    let mut names = vec!["TUNNEL", "ENDPOINT", "HANDSHAKE", "RECEIVED", "SENT"];
    if paths {
        names.insert(2, "PATH");
    }
    let tunnels = columns(&names, tunnels);
    let programs = columns(&["PROGRAM", "INTERFACE", "DIRECTION", "HOOK"], program_rows(&agent.programs));
    let counted = |name: &'static str, counters: &BTreeMap<String, u64>| {
        let some = counters.iter().filter(|(_, count)| **count > 0);
        columns(&[name, "PACKETS"], some.map(|(label, count)| vec![label.clone(), count.to_string()]))
    };
    let failover = agent.failover.iter().map(|failover| failover_row(failover, now));
    let failover = columns(&["FAILOVER", "LEADER", "TERM", "SINCE", "STAND-BYS", "LAST-CHANGE"], failover);
    for part in
        [failover, tunnels, programs, counted("ACTION", &agent.packets), counted("DROPPED", &agent.drops)]
    {
        if !part.is_empty() {
            text += "\n";
            text += &part;
        }
    }
    text
}

/// Most interfaces of one program that get a row each: a node may have a hundred pods.
const MOST_ROWS: usize = 8;

/// A row for each interface, or one for all of them where a program has many.
fn program_rows(programs: &[Attached]) -> impl Iterator<Item = Vec<String>> {
    let hook = |at: &Attached| (at.program.clone(), at.direction.clone(), at.hook.clone());
    let mut counts = BTreeMap::new();
    for at in programs {
        *counts.entry(hook(at)).or_insert(0) += 1;
    }
    programs.iter().filter_map(move |at| {
        let count = counts.get_mut(&hook(at))?;
        let interface = match *count {
            0 => return None,
            many if many > MOST_ROWS => {
                *count = 0;
                format!("{many} interfaces")
            }
            _ => at.interface.clone(),
        };
        Some(vec![at.program.clone(), interface, at.direction.clone(), at.hook.to_uppercase()])
    })
}

/// Number of working tunnels by path; `None` when there are none.
fn counted_paths(paths: impl Iterator<Item = TunnelPath>) -> Option<String> {
    let mut counts = BTreeMap::<TunnelPath, usize>::new();
    for path in paths {
        *counts.entry(path).or_default() += 1;
    }
    let texts: Vec<_> = counts.iter().map(|(path, count)| format!("{count} {path}")).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

fn path(tunnel: &Tunnel) -> String {
    tunnel.connection().map_or_else(none, |path| path.to_string())
}

fn failover_row(failover: &FailoverStatus, now: Timestamp) -> Vec<String> {
    let leader = match () {
        () if failover.leader == failover.kilos_leader => failover.leader.clone(),
        () => format!("{} (Kilo: {})", failover.leader, failover.kilos_leader),
    };
    let stand_by = |stand_by: &super::StandByStatus| {
        let fit = match stand_by.fit {
            Some(true) => " fit",
            Some(false) => " not fit",
            None => "",
        };
        let round_trip = stand_by.round_trip.map(|millis| format!(" {millis}ms")).unwrap_or_default();
        format!("{}{fit}{round_trip}", stand_by.node)
    };
    let stand_bys: Vec<_> = failover.stand_bys.iter().map(stand_by).collect();
    vec![
        failover.role.clone(),
        leader,
        failover.term.to_string(),
        failover.since.map_or_else(unknown, |since| ago(now, since)),
        if stand_bys.is_empty() { none() } else { stand_bys.join(", ") },
        failover.last_change.clone().unwrap_or_else(none),
    ]
}

fn location_row(location: &LocationStatus, now: Timestamp) -> Vec<String> {
    let since = location.since.map_or_else(unknown, |since| {
        // The leader may have begun before the agent's start.
        let at_least = if location.changes == Some(0) { ">" } else { "" };
        format!("{at_least}{}", ago(now, since))
    });
    vec![
        location.name.clone(),
        match (&location.leader, &location.acting) {
            (Some(leader), Some(acting)) => format!("{acting} (Kilo: {leader})"),
            (leader, _) => leader.clone().unwrap_or_else(none),
        },
        since,
        location.reason.map_or_else(|| "no node is ready".to_owned(), |reason| reason.to_string()),
        location.endpoint.clone().unwrap_or_else(none),
        location.wireguard_ip.map_or_else(none, |ip| ip.to_string()),
        format!("{}/{}", location.ready, location.nodes),
    ]
}

fn node_row(node: &NodeStatus, acts: bool, now: Timestamp) -> Vec<String> {
    vec![
        node.name.clone(),
        node.location.clone(),
        match &node.gateway {
            _ if acts => "acting leader".to_owned(),
            _ if node.leads => "leader".to_owned(),
            Some(gateway) if *gateway == node.name => "gateway".to_owned(),
            Some(gateway) => format!("by {gateway}"),
            None => none(),
        },
        if node.ready { "True" } else { "False" }.to_owned(),
        node.internal_ip.map_or_else(none, |ip| ip.to_string()),
        list(&node.pod_cidrs),
        node.last_seen.map_or_else(|| "never".to_owned(), |seen| ago(now, seen)),
        node.not_ready.join(", "),
    ]
}

fn peer_row(peer: &PeerStatus) -> Vec<String> {
    vec![
        peer.name.clone(),
        if peer.valid { "True" } else { "False" }.to_owned(),
        list(&peer.allowed_ips),
        peer.endpoint.clone().unwrap_or_else(none),
        peer.reason.clone().unwrap_or_default(),
    ]
}

fn list(prefixes: &[ipnet::IpNet]) -> String {
    let texts: Vec<_> = prefixes.iter().map(ToString::to_string).collect();
    if texts.is_empty() { none() } else { texts.join(",") }
}

fn none() -> String {
    "<none>".to_owned()
}

fn unknown() -> String {
    "<unknown>".to_owned()
}

/// An age with at most two units, as kubectl writes it.
pub fn ago(now: Timestamp, then: Timestamp) -> String {
    let text = now.since(then).to_string();
    text.split(' ').take(2).collect()
}

/// A number of bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

/// Formats columns under their headings, as wide as needed, three spaces apart; empty without rows.
pub fn columns(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    // Cells are untrusted text: they must not contain line breaks or terminal escapes.
    let shown = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let rows = rows.map(|row| row.iter().map(|cell| cell.chars().map(shown).collect()).collect());
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.len()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded: Vec<_> =
            cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        padded.join("   ").trim_end().to_owned() + "\n"
    };
    let mut text = line(head.to_vec());
    for row in &rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

#[cfg(test)]
mod tests {
    use kilo_core::{
        objects::Snapshot,
        settings::Granularity,
        topology::{CheckedIn, Mesh, Node},
        wireguard::key::PublicKey,
    };

    use super::*;
    use crate::status::{IndirectTunnel, of_objects};

    #[test]
    fn a_program_on_many_interfaces_has_one_row() {
        let on = |program: &str, count| {
            let at = move |number| Attached {
                program: program.to_owned(),
                interface: format!("veth{number}"),
                direction: "ingress".to_owned(),
                hook: "tcx".to_owned(),
            };
            (0..count).map(at).collect::<Vec<_>>()
        };
        let programs = [on("lan_ingress", 2), on("pod_ingress", 9)].concat();
        let rows: Vec<_> = program_rows(&programs).map(|row| row.join(" ")).collect();
        let wanted = [
            "lan_ingress veth0 ingress TCX",
            "lan_ingress veth1 ingress TCX",
            "pod_ingress 9 interfaces ingress TCX",
        ];
        assert_eq!(rows, wanted);
    }

    #[test]
    fn ways_are_counted_where_any_tunnel_is_known_to_work() {
        let tunnel = |path: Option<TunnelPath>| Tunnel {
            name: None,
            key: PublicKey([1; 32]),
            endpoint: None,
            last_handshake: None,
            received_bytes: 0,
            sent_bytes: 0,
            path,
            relay: None,
        };
        let counted = |tunnels: &[Tunnel]| counted_paths(tunnels.iter().filter_map(|tunnel| tunnel.path));
        assert_eq!(counted(&[tunnel(None)]), None);
        let tunnels =
            [TunnelPath::Relayed, TunnelPath::Direct, TunnelPath::Direct].map(|path| tunnel(Some(path)));
        assert_eq!(counted(&tunnels).as_deref(), Some("2 direct, 1 relayed"));
    }

    #[test]
    fn ways_between_leaders_have_names_that_are_known_and_are_counted_once() {
        use TunnelPath::{Direct, Punched, Relayed};
        let node = |n: u8| CheckedIn {
            node: Node { name: format!("n{n}"), key: Some(PublicKey([n; 32])), ..Node::default() },
            last_seen: 1_000,
        };
        let snapshot = Snapshot { nodes: [1, 2, 3].map(node).into_iter().collect(), ..Snapshot::default() };
        let mesh = Mesh::default();
        let mut status =
            of_objects(&mesh, &snapshot, &BTreeSet::new(), Granularity::Location, Timestamp(1_000));
        let tunnel = |n: u8, path: TunnelPath, relay: Option<&str>| Tunnel {
            name: None,
            key: PublicKey([n; 32]),
            endpoint: None,
            last_handshake: None,
            received_bytes: 0,
            sent_bytes: 0,
            path: Some(path),
            relay: relay.map(str::to_owned),
        };
        let reports = |asked: &str, tunnels: Vec<Tunnel>| {
            let agent = Some(AgentStatus { node: "n3".to_owned(), tunnels, ..AgentStatus::default() });
            (asked.to_owned(), Status { agent, ..Status::default() })
        };
        let all = vec![tunnel(2, Relayed, Some("n3")), tunnel(3, Direct, None), tunnel(9, Punched, None)];
        let lies =
            vec![Tunnel { path: None, ..tunnel(3, Direct, None) }, tunnel(1, Direct, Some("\u{1b}[2J"))];
        let mut seen = vec![reports("n1", all), reports("n2", lies)];
        let mut paths = |seen: &[(String, Status)]| {
            status.remember_paths(seen);
            let text = |it: &IndirectTunnel| format!("{} {}", it.nodes.join(" "), it.connection());
            (status.direct_tunnels, status.indirect_tunnels.iter().map(text).collect::<Vec<_>>())
        };
        assert_eq!(
            paths(&seen),
            (1, vec!["n1 n2 relayed by n3".to_owned()]),
            "the name it gives itself does not count"
        );
        seen.push(reports("n3", vec![tunnel(1, Punched, None), tunnel(2, Relayed, Some("\u{1b}[2J"))]));
        let all = ["n1 n2 relayed by n3", "n1 n3 punched", "n2 n3 relayed"].map(str::to_owned).to_vec();
        assert_eq!(paths(&seen), (0, all));
        let text = table(&status, false);
        assert!(text.contains("tunnels between locations: 1 punched, 2 relayed\n"), "{text}");
        assert!(text.contains("n1       n2       relayed by n3"), "{text}");
    }

    #[test]
    fn a_path_that_an_agent_invents_is_unknown_and_spoils_nothing() {
        let tunnel = |path: &str| {
            let json = serde_json::json!({
                "name": null, "key": PublicKey([1; 32]), "endpoint": null, "lastHandshake": null,
                "receivedBytes": 0, "sentBytes": 0, "path": path,
            });
            serde_json::from_value::<Tunnel>(json).unwrap()
        };
        for path in TunnelPath::ALL {
            let known = tunnel(path.label());
            assert_eq!(known.path, Some(*path));
            assert_eq!(serde_json::to_value(known).unwrap()["path"], path.label());
        }
        assert_eq!(tunnel("\u{1b}[2J").path, None);
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(ago(Timestamp(90_061), Timestamp(0)), "1day1h");
        assert_eq!(ago(Timestamp(0), Timestamp(100)), "0s", "a clock that is ahead");
    }

    #[test]
    fn who_acts_for_kilos_leader_and_what_is_asked_for_in_vain_is_shown() {
        let node = |n: u8| CheckedIn {
            node: Node {
                name: format!("a{n}"),
                location: "a".to_owned(),
                endpoint: "192.0.2.1:51820".parse().ok(),
                key: Some(PublicKey([n; 32])),
                internal_ip: format!("10.0.0.{n}/24").parse().ok(),
                signal: true,
                leading: (n == 2).then_some(65_536),
                gateway: n == 3,
                ..Node::default()
            },
            last_seen: 1_000,
        };
        let snapshot = Snapshot { nodes: [1, 2, 3].map(node).into_iter().collect(), ..Snapshot::default() };
        let nodes = snapshot.nodes.iter().map(|known| &**known.node);
        let mesh = Mesh::new(
            nodes,
            &snapshot.peers,
            Granularity::Location,
            "10.4.0.0/16".parse().unwrap_or_default(),
        );
        let ready = ["a1", "a2", "a3"].into();
        let status = of_objects(&mesh, &snapshot, &ready, Granularity::Location, Timestamp(1_000));
        let text = table(&status, false);
        for role in [
            "a1     location:a   leader ",
            "a2     location:a   acting leader ",
            "a3     location:a   <none> ",
        ] {
            assert!(text.contains(&format!("\n{role}")), "{text}");
        }
        assert!(
            text.contains("location:a   several active leaders are configured, but node a1 does not"),
            "{text}"
        );
    }

    #[test]
    fn columns_align_and_an_empty_table_has_no_head() {
        let rows = [vec!["a".to_owned(), "long cell".to_owned()], vec!["longer".to_owned(), String::new()]];
        assert_eq!(columns(&["X", "Y"], rows.into_iter()), "X        Y\na        long cell\nlonger\n");
        assert_eq!(columns(&["X"], std::iter::empty()), "");
        let hostile = [vec!["a\nHealthy\x1b[2J".to_owned()]];
        assert_eq!(columns(&["X"], hostile.into_iter()), "X\na\u{fffd}Healthy\u{fffd}[2J\n");
    }
}
