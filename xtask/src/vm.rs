//! `cargo xtask vm`: runs a command in a QEMU guest with a Debian kernel. The guest sees this machine's
//! root file system read-only under an overlay, so that everything installed and built here is available
//! there.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use parking_lot::Mutex;

use crate::{
    apt::{self, Suites},
    command::{output, run},
    lab::wait,
    workspace_root,
};

/// Directory that host and guest share for writing, relative to the workspace.
pub const SHARED: &str = "target/vm";

/// Debian packages that the virtual machine needs.
const PACKAGES: &[&str] = &["qemu-system-x86", "kmod", "busybox-static", "cpio", "xz-utils", "zstd"];

/// Modules that the initramfs loads before the root is mounted, in order.
const BOOT_MODULES: [&str; 6] = ["virtio_pci", "netfs", "9pnet", "9pnet_virtio", "9p", "overlay"];

/// Modules that data path and lab use; missing ones are built in or not needed.
const MODULES: &str = "wireguard ipip ip_gre vxlan 8021q veth bridge tun dummy sch_ingress cls_bpf act_bpf nf_tables nft_nat \
                       nft_masq nft_ct nft_chain_nat nft_counter nf_conntrack sch_netem br_netfilter";

/// Options of the virtual machine.
#[derive(Args, Clone, Debug)]
pub struct VmArgs {
    /// 6.1, 6.12, newest, or the path of a kernel image.
    #[arg(long)]
    pub kernel: String,
    /// Module tree of a kernel given by path (DIR/lib/modules/VERSION).
    #[arg(long)]
    pub modules: Option<PathBuf>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 3072)]
    pub memory: u32,
    /// Seconds until the guest is ended.
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// Let guest time count instructions (`-icount shift=0`).
    #[arg(long)]
    pub icount: bool,
    /// The command.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

/// A kernel image and its modules.
struct Kernel {
    image: PathBuf,
    /// Directory that holds `lib/modules/<version>`.
    modules: PathBuf,
    version: String,
}

/// Runs the command in the guest; returns its exit code.
pub fn execute(args: &VmArgs) -> Result<i32> {
    apt::install(PACKAGES)?;
    let cache = apt::cache_directory()?;
    let kernel = kernel(args, &cache)?;
    let initramfs = initramfs(&kernel, &cache)?;
    let shared = workspace_root().join(SHARED);
    fs::create_dir_all(&shared)?;
    let code = shared.join("exit-code");
    let _ = fs::remove_file(&code);
    write_command(args, &shared)?;
    boot(args, &kernel, &initramfs, &shared)?;
    let code = fs::read_to_string(&code).context("the guest ended without finishing the command")?;
    code.trim().parse().context("exit code")
}

fn kernel(args: &VmArgs, cache: &Path) -> Result<Kernel> {
    // Suite, and pattern of the package name.
    let (suite, pattern) = match args.kernel.as_str() {
        "6.1" => ("bookworm", r"^linux-image-6\.1\.[0-9.-]+-amd64-unsigned$"),
        "6.12" => ("bookworm-backports", r"^linux-image-6\.12\.[0-9.]+\+.*-amd64-unsigned$"),
        // In that suite the image is in a separate package from the modules.
        "newest" => ("trixie-backports", r"^linux-binary-[0-9.]+\+deb[0-9]+-amd64$"),
        path => return kernel_by_path(path, args.modules.as_deref()),
    };
    let directory = cache.join(format!("kernel-{}", args.kernel));
    if !directory.join("ready").exists() {
        println!("vm: fetching Debian's kernel {}", args.kernel);
        let suites = Suites::open(cache, &[suite], false)?;
        let names = output(suites.command("apt-cache").args(["search", "--names-only", pattern]))?;
        let mut packages: Vec<&str> = names
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .filter(|name| !name.contains("cloud") && !name.contains("-rt-"))
            .collect();
        packages.sort_by_key(|name| version_key(name));
        let package = packages.last().with_context(|| format!("{suite} has no kernel {}", args.kernel))?;
        let _ = fs::remove_dir_all(&directory);
        suites.unpack(package, &directory)?;
        if package.starts_with("linux-binary-") {
            suites.unpack(&package.replace("linux-binary-", "linux-modules-"), &directory)?;
        }
        let kernel = read_kernel(&directory)?;
        run(Command::new("/sbin/depmod").arg("-b").arg(module_base(&directory)).arg(&kernel.version))?;
        fs::write(directory.join("ready"), package)?;
    }
    read_kernel(&directory)
}

/// Numbers in a package name, for ordering by version.
fn version_key(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

fn kernel_by_path(path: &str, modules: Option<&Path>) -> Result<Kernel> {
    let image = PathBuf::from(path);
    if !image.is_file() {
        bail!("--kernel {path:?} is neither 6.1, 6.12 or newest nor a kernel image");
    }
    let modules = modules.context("--kernel with a path needs --modules DIR (DIR/lib/modules/VERSION)")?;
    let version = only_entry(&modules.join("lib/modules"))?;
    Ok(Kernel { image, modules: modules.to_owned(), version })
}

/// Newer packages have their modules under /usr.
fn module_base(directory: &Path) -> PathBuf {
    let merged = directory.join("usr");
    if merged.join("lib/modules").is_dir() { merged } else { directory.to_owned() }
}

fn read_kernel(directory: &Path) -> Result<Kernel> {
    let modules = module_base(directory);
    let version = only_entry(&modules.join("lib/modules"))?;
    // Newer packages have the image beside its modules.
    let places = [
        directory.join(format!("boot/vmlinuz-{version}")),
        modules.join(format!("lib/modules/{version}/vmlinuz")),
    ];
    let image = places.into_iter().find(|image| image.is_file());
    let image = image.with_context(|| format!("{} has no kernel image", directory.display()))?;
    Ok(Kernel { image, modules, version })
}

fn only_entry(directory: &Path) -> Result<String> {
    let entry = fs::read_dir(directory)
        .with_context(|| directory.display().to_string())?
        .flatten()
        .next()
        .with_context(|| format!("{} is empty", directory.display()))?;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

/// A small initramfs: busybox, the modules needed to mount the host's root, and a script.
fn initramfs(kernel: &Kernel, cache: &Path) -> Result<PathBuf> {
    let file = cache.join(format!("initramfs-{}.cpio", kernel.version));
    let tree = tempfile::tempdir()?;
    let root = tree.path();
    for directory in ["bin", "mod", "proc", "sys", "dev", "host", "shared", "modules", "new", "rw"] {
        fs::create_dir(root.join(directory))?;
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).context("busybox-static")?;
    let mut script = String::from(
        "#!/bin/busybox sh\nb=/bin/busybox\n$b mount -t proc proc /proc\n$b mount -t sysfs sys /sys\n$b mount -t devtmpfs dev /dev\n",
    );
    for (number, module) in load_order(kernel)?.into_iter().enumerate() {
        let name = format!("{number:02}.ko");
        unpack_module(&module, &root.join("mod").join(&name))?;
        script += &format!("$b insmod /mod/{name}\n");
    }
    script += INIT;
    let init = root.join("init");
    fs::write(&init, script)?;
    fs::set_permissions(&init, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    run(Command::new("sh")
        .current_dir(root)
        .args(["-c", "find . | cpio -o -H newc --quiet > \"$0\""])
        .arg(&file))?;
    Ok(file)
}

/// Files of the boot modules and their dependencies, dependencies first.
fn load_order(kernel: &Kernel) -> Result<Vec<PathBuf>> {
    let directory = kernel.modules.join("lib/modules").join(&kernel.version);
    let text = fs::read_to_string(directory.join("modules.dep")).context("modules.dep")?;
    let stem = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split(".ko").next().unwrap_or(file).replace('-', "_")
    };
    let mut order: Vec<PathBuf> = Vec::new();
    for module in BOOT_MODULES {
        let Some(line) = text.lines().find(|line| stem(line.split(':').next().unwrap_or_default()) == module)
        else {
            continue;
        };
        let (file, dependencies) = line.split_once(':').unwrap_or((line, ""));
        // modules.dep lists the nearest dependency first.
        for path in dependencies.split_whitespace().rev().chain([file]) {
            let path = directory.join(path);
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

fn unpack_module(from: &Path, to: &Path) -> Result<()> {
    let tool = match from.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => {
            fs::copy(from, to)?;
            return Ok(());
        }
    };
    run(Command::new("sh").args(["-c", "\"$0\" -dc \"$1\" > \"$2\"", tool]).arg(from).arg(to))
}

/// Rest of the guest's init: mounts the root, switches to it and runs the command. (A real root, not a
/// chroot: nsenter leaves a chroot.)
const INIT: &str = r"
o=trans=virtio,version=9p2000.L,msize=262144
$b mount -t 9p -o $o,ro,cache=loose host /host || $b sh
$b mount -t tmpfs -o size=2g rw /rw
$b mkdir /rw/upper /rw/work
$b mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work root /new
$b mkdir -p /new/lib/modules
for d in proc sys dev tmp run; do $b mkdir -p /new/$d; done
$b mount -t proc proc /new/proc
$b mount -t sysfs sys /new/sys
$b mount -t devtmpfs dev /new/dev
$b mkdir -p /new/dev/pts /new/dev/shm
$b mount -t devpts pts /new/dev/pts
$b mount -t tmpfs shm /new/dev/shm
# The checkout stays where it is, also below a directory of the guest's own.
w=$($b sed 's/.*kilo.checkout=\([^ ]*\).*/\1/' /proc/cmdline)
$b mkdir /keep
$b mount -o bind /new$w /keep
$b mount -t tmpfs tmp /new/tmp
$b mount -t tmpfs run /new/run
case $w in
/tmp/* | /run/*)
    $b mkdir -p /new$w
    $b mount -o bind /keep /new$w
esac
$b umount /keep
$b mount -t cgroup2 cgroup /new/sys/fs/cgroup
$b mount -t bpf bpf /new/sys/fs/bpf
$b mount -t 9p -o $o,ro,cache=loose modules /new/lib/modules
s=$($b sed 's/.*kilo.shared=\([^ ]*\).*/\1/' /proc/cmdline)
$b mkdir -p /new$s
$b mount -t 9p -o $o,cache=none shared /new$s
$b ip link set lo up
$b umount /proc /sys /dev
exec $b switch_root /new /bin/sh $s/command
";

/// Quotes a word for the shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Writes the script that the guest runs, in this directory and with this PATH.
fn write_command(args: &VmArgs, shared: &Path) -> Result<()> {
    let words: Vec<_> = args.command.iter().map(|word| quote(word)).collect();
    let directory = std::env::current_dir()?;
    let path = std::env::var("PATH").unwrap_or_default();
    let home = std::env::var("HOME").unwrap_or_default();
    fs::write(
        shared.join("command"),
        format!(
            "export PATH={}:/usr/sbin:/usr/bin:/sbin:/bin HOME={} LANG=C.UTF-8\ncd {}\nhostname vm\n\
             for m in {MODULES}; do modprobe $m 2>/dev/null; done\n{}\necho $? > {}\n\
             sync\n/bin/busybox poweroff -f\n",
            quote(&path),
            quote(&home),
            quote(&directory.to_string_lossy()),
            words.join(" "),
            quote(&shared.join("exit-code").to_string_lossy()),
        ),
    )?;
    Ok(())
}

/// Boots, shows the console, and ends the guest on timeout or when interrupted.
fn boot(args: &VmArgs, kernel: &Kernel, initramfs: &Path, shared: &Path) -> Result<()> {
    let share = |id: &str, path: &Path, readonly: bool| {
        let readonly = if readonly { ",readonly=on" } else { "" };
        format!("local,path={},mount_tag={id},security_model=none,multidevs=remap{readonly}", path.display())
    };
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-nodefaults", "-nographic", "-no-reboot"])
        .args(["-m", &args.memory.to_string(), "-serial", "stdio"])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .args([
            "-append",
            &format!(
                "console=ttyS0 quiet panic=-1 mitigations=off kilo.shared={} kilo.checkout={}",
                shared.display(),
                workspace_root().display()
            ),
        ])
        .args(["-virtfs", &share("host", Path::new("/"), true)])
        .args(["-virtfs", &share("modules", &kernel.modules.join("lib/modules"), true)])
        .args(["-virtfs", &share("shared", shared, false)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if args.icount {
        command.args(["-icount", "shift=0"]);
    }
    let mut child = command.spawn().context("qemu-system-x86_64")?;
    let console = child.stdout.take().context("no console")?;
    let child = Arc::new(Mutex::new(child));
    let on_signal = Arc::clone(&child);
    // Fails when a handler exists, as in a test run; that one then ends us, and QEMU sees its console
    // close.
    let _ = ctrlc::set_handler(move || {
        end(&on_signal);
        std::process::exit(130);
    });
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(std::result::Result::ok) {
            let text = String::from_utf8_lossy(&line);
            let _ = writeln!(std::io::stdout(), "{}", text.trim_end_matches('\r'));
        }
    });
    let ends =
        wait::until("the guest ends", Duration::from_secs(args.timeout), || Ok(child.lock().try_wait()?));
    if ends.is_err() {
        end(&child);
    }
    ends?;
    let _ = reader.join();
    Ok(())
}

fn end(child: &Mutex<Child>) {
    let mut child = child.lock();
    let _ = child.kill();
    let _ = child.wait();
}
