//! Pod CIDRs that this node had earlier in this boot, such as before its Node was deleted and registered
//! again: pods may still use their addresses, and the container runtime assigns more until the configuration
//! is replaced.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use serde_json::Value;

use super::{CniError, boot::replace, bridges_of, plugins, read};

/// File name of the record, beside this boot's configuration in `--cni-run-dir`.
pub const FILE: &str = "former-pod-cidrs.json";

/// What the CNI configuration still has from before the node's pod CIDRs changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormerSubnets {
    /// Bridges that the configuration creates.
    pub bridges: Vec<String>,
    /// Subnets in the configuration that are not among the node's pod CIDRs.
    pub subnets: Vec<IpNet>,
}

/// Subnets in the configuration at `path` that these CIDRs replace; empty without a file or without CIDRs.
///
/// # Errors
/// When the file cannot be read or is not JSON.
pub fn subnets(path: &Path, cidrs: &[IpNet]) -> Result<FormerSubnets, CniError> {
    let Some(config) = read(path)?.filter(|_| !cidrs.is_empty()) else { return Ok(FormerSubnets::default()) };
    let ranges = plugins(&config).iter().filter_map(|plugin| plugin.pointer("/ipam/ranges")?.as_array());
    let sets = ranges.flatten().filter_map(Value::as_array).flatten();
    let subnets = sets.filter_map(|range| range.get("subnet")?.as_str()?.parse::<IpNet>().ok());
    let subnets = subnets
        .map(|subnet| subnet.trunc())
        .filter(|subnet| !cidrs.iter().any(|cidr| cidr.trunc() == *subnet))
        .collect();
    Ok(FormerSubnets { bridges: bridges_of(&config), subnets })
}

/// Every pod CIDR of this boot, including those recorded by earlier agents: pods may have addresses from them
/// until the host reboots.
#[derive(Debug, Default)]
pub struct FormerPodCidrs {
    /// Where the next agent of this boot reads them; `None` keeps them in memory only.
    file: Option<PathBuf>,
    known: BTreeSet<IpNet>,
    /// The file lacks some of `known`.
    is_unsaved: bool,
}

impl FormerPodCidrs {
    /// Reads the pod CIDRs that agents of this boot have recorded in `directory`, which a reboot empties.
    ///
    /// # Errors
    /// When the file exists but cannot be read, or is not a JSON list of prefixes.
    pub fn open(directory: &Path) -> Result<Self, CniError> {
        let mut former = Self::in_directory(directory);
        let path = directory.join(FILE);
        let name = || path.display().to_string();
        match fs::read(&path) {
            Ok(text) => {
                former.known =
                    serde_json::from_slice(&text).map_err(|error| CniError::Invalid(name(), error.into()))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(CniError::Io(name(), error)),
        }
        Ok(former)
    }

    /// An empty set that is to be recorded in `directory`, which is not read.
    pub fn in_directory(directory: &Path) -> Self {
        Self { file: Some(directory.join(FILE)), ..Self::default() }
    }

    /// Adds prefixes, and writes the file when one of them is new or the last write failed.
    ///
    /// # Errors
    /// When the file cannot be written; this agent knows the prefixes anyway, and the next call retries.
    pub fn add(&mut self, prefixes: &[IpNet]) -> Result<(), CniError> {
        let count = self.known.len();
        self.known.extend(prefixes.iter().map(IpNet::trunc));
        self.is_unsaved |= self.known.len() != count;
        let Some(file) = self.file.as_ref().filter(|_| self.is_unsaved) else { return Ok(()) };
        let name = || file.display().to_string();
        let text =
            serde_json::to_string(&self.known).map_err(|error| CniError::Invalid(name(), error.into()))?;
        replace(file, &text).map_err(|error| CniError::Io(name(), error))?;
        self.is_unsaved = false;
        Ok(())
    }

    /// Known pod CIDRs that are not among `now`, the node's present ones.
    pub fn without<'a>(&'a self, now: &'a [IpNet]) -> impl Iterator<Item = IpNet> + 'a {
        self.known.iter().filter(|prefix| !now.iter().any(|cidr| cidr.trunc() == **prefix)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{tests::LIST, with_ranges},
        *,
    };

    fn cidrs(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn subnets_that_the_node_has_no_more_are_former_ones() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let old = cidrs(&["10.42.1.0/24", "fd00:42:1::/64"]);
        fs::write(file.path(), with_ranges(LIST, &old).unwrap().unwrap()).unwrap();
        let former = |now: &[&str]| subnets(file.path(), &cidrs(now)).unwrap();
        assert_eq!(former(&["10.42.1.0/24", "fd00:42:1::/64"]).subnets, []);
        let changed = former(&["10.42.1.0/24", "fd00:42:3::/64"]);
        assert_eq!(changed.subnets, cidrs(&["fd00:42:1::/64"]));
        assert_eq!(changed.bridges, ["cni0"]);
        assert_eq!(former(&[]), FormerSubnets::default(), "without pod CIDRs nothing is replaced");
    }

    #[test]
    fn the_next_agent_of_a_boot_knows_them_and_those_that_came_back_do_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let mut former = FormerPodCidrs::open(directory.path()).unwrap();
        former.add(&[]).unwrap();
        assert!(!directory.path().join(FILE).exists(), "nothing is written while there are none");
        former.add(&cidrs(&["10.42.1.7/24", "fd00:42:1::/64"])).unwrap();
        former.add(&cidrs(&["10.42.3.0/24"])).unwrap();
        let next = FormerPodCidrs::open(directory.path()).unwrap();
        let now = cidrs(&["10.42.3.0/24", "fd00:42:4::/64"]);
        assert_eq!(next.without(&now).collect::<Vec<_>>(), cidrs(&["10.42.1.0/24", "fd00:42:1::/64"]));
        fs::write(directory.path().join(FILE), "10.42.1.0/24").unwrap();
        assert!(FormerPodCidrs::open(directory.path()).is_err());
    }

    #[test]
    fn what_could_not_be_written_is_known_and_written_later() {
        let directory = tempfile::tempdir().unwrap();
        let later = directory.path().join("later");
        let mut former = FormerPodCidrs::in_directory(&later);
        let former_cidrs = cidrs(&["10.42.1.0/24"]);
        assert!(former.add(&former_cidrs).is_err());
        assert_eq!(former.without(&[]).collect::<Vec<_>>(), former_cidrs);
        fs::create_dir(&later).unwrap();
        former.add(&[]).unwrap();
        assert_eq!(FormerPodCidrs::open(&later).unwrap().without(&[]).collect::<Vec<_>>(), former_cidrs);
    }
}
