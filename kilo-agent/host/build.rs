//! Finds the BPF object that the host crate carries.
//!
//! A debug build without one gets an empty object, so that `cargo check` works on a fresh
//! checkout; loading it fails with a message that says what to run. A release build needs one.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

fn main() -> ExitCode {
    println!("cargo:rerun-if-env-changed=KILO_EBPF_OBJECT");
    let given = env::var_os("KILO_EBPF_OBJECT").map(PathBuf::from);
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    let root = manifest.ancestors().nth(2).unwrap_or(Path::new("."));
    let object = given.unwrap_or_else(|| root.join("target/bpf/kilo.o"));
    println!("cargo:rerun-if-changed={}", object.display());
    if object.is_file() {
        println!("cargo:rustc-env=KILO_EBPF_OBJECT={}", object.display());
        return ExitCode::SUCCESS;
    }
    let missing = format!("the BPF object {} does not exist; run `cargo xtask build-ebpf`", object.display());
    if env::var_os("PROFILE").is_some_and(|profile| profile == "release") {
        eprintln!("error: {missing}");
        return ExitCode::FAILURE;
    }
    let empty = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default().join("empty.o");
    if let Err(error) = fs::write(&empty, []) {
        eprintln!("error: {}: {error}", empty.display());
        return ExitCode::FAILURE;
    }
    println!("cargo:warning={missing}; built without the programs, which suffices for `cargo check`");
    println!("cargo:rustc-env=KILO_EBPF_OBJECT={}", empty.display());
    ExitCode::SUCCESS
}
