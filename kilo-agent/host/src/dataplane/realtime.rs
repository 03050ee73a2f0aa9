//! Kernels on which programs on one processor may interrupt each other: the masquerading
//! programs keep what they know of a packet in memory of the processor (`nat_work`).

use super::DataplaneError;

/// Linux from this version on may do without the lock that keeps network code on one
/// processor of a PREEMPT_RT kernel one after the other.
const WITHOUT_LOCK: (u32, u32) = (6, 18);
/// The setting that keeps the lock.
const KEEPS_LOCK: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y";

/// Refuses a kernel on which packets could get each other's addresses.
///
/// # Errors
/// On such a kernel.
pub fn check() -> Result<(), DataplaneError> {
    let Ok(system) = nix::sys::utsname::uname() else { return Ok(()) };
    let (release, version) = (system.release().to_string_lossy(), system.version().to_string_lossy());
    let config = std::fs::read_to_string(format!("/boot/config-{release}")).ok();
    if may_interleave(&release, &version, config.as_deref()) {
        return Err(DataplaneError::Realtime { release: release.into_owned() });
    }
    Ok(())
}

/// Pure: from what `uname` says of the kernel, and its configuration if it is known.
fn may_interleave(release: &str, version: &str, config: Option<&str>) -> bool {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version.split_whitespace().any(|word| word == "PREEMPT_RT")
        && number >= WITHOUT_LOCK
        && !config.is_some_and(|config| config.lines().any(|line| line == KEEPS_LOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_realtime_kernels_without_the_lock_are_refused() {
        const REALTIME: &str = "#1 SMP PREEMPT_RT Debian 6.18.1-1 (2025-12-01)";
        for (release, version, config, refused) in [
            ("6.18.1-rt-amd64", REALTIME, None, true),
            ("6.18.1-rt-amd64", REALTIME, Some("CONFIG_PREEMPT_RT=y\n"), true),
            (
                "6.18.1-rt-amd64",
                REALTIME,
                Some("CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y\n"),
                false,
            ),
            ("7.0.0", REALTIME, None, true),
            // The lock is always there.
            ("6.12.95-rt-amd64", "#1 SMP PREEMPT_RT Debian 6.12.95-1", None, false),
            ("6.1.0-44-rt-amd64", "#1 SMP PREEMPT_RT Debian 6.1.164-1", None, false),
            ("6.18.1-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.18.1-1", None, false),
            ("odd", "", None, false),
        ] {
            assert_eq!(may_interleave(release, version, config), refused, "{release} {version}");
        }
    }
}
