//! A real `kg` says what its settings mean for relays.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use kilo_agent::status::{AgentStatus, Status};

use crate::{
    cluster,
    netns::{Agent, isolated},
    wait::until,
};

const LIMIT: Duration = Duration::from_secs(60);

/// The agent's status; `None` while it does not respond.
fn status() -> Option<AgentStatus> {
    let mut stream = TcpStream::connect("127.0.0.1:1107").ok()?;
    stream.write_all(b"GET /status HTTP/1.1\r\nHost: kg\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    serde_json::from_str::<Status>(text.split_once("\r\n\r\n")?.1).ok()?.agent
}

fn start(flags: &[&str]) -> Agent {
    Agent(cluster::kg(&[]).args(flags).spawn().unwrap())
}

#[test]
fn with_relay_off_an_annotated_node_says_why_it_does_not_relay_and_counts_its_tunnels() {
    isolated(
        "with_relay_off_an_annotated_node_says_why_it_does_not_relay_and_counts_its_tunnels",
        || async {
            cluster::prepare();
            cluster::write(
                "n1",
                "kind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/region: a}, annotations: \
             {kilo.squat.ai/relay: 'true'}}\nspec: {podCIDRs: [10.42.1.0/24]}\n",
            );
            cluster::write_node(12, "b", "10.42.12.0/24", false);
            let _agent = start(&["--relay=off"]);
            until("the status says why", LIMIT, || {
                let relay = status().and_then(|status| status.relay);
                relay.is_some_and(|relay| relay == "no; annotated, but this agent runs with --relay=off")
            });
            let metrics = cluster::metrics();
            for path in ["direct", "punched", "relayed"] {
                assert_eq!(metrics.get(&format!("kilo_tunnels{{path=\"{path}\"}}")), Some(&0), "{path}");
            }
        },
    );
}

#[test]
fn a_wireguard_port_of_relays_is_warned_about_in_the_status() {
    isolated("a_wireguard_port_of_relays_is_warned_about_in_the_status", || async {
        cluster::prepare();
        let _agent = start(&["--port=51900"]);
        until("the status warns", LIMIT, || {
            let warnings = status().map(|status| status.warnings).unwrap_or_default();
            warnings.iter().any(|warning| warning.starts_with("--port=51900 is one of"))
        });
    });
}
