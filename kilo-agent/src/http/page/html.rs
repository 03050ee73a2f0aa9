//! The page as rendered by the server: the verdict and all tables, which work without scripts.

use std::collections::BTreeMap;

use minijinja::{AutoEscape, Environment, Error, context};

use super::{files, report::Report};
use crate::{
    status::{ago, bytes},
    timestamp::Timestamp,
};

/// Renders the whole document. All inserted text is escaped.
///
/// # Errors
/// When the template cannot be rendered, which is a bug.
pub fn html(report: &Report) -> Result<String, Error> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    let now = report.status.time;
    environment.add_filter("age", move |time: Option<String>| age(now, time));
    environment.add_filter("bytes", bytes);
    environment.add_filter("plain", |text: String| plain(&text).to_owned());
    let template = environment.template_from_str(files::TEMPLATE)?;
    let nodes = report.status.nodes.iter();
    let owners: BTreeMap<_, _> =
        nodes.filter_map(|node| Some((node.key?.to_string(), node.name.as_str()))).collect();
    template.render(context! { report => report, owners => owners })
}

/// Age of a time in RFC 3339.
fn age(now: Timestamp, time: Option<String>) -> String {
    match time.and_then(|time| time.parse().ok()) {
        Some(time) => ago(now, time) + " ago",
        None => "never".to_owned(),
    }
}

/// The name of a location without its kind: `east` for `location:east`.
fn plain(name: &str) -> &str {
    name.split_once(':').map_or(name, |(_, name)| if name.is_empty() { "(no name)" } else { name })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::status::Status;

    fn report(name: &str) -> Report {
        let status: Status = serde_json::from_value(json!({
            "time": "2026-01-01T00:01:00Z", "granularity": "location", "subnet": "10.4.0.0/16",
            "locations": [
                {"name": format!("location:{name}"), "leader": name, "reason": "asks", "endpoint": name, "ready": 1, "nodes": 2, "warning": name, "gateways": [name, "third"]},
            ],
            "nodes": [
                {"name": name, "location": format!("location:{name}"), "leads": true, "ready": true, "gateway": name, "endpoint": name, "key": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "podCIDRs": ["10.42.0.0/24"], "lastSeen": "2026-01-01T00:00:58Z"},
                {"name": "other", "location": format!("location:{name}"), "leads": false, "ready": false, "notReady": [name], "podCIDRs": []},
                {"name": "third", "location": format!("location:{name}"), "leads": false, "ready": true, "gateway": "third", "podCIDRs": []},
                {"name": "fourth", "location": format!("location:{name}"), "leads": false, "ready": true, "gateway": name, "podCIDRs": []},
            ],
            "peers": [{"name": name, "valid": false, "reason": name, "allowedIPs": [], "endpoint": name}],
            "problems": {name: name},
            "agent": {
                "node": name, "version": "1", "interface": name, "degraded": [name], "warnings": [name], "errors": [name],
                "tunnels": [{"name": name, "key": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "receivedBytes": 1536, "sentBytes": 0}],
                "packets": {name: 1}, "drops": {"no_hop": 3}, "programs": [],
                "failover": {"role": "leader", "leader": name, "kilosLeader": name, "term": 1, "standBys": [{"node": name}], "lastChange": name},
            },
        }))
        .unwrap();
        let change = crate::status::LeaderChange {
            time: Timestamp(0),
            location: name.to_owned(),
            from: Some(name.to_owned()),
            to: Some(name.to_owned()),
            why: name.to_owned(),
        };
        Report::new(status, vec![change])
    }

    #[test]
    fn without_a_script_the_page_says_what_is_wrong_and_has_all_tables() {
        let page = html(&report("a1")).unwrap().replace("&#x2f;", "/");
        for words in [
            "Not healthy, 2 problems: 3 of 4 nodes ready",
            "<td>a1, third</td>",
            "<td>gateway</td>",
            "<td>by a1</td>",
            "<th scope=\"row\">a1 (a1)</th>",
            "node/other",
            "not ready: a1",
            "asks to lead",
            "1.5 KiB",
            "2s ago",
            "<caption>Locations",
            "<caption>Nodes",
            "<caption>VPN peers",
            "<caption>WireGuard tunnels",
            "kgctl status", // from the remedy of no_hop
            "Leader changes",
        ] {
            assert!(page.contains(words), "{words} is missing from\n{page}");
        }
    }

    #[test]
    fn what_comes_from_the_cluster_cannot_become_markup() {
        let harmless = html(&report("x")).unwrap();
        let hostile = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}";
        let page = html(&report(hostile)).unwrap();
        for mark in ["<script", "<img", "<a ", "<tr", "<td", "<li", "\"", "<"] {
            assert_eq!(page.matches(mark).count(), harmless.matches(mark).count(), "{mark} in\n{page}");
        }
        assert!(page.contains("&lt;script&gt;alert(1)") && page.contains("{{ 7 * 7 }}"), "{page}");
    }

    #[test]
    fn a_location_is_shown_without_its_kind() {
        assert_eq!([plain("location:east"), plain("location:"), plain("x")], ["east", "(no name)", "x"]);
    }
}
