//! One archive for all architectures: nodes and registries select their image from it by the same digest.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{
    Architecture, IMAGE,
    buildah::{Archive, Buildah, pack},
};
use crate::command::output;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Writes the images of the architectures, which must be built, and an index of them. The digest is that of
/// the index.
pub fn archive(buildah: &Buildah, architectures: &[Architecture], file: &Path) -> Result<Archive> {
    let directory = file.parent().context("the archive has no directory")?;
    let layout = tempfile::tempdir_in(directory)?;
    for architecture in architectures {
        buildah.push(architecture.image(), layout.path(), architecture.name(), true)?;
    }
    let digest = join(layout.path(), architectures)?;
    Ok(Archive { digest, size: pack(layout.path(), file)? })
}

/// Turns a layout whose images bear the architectures' names into one with a single image; returns the
/// digest of its index.
fn join(layout: &Path, architectures: &[Architecture]) -> Result<String> {
    let path = layout.join("index.json");
    let listed: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let index = serde_json::to_vec(&index(&listed, architectures)?)?;
    let blob = layout.join("blob");
    fs::write(&blob, &index)?;
    let sum = output(Command::new("sha256sum").arg(&blob))?;
    let sum = sum.split_whitespace().next().context("sha256sum printed nothing")?.to_owned();
    fs::rename(&blob, layout.join("blobs/sha256").join(&sum))?;
    let digest = format!("sha256:{sum}");
    let top = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [{
            "mediaType": INDEX,
            "digest": digest,
            "size": index.len(),
            // containerd reads the name from the first, others from the second.
            "annotations": { "io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": IMAGE },
        }],
    });
    fs::write(&path, serde_json::to_vec(&top)?)?;
    Ok(digest)
}

/// Builds the index, which names each manifest's platform, from a layout whose manifests bear the
/// architectures' names.
fn index(listed: &Value, architectures: &[Architecture]) -> Result<Value> {
    let of = |architecture: &Architecture| {
        let name = architecture.name();
        let mut manifests = listed["manifests"].as_array().into_iter().flatten();
        let found = manifests
            .find(|manifest| manifest["annotations"]["org.opencontainers.image.ref.name"] == name)
            .with_context(|| format!("the layout has no image {name}"))?;
        Ok(json!({
            "mediaType": found["mediaType"],
            "digest": found["digest"],
            "size": found["size"],
            "platform": { "architecture": name, "os": "linux" },
        }))
    };
    let manifests = architectures.iter().map(of).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn one_index_names_the_manifest_of_each_architecture() {
        let listed = json!({ "manifests": [
            { "mediaType": "m", "digest": "sha256:b", "size": 2,
              "annotations": { "org.opencontainers.image.ref.name": "arm64" } },
            { "mediaType": "m", "digest": "sha256:a", "size": 1,
              "annotations": { "org.opencontainers.image.ref.name": "amd64" } },
        ] });
        let made = index(&listed, &Architecture::ALL).unwrap();
        assert_eq!(made["manifests"][0]["digest"], "sha256:a");
        assert_eq!(made["manifests"][0]["platform"]["architecture"], "amd64");
        assert_eq!(made["manifests"][1]["digest"], "sha256:b");
        assert_eq!(made["manifests"][1]["platform"]["architecture"], "arm64");
        let layout = tempfile::tempdir().unwrap();
        fs::create_dir_all(layout.path().join("blobs/sha256")).unwrap();
        fs::write(layout.path().join("index.json"), listed.to_string()).unwrap();
        let digest = join(layout.path(), &Architecture::ALL).unwrap();
        let sum = digest.strip_prefix("sha256:").unwrap();
        let blob = layout.path().join("blobs/sha256").join(sum);
        assert_eq!(serde_json::from_slice::<Value>(&fs::read(&blob).unwrap()).unwrap(), made);
        assert!(output(Command::new("sha256sum").arg(&blob)).unwrap().starts_with(sum));
        let top: Value =
            serde_json::from_slice(&fs::read(layout.path().join("index.json")).unwrap()).unwrap();
        assert_eq!(top["manifests"].as_array().unwrap().len(), 1);
        assert_eq!(top["manifests"][0]["digest"], digest.as_str());
        assert_eq!(top["manifests"][0]["size"], fs::metadata(&blob).unwrap().len());
        let one = json!({ "manifests": [listed["manifests"][0].clone()] });
        assert!(index(&one, &Architecture::ALL).unwrap_err().to_string().contains("amd64"));
    }
}
