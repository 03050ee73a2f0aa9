//! Nodes of the mesh: namespaces of the lab on bridges, one per location, between which this namespace
//! routes.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, TcpListener as Listener},
    os::linux::fs::MetadataExt as _,
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kilo_lab::{
    counters,
    netns::{self as lab_netns, Netns},
};
use tokio::net::{TcpListener, TcpStream};

use crate::{
    netns,
    objects::{self, LOCATIONS},
    process,
};

/// Port of the API server on the loopback of each node.
pub const API_PORT: u16 = 6443;
/// Name of the lab, which comes before the node's in the names of namespaces.
const LAB: &str = "scale";
const LOGS: &str = "/tmp/logs";
/// Pause before an agent that has ended is started again.
const RESTART: Duration = Duration::from_secs(1);

/// Mounts file systems for this namespace alone, and creates a bridge per location. (`cargo xtask` has made
/// room for neighbours, of which the kernel has one table for the whole machine.)
pub fn prepare_machine() {
    netns::sh(&format!(
        "mount -t tmpfs tmp /tmp; mount -t tmpfs run /run; mkdir -p /run/netns {LOGS}; ip link set lo up; \
         sysctl -qw net.ipv4.ip_forward=1"
    ));
    for location in 0..LOCATIONS {
        netns::sh(&format!(
            "ip link add loc-{location} type bridge; ip link set loc-{location} up; \
             ip address add {}/16 dev loc-{location}; ip address add {}/24 dev loc-{location}",
            Ipv4Addr::new(10, 201 + location as u8, 255, 254),
            router(location),
        ));
    }
}

fn router(location: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, location as u8, 254)
}

/// Namespaces of one node, in which the benchmark starts an agent of its own.
pub struct Host {
    pub number: usize,
    pub netns: Netns,
    ends: Arc<Ends>,
}

/// How often an agent has ended, and whether it is to end now.
#[derive(Default)]
struct Ends {
    count: AtomicUsize,
    are_wanted: AtomicBool,
}

impl Host {
    /// Creates its namespaces, an uplink with a private and a public address, and the bridge that pods would
    /// be on.
    pub fn create(number: usize) -> Self {
        let name = objects::name(number);
        let mut netns = Netns::create(LAB, &name).unwrap();
        netns.hold(Path::new(&format!("{LOGS}/{name}.hold"))).unwrap();
        let (location, place) = (number % LOCATIONS, number / LOCATIONS);
        let id = &netns.id;
        netns::sh(&format!(
            "ip link add n{number} type veth peer name eth0 netns {id}; ip link set n{number} master loc-{location} up"
        ));
        let public = Ipv4Addr::new(198, 18, location as u8, place as u8 + 1);
        netns
            .ip(&format!(
                "address add {}/16 dev eth0\naddress add {public}/24 dev eth0\nlink set eth0 up\n\
                 route add default via {}\nlink add kube-bridge type bridge\nlink set kube-bridge up\n\
                 address add {}/24 dev kube-bridge\n",
                objects::private(number),
                router(location),
                objects::gateway(number),
            ))
            .unwrap();
        netns.sh("sysctl -qw net.ipv4.ip_forward=1").unwrap();
        Self { number, netns, ends: Arc::default() }
    }

    /// Address of its bridge.
    pub fn gateway(&self) -> Ipv4Addr {
        objects::gateway(self.number)
    }

    /// Forwards connections to its loopback to the API server.
    pub fn offer_api(&self, to: u16) {
        let listen = || Listener::bind((Ipv4Addr::LOCALHOST, API_PORT)).unwrap();
        let listener = self.netns.spawn(listen).join().unwrap().unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
    }

    /// Starts its agent, and restarts it whenever it ends by itself, as a kubelet does.
    pub fn start_agent(&self, kubeconfig: &Path, flags: &[&str]) {
        let name = objects::name(self.number);
        let log = fs::File::create(format!("{LOGS}/{name}.log")).unwrap();
        let words = process::confined(kubeconfig);
        let mut command = self.netns.command(&words[0]);
        command
            .args(&words[1..])
            .args(["--hostname", &name, "--wireguard", "userspace"])
            .args(["--cni-path", "/run/kilo/10-kilo.conflist"])
            .args(["--internal-cidr", &format!("10.{}.0.0/16", 201 + self.number % LOCATIONS)])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let ends = Arc::clone(&self.ends);
        std::thread::spawn(move || {
            while !ends.are_wanted.load(Ordering::Relaxed) {
                let mut child = command.spawn().unwrap();
                let _ = child.wait();
                std::thread::sleep(RESTART);
                ends.count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// How often its agent has ended by itself.
    pub fn ends(&self) -> usize {
        self.ends.count.load(Ordering::Relaxed)
    }

    /// One of its agent's metrics.
    pub fn metric(&self, name: &str) -> Option<u64> {
        counters::scrape(&self.netns).ok()?.get(name).copied()
    }

    pub async fn until(&self, name: &str, value: u64, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.metric(name) != Some(value) {
            assert!(Instant::now() < deadline, "{name} of node {} is {:?}", self.number, self.metric(name));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Takes its link down and kills all its processes.
    pub fn lose_power(&self) {
        self.ends.are_wanted.store(true, Ordering::Relaxed);
        netns::sh(&format!("ip link set n{} down", self.number));
        lab_netns::kill_processes(std::slice::from_ref(&self.netns));
    }
}

/// Resources that some processes use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// CPU time since they started.
    pub ran: Duration,
    /// Megabytes (10^6 bytes); shared memory counts in proportion.
    pub memory: f64,
}

/// Resources that agents and the processes with the WireGuard devices use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub agents: Used,
    pub wireguard: Used,
}

pub fn usage(hosts: &[Host]) -> Usage {
    let inode = |host: &Host| fs::metadata(host.netns.path()).unwrap().st_ino();
    let ours: BTreeMap<u64, usize> = hosts.iter().map(|host| (inode(host), host.number)).collect();
    let mut usage = Usage::default();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let is_ours = fs::metadata(path.join("ns/net")).is_ok_and(|it| ours.contains_key(&it.st_ino()));
        let is_kg = fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == "kg");
        if !is_ours || !is_kg {
            continue;
        }
        let Ok(words) = fs::read(path.join("cmdline")) else { continue };
        let is_device = words.split(|byte| *byte == 0).any(|word| word == b"userspace-wireguard");
        let used = if is_device { &mut usage.wireguard } else { &mut usage.agents };
        used.ran += ran(&path);
        used.memory += memory(&path);
    }
    usage
}

/// User and system time, which the kernel gives in hundredths of a second.
fn ran(process: &Path) -> Duration {
    let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
    let fields: Vec<u64> = stat
        .rsplit_once(") ")
        .map(|(_, fields)| fields.split(' ').map(|field| field.parse().unwrap_or(0)).collect())
        .unwrap_or_default();
    Duration::from_millis(fields.get(11..13).map_or(0, |times| times.iter().sum::<u64>() * 10))
}

fn memory(process: &Path) -> f64 {
    let text = fs::read_to_string(process.join("smaps_rollup")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) * 1024.0 / 1e6
}

/// Ends all agents, and removes the namespaces.
pub fn end(hosts: &[Host]) {
    hosts.iter().for_each(|host| host.ends.are_wanted.store(true, Ordering::Relaxed));
    lab_netns::remove(hosts.iter().map(|host| host.netns.clone())).unwrap();
}
