//! Stand-ins for Cilium's programs, from the object built from `kilo-ebpf/src/bin/cilium.rs`.

use std::{net::Ipv4Addr, path::Path};

use anyhow::{Context as _, Result};
use aya::{EbpfLoader, programs::SchedClassifier};

/// The object, relative to the workspace.
pub const OBJECT: &str = "target/bpf/cilium.o";

/// Counters of a node: one for each hook of a shared device and side of ours ([`super::counter`]),
/// then these.
pub const FROM_HOST: u32 = 12;
pub const TO_HOST: u32 = 13;
pub const FROM_CONTAINER: u32 = 14;
pub const FROM_OVERLAY: u32 = 15;
/// What the host firewall refused.
pub const REFUSED: u32 = 16;
/// Number of counters.
pub const COUNTERS: usize = 17;

/// Port of Kilo's VXLAN, for which the host firewall has no rule.
pub const KILO_VXLAN_PORT: u16 = 51_821;
/// Hardware address of `cilium_host`.
pub const HOST_ADDRESS: [u8; 6] = [0x02, 0xc1, 0, 0, 0, 1];

/// One of the programs, and its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    name: &'static str,
    counter: u32,
    device: u32,
    own: u32,
    firewall: bool,
}

impl Program {
    /// A program that counts packets and returns its verdict.
    pub const fn named(name: &'static str, counter: u32) -> Self {
        Self { name, counter, device: 0, own: 0, firewall: false }
    }

    /// Redirects to the device with this index.
    pub const fn to(self, device: u32) -> Self {
        Self { device, ..self }
    }

    /// Sets the node's address in the overlay.
    pub fn of(self, own: Ipv4Addr) -> Self {
        Self { own: u32::from_ne_bytes(own.octets()), ..self }
    }

    /// Adds the host firewall.
    pub const fn guarding(self) -> Self {
        Self { firewall: true, ..self }
    }

    /// Name of the program in the object.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Loads it with the maps that are pinned in `directory`, and pins it there under `pin`.
    ///
    /// # Errors
    /// When the object is not built, or the verifier rejects it.
    pub fn load(&self, directory: &Path, pin: &str) -> Result<SchedClassifier> {
        let path = crate::workspace_root().join(OBJECT);
        let mut loader = EbpfLoader::new();
        for map in ["metrics", "ipcache"] {
            loader.map_pin_path(map, directory.join(map));
        }
        let firewall = u32::from(self.firewall);
        loader
            .override_global("COUNTER", &self.counter, true)
            .override_global("DEVICE", &self.device, true)
            .override_global("OWN", &self.own, true)
            .override_global("FIREWALL", &firewall, true);
        let mut object = loader.load_file(&path).with_context(|| path.display().to_string())?;
        let program = object.program_mut(self.name).context(self.name)?;
        let program: &mut SchedClassifier = program.try_into()?;
        program.load()?;
        let pin = directory.join(pin);
        program.pin(&pin)?;
        Ok(SchedClassifier::from_pin(pin)?)
    }
}
