//! Errors in words for a machine that is not a node: those of [`kilo_host`] are about agents.

use anyhow::{Result, anyhow, bail};
use kilo_host::{lock::LockError, wireguard::WireguardError};

/// Fails early if this process may not change the network.
pub fn check_rights() -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !may_change_network(&status) {
        bail!(
            "kgctl connect changes this machine's network: run it as root (sudo --preserve-env=KUBECONFIG kgctl \
             connect ..., or name the file with --kubeconfig)"
        );
    }
    Ok(())
}

/// Whether a process with this `/proc/self/status` has `CAP_NET_ADMIN`; true if the text does not say.
fn may_change_network(status: &str) -> bool {
    const NET_ADMIN: u64 = 1 << 12;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_none_or(|bits| bits & NET_ADMIN != 0)
}

/// Explains why the interface's name is not available.
pub fn of_lock(error: LockError) -> anyhow::Error {
    match error {
        LockError::Taken(interface) => anyhow!(
            "another process manages interface {interface}: if it is kg, this machine is a node and does not need kgctl \
             connect; if it is another kgctl connect, stop that one first"
        ),
        other => other.into(),
    }
}

/// Explains why there is no WireGuard device.
pub fn of_wireguard(error: WireguardError) -> anyhow::Error {
    match error {
        WireguardError::NoKernelSupport(kernel) => anyhow!(
            "this kernel has no WireGuard ({kernel}); load it (modprobe wireguard), or use --wireguard=userspace"
        ),
        WireguardError::NoWireguard { kernel, userspace } => anyhow!(
            "this kernel has no WireGuard ({kernel}); load it (modprobe wireguard), or give this process \
             /dev/net/tun ({userspace})"
        ),
        WireguardError::MissingCapability(interface) => {
            anyhow!("creating {interface} was refused; run kgctl connect as root")
        }
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;

    #[test]
    fn who_may_change_the_network_is_known_by_its_capabilities() {
        let status =
            |bits: &str| format!("Name:\tkgctl\nCapPrm:\t0\nCapEff:\t{bits}\nCapBnd:\t000001ffffffffff\n");
        assert!(may_change_network(&status("000001ffffffffff")));
        assert!(may_change_network(&status("0000000000001000")), "nobody has to be root");
        assert!(!may_change_network(&status("0000000000000000")));
        assert!(!may_change_network(&status("000001ffffffefff")));
        assert!(may_change_network(""), "nothing is known");
    }

    #[test]
    fn no_error_on_a_laptop_names_manifests_or_agents() {
        let none = || Error::from_raw_os_error(nix::libc::EOPNOTSUPP);
        let userspace = || Box::new(WireguardError::MissingCapability("kilo0".to_owned()));
        let said = [
            of_wireguard(WireguardError::NoKernelSupport(none())),
            of_wireguard(WireguardError::NoWireguard { kernel: none(), userspace: userspace() }),
            of_wireguard(*userspace()),
            of_lock(LockError::Taken("kilo0".to_owned())),
        ];
        for (error, what) in
            said.iter().zip(["=userspace", "/dev/net/tun", "as root", "not need kgctl connect"])
        {
            let error = error.to_string();
            assert!(
                error.contains(what) && !error.contains("manifest") && !error.contains("on this node"),
                "{error}"
            );
        }
    }
}
