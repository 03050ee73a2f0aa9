//! The far side: gateways of other locations claim prefixes of their members, and this device
//! moves them at once.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use kilo_common::signal::{Body, Kind};
use kilo_core::topology::ActingLocation;
use kilo_failover::{
    Far, MS, Micros, NodeId, Params, SEC, Signal, Term,
    far::{Acting, Refused, Step},
};

use super::{
    site::{FarGateway, FarLocation, Site},
    thread::Thread,
};

/// Between the two probes of an old leader.
pub(super) const APART: Micros = 20 * MS;
/// How long one waits for an answer.
pub(super) const PATIENCE: Micros = 200 * MS;
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
        locations_are(&mut self.fars, &site.fars);
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
        let Some((location, acting)) = site.fars.get(&far).zip(self.fars.get_mut(&far)) else {
            return self.metrics.refused("gateway");
        };
        let me = site.place.me;
        let claimed = claimed(&self.params, (location, acting), (far, from), signal, &site.names, me);
        if claimed.foreign > 0 {
            self.metrics.refused("member");
            let foreign = claimed.foreign;
            tracing::debug!(from = self.name(from), foreign, "a gateway claims nodes of another location");
        }
        match claimed.step {
            Ok(Some(step)) => self.moves(far, location, &step, now),
            Ok(None) => {}
            Err(why) => self.metrics.refused(why),
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
        let prefixes = prefixes(location, members, shared);
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

/// Takes over which locations there are, and who is in them.
pub(super) fn locations_are(fars: &mut BTreeMap<Far, Acting>, locations: &BTreeMap<Far, FarLocation>) {
    fars.retain(|far, _| locations.contains_key(far));
    for (far, location) in locations {
        let Some(leader) = location.gateways.get(location.acting).map(|gateway| gateway.id) else {
            continue;
        };
        let acting = fars.entry(*far).or_insert_with(|| {
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
}

/// What a CLAIM or END comes to.
pub(super) struct Claimed {
    /// How many nodes of another location it names.
    pub foreign: usize,
    /// What follows; `None`: nothing, since it names nobody else. An error is the reason why it counts nothing.
    pub step: Result<Option<Step>, &'static str>,
}

/// CLAIM or END of a gateway, which WireGuard has proved it to be of. `names`: all nodes that are known.
pub(super) fn claimed(
    params: &Params,
    (location, acting): (&FarLocation, &mut Acting),
    (far, from): (Far, NodeId),
    signal: &Signal,
    names: &BTreeMap<NodeId, String>,
    me: NodeId,
) -> Claimed {
    if signal.location != far {
        return Claimed { foreign: 0, step: Err("location") };
    }
    let names_any =
        |signal: &Signal| !matches!(&signal.body, Body::Claim { members, .. } if members.is_empty());
    // A node that joined a moment ago is claimed before its object is here.
    let (known, foreign) = known_only(signal, location, names);
    if foreign > 0 && !names_any(&known) {
        return Claimed { foreign, step: Ok(None) };
    }
    let gateways: Vec<NodeId> = location.gateways.iter().map(|gateway| gateway.id).collect();
    // The device has them where the last plan put them, and only who follows is to move.
    if let Some(leader) = location.gateways.get(location.acting).filter(|_| names_any(signal)) {
        acting.stay((STAYS, leader.id));
    }
    let step = acting.claimed(params, from, &known, &gateways, me).map(Some).map_err(|why| match why {
        Refused::Kind | Refused::Gateway => "gateway",
        Refused::Member => "member",
        Refused::Leap => "leap",
    });
    Claimed { foreign, step }
}

/// What moves with these members, and with what belongs to none.
pub(super) fn prefixes(location: &FarLocation, members: &[NodeId], shared: bool) -> Vec<IpNet> {
    let of_members = members.iter().filter_map(|member| location.members.get(member)).flatten();
    of_members.chain(location.shared.iter().filter(|_| shared)).copied().collect()
}

/// What plans have to know of other locations.
pub(super) fn known(fars: &BTreeMap<Far, Acting>) -> BTreeMap<u64, ActingLocation> {
    let of = |(far, known): (&Far, &Acting)| {
        let members =
            known.owners().filter(|(_, (term, gateway))| *term > Term::NONE && *gateway != 0).collect();
        let leader = Some(known.shared_since()).filter(|(term, _)| *term > Term::NONE);
        (*far, ActingLocation { leader, members })
    };
    fars.iter().map(of).collect()
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
