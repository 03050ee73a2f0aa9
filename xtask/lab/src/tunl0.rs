//! `tunl0`, or `cilium_tunl`: the kernel's IPIP device; where the kernel has none, an Ethernet
//! TAP device of that name and two threads that write and read the same outer
//! headers through raw sockets.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    mem::MaybeUninit,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

use super::network::Node;

/// First bytes of the hardware addresses that name a next hop.
const NEXT_HOP: [u8; 2] = [0x02, 0x4b];
/// Length of an Ethernet header in bytes.
const ETHERNET: usize = 14;

/// Makes the device of that name, up, with the MTU of an IPIP tunnel over Ethernet.
/// `next_hops` are the addresses routes over it may name.
pub fn make(node: &Node, name: &str, next_hops: &[Ipv4Addr]) -> Result<()> {
    let by_kernel = node.netns.sh(&format!(
        "modprobe ipip 2>/dev/null || true; \
         ip link show tunl0 >/dev/null 2>&1 || ip link add tunl0 type ipip 2>/dev/null; \
         ip link set tunl0 name {name} up"
    ));
    if by_kernel.is_ok() {
        return Ok(());
    }
    node.netns.ip(&tap(name, next_hops))?;
    let name = name.to_owned();
    let attached = node.netns.spawn(move || attach(&name)).join().map_err(|_| anyhow::anyhow!("tunl0"))??;
    attached.map(drop)
}

/// Lines of `ip` that make the TAP device, with neighbours for the next hops.
pub fn tap(name: &str, next_hops: &[Ipv4Addr]) -> String {
    let mut batch = format!("tuntap add dev {name} mode tap\nlink set {name} mtu 1480 up\n");
    for hop in next_hops {
        let [a, b, c, d] = hop.octets();
        let [x, y] = NEXT_HOP;
        batch += &format!(
            "neighbour add {hop} lladdr {x:02x}:{y:02x}:{a:02x}:{b:02x}:{c:02x}:{d:02x} dev {name} nud permanent\n"
        );
    }
    batch
}

/// Carries packets of the TAP device in this thread's namespace until it is deleted; then the returned thread
/// ends.
pub fn attach(name: &str) -> Result<JoinHandle<()>> {
    let (tap, socket) = open(name)?;
    let hardware = hardware_address(&socket, name)?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let (mut reader, sender) = (tap.try_clone()?, socket.try_clone()?);
    let gone = Arc::new(AtomicBool::new(false));
    let deleted = Arc::clone(&gone);
    std::thread::spawn(move || receive(tap, &socket, &hardware, &gone));
    Ok(std::thread::spawn(move || {
        let mut frame = [0; 2048];
        // Fails when the device is deleted.
        while let Ok(length) = reader.read(&mut frame) {
            if length > ETHERNET && frame[..2] == NEXT_HOP && frame[12..ETHERNET] == [8, 0] {
                let hop = Ipv4Addr::new(frame[2], frame[3], frame[4], frame[5]);
                let _ = sender.send_to(&frame[ETHERNET..length], &SocketAddr::from((hop, 0)).into());
            }
        }
        deleted.store(true, Ordering::Relaxed);
    }))
}

/// The device's own hardware address.
fn hardware_address(socket: &Socket, name: &str) -> Result<[u8; 6]> {
    let mut request = request(name);
    // SAFETY: the kernel reads and writes a request of this type.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR as _, &raw mut request) };
    ensure!(answer == 0, "{name}: {}", std::io::Error::last_os_error());
    // SAFETY: the kernel has written this member.
    let bytes = unsafe { request.ifr_ifru.ifru_hwaddr }.sa_data;
    let mut address = [0; 6];
    address.iter_mut().zip(bytes).for_each(|(to, from)| *to = from.cast_unsigned());
    Ok(address)
}

/// A request about the device.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: plain integers and bytes; zero is a value of each.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Attaches to the device and to packets of protocol 4 in this thread's namespace.
fn open(name: &str) -> Result<(File, Socket)> {
    let tap = File::options().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
    // Opening would create a missing device.
    ensure!(nix::net::if_::if_nametoindex(name).is_ok(), "{name} is not there");
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TAP | libc::IFF_NO_PI)?;
    // SAFETY: the kernel reads and writes a request of this type.
    let answer = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    ensure!(answer == 0, "{name}: {}", std::io::Error::last_os_error());
    Ok((tap, Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4)))?))
}

/// Hands inner packets to the host's stack, as if received on the device.
fn receive(mut tap: File, socket: &Socket, hardware: &[u8], gone: &AtomicBool) {
    let mut buffer = [MaybeUninit::<u8>::uninit(); 2048];
    while !gone.load(Ordering::Relaxed) {
        // The read has timed out.
        let Ok((length, _)) = socket.recv_from(&mut buffer) else { continue };
        // SAFETY: recv_from initialised the first `length` bytes.
        let packet = unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), length) };
        let Some(outer) = packet.first().map(|byte| usize::from(byte & 0xf) * 4) else { continue };
        let Some(inner) = packet.get(outer..) else { continue };
        let header = [hardware, &[NEXT_HOP[0], NEXT_HOP[1], 0, 0, 0, 0, 8, 0]].concat();
        if tap.write_all(&[&header, inner].concat()).is_err() {
            return;
        }
    }
}
