//! Reports at once that an interface, an address or a default route has gone, from a thread of its
//! own without a runtime.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
    },
};

/// One interface that packets to other locations need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Its index.
    pub index: u32,
    /// An address that it must have.
    pub address: Option<IpAddr>,
}

impl Needed {
    /// Whether the interface is up, as far as is known without asking netlink.
    pub fn is_up(&self) -> bool {
        let Ok(name) = nix::net::if_::if_indextoname(self.index) else { return false };
        let read =
            |file: &str| std::fs::read_to_string(format!("/sys/class/net/{}/{file}", name.to_string_lossy()));
        // The carrier of a device that is down cannot be read.
        read("carrier").is_ok_and(|carrier| carrier.trim() == "1")
    }
}

/// A subscription to links, addresses and routes.
#[derive(Debug)]
pub struct LinkEvents(OwnedFd);

/// What one read of the netlink socket showed, reduced to what failover reacts to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Something that is needed went.
    pub is_down: bool,
    /// Messages were lost: the host's state has to be read anew.
    pub is_lost: bool,
}

const HEADER: usize = 16;

impl LinkEvents {
    /// Subscribes in the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn open() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )?;
        let groups = libc::RTMGRP_LINK
            | libc::RTMGRP_IPV4_IFADDR
            | libc::RTMGRP_IPV6_IFADDR
            | libc::RTMGRP_IPV4_ROUTE
            | libc::RTMGRP_IPV6_ROUTE;
        bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &NetlinkAddr::new(0, groups.cast_unsigned()))?;
        Ok(Self(socket))
    }

    /// Reads everything there is.
    pub fn read(&self, needed: &[Needed]) -> Events {
        let mut events = Events::default();
        let mut buffer = [0; 16 << 10];
        loop {
            match recv(std::os::fd::AsRawFd::as_raw_fd(&self.0), &mut buffer, MsgFlags::empty()) {
                Ok(length) => events.is_down |= is_down(&buffer[..length.min(buffer.len())], needed),
                Err(nix::errno::Errno::ENOBUFS) => events.is_lost = true,
                Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return events,
            }
        }
    }
}

impl AsFd for LinkEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Whether one of these messages says that something needed went.
fn is_down(mut messages: &[u8], needed: &[Needed]) -> bool {
    while let (Some(length), Some(kind)) = (word(messages, 0), half(messages, 4)) {
        let length = length as usize;
        let Some(message) = messages.get(HEADER..length) else { return false };
        if says_down(kind, message, needed).unwrap_or(false) {
            return true;
        }
        messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

fn says_down(kind: u16, message: &[u8], needed: &[Needed]) -> Option<bool> {
    let is_needed = |index: u32| needed.iter().find(|needed| needed.index == index);
    Some(match kind {
        // struct ifinfomsg: index at 4, flags at 8.
        libc::RTM_NEWLINK => {
            let up = (libc::IFF_UP | libc::IFF_RUNNING).cast_unsigned();
            is_needed(word(message, 4)?).is_some() && word(message, 8)? & up != up
        }
        libc::RTM_DELLINK => is_needed(word(message, 4)?).is_some(),
        // struct ifaddrmsg: index at 4; attributes from 8 on.
        libc::RTM_DELADDR => {
            let address = is_needed(word(message, 4)?)?.address?;
            let is_it = |bytes: &[u8]| address_of(bytes) == Some(address);
            attributes(message, 8).any(|(kind, value)| [1, 2].contains(&kind) && is_it(value))
        }
        // struct rtmsg: length of the destination at 1, table at 4, attributes from 12 on (4: interface).
        libc::RTM_DELROUTE if (message.get(1), message.get(4)) == (Some(&0), Some(&libc::RT_TABLE_MAIN)) => {
            attributes(message, 12).any(|(kind, value)| {
                kind == 4 && word(value, 0).is_some_and(|index| is_needed(index).is_some())
            })
        }
        _ => false,
    })
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

/// Kind and value of each attribute.
fn attributes(message: &[u8], from: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = message.get(from..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = usize::from(half(rest, 0)?);
        let (kind, value) = (half(rest, 2)?, rest.get(4..length)?);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(body);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    fn link(index: u32, flags: i32) -> Vec<u8> {
        let mut body = vec![0; 4];
        body.extend(index.to_ne_bytes());
        body.extend(flags.to_ne_bytes());
        body.extend([0; 4]);
        body
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut out = ((4 + value.len()) as u16).to_ne_bytes().to_vec();
        out.extend(kind.to_ne_bytes());
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
        out
    }

    #[test]
    fn only_what_is_needed_and_goes_is_reported() {
        let needed = [Needed { index: 3, address: "192.0.2.1".parse().ok() }];
        let up = libc::IFF_UP | libc::IFF_RUNNING;
        let down = |kind, body: Vec<u8>| is_down(&message(kind, &body), &needed);
        assert!(!down(libc::RTM_NEWLINK, link(3, up)));
        assert!(down(libc::RTM_NEWLINK, link(3, libc::IFF_UP)), "no carrier");
        assert!(!down(libc::RTM_NEWLINK, link(4, 0)), "another one");
        assert!(down(libc::RTM_DELLINK, link(3, up)));
        let address = |octets: [u8; 4]| {
            let mut body = vec![2, 24, 0, 0];
            body.extend(3u32.to_ne_bytes());
            body.extend(attribute(1, &octets));
            body
        };
        assert!(down(libc::RTM_DELADDR, address([192, 0, 2, 1])));
        assert!(!down(libc::RTM_DELADDR, address([192, 0, 2, 2])));
        let route = |length: u8| {
            let mut body = vec![2, length, 0, 0, libc::RT_TABLE_MAIN];
            body.extend([0; 7]);
            body.extend(attribute(4, &3u32.to_ne_bytes()));
            body
        };
        assert!(down(libc::RTM_DELROUTE, route(0)));
        assert!(!down(libc::RTM_DELROUTE, route(24)));
        // Several in one read, and what is cut off.
        let mut several = message(libc::RTM_NEWLINK, &link(3, up));
        several.extend(message(libc::RTM_DELLINK, &link(3, up)));
        assert!(is_down(&several, &needed));
        for length in 0..several.len() {
            let _ = is_down(&several[..length], &needed);
        }
    }
}
