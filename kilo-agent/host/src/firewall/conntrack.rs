//! Deletes the conntrack entries of flows that netfilter tracks but does not translate: as long as its entry
//! exists, rules that are added later do not translate a flow.
//!
//! Messages are those of `nfnetlink_conntrack.h`: native byte order in headers, network byte
//! order in values.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Instant,
};

use nix::{
    libc,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
        socket, sockopt::ReceiveTimeout,
    },
    sys::time::{TimeVal, TimeValLike as _},
};

/// Conntrack's subsystem, in the upper byte of message types, and its message types.
const SUBSYSTEM: u16 = 1 << 8;
const NEW: u16 = SUBSYSTEM;
const GET: u16 = SUBSYSTEM | 1;
const DELETE: u16 = SUBSYSTEM | 2;
/// Attributes of an entry.
const ORIGINAL: u16 = 1;
const STATUS: u16 = 3;
/// Attributes of a tuple, and of its addresses.
const ADDRESSES: u16 = 1;
const V4: (u16, u16) = (1, 2);
const V6: (u16, u16) = (3, 4);
/// Flags in an attribute's type.
const FLAGS: u16 = 0xc000;
/// `IPS_SRC_NAT | IPS_DST_NAT`.
const TRANSLATED: u32 = 0x30;
/// Lengths of `nlmsghdr` alone, and with `nfgenmsg`.
const HEADER: usize = 16;
const START: usize = HEADER + 4;
/// Buffer size for one part of a dump.
const PART: usize = 1 << 16;

/// Flows that netfilter tracks but does not translate, between certain addresses.
#[derive(Debug)]
pub struct Untranslated<F> {
    netlink: OwnedFd,
    buffer: Vec<u8>,
    is_concerned: F,
    /// Family and original tuple of each entry, as attributes.
    entries: Vec<(u8, Vec<u8>)>,
}

impl<F: FnMut(IpAddr, IpAddr) -> bool> Untranslated<F> {
    /// Lists the flows whose source and destination `is_concerned` accepts. The kernel walks all its entries
    /// for that, which takes some ten milliseconds.
    ///
    /// # Errors
    /// When the kernel has no conntrack over netlink, or forbids it (`CAP_NET_ADMIN`).
    pub fn list(is_concerned: F) -> io::Result<Self> {
        let mut flows = Self { netlink: open()?, buffer: vec![0; PART], is_concerned, entries: Vec::new() };
        flows.look()?;
        Ok(flows)
    }

    /// Deletes their entries until `until`: first the listed ones, then those that were added since. Returns
    /// how many.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn forget(mut self, until: Instant) -> io::Result<usize> {
        let listed = self.delete(until)?;
        if Instant::now() >= until {
            return Ok(listed);
        }
        self.look()?;
        Ok(listed + self.delete(until)?)
    }

    fn look(&mut self) -> io::Result<()> {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let family = u8::try_from(family).unwrap_or_default();
            let found = list(&self.netlink, &mut self.buffer, family, &mut self.is_concerned)?;
            self.entries.extend(found.into_iter().map(|tuple| (family, tuple)));
        }
        Ok(())
    }

    fn delete(&mut self, until: Instant) -> io::Result<usize> {
        let mut deleted = 0;
        for (family, tuple) in std::mem::take(&mut self.entries) {
            if Instant::now() >= until {
                break;
            }
            deleted += usize::from(delete(&self.netlink, &mut self.buffer, family, &tuple)?);
        }
        Ok(deleted)
    }
}

fn open() -> io::Result<OwnedFd> {
    let (flags, kind) = (SockFlag::SOCK_CLOEXEC, SockType::Raw);
    let netlink = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkNetFilter)?;
    bind(netlink.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    setsockopt(&netlink, ReceiveTimeout, &TimeVal::seconds(5))?;
    Ok(netlink)
}

fn request(kind: u16, flags: i32, family: u8, attributes: &[u8]) -> Vec<u8> {
    let flags = u16::try_from(libc::NLM_F_REQUEST | flags).unwrap_or_default();
    let length = u32::try_from(START + attributes.len()).unwrap_or_default();
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family, 0, 0, 0]);
    message.extend(attributes);
    message
}

/// The original tuples of a family's entries that are concerned, as attributes.
fn list(
    netlink: &OwnedFd,
    buffer: &mut [u8],
    family: u8,
    is_concerned: &mut impl FnMut(IpAddr, IpAddr) -> bool,
) -> io::Result<Vec<Vec<u8>>> {
    send(netlink.as_raw_fd(), &request(GET, libc::NLM_F_DUMP, family, &[]), MsgFlags::empty())?;
    let mut found = Vec::new();
    loop {
        let length = recv(netlink.as_raw_fd(), buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..length];
        while let Some((kind, body)) = next_message(&mut rest) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => return error(body).map(|()| found),
                _ if kind == NEW => found.extend(concerned(body.get(4..).unwrap_or_default(), is_concerned)),
                _ => {}
            }
        }
    }
}

/// Deletes the entry with this original tuple; false when it has ended meanwhile.
fn delete(netlink: &OwnedFd, buffer: &mut [u8], family: u8, tuple: &[u8]) -> io::Result<bool> {
    send(netlink.as_raw_fd(), &request(DELETE, libc::NLM_F_ACK, family, tuple), MsgFlags::empty())?;
    let length = recv(netlink.as_raw_fd(), buffer, MsgFlags::empty())?;
    match next_message(&mut &buffer[..length]) {
        Some((kind, body)) if i32::from(kind) == libc::NLMSG_ERROR => match error(body) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            other => other.map(|()| true),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Type and body of the next message.
fn next_message<'a>(rest: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let length = usize::try_from(u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?)).ok()?;
    let kind = u16::from_ne_bytes(rest.get(4..6)?.try_into().ok()?);
    let body = rest.get(HEADER..length)?;
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body))
}

fn error(body: &[u8]) -> io::Result<()> {
    let number = body.first_chunk().map_or(-libc::EINVAL, |bytes| i32::from_ne_bytes(*bytes));
    if number == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-number)) }
}

/// Iterates over attributes: type, whole attribute, value. A truncated one ends the iteration.
fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8], &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & !FLAGS;
        let (whole, value) = (rest.get(..length)?, rest.get(4..length)?);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, whole, value))
    })
}

/// The original tuple of an entry, if it is not translated and its flow is concerned.
fn concerned(entry: &[u8], is_concerned: &mut impl FnMut(IpAddr, IpAddr) -> bool) -> Option<Vec<u8>> {
    let of = |wanted| attributes(entry).find(move |(kind, ..)| *kind == wanted);
    let (_, _, status) = of(STATUS)?;
    if u32::from_be_bytes(*status.first_chunk()?) & TRANSLATED != 0 {
        return None;
    }
    let (_, whole, tuple) = of(ORIGINAL)?;
    let (_, _, addresses) = attributes(tuple).find(|(kind, ..)| *kind == ADDRESSES)?;
    let address = |kind| {
        let (_, _, bytes) = attributes(addresses).find(|(found, ..)| *found == kind)?;
        Some(match bytes.len() {
            4 => IpAddr::from(Ipv4Addr::from(*bytes.first_chunk::<4>()?)),
            _ => IpAddr::from(Ipv6Addr::from(*bytes.first_chunk::<16>()?)),
        })
    };
    let (source, destination) =
        (address(V4.0).or_else(|| address(V6.0))?, address(V4.1).or_else(|| address(V6.1))?);
    let mut padded = whole.to_vec();
    padded.resize(whole.len().next_multiple_of(4), 0);
    is_concerned(source, destination).then_some(padded)
}
