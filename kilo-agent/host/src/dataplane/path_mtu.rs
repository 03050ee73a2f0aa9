//! Path MTUs towards nodes. Programs report ICMP errors about steered packets; the path is then probed, and
//! the result is kept for as long as it may hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use aya::maps::{Map, MapData, RingBuf};
use kilo_common::{
    map_table::name,
    maps::{FAMILY_V6, PathMtu},
};
use kilo_core::net::MIN_IPV6_MTU;
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use super::DataplaneError;
use crate::net::path_probe;

/// How long a probed path MTU is kept (RFC 1191, section 6.3).
const LIFETIME: Duration = Duration::from_secs(600);
/// Smallest path MTUs accepted: a smaller value is an attempt to slow this host down (Linux's `min_pmtu`; RFC
/// 8200, section 5).
const MIN_V4: u32 = 552;
const MIN_V6: u32 = MIN_IPV6_MTU;
/// Paths probed at a time. Further reports are dropped; they recur.
const ASKED_AT_A_TIME: usize = 16;

/// The smallest MTU found towards each node, in bytes with the outer header.
#[derive(Clone, Debug, Default)]
pub struct PathMtus(Arc<Mutex<Findings>>);

#[derive(Debug, Default)]
struct Findings {
    found: BTreeMap<IpAddr, (u32, Instant)>,
    /// Nodes whose path is being probed.
    asked: BTreeSet<IpAddr>,
}

impl PathMtus {
    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.0.lock()
    }

    /// MTUs that still hold; older ones are dropped.
    pub fn current(&self, now: Instant) -> BTreeMap<IpAddr, u32> {
        let mut findings = self.findings();
        findings.found.retain(|_, (_, since)| now - *since < LIFETIME);
        findings.found.iter().map(|(remote, (mtu, _))| (*remote, *mtu)).collect()
    }

    /// Records what a probe has found; true when that is less than what was known.
    fn learn(&self, remote: IpAddr, mtu: u32, now: Instant) -> bool {
        let mtu = mtu.max(if remote.is_ipv6() { MIN_V6 } else { MIN_V4 });
        let mut findings = self.findings();
        match findings.found.get_mut(&remote) {
            Some((held, since)) if mtu >= *held && now - *since < LIFETIME => false,
            _ => {
                findings.found.insert(remote, (mtu, now));
                true
            }
        }
    }

    /// True when the path is to be probed now; [`Self::answered`] must be called afterwards.
    fn ask(&self, remote: IpAddr) -> bool {
        let mut findings = self.findings();
        findings.asked.len() < ASKED_AT_A_TIME && findings.asked.insert(remote)
    }

    fn answered(&self, remote: IpAddr) {
        self.findings().asked.remove(&remote);
    }

    /// Probes whether the path really does not carry packets as large as the report says.
    async fn verify(self, remote: IpAddr, size: u32, notify: Arc<Notify>) {
        let carried = path_probe::smaller_than(size, remote).await;
        self.answered(remote);
        match carried {
            Ok(Some(mtu)) => {
                if self.learn(remote, mtu, Instant::now()) {
                    tracing::info!(%remote, mtu, "path MTU to a node decreased");
                    notify.notify_one();
                }
            }
            Ok(None) => tracing::debug!(
                %remote, size, "ignoring ICMP error: probing the path to the node did not confirm the smaller MTU"
            ),
            Err(error) => tracing::debug!(%remote, size, %error, "failed to probe the path to the node"),
        }
    }
}

/// Reads reports for as long as the runtime lives, and notifies when a path MTU changes.
pub fn follow(directory: &Path, known: PathMtus, notify: Arc<Notify>) -> Result<(), DataplaneError> {
    let data = MapData::from_pin(directory.join(name::PATH_MTU))?;
    let ring = RingBuf::try_from(Map::RingBuf(data))?;
    // SAFETY: the ring owns its descriptor and always returns the same one.
    let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    let mut ring = ring.map_err(|error| DataplaneError::Pin {
        path: directory.join(name::PATH_MTU),
        source: error.into(),
    })?;
    tokio::spawn(async move {
        while let Ok(mut guard) = ring.readable_mut().await {
            while let Some(item) = guard.get_inner_mut().next() {
                if let Some(report) = parse(&item)
                    && let remote = remote(&report)
                    && known.ask(remote)
                {
                    tokio::spawn(known.clone().verify(remote, report.size, Arc::clone(&notify)));
                }
            }
            guard.clear_ready();
        }
    });
    Ok(())
}

fn remote(report: &PathMtu) -> IpAddr {
    if report.family == FAMILY_V6 {
        return Ipv6Addr::from(report.remote).into();
    }
    let [a, b, c, d, ..] = report.remote;
    Ipv4Addr::new(a, b, c, d).into()
}

fn parse(bytes: &[u8]) -> Option<PathMtu> {
    let (remote, rest) = bytes.split_first_chunk::<16>()?;
    let (family, rest) = rest.split_first_chunk::<4>()?;
    let (size, _) = rest.split_first_chunk::<4>()?;
    Some(PathMtu { remote: *remote, family: u32::from_ne_bytes(*family), size: u32::from_ne_bytes(*size) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    #[test]
    fn only_a_smaller_mtu_is_news_and_all_are_forgotten_in_time() {
        let (known, start) = (PathMtus::default(), Instant::now());
        assert!(known.learn(NODE, 1400, start));
        assert!(!known.learn(NODE, 1450, start));
        assert!(known.learn(NODE, 1300, start + Duration::from_secs(1)));
        assert_eq!(known.current(start + Duration::from_secs(2)), BTreeMap::from([(NODE, 1300)]));
        assert_eq!(known.current(start + LIFETIME + Duration::from_secs(2)), BTreeMap::new());
    }

    #[test]
    fn nobody_talks_an_mtu_below_the_minimum() {
        let (known, now) = (PathMtus::default(), Instant::now());
        known.learn(NODE, 68, now);
        assert_eq!(known.current(now).values().copied().collect::<Vec<_>>(), [MIN_V4]);
    }

    #[test]
    fn a_path_is_asked_once_at_a_time_and_so_many_at_most() {
        let known = PathMtus::default();
        let node = |last: u8| IpAddr::from([10, 0, 1, last]);
        assert!(known.ask(NODE) && !known.ask(NODE));
        known.answered(NODE);
        assert!(known.ask(NODE));
        let asked = (0..100).filter(|last| known.ask(node(*last))).count();
        assert_eq!(asked, ASKED_AT_A_TIME - 1);
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&[10, 0, 0, 1]);
        let written = PathMtu { remote: octets, family: 4, size: 1234 };
        let mut bytes = written.remote.to_vec();
        bytes.extend(written.family.to_ne_bytes());
        bytes.extend(written.size.to_ne_bytes());
        assert_eq!(parse(&bytes), Some(written));
        assert_eq!(remote(&written), NODE);
        assert_eq!(parse(&bytes[..23]), None);
    }
}
