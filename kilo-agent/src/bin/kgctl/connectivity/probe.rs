//! The two ends of a probe, which run in pods of the agent's own image, because it has no shell.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream, UdpSocket},
    time::timeout,
};

/// Hidden command of kgctl that answers probes.
pub const SERVER: &str = "probe-server";
/// Hidden command of kgctl; its argument is the list of probes as JSON.
pub const CLIENT: &str = "probe";
/// Port of the probe servers.
pub const PORT: u16 = 8080;
/// Timeout of a probe.
const PATIENCE: Duration = Duration::from_secs(4);
/// The first packet to a new pod may be lost during neighbour resolution.
const TRIES: u32 = 2;
const LARGEST_DATAGRAM: usize = 1 << 16;
/// Bytes sent there and back to check full-sized packets: enough for many of them.
pub const BULK: usize = 256 << 10;

/// How a target is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A line sent there and back by TCP.
    Tcp,
    /// A datagram sent there and back.
    Udp,
    /// [`BULK`] bytes sent there and back by TCP, in packets as large as possible.
    Bulk,
    /// A datagram of the path MTU sent there and back, which must not be fragmented.
    Full,
    /// A TCP connection that is accepted or refused: either shows that the target is reachable.
    Reach,
}

/// One path to probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Number that the answer repeats.
    pub id: usize,
    /// Protocol of the probe.
    pub kind: Kind,
    /// Address and port to probe.
    pub to: SocketAddr,
}

/// Result of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Number of the probe.
    pub id: usize,
    /// Why the probe failed; `None` on success.
    pub error: Option<String>,
}

/// Answers probes of both protocols and both families.
pub struct Server {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Server {
    /// Listens on this port: probes sent from here on will be answered.
    ///
    /// # Errors
    /// When the port is taken.
    pub async fn bind(port: u16) -> Result<Self> {
        let (tcp, any) = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
            Ok(tcp) => (tcp, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
            // A kernel without IPv6.
            Err(_) => {
                let any = Ipv4Addr::UNSPECIFIED;
                (
                    TcpListener::bind((any, port)).await.context("failed to listen for probes by TCP")?,
                    any.into(),
                )
            }
        };
        let udp = UdpSocket::bind((any, tcp.local_addr()?.port()))
            .await
            .context("failed to listen for probes by UDP")?;
        Ok(Self { tcp, udp })
    }

    /// Answers forever.
    pub async fn run(self) {
        let Self { tcp, udp } = self;
        tokio::join!(echo(udp), accept(tcp));
    }
}

async fn echo(udp: UdpSocket) {
    let mut datagram = vec![0; LARGEST_DATAGRAM];
    loop {
        // An error belongs to an earlier answer, whose receiver has gone.
        if let Ok((length, from)) = udp.recv_from(&mut datagram).await {
            let _ = udp.send_to(&datagram[..length], from).await;
        }
    }
}

async fn accept(tcp: TcpListener) {
    loop {
        // Out of descriptors, for example: pending connections are accepted later.
        match tcp.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(answer(stream))),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}
/// Maximum length of the line with the number of bytes.
const LINE: u64 = 32;

/// Reads a line with a number of bytes, then that many bytes, and sends both back.
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

/// Runs all probes at the same time; returns the answers as JSON.
///
/// # Errors
/// When the argument is not a list of probes.
pub async fn ask(probes: &str) -> Result<String> {
    let probes: Vec<Probe> = serde_json::from_str(probes).context("failed to parse the list of probes")?;
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
            let socket = connected(probe.to).await?;
            socket.send(b"kilo").await?;
            let mut back = [0; 16];
            let length = socket.recv(&mut back).await?;
            return if &back[..length] == b"kilo" { Ok(()) } else { Err(io::Error::other("another answer")) };
        }
        Kind::Full => return full(probe.to).await,
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

async fn connected(to: SocketAddr) -> io::Result<UdpSocket> {
    let own = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(own).await?;
    socket.connect(to).await?;
    Ok(socket)
}

/// Sends a full-sized datagram. An ICMP error with a smaller path MTU is obeyed; a path that stays silent has
/// failed.
#[cfg(target_os = "linux")]
async fn full(to: SocketAddr) -> io::Result<()> {
    use super::path_mtu;
    const SENT: u32 = 4;

    let socket = connected(to).await?;
    path_mtu::forbid_fragments(&socket, to.is_ipv4())?;
    let mut back = vec![0; LARGEST_DATAGRAM];
    let mut mtu = 0;
    for _ in 0..SENT {
        mtu = path_mtu::of(&socket, to.is_ipv4())?;
        let sent = vec![b'k'; path_mtu::payload(mtu, to.is_ipv4())];
        let exchange = async {
            socket.send(&sent).await?;
            socket.recv(&mut back).await
        };
        match timeout(PATIENCE / (SENT + 1), exchange).await {
            Ok(Ok(length)) if length == sent.len() => return Ok(()),
            Ok(Ok(length)) => {
                return Err(io::Error::other(format!("{length} of {} bytes came back", sent.len())));
            }
            // Larger than the path MTU, which the kernel has just learned.
            Ok(Err(error)) if path_mtu::is_too_large(&error) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) => {}
        }
    }
    Err(io::Error::other(format!(
        "no reply to packets of {mtu} bytes, and no ICMP error said that they are too large"
    )))
}

/// Pods run on Linux.
#[cfg(not(target_os = "linux"))]
async fn full(to: SocketAddr) -> io::Result<()> {
    connected(to).await?;
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_ends_agree_and_a_port_where_nobody_is_counts_as_reached_only_by_reach() {
        // The port assigned for one protocol may be taken in the other.
        let server = loop {
            if let Ok(server) = Server::bind(0).await {
                break server;
            }
        };
        let here = SocketAddr::from(([127, 0, 0, 1], server.tcp.local_addr().unwrap().port()));
        tokio::spawn(server.run());
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        let probes = [
            (Kind::Tcp, here),
            (Kind::Udp, here),
            (Kind::Bulk, here),
            (Kind::Full, here),
            (Kind::Reach, nobody),
            (Kind::Tcp, nobody),
            (Kind::Udp, nobody),
            (Kind::Full, nobody),
        ];
        let probes = probes.into_iter().enumerate().map(|(id, (kind, to))| Probe { id, kind, to });
        let asked = serde_json::to_string(&probes.collect::<Vec<_>>()).unwrap();
        let answers: Vec<Answer> = serde_json::from_str(&ask(&asked).await.unwrap()).unwrap();
        let failed: Vec<_> = answers.iter().filter(|answer| answer.error.is_some()).map(|it| it.id).collect();
        assert_eq!(failed, [5, 6, 7], "{answers:?}");
        assert!(ask("nonsense").await.is_err());
    }
}
