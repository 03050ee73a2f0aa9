//! Kernel state of nodes with Cilium: its devices, routes and rules, and stand-in programs with its names on
//! them. Cilium itself is not run.
//!
//! On some nodes it is there before the agent, on others it comes after.

mod programs;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::{
    maps::{Map, MapData, PerCpuArray},
    programs::{LinkOrder, SchedClassifier, TcAttachType, links::FdLink, tc::TcAttachOptions},
};
use nix::sys::signal::Signal;

use super::{
    Lab,
    check::Check,
    checks::{self, no_drops, nothing_in_clear},
    cloud, cni, cni_conf,
    counters::{self, action},
    matrix,
    network::{Network, Node},
    tunl0,
};
use crate::wait;
use programs::Program;

pub use programs::OBJECT;

/// Flags of the agents, as in the manifests beside Cilium.
pub const FLAGS: &[&str] = &["--compatibility=cilium", "--cni=false", "--local=false"];

/// Checks that run once the mesh is up.
pub const CHECKS: &[Check] = &[
    ("members steer to their leader, and Cilium carries what stays in the location", |lab| {
        cni::packets_beside(lab, "cilium_vxlan")
    }),
    ("no packet of the mesh is seen in cleartext", nothing_in_clear),
    ("no mesh packet was dropped on the way", no_drops),
    ("programs of others are attached in their order whichever came first, and all count packets", beside),
    ("a host firewall that knows nothing of Kilo refuses none of its packets", not_refused),
    ("the cloud dropped no IPIP, though it drops what there is", cloud::nothing_dropped),
    ("IPIP to a leader's cni-compatibility-ip travels inside Cilium's packets", ipip),
    ("each agent that ends and starts leaves the others' programs where they are", restarted),
    ("what Cilium itself encapsulates for nodes of another location goes through WireGuard", tunnelled),
    ("after `kg uninstall` only the others' programs are left", uninstalled),
];

/// Nodes on which Cilium starts after the agent.
const AGENT_FIRST: [&str; 2] = ["a3", "b2"];
/// WireGuard's 1420 minus VXLAN's overhead: Cilium's own packets go through the tunnel, too.
const MTU: u32 = 1370;
/// Devices shared with Cilium, and the agent's programs at their ingress and egress.
const SHARED: [(&str, [&str; 2]); 3] = [
    ("eth0", ["lan_ingress", "uplink_egress"]),
    ("eth1", ["lan_ingress", "uplink_egress"]),
    ("kilo0", ["kilo_ingress", "kilo_egress"]),
];
const HOOKS: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];
/// Names of the programs attached before ours, and of Cilium's (`NETDEV`) after ours.
const WATCH: [&str; 2] = ["watch_ingress", "watch_egress"];
const NETDEV: [&str; 2] = ["cil_from_netdev", "cil_to_netdev"];

/// Sets up every node's CNI configuration, Cilium on those that have it first, and the cloud's rule.
pub fn install(network: &mut Network) -> Result<()> {
    network.give_pods_to_another_cni();
    for node in &network.nodes {
        configure_pods(node)?;
    }
    for node in network.nodes.iter().filter(|node| !agent_first(node)) {
        start(network, node)?;
    }
    try_the_firewall(network)?;
    cloud::forbid_ipip(network)
}

/// Once the agents run: Cilium on the other nodes, and everywhere on `kilo0`,
/// which is one more device it finds.
pub fn complete(network: &Network) -> Result<()> {
    for node in &network.nodes {
        if agent_first(node) {
            start(network, node)?;
        }
        attach_beside(node, "kilo0")?;
    }
    Ok(())
}

fn agent_first(node: &Node) -> bool {
    AGENT_FIRST.contains(&node.name())
}

/// Address of `cilium_host`.
fn overlay_address(node: &Node) -> Ipv4Addr {
    node.pod_address(250)
}

/// Cilium's directory in the node's BPF file system, as this process sees it.
fn directory(node: &Node) -> Result<PathBuf> {
    let holder = node.netns.holder.context("a node has namespaces of its own")?;
    Ok(format!("/proc/{holder}/root/sys/fs/bpf/cilium").into())
}

/// Sets up Cilium's devices, addresses, routes, rules and programs.
fn start(network: &Network, node: &Node) -> Result<()> {
    let own = overlay_address(node);
    let hardware = programs::HOST_ADDRESS.map(|byte| format!("{byte:02x}")).join(":");
    let mut ip = format!(
        "link add cilium_host address {hardware} type veth peer name cilium_net\n\
         link set cilium_host arp off up\nlink set cilium_net arp off up\n\
         link add cilium_vxlan type vxlan external dstport 8472\nlink set cilium_vxlan up\n\
         address add {own}/32 dev cilium_host\nroute add {own} dev cilium_host scope link\n\
         route add {}/24 via {own} dev cilium_host src {own}\n\
         rule add preference 100 lookup local\nrule delete preference 0 lookup local\n",
        node.pod_address(0),
    );
    for other in network.nodes.iter().filter(|other| other.name() != node.name()) {
        let pods = other.pod_address(0);
        ip += &format!("route replace {pods}/24 via {own} dev cilium_host src {own} mtu {MTU}\n");
    }
    node.netns.ip(&ip)?;
    node.netns.sh(&format!(
        "for d in all cilium_host cilium_net cilium_vxlan; do echo 0 > /proc/sys/net/ipv4/conf/$d/rp_filter; done
         iptables -t nat -N CILIUM_POST_nat
         iptables -t nat -A POSTROUTING -j CILIUM_POST_nat
         iptables -t nat -A CILIUM_POST_nat -s {}/24 ! -d 10.42.0.0/16 ! -o cilium_+ -j MASQUERADE
         mkdir /sys/fs/bpf/cilium
         bpftool map create /sys/fs/bpf/cilium/metrics type percpu_array key 4 value {} entries 1 name cilium_metrics
         bpftool map create /sys/fs/bpf/cilium/ipcache type hash key 4 value 4 entries 64 name cilium_ipcache",
        node.pod_address(0),
        programs::COUNTERS * 8,
    ))?;
    fill_ipcache(network, node)?;
    let [ingress, egress] = HOOKS;
    let from_host = Program::named("cil_from_host", programs::FROM_HOST).to(ifindex(node, "cilium_vxlan")?);
    attach(node, "cilium_host", egress, from_host, Side::After)?;
    attach(node, "cilium_host", ingress, Program::named("cil_to_host", programs::TO_HOST), Side::After)?;
    let from_overlay = Program::named("cil_from_overlay", programs::FROM_OVERLAY);
    let from_overlay = from_overlay.to(ifindex(node, "cilium_host")?).of(own);
    attach(node, "cilium_vxlan", ingress, from_overlay, Side::After)?;
    attach_beside(node, "eth0")?;
    if node.public.is_some() {
        attach_beside(node, "eth1")?;
    }
    // Kilo's where Cilium terminates IPIP; here nothing may come out of it.
    tunl0::make(node, "cilium_tunl", &[])
}

/// Maps each other node's pod CIDR to its private address: Cilium does not know locations.
fn fill_ipcache(network: &Network, node: &Node) -> Result<()> {
    let script = network.nodes.iter().filter(|other| other.name() != node.name()).map(|other| {
        let IpAddr::V4(address) = other.private else { bail!("{} has no IPv4 address", other.name()) };
        let bytes = |octets: [u8; 4]| octets.map(|octet| octet.to_string()).join(" ");
        Ok(format!(
            "bpftool map update pinned /sys/fs/bpf/cilium/ipcache key {} value {}\n",
            bytes(other.pod_address(0).octets()),
            // The helper that sets the tunnel key takes host byte order.
            bytes(u32::from(address).to_ne_bytes()),
        ))
    });
    node.netns.sh(&script.collect::<Result<String>>()?).map(drop)
}

/// Packets that a node's programs counted, indexed by counter.
#[derive(Debug)]
struct Counted([u64; programs::COUNTERS]);

impl std::ops::Index<u32> for Counted {
    type Output = u64;

    fn index(&self, counter: u32) -> &u64 {
        &self.0[counter as usize]
    }
}

/// Reads the counters of the node's programs, summed over all CPUs.
fn counted(node: &Node) -> Result<Counted> {
    let counters = MapData::from_pin(directory(node)?.join("metrics"))?;
    let array: PerCpuArray<_, [u64; programs::COUNTERS]> = Map::PerCpuArray(counters).try_into()?;
    let of_cpus = array.get(&0, 0)?;
    Ok(Counted(std::array::from_fn(|counter| of_cpus.iter().map(|of_cpu| of_cpu[counter]).sum())))
}

/// Where in a hook's chain a program is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Before,
    After,
}

/// Puts a program on a hook of a device of the node; pins keep it there.
fn attach(node: &Node, device: &str, hook: TcAttachType, program: Program, side: Side) -> Result<()> {
    let (directory, device, name) = (directory(node)?, device.to_owned(), program.name());
    let attach = move || -> Result<()> {
        let mut program = program.load(&directory, &format!("{name}_{device}"))?;
        let order = if side == Side::Before { LinkOrder::first() } else { LinkOrder::last() };
        let link = program.attach_with_options(&device, hook, TcAttachOptions::TcxOrder(order))?;
        let link: FdLink = program.take_link(link)?.try_into()?;
        link.pin(directory.join(format!("{name}_{device}_link")))?;
        Ok(())
    };
    let thread = node.netns.spawn(attach).join();
    thread
        .map_err(|_| anyhow::anyhow!("loader thread"))??
        .with_context(|| format!("{name} on {}", node.name()))
}

/// Attaches to each hook of the device a foreign program that counts before all others, and Cilium's after
/// them.
fn attach_beside(node: &Node, device: &str) -> Result<()> {
    let number = SHARED.iter().position(|(name, _)| *name == device).context("no shared device")?;
    for (side, hook) in HOOKS.into_iter().enumerate() {
        let counter = counter(number, side);
        attach(node, device, hook, Program::named(WATCH[side], counter), Side::Before)?;
        let netdev = Program::named(NETDEV[side], counter + 1);
        // The host firewall guards devices with Ethernet headers, by which packets enter the host.
        let netdev = if device == "kilo0" { netdev } else { netdev.guarding() };
        attach(node, device, hook, netdev, Side::After)?;
    }
    Ok(())
}

/// Counter of the program before ours on a hook of a shared device; the next one is of the program after
/// ours.
fn counter(device: usize, hook: usize) -> u32 {
    (device * 4 + hook * 2) as u32
}

fn ifindex(node: &Node, device: &str) -> Result<u32> {
    let text = node.netns.sh(&format!("cat /sys/class/net/{device}/ifindex"))?;
    text.trim().parse().with_context(|| format!("{device}: {text}"))
}

/// Writes a CNI configuration that gives each pod a point-to-point link and a route.
fn configure_pods(node: &Node) -> Result<()> {
    let conf = serde_json::json!({
        "cniVersion": "0.3.1",
        "name": "cilium",
        "plugins": [{
            "type": "ptp",
            "mtu": MTU,
            "ipam": {
                "type": "host-local",
                "subnet": format!("{}/24", node.pod_address(0)),
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    node.netns.sh(&format!("cat > {} <<'CONF'\n{conf}\nCONF", cni_conf::CONF)).map(drop)
}

/// Sends a packet that the host firewall must refuse, and waits until it has.
fn try_the_firewall(network: &Network) -> Result<()> {
    let (from, to) = (network.node("a2")?, network.node("a1")?);
    let target = (to.private, programs::KILO_VXLAN_PORT);
    let sent = from.netns.spawn(move || UdpSocket::bind("0.0.0.0:0")?.send_to(b"not yet", target)).join();
    sent.map_err(|_| anyhow::anyhow!("sender"))???;
    wait::until("the host firewall of a1 refuses something", Duration::from_secs(10), || {
        Ok(counted(to)?[programs::REFUSED] > 0)
    })?;
    Ok(())
}

/// Programs on a hook in the order they run: id and name.
type Chain = Vec<(u32, String)>;

/// The chains of the shared hooks, by device and hook, for the devices that the node has.
fn chains(node: &Node) -> Result<BTreeMap<String, Chain>> {
    let there = node.netns.sh("ls /sys/class/net")?;
    let devices = SHARED.iter().filter(|(device, _)| there.split_whitespace().any(|name| name == *device));
    let query = |device: &'static str, hook| {
        let query = move || SchedClassifier::query_tcx(device, hook);
        let (_, programs) =
            node.netns.spawn(query).join().map_err(|_| anyhow::anyhow!("query thread"))???;
        let named = |program: &aya::programs::ProgramInfo| {
            (program.id(), program.name_as_str().unwrap_or_default().to_owned())
        };
        Ok::<_, anyhow::Error>((format!("{device} {hook:?}"), programs.iter().map(named).collect()))
    };
    devices.flat_map(|(device, _)| HOOKS.map(|hook| query(device, hook))).collect()
}

/// Whichever came first, a foreign program stays before all others, ours come before those that were there,
/// and Cilium's come after ours.
fn beside(lab: &mut Lab) -> Result<String> {
    let mut seen = 0;
    for node in &lab.network.nodes {
        let (chains, counted) = (chains(node)?, counted(node)?);
        for (number, (device, ours)) in SHARED.iter().enumerate() {
            if *device == "eth1" && node.public.is_none() {
                continue;
            }
            for (side, hook) in HOOKS.into_iter().enumerate() {
                let chain = &chains[&format!("{device} {hook:?}")];
                let names: Vec<_> = chain.iter().map(|(_, name)| name.as_str()).collect();
                let (watch, ours, netdev) = (WATCH[side], ours[side], NETDEV[side]);
                let came_later = agent_first(node) || *device == "kilo0";
                let wanted = if came_later { [watch, ours, netdev] } else { [ours, watch, netdev] };
                ensure!(names == wanted, "{} {device} {hook:?}: {names:?}, not {wanted:?}", node.name());
                let at = counter(number, side);
                let before_ours = counted[at];
                // On a member's kilo0 our programs consume every packet.
                let all_taken = *device == "kilo0" && node.public.is_none();
                ensure!(
                    (before_ours > 0 || !came_later) && (counted[at + 1] > 0 || all_taken),
                    "{} {device} {hook:?}: the others count {before_ours} and {} packets",
                    node.name(),
                    counted[at + 1]
                );
                seen += before_ours + counted[at + 1];
            }
        }
        for counter in [programs::FROM_HOST, programs::FROM_OVERLAY] {
            ensure!(counted[counter] > 0, "{}: {counted:?}", node.name());
        }
    }
    Ok(format!("({seen} packets)"))
}

/// Runs the matrix again; meanwhile the host firewall refuses nothing.
fn not_refused(lab: &mut Lab) -> Result<String> {
    let refused = |lab: &Lab| -> Result<Vec<u64>> {
        lab.network.nodes.iter().map(|node| Ok(counted(node)?[programs::REFUSED])).collect()
    };
    let before = refused(lab)?;
    let matrix = matrix::run(&lab.network)?;
    matrix.all_passed()?;
    let after = refused(lab)?;
    ensure!(before == after, "refused packets: {before:?}, then {after:?}");
    Ok(format!("({} probes)", matrix.total()))
}

/// Cilium's program on pods' links does no route lookup: packets for any pod are sent to the private address
/// of its node.
fn tunnelled(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    for node in &network.nodes {
        let route = node.netns.sh(&format!("ip -o route get {}", node.pod_ip()))?;
        let device = route.split(" dev ").nth(1).and_then(|rest| rest.split(' ').next());
        let device = device.with_context(|| format!("no device in {route}"))?;
        let vxlan = ifindex(node, "cilium_vxlan")?;
        let program = Program::named("cil_from_container", programs::FROM_CONTAINER).to(vxlan);
        attach(node, device, TcAttachType::Ingress, program, Side::After)?;
    }
    let before: Vec<_> = network.nodes.iter().map(counted).collect::<Result<_>>()?;
    let matrix = matrix::run(network)?;
    matrix.all_passed()?;
    let mut packets = 0;
    for (node, before) in network.nodes.iter().zip(before) {
        let sent = counted(node)?[programs::FROM_CONTAINER] - before[programs::FROM_CONTAINER];
        ensure!(sent > 0, "no packet of the pod of {}", node.name());
        packets += sent;
    }
    no_drops(lab)?;
    nothing_in_clear(lab)?;
    Ok(format!("({} probes, {packets} packets of pods)", matrix.total()))
}

/// Ends agents by SIGKILL and SIGTERM; meanwhile and afterwards the chains are unchanged.
fn restarted(lab: &mut Lab) -> Result<String> {
    let all = |lab: &Lab| lab.network.nodes.iter().map(chains).collect::<Result<Vec<_>>>();
    // The agent's own programs have other ids afterwards, at the same position.
    let order = |chains: &[BTreeMap<String, Chain>]| -> Vec<_> {
        let of = |(number, name): &(u32, String)| {
            let ours = SHARED.iter().any(|(_, ours)| ours.contains(&name.as_str()));
            (name.clone(), (!ours).then_some(*number))
        };
        let all = chains.iter().flat_map(BTreeMap::iter);
        all.map(|(hook, chain)| (hook.clone(), chain.iter().map(of).collect::<Vec<_>>())).collect()
    };
    let before = all(lab)?;
    let nodes = lab.network.nodes.clone();
    for (node, signal) in nodes.iter().zip([Signal::SIGKILL, Signal::SIGTERM].into_iter().cycle()) {
        lab.agents.stop(node.name(), signal)?;
    }
    ensure!(all(lab)? == before, "the chains change when agents end: {before:?}");
    nodes.iter().try_for_each(|node| lab.agents.start(node))?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(120))?;
    let after = all(lab)?;
    ensure!(order(&after) == order(&before), "before {before:?}, after {after:?}");
    let counted_before: Vec<_> = nodes.iter().map(counted).collect::<Result<_>>()?;
    let own = |node: &Node| -> Result<u64> {
        let metrics = counters::scrape(&node.netns)?;
        Ok(["encrypt", "steer", "deliver", "forward"].iter().map(|name| action(&metrics, name)).sum())
    };
    let own_before: Vec<_> = nodes.iter().map(own).collect::<Result<_>>()?;
    let matrix = matrix::run(&lab.network)?;
    matrix.all_passed()?;
    for ((node, theirs), ours) in nodes.iter().zip(counted_before).zip(own_before) {
        let now = counted(node)?;
        let more = |counter: u32| now[counter] > theirs[counter];
        let eth0 = counter(0, 0);
        ensure!(more(eth0) && more(eth0 + 1), "{}: {theirs:?}, then {now:?}", node.name());
        ensure!(own(node)? > ours, "{}: the agent's programs count nothing", node.name());
    }
    Ok(format!("({} probes)", matrix.total()))
}

/// Nodes publish the address of `cilium_host`, and members send IPIP to it.
fn ipip(lab: &mut Lab) -> Result<String> {
    for node in &lab.network.nodes {
        let said = lab.agents.cluster().join(format!("{}.kilo.yaml", node.name()));
        let said = fs::read_to_string(&said).with_context(|| said.display().to_string())?;
        let wanted = format!("kilo.squat.ai/cni-compatibility-ip: {}/32", overlay_address(node));
        ensure!(said.contains(&wanted), "no {wanted} in {said}");
    }
    let tunnels = |lab: &Lab| -> Result<Vec<String>> {
        let show = |node: &Node| {
            node.netns.sh("ip -o link show cilium_tunl; ip -o -4 address show cilium_tunl; \
                 cat /sys/class/net/cilium_tunl/statistics/rx_packets")
        };
        lab.network.nodes.iter().map(show).collect()
    };
    let before = tunnels(lab)?;
    let figure = cloud::ipip_in_overlay(lab)?;
    let after = tunnels(lab)?;
    ensure!(before == after, "cilium_tunl: {before:?}, then {after:?}");
    Ok(figure)
}

fn uninstalled(lab: &mut Lab) -> Result<String> {
    // Cilium came first to one, the agent to the other.
    let names = ["a1", AGENT_FIRST[0]];
    checks::uninstall_from(lab, &names)?;
    // The kernel frees a link some time after its last pin is gone.
    wait::until("only Cilium's programs are left", Duration::from_secs(20), || {
        let left = names.iter().try_for_each(|name| only_theirs(lab.network.node(name)?));
        Ok(left.map_err(|others| format!("{others:#}")))
    })?;
    Ok(String::new())
}

fn only_theirs(node: &Node) -> Result<()> {
    for (hook, chain) in chains(node)? {
        let names: Vec<_> = chain.iter().map(|(_, name)| name.as_str()).collect();
        let side = usize::from(hook.ends_with("Egress"));
        ensure!(names == [WATCH[side], NETDEV[side]], "{} {hook}: {names:?}", node.name());
    }
    Ok(())
}
