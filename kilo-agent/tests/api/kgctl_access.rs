//! How `kgctl` reaches an API server, and what it reports when it cannot.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::until;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use api::{ADMIN, ApiServer, NOBODY, apply, apply_crds, create_node, manifest};

/// Runs kgctl without proxies and files from the environment.
fn kgctl(environment: &[(&str, &str)], arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    for name in
        ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "KUBECONFIG"]
    {
        command.env_remove(name);
    }
    let output = command.envs(environment.iter().copied()).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Two contexts for one server: `good` for its administrator, and `bad` for a user without rights.
fn two_contexts(server: &ApiServer) -> PathBuf {
    let path = server.file("two.kubeconfig");
    let cluster = json!({
        "server": format!("https://127.0.0.1:{}", server.port()), "certificate-authority": "ca.crt",
    });
    let user = |name: &str| json!({"name": name, "user": {"token": format!("{name}-token")}});
    let context =
        |name: &str, user: &str| json!({"name": name, "context": {"cluster": "here", "user": user}});
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bad",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [user(ADMIN), user(NOBODY)],
        "contexts": [context("good", ADMIN), context("bad", NOBODY)],
    });
    fs::write(&path, config.to_string()).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn contexts_users_and_impersonation_are_chosen_and_a_refusal_names_the_role() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    let path = two_contexts(&server);
    let config = path.to_str().unwrap();
    let (done, _, said) = kgctl(&[], &["graph", "--kubeconfig", config, "--context=good"]);
    assert!(!done && said.contains("does not know Peer objects"), "{said}");
    apply_crds(&client).await;
    create_node(&client, "n1", &[]).await;
    let url = format!("https://127.0.0.1:{}", server.port());

    let (done, _, said) = kgctl(&[], &["graph", "--kubeconfig", config]);
    for words in [
        "not allowed to list nodes",
        "User \"nobody\" cannot list resource \"nodes\"",
        "--clusterrole=kilo-kgctl --user=nobody",
        "context \"bad\"",
        config,
        &url,
    ] {
        assert!(!done && said.contains(words), "{words:?} is missing from {said}");
    }
    // Flags before and after the command, and `$KUBECONFIG` with a file that does not exist.
    let listed = format!("/nonexistent/config:{config}");
    for (environment, arguments) in [
        (&[][..], &["--kubeconfig", config, "--context", "good", "graph"][..]),
        (&[("KUBECONFIG", listed.as_str())], &["graph", "--user", ADMIN]),
        (&[("KUBECONFIG", config)], &["graph", "--context=good", "--cluster=here"]),
    ] {
        let (done, shown, said) = kgctl(environment, arguments);
        assert!(done && shown.contains("digraph"), "{arguments:?}: {said}");
    }
    let (done, _, said) = kgctl(&[], &["graph", "--kubeconfig", config, "--context", "goof"]);
    assert!(!done && said.contains("context \"goof\" does not exist; choose one of: good, bad"), "{said}");

    // Impersonates a user, first without and then with a group that has the role.
    let as_eve = ["graph", "--kubeconfig", config, "--context=good", "--as=eve"];
    let (done, _, said) = kgctl(&[], &as_eve);
    assert!(!done && said.contains("as \"eve\"") && said.contains("--user=eve"), "{said}");
    let role = manifest("kilo-kubeadm.yaml")
        .into_iter()
        .find(|object| object.metadata.name.as_deref() == Some("kilo-kgctl"))
        .unwrap();
    apply(&client, &role, false).await.unwrap();
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "readers"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kilo-kgctl"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "readers"}],
    });
    apply(&client, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
    // Authorisation follows shortly after.
    until("the group has the right", Duration::from_secs(20), || {
        let (done, _, said) = kgctl(&[], &[&as_eve[..], &["--as-group=readers"]].concat());
        if done { Ok(()) } else { Err(said) }
    });
    let (done, _, said) = kgctl(&[], &["graph", "--kubeconfig", config, "--context=good", "--as=eve"]);
    assert!(!done, "the group alone has the right: {said}");
}

/// Passes each connection to `answer`; returns the port.
fn listen(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            thread::spawn(move || answer(stream));
        }
    });
    port
}

/// Reads a request up to the empty line; returns its first line.
fn request(stream: &TcpStream) -> String {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    first
}

/// A kubeconfig for a server without TLS.
fn plain(directory: &Path, port: u16) -> String {
    let path = directory.join(format!("{port}.kubeconfig"));
    let text = format!(
        "kind: Config\ncurrent-context: lab\nclusters: [{{name: k, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n\
         contexts: [{{name: lab, context: {{cluster: k}}}}]\n"
    );
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn what_is_no_api_server_or_does_not_answer_is_named_with_url_context_and_file() {
    let directory = tempfile::tempdir().unwrap();
    let page = "<!doctype html><html><title>Corporate login</title>";
    let respond = |status: &'static str| {
        listen(move |mut stream| {
            request(&stream);
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}",
                page.len()
            );
        })
    };
    let silent = listen(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    for (port, wanted) in [
        (respond("200 OK"), "is not an API server: it returned a web page titled \"Corporate login\""),
        (respond("403 Forbidden"), "is not an API server: it returned a web page titled \"Corporate login\""),
        (silent, "no answer within 1s (--request-timeout)"),
        (api::free_port(), "cannot reach the API server"),
    ] {
        let config = plain(directory.path(), port);
        let started = Instant::now();
        let (done, shown, said) = kgctl(&[], &["status", "--kubeconfig", &config, "--request-timeout=1s"]);
        assert!(!done && shown.is_empty() && said.contains(wanted), "{wanted:?} is missing from {said}");
        assert!(said.contains(&format!("http://127.0.0.1:{port} (context \"lab\" of {config}")), "{said}");
        assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    }
}

#[test]
fn a_terminal_shows_what_is_waited_for_and_a_pipe_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let silent = listen(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let config = plain(directory.path(), silent);
    for (command, shown) in [
        ("graph", "reading nodes and peers (1 s)"),
        ("version", "waiting for the API server: list pods (1 s)"),
        ("trace n1 --src=10.42.1.2 --dst=10.42.4.2", "starting kgctl trace on n1 (1 s)"),
        ("peer-cluster --remote-name=b --name=a --remote-context=lab --remove", "list peers (1 s)"),
    ] {
        let line =
            format!("{} {command} --kubeconfig={config} --request-timeout=3s", env!("CARGO_BIN_EXE_kgctl"));
        let on_terminal = Command::new("script").args(["-qec", &line, "/dev/null"]).output().unwrap();
        let text = String::from_utf8_lossy(&on_terminal.stdout).into_owned();
        // The line is cleared before the error replaces it.
        let at = text.find(shown).unwrap_or_else(|| panic!("{command}: {shown:?} is not in {text:?}"));
        let after = &text[at..];
        assert!(
            after.contains("\r\u{1b}[2Kkgctl: ") && after.contains("no answer within 3s"),
            "{command}: {text:?}"
        );
        let arguments: Vec<_> = line.split(' ').skip(1).collect();
        let (done, _, said) = kgctl(&[], &arguments);
        assert!(!done && !said.contains("(1 s)") && !said.contains('\u{1b}'), "{command}: {said:?}");
    }
}

#[test]
fn without_any_file_the_places_are_named() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    let (done, _, said) = kgctl(&[("HOME", home)], &["graph"]);
    assert!(
        !done && said.contains(&format!("{home}/.kube/config")) && said.contains("--kubeconfig"),
        "{said}"
    );
    let (done, _, said) = kgctl(&[("HOME", home), ("KUBECONFIG", "/nowhere/a:/nowhere/b")], &["graph"]);
    assert!(!done && said.contains("/nowhere/a, /nowhere/b"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_of_the_kubeconfig_and_of_the_environment_are_used() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let (used, to) = (Arc::new(AtomicUsize::new(0)), server.port());
    let count = Arc::clone(&used);
    // Every CONNECT leads to the API server.
    let proxy = listen(move |mut stream| {
        let asked = request(&stream);
        assert!(asked.starts_with("CONNECT 192.0.2.1:6443 "), "{asked}");
        count.fetch_add(1, Ordering::SeqCst);
        let Ok(mut far) = TcpStream::connect(("127.0.0.1", to)) else { return };
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        let (mut from, mut back) = (stream.try_clone().unwrap(), far.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut back, &mut stream));
        let _ = std::io::copy(&mut from, &mut far);
    });
    let write = |own: &str| {
        let path = server.file(&format!("proxied{}.kubeconfig", own.len()));
        let text = format!(
            "kind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             users: [{{name: u, user: {{token: {ADMIN}-token}}}}]\n\
             clusters: [{{name: k, cluster: {{server: 'https://192.0.2.1:6443', certificate-authority: ca.crt, \
             tls-server-name: 127.0.0.1{own}}}}}]\n"
        );
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let url = format!("http://who:secret@127.0.0.1:{proxy}");
    let own = write(&format!(", proxy-url: '{url}'"));
    let none = write("");
    for (environment, config) in [
        (&[][..], &own),
        (&[("HTTPS_PROXY", url.as_str())], &none),
        // `NO_PROXY` applies to the server's address, not the proxy's.
        (&[("https_proxy", url.as_str()), ("NO_PROXY", "127.0.0.1")], &none),
    ] {
        let before = used.load(Ordering::SeqCst);
        let (done, shown, said) = kgctl(environment, &["graph", "--kubeconfig", config]);
        assert!(done && shown.contains("digraph"), "{environment:?}: {said}");
        assert!(used.load(Ordering::SeqCst) > before, "{environment:?}");
    }
    // Without the proxy: nobody responds at 192.0.2.1 anywhere.
    let before = used.load(Ordering::SeqCst);
    let exempt = [("HTTPS_PROXY", url.as_str()), ("NO_PROXY", "192.0.2.0/24")];
    let (done, _, said) = kgctl(&exempt, &["graph", "--kubeconfig", &none, "--request-timeout=1s"]);
    assert!(!done && !said.contains("through the proxy"), "{said}");
    assert_eq!(used.load(Ordering::SeqCst), before);
    // An unreachable proxy is named, without its password.
    let gone = format!("http://who:secret@127.0.0.1:{}", api::free_port());
    let (done, _, said) = kgctl(&[("HTTPS_PROXY", &gone)], &["graph", "--kubeconfig", &none]);
    assert!(
        !done && said.contains("through the proxy http://127.0.0.1:") && !said.contains("secret"),
        "{said}"
    );
}
