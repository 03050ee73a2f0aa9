//! DNS names of endpoints. One name that fails does not stop the others, and
//! keeps the address it had.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use futures::future::join_all;

use crate::topology::{EndpointHost, Mesh};

/// How long the answer to the own name counts.
const OWN_NAME_COUNTS: Duration = Duration::from_secs(300);
/// Longest wait for one name.
const PATIENCE: Duration = Duration::from_secs(2);

/// Remembers the last good answer of each name.
#[derive(Debug, Default)]
pub struct Resolver {
    known: BTreeMap<String, IpAddr>,
    own: Option<(Instant, Vec<IpAddr>)>,
}

impl Resolver {
    /// Addresses of this host's own name. A host without its name in DNS is
    /// ordinary, and a slow server must not hold up every reconcile: the answer
    /// counts for a while, an empty one too.
    pub async fn own_addresses(&mut self, hostname: &str) -> Vec<IpAddr> {
        match &self.own {
            Some((since, addresses)) if since.elapsed() < OWN_NAME_COUNTS => addresses.clone(),
            _ => {
                let addresses = lookup(hostname).await.unwrap_or_default();
                self.own = Some((Instant::now(), addresses.clone()));
                addresses
            }
        }
    }

    /// Addresses of every name the mesh's endpoints use.
    pub async fn resolve(&mut self, mesh: &Mesh) -> BTreeMap<String, IpAddr> {
        let endpoints = mesh.segments.iter().map(|segment| &segment.endpoint);
        let names: BTreeSet<&str> = endpoints
            .chain(mesh.peers.iter().filter_map(|peer| peer.endpoint.as_ref()))
            .filter_map(|endpoint| match &endpoint.host {
                EndpointHost::Dns(name) => Some(name.as_str()),
                EndpointHost::Ip(_) => None,
            })
            .collect();
        self.known.retain(|name, _| names.contains(name.as_str()));
        let answers = join_all(names.into_iter().map(|name| async move { (name, lookup(name).await) })).await;
        for (name, answer) in answers {
            match answer {
                // An address that is still among the answers stays: round robin must not flap.
                Ok(addresses) if self.known.get(name).is_some_and(|known| addresses.contains(known)) => {}
                Ok(addresses) => {
                    if let Some(address) = addresses.first() {
                        self.known.insert(name.to_owned(), *address);
                    }
                }
                Err(error) => tracing::warn!(name, error, "endpoint cannot be resolved"),
            }
        }
        self.known.clone()
    }
}

/// Every address of a host name.
///
/// # Errors
/// What the resolver said, or that it did not answer in time.
pub async fn lookup(name: &str) -> Result<Vec<IpAddr>, String> {
    match tokio::time::timeout(PATIENCE, tokio::net::lookup_host((name, 0))).await {
        Ok(Ok(addresses)) => Ok(addresses.map(|address| address.ip()).collect()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}
