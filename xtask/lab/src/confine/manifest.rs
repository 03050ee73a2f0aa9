//! The rights a manifest gives the agent's container, read from the YAML that is shipped.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, de::DeserializeOwned};
use serde_yaml_ng::{Deserializer, Value};

/// What containerd and CRI-O give a container that says nothing about capabilities.
const RUNTIME_DEFAULT: [&str; 14] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// What the agent's container may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    /// The bounding set: capabilities without their `CAP_`.
    pub capabilities: BTreeSet<String>,
    /// Programs that it executes gain no privileges.
    pub no_new_privileges: bool,
    /// What is mounted into it, in the order of the manifest.
    pub mounts: Vec<Mount>,
}

/// One volume in the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where the content comes from.
    pub source: Source,
    /// Path in the container.
    pub target: String,
    /// Mounted read-only.
    pub read_only: bool,
    /// Later mounts of the host are propagated (`HostToContainer`).
    pub from_host: bool,
}

/// Where a volume comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A directory of the node, made when it is missing.
    DirectoryOrCreate(String),
    /// A file of the node, made when it is missing.
    FileOrCreate(String),
    /// A path of the node that must be there.
    Host(String),
    /// An empty directory of the pod.
    Empty,
    /// Files from the API server, which the lab does not have.
    Objects,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    #[serde(default)]
    host_network: bool,
    containers: Vec<Container>,
    #[serde(default)]
    volumes: Vec<Value>,
    #[serde(rename = "securityContext")]
    _security_context: Option<PodSecurityContext>,
}

/// Like [`SecurityContext`], it rejects unknown fields: what is not applied would not be tested.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodSecurityContext {
    // Its filter allows what the capabilities allow.
    #[serde(rename = "seccompProfile")]
    _seccomp: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    name: String,
    security_context: SecurityContext,
    #[serde(default)]
    volume_mounts: Vec<VolumeMount>,
}

/// Everything a manifest says here must be understood: what is not applied would not be tested.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SecurityContext {
    allow_privilege_escalation: Option<bool>,
    #[serde(default)]
    read_only_root_filesystem: bool,
    #[serde(default)]
    capabilities: Capabilities,
    // The lab loads no such policy.
    #[serde(rename = "appArmorProfile")]
    _app_armor: Option<Value>,
    #[serde(rename = "seLinuxOptions")]
    _se_linux: Option<Value>,
    #[serde(rename = "seccompProfile")]
    _seccomp: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Capabilities {
    #[serde(default)]
    drop: Vec<String>,
    #[serde(default)]
    add: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct VolumeMount {
    name: String,
    mount_path: String,
    #[serde(default)]
    read_only: bool,
    mount_propagation: Option<String>,
    sub_path: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostPath {
    path: String,
    #[serde(default, rename = "type")]
    kind: String,
}

impl Rights {
    /// Reads the container `kilo` of the DaemonSet `kilo` in a manifest, changed by these
    /// kustomize components.
    ///
    /// # Errors
    /// When something is missing or cannot be applied.
    pub fn read(manifest: &str, components: &[String]) -> Result<Self> {
        let documents = Deserializer::from_str(manifest).map(Value::deserialize);
        let documents = documents.collect::<Result<Vec<_>, _>>()?;
        let daemon_set = documents
            .iter()
            .find(|document| document["kind"] == "DaemonSet" && document["metadata"]["name"] == "kilo")
            .context("the manifest has no DaemonSet named kilo")?;
        let mut daemon_set = daemon_set.clone();
        components.iter().try_for_each(|component| apply(&mut daemon_set, component))?;
        let pod: PodSpec = typed(&daemon_set["spec"]["template"]["spec"])?;
        let container = pod.containers.iter().find(|container| container.name == "kilo");
        let container = container.context("the DaemonSet has no container named kilo")?;
        let context = &container.security_context;
        ensure!(pod.host_network, "the pod has a network of its own");
        ensure!(context.read_only_root_filesystem, "the container's root is not read-only");
        let mounts = container.volume_mounts.iter().map(|mount| mount.resolve(&pod.volumes));
        Ok(Self {
            capabilities: context.capabilities.bounding(),
            no_new_privileges: context.allow_privilege_escalation == Some(false),
            mounts: mounts.collect::<Result<_>>()?,
        })
    }
}

/// Applies a kustomize component's patches to the DaemonSet: they add elements to lists (RFC 6902).
fn apply(daemon_set: &mut Value, component: &str) -> Result<()> {
    let component: Value = serde_yaml_ng::from_str(component)?;
    for patch in component["patches"].as_sequence().into_iter().flatten() {
        ensure!(patch["target"]["kind"] == "DaemonSet", "a patch of something else than a DaemonSet");
        let operations: Vec<Value> = serde_yaml_ng::from_str(patch["patch"].as_str().context("no patch")?)?;
        for operation in operations {
            let path = operation["path"].as_str().context("no path")?;
            let list = path.strip_prefix('/').and_then(|path| path.strip_suffix("/-"));
            let list = list.filter(|_| operation["op"] == "add");
            let list = list.with_context(|| format!("{path}: only adding to lists is applied here"))?;
            let found = list.split('/').try_fold(&mut *daemon_set, |at, step| match step.parse::<usize>() {
                Ok(index) => at.get_mut(index),
                Err(_) => at.get_mut(step),
            });
            let found =
                found.and_then(Value::as_sequence_mut).with_context(|| format!("{path}: no such list"))?;
            found.push(operation["value"].clone());
        }
    }
    Ok(())
}

fn typed<T: DeserializeOwned>(value: &Value) -> Result<T> {
    Ok(serde_yaml_ng::from_value(value.clone())?)
}

impl Capabilities {
    fn bounding(&self) -> BTreeSet<String> {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let mut set: BTreeSet<String> = owned(&RUNTIME_DEFAULT);
        if self.drop.iter().any(|name| name == "ALL") {
            set.clear();
        }
        set.retain(|name| !self.drop.contains(name));
        set.extend(self.add.iter().cloned());
        set
    }
}

impl VolumeMount {
    fn resolve(&self, volumes: &[Value]) -> Result<Mount> {
        let Self { name, mount_path, .. } = self;
        let volume = volumes.iter().find(|volume| volume["name"] == name.as_str());
        let volume = volume.with_context(|| format!("{mount_path}: no volume is named {name}"))?;
        let source = if let Some(path) = volume.get("hostPath") {
            let HostPath { path, kind } = typed(path)?;
            match kind.as_str() {
                "DirectoryOrCreate" => Source::DirectoryOrCreate(path),
                "FileOrCreate" => Source::FileOrCreate(path),
                "" | "Directory" | "File" | "CharDevice" => Source::Host(path),
                other => bail!("volume {name}: type {other:?} is not applied here"),
            }
        } else if volume.get("emptyDir").is_some() {
            Source::Empty
        } else if ["configMap", "secret", "projected"].iter().any(|kind| volume.get(kind).is_some()) {
            Source::Objects
        } else {
            bail!("volume {name} is of a kind that is not applied here")
        };
        ensure!(
            self.sub_path.is_none() || source == Source::Objects,
            "volume {name}: subPath of a host path"
        );
        let from_host = match self.mount_propagation.as_deref() {
            None | Some("None") => false,
            Some("HostToContainer") => true,
            Some(other) => bail!("volume {name}: mountPropagation {other:?} is not applied here"),
        };
        Ok(Mount { source, target: mount_path.clone(), read_only: self.read_only, from_host })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn shipped(name: &str) -> String {
        std::fs::read_to_string(crate::workspace_root().join("manifests").join(name)).unwrap()
    }

    #[test]
    fn every_shipped_manifest_is_understood() {
        for entry in std::fs::read_dir(crate::workspace_root().join("manifests")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("kilo-") {
                let rights =
                    Rights::read(&shipped(&name), &[]).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                assert!(rights.no_new_privileges, "{name}");
                assert!(rights.capabilities.contains("BPF"), "{name}: {:?}", rights.capabilities);
                assert!(!rights.capabilities.contains("SYS_ADMIN"), "{name}: {:?}", rights.capabilities);
            }
        }
    }

    #[test]
    fn mounts_are_those_of_the_container_with_their_volumes() {
        let rights = Rights::read(&shipped("kilo-kubeadm.yaml"), &[]).unwrap();
        let bpf = rights.mounts.iter().find(|mount| mount.target == "/sys/fs/bpf").unwrap();
        assert_eq!(bpf.source, Source::Host("/sys/fs/bpf".to_owned()));
        assert!(bpf.from_host && !bpf.read_only);
        let kubeconfig = rights.mounts.iter().find(|mount| mount.target == "/etc/kubernetes").unwrap();
        assert!(kubeconfig.read_only && kubeconfig.source == Source::Objects);
        let below_run = rights.mounts.iter().filter(|mount| mount.target.starts_with("/run"));
        assert_eq!(below_run.map(|mount| mount.target.as_str()).collect::<Vec<_>>(), ["/run/kilo"]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let manifest = shipped("kilo-kubeadm.yaml");
        let with = |line: &str| {
            manifest.replace(
                "            # Not privileged.",
                &format!("            {line}\n            # Not privileged."),
            )
        };
        let said = Rights::read(&with("privileged: true"), &[]).unwrap_err().to_string();
        assert!(said.contains("privileged"), "{said}");
        assert!(Rights::read(&with("runAsUser: 7"), &[]).is_err());
        assert!(Rights::read(&manifest, &[]).is_ok());
    }

    #[test]
    fn without_a_word_about_capabilities_the_runtime_gives_its_own() {
        let bounding = |drop: &[&str], add: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
            Capabilities { drop: owned(drop), add: owned(add) }.bounding()
        };
        assert_eq!(bounding(&[], &[]).len(), 14);
        assert_eq!(bounding(&["NET_RAW"], &["BPF"]).len(), 14);
        assert_eq!(bounding(&["ALL"], &["BPF"]), BTreeSet::from(["BPF".to_owned()]));
    }
}
