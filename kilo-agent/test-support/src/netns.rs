//! Runs a test's body in its own process with fresh network and mount namespaces, so that nothing in it
//! reaches the machine.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const INSIDE: &str = "KILO_TEST_INSIDE_NETNS";

/// The running test's path in this binary, which libtest uses as the thread's name.
pub fn own_name(test: &str) -> String {
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    assert!(name == test || name.ends_with(&format!("::{test}")), "{name:?} is not the test {test:?}");
    name
}

/// Runs `body` inside, or prints why it cannot. `test` is the name of the test function.
pub fn isolated<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F) {
    if std::env::var_os(INSIDE).is_some() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(body());
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        println!("kilo-skip: network namespaces need root");
        return;
    }
    let name = own_name(test);
    let mark = format!("{name} of {}", std::process::id());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([&name, "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, &mark).stdin(Stdio::null());
    // SAFETY: unshare and mount are plain system calls, nothing is allocated.
    unsafe { child.pre_exec(enter) };
    let child = match child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            println!("kilo-skip: cannot make namespaces: {error}");
            return;
        }
        // For example a test program that was rebuilt meanwhile; this must not look like a skip.
        Err(error) => panic!("{name} did not start in its namespace: {error}"),
    };
    let netns = netns_of(child.id());
    let output = child.wait_with_output().unwrap();
    end_all(&netns, &format!("{INSIDE}={mark}"));
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} failed inside its namespace");
    assert!(said.contains("running 1 test"), "{name} did not run inside its namespace");
}

/// The network namespace of a process.
fn netns_of(process: u32) -> PathBuf {
    fs::read_link(format!("/proc/{process}/ns/net")).unwrap()
}

/// Ends what is left of a test. A userspace WireGuard outlives its agent; processes in namespaces that the
/// test created are found by their environment.
fn end_all(netns: &Path, mark: &str) {
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let path = process.path();
        let is_in_netns = fs::read_link(path.join("ns/net")).is_ok_and(|other| other == netns);
        let has_mark = || {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        if (is_in_netns || has_mark())
            && let Some(id) = process.file_name().to_str().and_then(|id| id.parse().ok())
        {
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        }
    }
}

fn enter() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // Sockets and `ip netns` names of the test go with its mount namespace.
    mount(Some("kilo-test"), "/run", Some("tmpfs"), MsFlags::empty(), none)?;
    Ok(())
}

/// Runs a command that must succeed; returns its output.
#[track_caller]
pub fn sh(line: &str) -> String {
    let output = Command::new("sh").args(["-ec", line]).output().unwrap();
    assert!(
        output.status.success(),
        "`{line}`: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Sets up a host with its own state, sysfs and BPF file system, whose `eth0` has these addresses and leads
/// to `router`.
pub fn host(addresses: &[&str], router: &str) {
    sh(
        "mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard; mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
        ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up",
    );
    for address in addresses {
        sh(&format!("ip address add {address} dev eth0"));
    }
    sh(&format!("ip route add default via {router} dev eth0"));
}

/// True when the command succeeds.
pub fn succeeds(line: &str) -> bool {
    Command::new("sh").args(["-c", line]).output().is_ok_and(|output| output.status.success())
}

/// A `kg`, killed when the test ends.
pub struct Agent(pub Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        // Userspace WireGuard is a separate process, which ends with the link.
        succeeds("ip link delete kilo0");
    }
}

/// Leaves this thread only the capabilities that the DaemonSet's manifest grants. Commands that it starts
/// have all of root's again.
pub fn take_the_rights_of_the_daemonset() {
    let manifest = include_str!("../../../manifests/kilo-kubeadm.yaml");
    let container = manifest.split("\n        - name: kilo\n").nth(1).expect("the manifest has the agent");
    let added = container.split("              add:\n").nth(1).expect("the manifest adds capabilities");
    let names = added.lines().map_while(|line| line.trim().strip_prefix("- ")?.split(' ').next());
    let mask = names.fold(0u64, |mask, name| mask | 1 << number_of_capability(name));
    let half = |half: u64| u32::try_from(half & u64::from(u32::MAX)).unwrap();
    let (low, high) = (half(mask), half(mask >> 32));
    capabilities(nix::libc::SYS_capset, &mut [low, low, 0, high, high, 0]);
}

/// Runs `run` without effective capabilities on this thread, then restores them.
pub fn without_effective_rights(run: impl FnOnce()) {
    let mut rights = [0; 6];
    capabilities(nix::libc::SYS_capget, &mut rights);
    let [_, low, low_inherited, _, high, high_inherited] = rights;
    capabilities(nix::libc::SYS_capset, &mut [0, low, low_inherited, 0, high, high_inherited]);
    run();
    capabilities(nix::libc::SYS_capset, &mut rights);
}

/// Reads or writes this thread's capabilities: effective, permitted and inheritable sets, low half and high
/// half.
fn capabilities(call: nix::libc::c_long, data: &mut [u32; 6]) {
    // struct __user_cap_header_struct and two of __user_cap_data_struct (include/uapi/linux/capability.h).
    let header: [u32; 2] = [0x2008_0522, 0];
    // SAFETY: both structures are complete, and outlive the call.
    let code = unsafe { nix::libc::syscall(call, header.as_ptr(), data.as_mut_ptr()) };
    assert_eq!(code, 0, "{}", io::Error::last_os_error());
}

/// Bit number of a capability (include/uapi/linux/capability.h).
fn number_of_capability(name: &str) -> u32 {
    match name {
        "DAC_OVERRIDE" => 1,
        "NET_ADMIN" => 12,
        "NET_RAW" => 13,
        "SYS_ADMIN" => 21,
        "PERFMON" => 38,
        "BPF" => 39,
        other => panic!("capability {other} is new here: add its number"),
    }
}
