//! The CNI configuration of the manifests, where a node's agent finds it.

use anyhow::{Context as _, Result};
use serde::Deserialize as _;
use serde_yaml_ng::{Deserializer, Value};

use super::netns::Netns;

/// The node's configuration list, in its own /etc.
pub const CONF: &str = "/etc/cni/net.d/10-kilo.conflist";

/// Puts the configuration of the manifests into a node's own /etc.
pub fn install(node: &Netns) -> Result<()> {
    let manifest = include_str!("../../../manifests/kilo-kubeadm.yaml");
    let documents = Deserializer::from_str(manifest).map(Value::deserialize);
    let documents = documents.collect::<Result<Vec<_>, _>>()?;
    let conf = documents.iter().find_map(|document| document.get("data")?.get("cni-conf.json")?.as_str());
    let conf = conf.context("the manifest has no cni-conf.json")?;
    node.sh(&format!("cat > {CONF} <<'CONF'\n{conf}CONF"))?;
    Ok(())
}
