//! Responses of the agent's HTTP server to valid requests and to garbage.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::wait::task as wait;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_agent::{
    health::Health,
    http::{
        self, Graph,
        access::{Finding, Gate, LocalToken, Reviewer},
    },
    metrics::Metrics,
    status::{Status, View},
};
use kilo_core::{
    settings::Granularity,
    topology::{Mesh, Node, ObservedMesh},
    wireguard::key::PublicKey,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
};
use tokio_util::sync::CancellationToken;

const LIMIT: Duration = Duration::from_secs(10);

fn view() -> View {
    let node = |name: &str, location: &str, key: u8| Node {
        name: name.to_owned(),
        location: location.to_owned(),
        endpoint: "192.0.2.1:51820".parse().ok(),
        key: Some(PublicKey([key; 32])),
        internal_ip: "10.0.0.1/24".parse().ok(),
        pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
        ..Node::default()
    };
    let nodes = [node("a1", "east", 1), node("a2", "east", 2), node("b<1>", "west", 3)];
    let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
    view_of(mesh, "a1")
}

fn view_of(mesh: Mesh, node: &str) -> View {
    let observed = ObservedMesh { mesh: mesh.into(), ..ObservedMesh::default() };
    View { observed: observed.into(), node: node.to_owned(), ..View::default() }
}

/// A mesh of so many locations, fully connected.
fn large_view(locations: u16) -> View {
    let node = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let mut key = [0; 32];
        [key[0], key[1]] = [high, low];
        Node {
            name: format!("node-{number}"),
            location: format!("location-{number}"),
            endpoint: format!("192.0.{high}.{low}:51820").parse().ok(),
            key: Some(PublicKey(key)),
            internal_ip: format!("10.0.{high}.{low}/16").parse().ok(),
            pod_cidrs: vec![format!("10.42.{high}.{low}/32").parse().unwrap()],
            ..Node::default()
        }
    };
    let nodes: Vec<Node> = (1..=locations).map(node).collect();
    let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
    view_of(mesh, "node-1")
}

/// A server that runs until the test is over.
async fn server(graph: Graph) -> (SocketAddr, CancellationToken, Metrics) {
    server_of(view(), graph).await
}

async fn server_of(view: View, graph: Graph) -> (SocketAddr, CancellationToken, Metrics) {
    server_behind(view, graph, Gate::Open).await
}

async fn server_behind(view: View, graph: Graph, gate: Gate) -> (SocketAddr, CancellationToken, Metrics) {
    let (sender, view) = watch::channel(Arc::new(view));
    let metrics = Metrics::default();
    let health = Health::new(Duration::from_secs(60));
    health.succeeded(Instant::now());
    let context = http::Context::new(health, metrics.clone(), view, graph).behind(gate);
    let listener = http::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let until = stop.clone();
    tokio::spawn(async move {
        http::serve(listener, None, move |request| context.clone().answer(request), until).await;
        drop(sender);
    });
    (address, stop, metrics)
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

async fn say(address: SocketAddr, request: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The server may hang up before everything is written.
    let _ = stream.write_all(request).await;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut bytes)).await;
    assert!(read.is_ok(), "no end of the answer: {}", String::from_utf8_lossy(&bytes));
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").map_or(bytes.len(), |at| at + 4);
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    Answer { status, head, body: bytes[end..].to_vec() }
}

async fn ask(address: SocketAddr, method: &str, path: &str) -> Answer {
    say(address, format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).await
}

#[tokio::test]
async fn each_page_has_its_media_type_and_head_is_get_without_body() {
    let (address, _stop, metrics) = server(Graph::default()).await;
    metrics.error("apply");
    for (path, media, words) in [
        ("/", "text/html", "<script type=\"module\" src=\"page/app.js\">"),
        ("/page/app.js", "text/javascript", "import { follow }"),
        ("/page/style.css", "text/css", "prefers-color-scheme"),
        ("/health", "text/plain", "ok"),
        ("/metrics", "application/openmetrics-text", "kilo_reconcile_duration_seconds_bucket"),
        ("/status", "application/json", "\"locations\""),
        ("/graph", "image/svg+xml", "<svg"),
        ("/graph?format=dot", "text/vnd.graphviz", "digraph"),
        ("/graph?format=gv&layout=twopi&x=y", "text/vnd.graphviz", "digraph"),
    ] {
        let answer = ask(address, "GET", path).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert!(answer.head.contains(&format!("content-type: {media}")), "{path}: {}", answer.head);
        assert!(answer.text().contains(words), "{path}: {}", answer.text());
        let head = ask(address, "HEAD", path).await;
        assert_eq!((head.status, head.body.len()), (200, 0), "{path}");
        assert!(head.head.contains("content-length: ") && !head.head.contains("content-length: 0"), "{path}");
    }
    let page = ask(address, "GET", "/").await;
    let policy = "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self';";
    assert!(page.head.contains(policy) && !page.head.contains("unsafe"), "{}", page.head);
    assert!(
        page.head.contains("frame-ancestors 'none'") && !page.head.contains("access-control"),
        "{}",
        page.head
    );
    let graph = ask(address, "GET", "/graph").await;
    let policy = "content-security-policy: default-src 'none'; style-src 'sha256-";
    assert!(graph.head.contains(policy) && graph.head.contains("sandbox"), "{}", graph.head);
    let page = page.text();
    assert!(!page.contains("http://") && !page.contains("https://"), "nothing from elsewhere: {page}");
    let status: Status = serde_json::from_slice(&ask(address, "GET", "/status").await.body).unwrap();
    assert_eq!(status.locations.len(), 2);
    let text = ask(address, "GET", "/metrics").await.text();
    for name in [
        "kilo_errors_total{event=\"apply\"} 1",
        "kilo_leader ",
        "kilo_nodes ",
        "kilo_peers ",
        "kilo_reconciles_total ",
        "kilo_writes_total ",
        "kilo_reconcile_duration_seconds_count ",
    ] {
        assert!(text.contains(name), "{name} is missing from\n{text}");
    }
}

/// A token from the form starts a session, which the page, its files and its data accept.
#[tokio::test]
async fn a_browser_shows_its_token_once_and_others_see_health_and_metrics_alone() {
    let reviewer =
        Reviewer::new(
            |token, _| async move { if token == "good" { Finding::Allowed } else { Finding::Unknown } },
        );
    let gate = Gate::token(reviewer, LocalToken::of("local"));
    let (address, _stop, _) = server_behind(view(), Graph::default(), gate).await;
    for (path, status) in [("/health", 200), ("/metrics", 200), ("/nothing", 404)] {
        assert_eq!(ask(address, "GET", path).await.status, status, "{path}");
    }
    for path in ["/", "/page/app.js", "/page/style.css", "/page/icon.svg", "/status", "/events", "/graph"] {
        for method in ["GET", "HEAD"] {
            let refused = ask(address, method, path).await;
            assert_eq!(refused.status, 401, "{path}: {}", refused.text());
            assert!(!refused.text().contains("a1"), "{path}: {}", refused.text());
        }
    }
    let send = async |form: &str| {
        let length = form.len();
        let request = format!(
            "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{form}"
        );
        say(address, request.as_bytes()).await
    };
    let wrong = send("token=bad").await;
    assert!(wrong.status == 401 && wrong.text().contains("does not accept"), "{}", wrong.text());
    assert_eq!(send("x=y").await.status, 400);
    assert_eq!(send(&"x".repeat(100_000)).await.status, 400);
    let right = send("token=+good%0A").await;
    assert_eq!(right.status, 303);
    assert!(
        right.head.contains("httponly; samesite=strict") && !right.head.contains("good"),
        "{}",
        right.head
    );
    let cookie = right.head.split("set-cookie: ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
    for path in ["/", "/page/app.js", "/status", "/graph"] {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nCookie: {cookie}\r\n\r\n");
        assert_eq!(say(address, request.as_bytes()).await.status, 200, "{path}");
    }
    let open = server(Graph::default()).await;
    let refused =
        say(open.0, b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(refused.status, 405, "without tokens there is nothing to send");
}

#[tokio::test]
async fn rubbish_is_answered_with_its_status_and_disturbs_nobody() {
    let (address, _stop, _) = server(Graph::default()).await;
    let get =
        |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").into_bytes();
    let large = format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(200_000)).into_bytes();
    let many = format!("GET / HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: b\r\n".repeat(200)).into_bytes();
    let long = get(&format!("/{}", "x".repeat(100_000)));
    for (status, request, words) in [
        (400, get("/graph?format=pdf"), "svg, png, bmp, fig, gif, json, ps, dot, gv"),
        (400, get("/graph?layout=grid"), "circo, dot, neato, twopi, fdp"),
        (400, get("/graph?format=&layout=%00%ff"), "format"),
        (501, get("/graph?format=png"), "dot -Tpng"),
        (404, get("/nothing"), "/metrics"),
        (404, get("/graph/../health"), "/metrics"),
        (404, get("//health"), "/metrics"),
        (
            405,
            b"POST /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
                .to_vec(),
            "GET, HEAD",
        ),
        (405, b"DELETE /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(), "GET, HEAD"),
        (400, b"\x00\x01\x02\x03\r\n\r\n".to_vec(), ""),
        (400, b"GET / HTTP/1.1\r\nBad Header\r\n\r\n".to_vec(), ""),
        (400, b"GET / SPDY/9\r\n\r\n".to_vec(), ""),
        (431, large, ""),
        (431, many, ""),
        (431, long, ""),
    ] {
        let answer = say(address, &request).await;
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        // hyper answers an endless request line with 414, endless headers with 431.
        let right = answer.status == status || (status == 431 && answer.status == 414);
        assert!(right, "{shown:?}: {} {}", answer.head, answer.text());
        assert!(answer.text().contains(words), "{shown:?}: {}", answer.text());
        if status == 405 {
            assert!(answer.head.contains("allow: get, head"), "{}", answer.head);
        }
    }
    // A silent client delays nobody.
    let _silent = TcpStream::connect(address).await.unwrap();
    assert_eq!(ask(address, "GET", "/health").await.status, 200);
}

/// Many more clients than the server has slots request much data and read none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_never_read_do_not_starve_health() {
    let (address, _stop, _) = server_of(large_view(300), Graph::new(LIMIT)).await;
    let request = "GET /graph?format=dot HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50);
    let mut clients = Vec::new();
    for _ in 0..300 {
        let mut client = TcpStream::connect(address).await.unwrap();
        // The server may have closed the connection already.
        let _ = client.write_all(request.as_bytes()).await;
        clients.push(client);
    }
    for _ in 0..10 {
        let health = tokio::time::timeout(LIMIT, ask(address, "GET", "/health")).await;
        assert_eq!(health.expect("/health is starved").status, 200);
    }
    // Eventually the server drops all of them.
    for client in &mut clients {
        wait::until("a client that reads nothing loses its connection", 2 * LIMIT, async || {
            client.write_all(b"x").await.is_err()
        })
        .await;
    }
}

/// With one thread for everything, work done on it would delay all requests.
#[tokio::test]
async fn a_large_graph_holds_up_nobody() {
    let (address, _stop, _) = server_of(large_view(440), Graph::new(LIMIT)).await;
    let order = parking_lot::Mutex::new(Vec::new());
    let (asked, is_asked) = tokio::sync::oneshot::channel();
    let graph = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"HEAD /graph?format=dot HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        asked.send(()).unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        order.lock().push("graph");
    };
    let health = async {
        is_asked.await.unwrap();
        assert_eq!(ask(address, "GET", "/health").await.status, 200);
        order.lock().push("health");
    };
    tokio::join!(graph, health);
    assert_eq!(*order.lock(), ["health", "graph"]);
}

#[tokio::test]
async fn a_graph_without_measure_is_refused_as_text_and_drawn_without_lines() {
    let (address, _stop, _) = server_of(large_view(600), Graph::new(LIMIT)).await;
    let refused = ask(address, "GET", "/graph?format=dot").await;
    assert_eq!(refused.status, 501);
    assert!(refused.text().contains("kgctl graph"), "{}", refused.text());
    let drawn = ask(address, "GET", "/graph").await;
    assert!(drawn.status == 200 && drawn.text().contains("lines are left out"));
}
