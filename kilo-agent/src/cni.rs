//! The node's pod CIDRs in the CNI configuration list, as host-local reads them.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use ipnet::IpNet;
use serde_json::{Value, json};

/// Why the CNI configuration was left as it is.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// The file cannot be read or written.
    #[error("CNI configuration {0}: {1}")]
    Io(String, #[source] io::Error),
    /// The file is no configuration list.
    #[error("CNI configuration {0}: {1}; nothing was changed")]
    Invalid(String, String),
}

/// The configuration with these CIDRs as the ranges of every plugin that has
/// an `ipam` section. `None` when nothing changes.
///
/// # Errors
/// When the text is no JSON object with a `plugins` list.
pub fn with_ranges(text: &str, cidrs: &[IpNet]) -> Result<Option<String>, String> {
    let mut config: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let ranges: Vec<Value> = cidrs.iter().map(|cidr| json!([{ "subnet": cidr.to_string() }])).collect();
    let plugins =
        config.get_mut("plugins").and_then(Value::as_array_mut).ok_or("it has no list of plugins")?;
    let mut changed = false;
    for ipam in
        plugins.iter_mut().filter_map(|plugin| plugin.get_mut("ipam")).filter_map(Value::as_object_mut)
    {
        let ranges = Value::Array(ranges.clone());
        if ipam.get("ranges") != Some(&ranges) {
            ipam.insert("ranges".to_owned(), ranges);
            changed = true;
        }
    }
    if !changed {
        return Ok(None);
    }
    serde_json::to_string_pretty(&config).map(Some).map_err(|error| error.to_string())
}

/// Writes the CIDRs into the file, atomically; a file that is not there is
/// none of our business. Answers whether it was written.
///
/// # Errors
/// When the file cannot be used; it then stays as it was.
pub fn update(path: &Path, cidrs: &[IpNet]) -> Result<bool, CniError> {
    let name = || path.display().to_string();
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
        file.persist(path)?;
        Ok(())
    };
    replace().map_err(|error| CniError::Io(name(), error))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"{"cniVersion":"0.3.1","name":"kilo","plugins":[
        {"type":"bridge","ipam":{"type":"host-local"}},{"type":"portmap"}]}"#;

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
        assert_eq!(with_ranges(&text, &cidrs), Ok(None));
    }

    #[test]
    fn rubbish_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("10-kilo.conflist");
        for rubbish in ["", "[]", "{\"plugins\": 3}", "{"] {
            fs::write(&path, rubbish).unwrap();
            assert!(update(&path, &[]).is_err(), "{rubbish}");
            assert_eq!(fs::read_to_string(&path).unwrap(), rubbish);
        }
    }
}
