//! Applies addresses, routes and rules to a real kernel.

#![allow(clippy::unwrap_used, reason = "tests")]

use crate::netns;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use kilo_core::{
    flat_map::FlatSet,
    plan::{MAIN_TABLE, NetPlan, Route},
};
use kilo_host::net::{
    Net, NetError, Paths, discovery, forwarding, links,
    watch::{Changed, Watcher},
};
use netns::{isolated, sh};

/// kilo0 is a TUN device here: routes and addresses do not depend on what is behind it.
fn setup() -> u32 {
    // No link-local addresses, which the kernel adds some time after a link is up.
    sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode; ip link set lo up
        ip link add eth0 type veth peer name eth0p && ip link set eth0 up && ip link set eth0p up
        ip addr add 10.0.0.5/24 dev eth0 && ip addr add 10.0.0.6/24 dev eth0
        ip -6 addr add 2001:db8::5/64 dev eth0 nodad
        ip route add default via 10.0.0.1
        ip tuntap add dev kilo0 mode tun");
    index("kilo0")
}

fn index(name: &str) -> u32 {
    sh(&format!("ip -o link show {name} | cut -d: -f1")).trim().parse().unwrap()
}

fn route(destination: &str, source: &str) -> Route {
    Route {
        destination: destination.parse().unwrap(),
        table: MAIN_TABLE,
        source: (!source.is_empty()).then(|| source.parse().unwrap()),
        mtu: None,
        closed: false,
    }
}

fn plan() -> NetPlan {
    NetPlan {
        neighbours: BTreeSet::new(),
        unreachable: BTreeSet::new(),
        mtu: 1420,
        addresses: BTreeSet::from(["10.4.0.1/16".parse().unwrap(), "fd00:4::1/64".parse().unwrap()]),
        routes: FlatSet::from_iter([
            route("10.2.1.0/24", "10.0.0.5"),
            route("10.2.2.0/24", "10.0.0.5"),
            route("192.0.2.7/32", ""),
            route("fd00:2::/64", "2001:db8::5"),
        ]),
    }
}

/// Routes, rules and addresses that are not ours, to show that they stay.
fn foreign() -> String {
    sh(
        "ip route show table all | grep -v 'proto 107' | grep -v kilo0; ip -6 route show table all | grep -v 'proto 107' | grep -v kilo0; ip rule show; ip -6 rule show; ip -o addr show | grep -v kilo0",
    )
}

/// [`plan`] with routes whose destinations may not be reached any other way.
fn closed_plan() -> NetPlan {
    let mut plan = plan();
    plan.routes = plan.routes.into_iter().map(|route| Route { closed: true, ..route }).collect();
    plan
}

#[test]
fn routes_that_were_read_are_not_read_again_unless_something_was_written_since() {
    isolated("routes_that_were_read_are_not_read_again_unless_something_was_written_since", || async {
        let kilo = setup();
        let net = Net::new().unwrap();
        net.apply(&plan(), kilo).await.unwrap();
        let known = || async { Some(net.routes_out(&[kilo]).await.unwrap().1) };
        assert_eq!(net.apply_to(known().await, &plan(), kilo).await.unwrap(), 0, "all of ours were found");
        let before = known().await;
        sh("ip route del 192.0.2.7/32");
        assert_eq!(net.apply_to(before, &plan(), kilo).await.unwrap(), 0, "they were not read again");
        assert_eq!(net.apply_to(known().await, &plan(), kilo).await.unwrap(), 1);
        // The kernel removes IPv4 routes together with the last IPv4 address.
        let before = known().await;
        sh("ip -4 addr flush dev kilo0");
        assert!(net.apply_to(before, &plan(), kilo).await.unwrap() > 2);
        assert_eq!(net.apply(&plan(), kilo).await.unwrap(), 0, "nothing was left out");
    });
}

#[test]
fn without_the_device_destinations_are_unreachable_and_not_the_default_routes() {
    isolated("without_the_device_destinations_are_unreachable_and_not_the_default_routes", || async {
        let kilo = setup();
        sh("ip -6 route add default via 2001:db8::1 dev eth0");
        let before = foreign();
        let net = Net::new().unwrap();
        assert_eq!(net.apply(&closed_plan(), kilo).await.unwrap(), 1 + 2 + 2 * 4);
        assert_eq!(net.apply(&closed_plan(), kilo).await.unwrap(), 0, "a second apply writes nothing");
        let all_routed = |device: &str| {
            for address in ["10.2.1.7", "192.0.2.7", "fd00:2::7"] {
                let route = sh(&format!("ip route get {address} 2>&1 || true"));
                let route = route.replace("No route to host", "unreachable");
                assert!(route.contains(device), "{address}: {route}");
            }
        };
        all_routed("dev kilo0");
        sh("ip link set kilo0 down");
        all_routed("unreachable");
        net.apply(&closed_plan(), kilo).await.unwrap();
        all_routed("dev kilo0");
        assert_eq!(net.apply(&closed_plan(), kilo).await.unwrap(), 0);

        // One route becomes open again, another goes.
        let mut fewer = closed_plan();
        fewer.routes = plan().routes.into_iter().skip(1).collect();
        let writes = net.change(&closed_plan(), &fewer, kilo).await.unwrap();
        assert_eq!(
            sh(
                "ip route show table all type unreachable proto 107; ip -6 route show table all type unreachable proto 107"
            ),
            ""
        );
        assert!(writes >= 5, "{writes}");
        assert_eq!(net.apply(&fewer, kilo).await.unwrap(), 0);
        net.change(&fewer, &closed_plan(), kilo).await.unwrap();
        assert_eq!(net.apply(&closed_plan(), kilo).await.unwrap(), 0);

        // The device cannot be set up: everything possible is created, and what was refused is reported.
        sh("ip link del kilo0");
        all_routed("unreachable");
        let mut more = closed_plan();
        more.routes.extend([Route { closed: true, ..route("10.2.9.0/24", "10.0.0.5") }]);
        let refused = net.apply(&more, kilo).await.unwrap_err();
        assert!(
            matches!(&refused, NetError::Refused { writes: 1, others, .. } if others.is_empty()),
            "{refused}"
        );
        assert!(sh("ip route get 10.2.9.1 2>&1 || true").contains("No route to host"));

        net.remove(None).await.unwrap();
        assert_eq!(net.remove(None).await.unwrap(), 0);
        assert_eq!(foreign(), before);
        assert_eq!(sh("ip route show table all proto 107; ip -6 route show table all proto 107"), "");
    });
}

#[test]
fn a_tun_device_has_room_for_what_waits_for_its_process() {
    isolated("a_tun_device_has_room_for_what_waits_for_its_process", || async {
        let (kilo, net) = (setup(), Net::new().unwrap());
        let shown = || sh("ip -j link show kilo0 | grep -o '\"txqlen\":[0-9]*' | cut -d: -f2");
        let queue = || shown().trim().parse::<u32>().unwrap();
        assert_eq!(queue(), 500, "as the kernel makes it");
        net.apply(&plan(), kilo).await.unwrap();
        assert_eq!((queue(), net.apply(&plan(), kilo).await.unwrap()), (2000, 0));
        // A larger value was somebody's choice.
        sh("ip link set kilo0 txqueuelen 9000");
        assert_eq!((net.apply(&plan(), kilo).await.unwrap(), queue()), (0, 9000));
    });
}

#[test]
fn pods_without_a_route_are_unreachable_until_a_bridge_has_them() {
    isolated("pods_without_a_route_are_unreachable_until_a_bridge_has_them", || async {
        let kilo = setup();
        sh("ip -6 route add default via 2001:db8::1 dev eth0");
        let before = foreign();
        let net = Net::new().unwrap();
        net.apply(&closed_plan(), kilo).await.unwrap();
        let prefixes = ["10.42.1.0/24", "fd00:42:1::/64"].map(|prefix| prefix.parse().unwrap());
        let with = NetPlan { unreachable: prefixes.into(), ..closed_plan() };
        let route = |address: &str| sh(&format!("ip route get {address} 2>&1 || true"));
        assert!(route("10.42.1.7").contains("eth0"), "the default route: {}", route("10.42.1.7"));
        assert_eq!(net.change(&closed_plan(), &with, kilo).await.unwrap(), 2);
        for _ in 0..2 {
            assert_eq!(net.change(&with, &with, kilo).await.unwrap(), 0);
            assert_eq!(net.apply(&with, kilo).await.unwrap(), 0);
        }
        let unreachable = |address: &str| {
            let route = route(address).replace("No route to host", "unreachable");
            assert!(route.contains("unreachable"), "{address}: {route}");
        };
        ["10.42.1.7", "fd00:42:1::7", "10.42.1.1"].iter().copied().for_each(unreachable);

        // The first pod's bridge is the better route as long as it exists.
        sh("ip link add br0 type bridge && ip addr add 10.42.1.1/24 dev br0
            ip -6 addr add fd00:42:1::1/64 dev br0 nodad && ip link set br0 up");
        for address in ["10.42.1.7", "fd00:42:1::7"] {
            assert!(route(address).contains("dev br0"), "{address}: {}", route(address));
        }
        assert_eq!(net.apply(&with, kilo).await.unwrap(), 0);
        sh("ip link del br0");
        ["10.42.1.7", "fd00:42:1::7"].iter().copied().for_each(unreachable);

        // When a node is declared dead, its routes go and the `unreachable` one stays; and back.
        let mut lost = with.clone();
        let gone = *lost.routes.iter().next().unwrap();
        lost.routes.remove(&gone);
        lost.unreachable.insert(gone.destination);
        assert_eq!(net.change(&with, &lost, kilo).await.unwrap(), 1);
        unreachable(&gone.destination.hosts().next().unwrap().to_string());
        assert_eq!(net.apply(&lost, kilo).await.unwrap(), 0);
        assert_eq!(net.change(&lost, &with, kilo).await.unwrap(), 1);
        assert_eq!(net.apply(&with, kilo).await.unwrap(), 0);

        assert_eq!(net.change(&with, &closed_plan(), kilo).await.unwrap(), 2);
        net.apply(&with, kilo).await.unwrap();
        net.remove(Some(kilo)).await.unwrap();
        assert_eq!(sh("ip route show table all proto 107; ip -6 route show table all proto 107"), "");
        assert_eq!(foreign(), before);
    });
}

#[test]
fn the_plan_comes_about_and_nothing_else_changes() {
    isolated("the_plan_comes_about_and_nothing_else_changes", || async {
        let kilo = setup();
        sh(
            "ip route add 10.77.0.0/16 dev eth0 proto static; ip rule add from 10.77.0.0/16 lookup 77 priority 77",
        );
        let before = foreign();
        let net = Net::new().unwrap();
        let writes = net.apply(&plan(), kilo).await.unwrap();
        assert_eq!(writes, 1 + 2 + 4);
        assert_eq!(net.apply(&plan(), kilo).await.unwrap(), 0, "a second apply writes nothing");
        let shown = sh("ip route show proto 107");
        assert!(shown.contains("10.2.1.0/24 dev kilo0 scope link src 10.0.0.5"), "{shown}");
        assert!(sh("ip -6 route show proto 107").contains("fd00:2::/64 dev kilo0"));

        // The source address changes in place.
        let mut changed = plan();
        changed.routes = plan()
            .routes
            .into_iter()
            .map(|mut route| {
                if route.source == Some("10.0.0.5".parse().unwrap()) {
                    route.source = Some("10.0.0.6".parse().unwrap());
                }
                route
            })
            .collect();
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 2);
        assert_eq!(sh("ip route show table all proto 107 | grep -c 'src 10.0.0.6'").trim(), "2");
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 0);

        // Another address in the same network, which goes when the first one is deleted; all routes stay
        // with both.
        changed.addresses = BTreeSet::from(["10.4.0.2/16".parse().unwrap()]);
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 2 + 1 + 2, "no route is written again");
        assert!(sh("ip -o addr show dev kilo0").contains("10.4.0.2/16"));
        assert!(!sh("ip -o addr show dev kilo0").contains("10.4.0.1/16"));
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 0);

        // Without any address the kernel flushes routes; the same apply restores them.
        changed.addresses.clear();
        net.apply(&changed, kilo).await.unwrap();
        assert_eq!(sh("ip route show table all proto 107 | grep -c dev.kilo0").trim(), "4");
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 0);

        // One route fewer.
        let first = *changed.routes.iter().next().unwrap();
        changed.routes.remove(&first);
        assert_eq!(net.apply(&changed, kilo).await.unwrap(), 1);

        assert!(net.remove(Some(kilo)).await.unwrap() > 0);
        assert_eq!(net.remove(Some(kilo)).await.unwrap(), 0);
        assert_eq!(foreign(), before);
        assert_eq!(sh("ip route show table all proto 107"), "");
    });
}

#[test]
fn a_thousand_routes_are_quick_and_1000_reconciles_write_nothing() {
    isolated("a_thousand_routes_are_quick_and_1000_reconciles_write_nothing", || async {
        let kilo = setup();
        let net = Net::new().unwrap();
        let mut plan = plan();
        let many = |n: u32| route(&format!("10.{}.{}.0/24", 100 + n / 256, n % 256), "10.0.0.5");
        plan.routes.extend((0..1000).map(many));
        let start = Instant::now();
        let writes = net.apply(&plan, kilo).await.unwrap();
        let first = start.elapsed();
        assert_eq!(writes, 1 + 2 + 1004);
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(net.apply(&plan, kilo).await.unwrap(), 0);
        }
        let each = start.elapsed() / 20;
        println!(
            "kilo-figure: 1,000 routes applied in {first:?}, an idle reconcile over them takes {each:?}"
        );
        let few = plan.routes.into_iter().filter(|route| !route.destination.to_string().starts_with("10.1"));
        plan.routes = few.collect();
        net.apply(&plan, kilo).await.unwrap();
        for _ in 0..1000 {
            assert_eq!(net.apply(&plan, kilo).await.unwrap(), 0);
        }
        assert!(first < Duration::from_secs(5));
    });
}

#[test]
fn a_bridge_leaves_the_subnets_that_the_node_has_no_more() {
    isolated("a_bridge_leaves_the_subnets_that_the_node_has_no_more", || async {
        setup();
        let net = Net::new().unwrap();
        sh("ip link add br1 type bridge; ip addr add 10.42.3.1/24 dev br1; ip link set br1 up; \
            ip addr add 10.42.1.1/24 dev br1; ip addr add fd00:42:1::1/64 dev br1 nodad; \
            ip addr add fd00:42:3::1/64 dev br1 nodad; ip addr add 10.42.1.9/24 dev eth0");
        let former = ["10.42.1.0/24", "fd00:42:1::/64"].map(|subnet| subnet.parse().unwrap());
        let bridges = ["br1", "eth0", "absent"].map(str::to_owned);
        assert_eq!(net.leave_subnets(&bridges, &former).await.unwrap(), 2);
        let left = sh("ip addr show dev br1");
        assert!(left.contains("10.42.3.1/24") && left.contains("fd00:42:3::1/64"), "{left}");
        assert!(!left.contains("42.1.1") && !left.contains("fd00:42:1:"), "{left}");
        assert!(sh("ip addr show dev eth0").contains("10.42.1.9/24"), "what is not a bridge is not touched");
        assert_eq!(net.leave_subnets(&bridges, &former).await.unwrap(), 0);
    });
}

#[test]
fn a_route_of_somebody_else_is_refused_by_name_and_kilos_is_taken_over() {
    isolated("a_route_of_somebody_else_is_refused_by_name_and_kilos_is_taken_over", || async {
        let kilo = setup();
        let net = Net::new().unwrap();
        sh(
            "ip link set kilo0 up; ip route add 10.2.1.0/24 dev eth0 proto static; ip route add 10.2.2.0/24 dev kilo0 proto static; \
             ip route add 10.0.0.9/32 via 10.0.0.9 dev eth0 onlink proto static table 1107; \
             ip rule add from 10.2.0.0/24 to 10.0.0.9 lookup 1107; ip -6 rule add from fd00:3::/64 lookup 1107; \
             ip rule add from 10.2.0.0/24 lookup 1107 priority 1107 protocol 107; ip rule add from 10.7.0.0/16 lookup 77",
        );
        let error = net.apply(&plan(), kilo).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("10.2.1.0/24") && text.contains("eth0"), "{text}");
        assert_eq!(error.label(), "network");
        // Everything else is in place nevertheless.
        assert!(
            matches!(&error, NetError::Refused { writes: 9, others, .. } if others.is_empty()),
            "{error:?}"
        );
        assert!(sh("ip route show 10.2.2.0/24").contains("proto 107"));
        let rules = sh("ip rule show; ip -6 rule show");
        assert!(!rules.contains("1107") && rules.contains("from 10.7.0.0/16 lookup 77"), "{rules}");
        assert!(sh("ip route show 10.2.1.0/24").contains("dev eth0 proto static"));
    });
}

#[test]
fn a_default_route_by_another_interface_leads_to_no_node_of_the_location() {
    isolated("a_default_route_by_another_interface_leads_to_no_node_of_the_location", || async {
        let kilo = setup();
        sh("ip link add eth1 type veth peer name eth1p && ip link set eth1 up && ip link set eth1p up
            ip addr add 203.0.113.9/24 dev eth1 && ip addr add 2001:db8:1::9/64 dev eth1 nodad
            ip route replace default via 203.0.113.1 && ip route add default via 2001:db8:1::1
            ip addr add 10.7.0.1/32 dev lo");
        let net = Net::new().unwrap();
        let eth1 = index("eth1");
        let nodes = ["10.0.0.77", "10.9.0.77", "2001:db8::77"].map(|node| node.parse().unwrap());
        let found = async |private: &str, nodes: &[IpAddr]| {
            let query = links::HostQuery {
                kilo,
                private: Some(private.parse().unwrap()),
                ..links::HostQuery::default()
            };
            let without = links::host_links(&net.links().await.unwrap(), &query, &BTreeMap::new());
            let mut paths = Paths::default();
            net.find_paths(&mut paths, nodes.iter().copied().collect(), &without).await;
            paths.interfaces
        };
        let all = found("10.0.0.5", &nodes).await;
        assert_eq!(all.get(&nodes[0]), Some(&index("eth0")));
        assert_eq!(all.get(&nodes[1]), None, "only the default route leads there");
        // The link's IPv6 address goes when it is down, its IPv4 address stays.
        sh("ip link set eth0 down");
        assert_eq!(found("10.0.0.5", &nodes).await, BTreeMap::new());
        assert_eq!(found("2001:db8::5", &nodes).await, BTreeMap::new());
        sh("ip route add 10.9.0.0/16 via 203.0.113.1");
        assert_eq!(found("10.0.0.5", &nodes).await, BTreeMap::from([(nodes[1], eth1)]));
        sh("ip route del 10.9.0.0/16 && ip route add 0.0.0.0/1 via 203.0.113.1");
        assert_eq!(found("10.0.0.5", &nodes).await, BTreeMap::new(), "half of a default route is one");
        sh("ip route del 0.0.0.0/1 && ip link set eth0 up && ip route replace default \
            nexthop via 203.0.113.1 dev eth1 nexthop via 10.0.0.1 dev eth0");
        let many: Vec<IpAddr> = (1..60).map(|last| [10, 9, 0, last].into()).collect();
        let by_both: BTreeSet<_> = found("10.0.0.5", &many).await.into_values().collect();
        assert_eq!(
            by_both,
            BTreeSet::from([index("eth0"), eth1]),
            "the private interface is one of its ways"
        );
        sh("ip route replace default via 203.0.113.1");
        // A host with its address on loopback sends through every uplink.
        assert_eq!(found("10.7.0.1", &nodes).await.len(), 3);
        assert_eq!(
            found("203.0.113.9", &nodes).await.len(),
            3,
            "the private interface has the default route"
        );
    });
}

#[test]
fn links_uplinks_paths_and_addresses_are_found() {
    isolated("links_uplinks_paths_and_addresses_are_found", || async {
        let kilo = setup();
        sh("ip link add cni0 type bridge && ip link set cni0 up && ip addr add 10.244.1.1/24 dev cni0
            ip link add eth1 type veth peer name eth1p && ip link set eth1 up && ip link set eth1p up
            ip addr add 203.0.113.9/24 dev eth1 && ip link set eth1 mtu 1400
            ip route add 10.50.0.0/16 dev eth1");
        let net = Net::new().unwrap();
        let pods = ["10.244.1.0/24".parse().unwrap()];
        let query = links::HostQuery {
            kilo,
            private: Some("10.0.0.5".parse().unwrap()),
            pod_cidrs: &pods,
            ..links::HostQuery::default()
        };
        let towards = ["10.0.0.77", "10.50.0.1", "198.51.100.1"].map(|text| text.parse().unwrap());
        let all = net.links().await.unwrap();
        let mut paths = Paths::default();
        let without = links::host_links(&all, &query, &BTreeMap::new());
        net.find_paths(&mut paths, BTreeSet::from(towards), &without).await;
        let host = links::host_links(&all, &query, &paths.interfaces);
        let (eth0, eth1) = (index("eth0"), index("eth1"));
        assert_eq!(host.uplinks.keys().copied().collect::<Vec<_>>(), [eth0.min(eth1), eth0.max(eth1)]);
        assert_eq!(host.uplinks[&eth0].v4, Some([10, 0, 0, 5].into()));
        assert_eq!(host.mtus[&eth1], 1400);
        assert_eq!(host.private, Some(eth0));
        assert_eq!(host.towards.get(&towards[1]), Some(&eth1));
        assert_eq!(host.towards.len(), 1);
        assert_eq!(net.routes_out(&[]).await.unwrap().0.default, Some(eth0));
        let found = discovery::run(&net, "kilo-no-such-host.invalid", kilo, &pods, &[]).await.unwrap();
        assert_eq!(found.private.unwrap().to_string(), "10.0.0.5/24");
        // The interface of the default route comes first: its IPv6 address is public.
        assert_eq!(found.public.to_string(), "2001:db8::5/64");
        assert_eq!(all.iter().find(|link| link.index == kilo).unwrap().kind, "tun");
        assert!(links::by_name(net.rtnl(), "absent0").await.unwrap().is_none());
        assert!(links::delete(net.rtnl(), index("eth1")).await.unwrap());
        assert!(!links::delete(net.rtnl(), eth1).await.unwrap());
    });
}

#[test]
fn changes_wake_the_watcher_once_per_burst() {
    isolated("changes_wake_the_watcher_once_per_burst", || async {
        let kilo = setup();
        let mut watcher = Watcher::new(None).unwrap();
        let net = Net::new().unwrap();
        sh("ip rule add from 10.77.0.0/16 lookup 77");
        net.apply(&plan(), kilo).await.unwrap();
        let seen = watcher.changed().await.unwrap();
        assert!(seen.links && seen.addresses && seen.routes && seen.rules, "{seen:?}");
        // IPv6 causes further events a moment later.
        while tokio::time::timeout(Duration::from_secs(2), watcher.changed()).await.is_ok() {}
        net.apply(&plan(), kilo).await.unwrap();
        let idle = tokio::time::timeout(Duration::from_millis(500), watcher.changed()).await;
        assert!(idle.is_err(), "an apply without writes announces nothing: {idle:?}");
        sh("ip link set eth0 down");
        assert!(watcher.changed().await.unwrap().links);
    });
}

/// In a mesh of thousands, the agent is also notified of its own writes.
#[test]
fn thousands_of_announcements_are_kept_until_the_watcher_reads_them() {
    isolated("thousands_of_announcements_are_kept_until_the_watcher_reads_them", || async {
        setup();
        let mut watcher = Watcher::new(None).unwrap();
        while tokio::time::timeout(Duration::from_secs(1), watcher.changed()).await.is_ok() {}
        // Keeps both threads of the runtime busy, so that nothing is read.
        let busy = Arc::new(Barrier::new(3));
        for _ in 0..2 {
            let busy = Arc::clone(&busy);
            tokio::spawn(async move {
                busy.wait();
                busy.wait();
            });
        }
        busy.wait();
        sh(
            "for i in $(seq 4000); do echo route add 10.99.$((i / 250)).$((i % 250)) dev eth0; done | ip -batch -",
        );
        busy.wait();
        let seen = watcher.changed().await.unwrap();
        assert_eq!(seen, Changed { routes: true, ..Changed::default() }, "none was lost");
    });
}

#[test]
fn what_we_write_ourselves_does_not_wake_the_watcher_and_what_others_write_does() {
    isolated("what_we_write_ourselves_does_not_wake_the_watcher_and_what_others_write_does", || async {
        let kilo = setup();
        let net = Net::new().unwrap();
        net.apply(&plan(), kilo).await.unwrap();
        let mut watcher = Watcher::new(Some(net.rtnl().port())).unwrap();
        while tokio::time::timeout(Duration::from_secs(1), watcher.changed()).await.is_ok() {}
        let mut fewer = plan();
        let first = *fewer.routes.iter().next().unwrap();
        fewer.routes.remove(&first);
        assert_eq!(net.apply(&fewer, kilo).await.unwrap(), 1);
        let own = tokio::time::timeout(Duration::from_millis(500), watcher.changed()).await;
        assert!(own.is_err(), "{own:?}");
        sh("ip route del 10.2.2.0/24");
        assert!(watcher.changed().await.unwrap().routes);
    });
}

#[test]
fn who_asks_for_routes_is_told_of_routes_and_not_of_neighbours_or_filters() {
    isolated("who_asks_for_routes_is_told_of_routes_and_not_of_neighbours_or_filters", || async {
        setup();
        let net = Net::new().unwrap();
        let sender = tokio::sync::watch::Sender::default();
        let mut routes_changed = sender.subscribe();
        kilo_host::net::watch::watch(Arc::default(), net.rtnl().port(), sender).unwrap();
        while tokio::time::timeout(Duration::from_secs(1), routes_changed.changed()).await.is_ok() {}
        sh("ip neighbour replace 10.0.0.77 lladdr 02:00:00:00:00:77 dev eth0; tc qdisc add dev eth0 clsact");
        assert!(tokio::time::timeout(Duration::from_millis(500), routes_changed.changed()).await.is_err());
        for change in [
            "ip route add 10.98.0.0/16 dev eth0",
            "ip -6 rule add from 2001:db8::/32",
            "ip link set eth0 down",
        ] {
            sh(change);
            let notified = tokio::time::timeout(Duration::from_secs(5), routes_changed.changed()).await;
            assert!(notified.is_ok_and(|notified| notified.is_ok()), "{change}");
            while tokio::time::timeout(Duration::from_millis(300), routes_changed.changed()).await.is_ok() {}
        }
    });
}

#[test]
fn a_plan_that_is_there_becomes_another_by_writing_only_what_differs() {
    isolated("a_plan_that_is_there_becomes_another_by_writing_only_what_differs", || async {
        let kilo = setup();
        let net = Net::new().unwrap();
        net.apply(&plan(), kilo).await.unwrap();
        // One route goes, one gets another source, one comes, in both families.
        let mut next = plan();
        for (gone, new) in [
            (route("10.2.1.0/24", "10.0.0.5"), None),
            (route("10.2.2.0/24", "10.0.0.5"), Some(route("10.2.2.0/24", "10.0.0.6"))),
            (route("fd00:2::/64", "2001:db8::5"), Some(route("fd00:3::/64", ""))),
        ] {
            assert_eq!(next.routes.remove(&gone), Some(gone));
            next.routes.extend(new);
        }
        assert_eq!(net.change(&plan(), &next, kilo).await.unwrap(), 4);
        assert_eq!(net.change(&next, &next, kilo).await.unwrap(), 0);
        assert_eq!(net.apply(&next, kilo).await.unwrap(), 0, "a look at everything finds nothing to do");
        // A changed address is applied by a full pass.
        let mut moved = next.clone();
        moved.addresses = BTreeSet::from(["10.4.0.2/16".parse().unwrap()]);
        net.change(&next, &moved, kilo).await.unwrap();
        assert_eq!(net.apply(&moved, kilo).await.unwrap(), 0);
    });
}

#[test]
fn forwarding_is_seen_and_turned_on() {
    isolated("forwarding_is_seen_and_turned_on", || async {
        let read = |path: &str| std::fs::read_to_string(path).unwrap().trim().to_owned();
        let (ipv4, ipv6) = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding");
        std::fs::write(ipv4, "0").unwrap();
        std::fs::write(ipv6, "0").unwrap();
        assert_eq!((forwarding::enable(false), read(ipv4), read(ipv6)), (1, "1".into(), "0".into()));
        let accept_ra = "/proc/sys/net/ipv6/conf/lo/accept_ra";
        std::fs::write(accept_ra, "1").unwrap();
        assert!(forwarding::enable(true) >= 2, "forwarding, and interfaces that accept advertisements");
        assert_eq!((read(ipv6), read(accept_ra)), ("1".into(), "2".into()), "no default route is lost");
        assert_eq!(forwarding::enable(true), 0, "nothing is left to do");
    });
}

#[test]
fn a_strict_filter_of_the_tunnel_is_loosened_where_proc_is_read_only() {
    isolated("a_strict_filter_of_the_tunnel_is_loosened_where_proc_is_read_only", || async {
        let kilo = setup();
        let paths = ["all", "kilo0", "eth0"].map(|name| format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"));
        for path in &paths {
            std::fs::write(path, "1").unwrap();
        }
        sh("mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys");
        assert!(std::fs::write(&paths[1], "2").is_err(), "as a container sees it");
        let net = Net::new().unwrap();
        let loosen = || forwarding::accept_by_tunnel(net.rtnl(), "kilo0", kilo);
        assert_eq!(loosen().await, 1);
        let values = paths.each_ref().map(|path| std::fs::read_to_string(path).unwrap().trim().to_owned());
        assert_eq!(values, ["1", "2", "1"], "that of the tunnel alone");
        assert_eq!(loosen().await, 0, "nothing is left to do");
    });
}
