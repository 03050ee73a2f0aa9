//! Writes the node's pod CIDRs into the CNI configuration list, as ranges of `host-local`. [`update`] edits
//! an existing file in place; with `--cni-source`, [`boot`] publishes the file.

pub mod boot;
pub mod former;

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use kilo_core::errors::Cause;
use serde_json::{Value, json};

use boot::BootConfiguration;

/// The configuration as the manifest has it, beside the private key: how the init
/// container knows whether the manifest has changed.
pub const COPY: &str = "cni-conf.json";

/// Why the CNI configuration was left as it is.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// The file cannot be read or written.
    #[error("CNI configuration {0}: {1}")]
    Io(String, #[source] io::Error),
    /// The file is not a configuration list.
    #[error("CNI configuration {0}: {1}; nothing was changed")]
    Invalid(String, #[source] Cause),
}

/// The CNI configuration list that pod CIDRs are written into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CniConfiguration {
    /// `--cni=false`: none.
    Off,
    /// The file that the container runtime reads, edited in place: `--cni-path`.
    InPlace(PathBuf),
    /// A file that does not outlive the boot: `--cni-source`.
    OfBoot(BootConfiguration),
}

impl CniConfiguration {
    /// Where the container runtime reads it.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Off => None,
            Self::InPlace(path) => Some(path),
            Self::OfBoot(configuration) => Some(&configuration.path),
        }
    }

    /// The file that is written, whether or not it exists.
    pub fn file(&self) -> Option<PathBuf> {
        match self {
            Self::Off => None,
            Self::InPlace(path) => Some(path.clone()),
            Self::OfBoot(configuration) => Some(configuration.file()),
        }
    }

    /// The configuration that ends with the boot, if it is one.
    pub const fn of_boot(&self) -> Option<&BootConfiguration> {
        match self {
            Self::OfBoot(configuration) => Some(configuration),
            Self::Off | Self::InPlace(_) => None,
        }
    }

    /// Writes the pod CIDRs into it; returns whether anything was written.
    ///
    /// # Errors
    /// When a file cannot be read, parsed or written.
    pub fn write(&self, cidrs: &[IpNet]) -> Result<bool, CniError> {
        match self {
            Self::Off => Ok(false),
            Self::InPlace(path) => update(path, cidrs),
            Self::OfBoot(configuration) => configuration.publish(cidrs),
        }
    }
}

/// The configuration with these CIDRs as the ranges of every plugin with an `ipam` section; `None` when
/// nothing changes. The range that a CIDR already has keeps its other fields (`rangeStart`, `gateway`).
///
/// # Errors
/// When the text is not a JSON object with a `plugins` list.
pub fn with_ranges(text: &str, cidrs: &[IpNet]) -> Result<Option<String>, Cause> {
    let mut config: Value = serde_json::from_str(text)?;
    let plugins =
        config.get_mut("plugins").and_then(Value::as_array_mut).ok_or("it has no list of plugins")?;
    let mut changed = false;
    for ipam in
        plugins.iter_mut().filter_map(|plugin| plugin.get_mut("ipam")).filter_map(Value::as_object_mut)
    {
        let present = ipam.get("ranges").and_then(Value::as_array);
        let ranges = cidrs.iter().map(|cidr| range(present.map_or(&[], Vec::as_slice), *cidr)).collect();
        if present != Some(&ranges) {
            ipam.insert("ranges".to_owned(), Value::Array(ranges));
            changed = true;
        }
    }
    if !changed {
        return Ok(None);
    }
    Ok(Some(serde_json::to_string_pretty(&config)?))
}

/// The range set of that CIDR among those present, else a new one.
fn range(present: &[Value], cidr: IpNet) -> Value {
    let is_it = |set: &&Value| match set.as_array().map(Vec::as_slice) {
        Some([only]) => only.get("subnet").and_then(Value::as_str) == Some(&cidr.to_string()),
        _ => false,
    };
    present.iter().find(is_it).cloned().unwrap_or_else(|| json!([{ "subnet": cidr.to_string() }]))
}

/// Writes the CIDRs into the file atomically; returns whether it was written. Does nothing when the file does
/// not exist, or without CIDRs.
///
/// # Errors
/// When the file cannot be read, parsed or written; it then stays as it was.
pub fn update(path: &Path, cidrs: &[IpNet]) -> Result<bool, CniError> {
    let name = || path.display().to_string();
    if cidrs.is_empty() {
        return Ok(false);
    }
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(CniError::Io(name(), error)),
    };
    let Some(text) = with_ranges(&text, cidrs).map_err(|error| CniError::Invalid(name(), error))? else {
        return Ok(false);
    };
    let replace = || -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
        file.write_all(text.as_bytes())?;
        file.as_file().set_permissions(fs::metadata(path)?.permissions())?;
        // Without this, a power failure could leave an empty file under this name.
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    replace().map_err(|error| CniError::Io(name(), error))?;
    Ok(true)
}

/// Bridges that the configuration creates; empty without a file.
///
/// # Errors
/// When the file cannot be read or is not JSON.
pub fn bridges(path: &Path) -> Result<Vec<String>, CniError> {
    Ok(read(path)?.as_ref().map(bridges_of).unwrap_or_default())
}

fn read(path: &Path) -> Result<Option<Value>, CniError> {
    let name = || path.display().to_string();
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CniError::Io(name(), error)),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| CniError::Invalid(name(), error.into()))
}

fn plugins(config: &Value) -> &[Value] {
    config.get("plugins").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn bridges_of(config: &Value) -> Vec<String> {
    let bridges =
        plugins(config).iter().filter(|plugin| plugin.get("type").is_some_and(|kind| kind == "bridge"));
    // The plugin's own default.
    let named = |plugin: &Value| plugin.get("bridge").and_then(Value::as_str).unwrap_or("cni0").to_owned();
    bridges.map(named).collect()
}

/// The file that the container runtime uses instead of this one: the first configuration by name in its
/// directory. `None` when that is this one, or when this one does not exist.
///
/// # Errors
/// When the directory cannot be read.
pub fn in_front(path: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(directory), Some(own)) = (path.parent(), path.file_name()) else { return Ok(None) };
    // A symlink counts even if it dangles: its target may not be mounted here.
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let mut first = None;
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let extension = Path::new(&name).extension().and_then(|extension| extension.to_str());
        let counts = matches!(extension, Some("conf" | "conflist" | "json"));
        if counts && *name < *own && first.as_ref().is_none_or(|first| name < *first) {
            first = Some(name);
        }
    }
    Ok(first.map(|name| directory.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const LIST: &str = r#"{"cniVersion":"0.3.1","name":"kilo","plugins":[
        {"type":"bridge","ipam":{"type":"host-local"}},{"type":"portmap"}]}"#;

    #[test]
    fn its_bridges_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), LIST).unwrap();
        assert_eq!(bridges(file.path()).unwrap(), ["cni0"]);
        fs::write(file.path(), LIST.replace("\"bridge\",", "\"bridge\",\"bridge\":\"kube-bridge\","))
            .unwrap();
        assert_eq!(bridges(file.path()).unwrap(), ["kube-bridge"]);
        assert!(bridges(Path::new("/nonexistent")).unwrap().is_empty());
        fs::write(file.path(), "[").unwrap();
        assert!(bridges(file.path()).is_err());
    }

    #[test]
    fn both_families_become_ranges_and_the_rest_stays() {
        let cidrs = ["10.42.1.0/24".parse().unwrap(), "fd00:42:1::/64".parse().unwrap()];
        let text = with_ranges(LIST, &cidrs).unwrap().unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            config.pointer("/plugins/0/ipam/ranges"),
            Some(&json!([[{"subnet": "10.42.1.0/24"}], [{"subnet": "fd00:42:1::/64"}]]))
        );
        assert_eq!(config.pointer("/plugins/1"), Some(&json!({"type": "portmap"})));
        assert_eq!(with_ranges(&text, &cidrs).unwrap(), None);
    }

    #[test]
    fn what_else_is_said_stays() {
        let cidr: IpNet = "10.42.1.0/24".parse().unwrap();
        let range = json!({"subnet": "10.42.1.0/24", "rangeStart": "10.42.1.20"});
        let text = json!({
            "cniVersion": "0.4.0", "name": "mine", "disableCheck": true,
            "plugins": [
                {"type": "bridge", "mtu": 1300,
                 "ipam": {"type": "host-local", "dataDir": "/run/ipam", "ranges": [[range]]}},
                {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}},
            ],
        })
        .to_string();
        assert_eq!(with_ranges(&text, &[cidr]).unwrap(), None);
        let more = with_ranges(&text, &[cidr, "fd00:42:1::/64".parse().unwrap()]).unwrap().unwrap();
        let (mut before, mut after): (Value, Value) =
            (serde_json::from_str(&text).unwrap(), serde_json::from_str(&more).unwrap());
        let ranges = |config: &mut Value| config["plugins"][0]["ipam"]["ranges"].take();
        assert_eq!(ranges(&mut after), json!([[range], [{"subnet": "fd00:42:1::/64"}]]));
        ranges(&mut before);
        assert_eq!(before, after);
    }

    #[test]
    fn no_reader_sees_half_a_file_and_none_is_written_for_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("10-kilo.conflist");
        fs::write(&path, LIST).unwrap();
        assert!(!update(&path, &[]).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), LIST);
        let reader = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut seen = std::collections::BTreeSet::new();
                while seen.len() < 200 {
                    let text = fs::read_to_string(&path).unwrap();
                    let config: Value = serde_json::from_str(&text).unwrap();
                    assert_eq!(config.pointer("/plugins/1/type"), Some(&json!("portmap")));
                    seen.insert(text);
                }
            }
        });
        let mut number = 0_u32;
        while !reader.is_finished() {
            number += 1;
            let cidr = IpNet::new(std::net::Ipv4Addr::from(number << 8).into(), 24).unwrap();
            assert!(update(&path, &[cidr]).unwrap());
            assert!(!update(&path, &[cidr]).unwrap());
        }
        reader.join().unwrap();
        let names: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing is left beside the file");
    }

    #[test]
    fn rubbish_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("10-kilo.conflist");
        let cidr = "10.42.1.0/24".parse().unwrap();
        for rubbish in ["", "[]", "{\"plugins\": 3}", "{"] {
            fs::write(&path, rubbish).unwrap();
            let said = update(&path, &[cidr]).unwrap_err().to_string();
            assert!(said.contains("10-kilo.conflist") && said.contains("nothing was changed"), "{said}");
            assert_eq!(fs::read_to_string(&path).unwrap(), rubbish);
        }
    }

    #[test]
    fn the_configuration_that_comes_first_by_name_is_in_front() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("10-kilo.conflist");
        let put = |name: &str| fs::write(directory.path().join(name), "{}").unwrap();
        put("05-cilium.conflist");
        assert_eq!(in_front(&own).unwrap(), None, "there is none of ours");
        put("10-kilo.conflist");
        put("20-flannel.conflist");
        put("00-README.txt");
        put(".10-kilo.conflist.tmp");
        let in_front = || in_front(&own).unwrap().map(|path| path.file_name().unwrap().to_owned());
        assert_eq!(in_front().unwrap(), "05-cilium.conflist");
        put("00-multus.conf");
        assert_eq!(in_front().unwrap(), "00-multus.conf");
        for name in ["00-multus.conf", "05-cilium.conflist"] {
            fs::remove_file(directory.path().join(name)).unwrap();
        }
        assert_eq!(super::in_front(&own).unwrap(), None);
    }
}
