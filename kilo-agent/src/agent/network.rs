//! This node's condition NetworkUnavailable: true from the start of a boot until the data path is up. Agents
//! that restart later do not touch it.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::backend::Backend;
use ipnet::IpNet;
use kilo_core::topology::Node;
use kilo_host::cni::{
    boot::BootConfiguration,
    former::{self, FormerPodCidrs, FormerSubnets},
};

use super::{Agent, log_limiter::other_cni};

/// Pause between two attempts to write the condition.
const AGAIN: Duration = Duration::from_secs(5);
/// Pause after a refusal: the permission may be granted later.
const REFUSED: Duration = Duration::from_secs(60);

/// Whether pods have network here; `None` as long as there is nothing to report.
pub(super) type Availability = watch::Sender<Option<bool>>;

/// Writes the condition whenever it changes, beside the reconciles: the API server
/// may be away, or be reached through the mesh only.
pub(super) async fn write<B: Backend>(
    backend: Arc<B>,
    node: String,
    mut availability: watch::Receiver<Option<bool>>,
) {
    while availability.changed().await.is_ok() {
        loop {
            let Some(available) = *availability.borrow_and_update() else { break };
            let pause = match backend.report_network(&node, available).await {
                Ok(()) => break,
                Err(error) if error.is_temporary() => {
                    tracing::debug!(%error, "node condition NetworkUnavailable is not written yet");
                    AGAIN
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to write node condition NetworkUnavailable");
                    REFUSED
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The value changed.
                changed = availability.changed() => if changed.is_err() { return } else { availability.mark_changed() },
            }
        }
    }
}

/// Pod CIDRs that earlier agents of this boot saw; empty without a configuration that ends with the boot.
pub(super) fn kept_former_pod_cidrs(boot: Option<&BootConfiguration>) -> FormerPodCidrs {
    let Some(BootConfiguration { directory, .. }) = boot else { return FormerPodCidrs::default() };
    FormerPodCidrs::open(directory).unwrap_or_else(|error| {
        tracing::warn!(%error, "ignoring the former pod CIDRs that an earlier agent kept");
        FormerPodCidrs::in_directory(directory)
    })
}

impl<B: Backend> Agent<B> {
    /// Reports that pods have no network yet, unless an agent of this boot has already published the CNI
    /// configuration.
    pub(super) fn announce_network(&self) {
        if self.boot_configuration().is_some_and(|configuration| !configuration.is_published()) {
            self.availability.send_replace(Some(false));
        }
    }

    /// Publishes the CNI configuration; to be called once the data path is up. In each boot, no pod starts
    /// before every uplink has its programs.
    pub(super) async fn publish_cni(&self, own: &Node) {
        if self.state.is_open && self.boot_configuration().is_some_and(|boot| !boot.is_published()) {
            self.metrics.error("cni");
            tracing::error!(
                "no pod starts on this node until every uplink takes its egress program (the errors above say which \
                 does not): what pods send would leave by it in clear"
            );
            return;
        }
        // Only the configuration knows the former subnets: it stays until they are gone, and the next
        // reconcile tries again.
        if !self.leave_former_subnets(own).await {
            return;
        }
        let written = match (&self.options.cni_boot, &self.options.cni) {
            (Some(configuration), _) => configuration.publish(&own.pod_cidrs),
            (None, Some(path)) => kilo_host::cni::update(path, &own.pod_cidrs),
            (None, None) => return,
        };
        match written {
            Ok(true) => tracing::info!("CNI configuration updated with the pod CIDRs of this node"),
            Ok(false) => {}
            Err(error) => {
                self.metrics.error("cni");
                tracing::error!(%error, "failed to update CNI configuration");
                return;
            }
        }
        if self.boot_configuration().is_some_and(BootConfiguration::is_published) {
            self.availability.send_if_modified(|said| {
                let differs = *said != Some(true);
                *said = Some(true);
                differs
            });
        }
    }

    /// Saves the pod CIDRs of this boot, and returns those that the node no longer has. While the
    /// configuration lists one, pods can be started with its addresses, so it is saved first.
    pub(super) fn keep_former_pod_cidrs(&mut self, own: &Node) -> Vec<IpNet> {
        let subnets = self.former_subnets(own).subnets;
        if let Err(error) = self.state.former_pod_cidrs.add(&subnets) {
            self.metrics.error("cni");
            tracing::error!(
                %error,
                "failed to keep this node's former pod CIDRs: an agent that starts later in this boot does not \
                 masquerade what pods with such addresses send"
            );
        }
        self.state.former_pod_cidrs.without(&own.pod_cidrs).collect()
    }

    /// Subnets in the existing configuration that the node's pod CIDRs replace.
    fn former_subnets(&self, own: &Node) -> FormerSubnets {
        let path = match (&self.options.cni_boot, &self.options.cni) {
            (Some(configuration), _) => configuration.file(),
            (None, Some(path)) => path.clone(),
            (None, None) => return FormerSubnets::default(),
        };
        // The step that writes the file reports read errors.
        former::subnets(&path, &own.pod_cidrs).unwrap_or_default()
    }

    /// Removes the gateway addresses of former pod CIDRs from this node's bridges, since another node may
    /// have those CIDRs. True when none is known to be left.
    async fn leave_former_subnets(&self, own: &Node) -> bool {
        let former = self.former_subnets(own);
        if former.subnets.is_empty() {
            return true;
        }
        match self.net.leave_subnets(&former.bridges, &former.subnets).await {
            Ok(writes) => {
                self.metrics.writes.inc_by(writes as u64);
                tracing::info!(
                    subnets = ?former.subnets,
                    addresses = writes,
                    "the pod CIDRs of this node changed; removed the former ones from the bridge"
                );
                true
            }
            Err(error) => {
                self.metrics.error("cni");
                tracing::error!(
                    %error,
                    "failed to remove the former pod CIDRs from the bridge; the CNI configuration is updated \
                     only afterwards"
                );
                false
            }
        }
    }

    /// Warns once, in the log and in the status, that the container runtime uses another configuration.
    pub(super) fn warn_of_other_cni(&self) {
        let Some(path) = &self.options.cni else { return };
        let warnings = match kilo_host::cni::in_front(path) {
            Ok(other) => other.map(|other| other_cni(&other, path)).into_iter().collect(),
            // Reading our own file reports what is wrong.
            Err(_) => Vec::new(),
        };
        self.view.send_if_modified(|view| {
            let differs = view.warnings != warnings;
            if differs {
                for warning in &warnings {
                    self.metrics.error("cni");
                    tracing::warn!("{warning}");
                }
                Arc::make_mut(view).warnings = warnings;
            }
            differs
        });
    }

    const fn boot_configuration(&self) -> Option<&BootConfiguration> {
        self.options.cni_boot.as_ref()
    }
}
