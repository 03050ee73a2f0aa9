//! The WireGuard device itself: finding it, making it, removing it.

use std::{io, path::PathBuf};

use crate::{
    cli::WireguardMode,
    net::{Link, Net, NetError, links::LinkKind},
    wireguard::{
        device::{Backend, Device, DeviceError},
        userspace,
    },
};

/// What the flags say about the device.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--interface`.
    pub name: String,
    /// `--wireguard`.
    pub mode: WireguardMode,
    /// `--create-interface`.
    pub create: bool,
    /// This program, to run the userspace device.
    pub executable: PathBuf,
}

/// Why there is no device; the label is a metric label.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// Network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// Device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An interface of that name is something else.
    #[error(
        "interface {0} exists but is no WireGuard device; choose another name with --interface, or remove it"
    )]
    NotWireguard(String),
    /// It should be there already.
    #[error("interface {0} does not exist, and --create-interface=false says that somebody else makes it")]
    Absent(String),
    /// Kernel WireGuard was asked for.
    #[error("this kernel has no WireGuard; load the module (modprobe wireguard) or use --wireguard=auto")]
    NoKernelSupport,
    /// The userspace process does not run.
    #[error("userspace WireGuard: {0}")]
    Userspace(#[source] io::Error),
}

impl InterfaceError {
    /// Metric label.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Net(error) => error.label(),
            Self::Device(error) => error.label(),
            Self::NotWireguard(_) | Self::Absent(_) | Self::NoKernelSupport => "interface",
            Self::Userspace(_) => "userspace_wireguard",
        }
    }
}

/// A device that is there.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Handle for reading and changing it.
    pub device: Device,
    /// Interface index.
    pub index: u32,
}

impl Interface {
    /// Finds the device or makes it; says whether it was made.
    ///
    /// # Errors
    /// Says what stands in the way, and what to do.
    pub async fn ensure(net: &Net, options: &Options) -> Result<(Self, bool), InterfaceError> {
        if let Some(found) = Self::find(net, options).await? {
            return Ok((found, false));
        }
        if !options.create {
            return Err(InterfaceError::Absent(options.name.clone()));
        }
        let kernel = match options.mode {
            WireguardMode::Userspace => false,
            mode => match net.create_wireguard(&options.name).await {
                Ok(()) => true,
                Err(NetError::Unsupported(_)) if mode == WireguardMode::Auto => false,
                Err(NetError::Unsupported(_)) => return Err(InterfaceError::NoKernelSupport),
                Err(error) => return Err(error.into()),
            },
        };
        if !kernel {
            let (executable, name) = (options.executable.clone(), options.name.clone());
            let spawned =
                tokio::task::spawn_blocking(move || userspace::spawn_detached(&executable, &name)).await;
            spawned.map_err(io::Error::other).and_then(|result| result).map_err(InterfaceError::Userspace)?;
        }
        tracing::info!(interface = options.name, kernel, "made the WireGuard device");
        let found = Self::find(net, options).await?;
        found.map(|found| (found, true)).ok_or_else(|| InterfaceError::Absent(options.name.clone()))
    }

    async fn find(net: &Net, options: &Options) -> Result<Option<Self>, InterfaceError> {
        let links = net.links().await?;
        let Some(link) = links.iter().find(|link| link.name == options.name) else { return Ok(None) };
        let backend = backend(link).ok_or_else(|| InterfaceError::NotWireguard(options.name.clone()))?;
        Ok(Some(Self { device: Device::new(&options.name, backend)?, index: link.index }))
    }

    /// Removes the device, whoever runs it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn remove(net: &Net, options: &Options) -> Result<(), InterfaceError> {
        let links = net.links().await?;
        let Some(link) = links.iter().find(|link| link.name == options.name) else { return Ok(()) };
        match backend(link) {
            Some(Backend::Userspace) => {
                let name = options.name.clone();
                let stopped = tokio::task::spawn_blocking(move || userspace::stop(&name)).await;
                stopped.map_err(|error| InterfaceError::Userspace(io::Error::other(error)))?;
            }
            Some(_) => net.delete_link(link.index).await?,
            None => {}
        }
        Ok(())
    }
}

/// Who runs a device; `None` when it is no WireGuard device.
fn backend(link: &Link) -> Option<Backend> {
    match link.kind {
        LinkKind::Wireguard => Some(Backend::Kernel),
        LinkKind::Tun if userspace::is_running(&link.name) => Some(Backend::Userspace),
        _ => None,
    }
}
