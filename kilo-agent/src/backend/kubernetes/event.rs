//! Events about the own node, as `kubectl describe node` shows them.

use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams, core::ObjectMeta};

use super::client::{Asked, in_time};
use crate::backend::{BackendError, Warning};

/// Events about objects without a namespace are there.
const NAMESPACE: &str = "default";

/// Writes one warning.
///
/// # Errors
/// When the API server refuses (the right to create events is missing) or is out of reach.
pub async fn warn(client: Client, node: &str, warning: Warning, text: &str) -> Result<(), BackendError> {
    let now = Time(Timestamp::now());
    let event = Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{node}.")),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            // As the kubelet writes it, so that `kubectl describe node` finds it.
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        },
        reason: Some(warning.reason().to_owned()),
        message: Some(text.to_owned()),
        type_: Some("Warning".to_owned()),
        source: Some(EventSource { component: Some("kilo".to_owned()), host: Some(node.to_owned()) }),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        ..Event::default()
    };
    let events: Api<Event> = Api::namespaced(client, NAMESPACE);
    let parameters = PostParams::default();
    in_time(events.create(&parameters, &event), Asked::Event).await.map(drop)
}
