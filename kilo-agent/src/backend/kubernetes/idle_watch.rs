//! An idle watch does not cause a warning; a server that does not answer does.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kube::{Client, Config};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};
use tokio_util::task::AbortOnDropHandle;

use super::KubernetesBackend;

/// An API server without objects whose watches send nothing, not even bookmarks.
struct Silent {
    watches: AtomicUsize,
}

impl Silent {
    async fn serve(self: Arc<Self>, listener: TcpListener) {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(Arc::clone(&self).answer(stream));
        }
    }

    async fn answer(self: Arc<Self>, stream: TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let mut request = String::new();
            while !request.ends_with("\r\n\r\n") {
                if stream.read_line(&mut request).await? == 0 {
                    return Ok(());
                }
            }
            let kind =
                if request.contains("/nodes") { ("v1", "Node") } else { ("kilo.squat.ai/v1alpha1", "Peer") };
            if request.contains("watch=true") {
                self.watches.fetch_add(1, Ordering::Relaxed);
                stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                stream.flush().await?;
                continue;
            }
            let list = serde_json::json!({
                "apiVersion": kind.0, "kind": format!("{}List", kind.1), "metadata": {"resourceVersion": "7"}, "items": [],
            });
            let list = list.to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", list.len());
            stream.write_all((head + &list).as_bytes()).await?;
        }
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_watch_without_news_is_no_warning_and_a_server_that_has_gone_is_one() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(move || writer.clone())
        .finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
    config.read_timeout = Some(Duration::from_millis(300));
    config.default_retry = false;
    let server = Arc::new(Silent { watches: AtomicUsize::new(0) });
    let serving = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&server).serve(listener)));
    let client = Client::try_from(config).unwrap();
    let _backend = KubernetesBackend::start(client, None, "topology.kubernetes.io/region").await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while server.watches.load(Ordering::Relaxed) < 6 {
        assert!(Instant::now() < deadline, "watches that say nothing do not begin anew");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(log.text(), "");
    drop(serving);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !log.text().contains("unreachable") {
        assert!(Instant::now() < deadline, "a server that has gone is not reported: {:?}", log.text());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
