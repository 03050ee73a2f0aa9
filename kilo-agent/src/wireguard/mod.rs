//! The WireGuard device: keys, INI configuration, reading, diff and apply.

pub mod conf;
pub mod device;
pub mod key;
pub mod private_key;
pub mod userspace;
