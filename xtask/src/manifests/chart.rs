//! The Helm chart: the template of the manifests, with its conditions translated to Helm. Helm-only parts
//! replace the regions between `{# helm: NAME #}` and `{# helm: end #}`; such a part may contain the region
//! that it replaces, where it has `{# source #}`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

use super::{IMAGE, VERSION};

const DIRECTORY: &str = "chart/kilo";
const HEADER: &str =
    "{{- /* Made by `cargo xtask manifests` from the template of the manifests; do not edit. */}}\n";

/// Part of every pod template in the chart.
const PULL_SECRETS: &str = include_str!("chart/pull-secrets.tpl");
/// The webhook's pull secrets are inserted after this line.
const WEBHOOKS_ACCOUNT: &str = "      serviceAccountName: kilo-peer-validation\n";

/// The line of a Helm-only part in whose place the replaced region comes.
const SOURCE: &str = "{# source #}\n";
/// Labels from the chart's values are inserted before this end of an object's metadata.
const METADATA_END: &str = "    app.kubernetes.io/part-of: kilo\nspec:\n";
const INTERVAL: &str = "      interval: 15s\n";

/// API that own-node.yaml needs.
const POLICY: &str = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy";

/// Sources of the chart: the template of the `DaemonSet`s, and files of manifests/.
pub struct Sources<'a> {
    pub kilo: &'a str,
    pub crds: &'a str,
    pub validation: &'a str,
    pub pod_monitor: &'a str,
    pub rule: &'a str,
    pub dashboard: &'a str,
    pub page_access: &'a str,
    pub own_node: &'a str,
    pub slices: &'a str,
}

/// Generated files of the chart, by their path in manifests/. Values, their schema and helpers are written
/// by hand.
pub fn files(sources: &Sources<'_>) -> Result<BTreeMap<String, String>> {
    let &Sources { kilo, crds, validation, pod_monitor, rule, dashboard, page_access, own_node, slices } =
        sources;
    let optional_if = |condition: &str, text: &str| {
        let text: String = text.lines().map(|line| of_helm(line, &format!("{IMAGE}:{VERSION}"))).collect();
        format!("{HEADER}{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n")
    };
    let optional = |value: &str, text: &str| optional_if(&format!(".Values.{value}.enabled"), text);
    // A cluster that does not serve the kind gets everything else.
    let policy = format!("and .Values.ownNode.enabled (.Capabilities.APIVersions.Has \"{POLICY}\")");
    ensure!(!validation.contains("{{"), "peer-validation.yaml holds a Helm action");
    ensure!(validation.contains(WEBHOOKS_ACCOUNT), "peer-validation.yaml has another account");
    ensure!(!rule.contains("{{"), "prometheusrule.yaml holds a Helm action");
    ensure!(!own_node.contains("{{"), "own-node.yaml holds a Helm action");
    ensure!(pod_monitor.contains(INTERVAL), "podmonitor.yaml has another interval");
    let monitor = optional("podMonitor", &labelled("podMonitor", pod_monitor)?)
        .replace(INTERVAL, "      interval: {{ .Values.podMonitor.interval }}\n");
    let chart = format!(
        "{}apiVersion: v2\nname: kilo\n\
         description: A multi-location network for Kubernetes, WireGuard between locations, eBPF inside them.\n\
         type: application\nversion: {VERSION}\nappVersion: {VERSION}\n\
         home: https://github.com/kilo-ebpf/kilo\n",
        super::HEADER
    );
    let files = [
        ("Chart.yaml", chart),
        ("crds/crds.yaml", crds.to_owned()),
        ("templates/kilo.yaml", HEADER.to_owned() + &translate(kilo)?),
        (
            "templates/peer-validation.yaml",
            optional("webhook", validation)
                .replace(WEBHOOKS_ACCOUNT, &format!("{WEBHOOKS_ACCOUNT}{PULL_SECRETS}")),
        ),
        ("templates/page-access.yaml", optional("pageToken", page_access)),
        ("templates/own-node.yaml", optional_if(&policy, own_node)),
        ("templates/slices.yaml", optional("slices", slices)),
        ("templates/podmonitor.yaml", monitor),
        ("templates/prometheusrule.yaml", optional("prometheusRule", &labelled("prometheusRule", rule)?)),
        ("templates/dashboard.yaml", HEADER.to_owned() + include_str!("chart/dashboard.tpl")),
        // Read by that template as a file: Grafana's braces are not Helm's.
        ("grafana-dashboard.json", dashboard.to_owned()),
    ];
    Ok(files.into_iter().map(|(name, text)| (format!("{DIRECTORY}/{name}"), text)).collect())
}

/// Replacement for a marked region.
fn fragment(name: &str) -> Result<&'static str> {
    Ok(match name {
        "header" => include_str!("chart/header.tpl"),
        "args" => include_str!("chart/args.tpl"),
        "update-strategy" => include_str!("chart/update-strategy.tpl"),
        "pod-labels" => include_str!("chart/pod-labels.tpl"),
        "pod-annotations" => include_str!("chart/pod-annotations.tpl"),
        "more-pod-annotations" => include_str!("chart/more-pod-annotations.tpl"),
        "priority-class" => include_str!("chart/priority-class.tpl"),
        "placement" => include_str!("chart/placement.tpl"),
        "resources" => include_str!("chart/resources.tpl"),
        "app-armor" => include_str!("chart/app-armor.tpl"),
        "seccomp" => include_str!("chart/seccomp.tpl"),
        "pull-secrets" => PULL_SECRETS,
        "forward-rules-capability" => include_str!("chart/forward-rules-capability.tpl"),
        "forward-rules-mount" => include_str!("chart/forward-rules-mount.tpl"),
        "forward-rules-volume" => include_str!("chart/forward-rules-volume.tpl"),
        other => bail!("nothing is known to put in the place of `helm: {other}`"),
    })
}

/// Translates the template from minijinja to Helm.
fn translate(source: &str) -> Result<String> {
    let mut text = String::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = between(line, "{# helm: ", " #}") {
            let mut region = String::new();
            loop {
                let line = lines.next().context("a region without end")?;
                match between(line, "{# helm: ", " #}") {
                    Some("end") => break,
                    Some(inner) => bail!("the region {inner} is inside the region {name}"),
                    None => region += &format!("{line}\n"),
                }
            }
            let fragment = fragment(name)?;
            text += &match fragment.contains(SOURCE) {
                true => fragment.replace(SOURCE, &translate(&region)?),
                false => fragment.to_owned(),
            };
        } else if let Some(tag) = between(line, "{% ", " %}") {
            text += &match tag.split_once(' ').unwrap_or((tag, "")) {
                ("if", of) => format!("{{{{- if {} }}}}\n", condition(of)?),
                ("elif", of) => format!("{{{{- else if {} }}}}\n", condition(of)?),
                ("else", "") => "{{- else }}\n".to_owned(),
                ("endif", "") => "{{- end }}\n".to_owned(),
                _ => bail!("`{tag}` has no translation"),
            };
        } else {
            let rest = line.replace("{{ image }}", "").replace("{{ addon }}", "");
            ensure!(!rest.contains("{{") && !rest.contains("{%"), "`{line}` has no translation");
            text += &of_helm(&line.replace("{{ addon }}", "{{ .Values.mode }}"), "{{ image }}");
        }
    }
    Ok(text)
}

/// A line of a manifest, in which an image has this name, with the release's namespace and the chart's
/// image and pull policy.
fn of_helm(line: &str, image: &str) -> String {
    let text = line.replace("kube-system", "{{ .Release.Namespace }}");
    let Some((indent, "")) = text.split_once(&format!("image: {image}")) else { return text + "\n" };
    format!(
        "{indent}image: {{{{ include \"kilo.image\" . }}}}\n\
         {{{{- with .Values.image.pullPolicy }}}}\n{indent}imagePullPolicy: {{{{ . }}}}\n{{{{- end }}}}\n"
    )
}

/// The object of a manifest with the labels of that part of the chart's values.
fn labelled(value: &str, text: &str) -> Result<String> {
    ensure!(text.matches(METADATA_END).count() == 1, "the metadata for {value} has another end");
    let (last, next) = METADATA_END.split_at(METADATA_END.len() - "spec:\n".len());
    let labels = include_str!("chart/labels.tpl").replace("VALUE", value);
    Ok(text.replace(METADATA_END, &format!("{last}{labels}{next}")))
}

fn between<'a>(line: &'a str, start: &str, end: &str) -> Option<&'a str> {
    line.trim().strip_prefix(start)?.strip_suffix(end)
}

/// Translates a condition of the template.
fn condition(text: &str) -> Result<String> {
    if let Some((one, other)) = text.split_once(" or ") {
        return Ok(format!("or ({}) ({})", condition(one)?, condition(other)?));
    }
    if let Some(negated) = text.strip_prefix("not ") {
        return Ok(format!("not ({})", condition(negated)?));
    }
    let compared = |operator: &str, function: &str| {
        let (name, value) = text.split_once(&format!(" {operator} "))?;
        Some(format!("{function} .Values.{name} {value}"))
    };
    match text {
        "cni" => Ok("eq .Values.mode \"cni\"".to_owned()),
        "addon" => Ok("ne .Values.mode \"cni\"".to_owned()),
        _ => compared("==", "eq")
            .or_else(|| compared("!=", "ne"))
            .with_context(|| format!("`{text}` has no translation")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_written_in_helms_language() {
        for (ours, helms) in [
            ("cni", "eq .Values.mode \"cni\""),
            ("not cni", "not (eq .Values.mode \"cni\")"),
            ("cni or platform == \"k3s\"", "or (eq .Values.mode \"cni\") (eq .Values.platform \"k3s\")"),
            ("wireguard != \"kernel\"", "ne .Values.wireguard \"kernel\""),
        ] {
            assert_eq!(condition(ours).unwrap(), helms);
        }
        assert!(condition("platform in [1]").is_err());
    }

    #[test]
    fn what_cannot_be_translated_is_an_error() {
        let marked =
            translate("a\n{# helm: args #}\nours\n{# helm: end #}\n{% if cni %}\nb\n{% endif %}\n").unwrap();
        assert!(
            marked.starts_with("a\n{{- if ne .Values.granularity") && !marked.contains("ours"),
            "{marked}"
        );
        let kept =
            translate("{# helm: app-armor #}\n{% if cni %}\nours\n{% endif %}\n{# helm: end #}\n").unwrap();
        assert!(
            kept.contains("\n{{- if eq .Values.mode \"cni\" }}\nours\n{{- end }}\n{{- end }}\n"),
            "{kept}"
        );
        for text in [
            "{{ other }}",
            "{% for x in y %}",
            "{# helm: nothing #}\n{# helm: end #}",
            "{# helm: args #}",
            "{# helm: args #}\n{# helm: seccomp #}\n{# helm: end #}\n{# helm: end #}",
        ] {
            assert!(translate(text).is_err(), "{text}");
        }
    }
}
