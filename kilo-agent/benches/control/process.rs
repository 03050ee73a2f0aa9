//! The agent's process: its metrics, memory and CPU time.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// The measured binary; `$KILO_BENCH_KG` names another one, to compare with.
pub fn kg() -> String {
    std::env::var("KILO_BENCH_KG").unwrap_or_else(|_| env!("CARGO_BIN_EXE_kg").to_owned())
}

/// `kgctl` in the same directory.
pub fn kgctl() -> PathBuf {
    PathBuf::from(kg()).with_file_name("kgctl")
}

/// Environment variable that names the program of `cargo xtask`, which gives the agent the rights of its
/// DaemonSet.
const LAUNCHER: &str = "KILO_BENCH_LAUNCHER";
const LISTEN: &str = "127.0.0.1:1107";

/// The empty directory that becomes the container's root.
const ROOT: &str = "/tmp/container";

/// Command that starts the agent with the rights of its DaemonSet, as `cargo xtask confine` does, up to its
/// kubeconfig.
pub fn confined(kubeconfig: &Path) -> Vec<OsString> {
    let launcher = std::env::var_os(LAUNCHER).expect("cargo xtask bench names the launcher");
    let program = PathBuf::from(kg());
    fs::create_dir_all(ROOT).unwrap();
    let lent = [program.parent().unwrap(), kubeconfig.parent().unwrap()];
    let mut words = vec![launcher, "confine".into(), "--root".into(), ROOT.into()];
    words.extend(lent.into_iter().flat_map(|path| ["--lend".into(), path.into()]));
    words.extend(["--".into(), program.into(), "--kubeconfig".into(), kubeconfig.into()]);
    words
}

/// A running `kg`.
pub struct Agent {
    child: Child,
    started: Instant,
    /// CPU time of the launcher before it became the agent.
    before: Duration,
}

impl Agent {
    /// Starts it confined as `cargo xtask confine` does, and waits until the launcher has become the agent.
    pub fn start(kubeconfig: &Path, hostname: &str) -> Self {
        Self::start_with(kubeconfig, hostname, &[])
    }

    /// As [`Self::start`], with more flags.
    pub fn start_with(kubeconfig: &Path, hostname: &str, flags: &[&str]) -> Self {
        let log = fs::OpenOptions::new().create(true).append(true).open("/tmp/kg.log").unwrap();
        let program = kg();
        let words = confined(kubeconfig);
        let child = Command::new(&words[0])
            .args(&words[1..])
            .args(["--hostname", hostname, "--listen", LISTEN, "--wireguard", "userspace"])
            .args(["--cni-path", "/run/kilo/10-kilo.conflist", "--internal-cidr", "10.201.0.0/16"])
            .args(flags)
            .args(std::env::var("KILO_BENCH_FLAGS").unwrap_or_default().split_whitespace())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut agent = Self { child, started: Instant::now(), before: Duration::ZERO };
        agent.wait_for_the_program(Path::new(&program).file_name().unwrap().to_str().unwrap());
        agent
    }

    fn wait_for_the_program(&mut self, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let runs =
            |id: u32| fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|comm| comm.trim() == name);
        while !runs(self.id()) {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the launcher ended: {status}\n{}", log());
            }
            assert!(Instant::now() < deadline, "the launcher does not start kg\n{}", log());
            std::thread::sleep(Duration::from_micros(200));
        }
        (self.started, self.before) = (Instant::now(), self.ran());
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Time since the start.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Its metrics, as soon as it answers.
    pub async fn metrics(&mut self) -> BTreeMap<String, f64> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("kg ended: {status}\n{}", log());
            }
            match scrape().await {
                Ok(text) => {
                    let lines = text.lines().filter(|line| !line.starts_with('#'));
                    return lines
                        .filter_map(|line| {
                            let (name, value) = line.rsplit_once(' ')?;
                            Some((name.to_owned(), value.parse().ok()?))
                        })
                        .collect();
                }
                Err(error) => assert!(Instant::now() < deadline, "no metrics: {error}\n{}", log()),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until a metric is as wanted.
    pub async fn until(&mut self, metric: &str, wanted: impl Fn(f64) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(180);
        while !self.metrics().await.get(metric).is_some_and(|value| wanted(*value)) {
            assert!(Instant::now() < deadline, "{metric} is not as wanted\n{}", log());
            // Each scrape makes the agent read its WireGuard device.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Resident memory now and at most, in megabytes (10^6 bytes).
    pub fn memory(&self) -> (f64, f64) {
        let text = fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let field = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0 / 1e6
        };
        (field("VmRSS"), field("VmHWM"))
    }

    /// CPU time of all its threads, including those that have ended, without the launcher's.
    pub fn ran(&self) -> Duration {
        let process = nix::unistd::Pid::from_raw(self.id().cast_signed());
        let clock = nix::time::clock_getcpuclockid(process).unwrap();
        let ran: Duration = nix::time::clock_gettime(clock).unwrap().into();
        ran - self.before
    }

    /// Stops it with SIGTERM; returns how long that took.
    pub async fn stop(mut self) -> Duration {
        let started = Instant::now();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(self.id().cast_signed()),
            nix::sys::signal::Signal::SIGTERM,
        )
        .unwrap();
        while self.child.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        started.elapsed()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn scrape() -> std::io::Result<String> {
    let mut stream = TcpStream::connect(LISTEN).await?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kg\r\nConnection: close\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

fn log() -> String {
    fs::read_to_string("/tmp/kg.log").unwrap_or_default()
}
