//! `kgctl takeover`: prints the DaemonSet whose agents take over from Kilo's, made of Kilo's own.

use anyhow::{Context as _, Result, bail};
use clap::Args;
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec},
        core::v1::{Container, PodSpec, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{
    cluster::{ApiFlags, Cluster},
    refusal::Asked,
};

/// The image that the manifests name.
const IMAGE: &str = concat!("kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));
/// Name of what is printed, and the value of its pods' label.
pub const NAME: &str = "kilo-takeover";
const LABEL: &str = "app.kubernetes.io/name";
const FLAG: &str = "--take-over-from-kilo";
/// The container of the agent in Kilo's manifests.
const CONTAINER: &str = "kilo";
/// A pod counts as rolled out after this time: its agent is prepared by then.
const PREPARED_AFTER_SECONDS: i32 = 5;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl takeover | kubectl apply -f -
  kgctl takeover --image=registry.example/kilo:0.1.0 | kubectl apply -f -
  kgctl takeover --namespace=kilo --daemonset=kilo-gateway > kilo-takeover.yaml")]
pub struct TakeoverArgs {
    /// Image of the agents that take over.
    #[arg(long, default_value = IMAGE)]
    image: String,
    /// Namespace of Kilo's DaemonSet; default: the one namespace that has such a DaemonSet.
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Name of Kilo's DaemonSet.
    #[arg(long, value_name = "NAME", default_value = "kilo")]
    daemonset: String,
    #[command(flatten)]
    api: ApiFlags,
}

/// Returns the manifest.
pub async fn run(args: &TakeoverArgs) -> Result<String> {
    let cluster = Cluster::open(&args.api).await?;
    let daemon_sets: Api<DaemonSet> = match &args.namespace {
        Some(namespace) => Api::namespaced(cluster.client.clone(), namespace),
        None => Api::all(cluster.client.clone()),
    };
    let named = ListParams::default().fields(&format!("metadata.name={}", args.daemonset));
    let found = cluster.ask(Asked::new("list", "daemonsets"), daemon_sets.list(&named)).await?.items;
    let kilos = only(&found, args)?;
    let takeover = made_of(kilos, &args.image)?;
    Ok(serde_yaml_ng::to_string(&takeover)?)
}

fn only<'a>(found: &'a [DaemonSet], args: &TakeoverArgs) -> Result<&'a DaemonSet> {
    match found {
        [one] => Ok(one),
        [] => bail!(
            "there is no DaemonSet {}{}; name Kilo's with --daemonset and --namespace",
            args.daemonset,
            args.namespace.as_ref().map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default()
        ),
        several => bail!(
            "several namespaces have a DaemonSet {}: {}; choose one with --namespace",
            args.daemonset,
            several.iter().filter_map(kube::ResourceExt::namespace).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// The same pods with another image and name, beside those of that DaemonSet.
fn made_of(kilos: &DaemonSet, image: &str) -> Result<DaemonSet> {
    let name = kilos.name_any();
    let spec = kilos.spec.as_ref().with_context(|| format!("DaemonSet {name} has no spec"))?;
    let pod = spec.template.spec.as_ref().with_context(|| format!("DaemonSet {name} has no pods"))?;
    let agent = agent(&pod.containers).with_context(|| {
        let names: Vec<_> = pod.containers.iter().map(|container| container.name.as_str()).collect();
        format!("DaemonSet {name} has no container {CONTAINER}, but {}: it is not Kilo's", names.join(", "))
    })?;
    let present = agent.image.as_deref().unwrap_or_default();
    let gives_flag = |argument: &String| argument.starts_with(FLAG);
    if repository(present) == repository(image) || agent.args.iter().flatten().any(gives_flag) {
        bail!(
            "DaemonSet {name} names {present} already: there is nothing to take over from. Print this before its \
             image changes; name Kilo's own with --daemonset and --namespace"
        );
    }
    if pod.host_network != Some(true) {
        bail!("the pods of DaemonSet {name} have no hostNetwork: it is not Kilo's");
    }
    let agent = beside(agent, image);
    let volumes = pod
        .volumes
        .iter()
        .flatten()
        .filter(|volume| agent.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name));
    let pod = PodSpec {
        volumes: Some(volumes.cloned().collect()),
        containers: vec![agent],
        init_containers: None,
        ..pod.clone()
    };
    let labels = || Some([(LABEL.to_owned(), NAME.to_owned())].into());
    Ok(DaemonSet {
        metadata: ObjectMeta {
            name: Some(NAME.to_owned()),
            namespace: kilos.namespace(),
            labels: labels(),
            ..ObjectMeta::default()
        },
        spec: Some(DaemonSetSpec {
            min_ready_seconds: Some(PREPARED_AFTER_SECONDS),
            selector: LabelSelector { match_labels: labels(), ..LabelSelector::default() },
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta { labels: labels(), ..ObjectMeta::default() }),
                spec: Some(pod),
            },
            ..DaemonSetSpec::default()
        }),
        status: None,
    })
}

fn agent(containers: &[Container]) -> Option<&Container> {
    containers.iter().find(|container| container.name == CONTAINER)
}

/// The agent's container without what Kilo's answers: its ports, which the scheduler gives to one
/// pod of a node, and probes.
fn beside(agent: &Container, image: &str) -> Container {
    let mut args = agent.args.clone().unwrap_or_default();
    args.push(FLAG.to_owned());
    Container {
        image: Some(image.to_owned()),
        args: Some(args),
        ports: None,
        liveness_probe: None,
        readiness_probe: None,
        startup_probe: None,
        lifecycle: None,
        ..agent.clone()
    }
}

/// An image's name without tag and digest.
fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    // A colon before a slash is that of a registry's port.
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn kilos() -> Value {
        json!({
            "metadata": {"name": "kilo", "namespace": "kube-system", "uid": "1", "labels": {LABEL: "kilo"}},
            "spec": {
                "selector": {"matchLabels": {LABEL: "kilo"}},
                "template": {
                    "metadata": {"labels": {LABEL: "kilo"}},
                    "spec": {
                        "serviceAccountName": "kilo",
                        "hostNetwork": true,
                        "priorityClassName": "system-node-critical",
                        "nodeSelector": {"kilo": "yes"},
                        "tolerations": [{"operator": "Exists"}],
                        "initContainers": [{"name": "install-cni", "image": "squat/kilo:0.7.0"}],
                        "containers": [
                            {
                                "name": "kilo",
                                "image": "squat/kilo:0.7.0",
                                "args": ["--hostname=$(NODE_NAME)"],
                                "env": [{"name": "NODE_NAME", "value": "n1"}],
                                "ports": [{"containerPort": 1107, "hostPort": 1107}],
                                "livenessProbe": {"httpGet": {"port": 1107}},
                                "securityContext": {"privileged": true},
                                "volumeMounts": [{"name": "kilo-dir", "mountPath": "/var/lib/kilo"}],
                            },
                            {"name": "boringtun", "image": "leonnicolas/boringtun"},
                        ],
                        "volumes": [
                            {"name": "kilo-dir", "hostPath": {"path": "/var/lib/kilo"}},
                            {"name": "cni-bin-dir", "hostPath": {"path": "/opt/cni/bin"}},
                        ],
                    },
                },
            },
        })
    }

    fn made(from: Value) -> Result<Value> {
        let kilos: DaemonSet = serde_json::from_value(from).unwrap();
        Ok(serde_json::to_value(made_of(&kilos, IMAGE)?).unwrap())
    }

    #[test]
    fn the_pods_are_kilos_but_for_image_flag_and_what_only_one_can_have() {
        let made = made(kilos()).unwrap();
        assert_eq!(
            made["metadata"],
            json!({"name": NAME, "namespace": "kube-system", "labels": {LABEL: NAME}})
        );
        assert_eq!(made["spec"]["selector"], json!({"matchLabels": {LABEL: NAME}}));
        assert_eq!(made["spec"]["template"]["metadata"], json!({"labels": {LABEL: NAME}}));
        let mut expected = kilos()["spec"]["template"]["spec"].clone();
        expected.as_object_mut().unwrap().remove("initContainers");
        let containers = expected["containers"].as_array_mut().unwrap();
        containers.truncate(1);
        let agent = containers[0].as_object_mut().unwrap();
        agent.retain(|key, _| key != "ports" && key != "livenessProbe");
        agent["image"] = IMAGE.into();
        agent["args"] = json!(["--hostname=$(NODE_NAME)", FLAG]);
        expected["volumes"].as_array_mut().unwrap().truncate(1);
        assert_eq!(made["spec"]["template"]["spec"], expected);
    }

    #[test]
    fn what_is_not_kilos_is_refused() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut changed = kilos();
            change(&mut changed["spec"]["template"]["spec"]);
            made(changed).unwrap_err().to_string()
        };
        let ours = refused(&|pod| pod["containers"][0]["image"] = "kilo-ebpf/kilo:0.0.9".into());
        assert!(ours.contains("kilo-ebpf/kilo:0.0.9 already"), "{ours}");
        let twice = refused(&|pod| pod["containers"][0]["args"] = json!([FLAG]));
        assert!(twice.contains("nothing to take over from"), "{twice}");
        let other = refused(&|pod| pod["containers"][0]["name"] = "agent".into());
        assert!(other.contains("no container kilo, but agent, boringtun"), "{other}");
        let inside = refused(&|pod| pod["hostNetwork"] = false.into());
        assert!(inside.contains("no hostNetwork"), "{inside}");
    }

    #[test]
    fn one_daemon_set_is_chosen_or_the_choice_is_named() {
        let args = |namespace: Option<&str>| TakeoverArgs {
            image: IMAGE.to_owned(),
            namespace: namespace.map(ToOwned::to_owned),
            daemonset: "kilo".to_owned(),
            api: ApiFlags::default(),
        };
        let of = |namespace: &str| DaemonSet {
            metadata: ObjectMeta { namespace: Some(namespace.to_owned()), ..ObjectMeta::default() },
            ..DaemonSet::default()
        };
        let none = only(&[], &args(Some("here"))).unwrap_err().to_string();
        assert!(
            none.contains("no DaemonSet kilo in namespace here") && none.contains("--daemonset"),
            "{none}"
        );
        let several = only(&[of("a"), of("b")], &args(None)).unwrap_err().to_string();
        assert!(several.contains("a, b") && several.contains("--namespace"), "{several}");
        assert_eq!(only(&[of("a")], &args(None)).unwrap().namespace().as_deref(), Some("a"));
    }
}
