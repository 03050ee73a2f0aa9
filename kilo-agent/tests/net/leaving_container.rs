//! An agent in a container without the host's BPF file system, as in Kilo's own DaemonSet, is asked to stop
//! while a pod talks to an outside host.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    cluster,
    netns::{Agent, isolated, sh, succeeds},
    wait::until,
};

use std::{collections::BTreeSet, fs, time::Duration};

const LIMIT: Duration = Duration::from_secs(20);

/// File in which the outside host records the source of each datagram.
const SEEN: &str = "/run/seen";
/// File with what came back on the pod's TCP connection, and why that ended.
const ECHOED: &str = "/run/echoed";

/// Sets up a pod behind this host, and an outside host beyond its uplink.
fn build() {
    cluster::prepare();
    sh("mkdir -p /run/netns; sysctl -qw net.ipv4.ip_forward=1; umount /sys/fs/bpf; \
        ip netns add outside; ip link set other netns outside; ip -n outside link set lo up; \
        ip -n outside link set other up; ip -n outside address add 10.1.0.1/24 dev other; \
        ip -n outside address add 198.51.100.9/32 dev lo; ip -n outside route add default via 10.1.0.11; \
        ip netns add pod; ip link add pod type veth peer name eth0 netns pod; ip link set pod up; \
        ip address add 10.42.1.1/24 dev pod; ip -n pod link set lo up; ip -n pod link set eth0 up; \
        ip -n pod address add 10.42.1.2/24 dev eth0; ip -n pod route add default via 10.42.1.1");
    // A NAT rule makes the kernel track flows, as kube-proxy's rules do.
    sh("nft add table ip other; nft 'add chain ip other nat { type nat hook postrouting priority 100; }'; \
        nft add rule ip other nat ip daddr 192.0.2.99 masquerade");
    let udp = "my $s = IO::Socket::IP->new(LocalHost => q(198.51.100.9), LocalPort => 9, Proto => q(udp)) or die; \
               while ($s->recv(my $d, 9)) { print $s->peerhost, qq(\\n) }";
    let tcp = "my $l = IO::Socket::IP->new(LocalHost => q(198.51.100.9), LocalPort => 7, Listen => 1) or die; \
               my $c = $l->accept; while (sysread $c, my $d, 99) { syswrite $c, $d }";
    for code in [udp, tcp] {
        sh(&format!("ip netns exec outside perl -e 'use IO::Socket::IP; $| = 1; {code}' >> {SEEN} 2>&1 &"));
    }
}

fn talk() {
    let udp = "my $s = IO::Socket::IP->new(PeerHost => q(198.51.100.9), PeerPort => 9, Proto => q(udp)) or die; \
               while (1) { $s->send(q(x)); select undef, undef, undef, 0.01 }";
    let tcp = "my $c = IO::Socket::IP->new(PeerHost => q(198.51.100.9), PeerPort => 7) or die; \
               while (1) { syswrite $c, q(x); sysread $c, my $d, 9 or die qq(ended: $!); print q(x); \
               select undef, undef, undef, 0.02 }";
    for code in [udp, tcp] {
        sh(&format!("ip netns exec pod perl -e 'use IO::Socket::IP; $| = 1; {code}' >> {ECHOED} 2>&1 &"));
    }
}

fn seen() -> Vec<String> {
    fs::read_to_string(SEEN).unwrap().lines().map(ToOwned::to_owned).collect()
}

/// `Ok` when `so`; otherwise the source that the outside host saw last.
fn is_so(so: bool) -> Result<(), String> {
    if so { Ok(()) } else { Err(format!("{:?}", seen().last())) }
}

/// An agent in its own container, and flows that it masquerades.
fn agent_and_flows() -> Agent {
    build();
    let agent = start();
    talk();
    let host = "10.1.0.11".to_owned();
    until("answers", LIMIT, || is_so(seen().len() > 50 && fs::read_to_string(ECHOED).unwrap().len() > 20));
    assert_eq!(seen().into_iter().collect::<BTreeSet<_>>(), BTreeSet::from([host]));
    agent
}

fn start() -> Agent {
    let flags = ["unshare", "--pid", "--mount", "--propagation=private", "--fork", "--kill-child"];
    let mut command = cluster::kg(&flags);
    command.args(["--cni=true", "--cni-path=/run/absent.conflist", "--iptables-forward-rules=false"]);
    let agent = Agent(command.spawn().unwrap());
    until("the agent has put everything right", LIMIT, || cluster::has_done(&[]));
    agent
}

fn end(agent: &mut Agent, signal: &str) -> bool {
    let kg = sh("pgrep --ns $$ --nslist net -f '^[^ ]*/kg --backend'");
    sh(&format!("kill -{signal} {}", kg.split_whitespace().next_back().unwrap()));
    agent.0.wait().unwrap().success()
}

/// Prints the connection tracking table on failure, because the kernel soon forgets a connection that was
/// reset.
fn assert_no_stream_has_ended() {
    let echoed = fs::read_to_string(ECHOED).unwrap();
    let tracked = || fs::read_to_string("/proc/net/nf_conntrack").unwrap_or_default();
    assert!(!echoed.contains("ended"), "{echoed}\n{}", tracked());
}

fn only_the_host_was_seen() {
    let all: BTreeSet<_> = seen().into_iter().collect();
    assert_eq!(all, BTreeSet::from(["10.1.0.11".to_owned()]), "no packet left with the pod's address");
}

#[test]
fn flows_go_on_with_the_hosts_address_when_pins_end_with_the_container() {
    isolated("flows_go_on_with_the_hosts_address_when_pins_end_with_the_container", || async {
        let mut agent = agent_and_flows();
        let (before, echoed) = (seen().len(), fs::read_to_string(ECHOED).unwrap().len());
        assert!(end(&mut agent, "TERM"));
        assert!(succeeds("nft list table inet kilo | grep -q masquerade"));
        until("the streams go on", LIMIT, || {
            assert_no_stream_has_ended();
            is_so(seen().len() > before + 100 && fs::read_to_string(ECHOED).unwrap().len() > echoed + 50)
        });
        only_the_host_was_seen();
        let _next = start();
        assert!(!succeeds("nft list table inet kilo"), "the rules are still there beside the programs");
        let (before, echoed) = (seen().len(), fs::read_to_string(ECHOED).unwrap().len());
        until("the streams go on with the next agent", LIMIT, || {
            is_so(seen().len() > before + 100 && fs::read_to_string(ECHOED).unwrap().len() > echoed + 50)
        });
        only_the_host_was_seen();
        assert_no_stream_has_ended();
    });
}

#[test]
fn programs_of_a_killed_agent_outlive_its_container() {
    isolated("programs_of_a_killed_agent_outlive_its_container", || async {
        let mut agent = agent_and_flows();
        let (before, echoed) = (seen().len(), fs::read_to_string(ECHOED).unwrap().len());
        assert!(!end(&mut agent, "KILL"));
        until("the streams go on", LIMIT, || {
            is_so(seen().len() > before + 100 && fs::read_to_string(ECHOED).unwrap().len() > echoed + 50)
        });
        only_the_host_was_seen();
        // The next agent has new maps without the flow, which gets another port.
        let _next = start();
        let before = seen().len();
        until("datagrams go on with the next agent", LIMIT, || is_so(seen().len() > before + 100));
        only_the_host_was_seen();
    });
}
