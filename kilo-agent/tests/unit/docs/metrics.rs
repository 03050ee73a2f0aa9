//! The tables of metrics match the registries, and other text mentions only metrics that exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    time::Duration,
};

use hyper::Method;
use kilo_agent::{metrics::Metrics, timestamp::Timestamp, webhook};
use kilo_core::{topology::TunnelEnd, wireguard::key::PublicKey};
use kilo_host::{dataplane::Counters, wireguard::PeerStatus};
use kube::core::admission::Operation;

use super::root;
use crate::docs_counters::check;

/// A registry's data about one metric.
#[derive(Debug, PartialEq, Eq)]
struct Metric {
    /// Name as scraped.
    name: String,
    kind: String,
    help: String,
    labels: Vec<String>,
    has_sample: bool,
}

/// Names of a sample's labels, except the one that every histogram has.
fn labels(sample: &str) -> Vec<&str> {
    let Some((_, rest)) = sample.split_once('{') else { return Vec::new() };
    let (inside, _) = rest.rsplit_once('}').unwrap();
    // No example value contains a comma.
    let names = inside.split(',').filter_map(|label| Some(label.split_once('=')?.0));
    names.filter(|name| *name != "le").collect()
}

/// The metrics of a scrape, in its order.
fn metrics(scrape: &str) -> Vec<Metric> {
    let mut found: Vec<Metric> = Vec::new();
    for line in scrape.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            let help = help.trim_end_matches('.').to_owned();
            let (name, kind) = (name.to_owned(), String::new());
            found.push(Metric { name, kind, help, labels: Vec::new(), has_sample: false });
        } else if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let metric = found.last_mut().unwrap();
            kind.clone_into(&mut metric.kind);
            metric.name += match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
        } else if !line.starts_with('#') {
            let metric = found.last_mut().unwrap();
            metric.has_sample = true;
            for label in labels(line) {
                if !metric.labels.iter().any(|known| known == label) {
                    metric.labels.push(label.to_owned());
                }
            }
        }
    }
    found
}

/// All metrics of an agent, each with at least one sample.
fn of_agents() -> Vec<Metric> {
    let metrics = Metrics::default();
    metrics.error("api");
    metrics.set_tunnel_paths(std::iter::empty(), 0);
    let counted = Counters { actions: [("local", 1)].into(), drops: [("malformed", 1)].into() };
    metrics.set_counters(move || Ok(counted.clone()));
    metrics.failover.role("leader");
    metrics.failover.round_trip("lan", 0.001);
    metrics.failover.probe_lost("lan");
    let peer = PeerStatus { handshake_age: Some(Duration::from_secs(1)), ..PeerStatus::default() };
    let (location, node) = ("b".to_owned(), "b1".to_owned());
    let ends =
        [TunnelEnd::Location { location, node }, TunnelEnd::Peer { peer: "laptop".to_owned(), roams: false }];
    let ends: BTreeMap<_, _> = (1..).map(|number| PublicKey([number; 32])).zip(ends).collect();
    let peers = ends.keys().map(|key| (*key, peer.clone())).collect();
    metrics.set_peers(peers, ends, Timestamp::now());
    self::metrics(&metrics.encode().unwrap())
}

fn of_webhook() -> Vec<Metric> {
    let metrics = webhook::metrics::Metrics::default();
    metrics.review(&Operation::Create, true);
    metrics.request("validate", &Method::POST);
    self::metrics(&metrics.encode().unwrap())
}

fn table(metrics: &[Metric]) -> String {
    let mut text = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    let by_name: BTreeMap<_, _> = metrics.iter().map(|metric| (&metric.name, metric)).collect();
    for Metric { name, kind, help, labels, has_sample } in by_name.into_values() {
        assert!(has_sample, "{name} has no sample: give it one here, by which its labels are known");
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        writeln!(text, "| `{name}` | {kind} | {} | {help} |", labels.join(", ")).unwrap();
    }
    text
}

#[test]
fn the_tables_of_metrics_are_those_of_the_registries() {
    check("metrics.md", "metrics of agents", &table(&of_agents()));
    check("metrics.md", "metrics of the webhook", &table(&of_webhook()));
}

/// A metric with labels but no sample is missing from a scrape, so the scrape alone cannot show an
/// omission.
#[test]
fn every_name_in_the_sources_of_agents_metrics_is_in_the_table() {
    let known: BTreeSet<String> = of_agents().into_iter().map(|metric| metric.name).collect();
    for file in ["metrics.rs", "failover/report.rs"] {
        let source = fs::read_to_string(root().join("kilo-agent/src").join(file)).unwrap();
        let names = source.split('"').filter(|text| text.strip_prefix("kilo_").is_some_and(is_name));
        let is_known =
            |name: &str| ["", "_total", "_info"].iter().any(|end| known.contains(&format!("{name}{end}")));
        let missing: Vec<_> = names.filter(|name| !is_known(name)).collect();
        assert_eq!(missing, [""; 0], "{file}: give each a sample in `of_agents`");
    }
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

#[test]
fn a_scrape_says_what_a_table_shows() {
    let scrape = "# HELP a_b A count.\n# TYPE a_b counter\na_b_total{x=\"1\",y=\"2\"} 1\na_b_total{x=\"1\",z=\"2\"} 1\n\
                  # HELP c Times.\n# TYPE c histogram\nc_bucket{le=\"1\",w=\"1\"} 0\n# EOF\n";
    let wanted = "| metric | type | labels | meaning |\n|---|---|---|---|\n| `a_b_total` | counter | `x`, `y`, `z` | A count |\n\
                  | `c` | histogram | `w` | Times |\n";
    assert_eq!(table(&metrics(scrape)), wanted);
}

#[test]
fn what_monitoring_explains_is_exported() {
    let page = fs::read_to_string(root().join("docs/monitoring.md")).unwrap();
    let known: BTreeMap<String, BTreeSet<String>> =
        of_agents().into_iter().map(|metric| (metric.name, metric.labels.into_iter().collect())).collect();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `kilo_")?.split('`').next());
    let mut explained = 0;
    for row in rows {
        let (name, labels) = row.split_once('{').unwrap_or((row, ""));
        let of_metric = known.get(&format!("kilo_{name}"));
        let of_metric = of_metric.unwrap_or_else(|| panic!("no agent exports kilo_{name}"));
        let labels: BTreeSet<String> = labels
            .trim_end_matches('}')
            .split(',')
            .filter(|label| !label.is_empty())
            .map(str::to_owned)
            .collect();
        assert!(labels.is_subset(of_metric), "kilo_{name} has the labels {of_metric:?}");
        explained += 1;
    }
    assert!(explained > 20, "{explained} rows");
}
