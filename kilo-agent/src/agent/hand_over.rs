//! Leaving this host to an agent that is not ours, while pods talk.
//!
//! Whatever works without programs stays: the WireGuard device with its peers, addresses, routes
//! and annotations, which Kilo's own agent takes over as it finds them. Programs go, because they
//! would take packets that are the other's. What they masqueraded is masqueraded by rules until
//! the other does it.

use std::{collections::BTreeSet, net::IpAddr, path::Path, time::Duration};

use super::uninstall::Outcome;
use kilo_common::maps::PREFIX_NEVER_CLEAR;
use kilo_core::plan::{Tables, model::Packet};
use kilo_host::{
    dataplane,
    firewall::{
        conntrack,
        nat_rules::{Decision, Interim},
    },
    net::{Net, tunnels},
};

/// The rules do nothing after this time; until then they also keep in what nobody translates.
const BRIDGED: Duration = Duration::from_secs(600);

/// Takes programs, pins and tunnel devices away; `interface` is the WireGuard device's name.
pub async fn hand_over(bpffs: &Path, interface: &str) -> Outcome {
    let mut outcome = Outcome::default();
    let tables = dataplane::read_tables(bpffs).map_err(|error| error.to_string());
    let masqueraded = match &tables {
        Ok(tables) => masquerade_by_rules(tables, interface, &mut outcome).await,
        Err(error) => {
            outcome.stays.push(error.clone());
            false
        }
    };
    outcome.take(dataplane::detach_filters(), |count| format!("programs on {count} clsact hooks"));
    outcome.take(dataplane::remove_pins(bpffs), |count| {
        format!("{count} pinned programs and maps below {}", dataplane::top_directory(bpffs).display())
    });
    if let (true, Ok(tables)) = (masqueraded, tables) {
        let is_masqueraded = move |src: IpAddr, dst: IpAddr| tables.masquerades(Packet { src, dst });
        let forgotten = tokio::task::spawn_blocking(move || conntrack::forget(is_masqueraded)).await;
        let forgotten = forgotten.map_err(std::io::Error::other).flatten();
        outcome.take(
            forgotten.map_err(|error| format!("entries of connection tracking without translation: {error}")),
            |count| format!("{count} entries of connection tracking without translation"),
        );
    }
    let removed = match Net::new() {
        Ok(net) => tunnels::remove(net.rtnl()).await,
        Err(error) => Err(error),
    };
    outcome.take(removed, |count| format!("{count} tunnel devices"));
    outcome
}

/// True when there is anything to masquerade, and rules do it now.
async fn masquerade_by_rules(tables: &Tables, interface: &str, outcome: &mut Outcome) -> bool {
    let decision = Decision {
        sources: tables.masq_src.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
        destinations: tables.masq_dst.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
    };
    let uplinks: BTreeSet<String> = tables
        .device
        .keys()
        .filter_map(|ifindex| dataplane::interface_name(*ifindex))
        .filter(|name| name != interface)
        .collect();
    if decision.is_empty() || uplinks.is_empty() {
        return false;
    }
    let never = tables.prefix.iter().filter(|(_, value)| value.flags & PREFIX_NEVER_CLEAR != 0);
    let never_clear = &never.map(|(prefix, _)| *prefix).collect();
    match decision.apply_interim(&Interim { uplinks: &uplinks, never_clear, lasts: BRIDGED }).await {
        Ok(()) => true,
        Err(error) => {
            outcome.stays.push(error.to_string());
            false
        }
    }
}
