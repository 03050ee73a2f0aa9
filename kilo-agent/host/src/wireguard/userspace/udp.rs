//! gotatun's UDP socket, which keeps receiving after an error.
//!
//! gotatun's reader ends at the first error, and reports that in a way that cannot be distinguished from a
//! mere change of port. Lack of memory, for example, is not a reason to stop for good.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use gotatun::{
    packet::{Packet, PacketBufPool},
    udp::{
        UdpRecv, UdpTransportFactory, UdpTransportFactoryParams,
        socket::{UdpSocket, UdpSocketFactory},
    },
};

/// Pause after a failed receive, so that a lasting error does not take a CPU.
const PAUSE: Duration = Duration::from_millis(10);

/// How long a port in use is tried again: on each change of the key, gotatun opens a new socket and closes
/// the old one some time later. Without a socket the device would stay mute.
const CLOSED: Duration = Duration::from_secs(3);

/// Room for bursts while the process is not scheduled, in bytes; the kernel's
/// `net.core.rmem_max` may allow less.
const BUFFER: usize = 4 << 20;

/// Makes the sockets, dual-stack where the kernel has IPv6.
pub(super) struct Udp(UdpSocketFactory);

impl Udp {
    pub(super) fn new() -> Self {
        Self(UdpSocketFactory { recv_buffer_size: Some(BUFFER), send_buffer_size: Some(BUFFER) })
    }
}

impl UdpTransportFactory for Udp {
    type Send = UdpSocket;
    type Recv = RetryingReceiver;

    async fn bind(
        &mut self,
        params: &UdpTransportFactoryParams,
    ) -> io::Result<(UdpSocket, RetryingReceiver)> {
        let began = Instant::now();
        loop {
            match self.0.bind(params).await {
                Ok((sender, receiver)) => return Ok((sender, RetryingReceiver(receiver))),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && began.elapsed() < CLOSED => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Keeps receiving after errors.
pub(super) struct RetryingReceiver(UdpSocket);

impl UdpRecv for RetryingReceiver {
    type RecvManyBuf = <UdpSocket as UdpRecv>::RecvManyBuf;

    async fn recv_from(&mut self, pool: &mut PacketBufPool) -> io::Result<(Packet, SocketAddr)> {
        loop {
            match self.0.recv_from(pool).await {
                Ok(received) => return Ok(received),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn recv_many_from(
        &mut self,
        buffer: &mut Self::RecvManyBuf,
        pool: &mut PacketBufPool,
        packets: &mut Vec<(Packet, SocketAddr)>,
    ) -> io::Result<()> {
        while self.0.recv_many_from(buffer, pool, packets).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    fn enable_udp_gro(&self) -> io::Result<()> {
        self.0.enable_udp_gro()
    }
}
