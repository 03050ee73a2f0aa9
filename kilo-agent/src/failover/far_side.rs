//! The far side: gateways of other locations claim prefixes of their members, and this device
//! moves them at once.

use std::{collections::BTreeMap, net::IpAddr};

use kilo_common::signal::{Body, Kind};
use kilo_failover::{
    Far, MS, Micros, NodeId, SEC, Signal, Term,
    far::{Acting, Refused, Step},
};

use super::{
    site::{FarGateway, FarLocation, Site},
    thread::Thread,
};

/// Between the two probes of an old leader.
const APART: Micros = 20 * MS;
/// How long one waits for an answer.
const PATIENCE: Micros = 200 * MS;
/// What the device had before the agent started is believed for so long without a CLAIM: three
/// of them, as gateways repeat theirs.
const SEEDED: Micros = 30 * SEC;
/// The term of what the device had. Real ones are later, for they count from one above 16 bits.
pub(super) const SEED: Term = Term::from_bits(1);
/// The term of what nobody claimed when others were claimed.
const STAYS: Term = Term::from_bits(2);

impl Thread {
    /// Takes over who is where from a new site.
    pub(super) fn fars_are(&mut self, site: &Site, now: Micros) {
        if !site.is_gateway() {
            self.fars.clear();
            return;
        }
        self.fars.retain(|far, _| site.fars.contains_key(far));
        for (far, location) in &site.fars {
            let Some(leader) = location.gateways.get(location.acting).map(|gateway| gateway.id) else {
                continue;
            };
            let acting = self.fars.entry(*far).or_insert_with(|| {
                let mut acting = Acting::new([], leader);
                for (member, gateway) in &location.held {
                    acting.seed(*member, (SEED, *gateway));
                }
                acting
            });
            let members: Vec<NodeId> = location.members.keys().copied().collect();
            acting.members_are(&members);
            let gateways: Vec<NodeId> = location.gateways.iter().map(|gateway| gateway.id).collect();
            acting.gateways_are(&gateways);
            acting.is_led_by(leader);
            if let Some((term, gateway)) = location.written {
                acting.was_written(term, gateway);
            }
        }
        self.seeded_until.get_or_insert(now + SEEDED);
        self.is_dirty = true;
    }

    /// Forgets what the device had when nobody claims it.
    pub(super) fn forget_seeds(&mut self, now: Micros) {
        if self.seeded_until.is_some_and(|until| until <= now) {
            self.seeded_until = Some(Micros::MAX);
            self.fars.values_mut().for_each(|acting| acting.forget(SEED));
            self.is_dirty = true;
        }
    }

    /// CLAIM or END, through the tunnel of a gateway.
    pub(super) fn claimed(&mut self, (far, from): (Far, NodeId), signal: &Signal, now: Micros) {
        let Some(site) = self.site.clone() else { return };
        let Some(location) = site.fars.get(&far) else { return self.metrics.refused("gateway") };
        if signal.location != far {
            return self.metrics.refused("location");
        }
        let names_any =
            |signal: &Signal| !matches!(&signal.body, Body::Claim { members, .. } if members.is_empty());
        // A node that joined a moment ago is claimed before its object is here.
        let (known, foreign) = known_only(signal, location, &site.names);
        if foreign > 0 {
            self.metrics.refused("member");
            tracing::debug!(from = self.name(from), foreign, "a gateway claims nodes of another location");
            if !names_any(&known) {
                return;
            }
        }
        let Some(acting) = self.fars.get_mut(&far) else { return self.metrics.refused("gateway") };
        let gateways: Vec<NodeId> = location.gateways.iter().map(|gateway| gateway.id).collect();
        // The device has them where the last plan put them, and only who follows is to move.
        if let Some(leader) = location.gateways.get(location.acting).filter(|_| names_any(signal)) {
            acting.stay((STAYS, leader.id));
        }
        match acting.claimed(&self.params, from, &known, &gateways, site.place.me) {
            Ok(step) => self.moves(far, location, &step, now),
            Err(Refused::Kind | Refused::Gateway) => self.metrics.refused("gateway"),
            Err(Refused::Member) => self.metrics.refused("member"),
            Err(Refused::Leap) => self.metrics.refused("leap"),
        }
    }

    fn moves(&mut self, far: Far, location: &FarLocation, step: &Step, now: Micros) {
        if !step.moves.is_empty() || step.moves_shared {
            tracing::info!(
                location = %self.location_name(location),
                gateway = self.name(step.gateway),
                members = step.moves.len(),
                shared = step.moves_shared,
                term = step.answer.term.count(),
                "another gateway carries these nodes of a location"
            );
            // What the next reconcile reads first: it must not move anything back.
            self.is_dirty = true;
            self.tell();
        }
        let moved = self.move_prefixes(location, step.gateway, &step.moves, step.moves_shared);
        if let Some(old) = step.asks {
            for pause in [0, APART] {
                self.later.push((now + pause, far, old));
            }
        }
        if moved {
            // Who gave them with END learns it from who has them.
            self.tunnel_to(location, step.gateway, &step.answer);
        }
    }

    /// One request to the device; `false`: it did not take it, and the CLAIM will come again.
    fn move_prefixes(
        &mut self,
        location: &FarLocation,
        gateway: NodeId,
        members: &[NodeId],
        shared: bool,
    ) -> bool {
        let of_members = members.iter().filter_map(|member| location.members.get(member)).flatten();
        let of_location = location.shared.iter().filter(|_| shared);
        let prefixes: Vec<_> = of_members.chain(of_location).copied().collect();
        let peer = location.gateways.iter().find(|known| known.id == gateway);
        let (Some(site), Some(peer)) = (&self.site, peer) else { return false };
        if prefixes.is_empty() {
            return true;
        }
        match site.device.claim(peer.key, &prefixes) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "failed to move prefixes to another gateway; the next reconcile does");
                false
            }
        }
    }

    /// Probes of old leaders whose shared prefixes are claimed, and what follows of silence.
    pub(super) fn far_wakes(&mut self, now: Micros) {
        let due: Vec<_> = self.later.extract_if(.., |(at, ..)| *at <= now).collect();
        let Some(site) = self.site.clone() else { return };
        for (_, far, old) in due {
            let Some(location) = site.fars.get(&far) else { continue };
            let nonce = rand::random();
            if let Some(acting) = self.fars.get_mut(&far) {
                acting.probed(nonce, now, PATIENCE);
            }
            let body = Body::Empty;
            let (sender, location_id) = (site.place.me, site.place.location);
            let probe =
                Signal { kind: Kind::Probe, nonce, term: Term::NONE, sender, location: location_id, body };
            self.tunnel_to(location, old, &probe);
        }
        let silent: Vec<Far> =
            self.fars.iter_mut().filter_map(|(far, acting)| acting.wake_up(now).then_some(*far)).collect();
        for far in silent {
            let Some(location) = site.fars.get(&far) else { continue };
            let Some(gateway) = self.fars.get(&far).map(Acting::shared) else { continue };
            self.is_dirty = true;
            self.tell();
            self.move_prefixes(location, gateway, &[], true);
        }
    }

    /// Sends a signal to a gateway of another location, through the own tunnel.
    pub(super) fn tunnel_to(&mut self, location: &FarLocation, gateway: NodeId, signal: &Signal) {
        let Some(control) = self.site.as_ref().map(|site| site.control) else { return };
        let to = location.gateways.iter().find(|known| known.id == gateway);
        if let Some(FarGateway { control: to, .. }) = to {
            self.send_tunnel(IpAddr::V6(control), IpAddr::V6(*to), signal);
        }
    }

    fn location_name(&self, location: &FarLocation) -> String {
        let first = location.gateways.first().map_or(0, |gateway| gateway.id);
        format!("of {}", self.name(first))
    }
}

/// The same without members that are not known here: the rest of them need not wait. And how many of those are
/// known as nodes of another location, which nobody here may claim.
fn known_only(signal: &Signal, location: &FarLocation, names: &BTreeMap<NodeId, String>) -> (Signal, usize) {
    let mut signal = signal.clone();
    let mut foreign = 0;
    if let Body::Claim { members, .. } = &mut signal.body {
        let is_foreign =
            |member: &&NodeId| !location.members.contains_key(*member) && names.contains_key(*member);
        foreign = members.iter().filter(is_foreign).count();
        members.retain(|member| location.members.contains_key(member));
    }
    (signal, foreign)
}

#[cfg(test)]
mod tests {
    use kilo_common::signal::Shared;

    use super::*;

    #[test]
    fn nodes_of_another_location_are_counted_and_new_ones_are_not() {
        const OWN: NodeId = 1;
        const FOREIGN: NodeId = 2;
        const NEW: NodeId = 3;
        let location = FarLocation { members: BTreeMap::from([(OWN, Vec::new())]), ..FarLocation::default() };
        let names = [OWN, FOREIGN].map(|id| (id, format!("n{id}"))).into();
        for (claims, keeps, foreign) in [
            (vec![OWN], vec![OWN], 0),
            (vec![OWN, NEW], vec![OWN], 0),
            (vec![FOREIGN, OWN], vec![OWN], 1),
            (vec![FOREIGN, NEW], vec![], 1),
        ] {
            let body = Body::Claim { gateway: 9, shared: Shared::Stay, part: (0, 1), members: claims };
            let signal =
                Signal { kind: Kind::Claim, nonce: 1, term: Term::NONE, sender: 9, location: 7, body };
            let (signal, counted) = known_only(&signal, &location, &names);
            assert!(matches!(&signal.body, Body::Claim { members, .. } if *members == keeps));
            assert_eq!(counted, foreign, "{keeps:?}");
        }
    }
}
