//! A real `kg` on hosts with uplinks other than one Ethernet interface with an address.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::until;

use std::{fs, time::Duration};

use cluster::metrics;
use netns::{Agent, isolated, sh, succeeds};

const LIMIT: Duration = Duration::from_secs(30);

fn kg() -> Agent {
    let words = ["--backend", "file", "--backend-dir", "/run/cluster", "--hostname", "n1", "--cni=false"];
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kg"));
    Agent(command.args(words).args(["--resync-period", "1s", "--log-level", "warn"]).spawn().unwrap())
}

fn mtu(interface: &str) -> Option<u32> {
    fs::read_to_string(format!("/sys/class/net/{interface}/mtu")).ok()?.trim().parse().ok()
}

#[test]
fn a_default_route_through_kilo0_does_not_lower_its_mtu() {
    isolated("a_default_route_through_kilo0_does_not_lower_its_mtu", || async {
        cluster::prepare();
        // DHCP clients set a metric; a route without one wins.
        sh("ip route del default; ip route add default via 10.1.0.1 dev eth0 metric 100");
        let _agent = kg();
        until("kilo0 has the MTU of the uplink less the overhead", LIMIT, || mtu("kilo0") == Some(1420));
        cluster::write_peer("0.0.0.0/0");
        let leads = || succeeds("ip route show default dev kilo0 | grep -q default");
        until("the default route leads to the peer", LIMIT, leads);
        let reconciles = || metrics().get("kilo_reconciles_total").copied().unwrap_or(0);
        let before = reconciles();
        // If the new route counted as the uplink's, each reconcile would shrink the MTU by the overhead.
        until("it is reconciled several times", LIMIT, || reconciles() > before + 3);
        assert_eq!(mtu("kilo0"), Some(1420));
        // It still follows the uplink.
        sh("ip link set eth0 mtu 1400");
        until("kilo0 follows the uplink", LIMIT, || mtu("kilo0") == Some(1320));
    });
}

#[test]
fn a_node_whose_address_is_on_loopback_gets_its_programs_on_unnumbered_uplinks() {
    isolated("a_node_whose_address_is_on_loopback_gets_its_programs_on_unnumbered_uplinks", || async {
        cluster::prepare();
        // Routing daemons do this without addresses on links (RFC 5549).
        sh("ip address flush dev eth0 scope global; ip address add 10.1.0.11/32 dev lo
            ip -4 route add default src 10.1.0.11 via inet6 fe80::1 dev eth0 onlink");
        let _agent = kg();
        let index = |name: &str| nix::net::if_::if_nametoindex(name).unwrap();
        let tcx = |program: &str, name: &str| {
            let pin = format!("/sys/fs/bpf/kilo/links/{program}_{}", index(name));
            let direction = if program == "lan_ingress" { "ingress" } else { "egress" };
            succeeds(&format!("test -e {pin} || tc filter show dev {name} {direction} | grep -q {program}"))
        };
        until("eth0 has the programs", LIMIT, || tcx("lan_ingress", "eth0") && tcx("uplink_egress", "eth0"));
        assert!(!tcx("lan_ingress", "lo") && !tcx("uplink_egress", "lo"), "nothing arrives on loopback");
        let tables = kilo_host::dataplane::read_tables(std::path::Path::new("/sys/fs/bpf")).unwrap();
        assert_eq!(tables.device[&index("eth0")].masq_v4, [10, 1, 0, 11]);
        assert_eq!(tables.config.private_v4, [10, 1, 0, 11]);
        // Another uplink has no link-layer header.
        sh("ip tuntap add dev tun0 mode tun; ip link set tun0 up; ip address add 192.0.2.7/32 dev tun0");
        let pinned = |program: &str| {
            succeeds(&format!("test -e /sys/fs/bpf/kilo/links/{program}_{} ", index("tun0")))
                || succeeds(&format!("tc filter show dev tun0 {} | grep -q {program}", &program[3..]))
        };
        until("tun0 has its programs", LIMIT, || pinned("l3_ingress") && pinned("l3_egress"));
    });
}
