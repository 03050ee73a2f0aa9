//! Rules of the kernel's firewall that flags ask for. One that cannot be
//! written holds up nothing else.

use std::time::Instant;

use ipnet::IpNet;

use super::Agent;
use crate::backend::Backend;
use kilo_core::{plan, settings::Masquerade, topology::Node};
use kilo_host::firewall::nat_rules;

impl<B: Backend> Agent<B> {
    /// Once a resync period and when the pod CIDRs change: reading rules costs
    /// processes.
    pub(super) async fn write_forward_rules(&mut self, own: &Node) -> u64 {
        let wanted: &[IpNet] = if self.options.forward_rules { &own.pod_cidrs } else { &[] };
        match self.forward.apply(wanted, Instant::now()).await {
            Ok(writes) => writes,
            Err(error) => {
                self.metrics.error(error.label());
                tracing::error!(%error, "failed to write iptables FORWARD rules");
                0
            }
        }
    }

    /// What rules are to masquerade: nothing where the programs do.
    pub(super) fn nat_decision(&self, tables: &plan::Tables) -> nat_rules::Decision {
        match self.options.masquerade {
            Masquerade::Nftables => nat_rules::Decision {
                sources: tables.masq_src.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
                destinations: tables.masq_dst.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
            },
            Masquerade::Ebpf | Masquerade::Off => nat_rules::Decision::default(),
        }
    }

    pub(super) async fn write_nat_rules(&mut self, wanted: nat_rules::Decision) -> u64 {
        match self.nat_rules.apply(wanted, Instant::now()).await {
            Ok(writes) => writes,
            Err(error) => {
                self.metrics.error(error.label());
                tracing::error!(%error, "failed to write masquerading rules");
                0
            }
        }
    }
}
