//! Service names: the path to a DNS server behind a ClusterIP. Debian has no package of `CoreDNS`; dnsmasq
//! answers from what the API server lists.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, bail};

use crate::cluster::{
    Cluster,
    deploy::{self, SERVICE, SERVICE_V6},
    images, until,
};

/// DNS server that kubeadm configures for pods.
const SERVER: &str = "10.96.0.10";
/// Resolver options of glibc: its default, and one TCP connection per query.
const TRANSPORTS: [(&str, &str); 2] = [("UDP", "attempts:1"), ("TCP", "attempts:1 use-vc")];

/// Resolves names from a pod on every node, with the DNS server in the second location.
pub fn resolve(cluster: &Cluster) -> Result<String> {
    let objects = OBJECTS
        .replace("IMAGE", images::TEST)
        .replace("SERVER", SERVER)
        .replace("NODE", cluster.remote().name())
        .replace("HOSTS", &hosts(cluster)?);
    cluster.apply(&objects)?;
    let result = cluster
        .kubectl(&["-n", "kube-system", "rollout", "status", "deployment/names", "--timeout=60s"])
        .and_then(|_| from_every_node(cluster));
    for object in ["deployment/names", "service/kube-dns", "configmap/names"] {
        cluster.kubectl(&["-n", "kube-system", "delete", object])?;
    }
    result
}

/// Lines of a hosts file with every Service.
fn hosts(cluster: &Cluster) -> Result<String> {
    let list = cluster.get(&["services", "--all-namespaces"])?;
    let mut lines = String::new();
    for item in list["items"].as_array().into_iter().flatten() {
        let text = |pointer: &str| item.pointer(pointer).and_then(|value| value.as_str());
        let name = text("/metadata/name").context("the Service has no name")?;
        let namespace = text("/metadata/namespace").context("the Service has no namespace")?;
        let second = text("/spec/clusterIPs/1");
        for address in text("/spec/clusterIP").into_iter().chain(second).filter(|address| *address != "None")
        {
            lines += &format!("    {address} {name}.{namespace}.svc.cluster.local\n");
        }
    }
    Ok(lines)
}

fn from_every_node(cluster: &Cluster) -> Result<String> {
    let mut wanted: Vec<IpAddr> = vec![SERVICE.into()];
    wanted.extend(cluster.release.has_two_families().then_some(IpAddr::from(SERVICE_V6)));
    let pods = deploy::pods(cluster, "app=echo")?;
    for pod in &pods {
        for (transport, options) in TRANSPORTS {
            let options = format!("RES_OPTIONS={options}");
            let ask = ["exec", &pod.name, "--", "env", &options, "getent", "ahosts", "echo"];
            let mut last = String::new();
            // kube-proxy learns of the server shortly after it is ready.
            let found = until("the name is resolved", Duration::from_secs(20), || {
                last = cluster.kubectl(&ask).unwrap_or_else(|error| format!("{error:#}"));
                wanted.iter().all(|address| last.contains(&format!("{address} "))).then_some(())
            });
            if found.is_err() {
                bail!("{transport} from {} does not find {wanted:?}: {last}", pod.node);
            }
        }
    }
    Ok(format!("{} pods found {wanted:?} by UDP and TCP", pods.len()))
}

const OBJECTS: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: names, namespace: kube-system}
data:
  hosts: |
HOSTS
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: names, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      nodeSelector: {kubernetes.io/hostname: NODE}
      terminationGracePeriodSeconds: 0
      containers:
        - name: dnsmasq
          image: IMAGE
          command: [dnsmasq, --keep-in-foreground, --user=root, --no-resolv, --no-hosts,
            --addn-hosts=/etc/names/hosts, --log-facility=-]
          volumeMounts: [{name: names, mountPath: /etc/names}]
      volumes: [{name: names, configMap: {name: names}}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: SERVER
  selector: {k8s-app: kube-dns}
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
";
