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
