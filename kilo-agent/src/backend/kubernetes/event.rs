//! Events about Nodes and Peers, as `kubectl describe` shows them.

use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams, core::ObjectMeta};

use super::client::{Asked, in_time};
use crate::backend::BackendError;
use kilo_core::objects::events::EventReason;

/// Events about objects without a namespace are there.
const NAMESPACE: &str = "default";

/// Writes one. The `uid` of a Node is its name, as the kubelet writes it: so `kubectl describe node` finds it.
///
/// # Errors
/// When the API server refuses (the right to create events is missing) or is out of reach.
pub async fn write(
    client: &Client,
    reason: EventReason,
    name: &str,
    uid: &str,
    text: &str,
) -> Result<(), BackendError> {
    let now = Time(Timestamp::now());
    let version = if reason.kind() == "Node" { "v1" } else { "kilo.squat.ai/v1alpha1" };
    let event = Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{name}.")),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(reason.kind().to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        },
        reason: Some(reason.as_str().to_owned()),
        message: Some(text.chars().take(LONGEST).collect()),
        type_: Some(reason.severity().as_str().to_owned()),
        source: Some(EventSource { component: Some("kilo".to_owned()), ..EventSource::default() }),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        ..Event::default()
    };
    let events: Api<Event> = Api::namespaced(client.clone(), NAMESPACE);
    let parameters = PostParams::default();
    in_time(events.create(&parameters, &event), Asked::Event).await.map(drop)
}

/// Characters of a message that the API server takes.
const LONGEST: usize = 1024;
