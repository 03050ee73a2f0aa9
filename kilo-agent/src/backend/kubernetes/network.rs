//! The NetworkUnavailable condition of a Node.

use std::time::SystemTime;

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::client::{Asked, in_time};
use crate::backend::BackendError;

const TYPE: &str = "NetworkUnavailable";

/// Writes the condition unless it already has this status.
///
/// # Errors
/// When the API server is away or refuses.
pub async fn report(api: &Api<Node>, name: &str, available: bool) -> Result<(), BackendError> {
    // A list instead of a get, because the account already has the right to list; this happens once per boot.
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    let nodes = in_time(api.list(&one), Asked::Nodes).await?;
    let present = nodes.items.first().and_then(|node| {
        let conditions = node.status.as_ref()?.conditions.as_ref()?;
        let condition = conditions.iter().find(|condition| condition.type_ == TYPE)?;
        Some((condition.status.as_str(), condition.reason.as_deref().unwrap_or_default()))
    });
    if present == Some(words(available)) {
        return Ok(());
    }
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let patch = Patch::Strategic(condition(available, &now));
    in_time(api.patch_status(name, &PatchParams::default(), &patch), Asked::Patch(name)).await.map(drop)
}

/// Removes the condition from a node if one of our agents wrote it.
///
/// # Errors
/// When the API server is away or refuses.
pub async fn retract(api: &Api<Node>, node: &Node) -> Result<(), BackendError> {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let is_ours = conditions.iter().any(|condition| {
        let said = (condition.status.as_str(), condition.reason.as_deref().unwrap_or_default());
        condition.type_ == TYPE && [words(true), words(false)].contains(&said)
    });
    let Some(name) = node.metadata.name.as_deref().filter(|_| is_ours) else { return Ok(()) };
    let patch =
        Patch::Strategic(json!({ "status": { "conditions": [{ "$patch": "delete", "type": TYPE }] } }));
    in_time(api.patch_status(name, &PatchParams::default(), &patch), Asked::Patch(name)).await.map(drop)
}

/// The condition's status and reason.
const fn words(available: bool) -> (&'static str, &'static str) {
    if available { ("False", "KiloIsUp") } else { ("True", "KiloIsStarting") }
}

fn condition(available: bool, now: &str) -> Value {
    let (status, reason) = words(available);
    let message = match available {
        true => "Kilo's data path is up on this node",
        false => "Kilo has not brought its data path up since this node started",
    };
    json!({ "status": { "conditions": [{
        "type": TYPE,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }] } })
}
