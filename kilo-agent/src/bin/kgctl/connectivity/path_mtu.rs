//! The path MTU, as the kernel knows it.

use std::io;

use nix::{
    getsockopt_impl,
    libc::{self, c_int},
    setsockopt_impl,
    sys::socket::{getsockopt, setsockopt, sockopt::IpMtu},
};
use tokio::net::UdpSocket;

/// Sizes of the IP and UDP headers.
const HEADERS: usize = 20 + 8;
const HEADERS_V6: usize = 40 + 8;
/// The largest IPv4 packet, whatever the MTU of an interface.
const LARGEST: usize = 65_535;

#[derive(Clone, Copy)]
struct Discover;
setsockopt_impl!(
    Discover,
    libc::IPPROTO_IP,
    libc::IP_MTU_DISCOVER,
    c_int,
    nix::sys::socket::sockopt::SetStruct<c_int>
);

#[derive(Clone, Copy)]
struct DiscoverV6;
setsockopt_impl!(
    DiscoverV6,
    libc::IPPROTO_IPV6,
    libc::IPV6_MTU_DISCOVER,
    c_int,
    nix::sys::socket::sockopt::SetStruct<c_int>
);

#[derive(Clone, Copy)]
struct MtuV6;
getsockopt_impl!(
    MtuV6,
    libc::IPPROTO_IPV6,
    libc::IPV6_MTU,
    c_int,
    nix::sys::socket::sockopt::GetStruct<c_int>
);

/// Sets "don't fragment": packets of this socket arrive whole or not at all.
pub fn forbid_fragments(socket: &UdpSocket, is_ipv4: bool) -> io::Result<()> {
    match is_ipv4 {
        true => setsockopt(socket, Discover, &libc::IP_PMTUDISC_DO)?,
        false => setsockopt(socket, DiscoverV6, &libc::IPV6_PMTUDISC_DO)?,
    }
    Ok(())
}

/// The largest packet that the path of a connected socket carries, as far as the kernel has learned.
pub fn of(socket: &UdpSocket, is_ipv4: bool) -> io::Result<usize> {
    let mtu = if is_ipv4 { getsockopt(socket, IpMtu)? } else { getsockopt(socket, MtuV6)? };
    usize::try_from(mtu).map_err(io::Error::other)
}

/// Payload of a datagram that fills such a packet.
pub fn payload(mtu: usize, is_ipv4: bool) -> usize {
    mtu.min(LARGEST).saturating_sub(if is_ipv4 { HEADERS } else { HEADERS_V6 })
}

/// Whether the packet exceeded the path MTU, which the kernel has just updated.
pub fn is_too_large(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}
