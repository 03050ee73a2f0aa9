//! The same agent when it reads slices: what it holds and spends at rest. The benchmark writes the slices at
//! once, which takes the agent that holds the Lease minutes, and renews their index.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1 as core;
use kilo_core::objects::{
    node,
    slices::{Entry, INDEX, Index, MOST_NODES, NodeSlice, NodeSliceSpec},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::check_ins::unix_now;

const LABEL: &str = "topology.kubernetes.io/region";
/// How often the index is renewed, as the agent that writes slices does.
const RENEWED: Duration = Duration::from_secs(60);
/// How often the Node of the agent under test is read.
const LOOK: Duration = Duration::from_secs(1);

/// Slices of all Nodes as they are now. Until this is dropped, their index is renewed, and changes of the
/// Node of the agent under test are copied to its slice: an agent whose slice does not follow its Node reads
/// Nodes.
pub struct Slices([tokio::task::JoinHandle<()>; 2]);

impl Slices {
    /// `own`: the Node of the agent under test.
    pub async fn write(client: &Client, own: &str) -> Self {
        promise(client).await;
        let nodes = Api::<core::Node>::all(client.clone()).list(&ListParams::default()).await.unwrap();
        let entries: Vec<Entry> = nodes.items.iter().map(entry).collect();
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<NodeSlice>(&()));
        let slices: BTreeMap<String, &[Entry]> = entries
            .chunks(MOST_NODES)
            .enumerate()
            .map(|(number, nodes)| (format!("slice-{number:04}"), nodes))
            .collect();
        stream::iter(&slices)
            .for_each_concurrent(8, |(name, nodes)| {
                put(&api, name, NodeSliceSpec { nodes: nodes.to_vec(), index: None })
            })
            .await;
        let of_own = slices.iter().find(|(_, nodes)| nodes.iter().any(|node| node.name == own));
        let (name, nodes) = of_own.map(|(name, nodes)| (name.clone(), nodes.to_vec())).unwrap();
        let follows = tokio::spawn(follow(client.clone(), own.to_owned(), name, nodes));
        let names: Vec<String> = slices.into_keys().collect();
        let index = move || Index {
            slices: names.clone(),
            topology_label: LABEL.to_owned(),
            writer: "bench".to_owned(),
            renewed: unix_now(),
        };
        put(&api, INDEX, NodeSliceSpec { nodes: Vec::new(), index: Some(index()) }).await;
        let renews = tokio::spawn(async move {
            loop {
                tokio::time::sleep(RENEWED).await;
                let spec = json!({"spec": NodeSliceSpec { nodes: Vec::new(), index: Some(index()) }});
                api.patch(INDEX, &PatchParams::default(), &Patch::Merge(&spec)).await.unwrap();
            }
        });
        Self([renews, follows])
    }
}

fn entry(node: &core::Node) -> Entry {
    Entry::new(node, &node::from_object(node, LABEL).0, LABEL, true)
}

/// Writes the slice of these nodes again when the entry of `own` has changed.
async fn follow(client: Client, own: String, slice: String, mut entries: Vec<Entry>) {
    let nodes = Api::<core::Node>::all(client.clone());
    let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<NodeSlice>(&()));
    loop {
        tokio::time::sleep(LOOK).await;
        let mut new = entry(&nodes.get(&own).await.unwrap());
        let known = entries.iter_mut().find(|known| known.name == own).unwrap();
        // A heartbeat alone does not change a slice.
        (new.last_seen, new.resource_version) = (known.last_seen, known.resource_version.clone());
        if *known != new {
            println!("bench: the agent's own Node is another: {known:?}, now {new:?}");
            *known = new;
            let spec = json!({"spec": NodeSliceSpec { nodes: entries.clone(), index: None }});
            api.patch(&slice, &PatchParams::default(), &Patch::Merge(&spec)).await.unwrap();
        }
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

/// Gives every Node a heartbeat that promises the next one, as our agents do: without it, agents read Nodes.
async fn promise(client: &Client) {
    let api: Api<core::Node> = Api::all(client.clone());
    let names = api.list_metadata(&ListParams::default()).await.unwrap();
    let now = unix_now();
    let beat = json!({"metadata": {"annotations": {
        "kilo.squat.ai/last-seen": now.to_string(), "kilo.squat.ai/heartbeat": format!("{now}/300"),
    }}});
    stream::iter(names.items.into_iter().filter_map(|node| node.metadata.name))
        .for_each_concurrent(16, |name| {
            let (api, beat) = (&api, &beat);
            async move {
                drop(api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(beat)).await.unwrap());
            }
        })
        .await;
}

async fn put(api: &Api<DynamicObject>, name: &str, spec: NodeSliceSpec) {
    let slice = serde_json::to_value(NodeSlice::new(name, spec)).unwrap();
    api.create(&PostParams::default(), &serde_json::from_value(slice).unwrap()).await.unwrap();
}
