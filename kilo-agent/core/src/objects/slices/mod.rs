//! Slices of the list of nodes, `nodeslices.kilo.squat.ai/v1alpha1`: one agent writes into them what the
//! mesh needs of each Node, and the others watch them instead of Nodes.

mod election;
mod pack;
mod set;
mod source;
mod texts;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Leaving,
    annotations::{ANNOTATIONS, LAST_SEEN, PREFIX},
    leaving,
    node::{CONTROL_PLANE, EXTERNAL_IP, MOST_EXTERNAL_IPS},
};

pub use election::{CANDIDATES, NO_WRITER, Observed, Renewals, poll_seconds, rank};
pub use pack::{MOST_BYTES, MOST_NODES, Plan, plan};
pub use set::{Incomplete, SliceSet};
pub use source::{
    Chosen, EGRESS, ENTRY_BYTES, Inputs, NODE_BYTES, Reason, Source, longest_start, start_spread,
    time_to_send,
};
pub use texts::Texts;

/// The Lease of the agent that writes slices.
pub const LEASE: &str = "kilo-node-slices";
/// The slice that names the others.
pub const INDEX: &str = "index";

/// Some of the nodes, or the names of all slices.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "NodeSlice",
    doc = "What the mesh needs to know about some of the nodes, written by one agent for all others.",
    plural = "nodeslices",
    derive = "PartialEq",
    printcolumn = r#"{"name":"First","type":"string","jsonPath":".spec.nodes[0].name"}"#,
    printcolumn = r#"{"name":"Writer","type":"string","jsonPath":".spec.index.writer"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct NodeSliceSpec {
    /// About 20 of the nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub nodes: Vec<Entry>,
    /// Names of all slices; only in the slice `index`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Index>,
}

/// Content of the slice named [`INDEX`], which the writer renews each minute: readers use only the slices that it
/// names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Names of the slices; agents ignore all others.
    #[schemars(length(max = 10000))]
    pub slices: Vec<String>,
    /// The `--topology-label` of the writer: agents with another label do not use the slices.
    #[schemars(length(max = 317))]
    pub topology_label: String,
    /// Node of the agent that wrote the index.
    #[schemars(length(max = 253))]
    pub writer: String,
    /// Time at which the index was written, in Unix seconds: each minute, and when slices come or go.
    #[serde(default)]
    pub renewed: i64,
}

/// What the mesh needs to know about a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Name of the Node.
    #[schemars(length(max = 253))]
    pub name: String,
    /// `metadata.uid` of the Node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub uid: String,
    /// `metadata.resourceVersion` of the Node when this was written.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    /// Annotations of the Node that Kilo reads, except heartbeats, without the prefix `kilo.squat.ai/`.
    #[serde(default, skip_serializing_if = "Texts::is_empty")]
    #[schemars(with = "BTreeMap<String, String>")]
    pub annotations: Texts,
    /// Value of the Node's label that names its location.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Whether the Node's labels say that the API server or etcd runs there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub control_plane: bool,
    /// Pod CIDRs of the Node, `spec.podCIDR` first.
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub pod_cidrs: Vec<String>,
    /// Addresses of the Node of type `ExternalIP`.
    #[serde(default, rename = "externalIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub external_ips: Vec<String>,
    /// Why leadership should leave the node: `cordoned`, `removed` or `shutsDown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaving: Option<String>,
    /// Last heartbeat of the node when this was written, in Unix seconds; 0 = none.
    #[serde(default)]
    pub last_seen: i64,
    /// Seconds between heartbeats of the node, as its agent promises.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<u16>,
    /// Whether the writer considers the node alive.
    #[serde(default)]
    pub alive: bool,
}

/// Maximum length of an entry's lists. The API server refuses a slice with a longer one, and with it what the
/// slice says of other nodes; the addresses of a Node, which its kubelet writes, have no limit.
const MOST_LISTED: usize = MOST_EXTERNAL_IPS;

const WORDS: [(Leaving, &str); 3] =
    [(Leaving::Cordoned, "cordoned"), (Leaving::Removed, "removed"), (Leaving::ShutsDown, "shutsDown")];

impl Entry {
    /// The entry of a Node object. `read` is what [`super::node::from_object`] returns
    /// for it with that label.
    pub fn new(object: &core::Node, read: &super::CheckedIn, topology_label: &str, alive: bool) -> Self {
        let (metadata, empty) = (&object.metadata, BTreeMap::new());
        let present = metadata.annotations.as_ref().unwrap_or(&empty);
        let passed_on = ANNOTATIONS.iter().filter_map(|row| {
            let text = row.passed_on(present, read.last_seen)?;
            Some((row.name.strip_prefix(PREFIX)?.to_owned(), text.clone()))
        });
        let spec = object.spec.as_ref();
        let mut pod_cidrs: Vec<String> = Vec::new();
        for cidr in
            spec.into_iter().flat_map(|spec| spec.pod_cidr.iter().chain(spec.pod_cidrs.iter().flatten()))
        {
            if !pod_cidrs.contains(cidr) {
                pod_cidrs.push(cidr.clone());
            }
        }
        pod_cidrs.truncate(MOST_LISTED);
        let word =
            |leaving| WORDS.iter().find(|(known, _)| *known == leaving).map(|(_, word)| (*word).to_owned());
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            annotations: passed_on.collect(),
            location: metadata.labels.as_ref().and_then(|labels| labels.get(topology_label)).cloned(),
            control_plane: read.control_plane,
            pod_cidrs,
            external_ips: read.external_ips.iter().map(ToString::to_string).collect(),
            leaving: read.leaving.and_then(word),
            last_seen: read.last_seen,
            heartbeat: read.heartbeat,
            alive,
        }
    }

    /// The Node, as far as the mesh needs it: [`super::node::from_object`] reads the same from
    /// it as from the original.
    pub fn to_object(&self, topology_label: &str) -> core::Node {
        let mut object = core::Node::default();
        let with_prefix = |(name, text): (&str, &str)| (format!("{PREFIX}{name}"), text.to_owned());
        let mut annotations: BTreeMap<_, _> = self.annotations.iter().map(with_prefix).collect();
        if self.last_seen != 0 {
            annotations.insert(LAST_SEEN.to_owned(), self.last_seen.to_string());
        }
        if let Some(seconds) = self.heartbeat {
            annotations.insert(format!("{PREFIX}heartbeat"), format!("{}/{seconds}", self.last_seen));
        }
        let location = self.location.iter().map(|location| (topology_label.to_owned(), location.clone()));
        let control_plane = self.control_plane.then(|| (CONTROL_PLANE[0].to_owned(), String::new()));
        object.metadata.name = Some(self.name.clone());
        object.metadata.annotations = Some(annotations);
        object.metadata.labels = Some(location.chain(control_plane).collect());
        let mut spec = core::NodeSpec { pod_cidrs: Some(self.pod_cidrs.clone()), ..Default::default() };
        let leaving = self.leaving.as_ref().and_then(|word| WORDS.iter().find(|(_, known)| known == word));
        leaving::write(leaving.map(|(leaving, _)| *leaving), &mut spec);
        object.spec = Some(spec);
        let address = |ip: &String| core::NodeAddress { type_: EXTERNAL_IP.to_owned(), address: ip.clone() };
        let addresses = Some(self.external_ips.iter().map(address).collect());
        object.status = Some(core::NodeStatus { addresses, ..Default::default() });
        object
    }

    /// True when both describe the node alike, whenever they were written.
    pub fn has_same_content(&self, other: &Self) -> bool {
        let said = |entry: &Self| Self { resource_version: String::new(), last_seen: 0, ..entry.clone() };
        // A node without any heartbeat is another kind of node.
        (self.last_seen == 0) == (other.last_seen == 0) && said(self) == said(other)
    }

    /// `resourceVersion` as the number it is in practice; 0 if it is not one.
    pub fn version(&self) -> u64 {
        self.resource_version.parse().unwrap_or(0)
    }

    /// Approximate size in an object, in bytes.
    pub fn bytes(&self) -> usize {
        const NAMES: usize = 160;
        let pairs = self.annotations.iter().map(|(name, text)| name.len() + text.len() + 6).sum::<usize>();
        let texts = self.pod_cidrs.iter().chain(&self.external_ips).map(|text| text.len() + 3).sum::<usize>();
        NAMES
            + self.name.len()
            + self.uid.len()
            + self.location.as_ref().map_or(0, String::len)
            + pairs
            + texts
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::objects::node;

    const LABEL: &str = "topology.kubernetes.io/region";

    fn object(annotations: &[(&str, &str)]) -> core::Node {
        let annotations: BTreeMap<_, _> =
            annotations.iter().map(|(name, text)| (format!("{PREFIX}{name}"), (*text).to_owned())).collect();
        let text = serde_json::json!({
            "metadata": {
                "name": "a", "uid": "u", "resourceVersion": "17", "annotations": annotations,
                "labels": {LABEL: "here", "node-role.kubernetes.io/etcd": "", "other": "x"},
            },
            "spec": {"podCIDR": "10.42.0.0/24", "podCIDRs": ["10.42.0.0/24", "fd00::/64", "rubbish"],
                "unschedulable": true, "taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
            "status": {"addresses": [{"type": "ExternalIP", "address": "192.0.2.7"},
                {"type": "InternalIP", "address": "10.1.0.1"}], "images": [{"names": ["i"]}]},
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_slice_says_of_a_node_what_its_object_says_rubbish_included() {
        let all = ANNOTATIONS.iter().map(|row| (row.name.strip_prefix(PREFIX).unwrap(), row.example));
        let examples: Vec<_> =
            all.map(|(name, example)| (name, example.split('`').nth(1).unwrap_or(example))).collect();
        let rubbish = [("key", "short"), ("endpoint", "x"), ("last-seen", "1000"), ("heartbeat", "1000/300")];
        for annotations in [&examples[..], &rubbish, &[("last-seen", "7")], &[]] {
            let object = object(annotations);
            let (read, problems) = node::from_object(&object, LABEL);
            let entry = Entry::new(&object, &read, LABEL, true);
            assert_eq!((entry.uid.as_str(), entry.version()), ("u", 17));
            let text = serde_json::to_string(&entry).unwrap();
            assert!(!text.contains("images") && text.len() < entry.bytes() + 200, "{} {text}", entry.bytes());
            let entry: Entry = serde_json::from_str(&text).unwrap();
            assert_eq!(
                node::from_object(&entry.to_object(LABEL), LABEL),
                (read, problems),
                "{annotations:?}"
            );
        }
    }

    #[test]
    fn lists_are_as_long_as_the_crd_allows_and_read_as_those_of_the_node() {
        let crd = serde_json::to_value(<NodeSlice as kube::CustomResourceExt>::crd()).unwrap();
        let entry =
            "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/nodes/items/properties";
        for list in ["podCIDRs", "externalIPs"] {
            let most = crd.pointer(&format!("{entry}/{list}/maxItems")).unwrap();
            assert_eq!(most.as_u64(), Some(MOST_LISTED as u64), "{list}");
        }
        let mut object = object(&[]);
        let address = |address: String| core::NodeAddress { type_: EXTERNAL_IP.to_owned(), address };
        let rubbish = std::iter::once("rubbish".to_owned());
        let addresses = rubbish.chain((0..150).map(|number| format!("192.0.2.{number}"))).map(address);
        object.status = Some(core::NodeStatus { addresses: Some(addresses.collect()), ..Default::default() });
        object.spec.as_mut().unwrap().pod_cidrs =
            Some((0..150).map(|number| format!("10.42.{number}.0/24")).collect());
        let read = node::from_object(&object, LABEL).0;
        let entry = Entry::new(&object, &read, LABEL, true);
        assert_eq!((entry.external_ips.len(), entry.pod_cidrs.len()), (MOST_LISTED, MOST_LISTED));
        let again = node::from_object(&entry.to_object(LABEL), LABEL).0;
        assert_eq!(again.external_ips, read.external_ips);
    }

    #[test]
    fn a_slice_does_not_bring_back_what_an_agent_that_has_gone_said_of_failover() {
        for (last_seen, counts) in [("1000", true), ("0", true), ("1030", false)] {
            let said = [("signal", "1"), ("leading", "65536"), ("leaders", "2"), ("heartbeat", "1000/30")];
            let object = object(&[&said[..], &[("last-seen", last_seen)]].concat());
            let read = node::from_object(&object, LABEL).0;
            let entry = Entry::new(&object, &read, LABEL, true);
            let again = node::from_object(&entry.to_object(LABEL), LABEL).0;
            assert_eq!(
                (again.signal, again.leading.is_some(), again.leaders.is_some()),
                (counts, counts, counts)
            );
            assert_eq!(again, read, "{last_seen}");
        }
    }

    #[test]
    fn a_heartbeat_is_no_news_and_all_else_is() {
        let entry = |annotations: &[(&str, &str)], alive| {
            let object = object(annotations);
            Entry::new(&object, &node::from_object(&object, LABEL).0, LABEL, alive)
        };
        let before = entry(&[("last-seen", "1000"), ("heartbeat", "1000/30")], true);
        assert!(before.has_same_content(&entry(&[("last-seen", "1030"), ("heartbeat", "1030/30")], true)));
        for (annotations, alive) in [
            (&[("last-seen", "1030"), ("heartbeat", "1030/300")][..], true),
            (&[("last-seen", "1030"), ("heartbeat", "1000/30")], true),
            (&[("last-seen", "1030"), ("heartbeat", "1030/30")], false),
            (&[("last-seen", "1030"), ("heartbeat", "1030/30"), ("leader", "")], true),
            (&[("last-seen", "0"), ("heartbeat", "1000/30")], true),
        ] {
            assert!(!before.has_same_content(&entry(annotations, alive)), "{annotations:?} {alive}");
        }
    }
}
