//! Random tables, and packets related to them.

mod packets;
mod tables;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

pub use packets::ethernet;

/// A generator that always returns the same values for one seed.
pub struct Random(StdRng);

/// Prefixes of the mesh. The WireGuard device has no Ethernet header, but `BPF_PROG_TEST_RUN` reads one:
/// bytes 12 and 13 of packets from these sources are their family's EtherType.
const V4: [&str; 6] =
    ["8.0.1.0/24", "8.0.2.0/24", "8.0.0.0/16", "8.0.7.64/26", "10.42.4.0/24", "10.5.0.1/32"];
const V6: [&str; 5] = [
    "fd00:0:86dd:1::/64",
    "fd00:0:86dd:2::/64",
    "fd00:0:86dd::/48",
    "fd00:0:86dd:2:8000::/65",
    "2001:db8::7/128",
];
const WIREGUARD_PORT: u16 = 51_820;
/// Private addresses: outer sources on a link without link-layer header are read the same way.
const PRIVATE_V4: [[u8; 4]; 4] = [[8, 0, 9, 11], [8, 0, 9, 12], [8, 0, 9, 13], [8, 0, 9, 14]];
/// Other uplinks, which the test creates.
pub const OTHER_UPLINKS: [u32; 2] = [77, 78];
/// An interface of a container.
pub const CONTAINER: u32 = 99;
/// Stand-in for the WireGuard device, which the test creates, too.
pub const KILO: u32 = 79;
fn private(index: usize, v6: bool) -> IpAddr {
    if v6 {
        Ipv6Addr::new(0xfd00, 0x1, 0x86dd, 0, 0, 0, 0, 11 + u16::try_from(index).unwrap()).into()
    } else {
        PRIVATE_V4[index].into()
    }
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    pub fn chance(&mut self, one_in: u32) -> bool {
        self.0.random_ratio(1, one_in)
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// One of these, if there are any.
    pub fn one_of<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        from.choose(&mut self.0).cloned()
    }

    pub fn byte(&mut self) -> u8 {
        self.0.random()
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }

    /// Sometimes the segment size of a GSO packet; otherwise 0.
    pub fn gso(&mut self) -> u32 {
        if self.chance(12) { self.0.random_range(8..1400) } else { 0 }
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        *from.choose(&mut self.0).unwrap()
    }

    /// An address in this prefix.
    pub fn host(&mut self, prefix: IpNet) -> IpAddr {
        match prefix {
            IpNet::V4(net) => {
                let host = self.0.random::<u32>() & u32::from(net.hostmask());
                Ipv4Addr::from(u32::from(net.network()) | host).into()
            }
            IpNet::V6(net) => {
                let host = self.0.random::<u128>() & u128::from(net.hostmask());
                Ipv6Addr::from(u128::from(net.network()) | host).into()
            }
        }
    }
}
