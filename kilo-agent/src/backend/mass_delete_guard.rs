//! A list that suddenly misses many objects may be broken, so those objects are kept until the next list
//! misses them too.

use std::collections::BTreeSet;

/// Smallest loss that needs confirmation.
const MANY: usize = 3;

/// Names that are known to exist, and those in doubt at the moment.
#[derive(Debug, Default)]
pub struct MassDeleteGuard {
    known: BTreeSet<String>,
    doubted: BTreeSet<String>,
}

impl MassDeleteGuard {
    /// Takes a complete list and returns the names to keep although they are missing from it; if there are
    /// any, request another list soon. A loss is doubted when it is more than a third of the known names and
    /// at least three; names in doubt that are still missing are really gone.
    pub fn list(&mut self, listed: &BTreeSet<String>) -> &BTreeSet<String> {
        let lost: BTreeSet<_> =
            self.known.difference(listed).filter(|name| !self.doubted.contains(*name)).cloned().collect();
        let many = lost.len() >= MANY && lost.len() * 3 > self.known.len();
        self.doubted = if many { lost } else { BTreeSet::new() };
        self.known = listed.union(&self.doubted).cloned().collect();
        &self.doubted
    }

    /// An object was added.
    pub fn add(&mut self, name: &str) {
        if !self.known.contains(name) {
            self.known.insert(name.to_owned());
        }
    }

    /// An object was deleted by an event.
    pub fn remove(&mut self, name: &str) {
        self.known.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(range: std::ops::Range<usize>) -> BTreeSet<String> {
        range.map(|n| n.to_string()).collect()
    }

    #[test]
    fn a_mass_loss_is_believed_the_second_time() {
        let mut guard = MassDeleteGuard::default();
        assert!(guard.list(&names(0..10)).is_empty());
        assert_eq!(*guard.list(&names(0..5)), names(5..10));
        assert!(guard.list(&names(0..5)).is_empty());
        assert_eq!(guard.known, names(0..5));
    }

    #[test]
    fn a_few_lost_objects_need_no_confirmation() {
        let mut guard = MassDeleteGuard::default();
        guard.list(&names(0..9));
        assert!(guard.list(&names(0..6)).is_empty(), "a third");
        assert!(guard.list(&names(0..4)).is_empty(), "two");
    }

    #[test]
    fn what_comes_back_is_not_lost_and_can_be_doubted_again() {
        let mut guard = MassDeleteGuard::default();
        guard.list(&names(0..10));
        assert_eq!(*guard.list(&names(0..1)), names(1..10));
        assert!(guard.list(&names(0..10)).is_empty());
        assert_eq!(*guard.list(&names(0..1)), names(1..10));
    }

    #[test]
    fn a_second_list_that_misses_others_is_doubted_for_those() {
        let mut guard = MassDeleteGuard::default();
        guard.list(&names(0..10));
        assert_eq!(*guard.list(&names(0..5)), names(5..10));
        assert_eq!(*guard.list(&names(5..10)), names(0..5));
        assert!(guard.list(&names(5..10)).is_empty());
    }

    #[test]
    fn deletions_by_event_are_not_doubted() {
        let mut guard = MassDeleteGuard::default();
        guard.list(&names(0..6));
        guard.add("6");
        for name in names(0..4) {
            guard.remove(&name);
        }
        assert!(guard.list(&names(4..7)).is_empty());
    }
}
