//! `kgctl` when a compromised node sends without end. This test is the API server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::front::plain_kubeconfig;

/// Serves an API with one node, whose agent and kubelet send without end.
fn answer(mut stream: TcpStream) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let path = first.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default();
    let list = |items: Value| {
        json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}).to_string()
    };
    let body = match path {
        "/api/v1/nodes" => list(json!([{"metadata": {"name": "n1"}, "spec": {}, "status": {}}])),
        "/api/v1/pods" => list(json!([{
            "metadata": {"name": "kilo-n1", "namespace": "kube-system"},
            "spec": {"nodeName": "n1", "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "kilo", "image": "kilo", "imageID": "", "ready": true, "restartCount": 0},
            ]},
        }])),
        _ if path.contains("/proxy/") || path.ends_with("/log") => {
            let code = if path.ends_with("/metrics") { "500 Internal Server Error" } else { "200 OK" };
            let _ = write!(stream, "HTTP/1.1 {code}\r\nConnection: close\r\n\r\n");
            while stream.write_all(&[b'x'; 1 << 12]).is_ok() {}
            return;
        }
        _ => list(json!([])),
    };
    let _ = write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
}

#[test]
fn pages_and_logs_that_never_end_are_missing_in_the_report_and_nothing_else_is() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = plain_kubeconfig(directory.path(), port);
    let started = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    command.arg("--kubeconfig").arg(&kubeconfig).args(["sysdump", "--request-timeout=0"]);
    let output =
        command.arg(format!("--output={}", directory.path().join("dump.tar.gz").display())).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    println!("{said}");
    assert_eq!(output.status.code(), Some(3), "parts are missing: {said}");
    assert!(started.elapsed() < Duration::from_secs(120), "{:?}", started.elapsed());
    for file in ["status.json", "metrics.txt", "health.txt", "log-kilo.txt"] {
        let missing = format!("kgctl: nodes/n1/{file} is missing: the answer is longer than 67108864 bytes");
        assert!(said.contains(&missing), "{missing:?} is not in {said}");
    }
    assert!(!said.contains("nodes.yaml is missing"), "{said}");
}
