//! `kubeadm init` on the first node, `kubeadm join` on the others.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context as _, Result};

use super::{
    network::{PODS, PODS_V6, SERVICES, SERVICES_V6},
    node::Node,
    release::Release,
};

const TOKEN: &str = "abcdef.0123456789abcdef";
const SOCKET: &str = "unix:///run/containerd/containerd.sock";
/// Last log lines of the kubelet and of the control plane's containers.
const LAST_LINES: &str = "tail -n 15 /var/log/kubelet.log; tail -n 5 /var/log/pods/*/*/*.log";
/// Ignores preflight checks, which a node in namespaces cannot pass.
const CHECKS: &str = "--ignore-preflight-errors=all";

/// Creates the control plane on that node.
pub fn init(node: &Node, release: Release) -> Result<()> {
    node.write("/opt/kubeadm.yaml", &configuration(node, release))?;
    let socket = || node.path("/run/containerd/containerd.sock").ok().filter(|path| path.exists()).map(drop);
    super::until("containerd is up", Duration::from_secs(30), socket)?;
    // Debian has no package of CoreDNS.
    node.sh(&format!(
        "kubeadm init --config /opt/kubeadm.yaml {CHECKS} --skip-phases=preflight,addon/coredns > /var/log/kubeadm.log 2>&1 \
         || {{ (tail -n 30 /var/log/kubeadm.log; {LAST_LINES}) >&2; exit 1; }}"
    ))
    .context("kubeadm init")?;
    Ok(())
}

/// Installs kube-proxy, as `kubeadm init` does.
pub fn add_kube_proxy(node: &Node) -> Result<()> {
    node.sh("kubeadm init phase addon kube-proxy --config /opt/kubeadm.yaml").map(drop)
}

/// Joins another node to the cluster of the first.
pub fn join(node: &Node, first: &Node) -> Result<()> {
    let hash = first.sh(
        "openssl x509 -in /etc/kubernetes/pki/ca.crt -pubkey -noout | openssl pkey -pubin -outform der | sha256sum",
    )?;
    let hash = hash.split_whitespace().next().context("openssl printed no hash")?;
    node.sh(&format!(
        "kubeadm join {}:6443 --token {TOKEN} --discovery-token-ca-cert-hash sha256:{hash} --node-name {} \
         --cri-socket {SOCKET} {CHECKS} > /var/log/kubeadm.log 2>&1 \
         || {{ tail -n 30 /var/log/kubeadm.log >&2; exit 1; }}",
        endpoint(first),
        node.name(),
    ))
    .context("kubeadm join")?;
    Ok(())
}

/// Address of the API server for nodes: on the public network, so that a node that boots in another
/// location needs no mesh to get its pods.
pub fn endpoint(first: &Node) -> Ipv4Addr {
    first.site.public.unwrap_or(first.site.address)
}

fn configuration(node: &Node, release: Release) -> String {
    let (api, address, version) = (release.kubeadm_api, node.site.address, release.version);
    let join = |v4: &str, v6: &str| match release.has_two_families() {
        true => format!("\"{v4},{v6}\""),
        false => v4.to_owned(),
    };
    let (pods, services) = (join(PODS, PODS_V6), join(SERVICES, SERVICES_V6));
    let (never, cgroups) = match release.is_current {
        true => ("imagePullPolicy: Never", "failCgroupV1: false\n"),
        false => ("ignorePreflightErrors: []", ""),
    };
    let [call, health] = [60, 240].map(|seconds| super::extended(Duration::from_secs(seconds)).as_secs());
    // Older releases have no such setting.
    let timeouts = match release.is_current {
        true => format!(
            "timeouts: {{kubernetesAPICall: {call}s, etcdAPICall: {health}s, kubeletHealthCheck: {health}s, \
             controlPlaneComponentHealthCheck: {health}s}}\n"
        ),
        false => String::new(),
    };
    format!(
        r#"apiVersion: kubeadm.k8s.io/{api}
kind: InitConfiguration
bootstrapTokens: [{{token: "{TOKEN}", ttl: 24h0m0s}}]
localAPIEndpoint: {{advertiseAddress: {address}, bindPort: 6443}}
nodeRegistration: {{name: {name}, criSocket: "{SOCKET}", taints: [], {never}}}
{timeouts}---
apiVersion: kubeadm.k8s.io/{api}
kind: ClusterConfiguration
kubernetesVersion: v{version}
clusterName: kilo
controlPlaneEndpoint: "{endpoint}:6443"
etcd: {{local: {{imageTag: {etcd}}}}}
networking: {{podSubnet: {pods}, serviceSubnet: {services}}}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
{cgroups}failSwapOn: false
oomScoreAdj: 0
# The machine's disk is everybody's.
evictionHard: {{imagefs.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", memory.available: "0%"}}
imageGCHighThresholdPercent: 100
fileCheckFrequency: 2s
nodeStatusUpdateFrequency: 5s
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
oomScoreAdj: 0
# The table's size is the machine's.
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
"#,
        name = node.name(),
        etcd = release.etcd,
        endpoint = endpoint(node),
    )
}
