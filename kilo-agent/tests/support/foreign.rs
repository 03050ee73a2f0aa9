//! Programs of somebody else: they count their runs and pass every packet on.

use std::path::Path;

use aya::programs::SchedClassifier;

#[path = "../../../xtask/lab/src/foreign.rs"]
mod instructions;

pub use instructions::attach_tcx;

/// `mov64 r0, -1; exit`: `TC_ACT_UNSPEC`, so the next program has its turn.
const PASS_ON: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];

/// Loads a program and pins it there.
pub fn program(pin: &Path) -> SchedClassifier {
    instructions::program("foreign", &PASS_ON, pin).unwrap()
}
