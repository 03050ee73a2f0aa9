//! TCP, UDP and ICMP probes: servers that answer with the address they saw,
//! clients that check the echo. Everything runs on threads inside the
//! namespaces, with real sockets.

use std::{
    io::{Read as _, Write as _},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use socket2::{Domain, Protocol as SocketProtocol, SockRef, Socket, Type};

use super::netns::Netns;
use crate::wait;

/// Port both servers listen on.
pub const PORT: u16 = 7007;
/// Repeated in the payload of probes, so that they are recognized wherever they are seen.
pub const MARKER: &[u8; 16] = b"kilo-probe-seen!";
/// Distance between two markers, in bytes.
const MARKER_EVERY: u64 = 128;
/// Payload of a TCP probe in bytes: several segments.
const TCP_PAYLOAD: usize = 8_000;
/// Payload of a UDP or ICMP probe in bytes.
const DATAGRAM_PAYLOAD: usize = 600;
/// Receive buffer, in bytes, of sockets at which datagrams are counted: 1,000 a second must not overflow it
/// while a busy machine leaves its reader waiting. The kernel's default holds 256 small ones.
const ROOM: usize = 8 << 20;

/// What a probe sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// One connection that carries [`TCP_PAYLOAD`] bytes both ways.
    Tcp,
    /// One datagram and its answer.
    Udp,
    /// One echo request and its reply.
    Icmp,
}

impl Protocol {
    /// All protocols, in the order of the matrix.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Icmp];

    /// Name in the matrix.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        }
    }
}

/// Starts a TCP and a UDP server on an address in the namespace; they live as
/// long as this process.
pub fn serve(netns: &Netns, address: IpAddr) -> Result<()> {
    let listener = netns
        .spawn(move || TcpListener::bind((address, PORT)))
        .join()
        .map_err(|_| anyhow::anyhow!("server thread"))??
        .with_context(|| format!("TCP port {PORT} in {}", netns.name))?;
    let socket = netns
        .spawn(move || UdpSocket::bind((address, PORT)))
        .join()
        .map_err(|_| anyhow::anyhow!("server thread"))??
        .with_context(|| format!("UDP port {PORT} in {}", netns.name))?;
    setsockopt(&socket, RcvBufForce, &ROOM).context("its receive buffer")?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || echo_tcp(stream));
        }
    });
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            let answer = [peer.ip().to_string().as_bytes(), b"\n", &buffer[..length]].concat();
            let _ = socket.send_to(&answer, peer);
        }
    });
    Ok(())
}

/// Longer than a fault and the pause of TCP after it, both of which a connection outlives.
const OUTLIVES: Duration = Duration::from_secs(300);

fn echo_tcp(mut stream: TcpStream) -> Option<()> {
    let peer = stream.peer_addr().ok()?;
    stream.set_read_timeout(Some(OUTLIVES)).ok()?;
    // Unacknowledged bytes are still sent after this side closes: the kernel gives up a socket that nobody
    // holds with the first try after 102 s (`tcp_orphan_retries`), and the other side would wait in vain.
    SockRef::from(&stream).set_linger(Some(OUTLIVES)).ok()?;
    stream.write_all(format!("{}\n", peer.ip()).as_bytes()).ok()?;
    let mut buffer = vec![0; 65536];
    loop {
        match stream.read(&mut buffer).ok()? {
            0 => return Some(()),
            length => stream.write_all(&buffer[..length]).ok()?,
        }
    }
}

/// Sends one probe from this thread's namespace. Returns the source address the server saw (`None` for ICMP,
/// which does not report it).
pub fn probe(protocol: Protocol, target: IpAddr, timeout: Duration) -> Result<Option<IpAddr>> {
    probe_port(protocol, (target, PORT).into(), timeout)
}

/// As [`probe`], to another port than that of the servers; for ICMP there is none.
pub fn probe_port(protocol: Protocol, target: SocketAddr, timeout: Duration) -> Result<Option<IpAddr>> {
    match protocol {
        Protocol::Tcp => tcp(target, timeout).map(Some),
        Protocol::Udp => udp(target, timeout).map(Some),
        Protocol::Icmp => icmp(target.ip(), timeout).map(|()| None),
    }
}

/// Sends one TCP probe from a namespace; returns the address the server saw.
pub fn from(netns: &Netns, target: impl Into<IpAddr>, timeout: Duration) -> Result<IpAddr> {
    let target = target.into();
    let seen = netns.spawn(move || probe(Protocol::Tcp, target, timeout)).join();
    let seen = seen.map_err(|_| anyhow::anyhow!("probe thread"))???;
    seen.context("the TCP server did not report the source")
}

/// Probes again and again until the server sees this address.
pub fn until_seen_as(
    netns: &Netns,
    target: impl Into<IpAddr>,
    source: impl Into<IpAddr>,
    limit: Duration,
) -> Result<()> {
    let (target, source) = (target.into(), source.into());
    wait::until(&format!("{} -> {target}, which is to see {source}", netns.name), limit, || {
        Ok(match from(netns, target, Duration::from_secs(2)) {
            Ok(seen) if seen == source => Ok(()),
            Ok(seen) => Err(format!("seen as {seen}")),
            Err(error) => Err(format!("{error:#}")),
        })
    })
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(byte_at).collect()
}

/// Byte of a stream at this position: part of the marker, or different from its neighbours.
pub fn byte_at(at: u64) -> u8 {
    let in_marker = MARKER.get((at % MARKER_EVERY) as usize).copied();
    in_marker.unwrap_or((at % 251) as u8)
}

/// A UDP socket of the target's family.
pub fn any_port(target: IpAddr) -> std::io::Result<UdpSocket> {
    let any = if target.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    setsockopt(&socket, RcvBufForce, &ROOM)?;
    Ok(socket)
}

/// The address the server saw, and what it sent back.
pub fn split_answer(answer: &[u8]) -> Result<(IpAddr, &[u8])> {
    let end = answer.iter().position(|&byte| byte == b'\n').context("no address in the answer")?;
    Ok((std::str::from_utf8(&answer[..end])?.parse()?, &answer[end + 1..]))
}

fn tcp(target: SocketAddr, timeout: Duration) -> Result<IpAddr> {
    let mut stream = TcpStream::connect_timeout(&target, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let sent = pattern(TCP_PAYLOAD);
    stream.write_all(&sent)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(|| {
        let port = stream.local_addr().map_or(0, |address| address.port());
        format!("from port {port}, after {} bytes", answer.len())
    })?;
    let (seen, echoed) = split_answer(&answer)?;
    if echoed != sent {
        bail!("{} of {} bytes came back, or other ones", echoed.len(), sent.len());
    }
    Ok(seen)
}

fn udp(target: SocketAddr, timeout: Duration) -> Result<IpAddr> {
    let socket = any_port(target.ip())?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(timeout))?;
    let sent = pattern(DATAGRAM_PAYLOAD);
    socket.send(&sent)?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer)?;
    let (seen, echoed) = split_answer(&buffer[..length])?;
    if echoed != sent {
        bail!("another payload came back");
    }
    Ok(seen)
}

/// Echo over a raw socket (RFC 792, RFC 4443).
fn icmp(target: IpAddr, timeout: Duration) -> Result<()> {
    static SEQUENCE: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(1);
    let sequence = SEQUENCE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let v4 = target.is_ipv4();
    let (domain, protocol, kind, answer) = match v4 {
        true => (Domain::IPV4, SocketProtocol::ICMPV4, 8, 0),
        false => (Domain::IPV6, SocketProtocol::ICMPV6, 128, 129),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(timeout))?;
    // As the identifier, too: equal ones may collide where sources are translated to one address.
    let [high, low] = sequence.to_be_bytes();
    let mut request = vec![kind, 0, 0, 0, high, low, high, low];
    request.extend(pattern(DATAGRAM_PAYLOAD));
    if v4 {
        // For ICMPv6 the kernel does it, because it chooses the source address.
        let checksum = internet_checksum(&request);
        request[2..4].copy_from_slice(&checksum.to_be_bytes());
    }
    socket.send_to(&request, &SocketAddr::from((target, 0)).into())?;
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 2048];
        let (length, from) = socket.recv_from(&mut buffer)?;
        // SAFETY: recv_from initialised the first `length` bytes.
        let packet = unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), length) };
        // Raw IPv4 sockets show the IP header, raw IPv6 sockets do not.
        let header = if v4 { usize::from(packet.first().context("empty packet")? & 0xf) * 4 } else { 0 };
        let Some(reply) = packet.get(header..) else { continue };
        if reply.len() == request.len() && reply[0] == answer && reply[4..] == request[4..] {
            if from.as_socket().map(|from| from.ip()) != Some(target) {
                bail!("the reply came from {from:?}");
            }
            return Ok(());
        }
    }
    bail!("no reply")
}

/// RFC 1071 checksum.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&byte| u32::from(byte)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_packet_with_its_checksum_is_zero() {
        let mut packet = vec![8, 0, 0, 0, 1, 2, 3, 4, 5];
        let checksum = internet_checksum(&packet);
        packet[2..4].copy_from_slice(&checksum.to_be_bytes());
        assert_eq!(internet_checksum(&packet), 0);
    }
}
