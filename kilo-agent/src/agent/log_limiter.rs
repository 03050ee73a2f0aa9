//! Limits logging: a condition that persists is logged once, and a lasting failure once a minute instead of
//! on every reconcile.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};

use crate::metrics::{Metrics, gauge};
use ipnet::IpNet;
use kilo_core::{
    objects::ObjectRef,
    plan::{self, Conflict, ConflictKind},
    topology::PRIVATE_ENDPOINT_REMEDY,
    wireguard::Endpoint,
};

/// A reconcile that keeps failing for the same reason is logged again after this.
const AGAIN: Duration = Duration::from_secs(60);

/// Conditions that depend on the leader, which may flap, are logged again after this.
const CHANGED_AGAIN: Duration = Duration::from_secs(600);

/// Delay of the warning that fewer leaders lead than are configured: agents that were just configured
/// follow sooner than this.
const FEWER_LEADERS_AFTER: Duration = Duration::from_secs(60);

/// What has been logged already.
#[derive(Debug, Default)]
pub struct LogLimiter {
    /// Objects that are ignored, and why.
    objects: BTreeMap<ObjectRef, String>,
    /// Nodes with prefixes in `allowed-location-ips` that are not used, and why.
    unused: BTreeMap<ObjectRef, String>,
    /// Nodes of the location that have no hop.
    left_out: usize,
    /// What several nodes claim.
    conflicts: Vec<Conflict>,
    /// The private endpoint that this node led with, and when it last did.
    private_endpoint: Option<(Endpoint, Instant)>,
    /// Whether this location has no WireGuard address.
    without_address: bool,
    /// When the stand-bys of each location were last logged.
    stand_bys: BTreeMap<String, Instant>,
    /// Since when fewer leaders lead than are configured, and whether that was logged.
    fewer_leaders: Option<(Instant, bool)>,
    /// Whether the neighbour table is too small.
    neighbours: bool,
    /// Whether nodes of the location are reached by a default route alone.
    only_default: bool,
    /// Interfaces without programs, and their link types.
    unknown_headers: BTreeMap<String, u16>,
    /// Whether the mesh has IPv6 prefixes, and this host has IPv6 off.
    no_ipv6: bool,
    /// Prefixes that are left to the host's own routes.
    left_to_host: BTreeSet<IpNet>,
    /// Whether no interface leads out of the host.
    no_uplink: bool,
    /// Whether `--host-routing` is without TCX.
    pods_need_tcx: bool,
    /// Whether `--host-routing` leaves TCP to the stack.
    tcp_passes_the_stack: bool,
    /// The last failure of each step.
    failures: BTreeMap<&'static str, Failure>,
}

#[derive(Debug)]
struct Failure {
    text: String,
    said: Instant,
    /// Failures for this reason since `said`.
    since: u32,
}

/// The warning that another CNI's configuration sorts before ours.
pub fn other_cni(other: &Path, own: &Path) -> String {
    format!(
        "the CNI configuration {other} comes before {own} by name, so the container runtime may use it and start new \
         pods outside Kilo's network: remove it from this host, or run kg beside that CNI (--cni=false and \
         --compatibility, see the manifests for flannel and Cilium)",
        other = other.display(),
        own = own.display()
    )
}

impl LogLimiter {
    /// Logs once what is wrong with each object.
    pub fn log_invalid_objects(&mut self, problems: &BTreeMap<ObjectRef, String>, metrics: &Metrics) {
        for (object, problem) in problems {
            if self.objects.get(object) != Some(problem) {
                metrics.error("invalid_object");
                tracing::warn!(
                    object = object.to_string(),
                    problem,
                    "an object or one of its fields is invalid; it is ignored"
                );
            }
        }
        self.objects.clone_from(problems);
    }

    /// Logs once which prefixes of each node's `allowed-location-ips` are not used. Returns the nodes it logged.
    pub fn log_unused_location_ips(&mut self, unused: BTreeMap<ObjectRef, String>) -> Vec<String> {
        let news = unused.iter().filter(|(node, why)| self.unused.get(*node) != Some(*why));
        let said = news.map(|(node, why)| {
            let object = node.to_string();
            tracing::warn!(object, problem = why, "ignoring some prefixes in a node's allowed-location-ips");
            object
        });
        let said = said.collect();
        self.unused = unused;
        said
    }

    /// Logs once that pods' interfaces get no program.
    pub fn log_pods_need_tcx(&mut self, need: bool) {
        if need && !self.pods_need_tcx {
            tracing::warn!(
                "--host-routing=auto needs TCX (Linux 6.6 or later, and --attach=auto or tcx): all packets of pods pass \
                 the host's stack"
            );
        }
        self.pods_need_tcx = need;
    }

    /// Logs once that TCP from pods does not bypass the stack.
    pub fn log_tcp_passes_the_stack(&mut self, passes: bool) {
        if passes && !self.tcp_passes_the_stack {
            tracing::info!(
                "TCP from pods passes the host's stack; for --host-routing=auto set nf_conntrack_tcp_be_liberal=1, and \
                 nf_conntrack_tcp_timeout_unacknowledged and nf_conntrack_tcp_timeout_max_retrans as large as \
                 nf_conntrack_tcp_timeout_established"
            );
        }
        self.tcp_passes_the_stack = passes;
    }

    /// Logs once that the location has more nodes than the hop table can hold.
    pub fn log_left_out(&mut self, left_out: usize, metrics: &Metrics) {
        if left_out > self.left_out {
            metrics.error("location_full");
            tracing::error!(
                left_out,
                "more nodes in this location than the {} that fit beside this one; packets for the others are \
                 dropped: split the location in two (kilo.squat.ai/location)",
                plan::MOST_OTHERS
            );
        }
        self.left_out = left_out;
    }

    /// Logs once that this node leads its location with an endpoint that other locations may not reach.
    /// Returns the message when it is logged: for the same endpoint not again before that has not been so for
    /// ten minutes.
    pub fn log_private_endpoint(&mut self, endpoint: Option<&Endpoint>, now: Instant) -> Option<String> {
        let endpoint = endpoint?;
        let last = self.private_endpoint.replace((endpoint.clone(), now));
        let is_recent = |seen: Instant| now.saturating_duration_since(seen) < CHANGED_AGAIN;
        if last.is_some_and(|(of, seen)| of == *endpoint && is_recent(seen)) {
            return None;
        }
        let text = format!(
            "this node leads its location with the private endpoint {endpoint}, which nodes of other locations may not \
             reach: {PRIVATE_ENDPOINT_REMEDY}"
        );
        tracing::warn!("{text}");
        Some(text)
    }

    /// Logs once that this node's location has no WireGuard address, and why. Returns the message when it is logged.
    pub fn log_address_shortage(&mut self, shortage: Option<String>, metrics: &Metrics) -> Option<String> {
        let is_known = std::mem::replace(&mut self.without_address, shortage.is_some());
        let text = format!("this node's location has {}", shortage.filter(|_| !is_known)?);
        metrics.error("no_wireguard_address");
        tracing::error!("{text}");
        Some(text)
    }

    /// Logs which locations have too few stand-bys, each at most once in ten minutes since leadership may
    /// flap. Returns the locations it logged.
    pub fn log_stand_bys(&mut self, warnings: BTreeMap<String, String>, now: Instant) -> Vec<String> {
        self.stand_bys.retain(|_, said| now.saturating_duration_since(*said) < CHANGED_AGAIN);
        let mut said = Vec::new();
        for (location, warning) in warnings {
            if !self.stand_bys.contains_key(&location) {
                tracing::warn!("{location}: {warning}");
                self.stand_bys.insert(location.clone(), now);
                said.push(location);
            }
        }
        said
    }

    /// Logs once that this location has fewer active leaders than configured, if that lasts. Returns
    /// true when it logs.
    pub fn log_fewer_leaders(&mut self, warning: Option<String>, now: Instant) -> bool {
        let Some(warning) = warning else {
            self.fewer_leaders = None;
            return false;
        };
        let (since, said) = self.fewer_leaders.get_or_insert((now, false));
        let is_due = !*said && now.saturating_duration_since(*since) >= FEWER_LEADERS_AFTER;
        if is_due {
            *said = true;
            tracing::warn!("{warning}");
        }
        is_due
    }

    /// Logs once that the kernel's neighbour table is too small, until it is large enough.
    pub fn log_neighbours(&mut self, warning: Option<String>) {
        let is_new = warning.is_some() && !self.neighbours;
        self.neighbours = warning.is_some();
        if let Some(warning) = warning.filter(|_| is_new) {
            tracing::warn!("{warning}");
        }
    }

    /// Logs once that `first`, a node of this location, is unreachable because only a default route on
    /// another interface than the private one leads there.
    pub fn log_only_default(&mut self, first: Option<&IpAddr>) {
        let is_new = !self.only_default;
        self.only_default = first.is_some();
        if let Some(node) = first.filter(|_| is_new) {
            tracing::warn!(
                %node,
                "only a default route leads to a node of this location, and through another interface than that of \
                 this node's private address, so packets for it are dropped: add a route to its network (ip route add \
                 NETWORK via ROUTER dev INTERFACE), or set the private address with kilo.squat.ai/force-internal-ip"
            );
        }
    }

    /// Logs once which interfaces get no programs because of their link type.
    pub fn log_unknown_headers(&mut self, interfaces: &BTreeMap<String, u16>, metrics: &Metrics) {
        for (interface, link_type) in interfaces {
            if self.unknown_headers.get(interface) != Some(link_type) {
                metrics.error("link_type");
                tracing::warn!(
                    interface,
                    link_type,
                    "the programs cannot read packets of this link type, so nothing is masqueraded or received \
                     there: use --masquerade nftables, or make the tunnel a point-to-point one"
                );
            }
        }
        self.unknown_headers.clone_from(interfaces);
    }

    /// Logs once that no routes lead to the mesh's IPv6 prefixes.
    pub fn log_no_ipv6(&mut self, no_ipv6: bool) {
        if no_ipv6 && !self.no_ipv6 {
            tracing::warn!(
                "IPv6 is off on this host, so it and its pods do not reach the IPv6 prefixes of the mesh: sysctl                  net.ipv6.conf.all.disable_ipv6=0, if they are to"
            );
        }
        self.no_ipv6 = no_ipv6;
    }

    /// Logs once which prefixes that others offer are left to the host's own routes.
    pub fn log_left_to_host(&mut self, prefixes: &BTreeSet<IpNet>) {
        for prefix in prefixes.difference(&self.left_to_host) {
            tracing::warn!(
                %prefix,
                "a VPN peer or another location offers a prefix that this host reaches by a route of its own, and the                  kernel keeps to that: neither this host nor its pods reach what is offered (ip route show {prefix})"
            );
        }
        self.left_to_host.clone_from(prefixes);
    }

    /// Logs once that there is no interface for the uplink programs.
    pub fn log_no_uplink(&mut self, no_uplink: bool, metrics: &Metrics) {
        if no_uplink && !self.no_uplink {
            metrics.error("no_uplink");
            tracing::warn!(
                "no interface of this host has an address or a route with a next hop, so nothing is masqueraded \
                 or received from other nodes: give an uplink an address, or a route with a next hop (`ip route`)"
            );
        }
        self.no_uplink = no_uplink;
    }

    /// Logs once what nodes claim although one of them, or the mesh, has it. Returns the conflicts it logged.
    pub fn log_conflicts(&mut self, conflicts: &[Conflict], metrics: &Metrics) -> Vec<Conflict> {
        for kind in ConflictKind::ALL {
            let of_kind = conflicts.iter().filter(|conflict| conflict.claimed.kind() == *kind);
            metrics.conflicts(*kind).set(gauge(of_kind.count()));
        }
        if self.conflicts == conflicts {
            return Vec::new();
        }
        let known: BTreeSet<&Conflict> = self.conflicts.iter().collect();
        let said: Vec<Conflict> =
            conflicts.iter().filter(|conflict| !known.contains(conflict)).cloned().collect();
        for conflict in &said {
            metrics.error(conflict.claimed.kind().label());
            let (object, nodes) = (conflict.claimed.object(), conflict.nodes.len());
            tracing::error!(object, nodes, "{conflict}");
        }
        self.conflicts = conflicts.to_vec();
        said
    }

    /// Logs what failed, unless the same reason was logged within the last minute.
    pub fn log_failure(&mut self, what: &'static str, text: String, now: Instant) {
        let repeated = match self.failures.get_mut(what) {
            Some(failure) if failure.text == text => {
                if now.saturating_duration_since(failure.said) < AGAIN {
                    failure.since += 1;
                    return;
                }
                failure.since
            }
            _ => 0,
        };
        tracing::error!(error = text, repeated, "{what}");
        self.failures.insert(what, Failure { text, said: now, since: 0 });
    }

    /// Notes a success: the next failure is logged at once.
    pub fn clear_failures(&mut self) {
        self.failures.clear();
    }
}

#[cfg(test)]
mod tests {
    use kilo_core::{plan::Claimed, wireguard::key::PublicKey};

    use super::*;

    #[test]
    fn a_conflict_is_said_once_and_again_when_others_join_or_it_comes_back() {
        let (metrics, mut log_limiter) = (Metrics::default(), LogLimiter::default());
        let conflict = |claimed, nodes: &[&str]| Conflict {
            claimed,
            nodes: nodes.iter().map(ToString::to_string).collect(),
        };
        let address = Claimed::Address("10.1.0.12".parse().unwrap());
        let (two, three) = (conflict(address, &["a0", "a2"]), conflict(address, &["a0", "a1", "a2"]));
        let key = conflict(Claimed::Key(PublicKey([7; 32])), &["a1", "b1"]);
        let pods = conflict(Claimed::PodCidr("10.42.1.0/24".parse().unwrap()), &["a1", "b1"]);
        let mut said = |conflicts: &[&Conflict]| {
            let conflicts: Vec<Conflict> = conflicts.iter().copied().cloned().collect();
            let said = log_limiter.log_conflicts(&conflicts, &metrics);
            let counted = ConflictKind::ALL.iter().map(|kind| metrics.conflicts(*kind).get());
            (said, counted.collect::<Vec<_>>())
        };
        assert_eq!(said(&[&two]), (vec![two.clone()], vec![1, 0, 0]));
        assert_eq!(said(&[&two]), (vec![], vec![1, 0, 0]));
        assert_eq!(said(&[&two, &key, &pods]), (vec![key.clone(), pods.clone()], vec![1, 1, 1]));
        assert_eq!(said(&[&three, &key]), (vec![three.clone()], vec![1, 1, 0]));
        assert_eq!(said(&[]), (vec![], vec![0, 0, 0]));
        assert_eq!(said(&[&two, &pods]), (vec![two.clone(), pods.clone()], vec![1, 0, 1]));
    }

    #[test]
    fn an_unused_prefix_is_said_once_and_again_for_another_reason() {
        let mut log_limiter = LogLimiter::default();
        let mut said = |why: &[&str]| {
            let unused = why.iter().map(|why| (ObjectRef::node("a1"), (*why).to_owned()));
            log_limiter.log_unused_location_ips(unused.collect())
        };
        assert_eq!(said(&["10.0.0.0/8 is not used"]), ["node a1"]);
        assert!(said(&["10.0.0.0/8 is not used"]).is_empty());
        assert_eq!(said(&["10.7.0.0/16 is not used"]), ["node a1"]);
        assert!(said(&[]).is_empty());
        assert_eq!(said(&["10.7.0.0/16 is not used"]), ["node a1"]);
    }

    #[test]
    fn a_location_without_address_is_said_once_however_many_there_are() {
        let metrics = Metrics::default();
        let mut log_limiter = LogLimiter::default();
        let mut said = |shortage: Option<&str>| {
            log_limiter.log_address_shortage(shortage.map(str::to_owned), &metrics).is_some()
        };
        assert!(said(Some("2 addresses for 5 locations")));
        assert!(!said(Some("2 addresses for 6 locations")) && !said(None));
        assert!(said(Some("2 addresses for 5 locations")));
    }

    #[test]
    fn a_private_endpoint_is_spoken_of_once_although_leadership_changes_to_and_fro() {
        let start = Instant::now();
        let mut log_limiter = LogLimiter::default();
        let endpoint: Endpoint = "10.1.0.11:51820".parse().unwrap();
        let mut said = |leads: bool, seconds| {
            let now = start + Duration::from_secs(seconds);
            log_limiter.log_private_endpoint(leads.then_some(&endpoint), now).is_some()
        };
        assert!(said(true, 0) && !said(true, 1));
        assert!(!said(false, 2) && !said(true, 3), "it lost leadership for a second");
        assert!((4..2000).all(|second| !said(true, second)), "it goes on");
        assert!(!said(false, 2000) && said(true, 2600), "ten minutes later");
    }

    #[test]
    fn stand_bys_of_a_location_are_spoken_of_once_in_ten_minutes_whatever_happens_between() {
        let start = Instant::now();
        let mut log_limiter = LogLimiter::default();
        let mut said = |location: &str, why: &str, seconds| {
            let warnings = [(location.to_owned(), why.to_owned())].into_iter().filter(|it| !it.0.is_empty());
            log_limiter.log_stand_bys(warnings.collect(), start + Duration::from_secs(seconds))
        };
        assert_eq!(said("a", "b leads", 0), ["a"]);
        assert_eq!(said("a", "b leads", 1), [""; 0]);
        assert_eq!(said("", "", 2), [""; 0], "it clears, and comes back");
        assert_eq!(said("a", "c leads", 3), [""; 0]);
        assert_eq!(said("z", "b leads", 4), ["z"], "another one is not kept back");
        assert_eq!(said("a", "c leads", 600), ["a"]);
        assert_eq!(said("a", "c leads", 601), [""; 0]);
    }

    #[test]
    fn that_fewer_leaders_lead_than_are_asked_for_is_said_once_when_it_lasts() {
        let start = Instant::now();
        let mut log_limiter = LogLimiter::default();
        let mut said = |why: &str, seconds| {
            let warning = Some(why.to_owned()).filter(|why| !why.is_empty());
            log_limiter.log_fewer_leaders(warning, start + Duration::from_secs(seconds))
        };
        assert!(!said("a", 0) && !said("a", 59), "agents that hear of it answer soon");
        assert!(!said("", 60) && !said("a", 61));
        assert!(said("a", 121) && !said("b", 122) && !said("a", 1_000));
        assert!(!said("", 1_001) && !said("a", 1_002) && said("a", 1_062));
    }

    impl LogLimiter {
        fn said_at(&self) -> Option<Instant> {
            self.failures.get("reconcile failed").map(|failure| failure.said)
        }
    }

    #[test]
    fn the_same_failure_is_said_once_a_minute_and_another_at_once() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut log_limiter = LogLimiter::default();
        log_limiter.log_failure("reconcile failed", "no node".to_owned(), start);
        log_limiter.log_failure("reconcile failed", "no node".to_owned(), start + 2 * second);
        assert_eq!(log_limiter.said_at(), Some(start));
        log_limiter.log_failure("reconcile failed", "no node".to_owned(), start + 60 * second);
        assert_eq!(log_limiter.said_at(), Some(start + 60 * second));
        log_limiter.log_failure("reconcile failed", "no pod CIDR".to_owned(), start + 61 * second);
        assert_eq!(log_limiter.said_at(), Some(start + 61 * second));
        log_limiter.clear_failures();
        log_limiter.log_failure("reconcile failed", "no pod CIDR".to_owned(), start + 62 * second);
        assert_eq!(log_limiter.said_at(), Some(start + 62 * second));
    }
}
