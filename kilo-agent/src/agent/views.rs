//! What this agent shows to the tasks beside its reconciles: the status, and what the relay task needs.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Agent, host_state::SeenEndpoints};
use crate::{backend::Backend, failover::Failover, relay::RelayView, status::View};
use kilo_core::{observed::Attached, topology::ObservedMesh};
use kilo_host::interface::Interface;

/// What reconciles show, as of the last one.
pub(super) struct Views {
    /// For the status, the page and announcements.
    pub status: watch::Sender<Arc<View>>,
    /// For the relay task.
    pub relay: watch::Sender<RelayView>,
}

impl Views {
    pub fn new(status: watch::Sender<Arc<View>>) -> Self {
        Self { status, relay: watch::Sender::default() }
    }

    /// Shows a mesh in which only heartbeats have changed.
    pub fn show_heartbeats(&self, observed: &Arc<ObservedMesh>) {
        self.status.send_modify(|view| Arc::make_mut(view).observed = Arc::clone(observed));
        self.relay.send_modify(|view| view.observed = Arc::clone(observed));
    }

    /// Shows which programs are attached.
    pub fn show_programs(&self, programs: Vec<Attached>) {
        self.status.send_if_modified(|view| {
            let differs = view.programs != programs;
            if differs {
                Arc::make_mut(view).programs = programs;
            }
            differs
        });
    }

    /// Shows problems of the host; returns true when they were others before.
    pub fn show_warnings(&self, warnings: &[String]) -> bool {
        self.status.send_if_modified(|view| {
            let differs = view.warnings != warnings;
            if differs {
                Arc::make_mut(view).warnings = warnings.to_vec();
            }
            differs
        })
    }
}

impl<B: Backend> Agent<B> {
    /// Publishes the state to the status, the page and the relay task.
    pub(super) fn publish_views(&self, interface: &Interface, seen_endpoints: &SeenEndpoints) {
        let observed = &self.state.observed;
        let slices = self.backend.slices();
        self.metrics.slices.observe(slices.as_ref());
        self.views.status.send_modify(|view| {
            let view = Arc::make_mut(view);
            view.node.clone_from(&self.options.hostname);
            view.interface.clone_from(&self.options.interface.name);
            view.observed = Arc::clone(observed);
            view.granularity = self.options.settings.granularity;
            view.device = Some(interface.device.clone());
            view.nodes_from = slices.as_ref().map(ToString::to_string);
            view.failover = self.sources.failover.as_ref().map(Failover::reporter);
            view.relays = self.sources.relays.clone();
        });
        self.views.relay.send_replace(RelayView {
            observed: Arc::clone(observed),
            device: Some(interface.device.clone()),
            relay_addresses: Arc::clone(&seen_endpoints.relay_addresses),
        });
    }
}
