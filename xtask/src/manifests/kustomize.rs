//! An overlay for each variant: its difference from the base, as a JSON patch (RFC 6902).

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_yaml_ng::{Mapping, Value};

use super::HEADER;

/// Files of `overlays/NAME`, which turns `base` into `text`.
pub fn overlay(name: &str, about: &str, base: &str, text: &str) -> Result<BTreeMap<String, String>> {
    let common = documents(base)?;
    let mut patches = Vec::new();
    let mut added = Vec::new();
    for (key, (written, wanted)) in documents(text)? {
        match common.get(&key) {
            Some((_, there)) => {
                let mut operations = Vec::new();
                difference(there, &wanted, "", &mut operations);
                if !operations.is_empty() {
                    patches.push((key, operations));
                }
            }
            None => added.push(written),
        }
    }
    let mut kustomization = format!(
        "{HEADER}# {about} The same as kilo-{name}.yaml with crds.yaml.\n\
         apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - ../../base\n"
    );
    let mut files = BTreeMap::new();
    if !added.is_empty() {
        kustomization += "  - objects.yaml\n";
        files.insert("objects.yaml".to_owned(), format!("{HEADER}---\n{}", added.join("---\n")));
    }
    if !patches.is_empty() {
        kustomization += "patches:\n";
    }
    for ((kind, object), operations) in patches {
        let file = format!("patch-{}.yaml", kind.to_lowercase());
        kustomization +=
            &format!("  - path: {file}\n    target:\n      kind: {kind}\n      name: {object}\n");
        let text = serde_yaml_ng::to_string(&operations)?;
        files.insert(file, format!("{HEADER}# kilo-{name}.yaml says why.\n{text}"));
    }
    files.insert("kustomization.yaml".to_owned(), kustomization);
    Ok(files.into_iter().map(|(file, text)| (format!("overlays/{name}/{file}"), text)).collect())
}

/// Kind and name.
type Key = (String, String);

/// Objects of a YAML stream, each with its text.
fn documents(text: &str) -> Result<BTreeMap<Key, (String, Value)>> {
    let mut documents = BTreeMap::new();
    for document in text.split("\n---\n").skip(1) {
        let document = format!("{}\n", document.trim_end());
        let value: Value = serde_yaml_ng::from_str(&document)?;
        let text =
            |value: &Value| value.as_str().map(ToOwned::to_owned).context("an object without kind or name");
        documents.insert((text(&value["kind"])?, text(&value["metadata"]["name"])?), (document, value));
    }
    Ok(documents)
}

/// Operations that turn `old` into `new`, in the order in which to apply them.
fn difference(old: &Value, new: &Value, path: &str, operations: &mut Vec<Value>) {
    match (old, new) {
        _ if old == new => {}
        (Value::Mapping(old), Value::Mapping(new)) => of_mappings(old, new, path, operations),
        (Value::Sequence(old), Value::Sequence(new)) if keeps_order(old, new) => {
            let mut kept = old.iter().peekable();
            for (index, item) in new.iter().enumerate() {
                let path = format!("{path}/{index}");
                match kept.next_if(|kept| is_same_item(kept, item)) {
                    Some(before) => difference(before, item, &path, operations),
                    None => operations.push(operation("add", &path, Some(item))),
                }
            }
        }
        _ => operations.push(operation("replace", path, Some(new))),
    }
}

fn of_mappings(old: &Mapping, new: &Mapping, path: &str, operations: &mut Vec<Value>) {
    let at = |key: &Value| {
        let key = key.as_str().unwrap_or_default().replace('~', "~0").replace('/', "~1");
        format!("{path}/{key}")
    };
    for (key, _) in old.iter().filter(|(key, _)| !new.contains_key(key)) {
        operations.push(operation("remove", &at(key), None));
    }
    for (key, value) in new {
        match old.get(key) {
            Some(before) => difference(before, value, &at(key), operations),
            None => operations.push(operation("add", &at(key), Some(value))),
        }
    }
}

/// Whether the items of `old` are all in `new`, in their order.
fn keeps_order(old: &[Value], new: &[Value]) -> bool {
    let mut items = new.iter();
    old.iter().all(|before| items.any(|item| is_same_item(before, item)))
}

/// Whether both are the same list item, changed or not.
fn is_same_item(one: &Value, other: &Value) -> bool {
    match (one.get("name"), other.get("name")) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

fn operation(op: &str, path: &str, value: Option<&Value>) -> Value {
    let mut fields = Mapping::new();
    fields.insert("op".into(), op.into());
    fields.insert("path".into(), path.into());
    fields.extend(value.map(|value| ("value".into(), value.clone())));
    Value::Mapping(fields)
}
