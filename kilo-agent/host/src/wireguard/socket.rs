//! Path of the UAPI socket of a userspace WireGuard device, on which agent, process and `wg` agree.

use std::path::PathBuf;

use kilo_core::wireguard::is_interface_name;
use wireguard_control::InterfaceName;

use super::WireguardError;

/// Environment variable that overrides the directory of the sockets; agent and process must agree.
pub const DIRECTORY_VARIABLE: &str = "KILO_WIREGUARD_SOCKETS";
/// Where `wg` and other programs look for the sockets.
const DIRECTORY: &str = "/var/run/wireguard";

/// Directory of the sockets.
pub fn socket_directory() -> PathBuf {
    std::env::var_os(DIRECTORY_VARIABLE).map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from)
}

/// Path of a userspace device's socket.
pub fn socket_path(name: &str) -> PathBuf {
    socket_directory().join(format!("{name}.sock"))
}

/// Parses the name of an interface.
///
/// # Errors
/// When the kernel would not accept the name.
pub(super) fn interface_name(name: &str) -> Result<InterfaceName, WireguardError> {
    name.parse().map_err(|_| WireguardError::InvalidName(name.to_owned()))
}

/// Refuses names that no interface can have; some of them would lead the socket elsewhere.
///
/// # Errors
/// For such a name.
pub(super) fn check_name(name: &str) -> Result<(), WireguardError> {
    if is_interface_name(name) { Ok(()) } else { Err(WireguardError::InvalidName(name.to_owned())) }
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
