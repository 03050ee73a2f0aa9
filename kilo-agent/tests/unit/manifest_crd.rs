//! manifests/crds.yaml matches the Rust types; `KILO_BLESS=1` rewrites it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::Path;

use kilo_core::objects::{peer::Peer, slices::NodeSlice};
use kube::CustomResourceExt as _;

const HEADER: &str = "\
# Made from peer.rs and slices/mod.rs in kilo-agent/core/src/objects; do not edit. After a change there:
#   KILO_BLESS=1 cargo test -p kilo-agent --test unit manifest_crd::
";

#[test]
fn the_crds_in_the_manifests_are_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/crds.yaml");
    let crds = [Peer::crd(), NodeSlice::crd()].map(|crd| serde_yaml_ng::to_string(&crd).unwrap());
    let text = format!("{HEADER}---\n{}", crds.join("---\n"));
    if std::env::var_os("KILO_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let present = std::fs::read_to_string(&path).unwrap();
    assert_eq!(present, text, "the manifest and the type differ; see the first lines of the manifest");
}
