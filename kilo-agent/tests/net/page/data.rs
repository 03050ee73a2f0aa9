//! Meshes to display, of any size and with everything that can be wrong.

use kilo_agent::http::page::Report;
use kilo_agent::{
    status::{LeaderChange, Status},
    timestamp::Timestamp,
};
use serde_json::{Value, json};

const CITIES: [&str; 12] = [
    "amsterdam",
    "berlin",
    "chicago",
    "dublin",
    "edinburgh",
    "frankfurt",
    "geneva",
    "helsinki",
    "istanbul",
    "jakarta",
    "kyoto",
    "lisbon",
];

/// Name of a location: a city, numbered when there are many.
fn city(at: usize) -> String {
    match at / CITIES.len() {
        0 => CITIES[at].to_owned(),
        again => format!("{}-{}", CITIES[at % CITIES.len()], again + 1),
    }
}

fn key(number: usize) -> String {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(number as u64).to_be_bytes());
    BASE64_STANDARD.encode(bytes)
}

/// A mesh as seen by the leader of the first location; the last `out` nodes are not part of it.
pub fn report(nodes: usize, locations: usize, out: usize) -> Report {
    report_at(nodes, locations, out, Timestamp(1_790_000_000))
}

/// [`report`] at another time.
#[expect(clippy::too_many_lines, reason = "one report as `/status` has it, whose parts name each other")]
pub fn report_at(nodes: usize, locations: usize, out: usize, now: Timestamp) -> Report {
    let time = |ago: i64| Timestamp(now.0 - ago).to_string();
    let place = |at: usize| at % locations;
    let is_out = |at: usize| at >= nodes - out;
    let silent = (locations > 3).then(|| format!("location:{}", city(2)));
    // The fourth location has several active leaders.
    let gateway =
        |place: usize, member: usize| (place == 3).then(|| format!("{}-node-{:03}", city(place), member % 2));
    let node = |at: usize| {
        let why =
            if at.is_multiple_of(2) { "its agent last checked in 4m 12s ago" } else { "no public key yet" };
        let mut node = json!({
            "name": format!("{}-node-{:03}", city(place(at)), at / locations), "location": format!("location:{}", city(place(at))),
            "leads": at < locations && !is_out(at), "ready": !is_out(at),
            "notReady": if is_out(at) { vec![why] } else { vec![] },
            "endpoint": format!("203.0.{}.{}:51820", place(at), at / locations + 1),
            "internalIP": format!("10.{}.{}.{}", place(at) + 1, at / locations / 200, at / locations % 200 + 11),
            "podCIDRs": [format!("10.{}.{}.0/24", 100 + at / 250, at % 250)],
            "lastSeen": time(if is_out(at) { 252 } else { (at % 28) as i64 }), "key": key(at),
        });
        if let Some(gateway) = gateway(place(at), at / locations).filter(|_| !is_out(at)) {
            node["gateway"] = json!(gateway);
        }
        node
    };
    let location = |at: usize| {
        let members: Vec<usize> = (at..nodes).step_by(locations).collect();
        let ready = members.iter().filter(|at| !is_out(**at)).count();
        let mut location = json!({
            "name": format!("location:{}", city(at)), "leader": (ready > 0).then(|| format!("{}-node-000", city(at))),
            "reason": if ready == 1 { "onlyNode" } else { "asksWithPublicEndpoint" },
            "since": time(86_400 + 3_600 * at as i64), "changes": usize::from(at == 1),
            "endpoint": format!("203.0.{at}.1:51820"), "wireguardIP": format!("10.4.{}.1", at), "ready": ready, "nodes": members.len(),
        });
        if at == 1 && ready > 1 {
            location["acting"] = json!(format!("{}-node-001", city(1)));
        }
        if let (Some(first), Some(second)) = (gateway(at, 0), gateway(at, 1)) {
            location["gateways"] = json!([first, second]);
        }
        location
    };
    let tunnel = |at: usize| {
        let name = format!("location:{}", city(place(at)));
        let age = if silent.as_ref() == Some(&name) { 840 } else { 7 * at as i64 % 120 };
        json!({
            "name": name, "key": key(at), "endpoint": format!("203.0.{}.{}:51820", place(at), at / locations + 1), "lastHandshake": time(age),
            "receivedBytes": 7_340_032 * at, "sentBytes": 1_258_291 * at,
        })
    };
    let second = (locations > 3).then_some(locations + 3);
    let mut tunnels: Vec<Value> = (1..locations).chain(second).map(tunnel).collect();
    tunnels.push(json!({"name": "peer:laptop-ana", "key": key(90_001), "endpoint": "198.51.100.7:40112", "lastHandshake": time(41), "receivedBytes": 88_412, "sentBytes": 912_000}));
    let degraded = silent.iter().map(|name| {
        format!("{name} ({}-node-000 at 203.0.2.1:51820) does not answer: the last handshake was 14m ago; packets sent to it are lost for 1m 5s", city(2))
    });
    let status: Value = json!({
        "time": now.to_string(), "granularity": "location", "subnet": "10.4.0.0/16",
        "locations": (0..locations).map(location).collect::<Vec<_>>(), "nodes": (0..nodes).map(node).collect::<Vec<_>>(),
        "peers": [
            {"name": "laptop-ana", "valid": true, "allowedIPs": ["10.5.0.1/32"], "key": key(90_001)},
            {"name": "office-printer", "valid": true, "allowedIPs": ["10.5.0.2/32", "192.168.178.0/24"], "endpoint": "198.51.100.20:51820", "key": key(90_002)},
            {"name": "old-phone", "valid": false, "reason": "its allowed IPs overlap those of laptop-ana", "allowedIPs": ["10.5.0.1/32"]},
        ],
        "problems": {},
        "agent": {
            "node": "amsterdam-node-000", "version": "0.1.0", "interface": "kilo0", "degraded": degraded.collect::<Vec<_>>(), "tunnels": tunnels,
            "packets": {"encrypt": 812_000, "steer": 41_200}, "drops": {"no_hop": 12, "foreign_source": 3, "too_big": 0},
            "programs": [{"interface": "eth0", "program": "uplink_egress", "direction": "egress", "hook": "tcx"}],
            "failover": {
                "role": "leader", "leader": "amsterdam-node-000", "kilosLeader": "amsterdam-node-000", "term": 4, "since": time(7_200),
                "standBys": [{"node": "amsterdam-node-001", "fit": true, "roundTrip": 12}, {"node": "amsterdam-node-002", "fit": false}],
            },
        },
    });
    let status: Status = serde_json::from_value(status).unwrap();
    let change = |ago: i64, from: Option<&str>, to: Option<&str>, why: &str| LeaderChange {
        time: Timestamp(now.0 - ago),
        location: "location:berlin".to_owned(),
        from: from.map(str::to_owned),
        to: to.map(str::to_owned),
        why: why.to_owned(),
    };
    let changes = vec![
        change(
            312,
            Some("berlin-node-000"),
            Some("berlin-node-001"),
            "failover: it acts in the place of berlin-node-000",
        ),
        change(
            9_000,
            None,
            Some("berlin-node-000"),
            "the location joined: asks to lead, has a public endpoint",
        ),
    ];
    Report::new(status, changes)
}
