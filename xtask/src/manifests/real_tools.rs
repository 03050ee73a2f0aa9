//! kustomize and Helm render what the single-file manifests contain.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

use serde::Deserialize as _;
use serde_yaml_ng::Value;

use super::{VARIANTS, directory};
use crate::kube_tools::{self, Tool};

pub type Objects = BTreeMap<(String, String, String), Value>;

/// The objects of a stream of YAML documents.
pub fn objects(text: &str) -> Objects {
    let mut objects = BTreeMap::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = with_whole_numbers(Value::deserialize(document).unwrap());
        if value.is_null() {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &value["metadata"];
        let key = (text(&value["kind"]), text(&metadata["namespace"]), text(&metadata["name"]));
        assert!(objects.insert(key.clone(), value).is_none(), "{key:?} is there twice");
    }
    objects
}

/// Go writes 1.0 as 1.
fn with_whole_numbers(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() == 0.0 => Value::Number((float as i64).into()),
            _ => Value::Number(number),
        },
        Value::Sequence(items) => items.into_iter().map(with_whole_numbers).collect(),
        Value::Mapping(fields) => {
            Value::Mapping(fields.into_iter().map(|(key, value)| (key, with_whole_numbers(value))).collect())
        }
        other => other,
    }
}

fn manifest(name: &str) -> Objects {
    objects(&fs::read_to_string(directory().join(name)).unwrap())
}

pub fn tool(tool: Tool) -> Option<PathBuf> {
    let found = kube_tools::find(tool);
    if found.is_none() {
        println!("kilo-skip: there is no {}; `cargo xtask kube-tools` gets it", tool.name());
    }
    found
}

pub fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[track_caller]
fn assert_same(made: &Objects, wanted: &Objects, what: &str) {
    assert_eq!(made.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{what}");
    for (key, wanted) in wanted {
        assert_eq!(&made[key], wanted, "{what}: {key:?}");
    }
}

/// An object of kube-system.
pub fn object<'a>(objects: &'a mut Objects, kind: &str, name: &str) -> &'a mut Value {
    let key = (kind.to_owned(), "kube-system".to_owned(), name.to_owned());
    objects.get_mut(&key).unwrap_or_else(|| panic!("{key:?} is not there"))
}

/// Specification of the agent's pods.
pub fn pod_spec(objects: &mut Objects) -> &mut Value {
    &mut object(objects, "DaemonSet", "kilo")["spec"]["template"]["spec"]
}

/// The agent's arguments.
pub fn arguments(objects: &mut Objects) -> Vec<String> {
    let args = pod_spec(objects)["containers"][0]["args"].as_sequence().unwrap();
    args.iter().map(|arg| arg.as_str().unwrap().to_owned()).collect()
}

/// Adds an agent argument, as components and the chart's values do.
fn add_argument(objects: &mut Objects, argument: &str) {
    let args = &mut pod_spec(objects)["containers"][0]["args"];
    args.as_sequence_mut().unwrap().push(argument.into());
}

/// Gives the agent the container runtime's default seccomp profile, as the component and the chart's value
/// do.
fn confine(objects: &mut Objects) {
    let profile = &mut pod_spec(objects)["containers"][0]["securityContext"]["seccompProfile"]["type"];
    assert_eq!(*profile, "Unconfined");
    *profile = "RuntimeDefault".into();
}

/// What docs/install.md documents for the component: the flag, a capability, and the host's xtables lock.
fn forward_rules(objects: &mut Objects) {
    let spec = pod_spec(objects);
    let mut push = |path: &str, value: &str| {
        let list = path.split('/').fold(&mut *spec, |at, step| match step.parse::<usize>() {
            Ok(index) => &mut at[index],
            Err(_) => &mut at[step],
        });
        list.as_sequence_mut().unwrap().push(serde_yaml_ng::from_str(value).unwrap());
    };
    push("containers/0/args", "--iptables-forward-rules");
    push("containers/0/securityContext/capabilities/add", "NET_RAW");
    push("containers/0/volumeMounts", "{name: xtables-lock, mountPath: /run/xtables.lock}");
    push("volumes", "{name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}");
}

#[test]
fn every_overlay_makes_what_the_single_file_says() {
    let Some(kubectl) = tool(Tool::Kubectl) else { return };
    let build = |path: &str| {
        run(Command::new(&kubectl).arg("kustomize").arg(directory().join(path))).map(|text| objects(&text))
    };
    for variant in &VARIANTS {
        let mut wanted = manifest("crds.yaml");
        wanted.extend(manifest(&format!("kilo-{}.yaml", variant.name)));
        assert_same(&build(&format!("overlays/{}", variant.name)).unwrap(), &wanted, variant.name);
    }
    assert_same(&build("").unwrap(), &build("overlays/kubeadm").unwrap(), "manifests/kustomization.yaml");
}

#[test]
fn components_add_what_they_are_named_after() {
    let Some(kubectl) = tool(Tool::Kubectl) else { return };
    let build = |component: &str| {
        // Below manifests/, because kustomize follows no path that leaves its root.
        let work = tempfile::tempdir_in(directory()).unwrap();
        let text = format!("resources: [../overlays/k3s]\ncomponents: [../components/{component}]\n");
        fs::write(work.path().join("kustomization.yaml"), text).unwrap();
        objects(&run(Command::new(&kubectl).arg("kustomize").arg(work.path())).unwrap())
    };
    let components = fs::read_dir(directory().join("components")).unwrap();
    let mut components: Vec<_> =
        components.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    components.sort();
    let tried =
        ["forward-rules", "ipv6", "monitoring", "own-node", "page-access", "seccomp", "slices", "webhook"];
    assert_eq!(components, tried, "a component that is not tried below");
    let page = fs::read_to_string(directory().join("../docs/install.md")).unwrap();
    for component in tried {
        assert!(
            page.contains(&format!("\n| `{component}` |")),
            "{component} is missing from docs/install.md"
        );
    }
    let plain =
        objects(&run(Command::new(&kubectl).arg("kustomize").arg(directory().join("overlays/k3s"))).unwrap());
    let with = |name: &str| {
        let mut wanted = plain.clone();
        wanted.extend(manifest(name));
        wanted
    };
    assert_same(&build("webhook"), &with("peer-validation.yaml"), "webhook");
    assert_same(&build("own-node"), &with("own-node.yaml"), "own-node");
    let mut wanted = with("components/page-access/rbac.yaml");
    add_argument(&mut wanted, "--page-access=token");
    assert_same(&build("page-access"), &wanted, "page-access");
    let mut wanted = with("slices.yaml");
    add_argument(&mut wanted, "--slices=auto");
    assert_same(&build("slices"), &wanted, "slices");

    let mut wanted = plain.clone();
    confine(&mut wanted);
    assert_same(&build("seccomp"), &wanted, "seccomp");
    let mut wanted = plain.clone();
    forward_rules(&mut wanted);
    assert_same(&build("forward-rules"), &wanted, "forward-rules");

    let mut monitored = build("monitoring");
    let dashboard = ("ConfigMap".to_owned(), "kube-system".to_owned(), "kilo-grafana-dashboard".to_owned());
    let dashboard = monitored.remove(&dashboard).expect("the dashboard");
    let shipped = fs::read_to_string(directory().join("grafana-dashboard.json")).unwrap();
    assert_eq!(dashboard["data"]["kilo.json"].as_str(), Some(shipped.as_str()));
    let mut wanted = with("podmonitor.yaml");
    wanted.extend(manifest("prometheusrule.yaml"));
    assert_same(&monitored, &wanted, "monitoring");

    let mut forwarding = build("ipv6");
    let containers = pod_spec(&mut forwarding)["initContainers"].as_sequence_mut().unwrap();
    let before = containers.len();
    containers.retain(|container| container["name"] != "ipv6-forwarding");
    assert_eq!(containers.len(), before - 1, "one init container more");
    assert_same(&forwarding, &plain, "ipv6");
}

/// `helm template` with these values.
fn chart(helm: &PathBuf, values: &[&str]) -> Result<Objects, String> {
    chart_with(helm, values, &["--namespace=kube-system"])
}

fn chart_with(helm: &PathBuf, values: &[&str], flags: &[&str]) -> Result<Objects, String> {
    let mut command = Command::new(helm);
    command.args(["template", "kilo", "--include-crds"]).args(flags);
    command.arg(directory().join("chart/kilo"));
    for value in values {
        command.args(["--set", value]);
    }
    run(&mut command).map(|text| objects(&text))
}

#[test]
fn the_charts_policy_names_the_releases_account_where_the_api_server_knows_policies() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let policy = ("ValidatingAdmissionPolicy".to_owned(), String::new(), "kilo-own-node".to_owned());
    let served = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy";
    let values = ["ownNode.enabled=true"];
    let plain = chart(&helm, &[]).unwrap();
    let mut wanted = plain.clone();
    wanted.extend(manifest("own-node.yaml"));
    let made = chart_with(&helm, &values, &["--namespace=kube-system", served]).unwrap();
    assert_same(&made, &wanted, "ownNode");
    let made = chart_with(&helm, &[], &["--namespace=kube-system", served]).unwrap();
    assert_same(&made, &plain, "by default");
    let made = chart(&helm, &values).unwrap();
    assert_same(&made, &plain, "an API server without policies");
    // Only kube-system has the ConfigMap in which kubeadm clusters name their API server.
    let refused = chart_with(&helm, &values, &["--namespace=mesh", served]).unwrap_err();
    assert!(refused.contains("install this chart with --namespace kube-system"), "{refused}");
    // The webhook's own namespace refuses pods with the host's network.
    let webhook = ["platform=k3s", "webhook.enabled=true"];
    let refused = chart_with(&helm, &webhook, &["--namespace=kilo"]).unwrap_err();
    assert!(refused.contains("install this chart in another namespace"), "{refused}");
    chart_with(&helm, &webhook[..1], &["--namespace=kilo"]).unwrap();
    let made = chart_with(&helm, &["platform=k3s", values[0]], &["--namespace=mesh", served]).unwrap();
    let condition = &made[&policy]["spec"]["matchConditions"][0]["expression"];
    assert_eq!(condition, "request.userInfo.username == 'system:serviceaccount:mesh:kilo'");
}

#[test]
fn the_chart_makes_what_the_single_files_say() {
    let Some(helm) = tool(Tool::Helm) else { return };
    println!("{}", run(Command::new(&helm).arg("version")).unwrap());
    run(Command::new(&helm).arg("lint").arg("--strict").arg(directory().join("chart/kilo"))).unwrap();
    let kubeadm = chart(&helm, &[]).unwrap();
    for variant in &VARIANTS {
        let mut wanted = manifest("crds.yaml");
        wanted.extend(manifest(&format!("kilo-{}.yaml", variant.name)));
        let values = [
            format!("platform={}", variant.platform),
            format!("mode={}", variant.addon.unwrap_or("cni")),
            format!("wireguard={}", variant.wireguard.name()),
        ];
        let made = chart(&helm, &values.each_ref().map(String::as_str)).unwrap();
        assert_same(&made, &wanted, variant.name);
        if variant.name == "kubeadm" {
            assert_same(&made, &kubeadm, "the defaults");
        }
    }
    let mut wanted = kubeadm;
    wanted.extend(manifest("peer-validation.yaml"));
    wanted.extend(manifest("podmonitor.yaml"));
    wanted.extend(manifest("prometheusrule.yaml"));
    let values = [
        "webhook.enabled=true",
        "podMonitor.enabled=true",
        "prometheusRule.enabled=true",
        "pageToken.enabled=true",
        "slices.enabled=true",
        "forwardRules.enabled=true",
        "seccompProfile=RuntimeDefault",
    ];
    wanted.extend(manifest("components/page-access/rbac.yaml"));
    add_argument(&mut wanted, "--page-access=token");
    wanted.extend(manifest("slices.yaml"));
    add_argument(&mut wanted, "--slices=auto");
    forward_rules(&mut wanted);
    confine(&mut wanted);
    let made = chart(&helm, &values).unwrap();
    assert_same(
        &made,
        &wanted,
        "webhook, PodMonitor, PrometheusRule, tokens for the page, slices, forward rules and seccomp",
    );
}

#[test]
fn the_charts_values_reach_the_agent_and_wrong_ones_are_refused() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let values = [
        "image.repository=registry.example.com/kilo",
        "image.tag=v7",
        "granularity=full",
        "port=51819",
        "subnet=fd00:10:4::/64",
        "topologyLabel=example.com/site",
        "endpointFrom=external-ip",
        "extraArgs={--service-cidr=10.96.0.0/12}",
        "resources.limits.memory=64Mi",
    ];
    let mut made = chart(&helm, &values).unwrap();
    let container = &pod_spec(&mut made)["containers"][0];
    assert_eq!(container["image"], "registry.example.com/kilo:v7");
    assert_eq!(container["resources"]["limits"]["memory"], "64Mi");
    let args = arguments(&mut made);
    for wanted in [
        "--wireguard=kernel",
        "--mesh-granularity=full",
        "--port=51819",
        "--subnet=fd00:10:4::/64",
        "--topology-label=example.com/site",
        "--endpoint-from=external-ip",
        "--service-cidr=10.96.0.0/12",
    ] {
        assert!(args.iter().any(|arg| arg == wanted), "{wanted} is not among {args:?}");
    }
    let made =
        chart(&helm, &["imagePullSecrets[0].name=r", "wireguard=container", "webhook.enabled=true"]).unwrap();
    let specs: Vec<_> = made
        .values()
        .map(|object| &object["spec"]["template"]["spec"])
        .filter(|spec| !spec.is_null())
        .collect();
    assert_eq!(specs.len(), 3, "the agent, WireGuard and the webhook");
    for spec in specs {
        assert_eq!(spec["imagePullSecrets"][0]["name"], "r");
    }
    let digest = format!("image.digest=sha256:{}", "0".repeat(64));
    let mut made = chart(&helm, &[&digest]).unwrap();
    let image = pod_spec(&mut made)["containers"][0]["image"].as_str().unwrap().to_owned();
    assert!(image.starts_with("kilo-ebpf/kilo@sha256:"), "{image}");
    for wrong in [
        "seccompProfile=Localhost",
        "granularity=continent",
        "platform=vms",
        "mode=calico",
        "port=0",
        "graularity=full",
        "image.pullPolicy=Sometimes",
        "failover.standBys=5",
        "podMonitor.interval=soon",
        r"podLabels.app\.kubernetes\.io/name=mine",
        r"podAnnotations.container\.apparmor\.security\.beta\.kubernetes\.io/kilo=runtime/default",
        r"podMonitor.labels.app\.kubernetes\.io/name=mine",
        r"prometheusRule.labels.app\.kubernetes\.io/part-of=mine",
        "subnet=10.4.0.0/99",
        "subnet=999.4.0.0/16",
        "webhook=null",
        "failover=null",
    ] {
        let refusal = chart(&helm, &[wrong]).unwrap_err();
        assert!(refusal.contains("schema"), "{wrong}: {refusal}");
    }
}

#[test]
fn the_charts_failover_has_stand_bys_and_leaders_which_need_it() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let mut plain = chart(&helm, &[]).unwrap();
    add_argument(&mut plain, "--failover=auto");
    let made = chart(&helm, &["failover.enabled=true"]).unwrap();
    assert_same(&made, &plain, "failover");
    add_argument(&mut plain, "--stand-bys=3");
    add_argument(&mut plain, "--leaders=2");
    let values = ["failover.enabled=true", "failover.standBys=3", "failover.leaders=2"];
    assert_same(&chart(&helm, &values).unwrap(), &plain, "stand-bys and leaders");
    let refused = |values: &[&str]| chart(&helm, values).unwrap_err();
    let alone = refused(&["failover.leaders=2"]);
    assert!(alone.contains("needs failover.enabled=true"), "{alone}");
    let alone = refused(&["failover.standBys=4"]);
    assert!(alone.contains("does nothing without failover.enabled=true"), "{alone}");
    let full = refused(&["failover.enabled=true", "granularity=full"]);
    assert!(full.contains("does nothing with granularity=full"), "{full}");
    for flag in ["--listen=:9107", "--interface=wg0", "--kubeconfig=/k"] {
        let refused = refused(&[&format!("extraArgs={{{flag}}}")]);
        assert!(refused.contains(&format!("extraArgs cannot have {flag}")), "{refused}");
    }
}

#[test]
fn the_charts_pods_are_placed_and_labelled_as_the_values_say() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let values = [
        "wireguard=container",
        "webhook.enabled=true",
        "image.pullPolicy=Always",
        "nodeSelector.pool=mesh",
        "tolerations[0].key=mesh",
        "priorityClassName=mine",
        "podLabels.team=net",
        "podAnnotations.seen=yes",
        "updateStrategy.type=OnDelete",
    ];
    let mut made = chart(&helm, &values).unwrap();
    let is = |value: &Value, text: &str| assert_eq!(*value, serde_yaml_ng::from_str::<Value>(text).unwrap());
    for name in ["kilo", "kilo-wireguard"] {
        let spec = &object(&mut made, "DaemonSet", name)["spec"];
        is(&spec["updateStrategy"], "{type: OnDelete}");
        let (metadata, pod) = (&spec["template"]["metadata"], &spec["template"]["spec"]);
        assert_eq!(metadata["labels"]["team"], "net", "{name}");
        assert_eq!(metadata["labels"]["app.kubernetes.io/name"], name);
        assert_eq!(metadata["annotations"]["seen"], "yes", "{name}");
        is(&pod["nodeSelector"], "{kubernetes.io/os: linux, pool: mesh}");
        is(&pod["tolerations"], "[{key: mesh}]");
        assert_eq!(pod["priorityClassName"], "mine", "{name}");
    }
    let mut containers = 0;
    for pod in made.values().map(|object| &object["spec"]["template"]["spec"]) {
        for list in ["initContainers", "containers"] {
            for container in pod.get(list).and_then(Value::as_sequence).into_iter().flatten() {
                assert_eq!(container["imagePullPolicy"], "Always", "{}", container["name"].as_str().unwrap());
                containers += 1;
            }
        }
    }
    assert_eq!(containers, 4, "CNI plugins, the agent, WireGuard and the webhook");
}

#[test]
fn before_kubernetes_1_30_the_chart_has_no_field_that_such_an_api_server_does_not_know() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let mut wanted = chart_with(&helm, &[], &["--namespace=kube-system", "--kube-version=1.30.0"]).unwrap();
    let context = &mut pod_spec(&mut wanted)["containers"][0]["securityContext"];
    assert!(context.as_mapping_mut().unwrap().remove("appArmorProfile").is_some(), "from 1.30 on");
    let made = chart_with(&helm, &[], &["--namespace=kube-system", "--kube-version=v1.29.7+k3s1"]).unwrap();
    assert_same(&made, &wanted, "before 1.30");
    let annotations =
        &object(&mut wanted, "DaemonSet", "kilo")["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["container.apparmor.security.beta.kubernetes.io/kilo"], "unconfined");
}

#[test]
fn what_the_chart_gives_the_prometheus_operator_and_grafana_has_the_labels_of_the_values() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let values = [
        "podMonitor.enabled=true",
        "podMonitor.labels.release=stack",
        "podMonitor.interval=30s",
        "prometheusRule.enabled=true",
        "prometheusRule.labels.release=stack",
        "dashboard.enabled=true",
    ];
    let mut made = chart(&helm, &values).unwrap();
    let mut wanted = chart(&helm, &[]).unwrap();
    wanted.extend(manifest("podmonitor.yaml"));
    wanted.extend(manifest("prometheusrule.yaml"));
    for kind in ["PodMonitor", "PrometheusRule"] {
        object(&mut wanted, kind, "kilo")["metadata"]["labels"]["release"] = "stack".into();
    }
    object(&mut wanted, "PodMonitor", "kilo")["spec"]["podMetricsEndpoints"][0]["interval"] = "30s".into();
    let key = ("ConfigMap".to_owned(), "kube-system".to_owned(), "kilo-grafana-dashboard".to_owned());
    let dashboard = made.remove(&key).expect("the dashboard");
    let shipped = fs::read_to_string(directory().join("grafana-dashboard.json")).unwrap();
    assert_eq!(dashboard["data"]["kilo.json"].as_str(), Some(shipped.as_str()));
    assert_eq!(dashboard["metadata"]["labels"]["grafana_dashboard"], "1");
    assert_same(&made, &wanted, "labels and interval");
}

#[test]
fn the_chart_is_a_dependency_that_another_one_turns_on_and_off() {
    let Some(helm) = tool(Tool::Helm) else { return };
    let umbrella = tempfile::tempdir().unwrap();
    fs::write(
        umbrella.path().join("Chart.yaml"),
        format!(
            "apiVersion: v2\nname: umbrella\nversion: 1.0.0\n\
             dependencies: [{{name: kilo, version: {}, condition: kilo.enabled}}]\n",
            super::VERSION
        ),
    )
    .unwrap();
    fs::create_dir(umbrella.path().join("charts")).unwrap();
    let copy = ["-r", directory().join("chart/kilo").to_str().unwrap()].map(ToOwned::to_owned);
    run(Command::new("cp").args(copy).arg(umbrella.path().join("charts/kilo"))).unwrap();
    let made = |values: &str| {
        let mut command = Command::new(&helm);
        command.args(["template", "kilo", "--namespace=kube-system", "--include-crds"]).arg(umbrella.path());
        objects(&run(command.args(["--set", values])).unwrap())
    };
    let wanted = chart(&helm, &["platform=k3s"]).unwrap();
    assert_same(&made("global.region=east,kilo.enabled=true,kilo.platform=k3s"), &wanted, "turned on");
    assert!(made("kilo.enabled=false").is_empty(), "turned off");
}
