//! The status of Peer objects.

use std::collections::BTreeMap;

use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};

use super::client::{Asked, in_time};
use crate::backend::BackendError;
use kilo_core::objects::peer::PeerStatus;

/// Writes the statuses that differ; returns how many. A cluster set up for Kilo
/// has neither the right nor the sub-resource: that is said once per change of
/// the peers, for debugging, and is no error.
///
/// # Errors
/// When the API server is out of reach.
pub async fn report(
    api: &Api<DynamicObject>,
    peers: &BTreeMap<String, Option<String>>,
) -> Result<u64, BackendError> {
    let objects = in_time(api.list(&ListParams::default()), Asked::Peers).await?;
    let mut writes = 0;
    for object in objects {
        let name = object.metadata.name.clone().unwrap_or_default();
        let Some(reason) = peers.get(&name) else { continue };
        let wanted = PeerStatus { accepted: reason.is_none(), reason: reason.clone() };
        let present = object.data.get("status").and_then(|status| {
            // Any shape may stand there; one that does not fit is written anew.
            serde_json::from_value::<PeerStatus>(status.clone()).ok()
        });
        if present.as_ref() == Some(&wanted) {
            continue;
        }
        // A reason that has gone must go, so it is named even when it is none.
        let status = serde_json::json!({ "accepted": wanted.accepted, "reason": wanted.reason });
        let patch = Patch::Merge(serde_json::json!({ "status": status }));
        match api.patch_status(&name, &PatchParams::default(), &patch).await {
            Ok(_) => writes += 1,
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                tracing::debug!(reason = status.message, "the status of peers is not written");
                break;
            }
            Err(kube::Error::Api(status)) => {
                tracing::warn!(
                    peer = name,
                    reason = status.message,
                    "failed to write the status of this peer"
                );
            }
            Err(error) => return Err(BackendError::Unreachable(error.to_string())),
        }
    }
    Ok(writes)
}
