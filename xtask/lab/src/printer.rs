//! allowed-location-ips: a machine on a location's LAN that has no part in the mesh.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{Lab, netns::Netns, network::PRINTER, probe};

const LIMIT: Duration = Duration::from_secs(40);

fn answers(netns: &Netns) -> bool {
    probe::from(netns, PRINTER, Duration::from_secs(1)).is_ok()
}

/// The printer has no gateway: it answers those who are on its LAN, so
/// everything must come from a1 (or from a2, of a2's own pods).
pub fn run(lab: &mut Lab) -> Result<String> {
    let result = reached_while_named(lab);
    // After a failure, too, it must no longer be named.
    let a2 = lab.network.node("a2")?;
    let written = lab.agents.write_node(a2, &[]);
    let configured = lab.agents.configure_laptop(&lab.network, |peers| peers);
    result.and(written).and(configured).map(|()| String::new())
}

fn reached_while_named(lab: &Lab) -> Result<()> {
    let network = &lab.network;
    probe::serve(&network.printer, PRINTER.into())?;
    let (a1, a2) = (network.node("a1")?, network.node("a2")?);
    let (b1, b2) = (network.node("b1")?, network.node("b2")?);
    let far = [&b1.pod, &b1.netns, &b2.pod, &b2.netns];
    for netns in far.into_iter().chain([&network.laptop]) {
        ensure!(!answers(netns), "{} reaches the printer without allowed-location-ips", netns.name);
    }
    // Any node of the location may name it; packets go through the leader.
    lab.agents.write_node(a2, &[("allowed-location-ips", &format!("{PRINTER}/32"))])?;
    for netns in far {
        probe::until_seen_as(netns, PRINTER, a1.private, LIMIT)?;
    }
    probe::until_seen_as(&a2.pod, PRINTER, a2.private, LIMIT)?;
    lab.agents.configure_laptop(network, |peers| peers)?;
    probe::until_seen_as(&network.laptop, PRINTER, a1.private, LIMIT)?;

    // While it was not known everywhere, it was an address outside; now nothing may be in cleartext.
    lab.in_clear_but(|address| address == PRINTER)?;
    for netns in far {
        probe::until_seen_as(netns, PRINTER, a1.private, LIMIT)?;
    }
    lab.in_clear_but(|_| false)?;

    lab.agents.write_node(a2, &[])?;
    let started = Instant::now();
    for netns in far {
        while answers(netns) {
            ensure!(started.elapsed() < LIMIT, "{} still reaches the printer", netns.name);
        }
    }
    // A node forwards a peer's packets anywhere: the peer's own configuration no longer names the printer.
    lab.agents.configure_laptop(network, |peers| peers)?;
    ensure!(!answers(&network.laptop), "the laptop still reaches the printer");
    for node in [b1, b2] {
        let routes = node.netns.sh("ip route show table all")?;
        ensure!(!routes.contains(&IpAddr::from(PRINTER).to_string()), "{}:\n{routes}", node.name());
    }
    Ok(())
}
