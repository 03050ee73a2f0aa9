//! A VPN peer with plain wireguard-tools: behind a NAT whose mapping changes, with a pre-shared key, as the
//! way to a network behind it, and with a node as its way to the Internet.

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    Lab,
    netns::{Netns, run},
    network::{LAPTOP, LAPTOP6, OFFICE, OUTSIDE},
    probe, wait,
};

/// Longest wait until something configured works; WireGuard tries handshakes
/// every 5 s.
const LIMIT: Duration = Duration::from_secs(40);
/// A ClusterIP whose endpoint is a pod.
const TO_POD: &str = "10.43.0.10";
/// The network behind the laptop.
const OFFICES: &str = "10.77.0.0/24";
/// A ClusterIP whose endpoint is behind the laptop.
const TO_OFFICE: &str = "10.43.0.20";

/// Echo requests of the flow, and the time between two of them in seconds.
const PINGS: u32 = 100;
const INTERVAL: &str = "0.05";
/// How many of them roaming may cost: a quarter of a second.
const MAY_LOSE: u32 = 5;

/// The laptop gets another address on its LAN, and its NAT another public
/// address and port, while a ping and a TCP connection go on.
pub fn roams(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let (laptop, router) = (&network.laptop, &network.router);
    let (a1, b2) = (network.node("a1")?, network.node("b2")?);
    let ping = laptop
        .command("ping")
        .args(["-n", "-q", "-i", INTERVAL, "-c", &PINGS.to_string(), &b2.pod_ip().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    wait::time_passes(Duration::from_millis(1_500), "pings before the change are counted, too");
    router.sh(
        "ip address add 192.0.2.99/24 dev wan
         nft insert rule ip lab-nat postrouting oifname wan ip saddr 172.16.9.3 udp sport 1-65535 snat to 192.0.2.99:41000-41999",
    )?;
    laptop.ip("address del 172.16.9.2/24 dev eth0\naddress add 172.16.9.3/24 dev eth0\n\
               route replace default via 172.16.9.1\n")?;
    let output = ping.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("packets transmitted")).context("ping said nothing")?;
    let numbers: Vec<u32> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    let received = numbers.get(1).copied().unwrap_or(0);
    ensure!(received + MAY_LOSE >= PINGS, "{line}");
    for name in ["a2", "b2"] {
        let pod = network.node(name)?;
        probe::until_seen_as(&pod.pod, LAPTOP, pod.pod_ip(), LIMIT)?;
    }
    let endpoints = a1.netns.sh("wg show kilo0 endpoints")?;
    ensure!(endpoints.contains("192.0.2.99:41"), "a1 sees the laptop elsewhere:\n{endpoints}");
    let published = lab.agents.cluster().join("a1.kilo.yaml");
    wait::until("a1 reports where it sees the laptop", LIMIT, || {
        Ok(fs::read_to_string(&published)?.contains("192.0.2.99"))
    })?;
    Ok(format!("({received} of {PINGS} pings)"))
}

/// With another key there is no handshake; with the right one there is, and no
/// agent logs it. The key stays.
pub fn preshared_key(lab: &mut Lab) -> Result<String> {
    let result = needs_its_key(lab);
    // Also after a failure the laptop has what the agents have.
    result.and(lab.agents.configure_laptop(&lab.network, |peers| peers)).map(|()| String::new())
}

fn needs_its_key(lab: &Lab) -> Result<()> {
    let (network, agents) = (&lab.network, &lab.agents);
    let key = run(Command::new("wg").arg("genpsk"))?.trim().to_owned();
    let other = run(Command::new("wg").arg("genpsk"))?.trim().to_owned();
    agents.write_laptop(&[&format!("{LAPTOP}/32"), &format!("{LAPTOP6}/128")], Some(&key))?;
    let target = network.node("b2")?.pod_ip();
    // The agents need no longer than they do for any change.
    for name in ["a1", "b1"] {
        let node = network.node(name)?;
        wait::until(&format!("{name} uses the pre-shared key"), LIMIT, || {
            Ok(node.netns.sh("wg show kilo0 preshared-keys")?.contains(&key))
        })?;
    }
    agents.configure_laptop(network, |peers| peers.replace(&key, &other))?;
    let wrong = probe::from(&network.laptop, target, Duration::from_secs(3));
    ensure!(wrong.is_err(), "a peer with another pre-shared key is answered");
    agents.configure_laptop(network, |peers| peers)?;
    probe::until_seen_as(&network.laptop, target, LAPTOP, LIMIT)?;
    for node in &network.nodes {
        let log = fs::read_to_string(agents.log(node.name()))?;
        ensure!(!log.contains(&key), "{} logs the pre-shared key", node.name());
    }
    Ok(())
}

/// The office is reached from pods and nodes by its own address, and reaches
/// them by its own; a Service may have it as endpoint.
pub fn gateway(lab: &mut Lab) -> Result<String> {
    leads_to_office(lab).or_else(|error| {
        // After a failure the laptop is what it was before.
        write_laptop(lab, None).context("the office stays in the mesh")?;
        Err(error)
    })
}

fn leads_to_office(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    probe::serve(&network.office, OFFICE.into())?;
    let (a2, b1, b2) = (network.node("a2")?, network.node("b1")?, network.node("b2")?);
    ensure!(probe::from(&b2.pod, OFFICE, Duration::from_secs(1)).is_err(), "the office is reached too early");
    write_laptop(lab, Some(OFFICES))?;
    for node in &network.nodes {
        wait::until(&format!("{} has a route to the office", node.name()), LIMIT, || {
            Ok(node.netns.sh(&format!("ip route get {OFFICE}"))?.contains("dev kilo0"))
        })?;
    }
    // Until now it was an address outside for everybody.
    let early = lab.in_clear_but(|address| address == OFFICE)?;
    for node in [a2, b1, b2] {
        probe::until_seen_as(&node.pod, OFFICE, node.pod_ip(), LIMIT)?;
        probe::until_seen_as(&node.netns, OFFICE, node.private, LIMIT)?;
        probe::until_seen_as(&network.office, node.pod_ip(), OFFICE, LIMIT)?;
    }
    let _service = Service::add(&a2.netns, TO_OFFICE, &OFFICE.to_string())?;
    let target: std::net::IpAddr = TO_OFFICE.parse()?;
    probe::until_seen_as(&a2.pod, target, a2.pod_ip(), LIMIT)?;
    Ok(format!("({early} packets in cleartext before the mesh knew the network)"))
}

/// The laptop's Peer object with its own addresses and what lies behind it; its key is as an earlier check
/// left it.
fn write_laptop(lab: &Lab, behind: Option<&str>) -> Result<()> {
    let key = preshared_key_of(lab)?;
    let own = [format!("{LAPTOP}/32"), format!("{LAPTOP6}/128")];
    let allowed_ips: Vec<_> = own.iter().map(String::as_str).chain(behind).collect();
    lab.agents.write_laptop(&allowed_ips, key.as_deref())
}

/// The laptop sends services to a1, and everything else outside to b1.
pub fn internet(lab: &mut Lab) -> Result<String> {
    let result = by_nodes(lab);
    // Also after a failure: what follows expects the laptop as it was.
    let routed = lab.network.laptop.ip("route replace default via 172.16.9.1\n");
    let configured = lab.agents.configure_laptop(&lab.network, |peers| peers);
    result.and(routed).and(configured).map(|()| String::new())
}

fn by_nodes(lab: &Lab) -> Result<()> {
    let network = &lab.network;
    let (a1, b1, b2) = (network.node("a1")?, network.node("b1")?, network.node("b2")?);
    let _service = Service::add(&a1.netns, TO_POD, &b2.pod_ip().to_string())?;
    // It does not build on the check before, which may have failed.
    write_laptop(lab, Some(OFFICES))?;
    // WireGuard's own packets must not go into the tunnels, as everything else does from here on.
    network.laptop.ip("route replace 192.0.2.0/24 via 172.16.9.1\n")?;
    lab.agents.configure_laptop(network, |peers| {
        peers
            .replace(&format!("{}/32", a1.private), &format!("{}/32, 10.43.0.0/16", a1.private))
            .replace(&format!("{}/32", b1.private), &format!("{}/32, 0.0.0.0/0", b1.private))
    })?;
    let target: std::net::IpAddr = TO_POD.parse()?;
    // As kube-proxy does for a client outside the pod CIDRs: b2 answers the node, not the laptop.
    probe::until_seen_as(&network.laptop, target, std::net::Ipv4Addr::new(10, 4, 0, 1), LIMIT)?;
    let public = b1.public.context("b1 has a public address")?;
    probe::until_seen_as(&network.laptop, OUTSIDE, public, LIMIT)?;
    probe::until_seen_as(&network.office, OUTSIDE, public, LIMIT)
}

/// The laptop's pre-shared key as an earlier check left it.
fn preshared_key_of(lab: &Lab) -> Result<Option<String>> {
    let conf = lab.agents.kgctl(&["showconf", "peer", "laptop"])?;
    Ok(conf.lines().find_map(|line| line.strip_prefix("PresharedKey = ")).map(ToOwned::to_owned))
}

/// A ClusterIP on one node: what kube-proxy with `--cluster-cidr` sets up, until it is dropped.
struct Service<'a>(&'a Netns);

impl<'a> Service<'a> {
    fn add(netns: &'a Netns, cluster_ip: &str, endpoint: &str) -> Result<Self> {
        netns.sh(&format!(
            "nft -f - <<'RULES'
             table ip lab-proxy {{
                 chain prerouting {{
                     type nat hook prerouting priority -100;
                     ip daddr {cluster_ip} ip saddr != 10.42.0.0/16 meta mark set meta mark | 0x4000
                     ip daddr {cluster_ip} dnat to {endpoint}
                 }}
                 chain postrouting {{
                     type nat hook postrouting priority 100;
                     meta mark & 0x4000 == 0x4000 masquerade
                 }}
             }}\nRULES"
        ))?;
        Ok(Self(netns))
    }
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.sh("nft delete table ip lab-proxy") {
            eprintln!("lab: a service stays: {error:#}");
        }
    }
}
