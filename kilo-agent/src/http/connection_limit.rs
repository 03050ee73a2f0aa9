//! Limits open connections. When all slots are taken, a new connection replaces the oldest one of the client
//! that has most: clients that hold on to their connections shut out only themselves. The node itself, whose
//! kubelet requests `/health`, has separate slots.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Slots for clients on other hosts.
const ELSEWHERE: usize = 256;
/// Slots for clients on this node.
const ON_NODE: usize = 32;

type Open = Arc<Mutex<BTreeMap<u64, (IpAddr, CancellationToken)>>>;

/// The connections of one server.
#[derive(Debug, Default)]
pub struct ConnectionLimit {
    elsewhere: Open,
    on_node: Open,
    next: u64,
}

/// A slot for a connection, released on drop.
#[derive(Debug)]
pub struct ConnectionSlot {
    open: Open,
    number: u64,
    /// Cancelled when another connection takes the slot.
    pub lost: CancellationToken,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.open.lock().remove(&self.number);
    }
}

impl ConnectionLimit {
    /// Takes a slot for a connection from `client` to the local address `own`.
    pub fn take(&mut self, client: SocketAddr, own: SocketAddr) -> ConnectionSlot {
        let [client, own] = [client.ip().to_canonical(), own.ip().to_canonical()];
        // A connection from this host to one of its addresses has that address as its source, too.
        let (open, most) = match client == own || client.is_loopback() {
            true => (&self.on_node, ON_NODE),
            false => (&self.elsewhere, ELSEWHERE),
        };
        let (number, lost) = (self.next, CancellationToken::new());
        self.next += 1;
        let mut held = open.lock();
        if held.len() >= most
            && let Some(oldest) = oldest_of_the_largest(&held)
            && let Some((_, replaced)) = held.remove(&oldest)
        {
            replaced.cancel();
        }
        held.insert(number, (client, lost.clone()));
        drop(held);
        ConnectionSlot { open: Arc::clone(open), number, lost }
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
    fn who_holds_most_makes_room_and_the_node_keeps_its_own_slots() {
        let (mut limit, node) = (ConnectionLimit::default(), address("10.0.0.1:1107"));
        let scraper = limit.take(address("10.0.0.9:1"), node);
        let greedy: Vec<ConnectionSlot> = (0..400).map(|_| limit.take(address("10.0.0.8:1"), node)).collect();
        let lost = greedy.iter().filter(|slot| slot.lost.is_cancelled()).count();
        assert_eq!(lost, 400 - (ELSEWHERE - 1));
        assert!(greedy[..lost].iter().all(|slot| slot.lost.is_cancelled()), "the oldest ones");
        assert!(!scraper.lost.is_cancelled());
        let kubelet = limit.take(node, node);
        let mapped = limit.take(address("[::ffff:10.0.0.1]:5"), node);
        assert_eq!(limit.on_node.lock().len(), 2);
        drop((greedy, kubelet, mapped));
        assert_eq!(limit.elsewhere.lock().len(), 1);
        assert!(limit.on_node.lock().is_empty());
    }
}
