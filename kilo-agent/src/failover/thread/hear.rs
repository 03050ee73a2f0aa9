//! What comes in: signals of the ring, the word of the kernel, links that go, far leaders that change.

use std::{net::Ipv6Addr, time::Instant};

use kilo_common::{
    event::Hook,
    lead::{self, Term},
    maps::Heard,
    signal::{self, Kind},
};
use kilo_failover::{Agent, Far, Input, Signal, far};
use kilo_host::dataplane::lead::Swap;

use super::{Thread, micros};
use crate::failover::{
    moved::Asked,
    site::{Site, is_news},
};
use crate::far::{FarGateway, FarLocation};

/// More records than the ring has room for.
const MOST_HEARD: usize = 1_024;

impl Thread {
    /// Which gateway of a far location answers probes through the own tunnel: who has what belongs to no member,
    /// as it was claimed a moment ago or as the mesh has it.
    pub(super) fn acting_of(&self, far: Far, location: &FarLocation) -> Option<FarGateway> {
        let claimed = self.fars.get(&far).map(far::Acting::shared);
        let known = location.gateways.iter().find(|gateway| Some(gateway.id) == claimed);
        known.or_else(|| location.gateways.get(location.acting)).copied()
    }

    /// What one gateway of a far location has missed says nothing of the next one.
    pub(super) fn look_at_fars(&mut self, site: &Site) {
        for (far, location) in &site.fars {
            let Some(FarGateway { id, .. }) = self.acting_of(*far, location) else { continue };
            if self.probed.insert(*far, id).is_some_and(|before| before != id) {
                self.inbox.push(Input::FarMoved(*far));
            }
        }
    }

    pub(super) fn is_link_down(&self, site: &Site) -> bool {
        let Some(links) = &self.links else { return false };
        let events = links.read(&site.needed);
        events.is_down || events.is_lost && site.needed.iter().any(|needed| !needed.is_up())
    }

    /// The kernel's word may be another: it obeys ANNOUNCE by itself.
    pub(super) fn read_word(&mut self, site: &Site) {
        let Ok(word) = self.tools.signals.word() else { return };
        let (hop, term) = (lead::hop_of(word), lead::term_of(word));
        // The node it names has stopped being a gateway: Kilo's leader is who is left, and of several
        // leaders takes what is its own later.
        let is_gone = self.agent.is_some()
            && term > Term::NONE
            && site.gateway_of(hop).is_none_or(|gateway| !site.place.gateways.contains(&gateway));
        let word = match site.hop_of(site.leader) {
            Some(leader) if is_gone && leader != hop => {
                let new = lead::word(term, leader);
                self.tools.signals.swap(Swap { current: word, new }).unwrap_or(word)
            }
            _ => word,
        };
        if is_news(self.word, self.agent.as_ref().map(Agent::word), word, site.said(word)) {
            self.word_is(site, word);
        }
    }

    pub(super) fn word_is(&mut self, site: &Site, word: u64) {
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
            // Why, gateways say that have made the change.
            if !site.is_gateway() {
                self.last_change = Some(format!("{} leads after {}", self.name(gateway), self.name(before)));
            }
        }
        self.next_report = 0;
        self.inbox.push(Input::Word(term, gateway));
    }

    /// Reads all that the ring holds, and not for ever what comes meanwhile. Returns whether there was more than answers to probes: only then the kernel
    /// may have moved its word since it was read.
    pub(super) fn hear(&mut self, site: &Site) -> bool {
        let mut is_more = false;
        for _ in 0..MOST_HEARD {
            let Some(record) = self.tools.ring.next() else { break };
            let Some((heard, bytes)) = Heard::read(&record) else { continue };
            let signal = signal::parse(bytes).map(|signal| signal.map_list(|words| words.iter().collect()));
            // Most are answers to probes, which have no tag to be checked.
            let is_answer = signal.as_ref().is_ok_and(|signal: &Signal| signal.kind == Kind::Reflected);
            let bytes = if is_answer { Vec::new() } else { bytes.to_vec() };
            drop(record);
            match signal {
                Ok(signal) => {
                    is_more |= !is_answer;
                    self.take(site, &heard, &bytes, &signal);
                }
                Err(_) => self.metrics.refused("malformed"),
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
                    return self.metrics.refused("gateway");
                };
                if signal.kind == Kind::Moved {
                    let Some(location) = site.fars.get(&far) else { return };
                    let in_term =
                        |term| self.agent.as_ref().is_some_and(|agent: &Agent| agent.has_asked(term));
                    let asked = Asked { in_term: &in_term, nodes: &site.place.nodes };
                    let by_all = self.moved.by_all(far, location, from, signal, &asked, micros());
                    self.inbox.extend(by_all.map(|signal| Input::Signal { from: far, signal }));
                } else {
                    self.claimed((far, from), signal, micros());
                }
            }
            Kind::Probe | Kind::Roll | Kind::Announce => {}
            _ => {
                let from = signal.sender;
                let Some(node) = site.nodes.get(&from) else { return self.metrics.refused("unknown") };
                if node.address != source.to_canonical() || by_tunnel {
                    return self.metrics.refused("foreign");
                }
                if !signal::is_authentic(bytes, node.key) {
                    return self.metrics.refused("forged");
                }
                if signal.location != site.place.location {
                    return self.metrics.refused("location");
                }
                self.inbox.push(Input::Signal { from, signal: signal.clone() });
            }
        }
    }
}
