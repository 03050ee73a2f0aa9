//! Probes what size of packets the path to a node carries: sends a datagram that must not be fragmented, and
//! learns from the kernel whether a router refused it. No raw socket is needed, so neither is `CAP_NET_RAW`.
//!
//! An ICMP error counts only for the socket whose ports it quotes; both ports are
//! chosen anew for each datagram. A host that does not see our packets would have to guess
//! about 28 bits, twice, within the time a datagram has.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd as _, RawFd},
    time::Duration,
};

use nix::{
    cmsg_space, libc,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

/// How long to wait for a router's ICMP error.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// Datagrams that must all be refused for a smaller MTU to count.
const DATAGRAMS: usize = 2;
/// Bytes of an IPv4 or IPv6 and a UDP header.
const HEADERS: [u32; 2] = [20 + 8, 40 + 8];
/// Dynamic ports (RFC 6335), where next to nothing listens. WireGuard's and the
/// tunnel's default ports are among them and left out.
const PORTS: std::ops::RangeInclusive<u16> = 52_000..=65_535;

/// The path MTU to `remote` that routers report when it is less than `size`; in bytes with the IP header.
/// `None` when no router does.
///
/// # Errors
/// When the datagram cannot be sent: the interface itself carries less, or there
/// is no route.
pub async fn smaller_than(size: u32, remote: IpAddr) -> io::Result<Option<u32>> {
    let mut carries = None;
    for _ in 0..DATAGRAMS {
        match refused(size, remote).await? {
            Some(mtu) if mtu < size => carries = carries.max(Some(mtu)),
            _ => return Ok(None),
        }
    }
    Ok(carries)
}

/// Sends one datagram; returns the MTU that a router reports when it refuses it.
async fn refused(size: u32, remote: IpAddr) -> io::Result<Option<u32>> {
    let socket = open(remote)?;
    let headers = HEADERS[usize::from(remote.is_ipv6())];
    let payload = vec![0; usize::try_from(size.saturating_sub(headers)).unwrap_or(0)];
    socket.send(&payload)?;
    // SAFETY: the socket owns its descriptor and always returns the same one.
    let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::ERROR) }?;
    let answer = async {
        loop {
            let mut ready = socket.ready(Interest::ERROR).await?;
            match ready.try_io(|socket| read_error(socket.as_raw_fd())) {
                Ok(answer) => break answer,
                Err(_not_ready) => {}
            }
        }
    };
    timeout(ANSWERS_WITHIN, answer).await.unwrap_or(Ok(None))
}

/// A socket whose datagrams are sent as large as the interface allows, whatever
/// the kernel has learnt of the path, and which receives ICMP errors.
fn open(remote: IpAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match remote {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Drawn here: the kernel's own choice comes from a smaller range.
    let draw = || rand::random_range(PORTS);
    let socket = UdpSocket::bind((any, draw())).or_else(|_| UdpSocket::bind((any, draw())))?;
    socket.set_nonblocking(true)?;
    let (level, option, probe) = match remote {
        IpAddr::V4(_) => {
            setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)
        }
        IpAddr::V6(_) => {
            setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?;
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)
        }
    };
    let length = libc::socklen_t::try_from(size_of_val(&probe)).unwrap_or(0);
    // SAFETY: the option is an int, which the pointer leads to for the time of the call.
    let set =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const probe).cast(), length) };
    nix::errno::Errno::result(set)?;
    socket.connect((remote, draw()))?;
    Ok(socket)
}

/// Takes the next error the kernel holds for the socket; returns the MTU if a router refused a packet.
fn read_error(socket: RawFd) -> io::Result<Option<u32>> {
    let mut space = cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let mut quoted = [0; 64];
    let mut parts = [IoSliceMut::new(&mut quoted)];
    let message = recvmsg::<()>(socket, &mut parts, Some(&mut space), MsgFlags::MSG_ERRQUEUE)?;
    let error = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4RecvErr(error, _) | ControlMessageOwned::Ipv6RecvErr(error, _) => {
            Some(error)
        }
        _ => None,
    });
    // What this host itself refuses is not an answer of a router.
    let is_of_router = |error: &libc::sock_extended_err| {
        let by_icmp = matches!(error.ee_origin, libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6);
        by_icmp && error.ee_errno == libc::EMSGSIZE.unsigned_abs()
    };
    Ok(error.filter(is_of_router).map(|error| error.ee_info))
}
