//! A real `kg` checks that its programs stay on their hooks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::{stays, until};

use std::{fs, process::Command, time::Duration};

use netns::{Agent, isolated, sh, succeeds};

fn start(attach: &str) -> Agent {
    sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/cluster; mount -t sysfs sys /sys; \
        mount -t bpf bpf /sys/fs/bpf; ip link set lo up; \
        ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
        ip address add 10.1.0.11/24 dev eth0; ip route add default via 10.1.0.1 dev eth0");
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: {podCIDRs: [10.42.1.0/24]}\n";
    fs::write("/run/cluster/n1.yaml", node).unwrap();
    let agent = Command::new(env!("CARGO_BIN_EXE_kg"))
        .args(["--backend", "file", "--backend-dir", "/run/cluster", "--hostname", "n1", "--cni=false"])
        // Only events and the check of the hooks may trigger a reconcile.
        .args(["--resync-period", "1h", "--attach", attach])
        .spawn()
        .unwrap();
    Agent(agent)
}

fn metric(name: &str) -> Option<u64> {
    cluster::metrics().get(name).copied()
}

#[test]
fn a_tcx_link_that_somebody_removed_is_back_within_five_seconds_and_counted() {
    isolated("a_tcx_link_that_somebody_removed_is_back_within_five_seconds_and_counted", || async {
        let _agent = start("auto");
        let attached = || {
            succeeds(
                "bpftool net show dev eth0 2>/dev/null | grep -q lan_ingress || ls /sys/fs/bpf/kilo/links/lan_ingress_*",
            )
        };
        until("the program is attached", Duration::from_secs(20), attached);
        if !succeeds("ls /sys/fs/bpf/kilo/links/lan_ingress_*") {
            println!("kilo-skip: this kernel has no TCX");
            return;
        }
        until("the agent has put everything right", Duration::from_secs(20), || cluster::has_done(&[]));
        assert_eq!(metric("kilo_reattached_total"), Some(0));
        sh("rm /sys/fs/bpf/kilo/links/lan_ingress_*");
        let pinned = || succeeds("ls /sys/fs/bpf/kilo/links/lan_ingress_*");
        println!("back after {:?}", until("the link is back", Duration::from_secs(5), pinned));
        until("it is counted", Duration::from_secs(1), || metric("kilo_reattached_total") == Some(1));
    });
}

#[test]
fn a_filter_or_qdisc_that_somebody_removed_is_back_at_once_and_counted() {
    isolated("a_filter_or_qdisc_that_somebody_removed_is_back_at_once_and_counted", || async {
        let _agent = start("clsact");
        let ingress = || succeeds("tc filter show dev eth0 ingress | grep -q lan_ingress");
        let egress = || succeeds("tc filter show dev eth0 egress | grep -q uplink_egress");
        until("the filters are there", Duration::from_secs(20), || ingress() && egress());
        until("the agent has put everything right", Duration::from_secs(20), || cluster::has_done(&[]));
        sh("tc filter del dev eth0 ingress prio 27495");
        println!("filter back after {:?}", until("the filter is back", Duration::from_secs(2), ingress));
        until("it is counted", Duration::from_secs(1), || metric("kilo_reattached_total") == Some(1));
        sh("tc qdisc del dev eth0 clsact");
        let back = until("both filters are back", Duration::from_secs(2), || ingress() && egress());
        println!("qdisc and filters back after {back:?}");
        until("they are counted", Duration::from_secs(1), || metric("kilo_reattached_total") == Some(3));
        let writes = metric("kilo_writes_total");
        stays("looking at the hooks writes nothing", Duration::from_secs(5), || {
            metric("kilo_writes_total") == writes
        });
    });
}
