//! The TUN device as gotatun's transport for inner packets.
//!
//! gotatun's own transport is not used: it truncates packets beyond 4,096 bytes, and its reader ends at a
//! packet that is not IP.

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use gotatun::{
    packet::{Ip, Packet, PacketBufPool},
    tun::{
        IpRecv, IpSend, MtuWatcher,
        tun::{AbstractDevice, AsyncDevice, Configuration, create_as_async},
    },
};
use tokio::sync::watch;

/// Bytes of the largest packet that a TUN device delivers.
const LARGEST_PACKET: usize = 65_535;
/// How often the MTU is read again; it only limits padding.
const MTU_INTERVAL: Duration = Duration::from_secs(3);

/// A TUN device that lives as long as the process.
#[derive(Clone)]
pub(super) struct Tun {
    device: Arc<AsyncDevice>,
    mtu: watch::Receiver<u16>,
    buffer: Vec<u8>,
}

impl Tun {
    /// Creates the interface; an existing one of the name is an error.
    pub(super) fn create(name: &str) -> Result<Self, gotatun::tun::tun::Error> {
        let mut configuration = Configuration::default();
        configuration.tun_name(name);
        let device = Arc::new(create_as_async(&configuration)?);
        let (sender, mtu) = watch::channel(device.mtu()?);
        tokio::spawn(follow_mtu(Arc::downgrade(&device), sender));
        Ok(Self { device, mtu, buffer: vec![0; LARGEST_PACKET] })
    }
}

async fn follow_mtu(device: Weak<AsyncDevice>, mtu: watch::Sender<u16>) {
    loop {
        tokio::time::sleep(MTU_INTERVAL).await;
        let Some(device) = device.upgrade() else { return };
        let Ok(now) = device.mtu() else { return };
        mtu.send_if_modified(|known| std::mem::replace(known, now) != now);
    }
}

/// True when the interface was deleted: no packet will follow.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::EBADFD | nix::libc::EBADF | nix::libc::ENODEV))
}

impl IpSend for Tun {
    async fn send(&mut self, packet: Packet<Ip>) -> io::Result<()> {
        match self.device.send(&packet.into_bytes()).await {
            Err(error) if is_gone(&error) => Err(error),
            // Interface down or out of memory: this packet is lost, like on any link.
            _ => Ok(()),
        }
    }
}

impl IpRecv for Tun {
    async fn recv<'a>(
        &'a mut self,
        pool: &mut PacketBufPool,
    ) -> io::Result<impl Iterator<Item = Packet<Ip>> + Send + 'a> {
        loop {
            let length = self.device.recv(&mut self.buffer).await?;
            let mut packet = pool.get();
            let bytes = packet.buf_mut();
            bytes.clear();
            bytes.extend_from_slice(self.buffer.get(..length).unwrap_or_default());
            // A packet that is not IP has no peer.
            if let Ok(packet) = packet.try_into_ip() {
                return Ok(std::iter::once(packet));
            }
        }
    }

    fn mtu(&self) -> MtuWatcher {
        self.mtu.clone().into()
    }
}
