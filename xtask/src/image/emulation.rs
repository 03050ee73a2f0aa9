//! Runs another architecture's programs with QEMU while an image for it is built.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result};

use crate::{apt, command::run};

const KERNEL: &str = "/proc/sys/fs/binfmt_misc";

/// The kernel hands the architecture's programs to QEMU until this is dropped.
pub struct Emulation {
    /// The binfmt entry registered here; `None` when it existed before.
    name: Option<String>,
}

impl Emulation {
    /// Starts emulation of a CPU, by QEMU's name for it.
    pub fn start(cpu: &str) -> Result<Self> {
        apt::install(&["arch-test", "qemu-user-static"])?;
        let kernel = Path::new(KERNEL);
        if !kernel.join("register").exists() {
            run(Command::new("mount").args(["-t", "binfmt_misc", "binfmt_misc", KERNEL]))
                .context("this kernel runs no programs of other architectures (CONFIG_BINFMT_MISC)")?;
        }
        let name = format!("qemu-{cpu}");
        if kernel.join(&name).exists() {
            return Ok(Self { name: None });
        }
        // Registers what systemd would at boot: the interpreter is opened at registration, so that it is
        // found in every root.
        let file = format!("/usr/lib/binfmt.d/{name}.conf");
        let line = fs::read_to_string(&file).with_context(|| file.clone())?;
        fs::write(kernel.join("register"), line.trim()).with_context(|| format!("{KERNEL}/register"))?;
        Ok(Self { name: Some(name) })
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = fs::write(Path::new(KERNEL).join(name), "-1");
        }
    }
}
