//! WireGuard in a process, for kernels without the module: gotatun between a
//! TUN device and a UDP socket, driven over the standard UAPI socket.
//!
//! It is a process of its own (`kg userspace-wireguard <interface>`), so that traffic continues when the
//! agent is killed or replaced. It ends on SIGTERM, and when its interface is deleted. gotatun's own UAPI
//! server is not used: it drops the session of a peer it changes, keeps an allowed IP that moved listed with
//! its former peer, and hangs up instead of answering an error.

mod engine;
mod tun;
mod udp;

use std::{
    fs,
    io::{self, Write as _},
    os::unix::{
        fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    pin::pin,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    sync::{Semaphore, mpsc, oneshot},
};

use super::{
    WireguardError,
    socket::{check_name, socket_directory, socket_path},
};
use crate::net::{Rtnl, links, watch::Watcher};
use engine::Engine;
use kilo_core::{errors::Cause, wireguard::uapi::SetRequest};
use tun::Tun;

/// Subcommand of `kg` that calls [`run`].
pub const SUBCOMMAND: &str = "userspace-wireguard";

/// Most bytes read from one client (a request of 1,000 peers needs about 1 MB).
const LARGEST_REQUEST: u64 = 64 << 20;
/// Most clients at a time.
const CLIENTS: usize = 16;
/// How long a process whose interface is gone may take to end; less than the agent waits.
const ENDS_WITHIN: Duration = Duration::from_secs(4);
/// Pause after an error of netlink, before the interface is looked up again.
const AGAIN: Duration = Duration::from_secs(1);

/// Log file of a process started by [`spawn_detached`].
pub fn log_path(interface: &str) -> PathBuf {
    socket_directory().join(format!("{interface}.log"))
}

fn create_directory() -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(socket_directory())
}

/// A process in its own session. Dropping this does not end it.
#[derive(Clone, Debug)]
pub struct Detached {
    ended: Arc<AtomicBool>,
    id: u32,
}

impl Detached {
    /// True once the process has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Process id, in the agent's PID namespace, which is the session's id as well. After the end another process
    /// may have it.
    pub fn id(&self) -> u32 {
        self.id
    }
}

/// Starts `exe userspace-wireguard <interface>` in its own session, in the
/// network and mount namespace of the caller: signals to the agent's group
/// and the agent's own end do not reach it.
///
/// In a container the end of the container still ends it; a cluster that
/// wants userspace WireGuard to outlive upgrades runs it as its own container.
pub fn spawn_detached(exe: &Path, interface: &str) -> io::Result<Detached> {
    create_directory()?;
    let log = fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(log_path(interface))?;
    let mut command = Command::new(exe);
    command
        .args([SUBCOMMAND, interface])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::from(log));
    // SAFETY: setsid is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(|_| ()).map_err(io::Error::from));
    }
    let mut child = command.spawn()?;
    let ended = Arc::new(AtomicBool::new(false));
    let detached = Detached { ended: Arc::clone(&ended), id: child.id() };
    // Reaped while the agent lives; afterwards init does it.
    std::thread::Builder::new().name("userspace-wg".into()).spawn(move || {
        let _ = child.wait();
        ended.store(true, Ordering::Release);
    })?;
    Ok(detached)
}

/// Serves the interface until SIGTERM or SIGINT, or until it is deleted;
/// removes device and socket. Writes to stderr only at start and end.
pub async fn run(interface: &str) -> Result<(), WireguardError> {
    let result = serve(interface).await;
    if let Err(error) = &result {
        let _ = writeln!(io::stderr(), "{error}");
    }
    result
}

type Answer = oneshot::Sender<String>;

enum Request {
    Get(Answer),
    Set(SetRequest, Answer),
}

async fn serve(interface: &str) -> Result<(), WireguardError> {
    check_name(interface)?;
    let device_error = |what: &str, source| WireguardError::device(what, source);
    let path = socket_path(interface);
    let rtnl = Rtnl::new()?;
    wait_for_predecessor(&rtnl, interface, &path).await?;
    let tun_error = |source: Cause| WireguardError::Tun { name: interface.to_owned(), source };
    // Only one process at a time can have the interface: a socket that still exists from here on belongs to a
    // dead one.
    let tun = Tun::create(interface).map_err(|error| tun_error(error.into()))?;
    let mut engine = Engine::start(tun).await.map_err(|error| tun_error(error.into()))?;
    let mut terminate =
        signal(SignalKind::terminate()).map_err(|source| device_error("wait for SIGTERM", source))?;
    let mut interrupt =
        signal(SignalKind::interrupt()).map_err(|source| device_error("wait for SIGINT", source))?;
    let listener = bind(&path).map_err(|source| device_error(&format!("open {}", path.display()), source))?;
    let (sender, mut requests) = mpsc::channel(CLIENTS);
    let acceptor = tokio::spawn(accept(listener, sender));
    let watcher = Watcher::new(None)?;
    let vanished = || WireguardError::Vanished(interface.to_owned());
    let index = links::by_name(&rtnl, interface).await?.ok_or_else(vanished)?.index;
    let mut gone = pin!(until_gone(index, rtnl, watcher));
    let deleted = loop {
        tokio::select! {
            () = &mut gone => break true,
            _ = terminate.recv() => break false,
            _ = interrupt.recv() => break false,
            Some(request) = requests.recv() => match request {
                Request::Get(answer) => {
                    let text = engine.get().await;
                    let _ = answer.send(text + "errno=0\n\n");
                }
                Request::Set(request, answer) => {
                    let errno = engine.set(request).await;
                    let _ = answer.send(format!("errno={errno}\n\n"));
                }
            },
        }
    };
    // The next process begins when the socket no longer answers: by then the port is free, and
    // the file that is removed is not its own.
    engine.stop().await;
    let _ = fs::remove_file(&path);
    acceptor.abort();
    if deleted { Err(vanished()) } else { Ok(()) }
}

/// Waits until the interface is gone. The file of the TUN device does not show that (epoll only says
/// EPOLLERR, which tokio does not pass on): netlink does. Its errors say nothing about the interface.
async fn until_gone(index: u32, mut rtnl: Rtnl, mut watcher: Watcher) {
    loop {
        let found = links::by_index(&rtnl, index).await;
        if let Ok(None) = found {
            return;
        }
        if found.is_ok() && watcher.changed().await.is_ok() {
            continue;
        }
        tokio::time::sleep(AGAIN).await;
        if let (Ok(lookups), Ok(events)) = (Rtnl::new(), Watcher::new(None)) {
            (rtnl, watcher) = (lookups, events);
        }
    }
}

/// Waits for the end of a process whose interface was deleted, which closes its connections.
async fn wait_for_predecessor(rtnl: &Rtnl, interface: &str, path: &Path) -> Result<(), WireguardError> {
    let ended = async {
        while let Ok(mut predecessor) = UnixStream::connect(path).await {
            if links::by_name(rtnl, interface).await?.is_some() {
                return Err(WireguardError::AlreadyRunning(interface.to_owned()));
            }
            // It sends nothing unasked: a read returns only when it has ended.
            let _ = predecessor.read(&mut [0]).await;
        }
        Ok(())
    };
    let late = |_| Err(WireguardError::AlreadyRunning(interface.to_owned()));
    tokio::time::timeout(ENDS_WITHIN, ended).await.unwrap_or_else(late)
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    create_directory()?;
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    // The private key can be read through it.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn accept(listener: UnixListener, requests: mpsc::Sender<Request>) {
    let permits = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors, for example: not a reason to spin.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let requests = requests.clone();
        tokio::spawn(async move {
            let _ = converse(stream, &requests).await;
            drop(permit);
        });
    }
}

/// Serves the requests of one client, each ended by an empty line.
async fn converse(stream: UnixStream, requests: &mpsc::Sender<Request>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader.take(LARGEST_REQUEST));
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let line = line.trim_end_matches(['\r', '\n']);
        if !line.is_empty() {
            lines.push(line.to_owned());
            continue;
        }
        if lines.is_empty() {
            continue;
        }
        let answer = answer(&lines, requests).await;
        lines.clear();
        writer.write_all(answer.as_bytes()).await?;
    }
}

async fn answer(lines: &[String], requests: &mpsc::Sender<Request>) -> String {
    let (answer, receiver) = oneshot::channel();
    let mut lines = lines.iter().map(String::as_str);
    let request = match lines.next() {
        Some("get=1") => Some(Request::Get(answer)),
        Some("set=1") => SetRequest::decode(lines).ok().map(|request| Request::Set(request, answer)),
        _ => None,
    };
    let refused = |errno: i32| format!("errno={errno}\n\n");
    let Some(request) = request else { return refused(nix::libc::EINVAL) };
    if requests.send(request).await.is_err() {
        return refused(nix::libc::ENODEV);
    }
    receiver.await.unwrap_or_else(|_| refused(nix::libc::ENODEV))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_of_netlink_does_not_end_a_device_and_its_deletion_does() {
        let lo = links::by_name(&Rtnl::new().unwrap(), "lo").await.unwrap().unwrap().index;
        let there = until_gone(lo, Rtnl::closed(), Watcher::new(None).unwrap());
        assert!(tokio::time::timeout(AGAIN * 2, there).await.is_err(), "it is there");
        let gone = until_gone(i32::MAX.unsigned_abs(), Rtnl::closed(), Watcher::new(None).unwrap());
        tokio::time::timeout(AGAIN * 20, gone).await.unwrap();
    }
}
