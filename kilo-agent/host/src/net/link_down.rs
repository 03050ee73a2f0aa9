//! Detects at once that an interface, an address or a default route has gone, for a thread of its own without
//! a runtime.

use std::{
    io::{self, BufRead, BufReader},
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
    /// Index of the interface.
    pub index: u32,
    /// An address that it must have; `None` when no address is needed.
    pub address: Option<IpAddr>,
}

impl Needed {
    /// Whether packets of this address family need the interface: the family of its address, or both without
    /// one.
    fn takes(&self, family: i32) -> bool {
        self.address.is_none_or(|address| address.is_ipv4() == (family == libc::AF_INET))
    }

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
    /// A needed interface or address has gone.
    pub is_down: bool,
    /// A default route has gone. Another one may be left or take its place: [`has_default_route`] shows that
    /// a moment later.
    pub is_route_gone: bool,
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

    /// Reads all pending messages, without waiting.
    pub fn read(&self, needed: &[Needed]) -> Events {
        let mut events = Events::default();
        let mut buffer = [0; 16 << 10];
        loop {
            match recv(std::os::fd::AsRawFd::as_raw_fd(&self.0), &mut buffer, MsgFlags::empty()) {
                Ok(length) => events.add(&buffer[..length.min(buffer.len())], needed),
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

impl Events {
    /// Adds the events in these netlink messages.
    fn add(&mut self, mut messages: &[u8], needed: &[Needed]) {
        while let (Some(length), Some(kind)) = (word(messages, 0), half(messages, 4)) {
            let length = length as usize;
            let Some(message) = messages.get(HEADER..length) else { return };
            self.is_down |= reports_down(kind, message, needed).unwrap_or(false);
            self.is_route_gone |= reports_route_gone(kind, message, needed).unwrap_or(false);
            messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// Whether the calling thread's network namespace has a default route, by any interface, for the family of
/// each address in `needed`. True when routes cannot be read, as probes notice a loss, too. A host without
/// such an address never needed a default route.
pub fn has_default_route(needed: &[Needed]) -> bool {
    has_routes(needed, |file| {
        std::fs::File::open(format!("/proc/thread-self/net/{file}")).map(BufReader::new)
    })
}

/// [`has_default_route`], where `open` returns the content of `route` or `ipv6_route` of /proc/net.
fn has_routes<R: BufRead>(needed: &[Needed], open: impl Fn(&str) -> io::Result<R>) -> bool {
    needed.iter().filter_map(|needed| needed.address).all(|address| {
        let (file, is_default): (_, fn(&str) -> bool) =
            if address.is_ipv4() { ("route", is_default_v4) } else { ("ipv6_route", is_default_v6) };
        open(file).map_or(true, |routes| routes.lines().map_while(Result::ok).any(|line| is_default(&line)))
    })
}

/// Whether a route with these flags is up and not a reject route (`RTF_UP`, `RTF_REJECT`).
const fn leads_on(flags: u32) -> bool {
    flags & 0x0201 == 1
}

/// Fields of `/proc/net/route`: interface, destination, gateway, flags, three numbers, mask.
fn is_default_v4(line: &str) -> bool {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let flags = fields.get(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
    (fields.get(1), fields.get(7)) == (Some(&"00000000"), Some(&"00000000")) && flags.is_some_and(leads_on)
}

/// Fields of `/proc/net/ipv6_route`: destination, its length, source, its length, next hop, three numbers,
/// flags, interface.
fn is_default_v6(line: &str) -> bool {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let flags = fields.get(8).and_then(|flags| u32::from_str_radix(flags, 16).ok());
    let is_all = fields.first().is_some_and(|to| to.bytes().all(|digit| digit == b'0'));
    is_all && fields.get(1) == Some(&"00") && fields.get(9) != Some(&"lo") && flags.is_some_and(leads_on)
}

fn reports_route_gone(kind: u16, message: &[u8], needed: &[Needed]) -> Option<bool> {
    // struct rtmsg: family at 0, length of the destination at 1, table at 4, attributes from 12 on
    // (4: interface).
    if kind != libc::RTM_DELROUTE || (*message.get(1)?, *message.get(4)?) != (0, libc::RT_TABLE_MAIN) {
        return None;
    }
    let family = i32::from(*message.first()?);
    let is_needed = |index: u32| needed.iter().any(|needed| needed.index == index && needed.takes(family));
    Some(attributes(message, 12).any(|(kind, value)| kind == 4 && word(value, 0).is_some_and(is_needed)))
}

fn reports_down(kind: u16, message: &[u8], needed: &[Needed]) -> Option<bool> {
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
    fn a_default_route_is_needed_for_each_address_and_for_no_device_without() {
        let v4 = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0";
        let v6 = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
                  fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0";
        let kilo = Needed { index: 2, address: None };
        let uplink = |address: &str| vec![kilo.clone(), Needed { index: 3, address: address.parse().ok() }];
        let has = |needed: &[Needed], v4: &'static str, v6: &'static str| {
            has_routes(needed, |file| Ok((if file == "route" { v4 } else { v6 }).as_bytes()))
        };
        assert!(has(&uplink("192.0.2.1"), v4, ""));
        assert!(!has(&uplink("192.0.2.1"), "", v6), "the other family's is none for it");
        assert!(has(&uplink("2001:db8::1"), "", v6));
        assert!(!has(&uplink("2001:db8::1"), v4, ""));
        assert!(has(std::slice::from_ref(&kilo), "", ""), "a host that never had one");
        assert!(has_routes(&uplink("192.0.2.1"), |_| Err::<&[u8], _>(io::ErrorKind::NotFound.into())));
    }

    #[test]
    fn only_what_is_needed_and_goes_is_reported() {
        let needed = [Needed { index: 3, address: "192.0.2.1".parse().ok() }];
        let up = libc::IFF_UP | libc::IFF_RUNNING;
        let events = |messages: &[u8], needed: &[Needed]| {
            let mut events = Events::default();
            events.add(messages, needed);
            events
        };
        let down = |kind, body: Vec<u8>| events(&message(kind, &body), &needed).is_down;
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
        let route = |family: i32, length: u8| {
            let mut body = vec![family as u8, length, 0, 0, libc::RT_TABLE_MAIN];
            body.extend([0; 7]);
            body.extend(attribute(4, &3u32.to_ne_bytes()));
            body
        };
        let gone = |body: Vec<u8>, needed: &[Needed]| {
            let events = events(&message(libc::RTM_DELROUTE, &body), needed);
            assert!(!events.is_down, "another one may be left");
            events.is_route_gone
        };
        assert!(gone(route(libc::AF_INET, 0), &needed));
        assert!(!gone(route(libc::AF_INET, 24), &needed));
        assert!(!gone(route(libc::AF_INET6, 0), &needed), "an expired router advertisement");
        assert!(gone(route(libc::AF_INET6, 0), &[Needed { index: 3, address: None }]));
        // Several messages in one read, and truncated ones.
        let mut several = message(libc::RTM_NEWLINK, &link(3, up));
        several.extend(message(libc::RTM_DELLINK, &link(3, up)));
        assert!(events(&several, &needed).is_down);
        for length in 0..several.len() {
            let _ = events(&several[..length], &needed);
        }
    }

    #[test]
    fn a_default_route_that_leads_on_is_told_from_others() {
        let v4 = "eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0";
        assert!(is_default_v4(v4));
        assert!(!is_default_v4(&v4.replacen("00000000", "0000000A", 1)), "another destination");
        assert!(!is_default_v4(&v4.replace("0003", "0201")), "unreachable");
        assert!(!is_default_v4("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask"));
        let zero = "0".repeat(32);
        let v6 = |length, flags, device| {
            format!("{zero} {length} {zero} 00 {zero} 00000400 00000001 00000000 {flags} {device}")
        };
        assert!(is_default_v6(&v6("00", "00450003", "     eth0")));
        assert!(!is_default_v6(&v6("40", "00000001", "     eth0")), "a network");
        assert!(!is_default_v6(&v6("00", "00200200", "       lo")), "the kernel's own end");
    }
}
