//! A TCP proxy on loopback that can be cut or go silent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};

/// What the proxy does with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards bytes.
    Open,
    /// Resets connections, old and new.
    Cut,
    /// Accepts everything and forwards nothing.
    Silent,
}

/// The proxy, which ends with the test's runtime.
pub struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    /// Number of reads from clients while it was silent.
    held: watch::Sender<u64>,
}

impl Proxy {
    /// Listens on its own port and connects to `target`.
    pub async fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mode = watch::Sender::new(Mode::Open);
        let modes = mode.subscribe();
        let held = watch::Sender::new(0);
        let holds = held.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, target, modes.clone(), holds.clone()));
            }
        });
        Self { port, mode, held }
    }

    /// Port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes its mode from now on.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Waits until a client sends something that is held back.
    pub fn holds_a_request(&self) -> impl Future<Output = ()> {
        // Counts from the call, not from the first poll.
        let mut held = self.held.subscribe();
        async move {
            let says = tokio::time::timeout(Duration::from_secs(20), held.changed()).await;
            says.expect("no client said anything for 20 s").unwrap();
        }
    }
}

async fn serve(client: TcpStream, target: u16, modes: watch::Receiver<Mode>, held: watch::Sender<u64>) {
    let mut cut = modes.clone();
    if *cut.borrow() == Mode::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = carry(from_client, to_server, modes.clone(), || held.send_modify(|count| *count += 1)) => {}
        () = carry(from_server, to_client, modes, || {}) => {}
        _ = cut.wait_for(|mode| *mode == Mode::Cut) => {}
    }
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut modes: watch::Receiver<Mode>,
    on_silence: impl Fn(),
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if *modes.borrow() == Mode::Silent {
            on_silence();
        }
        // Held back while silent; such a connection is of no further use.
        if modes.wait_for(|mode| *mode != Mode::Silent).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
