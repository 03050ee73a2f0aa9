//! Real agents with the arguments and under the confinement of the `DaemonSet`s.

use super::*;

/// A DaemonSet's container as a command: its arguments, its capabilities, a read-only root, and the host
/// paths that the manifest mounts.
fn container(file: &str, daemon_set: &str, kubeconfig: &Path) -> Command {
    let object = find(file, ("DaemonSet", daemon_set));
    let container = &object.data["spec"]["template"]["spec"]["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["privileged"], Value::Null);
    assert_eq!(strings(&context["capabilities"]["drop"]), ["ALL"]);
    let capabilities: String = strings(&context["capabilities"]["add"])
        .iter()
        .map(|capability| format!(",+{}", capability.to_lowercase()))
        .collect();
    let arguments = strings(&container["args"]).into_iter().map(|argument| {
        argument
            .replace("$(NODE_NAME)", "n1")
            .replace("$(HOST_IP)", HOST_IP)
            .replace("/etc/kubernetes/kubeconfig", kubeconfig.to_str().unwrap())
    });
    let script = "mount --bind / / && mount -o remount,bind,ro / && \
         mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-ec", script])
        .args(["setpriv", "--no-new-privs", "--inh-caps=-all"])
        .arg(format!("--bounding-set=-all{capabilities}"))
        .arg(KG)
        .args(arguments);
    command
}

/// The private address of the node in the tests.
const HOST_IP: &str = "10.1.0.11";

/// Body of `http://HOST:1107/path`, once the status is 200.
async fn http(host: &str, path: &str) -> String {
    http_at(host, 1107, path).await
}

/// A node's namespace: private address, public address, default route.
fn make_host() {
    netns::sh(
        "mount -t tmpfs lib /var/lib; mkdir -p /var/lib/kilo /run/wireguard; \
         mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
         ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
         ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
         ip route add default via 10.1.0.1 dev eth0",
    );
}

/// Waits until the node leads its location.
async fn leads(nodes: &Api<Node>) {
    wait::until("the node leads its location", Duration::from_secs(20), async || {
        let annotations = nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        match annotations.get("kilo.squat.ai/wireguard-ip").is_some_and(|ip| ip == "10.4.0.1/16") {
            true => Ok(()),
            false => Err(format!("{annotations:?}")),
        }
    })
    .await;
}

/// Runs the agent of a manifest on one node until the node leads its location.
async fn runs_confined(file: &str) {
    make_host();
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    create_node(&admin, "n1", &[]).await;
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "laptop" },
        "spec": { "allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([9; 32]).to_string() },
    });
    apply(&admin, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
    let kubeconfig = account(&server, file, "kube-system", "kilo").await;

    let has_wireguard = manifest(file).iter().any(|object| name(object) == "kilo-wireguard");
    let start = || Running(container(file, "kilo-wireguard", &kubeconfig).spawn().unwrap());
    let mut wireguard = has_wireguard.then(start);
    let socket = Path::new("/run/wireguard/kilo0.sock");
    let starts = async || !has_wireguard || socket.exists();
    wait::until("WireGuard's container has made the device", Duration::from_secs(20), starts).await;
    let agent = Running(container(file, "kilo", &kubeconfig).spawn().unwrap());
    leads(&Api::all(admin)).await;
    let status = fs::read_to_string(format!("/proc/{}/status", agent.0.id())).unwrap();
    // NET_ADMIN is bit 12, PERFMON 38, BPF 39; DAC_OVERRIDE, used where the agent writes the CNI
    // configuration, is 1.
    let is_network = !["flannel", "cilium"].iter().any(|cni| file.contains(cni));
    let wanted = if is_network { "CapEff:\t000000c000001002" } else { "CapEff:\t000000c000001000" };
    assert!(status.contains(wanted), "{status}");
    assert!(http(HOST_IP, "/health").await.ends_with("ok\n"));
    let elsewhere = std::net::TcpStream::connect(("192.0.2.11", 1107));
    assert!(elsewhere.is_err(), "the agent listens on the node's address only");
    is_configured().await;
    if wireguard.take().is_some() {
        // The pod is replaced: the interface is a new one, and everything is set up again.
        wireguard = Some(start());
        is_configured().await;
    }
    let pins = dataplane::pin_directory(Path::new("/sys/fs/bpf"));
    assert!(pins.join("prefix_v4").exists());
    dashboard_shows_what_is_there(&http(HOST_IP, "/metrics").await);
    drop(wireguard);
}

/// Waits until the device has the peer, and the host a route to it.
async fn is_configured() {
    let key = PublicKey([9; 32]);
    let there = format!("wg show kilo0 peers | grep -qF {key} && ip route show 10.5.0.1 | grep -q kilo0");
    wait::until(&format!("`{there}`"), Duration::from_secs(40), async || netns::succeeds(&there)).await;
}

/// The agent has every metric that the dashboard queries.
fn dashboard_shows_what_is_there(scraped: &str) {
    // No peer completes a handshake here, failover is off, and there is one location: those metrics are set by hand.
    let metrics = Metrics::default();
    let peer = PeerStatus { handshake_age: Some(Duration::from_secs(1)), ..PeerStatus::default() };
    metrics.set_peers(BTreeMap::from([(PublicKey([1; 32]), peer)]), BTreeMap::new(), Timestamp::now());
    metrics.error("any");
    metrics.failover.role("leader");
    let all = scraped.to_owned() + &metrics.encode().unwrap() + "kilo_tunnels 0\n";
    let there: BTreeSet<_> = all.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/grafana-dashboard.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut asked = BTreeSet::new();
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        asked.extend(words.filter(|word| word.starts_with("kilo_")).map(ToOwned::to_owned));
    }
    assert!(asked.len() >= 10, "{asked:?}");
    for metric in &asked {
        assert!(
            there.contains(metric.as_str()),
            "the dashboard asks for {metric}, which is not among {there:?}"
        );
    }
}

#[test]
fn the_agent_runs_under_the_confinement_of_its_daemon_set() {
    netns::isolated("the_agent_runs_under_the_confinement_of_its_daemon_set", || async {
        runs_confined("kilo-k3s-userspace-heterogeneous.yaml").await;
    });
}

#[test]
fn without_kube_proxys_config_map_the_agent_asks_the_service_of_the_api_server() {
    let test = "without_kube_proxys_config_map_the_agent_asks_the_service_of_the_api_server";
    netns::isolated(test, || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let admin = server.client(ADMIN).await;
        apply_crds(&admin).await;
        create_node(&admin, "n1", &[]).await;
        let file = "kilo-kubeadm.yaml";
        let daemon = find(file, ("DaemonSet", "kilo"));
        let volumes = daemon.data["spec"]["template"]["spec"]["volumes"].as_array().unwrap().clone();
        let volume = volumes.iter().find(|volume| volume["name"] == "kubeconfig").unwrap();
        assert_eq!(volume["configMap"]["optional"], true, "the pod starts without it");

        // Files and variables that the kubelet gives every pod; kube-proxy would make the address work.
        mount_account(&server, &account(&server, file, "kube-system", "kilo").await);
        let mut command = container(file, "kilo", Path::new("/etc/kubernetes/kubeconfig"));
        // This machine's kernel may have no WireGuard.
        command.arg("--wireguard=auto");
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.env("KUBERNETES_SERVICE_PORT", server.port().to_string());
        let _agent = Running(command.spawn().unwrap());
        leads(&Api::all(admin)).await;
    });
}

#[test]
fn userspace_wireguard_and_the_agent_run_in_daemon_sets_of_their_own() {
    netns::isolated("userspace_wireguard_and_the_agent_run_in_daemon_sets_of_their_own", || async {
        runs_confined("kilo-k3s-userspace.yaml").await;
    });
}
