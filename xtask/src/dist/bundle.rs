//! Archives with the same bytes whenever they are made.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::{
    command::run,
    image::buildah::source_epoch,
    manifests::{IMAGE, files},
    workspace_root,
};

use super::{VERSION, kgctl::Target};

/// Packs `kgctl`, the link `kubectl-kilo` by which kubectl finds it, and the man pages from the directory
/// `man`. The archive for Windows has neither the link, which would need privileges there, nor man pages.
pub fn program(program: &Path, target: &Target, man: &Path, to: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    fs::copy(program, work.path().join(target.program)).with_context(|| program.display().to_string())?;
    if target.os != "windows" {
        std::os::unix::fs::symlink(target.program, work.path().join("kubectl-kilo"))?;
        let pages = work.path().join("man/man1");
        fs::create_dir_all(&pages)?;
        for page in fs::read_dir(man).with_context(|| man.display().to_string())? {
            let page = page?;
            fs::copy(page.path(), pages.join(page.file_name()))?;
        }
    }
    fs::copy(workspace_root().join("LICENSE"), work.path().join("LICENSE"))?;
    pack(work.path(), to)
}

/// Packs `manifests/` and the Helm chart, both with the image of that digest.
pub fn manifests(digest: &str, output: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    let (plain, chart) = (work.path().join("plain"), work.path().join("chart"));
    for (name, text) in files()? {
        let (path, text) = match name.strip_prefix("chart/") {
            Some(name) => (chart.join(name), chart_with_digest(name, text, digest)?),
            None => (plain.join("manifests").join(&name), with_digest(&text, digest)),
        };
        fs::create_dir_all(path.parent().context("no directory")?)?;
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    pack(&plain, &output.join(format!("kilo-{VERSION}-manifests.tar.gz")))?;
    // The name under which Helm knows a packed chart.
    pack(&chart, &output.join(format!("kilo-{VERSION}.tgz")))
}

fn with_digest(text: &str, digest: &str) -> String {
    let tagged = format!("{IMAGE}:{VERSION}");
    let with_digest = format!("{tagged}@{digest}");
    let text = text.replace(&tagged, &with_digest);
    // The field of kustomize's `images`.
    text.replace(
        &format!("    newTag: {VERSION}\n"),
        &format!("    newTag: {VERSION}\n    digest: {digest}\n"),
    )
}

fn chart_with_digest(name: &str, text: String, digest: &str) -> Result<String> {
    if name != "kilo/values.yaml" {
        return Ok(text);
    }
    let empty = "  digest: \"\"\n";
    ensure!(text.contains(empty), "the chart's values have no empty digest");
    Ok(text.replace(empty, &format!("  digest: {digest}\n")))
}

/// Packs a directory's content, compressed and without `./` before the names: Helm looks for
/// `kilo/Chart.yaml`.
fn pack(directory: &Path, to: &Path) -> Result<()> {
    let names: Result<BTreeSet<_>, _> =
        fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.file_name())).collect();
    run(Command::new("tar")
        .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=go=rX,u+rw"])
        .arg(format!("--mtime=@{}", source_epoch(&workspace_root())))
        .args(["--use-compress-program=gzip --no-name --best", "-C"])
        .arg(directory)
        .arg("-cf")
        .arg(to)
        .args(names?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::dist::kgctl::TARGETS;
    use crate::{
        command::output,
        kube_tools::{self, Tool},
    };

    const DIGEST: &str = "sha256:000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f";

    #[test]
    fn every_image_of_a_release_has_its_digest_and_two_runs_are_equal() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        manifests(DIGEST, first.path()).unwrap();
        manifests(DIGEST, second.path()).unwrap();
        for name in [format!("kilo-{VERSION}-manifests.tar.gz"), format!("kilo-{VERSION}.tgz")] {
            let bytes = |directory: &Path| fs::read(directory.join(&name)).unwrap();
            assert!(bytes(first.path()) == bytes(second.path()), "{name} differs");
            run(Command::new("tar").arg("-xzf").arg(first.path().join(&name)).arg("-C").arg(first.path()))
                .unwrap();
        }
        let mut seen = 0;
        let listed = output(
            Command::new("grep").args(["-rhE", "image: |digest: "]).arg(first.path().join("manifests")),
        );
        for line in listed.unwrap().lines().filter(|line| line.contains(IMAGE) || line.contains("digest")) {
            seen += 1;
            assert!(line.ends_with(DIGEST), "{line}");
        }
        assert!(seen > 40, "{seen}");
        let Some(helm) = kube_tools::find(Tool::Helm) else {
            println!("kilo-skip: there is no helm; `cargo xtask kube-tools` gets it");
            return;
        };
        let chart = first.path().join(format!("kilo-{VERSION}.tgz"));
        let made =
            output(Command::new(helm).args(["template", "kilo", "--namespace=kube-system"]).arg(chart))
                .unwrap();
        assert!(made.contains(&format!("image: {IMAGE}@{DIGEST}")), "{made}");
        let kubectl = kube_tools::find(Tool::Kubectl).unwrap();
        let made =
            output(Command::new(kubectl).arg("kustomize").arg(first.path().join("manifests"))).unwrap();
        assert!(made.contains(DIGEST), "{made}");
    }

    #[test]
    fn kubectl_finds_kgctl_as_its_plugin() {
        let Some(kubectl) = kube_tools::find(Tool::Kubectl) else {
            println!("kilo-skip: there is no kubectl; `cargo xtask kube-tools` gets it");
            return;
        };
        let work = tempfile::tempdir().unwrap();
        let script = work.path().join("script");
        fs::write(&script, "#!/bin/sh\necho \"kgctl got $*\"\n").unwrap();
        run(Command::new("chmod").arg("755").arg(&script)).unwrap();
        let archive = work.path().join("kgctl.tar.gz");
        let man = tempfile::tempdir().unwrap();
        fs::write(man.path().join("kgctl.1"), ".TH kgctl 1\n").unwrap();
        program(&script, &TARGETS[0], man.path(), &archive).unwrap();
        run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(work.path())).unwrap();
        assert!(work.path().join("man/man1/kgctl.1").is_file());
        let path = format!("{}:/usr/bin:/bin", work.path().display());
        let said =
            output(Command::new(kubectl).env("PATH", path).args(["kilo", "status", "--wide"])).unwrap();
        assert_eq!(said.trim(), "kgctl got status --wide");
    }
}
