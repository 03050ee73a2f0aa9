//! The kernel's WireGuard device. Needs the module: run it in the virtual machine where this machine's
//! kernel has none.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use crate::netns;

use std::{
    net::UdpSocket,
    path::Path,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_core::{
    plan::NetPlan,
    settings::WireguardMode,
    wireguard::{WireguardPeer, WireguardPlan, key::SecretKey},
};
use kilo_host::{
    net::{Net, links},
    wireguard::{Backend, Device, WireguardError, ensure_device},
};
use netns::{isolated, sh, succeeds};

const NO_PROGRAM: &str = "/nonexistent/kg";

fn secret(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

fn nets(count: u32) -> impl Iterator<Item = IpNet> {
    (0..count).map(|n| {
        let text = match n % 3 {
            0 => format!("fd00:{n:x}::/64"),
            _ => format!("10.{}.{}.0/24", n / 256, n % 256),
        };
        text.parse().unwrap()
    })
}

/// The device, or `None` where the kernel has no WireGuard.
async fn device(net: &Net, name: &str) -> Option<Device> {
    match ensure_device(net.rtnl(), name, WireguardMode::Kernel, true, Path::new(NO_PROGRAM)).await {
        Ok(made) => {
            assert_eq!((made.backend, made.created), (Backend::Kernel, true));
            Some(Device::open(net.rtnl(), name, Backend::Kernel).await.unwrap())
        }
        Err(WireguardError::NoKernelSupport(error)) => {
            println!("kilo-skip: this kernel has no WireGuard: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn large_peers_moves_and_releases() {
    isolated("large_peers_moves_and_releases", || async {
        let net = Net::new().unwrap();
        let Some(device) = device(&net, "kilo0").await else { return };
        let key = secret(1);
        let endpoint = "192.0.2.2:51820".parse().unwrap();
        let big = WireguardPeer {
            allowed_ips: nets(2000).collect(),
            endpoint: Some(endpoint),
            persistent_keepalive: 10,
            preshared_key: Some(secret(7)),
            roams: true,
        };
        let (one, two) = (secret(2).public(), secret(3).public());
        let mut plan =
            WireguardPlan { listen_port: 51820, peers: [(one, big), (two, WireguardPeer::default())].into() };
        for n in 0..150 {
            let allowed_ips = [format!("172.16.{n}.0/24").parse().unwrap()].into_iter().collect();
            let peer = WireguardPeer { allowed_ips, ..WireguardPeer::default() };
            plan.peers.insert(secret(50 + n).public(), peer);
        }
        let start = Instant::now();
        assert_eq!(device.reconcile(&plan, &key).await.unwrap(), 2 + 152);
        println!("kilo-figure: 152 peers and 2,150 allowed IPs written in {:?}", start.elapsed());
        let start = Instant::now();
        assert_eq!(
            device.reconcile(&plan, &key).await.unwrap(),
            0,
            "read back over many messages: empty diff"
        );
        println!("kilo-figure: read and compared in {:?}", start.elapsed());

        // 400 prefixes move, 100 go, the others are not part of the request.
        let all: Vec<IpNet> = nets(2000).collect();
        let moved = all[..400].iter().copied().collect();
        let peer = plan.peers.get_mut(&one).unwrap();
        for net in &all[..500] {
            peer.allowed_ips.remove(net);
        }
        plan.peers.get_mut(&two).unwrap().allowed_ips = moved;
        assert_eq!(device.reconcile(&plan, &key).await.unwrap(), 2);
        assert_eq!(device.reconcile(&plan, &key).await.unwrap(), 0);
        assert_eq!(device.read().await.unwrap().peers.len(), 152, "the tombstone is gone");

        // Removes and restores keys.
        let peer = plan.peers.get_mut(&one).unwrap();
        (peer.preshared_key, peer.persistent_keepalive) = (None, 0);
        assert_eq!(device.reconcile(&plan, &secret(9)).await.unwrap(), 2);
        assert_eq!(device.reconcile(&plan, &secret(9)).await.unwrap(), 0);
        plan.peers.retain(|key, _| *key == one);
        assert_eq!(device.reconcile(&plan, &secret(9)).await.unwrap(), 151);
        assert_eq!(device.reconcile(&plan, &secret(9)).await.unwrap(), 0);
    });
}

#[test]
fn a_change_of_allowed_ips_loses_no_packet_of_others() {
    isolated("a_change_of_allowed_ips_loses_no_packet_of_others", || async {
        let net = Net::new().unwrap();
        let Some(device) = device(&net, "wga").await else { return };
        sh("ip link set lo up; mkdir -p /run/netns; ip netns add b; ip -n b link set lo up
            ip link add va type veth peer name vb netns b; ip link set va up; ip -n b link set vb up
            ip addr add 192.0.2.1/24 dev va; ip -n b addr add 192.0.2.2/24 dev vb
            ip -n b link add wgb type wireguard");
        let (a, b) = (secret(1), secret(2));
        std::fs::write("/run/b", b.reveal()).unwrap();
        sh(&format!(
            "ip netns exec b wg set wgb listen-port 51821 private-key /run/b peer {} endpoint 192.0.2.1:51820 allowed-ips 10.4.0.1/32
             ip addr add 10.4.0.1/24 dev wga; ip link set wga up; ip -n b addr add 10.4.0.2/24 dev wgb; ip -n b link set wgb up",
            a.public()
        ));
        let peer = WireguardPeer {
            allowed_ips: nets(600).chain(["10.4.0.2/32".parse().unwrap()]).collect(),
            endpoint: Some("192.0.2.2:51821".parse().unwrap()),
            roams: true,
            ..WireguardPeer::default()
        };
        let mut plan = WireguardPlan { listen_port: 51820, peers: [(b.public(), peer)].into() };
        device.reconcile(&plan, &a).await.unwrap();
        sh("ping -c 1 -W 5 10.4.0.2");
        let ping = tokio::task::spawn_blocking(|| sh("ping -q -i 0.002 -c 1000 -W 5 10.4.0.2"));
        let mut changes = 0;
        let all: Vec<IpNet> = nets(600).collect();
        while !ping.is_finished() {
            let peer = plan.peers.get_mut(&b.public()).unwrap();
            let net = all[changes % all.len()];
            if peer.allowed_ips.remove(&net).is_none() {
                peer.allowed_ips.extend([net]);
            }
            device.reconcile(&plan, &a).await.unwrap();
            changes += 1;
        }
        let summary = ping.await.unwrap();
        println!("kilo-figure: {changes} changes of the peer meanwhile: {}", summary.lines().nth(3).unwrap());
        assert!(changes > 10 && summary.contains("1000 received"), "{summary}");

        // Roaming: the other side changes its port, while the plan still has the old one.
        sh("ip netns exec b wg set wgb listen-port 51899; ip netns exec b ping -c 2 -i 0.2 -W 5 10.4.0.1");
        let seen = device.read_status().await.unwrap()[&b.public()].clone();
        assert_eq!(seen.endpoint, Some("192.0.2.2:51899".parse().unwrap()));
        assert!(seen.handshake_age.unwrap() < Duration::from_secs(60));
        assert_eq!(device.reconcile(&plan, &a).await.unwrap(), 0);

        let _taken = UdpSocket::bind("0.0.0.0:51830").unwrap();
        plan.listen_port = 51830;
        let error = device.reconcile(&plan, &a).await.unwrap_err();
        assert!(matches!(error, WireguardError::PortInUse(51830)), "{error}");
    });
}

#[test]
fn a_taken_port_shows_when_the_interface_goes_up() {
    isolated("a_taken_port_shows_when_the_interface_goes_up", || async {
        let net = Net::new().unwrap();
        let Some(device) = device(&net, "kilo0").await else { return };
        let _taken = UdpSocket::bind("0.0.0.0:51820").unwrap();
        let plan = WireguardPlan { listen_port: 51820, ..WireguardPlan::default() };
        device.reconcile(&plan, &secret(1)).await.unwrap();
        let error =
            net.apply(&NetPlan { mtu: 1420, ..NetPlan::default() }, device.index()).await.unwrap_err();
        assert!(error.to_string().contains("--port"), "{error}");
    });
}

#[test]
fn a_deleted_interface_is_not_made_again_behind_our_back() {
    isolated("a_deleted_interface_is_not_made_again_behind_our_back", || async {
        let net = Net::new().unwrap();
        let Some(device) = device(&net, "kilo0").await else { return };
        let plan = WireguardPlan { listen_port: 51820, ..WireguardPlan::default() };
        assert!(links::delete(net.rtnl(), device.index()).await.unwrap());
        let error = device.reconcile(&plan, &secret(1)).await.unwrap_err();
        assert!(matches!(error, WireguardError::Vanished(_)), "{error}");
        assert!(!succeeds("ip link show kilo0"));
        // Re-created by a third party with another index, it is not ours either.
        sh("ip link add kilo0 type wireguard");
        let error = device.reconcile(&plan, &secret(1)).await.unwrap_err();
        assert!(matches!(error, WireguardError::Vanished(_)), "{error}");
        let found = ensure_device(net.rtnl(), "kilo0", WireguardMode::Auto, false, Path::new(NO_PROGRAM))
            .await
            .unwrap();
        assert!(!found.created);
    });
}
