//! The two ends of a probe, which run in pods of the agent's own image: it has no shell.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream, UdpSocket},
    time::timeout,
};

/// Hidden commands of kgctl.
pub const SERVER: &str = "probe-server";
/// Hidden command of kgctl; its argument is the list of probes as JSON.
pub const CLIENT: &str = "probe";
/// Where servers listen.
pub const PORT: u16 = 8080;
/// A probe takes no longer than this.
const PATIENCE: Duration = Duration::from_secs(4);
/// The first packet to a new pod may meet a neighbour that nobody knows yet.
const TRIES: u32 = 2;
/// Bytes there and back that show whether full packets pass: many of them.
pub const BULK: usize = 256 << 10;

/// How a target is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A line there and back by TCP.
    Tcp,
    /// A datagram there and back.
    Udp,
    /// [`BULK`] bytes there and back by TCP, in packets as large as they can be.
    Bulk,
    /// A TCP connection that is accepted or refused: somebody is there.
    Reach,
}

/// One path to try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// What the asker calls it.
    pub id: usize,
    /// How.
    pub kind: Kind,
    /// Whom.
    pub to: SocketAddr,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// As asked.
    pub id: usize,
    /// Why it failed; `None` = it did not.
    pub error: Option<String>,
}

/// Serves for ever: both protocols, both families.
///
/// # Errors
/// When the port is taken.
pub async fn serve() -> Result<()> {
    let (tcp, udp) = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).await {
        Ok(tcp) => (tcp, UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)).await?),
        // A kernel without IPv6.
        Err(_) => {
            let any = ("0.0.0.0", PORT);
            (TcpListener::bind(any).await.context("cannot listen")?, UdpSocket::bind(any).await?)
        }
    };
    tokio::spawn(async move {
        let mut datagram = [0; 2048];
        while let Ok((length, from)) = udp.recv_from(&mut datagram).await {
            let _ = udp.send_to(&datagram[..length], from).await;
        }
    });
    loop {
        // Too many at once are taken later.
        let Ok((stream, _)) = tcp.accept().await else { continue };
        tokio::spawn(answer(stream));
    }
}

/// Longest such line, in bytes.
const LINE: u64 = 32;

/// A line with a number of bytes, and so many of them: they go back.
async fn answer(stream: TcpStream) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    (&mut stream).take(LINE).read_line(&mut line).await?;
    let length = line.trim().parse().unwrap_or(0).min(BULK);
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    let stream = stream.get_mut();
    stream.write_all(line.as_bytes()).await?;
    stream.write_all(&bytes).await?;
    stream.shutdown().await
}

/// Tries all at the same time; what came of each, as JSON.
///
/// # Errors
/// When the argument is not a list of probes.
pub async fn ask(probes: &str) -> Result<String> {
    let probes: Vec<Probe> = serde_json::from_str(probes).context("the list of probes")?;
    let asked = probes.into_iter().map(async |probe| {
        let mut error = None;
        for _ in 0..TRIES {
            error = match timeout(PATIENCE, attempt(&probe)).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {} s", PATIENCE.as_secs())),
            };
            if error.is_none() {
                break;
            }
        }
        Answer { id: probe.id, error }
    });
    Ok(serde_json::to_string(&futures::future::join_all(asked).await)?)
}

async fn attempt(probe: &Probe) -> io::Result<()> {
    let length = match probe.kind {
        Kind::Reach => {
            return match TcpStream::connect(probe.to).await {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Err(error),
                _ => Ok(()),
            };
        }
        Kind::Udp => {
            let own = if probe.to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(own).await?;
            socket.connect(probe.to).await?;
            socket.send(b"kilo").await?;
            let mut back = [0; 16];
            let length = socket.recv(&mut back).await?;
            return if &back[..length] == b"kilo" { Ok(()) } else { Err(io::Error::other("another answer")) };
        }
        Kind::Tcp => 0,
        Kind::Bulk => BULK,
    };
    let mut stream = TcpStream::connect(probe.to).await?;
    stream.write_all(format!("{length}\n").as_bytes()).await?;
    stream.write_all(&vec![b'k'; length]).await?;
    let mut back = Vec::new();
    stream.read_to_end(&mut back).await?;
    let wanted = length + length.to_string().len() + 1;
    if back.len() == wanted {
        return Ok(());
    }
    Err(io::Error::other(format!("{} of {wanted} bytes came back", back.len())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_ends_agree_and_a_port_where_nobody_is_counts_as_reached_only_by_reach() {
        tokio::spawn(serve());
        tokio::time::sleep(Duration::from_millis(200)).await;
        let here = SocketAddr::from(([127, 0, 0, 1], PORT));
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        let probes = [
            (Kind::Tcp, here),
            (Kind::Udp, here),
            (Kind::Bulk, here),
            (Kind::Reach, nobody),
            (Kind::Tcp, nobody),
            (Kind::Udp, nobody),
        ];
        let probes = probes.into_iter().enumerate().map(|(id, (kind, to))| Probe { id, kind, to });
        let asked = serde_json::to_string(&probes.collect::<Vec<_>>()).unwrap();
        let answers: Vec<Answer> = serde_json::from_str(&ask(&asked).await.unwrap()).unwrap();
        let failed: Vec<_> = answers.iter().filter(|answer| answer.error.is_some()).map(|it| it.id).collect();
        assert_eq!(failed, [4, 5], "{answers:?}");
        assert!(ask("nonsense").await.is_err());
    }
}
