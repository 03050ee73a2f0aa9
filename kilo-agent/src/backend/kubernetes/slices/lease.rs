//! The Lease of the agent that writes slices.

use std::time::{Duration, Instant};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kilo_core::objects::slices::{LEASE, Observed};
use kube::{Api, api::PostParams};

/// Validity of the Lease: a dead writer is replaced within this time plus a few seconds.
pub(super) const VALID: Duration = Duration::from_secs(20);
/// Interval between renewals: one write per interval is all that the election costs.
pub(super) const RENEWED: Duration = Duration::from_secs(7);
/// The holder writes nothing after this time without renewal, five seconds before others may begin.
const TRUSTED: Duration = Duration::from_secs(15);
/// Timeout of a request about the Lease.
const ANSWER: Duration = Duration::from_secs(5);

/// The Lease, which this agent holds or observes.
pub(super) struct Held {
    leases: Api<Lease>,
    own: String,
    observed: Observed,
    lease: Option<Lease>,
    renewed: Instant,
}

/// Result of an attempt to take the Lease.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// This agent has the Lease.
    Has,
    /// Another agent has it.
    Another,
    /// This account may not take it.
    Refused(String),
    /// The holder is unknown; another attempt may succeed.
    Failed(String),
}

impl Held {
    pub(super) fn new(leases: Api<Lease>, own: &str) -> Self {
        Self {
            leases,
            own: own.to_owned(),
            observed: Observed::default(),
            lease: None,
            renewed: Instant::now(),
        }
    }

    /// Takes the Lease if nobody holds it, or its holder has not renewed it for long enough.
    pub(super) async fn take(&mut self) -> Tried {
        let asked = Instant::now();
        let found = match in_time(self.leases.get_opt(LEASE)).await {
            Ok(Some(found)) => found,
            Ok(None) => {
                return Tried::Refused(format!("there is no Lease {LEASE}; apply the one of manifests/"));
            }
            Err(tried) => return tried,
        };
        let spec = found.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if !holder.is_empty() && holder != self.own {
            let says = format!("{holder} {:?}", spec.renew_time);
            if !self.observed.observe(&says, VALID, Instant::now()) {
                return Tried::Another;
            }
        }
        let now = MicroTime(Timestamp::now());
        let changes = i32::from(holder != self.own) + spec.lease_transitions.unwrap_or(-1);
        let spec = LeaseSpec {
            holder_identity: Some(self.own.clone()),
            lease_duration_seconds: i32::try_from(VALID.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(changes.max(0)),
            ..LeaseSpec::default()
        };
        self.write(found, spec, asked).await
    }

    /// Renews the Lease; returns [`Tried::Another`] if another agent has taken it meanwhile.
    pub(super) async fn renew(&mut self) -> Tried {
        let asked = Instant::now();
        // Without a successful `take` there is nothing to renew.
        let Some(lease) = self.lease.clone() else { return Tried::Another };
        match self.renew_at(lease.clone(), asked).await {
            // The version is another one, perhaps because of an earlier renewal that was not answered in time.
            Tried::Another => match in_time(self.leases.get_opt(LEASE)).await {
                Ok(Some(found)) if is_tenure(&found, &lease) => self.renew_at(found, asked).await,
                Ok(_) => Tried::Another,
                Err(tried) => tried,
            },
            tried => tried,
        }
    }

    async fn renew_at(&mut self, lease: Lease, asked: Instant) -> Tried {
        let mut spec = lease.spec.clone().unwrap_or_default();
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        self.write(lease, spec, asked).await
    }

    async fn write(&mut self, mut lease: Lease, spec: LeaseSpec, asked: Instant) -> Tried {
        lease.spec = Some(spec);
        // Replaces the version that was read: of two agents that try, one succeeds.
        let parameters = PostParams { field_manager: Some("kilo".to_owned()), ..PostParams::default() };
        match in_time(self.leases.replace(LEASE, &parameters, &lease)).await {
            Ok(lease) => {
                (self.lease, self.renewed) = (Some(lease), asked);
                Tried::Has
            }
            Err(tried) => tried,
        }
    }

    /// When the next renewal is due.
    pub(super) fn renewal(&self) -> Instant {
        self.renewed + RENEWED
    }

    /// Whether no other agent can hold it yet.
    pub(super) fn is_valid(&self) -> bool {
        self.renewed.elapsed() < TRUSTED
    }
}

/// Whether both say that the same agent has held the Lease since the same time: a second agent of the same
/// node, which runs for a moment while a pod is replaced, has taken it at another time.
fn is_tenure(found: &Lease, known: &Lease) -> bool {
    let tenure = |lease: &Lease| {
        lease.spec.as_ref().map(|spec| (spec.holder_identity.clone(), spec.acquire_time.clone()))
    };
    tenure(found) == tenure(known)
}

async fn in_time<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<T, Tried> {
    match tokio::time::timeout(ANSWER, answer).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(kube::Error::Api(status))) => Err(match status.code {
            403 | 404 => Tried::Refused(status.message),
            409 => Tried::Another,
            _ => Tried::Failed(status.message),
        }),
        Ok(Err(error)) => Err(Tried::Failed(kilo_core::errors::error_chain(&error))),
        Err(_) => Err(Tried::Failed(format!("no answer within {} s", ANSWER.as_secs()))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;
    use crate::backend::kubernetes::test_server::{self, refusal};

    /// What the API server has, and whether it applies the next write without a proper answer.
    struct Server {
        lease: Value,
        version: u64,
        answers_late: bool,
    }

    fn held(server: &Arc<Mutex<Server>>, own: &str) -> Held {
        let server = Arc::clone(server);
        let client = test_server::client(move |request| {
            let mut server = server.lock();
            if request.method == "GET" {
                return (200, server.lease.clone());
            }
            if request.body["metadata"]["resourceVersion"] != server.lease["metadata"]["resourceVersion"] {
                return refusal(409, "Conflict", "the object has been modified", LEASE);
            }
            server.lease = request.body;
            server.version += 1;
            server.lease["metadata"]["resourceVersion"] = server.version.to_string().into();
            if std::mem::take(&mut server.answers_late) {
                return refusal(504, "Timeout", "the request timed out", LEASE);
            }
            (200, server.lease.clone())
        });
        Held::new(Api::namespaced(client, "kube-system"), own)
    }

    #[tokio::test]
    async fn a_renewal_that_was_answered_too_late_is_the_holders_own() {
        let lease = json!({ "metadata": { "name": LEASE, "resourceVersion": "1" }, "spec": {} });
        let server = Arc::new(Mutex::new(Server { lease, version: 1, answers_late: false }));
        let (mut own, mut again, mut other) = (held(&server, "a"), held(&server, "a"), held(&server, "b"));
        assert_eq!(own.take().await, Tried::Has);
        server.lock().answers_late = true;
        assert!(matches!(own.renew().await, Tried::Failed(_)));
        assert_eq!(own.renew().await, Tried::Has, "nobody else has written it");
        assert_eq!(own.renew().await, Tried::Has);
        assert_eq!(other.take().await, Tried::Another);

        // Another agent of the same node begins while this one ends.
        assert_eq!(again.take().await, Tried::Has);
        assert_eq!(own.renew().await, Tried::Another);
        assert_eq!(again.renew().await, Tried::Has);
        // Another node takes it.
        server.lock().lease["spec"]["holderIdentity"] = "".into();
        assert_eq!(other.take().await, Tried::Has);
        assert_eq!(again.renew().await, Tried::Another);
    }
}
