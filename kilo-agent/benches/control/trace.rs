//! System calls of the agent, as strace sees them.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const OUTPUT: &str = "/tmp/strace";

/// What the agent requested from the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// All system calls of all threads.
    pub calls: usize,
    /// `bpf` calls that change a map.
    pub map_writes: usize,
    /// Netlink messages that change something.
    pub netlink_writes: usize,
    /// Netlink messages that only query.
    pub netlink_reads: usize,
    /// Configurations of the WireGuard device.
    pub wireguard_writes: usize,
}

/// strace on a process.
pub struct Trace(Child);

impl Trace {
    pub async fn start(process: u32) -> Self {
        let _ = fs::remove_file(OUTPUT);
        let child = Command::new("strace")
            .args(["-f", "-s", "32", "-o", OUTPUT, "-p", &process.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("strace; apt-get install strace");
        let deadline = Instant::now() + Duration::from_secs(10);
        while !fs::metadata(OUTPUT).is_ok_and(|file| file.len() > 0) {
            assert!(Instant::now() < deadline, "strace does not attach");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        Self(child)
    }

    /// Present length of the output, to count from.
    pub fn here(&self) -> usize {
        fs::metadata(OUTPUT).map_or(0, |file| file.len() as usize)
    }

    /// Ends strace; counts the calls after `from`.
    pub fn stop(mut self, from: usize) -> Asked {
        let pid = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT);
        let _ = self.0.wait();
        let text = fs::read(OUTPUT).unwrap();
        if let Some(kept) = std::env::var_os("KILO_BENCH_STRACE") {
            fs::write(kept, &text[from..]).unwrap();
        }
        count(&String::from_utf8_lossy(&text[from..]))
    }
}

fn count(text: &str) -> Asked {
    let mut asked = Asked::default();
    // A call that another thread's line interrupts has a second line, "<... name resumed>".
    for line in text.lines().filter(|line| line.contains('(') && !line.contains(" resumed>")) {
        asked.calls += 1;
        if line.contains("bpf(BPF_MAP_UPDATE_ELEM") || line.contains("bpf(BPF_MAP_DELETE_ELEM") {
            asked.map_writes += 1;
        }
        let sent = line.contains("sendto(") || line.contains("sendmsg(");
        if sent && (line.contains("type=RTM_NEW") || line.contains("type=RTM_DEL")) {
            asked.netlink_writes += 1;
        }
        if sent && line.contains("type=RTM_GET") {
            asked.netlink_reads += 1;
        }
        if sent && line.contains("\"set=1") {
            asked.wireguard_writes += 1;
        }
    }
    asked
}
