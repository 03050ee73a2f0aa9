//! What Kilo in Go leaves on a node that lost power or was killed, and the commands of docs/migration.md
//! that remove it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fs, path::Path};

use crate::netns::{isolated, sh, succeeds};

/// The commands below the table of Kilo's leftovers.
fn commands() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/migration.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, below) = page.split_once("| left by Kilo |").unwrap();
    let block = below.split("```").nth(1).unwrap();
    block.lines().filter_map(|line| line.strip_prefix("# ")).map(ToOwned::to_owned).collect()
}

#[test]
fn the_pages_commands_remove_what_kilo_left_and_nothing_else() {
    isolated("the_pages_commands_remove_what_kilo_left_and_nothing_else", || async {
        sh("touch /run/xtables.lock; ip link set lo up; ip link add eth0 type veth peer name eth0p; ip link set eth0 up
            ip address add 10.1.0.1/24 dev eth0");
        // Foreign rules, for instance the distribution's.
        sh("iptables -t nat -N OTHERS; iptables -t nat -A POSTROUTING -s 10.9.0.0/24 -j OTHERS
            iptables -t nat -A OTHERS -j MASQUERADE; iptables -A INPUT -s 192.0.2.9 -j DROP
            ip6tables -A INPUT -s 2001:db8::9 -j DROP; ip route add 10.8.0.0/24 via 10.1.0.8 table 8");
        let rules = || sh("iptables-save | grep '^-A'; ip6tables-save | grep '^-A'");
        let (others, others_routes) = (rules(), sh("ip -4 route show table all"));
        // Like Kilo's, except for the kind of device: not every kernel has IPIP.
        sh("ip link add tunl0 type veth peer name tunl0p; ip link set tunl0 up
            ip route add 10.42.2.0/24 via 10.1.0.2 dev tunl0 onlink table 1107
            iptables -t nat -N KILO-NAT; iptables -N KILO-IPIP; ip6tables -t nat -N KILO-NAT
            for i in iptables ip6tables; do
                $i -t nat -A POSTROUTING -m comment --comment 'Kilo: jump to KILO-NAT chain' -j KILO-NAT
                $i -t nat -A KILO-NAT -m comment --comment 'Kilo: NAT remaining packets' -j MASQUERADE
            done
            iptables -t nat -I KILO-NAT -d 10.42.0.0/16 -m comment --comment 'Kilo: known' -j RETURN
            iptables -I INPUT -p 4 -m comment --comment 'Kilo: jump to KILO-IPIP chain' -j KILO-IPIP
            iptables -A KILO-IPIP -s 10.1.0.2 -m comment --comment 'Kilo: allow IPIP traffic' -j ACCEPT
            iptables -A KILO-IPIP -m comment --comment 'Kilo: reject other IPIP traffic' -j DROP");
        assert!(rules().contains("KILO") && sh("ip route show table 1107").contains("10.42.2.0/24"));
        let commands = commands();
        assert_eq!(commands.len(), 2, "{commands:?}");
        for command in commands {
            sh(&command);
        }
        assert_eq!(rules(), others);
        assert_eq!(sh("iptables-save; ip6tables-save").matches("KILO").count(), 0, "no chain either");
        assert!(!succeeds("ip link show tunl0"));
        assert_eq!(sh("ip -4 route show table all"), others_routes);
    });
}
