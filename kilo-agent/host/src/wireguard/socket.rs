//! Where the UAPI socket of a userspace WireGuard device is: agent, process and `wg` look in one place.

use std::path::PathBuf;

use wireguard_control::InterfaceName;

use super::WireguardError;

/// Overrides where the sockets are; agent and process must agree.
pub const DIRECTORY_VARIABLE: &str = "KILO_WIREGUARD_SOCKETS";
/// Where `wg` and everybody else looks for them.
const DIRECTORY: &str = "/var/run/wireguard";

/// Directory of the sockets.
pub fn socket_directory() -> PathBuf {
    std::env::var_os(DIRECTORY_VARIABLE).map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from)
}

/// Where a userspace device's socket is.
pub fn socket_path(name: &str) -> PathBuf {
    socket_directory().join(format!("{name}.sock"))
}

/// The name of an interface.
///
/// # Errors
/// When the kernel takes no such name.
pub(super) fn interface_name(name: &str) -> Result<InterfaceName, WireguardError> {
    name.parse().map_err(|_| WireguardError::InvalidName(name.to_owned()))
}

/// Refuses names that no interface can have, and those that would lead the socket elsewhere.
///
/// # Errors
/// For such a name.
pub(super) fn check_name(name: &str) -> Result<(), WireguardError> {
    if matches!(name, "." | "..") || name.contains(':') {
        return Err(WireguardError::InvalidName(name.to_owned()));
    }
    interface_name(name).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_paths_are_refused() {
        for name in ["", ".", "..", "a/b", "kilo0:1", "a b", "sixteen-letters0"] {
            assert!(check_name(name).is_err(), "{name}");
        }
        assert!(check_name("kilo0").is_ok());
    }
}
