//! The order in which slices are written, so that readers lose no node and no slice waits for ever.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kilo_core::objects::slices::{Entry, INDEX, NodeSliceSpec, Plan};

/// A slice, and its content; `None`: it is to be deleted.
pub(super) type Write = (String, Option<NodeSliceSpec>);

/// Of this many writes, one is not urgent: while nodes die and come back all the time, others wait, but not
/// for ever.
const URGENT_TURNS: usize = 4;

/// All writes of a plan. Slices with deaths and returns, for which others are waiting, go first unless a node
/// moves out of them, and of others those that have been waiting for longest: `since` says since when, and
/// `index` makes the index that names these slices.
pub(super) fn ordered(
    plan: Plan,
    old: &BTreeMap<String, Vec<Entry>>,
    since: &BTreeMap<String, Instant>,
    index: impl FnOnce(Vec<String>) -> NodeSliceSpec,
) -> Vec<Write> {
    let moving: BTreeSet<&str> = plan.gain.values().flatten().map(|entry| entry.name.as_str()).collect();
    let is_urgent = |(name, nodes): &(&String, &Vec<Entry>)| {
        let Some(old) = old.get(*name) else { return false };
        let stays = |entry: &Entry| {
            !moving.contains(entry.name.as_str()) || nodes.iter().any(|kept| kept.name == entry.name)
        };
        lives(old) != lives(nodes) && old.iter().all(stays)
    };
    let urgent: BTreeSet<String> =
        plan.others.iter().filter(is_urgent).map(|(name, _)| name.clone()).collect();
    let by_age = |slices: BTreeMap<String, Vec<Entry>>| {
        let mut slices: Vec<_> = slices.into_iter().collect();
        // The sort is stable: those that wait for equally long stay in order of their names.
        slices.sort_by_key(|(name, _)| since.get(name).copied());
        slices.into_iter().map(|(name, nodes)| (name, Some(NodeSliceSpec { nodes, index: None })))
    };
    let (urgent, others): (Vec<_>, Vec<_>) = by_age(plan.others).partition(|(name, _)| urgent.contains(name));
    let mut rest: Vec<Write> = by_age(plan.gain).collect();
    rest.extend(plan.names.map(|slices| (INDEX.to_owned(), Some(index(slices)))));
    rest.extend(others);
    rest.extend(plan.gone.into_iter().map(|name| (name, None)));
    in_turns(urgent, rest)
}

/// Names of the nodes that are alive.
fn lives(entries: &[Entry]) -> BTreeSet<&str> {
    entries.iter().filter(|entry| entry.alive).map(|entry| entry.name.as_str()).collect()
}

/// Urgent writes, and one of the rest in every [`URGENT_TURNS`].
fn in_turns(urgent: Vec<Write>, rest: Vec<Write>) -> Vec<Write> {
    let (mut urgent, mut rest) = (urgent.into_iter().peekable(), rest.into_iter());
    let mut writes = Vec::new();
    while urgent.peek().is_some() {
        writes.extend(urgent.by_ref().take(URGENT_TURNS - 1));
        writes.extend(rest.next());
    }
    writes.extend(rest);
    writes
}

/// What has not been written, and what must wait for it so that readers lose no node.
#[derive(Default)]
pub(super) struct Order {
    /// Nodes of slices that were not written.
    nodes: BTreeSet<String>,
    /// Whether the index was not written.
    index: bool,
}

impl Order {
    /// Notes that this was not written.
    pub(super) fn hold(&mut self, name: &str, content: Option<&NodeSliceSpec>) {
        self.index |= name == INDEX;
        self.nodes
            .extend(content.into_iter().flat_map(|content| &content.nodes).map(|entry| entry.name.clone()));
    }

    /// Whether this write would take a node out of a slice before it is elsewhere, or name or remove a slice
    /// too early. An index that names the slices that it names already (`named`) says only that a writer works.
    pub(super) fn is_held(
        &self,
        (name, content): (&str, Option<&NodeSliceSpec>),
        old: &BTreeMap<String, Vec<Entry>>,
        named: Option<&[String]>,
    ) -> bool {
        if name == INDEX {
            let wanted = content.and_then(|content| content.index.as_ref());
            let is_renewal = wanted.is_some_and(|index| named == Some(&index.slices[..]));
            return !is_renewal && !self.nodes.is_empty();
        }
        let new = content.map_or(&[][..], |content| &content.nodes[..]);
        let loses = |entry: &Entry| {
            self.nodes.contains(&entry.name) && !new.iter().any(|kept| kept.name == entry.name)
        };
        content.is_none() && self.index || old.get(name).is_some_and(|old| old.iter().any(loses))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use kilo_core::objects::slices::Index;

    use super::*;

    fn entry(name: &str, alive: bool) -> Entry {
        Entry { name: name.to_owned(), alive, ..Entry::default() }
    }

    fn slice(names: &[&str]) -> NodeSliceSpec {
        NodeSliceSpec { nodes: names.iter().map(|name| entry(name, true)).collect(), index: None }
    }

    fn index(slices: &[&str]) -> NodeSliceSpec {
        let slices = slices.iter().map(|name| (*name).to_owned()).collect();
        NodeSliceSpec { nodes: Vec::new(), index: Some(Index { slices, ..Index::default() }) }
    }

    #[test]
    fn a_slice_that_cannot_be_written_holds_up_what_would_lose_its_nodes_and_nothing_else() {
        let old: BTreeMap<_, _> =
            [("one", slice(&["a", "b"])), ("two", slice(&["c"])), ("three", slice(&["d"]))]
                .map(|(name, slice)| (name.to_owned(), slice.nodes))
                .into();
        let named = ["one", "three", "two"].map(String::from);
        let mut order = Order::default();
        let is_held = |order: &Order, name: &str, content: Option<&NodeSliceSpec>| {
            order.is_held((name, content), &old, Some(&named))
        };
        assert!(!is_held(&order, "two", None));
        // b moves to a slice whose write fails.
        order.hold("new", Some(&slice(&["b"])));
        let more = index(&["new", "one", "three", "two"]);
        assert!(is_held(&order, INDEX, Some(&more)), "it would name a slice that is missing");
        let same = index(&["one", "three", "two"]);
        assert!(!is_held(&order, INDEX, Some(&same)), "others must know that a writer works");
        assert!(is_held(&order, "one", Some(&slice(&["a"]))), "b would be nowhere");
        assert!(!is_held(&order, "one", Some(&slice(&["a", "b"]))));
        assert!(!is_held(&order, "two", Some(&slice(&[]))), "c has gone");
        assert!(!is_held(&order, "two", None));
        order.hold(INDEX, Some(&more));
        assert!(is_held(&order, "two", None), "the index still names it");
    }

    fn slices(all: &[(&str, &[(&str, bool)])]) -> BTreeMap<String, Vec<Entry>> {
        all.iter()
            .map(|(name, nodes)| {
                ((*name).to_owned(), nodes.iter().map(|(name, alive)| entry(name, *alive)).collect())
            })
            .collect()
    }

    fn names(plan: Plan, old: &BTreeMap<String, Vec<Entry>>, waited: &[(&str, u64)]) -> Vec<String> {
        let now = Instant::now() + Duration::from_mins(1);
        let since = waited.iter().map(|(name, seconds)| {
            ((*name).to_owned(), now.checked_sub(Duration::from_secs(*seconds)).unwrap())
        });
        let writes = ordered(plan, old, &since.collect(), |_| NodeSliceSpec::default());
        writes.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn deaths_go_first_unless_a_node_moves_and_others_by_how_long_they_have_waited() {
        let old = slices(&[
            ("changes", &[("a", true)]),
            ("dies", &[("b", true)]),
            ("dies-and-moves", &[("c", true), ("d", true)]),
            ("waits", &[("e", true)]),
            ("empty", &[("f", true)]),
        ]);
        let plan = Plan {
            gain: slices(&[("late", &[("d", true)]), ("more", &[("g", true)])]),
            names: Some(Vec::new()),
            others: slices(&[
                ("changes", &[("a", true)]),
                ("dies", &[("b", false)]),
                ("dies-and-moves", &[("c", false)]),
                ("waits", &[("e", true)]),
            ]),
            gone: vec!["empty".to_owned()],
        };
        let waited =
            [("changes", 1), ("dies", 0), ("dies-and-moves", 2), ("waits", 50), ("late", 1), ("more", 9)];
        assert_eq!(
            names(plan, &old, &waited),
            ["dies", "more", "late", INDEX, "waits", "dies-and-moves", "changes", "empty"]
        );
    }

    #[test]
    fn a_slice_without_deaths_does_not_wait_for_ever_where_others_have_some_in_each_round() {
        let name = |number: usize| format!("dies-{number:02}");
        let all: Vec<String> = (0..20).map(name).chain(["z".to_owned()]).collect();
        let with = |alive: bool| -> BTreeMap<_, _> {
            all.iter().map(|name| (name.clone(), vec![entry(name, alive || name == "z")])).collect()
        };
        let plan = Plan { others: with(false), ..Plan::default() };
        let writes = names(plan, &with(true), &[]);
        assert!(writes[..8].contains(&"z".to_owned()), "{writes:?}");
        assert_eq!(writes.len(), 21);
    }
}
