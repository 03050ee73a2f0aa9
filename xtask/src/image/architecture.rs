//! Architectures that images are built for.

use anyhow::Result;
use clap::ValueEnum;

use super::{IMAGE, base, emulation::Emulation};

/// An architecture that releases have an image of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Architecture {
    /// `x86_64`, on which everything is built.
    Amd64,
    /// `aarch64`.
    Arm64,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// Its name in Debian, Go and OCI.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Name of our image in the storage.
    pub const fn image(self) -> &'static str {
        match self {
            Self::Amd64 => IMAGE,
            Self::Arm64 => concat!("docker.io/kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"), "-arm64"),
        }
    }

    /// Name of the slim Debian image in the storage.
    pub const fn slim(self) -> &'static str {
        match self {
            Self::Amd64 => base::SLIM,
            Self::Arm64 => "docker.io/arm64v8/debian:bookworm-slim",
        }
    }

    /// Lets the kernel run the architecture's programs until the value is dropped; `None` for this
    /// machine's own.
    pub fn emulation(self) -> Result<Option<Emulation>> {
        match self {
            Self::Amd64 => Ok(None),
            Self::Arm64 => Emulation::start("aarch64").map(Some),
        }
    }
}
