//! Finds or creates the WireGuard interface.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
    },
};
use tokio::net::UnixStream;

use super::{
    WireguardError,
    device::Backend,
    socket::{check_name, socket_path},
    userspace,
};
use crate::net::{NetError, Rtnl, links};
use kilo_core::{errors::Cause, settings::WireguardMode};

/// The interface that was found or created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ensured {
    /// Who does the encryption.
    pub backend: Backend,
    /// Interface index.
    pub index: u32,
    /// True when it was created: it has no addresses, routes or programs yet.
    pub created: bool,
}

/// How long a userspace process may take to start. One that ends is noticed at once; one that lives may wait
/// seconds for a processor where many start, and giving up would mean starting over.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Finds the interface, or creates it when `create`. A userspace process is
/// started as `exe userspace-wireguard <interface>`.
pub async fn ensure_device(
    rtnl: &Rtnl,
    name: &str,
    mode: WireguardMode,
    create: bool,
    exe: &Path,
) -> Result<Ensured, WireguardError> {
    check_name(name)?;
    if let Some(found) = existing(rtnl, name, mode).await? {
        return Ok(found);
    }
    if !create {
        return Err(WireguardError::Absent(name.to_owned()));
    }
    if mode != WireguardMode::Userspace {
        match create_kernel(rtnl, name).await {
            Ok(()) => {}
            // Something else was faster: see what it is.
            Err(error) if error.errno() == Some(nix::libc::EEXIST) => {}
            Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(nix::libc::EOPNOTSUPP) => {
                if mode == WireguardMode::Kernel {
                    return Err(WireguardError::NoKernelSupport(source));
                }
                let started = start_userspace(rtnl, name, exe).await;
                return started.map_err(|error| WireguardError::NoWireguard {
                    kernel: source,
                    userspace: Box::new(error),
                });
            }
            Err(NetError::Kernel { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(WireguardError::MissingCapability(name.to_owned()));
            }
            Err(error) => return Err(error.into()),
        }
        let found = existing(rtnl, name, mode).await?;
        let found = found.ok_or_else(|| WireguardError::Vanished(name.to_owned()))?;
        return Ok(Ensured { created: true, ..found });
    }
    start_userspace(rtnl, name, exe).await
}

async fn existing(rtnl: &Rtnl, name: &str, mode: WireguardMode) -> Result<Option<Ensured>, WireguardError> {
    let Some(link) = links::by_name(rtnl, name).await? else { return Ok(None) };
    let backend = match link.kind.as_str() {
        "wireguard" => Backend::Kernel,
        "tun" => {
            let socket = socket_path(name);
            if let Err(source) = UnixStream::connect(&socket).await {
                return Err(WireguardError::NoSocket { name: name.to_owned(), socket, source });
            }
            Backend::Userspace
        }
        kind => {
            let kind = if kind.is_empty() { "physical" } else { kind };
            return Err(WireguardError::NotWireguard { name: name.to_owned(), kind: kind.to_owned() });
        }
    };
    match (mode, backend) {
        (WireguardMode::Kernel, Backend::Userspace) | (WireguardMode::Userspace, Backend::Kernel) => {
            let wanted = if mode == WireguardMode::Kernel { "kernel" } else { "userspace" };
            Err(WireguardError::OtherBackend { name: name.to_owned(), found: backend.name(), wanted })
        }
        _ => Ok(Some(Ensured { backend, index: link.index, created: false })),
    }
}

/// Creates the interface inside its namespace; it is never moved, as WireGuard's outer socket stays in the
/// namespace where it was created.
async fn create_kernel(rtnl: &Rtnl, name: &str) -> Result<(), NetError> {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Wireguard)]));
    let what = format!("create WireGuard interface {name}");
    rtnl.write(&what, RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL).await
}

async fn start_userspace(rtnl: &Rtnl, name: &str, exe: &Path) -> Result<Ensured, WireguardError> {
    let log: PathBuf = userspace::log_path(name);
    let not_started = |source: Cause| {
        let log = log.exists().then(|| log.clone());
        WireguardError::NotStarted { name: name.to_owned(), source, log }
    };
    let child = userspace::spawn_detached(exe, name).map_err(|error| not_started(error.into()))?;
    let start = Instant::now();
    loop {
        // The socket is bound after the TUN device was made.
        if UnixStream::connect(socket_path(name)).await.is_ok()
            && let Some(found) = existing(rtnl, name, WireguardMode::Userspace).await?
        {
            return Ok(Ensured { created: true, ..found });
        }
        if child.has_ended() {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            return Err(not_started(log.lines().last().unwrap_or("it ended at once").into()));
        }
        if start.elapsed() > START_TIMEOUT {
            return Err(not_started(format!("no answer within {START_TIMEOUT:?}").into()));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
