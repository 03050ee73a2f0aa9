//! What the API server knows about the agents' pods, such as why one does not run.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use kube::{Api, Client, api::ListParams};

use super::{NEVER_CHECKED_IN, Status};
use crate::AGENTS_NAMESPACE;

/// Label of the agent's pods in the manifests.
pub const LABEL: &str = "app.kubernetes.io/name=kilo";
/// Reason for a node without an agent pod while others have one.
const NO_POD: &str = "no pod of Kilo is on it: look at its taints and the DaemonSet's nodeSelector";
/// Error texts of runtimes and registries when the image has another architecture than the node.
const OTHER_ARCHITECTURE: [&str; 4] = [
    "exec format error",
    "no match for platform",
    "no matching manifest",
    "does not match the specified platform",
];

/// Waiting reasons of the kubelet that are part of every start.
const MAKING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// The agents' pods, and where they were looked for.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// The pods.
    pub pods: Vec<Pod>,
    /// The only namespace that was looked at; `None` = all.
    pub within: Option<String>,
}

impl Listed {
    /// Says that there are no pods, and where.
    pub fn none_found(&self) -> String {
        match &self.within {
            Some(namespace) => format!(
                "no pod in namespace {namespace} has the label {LABEL}: if the agents are elsewhere, name their \
                 namespace with --namespace"
            ),
            None => format!("no pod has the label {LABEL}"),
        }
    }
}

/// Lists the agents' pods of one node or of all, in this namespace. Without one: in all namespaces, or only in
/// the manifests' if the account may not list pods of all.
///
/// # Errors
/// Errors of the API server.
pub async fn list(
    client: &Client,
    node: Option<&str>,
    namespace: Option<&str>,
) -> Result<Listed, kube::Error> {
    let mut wanted = ListParams::default().labels(LABEL);
    if let Some(node) = node {
        wanted = wanted.fields(&format!("spec.nodeName={node}"));
    }
    let own = namespace.unwrap_or(AGENTS_NAMESPACE);
    let everywhere = match namespace {
        Some(_) => None,
        None => match Api::<Pod>::all(client.clone()).list(&wanted).await {
            Err(kube::Error::Api(refused)) if refused.code == 403 => None,
            found => Some(found?),
        },
    };
    let (found, within) = match everywhere {
        Some(found) => (found, None),
        None => (Api::namespaced(client.clone(), own).list(&wanted).await?, Some(own.to_owned())),
    };
    let pods = found.items.into_iter().filter(|pod| is_agents(pod, own)).collect();
    Ok(Listed { pods, within })
}

/// Whether a pod with the label can be an agent: anybody who may create pods may set the label, and such a
/// pod could answer in the agent's place, or have its image run everywhere. `own`: the agents' namespace.
fn is_agents(pod: &Pod, own: &str) -> bool {
    let is_on_host = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
    is_on_host || pod.metadata.namespace.as_deref() == Some(own)
}

/// The first running pod.
pub fn running(pods: &[Pod]) -> Option<&Pod> {
    pods.iter().find(|pod| phase(pod).is_none_or(|phase| phase == "Running"))
}

/// The pod's phase: `Pending`, `Running`, `Succeeded` or `Failed`.
pub fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Why a pod cannot be asked; `None` when it runs.
pub fn not_running(pod: &Pod) -> Option<String> {
    if running(std::slice::from_ref(pod)).is_some() {
        return None;
    }
    let plain = || {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        format!("pod {name} is {}", phase(pod).unwrap_or("in no phase"))
    };
    Some(why_not_running(pod).unwrap_or_else(plain))
}

/// Whether the kubelet says that the pod is Ready.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions.unwrap_or_default().iter().any(|it| it.type_ == "Ready" && it.status == "True")
}

/// Adds what the pods say to a status: reasons to nodes that do not take part, and for nodes that do, why
/// their agents' pods are not Ready.
pub fn explain(pods: &[Pod], status: &mut Status) {
    // Without any agent pod, agents run outside of pods and none is missing.
    if pods.is_empty() {
        return;
    }
    let mut of_nodes: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
    for pod in pods {
        if let Some(node) = node_of(pod) {
            of_nodes.entry(node).or_default().push(pod);
        }
    }
    for node in &mut status.nodes {
        let own = of_nodes.remove(node.name.as_str()).unwrap_or_default();
        let mut found: Vec<_> = own.iter().filter_map(|pod| why_not_running(pod)).collect();
        if own.is_empty() {
            found.push(NO_POD.to_owned());
        }
        if node.ready {
            // While a pod is replaced, two are on the node.
            if !own.iter().any(|pod| is_ready(pod)) {
                let plain = || own.iter().map(|pod| not_ready(pod, &node.name)).collect();
                let found = if found.is_empty() { plain() } else { found };
                status.pods.insert(node.name.clone(), found.join(", "));
            }
            continue;
        }
        if found.is_empty() {
            continue;
        }
        for reason in &mut node.not_ready {
            if reason.starts_with(NEVER_CHECKED_IN) {
                NEVER_CHECKED_IN.clone_into(reason);
            }
        }
        node.not_ready.extend(found);
    }
}

/// Says of a pod that nothing keeps from running that it is not Ready.
fn not_ready(pod: &Pod, node: &str) -> String {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    match phase(pod) {
        Some("Running") => format!("pod {name} is not Ready: `kgctl status {node}` shows why"),
        phase => format!("pod {name} is {}", phase.unwrap_or("in no phase")),
    }
}

/// Name of the pod's node.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Why a pod's agent does not run, according to its status; `None` when its containers run, or one of its
/// init containers does.
pub fn why_not_running(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let containers =
        || [&status.init_container_statuses, &status.container_statuses].into_iter().flatten().flatten();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let Some(reason) = containers().find_map(why_stopped) else {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or(AGENTS_NAMESPACE);
        // What the kubelet waits for, a volume for example, is only in its Events.
        return containers().next().is_some_and(is_being_made).then(|| {
            format!(
                "pod {name}: its containers are being created; if that lasts, `kubectl --namespace {namespace} describe \
                 pod {name}` says what they wait for"
            )
        });
    };
    let mut text = format!("pod {name}: {reason}");
    if OTHER_ARCHITECTURE.iter().any(|words| text.contains(words)) {
        text += "; the image is of another architecture than the node: name one that is built for both \
                 (docs/troubleshooting.md)";
    }
    Some(text)
}

/// Whether the kubelet has not started the container yet: it waits for volumes or the sandbox.
fn is_being_made(container: &ContainerStatus) -> bool {
    let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
    waiting.and_then(|waiting| waiting.reason.as_deref()).is_some_and(|reason| MAKING.contains(&reason))
}

fn why_stopped(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let said = last_words(state).or_else(|| last_words(container.last_state.as_ref()?));
    let reason = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => {
            let reason = waiting.reason.clone().unwrap_or_default();
            if MAKING.contains(&reason.as_str()) && said.is_none() {
                return None;
            }
            match said.or_else(|| waiting.message.clone()) {
                Some(text) => format!("{reason}: {text}"),
                None => reason,
            }
        }
        (None, Some(terminated)) if terminated.exit_code != 0 => {
            said.unwrap_or_else(|| format!("exit code {}", terminated.exit_code))
        }
        _ => return None,
    };
    Some(format!("container {}: {reason}", container.name))
}

/// The last line of a failed container's termination message.
fn last_words(state: &ContainerState) -> Option<String> {
    let ended = state.terminated.as_ref().filter(|ended| ended.exit_code != 0)?;
    ended
        .message
        .as_deref()?
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .map(|line| line.trim().to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_pod_with_the_label_that_anybody_may_make_is_no_agent() {
        let is_agents = |namespace: &str, spec: Value| {
            let pod = json!({ "metadata": { "name": "kilo-x", "namespace": namespace }, "spec": spec });
            is_agents(&serde_json::from_value(pod).unwrap(), AGENTS_NAMESPACE)
        };
        let plain = || json!({ "containers": [{ "name": "kilo" }] });
        assert!(is_agents("kube-system", plain()));
        assert!(is_agents("networking", json!({ "hostNetwork": true, "containers": [{ "name": "kilo" }] })));
        assert!(!is_agents("a-tenant", plain()));
    }

    fn why(status: &Value) -> Option<String> {
        let pod = json!({ "metadata": { "name": "kilo-x" }, "status": status });
        why_not_running(&serde_json::from_value(pod).unwrap())
    }

    fn container(name: &str, state: &Value, last: &Value) -> Value {
        json!({ "name": name, "state": state, "lastState": last, "image": "", "imageID": "", "ready": false,
                "restartCount": 0 })
    }

    #[test]
    fn an_image_of_another_architecture_is_recognised_by_what_runtime_and_registry_say() {
        let ended =
            json!({ "terminated": { "exitCode": 255, "message": "exec /bin/sh: exec format error\n" } });
        let waits =
            json!({ "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 10s restarting" } });
        let created = json!({ "waiting": { "reason": "PodInitializing" } });
        let text = why(&json!({
            "initContainerStatuses": [container("install-cni", &waits, &ended)],
            "containerStatuses": [container("kilo", &created, &json!({}))],
        }));
        let text = text.unwrap();
        assert!(
            text.starts_with(
                "pod kilo-x: container install-cni: CrashLoopBackOff: exec /bin/sh: exec format error"
            ),
            "{text}"
        );
        assert!(text.contains("another architecture") && text.contains("troubleshooting"), "{text}");
        let pull = json!({ "waiting": { "reason": "ErrImagePull", "message": "no match for platform in manifest: not found" } });
        let text = why(&json!({ "containerStatuses": [container("kilo", &pull, &json!({}))] })).unwrap();
        assert!(text.contains("ErrImagePull: no match") && text.contains("another architecture"), "{text}");
    }

    #[test]
    fn what_kg_said_last_is_shown_and_a_pod_that_runs_is_not_blamed() {
        let ended = json!({ "terminated": { "exitCode": 1, "message": "INFO start\nkg: forbidden; apply the ClusterRole\n" } });
        let text = why(&json!({ "containerStatuses": [container("kilo", &ended, &json!({}))] })).unwrap();
        assert_eq!(text, "pod kilo-x: container kilo: kg: forbidden; apply the ClusterRole");
        let runs = json!({ "running": {} });
        assert_eq!(why(&json!({ "containerStatuses": [container("kilo", &runs, &ended)] })), None);
        assert_eq!(why(&json!({})), None);
    }

    #[test]
    fn of_containers_that_are_not_made_the_events_are_pointed_to() {
        let starts = json!({ "waiting": { "reason": "ContainerCreating" } });
        let text = why(&json!({ "containerStatuses": [container("kilo", &starts, &json!({}))] })).unwrap();
        assert!(text.contains("`kubectl --namespace kube-system describe pod kilo-x`"), "{text}");
        let waits = json!({ "waiting": { "reason": "PodInitializing" } });
        let after = |init: &Value| {
            why(&json!({
                "initContainerStatuses": [container("install-cni", init, &json!({}))],
                "containerStatuses": [container("kilo", &waits, &json!({}))],
            }))
        };
        assert_eq!(after(&json!({ "running": {} })), None);
        assert!(after(&waits).is_some());
    }

    #[test]
    fn a_node_that_takes_part_needs_a_pod_that_is_ready() {
        let pod = |node: &str, name: &str, ready: &str| -> Pod {
            let runs = container("kilo", &json!({ "running": {} }), &json!({}));
            let status = json!({ "phase": "Running", "containerStatuses": [runs],
                "conditions": [{ "type": "Ready", "status": ready }] });
            let spec = json!({ "nodeName": node, "containers": [] });
            serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec, "status": status }))
                .unwrap()
        };
        let node = |name: &str, ready: bool| json!({ "name": name, "location": "location:east", "leads": false, "ready": ready, "podCIDRs": [] });
        let status: Status = serde_json::from_value(json!({
            "time": "2026-01-01T00:00:00Z", "granularity": "location", "subnet": "10.4.0.0/16", "locations": [],
            "nodes": [node("a1", true), node("a2", true), node("a3", true), node("a4", false)],
            "peers": [], "problems": {},
        }))
        .unwrap();
        let mut seen = status.clone();
        explain(&[], &mut seen);
        assert_eq!(seen, status, "agents may run outside of pods");
        let pods = [
            pod("a1", "kilo-old", "False"),
            pod("a1", "kilo-new", "True"),
            pod("a2", "kilo-x", "False"),
            pod("a4", "kilo-y", "False"),
        ];
        explain(&pods, &mut seen);
        assert_eq!(seen.pods.keys().collect::<Vec<_>>(), ["a2", "a3"]);
        assert!(seen.pods["a2"].contains("pod kilo-x is not Ready: `kgctl status a2`"), "{:?}", seen.pods);
        assert!(seen.pods["a3"].contains("no pod of Kilo is on it"), "{:?}", seen.pods);
        let problems = crate::status::problems(&seen);
        assert!(problems.iter().any(|found| found.object == "node/a2" && found.what.contains("kilo-x")));
        // What the agent itself says is better than that its pod is not Ready.
        seen.unhealthy.insert("a2".to_owned(), "no route socket".to_owned());
        let problems = crate::status::problems(&seen);
        let of_a2: Vec<_> = problems.iter().filter(|found| found.object == "node/a2").collect();
        assert_eq!(of_a2.len(), 1, "{problems:?}");
    }
}
