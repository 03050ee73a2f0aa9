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
    title: &'static str,
    about: &'static str,
    unit: &'static str,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { kind: "stat", width: 4, title, about, unit, queries }
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

// `$job` and `$instance` are the dashboard's variables.
const ROWS: [Row; 4] = [
    Row {
        title: "Mesh",
        height: 4,
        panels: &[
            number(
                "Agents up",
                "Agents Prometheus reaches.",
                "short",
                &[(r#"sum(up{job=~"$job"})"#, "up"), (r#"count(up{job=~"$job"})"#, "expected")],
            ),
            number(
                "Leaders",
                "Nodes that say they lead; one for each location.",
                "short",
                &[(r#"sum(kilo_leader{job=~"$job"})"#, "leaders")],
            ),
            number(
                "Nodes in the mesh",
                "As the agents see it; smallest and largest differ while a change spreads.",
                "short",
                &[(r#"min(kilo_nodes{job=~"$job"})"#, "min"), (r#"max(kilo_nodes{job=~"$job"})"#, "max")],
            ),
            number(
                "VPN peers",
                "Peer objects in the mesh.",
                "short",
                &[(r#"max(kilo_peers{job=~"$job"})"#, "peers")],
            ),
            number(
                "Oldest handshake",
                "WireGuard renews handshakes every 2 minutes where there is traffic.",
                "s",
                &[(
                    r#"max(time() - kilo_wireguard_last_handshake_seconds{job=~"$job",instance=~"$instance"})"#,
                    "age",
                )],
            ),
            number(
                "Dropped packets",
                "By the data path, in the last 5 minutes.",
                "short",
                &[(
                    r#"sum(increase(kilo_dropped_packets_total{job=~"$job",instance=~"$instance"}[5m]))"#,
                    "dropped",
                )],
            ),
        ],
    },
    Row {
        title: "Data path",
        height: 9,
        panels: &[
            graph(
                12,
                "Packets by action",
                "steer: to another node of the location; transit, forward: a leader on behalf of its \
                 location; encrypt, decrypt: WireGuard; masquerade: source translated.",
                "pps",
                &[(
                    r#"sum by (action) (rate(kilo_packets_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))"#,
                    "{{action}}",
                )],
            ),
            graph(
                12,
                "Dropped packets by reason",
                "not_unicast is harmless; docs/monitoring.md says what the others mean.",
                "pps",
                &[(
                    r#"sum by (reason) (rate(kilo_dropped_packets_total{job=~"$job",instance=~"$instance"}[$__rate_interval])) > 0"#,
                    "{{reason}}",
                )],
            ),
        ],
    },
    Row {
        title: "WireGuard",
        height: 9,
        panels: &[
            graph(
                8,
                "Received by node",
                "Through the tunnel.",
                "Bps",
                &[(
                    r#"sum by (instance) (rate(kilo_wireguard_received_bytes_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))"#,
                    "{{instance}}",
                )],
            ),
            graph(
                8,
                "Sent by node",
                "Through the tunnel.",
                "Bps",
                &[(
                    r#"sum by (instance) (rate(kilo_wireguard_sent_bytes_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))"#,
                    "{{instance}}",
                )],
            ),
            graph(
                8,
                "Time since the last handshake",
                "Of each peer of each leader. Above 180 s no session is valid: fine without traffic.",
                "s",
                &[(
                    r#"time() - kilo_wireguard_last_handshake_seconds{job=~"$job",instance=~"$instance"}"#,
                    "{{instance}} {{public_key}}",
                )],
            ),
        ],
    },
    Row {
        title: "Agents",
        height: 9,
        panels: &[
            graph(
                6,
                "Errors by event",
                "The agent's log has the details.",
                "short",
                &[(
                    r#"sum by (instance, event) (increase(kilo_errors_total{job=~"$job",instance=~"$instance"}[$__rate_interval])) > 0"#,
                    "{{instance}} {{event}}",
                )],
            ),
            graph(
                6,
                "Reconciliations",
                "One at least every --resync-period.",
                "ops",
                &[(
                    r#"sum by (instance) (rate(kilo_reconciles_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))"#,
                    "{{instance}}",
                )],
            ),
            graph(
                6,
                "Duration of a reconciliation",
                "",
                "s",
                &[
                    (
                        r#"histogram_quantile(0.5, sum by (le) (rate(kilo_reconcile_duration_seconds_bucket{job=~"$job",instance=~"$instance"}[$__rate_interval])))"#,
                        "median",
                    ),
                    (
                        r#"histogram_quantile(0.99, sum by (le) (rate(kilo_reconcile_duration_seconds_bucket{job=~"$job",instance=~"$instance"}[$__rate_interval])))"#,
                        "99 %",
                    ),
                ],
            ),
            graph(
                6,
                "Changes made to the kernel",
                "Links, routes, WireGuard, maps: none when nothing changed.",
                "short",
                &[(
                    r#"sum by (instance) (increase(kilo_writes_total{job=~"$job",instance=~"$instance"}[$__rate_interval]))"#,
                    "{{instance}}",
                )],
            ),
        ],
    },
];

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
    let variable = |name: &str, label: &str, query: &str| {
        json!({
            "name": name, "label": label, "type": "query", "datasource": source, "query": query,
            "refresh": 2, "sort": 1, "multi": true, "includeAll": true,
            "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
        })
    };
    let dashboard = json!({
        "title": "Kilo", "uid": "kilo-mesh", "tags": ["kilo", "kubernetes", "wireguard"],
        "schemaVersion": 39, "editable": true, "refresh": "30s", "graphTooltip": 1,
        "time": { "from": "now-1h", "to": "now" },
        "templating": { "list": [
            { "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus" },
            variable("job", "Job", "label_values(kilo_nodes, job)"),
            variable("instance", "Agent", "label_values(kilo_nodes{job=~\"$job\"}, instance)"),
        ] },
        "panels": panels,
    });
    Ok(serde_json::to_string_pretty(&dashboard)? + "\n")
}

fn panel_json(panel: &Panel, id: usize, source: &Value, [x, y, w, h]: [u32; 4]) -> Value {
    let targets: Vec<_> = ('A'..)
        .zip(panel.queries)
        .map(|(letter, (query, legend))| {
            json!({
                "refId": letter, "datasource": source, "expr": query, "legendFormat": legend,
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
