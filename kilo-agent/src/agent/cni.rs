//! The CNI configuration: this node's pod CIDRs in it, and those that it had before. Publishing it lets pods
//! start.

use ipnet::IpNet;

use super::Agent;
use crate::backend::Backend;
use kilo_core::topology::Node;
use kilo_host::cni::{
    boot::BootConfiguration,
    former::{self, FormerPodCidrs, FormerSubnets},
};

/// Pod CIDRs that earlier agents of this boot saw; empty without a configuration that ends with the boot.
pub(super) fn kept_former_pod_cidrs(boot: Option<&BootConfiguration>) -> FormerPodCidrs {
    let Some(BootConfiguration { directory, .. }) = boot else { return FormerPodCidrs::default() };
    FormerPodCidrs::open(directory).unwrap_or_else(|error| {
        tracing::warn!(%error, "ignoring the former pod CIDRs that an earlier agent kept");
        FormerPodCidrs::in_directory(directory)
    })
}

impl<B: Backend> Agent<B> {
    /// Publishes the CNI configuration; to be called once the data path is up. In each boot, no pod starts
    /// before every uplink has its programs.
    pub(super) async fn publish_cni(&self, own: &Node) {
        if self.actuators.is_open && self.boot_configuration().is_some_and(|boot| !boot.is_published()) {
            self.metrics.error("cni");
            tracing::error!(
                "no pod is started on this node: an uplink has no egress program yet (see the errors above), and \
                 pods' traffic could leave it in cleartext"
            );
            return;
        }
        // Only the configuration knows the former subnets: it stays until they are gone, and the next
        // reconcile tries again.
        if !self.leave_former_subnets(own).await {
            return;
        }
        match self.options.cni.write(&own.pod_cidrs) {
            Ok(true) => tracing::info!("CNI configuration updated with the pod CIDRs of this node"),
            Ok(false) => {}
            Err(error) => {
                self.metrics.error("cni");
                tracing::error!(%error, "failed to update CNI configuration");
                return;
            }
        }
        self.announce_network();
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
        let Some(path) = self.options.cni.file() else { return FormerSubnets::default() };
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
        match self.actuators.net.leave_subnets(&former.bridges, &former.subnets).await {
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

    pub(super) const fn boot_configuration(&self) -> Option<&BootConfiguration> {
        self.options.cni.of_boot()
    }
}
