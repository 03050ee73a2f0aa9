//! Finds the BPF object the agent carries.

use std::{
    env,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo:rerun-if-env-changed=KILO_EBPF_OBJECT");
    let given = env::var_os("KILO_EBPF_OBJECT").map(PathBuf::from);
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    let root = manifest.parent().unwrap_or(Path::new("."));
    let object = given.unwrap_or_else(|| root.join("target/bpf/kilo.o"));
    println!("cargo:rerun-if-changed={}", object.display());
    if !object.is_file() {
        eprintln!(
            "error: the BPF object {} does not exist; run `cargo xtask build-ebpf` first",
            object.display()
        );
        std::process::exit(1);
    }
    println!("cargo:rustc-env=KILO_EBPF_OBJECT={}", object.display());
}
