//! The status of Peer objects, and the Events about them.

use kube::{
    Api, Client,
    api::{DynamicObject, ListParams, Patch, PatchParams},
    core::Status,
};
use serde_json::{Value, json};

use super::{
    cache::Note,
    client::{Asked, answered, explain, in_time, is_right_missing},
    event,
};
use crate::{
    backend::{BackendError, Handshake, Happened, PeersReported, TunnelStatus},
    timestamp::Timestamp,
};
use kilo_core::{
    objects::{
        events::EventReason,
        peer::{PeerCondition, PeerStatus, READY},
    },
    topology::{PeerAcceptance, PeerAcceptances},
};

/// Writes the statuses that differ, and an Event about each acceptance or refusal. A cluster set up for Kilo
/// has neither the right nor the subresource: that is logged once per change of the peers, at level debug, and
/// is not an error.
///
/// # Errors
/// When the API server is out of reach or overloaded; what is not written yet differs the next time, too.
pub async fn report(
    client: &Client,
    api: &Api<DynamicObject>,
    peers: &PeerAcceptances,
) -> Result<PeersReported, BackendError> {
    let objects = present_objects(api, peers).await?;
    let mut reported = PeersReported::default();
    let mut first_refusal = None;
    for object in objects {
        let name = object.metadata.name.clone().unwrap_or_default();
        let Some(acceptance) = peers.get(&name) else { continue };
        let present = present(&object);
        let wanted = status(acceptance, present.as_ref(), Timestamp::now());
        if present.as_ref() == Some(&wanted) {
            continue;
        }
        // An absent reason is written as null, so that a former one is removed.
        let status = json!({
            "accepted": wanted.accepted, "reason": wanted.reason, "conditions": wanted.conditions,
        });
        let patch = Patch::Merge(json!({ "status": status }));
        match answered(api.patch_status(&name, &PatchParams::default(), &patch)).await? {
            Ok(_) => reported.writes += 1,
            Err(kube::Error::Api(status)) if is_object_gone(&status, &name) => continue,
            Err(kube::Error::Api(status)) if is_unsupported(&status) => {
                tracing::debug!(reason = status.message, "the status of peers is not written");
                break;
            }
            Err(kube::Error::Api(status)) if !matches!(status.code, 429 | 500..) => {
                first_refusal.get_or_insert_with(|| (name.clone(), status.message));
                reported.failed.insert(name);
                continue;
            }
            Err(error) => return Err(explain(error, Asked::Peers)),
        }
        if let Some(reason) = event_of(present.as_ref(), &wanted) {
            let uid = object.metadata.uid.as_deref().unwrap_or_default();
            let happened = Happened::now(name.clone(), reason, acceptance.message());
            if let Err(error) = event::write(client, uid, &happened).await {
                tracing::debug!(%error, peer = name, reason = reason.as_str(), "failed to write an Event");
            }
        }
    }
    // One line for all: admission may refuse thousands, and each is tried again every minute.
    if let Some((peer, reason)) = first_refusal {
        let failed = reported.failed.len();
        tracing::warn!(peer, reason, failed, "failed to write the status of peers; retrying in a minute");
    }
    Ok(reported)
}

/// Whether the object has been deleted since it was listed.
fn is_object_gone(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}

/// Whether this account may write no status at all, or Peer objects have none.
fn is_unsupported(status: &Status) -> bool {
    status.code == 404 || is_right_missing(status)
}

/// The existing objects of these peers: a few are fetched one by one, as lists because agents may not `get`;
/// otherwise all are listed.
async fn present_objects(
    api: &Api<DynamicObject>,
    peers: &PeerAcceptances,
) -> Result<Vec<DynamicObject>, BackendError> {
    const FEW: usize = 16;
    if peers.len() > FEW {
        return Ok(in_time(api.list(&ListParams::default()), Asked::Peers).await?.items);
    }
    let mut objects = Vec::new();
    for name in peers.keys() {
        let one = ListParams::default().fields(&format!("metadata.name={name}"));
        objects.extend(in_time(api.list(&one), Asked::Peers).await?.items);
    }
    Ok(objects)
}

/// What is kept of a Peer object besides its spec.
pub fn note(object: &DynamicObject) -> Note {
    let field = |name: &str| object.data.get("status")?.get(name)?.as_str();
    let time = field("lastHandshake").and_then(|text| text.parse().ok());
    let endpoint = field("endpoint").and_then(|text| text.parse().ok());
    let version = object.metadata.resource_version.clone().unwrap_or_default();
    Note { version, tunnels: TunnelStatus { handshake: time.map(|time| Handshake { time, endpoint }) } }
}

/// Writes a handshake into the object at this version; false when the object has changed since.
///
/// # Errors
/// When the API server is away or refuses.
pub async fn write_handshake(
    api: &Api<DynamicObject>,
    peer: &str,
    version: &str,
    handshake: &Handshake,
) -> Result<bool, BackendError> {
    let patch = Patch::Merge(json!({
        "metadata": { "resourceVersion": version },
        "status": { "lastHandshake": handshake.time, "endpoint": handshake.endpoint },
    }));
    let parameters = PatchParams::default();
    let write = async {
        match api.patch_status(peer, &parameters, &patch).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            // An older CRD without this field accepts the write and drops it: treated like a missing status
            // subresource.
            Ok(object) if note(&object).tunnels.handshake.is_none() => {
                let text = "the API server does not keep status.lastHandshake";
                Err(kube::Error::Api(Status::failure(text, "NotFound").with_code(404).into()))
            }
            other => other.map(|_| true),
        }
    };
    in_time(write, Asked::Peers).await
}

/// The status in an object; `None` if it has another shape, which is then overwritten.
fn present(object: &DynamicObject) -> Option<PeerStatus> {
    let status: &Value = object.data.get("status")?;
    serde_json::from_value(status.clone()).ok()
}

/// The status that the object should have.
fn status(acceptance: &PeerAcceptance, present: Option<&PeerStatus>, now: Timestamp) -> PeerStatus {
    let accepted = acceptance.is_accepted();
    let status = if accepted { "True" } else { "False" };
    let before = present.and_then(|status| status.conditions.iter().find(|it| it.type_ == READY));
    let since = before.filter(|before| before.status == status);
    let condition = PeerCondition {
        type_: READY.to_owned(),
        status: status.to_owned(),
        reason: acceptance.reason().to_owned(),
        message: acceptance.message(),
        last_transition_time: since
            .map_or_else(|| now.to_string(), |before| before.last_transition_time.clone()),
    };
    let reason = (*acceptance != PeerAcceptance::Accepted).then(|| acceptance.message());
    PeerStatus { accepted, reason, conditions: vec![condition], ..present.cloned().unwrap_or_default() }
}

/// The Event to write about a change, if any.
fn event_of(present: Option<&PeerStatus>, wanted: &PeerStatus) -> Option<EventReason> {
    let same =
        present.is_some_and(|before| before.accepted == wanted.accepted && before.reason == wanted.reason);
    let reason = if wanted.accepted { EventReason::PeerAccepted } else { EventReason::PeerRefused };
    (!same).then_some(reason)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{sync::Arc, time::Duration};

    use kilo_core::objects::peer::Peer;
    use kube::api::ApiResource;
    use parking_lot::Mutex;

    use super::*;
    use crate::backend::kubernetes::test_server::{self, Answer, refusal};

    /// What comes of the peers a to d when the API server answers a patch of b's status with this: the
    /// result, and the peers whose status it was asked to write.
    async fn reported(answer: impl Into<Answer>) -> (Result<PeersReported, BackendError>, String) {
        let answer = answer.into();
        let (asked, patched) = (Arc::new(Mutex::new(String::new())), |path: &str| {
            path.strip_suffix("/status").and_then(|path| path.rsplit('/').next()).map(ToOwned::to_owned)
        });
        let seen = Arc::clone(&asked);
        let object = |name: &str| json!({ "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name } });
        let client = test_server::client(move |request| match patched(&request.path) {
            Some(name) => {
                seen.lock().push_str(&name);
                if name == "b" { answer.clone() } else { Answer::Object(200, object(&name)) }
            }
            None if request.method == "GET" => {
                let items = ["a", "b", "c", "d"].map(object);
                Answer::Object(200, json!({ "metadata": {}, "items": items }))
            }
            None => Answer::Object(201, request.body),
        });
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Peer>(&()));
        // More than a few, so that all are listed at once.
        let names = ('a'..='z').map(|name| (name.to_string(), PeerAcceptance::Accepted));
        let result = report(&client, &api, &names.collect()).await;
        let asked = asked.lock().clone();
        (result, asked)
    }

    #[tokio::test]
    async fn a_peer_whose_status_cannot_be_written_is_named_and_the_others_are_written() {
        for (code, reason, message) in [
            (409, "Conflict", "the object has been modified"),
            (422, "Invalid", "is invalid"),
            (403, "Forbidden", "admission webhook \"x\" denied the request"),
        ] {
            let (result, asked) = reported(refusal(code, reason, message, "b")).await;
            let wanted = PeersReported { writes: 3, failed: ["b".to_owned()].into() };
            assert_eq!((result.unwrap(), asked.as_str()), (wanted, "abcd"), "{code} {message}");
        }
        let gone = "peers.kilo.squat.ai \"b\" not found";
        let (result, asked) = reported(refusal(404, "NotFound", gone, "b")).await;
        let wanted = PeersReported { writes: 3, ..PeersReported::default() };
        assert_eq!((result.unwrap(), asked.as_str()), (wanted, "abcd"), "it was deleted");
    }

    #[tokio::test]
    async fn thousands_of_peers_whose_status_is_refused_are_one_line_of_the_log() {
        let denied = "admission webhook \"x\" denied the request";
        let client = test_server::client(move |request| match request.method.as_str() {
            "PATCH" => refusal(403, "Forbidden", denied, "p").into(),
            _ => {
                let peer = |number| json!({ "metadata": { "name": format!("peer-{number:04}") } });
                let items: Vec<_> = (0..3000).map(peer).collect();
                Answer::Object(200, json!({ "metadata": {}, "items": items }))
            }
        });
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Peer>(&()));
        let names = (0..3000).map(|number| (format!("peer-{number:04}"), PeerAcceptance::Accepted)).collect();
        let log = tempfile::NamedTempFile::new().unwrap();
        let file = Arc::new(log.reopen().unwrap());
        let logging = tracing_subscriber::fmt().with_ansi(false).with_writer(file).finish();
        let logging = tracing::subscriber::set_default(logging);
        assert_eq!(report(&client, &api, &names).await.unwrap().failed.len(), 3000);
        drop(logging);
        let text = std::fs::read_to_string(log.path()).unwrap();
        assert_eq!(text.lines().count(), 1, "{}", &text[..500.min(text.len())]);
        assert!(text.contains("failed=3000") && text.contains("peer-0000"), "{text}");
    }

    #[tokio::test]
    async fn a_server_that_is_overloaded_is_not_asked_for_the_other_peers_and_all_are_tried_again() {
        for code in [429, 500, 503] {
            let (result, asked) = reported(refusal(code, "", "busy", "")).await;
            assert!(result.unwrap_err().is_temporary(), "{code}");
            assert_eq!(asked, "ab");
        }
    }

    /// It takes as long as a request may.
    #[tokio::test]
    async fn a_server_that_does_not_answer_is_not_waited_for_without_end() {
        let limit = crate::backend::kubernetes::ANSWER + Duration::from_secs(10);
        let (result, asked) = tokio::time::timeout(limit, reported(Answer::Silence)).await.unwrap();
        assert!(result.unwrap_err().is_temporary());
        assert_eq!(asked, "ab");
    }

    #[tokio::test]
    async fn a_cluster_for_kilo_is_asked_once_and_that_is_no_error() {
        let forbidden = "peers \"b\" is forbidden: User \"kilo\" cannot patch resource \"peers/status\"";
        for answer in [
            refusal(403, "Forbidden", forbidden, "b"),
            refusal(404, "NotFound", "the server could not find the requested resource", ""),
        ] {
            let (result, asked) = reported(answer).await;
            let wanted = PeersReported { writes: 1, ..PeersReported::default() };
            assert_eq!((result.unwrap(), asked.as_str()), (wanted, "ab"));
        }
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_turns() {
        let refused = PeerAcceptance::Refused { reason: "InvalidSpec", why: "no key".to_owned() };
        let first = status(&refused, None, Timestamp(1000));
        assert_eq!(event_of(None, &first), Some(EventReason::PeerRefused));
        let time = |status: &PeerStatus| status.conditions[0].last_transition_time.clone();
        let other = PeerAcceptance::Refused { reason: "InvalidSpec", why: "no prefix".to_owned() };
        let second = status(&other, Some(&first), Timestamp(2000));
        assert_eq!((time(&second), second.conditions[0].message.as_str()), (time(&first), "no prefix"));
        assert_eq!(event_of(Some(&first), &second), Some(EventReason::PeerRefused));
        let third = status(&PeerAcceptance::Accepted, Some(&second), Timestamp(3000));
        assert_eq!(time(&third), Timestamp(3000).to_string());
        assert_eq!((third.accepted, third.reason.as_deref()), (true, None));
        assert_eq!(event_of(Some(&second), &third), Some(EventReason::PeerAccepted));
        assert_eq!(status(&PeerAcceptance::Accepted, Some(&third), Timestamp(4000)), third);
        // The peer's handshake, which leaders write, does not count as a difference.
        let shaken = PeerStatus { last_handshake: Some(Timestamp(9).to_string()), ..third.clone() };
        assert_eq!(status(&PeerAcceptance::Accepted, Some(&shaken), Timestamp(4000)), shaken);
        // As left by an agent older than conditions: the status is completed, without an Event.
        let old = PeerStatus { conditions: Vec::new(), ..third.clone() };
        assert_eq!(event_of(Some(&old), &third), None);
    }
}
