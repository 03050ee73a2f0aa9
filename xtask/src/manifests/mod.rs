//! `cargo xtask manifests`: every DaemonSet from one template, the Grafana
//! dashboard from a list of panels.

mod dashboard;

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context as _, Result};
use minijinja::{Environment, UndefinedBehavior, context};

use crate::workspace_root;

/// Makes certificates for the webhook.
const CERTGEN: &str = "registry.k8s.io/ingress-nginx/kube-webhook-certgen:v1.4.4";

/// Who runs WireGuard.
#[derive(Clone, Copy, Debug)]
enum Wireguard {
    /// The kernel.
    Kernel,
    /// A DaemonSet of its own.
    Container,
    /// The kernel, and on nodes without it a process in the agent's container.
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
    /// The CNI that stays; `None` = Kilo is the CNI.
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

/// Every generated file of manifests/, by its name.
fn render() -> Result<BTreeMap<String, String>> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    environment.add_template("kilo", include_str!("kilo.yaml"))?;
    environment.add_template("peer-validation", include_str!("peer-validation.yaml"))?;
    let image = concat!("kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));

    let mut files = BTreeMap::new();
    let template = environment.get_template("kilo")?;
    for variant in &VARIANTS {
        let text = template.render(context! {
            image,
            about => variant.about,
            platform => variant.platform,
            addon => variant.addon,
            wireguard => variant.wireguard.name(),
        })?;
        files.insert(format!("kilo-{}.yaml", variant.name), text);
    }
    let validation = environment.get_template("peer-validation")?;
    files.insert(
        "peer-validation.yaml".to_owned(),
        validation.render(context! { image, certgen => CERTGEN })?,
    );
    files.insert("grafana-dashboard.json".to_owned(), dashboard::json()?);
    Ok(files)
}

fn directory() -> PathBuf {
    workspace_root().join("manifests")
}

/// Writes manifests/.
pub fn write() -> Result<()> {
    for (name, text) in render()? {
        let path = directory().join(&name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("manifests/{name}");
    }
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
        for entry in fs::read_dir(directory()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(
                !name.starts_with("kilo-") || rendered.contains_key(&name),
                "manifests/{name} is not generated: remove it or add it to the list of variants"
            );
        }
    }

    #[test]
    fn the_kustomization_uses_files_that_exist_and_the_image_of_the_manifests() {
        let text = fs::read_to_string(directory().join("kustomization.yaml")).unwrap();
        let value: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
        for resource in value["resources"].as_sequence().unwrap() {
            let name = resource.as_str().unwrap();
            assert!(directory().join(name).exists(), "{name} does not exist");
        }
        let image = format!(
            "{}:{}",
            value["images"][0]["name"].as_str().unwrap(),
            value["images"][0]["newTag"].as_str().unwrap()
        );
        assert_eq!(image, concat!("kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION")));
    }
}
