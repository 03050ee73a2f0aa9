//! Uplinks with several addresses, and several uplinks.

use std::{net::IpAddr, time::Duration};

use kilo_common::maps::{
    CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, DEVICE_BY_DESTINATION, DEVICE_MASQUERADE, Device,
};

use super::{Side, World, echo, frame, neighbour, ports, read, sides, tcp, udp};
use crate::bpf::{IFINDEX, PUBLIC, PUBLIC_V6, packet::PASS};
use crate::wait::time_passes;

/// Another address of the uplink in the side's family, and a destination that selects it.
fn other(side: &Side) -> (IpAddr, IpAddr) {
    if side.pod.is_ipv4() {
        ([10, 1, 0, 11].into(), [10, 1, 0, 99].into())
    } else {
        ("fd00:1::11".parse().unwrap(), "fd00:9::99".parse().unwrap())
    }
}

/// A world with two addresses of each family on the uplink.
fn several() -> Option<World> {
    let mut world = World::new()?;
    for (prefix, addr) in [("10.1.0.0/24", "10.1.0.11"), ("fc00::/7", "fd00:1::11")] {
        world.tables.masq_addr.insert((IFINDEX, prefix.parse().unwrap()), addr.parse().unwrap());
    }
    world.tables.config.flags |= CONFIG_SEVERAL_V4 | CONFIG_SEVERAL_V6;
    // The device with the programs is not the WireGuard device here.
    world.tables.config.kilo_ifindex = IFINDEX + 1;
    world.tables.device.get_mut(&IFINDEX).unwrap().flags |= DEVICE_BY_DESTINATION;
    world.dataplane.write(&world.tables).unwrap();
    Some(world)
}

#[test]
fn the_address_is_that_for_the_destination_and_answers_to_it_come_back() {
    let Some(mut world) = several() else { return };
    for side in sides() {
        let (addr, near) = other(&side);
        let pod = side.pod;
        for (to, seen_as) in [(near, addr), (side.outside, side.public)] {
            for (there, back) in [
                (udp(pod, to, (5000, 53), b"q"), udp(to, seen_as, (53, 5000), b"a")),
                (tcp(pod, to, (5001, 80), 2), tcp(to, seen_as, (80, 5001), 18)),
                (echo(pod, to, &side, side.echo, 7), echo(to, seen_as, &side, side.echo_reply, 7)),
            ] {
                for _ in 0..3 {
                    let out = world.out(&there);
                    assert_eq!((out.verdict, out.counted.as_slice()), (PASS, &["masquerade"][..]));
                    let seen = read(&out.bytes);
                    assert_eq!((seen.src, seen.ports), (seen_as, ports(&there)));
                    let back = world.back(&back);
                    assert_eq!(back.counted, ["unmasquerade"]);
                    assert_eq!(read(&back.bytes).dst, pod);
                }
            }
        }
    }
}

#[test]
fn the_hosts_own_flow_from_any_of_its_addresses_gives_way_to_a_pods() {
    let Some(mut world) = several() else { return };
    for side in sides() {
        let (addr, near) = other(&side);
        world.out(&tcp(side.pod, near, (5000, 443), 2));
        let out = world.out(&tcp(addr, near, (5000, 443), 2));
        assert_eq!((out.verdict, out.counted.len()), (PASS, 0));
        let seen = read(&out.bytes);
        assert_eq!(seen.src, addr);
        assert_ne!(seen.ports.0, 5000);
        for _ in 0..2 {
            let back = world.back(&tcp(near, addr, (443, seen.ports.0), 18));
            assert_eq!((read(&back.bytes).dst, read(&back.bytes).ports), (addr, (443, 5000)));
        }
        let free = tcp(addr, near, (5001, 443), 2);
        assert_eq!(world.out(&free).bytes, frame(&free));
    }
}

#[test]
fn a_flow_keeps_its_address_while_the_uplink_has_it_and_no_longer() {
    let Some(mut world) = several() else { return };
    for side in sides() {
        let (addr, near) = other(&side);
        let packet = udp(side.pod, near, (5000, 53), b"");
        assert_eq!(read(&world.out(&packet).bytes).src, addr);
        // Another address is selected now, but this one stays for another destination.
        let kept = world.tables.masq_addr.clone();
        let elsewhere = ipnet::IpNet::from(neighbour(near, 7));
        world.tables.masq_addr.retain(|(_, to), _| to.addr().is_ipv4() != near.is_ipv4());
        world.tables.masq_addr.insert((IFINDEX, elsewhere), addr);
        world.dataplane.write(&world.tables).unwrap();
        assert_eq!(read(&world.out(&packet).bytes).src, addr, "an established flow");
        let new = udp(side.pod, near, (5001, 53), b"");
        assert_eq!(read(&world.out(&new).bytes).src, side.public, "a new one");
        world.tables.masq_addr.retain(|(_, to), _| *to != elsewhere);
        world.dataplane.write(&world.tables).unwrap();
        time_passes(Duration::from_millis(1100), "a flow's address is looked up once a second");
        assert_eq!(read(&world.out(&packet).bytes).src, side.public, "the address is gone");
        world.tables.masq_addr = kept;
        world.dataplane.write(&world.tables).unwrap();
    }
}

#[test]
fn an_answer_by_another_interface_comes_back() {
    let Some(mut world) = World::new() else { return };
    world.tables.config.flags |= CONFIG_SEVERAL_V4 | CONFIG_SEVERAL_V6;
    // The device with the programs is not the WireGuard device here.
    world.tables.config.kilo_ifindex = IFINDEX + 1;
    let here = Device { masq_v4: PUBLIC, masq_v6: PUBLIC_V6, flags: DEVICE_MASQUERADE };
    let (mut v4, mut v6) = (PUBLIC, PUBLIC_V6);
    (v4[3], v6[15]) = (200, 200);
    let there = Device { masq_v4: v4, masq_v6: v6, ..here };
    let other = IFINDEX + 100;
    for side in sides() {
        for kind in 0..3 {
            world.tables.device = [(IFINDEX, here), (other, there)].into();
            world.dataplane.write(&world.tables).unwrap();
            let (out, back) = match kind {
                0 => (
                    udp(side.pod, side.outside, (5000, 53), b""),
                    udp(side.outside, side.public, (53, 5000), b""),
                ),
                1 => (
                    tcp(side.pod, side.outside, (5001, 80), 2),
                    tcp(side.outside, side.public, (80, 5001), 18),
                ),
                _ => (
                    echo(side.pod, side.outside, &side, side.echo, 7),
                    echo(side.outside, side.public, &side, side.echo_reply, 7),
                ),
            };
            assert_eq!(read(&world.out(&out).bytes).src, side.public);
            // The test's packets are now on the interface with the other address.
            world.tables.device = [(IFINDEX, there), (other, here)].into();
            world.dataplane.write(&world.tables).unwrap();
            for _ in 0..2 {
                let ran = world.back(&back);
                assert_eq!(ran.counted, ["unmasquerade"], "{kind}");
                assert_eq!(read(&ran.bytes).dst, side.pod);
            }
            let host = tcp(side.outside, side.public, (81, 5005), 2);
            assert_eq!(world.back(&host).bytes, frame(&host), "the host's own");
        }
    }
}
