//! The tables of docs/peer-resource.md and docs/node-slice-resource.md are made from the CRDs.

use kilo_core::objects::{peer::Peer, slices::NodeSlice};
use kube::CustomResourceExt as _;
use serde_json::Value;

use crate::docs_counters::check;

/// A row for each field below an object of the schema, with the path to it.
fn rows(object: &Value, path: &str, out: &mut String) {
    let required: Vec<_> =
        object["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in object["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let items = &field["items"];
        let kind = field["type"].as_str().unwrap_or_default();
        let kind = items["type"].as_str().map_or_else(|| kind.to_owned(), |of| format!("list of {of}s"));
        let needed = if required.contains(&name.as_str()) { "yes" } else { "no" };
        let text = field["description"].as_str().unwrap_or_default().replace('|', "\\|").replace('\n', " ");
        *out += &format!("| `{path}` | {kind} | {needed} | {text} |\n");
        rows(field, &path, out);
        rows(items, &format!("{path}[]"), out);
    }
}

#[test]
fn the_tables_of_the_peers_fields_are_the_crd() {
    let crd = serde_json::to_value(Peer::crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut text = String::new();
    for (part, heading) in [("spec", "You write"), ("status", "The agents write")] {
        text +=
            &format!("## {heading} `{part}`\n\n| field | type | required | meaning |\n|---|---|---|---|\n");
        rows(&schema["properties"][part], part, &mut text);
        text += "\n";
    }
    assert!(text.contains("| `spec.endpoint.dnsOrIP.dns` | string | no |"), "{text}");
    check("peer-resource.md", "peer fields", &text);
}

#[test]
fn the_table_of_the_slices_fields_is_the_crd() {
    let crd = serde_json::to_value(NodeSlice::crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut text = "| field | type | required | meaning |\n|---|---|---|---|\n".to_owned();
    rows(&schema["properties"]["spec"], "spec", &mut text);
    assert!(text.contains("| `spec.nodes[].podCIDRs` | list of strings | no |"), "{text}");
    check("node-slice-resource.md", "node slice fields", &text);
}
