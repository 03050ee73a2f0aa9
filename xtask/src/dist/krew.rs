//! The manifest by which krew installs `kgctl` as `kubectl kilo`.

use std::{collections::BTreeMap, fmt::Write as _};

use super::kgctl::Target;

/// Renders the manifest for a krew index, from the SHA-256 of each archive.
pub fn manifest(version: &str, archives: &BTreeMap<Target, String>) -> String {
    let mut text = format!(
        "apiVersion: krew.googlecontainertools.github.com/v1alpha2\n\
         kind: Plugin\n\
         metadata:\n  name: kilo\n\
         spec:\n  version: v{version}\n  homepage: https://github.com/kilo-ebpf/kilo\n  \
         shortDescription: Show and join the mesh that Kilo makes of nodes\n  \
         description: |\n    Shows who leads each location and why, draws the mesh, prints WireGuard\n    \
         configurations of nodes and peers, and joins it: kgctl of Kilo on eBPF.\n  \
         platforms:\n"
    );
    for (target, sum) in archives {
        let _ = write!(
            text,
            "    - selector:\n        matchLabels:\n          os: {}\n          arch: {}\n      \
             uri: https://github.com/kilo-ebpf/kilo/releases/download/v{version}/{}\n      \
             sha256: {sum}\n      bin: {}\n",
            target.os,
            target.architecture,
            target.archive(),
            target.program,
        );
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::dist::kgctl::TARGETS;

    #[test]
    fn each_architecture_has_its_archive_and_checksum() {
        let sums = TARGETS.into_iter().map(|target| (target, format!("sum-{}", target.archive()))).collect();
        let made: serde_yaml_ng::Value = serde_yaml_ng::from_str(&manifest("1.2.3", &sums)).unwrap();
        assert_eq!(made["metadata"]["name"], "kilo");
        assert_eq!(made["spec"]["version"], "v1.2.3");
        let platforms = made["spec"]["platforms"].as_sequence().unwrap();
        assert_eq!(platforms.len(), TARGETS.len());
        for (platform, target) in platforms.iter().zip(TARGETS) {
            assert_eq!(platform["selector"]["matchLabels"]["os"], target.os);
            assert_eq!(platform["selector"]["matchLabels"]["arch"], target.architecture);
            assert_eq!(platform["bin"], target.program);
            assert_eq!(platform["sha256"], format!("sum-{}", target.archive()).as_str());
            assert!(platform["uri"].as_str().unwrap().ends_with(&target.archive()));
        }
    }
}
