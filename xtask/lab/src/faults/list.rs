//! The one table of faults: those made under traffic (`cargo xtask lab faults`), and those chosen at random
//! (`cargo xtask lab soak`). A new fault is a row here, which names its requirement of `requirements.rs`, and
//! its function.

use anyhow::Result;

use super::{
    control_plane, hosts, links, nodes,
    soak::{
        Injected,
        inject::{self as random},
        rng::Rng,
    },
};
use crate::{
    Lab,
    deployed_state::{DETACHED, LEADS, NO_ENDPOINT, NO_KILO0, NO_NODE, ONLY_DEFAULT, PODS_STAY},
};

/// What traffic may lose.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// Not one datagram.
    Nothing,
    /// Answers resume within so many milliseconds.
    Within(u64),
    /// The fault cuts the path; it must work again afterwards.
    Heals,
    /// The same, for longer than a connection lives.
    HealsAnew,
}

/// A fault, and how each of the two commands makes it; `None` where one does not.
#[derive(Debug)]
pub struct Fault {
    /// Id on the command line and in reports: words with hyphens.
    pub id: &'static str,
    /// Number of the requirement (`requirements.rs`) that it belongs to.
    pub requirement: u8,
    /// How it is made at a fixed place while traffic is watched.
    pub traffic: Option<UnderTraffic>,
    /// How it is made at a random place.
    pub soak: Option<SoakFault>,
}

/// A fault under traffic, and the path it is watched from.
#[derive(Debug)]
pub struct UnderTraffic {
    /// What happens.
    pub name: &'static str,
    /// What may be lost.
    pub goal: Goal,
    /// Namespace the traffic starts from.
    pub from: &'static str,
    /// Pod it goes to, or `outside`.
    pub to: &'static str,
    /// Part of every `cargo xtask test`.
    pub always: bool,
    /// Makes the fault, mends it, returns what showed that it really happened.
    pub inject: fn(&mut Lab) -> Result<String>,
}

/// A fault of the soak.
#[derive(Debug)]
pub struct SoakFault {
    /// What happens.
    pub name: &'static str,
    /// Parts of the warnings that agents log then.
    pub causes: &'static [&'static str],
    /// Makes it at a random place; the returned value mends it.
    pub inject: fn(&mut Lab, &mut Rng) -> Result<Injected>,
}

const fn fault(id: &'static str, requirement: u8) -> Fault {
    Fault { id, requirement, traffic: None, soak: None }
}

impl Fault {
    /// Makes it under traffic, watched from a pod of one location to a pod of another, in every test.
    const fn across(self, name: &'static str, goal: Goal, inject: fn(&mut Lab) -> Result<String>) -> Self {
        let traffic = UnderTraffic { name, goal, from: "pod-a2", to: "pod-b2", always: true, inject };
        Self { traffic: Some(traffic), ..self }
    }

    /// Watches between these ends instead.
    const fn between(mut self, from: &'static str, to: &'static str) -> Self {
        if let Some(traffic) = &mut self.traffic {
            (traffic.from, traffic.to) = (from, to);
        }
        self
    }

    /// Leaves it out of every test: another fault or a check of `lab test` does much the same.
    const fn on_request(mut self) -> Self {
        if let Some(traffic) = &mut self.traffic {
            traffic.always = false;
        }
        self
    }

    /// Makes it at random, too.
    const fn soak(
        self,
        name: &'static str,
        causes: &'static [&'static str],
        inject: fn(&mut Lab, &mut Rng) -> Result<Injected>,
    ) -> Self {
        Self { soak: Some(SoakFault { name, causes, inject }), ..self }
    }
}

/// The requirement of faults that are made only at random: hours of random faults.
const ONLY_AT_RANDOM: u8 = 66;

/// All faults, by requirement; those made only at random come last.
#[rustfmt::skip]
pub const FAULTS: &[Fault] = &[
    fault("agents-killed", 1)
        .across("SIGKILL for every agent at once, back 2 s later", Goal::Nothing, nodes::kill_all)
        .soak("agents are killed", &[], random::agents_killed),
    fault("agents-restarted", 2)
        .across("every agent restarts at once", Goal::Nothing, nodes::restart_all)
        .soak("an agent restarts", &[], random::agent_restarts),
    fault("maps-of-layout-2", 3)
        .across("every agent finds the maps of layout 2 in use", Goal::Nothing, control_plane::upgrade),
    fault("maps-of-layout-2-masqueraded", 3)
        .across("the same, and a pod's flow is masqueraded", Goal::Within(1000), control_plane::upgrade)
        .between("pod-a2", "outside"),
    fault("task-panics", 8)
        .across("a task of the leader's agent panics", Goal::Nothing, nodes::task_panics),
    fault("uninstalled", 9)
        .across("a node of the location is uninstalled and comes back", Goal::Nothing, nodes::uninstall),
    fault("cluster-away", 10)
        .across("the cluster is away", Goal::Nothing, control_plane::cluster_away),
    fault("annotations-rubbish", 15)
        .across("one node's annotations are rubbish", Goal::Nothing, nodes::rubbish)
        .soak("a node's annotations are rubbish", &["annotation kilo.squat.ai/", LEADS], random::rubbish),
    fault("clock-wrong", 16)
        .across("the leader's clock is an hour ahead, then behind", Goal::Nothing, control_plane::clock_is_wrong),
    fault("leader-returns", 20)
        .across("the leader leaves and comes back", Goal::Within(4000), control_plane::leader_returns)
        .between("pod-a3", "pod-b2"),
    fault("leader-moves", 21)
        .across("the leader annotation moves to another node and back", Goal::Within(4000), nodes::leader_moves)
        .between("pod-a3", "pod-b2")
        .on_request()
        .soak("another node leads", &[LEADS], random::leader_moves),
    fault("two-leaders", 22)
        .across("two nodes take each other for the leader", Goal::Heals, nodes::two_leaders),
    fault("location-removed", 23)
        .across("every node of the other location is removed", Goal::Heals, nodes::location_gone),
    fault("location-dies", 23)
        .across("every node of the other location dies", Goal::HealsAnew, control_plane::location_dies)
        .on_request(),
    fault("kilo0-deleted", 25)
        .across("kilo0 of a node that does not lead is deleted", Goal::Within(5000), links::member_deleted)
        .soak("kilo0 is deleted", &["No such device", NO_KILO0], random::device_deleted),
    fault("kilo0-of-leader-deleted", 25)
        .across("kilo0 of the leader is deleted", Goal::Within(10_000), links::leader_deleted),
    fault("kilo0-renamed", 25)
        .across("kilo0 is renamed", Goal::Within(10_000), links::renamed),
    fault("kilo0-flushed", 25)
        .across("kilo0 of the leader loses its addresses and routes", Goal::Within(10_000), links::renumbered)
        .soak("kilo0 loses its addresses and routes", &[], random::device_flushed),
    fault("key-rotated", 26)
        .across("the leader's key is rotated", Goal::Within(10_000), links::key_rotated)
        .on_request()
        .soak("a leader's key is rotated", &[], random::key_rotated),
    fault("key-rotated-handshakes-lost", 26)
        .across("the leader's key is rotated, two handshakes are lost", Goal::Within(30_000), links::key_and_handshakes),
    fault("key-rotated-handshakes-late", 26)
        .across("the leader's key is rotated, every handshake is 300 ms late", Goal::Within(15_000), links::key_and_late_handshakes)
        .on_request(),
    fault("peer-roams", 27)
        .across("a VPN peer roams to another address", Goal::Within(1500), links::roams)
        .between("laptop", "pod-b2")
        .on_request(),
    fault("peer-unresolvable", 28)
        .across("a peer's DNS endpoint cannot be resolved", Goal::Nothing, nodes::unresolvable),
    fault("peers-same-key", 29)
        .across("two peers with one key and overlapping allowed IPs", Goal::Nothing, nodes::same_key),
    fault("public-address-changes", 32)
        .across("the leader's public address changes", Goal::Within(15_000), links::address_changes)
        // Between the two addresses it has none.
        .soak("a leader's public address changes", &[LEADS], random::address_changes),
    fault("uplink-down", 32)
        .across("the leader's uplink is down for 2 s", Goal::Within(12_000), links::uplink_down)
        .soak("a link is down", &[LEADS, NO_ENDPOINT, ONLY_DEFAULT], random::link_down),
    fault("peers-come-and-go", 34)
        .across("20 peers come and go", Goal::Nothing, nodes::peers_come)
        .soak("a peer comes", &[], random::peer_comes),
    fault("programs-detached", 37)
        .across("somebody detaches kilo0's programs", Goal::Within(5000), links::detached)
        .soak("programs are detached", &[DETACHED], random::detached),
    fault("stranger-encapsulates", 53)
        .across("encapsulated packets from a host that is not a node", Goal::Nothing, hosts::no_node),
    fault("source-forged", 53)
        .across("a node encapsulates a source it does not own", Goal::Nothing, hosts::foreign_source),
    fault("source-in-clear", 53)
        .across("a host of the LAN sends as a pod, without outer header", Goal::Nothing, hosts::in_clear),
    fault("rp-filter", 59)
        .across("rp_filter is 0, 2 and 1 on every node", Goal::Nothing, hosts::rp_filter)
        .soak("rp_filter changes", &[], random::rp_filter),
    fault("forward-policy-drop", 60)
        .across("FORWARD policy DROP, then --iptables-forward-rules", Goal::Heals, hosts::forward_drop)
        .on_request(),
    fault("kube-proxy-dnat", 61)
        .across("kube-proxy's DNAT and its drop of INVALID", Goal::Nothing, hosts::dnat)
        .on_request(),
    fault("second-masquerade", 63)
        .across("another masquerade rule for the same flow", Goal::Nothing, hosts::second_masquerade)
        .between("pod-a2", "outside"),
    fault("forwarding-off", 64)
        .across("ip_forward is turned off on a node", Goal::Within(12_000), hosts::ip_forward)
        .soak("forwarding is turned off", &["forwarding is off"], random::forwarding_off),
    fault("static-stability", 67)
        .across("agents dead, the cluster away, a node reboots", Goal::Nothing, control_plane::on_their_own),
    fault("agent-stopped", ONLY_AT_RANDOM).soak("an agent stands still", &[], random::agent_stands_still),
    // The device may go between being found and being attached to.
    fault("wireguard-killed", ONLY_AT_RANDOM).soak(
        "WireGuard's process is killed",
        &["No such device", NO_KILO0],
        random::wireguard_killed,
    ),
    fault("neighbours-flushed", ONLY_AT_RANDOM).soak("neighbours are forgotten", &[], random::neighbours_forgotten),
    fault("node-leaves", ONLY_AT_RANDOM).soak("a node leaves", &[LEADS, NO_NODE, PODS_STAY], random::node_leaves),
    fault("packets-lost", ONLY_AT_RANDOM).soak("packets are lost or late", &[], random::packets_lost),
];

/// Accepts a word of the command line that names a fault.
///
/// # Errors
/// Lists all ids when the word names none.
pub fn named(text: &str) -> Result<String, String> {
    if FAULTS.iter().any(|fault| is_named(fault.id, text)) {
        return Ok(text.to_owned());
    }
    let ids: Vec<_> = FAULTS.iter().map(|fault| fault.id).collect();
    Err(format!("not the id of a fault; ids are {}", ids.join(", ")))
}

/// Whether a word names a fault: its id, or its first words.
pub fn is_named(id: &str, word: &str) -> bool {
    id.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_id_is_there_once_and_speaks() {
        let ids: BTreeSet<_> = FAULTS.iter().map(|fault| fault.id).collect();
        assert_eq!(ids.len(), FAULTS.len());
        for id in ids {
            let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(id.chars().all(valid) && id.starts_with(char::is_alphabetic), "{id}");
        }
    }

    #[test]
    fn every_fault_is_made_somewhere() {
        for fault in FAULTS {
            assert!(fault.traffic.is_some() || fault.soak.is_some(), "{} is never made", fault.id);
        }
    }

    #[test]
    fn a_fault_is_named_by_its_id_or_its_first_words() {
        assert!(is_named("key-rotated", "key") && is_named("key-rotated", "key-rotated"));
        assert!(!is_named("key-rotated", "k") && !is_named("kilo0-deleted", "kilo"));
        assert!(named("key").is_ok() && named("26").unwrap_err().contains("key-rotated"));
    }
}
