//! Garbage in each field of Node and Peer objects: the problem names the field and valid values, and
//! everything else counts as before.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Output},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kilo_agent::backend::{Backend as _, file::FileBackend};
use kilo_core::{
    objects::{InternalIpBy, ObjectRef, Snapshot, annotations::PREFIX},
    topology::Node,
    wireguard::key::PublicKey,
};
use serde_json::{Value, json};

const LABEL: &str = "topology.kubernetes.io/region";
const KEY: PublicKey = PublicKey([9; 32]);

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A ready node with every annotation and field set.
fn node(name: &str, number: u8) -> Value {
    let annotations = json!({
        "force-endpoint": format!("192.0.2.{number}:51820"), "force-internal-ip": format!("10.1.0.{number}/24"),
        "leader": "", "location": "here", "persistent-keepalive": "25",
        "allowed-location-ips": "192.168.7.0/24,192.168.8.0/24",
        "endpoint": "198.51.100.1:1", "internal-ip": "10.9.0.1/24", "key": PublicKey([number; 32]).to_string(),
        "last-seen": now().to_string(), "wireguard-ip": "10.4.0.1/16", "granularity": "location",
        "cni-compatibility-ip": "10.8.0.1/32",
        "discovered-endpoints": format!(r#"{{"{KEY}":{{"IP":"192.0.2.77","Port":5,"Zone":""}}}}"#),
    });
    let annotations: serde_json::Map<_, _> = annotations
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, value)| (format!("{PREFIX}{name}"), value.clone()))
        .collect();
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "annotations": annotations },
            "spec": { "podCIDR": format!("10.42.{number}.0/24") } })
}

fn peer(name: &str, number: usize) -> Value {
    json!({ "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name },
            "spec": { "allowedIPs": [format!("10.5.0.{number}/32")], "publicKey": KEY.to_string() } })
}

fn write(directory: &Path, objects: &[Value]) {
    let mut text = String::new();
    for object in objects {
        writeln!(text, "---\n{}", serde_yaml_ng::to_string(object).unwrap()).unwrap();
    }
    fs::write(directory.join("cluster.yaml"), text).unwrap();
}

async fn read(objects: &[Value]) -> Arc<Snapshot> {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), objects);
    let backend = FileBackend::start(directory.path(), LABEL).await.unwrap();
    Arc::clone(&backend.watch().borrow())
}

/// An annotation, a bad value for it, parts of the problem's text, and the effect on a sound node.
type Case = (&'static str, &'static str, &'static [&'static str], fn(&mut Node));

const ANNOTATIONS: &[Case] = &[
    ("force-endpoint", "Non sense:1", &["Non sense", "192.0.2.1:51820", "DNS name"], own_endpoint),
    ("force-endpoint", "nonsense", &["no port", "nonsense:51820"], own_endpoint),
    ("force-endpoint", "192.0.2.1", &["192.0.2.1:51820"], own_endpoint),
    ("force-endpoint", "192.0.2.1:0", &["from 1 to 65535"], own_endpoint),
    ("force-endpoint", "192.0.2.1:65536", &["from 1 to 65535"], own_endpoint),
    ("force-endpoint", "2001:db8::1:51820", &["[2001:db8::1]:51820"], own_endpoint),
    ("force-endpoint", "under_score.example.com:1", &["DNS name"], own_endpoint),
    ("force-internal-ip", "10.1.0.7", &["10.1.0.7", "10.1.0.2/24", "- for a node without"], own_internal_ip),
    ("force-internal-ip", "10.1.0.7/33", &["10.1.0.2/24"], own_internal_ip),
    ("force-internal-ip", "none", &["10.1.0.2/24"], own_internal_ip),
    ("persistent-keepalive", "25s", &["25s", "seconds, 0 to 65535"], no_keepalive),
    ("persistent-keepalive", "-1", &["seconds, 0 to 65535"], no_keepalive),
    ("persistent-keepalive", "65536", &["seconds, 0 to 65535"], no_keepalive),
    ("persistent-keepalive", "", &["seconds, 0 to 65535"], no_keepalive),
    ("allowed-location-ips", "192.168.7.0/24,x", &["\"x\"", "commas", "192.168.7.0/24"], one_location_ip),
    ("allowed-location-ips", "192.168.7.0/24;192.168.8.0/24", &["commas"], no_location_ip),
    ("endpoint", "rubbish", &["rubbish"], nothing),
    ("internal-ip", "rubbish", &["rubbish"], nothing),
    ("key", "short", &["short", "base64 of 32 bytes", "agent"], |node| node.key = None),
    ("last-seen", "yesterday", &["yesterday", "agent"], nothing),
    ("wireguard-ip", "10.4.0.1", &["10.4.0.1", "agent"], |node| node.wireguard_ip = None),
    ("granularity", "cluster", &["cluster", "location, full, cross"], |node| node.granularity = None),
    ("cni-compatibility-ip", "x", &["\"x\"", "agent"], |node| node.cni_compatibility_ip = None),
    ("discovered-endpoints", "[1", &["agent"], not_discovered),
    ("discovered-endpoints", r#"{"x":{"IP":"1.2.3.4","Port":5}}"#, &["\"x\"", "32 bytes"], not_discovered),
];

fn nothing(_: &mut Node) {}

fn own_endpoint(node: &mut Node) {
    node.endpoint = "198.51.100.1:1".parse().ok();
    node.endpoint_forced = false;
}

fn own_internal_ip(node: &mut Node) {
    node.internal_ip = "10.9.0.1/24".parse().ok();
    node.internal_ip_by = InternalIpBy::Agent;
}

fn no_keepalive(node: &mut Node) {
    node.persistent_keepalive = 0;
}

fn one_location_ip(node: &mut Node) {
    node.allowed_location_ips.truncate(1);
}

fn no_location_ip(node: &mut Node) {
    node.allowed_location_ips.clear();
}

fn not_discovered(node: &mut Node) {
    node.discovered_endpoints.clear();
}

#[tokio::test]
async fn rubbish_in_any_annotation_is_named_and_nothing_else_about_the_node_is_lost() {
    let sound = read(&[node("a", 1), peer("p", 1)]).await;
    assert!(sound.problems.is_empty(), "{:?}", sound.problems);
    assert_eq!(sound.peers.len(), 1);
    for (annotation, rubbish, wanted, change) in ANNOTATIONS {
        let mut bad = node("a", 1);
        let name = format!("{PREFIX}{annotation}");
        bad["metadata"]["annotations"][&name] = json!(rubbish);
        if matches!(*annotation, "endpoint" | "internal-ip") {
            // Considered only where no value is forced.
            let forced = format!("{PREFIX}force-{annotation}");
            bad["metadata"]["annotations"].as_object_mut().unwrap().remove(&forced);
        }
        let mut expected = sound.nodes["a"].clone();
        let last_seen = bad["metadata"]["annotations"][format!("{PREFIX}last-seen")]
            .as_str()
            .and_then(|text| text.parse::<i64>().ok())
            .unwrap_or_default();
        match *annotation {
            "endpoint" => (expected.endpoint, expected.endpoint_forced) = (None, false),
            "internal-ip" => (expected.internal_ip, expected.internal_ip_by) = (None, InternalIpBy::Agent),
            _ => change(&mut expected),
        }
        let seen = read(&[bad, node("b", 2), peer("p", 1)]).await;
        let at = format!("{annotation}={rubbish:?}");
        assert_eq!(seen.problems.keys().map(ToString::to_string).collect::<Vec<_>>(), ["node a"], "{at}");
        let problem = &seen.problems[&ObjectRef::node("a")];
        for part in [&[name.as_str()], *wanted].concat() {
            assert!(problem.contains(part), "{at}: {part:?} is not in {problem}");
        }
        assert_eq!(seen.nodes["a"], expected, "{at}");
        assert_eq!(seen.nodes.get("a").unwrap().last_seen, last_seen, "{at}");
        assert_eq!(seen.nodes["b"].key, Some(PublicKey([2; 32])), "{at}");
        assert_eq!(seen.peers, sound.peers, "{at}");
    }
}

#[tokio::test]
async fn annotations_whose_text_means_what_it_says_are_never_rubbish() {
    for (annotation, text) in [
        ("leader", ""),
        ("leader", "any text\nat all"),
        ("location", ""),
        ("location", "ü b e r / there"),
        ("force-internal-ip", ""),
        ("force-internal-ip", "-"),
        ("internal-ip", ""),
        ("wireguard-ip", ""),
        ("allowed-location-ips", ""),
        ("allowed-location-ips", " 192.168.7.0/24 , "),
        ("discovered-endpoints", "{}"),
    ] {
        let mut odd = node("a", 1);
        odd["metadata"]["annotations"][format!("{PREFIX}{annotation}")] = json!(text);
        let seen = read(&[odd]).await;
        assert!(seen.problems.is_empty(), "{annotation}={text:?}: {:?}", seen.problems);
        match annotation {
            "leader" => assert!(seen.nodes["a"].leader, "present is enough"),
            "location" => assert_eq!(seen.nodes["a"].location, text),
            "force-internal-ip" => {
                assert_eq!(seen.nodes["a"].internal_ip_by, InternalIpBy::ForcedNone, "{text:?}");
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_pod_cidr_that_is_none_is_named_and_the_other_counts() {
    let mut bad = node("a", 1);
    bad["spec"] = json!({ "podCIDR": "10.42.1.0/24", "podCIDRs": ["10.42.1.0/24", "fd00::1"] });
    let seen = read(&[bad, node("b", 2)]).await;
    assert!(seen.problems[&ObjectRef::node("a")].contains("\"fd00::1\""), "{:?}", seen.problems);
    assert_eq!(seen.nodes["a"].pod_cidrs, ["10.42.1.0/24".parse().unwrap()]);
    assert_eq!(seen.nodes.len(), 2);
}

/// A path in the spec, a bad value for it, and parts of the problem's text.
fn peer_cases() -> Vec<(&'static str, Value, &'static [&'static str])> {
    let secret = "c2VjcmV0";
    let address: &[&str] = &["dnsOrIP"];
    vec![
        ("/allowedIPs", json!(["10.5.0.1"]), &["spec.allowedIPs", "\"10.5.0.1\"", "10.5.0.1/32"]),
        ("/allowedIPs", json!(["10.5.0.9/32", "x/32"]), &["spec.allowedIPs", "\"x/32\"", "10.5.0.1/32"]),
        ("/allowedIPs", json!(["10.5.0.1/33"]), &["spec.allowedIPs"]),
        ("/allowedIPs", json!("10.5.0.1/32"), &["string"]),
        ("/allowedIPs", Value::Null, &["null"]),
        ("/publicKey", json!("short"), &["spec.publicKey", "base64 of 32 bytes"]),
        ("/publicKey", json!(""), &["spec.publicKey", "base64 of 32 bytes"]),
        ("/publicKey", json!(7), &["string"]),
        ("/presharedKey", json!(secret), &["spec.presharedKey", "base64 of 32 bytes"]),
        ("/persistentKeepalive", json!(-1), &["spec.persistentKeepalive", "-1", "between 0 and 65535"]),
        ("/persistentKeepalive", json!(65536), &["spec.persistentKeepalive", "between 0 and 65535"]),
        ("/persistentKeepalive", json!("10"), &["string"]),
        (
            "/endpoint",
            json!({ "dnsOrIP": { "ip": "192.0.2.1" }, "port": 0 }),
            &["spec.endpoint.port", "65535"],
        ),
        ("/endpoint", json!({ "dnsOrIP": { "ip": "192.0.2.1" }, "port": 65536 }), &["spec.endpoint.port"]),
        ("/endpoint", json!({ "dnsOrIP": { "ip": "192.0.2.1" }, "port": -1 }), &["spec.endpoint.port", "-1"]),
        ("/endpoint", json!({ "dnsOrIP": { "ip": "192.0.2.1" } }), &["port"]),
        (
            "/endpoint",
            json!({ "dnsOrIP": { "ip": "192.0.2" }, "port": 1 }),
            &["\"192.0.2\"", "DNS name", "IP"],
        ),
        (
            "/endpoint",
            json!({ "dnsOrIP": { "dns": "Upper.Case" }, "port": 1 }),
            &["\"Upper.Case\"", "DNS name"],
        ),
        ("/endpoint", json!({ "dnsOrIP": { "dns": "a..b", "ip": "192.0.2.1" }, "port": 1 }), &["\"a..b\""]),
        ("/endpoint", json!({ "dnsOrIP": {}, "port": 1 }), address),
        ("/endpoint", json!({ "port": 1 }), address),
        ("/endpoint", json!("192.0.2.1:1"), &["string"]),
    ]
}

#[tokio::test]
async fn rubbish_in_any_field_of_a_peer_is_named_and_hides_no_other_peer() {
    let cases = peer_cases();
    let mut objects = vec![node("a", 1), peer("good", 200)];
    for (number, (pointer, rubbish, _)) in cases.iter().enumerate() {
        let mut bad = peer(&format!("bad-{number}"), number);
        bad["spec"][&pointer[1..]] = rubbish.clone();
        objects.push(bad);
    }
    objects.push(peer("last", 201));
    // One file each: whatever cannot be an object at all is a problem of its file.
    let directory = tempfile::tempdir().unwrap();
    for object in &objects {
        let name = object["metadata"]["name"].as_str().unwrap();
        fs::write(directory.path().join(format!("{name}.yaml")), serde_yaml_ng::to_string(object).unwrap())
            .unwrap();
    }
    let backend = FileBackend::start(directory.path(), LABEL).await.unwrap();
    let seen = Arc::clone(&backend.watch().borrow());
    assert_eq!(seen.nodes.len(), 1);
    assert_eq!(seen.peers.keys().collect::<Vec<_>>(), ["good", "last"]);
    assert_eq!(seen.problems.len(), cases.len(), "{:#?}", seen.problems);
    for (number, (pointer, rubbish, wanted)) in cases.iter().enumerate() {
        let problem =
            [ObjectRef::peer(format!("bad-{number}")), ObjectRef::file(format!("bad-{number}.yaml"))]
                .iter()
                .find_map(|object| seen.problems.get(object))
                .unwrap_or_else(|| panic!("{pointer} {rubbish} is not named: {:#?}", seen.problems));
        for part in *wanted {
            assert!(problem.contains(part), "{pointer} {rubbish}: {part:?} is not in {problem}");
        }
        assert!(
            *pointer != "/presharedKey" || !problem.contains("c2VjcmV0"),
            "the message holds a secret: {problem}"
        );
    }
}

fn kgctl(directory: &Path, arguments: &[&str]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    command.arg("--backend=file").arg("--backend-dir").arg(directory).args(arguments);
    let output = command.output().unwrap();
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, warned)
}

#[test]
fn a_cluster_full_of_rubbish_is_still_shown_as_it_is_without_it() {
    let (sound, spoilt) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let objects = [node("a", 1), node("b", 2), peer("p", 1)];
    write(sound.path(), &objects);
    write(spoilt.path(), &objects);
    let mut third = node("c", 3);
    third["metadata"]["annotations"][format!("{PREFIX}key")] = json!("rubbish");
    fs::write(spoilt.path().join("c.yaml"), serde_yaml_ng::to_string(&third).unwrap()).unwrap();
    for (number, text) in
        ["{[", "kind: Pod", "7", "kind: Peer\nmetadata: {name: q}\nspec: 7", "\0"].iter().enumerate()
    {
        fs::write(spoilt.path().join(format!("rubbish-{number}.yaml")), text).unwrap();
    }
    for arguments in [&["graph"][..], &["showconf", "node", "a"], &["showconf", "peer", "p"]] {
        let (expected, silent) = kgctl(sound.path(), arguments);
        assert!(expected.status.success() && silent.is_empty(), "{silent}");
        let (shown, warned) = kgctl(spoilt.path(), arguments);
        assert_eq!(shown.stdout, expected.stdout, "{arguments:?}: {warned}");
        assert_eq!(warned.lines().filter(|line| line.contains("rubbish-")).count(), 5, "{warned}");
        assert!(warned.contains("node c") && warned.contains("kilo.squat.ai/key"), "{warned}");
    }
}
