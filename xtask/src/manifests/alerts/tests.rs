#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use super::*;
use crate::{prometheus, workspace_root};

/// Whether promtool accepts these rules.
fn passes(promtool: &PathBuf, rules: &str, alerts: &[Alert]) -> Result<(), String> {
    let work = tempfile::tempdir().unwrap();
    fs::write(work.path().join("rules.yaml"), rules).unwrap();
    fs::write(work.path().join("tests.yaml"), tests_of("rules.yaml", alerts)).unwrap();
    let mut command = Command::new(promtool);
    let output = command.args(["test", "rules", "tests.yaml"]).current_dir(work.path()).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[test]
fn every_alert_fires_and_stays_quiet_when_it_should() {
    let Some(promtool) = prometheus::promtool_or_skip() else { return };
    passes(&promtool, &rule_file(), ALERTS).unwrap();
    // The tests also notice an alert that never or always fires.
    for alert in ALERTS {
        for expr in ["vector(1) == 0", "vector(1)"] {
            let rules = file_of(std::iter::once(alert.rule("      ", expr)));
            let said = passes(&promtool, &rules, std::slice::from_ref(alert)).unwrap_err();
            assert!(said.contains(alert.name), "{} as {expr}: {said}", alert.name);
        }
    }
}

#[test]
fn an_agent_from_before_intervals_is_stale_after_two_minutes_beside_newer_ones() {
    let Some(promtool) = prometheus::promtool_or_skip() else { return };
    let stale = ALERTS.iter().find(|alert| alert.name == "KiloViewStale").unwrap();
    let mixed = Alert {
        fires: &[
            (r#"kilo_last_check_in_seconds{instance="a1"}"#, "0x60"),
            (r#"kilo_last_check_in_seconds{instance="a2"}"#, "0+60x60"),
            (r#"kilo_heartbeat_interval_seconds{instance="a2"}"#, "300x60"),
        ],
        quiet: &[(r#"kilo_last_check_in_seconds{instance="a1"}"#, "0+60x60")],
        ..*stale
    };
    passes(&promtool, &rule_file(), &[mixed]).unwrap();
}

/// The series with that cluster as a label.
fn in_cluster(cluster: &str, &(name, values): &Series) -> Series {
    let name = match name.split_once('{') {
        Some((metric, labels)) => format!("{metric}{{cluster=\"{cluster}\", {labels}"),
        None => format!("{name}{{cluster=\"{cluster}\"}}"),
    };
    (name.leak(), values)
}

/// Series of both clusters.
fn in_clusters(east: &[Series], west: &[Series]) -> &'static [Series] {
    let east = east.iter().map(|series| in_cluster("east", series));
    east.chain(west.iter().map(|series| in_cluster("west", series))).collect::<Vec<_>>().leak()
}

#[test]
fn where_an_engine_holds_two_clusters_each_alert_fires_for_the_one_that_it_is_about() {
    let Some(promtool) = prometheus::promtool_or_skip() else { return };
    // No agent of any cluster: that has no label.
    let of_one_cluster = ALERTS.iter().filter(|alert| alert.name != "KiloAgentsMissing");
    let alerts: Vec<_> = of_one_cluster
        .map(|alert| Alert {
            fires: in_clusters(alert.fires, alert.quiet),
            labels: [alert.labels, &[("cluster", "east")]].concat().leak(),
            quiet: in_clusters(alert.quiet, alert.quiet),
            ..*alert
        })
        .collect();
    passes(&promtool, &rule_file(), &alerts).unwrap();
}

/// An alert that compares agents, and series of the clusters `east` and `west`: those with which it fires for
/// `east` alone, and those with which it is quiet.
type Compared = (&'static str, &'static [(&'static str, &'static str)], [[&'static [Series]; 2]; 2]);

const COMPARED: [Compared; 4] = [
    (
        "KiloViewsDiffer",
        &[],
        [
            [
                &[(r#"kilo_nodes{instance="a1"}"#, "5x60"), (r#"kilo_nodes{instance="a2"}"#, "4x60")],
                &[(r#"kilo_nodes{instance="a1"}"#, "7x60")],
            ],
            [
                &[(r#"kilo_nodes{instance="a1"}"#, "5x60"), (r#"kilo_nodes{instance="a2"}"#, "5x60")],
                &[(r#"kilo_nodes{instance="a1"}"#, "7x60")],
            ],
        ],
    ),
    (
        "KiloSlicesWithoutWriter",
        &[],
        [
            [
                &[("kilo_slices_wanted", "1x60"), ("kilo_slices_writer", "0x60")],
                &[("kilo_slices_wanted", "1x60"), ("kilo_slices_writer", "1x60")],
            ],
            [
                &[("kilo_slices_wanted", "1x60"), ("kilo_slices_writer", "1x60")],
                &[("kilo_slices_wanted", "1x60"), ("kilo_slices_writer", "1x60")],
            ],
        ],
    ),
    (
        "KiloViewStale",
        &[A1],
        [
            [
                &[(r#"kilo_last_check_in_seconds{instance="a1"}"#, "0x60")],
                &[
                    (r#"kilo_last_check_in_seconds{instance="a1"}"#, "0+60x60"),
                    (r#"kilo_heartbeat_interval_seconds{instance="a1"}"#, "300x60"),
                ],
            ],
            [
                &[(r#"kilo_last_check_in_seconds{instance="a1"}"#, "0+60x60")],
                &[
                    (r#"kilo_last_check_in_seconds{instance="a1"}"#, "0+60x60"),
                    (r#"kilo_heartbeat_interval_seconds{instance="a1"}"#, "300x60"),
                ],
            ],
        ],
    ),
    (
        "KiloStandByUnfit",
        &[A1],
        [
            [
                &[
                    (r#"kilo_stand_by_fit{instance="a1"}"#, "0x60"),
                    (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "1x60"),
                ],
                &[
                    (r#"kilo_stand_by_fit{instance="a1"}"#, "1x60"),
                    (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "1x60"),
                ],
            ],
            [
                &[
                    (r#"kilo_stand_by_fit{instance="a1"}"#, "0x60"),
                    (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "0x60"),
                ],
                &[
                    (r#"kilo_stand_by_fit{instance="a1"}"#, "1x60"),
                    (r#"kilo_failover_role{instance="a1", role="stand-by"}"#, "1x60"),
                ],
            ],
        ],
    ),
];

#[test]
fn agents_are_not_compared_with_those_of_another_cluster() {
    let Some(promtool) = prometheus::promtool_or_skip() else { return };
    for (name, labels, [[fires_east, fires_west], [quiet_east, quiet_west]]) in COMPARED {
        let alert = ALERTS.iter().find(|alert| alert.name == name).unwrap();
        let compared = Alert {
            fires: in_clusters(fires_east, fires_west),
            labels: [labels, &[("cluster", "east")]].concat().leak(),
            quiet: in_clusters(quiet_east, quiet_west),
            ..*alert
        };
        passes(&promtool, &rule_file(), &[compared]).unwrap();
    }
}

#[test]
fn an_opponent_is_noticed_who_reverts_once_a_minute() {
    let Some(promtool) = prometheus::promtool_or_skip() else { return };
    let restless = ALERTS.iter().find(|alert| alert.name == "KiloRestless").unwrap();
    let slow = Alert { fires: &[(r#"kilo_writes_total{instance="a1"}"#, "0+1x60")], ..*restless };
    passes(&promtool, &rule_file(), &[slow]).unwrap();
}

#[test]
fn alerts_ask_for_metrics_and_reasons_that_there_are() {
    let page = fs::read_to_string(workspace_root().join("docs/metrics.md")).unwrap();
    let reasons_page = fs::read_to_string(workspace_root().join("docs/drop-reasons.md")).unwrap();
    let mut names = BTreeSet::new();
    for alert in ALERTS {
        assert!(names.insert(alert.name), "{} is there twice", alert.name);
        assert!(!alert.expr.contains('\''), "{}", alert.name);
        let words = alert.expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for metric in words.filter(|word| word.starts_with("kilo_")) {
            let is_there = page.contains(&format!("| `{metric}` |"));
            assert!(is_there, "{}: {metric} is not in docs/metrics.md", alert.name);
        }
        if let Some(reasons) = alert.expr.split("reason=~\"").nth(1) {
            for reason in reasons.split('"').next().unwrap().split('|') {
                assert!(reasons_page.contains(&format!("| `{reason}` |")), "{}: {reason}", alert.name);
            }
        }
    }
}

#[test]
fn the_page_about_alerts_is_that_of_the_table() {
    let present = fs::read_to_string(workspace_root().join("docs/alerts.md")).unwrap_or_default();
    assert!(present == page(), "docs/alerts.md is out of date: run `cargo xtask manifests`");
}
