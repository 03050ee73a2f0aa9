//! One reconcile: observe, topology, plan, apply, publish.

use std::{sync::Arc, time::Instant};

use super::{
    Agent, AgentError,
    host_state::{HostState, SeenEndpoints},
    publisher::PATIENCE_UNKNOWN,
};
use crate::{
    backend::{Backend, BackendError},
    failover::Failover,
    metrics::gauge,
    relay::MeshView,
    timestamp::Timestamp,
};
use kilo_core::{
    objects::{Snapshot, events::EventReason},
    settings::Masquerade,
    topology::{Mesh, Node, among, heartbeats, not_among, with_own},
};
use kilo_host::interface::Interface;

impl<B: Backend> Agent<B> {
    /// True when there is nothing to do: the snapshot differs from the one last applied in heartbeats only,
    /// the same nodes are alive, and nobody has declared this one dead.
    pub(super) fn only_heartbeats_changed(&mut self, snapshot: &Arc<Snapshot>) -> bool {
        let state = &mut self.state;
        if !state.applied || !snapshot.differs_only_in_heartbeats(&state.snapshot) {
            return false;
        }
        let nodes = with_own(&snapshot.nodes, state.own.as_ref());
        let ready = state.liveness.ready(nodes, &self.options.hostname, Instant::now(), Timestamp::now().0);
        let own = snapshot.nodes.get(&self.options.hostname).map(|own| own.last_seen);
        let is_declared_dead = own.is_some_and(|own| self.publisher.note_seen(own, Instant::now()));
        if ready != state.ready || is_declared_dead {
            return false;
        }
        state.snapshot = Arc::clone(snapshot);
        self.view.send_modify(|view| Arc::make_mut(view).snapshot = Arc::clone(snapshot));
        self.relay_view.send_modify(|view| view.snapshot = Arc::clone(snapshot));
        // The objects decide how often this node must renew its heartbeat, and they are unchanged.
        self.publisher.pace(self.publisher.every(), state.liveness.suspects(), Instant::now());
        true
    }

    /// Computes the desired state once and applies what differs; returns the number of writes to the kernel.
    /// If anything fails, the known host state is discarded.
    pub(super) async fn reconcile(&mut self, snapshot: &Arc<Snapshot>) -> Result<u64, AgentError> {
        let mut host = match self.state.host.take() {
            Some(host) => host,
            None => self.read_host().await?,
        };
        let writes = self.converge(snapshot, &mut host).await?;
        self.state.host = Some(host);
        Ok(writes)
    }

    async fn converge(&mut self, snapshot: &Arc<Snapshot>, host: &mut HostState) -> Result<u64, AgentError> {
        self.log_limiter.log_invalid_objects(&snapshot.problems, &self.metrics);
        let (now, unix_now) = (Instant::now(), Timestamp::now().0);
        let name = &self.options.hostname;
        let seen = snapshot.nodes.get(name).ok_or_else(|| BackendError::NoSuchNode(name.clone()))?;
        self.publisher.note_seen(seen.last_seen, now);
        if let Some(failover) = &mut self.failover {
            failover.note_several_asked(snapshot);
        }
        let seen_endpoints = SeenEndpoints::new(snapshot, host);
        let own = self.describe_own_node(&seen, host, &seen_endpoints).await;
        // An unchanged node keeps its allocation, so others recognise it by pointer equality.
        let same = self.state.own.clone().filter(|same| **same == own);
        let own = same.unwrap_or_else(|| own.into());
        let (mesh, ready) = self.compute_topology(snapshot, &own, host, now, unix_now);
        let published = self.published(&own, seen, (&mesh, snapshot), &host.links);
        let nodes = with_own(&snapshot.nodes, Some(&own));
        // An agent that writes slices judges by its own heartbeat whether the API server is there.
        let slices = self.backend.slices();
        let writes = slices.as_ref().is_some_and(|slices| slices.writes);
        let may_rest = !writes && (self.failover.is_some() || slices.is_some());
        let every = heartbeats::seconds(nodes, &self.options.hostname, &mesh, may_rest);
        self.metrics.heartbeat_seconds.set(every.into());
        self.publisher.pace(every, self.state.liveness.suspects(), now);
        // Packets routed into the mesh before others know this node's key are lost, and the API server may be
        // reachable only through the mesh: so the key is published first, and its answer is awaited once.
        let asks_first = seen.key != own.key && self.publisher.is_answered();
        if asks_first {
            self.publisher.publish(published.clone(), PATIENCE_UNKNOWN, now, unix_now);
            let answer = self.publisher.answered().await;
            self.heard(answer);
        }
        self.state.leaders.observe(&mesh, now);
        self.report_successions(&mesh);
        self.observe(&mesh);
        self.warn_of_private_endpoint(&mesh);
        self.warn_of_stand_bys(&mesh);
        self.warn_of_one_leader(&mesh);
        self.show(&mesh, snapshot, &own, ready, (&host.interface, &seen_endpoints));
        let applied = self.put_right(&mesh, &own, host, &seen_endpoints).await;
        if !asks_first {
            self.publisher.publish_beside(published, now, unix_now);
        }
        self.declare_dead();
        let writes = applied?;
        // Saves what has just been applied: ready nodes, this one, peers.
        if let Some(last_good_writer) = &mut self.last_good_writer {
            last_good_writer.keep(&self.state, &self.metrics, now);
        }
        if self.publisher.is_answered() {
            self.report_peers();
        }
        Ok(writes + std::mem::take(&mut host.made))
    }

    /// Computes the mesh with this node's current state, and which of the snapshot's nodes take part.
    fn compute_topology(
        &mut self,
        snapshot: &Snapshot,
        own: &Arc<Node>,
        host: &HostState,
        now: Instant,
        unix_now: i64,
    ) -> (Arc<Mesh>, Vec<bool>) {
        let (state, settings) = (&mut self.state, &self.options.settings);
        let nodes = with_own(&snapshot.nodes, Some(own));
        let ready = state.liveness.ready(nodes.clone(), &self.options.hostname, now, unix_now);
        let members = among(nodes.clone(), &ready);
        let mesh = state.mesh.next(members, &snapshot.peers, settings.granularity, settings.subnet);
        let freed = state.freed.after(&state.mesh, &mesh, now);
        let lost = not_among(nodes, &ready).chain(state.liveness.former(now));
        let mesh = mesh.with_lost(lost).with_gone(state.liveness.gone(now)).with_freed(freed);
        let mesh = match &mut self.failover {
            Some(failover) => {
                let held = || self.dataplane.held_senders();
                failover.mesh(mesh, &host.state, (&self.options.hostname, &held), now)
            }
            None => mesh,
        };
        (mesh.into(), ready)
    }

    /// Plans and applies, and then lets pods start.
    async fn put_right(
        &mut self,
        mesh: &Mesh,
        own: &Node,
        host: &mut HostState,
        seen_endpoints: &SeenEndpoints,
    ) -> Result<u64, AgentError> {
        let missing = |missing| AgentError::Incomplete { node: own.name.clone(), missing };
        if own.pod_cidrs.is_empty() {
            return Err(missing(
                "it has no pod CIDR; set spec.podCIDR (kube-controller-manager --allocate-node-cidrs)",
            ));
        }
        if own.endpoint.is_none() {
            return Err(missing(
                "no address of this host can be an endpoint; set the annotation force-endpoint",
            ));
        }
        let plan = self.plan(mesh, own, host, seen_endpoints).await;
        let plan = plan.ok_or_else(|| missing("it is not in the mesh"))?;
        let site = self.site(mesh, &plan, host);
        if self.log_limiter.log_conflicts(&plan.conflicts, &self.metrics) {
            self.report_conflicts(&plan.conflicts);
        }
        let decision = self.nat_decision(&plan.tables);
        let applied = self.apply(plan, host).await;
        self.update_failover(site);
        let programs = self.dataplane.attached();
        self.view.send_if_modified(|view| {
            let differs = view.programs != programs;
            if differs {
                Arc::make_mut(view).programs = programs;
            }
            differs
        });
        // Pods' packets need these rules even when another part has failed.
        let mut ruled = self.write_forward_rules(own).await;
        // Rules of an earlier agent are removed once the programs masquerade in their place.
        if applied.is_ok() || self.options.masquerade == Masquerade::Nftables {
            ruled += self.write_nat_rules(decision).await;
        }
        self.metrics.writes.inc_by(ruled);
        let writes = applied?;
        // The data path is up: pods may start.
        self.publish_cni(own).await;
        self.warn_of_other_cni();
        Ok(writes)
    }

    fn warn_of_private_endpoint(&mut self, mesh: &Mesh) {
        let name = &self.options.hostname;
        let warned = if self.options.prefer_private { None } else { mesh.private_endpoint_of(name) };
        if let Some(text) = self.log_limiter.log_private_endpoint(warned, Instant::now()) {
            self.report(EventReason::PrivateEndpoint, text);
        }
    }

    /// Warns about this location only: agents of the others log their own.
    fn warn_of_one_leader(&mut self, mesh: &Mesh) {
        let own = mesh.find(&self.options.hostname);
        let warning = own.and_then(|(at, _)| mesh.one_leader_warning(at));
        self.log_limiter.log_one_leader(warning, Instant::now());
    }

    /// Warns about this location, and about others whose leader this agent does not know as one of their
    /// stand-bys.
    fn warn_of_stand_bys(&mut self, mesh: &Mesh) {
        let own = mesh.find(&self.options.hostname).map(|(at, _)| at);
        let concerns = |at: &usize| Some(*at) == own || mesh.unforeseen(*at).is_some();
        let warning = |at: usize| Some((mesh.segments[at].location.clone(), mesh.stand_by_warning(at)?));
        let warnings = (0..mesh.segments.len()).filter(concerns).filter_map(warning).collect();
        self.log_limiter.log_stand_bys(warnings, Instant::now());
    }

    /// Sets the gauges that describe the mesh.
    fn observe(&self, mesh: &Mesh) {
        self.metrics.leader.set(i64::from(mesh.leads(&self.options.hostname)));
        self.metrics.nodes.set(gauge(mesh.node_count()));
        self.metrics.peers.set(gauge(mesh.peers.len()));
    }

    /// Keeps the state for the next reconcile, and publishes it to the status, the page and the relay task.
    fn show(
        &mut self,
        mesh: &Arc<Mesh>,
        snapshot: &Arc<Snapshot>,
        own: &Arc<Node>,
        ready: Vec<bool>,
        (interface, seen_endpoints): (&Interface, &SeenEndpoints),
    ) {
        let state = &mut self.state;
        let differs = state.own.as_ref() != Some(own)
            || ready != state.ready
            || !snapshot.differs_only_in_heartbeats(&state.snapshot);
        if let Some(last_good_writer) = self.last_good_writer.as_ref().filter(|_| differs) {
            last_good_writer.note_change();
        }
        state.mesh = Arc::clone(mesh);
        state.snapshot = Arc::clone(snapshot);
        state.own = Some(Arc::clone(own));
        state.ready = ready;
        let slices = self.backend.slices();
        self.metrics.slices.observe(slices.as_ref());
        self.view.send_modify(|view| {
            let view = Arc::make_mut(view);
            view.node.clone_from(&self.options.hostname);
            view.interface.clone_from(&self.options.interface.name);
            view.mesh = Arc::clone(mesh);
            view.snapshot = Arc::clone(snapshot);
            view.own.clone_from(&state.own);
            view.ready.clone_from(&state.ready);
            view.granularity = self.options.settings.granularity;
            view.leaders.clone_from(&state.leaders);
            view.device = Some(interface.device.clone());
            view.nodes_from = slices.as_ref().map(ToString::to_string);
            view.failover = self.failover.as_ref().map(Failover::reporter);
            view.relays = self.relays.clone();
        });
        self.relay_view.send_replace(MeshView {
            mesh: Arc::clone(mesh),
            snapshot: Arc::clone(snapshot),
            own: state.own.clone(),
            device: Some(interface.device.clone()),
            relay_places: Arc::clone(&seen_endpoints.relay_places),
        });
    }
}
