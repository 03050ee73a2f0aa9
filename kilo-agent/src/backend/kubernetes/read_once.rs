//! Lists all objects once, for callers that do not watch: the right to list is enough.

use k8s_openapi::api::{coordination::v1::Lease, core::v1 as core};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde::de::DeserializeOwned;

use super::{cache::Cache, partial_node::PartialNode, see_node, see_peer};
use kilo_core::objects::{
    Snapshot, peer,
    slices::{self, SliceSet},
};

/// Objects per page: 10,000 nodes take 20 pages.
const PAGE: u32 = 500;

/// Nodes as they were listed.
pub struct ListedNodes(Vec<PartialNode>);

/// Peers as they were listed.
pub struct ListedPeers(Vec<DynamicObject>);

/// Lists all nodes.
///
/// # Errors
/// Errors of the API server.
pub async fn nodes(client: &Client) -> kube::Result<ListedNodes> {
    let nodes = Api::all_with(client.clone(), &ApiResource::erase::<core::Node>(&()));
    pages(nodes).await.map(ListedNodes)
}

/// Lists all peers.
///
/// # Errors
/// Errors of the API server.
pub async fn peers(client: &Client) -> kube::Result<ListedPeers> {
    // Untyped, so that one malformed object does not hide the others.
    let peers = Api::all_with(client.clone(), &ApiResource::erase::<peer::Peer>(&()));
    pages(peers).await.map(ListedPeers)
}

/// Lists all slices of the nodes.
///
/// # Errors
/// Errors of the API server.
pub async fn slices(client: &Client) -> kube::Result<SliceSet> {
    let slices: Api<DynamicObject> =
        Api::all_with(client.clone(), &ApiResource::erase::<slices::NodeSlice>(&()));
    let list = pages(slices).await?.into_iter().map(|object| {
        let name = object.metadata.name.unwrap_or_default();
        let spec = object.data.get("spec").cloned();
        (name, spec.and_then(|spec| serde_json::from_value(spec).ok()))
    });
    let mut set = SliceSet::default();
    set.replace(list.collect());
    Ok(set)
}

/// When the agent that writes slices was last alive, by its own clock, in Unix seconds; `None` without a
/// Lease.
///
/// # Errors
/// Errors of the API server.
pub async fn slices_renewed(client: &Client, namespace: &str) -> kube::Result<Option<i64>> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = leases.get_opt(slices::LEASE).await?;
    Ok(lease.and_then(|lease| Some(lease.spec?.renew_time?.0.as_second())))
}

async fn pages<K>(objects: Api<K>) -> kube::Result<Vec<K>>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let mut all = Vec::new();
    let mut wanted = ListParams::default().limit(PAGE);
    loop {
        let page = objects.list(&wanted).await?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => wanted = ListParams::default().limit(PAGE).continue_token(&token),
            None => return Ok(all),
        }
    }
}

/// Builds a snapshot of the listed objects. `topology_label`: the node label that names the location.
pub fn snapshot(nodes: ListedNodes, peers: ListedPeers, topology_label: &str) -> Snapshot {
    let mut cache = Cache::default();
    let none = std::collections::BTreeSet::new();
    let nodes = nodes.0.into_iter().map(|object| see_node(object, topology_label)).collect();
    cache.nodes.replace(nodes, &none);
    cache.peers.replace(peers.0.into_iter().map(see_peer).collect(), &none);
    cache.snapshot().unwrap_or_default()
}
