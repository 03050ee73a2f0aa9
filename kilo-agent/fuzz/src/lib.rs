//! Fuzz targets: each takes any bytes, and panics when a property does not
//! hold. `cargo xtask fuzz` drives them with libFuzzer; `tests/kept_inputs.rs` runs
//! them on the kept corpus and on random changes of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::missing_panics_doc, reason = "a panic is what a target reports with")]

mod packets;
mod texts;

pub use packets::{checksum, encapsulation, headers, nat, signal};
pub use texts::{annotations, cni, conf, peer, uapi, yaml};

/// Runs one input, and panics when a property does not hold.
pub type Target = fn(&[u8]);

/// Every target by name, which is also that of its program and of its directory in `corpus/`.
pub const TARGETS: [(&str, Target); 11] = [
    ("headers", headers),
    ("signal", signal),
    ("encapsulation", encapsulation),
    ("checksum", checksum),
    ("nat", nat),
    ("annotations", annotations),
    ("peer", peer),
    ("yaml", yaml),
    ("conf", conf),
    ("cni", cni),
    ("uapi", uapi),
];
