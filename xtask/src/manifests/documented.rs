//! kustomize makes of the kustomizations in docs/ what the text beside them says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{fs, path::PathBuf, process::Command};

use super::{
    directory,
    real_tools::{Objects, arguments, object, objects, run, tool},
};
use crate::{kube_tools::Tool, workspace_root};

/// Every block of a page in docs/ that is a kustomization, with the page's name.
fn kustomizations() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(workspace_root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let blocks = text.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let name = path.file_name().unwrap().display().to_string();
        found.extend(
            blocks
                .filter(|block| block.contains("kind: Kustomization"))
                .map(|block| (name.clone(), block.to_owned())),
        );
    }
    found
}

/// The kustomization of that page with these words.
fn documented(page: &str, words: &str) -> String {
    let found: Vec<_> =
        kustomizations().into_iter().filter(|(name, text)| name == page && text.contains(words)).collect();
    let [(_, text)] = &found[..] else { panic!("{page} has {} kustomizations with {words:?}", found.len()) };
    text.clone()
}

/// Builds a kustomization that stands beside manifests/, as in the root of this repository.
fn build(kubectl: &PathBuf, text: &str) -> Objects {
    let work = tempfile::tempdir().unwrap();
    run(Command::new("cp").arg("-r").arg(directory()).arg(work.path().join("manifests"))).unwrap();
    fs::write(work.path().join("kustomization.yaml"), text).unwrap();
    objects(
        &run(Command::new(kubectl).arg("kustomize").arg(work.path()))
            .unwrap_or_else(|error| panic!("{text}\n{error}")),
    )
}

#[test]
fn every_kustomization_on_the_pages_is_built() {
    let Some(kubectl) = tool(Tool::Kubectl) else { return };
    let all = kustomizations();
    assert!(all.len() >= 4, "{all:?}");
    for (page, text) in all {
        let mut made = build(&kubectl, &text);
        assert!(arguments(&mut made).len() > 3, "{page}: the agent lost its arguments");
    }
}

#[test]
fn a_flag_is_added_by_the_patch_on_the_page_and_the_other_one_replaces_all_flags() {
    let Some(kubectl) = tool(Tool::Kubectl) else { return };
    let page = documented("install.md", "value: --log-level=debug");
    let mut plain = build(&kubectl, "resources: [manifests/overlays/k3s]\n");
    let mut with = build(&kubectl, &page);
    let mut wanted = arguments(&mut plain);
    wanted.push("--log-level=debug".to_owned());
    assert_eq!(arguments(&mut with), wanted);

    // What the page warns of.
    let strategic = "resources: [manifests/overlays/k3s]\npatches:\n  - patch: |\n      \
         {apiVersion: apps/v1, kind: DaemonSet, metadata: {name: kilo, namespace: kube-system}, spec: {template: {spec: \
         {containers: [{name: kilo, args: [--log-level=debug]}]}}}}\n";
    assert_eq!(arguments(&mut build(&kubectl, strategic)), ["--log-level=debug"]);
}

#[test]
fn the_operators_objects_get_the_label_by_which_prometheus_selects() {
    let Some(kubectl) = tool(Tool::Kubectl) else { return };
    let mut made = build(&kubectl, &documented("monitoring.md", "path: /metadata/labels/release"));
    for kind in ["PodMonitor", "PrometheusRule"] {
        let labels = &object(&mut made, kind, "kilo")["metadata"]["labels"];
        assert_eq!(labels["release"], "kube-prometheus-stack", "{kind}");
        assert_eq!(labels["app.kubernetes.io/part-of"], "kilo", "{kind}");
    }
}
