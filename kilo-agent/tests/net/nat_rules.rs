//! Masquerading by nftables: packets of a pod through a host to an outside
//! host, which says whom it saw.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_common::maps::{MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT};
use kilo_host::firewall::nat_rules::{self, Decision, NatRules};
use netns::{isolated, sh};

/// A pod, an outside host, a node of the mesh, and this namespace between them.
fn build() {
    sh(
        "mkdir -p /run/netns; ip link set lo up; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
    );
    for (name, net) in [("pod", 1), ("outside", 2), ("known", 3)] {
        sh(&format!(
            "ip netns add {name}; ip link add {name} type veth peer name eth0 netns {name}; ip link set {name} up; \
             ip -n {name} link set eth0 up; ip address add 10.42.{net}.1/24 dev {name}; \
             ip address add fd42:{net}::1/64 dev {name} nodad; ip -n {name} address add 10.42.{net}.2/24 dev eth0; \
             ip -n {name} address add fd42:{net}::2/64 dev eth0 nodad; \
             ip -n {name} route add default via 10.42.{net}.1; ip -n {name} route add default via fd42:{net}::1"
        ));
    }
}

/// Source address `to` sees of a TCP connection from the pod, by family.
fn seen(to: &str, net: u8, v6: bool) -> String {
    let address = if v6 { format!("fd42:{net}::2") } else { format!("10.42.{net}.2") };
    // Perl is on every Debian machine.
    let server = "use IO::Socket::IP; my $s = IO::Socket::IP->new(LocalHost => shift, LocalPort => 7, Listen => 1, \
                  ReuseAddr => 1) or die; print $s->accept->peerhost";
    sh(&format!(
        "f=$(mktemp); ip netns exec {to} timeout 5 perl -e '{server}' {address} > $f & server=$!
for i in $(seq 50); do ip netns exec pod timeout 1 bash -c 'exec 3<>/dev/tcp/{address}/7' 2>/dev/null && break; sleep 0.1; done
wait $server; cat $f; rm $f"
    ))
    .trim()
    .to_owned()
}

fn table(entries: &[(&str, u32)]) -> BTreeMap<IpNet, u32> {
    entries.iter().map(|(prefix, value)| (prefix.parse().unwrap(), *value)).collect()
}

fn decision() -> Decision {
    Decision {
        sources: table(&[("10.42.1.0/24", MASQ_SRC_ALWAYS), ("fd42:1::/64", MASQ_SRC_ALWAYS)]),
        destinations: table(&[("10.42.3.0/24", MASQ_EXCLUDE), ("fd42:3::/64", MASQ_EXCLUDE)]),
    }
}

#[test]
fn pods_are_masqueraded_but_not_towards_the_mesh() {
    isolated("pods_are_masqueraded_but_not_towards_the_mesh", || async {
        build();
        let (mut rules, now) = (NatRules::default(), Instant::now());
        assert_eq!(seen("outside", 2, true), "fd42:1::2", "without rules the pod is seen");
        assert_eq!(rules.apply(decision(), now).await.unwrap(), 1);
        for (v6, host, pod) in [(false, "10.42.2.1", "10.42.1.2"), (true, "fd42:2::1", "fd42:1::2")] {
            assert_eq!(seen("outside", 2, v6), host);
            assert_eq!(seen("known", 3, v6), pod);
        }
        let later = now + Duration::from_secs(60);
        assert_eq!(rules.apply(decision(), later).await.unwrap(), 0, "nothing to do, nothing written");
        sh("nft flush ruleset");
        assert_eq!(rules.apply(decision(), later + Duration::from_secs(60)).await.unwrap(), 1, "put back");
        assert_eq!(rules.apply(decision().of_family(true), later).await.unwrap(), 1);
        assert_eq!(seen("outside", 2, false), "10.42.1.2", "IPv4 is the programs' now");
        assert_eq!(seen("outside", 2, true), "fd42:2::1");
        assert_eq!(rules.apply(Decision::default(), later).await.unwrap(), 1);
        assert_eq!(nat_rules::remove().await.unwrap(), 0, "it is gone");
    });
}

#[test]
fn forced_destinations_are_masqueraded_unless_the_source_is_exempt() {
    isolated("forced_destinations_are_masqueraded_unless_the_source_is_exempt", || async {
        build();
        let mut rules = NatRules::default();
        let mut wanted =
            Decision { sources: BTreeMap::new(), destinations: table(&[("fd42:2::/64", MASQ_FORCE)]) };
        rules.apply(wanted.clone(), Instant::now()).await.unwrap();
        assert_eq!(seen("outside", 2, true), "fd42:2::1");
        wanted.sources = table(&[("fd42:1::/64", MASQ_SRC_EXEMPT)]);
        rules.apply(wanted, Instant::now()).await.unwrap();
        assert_eq!(seen("outside", 2, true), "fd42:1::2");
    });
}
