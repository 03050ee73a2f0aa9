//! UDP datagrams as a stranger records and sends them: seen on a wire, and with a source of the sender's choice.

use std::{
    collections::{BTreeSet, VecDeque},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    os::fd::{AsRawFd as _, OwnedFd},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Result;
use nix::sys::socket::{AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, socket};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{netns::Netns, wait};

/// A datagram that was seen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Datagram {
    /// Source address and port.
    pub from: SocketAddrV4,
    /// Destination address and port.
    pub to: SocketAddrV4,
    /// What it carries.
    pub payload: Vec<u8>,
}

impl Datagram {
    /// Parses an Ethernet frame with UDP in IPv4 without options; `None` for any other.
    fn of(frame: &[u8]) -> Option<Self> {
        let is_udp = frame.get(12..14)? == [8, 0] && *frame.get(14)? == 0x45 && *frame.get(23)? == 17;
        let at = |address: usize, port: usize| {
            let octets: [u8; 4] = frame.get(address..address + 4)?.try_into().ok()?;
            let port: [u8; 2] = frame.get(port..port + 2)?.try_into().ok()?;
            Some(SocketAddrV4::new(Ipv4Addr::from(octets), u16::from_be_bytes(port)))
        };
        let length = usize::from(u16::from_be_bytes(frame.get(38..40)?.try_into().ok()?));
        let payload = frame.get(42..34 + length)?.to_vec();
        Some(Self { from: at(26, 34)?, to: at(30, 36)?, payload }).filter(|_| is_udp)
    }

    /// The packet, with its IPv4 and UDP headers.
    fn bytes(&self) -> Vec<u8> {
        let length = (28 + self.payload.len()) as u16;
        let mut bytes = vec![0x45, 0];
        bytes.extend(length.to_be_bytes());
        // The kernel adds identification and checksum; UDP needs none.
        bytes.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        bytes.extend(self.from.ip().octets());
        bytes.extend(self.to.ip().octets());
        for half in [self.from.port(), self.to.port(), length - 20, 0] {
            bytes.extend(half.to_be_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }
}

/// A packet socket that receives what all devices of the calling thread's namespace carry.
fn listen() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll)?)
}

/// What came next, if it is a datagram; after a moment `None` where nothing came.
fn next(socket: &OwnedFd, buffer: &mut [u8]) -> Option<Datagram> {
    let Ok((length, Some(_))) = recvfrom::<LinkAddr>(socket.as_raw_fd(), buffer) else {
        wait::pace(Duration::from_millis(1));
        return None;
    };
    Datagram::of(&buffer[..length])
}

/// A socket in the calling thread's namespace that sends whole packets.
fn raw() -> Result<Socket> {
    Ok(Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))?)
}

fn send_one(socket: &Socket, datagram: &Datagram) -> Result<()> {
    let to = SocketAddr::from((*datagram.to.ip(), 0));
    socket.send_to(&datagram.bytes(), &to.into()).map(drop).map_err(Into::into)
}

/// Records for so long, or until `is_enough`, on all devices of a namespace.
pub fn record(
    netns: &Netns,
    time: Duration,
    is_wanted: impl Fn(&Datagram) -> bool + Send + 'static,
    is_enough: impl Fn(&[Datagram]) -> bool + Send + 'static,
) -> JoinHandle<Result<Result<Vec<Datagram>>>> {
    netns.spawn(move || {
        let socket = listen()?;
        let (mut seen, mut buffer, began) = (Vec::new(), [0; 2048], Instant::now());
        while began.elapsed() < time && !is_enough(&seen) {
            seen.extend(next(&socket, &mut buffer).filter(|datagram| is_wanted(datagram)));
        }
        Ok(seen)
    })
}

/// Listens in one namespace for so long, and sends from another what `answer` makes of each datagram, `after` it
/// was heard; returns how many were sent, and the greatest age of one. Each payload is taken once, wherever it
/// is heard, so that what is sent here is not answered again.
pub fn answer(
    (hears, sends): (&Netns, &Netns),
    (time, after): (Duration, Duration),
    answer: impl Fn(&Datagram) -> Vec<Datagram> + Send + 'static,
) -> JoinHandle<Result<Result<(usize, Duration)>>> {
    let sends = sends.clone();
    hears.spawn(move || {
        let socket = listen()?;
        let out =
            sends.spawn(raw).join().map_err(|_| anyhow::anyhow!("the thread that opens a socket"))???;
        let (mut known, mut due, mut buffer) = (BTreeSet::new(), VecDeque::new(), [0; 2048]);
        let (began, mut sent, mut oldest) = (Instant::now(), 0, Duration::ZERO);
        while began.elapsed() < time || !due.is_empty() {
            let heard = next(&socket, &mut buffer).filter(|_| began.elapsed() < time);
            if let Some(heard) = heard.filter(|heard| known.insert(heard.payload.clone())) {
                due.push_back((Instant::now(), answer(&heard)));
            }
            while let Some((at, all)) = due.pop_front_if(|(at, _)| at.elapsed() >= after) {
                all.iter().try_for_each(|datagram| send_one(&out, datagram))?;
                sent += all.len();
                oldest = oldest.max(at.elapsed());
            }
        }
        Ok((sent, oldest))
    })
}

/// Sends the datagrams from a namespace, `every` apart.
///
/// # Errors
/// When the kernel refuses one.
pub fn send(netns: &Netns, datagrams: Vec<Datagram>, every: Duration) -> Result<()> {
    let sending = netns.spawn(move || -> Result<()> {
        let socket = raw()?;
        for datagram in datagrams {
            send_one(&socket, &datagram)?;
            wait::pace(every);
        }
        Ok(())
    });
    sending.join().map_err(|_| anyhow::anyhow!("the sending thread"))??
}
