//! Checks in /proc that a process has the rights it should have.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};

use super::manifest::Rights;

/// Numbers of the capabilities the manifests name (linux/capability.h).
const NUMBERS: [(&str, u32); 5] =
    [("DAC_OVERRIDE", 1), ("NET_ADMIN", 12), ("NET_RAW", 13), ("PERFMON", 38), ("BPF", 39)];
/// Where every container can write.
const ALWAYS_WRITABLE: [&str; 3] = ["/proc", "/dev", "/dev/shm"];

/// Compares with /proc/PID/status and /proc/PID/mountinfo.
///
/// # Errors
/// When something differs.
pub fn compare(wanted: &Rights, status: &str, mounts: &str) -> Result<()> {
    let fields: BTreeMap<_, _> = status.lines().filter_map(|line| line.split_once(":\t")).collect();
    let bits = bits(&wanted.capabilities)?;
    for (name, wanted) in [("CapInh", 0), ("CapPrm", bits), ("CapEff", bits), ("CapBnd", bits), ("CapAmb", 0)]
    {
        let found = fields.get(name).and_then(|text| u64::from_str_radix(text, 16).ok());
        ensure!(found == Some(wanted), "{name} is {found:x?} instead of {wanted:x}");
    }
    let found = fields.get("NoNewPrivs").copied();
    ensure!(found == Some(if wanted.no_new_privileges { "1" } else { "0" }), "NoNewPrivs is {found:?}");
    let writable: BTreeSet<_> = mounts.lines().filter_map(writable).collect();
    ensure!(!writable.contains("/"), "the root is writable");
    for mount in &wanted.mounts {
        let target = mount.target.as_str();
        ensure!(writable.contains(target) != mount.read_only, "{target} is not mounted as it should be");
    }
    for place in ["/sys", "/proc/sys", "/run", "/tmp", "/etc"] {
        ensure!(!writable.contains(place), "{place} is writable");
    }
    ensure!(
        ALWAYS_WRITABLE.iter().all(|place| writable.contains(place)),
        "{ALWAYS_WRITABLE:?} are not writable"
    );
    Ok(())
}

fn bits(names: &BTreeSet<String>) -> Result<u64> {
    let bit = |name: &String| {
        let number = NUMBERS.iter().find(|(known, _)| known == name);
        Ok(1 << number.with_context(|| format!("CAP_{name}: add its number in confine/held.rs"))?.1)
    };
    names.iter().map(bit).sum()
}

/// Mount point of a line of mountinfo; `None` when it is read-only.
fn writable(line: &str) -> Option<&str> {
    let mut words = line.split(' ').skip(4);
    let (point, options) = (words.next()?, words.next()?);
    options.split(',').any(|option| option == "rw").then_some(point)
}
