//! The WireGuard device: keys, INI configuration, reading, diff and apply.

pub mod key;
