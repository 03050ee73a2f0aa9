//! Bulk transfer of known bytes over one TCP connection, both ways at once.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{netns::Netns, probe};

/// Longest accepted time without a byte: a sender that keeps losing GSO packets backs off ever longer.
const STALL: Duration = Duration::from_secs(5);
/// Longest accepted time for the whole transfer, even on an emulated machine.
const LIMIT: Duration = Duration::from_secs(40);

/// Sends `length` bytes from the namespace to the server of [`probe::serve`], which echoes them; every byte
/// is compared. Returns the longest time without a byte.
///
/// # Errors
/// When a byte differs or is late.
pub fn run(from: &Netns, target: IpAddr, length: usize) -> Result<Duration> {
    let flow = from.spawn(move || transfer(target, length)).join();
    let flow = flow.map_err(|_| anyhow::anyhow!("TCP thread"))?;
    flow.and_then(|flow| flow).with_context(|| format!("{length} bytes from {} to {target}", from.name))
}

fn transfer(target: IpAddr, length: usize) -> Result<Duration> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((target, probe::PORT)), LIMIT)?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let sent = pattern(length);
    let mut writer = stream.try_clone()?;
    let bytes = sent.clone();
    let began = Instant::now();
    let writer = std::thread::spawn(move || {
        writer.write_all(&bytes)?;
        writer.shutdown(std::net::Shutdown::Write)
    });
    let mut answer = Vec::with_capacity(length + 64);
    let mut buffer = vec![0; 65536];
    let (mut last, mut stall) = (Instant::now(), Duration::ZERO);
    loop {
        let read = stream.read(&mut buffer);
        stall = stall.max(last.elapsed());
        last = Instant::now();
        match read.with_context(|| format!("after {} bytes", answer.len()))? {
            0 => break,
            count => answer.extend_from_slice(&buffer[..count]),
        }
        if began.elapsed() > LIMIT {
            bail!("only {} bytes came back within {} s", answer.len(), LIMIT.as_secs());
        }
    }
    writer.join().map_err(|_| anyhow::anyhow!("sending thread"))??;
    let (_, echoed) = probe::split_answer(&answer)?;
    ensure!(echoed.len() == length, "{} bytes came back", echoed.len());
    if let Some(at) = echoed.iter().zip(&sent).position(|(seen, sent)| seen != sent) {
        bail!("byte {at} came back as another one");
    }
    Ok(stall)
}

/// Bytes derived from their offset, so that no part can pass for another.
fn pattern(length: usize) -> Vec<u8> {
    let words = (0..length.div_ceil(8) as u64)
        .flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i >> 3).to_le_bytes());
    words.take(length).collect()
}
