//! Firewall rules that flags ask for. A failure to write them does not block anything else.

use std::{error::Error, time::Instant};

use ipnet::IpNet;

use super::Agent;
use crate::backend::Backend;
use kilo_core::{plan, settings::Masquerade, topology::Node};
use kilo_host::firewall::{
    forward::ForwardError,
    nat_rules::{self, NatRulesError},
};

impl<B: Backend> Agent<B> {
    /// Applies iptables FORWARD rules when the pod CIDRs have changed, and else at most every ten seconds:
    /// reading them spawns processes.
    pub(super) async fn write_forward_rules(&mut self, own: &Node) -> u64 {
        let wanted: &[IpNet] = if self.options.forward_rules { &own.pod_cidrs } else { &[] };
        let written = self.actuators.forward.apply(wanted, Instant::now()).await;
        self.writes(written, ForwardError::label, "iptables FORWARD")
    }

    /// What nftables rules are to masquerade: nothing where the programs do it.
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
        let written = self.actuators.nat_rules.apply(wanted, Instant::now()).await;
        self.writes(written, NatRulesError::label, "masquerading")
    }

    /// The number of writes; an error is counted and logged, and gives 0.
    fn writes<E: Error>(&self, written: Result<u64, E>, label: fn(&E) -> &'static str, what: &str) -> u64 {
        written.unwrap_or_else(|error| {
            self.metrics.error(label(&error));
            tracing::error!(%error, "failed to write {what} rules");
            0
        })
    }
}
