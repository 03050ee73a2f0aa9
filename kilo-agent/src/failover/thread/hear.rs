//! Reads inputs: signals from the ring, the kernel's word, links that go down, changes of far leaders.

use std::{collections::BTreeMap, net::Ipv6Addr, time::Instant};

use kilo_common::{
    event::Hook,
    lead::{self, Term},
    maps::Heard,
    signal::{self, Kind},
};
use kilo_core::signal_id::NodeId;
use kilo_failover::{Agent, Far, Input, Micros, Signal, far};
use kilo_host::{dataplane::lead::Swap, net::link_down::has_default_route};

use super::{Thread, micros};
use crate::failover::{
    claim_answers::Asked,
    site::{Neighbour, Site, is_news},
};
use crate::far::{FarGateway, FarLocation, Refusal};

/// How long a default route may be missing before leadership is handed over.
const ROUTE_RETURNS: Micros = 10_000;
/// More records than the ring can hold.
const MOST_HEARD: usize = 1_024;

impl Thread {
    /// The gateway of a far location that answers probes through this node's tunnel: the one with the shared
    /// prefixes, according to recent claims or else to the mesh.
    pub(super) fn acting_of(&self, far: Far, location: &FarLocation) -> Option<FarGateway> {
        let claimed = self.fars.get(&far).map(far::Owners::shared);
        let known = location.gateways.iter().find(|gateway| Some(gateway.id) == claimed);
        known.or_else(|| location.gateways.get(location.acting)).copied()
    }

    /// Reports a change of the probed gateway: lost probes of one say nothing about the next.
    pub(super) fn look_at_fars(&mut self, site: &Site) {
        for (far, location) in &site.fars {
            let Some(FarGateway { id, .. }) = self.acting_of(*far, location) else { continue };
            if self.probed.insert(*far, id).is_some_and(|before| before != id) {
                self.inbox.push(Input::FarMoved(*far));
            }
        }
    }

    pub(super) fn read_link_events(&mut self, site: &Site, now: Micros) -> bool {
        let Some(links) = &self.links else { return false };
        let events = links.read(&site.needed);
        // If messages were lost, a missed route event is noticed by probes: the host may never have had a
        // default route.
        if events.is_route_gone {
            self.routes_due = self.routes_due.or(Some(now + ROUTE_RETURNS));
        }
        events.is_down || events.is_lost && site.needed.iter().any(|needed| !needed.is_up())
    }

    /// Whether a default route has disappeared and was not replaced within [`ROUTE_RETURNS`].
    pub(super) fn check_route_gone(&mut self, site: &Site, now: Micros) -> bool {
        let is_due = self.routes_due.take_if(|due| *due <= now).is_some();
        is_due && !has_default_route(&site.needed)
    }

    /// Reads the kernel's word, which may have changed: the data path obeys ANNOUNCE by itself.
    pub(super) fn read_word(&mut self, site: &Site) {
        let Ok(word) = self.tools.signals.word() else { return };
        let (hop, term) = (lead::hop_of(word), lead::term_of(word));
        // The node that it names is no longer a gateway: falls back to Kilo's leader. With several active
        // leaders each takes over its own nodes later.
        let is_gone = self.agent.is_some()
            && term > Term::NONE
            && site.gateway_of(hop).is_none_or(|gateway| !site.own_location.gateways.contains(&gateway));
        let word = match site.hop_of(site.leader) {
            Some(leader) if is_gone && leader != hop => {
                let new = lead::word(term, leader);
                self.tools.signals.swap(Swap { current: word, new }).unwrap_or(word)
            }
            _ => word,
        };
        if is_news(self.word, self.agent.as_ref().map(Agent::word), word, site.said(word)) {
            self.set_word(site, word);
        }
    }

    pub(super) fn set_word(&mut self, site: &Site, word: u64) {
        let (_, before) = self.agent.as_ref().map_or_else(|| site.said(self.word), Agent::word);
        self.word = word;
        let (term, gateway) = site.said(word);
        if gateway != before {
            self.since = Some(Instant::now());
            self.is_dirty = true;
            tracing::info!(
                from = self.name(before),
                to = self.name(gateway),
                term = term.count(),
                "this node switched to another leader"
            );
            // The gateways that made the change report the reason.
            if !site.is_gateway() {
                self.last_change = Some(format!("{} leads after {}", self.name(gateway), self.name(before)));
            }
        }
        self.next_report = 0;
        self.inbox.push(Input::Word(term, gateway));
    }

    /// Reads the ring, up to a limit if more keeps arriving. Returns whether there was more than answers to
    /// probes: only then the kernel may have changed its word since it was read.
    pub(super) fn hear(&mut self, site: &Site) -> bool {
        let mut is_more = false;
        for _ in 0..MOST_HEARD {
            let Some(record) = self.tools.ring.next() else { break };
            let Some((heard, bytes)) = Heard::read(&record) else { continue };
            let signal = signal::parse(bytes).map(|signal| signal.map_list(|words| words.iter().collect()));
            // Most are answers to probes, which have no tag to verify.
            let is_answer = signal.as_ref().is_ok_and(|signal: &Signal| signal.kind == Kind::Reflected);
            let bytes = if is_answer { Vec::new() } else { bytes.to_vec() };
            drop(record);
            match signal {
                Ok(signal) => {
                    is_more |= !is_answer;
                    self.take(site, &heard, &bytes, &signal);
                }
                Err(_) => self.metrics.refused(Refusal::Malformed),
            }
        }
        is_more
    }

    pub(super) fn take(&mut self, site: &Site, heard: &Heard, bytes: &[u8], signal: &Signal) {
        let at = heard.time / 1_000;
        let source = Ipv6Addr::from(heard.source);
        let by_tunnel = heard.hook == Hook::KiloIngress as u32;
        match signal.kind {
            Kind::Reflected => {
                self.out.answered(signal.nonce, at, &self.metrics);
                self.fars.values_mut().for_each(|acting| acting.answered(signal.nonce));
                self.inbox.push(Input::Answer { nonce: signal.nonce, at });
            }
            Kind::Moved if by_tunnel && site.followers.contains_key(&source) => {
                let lead = self.agent.as_ref().and_then(Agent::lead);
                self.followers.heard(source, signal, lead, micros());
            }
            Kind::Claim | Kind::End | Kind::Moved => {
                let gateway = site.far_gateway(source).filter(|_| by_tunnel);
                let Some((far, from)) =
                    gateway.filter(|(_, from)| signal.kind == Kind::Moved || *from == signal.sender)
                else {
                    return self.metrics.refused(Refusal::Gateway);
                };
                if !self.claim_rate.allows(from, micros()) {
                    return self.metrics.refused(Refusal::Rate);
                }
                if signal.kind == Kind::Moved {
                    let Some(location) = site.fars.get(&far) else { return };
                    let in_term =
                        |term| self.agent.as_ref().is_some_and(|agent: &Agent| agent.has_asked(term));
                    let asked = Asked { in_term: &in_term, nodes: &site.own_location.nodes };
                    let Some(acting) = self.acting_of(far, location).map(|acting| acting.id) else { return };
                    let by_all = self.moved.by_all(far, location, (acting, from), signal, &asked);
                    self.inbox.extend(by_all.map(|signal| Input::Signal { from: far, signal }));
                } else {
                    self.claimed((far, from), signal, micros());
                }
            }
            Kind::Probe | Kind::Roll | Kind::Announce => {}
            _ => {
                let came = (source, by_tunnel);
                match refusal(&site.nodes, site.own_location.location, came, bytes, signal) {
                    Some(why) => self.metrics.refused(why),
                    None => self.inbox.push(Input::Signal { from: signal.sender, signal: signal.clone() }),
                }
            }
        }
    }
}

/// Why a signal from a node of this location is refused. `came`: the source address, and
/// whether it came through a tunnel.
fn refusal(
    nodes: &BTreeMap<NodeId, Neighbour>,
    location: u64,
    (source, by_tunnel): (Ipv6Addr, bool),
    bytes: &[u8],
    signal: &Signal,
) -> Option<Refusal> {
    match nodes.get(&signal.sender) {
        None => Some(Refusal::Unknown),
        Some(node) if node.address != source.to_canonical() || by_tunnel => Some(Refusal::Foreign),
        Some(node) if !signal::is_authentic(bytes, node.key) => Some(Refusal::Forged),
        Some(_) if signal.location != location => Some(Refusal::Location),
        Some(_) => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::net::Ipv4Addr;

    use kilo_common::{
        signal::{Body, LONGEST, Shared},
        siphash::Key,
    };
    use kilo_failover::{Note, Params, far::Owners};
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::{
        failover::{report::FailoverMetrics, thread::report::refused_as},
        far::{FarGateway, claimed},
    };

    const NODE: NodeId = 1 << 48;
    const FAR: Far = 7;
    const KEY: Key = Key([1, 2]);

    /// The refusal of a signal from that node, signed with this key.
    fn heard(sender: NodeId, location: u64, key: Key, address: [u8; 4], by_tunnel: bool) -> Option<Refusal> {
        let known = Neighbour { address: [10, 0, 0, 1].into(), hop: 7, key: KEY, is_gateway: true };
        let body = Body::Members { cookie: 1, age: 0, members: vec![NODE] };
        let signal = Signal { kind: Kind::Adopt, nonce: 1, term: Term::NONE, sender, location, body };
        let mut bytes = [0; LONGEST];
        let length = signal::write(&mut bytes, &signal, Some(key)).unwrap();
        let source = Ipv4Addr::from(address).to_ipv6_mapped();
        refusal(&BTreeMap::from([(NODE, known)]), FAR, (source, by_tunnel), &bytes[..length], &signal)
    }

    /// The refusal of a CLAIM by a gateway of another location: its gateway, location, member and term.
    fn claims(gateway: NodeId, location: u64, member: NodeId, term: Term) -> Option<Refusal> {
        let key = kilo_core::wireguard::key::PublicKey([0; 32]);
        let far = FarLocation {
            gateways: vec![FarGateway { id: NODE, ..FarGateway::with(key) }],
            members: BTreeMap::from([(NODE, Vec::new())]),
            ..FarLocation::default()
        };
        let names = BTreeMap::from([(NODE, "a".to_owned()), (9, "of another location".to_owned())]);
        let body = Body::Claim { gateway, shared: Shared::Stay, part: (0, 1), members: vec![member] };
        let signal = Signal { kind: Kind::Claim, nonce: 1, term, sender: NODE, location, body };
        let mut owners = Owners::new([(NODE, NODE)], NODE);
        let pair = (&far, &mut owners);
        let claimed = claimed(&Params::default(), pair, (FAR, NODE), &signal, &names, (99, 0));
        if claimed.foreign > 0 { Some(Refusal::Member) } else { claimed.step.err() }
    }

    #[test]
    fn each_refusal_is_counted_by_its_reason() {
        let next = Term::NONE.next(NODE);
        let mut registry = Registry::default();
        let metrics = FailoverMetrics::register(&mut registry);
        for (refused, why) in [
            (heard(NODE, FAR, KEY, [10, 0, 0, 1], false), None),
            (heard(8, FAR, KEY, [10, 0, 0, 1], false), Some(Refusal::Unknown)),
            (heard(NODE, FAR, KEY, [10, 0, 0, 2], false), Some(Refusal::Foreign)),
            (heard(NODE, FAR, KEY, [10, 0, 0, 1], true), Some(Refusal::Foreign)),
            (heard(NODE, FAR, Key([3, 4]), [10, 0, 0, 1], false), Some(Refusal::Forged)),
            (heard(NODE, FAR + 1, KEY, [10, 0, 0, 1], false), Some(Refusal::Location)),
            (claims(NODE, FAR, NODE, next), None),
            (claims(NODE, FAR + 1, NODE, next), Some(Refusal::Location)),
            (claims(8, FAR, NODE, next), Some(Refusal::Gateway)),
            (claims(NODE, FAR, 9, next), Some(Refusal::Member)),
            (claims(NODE, FAR, NODE, Term::from_bits(u64::MAX)), Some(Refusal::Leap)),
            (refused_as(&Note::Replayed(NODE)), Some(Refusal::Replayed)),
            (refused_as(&Note::Leaps(NODE)), Some(Refusal::Leap)),
            (refused_as(&Note::OverBudget), None),
        ] {
            assert_eq!(refused, why);
            refused.into_iter().for_each(|why| metrics.refused(why));
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for (why, count) in [
            ("unknown", 1),
            ("foreign", 2),
            ("forged", 1),
            ("location", 2),
            ("gateway", 1),
            ("member", 1),
            ("leap", 2),
            ("replayed", 1),
        ] {
            let line = format!("kilo_signals_refused_total{{why=\"{why}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }
}
