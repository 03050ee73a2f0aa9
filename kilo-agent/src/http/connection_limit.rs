//! Limits open connections. When all places are taken, a new connection replaces the oldest one of the client
//! that has most: clients that hold on to their connections shut out only themselves. The node itself, whose
//! kubelet requests `/health`, has separate places.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// Places for clients on other hosts.
const ELSEWHERE: usize = 256;
/// Places for clients on this node.
const ON_NODE: usize = 32;

type Open = Arc<Mutex<BTreeMap<u64, (IpAddr, CancellationToken)>>>;

/// The connections of one server.
#[derive(Debug, Default)]
pub struct ConnectionLimit {
    elsewhere: Open,
    on_node: Open,
    next: u64,
}

/// A place for a connection, released on drop.
#[derive(Debug)]
pub struct Place {
    open: Open,
    number: u64,
    /// Cancelled when another connection takes the place.
    pub lost: CancellationToken,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl ConnectionLimit {
    /// Takes a place for a connection from `client` to the local address `own`.
    pub fn take(&mut self, client: SocketAddr, own: SocketAddr) -> Place {
        let [client, own] = [client.ip().to_canonical(), own.ip().to_canonical()];
        // A connection from this host to one of its addresses has that address as its source, too.
        let (open, most) = match client == own || client.is_loopback() {
            true => (&self.on_node, ON_NODE),
            false => (&self.elsewhere, ELSEWHERE),
        };
        let (number, lost) = (self.next, CancellationToken::new());
        self.next += 1;
        let mut held = open.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() >= most
            && let Some(oldest) = oldest_of_the_largest(&held)
            && let Some((_, place)) = held.remove(&oldest)
        {
            place.cancel();
        }
        held.insert(number, (client, lost.clone()));
        drop(held);
        Place { open: Arc::clone(open), number, lost }
    }
}

fn oldest_of_the_largest(held: &BTreeMap<u64, (IpAddr, CancellationToken)>) -> Option<u64> {
    let mut clients: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
    for (number, (client, _)) in held {
        clients.entry(*client).or_insert((0, *number)).0 += 1;
    }
    clients.into_values().max_by_key(|(count, _)| *count).map(|(_, oldest)| oldest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn who_holds_most_makes_room_and_the_node_keeps_its_own_places() {
        let (mut places, node) = (ConnectionLimit::default(), address("10.0.0.1:1107"));
        let scraper = places.take(address("10.0.0.9:1"), node);
        let greedy: Vec<Place> = (0..400).map(|_| places.take(address("10.0.0.8:1"), node)).collect();
        let lost = greedy.iter().filter(|place| place.lost.is_cancelled()).count();
        assert_eq!(lost, 400 - (ELSEWHERE - 1));
        assert!(greedy[..lost].iter().all(|place| place.lost.is_cancelled()), "the oldest ones");
        assert!(!scraper.lost.is_cancelled());
        let kubelet = places.take(node, node);
        let mapped = places.take(address("[::ffff:10.0.0.1]:5"), node);
        assert_eq!(places.on_node.lock().unwrap().len(), 2);
        drop((greedy, kubelet, mapped));
        assert_eq!(places.elsewhere.lock().unwrap().len(), 1);
        assert!(places.on_node.lock().unwrap().is_empty());
    }
}
