//! A far leader: the owners of prefixes in its WireGuard, and its agent.

use std::{collections::VecDeque, rc::Rc};

use kilo_common::{lead::Term, signal};
use kilo_failover::{
    MS, Micros, NodeId,
    far::{Owners, SEED, SEEDED, Step},
    signal::Body,
};

use super::{Event, Sim};
use crate::host;

/// Leader of another location: its kernel, and its agent while that lives.
#[derive(Clone, Debug)]
pub struct FarHost {
    /// Power.
    pub on: bool,
    /// Owner of each member's prefixes in its WireGuard, and since which term.
    pub owner: Vec<(Term, usize)>,
    /// Owner of the shared prefixes.
    pub shared: usize,
    /// The latest term that it applied for each member, since its agent started.
    pub seen: Vec<Term>,
    /// Its agent's table, while it lives.
    acting: Option<Owners>,
    /// Who led the location according to the annotations when its agent started.
    led_by: NodeId,
    /// When its agent forgets what the device had at its start.
    seeded_until: Micros,
    stalled: Micros,
    inbox: Vec<(usize, Rc<[u8]>)>,
    /// Netlink requests, one after the other.
    steps: VecDeque<Step>,
    busy_until: Micros,
}

impl FarHost {
    /// A far leader that has all prefixes at gateway 0.
    pub fn new(nodes: usize) -> Self {
        let owner = vec![(Term::NONE, 0); nodes];
        Self {
            on: true,
            shared: 0,
            seen: vec![Term::NONE; nodes],
            acting: Some(Owners::new((0..nodes).map(|node| (host::id(node), host::id(0))), host::id(0))),
            owner,
            led_by: host::id(0),
            seeded_until: 0,
            stalled: 0,
            inbox: Vec::new(),
            steps: VecDeque::new(),
            busy_until: 0,
        }
    }
}

impl Sim {
    /// A gateway's signal arrives at a far leader.
    pub(crate) fn far_hear(&mut self, gateway: usize, far: usize, bytes: &Rc<[u8]>) {
        let host = &mut self.fars[far];
        if !host.on || host.acting.is_none() {
            return;
        }
        if host.stalled > self.now {
            host.inbox.push((gateway, bytes.clone()));
            return;
        }
        let Ok(signal) = signal::parse(bytes) else { return };
        let gateways = self.gateways();
        let FarHost { acting: Some(acting), led_by, .. } = &mut self.fars[far] else { return };
        let signal = host::read(&signal);
        let names_any = !matches!(&signal.body, Body::Claim { members, .. } if members.is_empty());
        let first = gateways.first().copied().unwrap_or_default();
        let has_first = |acting: &Owners| acting.owner(first).map(|(_, gateway)| gateway);
        let had_first = has_first(acting);
        let led_by = (&gateways[..], names_any.then_some(*led_by));
        let from = host::id(gateway);
        let step = acting.claimed_of_led(&self.params, from, &signal, led_by, (far as u64, self.now));
        let Ok(step) = step else { return };
        let stays_alone = has_first(acting) != had_first && !step.moves.contains(&first);
        if stays_alone {
            // A decision without a request takes effect with the next plan.
            let at = self.now + self.rng.between(2 * MS, 8 * MS);
            self.at(at, Event::FarPlans(far));
        }
        if let Some(old) = step.asks {
            for pause in [0, 20 * MS] {
                let nonce = self.rng.bits();
                if let Some(acting) = &mut self.fars[far].acting {
                    acting.probed(nonce, self.now + pause, 200 * MS);
                    let wake = acting.wake() + 20 * MS;
                    self.at(wake, Event::FarWake(far));
                }
                let gateway = host::index(old);
                self.uplink_send(gateway, far, false, Event::FarProbe { far, gateway, nonce, back: false });
            }
        }
        let takes = self.rng.between(2 * MS, 8 * MS) + step.moves.len() as u64 * 5;
        let host = &mut self.fars[far];
        host.busy_until = host.busy_until.max(self.now) + takes;
        host.steps.push_back(step);
        let at = host.busy_until;
        self.at(at, Event::FarApplies { far });
    }

    /// WireGuard has applied a request.
    pub(crate) fn far_apply(&mut self, far: usize) {
        let host = &mut self.fars[far];
        let Some(step) = host.steps.pop_front() else { return };
        if !host.on || host.acting.is_none() {
            return;
        }
        let gateway = host::index(step.gateway);
        if step.moves_shared {
            host.shared = gateway;
        }
        let term = step.answer.term;
        let members: Vec<_> = step.moves.iter().map(|member| host::index(*member)).collect();
        for member in &members {
            let (_, from) = std::mem::replace(&mut self.fars[far].owner[*member], (term, gateway));
            self.moved(far, *member, from, (term, step.gateway));
        }
        self.look(members);
        let bytes = host::write(&step.answer, far as u64, 0).into();
        self.uplink_send(gateway, far, false, Event::FromFar { gateway, far, bytes });
    }

    /// A far leader plans anew: owners as far as it knows; prefixes that no gateway has go to the owner of
    /// the shared ones, else to the first gateway.
    pub(crate) fn far_plan(&mut self, far: usize) {
        let gateways = self.gateways();
        let FarHost { acting: Some(acting), owner, .. } = &mut self.fars[far] else { return };
        acting.set_gateways(&gateways);
        for (member, owner) in owner.iter_mut().enumerate() {
            let known = acting.owner(host::id(member)).filter(|(_, gateway)| gateways.contains(gateway));
            let leader = Some(acting.shared_since()).filter(|(_, gateway)| gateways.contains(gateway));
            let known = known.or(leader).or(gateways.first().map(|first| (Term::NONE, *first)));
            *owner = known.map_or(*owner, |(term, gateway)| (term, host::index(gateway)));
        }
        self.look_at_all();
    }

    pub(crate) fn far_agent(&mut self, far: usize, starts: bool) {
        let written = self.acting();
        let host = &mut self.fars[far];
        host.steps.clear();
        host.inbox.clear();
        host.seen.fill(Term::NONE);
        host.acting = None;
        if starts {
            let mut acting = Owners::new([], host::id(host.shared));
            for (member, (_, gateway)) in host.owner.iter().enumerate() {
                acting.seed(host::id(member), (SEED, host::id(*gateway)));
            }
            acting.record_written_term(written.0, written.1);
            host.shared = host::index(acting.shared());
            (host.acting, host.led_by, host.seeded_until) = (Some(acting), written.1, self.now + SEEDED);
            if self.fars_forget {
                self.at(self.now + SEEDED, Event::FarForgets(far));
            }
        }
    }

    /// Forgets what the device had when its agent started, if nobody has claimed it since.
    pub(crate) fn far_forget(&mut self, far: usize) {
        let host = &mut self.fars[far];
        if host.seeded_until == self.now
            && let Some(acting) = &mut host.acting
        {
            acting.forget(SEED);
            self.far_plan(far);
        }
    }

    pub(crate) fn far_stall(&mut self, far: usize, end: Micros) {
        self.fars[far].stalled = end;
        self.at(end, Event::FarResume(far));
    }

    pub(crate) fn far_resume(&mut self, far: usize) {
        for (gateway, bytes) in std::mem::take(&mut self.fars[far].inbox) {
            self.far_hear(gateway, far, &bytes);
        }
    }

    pub(crate) fn far_wake_up(&mut self, far: usize) {
        let host = &mut self.fars[far];
        if let Some(acting) = &mut host.acting
            && acting.wake_up(self.now)
        {
            host.shared = host::index(acting.shared());
        }
    }

    /// A far leader's own probe of a gateway's control address.
    pub(crate) fn far_probe(&mut self, far: usize, gateway: usize, nonce: u64, back: bool) {
        if back {
            if let Some(acting) = &mut self.fars[far].acting {
                acting.answered(nonce);
            }
        } else if self.hosts[gateway].wires.runs(self.now) && !self.hosts[gateway].is_go {
            self.uplink_send(gateway, far, true, Event::FarProbe { far, gateway, nonce, back: true });
        }
    }

    /// The gateway that each far leader sends shared prefixes to.
    pub fn shared(&self) -> Vec<usize> {
        self.fars.iter().map(|far| far.shared).collect()
    }

    /// Whether each far leader sends shared prefixes to a gateway that can receive them and pass them on, if
    /// there is one: a gateway that reaches no other node has nowhere to send them.
    pub fn shared_are_served(&self) -> bool {
        let works = |gateway, far| {
            self.uplink_works(gateway, far, true)
                && self.uplink_works(gateway, far, false)
                && self.reaches_others(gateway)
        };
        (0..self.fars.len()).all(|far| {
            let able = (0..self.gateways).any(|gateway| works(gateway, far));
            !self.fars[far].on || !able || works(self.fars[far].shared, far)
        })
    }

    /// Whether a gateway and any other node reach each other.
    fn reaches_others(&self, gateway: usize) -> bool {
        let hears = |node| node != gateway && self.lan_works(gateway, node) && self.lan_works(node, gateway);
        (0..self.hosts.len()).any(hears)
    }
}
