//! Annotations of an entry, in two allocations however many there are: a tree of texts would be most of what
//! an agent holds per node.

use std::{cmp::Ordering, collections::BTreeMap};

use serde::{Deserialize, Serialize, Serializer};

/// Texts by name, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "BTreeMap<String, String>")]
pub struct Texts {
    /// Each name, followed by its text.
    all: Box<str>,
    /// Where each name and its text end, in bytes.
    ends: Box<[(u32, u32)]>,
}

impl Texts {
    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (mut from, mut to) = (0, self.ends.len());
        while from < to {
            let middle = from.midpoint(to);
            let (known, text) = self.pair(middle)?;
            match known.cmp(name) {
                Ordering::Less => from = middle + 1,
                Ordering::Equal => return Some(text),
                Ordering::Greater => to = middle,
            }
        }
        None
    }

    /// All names and texts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        (0..self.ends.len()).filter_map(|at| self.pair(at))
    }

    fn pair(&self, at: usize) -> Option<(&str, &str)> {
        let begin = at.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |(_, end)| *end);
        let (name, end) = *self.ends.get(at)?;
        let part = |from: u32, to: u32| self.all.get(from as usize..to as usize);
        part(begin, name).zip(part(name, end))
    }
}

impl From<BTreeMap<String, String>> for Texts {
    /// Leaves out what comes after 4 GiB; an object of the API server has room for some megabytes.
    fn from(texts: BTreeMap<String, String>) -> Self {
        let length = texts.iter().map(|(name, text)| name.len() + text.len()).sum();
        let (mut all, mut ends) = (String::with_capacity(length), Vec::with_capacity(texts.len()));
        for (name, text) in &texts {
            let name_end = u32::try_from(all.len() + name.len());
            let (Ok(name_end), Ok(end)) = (name_end, u32::try_from(all.len() + name.len() + text.len()))
            else {
                break;
            };
            all.extend([name.as_str(), text]);
            ends.push((name_end, end));
        }
        Self { all: all.into_boxed_str(), ends: ends.into_boxed_slice() }
    }
}

impl FromIterator<(String, String)> for Texts {
    /// Of equal names, the last one wins.
    fn from_iter<I: IntoIterator<Item = (String, String)>>(texts: I) -> Self {
        texts.into_iter().collect::<BTreeMap<_, _>>().into()
    }
}

impl Serialize for Texts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_are_found_and_written_as_a_map_has_them() {
        let text = r#"{"key":"k","zebra":"stripes","endpoint":"e"}"#;
        let texts: Texts = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&texts).unwrap(), r#"{"endpoint":"e","key":"k","zebra":"stripes"}"#);
        let pairs = [("key", "old"), ("endpoint", "e"), ("zebra", "stripes"), ("key", "k")];
        assert_eq!(texts, pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).into_iter().collect());
    }

    proptest! {
        #[test]
        fn a_map_of_any_texts_comes_back(map: BTreeMap<String, String>, other: String) {
            let texts = Texts::from(map.clone());
            let pairs = texts.iter().map(|(name, text)| (name.to_owned(), text.to_owned()));
            prop_assert_eq!(pairs.collect::<BTreeMap<_, _>>(), map.clone());
            for name in map.keys().chain([&other]) {
                prop_assert_eq!(texts.get(name), map.get(name).map(String::as_str));
            }
            prop_assert_eq!(texts.is_empty(), map.is_empty());
        }
    }
}
