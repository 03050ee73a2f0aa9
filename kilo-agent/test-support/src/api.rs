//! A real API server on loopback: etcd and kube-apiserver of `$KUBEBUILDER_ASSETS`
//! (`cargo xtask kube-assets`), stopped with the test.

use crate::wait::task as wait;

use std::{
    fmt,
    fs::{self, File},
    io::Write as _,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    core::v1 as core,
};
use kilo_agent::backend::kubernetes;
use kilo_core::objects::Snapshot;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    discovery::ApiResource,
};
use parking_lot::Mutex;

/// A user with all rights.
pub const ADMIN: &str = "admin";
/// A user with the manifests' role, once a test has applied it.
pub const AGENT: &str = "agent";
/// A user without rights.
pub const NOBODY: &str = "nobody";

/// etcd and one API server.
pub struct ApiServer {
    directory: tempfile::TempDir,
    port: u16,
    etcd: u16,
    orders: Option<mpsc::Sender<(Order, mpsc::Sender<()>)>>,
    supervisor: Option<JoinHandle<()>>,
}

enum Order {
    Start,
    Stop,
}

/// The directory of the binaries; `None`, with a notice that the test is skipped, when there is none.
pub fn assets() -> Option<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    if assets.is_none() {
        println!("kilo-skip: KUBEBUILDER_ASSETS is not set");
    }
    assets
}

/// Range of ClusterIPs unless a test chooses another.
const SERVICES: &str = "10.96.0.0/16";

static SHARED: Mutex<Weak<ApiServer>> = Mutex::new(Weak::new());

impl ApiServer {
    /// The server that all tests running at the moment share; stopped with the last.
    pub async fn shared() -> Option<Arc<Self>> {
        let assets = assets()?;
        let server = {
            let mut shared = SHARED.lock();
            let server =
                shared.upgrade().unwrap_or_else(|| Arc::new(Self::launch(&assets, "127.0.0.1", SERVICES)));
            *shared = Arc::downgrade(&server);
            server
        };
        server.wait_until_ready().await;
        Some(server)
    }

    /// A server for this test alone.
    pub async fn start() -> Option<Self> {
        Self::start_with_services(SERVICES).await
    }

    /// Like [`Self::start`], with ClusterIPs in this prefix.
    pub async fn start_with_services(prefix: &str) -> Option<Self> {
        Self::start_on("127.0.0.1", prefix).await
    }

    /// Like [`Self::start`], listening on every address: for a test in its own network namespace.
    pub async fn start_everywhere() -> Option<Self> {
        Self::start_on("0.0.0.0", SERVICES).await
    }

    async fn start_on(address: &str, services: &str) -> Option<Self> {
        let server = Self::launch(&assets()?, address, services);
        server.wait_until_ready().await;
        Some(server)
    }

    fn launch(assets: &Path, address: &str, services: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("kilo-api-").tempdir().unwrap();
        let (port, etcd, peer) = (free_port(), free_port(), free_port());
        certificates(directory.path());
        let tokens = format!(
            "{ADMIN}-token,{ADMIN},1,\"system:masters\"\n{AGENT}-token,{AGENT},2\n{NOBODY}-token,{NOBODY},3\n"
        );
        fs::write(directory.path().join("tokens.csv"), tokens).unwrap();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let mut store = command(&assets.join("etcd"), directory.path());
        store
            .args(["--data-dir", "etcd", "--name", "default"])
            .args(["--listen-client-urls", &url(etcd), "--advertise-client-urls", &url(etcd)])
            .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
            .args(["--initial-cluster", &format!("default={}", url(peer))]);
        let mut server = command(&assets.join("kube-apiserver"), directory.path());
        server
            .args(["--etcd-servers", &url(etcd), "--advertise-address=192.0.2.1"])
            .args([format!("--bind-address={address}"), format!("--secure-port={port}")])
            .args(["--service-cluster-ip-range", services, "--allow-privileged=true"])
            .args(["--tls-cert-file=server.crt", "--tls-private-key-file=server.key"])
            .args(["--client-ca-file=ca.crt", "--token-auth-file=tokens.csv", "--authorization-mode=RBAC"])
            .args(["--service-account-issuer=https://kilo.test", "--service-account-key-file=server.key"])
            .args([
                "--service-account-signing-key-file=server.key",
                "--disable-admission-plugins=ServiceAccount",
            ]);
        let (orders, received) = mpsc::channel();
        let supervisor = std::thread::spawn(move || keep(store, server, &received));
        Self { directory, port, etcd, orders: Some(orders), supervisor: Some(supervisor) }
    }

    fn order(&self, order: Order) {
        let (done, wait) = mpsc::channel();
        self.orders.as_ref().unwrap().send((order, done)).unwrap();
        wait.recv().unwrap();
    }

    /// Stops the API server, but not etcd.
    pub fn stop_api(&self) {
        self.order(Order::Stop);
    }

    /// Starts the API server again.
    pub async fn start_api(&self) {
        self.order(Order::Start);
        self.wait_until_ready().await;
    }

    async fn wait_until_ready(&self) {
        let client = self.client(ADMIN).await;
        // It is ready shortly before it has created the namespace that tests write to.
        for path in ["/readyz", "/api/v1/namespaces/default"] {
            let logs =
                || ["kube-apiserver.log", "etcd.log"].map(|log| self.last_lines(log)).join("\netcd:\n");
            wait::until(&format!("the API server is ready ({path})"), Duration::from_mins(2), async || {
                let request = hyper::http::Request::get(path).body(Vec::new()).unwrap();
                let answered = client.request_text(request).await;
                answered.map_err(|error| fmt::from_fn(move |to| write!(to, "{error}\n{}", logs())))
            })
            .await;
        }
    }

    /// The end of a log: all of it would hide the error that follows.
    fn last_lines(&self, log: &str) -> String {
        let text = fs::read_to_string(self.file(log)).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Path of a file in its directory: `ca.crt`, `server.crt`, `server.key`, logs.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A kubeconfig for this user on this port, which may be a proxy's.
    pub fn kubeconfig(&self, user: &str, port: u16) -> PathBuf {
        let path = self.directory.path().join(format!("{user}-{port}.kubeconfig"));
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:{port}\n    \
             certificate-authority: ca.crt\n\
             users:\n- name: u\n  user:\n    token: {user}-token\n\
             contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\n"
        );
        // Written atomically, because another test may be reading it.
        let mut file = tempfile::NamedTempFile::new_in(self.directory.path()).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.persist(&path).unwrap();
        path
    }

    /// A client for this user.
    pub async fn client(&self, user: &str) -> Client {
        kubernetes::client(Some(&self.kubeconfig(user, self.port)), None).await.unwrap()
    }

    /// Compacts etcd, which discards all history.
    pub fn compact(&self) {
        let etcdctl = assets().unwrap().join("etcdctl");
        let run = |args: &[&str]| {
            let output = Command::new(&etcdctl)
                .env("ETCDCTL_API", "3")
                .args(["--endpoints", &format!("127.0.0.1:{}", self.etcd)])
                .args(args)
                .output()
                .unwrap();
            assert!(output.status.success(), "etcdctl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let status: serde_json::Value =
            serde_json::from_str(&run(&["endpoint", "status", "-w", "json"])).unwrap();
        let revision = &status[0]["Status"]["header"]["revision"];
        run(&["compact", &revision.to_string()]);
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(supervisor) = self.supervisor.take() {
            let _ = supervisor.join();
        }
    }
}

/// Runs both processes on a thread of their own, with which they end.
fn keep(mut store: Command, mut server: Command, orders: &mpsc::Receiver<(Order, mpsc::Sender<()>)>) {
    let mut store = store.spawn().unwrap();
    let mut running = Some(server.spawn().unwrap());
    while let Ok((order, done)) = orders.recv() {
        match order {
            Order::Stop => end(running.take()),
            Order::Start => running = Some(server.spawn().unwrap()),
        }
        let _ = done.send(());
    }
    end(running);
    let _ = store.kill();
    let _ = store.wait();
}

fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A command that logs to a file, and ends with the thread that spawned it.
fn command(program: &Path, directory: &Path) -> Command {
    let name = program.file_name().unwrap().to_str().unwrap();
    let log = File::create(directory.join(format!("{name}.log"))).unwrap();
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    command
}

/// Below the kernel's ephemeral ports: an API server's connection to its etcd would sometimes take the port
/// of a starting server.
const FIRST_PORT: u16 = 20_000;
const PORTS: u32 = 12_000;

/// A port that nobody listens on, and that this process has not been given before.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(64);
    loop {
        let port = start.wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let port = FIRST_PORT + u16::try_from(port).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Creates a CA, and a certificate for 127.0.0.1.
pub fn certificates(directory: &Path) {
    let config = "[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN=kilo-test\n\
                  [ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=keyCertSign\n\
                  [leaf]\nbasicConstraints=CA:FALSE\nsubjectAltName=IP:127.0.0.1\n";
    fs::write(directory.join("openssl.cnf"), config).unwrap();
    let openssl = |args: &[&str]| {
        let output = Command::new("openssl").current_dir(directory).args(args).output();
        let output = output.expect("openssl makes the test's certificates: apt-get install openssl");
        assert!(output.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for name in ["ca", "server"] {
        let key = format!("{name}.key");
        openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &key]);
    }
    let ca = ["req", "-x509", "-config", "openssl.cnf", "-extensions", "ca", "-days", "2"];
    openssl(&[&ca[..], &["-key", "ca.key", "-out", "ca.crt"]].concat());
    openssl(&["req", "-new", "-config", "openssl.cnf", "-key", "server.key", "-out", "server.csr"]);
    let sign = ["x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"];
    let leaf = ["-days", "2", "-extfile", "openssl.cnf", "-extensions", "leaf", "-out", "server.crt"];
    openssl(&[&sign[..], &leaf].concat());
}

/// Every document of a YAML file of manifests/.
pub fn manifest(name: &str) -> Vec<DynamicObject> {
    use serde::Deserialize as _;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests").join(name);
    let text = fs::read_to_string(&path).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| serde_json::Value::deserialize(document).unwrap())
        .filter(|value| !value.is_null())
        .map(|value| serde_json::from_value(value).unwrap_or_else(|error| panic!("{name}: {error}")))
        .collect()
}

/// `kubectl apply --server-side` for one object.
pub async fn apply(client: &Client, object: &DynamicObject, dry_run: bool) -> kube::Result<DynamicObject> {
    let types = object.types.clone().unwrap();
    let kind = GroupVersionKind::try_from(&types).unwrap();
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let parameters = PatchParams { dry_run, ..PatchParams::apply("kilo-test").force() };
    api.patch(object.metadata.name.as_deref().unwrap(), &parameters, &Patch::Apply(object)).await
}

/// Binds a role to [`NOBODY`]: a Role in its namespace, or a ClusterRole in one namespace or in all.
pub async fn bind_nobody(client: &Client, (kind, name): (&str, &str), namespace: Option<&str>) {
    let binding = if namespace.is_some() { "RoleBinding" } else { "ClusterRoleBinding" };
    let binding = serde_json::json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": binding,
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [{"kind": "User", "name": NOBODY}],
    });
    apply(client, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
}

/// Applies manifests/crds.yaml and waits until Peer objects are served.
pub async fn apply_crds(client: &Client) {
    for object in manifest("crds.yaml") {
        apply(client, &object, false).await.unwrap();
    }
    let peers: Api<kilo_core::objects::peer::Peer> = Api::all(client.clone());
    wait::until("peers are served", Duration::from_secs(20), async || {
        peers.list(&kube::api::ListParams::default()).await.map(drop)
    })
    .await;
}

/// Gives the user [`AGENT`] exactly the rights of the shipped ClusterRole and of the Role for Events;
/// returns the ClusterRole.
pub async fn grant_agent(admin: &Client) -> DynamicObject {
    let find = |kind: &str, name: &str| {
        let is_wanted = |object: &DynamicObject| {
            object.types.as_ref().is_some_and(|types| types.kind == kind)
                && object.metadata.name.as_deref() == Some(name)
        };
        manifest("kilo-kubeadm.yaml").into_iter().find(is_wanted).unwrap()
    };
    let (role, events) = (find("ClusterRole", "kilo"), find("Role", "kilo-events"));
    for role in [&role, &events] {
        apply(admin, role, false).await.unwrap();
        let kind = &role.types.as_ref().unwrap().kind;
        let binding = serde_json::json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": format!("{kind}Binding"),
            "metadata": { "name": "agent", "namespace": role.metadata.namespace },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role.metadata.name },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": AGENT }],
        });
        apply(admin, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
    }
    until_may(admin, AGENT, ("list", "", "nodes"), ("", ""), true).await;
    until_may(admin, AGENT, ("create", "", "events"), ("default", ""), true).await;
    role
}

/// Waits until the authorizer, which learns of bindings through a watch, gives this answer for a user.
/// `what` is a verb, an API group and a resource; `of` a namespace and an object's name, or empty.
pub async fn until_may(admin: &Client, user: &str, what: (&str, &str, &str), of: (&str, &str), may: bool) {
    let reviews: Api<SubjectAccessReview> = Api::all(admin.clone());
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.to_owned()),
            resource_attributes: Some(ResourceAttributes {
                verb: some(what.0),
                group: some(what.1),
                resource: some(what.2),
                namespace: some(of.0),
                name: some(of.1),
                ..Default::default()
            }),
            ..Default::default()
        },
        ..Default::default()
    };
    let verb = if may { "may" } else { "may not" };
    wait::until(&format!("{user} {verb} {what:?}"), Duration::from_secs(20), async || {
        reviews.create(&PostParams::default(), &review).await.unwrap().status.unwrap().allowed == may
    })
    .await;
}

/// The pod CIDR of the node with this name: of its number, as `10.42.1.0/24` of `n1`, or else of its letters.
pub fn pod_cidr(name: &str) -> String {
    let letters = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let number = name[letters.len()..].parse::<u16>();
    let number = number.unwrap_or_else(|_| 1_000 + name.bytes().map(u16::from).sum::<u16>());
    format!("10.{}.{}.0/24", 42 + number / 256, number % 256)
}

/// Creates a node with a pod CIDR of its own and these annotations.
pub async fn create_node(client: &Client, name: &str, annotations: &[(&str, &str)]) -> core::Node {
    let mut node = core::Node::default();
    node.metadata.name = Some(name.to_owned());
    let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    node.metadata.annotations = Some(pairs.collect());
    node.spec = Some(core::NodeSpec { pod_cidr: Some(pod_cidr(name)), ..Default::default() });
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.unwrap()
}

/// Waits until the snapshot satisfies a condition; returns how long that took.
pub async fn until(
    snapshots: &mut tokio::sync::watch::Receiver<Arc<Snapshot>>,
    limit: Duration,
    wanted: impl Fn(&Snapshot) -> bool,
) -> Duration {
    let started = Instant::now();
    let waited = tokio::time::timeout(limit, snapshots.wait_for(|snapshot| wanted(snapshot))).await;
    let reached = waited.is_ok_and(|found| found.is_ok());
    assert!(reached, "not reached within {limit:?}: {:#?}", snapshots.borrow());
    started.elapsed()
}
