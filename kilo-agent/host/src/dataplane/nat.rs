//! NAT GC: removes the entries of flows that have ended or gone silent. The table is an LRU hash, which
//! evicts the oldest entries and not the dead ones: without the GC, ports towards a busy destination would
//! stay taken.

use std::{
    collections::BTreeSet,
    net::Ipv6Addr,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData, MapError};
use ipnet::Ipv6Net;
use kilo_common::{
    map_table::{self, name},
    maps::{NAT_EGRESS, NAT_FRAGMENT_EGRESS, NAT_INGRESS, NatKey, NatValue},
    nat::{FRAGMENT_SECONDS, timeout::is_expired},
};

use super::{DataplaneError, batch, open_pin};

/// Time between two sweeps.
pub const PERIOD: Duration = Duration::from_secs(30);
/// Time between two sweeps while the table is more than half full.
pub const BUSY_PERIOD: Duration = Duration::from_secs(5);
/// How soon a flow that found no port, or no room in the table, triggers a sweep.
pub const PROMPT: Duration = Duration::from_secs(1);

/// What one sweep of the map `nat` has left and removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Entries left after the sweep.
    pub entries: usize,
    /// Entries that were removed.
    pub removed: usize,
}

impl Sweep {
    /// When the next sweep is due, if nothing happens before.
    pub const fn next(&self) -> Duration {
        if self.entries > map_table::NAT.size as usize / 2 { BUSY_PERIOD } else { PERIOD }
    }
}

/// Seconds of `CLOCK_MONOTONIC`, by which the programs date entries.
pub fn now() -> u32 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    time.ok().and_then(|time| u32::try_from(time.tv_sec()).ok()).unwrap_or(0)
}

/// Sweeps the table of flows.
#[derive(Debug)]
pub struct NatGc {
    table: HashMap<MapData, NatKey, NatValue>,
    /// The same table, for batch reads, which aya does not offer.
    fd: OwnedFd,
}

impl NatGc {
    /// Opens the table of the data path whose maps are pinned in `directory`.
    ///
    /// # Errors
    /// When there is none, or no right to read it.
    pub fn open(directory: &Path) -> Result<Self, DataplaneError> {
        let data = open_pin(directory, name::NAT)?;
        let fd = data.fd().as_fd().try_clone_to_owned().map_err(DataplaneError::Sweep)?;
        Ok(Self { table: HashMap::try_from(Map::LruHashMap(data))?, fd })
    }

    /// Removes what has expired at `now` (see [`now`]).
    ///
    /// # Errors
    /// When the table cannot be read or written.
    pub fn sweep(&mut self, now: u32) -> Result<Sweep, DataplaneError> {
        let mut entries = self.read()?;
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries.dedup_by_key(|(key, _)| *key);
        let mut removed = 0;
        for (key, value) in expired(&entries, now) {
            // A packet may have come since.
            match self.table.get(&key, 0) {
                Ok(present) if present.last_seen == value.last_seen => {}
                Ok(_) | Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(error.into()),
            }
            removed += usize::from(self.remove(&key)?);
        }
        Ok(Sweep { entries: entries.len() - removed, removed })
    }

    /// Removes the flows to these destinations (IPv4 as `::ffff:a.b.c.d`), both
    /// directions; returns how many entries.
    ///
    /// # Errors
    /// When the table cannot be read or written.
    pub fn forget(&mut self, destinations: &BTreeSet<Ipv6Net>) -> Result<usize, DataplaneError> {
        let known: BTreeSet<Ipv6Net> = destinations.iter().map(Ipv6Net::trunc).collect();
        let lengths: BTreeSet<u8> = known.iter().map(Ipv6Net::prefix_len).collect();
        let holds = |addr: [u8; 16]| {
            let net = |length| Ipv6Net::new(Ipv6Addr::from(addr), length).ok();
            lengths.iter().filter_map(|length| net(*length)).any(|net| known.contains(&net.trunc()))
        };
        let mut removed = 0;
        for (key, _) in self.read()? {
            let outgoing = matches!(key.direction, NAT_EGRESS | NAT_FRAGMENT_EGRESS);
            if holds(if outgoing { key.dst } else { key.src }) {
                removed += usize::from(self.remove(&key)?);
            }
        }
        Ok(removed)
    }

    /// Removes an entry; false when the kernel has evicted it meanwhile.
    fn remove(&mut self, key: &NatKey) -> Result<bool, DataplaneError> {
        match self.table.remove(key) {
            Ok(()) => Ok(true),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads all entries, some perhaps twice.
    fn read(&self) -> Result<Vec<(NatKey, NatValue)>, DataplaneError> {
        // SAFETY: the pin was checked for these layouts.
        unsafe { batch::read(self.fd.as_fd()) }.map_err(DataplaneError::Sweep)
    }
}

/// Pure: entries that have expired at `now`. `entries` are sorted by key.
fn expired(entries: &[(NatKey, NatValue)], now: u32) -> impl Iterator<Item = (NatKey, NatValue)> {
    entries.iter().copied().filter(move |(key, value)| {
        let partner = || {
            let key_of_partner = key.partner(&value.addr, value.port);
            let at = entries.binary_search_by_key(&key_of_partner, |(key, _)| *key).ok()?;
            let partner = &entries.get(at)?.1;
            // After an eviction the port may be another flow's.
            (partner.addr == if key.direction == NAT_EGRESS { key.src } else { key.dst }).then_some(partner)
        };
        match key.direction {
            NAT_EGRESS => is_expired(key.protocol, Some(value), partner(), now),
            NAT_INGRESS => is_expired(key.protocol, partner(), Some(value), now),
            _ => now.saturating_sub(value.last_seen) > FRAGMENT_SECONDS,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kilo_common::{
        maps::{NAT_FRAGMENT_EGRESS, NAT_SEEN},
        nat::{flow::mapped, timeout::seconds},
        packet::protocol,
    };

    const PUBLIC: [u8; 16] = mapped([192, 0, 2, 11]);

    /// Both entries of a UDP flow of that pod, last used at `out` and, when it was answered, `back`.
    fn flow(pod: u8, out: u32, back: Option<u32>) -> [(NatKey, NatValue); 2] {
        let key = NatKey {
            src: mapped([10, 42, 1, pod]),
            dst: mapped([198, 51, 100, 2]),
            src_port: [1, pod],
            dst_port: [0, 53],
            protocol: protocol::UDP,
            direction: NAT_EGRESS,
            pad: [0; 2],
        };
        let value = NatValue { addr: PUBLIC, port: [1, pod], tcp_flags: 0, flags: NAT_SEEN, last_seen: out };
        let seen = if back.is_some() { NAT_SEEN } else { 0 };
        let reply = NatValue {
            addr: key.src,
            port: key.src_port,
            tcp_flags: 0,
            flags: seen,
            last_seen: back.unwrap_or(out),
        };
        [(key, value), (key.partner(&PUBLIC, value.port), reply)]
    }

    fn sorted(flows: &[[(NatKey, NatValue); 2]]) -> Vec<(NatKey, NatValue)> {
        let mut all = flows.concat();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }

    #[test]
    fn both_halves_of_a_silent_flow_go_together_and_others_stay() {
        let now = 1000;
        let (old, young, answered) = (
            flow(1, now - seconds::UDP - 1, None),
            flow(2, now - seconds::UDP, None),
            // Only one direction still has packets: both halves stay.
            flow(3, now - seconds::UDP_STREAM - 50, Some(now - 1)),
        );
        let entries = sorted(&[old, young, answered]);
        let gone: BTreeSet<_> = expired(&entries, now).map(|(key, _)| key).collect();
        assert_eq!(gone, old.iter().map(|(key, _)| *key).collect());
    }

    #[test]
    fn a_half_whose_port_became_another_flows_expires_alone() {
        let now = 1000;
        let [_, mut reply] = flow(1, now, Some(now));
        let [out, _] = flow(2, now - seconds::UDP - 1, None);
        // The entry for replies to flow 2's port leads to another pod.
        reply.0 = out.0.partner(&PUBLIC, out.1.port);
        let entries = sorted(&[[out, reply]]);
        let gone: Vec<_> = expired(&entries, now).map(|(key, _)| key).collect();
        assert_eq!(gone, [out.0]);
    }

    #[test]
    fn fragments_are_soon_forgotten() {
        let now = 1000;
        let [(key, value), _] = flow(1, now, None);
        let key = NatKey { direction: NAT_FRAGMENT_EGRESS, ..key };
        let at = |last_seen| [(key, NatValue { last_seen, ..value })];
        assert_eq!(expired(&at(now - FRAGMENT_SECONDS), now).count(), 0);
        assert_eq!(expired(&at(now - FRAGMENT_SECONDS - 1), now).count(), 1);
    }
}
