//! Objects that files made become a Helm release's and a file's again, by the commands of docs/upgrade.md.

use super::*;

/// Helm and kubectl as `cargo xtask kube-tools` gets them, with a configuration for one API server.
struct Tools {
    directory: std::path::PathBuf,
    kubeconfig: std::path::PathBuf,
    work: tempfile::TempDir,
}

impl Tools {
    fn find(server: &ApiServer) -> Option<Self> {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        let directory = cache.or_else(home)?.join("kilo/kube-tools");
        if !["helm", "kubectl"].iter().all(|program| directory.join(program).is_file()) {
            println!("kilo-skip: there is no helm; `cargo xtask kube-tools` gets it");
            return None;
        }
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        Some(Self { directory, kubeconfig, work: tempfile::tempdir().unwrap() })
    }

    /// Runs a command as the page shows it, in the root of this repository.
    fn run(&self, command: &str) -> Result<String, String> {
        let mut words = command.split_whitespace();
        let output = Command::new(self.directory.join(words.next().unwrap()))
            .args(words)
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.work.path())
            .env("XDG_CACHE_HOME", self.work.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() { Ok(said) } else { Err(said) }
    }
}

/// Helm 4 by itself would apply on the server, where fields that kubectl wrote are in conflict.
const INSTALL: &str = "helm install kilo manifests/chart/kilo --namespace kube-system --set platform=kubeadm --server-side=false";
const APPLY: &str = "kubectl apply -f manifests/crds.yaml -f manifests/kilo-kubeadm.yaml";
const FORGET: &str = "kubectl --namespace kube-system delete secret --selector owner=helm,name=kilo";

/// The identity and the generation of the DaemonSet's specification, which a change of it raises.
async fn generation(daemon_sets: &Api<DaemonSet>) -> (Option<String>, Option<i64>) {
    let found = daemon_sets.get("kilo").await.unwrap().metadata;
    (found.uid, found.generation)
}

#[tokio::test]
async fn what_files_made_becomes_a_helm_release_and_is_given_back() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    let Some(tools) = Tools::find(&server) else { return };
    let run = |command: &str| tools.run(command).unwrap_or_else(|error| panic!("{command}: {error}"));
    // Debian's build of 1.20 names no minor version.
    let minor = admin.apiserver_version().await.unwrap().minor;
    if minor.trim_end_matches('+').parse::<u32>().unwrap_or_default() < 30 {
        println!("kilo-skip: Kubernetes before 1.30 does not know appArmorProfile");
        return;
    }
    run(APPLY);
    let daemon_sets: Api<DaemonSet> = Api::namespaced(admin.clone(), "kube-system");
    let applied = generation(&daemon_sets).await;
    let refused = tools.run(INSTALL).unwrap_err();
    assert!(refused.contains("invalid ownership metadata"), "{refused}");

    run(&format!("{INSTALL} --take-ownership"));
    assert_eq!(generation(&daemon_sets).await, applied, "no pod is replaced");
    run(FORGET);
    run(APPLY);
    assert_eq!(generation(&daemon_sets).await, applied, "no pod is replaced on the way back");
    assert!(!run("helm list --namespace kube-system").contains("deployed"));

    // As with a Helm that knows no such flag.
    run("kubectl label --overwrite -f manifests/kilo-kubeadm.yaml app.kubernetes.io/managed-by=Helm");
    run("kubectl annotate --overwrite -f manifests/kilo-kubeadm.yaml meta.helm.sh/release-name=kilo \
         meta.helm.sh/release-namespace=kube-system");
    run(INSTALL);
    assert_eq!(generation(&daemon_sets).await, applied, "no pod is replaced");

    let arguments = async || {
        let object = serde_json::to_value(daemon_sets.get("kilo").await.unwrap()).unwrap();
        strings(&object["spec"]["template"]["spec"]["containers"][0]["args"])
    };
    let before = arguments().await;
    run(
        "helm upgrade kilo manifests/chart/kilo --namespace kube-system --reset-then-reuse-values --set granularity=full",
    );
    assert!(arguments().await.contains(&"--mesh-granularity=full".to_owned()));
    run("helm rollback kilo --namespace kube-system");
    assert_eq!(arguments().await, before);
    run(FORGET);
    run(APPLY);
    assert_eq!(generation(&daemon_sets).await.0, applied.0, "the DaemonSet is still the same one");
}
