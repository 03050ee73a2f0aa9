//! Tracks Kilo's order of each location over time. When it names another leader among nodes that were there
//! before, for example because the annotation `leader` moves, the old leader goes on briefly: it hands over,
//! make before break, or leads in a term of its own.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kilo_core::{
    signal_id::{self, NodeId},
    topology::{Acting, Mesh, REPLACED_LEADER_TERM},
};

/// How long the old leader has to hand over; then Kilo's order counts, as without failover.
const STAYS_FOR: Duration = Duration::from_secs(10);
/// An order is settled after this time: nodes that start join one after the other.
const SETTLED: Duration = Duration::from_secs(5);

/// Kilo's order of one location.
#[derive(Clone, Debug)]
struct Order {
    first: NodeId,
    since: Instant,
    /// Capable nodes, and since when.
    nodes: BTreeMap<NodeId, Instant>,
    /// The node that led before, and until when it goes on.
    stays: Option<(NodeId, Instant)>,
}

/// Kilo's orders, by location.
#[derive(Clone, Debug, Default)]
pub struct Orders(BTreeMap<u64, Order>);

impl Orders {
    /// Observes a mesh with known gateways, and puts leaders that go on into `acting`. Returns whether there
    /// are any.
    pub fn observe(&mut self, mesh: &Mesh, acting: &mut Acting, now: Instant) -> bool {
        let mut any = false;
        let mut seen = BTreeMap::new();
        for (index, segment) in mesh.segments.iter().enumerate().filter(|(at, _)| mesh.fails_over(*at)) {
            let gateways = mesh.gateways_of(index);
            let Some(first) = gateways.ids.first().copied() else { continue };
            let location = signal_id::location(&segment.location);
            let capable = segment.members.iter().filter(|member| member.node.is_capable());
            let capable: Vec<NodeId> =
                capable.filter_map(|member| Some(signal_id::node(&member.node.key?))).collect();
            let order = self.0.remove(&location);
            let mut order =
                order.unwrap_or_else(|| Order { first, since: now, nodes: BTreeMap::new(), stays: None });
            order.update(first, &capable, now);
            if let Some((leader, _)) = order.stays
                && gateways.term.count() == 0
            {
                acting.locations.entry(location).or_default().leader = Some((REPLACED_LEADER_TERM, leader));
                any = true;
            }
            seen.insert(location, order);
        }
        self.0 = seen;
        any
    }
}

impl Order {
    fn update(&mut self, first: NodeId, capable: &[NodeId], now: Instant) {
        let for_long = |since: Instant| now.saturating_duration_since(since) >= SETTLED;
        if self.first != first {
            let was_there = self.nodes.get(&first).is_some_and(|since| for_long(*since));
            let led = self.stays.map_or(self.first, |(leader, _)| leader);
            if was_there && (for_long(self.since) || self.stays.is_some()) {
                self.stays = Some((led, now + STAYS_FOR));
            }
            (self.first, self.since) = (first, now);
        }
        let goes_on = |(leader, until): &(NodeId, Instant)| {
            *leader != first && capable.contains(leader) && now < *until
        };
        self.stays = self.stays.filter(goes_on);
        self.nodes.retain(|node, _| capable.contains(node));
        for node in capable {
            self.nodes.entry(*node).or_insert(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = 1;
    const B: NodeId = 2;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn who_led_goes_on_for_a_moment_when_the_order_changes_among_nodes_that_were_there() {
        let start = Instant::now();
        let new = || Order { first: A, since: start, nodes: BTreeMap::new(), stays: None };
        let mut order = new();
        order.update(A, &[A, B], start);
        order.update(B, &[A, B], at(start, 20));
        assert_eq!(order.stays, Some((A, at(start, 30))));
        order.update(B, &[A, B], at(start, 29));
        assert!(order.stays.is_some());
        order.update(B, &[A, B], at(start, 30));
        assert_eq!(order.stays, None, "it had its time");
        // A change back before that time counts as no change.
        let mut order = new();
        order.update(A, &[A, B], start);
        order.update(B, &[A, B], at(start, 20));
        order.update(A, &[A, B], at(start, 22));
        assert_eq!(order.stays, None);
    }

    #[test]
    fn kilos_order_counts_at_once_where_a_node_came_or_went() {
        let start = Instant::now();
        let new = || Order { first: A, since: start, nodes: BTreeMap::new(), stays: None };
        // Nodes start one after the other.
        let mut order = new();
        order.update(A, &[A], start);
        order.update(B, &[A, B], at(start, 2));
        assert_eq!(order.stays, None);
        // A node that joins later comes first.
        let mut order = new();
        order.update(A, &[A], start);
        order.update(B, &[A, B], at(start, 60));
        assert_eq!(order.stays, None);
        // The leader is declared dead, including while it goes on.
        let mut order = new();
        order.update(A, &[A, B], start);
        order.update(B, &[B], at(start, 20));
        assert_eq!(order.stays, None);
        let mut order = new();
        order.update(A, &[A, B], start);
        order.update(B, &[A, B], at(start, 20));
        order.update(B, &[B], at(start, 21));
        assert_eq!(order.stays, None);
    }
}
