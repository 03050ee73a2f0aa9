//! Following gateways: a task that hears their claims beside everything that waits for the API server.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use kilo_agent::far::follow::{Act, Follow, HELLO};
use kilo_common::signal::{LONGEST, PORT};
use kilo_core::{
    signal_id,
    topology::{Acting, Mesh},
    wireguard::{WireguardPlan, key::PublicKey},
};
use kilo_host::wireguard::Device;
use tokio::{
    net::UdpSocket,
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

/// Whether this host has IPv6, which signals inside tunnels are.
pub fn is_possible() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|off| off.trim() == "0")
}

pub struct Following {
    control: Ipv6Addr,
    shared: Arc<Shared>,
    task: Option<(u32, JoinHandle<()>)>,
}

struct Shared {
    follow: Mutex<Follow>,
    /// There are other gateways, which are to be told.
    changed: Notify,
}

impl Shared {
    fn follow(&self) -> MutexGuard<'_, Follow> {
        self.follow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Following {
    /// Of the machine with this key.
    pub fn new(key: &PublicKey) -> Self {
        let shared = Shared { follow: Mutex::new(Follow::new(key)), changed: Notify::new() };
        Self { control: signal_id::control_address(key), shared: Arc::new(shared), task: None }
    }

    /// Who carries what, as far as it was claimed.
    pub fn acting(&self) -> Acting {
        self.shared.follow().acting()
    }

    /// Goes on with what was planned and applied, on this device, which has the control address by now.
    pub async fn go_on(&mut self, mesh: &Mesh, plan: &WireguardPlan, device: &Device) -> Result<()> {
        if self.shared.follow().locations_are(mesh, plan) {
            self.shared.changed.notify_one();
        }
        let index = device.index();
        if self.task.as_ref().is_some_and(|(of, task)| *of == index && !task.is_finished()) {
            return Ok(());
        }
        self.stop();
        let socket = UdpSocket::bind(SocketAddr::from((self.control, PORT))).await;
        let socket = socket.context("hear what gateways claim")?;
        // What WireGuard has not decrypted proves nothing of its sender.
        socket.bind_device(Some(device.name().as_bytes())).context("hear the tunnels alone")?;
        while socket.try_recv(&mut [0; LONGEST]).is_ok() {}
        let task = run(Arc::clone(&self.shared), socket, device.clone());
        self.task = Some((index, tokio::spawn(task)));
        Ok(())
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
                    let heard = shared.follow().hears(from.ip(), &bytes[..length], micros());
                    heard.unwrap_or_else(|why| {
                        tracing::debug!(%from, why, "what a gateway said counts nothing");
                        Vec::new()
                    })
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to hear what gateways claim; trying again");
                    sleep(Duration::from_secs(1)).await;
                    continue;
                }
            },
            () = sleep_until(wake) => shared.follow().wakes(micros(), rand::random),
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
                Ok(()) => tracing::info!(%peer, prefixes = prefixes.len(), "another gateway carries these"),
                Err(error) => {
                    tracing::error!(%error, "failed to move prefixes to another gateway; it says so again");
                    return;
                }
            },
            Act::Send(to, bytes) => {
                // A gateway that nobody has reached yet has no endpoint.
                if let Err(error) = socket.send_to(&bytes, (IpAddr::V6(to), PORT)).await {
                    tracing::debug!(%error, %to, "not sent to a gateway");
                }
            }
        }
    }
}
