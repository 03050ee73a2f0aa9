//! The WireGuard device of this node: finding it, making it, removing it.

use std::path::PathBuf;

use crate::{
    net::{Net, links},
    wireguard::{Device, WireguardError, ensure_device},
};
use kilo_core::settings::WireguardMode;

/// What the flags say about the device.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--interface`: name of the WireGuard device, at most 15 bytes.
    pub name: String,
    /// `--wireguard`.
    pub mode: WireguardMode,
    /// `--create-interface`: a missing device is created; when false, it is an error.
    pub create: bool,
    /// Path of this program, which also runs the userspace device.
    pub executable: PathBuf,
}

/// An existing WireGuard device.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Handle for reading and changing it.
    pub device: Device,
    /// Interface index.
    pub index: u32,
}

impl Interface {
    /// Finds the device or creates it; returns whether it was created. A renamed device that has the index
    /// `known` gets its name back: a second one could not have the same port.
    ///
    /// # Errors
    /// Says what stands in the way, and what to do.
    pub async fn ensure(
        net: &Net,
        options: &Options,
        known: Option<u32>,
    ) -> Result<(Self, bool), WireguardError> {
        let rtnl = net.rtnl();
        if let Some(index) = known
            && links::by_name(rtnl, &options.name).await?.is_none()
            && let Some(link) = links::by_index(rtnl, index).await?
            && matches!(link.kind.as_str(), "wireguard" | "tun")
        {
            links::rename(rtnl, index, &options.name).await?;
            tracing::warn!(
                interface = options.name,
                found = link.name,
                "WireGuard device was renamed by something else; renamed it back"
            );
        }
        let made =
            ensure_device(net.rtnl(), &options.name, options.mode, options.create, &options.executable)
                .await?;
        if made.created {
            tracing::info!(
                interface = options.name,
                backend = made.backend.name(),
                "WireGuard device created"
            );
        }
        let device = Device::open(net.rtnl(), &options.name, made.backend).await?;
        Ok((Self { index: device.index(), device }, made.created))
    }

    /// Removes the device of the kernel or of a userspace process, which ends with it. Leaves any other
    /// interface of that name. True when the device was there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn remove(net: &Net, options: &Options) -> Result<bool, WireguardError> {
        let Some(link) = links::by_name(net.rtnl(), &options.name).await? else { return Ok(false) };
        let is_ours = match link.kind.as_str() {
            "wireguard" => true,
            "tun" => Device::is_userspace(&options.name).await,
            _ => false,
        };
        Ok(is_ours && links::delete(net.rtnl(), link.index).await?)
    }
}
