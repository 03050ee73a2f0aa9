//! The maps of relays: ports of pairs, keys of messages, and the ring buffer of received messages.

use std::{collections::BTreeMap, path::Path};

use aya::{
    Pod,
    maps::{HashMap, Map, MapData, RingBuf},
};
use kilo_common::{
    map_table::name,
    relay::{Heard, Port, Sender},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    DataplaneError,
    maps::entries::{Difference, difference, gone},
    open_pin, pin_directory,
};

/// The maps of relays, with their content as this process has read or written it, without what programs
/// count.
pub struct RelayMaps {
    ports: HashMap<MapData, u32, Port>,
    keys: HashMap<MapData, u64, Sender>,
    held_ports: BTreeMap<u16, Port>,
    held_keys: BTreeMap<u64, [u64; 2]>,
    /// Number of the last write of a port ([`Port::written`]).
    written: u32,
    /// Every port is to be written, whether it differs or not.
    is_anew: bool,
}

impl std::fmt::Debug for RelayMaps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayMaps").field("ports", &self.held_ports.len()).finish_non_exhaustive()
    }
}

/// Maximum number of messages taken from the ring at once.
pub const BATCH: usize = 256;

/// The ring buffer of received messages, which allows one reader.
pub struct RelayRing(AsyncFd<RingBuf<MapData>>);

impl std::fmt::Debug for RelayRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RelayRing")
    }
}

impl RelayMaps {
    /// Opens the maps of this host's data path, with the content that an earlier agent left.
    ///
    /// # Errors
    /// When there is none, or no right to read it.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        let directory = pin_directory(bpffs);
        let map = |name| Ok::<_, DataplaneError>(Map::HashMap(open_pin(&directory, name)?));
        let ports = HashMap::try_from(map(name::RELAY)?)?;
        let keys = HashMap::try_from(map(name::RELAY_KEY)?)?;
        let mut maps = Self {
            ports,
            keys,
            held_ports: BTreeMap::new(),
            held_keys: BTreeMap::new(),
            // Not the number of a write by an earlier agent.
            written: rand::random(),
            // Routes may have changed unnoticed since that agent ended.
            is_anew: true,
        };
        maps.held_ports = maps.ports().iter().map(uncounted).collect();
        maps.held_keys = maps.keys.iter().flatten().map(|(id, sender)| (id, sender.key)).collect();
        Ok(maps)
    }

    /// Reads the ports, with the number of packets each has forwarded.
    pub fn ports(&self) -> BTreeMap<u16, Port> {
        let port = |(number, port)| Some((u16::try_from(number).ok()?, port));
        self.ports.iter().flatten().filter_map(port).collect()
    }

    /// Notes that routes have changed: after the next write of the ports, programs look up all routes again.
    pub const fn routes_changed(&mut self) {
        self.is_anew = true;
    }

    /// Whether routes have changed since the ports were written.
    #[must_use]
    pub const fn has_routes_changed(&self) -> bool {
        self.is_anew
    }

    /// Brings the ports to the desired content; returns the number of writes. Packet counts do not make a
    /// difference.
    ///
    /// # Errors
    /// When the map refuses a write.
    pub fn write_ports(&mut self, desired: &BTreeMap<u16, Port>) -> Result<usize, DataplaneError> {
        self.written = self.written.checked_add(1).unwrap_or(1);
        let (written, is_anew) = (self.written, self.is_anew);
        // A port that is written although nothing differs keeps its count.
        let counted = if is_anew { self.ports() } else { BTreeMap::new() };
        let mut changes = difference(&self.held_ports, desired.iter().map(uncounted));
        if is_anew {
            changes.write = desired.iter().map(uncounted).collect();
        }
        let row = |number: u16, port: Port| {
            let packets = counted.get(&number).map_or(0, |port| port.packets);
            Port { written, packets, ..port }
        };
        let writes = apply(&mut self.ports, &mut self.held_ports, changes, row)?;
        // A refused write does not get here, as it leaves some ports unchanged: the next one writes all of
        // them again.
        self.is_anew = false;
        Ok(writes)
    }

    /// Brings the keys to the desired content; returns the number of writes. What was received from a sender
    /// does not make a difference.
    ///
    /// # Errors
    /// When the map refuses a write.
    pub fn write_keys(&mut self, desired: &BTreeMap<u64, [u64; 2]>) -> Result<usize, DataplaneError> {
        let changes = difference(&self.held_keys, desired.iter().map(|(id, key)| (*id, *key)));
        apply(&mut self.keys, &mut self.held_keys, changes, |_, key| Sender::new(key))
    }
}

/// A port as the agent decides on it: without its packets, and without the number of its write.
fn uncounted((number, port): (&u16, &Port)) -> (u16, Port) {
    (*number, Port { packets: 0, written: 0, ..*port })
}

/// Writes these changes, and notes them in `held`; returns the number of writes. `row` makes the value of an
/// entry.
fn apply<K: Copy + Ord + Into<M>, H: Copy, M: Pod, V: Pod>(
    map: &mut HashMap<MapData, M, V>,
    held: &mut BTreeMap<K, H>,
    changes: Difference<K, H>,
    row: impl Fn(K, H) -> V,
) -> Result<usize, DataplaneError> {
    let writes = changes.write.len() + changes.remove.len();
    for key in changes.remove {
        gone(map.remove(&key.into()))?;
        held.remove(&key);
    }
    for (key, value) in changes.write {
        map.insert(key.into(), row(key, value), 0)?;
        held.insert(key, value);
    }
    Ok(writes)
}

impl RelayRing {
    /// Opens the ring of this host's data path. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        let directory = pin_directory(bpffs);
        let ring = RingBuf::try_from(Map::RingBuf(open_pin(&directory, name::RELAY_HEARD)?))?;
        // SAFETY: the ring owns its descriptor and always returns the same one.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        let path = directory.join(name::RELAY_HEARD);
        Ok(Self(ring.map_err(|error| DataplaneError::Pin { path, source: error.into() })?))
    }

    /// Waits for messages; returns at most [`BATCH`].
    ///
    /// # Errors
    /// When the runtime no longer watches the ring's descriptor.
    pub async fn heard(&mut self) -> std::io::Result<Vec<Heard>> {
        let mut guard = self.0.readable_mut().await?;
        let mut all = Vec::new();
        while all.len() < BATCH {
            let Some(item) = guard.get_inner_mut().next() else {
                guard.clear_ready();
                break;
            };
            all.extend(Heard::read(&item));
        }
        Ok(all)
    }
}
