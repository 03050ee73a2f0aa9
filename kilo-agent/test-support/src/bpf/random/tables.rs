//! Random tables.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use kilo_common::{
    lead::{Term, word},
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_GATEWAY, CONFIG_MASQUERADE, CONFIG_NATIVE, CONFIG_OFFERED, CONFIG_ONE_V4,
        CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, Config, DEVICE_BY_DESTINATION, DEVICE_MASQUERADE, Device,
        HOP_ACTING, HOP_FIRST_NODE, HOP_LOCAL, HOP_NONE, HOP_REMOTE, MASQ_EXCLUDE, MASQ_FORCE,
        MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT, NODE_GATEWAY, NODE_LED, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR,
        PREFIX_PODS_STEERED, PREFIX_ROUTE, PREFIX_SOURCE, PREFIX_VIA_WIREGUARD, PrefixValue,
    },
};
use kilo_core::{
    plan::{Hop, Tables, sender},
    settings::Tunnel,
};
use rand::RngExt as _;

use super::{
    super::{IFINDEX, PUBLIC, PUBLIC_V6, signals},
    KILO, OTHER_UPLINKS, PRIVATE_V4, Random, V4, V6, WIREGUARD_PORT, private,
};

impl Random {
    /// Flags for what may be sent to a prefix in cleartext.
    fn clear(&mut self) -> u32 {
        let steered = PREFIX_PODS_STEERED | PREFIX_HOST_STEERED;
        self.pick(&[
            0,
            0,
            PREFIX_HOST_STEERED,
            PREFIX_NEVER_CLEAR,
            PREFIX_PODS_STEERED,
            steered,
            PREFIX_NEVER_CLEAR | steered,
        ])
    }

    /// A word of `lead`: mostly this node's own WireGuard on the leader, and the first other node
    /// elsewhere.
    fn word(&mut self, leader: bool) -> u64 {
        let hop = match self.below(12) {
            0 => self.pick(&[HOP_NONE, HOP_LOCAL, HOP_REMOTE, HOP_ACTING, kilo_common::map_table::HOP.size]),
            1..=3 => HOP_FIRST_NODE + u32::try_from(self.below(3)).unwrap(),
            _ if leader => HOP_REMOTE,
            _ => HOP_FIRST_NODE,
        };
        // The map would keep a later term.
        word(Term::NONE, u16::try_from(hop).unwrap())
    }

    /// Tables of a node with up to three others in its location.
    pub fn tables(&mut self) -> Tables {
        let leader = self.chance(2);
        let v6_underlay = self.chance(3);
        let mut tables = Tables { lead: [0; 2].map(|_| self.word(leader)), ..Tables::default() };
        self.prefixes(&mut tables);
        self.hops(&mut tables, v6_underlay);
        self.senders(&mut tables, leader, v6_underlay);
        // Sometimes on a member, too, which must not encrypt nevertheless.
        if leader || self.chance(10) {
            tables.hop.insert(HOP_REMOTE, Hop::Wireguard);
        }
        self.masquerading(&mut tables);
        let one_v4 = self.chance(4);
        let several = self.chance(2);
        if several {
            self.several_addresses(&mut tables);
        }
        let offered = self.chance(2);
        if !offered {
            exclude_the_mesh(&mut tables);
        }
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        tables.config = Config {
            kilo_ifindex: KILO,
            flags: flag(leader, CONFIG_GATEWAY)
                | flag(self.chance(3), CONFIG_MASQUERADE)
                | flag(self.chance(2), CONFIG_NATIVE)
                | flag(several, CONFIG_SEVERAL_V4 | CONFIG_SEVERAL_V6)
                | flag(offered, CONFIG_OFFERED),
            nat_port_min: 32_768,
            // Sometimes there is only one port, or two.
            nat_port_max: if self.chance(4) { 32_768 + u16::from(self.chance(2)) } else { 60_999 },
            wireguard_port: WIREGUARD_PORT,
            wireguard_v4: [10, 5, 0, 1],
            wireguard_v6: "2001:db8::7".parse::<Ipv6Addr>().unwrap().octets(),
            control: [7; 16],
            vxlan_ifindex: flag(self.chance(2), IFINDEX),
            ipip_ifindex: flag(self.chance(2), IFINDEX),
            kilo_mtu: if self.chance(4) { 0 } else { self.0.random_range(60..1600) },
            private_v4: if v6_underlay && self.chance(2) { [0; 4] } else { PRIVATE_V4[0] },
            overlay_v4: if self.chance(4) { PRIVATE_V4[3] } else { [0; 4] },
            private_v6: match private(0, true) {
                IpAddr::V6(addr) if v6_underlay => addr.octets(),
                _ => [0; 16],
            },
            ..Config::default()
        };
        // Derived instead of drawn, so that the tables of the corpus stay the same.
        if !tables.config.kilo_mtu.is_multiple_of(3) {
            tables.config.flags |= CONFIG_ENCAPSULATED;
        }
        // Mostly /24, as pod CIDRs are.
        tables.config.direct_shift = [8, 8, 16, 6, 0][tables.config.kilo_mtu as usize % 5];
        if one_v4 && tables.config.private_v4 != [0; 4] {
            tables.config.flags |= CONFIG_ONE_V4;
            for ifindex in [IFINDEX].iter().chain(&OTHER_UPLINKS) {
                let device = tables.device.entry(*ifindex).or_default();
                (device.masq_v4, device.flags) = (PRIVATE_V4[0], DEVICE_MASQUERADE);
            }
        }
        tables
    }

    /// Prefixes: where they lead, and who may send from them.
    fn prefixes(&mut self, tables: &mut Tables) {
        let [first, second, third] = [0, 1, 2].map(|index| HOP_FIRST_NODE + index);
        let ids = [HOP_NONE, HOP_LOCAL, HOP_REMOTE, HOP_ACTING, first, second, third];
        for prefix in V4.iter().chain(&V6) {
            if self.chance(6) {
                continue;
            }
            let flags = self.pick(&[
                PREFIX_ROUTE | PREFIX_SOURCE,
                PREFIX_ROUTE | PREFIX_SOURCE,
                PREFIX_SOURCE,
                PREFIX_ROUTE,
                PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_VIA_WIREGUARD,
                0,
            ]);
            let flags = flags | self.clear();
            let hop = if self.chance(20) { kilo_common::map_table::HOP.size + 5 } else { self.pick(&ids) };
            tables.prefix.insert(prefix.parse::<IpNet>().unwrap().trunc(), PrefixValue { hop, flags });
        }
        if self.chance(4) {
            let (hop, flags) = (self.pick(&ids), PREFIX_ROUTE | self.clear());
            tables.prefix.insert("0.0.0.0/0".parse().unwrap(), PrefixValue { hop, flags });
        }
    }

    /// Hops of this node and the others, and flags for the host's own packets to them.
    fn hops(&mut self, tables: &mut Tables, v6_underlay: bool) {
        tables.hop.insert(HOP_LOCAL, Hop::Local);
        for index in 1..=3 {
            let id = HOP_FIRST_NODE + u32::try_from(index).unwrap() - 1;
            let hop = Hop::Node {
                tunnel: self.pick(&[Tunnel::None, Tunnel::Ipip, Tunnel::Ipip, Tunnel::Vxlan]),
                ifindex: if self.chance(4) { 7 } else { IFINDEX },
                mtu: if self.chance(4) { 0 } else { self.0.random_range(60..1600) },
                local: private(0, v6_underlay),
                // Two nodes may claim one address.
                remote: private(if self.chance(12) { self.below(3) + 1 } else { index }, v6_underlay),
            };
            if !self.chance(8) {
                tables.hop.insert(id, hop);
            }
            if !self.chance(3) {
                // The host itself sends there through its uplinks.
                let value = PrefixValue { hop: id, flags: PREFIX_SOURCE | self.clear() };
                tables.prefix.insert(IpNet::from(private(index, v6_underlay)), value);
            }
        }
    }

    /// Nodes that may send steered packets, and the keys of their signals.
    fn senders(&mut self, tables: &mut Tables, leader: bool, v6_underlay: bool) {
        // After all prefixes exist: a prefix within another reduces that one's sources.
        let cidrs: Vec<IpNet> = tables.prefix.keys().copied().collect();
        for index in 1..=3 {
            if !self.chance(8) {
                let id = HOP_FIRST_NODE + u32::try_from(index).unwrap() - 1;
                let mut flags = if index == 1 && !leader || self.chance(6) { NODE_GATEWAY } else { 0 };
                if self.chance(4) {
                    flags |= NODE_LED;
                }
                let mut sender = sender(&tables.prefix, id, flags, &cidrs);
                // Sometimes the node uses another interface, or this one is its second.
                sender.interfaces =
                    self.pick(&[[IFINDEX, 0, 0, 0], [IFINDEX, 0, 0, 0], [7, IFINDEX, 0, 0], [7, 8, 9, 10]]);
                tables.node.insert(private(index, v6_underlay), sender);
                if !self.chance(8) {
                    let key = signals::key(self, id);
                    tables.signal_key.insert(private(index, v6_underlay), key);
                }
                if self.chance(8) {
                    // Another node also claims the address of the next one.
                    tables.node.insert(private(1 + index % 3, v6_underlay), sender);
                }
            }
        }
    }

    /// Masqueraded sources and destinations, and each interface's addresses.
    fn masquerading(&mut self, tables: &mut Tables) {
        for prefix in ["8.0.1.0/24", "8.0.7.64/26", "fd00:0:86dd:1::/64", "fd00:0:86dd:2:8000::/65"] {
            tables.masq_src.insert(prefix.parse().unwrap(), self.pick(&[MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT]));
        }
        for prefix in ["8.0.0.0/16", "10.42.4.0/24", "10.5.0.1/32", "fd00:0:86dd::/48", "2001:db8::7/128"] {
            tables
                .masq_dst
                .insert(prefix.parse().unwrap(), self.pick(&[MASQ_EXCLUDE, MASQ_EXCLUDE, MASQ_FORCE]));
        }
        tables
            .device
            .insert(IFINDEX, Device { masq_v4: PUBLIC, masq_v6: PUBLIC_V6, flags: DEVICE_MASQUERADE });
        for ifindex in OTHER_UPLINKS {
            let masq_v4 = self.pick(&[PUBLIC, PRIVATE_V4[0], [203, 0, 113, 7], [0; 4]]);
            let masq_v6 = self.pick(&[PUBLIC_V6, [0x2a; 16], [0; 16]]);
            if !self.chance(4) {
                let flags = if self.chance(6) { 0 } else { DEVICE_MASQUERADE };
                tables.device.insert(ifindex, Device { masq_v4, masq_v6, flags });
            }
        }
        let masq_v4 = self.pick(&[PRIVATE_V4[0], [10, 4, 0, 1]]);
        tables.device.insert(KILO, Device { masq_v4, masq_v6: [0xfd; 16], flags: DEVICE_MASQUERADE });
    }

    /// An address of another uplink, and further addresses of this one towards some destinations.
    fn several_addresses(&mut self, tables: &mut Tables) {
        for (prefix, addr) in [
            ("8.0.0.0/16", "192.0.2.12"),
            ("10.0.0.0/8", "10.1.0.11"),
            ("10.42.4.0/25", "192.0.2.12"),
            ("198.51.100.0/24", "192.0.2.13"),
            ("fd00::/8", "fd00:1::11"),
            ("fd00:0:86dd:2::/64", "2001:db8::c"),
            ("2000::/3", "2001:db8::c"),
            ("::/1", "2001:db8::d"),
        ] {
            if !self.chance(3) {
                tables.masq_addr.insert((IFINDEX, prefix.parse().unwrap()), addr.parse().unwrap());
            }
        }
        let other = Device { masq_v4: [192, 0, 2, 200], masq_v6: PUBLIC_V6, flags: DEVICE_MASQUERADE };
        tables.device.insert(IFINDEX + 100, other);
        if let Some(device) = tables.device.get_mut(&IFINDEX) {
            device.flags |= DEVICE_BY_DESTINATION;
        }
    }
}

/// Where no location offers prefixes, nothing that must not leave in cleartext is masqueraded.
fn exclude_the_mesh(tables: &mut Tables) {
    let guarded = |value: &PrefixValue| value.flags & (PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED) != 0;
    let guarded = tables.prefix.iter().filter(|(_, value)| guarded(value)).map(|(net, _)| *net);
    let guarded: Vec<IpNet> = guarded.collect();
    let within = tables.masq_dst.keys().copied().filter(|net| guarded.iter().any(|of| of.contains(net)));
    let all: Vec<IpNet> = within.chain(guarded.iter().copied()).collect();
    for net in all {
        tables.masq_dst.insert(net, MASQ_EXCLUDE);
    }
}
