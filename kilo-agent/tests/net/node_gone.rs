//! An agent is asked to stop after its Node object has been deleted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::{stays, until};

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use cluster::kg;
use netns::{Agent, isolated, sh};

const LIMIT: Duration = Duration::from_secs(30);
const LOG: &str = "/run/kg.log";

/// A process in a namespace with the other end of an interface of this host.
struct Pod(Child);

impl Pod {
    fn start() -> Self {
        let child = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().unwrap();
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let namespace = format!("/proc/{}/ns/net", child.id());
        until("the pod's namespace is there", LIMIT, || {
            fs::read_link(&namespace).is_ok_and(|other| other != own)
        });
        sh(&format!("ip link add veth1 type veth peer name eth0 netns {}; ip link set veth1 up", child.id()));
        Self(child)
    }

    /// Ends it; its namespace takes the interface along.
    fn end(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn start() -> Agent {
    Agent(kg(&[]).stdout(fs::File::create(LOG).unwrap()).stderr(Stdio::inherit()).spawn().unwrap())
}

/// Asks the agent to stop; returns how long that took.
fn stop(agent: &mut Agent) -> Duration {
    let started = Instant::now();
    sh(&format!("kill -TERM {}", agent.0.id()));
    assert!(agent.0.wait().unwrap().success());
    started.elapsed()
}

/// Links, programs on hooks, and routes.
fn barrier() -> String {
    sh("ls /sys/fs/bpf/kilo/links 2>/dev/null || true; \
        for hook in ingress egress; do tc filter show dev eth0 $hook; done | grep -o 'kilo_[a-z_]*\\|uplink_[a-z]*' || true; \
        ip route show table all proto 107; ip route show type unreachable")
}

#[test]
fn while_pods_run_everything_stays_and_without_them_it_goes() {
    isolated("while_pods_run_everything_stays_and_without_them_it_goes", || async {
        cluster::prepare();
        cluster::write_node(2, "b", "10.42.2.0/24", true);
        let pod = Pod::start();
        let mut agent = start();
        let whole = || cluster::has_done(&[("kilo_nodes", 2)]) && barrier().contains("10.42.2.0/24");
        until("the agent has put everything right", LIMIT, whole);
        let before = barrier();
        cluster::remove("n1");
        let knows = || fs::read_to_string(LOG).unwrap().contains("node \\\"n1\\\" does not exist");
        until("the agent knows", LIMIT, knows);
        let took = stop(&mut agent);
        assert_eq!(barrier(), before, "{}", fs::read_to_string(LOG).unwrap());
        let log = fs::read_to_string(LOG).unwrap();
        assert!(
            log.contains("containers still run here") && log.contains("\"interfaces\":\"veth1\""),
            "{log}"
        );
        assert!(took > Duration::from_secs(9), "it waited {took:?} for the pod to end");

        let mut agent = start();
        until("the agent knows", LIMIT, knows);
        let expected = before;
        let ends = std::thread::spawn(move || {
            stays("everything is there while the pod runs", Duration::from_secs(1), || barrier() == expected);
            pod.end();
        });
        let took = stop(&mut agent);
        ends.join().unwrap();
        assert_eq!(barrier(), "", "{}", fs::read_to_string(LOG).unwrap());
        assert!(took < Duration::from_secs(9), "it waited {took:?} for a pod that has ended");
    });
}
