//! Next hops of relayed packets on a real link, and their link-layer addresses.

use std::{collections::BTreeMap, os::fd::OwnedFd, time::Instant};

use kilo_common::{maps::CONFIG_RELAY, relay::Port};
use kilo_host::dataplane::relay::RelayMaps;

use super::{FOR_X, WIREGUARD, X, X_PORT, Y, Y_PORT, data, mapped, pair_by, v6};
use crate::{
    bpf::{
        SELF,
        packet::{checksums_hold, udp, udp_v6},
    },
    gso,
    links::host::{LAN_MAC, LanSender, NODE_MAC, World, index},
    netns::{isolated, sh},
    wait::pace,
};

/// The address to which the end Y moves.
const MOVED: [u8; 4] = [203, 0, 114, 2];

/// Link-layer address of a router in the network behind `eth0`.
const fn router(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

/// A relay with one pair, whose ends are behind routers in `eth0`'s network.
struct Relay {
    world: World,
    maps: RelayMaps,
    ports: BTreeMap<u16, Port>,
    sender: LanSender,
    link: OwnedFd,
    is_v6: bool,
    sent: u32,
}

impl Relay {
    async fn new(is_v6: bool) -> Self {
        let mut world = World::on_veth();
        sh("sysctl -qw net.ipv4.conf.all.forwarding=1 net.ipv6.conf.all.forwarding=1
            ip -6 address add 2001:db8::a01:b/64 dev eth0 nodad
            for at in 12 13; do
                ip neighbour replace 10.1.0.$at lladdr 02:00:00:00:00:$at dev eth0 nud permanent
                ip neighbour replace 2001:db8::a01:$at lladdr 02:00:00:00:00:$at dev eth0 nud permanent
            done");
        world.tables.config.flags |= CONFIG_RELAY;
        world.tables.config.wireguard_port = WIREGUARD;
        world.attach(&["eth0"], &[]).await;
        let mut ports = pair_by(is_v6);
        ports.values_mut().for_each(|port| port.ifindex = index("eth0"));
        let (maps, sender, link) =
            (world.relay_maps(), LanSender::new(), crate::links::host::in_lan(gso::open));
        let mut relay = Self { world, maps, ports, sender, link, is_v6, sent: 0 };
        relay.write();
        relay
    }

    fn write(&mut self) {
        self.maps.write_ports(&self.ports).unwrap();
    }

    /// Routes both addresses of Y through this router.
    fn goes_by(&self, router: u8) {
        sh(&format!(
            "ip route replace 203.0.112.0/22 via 10.1.0.{router} dev eth0
             ip -6 route replace 2001:db8::cb00:7000/118 via 2001:db8::a01:{router} dev eth0"
        ));
    }

    /// Sends a datagram from X through the relay; returns the link-layer destination of the relayed frame.
    fn passes(&mut self) -> [u8; 6] {
        self.sent += 1;
        let bytes = [data(60), self.sent.to_be_bytes().to_vec()].concat();
        let packet = match self.is_v6 {
            true => udp_v6(v6(X), v6(SELF), (X_PORT, FOR_X), &bytes),
            false => udp(X, SELF, (X_PORT, FOR_X), &bytes),
        };
        let kind = if self.is_v6 { [0x86, 0xdd] } else { [8, 0] };
        self.sender.send(&[&NODE_MAC[..], &LAN_MAC, &kind, &packet].concat());
        let started = Instant::now();
        loop {
            assert!(started.elapsed().as_secs() < 10, "{:?}", self.world.drops());
            let frame = gso::next(&self.link);
            if frame.len() < 14
                || frame[6..12] != NODE_MAC
                || frame[12..14] != kind
                || !frame.ends_with(&bytes)
            {
                continue;
            }
            let at = if self.is_v6 { 24 } else { 16 };
            let to = &self.ports[&FOR_X].to;
            let to = if self.is_v6 { &to[..] } else { &to[12..] };
            assert_eq!(&frame[14 + at..14 + at + to.len()], to);
            assert!(checksums_hold(&frame[14..]));
            return frame[..6].try_into().unwrap();
        }
    }
}

#[test]
fn a_next_hop_is_kept_until_routes_change() {
    isolated("a_next_hop_is_kept_until_routes_change", || async { kept(false).await });
}

#[test]
fn so_it_is_kept_over_ipv6() {
    isolated("so_it_is_kept_over_ipv6", || async { kept(true).await });
}

async fn kept(is_v6: bool) {
    let mut relay = Relay::new(is_v6).await;
    relay.goes_by(12);
    assert_eq!(relay.passes(), router(0x12));
    let asked = Instant::now();
    relay.goes_by(13);
    let hop = relay.passes();
    // Nothing has announced the route change, so the kernel is asked after 2.5 s at the earliest.
    if asked.elapsed().as_millis() < 2_000 {
        assert_eq!(hop, router(0x12));
    }
    relay.maps.routes_changed();
    relay.write();
    assert_eq!(relay.passes(), router(0x13));
    assert_eq!(
        relay.maps.ports()[&FOR_X].packets,
        u64::from(relay.sent),
        "what was written anew goes on counting"
    );
    // The kernel knows the neighbour's new address.
    let address = if is_v6 { "2001:db8::a01:13" } else { "10.1.0.13" };
    sh(&format!("ip neighbour replace {address} lladdr 02:00:00:00:00:77 dev eth0 nud permanent"));
    assert_eq!(relay.passes(), router(0x77));
}

/// Without an agent a changed route takes effect after 2.5 to 25 s, by the kernel's clock.
#[test]
fn a_route_that_changes_without_an_agent_counts_25_s_later_at_most() {
    isolated("a_route_that_changes_without_an_agent_counts_25_s_later_at_most", || async {
        let mut relay = Relay::new(false).await;
        relay.goes_by(12);
        assert_eq!(relay.passes(), router(0x12));
        relay.goes_by(13);
        let changed = Instant::now();
        while relay.passes() != router(0x13) {
            assert!(changed.elapsed().as_secs() < 30);
            pace(std::time::Duration::from_millis(100));
        }
    });
}

#[test]
fn an_end_that_is_bound_anew_is_sent_to_by_its_own_hop_at_once() {
    isolated("an_end_that_is_bound_anew_is_sent_to_by_its_own_hop_at_once", || async {
        bound_anew(false).await;
    });
}

#[test]
fn so_it_is_bound_anew_over_ipv6() {
    isolated("so_it_is_bound_anew_over_ipv6", || async { bound_anew(true).await });
}

/// An end moves between two addresses behind two routers: no packet for one goes to the other's router.
async fn bound_anew(is_v6: bool) {
    let mut relay = Relay::new(is_v6).await;
    relay.goes_by(12);
    sh("ip route replace 203.0.114.0/24 via 10.1.0.13 dev eth0
        ip -6 route replace 2001:db8::cb00:7200/120 via 2001:db8::a01:13 dev eth0");
    for (to, hop) in [(Y, router(0x12)), (MOVED, router(0x13))].into_iter().cycle().take(20) {
        for (number, port) in &mut relay.ports {
            let end = if *number == FOR_X {
                (&mut port.to, &mut port.to_port)
            } else {
                (&mut port.from, &mut port.from_port)
            };
            (*end.0, *end.1) = (mapped(to, is_v6), Y_PORT);
        }
        relay.write();
        assert_eq!((relay.passes(), relay.passes()), (hop, hop), "{to:?}");
    }
}
