//! Collects what only a node itself knows about its host, for `kgctl sysdump`, which runs this in the agent's
//! pod: tables of the data path, links, routes, rules, firewall. It contains no keys.

use std::{
    collections::BTreeMap,
    fmt::{Debug, Write as _},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::Result;
use kilo_core::plan::Tables;
use kilo_host::{
    dataplane::{self, BPFFS, CounterReader},
    net::{Net, listing},
};

/// Maximum bytes kept of a command's output.
const LARGEST: usize = 1 << 20;
/// These programs are in the image; none of them is required.
const FIREWALLS: [(&str, &[&str]); 3] =
    [("nft", &["list", "ruleset"]), ("iptables-save", &[]), ("ip6tables-save", &[])];
const FILES: [&str; 8] = [
    "/proc/version",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv6/conf/all/forwarding",
    "/proc/sys/net/ipv4/conf/all/rp_filter",
    "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal",
    "/proc/sys/net/ipv4/neigh/default/gc_thresh3",
    "/proc/sys/net/ipv6/neigh/default/gc_thresh3",
    "/proc/net/softnet_stat",
];

/// Texts by file name, as JSON; where something cannot be read, the reason.
pub async fn run() -> Result<String> {
    let mut files = BTreeMap::new();
    let bpffs = Path::new(BPFFS);
    let tables = dataplane::read_tables(bpffs);
    files.insert(
        "tables.txt".to_owned(),
        tables.map_or_else(|error| missing(&error), |found| of_tables(&found)),
    );
    let counters = CounterReader::open(bpffs).and_then(|reader| reader.read());
    let counters = counters.map_or_else(|error| missing(&error), |counters| format!("{counters:#?}\n"));
    files.insert("counters.txt".to_owned(), counters);
    for (name, text) in listing::all(&Net::new()?).await {
        files.insert(format!("{name}.txt"), text.unwrap_or_else(|error| missing(&error)));
    }
    for (program, arguments) in FIREWALLS {
        files.insert(format!("{program}.txt"), output(program, arguments));
    }
    let read = |path: &str| match std::fs::read_to_string(path) {
        Ok(text) => format!("{path}: {}\n", text.trim_end()),
        Err(error) => format!("{path}: {error}\n"),
    };
    files.insert("kernel.txt".to_owned(), FILES.into_iter().map(read).collect());
    Ok(serde_json::to_string(&files)?)
}

fn missing(error: &dyn std::fmt::Display) -> String {
    format!("not read: {error}\n")
}

fn output(program: &str, arguments: &[&str]) -> String {
    let done = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let (mut text, said) = match done {
        Ok(output) => (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => return missing(&error),
    };
    let all = text.len();
    text.truncate(LARGEST);
    let mut text = String::from_utf8_lossy(&text).into_owned();
    if all > LARGEST {
        let _ = write!(text, "\n[{LARGEST} of {all} bytes]\n");
    }
    text + &said
}

/// The maps as the programs see them, one entry per line. Signal keys hide their value.
fn of_tables(tables: &Tables) -> String {
    fn part<K: Debug, V: Debug>(text: &mut String, name: &str, entries: impl Iterator<Item = (K, V)>) {
        let _ = writeln!(text, "[{name}]");
        for (key, value) in entries {
            let _ = writeln!(text, "{key:?} => {value:?}");
        }
        text.push('\n');
    }
    // Every field is listed by name, so that a new one is not forgotten. A plan's other data is not in the
    // maps.
    let Tables {
        config,
        lead,
        lead_of_term: _,
        prefix,
        hop,
        node,
        signal_key,
        masq_src,
        masq_dst,
        masq_addr,
        device,
    } = tables;
    let mut text = format!("[config]\n{config:?}\n\n[lead]\n{lead:?}\n\n");
    part(&mut text, "prefix", prefix.iter().copied());
    part(&mut text, "hop", hop.iter());
    part(&mut text, "node", node.iter());
    part(&mut text, "signal_key", signal_key.iter());
    part(&mut text, "masq_src", masq_src.iter().copied());
    part(&mut text, "masq_dst", masq_dst.iter().copied());
    part(&mut text, "masq_addr", masq_addr.iter());
    part(&mut text, "device", device.iter());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kilo_common::maps::SignalKey;

    #[test]
    fn keys_of_signals_are_in_no_report() {
        let mut tables = Tables::default();
        let secret =
            SignalKey { key: [0x5ec2_e7aa, 0x5ec2_e7bb], cookie: 0x5ec2_e7cc, ..SignalKey::default() };
        tables.signal_key.insert([10, 1, 0, 12].into(), secret);
        let text = of_tables(&tables);
        assert!(text.contains("10.1.0.12 => SignalKey"), "{text}");
        for part in [secret.key[0], secret.key[1], secret.cookie] {
            assert!(!text.contains(&part.to_string()) && !text.contains(&format!("{part:x}")), "{text}");
        }
    }
}
