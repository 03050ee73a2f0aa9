//! Warnings, in the log and in the status, about what is set up so that it cannot work.

use super::{Agent, log_limiter::other_cni};
use crate::backend::Backend;
use kilo_common::relay::{FIRST_PORT, LAST_PORT, is_port};
use kilo_core::{plan, settings::Granularity, topology::Node};

impl<B: Backend> Agent<B> {
    /// Warns about this node, once while nothing changes.
    pub(super) fn warn_of_setup(&self, own: &Node) {
        let other_cni = self.other_cni();
        let is_other_cni = other_cni.is_some();
        let granularity = self.options.settings.granularity;
        let failover = self.options.failover.as_ref().and_then(|_| failover_in_vain(granularity));
        let port = port_of_relays(self.options.settings.port);
        let found = other_cni.into_iter().chain(plan::foreign_pods(own));
        let warnings: Vec<_> = found.chain(failover).chain(port).collect();
        if self.views.show_warnings(&warnings) {
            if is_other_cni {
                self.metrics.error("cni");
            }
            for warning in &warnings {
                tracing::warn!("{warning}");
            }
        }
    }

    /// The warning that the container runtime uses another configuration, if it does.
    fn other_cni(&self) -> Option<String> {
        let path = self.options.cni.path()?;
        // Reading our own file reports what is wrong.
        kilo_host::cni::in_front(path).ok().flatten().map(|other| other_cni(&other, path))
    }
}

/// The warning about failover where nobody can take over.
fn failover_in_vain(granularity: Granularity) -> Option<String> {
    (granularity != Granularity::Location).then(|| {
        format!(
            "--failover=auto does nothing with --mesh-granularity={}, where each node leads itself: give all agents \
             --mesh-granularity=location, or --failover=off",
            granularity.as_str()
        )
    })
}

/// The warning about a WireGuard port that relays may give to a pair.
fn port_of_relays(port: u16) -> Option<String> {
    is_port(port).then(|| {
        format!(
            "--port={port} is one of the UDP ports {FIRST_PORT} to {LAST_PORT}, which relays give to pairs: if this \
             node is a relay or shares its public address with one, others take its endpoint for a relay's; choose \
             another --port"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failover_is_in_vain_where_each_node_leads_itself() {
        assert_eq!(failover_in_vain(Granularity::Location), None);
        for granularity in [Granularity::Full, Granularity::Cross] {
            let said = failover_in_vain(granularity).unwrap_or_default();
            assert!(said.contains(&format!("--mesh-granularity={}", granularity.as_str())), "{said}");
        }
    }

    #[test]
    fn a_wireguard_port_among_those_of_relays_is_reported() {
        for port in [51_820, 51_829, 52_830] {
            assert_eq!(port_of_relays(port), None);
        }
        for port in [51_830, 52_829] {
            let said = port_of_relays(port).unwrap_or_default();
            assert!(
                said.contains(&format!("--port={port} is one of the UDP ports 51830 to 52829")),
                "{said}"
            );
        }
    }
}
