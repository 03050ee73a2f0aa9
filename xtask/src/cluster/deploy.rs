//! Deploys Kilo by its manifests, and test pods.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{Cluster, images, node::Node, release::Release, until};
use crate::{
    command::run,
    lab::{
        netns::Netns,
        probe::{self, Protocol},
    },
    workspace_root,
};

/// The Service of the test pods.
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// Its IPv6 address, where the API server has both families.
pub const SERVICE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x80);
/// Its port on every node.
pub const NODE_PORT: u16 = 30080;
/// The test pods' port on their nodes.
pub const HOST_PORT: u16 = 8081;

/// True when this kernel has WireGuard.
pub fn has_wireguard() -> bool {
    has_links_of("wireguard")
}

/// True when this kernel has IPIP.
pub fn has_ipip() -> bool {
    has_links_of("ipip")
}

fn has_links_of(kind: &str) -> bool {
    let ip = |arguments: &[&str]| run(std::process::Command::new("ip").args(arguments));
    ip(&["link", "add", "kilo-try", "type", kind]).is_ok() && ip(&["link", "delete", "kilo-try"]).is_ok()
}

/// File of manifests/ for this kernel: with kernel WireGuard, or with userspace WireGuard.
pub fn manifest_name() -> &'static str {
    if has_wireguard() { "kilo-kubeadm.yaml" } else { "kilo-kubeadm-userspace.yaml" }
}

/// Applies the manifests as users do, and waits until they are rolled out; returns after what time every pod
/// was ready.
pub fn apply(cluster: &Cluster) -> Result<Duration> {
    let (userspace, kilo) = (!has_wireguard(), manifest_name());
    for node in &cluster.nodes {
        let location = format!("kilo.squat.ai/location={}", node.site.location());
        cluster.kubectl(&["annotate", "--overwrite", "node", node.name(), &location])?;
    }
    let started = Instant::now();
    for file in ["crds.yaml", kilo] {
        apply_file(cluster, file)?;
    }
    until("every pod of Kilo is ready", Duration::from_secs(180), || {
        all_are_ready(cluster).ok()?.then_some(())
    })?;
    if userspace {
        wireguard_is_ready(cluster)?;
    }
    let took = started.elapsed();
    // Later than ready: a rollout waits for `minReadySeconds` as well.
    wait_rolled_out(cluster, "kilo", 180)?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=180s"])?;
    Ok(took)
}

/// True when the DaemonSet has a ready pod of its newest template on every node.
fn all_are_ready(cluster: &Cluster) -> Result<bool> {
    let object = cluster.get(&["daemonset", "kilo", "-n", "kube-system"])?;
    let count = |path: &str| object.pointer(path).and_then(serde_json::Value::as_u64).unwrap_or_default();
    let wanted = count("/status/desiredNumberScheduled");
    Ok(wanted > 0
        && count("/status/observedGeneration") == count("/metadata/generation")
        && count("/status/updatedNumberScheduled") == wanted
        && count("/status/numberReady") == wanted)
}

/// Waits until the pods with userspace WireGuard are ready.
pub fn wireguard_is_ready(cluster: &Cluster) -> Result<()> {
    let pods = ["pod", "-l", "app.kubernetes.io/name=kilo-wireguard", "--timeout=120s"];
    let wait = ["-n", "kube-system", "wait", "--for=condition=Ready"];
    cluster.kubectl(&[&wait[..], &pods[..]].concat()).map(drop)
}

/// Text of a file of manifests/.
pub fn manifest(name: &str) -> Result<String> {
    let path = workspace_root().join("manifests").join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// Runs `kubectl apply -f` with a file of manifests/. Before 1.21 there is no `PodDisruptionBudget` of
/// policy/v1: it is left out, as docs/peer-validation.md says.
pub fn apply_file(cluster: &Cluster, name: &str) -> Result<()> {
    let whole = manifest(name)?;
    let is_known =
        |document: &&str| cluster.release.is_current || !document.contains("kind: PodDisruptionBudget");
    let text = whole.split("\n---\n").filter(is_known).collect::<Vec<_>>().join("\n---\n");
    let inside = format!("/opt/manifests/{name}");
    cluster.first().write(&inside, &text)?;
    let mut arguments = vec!["apply", "-f", &inside];
    if !cluster.release.is_current {
        arguments.push("--validate=false");
    }
    cluster.kubectl(&arguments).map(drop)
}

/// Gives the agents one more argument, and waits until all have started with it.
pub fn add_argument(cluster: &Cluster, argument: &str) -> Result<()> {
    let path = "/spec/template/spec/containers/0/args/-";
    let patch = serde_json::json!([{ "op": "add", "path": path, "value": argument }]).to_string();
    cluster.kubectl(&["-n", "kube-system", "patch", "ds/kilo", "--type=json", "-p", &patch])?;
    wait_rolled_out(cluster, "kilo", 180)
}

/// Waits until a DaemonSet of kube-system has rolled out.
pub fn wait_rolled_out(cluster: &Cluster, daemon_set: &str, seconds: u32) -> Result<()> {
    let (object, timeout) = (format!("ds/{daemon_set}"), format!("--timeout={seconds}s"));
    cluster.kubectl(&["-n", "kube-system", "rollout", "status", &object, &timeout]).map(drop)
}

/// Lines of a Service spec that set its addresses.
pub fn addresses(release: Release, [v4, v6]: [IpAddr; 2]) -> String {
    match release.has_two_families() {
        true => {
            format!("  clusterIP: {v4}\n  clusterIPs: [{v4}, '{v6}']\n  ipFamilyPolicy: RequireDualStack")
        }
        false => format!("  clusterIP: {v4}"),
    }
}

/// Creates a Deployment with a pod on every node, behind a ClusterIP, a NodePort and a hostPort.
pub fn test_pods(cluster: &Cluster) -> Result<()> {
    let objects = OBJECTS
        .replace("REPLICAS", &cluster.nodes.len().to_string())
        .replace("IMAGE", images::TEST)
        .replace("ADDRESSES", &addresses(cluster.release, [SERVICE.into(), SERVICE_V6.into()]))
        .replace(
            "FAMILIES",
            if cluster.release.has_two_families() { "  ipFamilyPolicy: RequireDualStack" } else { "" },
        );
    cluster.apply(&objects)?;
    cluster.kubectl(&["rollout", "status", "deployment/echo", "--timeout=180s"])?;
    start_test_servers(cluster)?;
    ensure_families(cluster)?;
    wait_service_answers(cluster, (SERVICE, 80).into())
}

/// Address of a Service on the probes' port, with that node's test pod as its only backend.
pub fn service_of(cluster: &Cluster, node: &Node) -> Result<IpAddr> {
    let pods = start_test_servers(cluster)?;
    cluster.kubectl(&["label", "--overwrite", "pod", &pod_on(&pods, node)?.name, "alone=true"])?;
    cluster.apply(ALONE)?;
    let address = cluster.kubectl(&["get", "service", "echo-alone", "-o", "jsonpath={.spec.clusterIP}"])?;
    let address: IpAddr = address.parse().with_context(|| format!("clusterIP {address:?}"))?;
    wait_service_answers(cluster, (address, probe::PORT).into())?;
    Ok(address)
}

/// Waits until every node gets a reply from the Service.
fn wait_service_answers(cluster: &Cluster, service: SocketAddr) -> Result<()> {
    for node in &cluster.nodes {
        until("kube-proxy knows the Service", Duration::from_secs(60), || {
            let ask = move || probe::probe_port(Protocol::Tcp, service, Duration::from_secs(2)).is_ok();
            node.netns().spawn(ask).join().ok()?.ok()?.then_some(())
        })?;
    }
    Ok(())
}

/// A pod that a kubelet started.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Name of its node.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Its first address, which is IPv4.
    pub address: IpAddr,
    /// Its IPv6 address, if it has one.
    pub second: Option<IpAddr>,
    /// Its network namespace.
    pub netns: Netns,
}

impl Pod {
    /// Its addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        [self.address].into_iter().chain(self.second)
    }
}

/// The running pods with that label, sorted by node.
pub fn pods(cluster: &Cluster, label: &str) -> Result<Vec<Pod>> {
    let list = cluster.get(&["pods", "-A", "-l", label])?;
    let mut pods = Vec::new();
    for item in list["items"].as_array().into_iter().flatten() {
        let text = |pointer: &str| item.pointer(pointer).and_then(|value| value.as_str());
        if item.pointer("/metadata/deletionTimestamp").is_some() || text("/status/phase") != Some("Running") {
            continue;
        }
        let node = text("/spec/nodeName").context("the pod has no node")?;
        let name = text("/metadata/name").context("the pod has no name")?;
        let container =
            text("/status/containerStatuses/0/containerID").context("the pod has no container")?;
        let container = container.trim_start_matches("containerd://");
        // After a power cut the API server still lists pods that ran before.
        let netns = cluster.node(node)?.container_netns(&format!("pod-{node}"), container);
        let Ok(netns) = netns else { continue };
        pods.push(Pod {
            node: node.to_owned(),
            name: name.to_owned(),
            address: text("/status/podIP").context("the pod has no address")?.parse()?,
            second: text("/status/podIPs/1/ip").map(str::parse).transpose()?,
            netns,
        });
    }
    pods.sort_by(|one, other| one.node.cmp(&other.node));
    Ok(pods)
}

/// Starts the servers in all test pods, and returns the pods.
pub fn start_test_servers(cluster: &Cluster) -> Result<Vec<Pod>> {
    let pods = pods(cluster, "app=echo")?;
    for pod in &pods {
        // This changes nothing in pods where a server runs already.
        for address in pod.addresses() {
            let _ = probe::serve(&pod.netns, address);
        }
    }
    Ok(pods)
}

/// Waits until duplicate address detection (RFC 4862, section 5.4) has finished on every node: until then a
/// node would send from an address that is not in the mesh.
pub fn addresses_hold(cluster: &Cluster) -> Result<()> {
    for node in &cluster.nodes {
        let hold = || node.netns().sh("ip -6 -oneline address show tentative").ok()?.is_empty().then_some(());
        until(&format!("the IPv6 addresses of {} hold", node.name()), Duration::from_secs(10), hold)?;
    }
    Ok(())
}

/// Fails when a test pod lacks an address of a family that the API server has.
pub fn ensure_families(cluster: &Cluster) -> Result<()> {
    let pods = pods(cluster, "app=echo")?;
    let lacking = pods.iter().find(|pod| pod.second.is_none() && cluster.release.has_two_families());
    lacking.map_or(Ok(()), |pod| bail!("the pod of {} has no IPv6 address", pod.node))
}

/// The test pod on that node.
pub fn pod_on<'a>(pods: &'a [Pod], node: &Node) -> Result<&'a Pod> {
    pods.iter().find(|pod| pod.node == node.name()).with_context(|| format!("no test pod on {}", node.name()))
}

const OBJECTS: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  replicas: REPLICAS
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      terminationGracePeriodSeconds: 0
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: echo}}}
      containers:
        - name: echo
          image: IMAGE
          command: [sleep, '2147483647']
          ports: [{containerPort: 7007, hostPort: 8081, protocol: TCP}]
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec:
ADDRESSES
  selector: {app: echo}
  ports: [{port: 80, targetPort: 7007}]
---
apiVersion: v1
kind: Service
metadata: {name: echo-node-port}
spec:
FAMILIES
  type: NodePort
  selector: {app: echo}
  ports: [{port: 80, targetPort: 7007, nodePort: 30080}]
";

const ALONE: &str = "
apiVersion: v1
kind: Service
metadata: {name: echo-alone}
spec:
  selector: {app: echo, alone: 'true'}
  ports: [{name: tcp, port: 7007}, {name: udp, port: 7007, protocol: UDP}]
";
