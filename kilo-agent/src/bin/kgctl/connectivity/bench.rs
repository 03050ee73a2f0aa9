//! The namespace, pods and Service of a test, and how they go.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kilo_agent::status::pods;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use super::probe;
use crate::{cluster::Cluster, progress::Progress, refusal::Asked};

/// Where everything of a test is.
pub const NAMESPACE: &str = "kilo-connectivity-test";
/// By this the next run knows what an earlier one has left.
const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "kgctl-connectivity-test");
const NAME: &str = "probe";
const POLL: Duration = Duration::from_millis(500);
/// Any user but root.
const USER: i64 = 65_532;

/// A pod that answers and asks.
#[derive(Clone, Debug)]
pub struct ProbePod {
    /// The node it is on.
    pub node: String,
    /// That node's location.
    pub location: String,
    /// Its addresses, one of each family it has.
    pub addresses: Vec<IpAddr>,
    /// The object.
    pub object: Pod,
}

/// Makes what a test needs, and removes it.
pub struct Bench {
    cluster: Cluster,
    image: String,
}

impl Bench {
    /// Nothing is made yet.
    pub fn new(cluster: Cluster, image: String) -> Self {
        Self { cluster, image }
    }

    /// The cluster it is in.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.cluster.client.clone())
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client.clone(), NAMESPACE)
    }

    /// Deletes namespaces of tests, and waits until they are gone.
    pub async fn remove(&self, patience: Duration) -> Result<()> {
        let (cluster, namespaces) = (&self.cluster, self.namespaces());
        let ours = ListParams::default().labels(&format!("{}={}", LABEL.0, LABEL.1));
        let started = Instant::now();
        let progress = Progress::new("removing the test's namespace", 0);
        loop {
            let found = cluster.ask(Asked::new("list", "namespaces"), namespaces.list(&ours)).await?;
            if found.items.is_empty() {
                drop(progress);
                return Ok(());
            }
            for namespace in found.items.iter().filter(|found| found.metadata.deletion_timestamp.is_none()) {
                // Nothing to be saved in them: pods end at once.
                let name = namespace.name_any();
                let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &name);
                let _ = pods
                    .delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default())
                    .await;
                let asked = Asked::new("delete", "namespaces");
                let gone = async {
                    match namespaces.delete(&name, &DeleteParams::default()).await {
                        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
                        other => other.map(drop),
                    }
                };
                cluster.ask(asked, gone).await?;
            }
            if started.elapsed() > patience {
                bail!("namespace {NAMESPACE} is not gone after {} s", patience.as_secs());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// A pod on each node, running.
    pub async fn start(&self, nodes: &BTreeMap<String, String>, patience: Duration) -> Result<Vec<ProbePod>> {
        let cluster = &self.cluster;
        let namespace = serde_json::from_value(json!({"metadata": {"name": NAMESPACE, "labels": {
            LABEL.0: LABEL.1, "pod-security.kubernetes.io/enforce": "restricted",
        }}}))?;
        let create = PostParams::default();
        cluster
            .ask(Asked::new("create", "namespaces"), self.namespaces().create(&create, &namespace))
            .await?;
        let started = Instant::now();
        for node in nodes.keys() {
            let pod = serde_json::from_value(self.pod(node))?;
            loop {
                let asked = Asked::new("create", "pods").within(NAMESPACE);
                match cluster.ask(asked, self.pods().create(&create, &pod)).await {
                    Ok(_) => break,
                    // The account of a new namespace comes a moment later.
                    Err(error)
                        if error.to_string().contains("serviceaccount") && started.elapsed() < patience =>
                    {
                        tokio::time::sleep(POLL).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        self.wait(nodes, started, patience).await
    }

    async fn wait(
        &self,
        nodes: &BTreeMap<String, String>,
        started: Instant,
        patience: Duration,
    ) -> Result<Vec<ProbePod>> {
        let progress = Progress::new("waiting for pods", nodes.len());
        loop {
            let asked = Asked::new("list", "pods").within(NAMESPACE);
            let found = self.cluster.ask(asked, self.pods().list(&ListParams::default())).await?.items;
            let runs: Vec<_> = found.iter().filter_map(|pod| running(pod, nodes)).collect();
            progress.of(
                i32::try_from(runs.len()).unwrap_or(i32::MAX),
                i32::try_from(nodes.len()).unwrap_or(i32::MAX),
            );
            if runs.len() == nodes.len() {
                return Ok(runs);
            }
            if started.elapsed() > patience {
                let waits = found.iter().filter(|pod| running(pod, nodes).is_none());
                let why: Vec<_> = waits
                    .map(|pod| {
                        let node = pods::node_of(pod).unwrap_or_default();
                        let why = pods::why_not_running(pod)
                            .unwrap_or_else(|| pods::phase(pod).unwrap_or_default().to_owned());
                        format!("on {node}: {why}")
                    })
                    .collect();
                bail!("not every pod runs after {} s (--timeout): {}", patience.as_secs(), why.join("; "));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The addresses of a Service of all pods, one of each family the cluster gives it.
    pub async fn service(&self) -> Result<Vec<IpAddr>> {
        let services: Api<Service> = Api::namespaced(self.cluster.client.clone(), NAMESPACE);
        let object = serde_json::from_value(json!({
            "metadata": {"name": NAME},
            "spec": {
                "selector": {"app": NAME}, "ipFamilyPolicy": "PreferDualStack",
                "ports": [{"port": probe::PORT, "protocol": "TCP"}],
            },
        }))?;
        let asked = Asked::new("create", "services").within(NAMESPACE);
        let made = self.cluster.ask(asked, services.create(&PostParams::default(), &object)).await?;
        let spec = made.spec.unwrap_or_default();
        let addresses = spec.cluster_ips.unwrap_or_else(|| spec.cluster_ip.into_iter().collect());
        // kube-proxy learns of it and of its endpoints by watches.
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(addresses.iter().filter_map(|address| address.parse().ok()).collect())
    }

    fn pod(&self, node: &str) -> serde_json::Value {
        json!({
            "metadata": {"name": format!("{NAME}-{node}"), "labels": {"app": NAME, LABEL.0: LABEL.1}},
            "spec": {
                // Past the scheduler: also where nothing else is to run.
                "nodeName": node,
                "tolerations": [{"operator": "Exists"}],
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 0,
                "securityContext": {
                    "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [{
                    "name": "kilo",
                    "image": self.image,
                    "command": ["kgctl", probe::SERVER],
                    "securityContext": {
                        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
                }],
            },
        })
    }
}

fn running(pod: &Pod, nodes: &BTreeMap<String, String>) -> Option<ProbePod> {
    let node = pods::node_of(pod)?;
    let status = pod.status.as_ref()?;
    let is_ready = status.container_statuses.iter().flatten().all(|container| container.ready);
    let addresses = status.pod_ips.iter().flatten().filter_map(|address| address.ip.parse().ok());
    let addresses: Vec<IpAddr> = addresses.collect();
    (status.phase.as_deref() == Some("Running") && is_ready && !addresses.is_empty()).then(|| ProbePod {
        node: node.to_owned(),
        location: nodes.get(node).cloned().unwrap_or_default(),
        addresses,
        object: pod.clone(),
    })
}
