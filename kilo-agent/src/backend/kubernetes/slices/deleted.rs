//! Which slices were deleted last, for a writer that waits for its own writes to appear.

use std::collections::BTreeMap;

/// More than any writer waits for. Where somebody creates and deletes slices all the time, the oldest go.
const MOST: usize = 1000;

/// Versions at which objects were last deleted.
#[derive(Default)]
pub(super) struct Deleted(BTreeMap<String, u64>);

impl Deleted {
    /// When an object of this name was last deleted, if it has not been created since.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    pub fn insert(&mut self, name: String, version: u64) {
        self.0.insert(name, version);
        if self.0.len() > MOST {
            let oldest = self.0.iter().min_by_key(|(_, version)| **version).map(|(name, _)| name.clone());
            oldest.map(|name| self.0.remove(&name));
        }
    }

    /// The object exists again.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_deletions_are_held_however_many_there_are() {
        let mut deleted = Deleted::default();
        for number in 0..3 * MOST as u64 {
            deleted.insert(format!("forged-{number}"), number);
        }
        assert_eq!(deleted.0.len(), MOST);
        assert_eq!(deleted.get("forged-0"), None);
        assert_eq!(deleted.get("forged-2999"), Some(2999));
        deleted.remove("forged-2999");
        assert_eq!(deleted.get("forged-2999"), None);
    }
}
