//! Keeps the webhook's certificate in a Secret, shared by all replicas, and its authority in the webhook's
//! configuration.
//!
//! It is renewed in two steps, so that the API server trusts a certificate before it is presented: first the
//! next one is stored beside the one in use and both authorities are trusted; an hour later the next one is
//! used. The Secret's resource version keeps replicas consistent.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::{
    ByteString,
    api::{admissionregistration::v1::ValidatingWebhookConfiguration, core::v1::Secret},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
};
use serde_json::{Value, json};

use super::issue::{Issued, LIFETIME, issue};
use crate::timestamp::Timestamp;
use kilo_core::errors::error_chain;

/// When the next step is due. A Secret without this annotation belongs to somebody else: its certificate is
/// used, but never renewed.
const DUE: &str = "kilo.squat.ai/renew-after";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// Keys of the authorities to trust; `ca` is the one of kube-webhook-certgen.
const AUTHORITIES: [&str; 2] = ["ca.crt", "ca"];
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// How long an authority is trusted before its certificate is used.
const TRUSTED_FIRST: Duration = Duration::from_secs(60 * 60);
/// How long before its end a certificate is renewed.
const EARLY: Duration = Duration::from_secs(120 * 24 * 60 * 60);
/// Number of attempts: of replicas that write at the same time, all but one must read again.
const TRIES: usize = 5;

/// Names of the webhook's objects in the cluster.
#[derive(Clone, Debug)]
pub struct ObjectNames {
    /// Namespace of the Secret and the Service.
    pub namespace: String,
    /// Name of the Secret that holds certificate and key (`--secret`).
    pub secret: String,
    /// Name of the Service through which the API server connects; the certificate is for its DNS names.
    pub service: String,
    /// Name of the ValidatingWebhookConfiguration that gets the certificate's authority.
    pub configuration: String,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The API server refuses or is unreachable.
    #[error(
        "{what}: {}; the service account needs the Role and ClusterRole of peer-validation.yaml",
        error_chain(source)
    )]
    Api {
        /// The request that failed.
        what: String,
        /// The error underneath.
        source: kube::Error,
    },
    /// The certificate cannot be issued.
    #[error("cannot create a certificate: {0}")]
    Issue(#[from] rcgen::Error),
    /// The Secret changed on every attempt to write it.
    #[error("Secret {0} was changed by something else on every attempt to write it")]
    Contended(String),
    /// The Secret is incomplete.
    #[error("Secret {0} has no tls.crt or tls.key; delete it to have it created again")]
    Incomplete(String),
}

/// Certificate chain and key in PEM.
pub type Files = (Vec<u8>, Vec<u8>);

type Data = BTreeMap<String, ByteString>;

/// Creates, renews or just reads the certificate, and has the API server trust its authority.
///
/// # Errors
/// When the API server refuses. Existing objects then stay unchanged.
pub async fn ensure(client: &Client, objects: &ObjectNames) -> Result<Files, SecretError> {
    let name = format!("{}/{}", objects.namespace, objects.secret);
    let failed = |what: String| move |source: kube::Error| SecretError::Api { what, source };
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &objects.namespace);
    for _ in 0..TRIES {
        let found =
            secrets.get_opt(&objects.secret).await.map_err(failed(format!("reading secret {name}")))?;
        let is_new = found.is_none();
        let mut secret = found.unwrap_or_else(|| new_secret(&objects.secret));
        let mut data = secret.data.take().unwrap_or_default();
        let due = secret.metadata.annotations.as_ref().and_then(|all| all.get(DUE)?.parse().ok());
        let Some(due) = step(&mut data, due, is_new, objects, Timestamp::now())? else {
            return finish(client, objects, &data, &name).await;
        };
        secret.metadata.annotations.get_or_insert_default().insert(DUE.to_owned(), due.to_string());
        secret.data = Some(data.clone());
        let written = match is_new {
            true => secrets.create(&PostParams::default(), &secret).await,
            // With the version that was read, so that another replica's write is not overwritten.
            false => secrets.replace(&objects.secret, &PostParams::default(), &secret).await,
        };
        match written {
            Ok(_) => {
                tracing::info!(secret = name, next_step = %due, "webhook certificate written");
                return finish(client, objects, &data, &name).await;
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(failed(format!("writing secret {name}"))(error)),
        }
    }
    Err(SecretError::Contended(name))
}

fn new_secret(name: &str) -> Secret {
    let mut secret = Secret { type_: Some("kubernetes.io/tls".to_owned()), ..Secret::default() };
    secret.metadata.name = Some(name.to_owned());
    secret
}

/// Carries out what is due; returns when the next step is due, or `None` if nothing was due.
fn step(
    data: &mut Data,
    due: Option<Timestamp>,
    is_new: bool,
    objects: &ObjectNames,
    now: Timestamp,
) -> Result<Option<Timestamp>, rcgen::Error> {
    let after = |time: Duration| Timestamp(now.0 + i64::try_from(time.as_secs()).unwrap_or(i64::MAX));
    let bytes = |text: String| ByteString(text.into_bytes());
    if is_new {
        let Issued { certificate, key, authority } = issue(&names(objects), at(now))?;
        for (name, text) in [(CERTIFICATE, certificate), (KEY, key), (AUTHORITIES[0], authority)] {
            data.insert(name.to_owned(), bytes(text));
        }
        return Ok(Some(after(LIFETIME - EARLY)));
    }
    let Some(due) = due.filter(|due| *due <= now) else { return Ok(None) };
    if let (Some(certificate), Some(key)) = (data.remove(NEXT_CERTIFICATE), data.remove(NEXT_KEY)) {
        data.insert(CERTIFICATE.to_owned(), certificate);
        data.insert(KEY.to_owned(), key);
        return Ok(Some(after(LIFETIME - EARLY)));
    }
    let Issued { certificate, key, authority } = issue(&names(objects), at(now))?;
    // The newest authority first; those older than the one in use are dropped.
    let in_use = authorities(data).map(|all| first_block(&all.0)).unwrap_or_default();
    data.insert(AUTHORITIES[0].to_owned(), bytes(authority + &in_use));
    data.insert(NEXT_CERTIFICATE.to_owned(), bytes(certificate));
    data.insert(NEXT_KEY.to_owned(), bytes(key));
    // An expired certificate is of no use, so the next one is used at once.
    let has_ended = now.0 - due.0 >= i64::try_from(EARLY.as_secs()).unwrap_or(i64::MAX);
    Ok(Some(after(if has_ended { Duration::ZERO } else { TRUSTED_FIRST })))
}

fn at(time: Timestamp) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(time.0).unwrap_or(0))
}

/// DNS names under which the API server may connect.
fn names(objects: &ObjectNames) -> Vec<String> {
    let name = format!("{}.{}", objects.service, objects.namespace);
    vec![format!("{name}.svc"), format!("{name}.svc.cluster.local"), name]
}

fn authorities(data: &Data) -> Option<&ByteString> {
    AUTHORITIES.iter().find_map(|name| data.get(*name))
}

/// The first certificate of a PEM text.
fn first_block(pem: &[u8]) -> String {
    const END: &str = "-----END CERTIFICATE-----";
    let text = String::from_utf8_lossy(pem);
    text.split_inclusive(END).next().map(|block| format!("{}\n", block.trim())).unwrap_or_default()
}

/// Has the API server trust the authorities; returns the certificate and key to serve with.
async fn finish(
    client: &Client,
    objects: &ObjectNames,
    data: &Data,
    name: &str,
) -> Result<Files, SecretError> {
    let (Some(certificate), Some(key)) = (data.get(CERTIFICATE), data.get(KEY)) else {
        return Err(SecretError::Incomplete(name.to_owned()));
    };
    if let Some(bundle) = authorities(data) {
        trust(client, &objects.configuration, bundle).await?;
    }
    Ok((certificate.0.clone(), key.0.clone()))
}

/// Writes the authorities into the webhook's configuration, if they differ.
async fn trust(client: &Client, configuration: &str, bundle: &ByteString) -> Result<(), SecretError> {
    let failed = |verb: &str| {
        let what = format!("{verb} ValidatingWebhookConfiguration {configuration}");
        move |source: kube::Error| SecretError::Api { what, source }
    };
    // Untyped: fields that are unknown to one version's type must stay.
    let kind = ApiResource::erase::<ValidatingWebhookConfiguration>(&());
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let mut found = api.get(configuration).await.map_err(failed("reading"))?;
    let bundle = json!(bundle);
    let mut differs = false;
    for webhook in found.data.get_mut("webhooks").and_then(Value::as_array_mut).into_iter().flatten() {
        differs |= webhook["clientConfig"]["caBundle"] != bundle;
        webhook["clientConfig"]["caBundle"] = bundle.clone();
    }
    if !differs {
        return Ok(());
    }
    match api.replace(configuration, &PostParams::default(), &found).await {
        Ok(_) => {
            tracing::info!(configuration, "webhook configuration updated with the certificate's authority");
        }
        // Another replica was faster; any other change is found at the next look.
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(failed("changing")(error)),
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;

    fn objects() -> ObjectNames {
        ObjectNames {
            namespace: "kilo".to_owned(),
            secret: "tls".to_owned(),
            service: "peer-validation".to_owned(),
            configuration: "peers.kilo.squat.ai".to_owned(),
        }
    }

    fn count(pem: &ByteString) -> usize {
        CertificateDer::pem_slice_iter(&pem.0).map(Result::unwrap).count()
    }

    #[test]
    fn a_certificate_is_trusted_before_it_is_used_and_never_missing() {
        let day = 24 * 60 * 60;
        let (mut data, start) = (Data::new(), Timestamp(1_800_000_000));
        let due = step(&mut data, None, true, &objects(), start).unwrap().unwrap();
        assert_eq!(due.0 - start.0, 245 * day);
        let first = data.clone();
        assert_eq!(count(&data[AUTHORITIES[0]]), 1);
        let mut early = data.clone();
        assert_eq!(step(&mut early, Some(due), false, &objects(), Timestamp(due.0 - 1)).unwrap(), None);
        assert_eq!(early, first, "nothing is due");

        let used = step(&mut data, Some(due), false, &objects(), due).unwrap().unwrap();
        assert_eq!(used.0 - due.0, 60 * 60);
        assert_eq!(data[CERTIFICATE], first[CERTIFICATE], "still in use");
        assert_eq!(count(&data[AUTHORITIES[0]]), 2);
        assert!(data[AUTHORITIES[0]].0.ends_with(&first[AUTHORITIES[0]].0), "both are trusted");
        let next = data[NEXT_CERTIFICATE].clone();

        let again = step(&mut data, Some(used), false, &objects(), used).unwrap().unwrap();
        assert_eq!(again.0 - used.0, 245 * day);
        assert_eq!(data[CERTIFICATE], next);
        assert!(!data.contains_key(NEXT_CERTIFICATE) && !data.contains_key(NEXT_KEY));
        step(&mut data, Some(again), false, &objects(), again).unwrap();
        assert_eq!(count(&data[AUTHORITIES[0]]), 2, "the oldest authority is gone");
    }

    #[test]
    fn one_that_has_ended_is_replaced_at_once_and_one_of_somebody_else_never() {
        let (mut data, start) = (Data::new(), Timestamp(1_800_000_000));
        let due = step(&mut data, None, true, &objects(), start).unwrap().unwrap();
        let late = Timestamp(start.0 + 366 * 24 * 60 * 60);
        assert_eq!(step(&mut data, Some(due), false, &objects(), late).unwrap(), Some(late));
        step(&mut data, Some(late), false, &objects(), late).unwrap();
        let kept = data.clone();
        assert_eq!(step(&mut data, None, false, &objects(), late).unwrap(), None);
        assert_eq!(data, kept);
    }
}
