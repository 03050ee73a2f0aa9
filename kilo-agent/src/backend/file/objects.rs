//! Node and Peer objects in YAML text, as kubectl prints them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize as _, de::DeserializeOwned};
use serde_json::Value;

use kilo_core::{objects::peer::Peer, wireguard::is_dns_name};

/// The Node and Peer objects of one YAML file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects {
    /// Nodes by name.
    pub nodes: BTreeMap<String, core::Node>,
    /// Peers by name.
    pub peers: BTreeMap<String, Peer>,
    /// What could not be read, and why.
    pub problems: Vec<String>,
}

impl Objects {
    /// Reads one or more documents; a `List` counts as its items. What cannot
    /// be read is a problem and hides nothing else.
    pub fn parse(text: &str) -> Self {
        let mut objects = Self::default();
        for (number, document) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
            match Value::deserialize(document) {
                Ok(Value::Null) => {}
                Ok(value) => objects.take(value, &format!("document {}", number + 1)),
                Err(error) => {
                    objects.problems.push(format!("document {}: {error}", number + 1));
                    // After a syntax error the rest of the file cannot be split into documents.
                    break;
                }
            }
        }
        objects
    }

    fn take(&mut self, mut value: Value, place: &str) {
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(ToOwned::to_owned);
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        if kind.as_deref() == Some("List") {
            let items = value.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take);
            for (number, item) in items.unwrap_or_default().into_iter().enumerate() {
                self.take(item, &format!("{place}, item {}", number + 1));
            }
            return;
        }
        let result = match (kind.as_deref(), name) {
            (Some("Node" | "Peer"), None) => Err("metadata.name is missing".to_owned()),
            (Some("Node" | "Peer"), Some(name)) if !is_dns_name(&name) => {
                Err(format!("metadata.name {name:?} is not a DNS name in lower case"))
            }
            (Some("Node"), Some(name)) => insert(&mut self.nodes, "Node", name, value),
            (Some("Peer"), Some(name)) => insert(&mut self.peers, "Peer", name, value),
            (Some(kind), _) => Err(format!("kind {kind} is neither Node nor Peer")),
            (None, _) => Err("it has no kind; write kind: Node or kind: Peer".to_owned()),
        };
        if let Err(problem) = result {
            self.problems.push(format!("{place}: {problem}"));
        }
    }

    /// Creates the objects of a file that cannot be read, with the reason.
    pub fn unreadable(problem: String) -> Self {
        Self { problems: vec![problem], ..Self::default() }
    }

    /// True when an object of `before` is not here.
    pub fn lacks_any_of(&self, before: &Self) -> bool {
        before.nodes.keys().any(|name| !self.nodes.contains_key(name))
            || before.peers.keys().any(|name| !self.peers.contains_key(name))
    }

    /// Keeps objects of `before` that are missing here while the file has problems.
    pub fn complete_from(&mut self, before: &Self) {
        if self.problems.is_empty() {
            return;
        }
        for (name, node) in &before.nodes {
            self.nodes.entry(name.clone()).or_insert_with(|| node.clone());
        }
        for (name, peer) in &before.peers {
            self.peers.entry(name.clone()).or_insert_with(|| peer.clone());
        }
    }
}

fn insert<T: DeserializeOwned>(
    into: &mut BTreeMap<String, T>,
    kind: &str,
    name: String,
    value: Value,
) -> Result<(), String> {
    let object = serde_json::from_value(value).map_err(|error| {
        let text = error.to_string();
        let hint = if text.contains("expected a string") { "; text such as \"25\" needs quotes" } else { "" };
        format!("{kind} {name}: {text}{hint}")
    })?;
    if into.contains_key(&name) {
        return Err(format!("{kind} {name} is defined twice; using the first"));
    }
    into.insert(name, object);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

    fn node(name: &str) -> String {
        format!("apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\nspec:\n  podCIDR: 10.42.1.0/24\n")
    }

    #[test]
    fn documents_and_lists_are_read() {
        let peer = format!(
            "kind: Peer\napiVersion: kilo.squat.ai/v1alpha1\nmetadata: {{name: p}}\n\
             spec: {{allowedIPs: [10.5.0.1/32], publicKey: \"{KEY}\"}}\n"
        );
        let list = "kind: List\nitems:\n- kind: Node\n  metadata: {name: c}\n";
        let objects = Objects::parse(&format!("---\n{}---\n---\n{peer}---\n{list}", node("a")));
        assert_eq!(objects.problems, Vec::<String>::new());
        assert_eq!(objects.nodes.keys().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(objects.peers.keys().collect::<Vec<_>>(), ["p"]);
        assert_eq!(Objects::parse(""), Objects::default());
    }

    #[test]
    fn each_wrong_object_is_named_and_hides_no_other() {
        let wrong = [
            ("kind: Pod\nmetadata: {name: x}\n", "Pod"),
            ("metadata: {name: x}\n", "kind"),
            ("kind: Node\n", "metadata.name"),
            ("kind: Node\nmetadata: {name: ../x}\n", "DNS name"),
            ("kind: Node\nmetadata: {name: x, annotations: {kilo.squat.ai/leader: true}}\n", "quotes"),
            ("kind: Peer\nmetadata: {name: x}\nspec: {allowedIPs: []}\n", "publicKey"),
            ("- 1\n", "kind"),
            ("7\n", "kind"),
        ];
        for (text, named) in wrong {
            let objects = Objects::parse(&format!("{}---\n{text}---\n{}", node("a"), node("b")));
            assert_eq!(objects.nodes.len(), 2, "{text}");
            assert_eq!(objects.problems.len(), 1, "{text}");
            assert!(objects.problems[0].contains(named), "{:?}", objects.problems);
            assert!(objects.problems[0].contains("document 2"), "{:?}", objects.problems);
        }
        let twice = Objects::parse(&format!("{}---\n{}", node("a"), node("a")));
        assert!(twice.problems[0].contains("twice"), "{:?}", twice.problems);
    }

    #[test]
    fn what_a_broken_file_no_longer_shows_stays_as_it_was() {
        let before = Objects::parse(&format!("{}---\n{}", node("a"), node("b")));
        let mut broken = Objects::parse(&format!("{}---\n{}---\n{{[", node("a"), node("c")));
        assert_eq!(broken.problems.len(), 1, "{:?}", broken.problems);
        broken.complete_from(&before);
        assert_eq!(broken.nodes.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
        let mut mended = Objects::parse(&node("a"));
        mended.complete_from(&before);
        assert_eq!(mended.nodes.len(), 1, "what a sound file does not show is gone");
    }
}
