//! Prometheus on the first node: it finds the agents by the PodMonitor's rules, has data for every query of
//! the dashboard, and evaluates every alert, whose tests pass.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    lab::{netns::Netns, wait},
    manifests::alerts,
    prometheus,
};

const PORT: u16 = 9090;
/// Value of the dashboard's `$__rate_interval`, which Grafana would choose.
const RATE_INTERVAL: &str = "20s";

/// Runs all of these checks.
pub fn prometheus(cluster: &Cluster) -> Result<String> {
    let node = cluster.first();
    let root = node.path("/opt/prometheus")?;
    fs::create_dir_all(&root)?;
    for program in ["prometheus", "promtool"] {
        fs::copy(prometheus::programs()?.join(program), root.join(program))?;
    }
    fs::write(root.join("alerts.yaml"), alerts::rule_file())?;
    fs::write(root.join("tests.yaml"), alerts::promtool_tests("alerts.yaml"))?;
    fs::write(root.join("prometheus.yaml"), configuration()?)?;
    fs::write(root.join("targets.json"), serde_json::to_vec(&targets(cluster)?)?)?;
    let checked = node.sh("cd /opt/prometheus && ./promtool check config prometheus.yaml")?;
    let rules = alerts::count();
    ensure!(checked.contains(&format!("{rules} rules found")), "there are {rules} alerts: {checked}");
    node.sh("cd /opt/prometheus && ./promtool test rules tests.yaml")?;
    let _running = Running::start(cluster)?;
    let netns = node.netns();
    let nodes: BTreeSet<_> = cluster.nodes.iter().map(|node| node.name().to_owned()).collect();
    until("every agent is scraped", Duration::from_secs(60), || {
        let up = result(&netns, "query", "up == 1").ok()?;
        let seen: BTreeSet<_> =
            up.iter().filter_map(|series| Some(series["metric"]["instance"].as_str()?.to_owned())).collect();
        (seen == nodes && up.len() == nodes.len()).then_some(())
    })?;
    wait::time_passes(Duration::from_secs(5), "two scrapes more make a rate");
    let queries = dashboard()?;
    for query in &queries {
        let answer = result(&netns, "query", query)?;
        // A query that filters by a comparison may have no result.
        ensure!(query.ends_with("> 0") || !answer.is_empty(), "no data for {query}");
    }
    let evaluated = until("every alert is evaluated", Duration::from_secs(30), || {
        let answer = get(&netns, "/api/v1/rules").ok()?;
        let groups = answer.pointer("/data/groups")?.as_array()?;
        let rules: Vec<_> = groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect();
        let known = |rule: &&Value| rule["health"] != "unknown";
        rules.iter().all(known).then(|| rules.into_iter().cloned().collect::<Vec<_>>())
    })?;
    ensure!(evaluated.len() == rules, "{} of {rules} alerts were loaded", evaluated.len());
    for rule in &evaluated {
        ensure!(rule["health"] == "ok", "{}: {}", rule["name"], rule["lastError"]);
        ensure!(rule["state"] != "firing", "{} fires on a cluster at rest", rule["name"]);
    }
    Ok(format!("{} agents, {} queries, {rules} alerts", nodes.len(), queries.len()))
}

/// Every query of the dashboard, with its variables filled in as for "All".
fn dashboard() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&deploy::manifest("grafana-dashboard.json")?)?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let fill = |query: &str| {
        let query = query.replace("$__rate_interval", RATE_INTERVAL);
        ["$cluster", "$job", "$instance"].iter().fold(query, |query, variable| query.replace(variable, ".*"))
    };
    let queries: Vec<_> = targets.filter_map(|target| target["expr"].as_str().map(fill)).collect();
    ensure!(queries.len() > 10, "the dashboard has {} queries", queries.len());
    Ok(queries)
}

fn pod_monitor() -> Result<Value> {
    Ok(serde_yaml_ng::from_str(&deploy::manifest("podmonitor.yaml")?)?)
}

fn words(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|word| Some(word.as_str()?.to_owned())).collect()
}

/// A Kubernetes name in the form that Prometheus uses in label names.
fn label(name: &str) -> String {
    name.replace(['.', '/', '-'], "_")
}

/// What Prometheus' own discovery would report for every port of every pod in the PodMonitor's namespaces:
/// Debian's build lacks it.
fn targets(cluster: &Cluster) -> Result<Value> {
    let mut targets = Vec::new();
    for namespace in words(&pod_monitor()?["spec"]["namespaceSelector"]["matchNames"]) {
        let pods = cluster.get(&["pods", "-n", &namespace])?;
        for pod in pods["items"].as_array().into_iter().flatten() {
            let Some(address) = pod.pointer("/status/podIP").and_then(Value::as_str) else { continue };
            let mut of_pod = serde_json::Map::new();
            for (name, value) in
                pod.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten()
            {
                of_pod.insert(format!("__meta_kubernetes_pod_label_{}", label(name)), value.clone());
            }
            for (name, place) in [("pod_phase", "/status/phase"), ("pod_node_name", "/spec/nodeName")] {
                let value = pod.pointer(place).cloned().unwrap_or_default();
                of_pod.insert(format!("__meta_kubernetes_{name}"), value);
            }
            for container in pod.pointer("/spec/containers").and_then(Value::as_array).into_iter().flatten() {
                for port in container["ports"].as_array().into_iter().flatten() {
                    let mut labels = of_pod.clone();
                    let name = port["name"].as_str().unwrap_or_default();
                    labels.insert("__meta_kubernetes_pod_container_port_name".to_owned(), name.into());
                    let target = format!("{address}:{}", port["containerPort"]);
                    targets.push(serde_json::json!({"targets": [target], "labels": labels}));
                }
            }
        }
    }
    Ok(Value::Array(targets))
}

/// Scrape configuration as the operator generates it from the PodMonitor, except for interval and
/// discovery.
fn configuration() -> Result<String> {
    let monitor = pod_monitor()?;
    let spec = &monitor["spec"];
    let mut relabelings = String::new();
    let labels = spec["selector"]["matchLabels"].as_object().context("no matchLabels")?;
    for (name, value) in labels {
        let value = value.as_str().context("a label is not a string")?;
        relabelings += &format!(
            "      - {{source_labels: [__meta_kubernetes_pod_label_{}], regex: \"{value}\", action: keep}}\n",
            label(name)
        );
    }
    let endpoints = spec["podMetricsEndpoints"].as_array().context("no endpoints")?;
    let [endpoint] = endpoints.as_slice() else { bail!("the PodMonitor has {} endpoints", endpoints.len()) };
    let port = endpoint["port"].as_str().context("the endpoint has no port")?;
    relabelings += &format!(
        "      - {{source_labels: [__meta_kubernetes_pod_container_port_name], regex: \"{port}\", action: keep}}\n\
         \x20     - {{source_labels: [__meta_kubernetes_pod_phase], regex: \"(Failed|Succeeded)\", action: drop}}\n"
    );
    for relabeling in endpoint["relabelings"].as_array().into_iter().flatten() {
        let target = relabeling["targetLabel"].as_str().context("a relabeling has no target")?;
        let sources = words(&relabeling["sourceLabels"]).join(", ");
        relabelings += &format!("      - {{source_labels: [{sources}], target_label: {target}}}\n");
    }
    let path = endpoint["path"].as_str().context("the endpoint has no path")?;
    let name =
        |pointer: &str| monitor.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [alerts.yaml]\nscrape_configs:\n\
         \x20 - job_name: {}/{}\n    metrics_path: {path}\n    file_sd_configs:\n\
         \x20     - {{files: [targets.json]}}\n    relabel_configs:\n{relabelings}",
        name("/metadata/namespace"),
        name("/metadata/name"),
    ))
}

/// Prometheus on the first node until dropped.
struct Running<'a>(Child, &'a Node);

impl<'a> Running<'a> {
    fn start(cluster: &'a Cluster) -> Result<Self> {
        let script = format!(
            "cd /opt/prometheus && exec ./prometheus --config.file=prometheus.yaml --storage.tsdb.path=/tmp/tsdb \
             --web.listen-address=127.0.0.1:{PORT} > /var/log/prometheus.log 2>&1"
        );
        let node = cluster.first();
        let mut command = node.command("sh")?;
        Ok(Self(command.args(["-c", &script]).stdin(Stdio::null()).spawn()?, node))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // It is a grandchild, in the node's PID namespace.
        let _ = self.1.sh("kill -KILL $(pidof prometheus)");
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Result of a Prometheus query.
fn result(netns: &Netns, kind: &str, query: &str) -> Result<Vec<Value>> {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let answer = get(netns, &format!("/api/v1/{kind}?query={encoded}"))?;
    ensure!(answer["status"] == "success", "{query}: {}", answer["error"]);
    Ok(answer.pointer("/data/result").and_then(Value::as_array).cloned().unwrap_or_default())
}

/// Fetches a page of Prometheus, which is JSON.
fn get(netns: &Netns, path: &str) -> Result<Value> {
    let path = path.to_owned();
    let ask = move || -> Result<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", PORT))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        // HTTP 1.0 has no chunked encoding.
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (_, body) = text.split_once("\r\n\r\n").context("no answer")?;
        Ok(serde_json::from_str(body)?)
    };
    netns.spawn(ask).join().map_err(|_| anyhow::anyhow!("query thread"))??
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_pod_monitor_and_the_dashboard_are_read() {
        let text = configuration().unwrap();
        for part in [
            "job_name: kube-system/kilo",
            "[__meta_kubernetes_pod_label_app_kubernetes_io_part_of], regex: \"kilo\", action: keep",
            "[__meta_kubernetes_pod_container_port_name], regex: \"metrics\", action: keep",
            "[__meta_kubernetes_pod_node_name], target_label: instance",
        ] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        assert!(dashboard().unwrap().iter().all(|query| !query.contains('$')));
        if let Some(directory) = std::env::var_os("KILO_TEST_OUTPUT").map(PathBuf::from) {
            fs::write(directory.join("prometheus.yaml"), text).unwrap();
            fs::write(directory.join("alerts.yaml"), alerts::rule_file()).unwrap();
        }
    }
}
