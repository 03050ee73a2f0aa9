//! Handles claims from gateways of other locations for prefixes of their members, which this device moves at
//! once.

use std::net::IpAddr;

use kilo_common::signal::{Body, Kind};
use kilo_failover::{
    Far, Micros, NodeId, Signal, Term,
    far::{Owners, Step},
};

use super::{site::Site, thread::Thread, unaccepted_claims::Move};
use crate::far::{
    APART, FarGateway, FarLocation, PATIENCE, Refusal, SEED, SEEDED, claimed, prefixes, set_locations,
};

impl Thread {
    /// Takes over the other locations of a new site.
    pub(super) fn set_fars(&mut self, site: &Site, now: Micros) {
        self.moved.retain(|far| site.fars.contains_key(far));
        self.probed.retain(|far, _| site.fars.contains_key(far));
        let gateways = site.fars.values().flat_map(|location| &location.gateways);
        self.claim_rate.retain(&gateways.map(|gateway| gateway.id).collect());
        if !site.is_gateway() {
            self.fars.clear();
            self.unmoved.retain(|_| false);
            return;
        }
        // A location that has come, also one that was here before, starts with what the device has.
        if set_locations(&mut self.fars, &site.fars) {
            self.seeded_until = Some(now + SEEDED);
        }
        self.unmoved.retain(|far| site.fars.contains_key(far));
        self.is_dirty = true;
    }

    /// Forgets the owners read from the device unless they have been claimed.
    pub(super) fn forget_seeds(&mut self, now: Micros) {
        if self.seeded_until.take_if(|until| *until <= now).is_some() {
            self.fars.values_mut().for_each(|acting| acting.forget(SEED));
            self.is_dirty = true;
        }
    }

    /// Handles CLAIM or END, received through the tunnel of a gateway.
    pub(super) fn claimed(&mut self, (far, from): (Far, NodeId), signal: &Signal, now: Micros) {
        let Some(site) = self.site.clone() else { return };
        let Some((location, acting)) = site.fars.get(&far).zip(self.fars.get_mut(&far)) else {
            return self.metrics.refused(Refusal::Gateway);
        };
        let me = site.own_location.me;
        let claimed = claimed(&self.params, (location, acting), (far, from), signal, &site.names, (me, now));
        if claimed.foreign > 0 {
            self.metrics.refused(Refusal::Member);
            let foreign = claimed.foreign;
            tracing::debug!(
                from = self.name(from),
                foreign,
                "ignoring nodes of another location in a claim of a gateway"
            );
        }
        match claimed.step {
            Ok(Some(step)) => self.apply_step(far, location, &step, now),
            Ok(None) => {}
            Err(why) => self.metrics.refused(why),
        }
    }

    /// Moves the prefixes first: until then every packet that arrives by the new path is lost.
    fn apply_step(&mut self, far: Far, location: &FarLocation, step: &Step, now: Micros) {
        let is_move = !step.moves.is_empty() || step.moves_shared;
        // A reconcile that starts meanwhile must not undo this; one that is requested first would compete for
        // the CPU.
        self.is_dirty |= is_move;
        let is_news = is_move && self.publish();
        let wanted = Move { gateway: step.gateway, members: step.moves.clone(), shared: step.moves_shared };
        let moved = self.move_prefixes(far, location, wanted);
        if moved.is_some() {
            // Only the gateway that has the prefixes is answered; a giver that sent END learns it from that
            // one.
            self.tunnel_to(location, step.gateway, &step.answer);
        }
        if is_news {
            self.shared.changed.notify_one();
        }
        if let Some(moved) = moved.filter(|moved| !moved.is_empty()) {
            tracing::info!(
                location = location.name,
                gateway = self.name(step.gateway),
                members = moved.members.len(),
                shared = moved.shared,
                term = step.answer.term.count(),
                "nodes of another location moved to another gateway"
            );
        }
        if let Some(old) = step.asks {
            for pause in [0, APART] {
                self.later.push((now + pause, far, old));
            }
        }
    }

    /// Moves prefixes with one request to the device, including those that failed before. Returns what moved;
    /// `None` on failure, which is retried at the gateway's next CLAIM.
    fn move_prefixes(&mut self, far: Far, location: &FarLocation, wanted: Move) -> Option<Move> {
        let (site, acting) = self.site.as_ref().zip(self.fars.get(&far))?;
        self.unmoved.move_all(far, acting, wanted, |all| takes(site, location, all))
    }

    /// Probes old leaders whose shared prefixes are claimed, and moves the prefixes when one is silent.
    pub(super) fn check_old_leaders(&mut self, now: Micros) {
        let due: Vec<_> = self.later.extract_if(.., |(at, ..)| *at <= now).collect();
        let Some(site) = self.site.clone() else { return };
        for (_, far, old) in due {
            let Some(location) = site.fars.get(&far) else { continue };
            let nonce = rand::random();
            if let Some(acting) = self.fars.get_mut(&far) {
                acting.probed(nonce, now, PATIENCE);
            }
            let body = Body::Empty;
            let (sender, location_id) = (site.own_location.me, site.own_location.location);
            let probe =
                Signal { kind: Kind::Probe, nonce, term: Term::NONE, sender, location: location_id, body };
            self.tunnel_to(location, old, &probe);
        }
        let silent: Vec<Far> =
            self.fars.iter_mut().filter_map(|(far, acting)| acting.wake_up(now).then_some(*far)).collect();
        for far in silent {
            let Some(location) = site.fars.get(&far) else { continue };
            let Some(gateway) = self.fars.get(&far).map(Owners::shared) else { continue };
            self.is_dirty = true;
            let is_news = self.publish();
            self.move_prefixes(far, location, Move { gateway, members: Vec::new(), shared: true });
            if is_news {
                self.shared.changed.notify_one();
            }
        }
    }

    /// Sends a signal to a gateway of another location, through this node's tunnel.
    pub(super) fn tunnel_to(&mut self, location: &FarLocation, gateway: NodeId, signal: &Signal) {
        let Some(control) = self.site.as_ref().map(|site| site.control) else { return };
        let to = location.gateways.iter().find(|known| known.id == gateway);
        if let Some(FarGateway { control: to, .. }) = to {
            self.send_tunnel(IpAddr::V6(control), IpAddr::V6(*to), signal);
        }
    }
}

/// Whether the device accepts the move.
fn takes(site: &Site, location: &FarLocation, all: &Move) -> bool {
    let prefixes = prefixes(location, &all.members, all.shared);
    if prefixes.is_empty() {
        return true;
    }
    let Some(peer) = location.gateways.iter().find(|known| known.id == all.gateway) else { return false };
    let taken = site.device.claim(peer.key, &prefixes);
    if let Err(error) = &taken {
        tracing::error!(
            %error,
            "failed to move prefixes to another gateway; retrying at its next claim or the next reconcile"
        );
    }
    taken.is_ok()
}
