//! What routers say of the way to nodes: reports of the programs, kept for as
//! long as they may hold true.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use aya::maps::{Map, MapData, RingBuf};
use kilo_common::maps::{FAMILY_V6, PathMtu, name};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use super::DataplaneError;

/// How long a report holds (RFC 1191, section 6.3).
const LIFETIME: Duration = Duration::from_secs(600);
/// Below these no link may go: anything less is somebody's attempt to slow us
/// down (Linux's `min_pmtu`; RFC 8200, section 5).
const MIN_V4: u32 = 552;
const MIN_V6: u32 = 1280;

/// The smallest MTU reported towards each node, in bytes with the outer header.
#[derive(Clone, Debug, Default)]
pub struct PathMtus(Arc<Mutex<BTreeMap<IpAddr, (u32, Instant)>>>);

impl PathMtus {
    /// Takes a report; true when it says something new.
    pub fn learn(&self, report: &PathMtu, now: Instant) -> bool {
        let remote = if report.family == FAMILY_V6 {
            IpAddr::V6(Ipv6Addr::from(report.remote))
        } else {
            let [a, b, c, d, ..] = report.remote;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        };
        let mtu = report.mtu.max(if remote.is_ipv6() { MIN_V6 } else { MIN_V4 });
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match known.get_mut(&remote) {
            Some((held, since)) if mtu >= *held && now - *since < LIFETIME => false,
            _ => {
                known.insert(remote, (mtu, now));
                true
            }
        }
    }

    /// What holds now; older reports are forgotten.
    pub fn current(&self, now: Instant) -> BTreeMap<IpAddr, u32> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (_, since)| now - *since < LIFETIME);
        known.iter().map(|(remote, (mtu, _))| (*remote, *mtu)).collect()
    }
}

/// Reads reports for as long as the runtime lives, and notifies of new ones.
pub fn follow(directory: &Path, known: PathMtus, notify: Arc<Notify>) -> Result<(), DataplaneError> {
    let data = MapData::from_pin(directory.join(name::PATH_MTU))?;
    let ring = RingBuf::try_from(Map::RingBuf(data))?;
    // SAFETY: the ring owns its descriptor and always answers the same one.
    let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    let mut ring = ring.map_err(|error| DataplaneError::Pin {
        path: directory.join(name::PATH_MTU),
        source: error.into(),
    })?;
    tokio::spawn(async move {
        while let Ok(mut guard) = ring.readable_mut().await {
            while let Some(item) = guard.get_inner_mut().next() {
                if let Some(report) = parse(&item)
                    && known.learn(&report, Instant::now())
                {
                    tracing::info!(remote = ?report.remote, mtu = report.mtu, "a router carries less towards a node");
                    notify.notify_one();
                }
            }
            guard.clear_ready();
        }
    });
    Ok(())
}

fn parse(bytes: &[u8]) -> Option<PathMtu> {
    let (remote, rest) = bytes.split_first_chunk::<16>()?;
    let (family, rest) = rest.split_first_chunk::<4>()?;
    let (mtu, _) = rest.split_first_chunk::<4>()?;
    Some(PathMtu { remote: *remote, family: u32::from_ne_bytes(*family), mtu: u32::from_ne_bytes(*mtu) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(last: u8, mtu: u32) -> PathMtu {
        let mut remote = [0; 16];
        remote[..4].copy_from_slice(&[10, 0, 0, last]);
        PathMtu { remote, family: 4, mtu }
    }

    #[test]
    fn only_a_smaller_mtu_is_news_and_all_are_forgotten_in_time() {
        let (known, start) = (PathMtus::default(), Instant::now());
        let node = IpAddr::from([10, 0, 0, 1]);
        assert!(known.learn(&report(1, 1400), start));
        assert!(!known.learn(&report(1, 1450), start));
        assert!(known.learn(&report(1, 1300), start + Duration::from_secs(1)));
        assert_eq!(known.current(start + Duration::from_secs(2)), BTreeMap::from([(node, 1300)]));
        assert_eq!(known.current(start + LIFETIME + Duration::from_secs(2)), BTreeMap::new());
    }

    #[test]
    fn nobody_talks_an_mtu_below_the_minimum() {
        let (known, now) = (PathMtus::default(), Instant::now());
        known.learn(&report(1, 68), now);
        assert_eq!(known.current(now).values().copied().collect::<Vec<_>>(), [MIN_V4]);
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let written = report(7, 1234);
        let mut bytes = written.remote.to_vec();
        bytes.extend(written.family.to_ne_bytes());
        bytes.extend(written.mtu.to_ne_bytes());
        assert_eq!(parse(&bytes), Some(written));
        assert_eq!(parse(&bytes[..23]), None);
    }
}
