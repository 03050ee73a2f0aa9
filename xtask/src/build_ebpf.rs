//! `cargo xtask build-ebpf`: the BPF object from source, with stable Rust.

mod btf;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    apt::{self, Suites},
    command::{cargo_home, output, run, rust_sysroot, show},
    workspace_root,
};

/// Version that matches the LLVM of the pinned toolchain.
const BPF_LINKER: &str = "0.13.0";
const TARGET: &str = "bpfel-unknown-none";
/// Arguments of every cargo command for the BPF target.
const FOR_BPF: [&str; 4] = ["-Z", "build-std=core", "--target", TARGET];
/// Cargo's own target directory for BPF, relative to the workspace.
const BUILD_DIRECTORY: &str = "target/bpf-build";

/// A binary of the BPF crate, and the path of its object relative to the workspace.
type Object = (&'static str, &'static str);
/// Kilo's programs.
const KILO: Object = ("kilo-ebpf", "target/bpf/kilo.o");
/// Stand-ins for Cilium's programs.
const CILIUM: Object = ("cilium", kilo_lab::CILIUM_OBJECT);

/// Builds the object; returns its path.
pub fn build(quiet: bool) -> Result<PathBuf> {
    build_in(&workspace_root(), KILO, quiet)
}

/// Builds the foreign programs that labs put beside Kilo's.
pub fn build_foreign() -> Result<()> {
    build_in(&workspace_root(), CILIUM, true).map(drop)
}

fn build_in(root: &Path, (program, object): Object, quiet: bool) -> Result<PathBuf> {
    let say = |line: String| {
        if !quiet {
            println!("build-ebpf: {line}");
        }
    };
    let toolchain = Toolchain::find(&say)?;
    let mut command = toolchain.cargo(root)?;
    command
        .args(["build", "--release", "--locked", "--package", "kilo-ebpf", "--bin", program])
        .args(FOR_BPF);
    if quiet {
        command.arg("--quiet");
    }
    show(&mut command).context("the BPF programs do not build")?;
    let built = root.join(BUILD_DIRECTORY).join(TARGET).join("release").join(program);
    let path = root.join(object);
    fs::create_dir_all(path.parent().context("no parent")?)?;
    strip(&toolchain.sysroot, &built, &path)?;
    say(format!("{object}, {} bytes", fs::metadata(&path)?.len()));
    Ok(path)
}

/// Runs clippy on the programs as they are built for BPF.
///
/// # Errors
/// When clippy warns, or the toolchain for BPF is missing.
pub fn clippy() -> Result<()> {
    let root = workspace_root();
    let toolchain = Toolchain::find(&|_| ())?;
    let mut command = toolchain.cargo(&root)?;
    command
        .args(["clippy", "--locked", "--quiet", "--package", "kilo-ebpf", "--bins"])
        .args(FOR_BPF)
        .args(["--", "-D", "warnings"]);
    show(&mut command).context("clippy has warnings about the BPF programs")
}

/// What compiling for BPF needs: rustc's sources of `core`, and a linker.
struct Toolchain {
    sysroot: PathBuf,
    source: RustSource,
    linker: PathBuf,
}

impl Toolchain {
    /// Fetches what is missing.
    fn find(say: &dyn Fn(String)) -> Result<Self> {
        let cache = apt::cache_directory()?;
        let sysroot = rust_sysroot()?;
        let source = rust_source(&sysroot, &cache, say)?;
        let linker = bpf_linker(&sysroot, &cache, say)?;
        Ok(Self { sysroot, source, linker })
    }

    /// Cargo, configured to compile for BPF.
    fn cargo(&self, root: &Path) -> Result<Command> {
        // Paths of this machine must not reach the object: two builds are equal to the byte.
        let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
        let flags = [
            "-Cdebuginfo=2".to_owned(),
            "-Ctarget-cpu=v3".to_owned(),
            "-Clink-arg=--btf".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            remap(root, "/kilo"),
            remap(&cargo_home()?, "/cargo"),
            remap(self.source.library.parent().unwrap_or(Path::new("/")), "/rust"),
            remap(&self.sysroot, "/sysroot"),
        ];
        let mut command = Command::new("cargo");
        command
            .current_dir(root)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .env("CARGO_TARGET_DIR", root.join(BUILD_DIRECTORY))
            .env_remove("RUSTFLAGS");
        if !self.source.in_sysroot {
            command.env("__CARGO_TESTS_ONLY_SRC_ROOT", &self.source.library);
        }
        Ok(command)
    }
}

/// Removes DWARF but keeps BTF, whose order no longer depends on the build. An unchanged file keeps its modification time, so that cargo does not
/// rebuild the agent.
fn strip(sysroot: &Path, from: &Path, to: &Path) -> Result<()> {
    let host = output(Command::new("rustc").arg("-vV"))?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    let tool = sysroot.join("lib/rustlib").join(host).join("bin/rust-objcopy");
    // In a directory of its own, because several processes of a test run build at once.
    let directory = tempfile::tempdir_in(to.parent().context("no parent")?)?;
    let stripped = directory.path().join("stripped.o");
    run(Command::new(tool)
        .env("LD_LIBRARY_PATH", sysroot.join("lib"))
        .arg("--strip-debug")
        .arg(from)
        .arg(&stripped))?;
    let mut object = fs::read(&stripped)?;
    btf::sort_declarations(&mut object).with_context(|| from.display().to_string())?;
    if object != fs::read(to).unwrap_or_default() {
        fs::write(&stripped, object)?;
        fs::rename(&stripped, to)?;
    }
    Ok(())
}

/// Builds once more in a copy of the sources elsewhere, and compares.
pub fn check_reproducible() -> Result<()> {
    let first = build(true)?;
    let copy = tempfile::tempdir()?;
    let root = workspace_root();
    for name in ["Cargo.toml", "Cargo.lock", "kilo-common", "kilo-ebpf", "kilo-agent", "xtask"] {
        run(Command::new("cp").arg("-a").arg(root.join(name)).arg(copy.path()))?;
    }
    let second = build_in(copy.path(), KILO, true)?;
    if fs::read(&first)? != fs::read(&second)? {
        bail!("two builds of the same sources differ: {} and a copy elsewhere", first.display());
    }
    println!("build-ebpf: a second build in another directory is equal to the byte");
    Ok(())
}

struct RustSource {
    /// The `library` directory.
    library: PathBuf,
    in_sysroot: bool,
}

/// Finds the sources of `core` in the sysroot or the cache, or fetches them with rustup or from Debian.
fn rust_source(sysroot: &Path, cache: &Path, say: &dyn Fn(String)) -> Result<RustSource> {
    let in_sysroot = sysroot.join("lib/rustlib/src/rust/library");
    if in_sysroot.join("core/src/lib.rs").exists() {
        say("rust-src: found in the toolchain".to_owned());
        return Ok(RustSource { library: in_sysroot, in_sysroot: true });
    }
    let version = output(Command::new("rustc").arg("--version"))?;
    let version = version.split_whitespace().nth(1).context("rustc names no version")?;
    let unpacked = cache.join(format!("rust-src-{version}"));
    let library = unpacked.join(format!("usr/src/rustc-{version}/library"));
    if library.join("core/src/lib.rs").exists() {
        say(format!("rust-src: found in {}", cache.display()));
        return Ok(RustSource { library, in_sysroot: false });
    }
    if run(Command::new("timeout").args(["60", "rustup", "component", "add", "rust-src"])).is_ok()
        && in_sysroot.join("core/src/lib.rs").exists()
    {
        say("rust-src: fetched with rustup".to_owned());
        return Ok(RustSource { library: in_sysroot, in_sysroot: true });
    }
    let suites = Suites::open(cache, &["trixie-backports", "forky", "sid"], false)?;
    let wanted = format!("{version}+");
    let package = suites
        .versions("rust-src")?
        .into_iter()
        .find(|candidate| candidate.starts_with(&wanted))
        .with_context(|| {
        format!("neither rustup nor Debian has rust-src {version}; install it into the toolchain")
    })?;
    suites.unpack(&format!("rust-src={package}"), &unpacked)?;
    if !library.join("core/src/lib.rs").exists() {
        bail!("Debian's rust-src {package} holds no {}", library.display());
    }
    say(format!("rust-src: fetched Debian's {package}"));
    Ok(RustSource { library, in_sysroot: false })
}

/// Path of bpf-linker, built against the LLVM that comes with rustc.
fn bpf_linker(sysroot: &Path, cache: &Path, say: &dyn Fn(String)) -> Result<PathBuf> {
    let tools = cache.join(format!("bpf-linker-{BPF_LINKER}"));
    let linker = tools.join("bin/bpf-linker");
    if run(Command::new(&linker).arg("--version")).is_ok() {
        say(format!("bpf-linker {BPF_LINKER}: found in {}", cache.display()));
        return Ok(linker);
    }
    apt::install(&["build-essential", "pkg-config", "zlib1g-dev"])?;
    let llvm = fs::read_dir(sysroot.join("lib"))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libLLVM")))
        .collect::<Vec<_>>();
    let Some(first) = llvm.iter().min() else {
        bail!("{} holds no libLLVM; bpf-linker needs rustc's own", sysroot.join("lib").display());
    };
    let shim = tools.join("llvm");
    let _ = fs::remove_dir_all(&shim);
    fs::create_dir_all(shim.join("lib"))?;
    for path in &llvm {
        symlink(path, shim.join("lib").join(path.file_name().unwrap_or_default()))?;
    }
    symlink(first, shim.join("lib/libLLVM.so"))?;
    say(format!("bpf-linker {BPF_LINKER}: building it (about a minute)"));
    run(Command::new("cargo")
        .env("LLVM_PREFIX", &shim)
        .env_remove("RUSTFLAGS")
        .args(["install", "--locked", &format!("bpf-linker@{BPF_LINKER}")])
        .args(["--no-default-features", "--features", "llvm-22", "--root"])
        .arg(&tools))?;
    say(format!("bpf-linker {BPF_LINKER}: built"));
    Ok(linker)
}
