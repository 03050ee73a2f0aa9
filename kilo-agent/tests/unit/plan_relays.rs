//! What relays and other nodes' signals add to a plan: the planner gets both as inputs, and its plan is not
//! edited.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use kilo_common::maps::{CONFIG_RELAY, SignalKey};
use kilo_core::{
    plan::{self, HopIds, HostPlan, Inputs},
    relay::{EndpointOverride, RelayInputs},
    topology::Node,
    wireguard::key::PublicKey,
};

use crate::plans;

fn node(name: &str, number: u8) -> Node {
    Node {
        name: name.to_owned(),
        endpoint: format!("192.0.2.{number}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.0.{number}.1/24").parse().ok(),
        location: name[..1].to_owned(),
        pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
        persistent_keepalive: u32::from(name == "c"),
        ..Node::default()
    }
}

/// The plan of the leader of location `a`, with tunnels to `b` and the roaming `c`, or of its member.
fn planned(own: &str, relays: &RelayInputs, signal_keys: &BTreeMap<IpAddr, SignalKey>) -> HostPlan {
    let nodes = [node("a1", 1), node("a2", 2), node("b", 3), node("c", 4)];
    let (mesh, settings, links) = (plans::mesh(&nodes), plans::settings(), plans::links());
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    let usual = plans::inputs(&mesh, &settings, &links, &hops);
    plan::host_plan(&Inputs { relays, signal_keys, ..usual }).unwrap()
}

#[test]
fn a_relay_decides_the_endpoint_of_its_peer_and_nothing_else() {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let (b, c, none) = (PublicKey([3; 32]), PublicKey([4; 32]), BTreeMap::new());
    let place = |plan: &HostPlan, key| {
        let peer = plan.wireguard.peers.get(&key).unwrap();
        (peer.endpoint.unwrap(), peer.roams)
    };
    let usual = planned("a1", &RelayInputs::default(), &none);
    assert_eq!(place(&usual, b), (at("192.0.2.3:51820"), false));
    assert_eq!(place(&usual, c), (at("192.0.2.4:51820"), true));

    let relay = at("198.51.100.1:51900");
    // A key that is no longer a peer's changes nothing.
    let endpoints = [b, PublicKey([9; 32])].map(|key| (key, EndpointOverride::At(relay)));
    let relayed = planned("a1", &RelayInputs { listens: true, endpoints: endpoints.into() }, &none);
    assert_eq!(place(&relayed, b), (relay, true));
    let mut same = relayed;
    let peer = same.wireguard.peers.get_mut(&b).unwrap();
    (peer.endpoint, peer.roams) = (Some(at("192.0.2.3:51820")), false);
    assert_eq!(same.tables.config.flags & CONFIG_RELAY, CONFIG_RELAY);
    same.tables.config.flags &= !CONFIG_RELAY;
    assert_eq!(same, usual);

    let endpoints = BTreeMap::from([(c, EndpointOverride::LeavesRelay)]);
    let left = planned("a1", &RelayInputs { listens: false, endpoints }, &none);
    assert_eq!(place(&left, c), (at("192.0.2.4:51820"), false), "back where the mesh says, and held there");
}

#[test]
fn programs_of_a_host_without_tunnels_do_not_look_for_relay_messages() {
    let listens = RelayInputs { listens: true, ..RelayInputs::default() };
    let flags = |own| planned(own, &listens, &BTreeMap::new()).tables.config.flags & CONFIG_RELAY;
    assert_eq!((flags("a1"), flags("a2")), (CONFIG_RELAY, 0));
}

#[test]
fn the_tables_have_the_keys_of_signals_that_were_given() {
    let key = SignalKey { key: [1, 2], cookie: 3, sender: 4, hop: 5, flags: 0 };
    let keys = BTreeMap::from([("10.0.2.1".parse().unwrap(), key)]);
    assert_eq!(planned("a2", &RelayInputs::default(), &keys).tables.signal_key, keys);
}

/// Words and single characters of code, without comments.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    for line in code.lines() {
        let mut rest = line.split("//").next().unwrap_or_default().trim_start();
        while let Some(first) = rest.chars().next() {
            let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (token, more) = rest.split_at(if word == 0 { first.len_utf8() } else { word });
            tokens.push(token);
            rest = more.trim_start();
        }
    }
    tokens
}

/// Places where code makes a `HostPlan` mutable or destructures it into mutable parts, which any edit
/// needs. A plan is a binding of this type, or anything called `plan`.
fn edits(code: &str) -> Vec<String> {
    let tokens = tokens(code);
    let mut plans = vec!["plan"];
    for (at, token) in tokens.iter().enumerate() {
        if *token == "HostPlan" {
            let wraps = ["&", "'", "a", "<", "Option", "Arc", "Box", "mut"];
            let before = tokens[..at].iter().rposition(|token| !wraps.contains(token));
            plans.extend(before.filter(|at| *at > 0 && tokens[*at] == ":").map(|at| tokens[at - 1]));
        }
    }
    let is_edit = |at: usize| match &tokens[at..] {
        ["mut", name, ..] if *name == "HostPlan" || plans.contains(name) => true,
        // Copies, or parts of a copy.
        ["let", "mut", _, "=", value @ ..] => {
            let mut value = value.iter().skip_while(|token| ["&", "*"].contains(token));
            value.next().is_some_and(|name| plans.contains(name)) && value.next() != Some(&"(")
        }
        ["let", "HostPlan", "{", ..] => true,
        _ => false,
    };
    let edits = (0..tokens.len()).filter(|at| is_edit(*at));
    edits.map(|at| tokens[at..].iter().take(8).copied().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn an_edit_of_a_plan_is_seen_whatever_its_name_is() {
    for code in [
        "fn a(plan: &mut HostPlan) {}",
        "fn a(mut of_host: HostPlan) { of_host.uplinks.clear(); }",
        "fn a(made: &HostPlan) { let mut copy = made.clone(); }",
        "fn a(made: Option<HostPlan>) { let mut tables = made.tables; }",
        "let mut plan = self.plan(mesh)?;",
        "let plan = planned(); take(&mut plan.tables);",
        "let HostPlan { mut tables, .. } = made;",
    ] {
        assert_eq!(edits(code).len(), 1, "{code}: {:?}", edits(code));
    }
    for code in [
        "fn a(plan: &HostPlan) -> usize { let mut count = 0; count += plan.uplinks.len(); count }",
        "let plan = self.plan(mesh)?; let mut writes = self.apply(&plan).await?; // mut plan",
        "let mut planned = 0;",
    ] {
        assert_eq!(edits(code), [""; 0], "{code}");
    }
}

/// The planner's output is applied unchanged.
#[test]
fn no_code_edits_a_plan() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut left = vec![source.join("agent"), source.join("failover"), source.join("relay")];
    let (mut read, mut with_plans) = (0, 0);
    while let Some(directory) = left.pop() {
        for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                left.push(path);
                continue;
            }
            let code = fs::read_to_string(&path).unwrap();
            assert_eq!(edits(&code), [""; 0], "{} edits a plan", path.display());
            read += 1;
            with_plans += usize::from(code.contains("HostPlan"));
        }
    }
    assert!(read > 30 && with_plans > 2, "{read} files, {with_plans} with plans");
}
