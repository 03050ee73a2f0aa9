//! `kg webhook` with requests from a real API server, with garbage, and during changes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::{task, time_passes, until};

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kilo_core::{objects::peer::Peer, wireguard::key::PublicKey};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply_crds, certificates, free_port};

const LIMIT: Duration = Duration::from_secs(20);

/// A running webhook with its own certificate.
struct Webhook {
    process: Child,
    directory: tempfile::TempDir,
    port: u16,
    metrics: u16,
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Webhook {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        certificates(directory.path());
        let (port, metrics) = (free_port(), free_port());
        let process = Command::new(env!("CARGO_BIN_EXE_kg"))
            .current_dir(directory.path())
            .args(["webhook", "--cert-file=server.crt", "--key-file=server.key"])
            .arg(format!("--listen=127.0.0.1:{port}"))
            .arg(format!("--listen-metrics=127.0.0.1:{metrics}"))
            .spawn()
            .unwrap();
        let webhook = Self { process, directory, port, metrics };
        until("the webhook listens", LIMIT, || TcpStream::connect(("127.0.0.1", metrics)).is_ok());
        webhook
    }

    fn connect(&self, authority: &Path) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        StreamOwned::new(connection, stream)
    }

    fn authority(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }

    /// Sends raw bytes; returns status line, headers and body.
    fn say(&self, request: &[u8]) -> String {
        let mut stream = self.connect(&self.authority());
        // It may hang up before everything is written.
        let _ = stream.write_all(request);
        let _ = stream.flush();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn scrape(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.metrics)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn post(body: &str) -> Vec<u8> {
    let head =
        "POST /validate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n";
    format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn review(endpoint: &serde_json::Value) -> String {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u-1", "operation": "CREATE", "userInfo": {}, "name": "p",
            "kind": {"group": "kilo.squat.ai", "version": "v1alpha1", "kind": "Peer"},
            "resource": {"group": "kilo.squat.ai", "version": "v1alpha1", "resource": "peers"},
            "object": {
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "p"},
                "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([1; 32]).to_string(), "endpoint": endpoint},
            },
        },
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_webhook_says_whom_to_admit_and_whom_to_deny() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let webhook = Webhook::start();
    let configuration = json!({
        "metadata": {"name": "peers.kilo.squat.ai"},
        "webhooks": [{
            "name": "peers.kilo.squat.ai", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail", "timeoutSeconds": 5,
            "rules": [{
                "apiGroups": ["kilo.squat.ai"], "apiVersions": ["v1alpha1"], "resources": ["peers"],
                "operations": ["CREATE", "UPDATE", "DELETE"],
            }],
            "clientConfig": {
                "url": format!("https://127.0.0.1:{}/validate", webhook.port),
                "caBundle": STANDARD.encode(fs::read(webhook.authority()).unwrap()),
            },
        }],
    });
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let configuration = serde_json::from_value(configuration).unwrap();
    configurations.create(&PostParams::default(), &configuration).await.unwrap();

    let peers: Api<Peer> = Api::all(client.clone());
    let peer = |name: &str, endpoint: serde_json::Value| -> Peer {
        let key = PublicKey([7; 32]).to_string();
        serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": name},
            "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": key, "endpoint": endpoint},
        }))
        .unwrap()
    };
    let nowhere = json!({"dnsOrIP": {}, "port": 51820});
    // The API server rereads its webhook configuration about once a second.
    let denied = task::until("the webhook is asked", LIMIT, async || {
        match peers.create(&PostParams::default(), &peer("denied", nowhere.clone())).await {
            Err(error) => Some(error.to_string()),
            Ok(_) => {
                drop(peers.delete("denied", &DeleteParams::default()).await);
                None
            }
        }
    })
    .await;
    let words = "admission webhook \"peers.kilo.squat.ai\" denied the request: spec.endpoint.dnsOrIP: \"\" is neither";
    assert!(denied.contains(words), "{denied}");
    peers
        .create(&PostParams::default(), &peer("good", json!({"dnsOrIP": {"ip": "192.0.2.1"}, "port": 1})))
        .await
        .unwrap();
    let worse = json!({"spec": {"endpoint": {"dnsOrIP": {"ip": null}, "port": 1}}});
    let denied = peers.patch("good", &PatchParams::default(), &Patch::Merge(&worse)).await.unwrap_err();
    assert!(denied.to_string().contains("dnsOrIP"), "{denied}");
    peers.delete("good", &DeleteParams::default()).await.unwrap();
    let text = webhook.scrape();
    for line in [
        "admission_requests_total{operation=\"CREATE\",response=\"allowed\"} 1",
        "admission_requests_total{operation=\"CREATE\",response=\"denied\"}",
        "admission_requests_total{operation=\"UPDATE\",response=\"denied\"}",
        "admission_requests_total{operation=\"DELETE\",response=\"allowed\"}",
        "http_requests_total{handler=\"validate\",method=\"POST\"}",
        "http_requests_total{handler=\"metrics\",method=\"GET\"} 1",
        "errors_total 0",
    ] {
        assert!(text.contains(line), "{line} is missing from\n{text}");
    }
}

#[test]
fn rubbish_is_answered_with_its_status_and_disturbs_nobody() {
    if api::assets().is_none() {
        return;
    }
    let webhook = Webhook::start();
    let good = review(&json!({"dnsOrIP": {"dns": "vpn.example.com"}, "port": 1}));
    let huge = format!("POST /validate HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let large = format!(
        "POST /validate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
        9 << 20,
        " ".repeat(9 << 20)
    );
    let old = good.replace("admission.k8s.io/v1", "admission.k8s.io/v1beta1");
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("400", post("{"), "not an AdmissionReview"),
        ("400", post("[]"), "not an AdmissionReview"),
        ("400", post(&old), "v1beta1"),
        ("400", post(r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#), "no request"),
        (
            "404",
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_vec(),
            "/validate",
        ),
        ("405", b"GET /validate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(), "POST"),
        (
            "415",
            b"POST /validate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_vec(),
            "json",
        ),
        ("413", large.into_bytes(), "MiB"),
        ("431", huge.into_bytes(), ""),
        ("400", b"\x16\x03\x01 not http\r\n\r\n".to_vec(), ""),
    ];
    for (status, request, words) in &cases {
        let answer = webhook.say(request);
        let first = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{first:?}: {answer:?}");
        assert!(answer.contains(words), "{first:?}: {answer}");
    }
    let mut plain = TcpStream::connect(("127.0.0.1", webhook.port)).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let answer = webhook.say(&post(&good));
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("\"allowed\":true") && answer.contains("u-1"),
        "{answer}"
    );
}

#[test]
fn a_new_certificate_is_used_without_a_restart_and_half_of_one_is_not() {
    if api::assets().is_none() {
        return;
    }
    let webhook = Webhook::start();
    let directory = webhook.directory.path();
    let good = review(&json!({"dnsOrIP": {"ip": "192.0.2.1"}, "port": 1}));
    let fresh = tempfile::tempdir().unwrap();
    certificates(fresh.path());
    fs::copy(fresh.path().join("server.key"), directory.join("server.key")).unwrap();
    until("half a pair is noticed", LIMIT, || webhook.scrape().contains("errors_total 1"));
    assert!(webhook.say(&post(&good)).starts_with("HTTP/1.1 200"), "the old pair is still used");
    for name in ["server.crt", "ca.crt"] {
        fs::copy(fresh.path().join(name), directory.join(name)).unwrap();
    }
    until("the new pair is used", LIMIT, || webhook.say(&post(&good)).starts_with("HTTP/1.1 200"));
}

#[test]
fn a_review_under_way_is_answered_before_the_webhook_stops() {
    if api::assets().is_none() {
        return;
    }
    let mut webhook = Webhook::start();
    let request = post(&review(&json!({"dnsOrIP": {"ip": "192.0.2.1"}, "port": 1})));
    let mut stream = webhook.connect(&webhook.authority());
    let (head, tail) = request.split_at(request.len() - 10);
    stream.write_all(head).unwrap();
    stream.flush().unwrap();
    time_passes(Duration::from_millis(300), "the webhook gives no sign that it has read the beginning");
    let process = nix::unistd::Pid::from_raw(webhook.process.id().try_into().unwrap());
    nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGTERM).unwrap();
    until("no new connections", LIMIT, || TcpStream::connect(("127.0.0.1", webhook.port)).is_err());
    stream.write_all(tail).unwrap();
    stream.flush().unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    until("it ends", LIMIT, || webhook.process.try_wait().unwrap().is_some());
    assert!(webhook.process.wait().unwrap().success());
}

#[test]
fn a_certificate_that_cannot_be_used_is_named_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let start = |certificate: &str, key: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_kg"))
            .arg("webhook")
            .args(["--listen=127.0.0.1:0", "--listen-metrics=127.0.0.1:0"])
            .arg("--cert-file")
            .arg(path(certificate))
            .arg("--key-file")
            .arg(path(key))
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    fs::write(path("rubbish"), "nothing").unwrap();
    assert!(start("absent", "rubbish").contains("absent: No such file"));
    assert!(start("rubbish", "rubbish").contains("no usable certificate"));
}
