//! Marks members that this gateway leads (`NODE_LED`) between two reconciles: packets of a member that
//! follows it must not be passed on to another gateway.

use std::{collections::BTreeSet, net::IpAddr, path::Path};

use aya::maps::{HashMap, Map, MapData};
use kilo_common::{
    map_table::name,
    maps::{NODE_LED, NodeValue},
};

use super::{
    DataplaneError,
    maps::{SenderLock, entries::gone},
    open_pin,
};

/// `BPF_EXIST` (include/uapi/linux/bpf.h): a node that a reconcile has removed meanwhile must not come back as an
/// accepted sender.
const EXIST: u64 = 2;

/// The sender maps `node_v4` and `node_v6`, to mark members this gateway leads.
pub struct Led {
    v4: HashMap<MapData, [u8; 4], NodeValue>,
    v6: HashMap<MapData, [u8; 16], NodeValue>,
    senders: SenderLock,
}

impl Led {
    /// Opens the maps that are pinned in `directory`.
    pub(super) fn of(directory: &Path, senders: SenderLock) -> Result<Self, DataplaneError> {
        let map = |name| Ok::<_, DataplaneError>(Map::HashMap(open_pin(directory, name)?));
        let (v4, v6) = (map(name::NODE_V4)?, map(name::NODE_V6)?);
        Ok(Self { v4: HashMap::try_from(v4)?, v6: HashMap::try_from(v6)?, senders })
    }

    /// Private addresses of the members marked as led by this gateway.
    pub fn read(&self) -> BTreeSet<IpAddr> {
        let is_led = |value: &NodeValue| value.flags & NODE_LED != 0;
        let v4 = self.v4.iter().flatten().filter(|(_, value)| is_led(value));
        let v6 = self.v6.iter().flatten().filter(|(_, value)| is_led(value));
        v4.map(|(address, _)| IpAddr::from(address)).chain(v6.map(|(address, _)| address.into())).collect()
    }

    /// Sets or clears the mark of one node, if it is known.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn mark(&mut self, address: IpAddr, is_led: bool) -> Result<(), DataplaneError> {
        let marked = |value: NodeValue| {
            let flags = if is_led { value.flags | NODE_LED } else { value.flags & !NODE_LED };
            (flags != value.flags).then_some(NodeValue { flags, ..value })
        };
        let _locked = self.senders.lock();
        match address {
            IpAddr::V4(address) => {
                let key = address.octets();
                if let Some(value) = self.v4.get(&key, 0).ok().and_then(marked) {
                    gone(self.v4.insert(key, value, EXIST))?;
                }
            }
            IpAddr::V6(address) => {
                let key = address.octets();
                if let Some(value) = self.v6.get(&key, 0).ok().and_then(marked) {
                    gone(self.v6.insert(key, value, EXIST))?;
                }
            }
        }
        Ok(())
    }
}
