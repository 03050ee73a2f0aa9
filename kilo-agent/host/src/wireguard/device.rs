//! A WireGuard device: reading it and writing changes, kernel or userspace.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::fd::AsRawFd as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use ipnet::IpNet;
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    task::spawn_blocking,
};
use wireguard_control as control;

use super::{
    WireguardError,
    reading::{Last, Reading},
    socket::{check_name, interface_name, socket_path},
};
use crate::net::{Rtnl, links};
use kilo_core::wireguard::WireguardPlan;
use kilo_core::wireguard::{
    DeviceState, PeerState,
    diff::{self, Change},
    key::{PublicKey, SecretKey},
    uapi::{self, SetPeer, SetRequest},
};

/// Which WireGuard a device belongs to: it decides how it is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's module, over generic netlink.
    Kernel,
    /// A process with a TUN device, over its UAPI socket.
    Userspace,
}

impl Backend {
    /// Name in messages and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Userspace => "userspace",
        }
    }
}

/// What status and metrics show of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Address where it was last seen, or that was configured.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last handshake; `None` = there was none, and then the
    /// endpoint is only what was set, not what was seen.
    pub handshake_age: Option<Duration>,
    /// Bytes received from it.
    pub rx_bytes: u64,
    /// Bytes sent to it.
    pub tx_bytes: u64,
}

/// Timeout of a request to a userspace process.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a request that moves prefixes to another gateway.
const CLAIM_TIMEOUT: Duration = Duration::from_millis(500);
/// Most peers in one request to a userspace process.
const PEERS_AT_A_TIME: usize = 256;

/// An existing WireGuard device.
#[derive(Clone, Debug)]
pub struct Device {
    name: String,
    index: u32,
    backend: Backend,
    rtnl: Rtnl,
    /// The last reading, shared by all clones of this handle.
    last: Arc<Last>,
}

impl Device {
    /// Opens an existing device by name.
    pub async fn open(rtnl: &Rtnl, name: &str, backend: Backend) -> Result<Self, WireguardError> {
        check_name(name)?;
        let link =
            links::by_name(rtnl, name).await?.ok_or_else(|| WireguardError::Vanished(name.to_owned()))?;
        Ok(Self {
            name: name.to_owned(),
            index: link.index,
            backend,
            rtnl: rtnl.clone(),
            last: Arc::default(),
        })
    }

    /// True when a userspace process answers for the interface.
    pub async fn is_userspace(name: &str) -> bool {
        UnixStream::connect(socket_path(name)).await.is_ok()
    }

    /// The interface's name, by which the userspace process's socket is found as well.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's index of the interface, as of [`Self::open`]: an interface of the same name that was made
    /// since has another one.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Who does the encryption.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// wireguard-control creates a missing interface on its own, without
    /// routes or programs: make sure that ours is still there.
    async fn check(&self) -> Result<(), WireguardError> {
        match links::by_name(&self.rtnl, &self.name).await? {
            Some(link) if link.index == self.index => Ok(()),
            _ => Err(WireguardError::Vanished(self.name.clone())),
        }
    }

    /// Reads the present configuration and counters.
    pub async fn read(&self) -> Result<DeviceState, WireguardError> {
        let started = Instant::now();
        let state = self.ask().await?;
        self.last.keep(reading_of(&state, started));
        Ok(state)
    }

    async fn ask(&self) -> Result<DeviceState, WireguardError> {
        self.check().await?;
        let state = match self.backend {
            Backend::Kernel => {
                let name = interface_name(&self.name)?;
                let device = blocking(move || control::Device::get(&name, control::Backend::Kernel)).await;
                device.map(|device| state_of(device, SystemTime::now()))
            }
            Backend::Userspace => exchange(&self.name, "get=1\n\n").await.and_then(|text| answered(&text)),
        };
        state.map_err(|source| WireguardError::device(format!("read WireGuard device {}", self.name), source))
    }

    /// Writes changes, without a system call if there are none. Returns their number.
    pub async fn apply(&self, changes: &[Change]) -> Result<usize, WireguardError> {
        if changes.is_empty() {
            return Ok(0);
        }
        self.configure(diff::request(changes), "configure").await?;
        Ok(changes.len())
    }

    /// Sends a request; `doing` describes it in errors.
    async fn configure(&self, request: SetRequest, doing: &str) -> Result<(), WireguardError> {
        self.check().await?;
        let port = request.listen_port;
        let result = match self.backend {
            Backend::Kernel => {
                let name = interface_name(&self.name)?;
                let update = kernel_update(&request);
                blocking(move || update.apply(&name, control::Backend::Kernel)).await
            }
            Backend::Userspace => set(&self.name, request).await,
        };
        result.map_err(|source| match port {
            Some(port) if source.kind() == io::ErrorKind::AddrInUse => WireguardError::PortInUse(port),
            _ => WireguardError::device(format!("{doing} WireGuard device {}", self.name), source),
        })
    }

    /// Moves prefixes to an existing peer, whichever peer has them, in one request and at once. For a thread
    /// without a runtime.
    ///
    /// # Errors
    /// When the device refuses or does not answer.
    pub fn claim(&self, peer: PublicKey, prefixes: &[IpNet]) -> Result<(), WireguardError> {
        let update = diff::PeerUpdate { add_allowed_ips: prefixes.to_vec(), ..diff::PeerUpdate::default() };
        let request = diff::request_for_known(peer, update);
        let result = match self.backend {
            // A device that has gone would be created again.
            Backend::Kernel if nix::net::if_::if_nametoindex(&*self.name) != Ok(self.index) => {
                return Err(WireguardError::Vanished(self.name.clone()));
            }
            Backend::Kernel => {
                kernel_update(&request).apply(&interface_name(&self.name)?, control::Backend::Kernel)
            }
            Backend::Userspace => exchange_blocking(&self.name, &request.encode()),
        };
        result.map_err(|source| {
            WireguardError::device(format!("move prefixes of WireGuard device {}", self.name), source)
        })
    }

    /// Changes the endpoint of an existing peer at once; its session continues.
    ///
    /// # Errors
    /// When the device refuses or does not answer.
    pub async fn move_endpoint(&self, peer: PublicKey, to: SocketAddr) -> Result<(), WireguardError> {
        let update = diff::PeerUpdate { endpoint: Some(to), ..diff::PeerUpdate::default() };
        self.configure(diff::request_for_known(peer, update), "move the endpoint of a peer of").await
    }

    /// Reads, compares, writes the difference; returns the number of changes.
    pub async fn reconcile(
        &self,
        plan: &WireguardPlan,
        private_key: &SecretKey,
    ) -> Result<usize, WireguardError> {
        let current = self.read().await?;
        self.apply(&diff::diff(&current, plan, private_key)).await
    }

    /// Handshakes, counters and endpoints, for metrics and discovered endpoints.
    pub async fn read_status(&self) -> Result<BTreeMap<PublicKey, PeerStatus>, WireguardError> {
        self.status_within(Duration::ZERO).await.map(|reading| reading.peers)
    }

    /// As [`Self::read_status`], or what any clone of this handle has read no longer than `age` ago.
    ///
    /// # Errors
    /// When the device has to be read, and cannot be.
    pub async fn status_within(&self, age: Duration) -> Result<Reading, WireguardError> {
        if let Some(known) = self.last.within(age, Instant::now()) {
            return Ok(known);
        }
        let started = Instant::now();
        let reading = reading_of(&self.ask().await?, started);
        self.last.keep(reading.clone());
        Ok(reading)
    }
}

/// What was just read, by a request that `started` then: ages count from there.
fn reading_of(state: &DeviceState, started: Instant) -> Reading {
    let peers = state.peers.iter().map(|(key, peer)| (*key, status(peer))).collect();
    Reading { at: started, took: started.elapsed(), peers }
}

fn status(peer: &PeerState) -> PeerStatus {
    PeerStatus {
        endpoint: peer.endpoint,
        handshake_age: peer.handshake_age,
        rx_bytes: peer.rx_bytes,
        tx_bytes: peer.tx_bytes,
    }
}

/// wireguard-control's calls block on netlink: not on the async threads.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    spawn_blocking(call).await.map_err(io::Error::other)?
}

/// The device's state as the kernel reports it; parts of one peer are merged.
fn state_of(device: control::Device, now: SystemTime) -> DeviceState {
    let mut state = DeviceState {
        private_key: device.private_key.as_ref().and_then(secret),
        listen_port: device.listen_port.unwrap_or(0),
        peers: BTreeMap::new(),
    };
    merge(&mut state, device.peers, now);
    state
}

/// All zero = none, for the private and the pre-shared key alike.
fn secret(key: &control::Key) -> Option<SecretKey> {
    (key.0 != [0; 32]).then(|| SecretKey::from_bytes(key.0))
}

fn merge(state: &mut DeviceState, parts: Vec<control::PeerInfo>, now: SystemTime) {
    for part in parts {
        let peer = state.peers.entry(PublicKey(part.config.public_key.0)).or_default();
        let nets = part.config.allowed_ips.iter();
        peer.allowed_ips.extend(nets.filter_map(|net| Some(IpNet::new(net.address, net.cidr).ok()?.trunc())));
        // Only the first part has these; the others read as absent or zero.
        peer.endpoint = peer.endpoint.or(part.config.endpoint);
        peer.preshared_key =
            peer.preshared_key.or_else(|| part.config.preshared_key.as_ref().and_then(secret));
        let keepalive = part.config.persistent_keepalive_interval.unwrap_or(0);
        peer.persistent_keepalive = peer.persistent_keepalive.max(keepalive);
        let age = uapi::age_of(part.stats.last_handshake_time, now);
        peer.handshake_age = peer.handshake_age.or(age);
        peer.rx_bytes = peer.rx_bytes.max(part.stats.rx_bytes);
        peer.tx_bytes = peer.tx_bytes.max(part.stats.tx_bytes);
    }
}

fn kernel_update(request: &SetRequest) -> control::DeviceUpdate {
    let mut update = control::DeviceUpdate::new();
    if let Some(key) = &request.private_key {
        update = update.set_private_key(control::Key(*key.as_bytes()));
    }
    if let Some(port) = request.listen_port {
        update = update.set_listen_port(port);
    }
    request.peers.iter().fold(update, |update, peer| update.add_peer(kernel_peer(peer)))
}

fn kernel_peer(peer: &SetPeer) -> control::PeerConfigBuilder {
    let mut entry = control::PeerConfigBuilder::new(&control::Key(peer.public_key.0));
    if peer.remove {
        return entry.remove();
    }
    if let Some(endpoint) = peer.endpoint {
        entry = entry.set_endpoint(endpoint);
    }
    if let Some(seconds) = peer.persistent_keepalive {
        entry = entry.set_persistent_keepalive_interval(seconds);
    }
    if let Some(key) = &peer.preshared_key {
        // All zero removes it.
        entry = entry.set_preshared_key(control::Key(key.as_ref().map_or([0; 32], |key| *key.as_bytes())));
    }
    peer.allowed_ips.iter().fold(entry, |entry, net| entry.add_allowed_ip(net.addr(), net.prefix_len()))
}

/// Sends a request in parts, each with a timeout of its own.
async fn set(name: &str, request: SetRequest) -> io::Result<()> {
    for part in request.parts(PEERS_AT_A_TIME) {
        answered(&exchange(name, &part.encode()).await?)?;
    }
    Ok(())
}

/// What a userspace process has answered: the device's state, empty after a write, or the error it reports.
fn answered(text: &str) -> io::Result<DeviceState> {
    match uapi::decode_state(text, SystemTime::now()) {
        Ok((state, 0)) => Ok(state),
        Ok((_, errno)) => Err(io::Error::from_raw_os_error(errno.abs())),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Connects, with a timeout for connecting and for each write. Without one, connecting to a process that
/// accepts nothing would wait for room in its queue.
fn connect_within(path: &Path, timeout: Duration) -> io::Result<std::os::unix::net::UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let stream =
        std::os::unix::net::UnixStream::from(socket(AddressFamily::Unix, SockType::Stream, flags, None)?);
    stream.set_write_timeout(Some(timeout))?;
    match connect(stream.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) => Ok(stream),
        Err(Errno::EAGAIN) => {
            let waited = format!("its process has not accepted a connection for {} ms", timeout.as_millis());
            Err(io::Error::new(io::ErrorKind::TimedOut, waited))
        }
        Err(error) => Err(error.into()),
    }
}

/// As [`exchange`], for a thread without a runtime, which must not wait for long.
fn exchange_blocking(name: &str, request: &str) -> io::Result<()> {
    use std::io::{Read as _, Write as _};
    let mut stream = connect_within(&socket_path(name), CLAIM_TIMEOUT)?;
    stream.set_read_timeout(Some(CLAIM_TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let (mut answer, mut part) = (Vec::new(), [0; 256]);
    while !answer.ends_with(b"\n\n") {
        match stream.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => answer.extend_from_slice(&part[..length]),
            // Linux reports a socket's timeout this way.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let waited = format!("its process has not answered for {} ms", CLAIM_TIMEOUT.as_millis());
                return Err(io::Error::new(io::ErrorKind::TimedOut, waited));
            }
            Err(error) => return Err(error),
        }
    }
    answered(std::str::from_utf8(&answer).map_err(io::Error::other)?).map(drop)
}

/// Sends one request over the socket; returns the answer. Not done by wireguard-control, which turns every
/// error into EINVAL, prints to stdout and starts `wireguard-go` on its own when nobody answers.
async fn exchange(name: &str, request: &str) -> io::Result<String> {
    let talk = async {
        let mut stream = UnixStream::connect(socket_path(name)).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        // The answer ends with an empty line; the other side may keep the connection.
        while !answer.ends_with(b"\n\n") && stream.read_buf(&mut answer).await? != 0 {}
        if !answer.ends_with(b"\n\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        String::from_utf8(answer).map_err(|_| io::ErrorKind::InvalidData.into())
    };
    tokio::time::timeout(SOCKET_TIMEOUT, talk).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{Backlog, bind, listen};

    use super::*;

    fn part(n: u8, nets: &[&str]) -> control::PeerInfo {
        let mut info = control::PeerInfo::from_public_key(control::Key([n; 32]));
        info.config.allowed_ips = nets.iter().map(|net| net.parse().unwrap()).collect();
        info
    }

    #[test]
    fn a_process_that_accepts_nothing_holds_up_no_thread() {
        let path = std::env::temp_dir().join(format!("kilo-connect-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listens = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listens.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listens, Backlog::new(1).unwrap()).unwrap();
        let (timeout, began) = (Duration::from_millis(50), Instant::now());
        let connections: Vec<_> = (0..4).map(|_| connect_within(&path, timeout)).collect();
        std::fs::remove_file(&path).unwrap();
        assert!(connections[0].is_ok(), "{connections:?}");
        let last = connections[3].as_ref().map(drop).map_err(io::Error::kind);
        assert_eq!(last, Err(io::ErrorKind::TimedOut));
        assert!(began.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn a_peer_in_several_parts_is_put_together_once() {
        let mut first = part(1, &["10.0.0.0/24"]);
        first.config.endpoint = Some("192.0.2.1:51820".parse().unwrap());
        first.config.persistent_keepalive_interval = Some(10);
        first.config.preshared_key = Some(control::Key([0; 32]));
        first.stats.rx_bytes = 9;
        let mut state = DeviceState::default();
        merge(
            &mut state,
            vec![first, part(2, &[]), part(1, &["fd00::/64", "10.0.0.0/24"])],
            SystemTime::now(),
        );
        let peer = &state.peers[&PublicKey([1; 32])];
        assert_eq!(peer.allowed_ips.len(), 2);
        assert_eq!((peer.persistent_keepalive, peer.rx_bytes, peer.preshared_key), (10, 9, None));
        assert!(peer.endpoint.is_some());
        assert_eq!(state.peers.len(), 2);
    }
}
