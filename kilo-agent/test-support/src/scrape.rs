//! Metrics of the agent in this network namespace.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::TcpStream,
};

/// The agent's metrics; empty while it does not respond.
pub fn metrics() -> BTreeMap<String, u64> {
    let mut text = String::new();
    let asked = TcpStream::connect("127.0.0.1:1107").and_then(|mut stream| {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kg\r\nConnection: close\r\n\r\n")?;
        stream.read_to_string(&mut text)
    });
    drop(asked);
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

/// Whether the agent has finished a reconcile with these gauges, and has not begun another. The gauges
/// alone are set before it applies anything.
pub fn has_done(gauges: &[(&str, u64)]) -> bool {
    let now = metrics();
    let ended = now.get("kilo_reconcile_duration_seconds_count");
    ended.is_some_and(|ended| *ended > 0)
        && ended == now.get("kilo_reconciles_total")
        && gauges.iter().all(|(name, value)| now.get(*name) == Some(value))
}
