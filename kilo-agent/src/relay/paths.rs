//! This host's source addresses and interfaces towards destinations, and its ports for relayed pairs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    time::{Duration, Instant},
};

use nix::sys::socket::{setsockopt, sockopt::RcvBuf};

/// How long an answer of the kernel is reused.
const HOLDS: Duration = Duration::from_secs(1);

/// Source address and interface towards each address, according to the kernel's routes.
#[derive(Debug, Default)]
pub struct Paths {
    /// Source address towards each address; `None` without a route.
    sources: Held<Option<IpAddr>>,
    /// Interface that has each source address. A lookup reads all addresses of the host, and most
    /// destinations share the same source.
    interfaces: Held<Option<u32>>,
}

impl Paths {
    /// Looks up source and interface towards this address; `None` without a route.
    pub fn look_up(&mut self, to: IpAddr, now: Instant) -> Option<(IpAddr, u32)> {
        let source = self.sources.get(to, now, source_towards)?;
        Some((source, self.interfaces.get(source, now, interface_of)?))
    }
}

/// The kernel's answers about addresses, cached for [`HOLDS`].
#[derive(Debug)]
struct Held<T>(BTreeMap<IpAddr, (Instant, T)>);

impl<T> Default for Held<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Copy> Held<T> {
    fn get(&mut self, of: IpAddr, now: Instant, ask: impl FnOnce(IpAddr) -> T) -> T {
        self.0.retain(|_, (since, _)| now.saturating_duration_since(*since) < HOLDS);
        self.0.entry(of).or_insert_with(|| (now, ask(of))).1
    }
}

/// The source address towards `to`: connecting a datagram socket sends nothing, but chooses it.
pub fn source_towards(to: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((to, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The interface that has this address.
fn interface_of(source: IpAddr) -> Option<u32> {
    let is_source = |address: &nix::sys::socket::SockaddrStorage| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        let v6 = address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip()));
        v4.or(v6) == Some(source)
    };
    let interface = nix::ifaddrs::getifaddrs()
        .ok()?
        .find(|interface| interface.address.as_ref().is_some_and(is_source))?;
    nix::net::if_::if_nametoindex(&*interface.interface_name).ok()
}

/// Whether the host has no IPv6 at all, as opposed to a port that is in use.
fn has_no_ipv6(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL))
}

/// Sockets that reserve the ports of pairs. Nobody reads from them: what the programs leave to the stack ends
/// there, without causing an ICMP error.
#[derive(Debug, Default)]
pub struct Ports(BTreeMap<u16, UdpSocket>);

impl Ports {
    /// Reserves a port; false when another process has it.
    pub fn take(&mut self, port: u16) -> bool {
        if self.0.contains_key(&port) {
            return true;
        }
        // Without IPv6 only IPv4's port can be reserved.
        let socket = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Err(error) if has_no_ipv6(&error) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)),
            socket => socket,
        };
        let Ok(socket) = socket else { return false };
        // The kernel raises the size to its minimum.
        let _ = setsockopt(&socket, RcvBuf, &1);
        self.0.insert(port, socket);
        true
    }

    /// Releases all other ports.
    pub fn keep(&mut self, taken: &BTreeSet<u16>) {
        self.0.retain(|port, _| taken.contains(port));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_of_one_source_is_looked_up_once_a_second() {
        let (mut paths, start) = (Paths::default(), Instant::now());
        let to = |last| IpAddr::from([127, 0, 0, last]);
        let source = Some(to(1));
        // Recent answers are reused, whatever the destination.
        paths.interfaces.0.insert(to(1), (start, Some(4_711)));
        paths.sources.0.insert(to(7), (start, source));
        paths.sources.0.insert(to(8), (start, source));
        let towards = |paths: &mut Paths, last, at| paths.look_up(to(last), at).map(|(_, index)| index);
        assert_eq!(towards(&mut paths, 7, start), Some(4_711));
        assert_eq!(towards(&mut paths, 8, start + HOLDS / 2), Some(4_711));
        let lo = nix::net::if_::if_nametoindex("lo").ok();
        assert_eq!(towards(&mut paths, 1, start + HOLDS), lo);
    }
}
