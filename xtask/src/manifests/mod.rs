//! `cargo xtask manifests`: every DaemonSet, the overlay of each and the chart's from one template, the
//! Grafana dashboard from a list of panels, alerts and their page from another, and copies of what the
//! single files, components and the chart have in common. docs/testing.md lists what is written by hand.

pub mod alerts;
mod chart;
mod dashboard;
#[cfg(test)]
mod documented;
mod kustomize;
#[cfg(test)]
mod real_tools;

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context as _, Result};
use minijinja::{Environment, UndefinedBehavior, context};

use crate::workspace_root;

/// Where WireGuard runs.
#[derive(Clone, Copy, Debug)]
enum Wireguard {
    /// In the kernel.
    Kernel,
    /// In a DaemonSet of its own.
    Container,
    /// In the kernel; on nodes without it, as a process in the agent's container.
    Auto,
}

impl Wireguard {
    const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Container => "container",
            Self::Auto => "auto",
        }
    }
}

/// One `kilo-*.yaml`.
struct Variant {
    name: &'static str,
    about: &'static str,
    platform: &'static str,
    /// The CNI that Kilo is added to; `None`: Kilo is the CNI.
    addon: Option<&'static str>,
    wireguard: Wireguard,
}

const fn variant(
    name: &'static str,
    about: &'static str,
    platform: &'static str,
    addon: Option<&'static str>,
    wireguard: Wireguard,
) -> Variant {
    Variant { name, about, platform, addon, wireguard }
}

const KUBEADM: &str = "For clusters made with kubeadm (kubeadm init --pod-network-cidr=10.244.0.0/16).";
const KUBEADM_ADDON: &str = "For clusters made with kubeadm.";
const K3S: &str = "For k3s; start servers with --flannel-backend=none --disable-network-policy.";
const K3S_FLANNEL: &str = "For k3s with its own flannel (VXLAN).";
const K3S_CILIUM: &str =
    "For k3s with Cilium; start servers with --flannel-backend=none --disable-network-policy.";
const BOOTKUBE: &str = "For clusters made with bootkube.";
const TYPHOON: &str = "For Typhoon clusters.";

const VARIANTS: [Variant; 14] = [
    variant("kubeadm", KUBEADM, "kubeadm", None, Wireguard::Kernel),
    variant("kubeadm-userspace", KUBEADM, "kubeadm", None, Wireguard::Container),
    variant("kubeadm-flannel", KUBEADM_ADDON, "kubeadm", Some("flannel"), Wireguard::Kernel),
    variant("kubeadm-flannel-userspace", KUBEADM_ADDON, "kubeadm", Some("flannel"), Wireguard::Container),
    variant("kubeadm-cilium", KUBEADM_ADDON, "kubeadm", Some("cilium"), Wireguard::Kernel),
    variant("k3s", K3S, "k3s", None, Wireguard::Kernel),
    variant("k3s-userspace", K3S, "k3s", None, Wireguard::Container),
    variant("k3s-userspace-heterogeneous", K3S, "k3s", None, Wireguard::Auto),
    variant("k3s-flannel", K3S_FLANNEL, "k3s", Some("flannel"), Wireguard::Kernel),
    variant("k3s-cilium", K3S_CILIUM, "k3s", Some("cilium"), Wireguard::Kernel),
    variant("bootkube", BOOTKUBE, "bootkube", None, Wireguard::Kernel),
    variant("bootkube-flannel", BOOTKUBE, "bootkube", Some("flannel"), Wireguard::Kernel),
    variant("typhoon", TYPHOON, "typhoon", None, Wireguard::Kernel),
    variant("typhoon-flannel", TYPHOON, "typhoon", Some("flannel"), Wireguard::Kernel),
];

/// What all variants have in common, for no particular platform.
const BASE: Variant = variant("base", "Kilo's agent.", "other", None, Wireguard::Kernel);

const TEMPLATE: &str = include_str!("kilo.yaml");
const PAGE_ACCESS: &str = include_str!("page-access.yaml");
const OWN_NODE: &str = include_str!("own-node.yaml");
const SLICES: &str = include_str!("slices.yaml");
/// First line of a generated file, but for those of the chart. It is not in the templates, which are edited.
const HEADER: &str = "# Made by `cargo xtask manifests`; do not edit.\n";
/// Name of the image in the manifests, without a tag.
pub const IMAGE: &str = "kilo-ebpf/kilo";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Every generated file below manifests/, by its path there.
fn render() -> Result<BTreeMap<String, String>> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    environment.add_template("kilo", TEMPLATE)?;
    environment.add_template("peer-validation", include_str!("peer-validation.yaml"))?;
    environment.add_template("uninstall", include_str!("uninstall.yaml"))?;
    let image = format!("{IMAGE}:{VERSION}");

    let mut files = BTreeMap::new();
    let template = environment.get_template("kilo")?;
    let daemon = |variant: &Variant, is_base: bool| {
        template.render(context! {
            image,
            about => variant.about,
            about_base => is_base,
            platform => variant.platform,
            addon => variant.addon,
            cni => variant.addon.is_none() && !is_base,
            wireguard => variant.wireguard.name(),
        })
    };
    let base = daemon(&BASE, true)?;
    for variant in &VARIANTS {
        let text = daemon(variant, false)?;
        files.extend(kustomize::overlay(variant.name, variant.about, &base, &text)?);
        files.insert(format!("kilo-{}.yaml", variant.name), headed(&text));
    }
    let validation = environment.get_template("peer-validation")?.render(context! { image })?;
    let dashboard = dashboard::json()?;
    let written = |name: &str| fs::read_to_string(directory().join(name)).with_context(|| name.to_owned());
    let (crds, pod_monitor) = (written("crds.yaml")?, written("podmonitor.yaml")?);
    let rule = alerts::prometheus_rule();
    files.extend(chart::files(&chart::Sources {
        kilo: TEMPLATE,
        crds: &crds,
        validation: &validation,
        pod_monitor: &pod_monitor,
        rule: &rule,
        dashboard: &dashboard,
        page_access: PAGE_ACCESS,
        own_node: OWN_NODE,
        slices: SLICES,
    })?);
    let uninstall = environment.get_template("uninstall")?.render(context! { image })?;
    for (file, text) in [
        ("base/kilo.yaml", &*base),
        ("components/page-access/rbac.yaml", PAGE_ACCESS),
        ("own-node.yaml", OWN_NODE),
        ("components/own-node/policy.yaml", OWN_NODE),
        ("slices.yaml", SLICES),
        ("components/slices/rbac.yaml", SLICES),
        ("prometheusrule.yaml", &rule),
        ("components/monitoring/prometheusrule.yaml", &rule),
        ("peer-validation.yaml", &validation),
        ("components/webhook/peer-validation.yaml", &validation),
        ("uninstall.yaml", &uninstall),
    ] {
        files.insert(file.to_owned(), headed(text));
    }
    files.insert("base/crds.yaml".to_owned(), crds);
    files.insert("components/monitoring/podmonitor.yaml".to_owned(), pod_monitor);
    files.insert("components/monitoring/grafana-dashboard.json".to_owned(), dashboard.clone());
    files.insert("grafana-dashboard.json".to_owned(), dashboard);
    Ok(files)
}

fn headed(text: &str) -> String {
    format!("{HEADER}{text}")
}

/// Every file of manifests/, generated or not, by its path there. A name that begins with a dot is that of a
/// test's directory or an editor's file.
pub fn files() -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        for entry in fs::read_dir(directory().join(&below))? {
            let entry = entry?;
            let path = below.join(entry.file_name());
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if entry.file_type()?.is_dir() {
                left.push(path);
            } else {
                let text = fs::read_to_string(entry.path()).with_context(|| path.display().to_string())?;
                files.insert(path.to_string_lossy().into_owned(), text);
            }
        }
    }
    Ok(files)
}

fn directory() -> PathBuf {
    workspace_root().join("manifests")
}

/// Writes manifests/, and the page about alerts.
pub fn write() -> Result<()> {
    for (name, text) in render()? {
        let path = directory().join(&name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("manifests/{name}");
    }
    fs::write(workspace_root().join("docs/alerts.md"), alerts::page()).context("docs/alerts.md")?;
    println!("docs/alerts.md");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_files_in_manifests_are_what_the_generator_writes() {
        let rendered = render().unwrap();
        for (name, text) in &rendered {
            let present = fs::read_to_string(directory().join(name)).unwrap_or_default();
            assert!(present == *text, "manifests/{name} is out of date: run `cargo xtask manifests`");
        }
        for (name, _) in files().unwrap() {
            let is_ours = ["kilo-", "overlays/"].iter().any(|start| name.starts_with(start));
            assert!(
                !is_ours || rendered.contains_key(&name),
                "manifests/{name} is not generated: remove it or add it to the generator"
            );
        }
    }

    #[test]
    fn every_kustomization_uses_files_that_exist_and_the_image_of_the_manifests() {
        let mut count = 0;
        for (path, text) in files().unwrap() {
            if !path.ends_with("kustomization.yaml") {
                continue;
            }
            count += 1;
            let here = directory().join(&path);
            let here = here.parent().unwrap();
            let value: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
            let list =
                |key: &str| value.get(key).and_then(|list| list.as_sequence().cloned()).unwrap_or_default();
            let named = list("resources").into_iter().chain(list("components"));
            let patches = list("patches").into_iter().filter_map(|patch| patch.get("path").cloned());
            for name in named.chain(patches) {
                let name = name.as_str().unwrap();
                let target = here.join(name);
                let good = target.is_file() || target.join("kustomization.yaml").is_file();
                assert!(good, "{path}: {name} does not exist");
            }
            for image in list("images") {
                assert_eq!(image["name"].as_str().unwrap(), IMAGE);
                assert_eq!(image["newTag"].as_str().unwrap(), VERSION);
            }
        }
        assert!(count >= VARIANTS.len() + 5, "{count}");
    }
}
