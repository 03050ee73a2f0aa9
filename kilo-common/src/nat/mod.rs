//! Masquerading: who is translated, to which port, and what changes in the
//! packet (RFC 3022, RFC 4787, RFC 5508). Written once for both families.

pub mod flow;
pub mod inbound;
pub mod timeout;
pub mod transport;

use crate::{
    maps::{self, MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT, VXLAN_PORT},
    packet::protocol,
};

/// Candidate ports tried before a flow is refused.
pub const PORT_ATTEMPTS: u32 = 16;

/// Seconds after its first fragment within which a datagram's later ones are translated.
pub const FRAGMENT_SECONDS: u32 = 30;

/// Whether a packet is source-translated, from the values its source has in
/// `masq_src` and its destination in `masq_dst`.
#[inline(always)]
pub const fn is_masqueraded(source: Option<u32>, destination: Option<u32>) -> bool {
    match destination {
        Some(MASQ_EXCLUDE) => false,
        Some(MASQ_FORCE) => !matches!(source, Some(MASQ_SRC_EXEMPT)),
        _ => matches!(source, Some(MASQ_SRC_ALWAYS)),
    }
}

/// The port to try in round `attempt`: first the flow's own, then the range
/// from `start` upwards, wrapping; host byte order. `None` for ports no flow
/// of this protocol may have: WireGuard's and the tunnel's.
#[inline(always)]
pub const fn candidate_port(
    protocol: u8,
    own: u16,
    attempt: u32,
    start: u32,
    config: &maps::Config,
) -> Option<u16> {
    let port = if attempt == 0 {
        own
    } else {
        let (min, max) = (config.nat_port_min as u32, config.nat_port_max as u32);
        if max < min {
            return None;
        }
        (min + start.wrapping_add(attempt) % (max - min + 1)) as u16
    };
    if is_reserved(protocol, port, config) { None } else { Some(port) }
}

/// True for the ports of WireGuard and the tunnel, whose packets the kernel
/// takes without a socket that could be looked up everywhere.
#[inline(always)]
pub const fn is_reserved(protocol: u8, port: u16, config: &maps::Config) -> bool {
    protocol == protocol::UDP && (port == config.wireguard_port || port == VXLAN_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_excluded_destination_is_never_masqueraded() {
        for source in [None, Some(MASQ_SRC_ALWAYS), Some(MASQ_SRC_EXEMPT)] {
            assert!(!is_masqueraded(source, Some(MASQ_EXCLUDE)));
        }
    }

    #[test]
    fn a_forced_destination_is_masqueraded_unless_the_source_is_exempt() {
        assert!(is_masqueraded(None, Some(MASQ_FORCE)));
        assert!(!is_masqueraded(Some(MASQ_SRC_EXEMPT), Some(MASQ_FORCE)));
        assert!(!is_masqueraded(None, None));
        assert!(is_masqueraded(Some(MASQ_SRC_ALWAYS), None));
    }

    proptest! {
        #[test]
        fn every_port_of_a_small_range_is_tried(min in 1024u16..50_000, size in 1u16..16, start in any::<u32>()) {
            let config = maps::Config { nat_port_min: min, nat_port_max: min + size - 1, ..maps::Config::default() };
            let tried: std::collections::BTreeSet<_> = (1..PORT_ATTEMPTS)
                .filter_map(|attempt| candidate_port(protocol::UDP, 7, attempt, start, &config))
                .collect();
            prop_assert_eq!(tried, (min..min + size).collect());
        }
    }

    #[test]
    fn the_ports_of_wireguard_and_of_the_tunnel_are_never_chosen() {
        for port in [5, VXLAN_PORT] {
            let config = maps::Config {
                nat_port_min: port,
                nat_port_max: port,
                wireguard_port: 5,
                ..maps::Config::default()
            };
            assert_eq!(candidate_port(protocol::UDP, port, 0, 0, &config), None);
            assert_eq!(candidate_port(protocol::UDP, 9, 1, 0, &config), None);
            assert_eq!(
                candidate_port(protocol::TCP, port, 0, 0, &config),
                Some(port),
                "a TCP port is another"
            );
        }
    }
}
