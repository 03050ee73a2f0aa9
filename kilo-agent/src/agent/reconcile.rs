//! One reconcile: observe, topology, plan, apply, publish.

use std::{sync::Arc, time::Instant};

use super::{
    Agent, AgentError,
    host_state::{HostState, SeenEndpoints},
    publisher::PATIENCE_UNKNOWN,
};
use crate::{
    backend::{Backend, BackendError},
    metrics::gauge,
    timestamp::Timestamp,
};
use kilo_core::{
    objects::{Snapshot, events::EventReason},
    settings::Masquerade,
    topology::{CheckedInRef, Mesh, Node, ObservedMesh, among, heartbeats, not_among, with_own},
};

impl<B: Backend> Agent<B> {
    /// True when there is nothing to do: the snapshot differs from the one last applied in heartbeats only,
    /// the same nodes are alive, and nobody has declared this one dead.
    pub(super) fn only_heartbeats_changed(&mut self, snapshot: &Arc<Snapshot>) -> bool {
        let state = &mut self.state;
        if !state.applied || !snapshot.differs_only_in_heartbeats(&state.observed.snapshot) {
            return false;
        }
        let nodes = with_own(&snapshot.nodes, state.observed.own.as_ref());
        let ready = state.liveness.ready(nodes, &self.options.hostname, Instant::now(), Timestamp::now().0);
        let own = snapshot.nodes.get(&self.options.hostname).map(|own| own.last_seen);
        let is_declared_dead = own.is_some_and(|own| self.writers.publisher.note_seen(own, Instant::now()));
        if ready != state.observed.ready || is_declared_dead {
            return false;
        }
        state.observed = state.observed.with_heartbeats(Arc::clone(snapshot)).into();
        self.views.show_heartbeats(&state.observed);
        // The objects decide how often this node must renew its heartbeat, and they are unchanged.
        self.writers.publisher.pace(
            self.writers.publisher.every(),
            state.liveness.suspects(),
            Instant::now(),
        );
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
        self.writers.publisher.note_seen(seen.last_seen, now);
        if let Some(failover) = &mut self.sources.failover {
            failover.note_several_asked(snapshot);
        }
        let seen_endpoints = SeenEndpoints::new(snapshot, host);
        let own = self.describe_own_node(&seen, host, &seen_endpoints).await;
        // An unchanged node keeps its allocation, so others recognise it by pointer equality.
        let same = self.state.observed.own.clone().filter(|same| **same == own);
        let own = same.unwrap_or_else(|| own.into());
        let observed = self.compute_topology(snapshot, &own, host, now, unix_now);
        let mesh = &observed.mesh;
        let published = self.published(&own, seen, &observed, &host.links);
        self.pace_heartbeats(with_own(&snapshot.nodes, Some(&own)), mesh, now);
        // Packets routed into the mesh before others know this node's key are lost, and the API server may be
        // reachable only through the mesh: so the key is published first, and its answer is awaited once.
        let publisher = &self.writers.publisher;
        let asks_first = seen.key != own.key && publisher.is_answered() && !publisher.is_resting(now);
        if asks_first {
            self.writers.publisher.publish(published.clone(), PATIENCE_UNKNOWN, now, unix_now);
            let answer = self.writers.publisher.answered().await;
            self.handle_publish_result(answer);
        }
        self.report_successions(mesh);
        self.set_gauges(mesh);
        self.warn_of_private_endpoint(mesh);
        self.warn_of_address_shortage(mesh);
        self.warn_of_stand_bys(mesh);
        self.warn_of_fewer_leaders(mesh);
        self.log_limiter.log_unused_location_ips(mesh.unused_location_ips());
        self.remember(&observed);
        self.publish_views(&host.interface, &seen_endpoints);
        let applied = self.plan_and_apply(mesh, &own, host, &seen_endpoints).await;
        if !asks_first {
            self.writers.publisher.publish_beside(published, now, unix_now);
        }
        self.declare_dead();
        let writes = applied?;
        // Saves what has just been applied: ready nodes, this one, peers.
        if let Some(last_good_writer) = &mut self.writers.last_good {
            last_good_writer.keep(&self.state, &self.metrics, now);
        }
        if self.writers.publisher.is_answered() {
            self.report_peers();
        }
        Ok(writes + std::mem::take(&mut host.made))
    }

    /// Computes the mesh with this node's current state.
    fn compute_topology(
        &mut self,
        snapshot: &Arc<Snapshot>,
        own: &Arc<Node>,
        host: &HostState,
        now: Instant,
        unix_now: i64,
    ) -> Arc<ObservedMesh> {
        let (state, settings) = (&mut self.state, &self.options.settings);
        let nodes = with_own(&snapshot.nodes, Some(own));
        let ready = state.liveness.ready(nodes.clone(), &self.options.hostname, now, unix_now);
        let members = among(nodes.clone(), &ready);
        let before = &state.observed;
        let mesh = before.mesh.next(members, &snapshot.peers, settings.granularity, settings.subnet);
        let freed = state.freed.after(&before.mesh, &mesh, now);
        let lost = not_among(nodes, &ready).chain(state.liveness.former(now));
        let mesh = mesh.with_lost(lost).with_gone(state.liveness.gone(now)).with_freed(freed);
        let mesh = match &mut self.sources.failover {
            Some(failover) => {
                let held = || self.actuators.dataplane.held_senders();
                failover.mesh(mesh, &host.state, (&self.options.hostname, &held), now)
            }
            None => mesh,
        };
        let mut leaders = before.leaders.clone();
        leaders.observe(&mesh, now);
        let (snapshot, own) = (Arc::clone(snapshot), Some(Arc::clone(own)));
        Arc::new(ObservedMesh { snapshot, own, ready, mesh: mesh.into(), leaders })
    }

    /// Plans and applies, and then lets pods start.
    async fn plan_and_apply(
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
        let conflicts = self.log_limiter.log_conflicts(&plan.conflicts, &self.metrics);
        self.report_conflicts(&conflicts);
        let decision = self.nat_decision(&plan.tables);
        let applied = self.apply(plan, host).await;
        self.update_failover(site);
        self.views.show_programs(self.actuators.dataplane.attached());
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
        self.warn_of_setup(own);
        Ok(writes)
    }

    fn warn_of_private_endpoint(&mut self, mesh: &Mesh) {
        let name = &self.options.hostname;
        let warned = if self.options.prefer_private { None } else { mesh.private_endpoint_of(name) };
        if let Some(text) = self.log_limiter.log_private_endpoint(warned, Instant::now()) {
            self.report(EventReason::PrivateEndpoint, text);
        }
    }

    fn warn_of_address_shortage(&mut self, mesh: &Mesh) {
        let shortage = mesh.address_shortage_of(&self.options.hostname);
        let said = self.log_limiter.log_address_shortage(shortage, &self.metrics);
        if let Some(text) = said.filter(|_| mesh.leads(&self.options.hostname)) {
            self.report(EventReason::NoWireguardAddress, text);
        }
    }

    /// Warns about this location only: agents of the others log their own.
    fn warn_of_fewer_leaders(&mut self, mesh: &Mesh) {
        let own = mesh.find(&self.options.hostname);
        let warning = own.and_then(|(at, _)| mesh.fewer_leaders_warning(at));
        self.log_limiter.log_fewer_leaders(warning, Instant::now());
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
    fn set_gauges(&self, mesh: &Mesh) {
        self.metrics.leader.set(i64::from(mesh.leads(&self.options.hostname)));
        self.metrics.nodes.set(gauge(mesh.node_count()));
        self.metrics.peers.set(gauge(mesh.peers.len()));
    }

    /// Sets how often this node's heartbeat is due.
    fn pace_heartbeats<'a>(
        &mut self,
        nodes: impl Iterator<Item = CheckedInRef<'a>>,
        mesh: &Mesh,
        now: Instant,
    ) {
        // An agent that writes slices tells by its own heartbeat whether the API server is there.
        let slices = self.backend.slices();
        let writes = slices.as_ref().is_some_and(|slices| slices.writes);
        let may_rest = !writes && (self.sources.failover.is_some() || slices.is_some());
        let every = heartbeats::seconds(nodes, &self.options.hostname, mesh, may_rest);
        self.metrics.heartbeat_seconds.set(every.into());
        self.writers.publisher.pace(every, self.state.liveness.suspects(), now);
    }

    /// Keeps what this reconcile found for the next one.
    fn remember(&mut self, observed: &Arc<ObservedMesh>) {
        let before = std::mem::replace(&mut self.state.observed, Arc::clone(observed));
        let differs = before.own != observed.own
            || before.ready != observed.ready
            || !observed.snapshot.differs_only_in_heartbeats(&before.snapshot);
        if let Some(last_good_writer) = self.writers.last_good.as_ref().filter(|_| differs) {
            last_good_writer.note_change();
        }
    }
}
