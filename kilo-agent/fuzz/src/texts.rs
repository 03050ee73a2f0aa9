//! Targets for the readers of text: annotations, Peer objects, WireGuard's formats, CNI configuration.

use std::{
    collections::BTreeMap,
    time::{Duration, UNIX_EPOCH},
};

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use kilo_agent::backend::file::Objects;
use kilo_core::{
    objects::{
        annotations::PREFIX,
        node,
        peer::{self as peers, InvalidPeer, Peer},
    },
    wireguard::{
        conf::Conf,
        is_dns_name,
        uapi::{SetRequest, decode_state, encode_state},
    },
};
use kilo_host::cni as cni_config;
use serde_json::{Value, json};

/// Most characters of an error message, however long its input is (200 are repeated, and some become
/// `\u{10ffff}`).
const LONGEST_MESSAGE: usize = 5_000;

/// No message may repeat this many consecutive characters of a key: a quarter of one in hexadecimal.
const SECRET: usize = 16;

/// A node's annotations, one `name=value` per line (and `podCIDR=`, `label=`): the node survives writing and
/// reading, and messages are short.
pub fn annotations(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let mut object = core::Node::default();
    let mut pod_cidrs = Vec::new();
    let mut written = BTreeMap::new();
    for line in text.lines() {
        match line.split_once('=').unwrap_or((line, "")) {
            ("podCIDR", value) => pod_cidrs.push(value.to_owned()),
            ("label", value) => {
                object.metadata.labels = Some(BTreeMap::from([("region".to_owned(), value.to_owned())]));
            }
            (name, value) => drop(written.insert(format!("{PREFIX}{name}"), value.to_owned())),
        }
    }
    object.metadata.name = Some("a".to_owned());
    object.metadata.annotations = Some(written);
    object.spec = Some(core::NodeSpec { pod_cidrs: Some(pod_cidrs), ..Default::default() });
    let (seen, problems) = node::from_object(&object, "region");
    for problem in problems {
        assert!(problem.chars().count() <= LONGEST_MESSAGE, "{problem}");
    }
    let again = node::to_object(&seen.node, seen.last_seen);
    assert_eq!(node::from_object(&again, "region"), (seen, Vec::new()));
}

/// A Peer object in JSON: it survives writing and reading, both as an object and as the mesh's peer.
pub fn peer(data: &[u8]) {
    let Ok(object) = serde_json::from_slice::<Peer>(data) else { return };
    let text = serde_json::to_vec(&object).unwrap();
    assert_eq!(serde_json::from_slice::<Peer>(&text).ok().as_ref(), Some(&object));
    match peers::from_object(&object) {
        Ok(peer) => {
            assert!(peer.allowed_ips.iter().all(|prefix| prefix.trunc() == *prefix));
            assert!(peer.endpoint.as_ref().is_none_or(|endpoint| endpoint.port > 0));
            assert_eq!(peers::from_object(&peers::to_object(&peer)), Ok(peer));
        }
        // These repeat fields that are not keys.
        Err(
            InvalidPeer::AllowedIp(_)
            | InvalidPeer::Control(_)
            | InvalidPeer::NeverRouted(..)
            | InvalidPeer::Host(_)
            | InvalidPeer::Unspecified(_),
        ) => {}
        Err(error) => {
            let secret = object.spec.preshared_key.as_deref().unwrap_or_default();
            assert!(!repeats(&error.to_string(), secret), "{error}");
        }
    }
}

/// Files of a directory: any text gives the same objects when it is parsed again, each under a valid name.
pub fn yaml(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let objects = Objects::parse(text);
    assert!(objects.nodes.keys().chain(objects.peers.keys()).all(|name| is_dns_name(name)));
    for (name, node) in &objects.nodes {
        assert_eq!(node.metadata.name.as_ref(), Some(name));
        node::from_object(node, "region");
    }
    let mut again = Objects::parse(text);
    assert_eq!(again, objects);
    again.complete_from(&objects);
    assert_eq!(again, objects);
}

/// True when `message` repeats a part of `text` that is long enough to be of
/// use to an attacker who looks for a key. Letters alone may be a misspelt name.
fn repeats(message: &str, text: &str) -> bool {
    let is_key = |c: char| c.is_ascii_alphanumeric() || c == '+' || c == '/';
    let long = text.split(|c| !is_key(c)).filter(|word| word.len() >= 32);
    long.flat_map(|word| word.as_bytes().windows(SECRET))
        .filter(|part| !part.iter().all(u8::is_ascii_alphabetic))
        .any(|part| str::from_utf8(part).is_ok_and(|part| message.contains(part)))
}

/// WireGuard's INI: a parsed configuration survives writing and reading, and no message holds a key.
pub fn conf(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    match text.parse::<Conf>() {
        Ok(conf) => assert_eq!(conf.to_ini().parse::<Conf>(), Ok(conf)),
        Err(error) => {
            let message = error.to_string();
            assert!(!repeats(&message, text) && message.len() <= LONGEST_MESSAGE, "{message}");
            assert!(error.line <= text.lines().count());
        }
    }
}

/// A CNI configuration list: the ranges become the node's prefixes, the rest stays, and a second call changes
/// nothing.
pub fn cni(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let cidrs = ["10.42.1.0/24", "fd00:42:1::/64"].map(|cidr| cidr.parse::<IpNet>().unwrap());
    for cidrs in [&cidrs[..1], &cidrs] {
        let Ok(Some(changed)) = cni_config::with_ranges(text, cidrs) else { continue };
        assert!(matches!(cni_config::with_ranges(&changed, cidrs), Ok(None)));
        let parsed = |text| serde_json::from_str::<Value>(text).unwrap_or_default();
        let (mut before, mut after) = (parsed(text), parsed(&changed));
        for ranges in take_ranges(&mut after).into_iter().flatten() {
            let subnets: Vec<_> =
                ranges.as_array().into_iter().flatten().map(|set| &set[0]["subnet"]).collect();
            let wanted: Vec<_> = cidrs.iter().map(|cidr| json!(cidr.to_string())).collect();
            assert_eq!(subnets, wanted.iter().collect::<Vec<_>>());
        }
        take_ranges(&mut before);
        assert_eq!(before, after);
    }
}

/// Removes the ranges of every plugin.
fn take_ranges(config: &mut Value) -> Vec<Option<Value>> {
    let plugins = config.get_mut("plugins").and_then(Value::as_array_mut).into_iter().flatten();
    let ipam = plugins.filter_map(|plugin| plugin.get_mut("ipam")?.as_object_mut());
    ipam.map(|ipam| ipam.remove("ranges")).collect()
}

/// WireGuard's configuration protocol, as request and as answer.
pub fn uapi(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    match SetRequest::decode(text.lines()) {
        Ok(request) => {
            let written = request.encode();
            assert_eq!(SetRequest::decode(written.lines().skip(1)), Ok(request));
        }
        Err(error) => assert!(!repeats(&error.to_string(), text), "{error}"),
    }
    let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    match decode_state(text, now) {
        Ok((state, errno)) => {
            let written = format!("{}errno={errno}\n\n", encode_state(&state, 0, now));
            assert_eq!(decode_state(&written, now), Ok((state, errno)));
        }
        Err(error) => assert!(!repeats(&error.to_string(), text), "{error}"),
    }
}
