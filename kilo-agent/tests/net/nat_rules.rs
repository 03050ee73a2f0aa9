//! Masquerading by nftables: packets of a pod pass through a host to an outside host, which reports the
//! source that it saw.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;
use crate::wait::{time_passes, until};

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_common::maps::{MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT};
use kilo_host::firewall::{
    conntrack::Untranslated,
    nat_rules::{self, Decision, Interim, NatRules},
};
use netns::{isolated, sh, succeeds};

/// Sets up a pod, an outside host and a mesh node, with this namespace between them.
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

/// Source address that `to` sees on a TCP connection from the pod.
fn seen(to: &str, net: u8, v6: bool) -> String {
    let address = if v6 { format!("fd42:{net}::2") } else { format!("10.42.{net}.2") };
    // Every Debian machine has Perl.
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
        let mut later = now + Duration::from_secs(60);
        assert_eq!(rules.apply(decision(), later).await.unwrap(), 0, "nothing to do, nothing written");
        for flushed in ["ruleset", "chain inet kilo postrouting", "set inet kilo known_ip6"] {
            sh(&format!("nft flush {flushed}"));
            later += Duration::from_secs(60);
            assert_eq!(rules.apply(decision(), later).await.unwrap(), 1, "{flushed} is put back");
        }
        assert_eq!(seen("outside", 2, false), "10.42.2.1");
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

/// Sends 50 datagrams per second from one socket of the pod; the outside host records the sources that it
/// sees.
fn stream_begins() {
    let server = "use IO::Socket::IP; $| = 1; my $s = IO::Socket::IP->new(LocalHost => q(10.42.2.2), LocalPort => 9, \
                  Proto => q(udp)) or die; while ($s->recv(my $d, 9)) { print $s->peerhost, qq(\\n) }";
    let client = "use IO::Socket::IP; my $s = IO::Socket::IP->new(PeerHost => q(10.42.2.2), PeerPort => 9, \
                  Proto => q(udp)) or die; while (1) { $s->send(q(x)); select undef, undef, undef, 0.02 }";
    sh(&format!("ip netns exec outside perl -e '{server}' > /run/seen 2>&1 &"));
    let listens = "ip netns exec outside ss -Hlun | grep -q '10.42.2.2:9 '";
    until("the outside host listens", Duration::from_secs(10), || succeeds(listens));
    sh(&format!("ip netns exec pod perl -e '{client}' > /dev/null 2>&1 &"));
    let arrived = || !std::fs::read("/run/seen").unwrap().is_empty();
    until("the first datagram arrives", Duration::from_secs(10), arrived);
}

/// Sources seen since the last call; empties the file.
fn seen_meanwhile() -> BTreeSet<String> {
    time_passes(Duration::from_millis(300), "15 datagrams are sent in it");
    let text = std::fs::read_to_string("/run/seen").unwrap();
    sh("truncate -s 0 /run/seen");
    // The writer continues at its offset: the truncated part reads as zeros.
    text.lines().map(|line| line.trim_matches('\0').to_owned()).filter(|line| !line.is_empty()).collect()
}

#[test]
fn a_flow_without_translation_is_kept_in_until_it_is_forgotten_and_then_translated() {
    isolated("a_flow_without_translation_is_kept_in_until_it_is_forgotten_and_then_translated", || async {
        build();
        let pod = || BTreeSet::from(["10.42.1.2".to_owned()]);
        // A NAT rule makes the kernel track flows, as kube-proxy's rules do.
        sh("nft add table ip other; \
                nft 'add chain ip other nat { type nat hook postrouting priority 100; }'; \
                nft add rule ip other nat ip daddr 192.0.2.1 masquerade");
        stream_begins();
        assert_eq!(seen_meanwhile(), pod(), "a flow that only the programs translate");
        let uplinks = BTreeSet::from(["outside".to_owned()]);
        let lasts = Duration::from_secs(2);
        decision()
            .apply_interim(&Interim {
                uplinks: &uplinks,
                never_clear: &BTreeSet::new(),
                by_uplink: &BTreeSet::new(),
                masquerades: true,
                steered: Duration::ZERO,
                lasts,
            })
            .await
            .unwrap();
        seen_meanwhile();
        assert_eq!(seen_meanwhile(), BTreeSet::new(), "nothing leaves untranslated");
        let outside: IpAddr = "10.42.2.2".parse().unwrap();
        let elsewhere = forgotten(|_, to| to != outside);
        assert_eq!(seen_meanwhile(), BTreeSet::new(), "{elsewhere} other flows");
        assert_eq!(forgotten(|_, to| to == outside), 1);
        assert_eq!(seen_meanwhile(), BTreeSet::from(["10.42.2.1".to_owned()]));
        assert_eq!(forgotten(|_, to| to == outside), 0, "it is translated now");
        assert_eq!(seen("known", 3, false), "10.42.1.2", "towards the mesh nothing changes");
        time_passes(lasts, "the kernel counts it from the rules' making on");
        assert_eq!(seen("outside", 2, false), "10.42.1.2", "after that time the rules do nothing");
    });
}

/// Number of conntrack entries of such flows that were deleted.
fn forgotten(is_concerned: impl FnMut(IpAddr, IpAddr) -> bool) -> usize {
    Untranslated::list(is_concerned).unwrap().forget(Instant::now() + Duration::from_secs(9)).unwrap()
}

fn it_flows() {
    assert!((0..50).any(|_| !seen_meanwhile().is_empty()), "nothing arrives");
}

#[test]
fn rules_for_somebody_else_are_not_taken_for_ones_own_and_take_nested_prefixes() {
    isolated("rules_for_somebody_else_are_not_taken_for_ones_own_and_take_nested_prefixes", || async {
        build();
        let mut wanted = decision();
        // Peers cause these when their allowed IPs lie within the pod network or around it.
        for prefix in ["10.0.0.0/8", "10.42.1.64/26"] {
            wanted.sources.insert(prefix.parse().unwrap(), MASQ_SRC_ALWAYS);
        }
        let uplinks = BTreeSet::from(["outside".to_owned()]);
        let lasts = Duration::from_secs(600);
        let steered = Duration::ZERO;
        let nowhere = BTreeSet::new();
        let interim = Interim {
            uplinks: &uplinks,
            never_clear: &nowhere,
            by_uplink: &nowhere,
            masquerades: true,
            steered,
            lasts,
        };
        wanted.apply_interim(&interim).await.unwrap();
        assert_eq!(NatRules::default().apply(wanted.clone(), Instant::now()).await.unwrap(), 1);
        assert_eq!(NatRules::default().apply(wanted.clone(), Instant::now()).await.unwrap(), 0);

        // Another agent masquerades: what must not leave is dropped at the uplink, and nothing is
        // translated.
        let never_clear = BTreeSet::from(["10.42.2.0/24".parse().unwrap()]);
        stream_begins();
        it_flows();
        let interim = Interim { never_clear: &never_clear, masquerades: false, ..interim };
        wanted.apply_interim(&interim).await.unwrap();
        seen_meanwhile();
        assert_eq!(seen_meanwhile(), BTreeSet::new());
        let rules = sh("nft list table inet kilo");
        assert!(!rules.contains("masquerade"), "{rules}");

        // While programs stay, packets that the uplink's program handles must reach it, and no others.
        let closed = Interim { steered: Duration::from_secs(600), ..interim.clone() };
        wanted.apply_interim(&closed).await.unwrap();
        seen_meanwhile();
        assert_eq!(seen_meanwhile(), BTreeSet::new());
        let open = Interim { never_clear: &nowhere, by_uplink: &never_clear, ..closed.clone() };
        wanted.apply_interim(&open).await.unwrap();
        it_flows();
        let over = Interim { steered: Duration::ZERO, ..open.clone() };
        wanted.apply_interim(&over).await.unwrap();
        seen_meanwhile();
        assert_eq!(seen_meanwhile(), BTreeSet::new());

        // A leader without programs would forward other nodes' pod packets unchanged.
        let others = Decision { sources: table(&[("10.99.0.0/16", MASQ_SRC_ALWAYS)]), ..Decision::default() };
        others.apply_interim(&interim).await.unwrap();
        it_flows();
        let never_clear = ["10.42.1.0/24", "10.42.2.0/24"].map(|prefix| prefix.parse().unwrap()).into();
        let interim = Interim { never_clear: &never_clear, ..interim };
        others.apply_interim(&interim).await.unwrap();
        seen_meanwhile();
        assert_eq!(seen_meanwhile(), BTreeSet::new(), "from one closed prefix to another");
    });
}
