//! The WireGuard device of this host: making it, reading it and applying changes, in the kernel or
//! in userspace.

pub mod device;
pub mod ensure;
mod error;
pub mod handshake_nudge;
pub mod private_key;
mod reading;
pub mod socket;
pub mod userspace;

pub use device::{Backend, Device, PeerStatus};
pub use ensure::{Ensured, ensure_device};
pub use error::WireguardError;
pub use reading::Reading;
