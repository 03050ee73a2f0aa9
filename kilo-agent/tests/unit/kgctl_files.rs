//! `kgctl` on a directory of objects: what it reads from the nodes instead of from flags, and the flags of
//! Kilo's own `kgctl` that change nothing.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use kilo_core::wireguard::key::PublicKey;

/// Runs it on these objects; returns whether it succeeded, and all that it wrote.
fn kgctl(directory: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.args(arguments).arg("--backend=file").arg("--backend-dir").arg(directory).output();
    let output = output.unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

fn shown(directory: &Path, arguments: &[&str]) -> String {
    let (success, said) = kgctl(directory, arguments);
    assert!(success, "{arguments:?}: {said}");
    said
}

/// A node that is alone in its location and has this WireGuard address, ready or not.
fn write_node(directory: &Path, name: &str, number: u8, address: &str, ready: bool) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seen = if ready { now } else { now - 3600 };
    let key = PublicKey([number; 32]);
    let node = format!(
        "kind: Node\nmetadata:\n  name: {name}\n  labels: {{topology.kubernetes.io/region: {name}}}\n  annotations:\n    \
         kilo.squat.ai/key: {key}\n    kilo.squat.ai/endpoint: 192.0.2.{number}:51820\n    \
         kilo.squat.ai/internal-ip: 172.16.{number}.1/24\n    kilo.squat.ai/last-seen: '{seen}'\n    \
         kilo.squat.ai/wireguard-ip: '{address}'\nspec: {{podCIDR: 10.42.{number}.0/24}}\n"
    );
    fs::write(directory.join(format!("{name}.yaml")), node).unwrap();
}

fn write_peer(directory: &Path) {
    write_peer_of(directory, "laptop", 99, "10.77.0.1/32");
}

fn write_peer_of(directory: &Path, name: &str, key: u8, allowed_ip: &str) {
    let key = PublicKey([key; 32]);
    let peer = format!(
        "kind: Peer\nmetadata: {{name: {name}}}\nspec: {{allowedIPs: [{allowed_ip}], publicKey: {key}}}\n"
    );
    fs::write(directory.join(format!("{name}.yaml")), peer).unwrap();
}

/// Commands that show WireGuard addresses.
const SHOW_ADDRESSES: [&[&str]; 4] =
    [&["graph"], &["status"], &["showconf", "peer", "laptop"], &["showconf", "node", "a", "--as-peer"]];

#[test]
fn the_subnet_is_that_of_the_addresses_which_nodes_publish() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_node(path, "a", 1, "10.5.0.1/16", true);
    write_node(path, "b", 2, "10.5.0.2/16", true);
    // One that did not hear of the new subnet before it was lost, and one that has just become ready.
    write_node(path, "c", 3, "10.4.0.3/16", false);
    write_node(path, "d", 4, "", true);
    write_peer(path);
    for arguments in SHOW_ADDRESSES {
        let said = shown(path, arguments);
        assert!(said.contains("10.5.0.1") && !said.contains("10.4.0."), "{arguments:?}: {said}");
        let other = shown(path, &[arguments, &["--subnet=10.6.0.0/16"]].concat());
        assert!(other.contains("10.6.0.1") && !other.contains("10.5.0."), "{arguments:?}: {other}");
    }
}

#[test]
fn without_a_published_address_the_subnet_is_kilos_and_lost_nodes_say_it_when_no_other_does() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_node(path, "a", 1, "", true);
    write_peer(path);
    for arguments in SHOW_ADDRESSES {
        assert!(shown(path, arguments).contains("10.4.0.1"), "{arguments:?}");
    }
    write_node(path, "b", 2, "10.5.0.2/16", false);
    for arguments in SHOW_ADDRESSES {
        assert!(shown(path, arguments).contains("10.5.0.1"), "{arguments:?}");
    }
}

#[test]
fn nodes_that_contradict_each_other_are_named_with_the_flag_that_decides() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_node(path, "a", 1, "10.4.0.1/16", true);
    write_node(path, "b", 2, "10.5.0.2/16", true);
    write_peer(path);
    for arguments in SHOW_ADDRESSES {
        let (success, said) = kgctl(path, arguments);
        assert!(!success, "{arguments:?}: {said}");
        for part in [
            "node a",
            "10.4.0.0/16",
            "node b",
            "10.5.0.0/16",
            "give all agents the same",
            "--subnet=10.4.0.0/16",
        ] {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in {said}");
        }
        let chosen = shown(path, &[arguments, &["--subnet=10.5.0.0/16"]].concat());
        assert!(chosen.contains("10.5.0.1"), "{arguments:?}: {chosen}");
    }
}

#[test]
fn peers_that_agents_refuse_are_left_out_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_node(path, "a", 1, "10.4.0.1/16", true);
    write_node(path, "b", 2, "10.4.0.2/16", true);
    write_peer(path);
    // It has the key of node b.
    write_peer_of(path, "other", 2, "10.77.0.2/32");
    for arguments in [&["graph"][..], &["showconf", "node", "a"], &["showconf", "peer", "laptop"]] {
        let said = shown(path, arguments);
        let why = "peer other is left out: spec.publicKey belongs to location:b already";
        assert!(said.contains(why), "{arguments:?}: {said}");
        assert!(!said.contains("\"other\"") && !said.contains("10.77.0.2"), "{arguments:?}: {said}");
        assert!(said.contains("\"laptop\"") || said.contains("192.0.2.2:51820"), "{arguments:?}: {said}");
    }
    let (success, said) = kgctl(path, &["showconf", "peer", "other"]);
    assert!(!success && said.contains("spec.publicKey belongs to location:b already"), "{said}");
    assert!(said.contains("choose one of: laptop"), "{said}");
}

/// Kilo's own `kgctl` has these on each command, before or behind it, and those of `showconf` on both of its
/// commands.
#[test]
fn flags_that_every_command_of_kilo_has_are_taken_where_they_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_node(path, "a", 1, "10.4.0.1/16", true);
    write_peer(path);
    let flags =
        ["--port=51821", "--mesh-granularity=location", "--topology-label=topology.kubernetes.io/region"];
    for arguments in [&["graph"][..], &["showconf", "peer", "laptop"]] {
        let plain = shown(path, arguments);
        assert_eq!(shown(path, &[arguments, &flags[..]].concat()), plain);
        assert_eq!(shown(path, &[&flags[..], arguments].concat()), plain);
        let between = [&arguments[..1], &flags[..], &arguments[1..]].concat();
        assert_eq!(shown(path, &between), plain);
    }
    assert!(shown(path, &["status", "--port", "51821"]).contains("1 of 1 nodes ready"));
    let node = shown(path, &["--port=51821", "showconf", "node", "a"]);
    assert!(node.contains("ListenPort = 51821"), "{node}");
    let as_peer = shown(path, &["showconf", "node", "a", "--as-peer", "-o", "yaml"]);
    assert_eq!(shown(path, &["showconf", "--as-peer", "-o", "yaml", "node", "a"]), as_peer);
}
