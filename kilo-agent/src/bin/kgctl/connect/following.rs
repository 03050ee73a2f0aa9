//! Follows gateways: a task receives their claims, and never waits for the API server.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    net::{IpAddr, Ipv6Addr, SocketAddrV6},
    os::fd::AsRawFd as _,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use kilo_agent::far::follow::{Act, Follow, HELLO};
use kilo_common::signal::{LONGEST, PORT};
use kilo_core::{
    net::MIN_IPV6_MTU,
    signal_id,
    topology::{Acting, Mesh},
    wireguard::{WireguardPlan, key::PublicKey},
};
use kilo_host::wireguard::Device;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn6, bind, setsockopt, sockopt::BindToDevice,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    net::UdpSocket,
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

/// Why an interface with this MTU cannot carry IPv6, which signals inside tunnels use, and what to do; `None`
/// if it can.
pub fn obstacle(mtu: u32) -> Option<String> {
    if mtu < MIN_IPV6_MTU {
        return Some(format!("--mtu must be at least {MIN_IPV6_MTU}"));
    }
    let off = |of| std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6"));
    ["all", "default"].into_iter().find_map(|of| match off(of) {
        Ok(off) if off.trim() == "0" => None,
        Ok(_) => Some(format!("net.ipv6.conf.{of}.disable_ipv6 must be 0")),
        Err(_) => Some("the kernel needs IPv6".to_owned()),
    })
}

/// A socket that receives only packets decrypted by WireGuard: nothing else proves who sent them.
fn socket(control: Ipv6Addr, device: &str) -> Result<UdpSocket> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = nix::sys::socket::socket(AddressFamily::Inet6, SockType::Datagram, flags, None)?;
    // Before the socket has an address, so that it receives nothing else in between.
    setsockopt(&socket, BindToDevice, &OsString::from(device))?;
    bind(socket.as_raw_fd(), &SockaddrIn6::from(SocketAddrV6::new(control, PORT, 0, 0)))?;
    Ok(UdpSocket::from_std(socket.into())?)
}

pub struct Following {
    control: Ipv6Addr,
    shared: Arc<Shared>,
    task: Option<(u32, JoinHandle<()>)>,
}

struct Shared {
    follow: Mutex<Follow>,
    /// The set of gateways has changed, or one has just answered: this machine announces itself to each.
    changed: Notify,
}

impl Shared {
    fn follow(&self) -> MutexGuard<'_, Follow> {
        self.follow.lock()
    }
}

impl Following {
    /// Creates the follower for the machine with this key; nothing is received yet.
    pub fn new(key: &PublicKey) -> Self {
        let shared = Shared { follow: Mutex::new(Follow::new(key)), changed: Notify::new() };
        Self { control: signal_id::control_address(key), shared: Arc::new(shared), task: None }
    }

    /// The acting gateways, as claimed so far.
    pub fn acting(&self) -> Acting {
        self.shared.follow().acting()
    }

    /// Follows the gateways of a plan that was applied to this device, which then has the control address.
    pub fn go_on(&mut self, mesh: &Mesh, plan: &WireguardPlan, device: &Device) -> Result<()> {
        if self.shared.follow().set_locations(mesh, plan) {
            self.shared.changed.notify_one();
        }
        let index = device.index();
        if self.task.as_ref().is_some_and(|(of, task)| *of == index && !task.is_finished()) {
            return Ok(());
        }
        self.stop();
        let socket =
            socket(self.control, device.name()).context("failed to listen for claims of gateways")?;
        let task = run(Arc::clone(&self.shared), socket, device.clone());
        self.task = Some((index, tokio::spawn(task)));
        Ok(())
    }

    /// Whether claims are received.
    pub const fn is_on(&self) -> bool {
        self.task.is_some()
    }

    /// Announces this machine to every gateway.
    pub fn announce(&self) {
        self.shared.changed.notify_one();
    }

    /// Keys of the followed gateways.
    pub fn gateways(&self) -> BTreeSet<PublicKey> {
        self.shared.follow().keys()
    }

    /// A gateway's name, for messages.
    pub fn name(&self, key: &PublicKey) -> String {
        self.shared.follow().name(signal_id::node(key)).to_owned()
    }

    fn stop(&mut self) {
        if let Some((_, task)) = self.task.take() {
            task.abort();
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn run(shared: Arc<Shared>, socket: UdpSocket, device: Device) {
    let began = Instant::now();
    let micros = || u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    let (mut hello, mut bytes) = (began, [0; LONGEST + 1]);
    loop {
        let wake = began + Duration::from_micros(shared.follow().wake().min(micros() + 3_600_000_000));
        let acts = tokio::select! {
            received = socket.recv_from(&mut bytes) => match received {
                Ok((length, from)) => {
                    let heard = shared.follow().hear(from.ip(), &bytes[..length], micros());
                    heard.unwrap_or_else(|why| {
                        tracing::debug!(%from, why = why.label(), "ignoring a signal of a gateway");
                        Vec::new()
                    })
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to receive claims of gateways; retrying");
                    sleep(Duration::from_secs(1)).await;
                    continue;
                }
            },
            () = sleep_until(wake) => shared.follow().wake_up(micros(), rand::random),
            () = shared.changed.notified() => shared.follow().hello(rand::random()),
            () = sleep_until(hello) => {
                hello = Instant::now() + Duration::from_micros(HELLO);
                shared.follow().hello(rand::random())
            }
        };
        perform(acts, &socket, &device).await;
    }
}

async fn perform(acts: Vec<Act>, socket: &UdpSocket, device: &Device) {
    for act in acts {
        match act {
            Act::Move(peer, prefixes) => match device.claim(peer, &prefixes) {
                Ok(()) => {
                    tracing::info!(%peer, prefixes = prefixes.len(), "prefixes moved to another gateway");
                }
                Err(error) => {
                    tracing::error!(%error, "failed to move prefixes to another gateway; that gateway will ask again");
                    return;
                }
            },
            Act::Send(to, bytes) => {
                // A gateway that has not been reached yet has no endpoint.
                if let Err(error) = socket.send_to(&bytes, (IpAddr::V6(to), PORT)).await {
                    tracing::debug!(%error, %to, "failed to send a signal to a gateway");
                }
            }
        }
    }
}
