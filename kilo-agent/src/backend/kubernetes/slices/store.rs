//! What slices say, in the cache that snapshots are made of.

use std::{collections::BTreeMap, sync::Arc};

use kilo_core::{objects::CheckedIn, objects::slices::Entry};

use super::{Context, SeenNode, see_entry};
use crate::backend::kubernetes::cache::Urgency;

/// Everything that slices say instead of what was known; the own node as its object says.
pub(super) fn replace(context: &Context, own: Option<SeenNode<CheckedIn>>) -> BTreeMap<String, Arc<Entry>> {
    let shown = entries(context);
    let list = shown.values().map(|entry| see_entry(entry, &context.label)).chain(own).collect();
    context.shared.change(|cache| cache.nodes.replace(list, &std::collections::BTreeSet::new()));
    shown
}

/// What has changed since that was shown.
pub(super) fn show(context: &Context, shown: &mut BTreeMap<String, Arc<Entry>>) {
    let now = entries(context);
    let is_known = |name: &String, entry: &Arc<Entry>| {
        shown.get(name).is_some_and(|known| Arc::ptr_eq(known, entry) || known == entry)
    };
    let news: Vec<_> = now.iter().filter(|(name, entry)| !is_known(name, entry)).collect();
    let gone: Vec<_> = shown.keys().filter(|name| !now.contains_key(*name)).collect();
    if news.is_empty() && gone.is_empty() {
        return;
    }
    context.shared.change(|cache| {
        let mut urgency = Urgency::Never;
        for name in gone {
            urgency = urgency.max(cache.nodes.remove(name));
        }
        for (_, entry) in news {
            urgency = urgency.max(cache.nodes.put(see_entry(entry, &context.label)));
        }
        urgency
    });
    *shown = now;
}

/// All nodes of slices but the own one.
fn entries(context: &Context) -> BTreeMap<String, Arc<Entry>> {
    let seen = context.seen();
    let (nodes, twice) = seen.set.nodes();
    context.report.wrong(seen.set.bad(), twice);
    let others = nodes.into_iter().filter(|(name, _)| **name != context.hostname);
    others.map(|(name, entry)| (name.to_owned(), Arc::clone(entry))).collect()
}
