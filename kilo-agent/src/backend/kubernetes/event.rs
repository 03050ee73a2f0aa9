//! Events about Nodes and Peers, as `kubectl describe` shows them.

use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams, core::ObjectMeta};

use super::client::{Asked, in_time};
use crate::backend::{BackendError, Happened};

/// Namespace of Events about cluster-scoped objects.
const NAMESPACE: &str = "default";
/// The API server's reason when an object of that name exists; other conflicts have the same code.
const ALREADY_EXISTS: &str = "AlreadyExists";

/// Writes an Event unless it exists: an earlier attempt may have been written but not answered. A Node's
/// `uid` is its name, as the kubelet writes it, so that `kubectl describe node` finds the Event.
///
/// # Errors
/// When the API server refuses (the right to create events is missing) or is out of reach.
pub async fn write(client: &Client, uid: &str, happened: &Happened) -> Result<(), BackendError> {
    let event = event(uid, happened);
    let events: Api<Event> = Api::namespaced(client.clone(), NAMESPACE);
    let write = async {
        match events.create(&PostParams::default(), &event).await {
            Err(kube::Error::Api(status)) if status.reason == ALREADY_EXISTS => Ok(()),
            other => other.map(drop),
        }
    };
    in_time(write, Asked::Event).await
}

fn event(uid: &str, Happened { object, reason, text, at, id }: &Happened) -> Event {
    let at = Time(Timestamp::try_from(*at).unwrap_or_else(|_| Timestamp::now()));
    let version = if reason.kind() == "Node" { "v1" } else { "kilo.squat.ai/v1alpha1" };
    Event {
        metadata: ObjectMeta {
            name: Some(name(object, *id)),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(version.to_owned()),
            kind: Some(reason.kind().to_owned()),
            name: Some(object.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        },
        reason: Some(reason.as_str().to_owned()),
        message: Some(text.chars().take(LONGEST).collect()),
        type_: Some(reason.severity().as_str().to_owned()),
        source: Some(EventSource { component: Some("kilo".to_owned()), ..EventSource::default() }),
        count: Some(1),
        first_timestamp: Some(at.clone()),
        last_timestamp: Some(at),
        ..Event::default()
    }
}

/// Names an Event as the kubelet does: the object, and a number that is unique. Longer names are cut.
fn name(object: &str, id: u64) -> String {
    let object: String = object.chars().take(LONGEST_NAME - ID).collect();
    // No part of a DNS name may be empty, or end with a hyphen.
    format!("{}.{id:016x}", object.trim_end_matches(['.', '-']))
}

/// Maximum characters of a message that the API server accepts.
const LONGEST: usize = 1024;
/// Maximum characters of a name.
const LONGEST_NAME: usize = 253;
/// Characters of the suffix: a dot and 64 bits in hexadecimal.
const ID: usize = 17;

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use kilo_core::objects::events::EventReason;

    use super::*;

    #[test]
    fn a_second_try_writes_the_same_event_of_when_it_happened() {
        let at = UNIX_EPOCH + Duration::from_secs(1_780_000_000);
        let now = Happened::now("a2".to_owned(), EventReason::LeadsLocation, "leads".to_owned());
        let happened = Happened { at, ..now.clone() };
        let first = event("a2", &happened);
        assert_eq!(event("a2", &happened), first);
        let time = Timestamp::from_second(1_780_000_000).ok().map(Time);
        assert_eq!((&first.first_timestamp, &first.last_timestamp), (&time, &time));
        let other = Happened::now("a2".to_owned(), EventReason::LeadsLocation, "leads".to_owned());
        assert_ne!(event("a2", &other).metadata.name, event("a2", &now).metadata.name);
    }

    #[test]
    fn a_name_is_one_whatever_the_object_is_called() {
        assert_eq!(name("a2", 0xbeef), "a2.000000000000beef");
        let long = format!("{}.rest-of-a-name", "n".repeat(LONGEST_NAME - ID - 1));
        let named = name(&long, u64::MAX);
        assert!(named.len() < LONGEST_NAME && named.ends_with("n.ffffffffffffffff"), "{named}");
    }
}
