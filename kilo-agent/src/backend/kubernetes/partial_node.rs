//! A Node object without the fields that the topology does not need: images, most conditions and managed fields
//! are most of it, and come with each heartbeat.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Resource,
    api::ApiResource,
    core::{DynamicResourceScope, ObjectMeta},
};
use serde::{Deserialize, Deserializer};

use kilo_core::objects::leaving;

/// The fields read of a Node; the rest is skipped.
#[derive(Clone, Debug, Deserialize)]
pub struct PartialNode {
    #[serde(deserialize_with = "metadata")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Spec {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Vec<String>>,
    unschedulable: Option<bool>,
    taints: Option<Vec<core::Taint>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Status {
    addresses: Option<Vec<core::NodeAddress>>,
    #[serde(default, deserialize_with = "of_shutdown")]
    conditions: Option<Vec<core::NodeCondition>>,
}

/// Keeps the condition that says that the machine shuts down: the others change with each of the kubelet's
/// heartbeats.
fn of_shutdown<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<core::NodeCondition>>, D::Error> {
    let mut conditions = Option::<Vec<core::NodeCondition>>::deserialize(deserializer)?.unwrap_or_default();
    conditions.retain(leaving::shuts_down);
    conditions.shrink_to_fit();
    Ok((!conditions.is_empty()).then_some(conditions))
}

fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        name: Option<String>,
        resource_version: Option<String>,
        uid: Option<String>,
        annotations: Option<BTreeMap<String, String>>,
        labels: Option<BTreeMap<String, String>>,
    }
    let Metadata { name, resource_version, uid, annotations, labels } = Metadata::deserialize(deserializer)?;
    Ok(ObjectMeta { name, resource_version, uid, annotations, labels, ..ObjectMeta::default() })
}

impl From<PartialNode> for core::Node {
    fn from(PartialNode { metadata, spec, status }: PartialNode) -> Self {
        let Spec { pod_cidr, pod_cidrs, unschedulable, taints } = spec;
        let spec = core::NodeSpec { pod_cidr, pod_cidrs, unschedulable, taints, ..Default::default() };
        let Status { addresses, conditions } = status;
        let status = core::NodeStatus { addresses, conditions, ..Default::default() };
        Self { metadata, spec: Some(spec), status: Some(status) }
    }
}

impl Resource for PartialNode {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_topology_needs_is_read_and_the_rest_is_passed_over() {
        let text = r#"{
            "kind": "Node", "apiVersion": "v1",
            "metadata": {
                "name": "a", "resourceVersion": "7", "uid": "u", "creationTimestamp": "no time",
                "annotations": {"kilo.squat.ai/key": "k"}, "labels": {"l": "v"},
                "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
            },
            "spec": {"podCIDR": "10.42.0.0/24", "podCIDRs": ["10.42.0.0/24"], "configSource": 5,
                "unschedulable": true, "taints": [{"key": "k", "effect": "NoSchedule", "timeAdded": "2026-01-02T03:04:05Z"}]},
            "status": {
                "images": [{"names": ["i"]}],
                "conditions": [{"type": "DiskPressure", "status": "False"},
                    {"type": "Ready", "status": "False", "message": "node is shutting down",
                     "lastHeartbeatTime": "2026-01-02T03:04:05Z"}],
                "addresses": [{"type": "Hostname", "address": "a"}, {"type": "ExternalIP", "address": "192.0.2.7"}]
            }
        }"#;
        let node = core::Node::from(serde_json::from_str::<PartialNode>(text).unwrap());
        assert_eq!(
            (node.metadata.name.as_deref(), node.metadata.resource_version.as_deref()),
            (Some("a"), Some("7"))
        );
        assert_eq!(node.metadata.annotations.unwrap()["kilo.squat.ai/key"], "k");
        assert_eq!(node.metadata.labels.unwrap()["l"], "v");
        let spec = node.spec.unwrap();
        assert_eq!(spec.pod_cidr.as_deref(), Some("10.42.0.0/24"));
        assert_eq!(spec.pod_cidrs.unwrap(), ["10.42.0.0/24"]);
        assert_eq!((spec.unschedulable, spec.taints.unwrap()[0].key.as_str()), (Some(true), "k"));
        let status = node.status.unwrap();
        let conditions = status.conditions.unwrap();
        assert_eq!((conditions.len(), conditions[0].type_.as_str()), (1, "Ready"));
        let addresses = status.addresses.unwrap();
        assert_eq!((addresses[1].type_.as_str(), addresses[1].address.as_str()), ("ExternalIP", "192.0.2.7"));
        assert!(serde_json::from_str::<PartialNode>(r#"{"metadata": {}}"#).is_ok(), "without spec");
    }
}
