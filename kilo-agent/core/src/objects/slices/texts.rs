//! Annotations of an entry: sorted pairs, whose names are the table's own where it knows them. A tree of texts would
//! be most of what an agent holds of a node.

use std::{borrow::Cow, collections::BTreeMap};

use serde::{Deserialize, Serialize, Serializer};

use crate::objects::annotations::{ANNOTATIONS, PREFIX};

/// Texts by name, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "BTreeMap<String, Box<str>>")]
pub struct Texts(Box<[(Cow<'static, str>, Box<str>)]>);

impl Texts {
    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(known, _)| known.as_ref().cmp(name)).ok()?;
        self.0.get(at).map(|(_, text)| &**text)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (name.as_ref(), &**text))
    }
}

/// The table's own name, if it has one like this.
fn shared(name: String) -> Cow<'static, str> {
    let known =
        ANNOTATIONS.iter().find_map(|row| row.name.strip_prefix(PREFIX).filter(|known| **known == *name));
    known.map_or(Cow::Owned(name), Cow::Borrowed)
}

impl From<BTreeMap<String, Box<str>>> for Texts {
    fn from(texts: BTreeMap<String, Box<str>>) -> Self {
        Self(texts.into_iter().map(|(name, text)| (shared(name), text)).collect())
    }
}

impl FromIterator<(String, String)> for Texts {
    /// Of equal names the last counts.
    fn from_iter<I: IntoIterator<Item = (String, String)>>(texts: I) -> Self {
        let texts = texts.into_iter().map(|(name, text)| (name, text.into_boxed_str()));
        texts.collect::<BTreeMap<_, _>>().into()
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
    use super::*;

    #[test]
    fn texts_are_found_and_written_as_a_map_has_them() {
        let text = r#"{"key":"k","zebra":"stripes","endpoint":"e"}"#;
        let texts: Texts = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&texts).unwrap(), r#"{"endpoint":"e","key":"k","zebra":"stripes"}"#);
        assert_eq!(
            (texts.get("key"), texts.get("zebra"), texts.get("no")),
            (Some("k"), Some("stripes"), None)
        );
        let borrowed = texts.0.iter().filter(|(name, _)| matches!(name, Cow::Borrowed(_))).count();
        assert_eq!(borrowed, 2, "names of the table are not copied");
        let pairs = [("key", "old"), ("endpoint", "e"), ("zebra", "stripes"), ("key", "k")];
        assert_eq!(texts, pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).into_iter().collect());
    }
}
