//! Compares Graphviz files as graphs.

use std::collections::{BTreeMap, BTreeSet};

/// A DOT file as a graph: order, white space and spelling do not matter.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct Graph {
    attributes: BTreeMap<String, String>,
    /// Both ends sorted, with the attributes.
    edges: BTreeSet<(String, String, BTreeMap<String, String>)>,
    /// Name -> cluster and attributes.
    nodes: BTreeMap<String, (String, BTreeMap<String, String>)>,
    /// Cluster -> attributes.
    clusters: BTreeMap<String, BTreeMap<String, String>>,
}

impl Graph {
    pub fn parse(text: &str) -> Self {
        let tokens = tokens(text);
        let mut graph = Self::default();
        let mut cluster: Option<String> = None;
        let mut at = tokens.iter().position(|token| token == "{").unwrap() + 1;
        while at < tokens.len() {
            let token = tokens[at].as_str();
            let next = tokens.get(at + 1).map_or("", String::as_str);
            match (token, next) {
                ("subgraph", name) => {
                    graph.clusters.insert(name.to_owned(), BTreeMap::new());
                    cluster = Some(name.to_owned());
                    at += 3;
                }
                ("}", _) => {
                    cluster = None;
                    at += 1;
                }
                (";", _) => at += 1,
                (name, "=") => {
                    let value = tokens[at + 2].clone();
                    match &cluster {
                        Some(cluster) => {
                            graph.clusters.get_mut(cluster).unwrap().insert(name.to_owned(), value)
                        }
                        None => graph.attributes.insert(name.to_owned(), value),
                    };
                    at += 3;
                }
                (from, "->") => {
                    let to = tokens[at + 2].clone();
                    let (attributes, end) = attributes(&tokens, at + 3);
                    let (a, b) =
                        if from < to.as_str() { (from.to_owned(), to) } else { (to, from.to_owned()) };
                    graph.edges.insert((a, b, attributes));
                    at = end;
                }
                (name, "[") => {
                    let (attributes, end) = attributes(&tokens, at + 1);
                    graph.nodes.insert(name.to_owned(), (cluster.clone().unwrap_or_default(), attributes));
                    at = end;
                }
                other => panic!("DOT: {other:?}"),
            }
        }
        graph
    }
}

/// `[ a=b, c=d ]` from the bracket on; returns where it ends.
fn attributes(tokens: &[String], mut at: usize) -> (BTreeMap<String, String>, usize) {
    let mut attributes = BTreeMap::new();
    assert_eq!(tokens[at], "[");
    at += 1;
    while tokens[at] != "]" {
        if tokens[at] == "," {
            at += 1;
            continue;
        }
        let value = tokens[at + 2].replace("\\n", "\n").trim().to_owned();
        attributes.insert(tokens[at].clone(), value);
        at += 3;
    }
    (attributes, at + 1)
}

fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                let mut token = String::new();
                while let Some(c) = chars.next() {
                    match c {
                        '"' => break,
                        '\\' if chars.peek() == Some(&'"') => token.extend(chars.next()),
                        c => token.push(c),
                    }
                }
                tokens.push(token);
            }
            '-' if chars.peek() == Some(&'>') => {
                chars.next();
                tokens.push("->".to_owned());
            }
            '{' | '}' | '[' | ']' | ';' | ',' | '=' => tokens.push(c.to_string()),
            c if c.is_whitespace() => {}
            c => {
                let mut token = c.to_string();
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || matches!(c, '_' | '.')) {
                    token.push(c);
                }
                tokens.push(token);
            }
        }
    }
    tokens
}
