//! A TCP proxy on loopback that counts what the server sends.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// The proxy ends with the runtime.
pub struct Counted {
    /// Loopback port to connect to.
    pub port: u16,
    received: Arc<AtomicU64>,
}

impl Counted {
    pub async fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&received);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let count = Arc::clone(&count);
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
                    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                        (client.into_split(), server.into_split());
                    let back = async move {
                        let mut buffer = vec![0; 1 << 16];
                        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                            count.fetch_add(length as u64, Ordering::Relaxed);
                            if to_client.write_all(&buffer[..length]).await.is_err() {
                                return;
                            }
                        }
                    };
                    tokio::select! {
                        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                        () = back => {}
                    }
                });
            }
        });
        Self { port, received }
    }

    /// Bytes the server has sent, TLS included.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}
