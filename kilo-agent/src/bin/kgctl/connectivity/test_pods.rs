//! Creates and removes the namespace, pods and Service of a test.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kilo_agent::status::pods;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::json;

use super::{
    heartbeat::{self, Holder, Observed},
    probe,
};
use crate::{cluster::Cluster, progress::Progress, refusal::Asked};

/// Namespace of all objects of a test.
pub const NAMESPACE: &str = "kilo-connectivity-test";
/// Label that marks the namespace as one of a test.
const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "kgctl-connectivity-test");
const NAME: &str = "probe";
const POLL: Duration = Duration::from_millis(500);
/// Any user but root.
const USER: i64 = 65_532;

/// A pod that sends and answers probes.
#[derive(Clone, Debug)]
pub struct ProbePod {
    /// The node it is on.
    pub node: String,
    /// That node's location.
    pub location: String,
    /// The pod's addresses, one per address family.
    pub addresses: Vec<IpAddr>,
    /// The Pod object.
    pub object: Pod,
}

/// Creates what a test needs, and removes what it created, which the namespace's uid identifies.
pub struct TestPods {
    cluster: Cluster,
    image: String,
    uid: Option<String>,
}

impl TestPods {
    /// Creates nothing yet.
    pub fn new(cluster: Cluster, image: String) -> Self {
        Self { cluster, image, uid: None }
    }

    /// The cluster under test.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.cluster.client.clone())
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client.clone(), NAMESPACE)
    }

    async fn found(&self) -> Result<Option<Namespace>> {
        let (asked, namespaces) = (Asked::new("get", "namespaces"), self.namespaces());
        self.cluster.ask(asked, namespaces.get_opt(NAMESPACE)).await
    }

    /// Waits until no namespace of another run exists; deletes one whose heartbeat has stopped.
    ///
    /// # Errors
    /// When another run is under way.
    pub async fn wait_until_free(&self, patience: Duration) -> Result<()> {
        let _progress = Progress::new("waiting for the end of an earlier run", 0);
        let (mut observed, mut deleted): (Option<Observed>, Option<Instant>) = (None, None);
        while let Some(found) = self.found().await? {
            if found.labels().get(LABEL.0).is_none_or(|value| value != LABEL.1) {
                bail!(
                    "namespace {NAMESPACE} was not created by kgctl: label {}={} is missing",
                    LABEL.0,
                    LABEL.1
                );
            }
            let observed = observed.get_or_insert_with(|| Observed::new(&found));
            if found.metadata.deletion_timestamp.is_some() {
                if deleted.get_or_insert_with(Instant::now).elapsed() > patience {
                    bail!(
                        "namespace {NAMESPACE} of an earlier run still exists after {} s",
                        patience.as_secs()
                    );
                }
            } else {
                match observed.holder(&found) {
                    Holder::Runs => bail!(
                        "another connectivity-test has been running in this cluster since {}, and holds namespace \
                         {NAMESPACE}; try again when it is done",
                        heartbeat::made(&found)
                    ),
                    Holder::Unknown => {}
                    // The version makes this fail if the heartbeat continues.
                    Holder::Gone => self.delete(&found, found.resource_version()).await?,
                }
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Creates the namespace; returns false when another run was quicker.
    pub async fn claim(&mut self) -> Result<bool> {
        let namespace = serde_json::from_value(json!({"metadata": {
            "name": NAMESPACE,
            "labels": {LABEL.0: LABEL.1, "pod-security.kubernetes.io/enforce": "restricted"},
            "annotations": {heartbeat::ANNOTATION: heartbeat::now()},
        }}))?;
        let (namespaces, parameters) = (self.namespaces(), PostParams::default());
        let create = async {
            match namespaces.create(&parameters, &namespace).await {
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
                other => other.map(Some),
            }
        };
        let made = self.cluster.ask(Asked::new("create", "namespaces"), create).await?;
        self.uid = made.and_then(|made| made.metadata.uid);
        Ok(self.uid.is_some())
    }

    /// Renews the heartbeat while the namespace belongs to this run; returns why it no longer does.
    pub async fn keep(&self) -> anyhow::Error {
        let (namespaces, parameters) = (self.namespaces(), PatchParams::default());
        let mut beaten = Instant::now();
        loop {
            tokio::time::sleep(heartbeat::PERIOD).await;
            let at = Instant::now();
            let metadata = json!({"uid": self.uid, "annotations": {heartbeat::ANNOTATION: heartbeat::now()}});
            let patch = Patch::Merge(json!({"metadata": metadata}));
            let beat = async {
                match namespaces.patch(NAMESPACE, &parameters, &patch).await {
                    Ok(found) => Ok(found.metadata.deletion_timestamp.is_none()),
                    // It is gone, or another one with another uid.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(false),
                    Err(error) => Err(error),
                }
            };
            let asked = self.cluster.ask(Asked::new("patch", "namespaces"), beat);
            let asked = tokio::time::timeout(heartbeat::PERIOD, asked).await;
            match asked.unwrap_or_else(|_| Err(anyhow!("the API server does not answer"))) {
                Ok(true) => beaten = at,
                Ok(false) => {
                    return anyhow!("namespace {NAMESPACE} of this run was deleted by somebody else");
                }
                // Ends before another run can consider this one dead.
                Err(error) if beaten.elapsed() + 2 * heartbeat::PERIOD >= heartbeat::STALE => {
                    return error.context("failed to renew this run's heartbeat; another run may start");
                }
                Err(_) => {}
            }
        }
    }

    /// Deletes the namespace of this run, and waits until it is gone.
    pub async fn remove(&self, patience: Duration) -> Result<()> {
        let started = Instant::now();
        let _progress = Progress::new("removing the test's namespace", 0);
        loop {
            let found = self.found().await?.filter(|found| self.uid.is_some() && found.uid() == self.uid);
            let Some(found) = found else { return Ok(()) };
            if found.metadata.deletion_timestamp.is_none() {
                self.delete(&found, None).await?;
            }
            if started.elapsed() > patience {
                bail!("namespace {NAMESPACE} still exists after {} s", patience.as_secs());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Deletes this namespace, but no other one of the same name; with a version, only if it is unchanged.
    async fn delete(&self, seen: &Namespace, resource_version: Option<String>) -> Result<()> {
        let preconditions = Preconditions { uid: seen.uid(), resource_version };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let namespaces = self.namespaces();
        let gone = async {
            match namespaces.delete(NAMESPACE, &parameters).await {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
                other => other.map(drop),
            }
        };
        self.cluster.ask(Asked::new("delete", "namespaces"), gone).await
    }

    /// Starts a pod on each node, and waits until all are running.
    pub async fn start(&self, nodes: &BTreeMap<String, String>, patience: Duration) -> Result<Vec<ProbePod>> {
        let (cluster, create) = (&self.cluster, PostParams::default());
        let progress = Progress::new("starting pods", nodes.len());
        let started = Instant::now();
        for node in nodes.keys() {
            let pod = serde_json::from_value(self.pod(node))?;
            loop {
                let asked = Asked::new("create", "pods").within(NAMESPACE);
                match cluster.ask(asked, self.pods().create(&create, &pod)).await {
                    Ok(_) => break,
                    // The service account of a new namespace appears a moment later.
                    Err(error)
                        if error.to_string().contains("serviceaccount") && started.elapsed() < patience =>
                    {
                        tokio::time::sleep(POLL).await;
                    }
                    Err(error) => return Err(error),
                }
            }
            progress.step();
        }
        drop(progress);
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
                bail!("pods not running after {} s (--timeout): {}", patience.as_secs(), why.join("; "));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Creates a Service of all pods; returns its addresses, one per address family that the cluster assigns.
    pub async fn service(&self) -> Result<Vec<IpAddr>> {
        let _progress = Progress::new("making the Service known to kube-proxy", 0);
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
        // kube-proxy learns of the Service and its endpoints by watches, a moment later.
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(addresses.iter().filter_map(|address| address.parse().ok()).collect())
    }

    fn pod(&self, node: &str) -> serde_json::Value {
        json!({
            "metadata": {"name": format!("{NAME}-{node}"), "labels": {"app": NAME, LABEL.0: LABEL.1}},
            "spec": {
                // Bypasses the scheduler, to reach nodes where nothing else may run.
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
