//! The WireGuard device: keys, INI configuration, reading, diff and apply.

pub mod conf;
pub mod key;
