//! Sets `last-seen` of a dead node to 0.

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use super::client::{Asked, in_time};
use crate::backend::BackendError;
use kilo_core::objects::annotations::LAST_SEEN;

/// Sets the annotation to 0 if it still has the value seen; `false`: it has changed, so the node is alive.
///
/// # Errors
/// When the API server is away or refuses, also because the object changes at this moment.
pub async fn write(api: &Api<Node>, name: &str, last_seen: i64) -> Result<bool, BackendError> {
    // A list instead of a get, because the account already has the right to list.
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    let nodes = in_time(api.list_metadata(&one), Asked::Nodes).await?;
    let object = nodes.items.first().map(|node| &node.metadata);
    let value = object.and_then(|object| object.annotations.as_ref()?.get(LAST_SEEN));
    if value != Some(&last_seen.to_string()) {
        return Ok(false);
    }
    let version = object.and_then(|object| object.resource_version.as_deref());
    // Only this version is patched: a heartbeat written in between takes precedence.
    let metadata = json!({ "resourceVersion": version, "annotations": { LAST_SEEN: "0" } });
    let patch = Patch::Merge(json!({ "metadata": metadata }));
    let parameters = PatchParams { field_manager: Some("kilo".to_owned()), ..PatchParams::default() };
    let patched = api.patch_metadata(name, &parameters, &patch);
    in_time(patched, Asked::Patch(name)).await.map(|_| true)
}
