//! The Grafana dashboard: panels for the metrics of kg.

use anyhow::Result;
use serde_json::{Value, json};

/// One panel: its title, description, unit, and queries with their legends.
struct Panel {
    kind: &'static str,
    /// Width out of the dashboard's 24 columns.
    width: u32,
    title: &'static str,
    about: &'static str,
    unit: &'static str,
    queries: &'static [(&'static str, &'static str)],
}

/// A row of the dashboard.
struct Row {
    title: &'static str,
    height: u32,
    panels: &'static [Panel],
}

const fn number(
    width: u32,
    title: &'static str,
    about: &'static str,
    unit: &'static str,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { kind: "stat", width, title, about, unit, queries }
}

const fn graph(
    width: u32,
    title: &'static str,
    about: &'static str,
    unit: &'static str,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { kind: "timeseries", width, title, about, unit, queries }
}

/// What the queries below write in the place of matchers, and the matchers: the dashboard's variables.
const MATCHERS: [(&str, &str); 2] = [
    ("<mesh>", r#"cluster=~"$cluster",job=~"$job""#),
    ("<agents>", r#"cluster=~"$cluster",job=~"$job",instance=~"$instance""#),
];

static ROWS: [Row; 7] = [MESH, HEALTH, TUNNELS, FAILOVER, DATA_PATH, WIREGUARD, AGENTS];

const MESH: Row = Row {
    title: "Mesh",
    height: 4,
    panels: &[
        number(
            4,
            "Agents up",
            "Agents that Prometheus reaches; replicas of the webhook, which have the same job, are not counted.",
            "short",
            &[
                (r#"sum(up{<mesh>,container=~"kilo|"})"#, "up"),
                (r#"count(up{<mesh>,container=~"kilo|"})"#, "expected"),
            ],
        ),
        number(
            4,
            "Leaders",
            "Nodes that say they lead; one for each location.",
            "short",
            &[("sum(kilo_leader{<mesh>})", "leaders")],
        ),
        number(
            4,
            "Nodes in the mesh",
            "As the agents see it; smallest and largest differ while a change spreads.",
            "short",
            &[
                ("min by (cluster) (kilo_nodes{<mesh>})", "{{cluster}} min"),
                ("max by (cluster) (kilo_nodes{<mesh>})", "{{cluster}} max"),
            ],
        ),
        number(
            4,
            "VPN peers",
            "Peer objects in the mesh.",
            "short",
            &[("sum(max by (cluster) (kilo_peers{<mesh>}))", "peers")],
        ),
        number(
            4,
            "Oldest handshake",
            "Of the tunnels to other locations, without VPN peers. WireGuard renews handshakes every 2 minutes where \
             there is traffic.",
            "s",
            &[(r#"max(time() - kilo_wireguard_last_handshake_seconds{<agents>,peer=""})"#, "age")],
        ),
        number(
            4,
            "Dropped packets",
            "By the data path, in the last 5 minutes, without the harmless reason not_unicast. docs/drop-reasons.md says \
             what each reason asks for.",
            "short",
            &[(
                r#"sum(increase(kilo_dropped_packets_total{<agents>,reason!="not_unicast"}[5m]))"#,
                "dropped",
            )],
        ),
    ],
};

/// What alerts ask about and a number answers: 0 is good.
const HEALTH: Row = Row {
    title: "Health",
    height: 4,
    panels: &[
        number(
            3,
            "Silent tunnels",
            "Tunnels into which leaders send and whose other end does not answer (alert KiloTunnelSilent).",
            "short",
            &[("sum(kilo_silent_tunnels{<agents>})", "silent")],
        ),
        number(
            3,
            "Locations without leader",
            "Locations that nothing can reach (alert KiloLocationWithoutLeader).",
            "short",
            &[("sum(max by (cluster) (kilo_locations_without_leader{<mesh>}))", "locations")],
        ),
        number(
            3,
            "Nodes left out",
            "Nodes with a key that are not in the mesh; kgctl status says why (alert KiloNodesLeftOut).",
            "short",
            &[("sum(max by (cluster) (kilo_nodes_left_out{<mesh>}))", "nodes")],
        ),
        number(
            3,
            "Stale views",
            "Agents whose own heartbeat has not come back from the API server for two intervals and a minute (alert \
             KiloViewStale).",
            "short",
            &[(
                "count(time() - kilo_last_check_in_seconds{<agents>} > 60 + 2 * kilo_heartbeat_interval_seconds{<agents>}) \
                 or vector(0)",
                "agents",
            )],
        ),
        number(
            3,
            "Fullest map",
            "The BPF map that has least room left (alert KiloMapNearlyFull at 90 %).",
            "percentunit",
            &[("max(kilo_map_entries{<agents>} / kilo_map_capacity{<agents>})", "used")],
        ),
        number(
            3,
            "Conflicts",
            "Private addresses, WireGuard keys and prefixes that a node claims although another one, or the mesh, has them \
             (alerts KiloAddressConflict, KiloKeyConflict and KiloPrefixConflict).",
            "short",
            &[
                ("sum(max by (cluster) (kilo_address_conflicts{<mesh>}))", "addresses"),
                ("sum(max by (cluster) (kilo_key_conflicts{<mesh>}))", "keys"),
                ("sum(max by (cluster) (kilo_prefix_conflicts{<mesh>}))", "prefixes"),
            ],
        ),
        number(
            3,
            "Unfit stand-bys",
            "With failover: stand-bys that could not take over now (alert KiloStandByUnfit).",
            "short",
            &[(
                r#"count(kilo_stand_by_fit{<agents>} == 0 and on (cluster, job, instance) kilo_failover_role{<agents>,role="stand-by"} == 1) or vector(0)"#,
                "stand-bys",
            )],
        ),
        number(
            3,
            "Versions",
            "Agents by version: more than one during an upgrade.",
            "short",
            &[("count by (version) (kilo_build_info{<mesh>})", "{{version}}")],
        ),
    ],
};

const TUNNELS: Row = Row {
    title: "Tunnels and maps",
    height: 9,
    panels: &[
        graph(
            8,
            "Tunnels by path",
            "Working tunnels to other locations: direct, punched through both NATs, or relayed (docs/nat.md).",
            "short",
            &[("sum by (path) (kilo_tunnels{<agents>})", "{{path}}")],
        ),
        graph(
            8,
            "Silent tunnels by leader",
            "kgctl status and /health of the leader name the other end.",
            "short",
            &[("sum by (cluster, instance) (kilo_silent_tunnels{<agents>}) > 0", "{{cluster}} {{instance}}")],
        ),
        graph(
            8,
            "Use of BPF maps",
            "On the node where each is fullest; docs/data-path.md says what they hold.",
            "percentunit",
            &[("max by (map) (kilo_map_entries{<agents>} / kilo_map_capacity{<agents>})", "{{map}}")],
        ),
    ],
};

const FAILOVER: Row = Row {
    title: "Failover and slices",
    height: 9,
    panels: &[
        graph(
            8,
            "Leaderships taken",
            "By the node that took it, and why: lost, alone and handed_over follow a fault (docs/failover.md).",
            "short",
            &[(
                "sum by (cluster, instance, cause) (increase(kilo_failovers_total{<agents>}[$__rate_interval])) > 0",
                "{{cluster}} {{instance}} {{cause}}",
            )],
        ),
        graph(
            8,
            "Suspicions and refused signals",
            "What became of suspicions of a leader, and why agents refused signals: forged and foreign ones are an attack.",
            "short",
            &[
                (
                    "sum by (cluster, instance, outcome) (increase(kilo_suspicions_total{<agents>}[$__rate_interval])) > 0",
                    "{{cluster}} {{instance}} {{outcome}}",
                ),
                (
                    "sum by (cluster, instance, why) (increase(kilo_signals_refused_total{<agents>}[$__rate_interval])) > 0",
                    "{{cluster}} {{instance}} refused: {{why}}",
                ),
            ],
        ),
        graph(
            8,
            "Slices",
            "Agents that should use slices, that do, and that write them (one in each cluster); and slices that are missing, \
             unreadable or contradict each other.",
            "short",
            &[
                ("sum by (cluster) (kilo_slices_wanted{<mesh>})", "{{cluster}} wanted"),
                ("sum by (cluster) (kilo_slices_in_use{<mesh>})", "{{cluster}} in use"),
                ("sum by (cluster) (kilo_slices_writer{<mesh>})", "{{cluster}} writers"),
                ("max by (cluster) (kilo_slice_problems{<mesh>})", "{{cluster}} problems"),
            ],
        ),
    ],
};

const DATA_PATH: Row = Row {
    title: "Data path",
    height: 9,
    panels: &[
        graph(
            12,
            "Packets by action",
            "steer: to another node of the location; transit, forward: a leader on behalf of its \
             location; encrypt, decrypt: WireGuard; masquerade: source translated.",
            "pps",
            &[("sum by (action) (rate(kilo_packets_total{<agents>}[$__rate_interval]))", "{{action}}")],
        ),
        graph(
            12,
            "Dropped packets by reason",
            "not_unicast is harmless; docs/drop-reasons.md says what the others mean and what to do.",
            "pps",
            &[(
                "sum by (reason) (rate(kilo_dropped_packets_total{<agents>}[$__rate_interval])) > 0",
                "{{reason}}",
            )],
        ),
    ],
};

const WIREGUARD: Row = Row {
    title: "WireGuard",
    height: 9,
    panels: &[
        graph(
            8,
            "Received by node",
            "Through the tunnel.",
            "Bps",
            &[(
                "sum by (cluster, instance) (rate(kilo_wireguard_received_bytes_total{<agents>}[$__rate_interval]))",
                "{{cluster}} {{instance}}",
            )],
        ),
        graph(
            8,
            "Sent by node",
            "Through the tunnel.",
            "Bps",
            &[(
                "sum by (cluster, instance) (rate(kilo_wireguard_sent_bytes_total{<agents>}[$__rate_interval]))",
                "{{cluster}} {{instance}}",
            )],
        ),
        graph(
            8,
            "Time since the last handshake",
            "Of each tunnel: to another location and its gateway, or to a VPN peer. Above 180 s no session is valid: fine \
             without traffic.",
            "s",
            &[(
                "time() - kilo_wireguard_last_handshake_seconds{<agents>}",
                "{{cluster}} {{instance}} to {{location}} {{node}}{{peer}}",
            )],
        ),
    ],
};

const AGENTS: Row = Row {
    title: "Agents",
    height: 9,
    panels: &[
        graph(
            6,
            "Errors by event",
            "The agent's log has the details.",
            "short",
            &[(
                "sum by (cluster, instance, event) (increase(kilo_errors_total{<agents>}[$__rate_interval])) > 0",
                "{{cluster}} {{instance}} {{event}}",
            )],
        ),
        graph(
            6,
            "Reconciliations",
            "One at least every --resync-period.",
            "ops",
            &[(
                "sum by (cluster, instance) (rate(kilo_reconciles_total{<agents>}[$__rate_interval]))",
                "{{cluster}} {{instance}}",
            )],
        ),
        graph(
            6,
            "Duration of a reconciliation",
            "",
            "s",
            &[
                (
                    "histogram_quantile(0.5, sum by (le) (rate(kilo_reconcile_duration_seconds_bucket{<agents>}[$__rate_interval])))",
                    "median",
                ),
                (
                    "histogram_quantile(0.99, sum by (le) (rate(kilo_reconcile_duration_seconds_bucket{<agents>}[$__rate_interval])))",
                    "99 %",
                ),
            ],
        ),
        graph(
            6,
            "Changes made to the kernel",
            "Links, routes, WireGuard, maps: none when nothing changed. Reattached: programs that something else had removed \
             (alert KiloProgramsReattached).",
            "short",
            &[
                (
                    "sum by (cluster, instance) (increase(kilo_writes_total{<agents>}[$__rate_interval]))",
                    "{{cluster}} {{instance}}",
                ),
                (
                    "sum by (cluster, instance) (increase(kilo_reattached_total{<agents>}[$__rate_interval])) > 0",
                    "{{cluster}} {{instance}} reattached",
                ),
            ],
        ),
    ],
};

/// The dashboard as Grafana imports it.
pub fn json() -> Result<String> {
    let source = json!({ "type": "prometheus", "uid": "${datasource}" });
    let mut panels = Vec::new();
    let mut y = 0;
    for row in &ROWS {
        let id = panels.len() + 1;
        panels.push(json!({
            "id": id, "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": { "x": 0, "y": y, "w": 24, "h": 1 },
        }));
        y += 1;
        let mut x = 0;
        for panel in row.panels {
            panels.push(panel_json(panel, panels.len() + 1, &source, [x, y, panel.width, row.height]));
            x += panel.width;
        }
        y += row.height;
    }
    // `.*` also matches the absent label `cluster` of a Prometheus with one cluster.
    let variable = |name: &str, label: &str, query: &str| {
        json!({
            "name": name, "label": label, "type": "query", "datasource": source, "query": query,
            "refresh": 2, "sort": 1, "multi": true, "includeAll": true, "allValue": ".*",
            "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
        })
    };
    let dashboard = json!({
        "title": "Kilo", "uid": "kilo-mesh", "tags": ["kilo", "kubernetes", "wireguard"],
        "schemaVersion": 39, "editable": true, "refresh": "30s", "graphTooltip": 1,
        "time": { "from": "now-1h", "to": "now" },
        "templating": { "list": [
            { "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus" },
            variable("cluster", "Cluster", "label_values(kilo_nodes, cluster)"),
            variable("job", "Job", "label_values(kilo_nodes{cluster=~\"$cluster\"}, job)"),
            variable("instance", "Agent", &with_variables("label_values(kilo_nodes{<mesh>}, instance)")),
        ] },
        "panels": panels,
    });
    Ok(serde_json::to_string_pretty(&dashboard)? + "\n")
}

/// A query with the dashboard's variables in its matchers.
fn with_variables(query: &str) -> String {
    MATCHERS.iter().fold(query.to_owned(), |query, (short, matchers)| query.replace(short, matchers))
}

fn panel_json(panel: &Panel, id: usize, source: &Value, [x, y, w, h]: [u32; 4]) -> Value {
    let targets: Vec<_> = ('A'..)
        .zip(panel.queries)
        .map(|(letter, (query, legend))| {
            json!({
                "refId": letter, "datasource": source, "expr": with_variables(query), "legendFormat": legend,
                "instant": panel.kind == "stat",
            })
        })
        .collect();
    json!({
        "id": id, "type": panel.kind, "title": panel.title, "description": panel.about,
        "datasource": source, "gridPos": { "x": x, "y": y, "w": w, "h": h },
        "fieldConfig": { "defaults": { "unit": panel.unit, "min": 0 }, "overrides": [] },
        "targets": targets,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{collections::BTreeSet, fs, process::Command};

    use super::*;
    use crate::{manifests::alerts, prometheus};

    /// The metrics of ours that a text names.
    fn metrics(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.filter(|word| word.starts_with("kilo_")).collect()
    }

    fn panels() -> impl Iterator<Item = &'static Panel> {
        ROWS.iter().flat_map(|row| row.panels)
    }

    /// The first query of a panel, as for "All".
    fn query(title: &str) -> String {
        let panel = panels().find(|panel| panel.title == title).unwrap();
        filled(panel.queries[0].0)
    }

    fn filled(query: &str) -> String {
        let query = with_variables(query).replace("$__rate_interval", "1m");
        ["$cluster", "$job", "$instance"].iter().fold(query, |query, variable| query.replace(variable, ".*"))
    }

    #[test]
    fn every_row_is_as_wide_as_the_dashboard() {
        for row in &ROWS {
            assert_eq!(row.panels.iter().map(|panel| panel.width).sum::<u32>(), 24, "{}", row.title);
        }
    }

    #[test]
    fn it_shows_every_metric_that_alerts_ask_for() {
        let dashboard = json().unwrap();
        let (shown, rules) = (metrics(&dashboard), alerts::rule_file());
        let missing: Vec<_> = metrics(&rules).into_iter().filter(|metric| !shown.contains(metric)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(!dashboard.contains("<mesh>") && !dashboard.contains("<agents>"), "{dashboard}");
        for query in panels().flat_map(|panel| panel.queries).map(|(query, _)| query) {
            let metrics = query.split('{').count() - 1;
            let chosen = query.matches("{<mesh>").count() + query.matches("{<agents>").count();
            assert_eq!(metrics, chosen, "{query} does not ask for the chosen cluster");
        }
    }

    #[test]
    fn promtool_understands_each_query_and_they_count_what_their_titles_say() {
        let Some(promtool) = prometheus::promtool_or_skip() else { return };
        let work = tempfile::tempdir().unwrap();
        let rules: String = panels()
            .flat_map(|panel| panel.queries)
            .enumerate()
            .map(|(at, (query, _))| format!("      - {{record: \"q:{at}\", expr: '{}'}}\n", filled(query)))
            .collect();
        fs::write(
            work.path().join("rules.yaml"),
            format!("groups:\n  - name: dashboard\n    rules:\n{rules}"),
        )
        .unwrap();
        let up = r#"up{job="kube-system/kilo", instance="a1""#;
        let handshake = r#"kilo_wireguard_last_handshake_seconds{instance="a1""#;
        let series = [
            (format!(r#"{up}, container="kilo"}}"#), "1x10"),
            (format!(r#"{up}, container="server", namespace="kilo"}}"#), "1x10"),
            (format!(r#"{handshake}, location="b", node="b1"}}"#), "240x10"),
            (format!(r#"{handshake}, peer="laptop"}}"#), "0x10"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="not_unicast"}"#.to_owned(), "0+9x10"),
            (r#"kilo_dropped_packets_total{instance="a1", reason="no_hop"}"#.to_owned(), "0x10"),
            (r#"kilo_locations_without_leader{cluster="east"}"#.to_owned(), "1x10"),
            (r#"kilo_locations_without_leader{cluster="west"}"#.to_owned(), "2x10"),
            (r#"kilo_last_check_in_seconds{instance="a1"}"#.to_owned(), "0x10"),
            (r#"kilo_heartbeat_interval_seconds{instance="a1"}"#.to_owned(), "30x10"),
        ];
        let series =
            series.map(|(name, values)| format!("      - {{series: '{name}', values: '{values}'}}\n"));
        let wanted = [
            ("Agents up", 1),
            ("Oldest handshake", 60),
            ("Dropped packets", 0),
            ("Locations without leader", 3),
            ("Stale views", 1),
            ("Unfit stand-bys", 0),
        ];
        let asked = wanted.map(|(title, value)| {
            format!(
                "      - expr: '{}'\n        eval_time: 5m\n        exp_samples: [{{value: {value}, labels: '{{}}'}}]\n",
                query(title)
            )
        });
        let tests = format!(
            "rule_files: [rules.yaml]\ntests:\n  - interval: 1m\n    input_series:\n{}    promql_expr_test:\n{}",
            series.concat(),
            asked.concat()
        );
        fs::write(work.path().join("tests.yaml"), tests).unwrap();
        let mut command = Command::new(promtool);
        let output = command.args(["test", "rules", "tests.yaml"]).current_dir(work.path()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{said}");
    }
}
