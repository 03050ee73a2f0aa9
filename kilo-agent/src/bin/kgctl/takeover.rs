//! `kgctl takeover`: prints a DaemonSet, derived from Kilo's own, whose agents take over from Kilo's.

use anyhow::{Context as _, Result, bail};
use clap::Args;
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec},
        core::v1::{Container, LocalObjectReference, PodSpec, PodTemplateSpec, Volume},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{
    cluster::{ApiFlags, Cluster},
    image_name,
    refusal::Asked,
};

/// Selects the pods of one DaemonSet.
const LABEL: &str = "app.kubernetes.io/name";
/// Label of every printed DaemonSet, whatever its name.
const COMMON_LABEL: [&str; 2] = ["app.kubernetes.io/part-of", "kilo-takeover"];
const FLAG: &str = "--take-over-from-kilo";
/// Name of the agent's container in Kilo's manifests.
const CONTAINER: &str = "kilo";
/// A pod counts as available after this time, when its agent is prepared.
const PREPARED_AFTER_SECONDS: i32 = 5;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl takeover --image=registry.example/kilo:0.1.0 | kubectl apply -f -
  kgctl takeover -n kilo --daemonset=kilo-gateway --image=registry.example/kilo:0.1.0 > new.yaml")]
pub struct TakeoverArgs {
    /// Image of the agents that take over: the name that this program's image has in your registry.
    #[arg(long, value_parser = image_name::parse)]
    image: String,
    /// Secret in the namespace of Kilo's DaemonSet with which kubelets pull the image (repeatable).
    #[arg(long = "image-pull-secret", value_name = "NAME")]
    image_pull_secrets: Vec<String>,
    /// Namespace of Kilo's DaemonSet; default: the one namespace that has such a DaemonSet.
    #[arg(long, short, value_name = "NAME")]
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
    let takeover = made_of(kilos, &args.image, &args.image_pull_secrets)?;
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

/// Copies a DaemonSet's pods with another image and name, to run beside them.
fn made_of(kilos: &DaemonSet, image: &str, pull_secrets: &[String]) -> Result<DaemonSet> {
    let name = kilos.name_any();
    let spec = kilos.spec.as_ref().with_context(|| format!("DaemonSet {name} has no spec"))?;
    let pod = spec.template.spec.as_ref().with_context(|| format!("DaemonSet {name} has no pods"))?;
    let agent = agent(&pod.containers).with_context(|| {
        let names: Vec<_> = pod.containers.iter().map(|container| container.name.as_str()).collect();
        format!("DaemonSet {name} has no container {CONTAINER}, but {}: it is not Kilo's", names.join(", "))
    })?;
    let present = agent.image.as_deref().unwrap_or_default();
    let gives_flag = |argument: &String| argument.starts_with(FLAG);
    // A mirror may have Kilo's image and ours under one name, so the tag counts, too.
    if present == image || agent.args.iter().flatten().any(gives_flag) {
        bail!(
            "DaemonSet {name} already runs {present}: there is nothing to take over from. Print this before its \
             image changes; name Kilo's own with --daemonset and --namespace"
        );
    }
    if pod.host_network != Some(true) {
        bail!("the pods of DaemonSet {name} have no hostNetwork: it is not Kilo's");
    }
    let before: Vec<_> = pod
        .init_containers
        .iter()
        .flatten()
        .filter(|container| prepares(container, agent, pod.volumes.as_deref().unwrap_or_default()))
        .cloned()
        .collect();
    let agent = beside(agent, image);
    let mounted = |volume: &&Volume| before.iter().chain([&agent]).any(|container| mounts(container, volume));
    let volumes = pod.volumes.iter().flatten().filter(mounted).cloned().collect();
    let more_secrets = pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let pull_secrets: Vec<_> = pod.image_pull_secrets.iter().flatten().cloned().chain(more_secrets).collect();
    let pod = PodSpec {
        volumes: Some(volumes),
        containers: vec![agent],
        init_containers: (!before.is_empty()).then_some(before),
        image_pull_secrets: (!pull_secrets.is_empty()).then_some(pull_secrets),
        ..pod.clone()
    };
    // Several DaemonSets of Kilo's (for gateways and for others, say) are taken over independently.
    let takeover = format!("{name}-takeover");
    let own = || [(LABEL.to_owned(), takeover.clone())];
    let all = || Some(own().into_iter().chain([COMMON_LABEL.map(ToOwned::to_owned).into()]).collect());
    Ok(DaemonSet {
        metadata: ObjectMeta {
            name: Some(takeover.clone()),
            namespace: kilos.namespace(),
            labels: all(),
            ..ObjectMeta::default()
        },
        spec: Some(DaemonSetSpec {
            min_ready_seconds: Some(PREPARED_AFTER_SECONDS),
            selector: LabelSelector { match_labels: Some(own().into()), ..LabelSelector::default() },
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta { labels: all(), ..ObjectMeta::default() }),
                spec: Some(pod),
            },
            ..DaemonSetSpec::default()
        }),
        status: None,
    })
}

/// Selects every DaemonSet printed here, whichever of Kilo's it was derived from.
pub fn made_here() -> ListParams {
    ListParams::default().labels(&COMMON_LABEL.join("="))
}

fn mounts(container: &Container, volume: &Volume) -> bool {
    container.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name)
}

/// Whether this init container leaves files for the agent in a volume that begins empty, like the kubeconfig
/// in Kilo's manifests for k3s. One that runs on beside the agent (a sidecar) prepares nothing.
fn prepares(container: &Container, agent: &Container, volumes: &[Volume]) -> bool {
    let shared = |volume: &Volume| mounts(container, volume) && mounts(agent, volume);
    container.restart_policy.is_none()
        && volumes.iter().any(|volume| volume.empty_dir.is_some() && shared(volume))
}

fn agent(containers: &[Container]) -> Option<&Container> {
    containers.iter().find(|container| container.name == CONTAINER)
}

/// The agent's container without its host ports, which only one pod of a node can have, and without probes,
/// which Kilo's agent would answer.
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const IMAGE: &str = "registry.example/kilo:0.1.0";

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
        Ok(serde_json::to_value(made_of(&kilos, IMAGE, &[])?).unwrap())
    }

    #[test]
    fn the_pods_are_kilos_but_for_image_flag_and_what_only_one_can_have() {
        let made = made(kilos()).unwrap();
        let name = "kilo-takeover";
        let labels = json!({LABEL: name, "app.kubernetes.io/part-of": "kilo-takeover"});
        assert_eq!(made["metadata"], json!({"name": name, "namespace": "kube-system", "labels": labels}));
        assert_eq!(made["spec"]["selector"], json!({"matchLabels": {LABEL: name}}));
        assert_eq!(made["spec"]["template"]["metadata"], json!({"labels": labels}));
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
    fn an_init_container_whose_files_the_agent_reads_is_kept_with_its_volumes() {
        let mut k3s = kilos();
        let pod = &mut k3s["spec"]["template"]["spec"];
        let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
        let generate = json!({
            "name": "generate-kubeconfig",
            "image": "squat/kilo:0.7.0",
            "args": ["--kubeconfig=/etc/kubernetes/kubeconfig"],
            "volumeMounts": [mount("kubeconfig", "/etc/kubernetes"), mount("k3s-agent", "/var/lib/rancher")],
        });
        let directory = [mount("kilo-dir", "/var/lib/kilo")];
        let cni = json!({"name": "install-cni", "image": "squat/kilo:0.7.0", "volumeMounts": directory});
        let beside =
            json!({"name": "beside", "restartPolicy": "Always", "volumeMounts": [mount("kubeconfig", "/k")]});
        pod["initContainers"] = json!([cni, generate, beside]);
        let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().unwrap();
        mounts.push(mount("kubeconfig", "/etc/kubernetes"));
        let volumes = pod["volumes"].as_array_mut().unwrap();
        volumes.push(json!({"name": "kubeconfig", "emptyDir": {}}));
        volumes.push(json!({"name": "k3s-agent", "hostPath": {"path": "/var/lib/rancher"}}));
        let made = made(k3s).unwrap();
        let pod = &made["spec"]["template"]["spec"];
        assert_eq!(pod["initContainers"], json!([generate]));
        let volumes: Vec<_> =
            pod["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
        assert_eq!(volumes, ["kilo-dir", "kubeconfig", "k3s-agent"]);
    }

    #[test]
    fn each_daemon_set_of_kilos_has_its_own_agents_that_wait() {
        let mut gateways = kilos();
        gateways["metadata"]["name"] = "kilo-gateway".into();
        let made = made(gateways).unwrap();
        assert_eq!(made["metadata"]["name"], "kilo-gateway-takeover");
        assert_eq!(made["spec"]["selector"], json!({"matchLabels": {LABEL: "kilo-gateway-takeover"}}));
        let common = made["metadata"]["labels"]["app.kubernetes.io/part-of"].as_str().unwrap();
        let selector = made_here().label_selector.unwrap();
        assert_eq!(selector, format!("app.kubernetes.io/part-of={common}"));
    }

    #[test]
    fn one_name_may_have_kilos_image_and_ours() {
        let mut mirrored = kilos();
        let image = IMAGE.replace("0.1.0", "kilo-0.7.0");
        mirrored["spec"]["template"]["spec"]["containers"][0]["image"] = image.into();
        let made = made(mirrored).unwrap();
        assert_eq!(made["spec"]["template"]["spec"]["containers"][0]["image"], IMAGE);
    }

    #[test]
    fn what_is_not_kilos_is_refused() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let mut changed = kilos();
            change(&mut changed["spec"]["template"]["spec"]);
            made(changed).unwrap_err().to_string()
        };
        let ours = refused(&|pod| pod["containers"][0]["image"] = IMAGE.into());
        assert!(ours.contains(&format!("already runs {IMAGE}")), "{ours}");
        let twice = refused(&|pod| pod["containers"][0]["args"] = json!([FLAG]));
        assert!(twice.contains("nothing to take over from"), "{twice}");
        let other = refused(&|pod| pod["containers"][0]["name"] = "agent".into());
        assert!(other.contains("no container kilo, but agent, boringtun"), "{other}");
        let inside = refused(&|pod| pod["hostNetwork"] = false.into());
        assert!(inside.contains("no hostNetwork"), "{inside}");
    }

    #[test]
    fn secrets_for_our_image_are_added_to_those_of_kilos() {
        let mut kilos = kilos();
        kilos["spec"]["template"]["spec"]["imagePullSecrets"] = json!([{"name": "mirror"}]);
        let kilos: DaemonSet = serde_json::from_value(kilos).unwrap();
        let made = made_of(&kilos, IMAGE, &["ours".to_owned()]).unwrap();
        let pod = &serde_json::to_value(made).unwrap()["spec"]["template"]["spec"];
        assert_eq!(pod["imagePullSecrets"], json!([{"name": "mirror"}, {"name": "ours"}]));
    }

    #[test]
    fn one_daemon_set_is_chosen_or_the_choice_is_named() {
        let args = |namespace: Option<&str>| TakeoverArgs {
            image: IMAGE.to_owned(),
            image_pull_secrets: Vec::new(),
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
