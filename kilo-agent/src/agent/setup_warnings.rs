//! Warnings, in the log and in the status, about what is set up so that it cannot work.

use super::{Agent, log_limiter::other_cni};
use crate::backend::Backend;
use kilo_core::{plan, settings::Granularity, topology::Node};

impl<B: Backend> Agent<B> {
    /// Warns about this node, once while nothing changes.
    pub(super) fn warn_of_setup(&self, own: &Node) {
        let other_cni = self.other_cni();
        let is_other_cni = other_cni.is_some();
        let granularity = self.options.settings.granularity;
        let failover = self.options.failover.as_ref().and_then(|_| failover_in_vain(granularity));
        let warnings: Vec<_> = other_cni.into_iter().chain(plan::foreign_pods(own)).chain(failover).collect();
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
}
