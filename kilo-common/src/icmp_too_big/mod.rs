//! ICMP errors about packets that the next hop cannot carry: "fragmentation needed" (RFC 792, RFC 1191) and
//! ICMPv6 "packet too big" (RFC 4443, RFC 8201). `write` makes those with which a program answers a sender,
//! as the kernel would; `read` takes those of routers about steered packets as a hint to probe the path.

pub mod read;
pub mod write;

pub use read::{ERROR_V4, ERROR_V6, QuotedPacket};
pub use write::{LEN_V4, LEN_V6, QUOTED};

/// Bytes of an ICMP header, of either version.
pub const ICMP_LEN: usize = 8;

const UNREACHABLE: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;
const PACKET_TOO_BIG: u8 = 2;
