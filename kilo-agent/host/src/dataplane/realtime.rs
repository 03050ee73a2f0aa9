//! Detects kernels on which programs on one processor may interrupt each other: the masquerading programs
//! keep per-packet state in per-CPU memory (`nat_work`).

use super::DataplaneError;

/// First Linux version whose `PREEMPT_RT` kernels may lack the lock that serializes network code on one
/// processor.
const WITHOUT_LOCK: (u32, u32) = (6, 18);
/// The setting that keeps the lock.
const KEEPS_LOCK: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y";

/// File of kernels with the `PREEMPT_RT` patch set, even when built with a custom version text. Kernels of
/// kernel.org show it in that text alone.
const REALTIME: &str = "/sys/kernel/realtime";

/// Refuses a kernel on which packets could get each other's addresses.
///
/// # Errors
/// [`DataplaneError::Realtime`] on such a kernel.
pub fn check() -> Result<(), DataplaneError> {
    let Ok(system) = nix::sys::utsname::uname() else { return Ok(()) };
    let (release, version) = (system.release().to_string_lossy(), system.version().to_string_lossy());
    let config = std::fs::read_to_string(format!("/boot/config-{release}")).ok();
    let realtime = std::fs::read_to_string(REALTIME).ok();
    let is_realtime = is_realtime(&version, realtime.as_deref());
    if is_realtime && may_interleave(&release, config.as_deref()) {
        return Err(DataplaneError::Realtime { release: release.into_owned() });
    }
    Ok(())
}

/// Pure: whether this is a `PREEMPT_RT` kernel, from the version that `uname` reports and the content of
/// [`REALTIME`]. The word stands alone, or beside another model that may be chosen at boot
/// (`PREEMPT_{RT,LAZY}`).
fn is_realtime(version: &str, realtime: Option<&str>) -> bool {
    let is_word = |word: &str| {
        word.strip_prefix("PREEMPT_").is_some_and(|models| {
            models.split(|c: char| !c.is_ascii_alphanumeric()).any(|model| model == "RT")
        })
    };
    realtime.is_some_and(|text| text.trim() == "1") || version.split_whitespace().any(is_word)
}

/// Pure: whether such a kernel may lack the lock, judging by its version and configuration.
fn may_interleave(release: &str, config: Option<&str>) -> bool {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    number >= WITHOUT_LOCK && !config.is_some_and(|config| config.lines().any(|line| line == KEEPS_LOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_realtime_kernel_is_known_by_its_version_or_by_its_file() {
        for (version, realtime, wanted) in [
            ("#1 SMP PREEMPT_RT Debian 6.18.1-1 (2025-12-01)", None, true),
            ("#1 SMP PREEMPT_{RT,LAZY} Debian 6.18.1-1", None, true),
            ("#1 SMP PREEMPT_RT+ built here", None, true),
            ("#1 SMP PREEMPT_DYNAMIC Debian 6.18.1-1", None, false),
            ("#1 SMP PREEMPT_DYNAMIC RT", None, false),
            ("#1 SMP PREEMPT_PART", None, false),
            ("#1 SMP PREEMPT Debian", None, false),
            ("#7 SMP built by PREEMPT_RTX", None, false),
            ("#1 SMP our own", Some("1\n"), true),
            ("#1 SMP our own", Some("0\n"), false),
            ("#1 SMP our own", Some(""), false),
            ("", None, false),
        ] {
            assert_eq!(is_realtime(version, realtime), wanted, "{version} {realtime:?}");
        }
    }

    #[test]
    fn only_kernels_that_may_do_without_the_lock_are_refused() {
        const KEPT: &str = "CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y\n";
        const NOT_KEPT: &str = "CONFIG_PREEMPT_RT=y\n# CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is not set\n";
        for (release, config, refused) in [
            ("6.18.1-rt-amd64", None, true),
            ("6.18.1-rt-amd64", Some(NOT_KEPT), true),
            ("6.18.1-rt-amd64", Some(KEPT), false),
            ("7.0.0", None, true),
            ("10.1", None, true),
            // The lock is always there.
            ("6.17.13+rt", None, false),
            ("6.12.95-rt-amd64", None, false),
            ("6.1.0-44-rt-amd64", None, false),
            ("odd", None, false),
        ] {
            assert_eq!(may_interleave(release, config), refused, "{release} {config:?}");
        }
    }
}
