//! A list that suddenly misses many objects may be a broken one: it is
//! believed when the next list misses them too.

use std::collections::BTreeSet;

/// Smallest loss that needs confirmation.
const MANY: usize = 3;

/// Names that are known to exist.
#[derive(Debug, Default)]
pub struct Confirmed {
    names: BTreeSet<String>,
    doubted: bool,
}

impl Confirmed {
    /// Takes a complete list. False when it lost a third of what was known,
    /// and at least three names, for the first time.
    pub fn believes(&mut self, listed: BTreeSet<String>) -> bool {
        let lost = self.names.difference(&listed).count();
        if lost >= MANY && lost * 3 > self.names.len() && !self.doubted {
            self.doubted = true;
            return false;
        }
        self.doubted = false;
        self.names = listed;
        true
    }

    /// An object was added.
    pub fn add(&mut self, name: String) {
        self.names.insert(name);
    }

    /// An object was deleted, by an event of its own.
    pub fn remove(&mut self, name: &str) {
        self.names.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> BTreeSet<String> {
        (0..count).map(|n| n.to_string()).collect()
    }

    #[test]
    fn a_mass_loss_is_believed_the_second_time() {
        let mut confirmed = Confirmed::default();
        assert!(confirmed.believes(names(10)));
        assert!(!confirmed.believes(names(5)));
        assert!(confirmed.believes(names(5)));
    }

    #[test]
    fn a_few_lost_objects_need_no_confirmation() {
        let mut confirmed = Confirmed::default();
        assert!(confirmed.believes(names(10)));
        assert!(confirmed.believes(names(8)));
    }

    #[test]
    fn a_list_that_recovers_resets_the_doubt() {
        let mut confirmed = Confirmed::default();
        assert!(confirmed.believes(names(10)));
        assert!(!confirmed.believes(names(1)));
        assert!(confirmed.believes(names(10)));
        assert!(!confirmed.believes(names(1)));
    }
}
