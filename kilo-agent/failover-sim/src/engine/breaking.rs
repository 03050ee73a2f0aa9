//! How each fault is made and mended.

use kilo_common::lead::{self, Term};
use kilo_failover::{
    Input, MS, Micros, SEC, Signal,
    signal::{Body, Kind, MAX_MEMBERS, Shared},
};

use super::{Event, LOCATION, Sim};
use crate::{
    faults::Fault,
    host::{self, CLOCK},
};

impl Sim {
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each fault: how it is made and mended stands together"
    )]
    pub(super) fn fault(&mut self, index: usize, on: bool) {
        let (_, end, fault) = self.faults[index].clone();
        if self.log {
            println!("{:>9} {} {fault:?}", self.now / MS, if on { "fault:" } else { "end of" });
        }
        match fault {
            Fault::Power(node) => self.set_power(node, !on),
            Fault::Pause(node) => {
                if on {
                    self.hosts[node].wires.paused = end;
                    self.at(end, Event::Resume(node));
                }
            }
            Fault::Uplink(node) => self.hosts[node].wires.uplink[0] = !on,
            Fault::Carrier(node) => {
                self.hosts[node].wires.uplink[0] = !on;
                self.look_at_all();
                if on {
                    self.input(node, Input::LinkDown);
                }
            }
            Fault::UplinkOut(node) => self.hosts[node].wires.uplink[1] = !on,
            Fault::UplinkIn(node) => self.hosts[node].wires.uplink[2] = !on,
            Fault::Lan(node) => self.hosts[node].wires.lan[0] = !on,
            Fault::LanOut(node) => self.hosts[node].wires.lan[1] = !on,
            Fault::LanIn(node) => self.hosts[node].wires.lan[2] = !on,
            Fault::Forward(node) => self.hosts[node].wires.forwards = !on,
            Fault::Link(a, b) => {
                let link = (a.min(b), a.max(b));
                let _ = if on { self.cuts.insert(link) } else { self.cuts.remove(&link) };
            }
            Fault::FarPath(gateway, far) => {
                let cut = (gateway, far);
                let _ = if on { self.far_cuts.insert(cut) } else { self.far_cuts.remove(&cut) };
            }
            Fault::Agent(node) => self.agent(node, !on),
            Fault::Layout(node) => {
                self.agent(node, !on);
                if on {
                    self.replace_layout(node);
                }
            }
            Fault::Agents => (0..self.hosts.len()).for_each(|node| self.agent(node, !on)),
            Fault::Stall(node) => {
                if on {
                    self.hosts[node].stalled = self.hosts[node].stalled.max(end);
                    self.at(end, Event::Resume(node));
                }
            }
            Fault::FarAgent(far) => self.far_agent(far, !on),
            Fault::FarStall(far) => {
                if on {
                    self.far_stall(far, end);
                }
            }
            Fault::Far(far) => self.fars[far].on = !on,
            Fault::Api => self.annotated = on.then(|| self.acting()),
            Fault::Renumbered => self.renumbered = on,
            Fault::Site => (0..self.gateways).for_each(|node| self.hosts[node].wires.uplink[0] = !on),
            Fault::Halves(halves) => {
                for (host, half) in self.hosts.iter_mut().zip(halves) {
                    host.wires.half = on && half;
                }
            }
            Fault::Cordon(node) => {
                let _ = if on { self.cordoned.insert(node) } else { self.cordoned.remove(&node) };
                self.objects_changed();
            }
            // Nobody reads the clock until the node boots.
            Fault::Clock(node) if on => self.hosts[node].clock = CLOCK - 1_000 * SEC,
            Fault::NoGateway(node) => {
                let _ = if on { self.no_gateways.insert(node) } else { self.no_gateways.remove(&node) };
                self.objects_changed();
                for far in 0..self.fars.len() {
                    let at = self.now + self.rng.between(MS, 500 * MS);
                    self.at(at, Event::FarPlans(far));
                }
            }
            Fault::Leap(node) if on => self.send_leap(node),
            Fault::Ahead(node) if on => self.send_ahead(node),
            Fault::Hellos(node) if on => self.send_hellos(node),
            Fault::Clock(_) | Fault::Leap(_) | Fault::Ahead(_) | Fault::Hellos(_) => {}
            Fault::Flood(percent) => self.flood = if on { f64::from(percent) / 100.0 } else { 0.0 },
            Fault::First(node) => {
                self.first = if on { node.min(self.gateways - 1) } else { 0 };
                self.objects_changed();
            }
        }
        self.look_at_all();
    }

    /// Sends a gateway's HELLO as after 700 changes that concerned others.
    pub(super) fn send_ahead(&mut self, node: usize) {
        self.changes += 700;
        for to in (0..self.gateways).filter(|to| *to != node) {
            let event = self.hello(node, to, self.changes, self.now);
            self.lan_send(node, to, event);
        }
    }

    /// Sends what a hostile gateway may send to drive terms out of everybody's reach.
    fn send_hellos(&mut self, node: usize) {
        for number in 1..=1_000_u32 {
            let at = self.now + u64::from(number) * 10 * MS;
            for to in (0..self.gateways).filter(|to| *to != node) {
                let event = self.hello(node, to, number * 1_000, at);
                self.at(at, event);
            }
        }
    }

    /// A gateway's HELLO at `at`, which claims that it leads and that there were so many changes.
    fn hello(&self, node: usize, to: usize, count: u32, at: Micros) -> Event {
        let me = host::id(node);
        let (term, cookie) = (Term::from_bits(u64::from(count) << 16), self.hosts[node].cookie(host::id(to)));
        let losses = Vec::new();
        let body = Body::Hello { is_fit: true, is_busy: false, leads: true, gateway: me, cookie, losses };
        let nonce = CLOCK + at;
        let signal = Signal { kind: Kind::Hello, nonce, term, sender: me, location: LOCATION, body };
        Event::Lan { to, bytes: host::write(&signal, me, host::id(to)).into(), sent_at: at }
    }

    /// How many of those changes the kernel that is furthest behind has not heard of.
    pub fn behind(&self) -> u32 {
        let counts = self.hosts.iter().map(|host| lead::term_of(host.word).count());
        self.changes.saturating_sub(counts.min().unwrap_or(0))
    }

    /// Sends a gateway's signals with the last of all terms: HELLO, ANNOUNCE to every
    /// kernel, CLAIM of everybody.
    pub(super) fn send_leap(&mut self, node: usize) {
        let (me, term) = (host::id(node), Term::from_bits(u64::MAX));
        let leap = |kind, body| Signal { kind, nonce: 7, term, sender: me, location: LOCATION, body };
        for to in (0..self.hosts.len()).filter(|to| *to != node) {
            let cookie = self.hosts[node].cookie(host::id(to));
            let losses = Vec::new();
            let hello =
                Body::Hello { is_fit: true, is_busy: false, leads: true, gateway: me, cookie, losses };
            let announce = Body::Word { cookie: self.hosts[to].cookie(me), gateway: me };
            for signal in [leap(Kind::Hello, hello), leap(Kind::Announce, announce)] {
                let bytes = host::write(&signal, me, host::id(to)).into();
                self.lan_send(node, to, Event::Lan { to, bytes, sent_at: self.now });
            }
        }
        let members: Vec<_> = (0..self.hosts.len()).map(host::id).collect();
        for far in 0..self.fars.len() {
            for members in members.chunks(MAX_MEMBERS) {
                let body = Body::Claim {
                    gateway: me,
                    shared: Shared::Move,
                    part: (0, 1),
                    members: members.to_vec(),
                };
                let bytes = host::write(&leap(Kind::Claim, body), me, 0).into();
                self.uplink_send(node, far, true, Event::ToFar { gateway: node, far, bytes });
            }
        }
    }

    pub(super) fn agent(&mut self, node: usize, starts: bool) {
        if !starts {
            self.hosts[node].was_written = self.hosts[node].written();
        }
        self.hosts[node].agent = None;
        self.hosts[node].inbox.clear();
        if starts {
            self.start_agent(node, false);
        }
    }

    /// A node's maps are replaced by others, which contain only what the plan knows.
    fn replace_layout(&mut self, node: usize) {
        let acting = self.acting();
        let host = &mut self.hosts[node];
        host.led.clear();
        host.word = lead::word(acting.0, host::index(acting.1) as u16);
        self.followed[node].insert(acting);
    }

    pub(super) fn set_power(&mut self, node: usize, on: bool) {
        let boot = self.rng.bits();
        if !on {
            self.hosts[node].was_written = self.hosts[node].written();
        }
        let host = &mut self.hosts[node];
        host.wires.on = on;
        host.agent = None;
        host.inbox.clear();
        if on {
            host.boot = boot;
            host.word = lead::word(Term::NONE, 0);
            host.led.clear();
            self.followed[node].insert((Term::NONE, host::id(0)));
            self.start_agent(node, true);
        }
    }
}
