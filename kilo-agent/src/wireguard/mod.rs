//! The WireGuard device: keys, INI configuration, reading, diff and apply.

pub mod conf;
pub mod device;
pub mod diff;
pub mod ensure;
mod error;
pub mod greet;
pub mod key;
pub mod private_key;
pub mod uapi;
pub mod userspace;

pub use device::{Backend, Device, PeerStatus};
pub use diff::{Change, DeviceState, PeerState, diff};
pub use ensure::{Ensured, Mode, ensure_device, ensure_device_with};
pub use error::WireguardError;
