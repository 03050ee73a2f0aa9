//! Listens to the packet drops of this node, through the pinned maps.

use std::{
    os::fd::{AsRawFd, RawFd},
    path::Path,
    time::Duration,
};

use aya::maps::{Array, Map, MapData, RingBuf};
use kilo_common::{
    drop_reasons::DropReason,
    event::{DropEvent, EVENT_BYTES, Monitor as State},
    map_table::name,
};
use nix::time::{ClockId, clock_gettime};

use super::{DataplaneError, pin_directory};

/// How long the programs keep reporting after the listener was killed.
const LEASE: Duration = Duration::from_secs(3);
/// How often [`Monitor::renew`] must be called.
pub const RENEW: Duration = Duration::from_secs(1);

/// The only listener of a node. The programs report drops only while there is one.
pub struct Monitor {
    ring: RingBuf<MapData>,
    state: Array<MapData, State>,
    reasons: u64,
    one_in: u32,
}

impl Monitor {
    /// Starts listening to these reasons (empty: all), to one event in `one_in` (0 and 1: every one).
    ///
    /// # Errors
    /// When there is no data path on this host, or somebody listens already.
    pub fn open(bpffs: &Path, reasons: &[DropReason], one_in: u32) -> Result<Self, DataplaneError> {
        let directory = pin_directory(bpffs);
        let ring = super::open_pin(&directory, name::EVENTS)?;
        let state = super::open_pin(&directory, name::MONITOR)?;
        let state = Array::<_, State>::try_from(Map::Array(state))?;
        // A ring has one reader. Checked before there is a listener of ours: dropping that would end the
        // other's lease.
        if state.get(&0, 0)?.deadline > ktime() {
            return Err(DataplaneError::Monitored);
        }
        let mut monitor = Self {
            ring: RingBuf::try_from(Map::RingBuf(ring))?,
            state,
            reasons: if reasons.is_empty() {
                u64::MAX
            } else {
                reasons.iter().fold(0, |bits, reason| bits | 1 << reason.index())
            },
            one_in,
        };
        // Discard what an earlier listener left.
        while monitor.ring.next().is_some() {}
        monitor.renew()?;
        Ok(monitor)
    }

    /// Extends the lease; to be called every [`RENEW`].
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn renew(&mut self) -> Result<(), DataplaneError> {
        let lease = u64::try_from(LEASE.as_nanos()).unwrap_or(u64::MAX);
        let state = State { deadline: ktime() + lease, reasons: self.reasons, one_in: self.one_in, pad: 0 };
        Ok(self.state.set(0, state, 0)?)
    }

    /// The next pending event; does not wait. The descriptor is readable when there is one.
    pub fn next_event(&mut self) -> Option<DropEvent> {
        while let Some(item) = self.ring.next() {
            if let Ok(bytes) = <&[u8; EVENT_BYTES]>::try_from(&*item) {
                return Some(DropEvent::from_bytes(bytes));
            }
        }
        None
    }
}

impl AsRawFd for Monitor {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // If this fails, the lease runs out.
        let _ = self.state.set(0, State::default(), 0);
    }
}

/// The programs' clock, `bpf_ktime_get_ns`, in nanoseconds.
pub fn ktime() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
